"""Where each request truly stands on the device, worked out from batches alone.

The scheduler's `num_computed_tokens` is optimistic under async scheduling; the worker takes rejected drafts off before
it launches the next frame, so its own count is true. Knows batches; no tensors, no cache.
"""

from __future__ import annotations

from sim.records import Batch


def position_after(position: int, num_tokens: int, num_drafts: int, accepted: int) -> int:
    """Tokens whose KV is right once a frame has ended that began at `position`: rollback is a length, nothing moves."""
    return position + num_tokens - (num_drafts - accepted)


class DevicePositions:
    """Positions by request index. Batches have to be told in the order in which the device runs them."""

    def __init__(self) -> None:
        self._positions: dict[int, int] = {}

    def before(self, batch: Batch) -> list[int]:
        """By frame: tokens whose KV is right when the batch is launched. An admitted frame starts behind its hit."""
        running = batch.num_running_frames
        positions = self._positions
        return [
            positions.get(request.index, 0) if number < running else computed
            for number, (request, computed) in enumerate(zip(batch.requests, batch.computed, strict=True))
        ]

    def after(self, batch: Batch, before: list[int]) -> list[int]:
        """By frame: the same once the batch has ended; `batch.accepted` must be settled."""
        ends = []
        for request, position, num_tokens, num_drafts, samples, accepted in zip(
            batch.requests, before, batch.tokens, batch.drafts, batch.samples, batch.accepted, strict=True
        ):
            if num_tokens > 0:
                position = position_after(position, num_tokens, num_drafts if samples else 0, accepted)
            self._positions[request.index] = position
            ends.append(position)
        return ends
