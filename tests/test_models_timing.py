"""Step costs: forms by hand, vLLM's captured sizes, an independent regression, and measured kernels."""

import csv
import itertools
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from sim.calibration_schema import load_calibration
from sim.models.calibration import Calibration, DecodeAttention, LinearLayers, Overhead, PrefillAttention
from sim.models.hardware import hardware
from sim.models.shapes import drafter_shape, load_shape
from sim.models.timing import NO_COST, StepCost, StepShape, TimingModel, TimingParams, capture_sizes

LLAMA = load_shape("llama-3.1-8b")
EAGER: tuple[int, ...] = ()


def own(card: str) -> Calibration:
    return load_calibration(hardware(card).calibration)


def published() -> Calibration:
    """The H100 by the published forms, without a grid (shared/timing.md): what a hand can follow."""
    return replace(
        own("h100"),
        linear={"bfloat16": LinearLayers(0.815, 0.875, 3.8, 3.1)},
        decode={"bfloat16": DecodeAttention(0.861, 7.0)},
        prefill={"bfloat16": PrefillAttention(0.694, 0.32, 13.0)},
        overhead=Overhead(6.5, 950.0, 16.0),
    )


def decode(batch: int, context: int, rows: int = 1, drafts: int = 0) -> StepShape:
    step = StepShape()
    for _ in range(batch):
        step.add_decode(rows, context)
    if drafts:
        step.num_draft_reqs, step.num_spec_tokens = batch, drafts
    return step


def prefill(rows: int, history: int = 0) -> StepShape:
    step = StepShape()
    step.add_prefill(rows, history, 1)
    return step


# Sums


def test_sums_over_frames_by_hand() -> None:
    step = StepShape()
    step.add_decode(4, 104)
    step.add_decode(1, 50)
    step.add_prefill(3, 10, 0)
    assert (step.num_reqs, step.num_tokens, step.num_sampled_tokens) == (3, 8, 5)
    assert (step.decode_reqs, step.decode_tokens, step.decode_kv_tokens, step.max_decode_kv_tokens) == (2, 5, 154, 104)
    # Rows 11, 12 and 13 of the request see as many keys: 36 pairs.
    assert (step.num_prefills, step.prefill_tokens, step.prefill_kv_tokens, step.prefill_qk_pairs) == (1, 3, 13, 36)
    step.clear()
    assert repr(step) == repr(StepShape())


def test_parts_are_disjoint_integers() -> None:
    cost = TimingModel(LLAMA, hardware("h100"), own("h100")).step_cost(decode(5, 1000, 4, 3))
    assert all(isinstance(part, int) and part >= 0 for part in cost)
    assert cost.total == sum(cost)
    assert StepCost(1, 2, 3, 4, 5, 6, 7).total == 28
    assert TimingModel(LLAMA, hardware("h100"), own("h100")).step_cost(StepShape()) is NO_COST


# Forms


def test_one_row_is_the_weights_over_the_bandwidth() -> None:
    # Llama-3.1-8B, H100: all weights but the embedding and the norms, 16 bits, at 0.875 * 3.35 TB/s; 3.8 us for each
    # of 4 * 32 + 1 layers. Arithmetic on one row is nothing beside it.
    weights = 8_030_261_248 - 128_256 * 4096 - 65 * 4096
    expected = 2 * weights / (0.875 * 3.35e12) + 129 * 3.8e-6
    cost = TimingModel(LLAMA, hardware("h100"), published(), captured=EAGER).step_cost(decode(1, 1))
    assert cost.linear == pytest.approx(expected * 1e9, rel=1e-6)


def model_linear_of_one_row() -> int:
    return TimingModel(LLAMA, hardware("h100"), published()).step_cost(decode(1, 1)).linear


