"""Axis: whether an admitted request that has one token to compute is padded to 1 + K, and when.

A batch in which every frame has 1 + K tokens runs as one CUDA graph; so a request that needs a single token is given K
placeholder drafts along with it. Asked only where K is fixed and no running frame of the step is a prefill chunk.
"""

from __future__ import annotations


def never(hit: int, num_speculative_tokens: int, budget: int, max_model_len: int, running_frames: bool) -> int:
    """No padding (vLLM before 0.25)."""
    return 1


def beside_running(hit: int, num_speculative_tokens: int, budget: int, max_model_len: int, running_frames: bool) -> int:
    """Beside at least one running frame; where it does not fit, admission stops (vLLM 0.26 and 0.28)."""
    if not running_frames:
        return 1
    padded = 1 + num_speculative_tokens
    return 0 if padded > budget or hit + padded > max_model_len else padded


def beside_running_or_hit(
    hit: int, num_speculative_tokens: int, budget: int, max_model_len: int, running_frames: bool
) -> int:
    """Beside a running frame or after a hit; not padded where the model's length lacks room, and admission stops where
    the budget does (vLLM 0.30 and 0.32)."""
    if not running_frames and hit == 0:
        return 1
    padded = 1 + num_speculative_tokens
    if hit + padded + 1 > max_model_len:
        return 1
    return 0 if padded > budget else padded
