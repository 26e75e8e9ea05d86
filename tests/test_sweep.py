"""Sweeps: what they make of axes, what they leave, and that nothing is lost, whatever is killed."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import sim
from sim.compiled import CORE
from sim.outcome import Job, Outcome, flat_figures
from sim.results import ResultsError, code_digest
from sim.scenario_source import Source, read_text
from sim.sweep import SweepError, SweepProgress, SweepStopped, load, load_steps, sweep
from sim.sweep_schema import SweepFile, read_sweep, sweep_from
from sim.workers import Limits, Usage, run_jobs

K = "engine.speculative_config.num_speculative_tokens"
RATE = "workload.synthetic.arrivals.rate"

TINY = """
engine: {num_gpu_blocks: 60, max_model_len: 256, max_num_seqs: 8, speculative_config: {method: eagle3, num_speculative_tokens: 3}}
timing: {fixed_step_ms: 10}
workload:
  synthetic:
    num_requests: 40
    arrivals: {process: poisson, rate: 20}
    prompt_tokens: {distribution: uniform, min: 8, max: 90}
    output_tokens: {distribution: uniform, min: 1, max: 60}
slo: {ttft_ms: 1000}
"""  # noqa: E501


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    scenario = tmp_path / "tiny.yaml"
    scenario.write_text(TINY)
    return scenario


def spec(scenario: Path, **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"name": "t", "scenario": str(scenario), "axes": {"grid": {K: [0, 3], RATE: [10, 30]}}}
    return given | {"seeds": 2} | more


def dataset(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (folder / "points").iterdir()}


def num_ran(folder: Path) -> int:
    """Runs that a worker made: the side file has a line for each."""
    return len((folder / "times.csv").read_text().splitlines()) - 1


# Axes


def axes(text: str) -> list[dict[str, Any]]:
    return list(sweep_from(read_text(f"scenario: quickstart\naxes: {text}")).points())


def test_a_grid_has_every_combination_and_the_last_axis_changes_fastest() -> None:
    assert axes("{grid: {a: [1, 2], b: [x, y]}}") == [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 2, "b": "x"},
        {"a": 2, "b": "y"},
    ]


def test_zip_pairs_and_a_list_is_as_written_and_kinds_are_crossed() -> None:
    assert axes("{zip: {a: [1, 2], b: [3, 4]}}") == [{"a": 1, "b": 3}, {"a": 2, "b": 4}]
    assert axes("{list: [{a: 1}, {a: 5}], zip: {b: [3, 4], c: [5, 6]}}") == [
        {"a": 1, "b": 3, "c": 5},
        {"a": 1, "b": 4, "c": 6},
        {"a": 5, "b": 3, "c": 5},
        {"a": 5, "b": 4, "c": 6},
    ]
    assert axes("{}") == [{}]


RANGES = """
    - {key: a, distribution: uniform, min: 2.0, max: 4.0}
    - {key: b, distribution: log_uniform, min: 1, max: 100}
    - {key: c, distribution: whole, min: 1, max: 4}
    - {key: d, distribution: choice, values: [x, y]}
    - {key: e, distribution: log_whole, min: 1, max: 255}