def test_many_rows_are_arithmetic() -> None:
    # 8,192 rows: 2 operations a weight at 0.815 * 989.4 TFLOP/s (the head on one row); memory adds next to nothing.
    matrices = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    arithmetic = 2 * 8192 * matrices / (0.815 * 989.4e12)
    cost = TimingModel(LLAMA, hardware("h100"), published()).step_cost(prefill(8192))
    assert cost.linear + cost.arithmetic == pytest.approx(arithmetic * 1e9, rel=0.01)
    # What one row takes, reading the weights, is told apart.
    assert cost.linear == model_linear_of_one_row()


def test_decode_attention_reads_kv_once_a_request() -> None:
    # 131,072 bytes a token at 0.861 * 3.35 TB/s, 7 us a layer; a verification of 6 rows costs the same (not validated).
    model = TimingModel(LLAMA, hardware("h100"), published())
    expected = 32 * 7e-6 + 16 * 2000 * 131_072 / (0.861 * 3.35e12)
    assert model.step_cost(decode(16, 2000)).attention_decode == pytest.approx(expected * 1e9, rel=1e-6)
    assert model.step_cost(decode(16, 2000, rows=6)).attention_decode == pytest.approx(expected * 1e9, rel=1e-6)
    assert any("not validated" in note for note in model.notes)
    fp8 = (
        TimingModel(LLAMA, hardware("h100"), published(), kv_cache_dtype="fp8")
        .step_cost(decode(16, 2000))
        .attention_decode
    )
    assert fp8 == pytest.approx((32 * 7e-6 + 0.68 * (expected - 32 * 7e-6)) * 1e9, rel=1e-6)


def test_flash_attention_2_does_not_split_a_verification() -> None:
    # Published for vLLM's FlashAttention 2: a verification walks each context at 21 to 29 us per 1,000 tokens and layer
    # while all query heads fit the card; at a batch of 1 and 16k context one costs 369 us, one token 62 us.
    model = TimingModel(LLAMA, hardware("a100"), own("a100"))
    one = model.step_cost(decode(1, 16_000)).attention_decode
    verified = model.step_cost(decode(1, 16_000, rows=4)).attention_decode
    assert 21 * 16 <= verified / 32e3 <= 29 * 16
    assert verified == pytest.approx(369 * 32e3, rel=0.15)
    assert 3 < verified / one < 10
    # Contexts side by side are free until the heads fill the card: 32 of them, 108 * 1.3 slots.
    assert model.step_cost(decode(4, 16_000, rows=4)).attention_decode == verified
    fixed = 32 * own("a100").decode["bfloat16"].t0_us * 1e3
    many = model.step_cost(decode(16, 16_000, rows=4)).attention_decode
    assert many - fixed == pytest.approx((verified - fixed) * 16 * 32 / 108 / 1.3, rel=1e-6)
    # The same card with the other kernels.
    for kernel in ("fa3", "flashinfer"):
        split = TimingModel(LLAMA, hardware("a100"), own("a100"), params=TimingParams(attention_kernel=kernel))
        assert split.step_cost(decode(1, 16_000, rows=4)).attention_decode == one


def test_prefill_attention_sums_arithmetic_and_memory() -> None:
    # 8,192 tokens, 32 layers and heads of 128: 4 operations a pair, head and element at 0.694 of the peak; 4,096 bytes
    # of KV a token and layer, queries and outputs 8,192 each, at 0.32 of the bandwidth; 13 us a layer.
    pairs = 8192 * 8193 // 2
    arithmetic = 4 * pairs * 32 * 128 / (0.694 * 989.4e12)
    memory = 8192 * (4096 + 2 * 8192) / (0.32 * 3.35e12)
    got = TimingModel(LLAMA, hardware("h100"), published()).step_cost(prefill(8192)).attention_prefill
    assert got == pytest.approx(32 * (arithmetic + memory + 13e-6) * 1e9, rel=1e-6)


def test_chunks_add_up_to_the_whole_prompt() -> None:
    first, second, whole = prefill(1000), prefill(500, history=1000), prefill(1500)
    assert first.prefill_qk_pairs + second.prefill_qk_pairs == whole.prefill_qk_pairs


