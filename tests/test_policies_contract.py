"""What every value of every axis and every preset keeps to, and what each says it does, seen in runs.

Scenarios are built as a user's are, so that the wiring is tested with the policies. Expected values are hand
calculations or follow from what an axis is said to mean in `docs/policies.md`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any, get_args

import pytest

from sim.build import Simulation, build
from sim.core.request import Request
from sim.policies.axes import AXES, DRAFTER_KV
from sim.policies.presets import PRESETS, TRAITS
from sim.records import FATES, Batch, Returned
from sim.scenario import ScenarioError, load_scenario
from sim.scenario_schema import Policies
from tests.by_hand import LOSSY
from tests.naive_accounts import NaiveAccounts

SUBJECTS = [f"{axis}={value}" for axis, values in AXES.items() for value in values] + list(PRESETS)

ENGINE = (
    "engine.block_size=4",
    "engine.max_model_len=2000",
    "engine.max_num_seqs=4",
    "engine.max_num_batched_tokens=64",
    "timing.schedule_ms=0.5",
    "timing.update_ms=0.5",
    "limits.max_steps=3000",
)
REQUESTS = (
    "prompt_tokens: {distribution: uniform, min: 3, max: 20}, output_tokens: {distribution: uniform, min: 8, max: 20}"
)
SCENES = {
    # The largest request may come to 20 + 20 tokens, and two frames of drafts and lookahead: 51 slots, 13 blocks.
    "starved": (
        "engine.num_gpu_blocks=16",
        f"workload={{synthetic: {{num_requests: 6, arrivals: {{process: all_at_once}}, {REQUESTS}}}}}",
    ),
    "reset": (
        "engine.num_gpu_blocks=120",
        f"workload={{synthetic: {{num_requests: 6, arrivals: {{process: poisson, rate: 60}}, {REQUESTS}, "
        "shared_prefix: {count: 1, tokens: 17, fraction: 0.7}}}",
        "events=[{type: reset_prefix_cache, reset_running_requests: true, at_s: 0.0955}]",
    ),
}
EAGLE = "engine.speculative_config={method: eagle3, num_speculative_tokens: 3}"
COVERS_THE_DRAFTER = ("two_frames", "max_draft")
"""Reservations that add no lookahead: what the drafter writes is to lie within them."""
TWO_MODELS = "engine.speculative_config={method: draft_model, model: llama-3.2-1b, num_speculative_tokens: 3}"


def subject_overrides(subject: str) -> list[str]:
    """The settings under which a preset or an axis's value means something."""
    if subject in PRESETS:
        return [f"engine.preset={subject}", EAGLE, "timing.fixed_step_ms=10"]
    policies = subject.replace("=", ": ")
    if subject == "undo=compact":
        policies += ", tree_widths: [2, 1]"
    return [
        f"engine.policies={{{policies}}}",
        TWO_MODELS if "own_pool" in subject else EAGLE,
        *([] if subject == "draft_length=best_by_cost" else ["timing.fixed_step_ms=10"]),
    ]


def simulation(overrides: Sequence[str], acceptance: float = 0.6, check: bool = True) -> Simulation:
    given = [f"acceptance={{model: geometric, rate: {acceptance}}}", *ENGINE, *overrides]
    return build(load_scenario("minimal", given), check=check)


class Contract:
    """What all of them keep to, at every record; and who got what."""

    def __init__(self, of: Simulation, reservation: str | None = None) -> None:
        self.settings = of.settings
        self.lookahead = 0 if reservation in COVERS_THE_DRAFTER else of.settings.num_lookahead_tokens
        self.delivered: Counter[int] = Counter()
        self.fates: Counter[str] = Counter()
        self.num_frames = 0
        self.running: list[Request] = []
        of.add_observer(self)

    def scheduled(self, now: int, batch: Batch) -> None:
        """A frame is given its own slots at least, and holds what it is given."""
        longest, size = self.settings.max_model_len, self.settings.block_size
        for number, request in enumerate(batch.requests):
            self.num_frames += 1
            end = batch.computed[number] + batch.tokens[number]
            given = batch.reserved[number] if batch.reserved else min(end + batch.lookahead, longest)
            assert given >= end, f"request {request.id}: given {given} slots, its frame ends at {end}"
            assert given <= len(request.block_table) * size
            if number >= batch.num_running_frames:
                self.running.append(request)
        self.running = [request for request in self.running if request not in batch.preempted]

    def updated(self, now: int, returned: Returned) -> None:
        """Whoever has a frame in flight holds all that it may write: its end, rollbacks counted, and its lookahead."""
        for request, delivered, fate in zip(returned.batch.requests, returned.delivered, returned.fates, strict=True):
            self.delivered[request.index] += delivered
            self.fates[FATES[fate]] += 1
        self.running = [request for request in self.running if request not in returned.finished]
        for request in self.running:
            if request.num_in_flight_tokens > 0 and request.num_output_placeholders >= 0:
                written = request.num_computed_tokens + self.lookahead
                assert len(request.block_table) * self.settings.block_size >= written

    def interrupted(self, now: int, interruption: Any) -> None:
        self.running = [request for request in self.running if request not in interruption.requests]