"""


def test_a_sobol_sequence_is_even_in_every_axis() -> None:
    """64 points: in one dimension each 64th of the interval has one, and a shift round it changes that by nothing."""
    points = axes(f"\n  sobol:\n   n: 64\n   over:{RANGES}")
    for u in (
        [(point["a"] - 2) / 2 for point in points],
        [np.log(point["b"]) / np.log(100) for point in points],
    ):
        assert np.ptp(np.diff(sorted(u))) < 1e-9  # evenly spaced
        assert 0 <= min(u)
        assert max(u) < 1
    assert [sum(point["c"] == value for point in points) for value in (1, 2, 3, 4)] == [16] * 4
    assert sum(point["d"] == "x" for point in points) == 32
    assert [sum(2**n <= point["e"] < 2 ** (n + 1) for point in points) for n in range(8)] == [8] * 8


def test_random_points_are_in_range_and_depend_on_their_seed_alone() -> None:
    text = f"\n  random:\n   n: 500\n   seed: %d\n   over:{RANGES}"
    points = axes(text % 1)
    assert points == axes(text % 1)
    assert points != axes(text % 2)
    assert {type(point["c"]) for point in points} == {int}
    assert {point["c"] for point in points} == {1, 2, 3, 4}
    assert all(2 <= point["a"] < 4 and 1 <= point["b"] < 100 and 1 <= point["e"] <= 255 for point in points)
    # Half of the draws of log_uniform lie below the geometric mean: 250, and five standard deviations are 56.
    assert abs(sum(point["b"] < 10 for point in points) - 250) < 56


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("scenario: q\naxes: {gird: {}}", "s.yaml:2: axes.gird = {}: unknown key; did you mean `grid`?"),
        ("seeds: 1", "scenario: is needed"),
        ("scenario: q\nlimits: {time_s: 3s}", "limits.time_s = '3s': has the unit 's'"),
        ("scenario: q\nseeds: [1, 1]", "a seed is given twice"),
        ("scenario: q\naxes: {zip: {a: [1], b: [1, 2]}}", "the lists differ in length (a: 1, b: 2)"),
        ("scenario: q\naxes: {list: [{a: 1}, {b: 2}]}", "point 1 and point 0 differ in their keys: a, b"),
        ("scenario: q\naxes: {grid: {seed: [1]}}", "the seeds of a sweep are its own"),
        ("scenario: q\nset: {output.steps: true}", "`steps: true` for tables of steps"),
        ("scenario: q\nset: {a: 1}\naxes: {grid: {a: [1]}}", "a is set twice, also under set"),
        ("scenario: q\naxes: {grid: {a..b: [1]}}", "is no key of a scenario"),
        ("scenario: q\naxes: {sobol: {n: 3, over: [{key: a, distribution: whole, min: 1, max: 2}]}}", "power of two"),
        ("scenario: q\naxes: {sobol: {n: 4, over: [{key: a, distribution: whole, min: 3, max: 2}]}}", "is above max 2"),
        (
            "scenario: q\naxes: {random: {n: 4, over: [{key: a, distribution: unifrom, min: 3, max: 2}]}}",
            "did you mean `uniform`?",
        ),
        ("scenario: q\nsteps: yes", "is text, not true or false (YAML 1.2)"),
    ],
)
def test_a_sweep_that_makes_no_sense_says_where_and_why(text: str, said: str) -> None:
    with pytest.raises(SweepError) as caught:
        sweep_from(read_text(text, Path("s.yaml")))
    assert said in str(caught.value)
    assert str(caught.value).startswith("sweep s.yaml cannot be run: ")


def test_a_key_that_no_point_can_set_is_refused_at_its_line(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("scenario: tiny.yaml\naxes:\n  grid:\n    engine.max_num_seq: [1, 2]\n")
    with pytest.raises(SweepError, match=r"s\.yaml:4: .*max_num_seq = 1: unknown key; did you mean `max_num_seqs`"):
        sweep(tmp_path / "s.yaml")
    assert not (tmp_path / "results").exists()
    with pytest.raises(SweepError, match="did you mean `small`"):
        sweep("smal")
    with pytest.raises(SweepError, match="there is no such file"):
        sweep(spec(tmp_path / "none.yaml"))


@pytest.mark.parametrize("name", ["small", "k-by-load", "watermark"])
def test_the_shipped_sweeps_can_be_run(name: str) -> None:
    from sim.sweep import _scenario

    file: SweepFile = read_sweep(name)
    assert file.name == name
    points = list(file.points())
    for point in points[:: max(len(points) // 6, 1)]:
        _scenario(file, point)


# The dataset


def test_a_row_is_the_summary_of_the_same_run(tiny: Path) -> None:
    result = sim.sweep(spec(tiny), jobs=2)
    frame = sim.sweep.load(result.folder)  # type: ignore[attr-defined]
    assert list(frame["point"]) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert list(frame["seed"]) == [0, 1] * 4
    assert list(frame[K]) == [0, 0, 0, 0, 3, 3, 3, 3]
    assert set(frame["status"]) == {"ok"}
    assert result.manifest["complete"]
    for number, overrides in ((1, ["engine.speculative_config=null"]), (5, [f"{K}=3"])):
        run = sim.simulate(tiny, [*overrides, f"{RATE}=10", "seed=1", "output.pictures=false"])
        row = frame.iloc[number]
        for name, value in flat_figures(run.summary).items():
            assert row[name] == value or (value is None and np.isnan(row[name])), name


def test_the_number_of_workers_changes_no_byte_and_a_finished_sweep_is_found(tiny: Path, tmp_path: Path) -> None:
    told: list[SweepProgress] = []
    one = sweep(spec(tiny), out="one", jobs=1, watch=told.append).folder
    two = sweep(spec(tiny), out="two", jobs=2).folder
    assert dataset(one) == dataset(two)
    assert told[-1].total == told[-1].done == 8
    assert max(progress.running for progress in told) == 1
    before = {file: file.stat().st_mtime_ns for file in (one / "points").iterdir()}
    sweep(spec(tiny), out="one", jobs=1)
    assert before == {file: file.stat().st_mtime_ns for file in (one / "points").iterdir()}


def test_equal_points_are_run_once(tiny: Path) -> None:
    """Acceptance has no meaning where nothing is drafted, and the same point may come twice."""
    points = [{K: 0}, {K: 3}, {K: 3}]
    axes = {"list": points, "grid": {"acceptance": [{"model": "geometric", "rate": r} for r in (0.2, 0.8)]}}
    folder = sweep(spec(tiny, axes=axes, seeds=[5, 3]), jobs=2).folder
    frame = load(folder)
    assert len(frame) == 12
    assert num_ran(folder) == 2 * (1 + 2)
    assert frame["scenario_digest"].nunique() == 6
    assert list(frame["seed"]) == [3, 5] * 6
    assert frame.groupby("scenario_digest")["e2el_ms_mean"].nunique().eq(1).all()
    assert json.loads(frame["acceptance"][0]) == {"model": "geometric", "rate": 0.2}


def test_points_that_fail_are_recorded_and_the_others_go_on(tiny: Path, tmp_path: Path) -> None:
    axes = {
        "list": [
            {K: 3, "engine.num_gpu_blocks": 60, "workload.synthetic.num_requests": 10},
            {K: 999, "engine.num_gpu_blocks": 60, "workload.synthetic.num_requests": 10},  # K + 1 above max_model_len
            {K: 3, "engine.num_gpu_blocks": 5, "workload.synthetic.num_requests": 10},  # requests that never fit
            {K: 3, "engine.num_gpu_blocks": 60, "workload.synthetic.num_requests": 3_000_000},  # takes for ever
        ]
    }
    given = spec(tiny, axes=axes, seeds=1, limits={"time_s": 1.5})
    result = sweep(given, jobs=2)
    frame = result.table()
    assert list(frame["status"]) == ["ok", "refused", "refused", "time_limit"]
    assert result.manifest["counts"] == {"ok": 1, "refused": 2, "time_limit": 1}
    assert "num_speculative_tokens = 999" in frame["error"][1]
    assert "num_gpu_blocks" in frame["error"][2]
    assert frame["error"][3] == "took more than 1.5 s"
    assert frame["num_finished"][0] == 10
    assert frame["num_finished"].isna().sum() == 3
    done = num_ran(result.folder)
    sweep(given, jobs=2)
    assert num_ran(result.folder) == done
    # Another limit makes it the same sweep, of which only what was over the limit is run again.
    again = sweep(given | {"limits": {"memory_mb": 20}}, jobs=2)
    assert num_ran(result.folder) == done + 1
    assert list(again.table()["status"]) == ["ok", "refused", "refused", "memory_limit"]


def test_tables_of_steps_are_kept_where_asked_for(tiny: Path) -> None:
    folder = sweep(spec(tiny, axes={"grid": {K: [0, 3]}}, seeds=1, steps=True), jobs=1).folder
    frame = load(folder)
    for row in frame.itertuples():
        assert len(load_steps(folder, str(row.scenario_digest))) == row.num_steps
    shutil.rmtree(folder / "steps")
    sweep(spec(tiny, axes={"grid": {K: [0, 3]}}, seeds=1, steps=True), jobs=1)
    assert len(list((folder / "steps").iterdir())) == 2
    with pytest.raises(ResultsError, match="no table of steps"):
        load_steps(folder, "0" * 64)


def test_another_sweep_in_the_same_folder_is_refused_with_the_reason(tiny: Path, tmp_path: Path) -> None:
    folder = sweep(spec(tiny, seeds=1, axes={}), jobs=1).folder
    before = dataset(folder)
    with pytest.raises(ResultsError, match="holds another sweep: axes and seeds differ"):
        sweep(spec(tiny, seeds=2, axes={"grid": {K: [1]}}))
    tiny.write_text(TINY.replace("rate: 20", "rate: 21"))
    with pytest.raises(ResultsError, match="holds another sweep: scenario differs"):
        sweep(spec(tiny, seeds=1, axes={}))
    tiny.write_text(TINY)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["code"] == code_digest()
    for before_it_was_recorded in (manifest | {"code": "0" * 12}, {k: v for k, v in manifest.items() if k != "code"}):
        (folder / "manifest.json").write_text(json.dumps(before_it_was_recorded))
        with pytest.raises(ResultsError, match=r"made by other code of the same version\. Give this one another name"):
            sweep(spec(tiny, seeds=1, axes={}))
    (folder / "manifest.json").write_text(json.dumps(manifest | {"speckv": "0.0.1"}))
    with pytest.raises(ResultsError, match=r"made by speckv 0\.0\.1"):
        sweep(spec(tiny, seeds=1, axes={}))
    assert dataset(folder) == before
    with pytest.raises(ResultsError, match=r"manifest\.json"):
        load(tmp_path)


def test_a_folder_that_cannot_be_written_is_said_before_anything_runs(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="file is in the way, and is no folder"):
        sweep(spec(tiny), out=tmp_path / "file")


def mounted(folder: Path, options: str) -> None:
    """A tmpfs at a new folder; skip where that is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.decode().strip()}")


