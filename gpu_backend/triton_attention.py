"""The fast path on CUDA: attention over block tables in Triton, with split KV for small batches.

Importing it needs Triton (it comes with torch's CUDA builds for Linux). Knows what `gpu_backend.attention` knows and
matches `reference_attention` there to the tolerance of the type. One program takes the query rows of one request that
share a KV head (all rows of a verification at once, a stretch of a prefill chunk), and walks over one stretch of the
context; with more than one stretch a second kernel combines them. Sums are in float32.

Whether it matches is checked by `python -m gpu_backend.gpu_check` on a GPU. The tests run the kernels on the CPU with a
stand-in for the language, which shows the indexing to be right, but neither that they compile nor how fast they are.
"""

# No `from __future__ import annotations`: Triton reads the annotations.

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_backend.attention import RaggedBatch

_LOG2_E = 1.4426950408889634
_BLOCK_N = 64
"""Tokens of the context in one round."""
_MOST_ROWS = 64
"""Most query rows (query tokens times the heads of a group) of one program, where one token has no more."""
_MOST_SPLITS = 32


@triton.jit
def _attend(
    query,
    kv,
    table,
    query_start,
    seq_lens,
    out,
    partial,
    partial_lse,
    scale,
    num_tokens,
    num_heads,
    query_blocks,
    num_splits,
    stride_table,
    stride_half,
    stride_block,
    stride_slot,
    stride_kv_head,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
):
    request = tl.program_id(0) // query_blocks
    first_token = (tl.program_id(0) % query_blocks) * TOKENS
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    first_row = tl.load(query_start + request)
    query_len = tl.load(query_start + request + 1) - first_row
    if first_token >= query_len:
        return
    seq_len = tl.load(seq_lens + request)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = first_token + m // GROUP
    live = (m < TOKENS * GROUP) & (token < query_len)
    in_head = d < HEAD_DIM
    row = ((first_row + token).to(tl.int64) * num_heads + kv_head * GROUP + m % GROUP) * HEAD_DIM
    q = tl.load(query + row[:, None] + d[None, :], mask=live[:, None] & in_head[None, :], other=0.0)
    own = seq_len - query_len + token

    # Nothing behind the block's last query row is visible to any of its rows.
    end = tl.minimum(seq_len - query_len + first_token + TOKENS, seq_len)
    stretch = tl.cdiv(tl.cdiv(end, BLOCK_N), num_splits) * BLOCK_N
    low = split * stretch
    high = tl.minimum(low + stretch, end)

    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(low, high, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = n < high
        block = tl.load(table + request * stride_table + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slot = block * stride_block + (n % BLOCK_SIZE) * stride_slot + kv_head * stride_kv_head
        k = tl.load(kv + slot[None, :] + d[:, None], mask=inside[None, :] & in_head[:, None], other=0.0)
        score = tl.dot(q, k, input_precision="ieee") * scale
        score = tl.where(inside[None, :] & (n[None, :] <= own[:, None]), score, float("-inf"))
        new_most = tl.maximum(most, tl.max(score, 1))
        # A row that has seen nothing yet stays at -inf; its difference to itself must not become NaN.
        base = tl.where(new_most == float("-inf"), 0.0, new_most)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(weight, 1)
        v = tl.load(kv + stride_half + slot[:, None] + d[None, :], mask=inside[:, None] & in_head[None, :], other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        most = new_most

    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    store = live[:, None] & in_head[None, :]
    if SPLIT:
        at = split.to(tl.int64) * num_tokens * num_heads
        tl.store(partial + at * HEAD_DIM + row[:, None] + d[None, :], mixed, mask=store)
        lse = tl.where(total == 0.0, float("-inf"), most + tl.log2(tl.where(total == 0.0, 1.0, total)))
        tl.store(partial_lse + at + row // HEAD_DIM, lse, mask=live)
    else:
        tl.store(out + row[:, None] + d[None, :], mixed, mask=store)


@triton.jit
def _combine(
    partial,
    partial_lse,
    out,
    num_rows,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    there = s < num_splits
    in_head = d < HEAD_DIM
    lse = tl.load(partial_lse + s * num_rows + row, mask=there, other=float("-inf"))
    weight = tl.exp2(lse - tl.max(lse, 0))
    weight = weight / tl.sum(weight, 0)
    at = (s[:, None] * num_rows + row) * HEAD_DIM + d[None, :]
    part = tl.load(partial + at, mask=there[:, None] & in_head[None, :], other=0.0)
    tl.store(out + row * HEAD_DIM + d, tl.sum(part * weight[:, None], 0), mask=in_head)


def _num_splits(programs: int, max_seq_len: int, device: torch.device) -> int:
    """Stretches of the context: enough to give every multiprocessor two programs, none shorter than four rounds."""
    if device.type != "cuda":
        return 1
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(wanted // programs, max_seq_len // (4 * _BLOCK_N), _MOST_SPLITS))


def triton_attention(
    query: Tensor, layer: Tensor, batch: RaggedBatch, scale: float, *, num_splits: int | None = None
) -> Tensor:
    """As `reference_attention`, for bfloat16, float16 and float32 on CUDA.

    `num_splits`: stretches that the context is cut into; None leaves it to the number of programs.

    Raises:
        ValueError: the query is not contiguous, or head_dim is not the last and contiguous dimension of the cache.
    """
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads = layer.shape[2], layer.shape[3]
    if not query.is_contiguous() or layer.stride(4) != 1:
        raise ValueError(f"query strides {query.stride()} and cache strides {layer.stride()}: head_dim must lie packed")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads {num_kv_heads} does not divide num_heads {num_heads}")
    group = num_heads // num_kv_heads
    rows = max(16, group, min(batch.max_query_len * group, _MOST_ROWS))
    block_m = triton.next_power_of_2(rows)
    tokens = block_m // group
    query_blocks = triton.cdiv(batch.max_query_len, tokens)
    num_requests = batch.seq_lens.shape[0]
    if num_splits is None:
        num_splits = _num_splits(num_requests * query_blocks * num_kv_heads, batch.max_seq_len, query.device)
    out = torch.empty_like(query)
    partial, lse = out, out
    if num_splits > 1:
        partial = torch.empty((num_splits, num_tokens, num_heads, head_dim), dtype=torch.float32, device=query.device)
        lse = torch.empty((num_splits, num_tokens, num_heads), dtype=torch.float32, device=query.device)
    block_d = max(16, triton.next_power_of_2(head_dim))
    _attend[(num_requests * query_blocks, num_kv_heads, num_splits)](
        query,
        layer,
        batch.block_table,
        batch.query_start,
        batch.seq_lens,
        out,
        partial,
        lse,
        scale * _LOG2_E,
        num_tokens,
        num_heads,
        query_blocks,
        num_splits,
        batch.block_table.stride(0),
        layer.stride(0),
        layer.stride(1),
        layer.stride(2),
        layer.stride(3),
        GROUP=group,
        TOKENS=tokens,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        BLOCK_N=_BLOCK_N,
        SPLIT=num_splits > 1,
        num_warps=4 if block_m <= 32 else 8,
        num_stages=1 if query.dtype == torch.float32 else 2,  # Two of float32 do not fit a small card's shared memory.
    )
    if num_splits > 1:
        num_rows = num_tokens * num_heads
        _combine[(num_rows,)](
            partial,
            lse,
            out,
            num_rows,
            num_splits,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            BLOCK_S=triton.next_power_of_2(num_splits),
            num_warps=1,
        )
    return out
