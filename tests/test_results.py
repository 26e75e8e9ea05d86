"""The folder of a run: its place, finding an earlier run, what may be in the way."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sim import results
from sim.against import SWITCHES
from sim.observers.garbage import Garbage
from sim.observers.ledger import Ledger
from sim.observers.metrics import REQUEST_COLUMNS, Metrics
from sim.observers.recorder import STEP_COLUMNS, WINDOW_COLUMNS
from sim.results import ResultsError
from sim.run import simulate

REPOSITORY = Path(__file__).resolve().parent.parent

DIGEST = "0123456789abcdef" * 4


def manifest(**changes: object) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "complete": True,
        "scenario_digest": DIGEST,
        "versions": {"speckv": "1.0"},
        "inputs": [],
        "checked": False,
        **changes,
    }


def test_the_place_says_scenario_and_seed() -> None:
    assert results.run_folder(Path("out"), "chat", DIGEST, 7) == Path("out/chat/0123456789-seed7")


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, True),
        ({"complete": False}, False),
        ({"scenario_digest": "f" * 64}, False),
        ({"versions": {"speckv": "0.9"}}, False),
        ({"inputs": [{"path": "trace.csv", "bytes": 1, "modified_ns": 1}]}, False),
        ({"schema_version": 0}, False),
    ],
)
def test_only_the_same_complete_run_is_found(tmp_path: Path, changes: dict[str, object], found: bool) -> None:
    results.prepare(tmp_path, manifest(**changes))
    results.write_json(tmp_path / "summary.json", {})
    assert (results.find_complete(tmp_path, DIGEST, "1.0", [], checked=False) is not None) == found


def test_a_run_that_was_not_checked_does_not_stand_for_one_that_is(tmp_path: Path) -> None:
    for checked in (False, True):
        results.prepare(tmp_path, manifest(checked=checked))
        results.write_json(tmp_path / "summary.json", {})
        assert (results.find_complete(tmp_path, DIGEST, "1.0", [], checked=True) is not None) == checked
        assert results.find_complete(tmp_path, DIGEST, "1.0", [], checked=False) is not None


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"complete": true}'])
def test_a_damaged_manifest_finds_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    assert results.find_complete(tmp_path, DIGEST, "1.0", [], checked=False) is None


def test_a_summary_is_part_of_a_run(tmp_path: Path) -> None:
    results.prepare(tmp_path, manifest())
    assert results.find_complete(tmp_path, DIGEST, "1.0", [], checked=False) is None


def test_files_that_change_are_told_apart(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("one")
    before = results.input_facts([trace])
    assert before == results.input_facts([trace])
    trace.write_text("longer")
    assert before != results.input_facts([trace])


def test_preparing_takes_out_what_was_left_and_nothing_else(tmp_path: Path) -> None:
    for name in ("steps.csv", "overview.png", "summary.json", "notes.txt"):
        (tmp_path / name).write_text("old")
    results.prepare(tmp_path, manifest())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "notes.txt"]


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat").write_text("a file")
    with pytest.raises(ResultsError, match=r"chat is in the way, and is no folder"):
        results.prepare(tmp_path / "chat" / "id", manifest())
    with pytest.raises(ResultsError, match=r"chat is in the way, and is no folder"):
        results.prepare(tmp_path / "chat", manifest())


def test_json_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    results.write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="Out of range"):
        results.write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_discarding_leaves_nothing_but_what_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    folder = tmp_path / "results" / "chat" / "id"
    results.prepare(folder, manifest())
    results.discard(folder)
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.txt"]


def test_tables_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="no table of steps"):
        results.read_table(tmp_path, "steps")


def test_the_guide_explains_every_column_and_figure() -> None:
    explained = set(re.findall(r"`([a-z0-9_]+)`", (REPOSITORY / "docs" / "results.md").read_text()))
    columns = {name for name, _ in REQUEST_COLUMNS} | set(STEP_COLUMNS) | set(WINDOW_COLUMNS)
    garbage = Garbage(Ledger(3, 4), 4).figures()
    assert columns | set(Metrics().figures()) | set(garbage) | set(garbage["block_seconds"]) <= explained
    assert {switch.name for switch in SWITCHES} <= explained


def test_the_guide_explains_the_whole_summary(tmp_path: Path) -> None:
    explained = set(re.findall(r"`([a-z0-9_]+)`", (REPOSITORY / "docs" / "results.md").read_text()))
    summary = simulate("minimal", ["workload.synthetic.num_requests=1", "output.pictures=false"], out=tmp_path).summary
    assert set(summary) - {"schema_version"} <= explained
