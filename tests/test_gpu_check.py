"""The script for a machine with a GPU, tried on the CPU, and what it says where it cannot run."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `gpu`: torch is not installed")

from gpu_backend import gpu_check  # noqa: E402

torch.set_num_threads(1)


def test_it_works_on_the_cpu_and_says_what_that_is_worth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "measured.csv"
    assert gpu_check.main(["--device", "cpu", "--out", str(table)]) == 0
    said = capsys.readouterr().out
    assert "nothing about a GPU" in said
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["query_len"] for row in rows if row["part"] == "attention"] == ["1", "2", "4", "6", "8"]
    assert {row["part"] for row in rows} == {"agreement", "decoding", "attention"}


def test_without_torch_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert gpu_check.main([]) == 2
    assert "torch is not installed: pip install 'speckv[gpu]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("built_for", "message"), [(None, "has no CUDA"), ("12.8", "finds no card: no NVIDIA driver, one too old")]
)
def test_without_a_card_it_says_why(
    built_for: str | None, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"), 1, "is another process on the"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_was_measured_is_kept_when_it_breaks_off(
    error: BaseException,
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def break_off(self: gpu_check.Check) -> None:
        raise error

    monkeypatch.setattr(gpu_check.Check, "bandwidth", break_off)
    table = tmp_path / "measured.csv"
    assert gpu_check.main(["--device", "cpu", "--out", str(table)]) == code
    assert message in capsys.readouterr().err
    assert "agreement" in table.read_text()
