"""From a scenario to a simulation: the one place that knows concrete parts.

Everything here is choice and wiring; what the parts do stands in their own files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import sim.scenario as scenarios
from sim import scenario_schema
from sim.content import SegmentContent
from sim.core.request import RUNNING, Content, Request
from sim.core.scheduler import Scheduler
from sim.core.settings import DraftLength, Rules, Settings
from sim.device import Device, StepTimer, TokenTree
from sim.drafter_pool import DrafterPool
from sim.engine import Engine, OutsideEvent, RequestNeverFits
from sim.models.acceptance import AcceptanceModel, Geometric, Replay, read_accepted_lengths
from sim.models.acceptance_models import acceptance_model, drafted_of, drafted_share_of
from sim.models.acceptance_profiles import ACCEPTANCE_PROFILES
from sim.models.memory import BatchLimits, NoRoomForKV, drafter_outside_bytes, plan_memory
from sim.models.shapes import kv_dtype_bytes
from sim.models.step_timers import Jittered, Watched
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
from workloads.joint import Copula, JointRequests, Resampled
from workloads.lengths import Lengths
from workloads.open_loop import OpenLoop
from workloads.prompts import SharedPrefixes
from workloads.sessions import Sessions, SingleRequests
from workloads.sharegpt import ShareGPT
from workloads.spec import RequestSpec, Workload
from workloads.streams import uniforms
from workloads.tenants import Tenants, tenant_seed
from workloads.traces import Columns, Format, Trace, TraceError, detect_format

_DRAWS: Final = 256
_LATEST_NS: Final = 4 * 10**18


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
        self._observers: list[Any] = []
        """Who is told, in order."""
        self.ledger = ledger
        self.settings = settings
        self.warnings = warnings
        self.num_requests = num_requests
        """In all, where known beforehand."""
        self.invariants: Invariants | None = None
        self.drafter_pool: DrafterPool | None = None
        self.block_bytes = 0
        """Bytes of one block of the pool on one rank: the target's KV, and the drafter's where it lives in there."""
        self.drafter_outside_bytes_per_request = 0
        """Bytes that the drafter keeps of one request outside any pool, on one rank."""

    def add_observer(self, observer: Any, *, before_ledger: bool = False) -> None:
        """Tell this observer as well; the ledger is told first, the laws are checked before those added here.

        `before_ledger`: tell it before everybody else, while the ledger is still as it was.
        """
        if before_ledger:
            self._observers.insert(0, observer)
        else:
            self._observers.append(observer)

    def run(self, tick: Callable[[int], bool] | None = None) -> None:
        """Run to the end, or until `tick`, called with the simulated ns every 200 steps, says False.

        Raises:
            RequestNeverFits: a request arrived that can never be served.
            LawBroken: under check, at the first record after which a law does not hold.
        """
        for observer in self._observers:
            self._engine.add_observer(observer)
        self._engine.run(tick)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler that decides."""
        return self._engine.scheduler

    @property
    def num_refused(self) -> int:
        """Requests that the engine turned away since it could never serve them."""
        return self._engine.num_refused

    @property
    def device(self) -> Device:
        """The device that plays the steps; its `timer` may be replaced before the run."""
        return self._engine.device

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
    workload, num_requests = _workload(scenario, warnings)
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
        Device(
            _with_jitter(scenario, timer),
            acceptance,
            pool,
            tree,
            _drafts_at(settings, _drafter(scenario), acceptance),
        ),
        workload,
        content,
        async_scheduling=settings.async_scheduling,
        schedule_ns=round(scenario.timing.schedule_ms * 1e6),
        update_ns=round(scenario.timing.update_ms * 1e6),
        events=[_event(scenario, number) for number in range(len(scenario.events))],
        max_request_tokens=max_request_tokens,
        max_prompt_tokens=max_prompt_tokens,
        refuse_too_long=scenario.workload.refuse_too_long,
        max_time_ns=None if scenario.limits.max_time_s is None else round(scenario.limits.max_time_s * 1e9),
        max_steps=scenario.limits.max_steps,
    )
    ledger = Ledger(settings.num_gpu_blocks, settings.block_size, lossy=rules.stale_output.frames_count)
    simulation = Simulation(engine, ledger, settings, warnings, num_requests)
    simulation.block_bytes = block_bytes(scenario)
    simulation.drafter_outside_bytes_per_request = _outside_bytes(scenario, settings)
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
    looks_ahead = engine.policies.lookahead
    if looks_ahead is None:
        looks_ahead = traits.lookahead and scenarios.drafter_kv(scenario).in_target_blocks
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
        num_lookahead_tokens=(drafter.num_lookahead_tokens(num_speculative_tokens) if looks_ahead else 0),
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
        shape.decode_qk_pairs = shape.decode_kv_tokens * (1 + num_drafts)
        shape.max_decode_kv_tokens = max(contexts)
        shape.num_spec_tokens = num_drafts
        return timer.step_cost(shape).total

    return BestByCost(speculation.num_speculative_tokens, step_ns)


