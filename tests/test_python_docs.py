"""The examples of docs/python.md run as they stand, one after the other, in an empty folder."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parent.parent / "docs" / "python.md"


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(examples) >= 6
    for number, example in enumerate(examples):
        exec(compile(example, f"{PAGE.name}, example {number}", "exec"), {})
    assert (tmp_path / "differences.png").is_file()
    assert "no speculation" in capsys.readouterr().out
