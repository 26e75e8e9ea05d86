"""Calibrations: grids and forms by hand, the YAML there and back, fits on made-up tables, and on measured ones."""

import csv
import io
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.calibration_fit import check_calibration, fit_calibration
from sim.calibration_schema import calibration_names, calibration_text, load_calibration, read_calibration
from sim.measured_tables import TableError, Tables, read_tables
from sim.models.calibration import AllReduce, Grid
from sim.models.hardware import custom_hardware, hardware, hardware_names
from sim.models.shapes import load_shape
from sim.models.timing import StepShape, TimingModel
from sim.scenario_errors import ScenarioError

H200 = hardware("h200")


def table(folder: Path, name: str, header: str, rows: list[tuple[object, ...]]) -> Path:
    text = io.StringIO()
    csv.writer(text).writerows([header.split(","), *rows])
    file = folder / name
    file.write_text(text.getvalue())
    return file


# Grids and forms


def test_a_grid_is_straight_in_logarithms() -> None:
    # Between 1 and 100 the middle is 10; between 2 and 8 it is 4; outside the ends hold.
    grid = Grid(("a", "b"), ((1.0, 100.0), (2.0, 8.0)), (0.0, 1.0, 2.0, 3.0))
    assert grid.log_factor(1, 2) == 0
    assert grid.log_factor(10, 2) == pytest.approx(1)
    assert grid.log_factor(10, 4) == pytest.approx(1.5)
    assert grid.log_factor(0.1, 1000) == 1
    assert grid.log_factor(1e9, 1e9) == 3
    held = grid.sliced(b=4.0)
    assert (held.axes, held.knots) == (("a",), ((1.0, 100.0),))
    assert held.log_factors == pytest.approx((0.5, 2.5))


@given(st.floats(0.01, 1e6), st.floats(0.01, 1e6))
def test_a_grid_stays_within_its_values(a: float, b: float) -> None:
    grid = Grid(("a", "b"), ((1.0, 3.0, 900.0), (2.0, 8.0)), (0.5, -1.0, 2.0, 3.0, 0.0, 1.0))
    assert -1 - 1e-9 <= grid.log_factor(a, b) <= 3 + 1e-9


@pytest.mark.parametrize(
    ("knots", "logs", "message"),
    [
        ((1.0, 1.0), (0.0, 0.0), "must be positive and rise"),
        ((0.0, 1.0), (0.0, 0.0), "must be positive and rise"),
        ((1.0, 2.0), (0.0,), "2 finite numbers"),
        ((1.0, 2.0), (0.0, math.nan), "2 finite numbers"),
    ],
)
def test_grids_that_are_refused(knots: tuple[float, ...], logs: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grid(("a",), (knots,), logs)


def test_an_all_reduce_by_hand() -> None:
    assert AllReduce(2, 4.5, 270e9).us(270_000) == pytest.approx(5.5)
    points = AllReduce(2, 0, 1e9, ((100.0, 4.0), (10_000.0, 16.0)))
    assert [points.us(size) for size in (1, 100, 1000, 20_000)] == pytest.approx([4, 4, 8, 32])


# The files


def test_every_calibrated_card_has_its_file() -> None:
    cards = {name: hardware(name).calibration for name in hardware_names()}
    assert {name for name in cards.values() if name} == set(calibration_names())
    for card, name in cards.items():
        if name is not None:
            calibration = load_calibration(name)
            assert (calibration.name, calibration.card) == (name, card)
            for part, evidence in calibration.parts():
                assert evidence.source or evidence.how or evidence.borrowed, f"{name}: {part} says nothing of itself"


def test_the_text_reads_back(tmp_path: Path) -> None:
    for name in calibration_names():
        calibration = load_calibration(name)
        (tmp_path / "c.yaml").write_text(calibration_text(calibration))
        assert read_calibration(tmp_path / "c.yaml") == calibration


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("compute: 0.809893", "compute: -1", r"linear\.bfloat16\.compute = -1"),
        ("compute: 0.809893", "computes: 0.815", r"linear\.bfloat16\.computes"),
        ("p: 2.82884", "p: fast", r"linear\.bfloat16\.p"),
        ('card: "H100-SXM"', "", "card"),
        ("  bfloat16:", "  bfloat8:", "needs bfloat16"),
    ],
)
def test_a_wrong_file_is_told_by_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = calibration_text(load_calibration("h100"))
    assert old in text
    file = tmp_path / "wrong.yaml"
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(ScenarioError, match=message) as caught:
        read_calibration(file)
    assert "wrong.yaml" in str(caught.value)


