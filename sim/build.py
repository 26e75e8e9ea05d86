"""From a scenario to a simulation: the one place that knows concrete parts.

Everything here is choice and wiring; what the parts do stands in their own files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np

import sim.scenario as scenarios
from sim.content import SegmentContent
from sim.core.request import RUNNING, Content, Request
from sim.core.scheduler import Scheduler
from sim.core.settings import DraftLength, Rules, Settings
from sim.device import Device, StepTimer, TokenTree
from sim.drafter_pool import DrafterPool
from sim.engine import Engine, OutsideEvent, RequestNeverFits
from sim.models.acceptance import AcceptanceModel, Geometric, PerPosition, Replay, read_accepted_lengths
from sim.models.memory import BatchLimits, NoRoomForKV, plan_memory
from sim.models.shapes import kv_dtype_bytes
from sim.models.timing import NO_COST, StepCost, StepShape, TimingModel, TimingParams, capture_sizes
from sim.observers.invariants import Invariants
from sim.observers.ledger import Ledger
from sim.policies.axes import rules_with
from sim.policies.caching import DROP_BLOCK, DROP_TOKEN
from sim.policies.draft_length import Adaptive, BestByCost
from sim.policies.drafter_kv import DrafterKV
from sim.policies.drafters import DRAFTERS, Drafter
from sim.policies.presets import PRESETS, TRAITS
from sim.records import Batch
from sim.scenario import Scenario, ScenarioError
from sim.scenario_errors import Problem
from workloads import arrivals
from workloads.closed_loop import ClosedLoop
from workloads.conversations import Conversations
from workloads.lengths import Fixed
from workloads.open_loop import OpenLoop
from workloads.prompts import SharedPrefixes
from workloads.sessions import Sessions, SingleRequests
from workloads.spec import RequestSpec, Workload
from workloads.streams import uniforms
from workloads.traces import Trace

_DRAWS: Final = 256


class FixedStep:
    """Every step takes the same time, whatever is in it."""

    def __init__(self, step_ns: int) -> None:
        self._cost = NO_COST._replace(overhead=step_ns)

    def step_cost(self, step: StepShape) -> StepCost:
        """The same cost, under `overhead`."""
        return self._cost


class Prioritised:
    """A workload whose requests are given priorities, drawn by request."""

    def __init__(self, workload: Workload, seed: int, levels: Sequence[int], weights: Sequence[float] | None) -> None:
        self._workload = workload
        self._seed = seed
        self._levels = list(levels)
        shares = np.asarray([1.0] * len(levels) if weights is None else weights, dtype=np.float64)
        self._edges = np.cumsum(shares / shares.sum())

    @property
    def num_requests(self) -> int | None:
        """As the workload's."""
        return self._workload.num_requests

    def arrivals(self) -> Iterator[RequestSpec]:
        """The workload's, with priorities."""
        return map(self._give, self._workload.arrivals())

    def after(self, spec: RequestSpec, finish_ns: int) -> Sequence[RequestSpec]:
        """The workload's, with priorities."""
        return [self._give(following) for following in self._workload.after(spec, finish_ns)]

    def _give(self, spec: RequestSpec) -> RequestSpec:
        u = float(uniforms(self._seed, "priority", spec.index, 0, 1)[0])
        level = min(int(np.searchsorted(self._edges, u, side="right")), len(self._levels) - 1)
        return RequestSpec(
            spec.index,
            spec.arrival_ns,
            spec.prompt,
            spec.num_prompt_tokens,
            spec.max_tokens,
            self._levels[level],
            spec.conversation,
            spec.turn,
        )