@cache
def outputs_without_speculation(scene: str, mode: str) -> dict[int, int]:
    plain = simulation([*SCENES[scene], "engine.speculative_config=null", "timing.fixed_step_ms=10", mode])
    contract = Contract(plain)
    plain.run()
    assert plain.stopped_by is None
    return dict(contract.delivered)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_the_contract(subject: str, scene: str, mode: str) -> None:
    """Laws 1 to 6 in two accounts, slots for every frame, and as many tokens to each request as without speculation;
    or, with a known loss, a count of it."""
    if mode == "async" and subject in TRAITS and not TRAITS[subject].runs_async:
        pytest.skip(f"{subject} does not overlap")
    flag = f"engine.async_scheduling={'true' if mode == 'async' else 'false'}"
    run = simulation([*SCENES[scene], *subject_overrides(subject), flag])
    assert run.invariants is not None
    assert run.invariants.lossy == (subject in LOSSY or subject == "stale_how=count_frames")
    if not run.invariants.lossy:
        run.add_observer(NaiveAccounts(run.scheduler, run.ledger))
    contract = Contract(run, subject.partition("=")[2])
    run.run()
    expected = outputs_without_speculation(scene, flag)
    assert len(expected) == 6
    assert contract.num_frames > 30
    if run.invariants.lossy and dict(contract.delivered) != expected:
        assert mode == "async"
        assert run.invariants.num_losses > 0
        return
    assert run.stopped_by is None
    assert dict(contract.delivered) == expected
    if not run.invariants.lossy:
        assert run.invariants.num_losses == 0
    if scene == "starved" and subject != "reservation=worst_case":
        assert run.scheduler.num_preemptions > 0


def test_the_scenario_knows_the_values_of_each_axis() -> None:
    """So that the suite above misses none."""
    for axis, values in AXES.items():
        named = get_args(get_args(Policies.model_fields[axis].annotation)[0])
        assert set(named) == set(values), axis


# What each says it does

ALONE = (
    "workload={synthetic: {num_requests: 4, arrivals: {process: all_at_once}, prompt_tokens: {distribution: uniform, "
    "min: 3, max: 20}, output_tokens: 40}}",
    "engine.num_gpu_blocks=300",
    "timing.fixed_step_ms=10",
)


class Tables:
    """Blocks of each request as updated, by time."""

    def __init__(self, of: Simulation) -> None:
        self.rows: list[tuple[int, dict[int, int]]] = []
        self.scheduler = of.scheduler
        of.add_observer(self)

    def updated(self, now: int, returned: Returned) -> None:
        self.rows.append((now, {request.index: len(request.block_table) for request in self.scheduler.running}))


@pytest.mark.parametrize("mode", ["true", "false"])
@pytest.mark.parametrize("lookahead", ["true", "false"])
def test_what_is_freed_is_less_than_what_is_kept(mode: str, lookahead: str) -> None:
    """At every update: free_rejected <= rewind <= overwrite = commit_tail, and somewhere less."""
    found = {}
    for undo in ("overwrite", "commit_tail", "rewind", "free_rejected"):
        policies = f"engine.policies={{undo: {undo}, lookahead: {lookahead}}}"
        run = simulation([*ALONE, EAGLE, policies, f"engine.async_scheduling={mode}"], acceptance=0.4)
        tables = Tables(run)
        run.run()
        found[undo] = tables.rows
    assert found["commit_tail"] == found["overwrite"]
    for less, more in (("rewind", "overwrite"), ("free_rejected", "rewind")):
        assert [now for now, _ in found[less]] == [now for now, _ in found[more]]
        pairs = [
            (low[index], high[index])
            for (_, low), (_, high) in zip(found[less], found[more], strict=True)
            for index in high
        ]
        assert all(low <= high for low, high in pairs), (less, more)
    total = {undo: sum(sum(row.values()) for _, row in rows) for undo, rows in found.items()}
    assert total["free_rejected"] < total["overwrite"]
    assert total["rewind"] < total["overwrite"]


