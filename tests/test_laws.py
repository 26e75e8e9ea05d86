"""Laws 1 to 8 of `docs/ledger.md` on small random simulations, and planted faults that the check must find.

Laws 1 to 6 are those that `--check` holds at every record. Beside them runs a second account, made slot by slot,
since the ledger's sums cannot contradict themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sim.core.request import FINISHED
from sim.core.settings import Settings
from sim.models.acceptance import Geometric
from sim.models.timing import NO_COST, StepCost, StepShape
from sim.observers.invariants import LawBroken
from sim.policies.axes import PREFIX_CACHE, RESERVATION, STALE_HOW, STALE_WHEN, UNDO, VICTIM, rules_with
from sim.policies.drafters import DRAFTERS
from sim.policies.presets import PRESETS, TRAITS
from sim.records import EVICTED, Batch, Interruption, Returned
from sim.replay import replay_case
from tests.by_hand import LOSSLESS, LOSSY, Simulated, abort_at, reset_at, small_settings, spec
from tests.naive_accounts import NaiveAccounts
from workloads.spec import RequestSpec, prompt_stream, shared_stream

US = 1_000


@dataclass(frozen=True)
class Case:
    """A small engine, what is asked of it, and what happens to it."""

    preset: str
    method: str
    settings: Settings
    acceptance: float
    schedule_us: int
    update_us: int
    specs: tuple[RequestSpec, ...]
    resets_ms: tuple[float, ...]
    aborts_ms: tuple[tuple[int, float], ...]

    @property
    def k(self) -> int:
        return self.settings.num_speculative_tokens

    def simulated(self, **arguments: Any) -> Simulated:
        events = [reset_at(time) for time in self.resets_ms] + [abort_at(who, time) for who, time in self.aborts_ms]
        given: dict[str, Any] = {
            "acceptance": Geometric(3, self.acceptance) if self.k else None,
            "timer": ByTokens(),
            "schedule_ms": self.schedule_us / 1000,
            "update_ms": self.update_us / 1000,
            "events": events,
            "lossy": self.preset in LOSSY,
        }
        return Simulated(self.specs, self.settings, **{"rules": PRESETS[self.preset], **given, **arguments})


class ByTokens:
    """5 us a step and 1 us a token."""

    def step_cost(self, step: StepShape) -> StepCost:
        return NO_COST._replace(overhead=(5 + step.num_tokens) * US)


@st.composite
def requests(draw: st.DrawFn, longest: int) -> tuple[RequestSpec, ...]:
    """Up to 7, some behind one of two shared prefixes, over about the time that they take."""
    specs = []
    time = 0
    for index in range(draw(st.integers(1, 7))):
        time += draw(st.sampled_from([0, 0, 7, 40, 150])) * US
        tokens = draw(st.integers(1, longest))
        shared = min(draw(st.sampled_from([0, 0, 5, 16, 30])), tokens)
        segments = (shared_stream(draw(st.integers(0, 1))), 0, shared), (prompt_stream(index), 0, tokens - shared)
        prompt = tuple(segment for segment in segments if segment[2])
        specs.append(spec(index, prompt, draw(st.integers(1, 24)), time, draw(st.integers(0, 2))))
    return tuple(specs)


def room(preset: str, method: str, k: int, size: int, longest: int, specs: tuple[RequestSpec, ...]) -> int:
    """Blocks in which any one of the requests can come to its end, the null block included."""
    ahead = 2 * (k + 1) + (k if DRAFTERS[method].has_lookahead else 0)
    return max(-(-min(each.num_prompt_tokens + each.max_tokens + ahead, longest) // size) for each in specs) + 1


@st.composite
def cases(draw: st.DrawFn, presets: tuple[str, ...] = tuple(PRESETS), events: bool = True) -> Case:
    preset = draw(st.sampled_from(presets))
    k = draw(st.sampled_from([0, 1, 2, 3, 5, 7]))
    method = draw(st.sampled_from(["ngram", "ngram_gpu", "eagle3", "draft_model"])) if k else "none"
    is_async = draw(st.booleans()) and DRAFTERS[method].runs_async and TRAITS[preset].runs_async
    size = draw(st.sampled_from([1, 2, 4, 16]))
    longest = draw(st.sampled_from([45, 2000]))
    specs = draw(requests(min(longest - 2, 44)))
    blocks = room(preset, method, k, size, longest, specs) + draw(st.sampled_from([0, 1, 3, 200]))
    chosen = small_settings(
        method,
        k,
        preset,
        num_gpu_blocks=blocks,
        block_size=size,
        max_num_seqs=draw(st.sampled_from([2, 8])),
        max_num_batched_tokens=draw(st.sampled_from([24, 48, 500])),
        max_model_len=longest,
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.1])),
        priority=draw(st.sampled_from([False, False, True])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 16])),
        async_scheduling=is_async,
        num_speculative_tokens_per_batch_size=draw(st.sampled_from([(), (), ((1, 2, k), (4, 5, 1))])) if k else (),
    )
    times = st.integers(0, 60).map(lambda step: step / 50)
    return Case(
        preset,
        method,
        chosen,
        draw(st.sampled_from([0.0, 0.5, 0.8, 1.0])),
        draw(st.sampled_from([0, 3, 40])),
        draw(st.sampled_from([0, 2, 30])),
        specs,
        tuple(sorted(draw(st.lists(times, max_size=3)))) if events else (),
        tuple(draw(st.lists(st.tuples(st.integers(0, len(specs) - 1), times), max_size=2))) if events else (),
    )


def limited(simulated: Simulated, num_steps: int = 5000) -> Callable[[int], bool]:
    """Ends a run that does not end."""
    return lambda now: simulated.engine.num_steps < num_steps


SOME = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@given(cases(LOSSLESS))
@settings(SOME, max_examples=150)
def test_laws_1_to_6_hold_at_every_record(case: Case) -> None:
    simulated = case.simulated()
    naive = NaiveAccounts(simulated.scheduler, simulated.ledger)
    simulated.engine.add_observer(naive)
    simulated.run(limited(simulated))
    assert simulated.engine.stopped_by is None
    assert simulated.invariants.num_losses == 0
    assert naive.num_records == simulated.invariants.num_records - 1  # `closed` beside them
    assert not simulated.scheduler.requests
    assert simulated.scheduler.pool.num_free == case.settings.num_gpu_blocks - 1


@given(
    cases(LOSSLESS),
    st.fixed_dictionaries(
        {
            "undo": st.sampled_from(sorted(UNDO)),
            "reservation": st.sampled_from(sorted(RESERVATION)),
            "prefix_cache": st.sampled_from(sorted(PREFIX_CACHE)),
            "victim": st.sampled_from(sorted(VICTIM)),
            "stale_when": st.sampled_from(STALE_WHEN),
            "stale_how": st.sampled_from(sorted(set(STALE_HOW) - {"count_frames"})),
        }
    ),
)
@settings(SOME, max_examples=100)
def test_laws_1_to_6_hold_for_any_mix_of_policies(case: Case, axes: dict[str, str]) -> None:
    """And a reservation of the worst case never preempts for lack of blocks, unless an undo gives it back (the scenario
    refuses that)."""
    simulated = case.simulated(rules=rules_with(PRESETS[case.preset], **axes))
    simulated.engine.add_observer(NaiveAccounts(simulated.scheduler, simulated.ledger))
    simulated.run(limited(simulated))
    assert simulated.engine.stopped_by is None
    assert not simulated.scheduler.requests
    if axes["reservation"] == "worst_case" and not case.resets_ms and axes["undo"] not in ("rewind", "free_rejected"):
        assert simulated.scheduler.num_preemptions == 0


@given(cases(LOSSY))
@SOME
def test_laws_1_to_6_hold_but_for_the_losses_of_a_preset_that_has_them(case: Case) -> None:
    """A loss is counted. It may end the engine, stall a request (ph so high that it counts as sure to finish), or
    have it preempted for ever (C so high that its slots exceed the pool); then the test ends the run."""
    simulated = case.simulated()
    simulated.run(limited(simulated, 1000))
    assert simulated.engine.stopped_by in (None, "stalled", "crash", "interrupt")
    if not case.resets_ms and case.preset != "article":
        assert simulated.engine.stopped_by is None
        assert simulated.invariants.num_losses == 0 or simulated.scheduler.num_preemptions


def test_the_random_cases_reach_every_class() -> None:
    """Not a law: that the property above is about something."""
    seen: set[int] = set()
    for is_async in (False, True):
        chosen = small_settings(
            "eagle3", 5, num_gpu_blocks=20, block_size=4, async_scheduling=is_async, max_num_batched_tokens=24
        )
        specs = [spec(index, ((shared_stream(0), 0, 9), (prompt_stream(index), 0, 4)), 20) for index in range(4)]
        simulated = Simulated(
            specs, chosen, acceptance=Geometric(3, 0.5), schedule_ms=1, update_ms=1, events=[reset_at(150)]
        )
        naive = NaiveAccounts(simulated.scheduler, simulated.ledger)
        simulated.engine.add_observer(naive)
        simulated.run()
        assert simulated.scheduler.num_preemptions > 4
        seen |= naive.seen
    assert seen == set(range(8))


# Law 7: known limits


class Watch:
    """What the content account and the frames showed."""

    def __init__(self, simulated: Simulated) -> None:
        self.ledger = simulated.ledger
        self.most_content_garbage = 0
        self.returned: list[tuple[int, int, int]] = []
        """(drafts, sampled, rejected) of frames that sampled."""
        simulated.engine.add_observer(self)

    def _look(self, now: int, *facts: Any) -> None:
        self.most_content_garbage = max(self.most_content_garbage, self.ledger.content_garbage)

    scheduled = step_ended = interrupted = _look

    def updated(self, now: int, returned: Returned) -> None:
        self._look(now)
        columns = zip(returned.batch.drafts, returned.sampled, returned.rejected, strict=True)
        self.returned += [row for row in columns if row[1]]


@given(cases(LOSSLESS))
@SOME
def test_law_7_acceptance_1_leaves_no_garbage(case: Case) -> None:
    assume(case.k)
    simulated = case.simulated(acceptance=Geometric(3, 1.0))
    watch = Watch(simulated)
    simulated.run(limited(simulated))
    assert watch.most_content_garbage == 0
    assert all(sampled == 1 + drafts for drafts, sampled, _ in watch.returned)
    seconds = simulated.ledger.slot_seconds()
    assert seconds["placeholder_rejected"] == 0
    assert seconds["garbage"] == 0


@given(cases(LOSSLESS))
@SOME
def test_law_7_acceptance_0_gives_one_token_a_step(case: Case) -> None:
    assume(case.k)
    simulated = case.simulated(acceptance=Geometric(3, 0.0))
    watch = Watch(simulated)
    simulated.run(limited(simulated))
    assert all((sampled, rejected) == (1, drafts) for drafts, sampled, rejected in watch.returned)
    assert simulated.ledger.slot_seconds()["placeholder_accepted"] == 0


@given(cases(LOSSLESS, events=False))
@SOME
def test_law_7_an_ample_pool_never_preempts(case: Case) -> None:
    """Room for all at once, each with its most slots beyond what is confirmed."""
    size = case.settings.block_size
    ahead = 2 * (case.k + 1) + case.k
    blocks = 1 + sum(-(-(each.num_prompt_tokens + each.max_tokens + ahead) // size) for each in case.specs)
    simulated = replace(case, settings=replace(case.settings, num_gpu_blocks=blocks)).simulated()
    simulated.run(limited(simulated))
    assert simulated.engine.stopped_by is None
    assert simulated.scheduler.num_preemptions == 0


@given(cases(LOSSLESS))
@SOME
def test_law_7_k_0_is_no_speculation(case: Case) -> None:
    """A table that says 0 for every batch, with a drafter that asks for no slots: the same records as without one."""
    assume(case.preset not in ("sglang-0.5.23", "trtllm"))  # they reserve for the configured K
    plain = replace(
        case.settings,
        num_speculative_tokens=0,
        num_speculative_tokens_per_batch_size=(),
        num_lookahead_tokens=0,
        draft_slots=0,
        drop_last_hit_block=False,
        hit_margin_tokens=0,
    )
    table = replace(plain, num_speculative_tokens=4, num_speculative_tokens_per_batch_size=((1, 8, 0),))
    without = replace(case, settings=plain).simulated(acceptance=None)
    never = replace(case, settings=table).simulated(acceptance=Geometric(3, 0.5))
    without.run(limited(without))
    never.run(limited(never))
    assert never.log.lines == without.log.lines
    assert never.ledger.slot_seconds() == without.ledger.slot_seconds()


def test_law_7_k_0_in_a_scripted_case() -> None:
    engine = {
        "async_scheduling": True,
        "block_size": 4,
        "num_gpu_blocks": 9,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 100,
        "enable_prefix_caching": True,
    }
    asked = [
        {
            "id": f"r{number}",
            "prompt": [["s", 8], [f"p{number}", 3]],
            "accepted": [1],
            "max_tokens": 9,
            "arrival_turn": 0,
        }
        for number in range(3)
    ]
    traces = [
        replay_case({"engine": {**engine, **drafter}, "requests": asked}, PRESETS["vllm-0.32"])
        for drafter in (
            {"method": "none", "num_speculative_tokens": 0},
            {"method": "eagle3", "num_speculative_tokens": 0},
            {"method": "draft_model", "num_speculative_tokens": 0},
        )
    ]
    assert traces[0] == traces[1] == traces[2]
    assert sum(traces[0]["summary"]["num_preemptions"].values()) > 0


# Law 8: when, never how many


@given(cases(LOSSLESS), st.data())
@SOME
def test_law_8_outputs_do_not_depend_on_the_engine(case: Case, data: st.DataObject) -> None:
    """The same requests on two engines that differ in everything: each request that nobody aborts gets its
    max_tokens, or what the model's length leaves it; an aborted one gets no more."""
    other = data.draw(cases(LOSSLESS))
    for engine in (case, other):
        chosen = engine.settings
        longest = chosen.max_model_len
        specs = tuple(each for each in case.specs if each.num_prompt_tokens < longest)
        assume(specs)
        blocks = room(engine.preset, engine.method, engine.k, chosen.block_size, longest, specs)
        large = replace(chosen, num_gpu_blocks=max(blocks, chosen.num_gpu_blocks))
        run = replace(engine, settings=large, specs=specs, aborts_ms=case.aborts_ms)
        simulated = run.simulated()
        outputs = Outputs()
        simulated.engine.add_observer(outputs)
        simulated.run(limited(simulated))
        assert simulated.engine.stopped_by is None
        wanted = {each.index: min(each.max_tokens, longest - each.num_prompt_tokens) for each in specs}
        for index, most in wanted.items():
            if index in outputs.aborted:
                assert outputs.delivered.get(index, 0) < most
            else:
                assert outputs.delivered[index] == most
                assert outputs.status[index] == FINISHED