class Simulation:
    """An engine that is ready to run, with its ledger."""

    def __init__(
        self, engine: Engine, ledger: Ledger, settings: Settings, warnings: list[str], num_requests: int | None
    ) -> None:
        self._engine = engine
        self.ledger = ledger
        self.settings = settings
        self.warnings = warnings
        self.num_requests = num_requests
        """In all, where known beforehand."""
        self.invariants: Invariants | None = None
        self.drafter_pool: DrafterPool | None = None

    def add_observer(self, observer: Any) -> None:
        """Tell this observer as well; the ledger is told first, the laws are checked before those added here."""
        self._engine.add_observer(observer)

    def run(self, tick: Callable[[int], bool] | None = None) -> None:
        """Run to the end, or until `tick`, called with the simulated ns every 200 steps, says False.

        Raises:
            RequestNeverFits: a request arrived that can never be served.
            LawBroken: under check, at the first record after which a law does not hold.
        """
        self._engine.run(tick)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler that decides."""
        return self._engine.scheduler

    @property
    def moved_rows(self) -> int:
        """Rows of KV moved by the compaction of token trees."""
        return self._engine.device.moved_rows

    @property
    def now(self) -> int:
        """Simulated ns."""
        return self._engine.now

    @property
    def num_steps(self) -> int:
        """Steps that the device has ended."""
        return self._engine.num_steps

    @property
    def num_request_steps(self) -> int:
        """Frames launched: requests times steps."""
        return self._engine.num_request_steps

    @property
    def stalled(self) -> list[Request]:
        """Requests that can never be scheduled again; empty unless the run ended by it."""
        return self._engine.stalled

    @property
    def stopped_by(self) -> str | None:
        """None for a run to the end; else `stalled`, `crash`, `max_time_s`, `max_steps` or `interrupt`."""
        return self._engine.stopped_by

    @property
    def crash(self) -> str | None:
        """What the released engine would have fallen over."""
        return self._engine.crash


def build(scenario: Scenario, check: bool = False) -> Simulation:
    """A simulation of the scenario; `check` holds laws 1 to 6 at every record.

    Raises:
        ScenarioError: the scenario's files, memory or requests do not fit together.
    """
    warnings = list(scenario.warnings)
    drafter = _drafter(scenario)
    settings = _settings(scenario, drafter, warnings)
    rules = _rules(scenario)
    workload, num_requests = _workload(scenario)
    acceptance = _acceptance(scenario)
    capacity = (settings.num_gpu_blocks - 1) * settings.block_size
    max_request_tokens = _max_request_tokens(settings, rules.reservation.exact, capacity)
    max_prompt_tokens = min(settings.max_model_len - 1, capacity)
    _check_requests(scenario, workload, max_prompt_tokens, max_request_tokens)
    block_size = settings.block_size

    def content(spec: RequestSpec) -> Content:
        return SegmentContent(spec.index, spec.prompt, spec.num_prompt_tokens, block_size)

    timer = _timer(scenario, settings, warnings)
    scheduler = Scheduler(settings, rules, _draft_length(scenario, timer))
    pool = _drafter_pool(scenario, settings)
    widths = scenario.engine.policies.tree_widths
    tree = None if widths is None else TokenTree(scenario.seed, widths)
    engine = Engine(
        scheduler,
        Device(timer, acceptance, pool, tree),
        workload,
        content,
        async_scheduling=settings.async_scheduling,
        schedule_ns=round(scenario.timing.schedule_ms * 1e6),
        update_ns=round(scenario.timing.update_ms * 1e6),
        events=[_event(scenario, number) for number in range(len(scenario.events))],
        max_request_tokens=max_request_tokens,
        max_prompt_tokens=max_prompt_tokens,
        max_time_ns=None if scenario.limits.max_time_s is None else round(scenario.limits.max_time_s * 1e9),
        max_steps=scenario.limits.max_steps,
    )
    ledger = Ledger(settings.num_gpu_blocks, settings.block_size)
    simulation = Simulation(engine, ledger, settings, warnings, num_requests)
    simulation.add_observer(ledger)
    if pool is not None:
        simulation.drafter_pool = pool
        simulation.add_observer(pool)
    if check:
        simulation.invariants = Invariants(
            scheduler,
            ledger,
            async_scheduling=settings.async_scheduling,
            lossy=rules.stale_output.frames_count,
        )
        simulation.add_observer(simulation.invariants)
    return simulation


def _drafter(scenario: Scenario) -> Drafter:
    speculation = scenario.engine.speculative_config
    return DRAFTERS["none" if speculation is None else speculation.method]


def _settings(scenario: Scenario, drafter: Drafter, warnings: list[str]) -> Settings:
    engine = scenario.engine
    speculation = engine.speculative_config
    traits = TRAITS[engine.preset]
    last_hit = engine.policies.last_hit or traits.last_hit
    draft_slots = drafter.draft_slots if traits.draft_slots else 0
    num_speculative_tokens = 0 if speculation is None else speculation.num_speculative_tokens
    rows = None if speculation is None else speculation.num_speculative_tokens_per_batch_size
    max_num_scheduled_tokens = engine.max_num_batched_tokens
    if not PRESETS[engine.preset].draft_slots_per_request:
        max_num_scheduled_tokens -= draft_slots * engine.max_num_seqs
    in_blocks = scenarios.drafter_kv(scenario).in_target_blocks
    return Settings(
        num_gpu_blocks=_num_gpu_blocks(scenario) if engine.num_gpu_blocks is None else engine.num_gpu_blocks,
        block_size=engine.block_size,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_scheduled_tokens=max_num_scheduled_tokens,
        max_model_len=engine.max_model_len,
        enable_prefix_caching=engine.enable_prefix_caching,
        watermark=engine.watermark,
        priority=engine.scheduling_policy == "priority",
        long_prefill_token_threshold=engine.long_prefill_token_threshold,
        async_scheduling=engine.async_scheduling,
        num_speculative_tokens=num_speculative_tokens,
        num_speculative_tokens_per_batch_size=tuple((row[0], row[1], row[2]) for row in rows or ()),
        num_lookahead_tokens=(
            drafter.num_lookahead_tokens(num_speculative_tokens) if traits.lookahead and in_blocks else 0
        ),
        draft_slots=draft_slots,
        drop_last_hit_block=drafter.drop_last_hit_block and last_hit == DROP_BLOCK,
        hit_margin_tokens=1 if drafter.drop_last_hit_block and last_hit == DROP_TOKEN else 0,
    )


def _rules(scenario: Scenario) -> Rules:
    policies = scenario.engine.policies
    return rules_with(
        PRESETS[scenario.engine.preset],
        undo=policies.undo,
        reservation=policies.reservation,
        prefix_cache=policies.prefix_cache,
        stale_when=policies.stale_when,
        stale_how=policies.stale_how,
        victim=policies.victim,
    )


def _draft_length(scenario: Scenario, timer: StepTimer) -> DraftLength | None:
    speculation = scenario.engine.speculative_config
    kind = scenario.engine.policies.draft_length
    if speculation is None or kind is None or kind == "fixed":
        return None
    if kind == "adaptive":
        return Adaptive(speculation.num_speculative_tokens)

    def step_ns(batch: Batch, num_drafts: int) -> int:
        """The batch's requests in a step of their own, each verifying so many drafts and drafting as many anew."""
        shape = StepShape()
        contexts = [request.num_tokens for request in batch.requests]
        requests = len(contexts)
        shape.num_reqs = shape.decode_reqs = shape.num_draft_reqs = requests
        shape.num_tokens = shape.decode_tokens = shape.num_sampled_tokens = requests * (1 + num_drafts)
        shape.decode_kv_tokens = sum(contexts)
        shape.max_decode_kv_tokens = max(contexts)
        shape.num_spec_tokens = num_drafts
        return timer.step_cost(shape).total

    return BestByCost(speculation.num_speculative_tokens, step_ns)