class Hits:
    """Tokens hit by each request at its first admission."""

    def __init__(self, of: Simulation) -> None:
        self.by_request: dict[int, int] = {}
        of.add_observer(self)

    def scheduled(self, now: int, batch: Batch) -> None:
        for number in range(batch.num_running_frames, len(batch.requests)):
            self.by_request.setdefault(batch.requests[number].index, batch.computed[number])


@pytest.mark.parametrize(
    ("prefix_cache", "expected"), [("accepted", 20), ("prompt_only", 8), ("prompt_and_finish", 20)]
)
def test_what_a_second_turn_hits(prefix_cache: str, expected: int) -> None:
    """Prompt 10, 11 of output, blocks of 4, no speculation. The second turn's prompt is those 21 tokens and 10 more. Of
    them 20 were computed (the last output never is): 5 full blocks. Of the prompt alone 2 are full."""
    run = simulation(
        [
            "engine.num_gpu_blocks=100",
            "engine.speculative_config=null",
            f"engine.policies.prefix_cache={prefix_cache}",
            "engine.async_scheduling=false",
            "timing.fixed_step_ms=10",
            "workload={synthetic: {num_requests: 1, arrivals: {process: all_at_once}, prompt_tokens: 10, "
            "output_tokens: 11, conversations: {turns: 2}}}",
        ]
    )
    hits = Hits(run)
    run.run()
    assert hits.by_request == {0: 0, 1: expected}


@pytest.mark.parametrize(
    ("last_hit", "own", "expected"),
    [
        ("drop_block", 1, 12),
        ("drop_token", 1, 12),
        ("drop_nothing", 1, 16),
        ("drop_block", 2, 12),
        ("drop_token", 2, 16),
        ("drop_nothing", 2, 16),
    ],
)
def test_what_a_hit_loses(last_hit: str, own: int, expected: int) -> None:
    """16 shared tokens and 1 or 2 own, blocks of 4: 4 blocks could be hit, since a token is left to compute. A dropped
    block makes it 3. A dropped token: of L = 17 at most 15 tokens may be hit, 3 blocks; of 18 it is 16, 4 blocks."""
    run = simulation(
        [
            "engine.num_gpu_blocks=100",
            EAGLE,
            f"engine.policies.last_hit={last_hit}",
            "timing.fixed_step_ms=10",
            f"workload={{synthetic: {{num_requests: 2, arrivals: {{process: constant, rate: 1}}, prompt_tokens: {own}, "
            "output_tokens: 2, shared_prefix: {count: 1, tokens: 16, fraction: 1.0}}}",
        ]
    )
    hits = Hits(run)
    run.run()
    assert hits.by_request == {0: 0, 1: expected}


@pytest.mark.parametrize("mode", ["true", "false"])
def test_a_worst_case_is_never_preempted(mode: str) -> None:
    for seed in range(4):
        starved = [*SCENES["starved"], EAGLE, "timing.fixed_step_ms=10", f"engine.async_scheduling={mode}"]
        run = simulation([*starved, f"seed={seed}", "engine.policies.reservation=worst_case"])
        run.run()
        assert run.scheduler.num_preemptions == 0
        other = simulation([*starved, f"seed={seed}"])
        other.run()
        assert other.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    ("reservation", "expected"), [("exact_lookahead", 2), ("max_draft", 4), ("two_frames", 8), ("worst_case", 19)]
)
def test_slots_beyond_what_is_certain(reservation: str, expected: int) -> None:
    """Sync, K = 3 configured and 1 used (a table of batch sizes), no lookahead; the first frame after a prompt of 10
    starts at F = 10. Beyond F: its 2 tokens; 1 + K; 2 (K + 1); or output 11 and 2 (K + 1), whatever F is."""
    run = simulation(
        [
            "engine.num_gpu_blocks=100",
            "engine.speculative_config={method: eagle3, num_speculative_tokens: 3, "
            "num_speculative_tokens_per_batch_size: [[1, 4, 1]]}",
            f"engine.policies={{reservation: {reservation}, lookahead: false}}",
            "engine.async_scheduling=false",
            "timing.fixed_step_ms=10",
            "workload={synthetic: {num_requests: 1, arrivals: {process: all_at_once}, prompt_tokens: 10, "
            "output_tokens: 11}}",
        ]
    )
    given: list[int] = []

    class Given:
        def scheduled(self, now: int, batch: Batch) -> None:
            if batch.requests:
                end = batch.computed[0] + batch.tokens[0]
                given.append((batch.reserved[0] if batch.reserved else end) - batch.computed[0])

    run.add_observer(Given())
    run.run()
    assert given[1] == expected


