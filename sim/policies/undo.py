"""Axis: what happens to a request's blocks when drafts are rejected. Its counters are rolled back in any case.

Worked example, block size 4, K = 6: 6 computed, a frame of 7 tokens, all drafts rejected. The counters go 6, 13, 7; the
request held ceil(13 / 4) = 4 blocks, and 7 tokens need 2.

    overwrite       4 blocks stay; the next frame writes over the garbage in blocks 1 to 3
    free_rejected   blocks 2 and 3 are freed at once
"""

from __future__ import annotations

from sim.core.request import Request


class Overwrite:
    """Nothing is freed; the next frame writes over the garbage (vLLM, every version)."""

    frees = False
    compacts = False

    def kept_tokens(self, request: Request, num_rejected: int, num_lookahead_tokens: int) -> int:
        """All that is reserved."""
        return request.num_reserved_tokens


class CommitTail(Overwrite):
    """What is accepted is committed, the tail stays reserved and is freed at the end (SGLang 0.5.23, its v2 worker).

    For the block table the same as `overwrite`; it goes with SGLang's reservation and its caching at the end.
    """


class Compact(Overwrite):
    """For token trees: the accepted branch's KV is moved to the front, then overwritten as before.

    The moved rows are counted and timed by the device (SGLang with pages, TensorRT-LLM).
    """

    compacts = True


class Rewind:
    """The sequence's end moves back token by token, and its last block is freed at each boundary (TensorRT-LLM).

    What was reserved beyond the rejected tokens stays reserved behind the new end.
    """

    frees = True
    compacts = False

    def kept_tokens(self, request: Request, num_rejected: int, num_lookahead_tokens: int) -> int:
        """The reserved end, less the rejected tokens, but no block that a frame in flight may still write."""
        request.num_reserved_tokens -= num_rejected
        return max(request.num_reserved_tokens, _promised(request, num_lookahead_tokens))


class FreeRejected:
    """Rejected slots are freed at once; with pages only those that are wholly empty (SGLang 0.5.6, its v1 worker)."""

    frees = True
    compacts = False

    def kept_tokens(self, request: Request, num_rejected: int, num_lookahead_tokens: int) -> int:
        """What is computed and right, and what a frame in flight may still write."""
        kept = _promised(request, num_lookahead_tokens)
        request.num_reserved_tokens = min(request.num_reserved_tokens, kept)
        return kept


def _promised(request: Request, num_lookahead_tokens: int) -> int:
    """End of what is computed or in flight, with its lookahead while a frame is in flight."""
    ahead = num_lookahead_tokens if request.num_in_flight_tokens > 0 else 0
    return request.num_computed_tokens + ahead