def block_bytes(scenario: Scenario) -> int:
    """Bytes of one block of the pool on one rank: the target's KV, and the drafter's where it lives in there."""
    engine = scenario.engine
    element = kv_dtype_bytes(engine.kv_cache_dtype, scenarios.weight_dtype(scenario))
    token = scenarios.target_shape(scenario).kv_bytes_per_token(element, engine.tensor_parallel_size)
    drafter = scenarios.drafter(scenario)
    if drafter is not None and scenarios.drafter_kv(scenario).in_target_blocks:
        token += drafter.kv_bytes_per_token(element, engine.tensor_parallel_size)
    return engine.block_size * token


def drafter_block_bytes(scenario: Scenario) -> int:
    """Bytes of one block of a drafter's own pool on one rank; 0 if it has none."""
    engine = scenario.engine
    drafter = scenarios.drafter(scenario)
    if drafter is None or not scenarios.drafter_kv(scenario).own_pool:
        return 0
    element = kv_dtype_bytes(engine.kv_cache_dtype, scenarios.weight_dtype(scenario))
    return engine.block_size * drafter.kv_bytes_per_token(element, engine.tensor_parallel_size)


def pool_bytes(scenario: Scenario) -> int | None:
    """Bytes of `engine.num_gpu_blocks` and of a drafter's own pool beside it, on one rank; None if the card decides."""
    engine = scenario.engine
    if engine.num_gpu_blocks is None:
        return None
    own = drafter_block_bytes(scenario)
    blocks = engine.policies.drafter_pool_blocks
    if own and blocks is None:
        blocks = _default_drafter_blocks(scenarios.drafter_kv(scenario), engine.num_gpu_blocks)
    return engine.num_gpu_blocks * block_bytes(scenario) + (blocks or 0) * own


def blocks_in(scenario: Scenario, kv_bytes: int) -> int:
    """Most blocks of the pool that fit so many bytes, beside the drafter's own pool if the scenario has one."""
    own = drafter_block_bytes(scenario)
    if own and scenario.engine.policies.drafter_pool_blocks is not None:
        return (kv_bytes - scenario.engine.policies.drafter_pool_blocks * own) // block_bytes(scenario)
    share = 0.1 if scenarios.drafter_kv(scenario).freed_after_verification else 1.0
    return int(kv_bytes / (block_bytes(scenario) + share * own))


def _outside_bytes(scenario: Scenario, settings: Settings) -> int:
    engine = scenario.engine
    kind = scenarios.drafter_kv(scenario)
    return drafter_outside_bytes(
        scenarios.target_shape(scenario),
        scenarios.drafter(scenario),
        settings.num_speculative_tokens,
        kv_outside=not kind.in_target_blocks and not kind.own_pool,
        kv_element_bytes=kv_dtype_bytes(engine.kv_cache_dtype, scenarios.weight_dtype(scenario)),
        tp=engine.tensor_parallel_size,
    )


def _drafts_at(
    settings: Settings, drafter: Drafter, acceptance: AcceptanceModel | None
) -> Callable[[int, int, int], NDArray[np.bool_]] | None:
    """Where n-grams find a match: vLLM's proposer then returns nothing, and the next frame has no drafts. Under async
    scheduling the frame has its placeholders all the same, and they are rejected."""
    if acceptance is None or drafter.method != "ngram" or settings.async_scheduling:
        return None
    if drafted_share_of(acceptance, settings.num_speculative_tokens) >= 1.0:
        return None
    return partial(drafted_of, acceptance)


