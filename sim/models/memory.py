"""From a card's memory to a number of KV blocks, and the batch limits vLLM chooses for a card.

Knows bytes. Must not know time, policies or what the blocks are used for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from sim.models.hardware import Hardware
from sim.models.shapes import DrafterShape, ModelShape, kv_dtype_bytes

__all__ = [
    "GPU_MEMORY_UTILIZATION",
    "BatchLimits",
    "MemoryPlan",
    "NoRoomForKV",
    "batch_limits",
    "drafter_outside_bytes",
    "plan_memory",
    "reserve_bytes",
]

GPU_MEMORY_UTILIZATION: Final = 0.92
"""vLLM 0.32's default (config/cache.py); it was 0.9 for long."""

_GIB: Final = 1 << 30

_FIXED_RESERVE_BYTES: Final = 600 * (1 << 20)
"""CUDA context, communication buffers and captured graphs."""
_ROW_HIDDEN_COPIES: Final = 4
"""Copies of the hidden state that are alive beside the widest MLP activation."""
_LOGITS_COPIES: Final = 3
"""fp32 logits of every request, with their probabilities and their sorted copy, at the sampler's profile run."""


class BatchLimits(NamedTuple):
    """`max_num_seqs` requests and `max_num_batched_tokens` tokens a step."""

    max_num_seqs: int
    max_num_batched_tokens: int


def batch_limits(
    card: Hardware,
    max_model_len: int,
    *,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
) -> BatchLimits:
    """The limits that vLLM 0.32's API server takes on a card, where the user gives none (engine/arg_utils.py).

    By the memory CUDA reports: from 160 GiB on 1,024 requests and 16,384 tokens; from 70 GiB on, but for an A100,
    1,024 and 8,192; else 256 and 2,048. Tokens that were not given are then at most `max_num_seqs * max_model_len`,
    and requests that were not given at most the tokens.
    """
    if card.memory_bytes >= 160 * _GIB:
        seqs, tokens = 1024, 16_384
    elif card.memory_bytes >= 70 * _GIB and "a100" not in card.name.lower():
        seqs, tokens = 1024, 8192
    else:
        seqs, tokens = 256, 2048
    if max_num_seqs is not None:
        seqs = max_num_seqs
    tokens = min(tokens, seqs * max_model_len) if max_num_batched_tokens is None else max_num_batched_tokens
    if max_num_seqs is None:
        seqs = min(seqs, tokens)
    return BatchLimits(seqs, tokens)


class NoRoomForKV(ValueError):
    """Not one KV block fits beside the weights; the text has the numbers."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the memory of one rank goes, in bytes, and the blocks that are left.

    `usable_bytes` = floor(memory * gpu_memory_utilization). `block_bytes` holds the target's and the drafter's KV of
    one block, `drafter_block_bytes` of them the drafter's.
    """

    usable_bytes: int
    weight_bytes: int
    drafter_weight_bytes: int
    reserve_bytes: int
    kv_bytes: int
    block_bytes: int
    drafter_block_bytes: int
    num_gpu_blocks: int


