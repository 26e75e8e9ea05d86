"""Small engines for worked examples: a scheduler stepped by hand, and a simulation of a few given requests.

Knows the core's, the device's and the engine's public names; no scenario and no results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from sim.content import SegmentContent
from sim.core.block_hashes import BlockHashes
from sim.core.request import Request
from sim.core.scheduler import Scheduler
from sim.core.settings import Rules, Settings
from sim.device import Device
from sim.engine import Engine, OutsideEvent
from sim.models.acceptance import AcceptanceModel
from sim.models.timing import NO_COST, StepCost, StepShape
from sim.observers.invariants import Invariants
from sim.observers.ledger import Ledger
from sim.policies.caching import DROP_BLOCK, DROP_TOKEN
from sim.policies.drafters import DRAFTERS
from sim.policies.presets import DEFAULT_PRESET, PRESETS, TRAITS, VLLM_PRESETS
from sim.records import Batch, Frame, Interruption, Returned
from workloads.spec import RequestSpec, Segment, prompt_stream

__all__ = [
    "LOSSLESS",
    "LOSSY",
    "MS",
    "VLLM_PRESETS",
    "GivenRequests",
    "Log",
    "Simulated",
    "Tokens",
    "Turns",
    "abort_at",
    "reset_at",
    "small_settings",
    "spec",
]

LOSSY = ("vllm-0.26", "vllm-0.24", "article")
"""Presets that reproduce a loss: `async_tokens_to_discard` was in vLLM 0.22 to 0.26, and is in the article."""
LOSSLESS = tuple(name for name in PRESETS if name not in LOSSY)

MS = 1_000_000
"""Nanoseconds."""


def hashes_of(numbers: Sequence[int]) -> BlockHashes:
    """Hashes of full blocks, these numbers in order."""
    hashes = BlockHashes()
    for number in numbers:
        hashes.append(number)
    return hashes


def a_frame(request: Request, num_tokens: int, num_drafts: int = 0, computed: int = 0, samples: bool = True) -> Frame:
    """A frame as a schedule leaves it."""
    frame = Frame(request)
    frame.num_tokens = num_tokens
    frame.num_drafts = num_drafts
    frame.num_computed_tokens = computed
    frame.samples = samples
    frame.epoch = request.num_preemptions
    return frame


class Tokens:
    """Content as a list of tokens; two blocks are equal if their tokens and all before them are."""

    def __init__(self, tokens: Sequence[int], block_size: int, output: int = 1_000_000) -> None:
        self.tokens = list(tokens)
        self.block_size = block_size
        self.output = output

    def extend_hashes(self, hashes: BlockHashes, count: int) -> None:
        size = self.block_size
        while len(hashes) < count:
            block = range(len(hashes) * size, (len(hashes) + 1) * size)
            parent = hashes[-1] if hashes else 0
            hashes.append(hash((parent, *(self._at(position) for position in block))))

    def _at(self, position: int) -> int:
        return self.tokens[position] if position < len(self.tokens) else self.output + position


def small_settings(method: str = "none", k: int = 0, preset: str = DEFAULT_PRESET, **changes: Any) -> Settings:
    """Settings of a small engine with this drafter: 100 blocks of 4, 1,000 tokens a step."""
    drafter = DRAFTERS[method]
    traits = TRAITS[preset]
    draft_slots = drafter.draft_slots if traits.draft_slots else 0
    given: dict[str, Any] = {
        "num_gpu_blocks": 101,
        "block_size": 4,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1000,
        "max_model_len": 10_000,
        "async_scheduling": False,
        "num_speculative_tokens": k,
        "num_lookahead_tokens": drafter.num_lookahead_tokens(k) if traits.lookahead else 0,
        "draft_slots": draft_slots,
        "drop_last_hit_block": drafter.drop_last_hit_block and traits.last_hit == DROP_BLOCK,
        "hit_margin_tokens": 1 if drafter.drop_last_hit_block and traits.last_hit == DROP_TOKEN else 0,
    }
    given.update(changes)
    if draft_slots and not PRESETS[preset].draft_slots_per_request and "max_num_scheduled_tokens" not in changes:
        given["max_num_scheduled_tokens"] = given["max_num_batched_tokens"] - draft_slots * given["max_num_seqs"]
    return Settings(**given)


class Turns:
    """A scheduler whose batches the test takes back itself, oldest first."""

    def __init__(self, preset: str = DEFAULT_PRESET, method: str = "none", k: int = 0, **changes: Any) -> None:
        self.settings = small_settings(method, k, preset, **changes)
        self.scheduler = Scheduler(self.settings, PRESETS[preset])
        self.in_flight: deque[Batch] = deque()
        self.batch: Batch
        self.num_requests = 0

    def add(
        self, prompt: int | Sequence[int], max_tokens: int = 100, *, priority: int = 0, arrival: int | None = None
    ) -> Request:
        """A request with a prompt of its own of so many tokens, or with these tokens; ids are r0, r1, ..."""
        index = self.num_requests
        self.num_requests += 1
        tokens = range(10_000 * (index + 1), 10_000 * (index + 1) + prompt) if isinstance(prompt, int) else prompt
        content = Tokens(tokens, self.settings.block_size, 1_000_000 * (index + 1))
        request = Request(
            f"r{index}",
            index,
            len(tokens),
            max_tokens,
            content,
            arrival=index if arrival is None else arrival,
            priority=priority,
        )
        self.scheduler.add(request)
        return request

    def schedule(self) -> dict[str, tuple[int, int]]:
        """Schedule; returns {id: (tokens, of them drafts)} in batch order. A batch with tokens is in flight then."""
        self.batch = self.scheduler.schedule()
        if self.batch.total_tokens > 0:
            self.in_flight.append(self.batch)
        batch = self.batch
        ids = [request.id for request in batch.requests]
        return dict(zip(ids, zip(batch.tokens, batch.drafts, strict=True), strict=True))

    def update(self, **accepted: int) -> Returned:
        """Take the oldest batch back; `accepted` drafts by id, 0 where nothing is said."""
        batch = self.in_flight.popleft()
        sampled = [
            1 + accepted.get(request.id, 0) if samples else 0
            for request, samples in zip(batch.requests, batch.samples, strict=True)
        ]
        return self.scheduler.update(batch, sampled)

    def step(self, **accepted: int) -> dict[str, tuple[int, int]]:
        """Schedule, then take the oldest batch back."""
        scheduled = self.schedule()
        self.update(**accepted)
        return scheduled

    def preempted(self) -> list[str]:
        """By the last schedule."""
        return [request.id for request in self.batch.preempted]


class GivenRequests:
    """A workload of these requests, in order of arrival."""

    def __init__(self, specs: Sequence[RequestSpec]) -> None:
        self.specs = sorted(specs, key=lambda spec: spec.arrival_ns)

    @property
    def num_requests(self) -> int | None:
        return len(self.specs)

    def arrivals(self) -> Iterator[RequestSpec]:
        return iter(self.specs)

    def after(self, spec: RequestSpec, finish_ns: int) -> Sequence[RequestSpec]:
        return ()


def spec(
    index: int,
    prompt: int | tuple[Segment, ...],
    max_tokens: int,
    arrival_ns: int = 0,
    priority: int = 0,
) -> RequestSpec:
    """A request with a prompt of its own of so many tokens, or with these segments."""
    segments = ((prompt_stream(index), 0, prompt),) if isinstance(prompt, int) else prompt
    return RequestSpec(index, arrival_ns, segments, sum(part[2] for part in segments), max_tokens, priority)


class FixedTime:
    """Every step takes as long."""

    def __init__(self, step_ns: int) -> None:
        self.cost = NO_COST._replace(overhead=step_ns)

    def step_cost(self, step: StepShape) -> StepCost:
        return self.cost


class Log:
    """What an engine told, as plain values in order: (ms, what, request index to number)."""

    def __init__(self) -> None:
        self.lines: list[tuple[float, str, dict[int, int]]] = []

    def _note(self, now: int, what: str, requests: Iterable[Request], numbers: Iterable[int]) -> None:
        indices = [request.index for request in requests]
        self.lines.append((now / MS, what, dict(zip(indices, numbers, strict=True))))

    def arrived(self, now: int, request: Request) -> None:
        self._note(now, "arrived", [request], [request.num_prompt_tokens])

    def scheduled(self, now: int, batch: Batch) -> None:
        self._note(now, "scheduled", batch.requests, batch.tokens)

    def step_started(self, now: int, batch: Batch, shape: StepShape, cost: StepCost) -> None:
        self._note(now, "started", batch.requests, batch.tokens)

    def step_ended(self, now: int, batch: Batch) -> None:
        self._note(now, "ended", batch.requests, batch.accepted)

    def updated(self, now: int, returned: Returned) -> None:
        self._note(now, "updated", returned.batch.requests, returned.delivered)

    def interrupted(self, now: int, interruption: Interruption) -> None:
        self._note(now, interruption.kind, interruption.requests, [0] * len(interruption.requests))

    def closed(self, now: int) -> None:
        self._note(now, "closed", [], [])


class Simulated:
    """A few requests through an engine, with the ledger, the laws and a log attached."""

    def __init__(
        self,
        specs: Sequence[RequestSpec] | Any,
        settings: Settings,
        rules: Rules | None = None,
        *,
        acceptance: AcceptanceModel | None = None,
        step_ms: float = 10,
        schedule_ms: float = 0,
        update_ms: float = 0,
        timer: Any = None,
        events: Iterable[OutsideEvent] = (),
        lossy: bool = False,
        check: bool = True,
        between: Any = None,
        max_time_ns: int | None = None,
        max_steps: int | None = None,
        max_request_tokens: int = 2**62,
    ) -> None:
        """`between`: an observer that is told after the ledger and before the laws are checked."""
        size = settings.block_size
        self.settings = settings
        self.scheduler = Scheduler(settings, PRESETS[DEFAULT_PRESET] if rules is None else rules)
        self.engine = Engine(
            self.scheduler,
            Device(FixedTime(round(step_ms * MS)) if timer is None else timer, acceptance),
            GivenRequests(specs) if isinstance(specs, Sequence) else specs,
            lambda given: SegmentContent(given.index, given.prompt, given.num_prompt_tokens, size),
            async_scheduling=settings.async_scheduling,
            schedule_ns=round(schedule_ms * MS),
            update_ns=round(update_ms * MS),
            events=events,
            max_request_tokens=max_request_tokens,
            max_prompt_tokens=settings.max_model_len - 1,
            max_time_ns=max_time_ns,
            max_steps=max_steps,
        )
        self.ledger = Ledger(settings.num_gpu_blocks, size)
        self.invariants = Invariants(
            self.scheduler, self.ledger, async_scheduling=settings.async_scheduling, lossy=lossy
        )
        self.log = Log()
        self.engine.add_observer(self.ledger)
        if between is not None:
            self.engine.add_observer(between)
        if check:
            self.engine.add_observer(self.invariants)
        self.engine.add_observer(self.log)

    def run(self, tick: Callable[[int], bool] | None = None) -> Simulated:
        self.engine.run(tick)
        return self


def reset_at(*times_ms: float, running: bool = True) -> OutsideEvent:
    """A reset of the prefix cache at these times."""
    times = [round(time * MS) for time in times_ms]
    return OutsideEvent("reset_prefix_cache", lambda: times, reset_running_requests=running)


def abort_at(index: int, *times_ms: float) -> OutsideEvent:
    """An abort of this request at these times."""
    times = [round(time * MS) for time in times_ms]

    def choose(asked: int, unfinished: list[Request]) -> Request | None:
        return next((request for request in unfinished if request.index == index), None)

    return OutsideEvent("abort", lambda: times, choose=choose)