def _drafter_pool(scenario: Scenario, settings: Settings) -> DrafterPool | None:
    kind = scenarios.drafter_kv(scenario)
    drafter = scenarios.drafter(scenario)
    if not kind.own_pool or drafter is None:
        return None
    engine = scenario.engine
    num_blocks = engine.policies.drafter_pool_blocks
    if num_blocks is None:
        num_blocks = _default_drafter_blocks(kind, settings.num_gpu_blocks)
    return DrafterPool(
        num_blocks,
        settings.block_size,
        drafter_block_bytes(scenario),
        freed_after_verification=kind.freed_after_verification,
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
            dtype=scenarios.weight_dtype(scenario),
            kv_cache_dtype=engine.kv_cache_dtype,
            block_size=engine.block_size,
            gpu_memory_utilization=engine.gpu_memory_utilization,
            drafter=drafter,
            drafter_kv_in_blocks=kind.in_target_blocks,
        )
    except NoRoomForKV as error:
        raise _refused(
            scenario,
            "engine.num_gpu_blocks",
            str(error),
            "a larger tensor_parallel_size, a larger card, or a number for num_gpu_blocks",
        ) from None
    if not kind.own_pool or drafter is None:
        return max(plan.num_gpu_blocks, 2)
    drafter_block = drafter_block_bytes(scenario)
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
    """Prompt and output tokens of the largest request that can end: its last token needs no slot, its drafts do.

    Other reservations than the exact one may ask for the last token's slot as well.
    """
    k = settings.num_speculative_tokens
    frames = 2 if settings.async_scheduling else 1
    ahead = max(frames, 2) * (k + 1) + settings.num_lookahead_tokens if k or not exact else 0
    if capacity >= settings.max_model_len:
        return 2**62
    return capacity - ahead + (1 if exact else 0)


def _told(scenario: Scenario, specs: Iterator[RequestSpec]) -> Iterator[RequestSpec]:
    """The requests; what their distributions cannot do is the scenario's problem."""
    try:
        yield from specs
    except TraceError:
        raise
    except (ValueError, OverflowError) as error:
        raise _refused(scenario, "workload", str(error), "arrivals and lengths that can be drawn") from None


def _check_requests(scenario: Scenario, workload: Workload, max_prompt_tokens: int, max_request_tokens: int) -> None:
    """Look at every request that is known beforehand, so that nothing is written for one that never fits."""
    trace = scenario.workload.trace
    for spec in _told(scenario, workload.arrivals()):
        if spec.arrival_ns > _LATEST_NS:
            reason = f"request {spec.index} arrives after {spec.arrival_ns / 1e9:.3g} s; simulated time ends at 4e9 s"
            raise _refused(scenario, "workload", reason, "arrivals that come sooner")
        if scenario.workload.refuse_too_long:
            continue
        total = spec.num_prompt_tokens + spec.max_tokens
        if spec.num_prompt_tokens <= max_prompt_tokens and total <= max_request_tokens:
            continue
        what = f"request {spec.index} has a prompt of {spec.num_prompt_tokens} tokens and {spec.max_tokens} of output"
        if trace is not None:
            what += f" (number {spec.index + 1} of {trace.path})"
        if spec.num_prompt_tokens > max_prompt_tokens:
            reason = f"{what}; no prompt of more than {max_prompt_tokens} can be served"
        else:
            reason = f"{what}; with its drafts it can never end in this pool, which holds {max_request_tokens} of one"
        key = "engine.max_model_len"
        if max_prompt_tokens < scenario.engine.max_model_len - 1 or spec.num_prompt_tokens <= max_prompt_tokens:
            key = "engine.num_gpu_blocks"
        allowed = "a larger pool or model length, or workload.refuse_too_long to have such requests turned away"
        raise _refused(scenario, key, reason, allowed)


def _workload(scenario: Scenario, warnings: list[str]) -> tuple[Workload, int | None]:
    given = scenario.workload
    if given.trace is not None:
        return _trace(scenario, given.trace, warnings)
    if given.tenants is not None:
        seeds = [tenant_seed(scenario.seed, number) for number in range(len(given.tenants))]
        together = Tenants(
            [
                _synthetic(scenario, f"workload.tenants.{number}.synthetic", tenant.synthetic, seeds[number], warnings)
                for number, tenant in enumerate(given.tenants)
                if tenant.synthetic is not None
            ]
        )
        return together, together.num_requests
    assert given.synthetic is not None
    workload = _synthetic(scenario, "workload.synthetic", given.synthetic, scenario.seed, warnings)
    return workload, workload.num_requests


