"""The paged cache's layout, and attention over block tables against softmax worked out by hand."""

from __future__ import annotations

import math
import random

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `gpu`: torch is not installed")

from gpu_backend.attention import RaggedBatch, fast_path_missing, paged_attention, reference_attention  # noqa: E402
from gpu_backend.paged_cache import PagedCache, block_table, slot_mapping  # noqa: E402
from tests.triton_stand_in import standing_in  # noqa: E402

torch.set_num_threads(1)


def test_the_layout_is_that_of_flash_attention() -> None:
    """Source: vLLM 0.32, `FlashAttentionBackend.get_kv_cache_shape`: (2, blocks, block size, KV heads, head size)."""
    cache = PagedCache(num_layers=3, num_blocks=5, block_size=4, num_kv_heads=2, head_dim=8)
    assert [layer.shape for layer in cache.layers] == [(2, 5, 4, 2, 8)] * 3
    # A token's heads lie together, then tokens, then blocks, then all keys before all values.
    assert cache.layers[0].stride() == (5 * 4 * 2 * 8, 4 * 2 * 8, 2 * 8, 8, 1)


def test_slots_by_hand() -> None:
    """Block size 4, tables 7 2 and 5: position 6 of the first request is slot 2 of block 2, so 10."""
    table = block_table([[7, 2], [5]])
    assert table.tolist() == [[7, 2], [5, 0]]
    requests, positions = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 3, 6, 1])
    assert slot_mapping(table, requests, positions, 4).tolist() == [28, 31, 10, 21]


def test_a_position_behind_the_table_is_refused() -> None:
    with pytest.raises(IndexError):
        slot_mapping(block_table([[7, 2]]), torch.tensor([0]), torch.tensor([8]), 4)


def test_writes_go_to_their_slots_and_nowhere_else() -> None:
    cache = PagedCache(2, 3, 2, 1, 1, fill=math.nan)
    ones = torch.ones(2, 1, 1, dtype=torch.float64)
    cache.write(1, ones, ones * 2, torch.tensor([3, 4]))
    assert cache.layers[0].isnan().all()
    keys, values = cache.layers[1].flatten(1)
    assert [None if math.isnan(x) else x for x in keys.tolist()] == [None, None, None, 1, 1, None]
    assert [None if math.isnan(x) else x for x in values.tolist()] == [None, None, None, 2, 2, None]


def test_two_drafts_by_hand() -> None:
    """One head of one dimension, keys 1, 2, 3 and values 10, 20, 30, two query rows at positions 1 and 2, both 1.

    The first sees weights e, e^2; the second e, e^2, e^3: the draft is causal. Blocks lie in the order 2, 1.
    """
    cache = PagedCache(1, 3, 2, 1, 1, fill=math.nan)
    slots = slot_mapping(block_table([[2, 1]]), torch.tensor([0, 0, 0]), torch.tensor([0, 1, 2]), 2)
    cache.write(
        0,
        torch.tensor([1.0, 2.0, 3.0]).double().view(3, 1, 1),
        torch.tensor([10.0, 20.0, 30.0]).double().view(3, 1, 1),
        slots,
    )
    query = torch.ones(2, 1, 1, dtype=torch.float64)
    mixed = reference_attention(query, cache.layers[0], RaggedBatch.of([[2, 1]], [2], [3]), 1.0)
    e = math.e
    first = (10 * e + 20 * e**2) / (e + e**2)
    second = (10 * e + 20 * e**2 + 30 * e**3) / (e + e**2 + e**3)
    assert mixed.flatten().tolist() == pytest.approx([first, second], rel=1e-14)