def test_an_unknown_name_is_told() -> None:
    with pytest.raises(ScenarioError, match="h100"):
        load_calibration("h10O")


def test_on_another_card_shares_go_along_and_grids_do_not() -> None:
    own = load_calibration("h200")
    assert own.for_card(H200) is own
    other = own.for_card(custom_hardware("mine", bf16_tflops=100, bandwidth_gbs=1000, memory_gib=24, num_sms=100))
    assert other.linear["bfloat16"].compute == own.linear["bfloat16"].compute
    assert other.linear["bfloat16"].grid is None
    assert other.decode["bfloat16"].grid is None
    assert any("H200" in note for note in other.notes)
    # No NVLink: a ring over PCIe.
    l40s = own.for_card(hardware("l40s"))
    assert l40s.allreduce_for(2).us(32e6) == pytest.approx(20 + 1000)
    with pytest.raises(ValueError, match="allowed: 1, 2, 4, 8"):
        l40s.allreduce_for(3)


# Fits on tables made with known constants


def made_up(folder: Path) -> list[Path]:
    """Tables of a card that does exactly what the forms say."""
    linear = []
    for n, k in ((4096, 4096), (8192, 4096), (4096, 8192), (16384, 8192), (28672, 4096), (2048, 8192)):
        for m in (1, 8, 64, 256, 1024, 4096):
            compute, memory = 2e6 * m * n * k / (0.7 * 989.4e12), 2e6 * n * k / (0.8 * 4.8e12)
            linear.append(("bfloat16", m, n, k, (compute**3 + memory**3) ** (1 / 3) + 5))
    decode, prefill = [], []
    for heads, kv in ((32, 8), (16, 4), (64, 8)):
        for batch in (1, 8, 64):
            for context in (256, 1024, 4096, 16384):
                us = 7 + 5 + 1e6 * batch * context * kv * 512 / (0.8 * 4.8e12)
                decode.append(("fa", "x", heads, kv, "bfloat16", "bfloat16", batch, 1, context - 1, us))
        for rows in (64, 256, 1024, 4096):
            for batch in (1, 4):
                work = 4 * batch * rows * (rows + 1) / 2 * heads * 128 / (0.6 * 989.4e12)
                moved = batch * rows * (kv * 512 + heads * 512) / (0.3 * 4.8e12)
                us = 1e6 * (work + moved) + 13
                prefill.append(("fa", "x", heads, kv, "bfloat16", "bfloat16", batch, rows, 0, us))
    attention = "kernel,shape,n_q_heads,n_kv_heads,kv_dtype,attn_dtype,batch,q_len,ctx_before,latency_us"
    reduce = [("H200", 2, 2**power, "vllm_graph", 4 + 2**power / 250e3) for power in range(8, 26)]
    return [
        table(folder, "linear.csv", "dtype,m,n,k,latency_us", linear),
        table(folder, "decode.csv", attention, decode),
        table(folder, "prefill.csv", attention, prefill),
        table(folder, "reduce.csv", "gpu,num_gpus,message_size,backend,latency_us", reduce),
    ]


def test_a_fit_finds_the_constants_that_made_the_tables(tmp_path: Path) -> None:
    tables = read_tables(made_up(tmp_path))
    made, lines = fit_calibration(tables, H200, load_calibration("h200"), "mine")
    linear, decode, prefill = made.linear["bfloat16"], made.decode["bfloat16"], made.prefill["bfloat16"]
    assert (linear.compute, linear.memory, linear.t0_us) == pytest.approx((0.7, 0.8, 5), rel=0.03)
    assert (decode.memory, decode.t0_us) == pytest.approx((0.8, 7), rel=0.03)
    assert (prefill.compute, prefill.memory, prefill.t0_us) == pytest.approx((0.6, 0.3, 13), rel=0.05)
    assert made.allreduce_for(2).us(2**20) == pytest.approx(4 + 2**20 / 250e3, rel=0.03)
    # Held out, and still nearly exact.
    assert {line.part for line in lines} == {
        "linear bfloat16",
        "decode attention bfloat16",
        "prefill attention bfloat16",
        "all-reduce over 2",
    }
    for line in lines:
        assert line.analytic is not None
        assert line.analytic < 2
    # What the tables do not cover stays as it was.
    assert made.overhead == load_calibration("h200").overhead
    for checked in check_calibration(made, tables, H200):
        assert checked.error < 2, checked


