"""A scenario against its twin: same requests and draws, one part at a time, intervals by hand."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sim import results
from sim.against import FIGURES, SWITCHES, against, write
from sim.build import build
from sim.cli import app
from sim.paired import Interval
from sim.run import simulate
from sim.scenario import ScenarioError, load_scenario

BUSY = """
engine: {num_gpu_blocks: 30, max_model_len: 256, max_num_seqs: 8, speculative_config: {method: eagle3, num_speculative_tokens: 3}}
workload:
  synthetic:
    num_requests: 25
    arrivals: {process: poisson, rate: 40}
    prompt_tokens: {distribution: uniform, min: 8, max: 90}
    output_tokens: {distribution: uniform, min: 1, max: 60}
"""  # noqa: E501

ALONE = """
engine:
  num_gpu_blocks: 500
  max_model_len: 1024
  async_scheduling: false
  speculative_config: {method: eagle3, num_speculative_tokens: 3}
timing: {fixed_step_ms: 10, schedule_ms: 0, update_ms: 0}
acceptance: {model: geometric, rate: 0.5}
workload:
  synthetic:
    num_requests: 10
    arrivals: {process: constant, rate: 1}
    prompt_tokens: {distribution: fixed, tokens: 40}
    output_tokens: {distribution: fixed, tokens: 20}
    shared_prefix: {count: 1, tokens: 64}