class Outputs:
    """Delivered tokens by request."""

    def __init__(self) -> None:
        self.delivered: dict[int, int] = {}
        self.status: dict[int, int] = {}
        self.aborted: set[int] = set()

    def updated(self, now: int, returned: Returned) -> None:
        for request, delivered in zip(returned.batch.requests, returned.delivered, strict=True):
            self.delivered[request.index] = self.delivered.get(request.index, 0) + delivered
            self.status[request.index] = request.status

    def interrupted(self, now: int, interruption: Interruption) -> None:
        if interruption.kind == "abort":
            self.aborted.update(request.index for request in interruption.requests)


@pytest.mark.parametrize("preset", ["vllm-0.24", "vllm-0.26"])
def test_law_8_a_known_loss_is_counted(preset: str) -> None:
    """A reset with speculative frames in flight leaves placeholders that nothing takes back: see the scheduler's
    tests."""
    chosen = small_settings("ngram_gpu", 3, preset, async_scheduling=True)
    simulated = Simulated(
        [spec(0, 8, 40)],
        chosen,
        PRESETS[preset],
        acceptance=Geometric(3, 0.5),
        events=[reset_at(15)],
        lossy=True,
    ).run()
    assert simulated.invariants.num_losses > 0


# Planted faults: each law must be able to fail