class Victims:
    """Who was preempted beside whom, with their outputs and those of the requests behind them in the running list.

    Those behind a victim were candidates for certain; those in front may have been scheduled by the step already.
    """

    def __init__(self, of: Simulation) -> None:
        self.running: list[Request] = []
        self.choices: list[tuple[Request, list[Request]]] = []
        self.outputs: list[tuple[tuple[int, int], list[tuple[int, int]]]] = []
        of.add_observer(self)

    def scheduled(self, now: int, batch: Batch) -> None:
        for victim in batch.preempted:
            others = [request for request in self.running if request is not victim]
            behind = self.running[self.running.index(victim) + 1 :]
            self.choices.append((victim, list(self.running)))
            self.outputs.append((_outputs(victim), [_outputs(request) for request in behind]))
            self.running = others
        self.running += batch.requests[batch.num_running_frames :]

    def updated(self, now: int, returned: Returned) -> None:
        self.running = [request for request in self.running if request not in returned.finished]


def _outputs(request: Request) -> tuple[int, int]:
    return request.num_output_tokens, -request.num_prompt_tokens


@pytest.mark.parametrize("mode", ["true", "false"])
@pytest.mark.parametrize("victim", ["last_admitted", "fewest_outputs"])
def test_whom_it_preempts(victim: str, mode: str) -> None:
    """The last of those admitted; or of fewest outputs, and equals the longest prompt, of those not scheduled."""
    other_choice = 0
    for seed in range(3):
        run = simulation(
            [
                *SCENES["starved"],
                EAGLE,
                "timing.fixed_step_ms=10",
                f"engine.policies.victim={victim}",
                f"engine.async_scheduling={mode}",
                f"seed={seed}",
            ]
        )
        victims = Victims(run)
        run.run()
        assert victims.choices
        for (chosen, running), (least, others) in zip(victims.choices, victims.outputs, strict=True):
            if victim == "last_admitted":
                assert chosen is running[-1]
                assert not others
            else:
                assert all(least <= other for other in others)
                other_choice += chosen is not running[-1]
    assert other_choice > 0 or victim == "last_admitted"


class PoolWatch:
    """Blocks of the drafter's own pool while a step runs, when it has ended, and once it has come back."""

    def __init__(self, of: Simulation) -> None:
        assert of.drafter_pool is not None
        self.pool = of.drafter_pool
        self.running: list[int] = []
        self.between: list[int] = []
        of.add_observer(self)

    def step_started(self, now: int, batch: Batch, shape: Any, cost: Any) -> None:
        self.running.append(self.pool.used_blocks)

    def step_ended(self, now: int, batch: Batch) -> None:
        self.between.append(self.pool.used_blocks)


@pytest.mark.parametrize("mode", ["true", "false"])
@pytest.mark.parametrize("kind", ["own_pool_freed", "own_pool_kept"])
def test_what_a_drafters_pool_holds_between_steps(kind: str, mode: str) -> None:
    run = simulation(
        [
            *ALONE,
            TWO_MODELS,
            f"engine.policies={{drafter_kv: {kind}, drafter_pool_blocks: 200}}",
            f"engine.async_scheduling={mode}",
        ]
    )
    watch = PoolWatch(run)
    run.run()
    assert max(watch.running) > 0
    assert watch.pool.num_refused == 0
    assert watch.pool.used_blocks == 0
    if kind == "own_pool_freed":
        assert set(watch.between) == {0}
    else:
        assert min(watch.between[:10]) > 0