def test_all_reduce_twice_a_layer() -> None:
    # TP 2 on H100: 12.38 us for a message of 64 * 8192 * 2 = 2^20 bytes (aiconfigurator's table), 160 times.
    shape = load_shape("llama-3.1-70b")
    cost = TimingModel(shape, hardware("h100"), own("h100"), tp=2).step_cost(decode(64, 1000))
    assert cost.allreduce == pytest.approx(160 * 12.38e3, rel=1e-6)
    assert TimingModel(LLAMA, hardware("h100"), own("h100")).step_cost(decode(64, 1000)).allreduce == 0
    with pytest.raises(ValueError, match="tensor_parallel_size 16"):
        TimingModel(shape, hardware("h100"), own("h100"), tp=16)


def test_overhead_by_hand() -> None:
    params = TimingParams(per_layer_us=14, per_step_us=950, per_sampled_token_us=16)
    cost = TimingModel(LLAMA, hardware("h100"), own("h100"), params=params).step_cost(decode(8, 100, rows=4))
    # Small kernels move, for each of 32 rows and layers, eight hidden states, qkv twice and three halves of the MLP.
    moved = 2 * (8 * 4096 + 2 * 48 * 128 + 3 * 14_336)
    small = 32 * 32 * moved / 3.35e12
    assert cost.overhead == pytest.approx((32 * 14 + 950 + 32 * 16) * 1000 + small * 1e9, abs=1)


def test_a_wider_verification_is_nearly_free_up_to_128_rows() -> None:
    # Published: t(128) / t(1) is 1.06 to 1.08 for weights over 66 MB. Our range is wider: 1.0 to 1.1.
    model = TimingModel(LLAMA, hardware("h200"), own("h200"), captured=EAGER)
    one, many = decode(1, 100), decode(1, 100)
    one.num_sampled_tokens = many.num_sampled_tokens = 0
    many.num_tokens = 128
    first, wide = model.step_cost(one), model.step_cost(many)
    # Ours has the smaller matrices too; in the table o and down grow by 1.11 to 1.16.
    assert 1.0 <= (wide.linear + wide.arithmetic) / first.linear < 1.15


@pytest.mark.parametrize("card", ["h100", "a100"])
def test_more_work_never_costs_less(card: str) -> None:
    # Measured tables dip by a few parts in ten thousand; no more than that is let through.
    model = TimingModel(LLAMA, hardware(card), own(card), captured=capture_sizes(256, 8192, 3))
    grid = itertools.product((1, 3, 40, 200), (10, 1000, 30_000))
    for batch, context in grid:
        base = model.step_cost(decode(batch, context)).total
        assert model.step_cost(decode(batch + 1, context)).total >= 0.999 * base
        assert model.step_cost(decode(batch, context + 100)).total >= 0.999 * base
        assert model.step_cost(decode(batch, context, rows=4)).total >= 0.999 * base


# CUDA graphs


def test_captured_sizes_without_speculation() -> None:
    # What a real vLLM 0.19 run with 256 requests printed: 51 sizes.
    sizes = capture_sizes(256, 2048)
    assert sizes[:5] == (1, 2, 4, 8, 16)
    assert sizes[34:] == (256, *range(272, 513, 16))
    assert len(sizes) == 51
    # Fewer requests: twice their number.
    assert capture_sizes(10, 2048) == (1, 2, 4, 8, 10, 16)
    assert capture_sizes(256, 100)[-1] == 100


def test_captured_sizes_are_multiples_under_speculation() -> None:
    sizes = capture_sizes(256, 8192, 5)
    assert all(size % 6 == 0 for size in sizes)
    # The grid over requests, times 6, as long as it fits, and the token grid, rounded up.
    assert {6, 12, 24, 48, 96, 480} <= set(sizes)
    assert max(sizes) <= 512


