"""Random simulations on the clock, small enough to be run with a shadow: the engine, wired without a scenario file.

Knows the engine and its parts; must not know what a shadow finds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from gpu_backend.shadow import Shadow
from sim.content import SegmentContent
from sim.core.request import RUNNING, Request
from sim.core.scheduler import Scheduler
from sim.core.settings import Settings
from sim.device import Device
from sim.engine import Engine, OutsideEvent
from sim.models.acceptance import Geometric
from sim.models.timing import NO_COST, StepCost, StepShape
from sim.policies.drafters import DRAFTERS
from sim.policies.presets import PRESETS
from workloads.spec import RequestSpec, Segment, merge_segments, output_stream, prompt_stream, shared_stream


class _Timer:
    """A step takes longer the more tokens it has."""

    def step_cost(self, step: StepShape) -> StepCost:
        return NO_COST._replace(overhead=1000 + 37 * step.num_tokens)


class _Listed:
    """Requests that are all known in advance."""

    def __init__(self, specs: Sequence[RequestSpec]) -> None:
        self.specs = specs
        self.num_requests = len(specs)

    def arrivals(self) -> Iterator[RequestSpec]:
        return iter(self.specs)

    def after(self, spec: RequestSpec, finish_ns: int) -> Sequence[RequestSpec]:
        return ()


def _specs(draw: random.Random) -> list[RequestSpec]:
    specs: list[RequestSpec] = []
    arrival = 0
    for index in range(draw.randint(3, 12)):
        segments: list[Segment] = []
        kind = draw.random()
        if kind < 0.4:
            segments.append((shared_stream(draw.randint(0, 1)), 0, draw.randint(1, 40)))
        elif kind < 0.7 and specs:
            earlier = draw.choice(specs)
            segments += [*earlier.prompt, (output_stream(earlier.index), 0, draw.randint(1, earlier.max_tokens))]
        segments.append((prompt_stream(index), 0, draw.randint(1, 30)))
        prompt = merge_segments(segments)
        length = sum(count for _, _, count in prompt)
        specs.append(RequestSpec(index, arrival, prompt, length, draw.randint(1, 40)))
        arrival += draw.choice((0, 0, 500, 3_000, 20_000))
    return specs


def random_simulation(seed: int, presets: Sequence[str], *, resets: bool = False) -> tuple[Engine, Shadow]:
    """An engine that is ready to run, with a shadow. `resets`: async, and running requests are reset at times."""
    draw = random.Random(seed)
    rules = PRESETS[draw.choice(list(presets))]
    specs = _specs(draw)
    is_async = resets or draw.random() < 0.7
    method = draw.choice([method for method, drafter in DRAFTERS.items() if drafter.runs_async or not is_async])
    k = 0 if method == "none" else draw.randint(1, 6)
    drafter = DRAFTERS[method if k else "none"]
    lookahead = drafter.num_lookahead_tokens(k)
    block_size = draw.choice((1, 2, 3, 4, 8, 16))
    max_num_seqs = draw.randint(2, 12)
    longest = max(spec.num_prompt_tokens + spec.max_tokens for spec in specs)
    need = -(-(longest + 2 * (k + 1) + lookahead) // block_size)
    num_blocks = 1 + need + draw.choice((0, 1, need // 2, need, 4 * need))
    budget = draw.randint(k + 3, 96) + drafter.draft_slots * max_num_seqs
    settings = Settings(
        num_gpu_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_num_scheduled_tokens=None if rules.draft_slots_per_request else budget - drafter.draft_slots * max_num_seqs,
        max_model_len=longest + draw.choice((0, 3, 1000)),
        enable_prefix_caching=draw.random() < 0.9,
        long_prefill_token_threshold=draw.choice((0, 0, k + 1, k + 9)),
        async_scheduling=is_async,
        num_speculative_tokens=k,
        num_lookahead_tokens=lookahead,
        draft_slots=drafter.draft_slots,
        drop_last_hit_block=drafter.drop_last_hit_block,
    )
    events = []
    for _ in range(draw.randint(2, 6) if resets else draw.randint(0, 3)):
        time = draw.randint(2_000, 200_000)
        if resets or draw.random() < 0.5:
            events.append(OutsideEvent("reset_prefix_cache", lambda time=time: [time], draw.random() < 0.7 or resets))
        else:
            events.append(OutsideEvent("abort", lambda time=time: [time], choose=_first_running))

    def content(spec: RequestSpec) -> SegmentContent:
        return SegmentContent(spec.index, spec.prompt, spec.num_prompt_tokens, block_size)

    engine = Engine(
        Scheduler(settings, rules),
        Device(_Timer(), Geometric(seed, draw.choice((0.0, 0.4, 0.7, 1.0)), 64) if k else None),
        _Listed(specs),
        content,
        async_scheduling=is_async,
        schedule_ns=draw.choice((0, 300)),
        update_ns=draw.choice((0, 200)),
        events=events,
        max_request_tokens=2**62,
        max_prompt_tokens=2**62,
        max_steps=20_000,
    )
    shadow = Shadow(num_blocks, block_size)
    engine.add_observer(shadow)
    return engine, shadow


def _first_running(asked: int, unfinished: list[Request]) -> Request | None:
    return next((request for request in unfinished if request.status == RUNNING), None)