class Fault:
    """Breaks something once, at the first record of a kind where it can, before the laws are looked at."""

    def __init__(self, at: str, plant: Callable[[Simulated, Any], bool]) -> None:
        self.planted = False
        self.plant = plant
        self.simulated: Simulated
        setattr(self, at, self._strike)

    def _strike(self, now: int, fact: Any) -> None:
        if not self.planted and now > 0:
            self.planted = self.plant(self.simulated, fact)


def holder(simulated: Simulated) -> Any:
    """A running request of which something is certain."""
    return next((each for each in simulated.scheduler.running if each.num_output_tokens > 1), None)


def negative_slack(simulated: Simulated, batch: Batch) -> bool:
    simulated.ledger.garbage += 10_000
    return True


def cached_that_is_not(simulated: Simulated, batch: Batch) -> bool:
    simulated.ledger.cached_blocks -= 1000
    return True


def more_valid_than_held(simulated: Simulated, batch: Batch) -> bool:
    simulated.ledger.content_garbage += 10_000
    return True


def counted_free(simulated: Simulated, batch: Batch) -> bool:
    simulated.scheduler.pool.num_free += 1
    return True


def held_and_in_the_queue(simulated: Simulated, batch: Batch) -> bool:
    request = holder(simulated)
    if request is None:
        return False
    simulated.scheduler.pool.append([request.block_table[-1]])
    simulated.scheduler.pool.num_free += 1
    return True