def test_padding_is_the_cost_of_rows_that_are_not_there() -> None:
    model = TimingModel(LLAMA, hardware("h100"), own("h100"))
    assert [model.padded(n) for n in (1, 3, 9, 257, 512, 513)] == [1, 4, 16, 272, 512, 513]
    nine, sixteen = model.step_cost(decode(9, 100)), model.step_cost(decode(16, 100))
    assert nine.padding > 0
    assert sixteen.padding == 0
    # The head works on sampled rows, padding on the layers.
    layers_only = decode(9, 100)
    layers_only.num_sampled_tokens = 0
    padded = model.step_cost(layers_only)
    full = decode(16, 100)
    full.num_sampled_tokens = 0
    sixteen_rows = model.step_cost(full)
    ours = padded.linear + padded.arithmetic + padded.padding
    assert ours == pytest.approx(sixteen_rows.linear + sixteen_rows.arithmetic, abs=2)


def test_an_eager_step_waits_for_its_launches() -> None:
    # Beyond 512 rows a small step takes at least 32 launches of a layer; a long prefill hides them.
    model = TimingModel(LLAMA, hardware("h100"), published())
    beyond, within = model.step_cost(decode(513, 10)), model.step_cost(decode(512, 10))
    assert beyond.total >= 32 * 546_000
    assert beyond.total > within.total
    long = model.step_cost(prefill(8192))
    moved = 2 * (8 * 4096 + 2 * 48 * 128 + 3 * 14_336)
    assert long.overhead == pytest.approx((32 * 6.5 + 950 + 16) * 1000 + 8192 * 32 * moved / 3.35e3, abs=1)


# Drafting


def test_no_drafter_no_drafting() -> None:
    assert TimingModel(LLAMA, hardware("h100"), own("h100")).step_cost(decode(8, 100, 4, 3)).drafting == 0


def test_a_round_of_eagle3_by_hand() -> None:
    # K = 1, one request, one row, H100: a forward of one layer and its projection, and the head.
    drafter = drafter_shape(LLAMA, "eagle3")
    model = TimingModel(LLAMA, hardware("h100"), published(), drafter=drafter)
    memory = drafter.weight_bytes() / (0.875 * 3.35e12) + 6 * 3.8e-6
    attention = 7e-6 + 1000 * 4096 / (0.861 * 3.35e12)
    small = 2 * (8 * 4096 + 2 * 48 * 128 + 3 * 14_336) / 3.35e12
    expected = 1.7e-3 + memory + attention + 6.5e-6 + small
    assert model.step_cost(decode(1, 1000, 1, 1)).drafting == pytest.approx(expected * 1e9, rel=1e-4)


def test_a_draft_more_is_a_forward_more() -> None:
    drafter = drafter_shape(LLAMA, "eagle3")
    model = TimingModel(LLAMA, hardware("h100"), published(), drafter=drafter)
    costs = [model.step_cost(decode(8, 1000, 1, k)).drafting for k in (1, 2, 3, 4)]
    steps = [after - before for before, after in itertools.pairwise(costs)]
    assert max(steps) - min(steps) <= 1
    # Without the projection, which runs once a round: 32,000 rows of the head and one layer.
    read = 2 * (drafter.num_parameters() - 3 * 4096 * 4096) / (0.875 * 3.35e12)
    assert read < steps[0] / 1e9 < 1.3 * read


def test_published_cost_of_a_draft_step() -> None:
    # With 0.845 ms a step and 5.1 ms a round (vLLM pull request 32628), a round of K drafts takes 5.1 + 0.845 K.
    params = TimingParams(draft_step_us=845, draft_round_us=5100)
    model = TimingModel(LLAMA, hardware("h100"), own("h100"), drafter=drafter_shape(LLAMA, "eagle3"), params=params)
    for k in (3, 8):
        assert model.step_cost(decode(1, 100, k + 1, k)).drafting == 5_100_000 + 845_000 * k


def test_a_draft_model_costs_its_layers() -> None:
    target = load_shape("qwen3-8b")
    small = drafter_shape(target, "draft_model", "qwen3-0.6b")
    cost = TimingModel(target, hardware("h100"), own("h100"), drafter=small).step_cost(decode(1, 100, 4, 3)).drafting
    # NVIDIA gives about 1.4 ms for one forward of Qwen3-0.6B in a graph on an H100; a round of 3 and 1.7 ms of glue.
    assert cost / 1e6 == pytest.approx(1.7 + 3 * 1.4, rel=0.25)


