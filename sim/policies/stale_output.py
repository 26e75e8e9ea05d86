"""Axis: what becomes of output that was in flight when its request was preempted."""

from __future__ import annotations

from sim.core.request import Request
from sim.records import DISCARDED, FRESH, STALE_DELIVERED, STALE_DROPPED


class DrainedInTokens:
    """Counted in tokens and drained frame by frame, so that exactly the stale frames are told apart (0.27 on).

    vLLM delivers it after a preemption and drops it after a reset. Delivered output keeps its request waiting until it
    is there, since a resumed request would sample the same positions again.
    Source: vLLM 0.32, `num_stale_output_tokens` and `drop_stale_output` in the V1 scheduler.
    """

    frames_count = False

    def __init__(self, drops_after: str = "reset") -> None:
        """`drops_after`: `reset` (vLLM), `any_preemption` or `nothing`."""
        self.drops_after = drops_after

    def preempted(self, request: Request, by_reset: bool) -> None:
        drops = self.drops_after == "any_preemption" or (by_reset and self.drops_after == "reset")
        request.drop_stale_output = drops or (request.drop_stale_output and request.num_stale_output_tokens > 0)
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.num_output_placeholders = 0

    def must_wait(self, request: Request) -> bool:
        return request.num_stale_output_tokens > 0 and not request.drop_stale_output

    def returned(self, request: Request, num_tokens: int, num_sampled: int, stale: bool) -> int:
        if not stale:
            return FRESH
        request.num_stale_output_tokens -= num_tokens
        return STALE_DROPPED if request.drop_stale_output else STALE_DELIVERED


class DiscardedInFrames:
    """Set in tokens at a reset of running requests, drained in frames that return with tokens (0.22 to 0.26).

    The units do not match: with K drafts a frame the counter outlives the frames it was meant for, so tokens of later
    frames are lost, and the placeholders of the frames that were discarded are never given back. A preemption for lack
    of blocks marks nothing; its output is delivered and drains the placeholders it left.
    Source: vLLM 0.24 and 0.26, `async_tokens_to_discard` in the V1 scheduler.
    """

    frames_count = True

    def __init__(self, rolls_back_first: bool, any_preemption: bool = False) -> None:
        """`rolls_back_first`: a discarded frame's rejections are rolled back before (0.24), or not at all (0.26).

        `any_preemption`: set at every preemption, as the article tells it, not at resets alone.
        """
        self.rolls_back_first = rolls_back_first
        self.any_preemption = any_preemption

    def preempted(self, request: Request, by_reset: bool) -> None:
        if by_reset or self.any_preemption:
            request.async_tokens_to_discard = request.num_output_placeholders
            request.num_output_placeholders = 0

    def must_wait(self, request: Request) -> bool:
        return False

    def returned(self, request: Request, num_tokens: int, num_sampled: int, stale: bool) -> int:
        if request.async_tokens_to_discard > 0:
            if num_sampled > 0:
                request.async_tokens_to_discard -= 1
            return DISCARDED if self.rolls_back_first else STALE_DROPPED
        return STALE_DELIVERED if stale else FRESH
