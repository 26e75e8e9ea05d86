"""The benchmarks that others rely on: what they count, compare and write down is right. None of them is timed here."""

from __future__ import annotations

import csv
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from sim.case_files import read_case
from sim.core.scheduler import Scheduler
from sim.policies.presets import DEFAULT_PRESET, PRESETS
from sim.replay import replay_case

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a benchmark by its name."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    return importlib.import_module


# Instructions


@pytest.mark.parametrize(
    ("found", "passes", "says"),
    [
        (1110.0, False, "+11.0% on the 1,000.0 agreed on: MORE THAN 10%"),
        (1100.0, True, "+10.0%"),
        (1000.0, True, "+0.0%"),
        (880.0, True, "keep it so: --update"),
    ],
)
def test_a_count_that_grows_by_more_than_a_tenth_fails(benchmark: Any, found: float, passes: bool, says: str) -> None:
    line, fine = benchmark("instructions").verdict("plain, CPython 3.11", found, 1000.0)
    assert fine is passes
    assert says in line
    assert ("--update, and commit" in line) is not passes


def test_a_python_without_a_count_is_told_so(benchmark: Any) -> None:
    line, fine = benchmark("instructions").verdict("plain, CPython 3.99", 1000.0, None)
    assert fine
    assert "NOT HELD: none agreed on for these" in line