def a_reference_lost(simulated: Simulated, batch: Batch) -> bool:
    request = holder(simulated)
    if request is None:
        return False
    simulated.scheduler.pool.refs[request.block_table[0]] -= 1
    return True


def in_two_tables(simulated: Simulated, batch: Batch) -> bool:
    running = simulated.scheduler.running
    if len(running) < 2:
        return False
    running[1].block_table[-1] = running[0].block_table[-1]
    return True


def shared_without_a_hash(simulated: Simulated, batch: Batch) -> bool:
    """On both sides, so that they agree with each other."""
    pool = simulated.scheduler.pool
    block = next((block for block in range(1, pool.num_blocks) if pool.refs[block] > 1), None)
    if block is None:
        return False
    pool.cache.evict([block])
    blocks = simulated.invariants.blocks
    blocks.follow([(EVICTED, -1, [block])])
    return True


def a_placeholder_too_many(simulated: Simulated, batch: Batch) -> bool:
    request = holder(simulated)
    if request is None:
        return False
    request.num_output_placeholders += 1
    return True


def a_rollback_forgotten(simulated: Simulated, returned: Returned) -> bool:
    frame = next((n for n, rejected in enumerate(returned.rejected) if rejected), None)
    if frame is None or returned.batch.requests[frame].status == FINISHED:
        return False
    returned.batch.requests[frame].num_computed_tokens += returned.rejected[frame]
    return True