def test_prompts_pass_through_the_drafter() -> None:
    drafter = drafter_shape(LLAMA, "eagle3")
    model = TimingModel(LLAMA, hardware("h100"), own("h100"), drafter=drafter)
    chunk = StepShape()
    chunk.add_prefill(4096, 0, 0)
    # A chunk drafts nothing, but its KV is written: one layer of the target's 32, and the projection.
    cost = model.step_cost(chunk)
    assert 1 / 40 < (cost.drafting - 1_700_000) / (cost.linear + cost.arithmetic + cost.attention_prefill) < 1 / 15


def test_ngram_is_a_small_part_of_the_step() -> None:
    model = TimingModel(LLAMA, hardware("h100"), own("h100"), drafter=drafter_shape(LLAMA, "ngram"))
    cost = model.step_cost(decode(8, 100, 4, 3))
    assert cost.drafting == pytest.approx(0.005875 * (cost.total - cost.drafting), abs=2)
    assert model.step_cost(decode(8, 100)).drafting == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"per_layer_us": -1}, "per_layer_us"),
        ({"draft_step_us": float("nan")}, "draft_step_us"),
        ({"attention_kernel": "fa4"}, "attention_kernel: must be one of fa2, fa3, flashinfer"),
    ],
)
def test_parameters_that_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TimingParams(**values)  # type: ignore[arg-type]


# Held to measurements. None of our constants was fitted to the first three, nor chosen by them.


def test_regression_of_a_real_engine() -> None:
    # SpecDecode-Bench fitted real vLLM (Llama-3.1-8B, H100, batches of 1 to 64): 5.886 ms + 21.0 us a batched token
    # + 39.3 ns a KV token + 1.207 ms a step. Mean absolute difference over this grid: 3.7 percent, 6.9 at worst (one
    # request). Held to 8 in every cell.
    model = TimingModel(LLAMA, hardware("h100"), own("h100"), captured=capture_sizes(256, 8192))
    errors = []
    for batch, context in itertools.product((1, 2, 4, 8, 16, 32, 64), (256, 512, 1024, 2048, 4096)):
        regression = 5.886e-3 + 21.0e-6 * batch + 39.3e-9 * batch * context + 1.207e-3
        errors.append(model.step_cost(decode(batch, context)).total / 1e9 / regression - 1)
    assert statistics.mean(map(abs, errors)) < 0.05
    assert max(map(abs, errors)) < 0.08


@pytest.mark.parametrize(("batch", "measured"), [(1, 1.749), (16, 1.699), (64, 1.486), (128, 1.222)])
def test_speedup_of_speculation_on_a_real_engine(batch: int, measured: float) -> None:
    # SpecDecode-Bench: Llama-3.1-8B on an H100, vLLM 0.10, EAGLE-3, K = 3, gsm8k. Its recorded drafts yield 2.38 tokens
    # a step; contexts taken as 400. Nothing was fitted to it. We are 4 and 5 percent low up to 16 requests and 9 and 8
    # at 64 and 128. Held to 15.
    alone = TimingModel(LLAMA, hardware("h100"), own("h100"), captured=capture_sizes(256, 8192))
    drafting = TimingModel(
        LLAMA,
        hardware("h100"),
        own("h100"),
        drafter=drafter_shape(LLAMA, "eagle3"),
        captured=capture_sizes(256, 8192, 3),
    )
    one, four = decode(batch, 400), decode(batch, 400, rows=4, drafts=3)
    speedup = 2.38 * alone.step_cost(one).total / drafting.step_cost(four).total
    assert speedup == pytest.approx(measured, rel=0.15)