def _trace(scenario: Scenario, given: scenario_schema.Trace, warnings: list[str]) -> tuple[Workload, int | None]:
    path = scenarios.trace_path(scenario)
    format = _format(path, given)
    if format == "sharegpt":
        conversations = _sharegpt(scenario, "workload.trace", path, given, scenarios.think_ms(given.think_time_s))
        process = given.arrivals
        if process is None:
            process = scenario_schema.SHAREGPT_ARRIVALS
            warnings.append(
                "workload.trace.arrivals: the trace has no times; 4 conversations begin a second, at random"
            )
        _tell_left_out(warnings, "workload.trace", conversations.left_out)
        workload = _started(conversations, process, scenario.seed)
        return workload, workload.num_requests
    for key in ("arrivals", "think_time_s", "tokenizer"):
        if getattr(given, key):
            raise _refused(scenario, f"workload.trace.{key}", f"has no meaning with format {format}", "only sharegpt")
    trace = Trace(
        path,
        format,
        time_scale=given.time_scale,
        max_requests=given.max_requests,
        block_tokens=given.block_tokens,
        columns=_columns(given),
        skip_bad_rows=given.skip_bad_rows,
    )
    count = trace.check()
    _tell_left_out(warnings, "workload.trace", trace.left_out)
    return trace, count


def _synthetic(
    scenario: Scenario, section: str, synthetic: scenario_schema.Synthetic, seed: int, warnings: list[str]
) -> Workload:
    shared = None
    if synthetic.shared_prefix is not None:
        prefix = synthetic.shared_prefix
        shared = SharedPrefixes(prefix.count, scenarios.lengths(prefix.tokens), prefix.fraction)
    prompts = scenarios.lengths(synthetic.prompt_tokens)
    outputs = scenarios.lengths(synthetic.output_tokens)
    sessions: Sessions
    if synthetic.lengths_from is not None:
        pairs = _pairs(scenario, section, synthetic.lengths_from, warnings)
        sessions = JointRequests(seed, synthetic.num_requests, pairs, shared)
    elif synthetic.length_correlation:
        copula = Copula(prompts, outputs, synthetic.length_correlation)
        sessions = JointRequests(seed, synthetic.num_requests, copula, shared)
    elif synthetic.conversations is None:
        sessions = SingleRequests(seed, synthetic.num_requests, prompts, outputs, shared)
    else:
        talk = synthetic.conversations
        first = talk.first_prompt_tokens
        try:
            sessions = Conversations(
                seed,
                synthetic.num_requests,
                scenarios.lengths(talk.turns),
                prompts,
                outputs,
                shared,
                scenarios.think_ms(talk.think_time_s),
                talk.max_context_tokens,
                None if first is None else scenarios.lengths(first),
            )
        except ValueError as error:
            raise _refused(scenario, f"{section}.conversations", str(error), "lengths that fit the context") from None
    workload = _started(sessions, synthetic.arrivals, seed)
    if synthetic.priority is not None:
        return Prioritised(workload, seed, synthetic.priority.levels, synthetic.priority.weights)
    return workload


def _started(sessions: Sessions, process: Any, seed: int) -> Workload:
    if process.process == "closed_loop":
        return ClosedLoop(sessions, process.concurrency)
    return OpenLoop(sessions, _arrivals(process), seed)


def _pairs(scenario: Scenario, section: str, given: scenario_schema.TraceFile, warnings: list[str]) -> Resampled:
    path = scenarios.lengths_path(scenario, given, section)
    format = _format(path, given)
    left_out: dict[str, int]
    if format == "sharegpt":
        conversations = _sharegpt(scenario, f"{section}.lengths_from", path, given, None)
        pairs, left_out = Resampled(conversations.lengths()), conversations.left_out
    else:
        trace = Trace(
            path,
            format,
            max_requests=given.max_requests,
            columns=_columns(given),
            skip_bad_rows=given.skip_bad_rows,
        )
        pairs, left_out = Resampled(trace.lengths()), trace.left_out
    _tell_left_out(warnings, f"{section}.lengths_from", left_out)
    return pairs


def _sharegpt(
    scenario: Scenario, section: str, path: Path, given: scenario_schema.TraceFile, think_ms: Lengths | None
) -> ShareGPT:
    try:
        return ShareGPT(
            path,
            seed=scenario.seed,
            max_conversations=given.max_requests,
            tokenizer=given.tokenizer,
            think_ms=think_ms,
            max_context_tokens=scenario.engine.max_model_len,
            skip_bad_rows=given.skip_bad_rows,
        )
    except TraceError:
        raise
    except ValueError as error:
        raise _refused(scenario, f"{section}.tokenizer", str(error), "null, or a tokenizer that is installed") from None