def test_a_folder_without_permission_is_said_before_anything_runs(tiny: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere; the test with a file system that is read-only stands for this one")
    (tmp_path / "closed").mkdir(mode=0o555)
    with pytest.raises(ResultsError, match=r"cannot write .*closed/t: Permission denied"):
        sweep(spec(tiny), out=tmp_path / "closed")


def test_a_read_only_file_system_is_said_before_anything_runs(tiny: Path, tmp_path: Path) -> None:
    mounted(tmp_path / "disk", "ro,size=64k")
    try:
        with pytest.raises(ResultsError, match=r"cannot write .*disk/t: Read-only file system"):
            sweep(spec(tiny), out=tmp_path / "disk")
    finally:
        subprocess.run(["umount", str(tmp_path / "disk")], check=True)


def test_a_worker_without_memory_is_told_and_the_others_go_on(tiny: Path, tmp_path: Path) -> None:
    """The workers may take 0.9 GB of addresses, and a pool of ten million blocks is more."""
    given = spec(tiny, axes={"grid": {"engine.num_gpu_blocks": [60, 10_000_000, 61]}}, seeds=1)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (900_000_000, 900_000_000)); "
    assert start(given, tmp_path, limit).wait(timeout=60) == 0
    frame = load(tmp_path / "t")
    assert list(frame["status"]) == ["ok", "memory_limit", "ok"]
    assert frame["error"][1] == "the worker could not get more memory"
    ran = num_ran(tmp_path / "t")
    assert start(given, tmp_path, limit).wait(timeout=60) == 0
    assert num_ran(tmp_path / "t") == ran + 1  # no limit of the sweep's: there may be more memory by now


