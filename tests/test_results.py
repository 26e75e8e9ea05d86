"""The folder of a run: its place, finding an earlier run, what may be in the way."""

import json
import os
import re
import subprocess
import sys
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
CODE = "0123456789ab"


def manifest(**changes: object) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "complete": True,
        "scenario_digest": DIGEST,
        "versions": {"speckv": "1.0"},
        "code": CODE,
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
        ({"code": "ba9876543210"}, False),
        ({"code": None}, False),
        ({"inputs": [{"path": "trace.csv", "bytes": 1, "modified_ns": 1}]}, False),
        ({"schema_version": 0}, False),
    ],
)
def test_only_the_same_complete_run_is_found(tmp_path: Path, changes: dict[str, object], found: bool) -> None:
    results.prepare(tmp_path, manifest(**changes))
    results.write_json(tmp_path / "summary.json", {})
    assert (results.find_complete(tmp_path, DIGEST, "1.0", CODE, [], checked=False) is not None) == found


def test_a_run_that_was_not_checked_does_not_stand_for_one_that_is(tmp_path: Path) -> None:
    for checked in (False, True):
        results.prepare(tmp_path, manifest(checked=checked))
        results.write_json(tmp_path / "summary.json", {})
        assert (results.find_complete(tmp_path, DIGEST, "1.0", CODE, [], checked=True) is not None) == checked
        assert results.find_complete(tmp_path, DIGEST, "1.0", CODE, [], checked=False) is not None


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"complete": true}'])
def test_a_damaged_manifest_finds_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    assert results.find_complete(tmp_path, DIGEST, "1.0", CODE, [], checked=False) is None


def test_a_summary_is_part_of_a_run(tmp_path: Path) -> None:
    results.prepare(tmp_path, manifest())
    assert results.find_complete(tmp_path, DIGEST, "1.0", CODE, [], checked=False) is None


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


@pytest.mark.parametrize("place", range(7))
def test_preparing_broken_off_anywhere_leaves_no_run_that_is_called_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """Ctrl-C before each of the files of the earlier run is taken out: summary, two tables of two kinds, picture."""
    results.prepare(tmp_path, manifest())
    names = ("summary.json", "requests.parquet", "requests.csv", "steps.parquet", "steps.csv", "overview.png")
    for name in names:
        (tmp_path / name).write_text("{}")
    assert results.find_complete(tmp_path, DIGEST, "1.0", CODE, [], checked=False) is not None
    unlink = Path.unlink
    seen: list[str] = []

    def interrupted(path: Path, missing_ok: bool = False) -> None:
        if len(seen) == place:
            raise KeyboardInterrupt
        seen.append(path.name)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", interrupted)
    if place < len(names):
        with pytest.raises(KeyboardInterrupt):
            results.prepare(tmp_path, manifest(complete=False))
    else:
        results.prepare(tmp_path, manifest(complete=False))
    assert set(seen) <= set(names)
    assert len(seen) == place
    assert results.read_json(tmp_path / "manifest.json")["complete"] is False
    assert {path.name for path in tmp_path.iterdir()} == {"manifest.json", *names} - set(seen)


def code_tree(root: Path) -> Path:
    for name in ("sim/b.py", "sim/core/a.py", "workloads/c.py", "scenarios/calibrations/h100.yaml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def test_the_code_is_its_sources_and_calibrations(tmp_path: Path) -> None:
    one = results.digest_of_code(code_tree(tmp_path / "one"))
    assert re.fullmatch("[0-9a-f]{12}", one)
    other = code_tree(tmp_path / "other")
    for name in ("sim/core/a.cpython-311.so", "sim/__pycache__/b.pyc", "scenarios/a.yaml", "tests/t.py", "sim/.b.py"):
        (other / name).parent.mkdir(exist_ok=True)
        (other / name).write_text("of no account")
    assert results.digest_of_code(other) == one
    found = {one}
    for name in ("sim/b.py", "sim/core/a.py", "workloads/c.py", "scenarios/calibrations/h100.yaml"):
        (other / name).write_text("edited")
        found.add(results.digest_of_code(other))
    (other / "sim" / "b.py").rename(other / "sim" / "d.py")
    found.add(results.digest_of_code(other))
    assert len(found) == 6


def test_a_source_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (code_tree(tmp_path) / "sim" / "lost.py").symlink_to("nowhere.py")
    with pytest.raises(ResultsError, match=r"cannot read .*lost\.py"):
        results.digest_of_code(tmp_path)


def test_the_core_that_runs_is_no_part_of_the_code() -> None:
    """Nor is it read before a run asks for it."""
    show = "import sim.results as r, sim.cli; print(r.code_digest.cache_info().currsize, r.code_digest())"
    for core in ("plain", ""):
        environment = {**os.environ, "SPECKV_CORE": core}
        done = subprocess.run([sys.executable, "-c", show], cwd=REPOSITORY, env=environment, capture_output=True)
        assert done.stdout.decode().split() == ["0", results.digest_of_code(REPOSITORY)]


def test_a_run_by_other_code_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = ["workload.synthetic.num_requests=1", "output.pictures=false"]
    first = simulate("minimal", changes, out=tmp_path)
    assert simulate("minimal", changes, out=tmp_path).found
    assert first.manifest["set"] == changes
    monkeypatch.setattr(results, "code_digest", lambda: CODE)
    again = simulate("minimal", changes, out=tmp_path)
    assert (again.found, again.folder, again.manifest["code"]) == (False, first.folder, CODE)
    assert again.summary == first.summary
    assert simulate("minimal", changes, out=tmp_path).found


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