def test_the_command_fails_on_growth_and_agrees_on_request(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    instructions = benchmark("instructions")
    counts = {"plain": 1110.0, "compiled": "there is no valgrind"}
    monkeypatch.setattr(instructions, "BASELINES", tmp_path / "instructions.json")
    monkeypatch.setattr(instructions, "count", counts.__getitem__)
    instructions.BASELINES.write_text(json.dumps({instructions.key("plain"): 1000.0}))

    def command(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["instructions.py", *arguments])
        return instructions.main(), capsys.readouterr().out

    code, said = command()
    assert code == 1
    assert f"{instructions.key('compiled')}: NOT COUNTED: there is no valgrind" in said
    assert command("--update")[0] == 0
    assert json.loads(instructions.BASELINES.read_text()) == {instructions.key("plain"): 1110.0}
    assert command()[0] == 0


@pytest.mark.plain_core
def test_work_that_is_added_to_a_hot_loop_is_caught(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty walks over the running requests before each schedule: 160 instructions a request-step, of some 1,200."""
    instructions = benchmark("instructions")

    def count() -> float:
        engine = instructions.small_run(tmp_path, 25)
        return float(instructions.bytecodes(engine.run) / engine.num_request_steps)

    count()  # what is made once
    before = count()
    assert count() == before
    schedule = Scheduler.schedule

    def slower(self: Scheduler) -> Any:
        total = 0
        for _ in range(20):
            for request in self.running:
                total += request.num_computed_tokens
        return schedule(self)

    monkeypatch.setattr(Scheduler, "schedule", slower)
    assert instructions.verdict("plain", before, before)[1]
    assert not instructions.verdict("plain", count(), before)[1]


def test_bytecodes_of_a_loop(benchmark: Any) -> None:
    """Each turn of a loop costs the same, and what it costs is what the disassembler shows between its jumps."""
    bytecodes = benchmark("instructions").bytecodes

    def turns(count: int) -> Any:
        def loop() -> None:
            for _ in range(count):
                pass

        return loop

    counts = [bytecodes(turns(count)) for count in (0, 1, 2, 1000)]
    a_turn = counts[2] - counts[1]
    assert a_turn == 3  # FOR_ITER, STORE_FAST, JUMP_BACKWARD
    assert counts[3] - counts[0] == 1000 * a_turn


CALLGRIND = """\
# callgrind format
positions: line
events: Ir
ob=(1) /usr/lib/libpython3.11.so.1.0
fl=(1) ceval.c
fn=(1) eval
10 100
+2 20
cob=(2) /site-packages/numpy/_core/_multiarray_umath.so
cfn=(2) add
calls=3 0
* 700
-1 5
ob=(2)
fn=(2)
0 700
ob=(3) /usr/lib/libm.so.6
fn=(3) log
0 9
ob=(1)
fn=(1)
15 1
totals: 835
"""


def test_callgrinds_own_costs_by_library(benchmark: Any) -> None:
    """As its manual has the format: a cost line after `calls=` is what the callee took, which has lines of its own."""
    instructions = benchmark("instructions")
    counted = instructions.counted_by_object(CALLGRIND.splitlines())
    assert sum(counted.values()) == 835
    assert counted["/usr/lib/libpython3.11.so.1.0"] == 126
    assert instructions.ours(counted) == 126


# Cases and scaling


def test_the_margin_of_two_runs(benchmark: Any) -> None:
    """3 s for a million request-steps more is 3 microseconds, whatever start-up took."""
    cases = benchmark("cases")
    few = cases.Run(1.5, 100.0, {"num_request_steps": 200_000})
    many = cases.Run(4.5, 100.0, {"num_request_steps": 1_200_000})
    assert cases.margin(few, many) == pytest.approx(3.0)


def test_history_gets_a_row_a_case(benchmark: Any, tmp_path: Path) -> None:
    cases = benchmark("cases")
    case = cases.Case("30/s K=5", "compiled", "0.3.0", 10.0, 120.0, [1.0, 3.0, 2.0], [2.0, 2.0, 2.0])
    path = tmp_path / "history.csv"
    cases.keep([case], [1000, 6000], path)
    cases.keep([case], [1000, 6000], path)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    facts = {"case": "30/s K=5", "core": "compiled", "version": "0.3.0", "requests": "1000-6000"}
    figures = {
        "median_us": "2.000",
        "least_us": "1.000",
        "most_us": "3.000",
        "ping_pong_us": "2.000",
        "rounds": "1.000",
    }
    assert (facts | figures).items() <= rows[0].items()
    assert "/" not in path.read_text().replace("30/s", "")


def test_the_exponent_of_a_power_is_its_power(benchmark: Any) -> None:
    exponent = benchmark("scaling").exponent
    at = [10.0, 100.0, 5000.0]
    assert exponent(at, [3 * each**1.5 for each in at]) == pytest.approx(1.5, abs=1e-3)
    assert exponent(at, [7.0] * 3) == 0.0


# Against vLLM, and by part


def test_the_case_made_for_a_batch_keeps_it_full(benchmark: Any, tmp_path: Path) -> None:
    """It is a case that the format allows; and tokens that are handed over lead to the same decisions as scripted."""
    against = benchmark("against_vllm")
    path = tmp_path / "batch.json"
    path.write_text(json.dumps(against.batch_case(6)))
    case = read_case(path)
    seconds, trace = against.ours(case, DEFAULT_PRESET)
    assert seconds > 0
    assert trace == replay_case(case, PRESETS[DEFAULT_PRESET])
    sizes = [len(row["scheduled"]) for row in trace["turns"] if row.get("scheduled")]
    assert sorted(sizes)[len(sizes) // 2] == 6
    assert sum(trace["summary"]["num_preemptions"].values()) == 0
    assert set(trace["summary"]["num_output_tokens"].values()) == {128}


def test_the_loop_by_part_takes_the_engines_steps(benchmark: Any, tmp_path: Path) -> None:
    by_part = benchmark("by_part")
    settings = ["workload.synthetic.num_requests=30"]
    spent, steps = by_part.loop(*by_part.simulation_of(settings, tmp_path))
    simulation, _ = by_part.simulation_of(settings, tmp_path)
    simulation.run()
    assert steps == simulation.num_request_steps
    assert all(ns > 0 for ns in spent.ns.values())


# Measured data


@pytest.mark.parametrize("name", ["serving", "real_run", "acceptance_measured"])
def test_data_that_are_not_there_end_in_one_line(
    benchmark: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [f"{name}.py", str(tmp_path / "absent")])
    with pytest.raises(SystemExit) as ended:
        benchmark(name).main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith(f"{name}.py: there is no {tmp_path}/absent/")
    assert len(said.splitlines()) == 1
    assert "docs/timing.md, Where the measured data come from" in said


def test_the_sources_named_are_those_of_the_documentation(benchmark: Any) -> None:
    page = (REPOSITORY / "docs" / "timing.md").read_text(encoding="utf-8")
    assert "## Where the measured data come from" in page
    for source in benchmark("measured").SOURCES.values():
        assert source.split(" (")[0] in page
