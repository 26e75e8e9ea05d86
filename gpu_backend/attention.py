"""Attention over block tables with several query tokens a request, for grouped-query heads.

Knows tensors: queries, a layer of the paged cache, block tables, lengths. Must not know requests, models or schedulers.
`reference_attention` is plain torch and right on CPU and CUDA in float64, float32 and bfloat16; `paged_attention` takes
the fast path where there is one.

The queries of a request are its last `query_len` tokens: with seq_len tokens in the cache (the queries' own included),
query row j stands at position seq_len - query_len + j and sees positions 0 to its own. That is a prefill chunk, a
decode token and the K + 1 rows of a verification in one rule: the drafts are causal among themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_backend.paged_cache import block_table


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Which rows belong to which request, and where its KV lies. All tensors on one device."""

    block_table: Tensor
    """[requests, max_blocks], int32."""
    query_start: Tensor
    """[requests + 1], int32: rows query_start[i] to query_start[i + 1] - 1 belong to request i."""
    seq_lens: Tensor
    """[requests], int32: tokens in the cache, those of the queries included."""
    max_query_len: int
    max_seq_len: int

    @classmethod
    def of(
        cls,
        tables: Sequence[Sequence[int]],
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> RaggedBatch:
        """From lists, one entry a request.

        Raises:
            ValueError: lists of different lengths, no query rows, or more of them than tokens in the cache.
        """
        if not len(tables) == len(query_lens) == len(seq_lens) > 0:
            raise ValueError(f"{len(tables)} tables, {len(query_lens)} query lengths and {len(seq_lens)} lengths")
        for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
            if not 1 <= query_len <= seq_len:
                raise ValueError(f"query_len {query_len} with seq_len {seq_len}; 1 <= query_len <= seq_len")
        starts = [0]
        for query_len in query_lens:
            starts.append(starts[-1] + query_len)
        return cls(
            block_table(tables, device),
            torch.tensor(starts, dtype=torch.int32, device=device),
            torch.tensor(list(seq_lens), dtype=torch.int32, device=device),
            max(query_lens),
            max(seq_lens),
        )


def reference_attention(query: Tensor, layer: Tensor, batch: RaggedBatch, scale: float) -> Tensor:
    """Softmax attention, every step spelled out; gathers all contexts, padded to the longest, so it needs room.

    Args:
        query: [tokens, num_heads, head_dim].
        layer: [2, num_blocks, block_size, num_kv_heads, head_dim]; num_kv_heads divides num_heads.
        batch: which rows and slots belong together.
        scale: what scores are multiplied with, as a rule head_dim ** -0.5.

    Returns:
        [tokens, num_heads, head_dim] in the query's dtype. Scores, softmax and sums are in float64 for float64, else in
        float32. Slots that no row may see have no influence, whatever they hold, NaN included.
    """
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads = layer.shape[2], layer.shape[3]
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads {num_kv_heads} does not divide num_heads {num_heads}")
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    starts = batch.query_start.to(torch.int64)
    query_lens = starts[1:] - starts[:-1]
    seq_lens = batch.seq_lens.to(torch.int64)
    num_requests = len(seq_lens)

    # Rows to [requests, longest query].
    requests = torch.repeat_interleave(torch.arange(num_requests, device=query.device), query_lens)
    row = torch.arange(num_tokens, device=query.device) - starts[requests]
    padded = query.new_zeros(num_requests, batch.max_query_len, num_heads, head_dim)
    padded[requests, row] = query

    blocks = -(-batch.max_seq_len // block_size)
    table = batch.block_table[:, :blocks].to(torch.int64)
    keys, values = (half[table].flatten(1, 2)[:, : batch.max_seq_len].to(work) for half in layer)
    positions = torch.arange(batch.max_seq_len, device=query.device)
    written = positions < seq_lens[:, None]
    keys = keys.masked_fill(~written[:, :, None, None], 0)
    values = values.masked_fill(~written[:, :, None, None], 0)

    group = num_heads // num_kv_heads
    grouped = padded.to(work).unflatten(2, (num_kv_heads, group))
    scores = torch.einsum("rqhgd,rnhd->rhgqn", grouped, keys) * scale
    own = (seq_lens - query_lens)[:, None] + torch.arange(batch.max_query_len, device=query.device)
    visible = positions[None, None, :] <= own[:, :, None]
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    mixed = torch.einsum("rhgqn,rnhd->rqhgd", weights, values).flatten(2, 3)
    return mixed[requests, row].to(query.dtype)


def fast_path_missing(query: Tensor) -> str | None:
    """Why there is no fast path for this query, in words; None where there is one."""
    if query.device.type != "cuda":
        return f"the fast path needs CUDA; the query lies on {query.device.type}"
    if query.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the fast path has no {query.dtype}; it has bfloat16, float16 and float32"
    try:
        import gpu_backend.triton_attention  # noqa: F401
    except ImportError as error:
        return f"the fast path needs Triton ({error})"
    return None


def paged_attention(query: Tensor, layer: Tensor, batch: RaggedBatch, scale: float) -> Tensor:
    """`reference_attention`, by the fast path where there is one."""
    if fast_path_missing(query) is not None:
        return reference_attention(query, layer, batch, scale)
    from gpu_backend.triton_attention import triton_attention

    return triton_attention(query, layer, batch, scale)