def certain_beyond_the_confirmed(simulated: Simulated, returned: Returned) -> bool:
    """On both sides: C of request and ledger runs ahead of the tokens."""
    request = holder(simulated)
    if request is None:
        return False
    request.num_tokens -= 5
    return True


def garbage_in_the_prefix_cache(simulated: Simulated, batch: Batch) -> bool:
    request = holder(simulated)
    if request is None:
        return False
    request.num_cached_blocks = len(request.block_table) + 1
    return True


def garbage_called_valid(simulated: Simulated, batch: Batch) -> bool:
    request = holder(simulated)
    if request is None:
        return False
    simulated.ledger.accounts[request.index].content_valid += 50
    return True


def one_more_rejected(simulated: Simulated, returned: Returned) -> bool:
    returned.batch.frames[0].num_rejected += 1
    return returned.batch.drafts[0] > 0


def a_token_lost(simulated: Simulated, returned: Returned) -> bool:
    returned.batch.frames[0].num_delivered -= 1
    return True


def more_accepted_than_drafted(simulated: Simulated, batch: Batch) -> bool:
    if not batch.samples[0]:
        return False
    batch.frames[0].num_sampled = batch.drafts[0] + 2
    return True


def writes_beyond_its_blocks(simulated: Simulated, batch: Batch) -> bool:
    del batch.requests[0].block_table[1:]
    return batch.requests[0].num_computed_tokens > simulated.settings.block_size


