"""`speckv calibrate`: what it prints and where it ends, on made-up tables; and `measure` on the CPU, where torch is."""

import csv
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sim.cli import app
from sim.measured_tables import OWN_COLUMNS, read_tables

RUNNER = CliRunner()


def linear_table(folder: Path) -> Path:
    """A card of 0.5 of the H200's peak arithmetic and 0.8 of its bandwidth, 4 us a launch."""
    file = folder / "gemm_H200.csv"
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(["dtype", "m", "n", "k", "latency_us"])
        for n, k in ((4096, 4096), (8192, 4096), (4096, 8192), (16384, 8192)):
            for m in (1, 16, 256, 1024, 4096):
                us = max(2e6 * m * n * k / (0.5 * 989.4e12), 2e6 * n * k / (0.8 * 4.8e12)) + 4
                writer.writerow(["bfloat16", m, n, k, us])
    return file


def test_fit_prints_held_out_errors_and_writes_a_calibration(tmp_path: Path) -> None:
    file = linear_table(tmp_path)
    done = RUNNER.invoke(app, ["calibrate", "fit", str(file), "-o", str(tmp_path / "mine.yaml")])
    assert done.exit_code == 0, done.output
    assert "aiconfigurator's linear layers" in done.output
    assert "linear bfloat16" in done.output
    checked = RUNNER.invoke(app, ["calibrate", "check", str(tmp_path / "mine.yaml"), str(file)])
    assert checked.exit_code == 0, checked.output
    line = next(line for line in checked.output.splitlines() if line.startswith("linear bfloat16  "))
    assert int(line.split()[2]) == 20
    assert float(line.split()[3]) < 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "absent.csv", "--card", "h200"], "there is no such file"),
        (["fit", "TABLE", "--card", "h20O"], "did you mean H200"),
        (["fit", "TABLE", "--base", "h10O"], "no calibration of that name"),
        (["check", "h200", "absent.csv"], "there is no such file"),
        (["measure", "--device", "gpu", "--out", "x.csv"], "allowed: cpu, cuda"),
        (["measure", "--device", "cpu", "--out", "x.csv", "--model", "no-model"], "unknown model"),
    ],
)
def test_bad_input_is_one_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    if arguments[0] == "measure":
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    words = [str(linear_table(tmp_path)) if word == "TABLE" else word for word in arguments]
    done = RUNNER.invoke(app, ["calibrate", *words])
    assert done.exit_code in (1, 2)
    assert message in done.output + getattr(done, "stderr", "")
    assert not (tmp_path / "x.csv").exists()


def test_measuring_on_a_cpu_tries_the_whole_way(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from gpu_backend.measure import COLUMNS, measure_machine

    assert COLUMNS == OWN_COLUMNS
    out = tmp_path / "cpu.csv"
    outcome = measure_machine(
        out,
        device="cpu",
        model="tiny",
        linears={"qkv": (96, 64), "o": (64, 64), "gate_up": (256, 64), "down": (64, 128), "lm_head": (500, 64)},
        heads=4,
        kv_heads=2,
        head_dim=16,
        budget_s=60,
    )
    assert not outcome.interrupted
    assert "nothing about any GPU" in outcome.worth
    tables = read_tables([out])
    assert len(tables.linear) == 4 * 7
    assert len(tables.attention) > 10
    with out.open() as opened:
        kinds = {row["kind"] for row in csv.DictReader(opened)}
    assert kinds == {
        *("linear", "decode", "verify", "ragged", "prefill", "mixed", "draft_loop"),
        *("table_update", "rollback", "compaction", "eager"),
    }


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from gpu_backend.measure import measure_machine

    def stop(text: str) -> None:
        raise KeyboardInterrupt

    outcome = measure_machine(
        tmp_path / "cpu.csv",
        device="cpu",
        model="tiny",
        linears={"qkv": (96, 64)},
        heads=4,
        kv_heads=2,
        head_dim=16,
        budget_s=60,
        say=stop,
    )
    assert outcome.interrupted
    assert outcome.rows == 25
    assert len((tmp_path / "cpu.csv").read_text().splitlines()) == 26


def test_a_missing_driver_is_told(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    from gpu_backend.measure import MeasureError, measure_machine

    with pytest.raises(MeasureError, match="--device cpu"):
        measure_machine(
            tmp_path / "x.csv", device="cuda:0", model="m", linears={}, heads=1, kv_heads=1, head_dim=16, budget_s=1
        )