def test_bytes_of_a_block() -> None:
    """Llama 3.1 8B has 32 layers of 8 KV heads of 128, Llama 3.2 1B 16 of 8 of 64; keys and values of 2 bytes. So
    131,072 and 32,768 bytes a token, and blocks of 4."""
    found = {}
    for kind in DRAFTER_KV:
        run = simulation([*ALONE, TWO_MODELS, f"engine.policies.drafter_kv={kind}"])
        own = run.drafter_pool
        found[kind] = (run.block_bytes, None if own is None else own.block_bytes)
    target, drafter = 4 * 131_072, 4 * 32_768
    assert found == {
        "none": (target, None),
        "shared": (target + drafter, None),
        "own_pool_freed": (target, drafter),
        "own_pool_kept": (target, drafter),
    }


class Lengths:
    def __init__(self, of: Simulation) -> None:
        self.lengths: list[int] = []
        of.add_observer(self)

    def scheduled(self, now: int, batch: Batch) -> None:
        if batch.requests:
            self.lengths.append(batch.num_spec_tokens)


def lengths(kind: str, acceptance: float, *more: str) -> list[int]:
    run = simulation(
        [
            "engine.num_gpu_blocks=600",
            "engine.speculative_config={method: eagle3, num_speculative_tokens: 6}",
            f"engine.policies.draft_length={kind}",
            "workload={synthetic: {num_requests: 4, arrivals: {process: all_at_once}, prompt_tokens: 8, "
            "output_tokens: 300}}",
            *more,
        ],
        acceptance,
    )
    watch = Lengths(run)
    run.run()
    return watch.lengths


def test_adaptive_lengths_follow_acceptance() -> None:
    """The start is 0.6 a draft: 0.6^2 = 0.36 is above the floor of 0.3, and 0.6^3 is not, so 2 of the 6."""
    falling = lengths("adaptive", 0.0, "timing.fixed_step_ms=10")
    rising = lengths("adaptive", 1.0, "timing.fixed_step_ms=10")
    assert falling[0] == rising[0] == 2
    assert falling[-1] == 1
    assert all(later <= earlier for earlier, later in pairwise(falling))
    assert max(rising) == rising[-1] == 6
    assert all(later >= earlier for earlier, later in pairwise(rising))


def test_no_drafts_where_they_cost_more_than_they_bring() -> None:
    """All is accepted, but a round of drafting takes 1 s, where the step takes milliseconds: none. Nothing is accepted:
    none, once that is known. All is accepted at the price of one layer a draft: all 6."""
    assert set(lengths("best_by_cost", 1.0, "timing.draft_step_us=1000000")) == {0}
    nothing = lengths("best_by_cost", 0.0)
    assert nothing[0] > 0
    assert nothing[-1] == 0
    assert lengths("best_by_cost", 1.0)[-1] == 6


def test_a_tree_moves_rows_and_a_chain_does_not() -> None:
    """A tree of one node a level is a chain: its branch stands at the front already."""
    moved = {}
    for widths in ([1, 1, 1], [2, 1]):
        run = simulation([*ALONE, EAGLE, f"engine.policies={{undo: compact, tree_widths: {widths}}}"])
        run.run()
        moved[len(widths)] = run.moved_rows
    assert moved[3] == 0
    assert moved[2] > 0


@pytest.mark.parametrize(
    ("when", "how", "preempted", "reset"),
    [
        ("reset", "count_tokens", "stale_delivered", "stale_dropped"),
        ("any_preemption", "count_tokens", "stale_dropped", "stale_dropped"),
        ("reset", "drop", "stale_delivered", "stale_dropped"),
        ("any_preemption", "drop", "stale_dropped", "stale_dropped"),
        ("reset", "deliver", "stale_delivered", "stale_delivered"),
        ("any_preemption", "deliver", "stale_delivered", "stale_delivered"),
        ("any_preemption", "count_frames", "discarded", "discarded"),
    ],
)
def test_what_becomes_of_output_in_flight(when: str, how: str, preempted: str, reset: str) -> None:
    """After a preemption for lack of blocks, and after a reset."""
    for scene, expected in (("starved", preempted), ("reset", reset)):
        policies = f"engine.policies={{stale_when: {when}, stale_how: {how}}}"
        run = simulation([*SCENES[scene], EAGLE, "timing.fixed_step_ms=10", policies, "engine.async_scheduling=true"])
        contract = Contract(run)
        run.run()
        stale = {fate for fate in contract.fates if fate not in ("fresh", "unknown")}
        assert stale == {expected}, scene