@pytest.mark.parametrize(
    ("law", "at", "plant"),
    [
        (1, "scheduled", negative_slack),
        (1, "updated", cached_that_is_not),
        (1, "step_ended", more_valid_than_held),
        (2, "scheduled", counted_free),
        (2, "scheduled", held_and_in_the_queue),
        (2, "updated", a_reference_lost),
        (2, "updated", in_two_tables),
        (2, "scheduled", shared_without_a_hash),
        (3, "scheduled", a_placeholder_too_many),
        (3, "updated", a_rollback_forgotten),
        (3, "updated", certain_beyond_the_confirmed),
        (4, "scheduled", garbage_in_the_prefix_cache),
        (4, "step_ended", garbage_called_valid),
        (5, "updated", one_more_rejected),
        (5, "updated", a_token_lost),
        (5, "step_ended", more_accepted_than_drafted),
        (6, "scheduled", writes_beyond_its_blocks),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_planted_fault_is_found(law: int, at: str, plant: Callable[[Simulated, Any], bool], is_async: bool) -> None:
    """The same run is clean without the fault, and with it the law's number is named at that very record."""
    chosen = small_settings("eagle3", 3, num_gpu_blocks=200, async_scheduling=is_async)
    specs = [spec(index, ((shared_stream(0), 0, 9), (prompt_stream(index), 0, 4)), 30) for index in range(3)]
    arguments: dict[str, Any] = {"acceptance": Geometric(3, 0.5), "schedule_ms": 1, "update_ms": 1}
    Simulated(specs, chosen, **arguments).run()

    fault = Fault(at, plant)
    simulated = Simulated(specs, chosen, between=fault, **arguments)
    fault.simulated = simulated
    with pytest.raises(LawBroken, match=rf"law {law} at \d+ ns: "):
        simulated.run()
    assert fault.planted
    assert simulated.log.lines[-1][1] != "closed"


def test_the_second_account_finds_what_law_1_cannot() -> None:
    """One slot called garbage instead of slack still adds up; the slot-by-slot account sees it."""
    chosen = small_settings("eagle3", 3)
    simulated = Simulated([spec(0, 9, 10)], chosen, acceptance=Geometric(3, 0.5), check=False)

    class OneOff:
        def scheduled(self, now: int, batch: Batch) -> None:
            simulated.ledger.garbage += 1

    simulated.engine.add_observer(OneOff())
    simulated.engine.add_observer(NaiveAccounts(simulated.scheduler, simulated.ledger))
    with pytest.raises(AssertionError, match="reservations at 0 ns"):
        simulated.run()