def test_the_rows_of_a_no_split_kernel_are_fitted(tmp_path: Path) -> None:
    # A card whose tiles take 30 us per 1,000 tokens and 4 us each, 128 at once: walks and waves, by hand.
    rows = []
    for decodes in (1, 2, 4, 8, 16, 32):
        for context in (1024, 4096, 16384):
            tiles = (30e-3 * context + 4) * decodes * 32 / 128
            us = 10 + max(30e-3 * context, tiles) + 0.0
            rows.append((16, 0, decodes, context, us))
    for decodes in (1, 4, 16, 64):
        for context in (256, 1024, 4096, 16384, 512, 2048):
            rows.append((0, 0, decodes, context, 10 + 1e6 * decodes * context * 4096 / (0.9 * 1.008e12)))
    for chunk in (64, 256, 1024, 2048):
        for history in (0, 1024, 4096, 8192, 16384):
            pairs = chunk * history + chunk * (chunk + 1) / 2
            rows.append(
                (chunk, history, 0, 0, 10 + max(1e6 * 4 * pairs * 4096 / (0.8 * 165.2e12), 30e-3 * (history + chunk)))
            )
    header = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
    file = table(tmp_path, "mixed_rtx4090.csv", header, rows + rows)
    card = hardware("rtx 4090")
    made, lines = fit_calibration(read_tables([file]), card, load_calibration("rtx-4090"), "mine")
    assert made.no_split.us_per_1000_tokens == pytest.approx(30, rel=0.1)
    (line,) = (line for line in lines if line.part == "no-split attention")
    assert line.analytic is not None
    assert line.analytic < 5