def test_regression_of_a_real_engine_over_verifications() -> None:
    # The same regression with 1 to 6 tokens a request, 210 cells. Today 3.6 percent, two cells beyond 8: 64 requests of
    # 6 tokens on contexts of 512 and 1,024, 8.0 and 9.0. Held to 8 in the mean and in all cells but a few, those to 10
    # (docs/timing.md says why not closer).
    errors = []
    for rows in range(1, 7):
        sizes = capture_sizes(256, 8192, rows - 1)
        model = TimingModel(LLAMA, hardware("h100"), own("h100"), captured=sizes)
        for batch, context in itertools.product((1, 2, 4, 8, 16, 32, 64), (256, 512, 1024, 2048, 4096)):
            regression = 5.886e-3 + 21.0e-6 * batch * rows + 39.3e-9 * batch * context + 1.207e-3
            errors.append(model.step_cost(decode(batch, context, rows)).total / 1e9 / regression - 1)
    assert statistics.mean(map(abs, errors)) < 0.05
    assert sum(abs(error) > 0.08 for error in errors) <= 4
    assert max(map(abs, errors)) < 0.10


def test_experts_cost_what_the_batch_touches() -> None:
    # Mixtral on an H200: one token reads 2 experts of 8 a layer, sixteen nearly all.
    shape = load_shape("mixtral-8x7b")
    model = TimingModel(shape, hardware("h100"), own("h100"), captured=EAGER)
    one, many = model.step_cost(decode(1, 100)), model.step_cost(decode(16, 100))
    expert = 2 * 3 * 4096 * 14_336 / (0.875 * 3.35e12) * 1e9
    assert (many.linear + many.arithmetic) - one.linear == pytest.approx(32 * 6 * expert, rel=0.05)
    assert any("router" in note for note in model.notes)


def test_latent_attention_reads_its_vector_and_computes_for_all_heads() -> None:
    # DeepSeek-V3 on 8 H100: 1,152 bytes a token and layer; 16 heads of a rank with 2 * (576 + 512) operations a pair.
    shape = load_shape("deepseek-v3")
    model = TimingModel(shape, hardware("h100"), published(), tp=8, dtype="fp8")
    read = 61 * (7e-6 + 32 * 4096 * 1152 / (0.861 * 3.35e12))
    assert model.step_cost(decode(32, 4096)).attention_decode == pytest.approx(read * 1e9, rel=1e-3)
    eight = 61 * (7e-6 + 32 * 8 * 4096 * 16 * 2 * 1088 / (0.694 * 989.4e12))
    assert model.step_cost(decode(32, 4096, rows=8)).attention_decode == pytest.approx(max(read, eight) * 1e9, rel=1e-3)


def test_rows_beyond_a_tile_read_the_kv_again() -> None:
    # 8 query heads a KV head, 128 rows a tile: up to 16 rows of a request go through at once.
    model = TimingModel(load_shape("llama-3.1-70b"), hardware("h100"), published(), tp=8)
    costs = [model.step_cost(decode(32, 8192, rows)).attention_decode for rows in (1, 16, 17)]
    fixed = 80 * 7000
    assert costs[0] == costs[1]
    assert costs[2] - fixed == pytest.approx(2 * (costs[0] - fixed), rel=1e-3)


def test_a_step_outside_what_was_measured_is_told() -> None:
    model = TimingModel(LLAMA, hardware("h200"), own("h200"))
    assert model.outside(decode(64, 4096)) is None
    assert "contexts of 400000" in (model.outside(decode(1, 400_000)) or "")
    assert "tokens in a step" in (model.outside(prefill(50_000)) or "")


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def mean_error(pairs: list[tuple[float, float]]) -> float:
    assert len(pairs) > 50
    return statistics.mean(abs(ours / measured - 1) for ours, measured in pairs)


