"""Axis: how many slots a frame is given. Every one of them is capped at max_model_len and rounded up to whole
blocks."""

from __future__ import annotations

from sim.core.request import Request


class ExactLookahead:
    """The frame's own tokens and the drafter's lookahead (vLLM)."""

    exact = True

    def slots(self, request: Request, computed: int, num_new_tokens: int, lookahead: int, num_drafts: int) -> int:
        """computed + num_new_tokens + lookahead."""
        return computed + num_new_tokens + lookahead


class WorstCase:
    """Prompt, all output that may come and a last frame's drafts, from admission on; so nothing is ever preempted.

    Engines call it max utilization's opposite: TensorRT-LLM's GUARANTEED_NO_EVICT.
    """

    exact = False

    def slots(self, request: Request, computed: int, num_new_tokens: int, lookahead: int, num_drafts: int) -> int:
        """num_prompt_tokens + max_tokens + two frames' drafts + lookahead."""
        whole = request.num_prompt_tokens + request.max_tokens + 2 * (num_drafts + 1) + lookahead
        return max(whole, computed + num_new_tokens + lookahead)


class TwoFrames:
    """For a decoding request committed + 2 A, A the most tokens that one frame may add (SGLang 0.5.23).

    A = max(steps * topk, draft tokens), which for a chain of K drafts is K + 1: a chain's draft tokens hold the last
    confirmed one. Rounding up to the page is the block table's.
    """

    exact = False

    def slots(self, request: Request, computed: int, num_new_tokens: int, lookahead: int, num_drafts: int) -> int:
        """computed - in flight + 2 (K + 1), but at least the frame."""
        end = computed + num_new_tokens
        if end < request.num_tokens or num_drafts == 0:
            return end
        return max(end, computed - request.num_in_flight_tokens + 2 * (num_drafts + 1))


class MaxDraft:
    """For a decoding request 1 + the configured K, however many drafts the frame has (TensorRT-LLM)."""

    exact = False

    def slots(self, request: Request, computed: int, num_new_tokens: int, lookahead: int, num_drafts: int) -> int:
        """computed + 1 + K, but at least the frame."""
        end = computed + num_new_tokens
        if end < request.num_tokens:
            return end
        return max(end, computed + 1 + num_drafts)