def _drafter_pool(scenario: Scenario, settings: Settings) -> DrafterPool | None:
    kind = scenarios.drafter_kv(scenario)
    drafter = scenarios.drafter(scenario)
    if not kind.own_pool or drafter is None:
        return None
    engine = scenario.engine
    num_blocks = engine.policies.drafter_pool_blocks
    if num_blocks is None:
        num_blocks = _default_drafter_blocks(kind, settings.num_gpu_blocks)
    element = kv_dtype_bytes(engine.kv_cache_dtype, engine.dtype)
    block_bytes = settings.block_size * drafter.kv_bytes_per_token(element, engine.tensor_parallel_size)
    return DrafterPool(
        num_blocks, settings.block_size, block_bytes, freed_after_verification=kind.freed_after_verification
    )


def _default_drafter_blocks(kind: DrafterKV, num_gpu_blocks: int) -> int:
    return max(num_gpu_blocks // 10, 1) if kind.freed_after_verification else num_gpu_blocks


def _num_gpu_blocks(scenario: Scenario) -> int:
    engine = scenario.engine
    kind = scenarios.drafter_kv(scenario)
    drafter = scenarios.drafter(scenario)
    try:
        plan = plan_memory(
            scenarios.card(scenario),
            scenarios.target_shape(scenario),
            limits=BatchLimits(engine.max_num_seqs, engine.max_num_batched_tokens),
            tp=engine.tensor_parallel_size,
            dtype=engine.dtype,
            kv_cache_dtype=engine.kv_cache_dtype,
            block_size=engine.block_size,
            gpu_memory_utilization=engine.gpu_memory_utilization,
            drafter=drafter,
            drafter_kv_in_blocks=kind.in_target_blocks,
        )
    except NoRoomForKV as error:
        raise _refused(scenario, "engine.num_gpu_blocks", str(error), "a larger card, or num_gpu_blocks") from None
    if not kind.own_pool or drafter is None:
        return max(plan.num_gpu_blocks, 2)
    element = kv_dtype_bytes(engine.kv_cache_dtype, engine.dtype)
    drafter_block = engine.block_size * drafter.kv_bytes_per_token(element, engine.tensor_parallel_size)
    if engine.policies.drafter_pool_blocks is not None:
        left = plan.kv_bytes - engine.policies.drafter_pool_blocks * drafter_block
        num_gpu_blocks = left // plan.block_bytes
    else:
        share = 0.1 if kind.freed_after_verification else 1.0
        num_gpu_blocks = int(plan.kv_bytes / (plan.block_bytes + share * drafter_block))
    if num_gpu_blocks < 2:
        raise _refused(
            scenario,
            "engine.policies.drafter_pool_blocks",
            f"the drafter's pool leaves {num_gpu_blocks} blocks for the target",
            "a smaller pool, or a larger card",
        )
    return num_gpu_blocks


def _max_request_tokens(settings: Settings, exact: bool, capacity: int) -> int:
    """Prompt and output tokens of the largest request that can end: its last token needs no slot, its drafts do."""
    k = settings.num_speculative_tokens
    frames = 2 if settings.async_scheduling else 1
    ahead = max(frames, 2) * (k + 1) + settings.num_lookahead_tokens if k or not exact else 0
    if capacity >= settings.max_model_len:
        return 2**62
    return capacity - ahead + 1


def _check_requests(scenario: Scenario, workload: Workload, max_prompt_tokens: int, max_request_tokens: int) -> None:
    """Look at every request that is known beforehand, so that nothing is written for one that never fits."""
    trace = scenario.workload.trace
    for spec in workload.arrivals():
        total = spec.num_prompt_tokens + spec.max_tokens
        if spec.num_prompt_tokens <= max_prompt_tokens and total <= max_request_tokens:
            continue
        what = f"request {spec.index} has a prompt of {spec.num_prompt_tokens} tokens and {spec.max_tokens} of output"
        if trace is not None:
            what += f" (row {spec.index + 1} of {trace.path})"
        if spec.num_prompt_tokens > max_prompt_tokens:
            reason = f"{what}; no prompt of more than {max_prompt_tokens} can be served"
        else:
            reason = f"{what}; with its drafts it can never end in this pool, which holds {max_request_tokens} of one"
        key = "engine.max_model_len"
        if max_prompt_tokens < scenario.engine.max_model_len - 1 or spec.num_prompt_tokens <= max_prompt_tokens:
            key = "engine.num_gpu_blocks"
        raise _refused(scenario, key, reason, "a larger pool or model length, or a workload with shorter requests")


def _workload(scenario: Scenario) -> tuple[Workload, int | None]:
    given = scenario.workload
    if given.trace is not None:
        trace = Trace(
            scenarios.trace_path(scenario),
            given.trace.format,
            time_scale=given.trace.time_scale,
            max_requests=given.trace.max_requests,
        )
        return trace, trace.check()
    synthetic = given.synthetic
    assert synthetic is not None
    shared = None
    if synthetic.shared_prefix is not None:
        prefix = synthetic.shared_prefix
        shared = SharedPrefixes(prefix.count, scenarios.lengths(prefix.tokens), prefix.fraction)
    prompts = scenarios.lengths(synthetic.prompt_tokens)
    outputs = scenarios.lengths(synthetic.output_tokens)
    sessions: Sessions
    if synthetic.conversations is None:
        sessions = SingleRequests(scenario.seed, synthetic.num_requests, prompts, outputs, shared)
    else:
        talk = synthetic.conversations
        think_ms = round(talk.think_time_s * 1e3)
        try:
            sessions = Conversations(
                scenario.seed,
                synthetic.num_requests,
                scenarios.lengths(talk.turns),
                prompts,
                outputs,
                shared,
                Fixed(think_ms) if think_ms else None,
                talk.max_context_tokens,
            )
        except ValueError as error:
            raise _refused(
                scenario, "workload.synthetic.conversations", str(error), "lengths that fit the context"
            ) from None
    process = synthetic.arrivals
    workload: Workload
    if process.process == "closed_loop":
        workload = ClosedLoop(sessions, process.concurrency)
    else:
        workload = OpenLoop(sessions, _arrivals(process), scenario.seed)
    num_requests = workload.num_requests
    if synthetic.priority is not None:
        workload = Prioritised(workload, scenario.seed, synthetic.priority.levels, synthetic.priority.weights)
    return workload, num_requests


def _arrivals(process: Any) -> arrivals.Arrivals:
    if process.process == "poisson":
        return arrivals.Poisson(process.rate)
    if process.process == "gamma":
        return arrivals.Gamma(process.rate, process.burstiness)
    if process.process == "constant":
        return arrivals.Constant(process.rate)
    return arrivals.AllAtOnce()


def _acceptance(scenario: Scenario) -> AcceptanceModel | None:
    speculation = scenario.engine.speculative_config
    given = scenario.acceptance
    if speculation is None or given is None:
        return None
    if given.model == "geometric":
        return Geometric(scenario.seed, given.rate, max(speculation.num_speculative_tokens, 64))
    if given.model == "per_position":
        return PerPosition(scenario.seed, given.rates, given.convention)
    path = scenarios.replay_path(scenario)
    drafter = given.drafter or ("ngram" if speculation.method.startswith("ngram") else "eagle3")
    try:
        return Replay(read_accepted_lengths(path, f"{drafter}_tokens_per_step"))
    except (ValueError, OSError) as error:
        raise _refused(scenario, "acceptance.path", str(error), "JSON lines with tokens a step") from None


def _timer(scenario: Scenario, settings: Settings, warnings: list[str]) -> StepTimer:
    timing = scenario.timing
    if timing.fixed_step_ms is not None:
        return FixedStep(round(timing.fixed_step_ms * 1e6))
    card = scenarios.card(scenario)
    if not card.calibrated:
        warnings.append(f"hardware: {card.name} is not calibrated; its step times follow from its datasheet")
    k = settings.num_speculative_tokens
    captured = capture_sizes(settings.max_num_seqs, settings.max_num_batched_tokens, k) if timing.cuda_graphs else ()
    return TimingModel(
        scenarios.target_shape(scenario),
        card,
        scenario.engine.tensor_parallel_size,
        scenario.engine.dtype,
        scenario.engine.kv_cache_dtype,
        scenarios.drafter(scenario),
        captured,
        TimingParams(
            per_layer_us=timing.per_layer_us,
            per_step_us=timing.per_step_us,
            per_sampled_token_us=timing.per_sampled_token_us,
            draft_step_us=timing.draft_step_us,
            draft_round_us=timing.draft_round_us,
        ),
    )


def _event(scenario: Scenario, number: int) -> OutsideEvent:
    """Event `number` of the scenario; its draws are its own."""
    event = scenario.events[number]
    seed = scenario.seed
    purpose = f"event {number}"

    def once() -> Iterable[int]:
        assert event.at_s is not None
        yield round(event.at_s * 1e9)

    def regularly() -> Iterable[int]:
        assert event.type == "reset_prefix_cache" and event.every_s is not None
        gap = round(event.every_s * 1e9)
        time = gap
        while True:
            yield time
            time += gap

    def at_random() -> Iterable[int]:
        assert event.rate_per_s is not None
        time, first = 0.0, 0
        while True:
            for u in uniforms(seed, purpose, 0, first, _DRAWS).tolist():
                time -= math.log1p(-u) / event.rate_per_s
                yield round(time * 1e9)
            first += _DRAWS

    if event.rate_per_s is not None:
        times, recurring = at_random, True
    elif event.type == "reset_prefix_cache" and event.every_s is not None:
        times, recurring = regularly, True
    else:
        times, recurring = once, False
    if event.type == "reset_prefix_cache":
        return OutsideEvent(event.type, times, reset_running_requests=event.reset_running_requests, recurring=recurring)
    wanted = event.request

    def choose(asked: int, unfinished: list[Request]) -> Request | None:
        if wanted is not None:
            return next((request for request in unfinished if request.index == wanted), None)
        running = [request for request in unfinished if request.status == RUNNING]
        if not running:
            return None
        u = float(uniforms(seed, f"{purpose} victim", asked, 0, 1)[0])
        return running[int(u * len(running))]

    return OutsideEvent(event.type, times, choose=choose, recurring=recurring)


def _refused(scenario: Scenario, key: str, reason: str, allowed: str) -> ScenarioError:
    label = None if scenario.file is None else str(scenario.file)
    value: Any = scenario
    for part in key.split("."):
        value = getattr(value, part, None)
    return ScenarioError([Problem(reason, key, value, allowed, file=label)], label)


__all__ = ["FixedStep", "Prioritised", "RequestNeverFits", "Simulation", "build"]