@pytest.mark.parametrize("table", ["H200_vllm0.24.0", "A100_vllm0.14.0"])
def test_measured_decode_attention(shared_data: Path, table: str) -> None:
    # Published held-out errors: 8.9 percent (H200), 11.2 (A100). The tables hold a graph replay (about 5 us) and are
    # warm in L2 below 50 MB of KV; contexts of more than 500 tokens. Here 7.2 and 9.0; held to 15.
    model = TimingModel(LLAMA, hardware(table[:4].lower()), own(table[:4].lower()))
    pairs = []
    for row in rows_of(shared_data / "gpu" / f"aic_generation_attn_{table}.csv"):
        batch, context = int(row["batch"]), int(row["ctx_before"]) + 1
        kv_bytes = batch * context * 4096
        if row["kv_dtype"] == "bfloat16" and row["shape"] == "8B-tp1" and 500 < context and 50e6 < kv_bytes:
            layer_us = model.step_cost(decode(batch, context)).attention_decode / 32e3
            pairs.append((layer_us + 5, float(row["latency_us"])))
    assert statistics.mean(abs(ours / measured - 1) for ours, measured in pairs) < 0.15
    assert len(pairs) > 30


@pytest.mark.parametrize("table", ["H200_vllm0.24.0", "A100_vllm0.14.0"])
def test_measured_prefill_attention(shared_data: Path, table: str) -> None:
    # Published held-out errors: 6.0 percent (H200), 7.0 (A100), prompts without history. Here, from 64 tokens
    # on, 3.5 and 2.8 (the memory constant was fitted to these tables); held to 10.
    model = TimingModel(LLAMA, hardware(table[:4].lower()), own(table[:4].lower()))
    pairs = []
    for row in rows_of(shared_data / "gpu" / f"aic_context_attn_{table}.csv"):
        batch, rows = int(row["batch"]), int(row["q_len"])
        latency = float(row["latency_us"])
        if row["kv_dtype"] == "bfloat16" and row["shape"] == "8B-tp1" and rows >= 64 and latency > 30:
            step = StepShape()
            for _ in range(batch):
                step.add_prefill(rows, int(row["ctx_before"]), 1)
            pairs.append((model.step_cost(step).attention_prefill / 32e3, latency))
    assert mean_error(pairs) < 0.10


def test_measured_decodes_beside_a_chunk_on_flash_attention_2(shared_data: Path) -> None:
    # LLMServingSim's RTX 4090 profile (vLLM 0.19): a chunk of 16 tokens beside decodes; 4k of KV each and more. The
    # decodes lose their split: 130 us at 4k for one where decoding alone takes a fifth. 13 percent off; held to 20.
    model = TimingModel(LLAMA, hardware("rtx 4090"), own("rtx 4090"))
    pairs = []
    for row in rows_of(shared_data / "gpu" / "llmservingsim_attention_mixed_RTX4090_Llama3.1-8B_tp1.csv"):
        chunk, history, decodes, context = (
            int(float(row[name])) for name in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
        )
        if chunk == 16 and history == 0 and 1 <= decodes <= 32 and context >= 4096:
            step = decode(decodes, context)
            step.add_prefill(chunk, history, 1)
            cost = model.step_cost(step)
            pairs.append(((cost.attention_decode + cost.attention_prefill) / 32e3, float(row["time_us"])))
    assert len(pairs) >= 10
    assert statistics.mean(abs(ours / measured - 1) for ours, measured in pairs) < 0.20


def test_measured_serving_steps(shared_data: Path) -> None:
    # aiconfigurator's serving rows, Llama-3.1-70B fp8 on 1 to 8 H200: a token's time at half its answer. Prompts that
    # pass in between are not in the step, so only 1k prompts and up to 16 requests; our fp8 form is 17 percent off
    # and the overhead constants come from these rows. It is 4.7 percent off; held to 12.
    pairs = []
    shape = load_shape("llama-3.1-70b")
    for row in rows_of(shared_data / "gpu" / "aic_serving_H200_vllm.csv"):
        batch, tp = int(float(row["batch_size"])), int(float(row["tp_size"]))
        if row["isl"] == "1024" and batch <= 16:
            model = TimingModel(shape, hardware("h200"), own("h200"), tp=tp, dtype="fp8")
            step = decode(batch, 1024 + int(row["osl"]) // 2)
            pairs.append((model.step_cost(step).total / 1e6, float(row["silicon_tpot_ms"])))
    assert len(pairs) >= 20
    assert statistics.mean(abs(ours / measured - 1) for ours, measured in pairs) < 0.12