def test_a_worker_without_room_for_its_files_is_told_and_tried_again(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted(tmp_path / "disk", "size=4k")
    given = spec(tiny, axes={}, seeds=1, steps=True)
    try:
        with monkeypatch.context() as small:
            small.setenv("TMPDIR", str(tmp_path / "disk"))
            frame = sweep(given, out=tmp_path / "out", jobs=1).table()
        assert list(frame["status"]) == ["crashed"]
        assert "No space left on device" in frame["error"][0]
    finally:
        subprocess.run(["umount", str(tmp_path / "disk")], check=True)
    assert list(sweep(given, out=tmp_path / "out", jobs=1).table()["status"]) == ["ok"]


def test_a_full_disk_stops_the_sweep_and_loses_nothing(tiny: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    mounted(disk, "size=64k")
    given = spec(tiny, axes={"grid": {RATE: [10, 20, 30, 40]}})
    try:
        with pytest.raises(
            SweepStopped, match=r"No space left on device\nwhat had ended is kept \([1-7] of 8 runs\); once .*"
        ):
            sweep(given, out=disk, jobs=1)
        kept = len(load(disk / "t"))
        assert 0 < kept < 8
        subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
        folder = sweep(given, out=disk, jobs=1).folder
        assert num_ran(folder) <= 9
        assert dataset(folder) == dataset(sweep(given, out=tmp_path / "roomy", jobs=1).folder)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# Kills


def start(given: dict[str, Any], out: Path, before: str = "") -> subprocess.Popen[bytes]:
    """A sweep in a process of its own, from a script that guards nothing."""
    code = f"{before}import json, sim; sim.sweep(json.loads({json.dumps(given)!r}), out={str(out)!r}, jobs=2)"
    environment = {**os.environ, "PYTHONPATH": str(Path(sim.__file__).parent.parent)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)


def wait_for(there: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not there():
        assert time.monotonic() < until
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == pid:
                found.append(int(stat.parent.name))
        except (OSError, IndexError, ValueError):
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds workers through /proc")
def test_kills_at_ten_random_moments_change_nothing(tiny: Path, tmp_path: Path) -> None:
    """Five times a worker, five times the parent, after which the same command is given again."""
    num_requests = 150 if CORE.name == "plain" else 800  # long enough for ten kills, on either core
    given = spec(
        tiny,
        axes={"grid": {K: [0, 1, 2, 3], RATE: [8, 10, 15, 20, 30]}},
        set={"workload.synthetic.num_requests": num_requests},
        seeds=3,
    )
    undisturbed = sweep(given, out=tmp_path / "undisturbed", jobs=2).folder
    random_numbers = random.Random(7)
    victims = ["worker", "parent"] * 5
    random_numbers.shuffle(victims)  # with this seed no worker is killed three times running, which a row may tell
    out = tmp_path / "killed"
    times = out / "t" / "times.csv"

    def num_ended() -> int:
        return times.read_text().count("\n") if times.exists() else 0

    parent = start(given, out)
    for victim in victims:
        # Up to two more runs end first, and then up to a third of a second: often while workers or the parent start.
        enough = num_ended() + random_numbers.randint(0, 2)
        wait_for(lambda: num_ended() >= enough)  # noqa: B023
        time.sleep(random_numbers.uniform(0, 0.3))
        if victim == "worker":
            wait_for(lambda: bool(children(parent.pid)))  # noqa: B023
            os.kill(random_numbers.choice(children(parent.pid)), signal.SIGKILL)
        else:
            workers = children(parent.pid)
            parent.kill()
            assert parent.wait() == -signal.SIGKILL  # it had not ended before
            wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))  # noqa: B023
            for file in (out / "t" / "points").glob("*.parquet"):
                pq.read_table(file)  # whole at every moment
            parent = start(given, out)
    assert parent.wait(timeout=120) == 0
    assert dataset(out / "t") == dataset(undisturbed)
    assert set(load(out / "t")["status"]) == {"ok"}
    assert num_ran(out / "t") <= 60 + 5 * 2  # a killed parent loses what was running, and nothing that had ended


def test_two_sweeps_do_not_write_the_same_folder(tiny: Path, tmp_path: Path) -> None:
    import fcntl

    folder = sweep(spec(tiny, axes={}, seeds=1), jobs=1).folder
    with open(folder / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ResultsError, match="being written by another sweep"):
            sweep(spec(tiny, axes={}, seeds=1))


class Scripted:
    """A backend whose slots answer as told: a list of answers a job."""

    num_slots = 2

    def __init__(self, answers: dict[int, list[Outcome | str]]) -> None:
        self.answers = answers
        self.jobs: dict[int, Job] = {}
        self.killed: list[int] = []

    def submit(self, slot: int, job: Job) -> None:
        assert slot not in self.jobs
        self.jobs[slot] = job

    def wait(self, slots: Sequence[int], timeout_s: float) -> list[tuple[int, Outcome | str]]:
        return [
            (slot, self.answers[job.number].pop(0))
            for slot, job in list(self.jobs.items())
            if self.answers[job.number] and self.jobs.pop(slot)
        ]

    def usage(self, slot: int) -> Usage:
        return Usage(100.0, 1.0)

    def kill(self, slot: int) -> None:
        self.killed.append(self.jobs.pop(slot).number)

    def close(self) -> None:
        pass


def test_a_worker_that_dies_is_replaced_and_a_run_that_kills_workers_is_given_up() -> None:
    scenario = sim.load_scenario("minimal")
    ok = Outcome("ok")
    backend = Scripted({0: ["signal SIGKILL", ok], 1: ["a", "b", "signal SIGSEGV"], 2: [ok], 3: []})
    drawn: list[int] = []

    def jobs() -> Iterator[Job]:
        for number in range(4):
            drawn.append(number)
            yield Job(number, scenario)

    ended = {}
    for job, outcome in run_jobs(backend, jobs(), Limits()):
        ended[job.number] = outcome
        if len(ended) == 3:
            break
    assert ended[0] == ended[2] == ok
    assert ended[1].status == "crashed"
    assert ended[1].error == "the worker died 3 times, last: signal SIGSEGV"
    backend = Scripted({0: [], 1: [ok]})
    found = {job.number: outcome for job, outcome in run_jobs(backend, [Job(0, scenario)], Limits(time_s=1.0))}
    assert found == {0: replace(ok, status="time_limit", error="took more than 1 s")}
    assert backend.killed == [0]


def test_the_same_rows_on_a_ray_cluster(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    given = spec(tiny, limits={"memory_mb": 4000})
    on_ray = sweep(given, out=tmp_path / "ray", backend="ray", jobs=2).folder
    assert dataset(on_ray) == dataset(sweep(given, out=tmp_path / "local", jobs=2).folder)


class RayCluster:
    """A head that somebody else has started, with a token of its own."""

    def __init__(self, folder: Path, port: int) -> None:
        (folder / "home").mkdir(exist_ok=True)
        self.environment = {
            **os.environ,
            "HOME": str(folder / "home"),
            "PYTHONPATH": str(Path(sim.__file__).parent.parent),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "of-this-test-alone-0123456789abcdef",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self.address = f"127.0.0.1:{port}"
        self._files = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # its sockets need a short path
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}", "--num-cpus=2"]
        command += ["--node-ip-address=127.0.0.1", "--include-dashboard=false", f"--temp-dir={self._files}"]
        subprocess.run(command, env=self.environment, capture_output=True, check=True, timeout=120)

    def kill(self) -> None:
        """All of its processes at once; they name the folder of its files."""
        for line in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if self._files.encode() in line.read_bytes():
                    os.kill(int(line.parent.name), signal.SIGKILL)
            except (OSError, ValueError):
                continue
        shutil.rmtree(self._files, ignore_errors=True)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the cluster's processes through /proc")
def test_a_running_ray_cluster_gives_the_same_rows_and_may_go_away(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = spec(tiny, axes={"grid": {RATE: [10, 15, 20, 30]}}, set={"workload.synthetic.num_requests": 1000})
    (tmp_path / "t.yaml").write_text(json.dumps(given))
    cluster = RayCluster(tmp_path, port)
    command = [sys.executable, "-m", "sim", "sweep", "t.yaml", "--out", "ray", "--backend", "ray"]
    command += ["--address", cluster.address]
    try:
        stopped = subprocess.Popen(command, env=cluster.environment, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
        wait_for(lambda: (tmp_path / "ray" / "t" / "times.csv").exists())
        cluster.kill()
        _, said = stopped.communicate(timeout=60)  # Ray itself would end it after a minute, with a message of its own
        assert stopped.returncode == 1
        assert "speckv: the Ray cluster is gone: " in said
        assert "speckv: what had ended is kept (" in said
        assert len(load(tmp_path / "ray" / "t")) >= 1
        without = {key: value for key, value in cluster.environment.items() if key != "RAY_AUTH_MODE"}
        refused = subprocess.run(command, env=without, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert refused.returncode == 1
        assert f"cannot use the Ray cluster at {cluster.address}: nothing answers there" in refused.stderr
        cluster = RayCluster(tmp_path, port)
        subprocess.run(command, env=cluster.environment, cwd=tmp_path, check=True, timeout=120)
    finally:
        cluster.kill()
    assert dataset(tmp_path / "ray" / "t") == dataset(sweep(given, out=tmp_path / "local", jobs=2).folder)


# The command


def test_the_command_runs_a_sweep_and_says_what_failed(tiny: Path, tmp_path: Path) -> None:
    from sim.cli import app

    file = tmp_path / "s.yaml"
    file.write_text(f"scenario: tiny.yaml\naxes: {{grid: {{{K}: [0, 999]}}}}\n")
    done = CliRunner().invoke(app, ["sweep", "s.yaml", "--jobs", "1"])
    assert done.exit_code == 0
    assert "2 points, 2 runs: 1 ok, 1 refused" in done.stdout
    assert "point 1, seed 0: refused: " in done.stdout
    assert str(Path("results/sweeps/s")) in done.stdout
    as_json = CliRunner().invoke(app, ["sweep", "s.yaml", "--json"])
    assert json.loads(as_json.stdout)["counts"] == {"ok": 1, "refused": 1}
    assert CliRunner().invoke(app, ["sweep", "s.yaml", "--quiet"]).stdout.strip() == str(Path("results/sweeps/s"))
    file.write_text("scenario: tiny.yaml\nseeds: 3\n")
    refused = CliRunner().invoke(app, ["sweep", "s.yaml"])
    assert refused.exit_code == 1
    assert "holds another sweep" in refused.stderr
    file.write_text("scenario: tiny.yaml\nseed: 3\n")
    assert CliRunner().invoke(app, ["sweep", "s.yaml"]).exit_code == 2
    assert CliRunner().invoke(app, ["sweep", "s.yaml", "--backend", "slurm"]).exit_code == 2


def test_progress_is_told_in_one_line() -> None:
    from sim.commands.sweep import facts

    assert facts(SweepProgress(12, 3, 1, 2, 65.4)) == "3 of 12 done, 1 failed, 2 running, 1:05 left"
    assert facts(SweepProgress(12, 0, 0, 2, None)) == "0 of 12 done, 2 running"
    assert facts(SweepProgress(9000, 3, 0, 2, 3700.0)) == "3 of 9,000 done, 2 running, 1:01:40 left"


def test_a_mapping_is_as_good_as_a_file(tiny: Path) -> None:
    assert sweep_from(Source({"scenario": "tiny.yaml"}, None, {})).name == "sweep"
    with pytest.raises(ValueError, match="jobs must be 1 or more"):
        sweep({"scenario": str(tiny)}, jobs=0)