def _ragged(seed: int, dtype: torch.dtype, group: int, kv_heads: int, head_dim: int):
    """A random batch: prefill chunks, decode rows, verifications; scattered blocks; NaN in what nobody wrote."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    block_size = draw.choice((1, 2, 3, 4, 8, 16))
    query_lens, seq_lens, tables = [], [], []
    for _ in range(draw.randint(1, 5)):
        query_lens.append(draw.choice((1, 1, 2, 4, 6, 9)))
        seq_lens.append(query_lens[-1] + draw.randint(0, 90))
    need = sum(-(-seq_len // block_size) + 1 for seq_len in seq_lens)
    ids = list(range(1, need + 1))
    draw.shuffle(ids)
    cache = PagedCache(1, need + 1, block_size, kv_heads, head_dim, dtype, fill=math.nan)
    contexts = []
    for seq_len in seq_lens:
        blocks = [ids.pop() for _ in range(-(-seq_len // block_size) + draw.randint(0, 1))]
        tables.append(blocks)
        keys, values = torch.randn(2, seq_len, kv_heads, head_dim).to(dtype)
        at = torch.arange(seq_len)
        cache.write(0, keys, values, slot_mapping(block_table([blocks]), torch.zeros_like(at), at, block_size))
        contexts.append((keys, values))
    query = torch.randn(sum(query_lens), kv_heads * group, head_dim).to(dtype)
    return query, cache.layers[0], RaggedBatch.of(tables, query_lens, seq_lens), contexts, query_lens


def _by_hand(query, contexts, query_lens, scale):
    """Every row and head on its own: scores, exponentials, their sum, the weighted values; in float64."""
    rows = []
    row = 0
    for (keys, values), query_len in zip(contexts, query_lens, strict=True):
        for number in range(query_len):
            seen = len(keys) - query_len + number + 1
            heads = []
            for head in range(query.shape[1]):
                kv_head = head * keys.shape[1] // query.shape[1]
                scores = (keys[:seen, kv_head].double() * query[row, head].double()).sum(-1) * scale
                weights = torch.exp(scores - scores.max())
                heads.append((weights[:, None] * values[:seen, kv_head].double()).sum(0) / weights.sum())
            rows.append(torch.stack(heads))
            row += 1
    return torch.stack(rows)


TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_ragged_batches_against_softmax_by_hand(dtype: torch.dtype) -> None:
    for seed in range(8):
        query, layer, batch, contexts, query_lens = _ragged(seed, dtype, 1 + seed % 3, 1 + seed % 2, 8)
        mixed = reference_attention(query, layer, batch, 0.35)
        assert mixed.dtype == dtype
        expected = _by_hand(query, contexts, query_lens, 0.35)
        torch.testing.assert_close(mixed.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_what_lies_behind_a_context_has_no_influence() -> None:
    """The slots behind a context hold NaN in these batches; nothing of it may come out."""
    query, layer, batch, _, _ = _ragged(3, torch.float64, 2, 2, 8)
    assert layer.isnan().any()
    assert not reference_attention(query, layer, batch, 0.35).isnan().any()


@pytest.mark.parametrize(("tables", "query_lens", "seq_lens"), [([[1]], [2], [1]), ([[1]], [0], [1]), ([], [], [])])
def test_batches_that_make_no_sense_are_refused(tables, query_lens, seq_lens) -> None:
    with pytest.raises(ValueError, match=r"query_len|tables"):
        RaggedBatch.of(tables, query_lens, seq_lens)


def test_heads_that_do_not_divide_are_refused() -> None:
    cache = PagedCache(1, 2, 2, 2, 4)
    with pytest.raises(ValueError, match="num_kv_heads 2 does not divide num_heads 3"):
        reference_attention(torch.zeros(1, 3, 4).double(), cache.layers[0], RaggedBatch.of([[1]], [1], [1]), 1.0)


def test_on_the_cpu_there_is_no_fast_path_and_the_reference_answers() -> None:
    query, layer, batch, _, _ = _ragged(5, torch.float64, 2, 2, 8)
    assert "needs CUDA" in str(fast_path_missing(query))
    assert torch.equal(paged_attention(query, layer, batch, 0.35), reference_attention(query, layer, batch, 0.35))


@pytest.mark.parametrize("num_splits", [None, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_fast_paths_kernels_by_a_stand_in_for_triton(dtype: torch.dtype, num_splits: int | None) -> None:
    """Indices, masks and sums of the kernels, on the CPU: this does not show that they compile on a GPU."""
    with standing_in():
        from gpu_backend.triton_attention import triton_attention

        for seed in range(6):
            group, kv_heads, head_dim = (1, 3, 4)[seed % 3], 1 + seed % 2, (8, 16, 24)[seed % 3]
            query, layer, batch, contexts, query_lens = _ragged(seed, dtype, group, kv_heads, head_dim)
            mixed = triton_attention(query, layer, batch, 0.35, num_splits=num_splits)
            expected = _by_hand(query, contexts, query_lens, 0.35)
            torch.testing.assert_close(mixed.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_the_fast_paths_kernels_in_long_prefill_chunks_by_a_stand_in_for_triton() -> None:
    """40 query tokens with 4 heads a group: more than the 64 rows of one program, so several of them a request."""
    torch.manual_seed(0)
    cache = PagedCache(1, 40, 4, 2, 16, torch.float32, fill=math.nan)
    keys, values = torch.randn(2, 70, 2, 16)
    table = list(range(39, 21, -1))
    at = torch.arange(70)
    cache.write(0, keys, values, slot_mapping(block_table([table]), torch.zeros_like(at), at, 4))
    query = torch.randn(40, 8, 16)
    batch = RaggedBatch.of([table], [40], [70])
    expected = _by_hand(query, [(keys, values)], [40], 0.25)
    with standing_in():
        from gpu_backend.triton_attention import triton_attention

        for num_splits in (1, 2):
            mixed = triton_attention(query, cache.layers[0], batch, 0.25, num_splits=num_splits)
            torch.testing.assert_close(mixed.double(), expected, rtol=2e-5, atol=2e-5)
