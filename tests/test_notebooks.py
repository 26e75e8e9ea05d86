"""The notebooks: each runs from a clean state, keeps the outputs of such a run, and types no result in."""

from __future__ import annotations

import importlib.util
import re
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

for needed in ("nbformat", "nbclient", "ipykernel"):
    pytest.importorskip(needed, reason=f"{needed} is not installed; the extra `notebooks` has it: speckv[notebooks]")

import nbformat  # noqa: E402 - only where it is there

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [path.stem for path in NOTEBOOKS]
REFRESH = "run `python notebooks/execute.py` and look at what has changed"

NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
RESULT = re.compile(r"\d+\.\d+|\d+(?:\.\d+)? ?%|\d+ percent")
"""What a result in a sentence looks like."""
RELEASE = re.compile(r"(?:vllm-|vLLM )?0\.\d\d(?! ?%)\b")


def _execute() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebooks_execute", ROOT / "notebooks" / "execute.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _texts(cell: Any) -> list[str]:
    """A code cell's outputs as text, a picture as its kind alone."""
    texts = []
    for output in cell.outputs:
        data = output.get("data", {})
        if "image/png" in data:
            texts.append("image/png")
        else:
            texts.append(data.get("text/markdown") or data.get("text/plain") or output.get("text", ""))
    return texts


def test_all_nine_are_there() -> None:
    assert [name[:2] for name in NAMES] == ["01", "02", "03", "04", "05", "06", "07", "08", "09"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_runs_from_a_clean_state_and_says_what_is_kept(path: Path, tmp_path: Path) -> None:
    """Words are the same and numbers within a tenth, or 2: a step's cost may be refined without a new reading."""
    fresh = _execute().executed(path, tmp_path)
    kept = nbformat.read(path, as_version=4)
    assert list(tmp_path.iterdir()) == []
    for number, (old, new) in enumerate(zip(kept.cells, fresh.cells, strict=True)):
        if old.cell_type != "code":
            continue
        assert not [output for output in new.outputs if output.output_type == "stream"], f"cell {number} prints"
        for was, now in zip(_texts(old), _texts(new), strict=True):
            words = [" ".join(NUMBER.sub("#", text).replace("-", "").split()) for text in (was, now)]
            assert words[0] == words[1], f"{path.name}, cell {number}: {REFRESH}"
            for one, other in zip(NUMBER.findall(was), NUMBER.findall(now), strict=True):
                first, second = float(one.replace(",", "")), float(other.replace(",", ""))
                assert second == pytest.approx(first, rel=0.1, abs=2), f"{path.name}, cell {number}: {REFRESH}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_is_kept_with_outputs_that_a_browser_can_show(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    pictures = [text for cell in code for text in _texts(cell) if text == "image/png"]
    assert len(pictures) >= 3
    assert path.stat().st_size < 1_000_000
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_names_no_path_and_no_time(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(
        [c.source + "\n".join(_texts(c) if c.cell_type == "code" else ()) + str(c.metadata) for c in cells]
    )
    for place in (str(ROOT), str(Path.home()), tempfile.gettempdir() + "/"):
        assert place not in text
    assert not re.search(r"20\d\d-\d\d-\d\d", text)
    assert "iopub" not in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_no_result_is_typed_into_the_text(path: Path) -> None:
    """Results stand in outputs, where a cell has worked them out; settings are no results."""
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            lines = [line for line in cell.source.splitlines() if not line.startswith("#")]
            text = RELEASE.sub("", "\n".join(lines))
            found = [match for match in RESULT.findall(text) if match not in SETTINGS.get(path.stem, ())]
            assert found == [], cell.source[:80]


SETTINGS = {
    "01_article": ("80 percent",),
    "02_garbage_kv": ("0.65",),
    "03_placeholder_overhead": ("0.65",),
    "04_async_discard": ("0.3", "0.1"),
    "05_drafter_kv": ("55 percent",),
    "09_policies_compared": ("95 percent",),
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target