"""


@pytest.fixture
def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "busy.yaml").write_text(BUSY)
    (tmp_path / "alone.yaml").write_text(ALONE)
    return tmp_path / "busy.yaml"


def test_rounding_prints_as_nothing() -> None:
    """Sums of doubles near 1,000 differ by some 1e-13 of it; one part in a million is no rounding."""
    from sim.commands.against import _settled

    assert _settled(Interval(1e-10, -2e-10, 3e-10, 5), (1000.0, 1000.0)) == Interval(0, 0, 0, 5)
    assert _settled(Interval(1e-10, None, None, 1), (1000.0, 0.0)) == Interval(0, None, None, 1)
    assert _settled(Interval(1e-3, -1e-7, 2e-3, 5), (1000.0, 1000.0)) == Interval(1e-3, 0, 2e-3, 5)


def test_twins_have_the_same_requests_and_draws(busy: Path) -> None:
    base = simulate(busy, out="a").requests().sort_values("request")
    twin = simulate(busy, ["engine.speculative_config=null"], out="b").requests().sort_values("request")
    for column in ("arrival_ns", "num_prompt_tokens", "num_output_tokens"):
        assert base[column].tolist() == twin[column].tolist()
    models = []
    for k in (3, 5):
        override = [f"engine.speculative_config.num_speculative_tokens={k}"]
        simulation = build(load_scenario(busy, override))
        acceptance: Any = simulation._engine.device.acceptance
        models.append([min(run, 3) for run in acceptance.runs(7, 0, 50).tolist()])
    assert models[0] == models[1]


def test_only_the_dropped_block_costs_hits(busy: Path) -> None:
    """One request at a time behind a prefix of 64 tokens: each of nine later ones hits 4 blocks of 16, with EAGLE 3.

    Nothing else can take hits: the pool is ample, every step takes 10 ms, and scheduling is synchronous.
    """
    found = against("alone.yaml", seeds=2)
    assert found.figures["prefix_cache_hits"] == (9 * 48, 9 * 64)
    parts = {part.name: part for part in found.parts}
    costs = {name: part.differences["prefix_cache_hits"] for name, part in parts.items()}
    assert costs.pop("dropped_block") == found.differences["prefix_cache_hits"] == Interval(-144, -144, -144, 2)
    assert set(costs.values()) == {Interval(0, 0, 0, 2)}
    assert {name for name, part in parts.items() if part.missing} == {"placeholders", "discard", "drafting_time"}
    # Hits save no step here, since a prompt fits one: so that part costs nothing else that is timed.
    assert parts["dropped_block"].differences["output_throughput"].mean == 0
    # Five outputs in nine are drafts: verification is all there is to gain.
    assert parts["speculation"].differences["e2el_ms_mean"].mean < 0
    assert parts["lookahead"].differences["slot_seconds_lookahead"].mean > 0


def test_parts_and_interaction_add_up(busy: Path) -> None:
    found = against(busy, seeds=3)
    assert [part.name for part in found.parts] == [switch.name for switch in SWITCHES] + ["interaction", "speculation"]
    assert found.figures["num_preemptions"][0] > 0
    for name, whole in found.differences.items():
        added = sum(part.differences[name].mean for part in found.parts)
        assert added == pytest.approx(whole.mean, rel=1e-9, abs=1e-6)
        assert whole.mean == pytest.approx(found.figures[name][0] - found.figures[name][1], rel=1e-9, abs=1e-9)


def test_the_bytes_of_the_pool_are_held_fixed(busy: Path) -> None:
    """A token has 131,072 bytes, with the EAGLE layer 135,168: 30 blocks hold as much as 30.94 without it."""
    found = against(busy, seeds=1)
    assert any("30 blocks, and 30 in the twin" in text for text in found.held_fixed)
    found = against(busy, seeds=1, overrides=["engine.num_gpu_blocks=1200"])
    assert any("1200 blocks, and 1237 in the twin" in text for text in found.held_fixed)
    found = against(busy, ["engine.num_gpu_blocks=60"], seeds=1)
    assert any("the changes set the blocks" in text for text in found.held_fixed)
    assert found.parts == ()
    assert found.figures["num_preemptions"][0] > found.figures["num_preemptions"][1]
    found = against(busy, seeds=1, overrides=["engine.num_gpu_blocks=null", "engine.max_num_seqs=4"])
    assert any("the card" in text for text in found.held_fixed)


def test_policies_that_need_drafts_leave_with_them(busy: Path) -> None:
    found = against(busy, ["K=0"], seeds=1, overrides=["engine.policies.undo=rewind"])
    parts = {part.name: part for part in found.parts}
    assert parts["garbage"].missing == parts["overhang"].missing == "rejected blocks are freed at once"


def test_other_twins(busy: Path) -> None:
    found = against(busy, ["K=1"], seeds=1)
    assert found.changes == ("engine.speculative_config.num_speculative_tokens=1",)
    assert found.parts == ()


def test_workers_find_the_same(busy: Path) -> None:
    assert against("alone.yaml", seeds=2, jobs=2) == against("alone.yaml", seeds=2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([], "nothing to compare"),
        (["seed=3"], "same seed"),
        (["engine.max_num_seqs=8"], "changes nothing"),
        (["engine.nonsense=8"], "unknown key"),
        (["K=x"], "num_speculative_tokens"),
    ],
)
def test_comparisons_that_cannot_be_made(busy: Path, changes: list[str], said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        against(busy, changes, seeds=1)


def test_it_is_written_twice_the_same(busy: Path) -> None:
    found = against("alone.yaml", ["K=1"], seeds=2)
    folder = write(found, Path("out"))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(before) == {"comparison.json", "comparison.csv"}
    assert results.comparisons_below(Path("out")) == [folder]
    assert write(against("alone.yaml", ["K=1"], seeds=2), Path("out")) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    rows = list(csv.DictReader((folder / "comparison.csv").read_text().splitlines()))
    assert {row["figure"] for row in rows} <= set(FIGURES)
    assert {row["part"] for row in rows} == {"whole"}


def test_the_command(busy: Path) -> None:
    done = CliRunner().invoke(app, ["run", "alone.yaml", "--seeds", "2"])
    assert done.exit_code == 0, done.output
    assert max(len(line) for line in done.stdout.splitlines() if "held fixed" not in line) <= 100
    assert "dropped block" in done.stdout
    (folder,) = Path("results").glob("*/*")
    assert folder.name.endswith("-seed0-against")
    written = json.loads((folder / "comparison.json").read_text())
    assert written["changes"] == ["engine.speculative_config=null"]
    assert written["seeds"] == [0, 1]
    assert written["figures"]["prefix_cache_hits"]["difference"]["mean"] == -144
    done = CliRunner().invoke(app, ["run", "alone.yaml", "--against", "K=1", "--seeds", "1", "--json", "--quiet"])
    assert json.loads(done.stdout)["figures"]["num_preemptions"]["difference"]["low"] is None
    assert CliRunner().invoke(app, ["run", "alone.yaml", "--against", "seed=1"]).exit_code == 2
    small = CliRunner().invoke(app, ["run", "alone.yaml", "--against", "k=0"])
    assert (small.exit_code, small.stderr) == (2, "speckv: --against k=0: no such key; did you mean `K=0`?\n")
    assert CliRunner().invoke(app, ["run", "alone.yaml", "--against", "K=1", "--check"]).exit_code == 2
