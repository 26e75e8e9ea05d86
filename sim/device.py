"""The device: where each request truly stands, how many drafts a frame gets accepted, and what a step costs.

The scheduler's position of a request is optimistic; the device's is true, since the worker takes rejected drafts off
before it launches the next frame. Both sampling and cost are settled when a batch is launched. Knows requests, batches
and models; no clock and no scheduler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sim.core.request import Request
from sim.models.timing import StepCost, StepShape
from sim.records import Batch

if TYPE_CHECKING:
    from sim.core.request import Content
    from sim.models.acceptance import AcceptanceModel
    from workloads.spec import RequestSpec

_RUN_CHUNK = 256


class StepTimer(Protocol):
    """What a step costs."""

    def step_cost(self, step: StepShape) -> StepCost:
        """Integer nanoseconds, by part."""


class SimulatedRequest(Request):
    """A request with its place on the device."""

    __slots__ = ("device_position", "runs", "spec")

    def __init__(self, spec: RequestSpec, content: Content) -> None:
        super().__init__(
            f"r{spec.index}",
            spec.index,
            spec.num_prompt_tokens,
            spec.max_tokens,
            content,
            arrival=spec.arrival_ns,
            priority=spec.priority,
        )
        self.spec = spec
        self.device_position = 0
        """Tokens whose KV is right in device memory once all launched steps have ended."""
        self.runs: list[int] = []
        """By output position: drafts that a verification starting there gets accepted."""


class Device:
    """Plays the worker and its GPU."""

    __slots__ = ("acceptance", "speculates", "timer")

    def __init__(self, timer: StepTimer, acceptance: AcceptanceModel | None) -> None:
        """`acceptance`: None without speculation."""
        self.timer = timer
        self.acceptance = acceptance
        self.speculates = acceptance is not None

    def launch(self, batch: Batch) -> tuple[StepShape, StepCost]:
        """Settle a batch's accepted drafts and its cost; the requests' true positions move on."""
        shape = StepShape()
        accepted_column = batch.accepted
        num_running = batch.num_running_frames
        decode_reqs = decode_tokens = decode_kv = longest = 0
        prefills = prefill_tokens = prefill_kv = pairs = 0
        sampled_rows = sampling = 0
        number = 0
        for request, num_tokens, num_drafts, samples in zip(
            batch.requests, batch.tokens, batch.drafts, batch.samples, strict=True
        ):
            assert isinstance(request, SimulatedRequest)
            position = request.device_position if number < num_running else batch.computed[number]
            number += 1
            end = position + num_tokens
            if samples:
                sampling += 1
                sampled_rows += 1 + num_drafts
            if samples and num_tokens == 1 + num_drafts:
                decode_reqs += 1
                decode_tokens += num_tokens
                decode_kv += end
                if end > longest:
                    longest = end
            else:
                prefills += 1
                prefill_tokens += num_tokens
                prefill_kv += end
                pairs += num_tokens * position + (num_tokens * (num_tokens + 1)) // 2
            if num_drafts and samples:
                output = end - num_drafts - request.num_prompt_tokens
                runs = request.runs
                if output >= len(runs):
                    self._extend_runs(request, output)
                accepted = runs[output]
                if accepted > num_drafts:
                    accepted = num_drafts
                accepted_column.append(accepted)
                end -= num_drafts - accepted
            else:
                accepted_column.append(0)
            request.device_position = end
        shape.num_reqs = number
        shape.num_tokens = batch.total_tokens
        shape.num_sampled_tokens = sampled_rows
        shape.decode_reqs = decode_reqs
        shape.decode_tokens = decode_tokens
        shape.decode_kv_tokens = decode_kv
        shape.max_decode_kv_tokens = longest
        shape.prefill_tokens = prefill_tokens
        shape.prefill_kv_tokens = prefill_kv
        shape.prefill_qk_pairs = pairs
        shape.num_prefills = prefills
        shape.num_draft_reqs = sampling if self.speculates else 0
        shape.num_spec_tokens = batch.num_spec_tokens if self.speculates else 0
        return shape, self.timer.step_cost(shape)

    def _extend_runs(self, request: SimulatedRequest, output: int) -> None:
        assert self.acceptance is not None
        runs = request.runs
        first = len(runs)
        count = max(output + 1 - first, min(max(request.max_tokens - first, 1), _RUN_CHUNK))
        runs.extend(self.acceptance.runs(request.index, first, count).tolist())