def test_an_iteration_log_gives_the_overhead(tmp_path: Path) -> None:
    # Lines as vLLM prints them: kernels as the calibration has them, 2 ms a step and 30 us a token on top.
    shape, before = load_shape("llama-3.1-8b"), load_calibration("h200")
    bare = replace(before, overhead=replace(before.overhead, per_step_us=0.0, per_sampled_token_us=0.0))
    model = TimingModel(shape, H200, bare)
    lines = []
    for number in range(1, 40):
        step = StepShape()
        for _ in range(number):
            step.add_decode(4, 1)
        ms = model.step_cost(step).total / 1e6 + 2.0 + 0.030 * 4 * number
        lines.append(
            f"INFO [loggers.py:206] Engine 000: Iteration({number}): 0 context requests, 0 context tokens, "
            f"{number} generation requests, {4 * number} generation tokens, iteration elapsed time: {ms:.3f} ms\n"
        )
    file = tmp_path / "vllm.log"
    file.write_text("something else\n" + "".join(lines))
    made, (line,) = fit_calibration(read_tables([file]), H200, before, "mine", shape)
    assert (made.overhead.per_step_us, made.overhead.per_sampled_token_us) == pytest.approx((2000, 30), rel=0.02)
    assert line.part == "overhead (iteration log)"
    with pytest.raises(ValueError, match="nothing to fit"):
        fit_calibration(read_tables([file]), H200, before, "mine")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("a,b\n1,2\n", "this header is not known: a, b"),
        ("dtype,m,n,k,latency_us\nbfloat16,1,2,x,3\n", r"t\.csv:2: k = 'x': expected a number"),
        ("dtype,m,n,k,latency_us\nbfloat16,1,2,3,0\n", r"t\.csv:2: latency_us = 0: expected a time above 0"),
        ("dtype,m,n,k,latency_us\nbfloat16,1,2,3,nan\n", "expected a finite number"),
        ("dtype,m,n,k,latency_us\nbfloat16,1\n", r"t\.csv:2: 2 fields; the header has 5"),
        ("dtype,m,n,k,latency_us\n", "holds no measurement"),
    ],
)
def test_a_wrong_table_is_told_by_line(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "t.csv"
    file.write_text(content)
    with pytest.raises(TableError, match=message):
        read_tables([file])
    with pytest.raises(TableError, match="there is no such file"):
        read_tables([tmp_path / "absent.csv"])


# Measured tables. The figures in brackets are what comes out today.

Fitted = Callable[..., dict[str, tuple[float, float | None, str]]]


@pytest.fixture(scope="module")
def held_out(shared_data: Path) -> Fitted:
    def fit(card: str, *names: str) -> dict[str, tuple[float, float | None, str]]:
        tables: Tables = read_tables([shared_data / "gpu" / name for name in names])
        base = load_calibration(hardware(card).calibration)
        _, lines = fit_calibration(tables, hardware(card), base, "test")
        return {line.part: (line.analytic or 0.0, line.grid, line.note) for line in lines}

    return fit


def test_h200_linear_layers_held_out(held_out: Fitted) -> None:
    found = held_out("h200", "aic_gemm_H200_vllm0.24.0.csv")
    assert min(9.0, found["linear bfloat16"][1] or 9) < 7  # [4.9 with a grid, 9.3 without]
    assert (found["linear fp8"][1] or 99) < 13  # [8.1, 16.8]


def test_h200_attention_held_out(held_out: Fitted) -> None:
    found = held_out("h200", "aic_generation_attn_H200_vllm0.24.0.csv", "aic_context_attn_H200_vllm0.24.0.csv")
    analytic, grid, _ = found["decode attention bfloat16"]
    assert analytic < 9  # [7.3]
    assert (grid or 99) < 4  # [3.2]
    assert found["prefill attention bfloat16"][0] < 7  # [6.2]


def test_rtx_4090_mixed_attention_held_out(held_out: Fitted) -> None:
    found = held_out("rtx 4090", "llmservingsim_attention_mixed_RTX4090_Llama3.1-8B_tp1.csv")
    assert found["no-split attention"][0] < 12  # [9.1; a sum of the two is 30 off]


def test_the_h100_reaches_what_was_measured_on_it(tmp_path: Path) -> None:
    # Facts of aiconfigurator's H100 tables (vLLM 0.24, Apache-2.0), Llama-3.1-8B: its qkv and output projections and
    # the shapes nearest its MLP, around 384 rows, where a verification of 64 requests with 5 drafts stands. Decode
    # attention of 32 query and 8 KV heads. Off in the mean by 5.9 and 0.4 percent; held to 8.
    linear = table(
        tmp_path,
        "linear.csv",
        "dtype,m,n,k,latency_us",
        [
            ("bfloat16", rows, n, k, us)
            for n, k, times in (
                (6144, 4096, (19.9, 23.1, 26.4, 28.5, 35.8)),
                (4096, 4096, (15.0, 14.8, 19.6, 22.6, 24.1)),
                (16384, 4096, (46.0, 55.7, 62.6, 55.4, 84.7)),
                (4096, 16384, (47.5, 52.9, 60.7, 77.2, 80.4)),
                (65536, 4096, (218.0, 227.7, 235.1, 209.6, 344.2)),
            )
            for rows, us in zip((1, 64, 256, 257, 512), times, strict=True)
        ],
    )
    attention = table(
        tmp_path,
        "attention.csv",
        "kernel,shape,n_q_heads,n_kv_heads,kv_dtype,attn_dtype,batch,q_len,ctx_before,latency_us",
        [
            ("fa3", "8B-tp1", 32, 8, "bfloat16", "bfloat16", batch, 1, context - 1, us)
            for batch, times in ((1, (12.3, 13.6, 16.9)), (16, (14.6, 36.1, 113.4)), (64, (46.1, 119.4, 353.6)))
            for context, us in zip((256, 1024, 4096), times, strict=True)
        ],
    )
    lines = check_calibration(load_calibration("h100"), read_tables([linear, attention]), hardware("h100"))
    found = {line.part: line.error for line in lines}
    assert found["linear bfloat16"] < 8
    assert found["decode attention bfloat16"] < 8


def test_what_is_shipped_is_what_the_tables_give(shared_data: Path) -> None:
    # Vidur's medians were not fitted to: another measurement of the same card.
    tables = read_tables([shared_data / "gpu" / "vidur_mlp_A100_Llama3-8B.csv"])
    lines = {line.part: line for line in check_calibration(load_calibration("a100"), tables, hardware("a100"))}
    assert lines["linear bfloat16"].error < 12  # [9.0; two releases of a kernel differ by 9]