def reserve_bytes(shape: ModelShape, tp: int, limits: BatchLimits) -> int:
    """What a rank keeps for activations, logits, graphs and the CUDA context: an estimate.

    vLLM measures it in a profile run; nothing public tabulates it. 600 MiB, plus a row of the widest MLP activation
    and four hidden states (16 bits) for every token of a step, plus three fp32 rows of logits for every request.
    Against the one real run with all numbers public (Llama-3.1-8B on an RTX 4090, vLLM 0.19: 1.24 GB) it is 2 percent
    low.
    """
    row = 2 * (2 * shape.intermediate_size // tp + _ROW_HIDDEN_COPIES * shape.hidden_size)
    logits = 4 * _LOGITS_COPIES * shape.vocab_size
    return _FIXED_RESERVE_BYTES + limits.max_num_batched_tokens * row + limits.max_num_seqs * logits


def plan_memory(
    card: Hardware,
    shape: ModelShape,
    *,
    limits: BatchLimits,
    tp: int = 1,
    dtype: str = "bfloat16",
    kv_cache_dtype: str = "auto",
    block_size: int = 16,
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION,
    drafter: DrafterShape | None = None,
    drafter_kv_in_blocks: bool = True,
    reserve: int | None = None,
) -> MemoryPlan:
    """The number of KV blocks of a rank: what is left after weights and reserve, over the bytes of a block.

    `block_size` in tokens; `reserve` in bytes, by default `reserve_bytes`. A block holds the drafter's KV too,
    unless `drafter_kv_in_blocks` is False. Raises
    NoRoomForKV where not one block fits, ShapeError for an unknown dtype or a `tp` that does not divide the model, and
    ValueError for a utilization outside (0, 1].
    """
    if not 0 < gpu_memory_utilization <= 1:
        raise ValueError(f"gpu_memory_utilization: must be above 0 and at most 1, got {gpu_memory_utilization!r}")
    element = kv_dtype_bytes(kv_cache_dtype, dtype)
    usable = math.floor(card.memory_bytes * gpu_memory_utilization)
    weights = shape.weight_bytes(dtype, tp)
    drafter_weights = 0 if drafter is None else drafter.weight_bytes(tp)
    kept = reserve_bytes(shape, tp, limits) if reserve is None else reserve
    drafter_block = (
        0 if drafter is None or not drafter_kv_in_blocks else block_size * drafter.kv_bytes_per_token(element, tp)
    )
    block = block_size * shape.kv_bytes_per_token(element, tp) + drafter_block
    left = usable - weights - drafter_weights - kept
    if left < block:
        raise NoRoomForKV(
            f"{shape.name} on {card.name} (tensor_parallel_size {tp}): no room for one KV block of {block:,} bytes: "
            f"{usable:,} bytes usable (gpu_memory_utilization {gpu_memory_utilization} of {card.memory_bytes:,}) "
            f"- weights {weights:,} - drafter {drafter_weights:,} - reserve {kept:,} = {left:,}"
        )
    return MemoryPlan(
        usable_bytes=usable,
        weight_bytes=weights,
        drafter_weight_bytes=drafter_weights,
        reserve_bytes=kept,
        kv_bytes=left,
        block_bytes=block,
        drafter_block_bytes=drafter_block,
        num_gpu_blocks=left // block,
    )


_HIDDEN_BYTES: Final = 2
"""Hidden states are kept in 16 bits."""


def drafter_outside_bytes(
    target: ModelShape,
    drafter: DrafterShape | None,
    num_speculative_tokens: int,
    *,
    kv_outside: bool,
    kv_element_bytes: int = 2,
    tp: int = 1,
) -> int:
    """Bytes that a drafter keeps of one request from step to step outside any pool, on one rank.

    The hidden states that it reads, for the K + 1 rows of a frame: of three of the target's layers for EAGLE-3, of its
    last for EAGLE and MTP, which is what their projection takes in besides the token; every rank has them whole. With
    `kv_outside` the drafter has no KV in blocks and keeps the keys and values of its K drafts beside them (the
    article's extra keys and values), in its own shape. N-grams and a model of its own keep neither hidden states.

    EAGLE-3 on Llama-3.1-8B, K = 3: 4 rows * 3 layers * 4,096 * 2 bytes = 98,304.
    """
    if drafter is None or drafter.layers is None:
        return 0
    layers = 3 if drafter.method == "eagle3" else 0 if drafter.method == "draft_model" else 1
    hidden = (num_speculative_tokens + 1) * layers * target.hidden_size * _HIDDEN_BYTES
    beside = num_speculative_tokens * drafter.kv_bytes_per_token(kv_element_bytes, tp) if kv_outside else 0
    return hidden + beside
