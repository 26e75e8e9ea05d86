"""Which steps a run writes down: each thinned table against the full one, its readers, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from sim import notebook, pictures, results
from sim.build import build
from sim.cli import app
from sim.commands.again import explain
from sim.observers.recorder import STEP_COLUMNS, WINDOW_COLUMNS
from sim.outcome import Job, measure
from sim.recording import Recording, RecordingError, read_recording
from sim.report.run_data import over_time
from sim.run import Result, simulate
from sim.scenario import ScenarioError, load_scenario
from sim.scenario_source import read_text
from sim.sweep_schema import SweepError, sweep_from

TINY = """
engine: {num_gpu_blocks: 30, max_model_len: 256, max_num_seqs: 8, speculative_config: {method: eagle3, num_speculative_tokens: 3}}
workload:
  synthetic:
    num_requests: 40
    arrivals: {process: poisson, rate: 20}
    prompt_tokens: {distribution: uniform, min: 8, max: 90}
    output_tokens: {distribution: uniform, min: 1, max: 60}
events: [{type: abort, rate_per_s: 2}, {type: reset_prefix_cache, every_s: 0.7, reset_running_requests: true}]
"""  # noqa: E501
WINDOW_NS = 100_000_000
LEVELS = [name for name in WINDOW_COLUMNS if name.startswith(("res_", "content_"))]
LEVELS += ["held_blocks", "num_running", "num_waiting"]
SUMS = [name for name in WINDOW_COLUMNS if name in STEP_COLUMNS and name not in LEVELS]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("recording") / "tiny.yaml"
    file.write_text(TINY)
    return file


def recorded(tiny: Path, steps: str, *overrides: str) -> Result:
    return simulate(tiny, [f"output.steps={steps}", "output.pictures=false", *overrides], out=tiny.parent / "results")


@pytest.fixture(scope="module")
def full(tiny: Path) -> Result:
    return recorded(tiny, "all")


@pytest.fixture(scope="module")
def windows(tiny: Path) -> Result:
    return recorded(tiny, "window:100ms")


# What is written


def test_the_summary_does_not_depend_on_it(tiny: Path, full: Result, windows: Result) -> None:
    assert full.summary["num_preemptions"] > 0
    assert full.summary["num_aborted"] > 0
    kept = (full.folder / results.SUMMARY).read_bytes()
    requests = (full.folder / "requests.parquet").read_bytes()
    for result in (windows, recorded(tiny, "every:10"), recorded(tiny, "none")):
        assert (result.folder / results.SUMMARY).read_bytes() == kept
        assert (result.folder / "requests.parquet").read_bytes() == requests


def test_each_so_manyth_row_is_that_of_the_full_table(tiny: Path, full: Result) -> None:
    steps = full.steps()
    for every in (2, 10, 100):
        thinned = recorded(tiny, f"every:{every}").steps()
        pd.testing.assert_frame_equal(thinned, steps.iloc[::every].reset_index(drop=True))


def test_windows_tile_the_run(full: Result, windows: Result) -> None:
    table = windows.steps()
    end = round(full.summary["duration_s"] * 1e9)
    assert tuple(table.columns) == WINDOW_COLUMNS
    assert table["window"].tolist() == list(range(-(-end // WINDOW_NS)))
    assert table["from_ns"].tolist() == list(range(0, end, WINDOW_NS))
    assert table["to_ns"].tolist() == [*range(WINDOW_NS, end, WINDOW_NS), end]


def test_windows_in_which_nothing_happens_are_one_row(tiny: Path) -> None:
    """Three requests within an hour: as many rows as there is something to say, and they tile the run all the same."""
    arrivals = "workload.synthetic.arrivals={process: constant, rate: 0.001}"
    result = recorded(tiny, "window:1ms", arrivals, "workload.synthetic.num_requests=3", "events=[]")
    table = result.steps()
    end = round(result.summary["duration_s"] * 1e9)
    assert len(table) < 20 * result.summary["num_steps"] < end / 1e6 / 10
    assert table["from_ns"].tolist() == [0, *table["to_ns"].tolist()[:-1]]
    assert table["to_ns"].iloc[-1] == end
    assert (table["window"] == table["from_ns"] // 1_000_000).all()
    seconds = (table["to_ns"] - table["from_ns"]) / 1e9
    assert (table["res_free"] * seconds).sum() == pytest.approx(result.summary["slot_seconds"]["free"], rel=1e-9)


def test_sums_are_those_of_the_steps_taken_back_in_a_window(full: Result, windows: Result) -> None:
    steps, table = full.steps(), windows.steps()
    by_window = steps.groupby(steps["updated_ns"] // WINDOW_NS)
    expected = by_window[SUMS].sum().reindex(table["window"], fill_value=0)
    assert np.array_equal(table[SUMS].to_numpy(), expected.to_numpy())
    assert table["num_steps"].tolist() == by_window.size().reindex(table["window"], fill_value=0).tolist()
    assert table["num_steps"].sum() == full.summary["num_steps"]


class Integrals:
    """Levels over time by window, in whole slot-ns, from what holds after each record. Told after the ledger."""

    def __init__(self, simulation: Any, window_ns: int) -> None:
        self.ledger, self.scheduler, self.window_ns = simulation.ledger, simulation.scheduler, window_ns
        self.now = 0
        self.levels = [0] * len(LEVELS)
        self.by_window: dict[int, list[int]] = {}
        self.look(0)

    def look(self, now: int) -> None:
        while self.now < now:
            window = self.now // self.window_ns
            until = min(now, (window + 1) * self.window_ns)
            sums = self.by_window.setdefault(window, [0] * len(LEVELS))
            for number, level in enumerate(self.levels):
                sums[number] += level * (until - self.now)
            self.now = until
        ledger, scheduler = self.ledger, self.scheduler
        queues = (len(scheduler.running), len(scheduler.waiting))
        self.levels = [*ledger.reservations(), *ledger.content()[:3], ledger.held_blocks, *queues]

    def arrived(self, now: int, request: object) -> None:
        self.look(now)

    scheduled = step_ended = updated = interrupted = arrived

    def closed(self, now: int) -> None:
        self.look(now)


def test_levels_are_means_over_a_window_s_time(tiny: Path, windows: Result) -> None:
    simulation = build(load_scenario(tiny))
    watcher = Integrals(simulation, WINDOW_NS)
    simulation.add_observer(watcher)
    simulation.run()
    table = windows.steps()
    lengths = (table["to_ns"] - table["from_ns"]).to_numpy()
    assert sorted(watcher.by_window) == table["window"].tolist()
    expected = np.array([watcher.by_window[number] for number in table["window"]]) / lengths[:, None]
    assert table[LEVELS].to_numpy() == pytest.approx(expected, rel=1e-9, abs=1e-6)
    for name, seconds in windows.summary["slot_seconds"].items():
        if f"res_{name}" in table:
            assert float((table[f"res_{name}"] * lengths).sum()) / 1e9 == pytest.approx(seconds, abs=1e-6)


def test_csv_says_the_same(tiny: Path, windows: Result) -> None:
    other = recorded(tiny, "window:100ms", "output.format=csv")
    pd.testing.assert_frame_equal(other.steps(), windows.steps())
    assert pictures.thin(other.folder).states.keys() == pictures.thin(windows.folder).states.keys()


def test_a_border_belongs_to_the_window_behind_it(tiny: Path) -> None:
    """Steps of 10 ms, one after the other, and windows of 50 ms: the fifth is taken back as the second window begins,
    so that the last, which is taken back at the end of the run and on a border, has a window of no length."""
    fixed = ["timing={fixed_step_ms: 10, schedule_ms: 0, update_ms: 0}", "events=[]", "engine.speculative_config=null"]
    fixed.append(
        "workload={synthetic: {num_requests: 1, arrivals: {process: all_at_once}, prompt_tokens: 8, output_tokens: 10}}"
    )
    table = recorded(tiny, "window:50ms", *fixed).steps()
    assert table["num_steps"].tolist() == [4, 5, 1]
    assert table["from_ns"].tolist() == [0, 50_000_000, 100_000_000]
    assert table["to_ns"].tolist() == [50_000_000, 100_000_000, 100_000_000]
    assert table["num_running"].tolist() == [1.0, 1.0, 0.0]
    assert table["num_delivered_tokens"].sum() == 10


# Who reads it


def test_pictures_of_windows_hold_the_same_integrals(full: Result, windows: Result) -> None:
    whole, thinned = pictures.thin(full.folder), pictures.thin(windows.folder)
    assert float(np.sum(np.diff(thinned.edges_s))) == pytest.approx(full.summary["duration_s"])
    for name, seconds in full.summary["slot_seconds"].items():
        if f"res_{name}" in thinned.states:
            found = float(np.sum(thinned.states[f"res_{name}"] * np.diff(thinned.edges_s)))
            assert found == pytest.approx(seconds, abs=1e-6)
    # Tokens are means a step, whatever a row stands for.
    few = pictures.thin(windows.folder, points=1).tokens["num_tokens"][0]
    assert few == pytest.approx(pictures.thin(full.folder, points=1).tokens["num_tokens"][0])
    assert whole.num_steps == full.summary["num_steps"]
    assert over_time(windows.folder)[1] is None


@pytest.mark.parametrize("steps", ["every:10", "window:100ms"])
def test_a_thinned_run_has_its_picture_and_its_story(
    tiny: Path, steps: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = simulate(tiny, [f"output.steps={steps}"], out=tiny.parent / "drawn")
    assert (result.folder / results.PICTURE).is_file()
    explain(result.folder, request="r7")
    assert "r7" in capsys.readouterr().out


def test_the_notebooks_say_when_they_need_each_step(tiny: Path, full: Result, windows: Result) -> None:
    with pytest.raises(ValueError, match=r"output\.steps = 'every:10': each step is needed here; allowed: all"):
        notebook.slots_per_request(recorded(tiny, "every:10"))
    lengths = windows.steps()["to_ns"] - windows.steps()["from_ns"]
    exact = float((windows.steps()["num_running"] * lengths).sum()) / 1e9
    assert notebook.running_seconds(windows) == pytest.approx(exact)
    # The full table knows the queue at schedules only: it counts those that have ended until the next one.
    assert exact <= notebook.running_seconds(full)


def test_a_sweep_takes_the_same(tiny: Path, windows: Result) -> None:
    outcome = measure(Job(0, load_scenario(tiny), "window:100ms"))
    assert outcome.steps == (windows.folder / "steps.parquet").read_bytes()
    with pytest.raises(SweepError, match=r"(?s)steps = 'evry:100': is not known; did you mean `every:100`\?.*allowed"):
        sweep_from(read_text("scenario: quickstart\nsteps: evry:100"))


# What may be written


@pytest.mark.parametrize(
    ("written", "meant", "again"),
    [
        (True, Recording(), True),
        ("all", Recording(), True),
        ("every:1", Recording(), True),
        (False, Recording(0), False),
        ("none", Recording(0), False),
        ("every:0100", Recording(100), "every:100"),
        ("window:1s", Recording(window_ns=10**9), "window:1s"),
        ("window:60000ms", Recording(window_ns=60 * 10**9), "window:1min"),
        ("window:0.5h", Recording(window_ns=1800 * 10**9), "window:30min"),
        ("window:1.5ms", Recording(window_ns=1_500_000), "window:1.5ms"),
    ],
)
def test_what_is_written_and_how_it_is_kept(written: bool | str, meant: Recording, again: bool | str) -> None:
    assert read_recording(written) == meant
    assert meant.written == again
    assert read_recording(again) == meant


@pytest.mark.parametrize(
    ("written", "nearest"),
    [
        ("evry:100", "every:100"),
        ("every", "every:100"),
        ("every:0", None),
        ("every:-3", None),
        ("windows:2s", "window:2s"),
        ("window:1", "window:1s"),
        ("window:5mins", "window:5min"),
        ("window:1us", None),
        ("window:0.5ms", None),
        ("window:1.5000001ms", None),
        ("nne", "none"),
        ("", None),
        (100, "every:100"),
        (None, None),
    ],
)
def test_what_it_cannot_be(written: object, nearest: str | None) -> None:
    with pytest.raises(RecordingError) as caught:
        read_recording(written)
    assert caught.value.nearest == nearest


def test_all_and_true_are_the_same_run(tiny: Path, full: Result) -> None:
    for written in ("true", "every:1"):
        assert recorded(tiny, written).found
    assert full.manifest["scenario"]["output"]["steps"] is True


def test_an_error_names_key_and_value(tiny: Path) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_scenario(tiny, ["output.steps=evry:100"])
    assert "output.steps = 'evry:100': is not known; did you mean `every:100`?" in str(caught.value)
    assert "allowed: all or none (or true or false), every:N with N from 1, or window:DURATION" in str(caught.value)


def test_the_command_takes_it(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny.parent)
    arguments = ["run", str(tiny), "--quiet", "--set", "output.pictures=false", "--out", "results"]
    done = CliRunner().invoke(app, [*arguments, "--record", "steps=window:100ms"])
    assert done.exit_code == 0
    manifest = json.loads((Path(done.stdout.strip()) / "manifest.json").read_text())
    assert manifest["scenario"]["output"]["steps"] == "window:100ms"


@pytest.mark.parametrize(
    ("text", "meant"),
    [("steps=evry:100", "steps=every:100"), ("all", "steps=all"), ("stps=window:2s", "steps=window:2s")],
)
def test_the_command_says_what_it_takes(tiny: Path, text: str, meant: str) -> None:
    done = CliRunner().invoke(app, ["run", str(tiny), "--record", text])
    assert done.exit_code == 2
    assert f"--record {text!r}: " in done.stderr
    assert f"did you mean `{meant}`?" in done.stderr
    assert "allowed: steps=WHICH" in done.stderr
    assert CliRunner().invoke(app, ["run", str(tiny), "--record", "steps=all", "--seeds", "2"]).exit_code == 2