# Combinations that mean nothing

K3 = "engine.speculative_config={method: eagle3, num_speculative_tokens: 3}"
NGRAM = "engine.speculative_config={method: ngram_gpu, num_speculative_tokens: 3}"
TABLE = (
    "engine.speculative_config={method: eagle3, num_speculative_tokens: 3, num_speculative_tokens_per_batch_size: "
    "[[1, 4, 1]]}"
)
NONE = "engine.speculative_config=null"


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        ([K3, "engine.policies.undo=compact"], "undo", "there is none"),
        ([K3, "engine.policies.tree_widths=[2, 1]"], "tree_widths", "scattered over its slots"),
        ([K3, "engine.policies={undo: compact, tree_widths: [3, 1]}"], "num_speculative_tokens", "has 4 drafts"),
        ([NGRAM, "engine.policies={undo: compact, tree_widths: [2, 1]}"], "tree_widths", "propose a chain"),
        ([TABLE, "engine.policies={undo: compact, tree_widths: [2, 1]}"], "tree_widths", "a tree's K is fixed"),
        (
            [K3, "engine.policies={undo: compact, tree_widths: [2, 1], draft_length: adaptive}"],
            "tree_widths",
            "a tree's K is fixed",
        ),
        ([TABLE, "engine.policies.draft_length=adaptive"], "draft_length", "sets K already"),
        (
            [K3, "engine.policies.draft_length=best_by_cost", "timing.fixed_step_ms=5"],
            "draft_length",
            "every K costs the same",
        ),
        ([K3, "engine.policies={undo: rewind, reservation: worst_case}"], "reservation", "would give back"),
        ([K3, "engine.policies={undo: free_rejected, reservation: worst_case}"], "reservation", "would give back"),
        ([K3, "engine.preset=trtllm", "engine.policies.reservation=worst_case"], "reservation", "would give back"),
        ([K3, "engine.preset=sglang-0.5.6", "engine.policies.reservation=worst_case"], "reservation", "give back"),
        ([NGRAM, "engine.policies.drafter_kv=own_pool_freed"], "drafter_kv", "n-grams have no KV"),
        ([NGRAM, "engine.policies.drafter_kv=own_pool_kept"], "drafter_kv", "n-grams have no KV"),
        ([K3, "engine.policies.drafter_pool_blocks=9"], "drafter_pool_blocks", "no pool of its own"),
        ([K3, "engine.preset=sglang-0.5.6", "engine.async_scheduling=true"], "async_scheduling", "does not overlap"),
        ([NONE, "engine.policies.undo=rewind"], "undo", "without speculative_config"),
        ([NONE, "engine.policies.drafter_kv=shared"], "drafter_kv", "without speculative_config"),
        ([NONE, "engine.policies.draft_length=adaptive"], "draft_length", "without speculative_config"),
        ([NONE, "engine.policies.lookahead=true"], "lookahead", "without speculative_config"),
        ([NONE, "engine.policies.drafter_pool_blocks=5"], "drafter_pool_blocks", "without speculative_config"),
        ([NONE, "engine.policies.tree_widths=[2]"], "tree_widths", "without speculative_config"),
    ],
)
def test_a_combination_that_means_nothing_is_refused(overrides: list[str], key: str, reason: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_scenario("minimal", overrides)
    assert reason in str(caught.value)
    assert f"{key} =" in str(caught.value) or f"{key}:" in str(caught.value)


def test_a_request_whose_worst_case_is_larger_than_the_pool_is_refused() -> None:
    """Prompt 20, output 20, K = 3 without lookahead: 20 + 20 + 2 * 4 = 48 slots, and blocks of 1. A pool of 47 cannot
    give them; one of 48 can."""
    given = (
        EAGLE,
        "engine.block_size=1",
        "engine.policies={reservation: worst_case, lookahead: false}",
        "timing.fixed_step_ms=10",
        "workload={synthetic: {num_requests: 1, arrivals: {process: all_at_once}, prompt_tokens: 20, "
        "output_tokens: 20}}",
    )
    fits = simulation([*given, "engine.num_gpu_blocks=49"])
    fits.run()
    assert fits.stopped_by is None
    with pytest.raises(ScenarioError, match="it can never end in this pool"):
        simulation([*given, "engine.num_gpu_blocks=48"])