def _format(path: Path, given: scenario_schema.TraceFile) -> Format:
    if given.format != "auto":
        return given.format
    return detect_format(path) if given.columns is None else "columns"


def _columns(given: scenario_schema.TraceFile) -> Columns | None:
    named = given.columns
    return None if named is None else Columns(named.arrival, named.prompt_tokens, named.output_tokens, named.unit)


def _tell_left_out(warnings: list[str], key: str, left_out: Mapping[str, int]) -> None:
    if left_out:
        listed = "; ".join(f"{reason}: {count}" for reason, count in left_out.items())
        warnings.append(f"{key}: {sum(left_out.values())} rows left out ({listed})")


def _arrivals(process: Any) -> arrivals.Arrivals:
    if process.process == "poisson":
        return arrivals.Poisson(process.rate)
    if process.process == "gamma":
        return arrivals.Gamma(process.rate, process.burstiness)
    if process.process == "constant":
        return arrivals.Constant(process.rate)
    if process.process == "on_off":
        return arrivals.OnOff(process.on_rate, process.on_s, process.off_s, process.off_rate, process.regular)
    if process.process == "piecewise":
        return arrivals.Piecewise([(row[0], row[1]) for row in process.rates], process.repeat_s)
    return arrivals.AllAtOnce()


def _acceptance(scenario: Scenario) -> AcceptanceModel | None:
    speculation = scenario.engine.speculative_config
    given = scenario.acceptance
    if speculation is None or given is None:
        return None
    k = speculation.num_speculative_tokens
    if given.model == "geometric":
        return Geometric(scenario.seed, given.rate, max(k, 1))  # more than K are never accepted
    if given.model != "replay":
        section = given.model_dump()
        if given.model == "profile":
            section = dict(ACCEPTANCE_PROFILES[given.name].section)
        try:
            model = acceptance_model(section, scenario.seed)
        except ValueError as error:
            raise _refused(scenario, "acceptance", str(error), "parameters that fit each other") from None
        longest = int(getattr(model, "max_run", k))
        if longest < k:
            reason = f"accepts at most {longest} drafts, and num_speculative_tokens is {k}"
            raise _refused(scenario, "acceptance.model", reason, f"rates for {k} or more drafts")
        return model
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
    calibration = scenarios.calibration(scenario)
    if card.calibrated and calibration.card != card.name:
        warnings.append(
            f"timing.calibration: {calibration.name} was fitted on {calibration.card}; its shares of the peaks are "
            f"put on "
            f"{card.name}'s datasheet"
        )
    k = settings.num_speculative_tokens
    captured = capture_sizes(settings.max_num_seqs, settings.max_num_batched_tokens, k) if timing.cuda_graphs else ()
    model = TimingModel(
        scenarios.target_shape(scenario),
        card,
        calibration,
        scenario.engine.tensor_parallel_size,
        scenarios.weight_dtype(scenario),
        scenario.engine.kv_cache_dtype,
        scenarios.drafter(scenario),
        captured,
        TimingParams(
            per_layer_us=timing.per_layer_us,
            per_step_us=timing.per_step_us,
            per_sampled_token_us=timing.per_sampled_token_us,
            draft_step_us=timing.draft_step_us,
            draft_round_us=timing.draft_round_us,
            attention_kernel=timing.attention_kernel,
        ),
    )
    return Watched(model, warnings.append)


def _with_jitter(scenario: Scenario, timer: StepTimer) -> StepTimer:
    jitter = scenario.timing.jitter
    if jitter is None:
        return timer
    residuals = scenarios.calibration(scenario).residuals if jitter.model == "residuals" else ()
    return Jittered(
        timer,
        scenario.seed,
        sigma=jitter.sigma if jitter.model == "lognormal" else 0.0,
        residuals=residuals,
        stall_rate=jitter.stalls_per_1000_steps / 1000,
        stall_ns=round(jitter.stall_ms * 1e6),
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
        assert event.type == "reset_prefix_cache"
        assert event.every_s is not None
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


__all__ = [
    "FixedStep",
    "Prioritised",
    "RequestNeverFits",
    "Simulation",
    "block_bytes",
    "blocks_in",
    "build",
    "drafter_block_bytes",
    "pool_bytes",
]
