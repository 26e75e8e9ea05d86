"""A sweep: many runs of one scenario into one dataset, which loses nothing that has finished.

Knows points, rows and the folder; must not know how a run is made, what YAML is, or how anything is shown. Calling the
module is calling `sweep`, so that `sim.sweep(...)` runs one and `sim.sweep.load(...)` reads one.

The folder: `manifest.json`; `points/<number>.parquet`, one file a point and in it a row a seed, replaced whole as each
run ends; `steps/<scenario_digest>.parquet` where asked for; `times.csv`, the only file besides the manifest that knows
the time of day. Only this process writes, workers answer; so a kill at any moment leaves whole files.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from sim import __version__, results
from sim.outcome import Job, Outcome, reason, run_digest, variant
from sim.results import ResultsError
from sim.scenario import Scenario, ScenarioError, replay_path, trace_path
from sim.scenario_errors import Problem
from sim.scenario_schema import Replay
from sim.scenario_source import Plain, Source
from sim.sweep_schema import SweepError, SweepFile, read_sweep, sweep_from
from sim.whole_files import written_whole
from sim.workers import Backend, BackendGone, Limits, LocalWorkers, num_cores, resident_mb, run_jobs

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

__all__ = ["SweepError", "SweepProgress", "SweepResult", "SweepStopped", "load", "load_steps", "sweep"]

SCHEMA_VERSION: Final = 1
_POINTS, _STEPS, _TIMES, _LOCK = "points", "steps", "times.csv", ".lock"
_BEFORE: Final = ("point", "seed")
_AFTER: Final = ("status", "error", "stopped_by", "scenario_digest")
_SAME: Final = ("scenario", "set", "axes", "seeds", "steps", "inputs")
"""What makes two sweeps the same; limits may differ."""


class SweepStopped(Exception):
    """A sweep that broke off. What had finished is in the folder, and the same call goes on from there."""


class SweepProgress(NamedTuple):
    """How far a sweep is, in runs: a point and a seed each."""

    total: int
    done: int
    """With those that failed, and those that were found."""
    failed: int
    running: int
    left_s: float | None
    """At the pace so far; None before anything has ended."""


@dataclass(frozen=True)
class SweepResult:
    """A sweep that has ended, and where it lies."""

    folder: Path
    manifest: dict[str, Any]

    def table(self) -> pd.DataFrame:
        """All rows, as `load` gives them."""
        return load(self.folder)


def sweep(
    sweep: str | Path | Mapping[str, Any],
    *,
    out: str | Path = "results/sweeps",
    jobs: int | None = None,
    backend: Literal["local", "ray"] = "local",
    address: str | None = None,
    watch: Callable[[SweepProgress], None] | None = None,
) -> SweepResult:
    """Run a sweep into `out/<name>/`, or go on with it where it was stopped.

    `sweep`: a YAML file, the name of a sweep that comes with speckv, or the mapping that such a file holds. `jobs`:
    workers, by default one a core (or a CPU of the Ray cluster). `address`: of a running Ray cluster; without it
    `backend="ray"` starts one here. `watch` is told a few times a second.

    A run that fails, or exceeds its limits, or whose worker dies time after time, gets a row that says so.

    Raises:
        SweepError: it cannot be run; nothing has been written.
        ResultsError: the folder cannot be written, or holds another sweep.
        SweepStopped: the disk is full, or the workers' machine has gone.
    """
    if isinstance(sweep, Mapping):
        file = sweep_from(Source(json.loads(json.dumps(dict(sweep), allow_nan=False)), None, {}))
    else:
        file = read_sweep(sweep)
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be 1 or more, got {jobs}")
    if file.sweep.limits.memory_mb is not None and resident_mb("self") is None and backend == "local":
        problem = Problem(
            "memory can be limited on Linux only", "limits.memory_mb", allowed="null", file=file.label, line=None
        )
        raise SweepError([problem], file.label)
    first = _first_that_loads(file)
    with _Folder(Path(out) / file.name, file, first) as folder:
        running = _Running(file, folder, watch)
        if running.complete:
            return folder.closed()
        try:
            with closing(_workers(backend, jobs, address, running.missing)) as workers:
                running.run(workers)
            return folder.closed()
        except BackendGone as error:
            raise SweepStopped(f"{error}\n{running.told('there are workers again')}") from error
        except OSError as error:
            raise SweepStopped(f"{_cannot(folder.path, error)}\n{running.told('it can be written')}") from error


def _workers(backend: str, jobs: int | None, address: str | None, missing: int) -> Backend:
    if backend == "ray":
        from sim.ray_workers import RayWorkers

        return RayWorkers(jobs, address)
    return LocalWorkers(min(jobs or num_cores(), missing))


def load(folder: str | Path) -> pd.DataFrame:
    """The rows of a sweep so far, by point and seed: axes under the scenario's keys, then `status`, then the figures.

    `status` is `ok`, or one of `refused`, `failed`, `time_limit`, `memory_limit` and `crashed`; figures are then NaN.
    Raises ResultsError if there is no sweep in the folder.
    """
    import pyarrow as pa

    folder = Path(folder)
    results.read_json(folder / results.MANIFEST)
    tables = [_read(file) for file in _point_files(folder)]
    if not tables:
        raise ResultsError(f"{folder} holds a sweep of which no run has ended yet")
    frame = pa.concat_tables(tables, promote_options="permissive").to_pandas()
    return frame  # type: ignore[no-any-return]


def load_steps(folder: str | Path, scenario_digest: str) -> pd.DataFrame:
    """The table of steps of the run with that `scenario_digest`. Raises ResultsError if the sweep kept none."""
    file = Path(folder) / _STEPS / f"{scenario_digest}.parquet"
    if not file.is_file():
        raise ResultsError(f"{folder} has no table of steps of {scenario_digest}; a sweep keeps them with steps: true")
    frame: pd.DataFrame = _read(file).to_pandas()
    return frame


class _Folder:
    """The files of a sweep, locked while it runs."""

    def __init__(self, path: Path, file: SweepFile, first: Scenario) -> None:
        self.path = path
        self._file = file
        sweep = file.sweep
        same = {
            "scenario": _facts_of_base(first),
            "set": sweep.set,
            "axes": sweep.axes.model_dump(mode="json"),
            "seeds": file.seeds,
            "steps": sweep.steps,
            "inputs": results.input_facts(_inputs(first)),
        }
        self.manifest: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "name": file.name,
            "complete": False,
            "sweep_file": file.label,
            "sweep_digest": _digest(same),
            **same,
            "scenario_file": str(first.file),
            "limits": sweep.limits.model_dump(mode="json"),
            "columns": file.keys,
            "num_points": file.num_points,
            "num_runs": file.num_points * len(file.seeds),
            "speckv": __version__,
            "code": results.code_digest(),
            "started": _now(),
            "finished": None,
        }
        self.limits_before: dict[str, Any] | None = None

    def __enter__(self) -> _Folder:
        try:
            (self.path / _POINTS).mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / _LOCK, "w")
        except OSError as error:
            raise ResultsError(_cannot(self.path, error)) from error
        try:
            self._open()
        except BaseException:
            self._lock.close()
            raise
        return self

    def _open(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ResultsError(f"{self.path} is being written by another sweep that runs now") from None
        file = self.path / results.MANIFEST
        if file.exists():
            self._check_same(results.read_json(file))
        elif any(_point_files(self.path)):
            raise ResultsError(f"{self.path} holds points but no manifest.json; give another folder")
        try:
            for partial in self.path.glob("*/*.partial"):
                partial.unlink(missing_ok=True)
            results.write_json(file, self.manifest)
        except OSError as error:
            raise ResultsError(_cannot(self.path, error)) from error

    def _check_same(self, before: Any) -> None:
        def refuse(reason: str) -> ResultsError:
            return ResultsError(
                f"{self.path} holds another sweep: {reason}. Give this one another name or folder, or remove that one"
            )

        try:
            if before["schema_version"] != SCHEMA_VERSION or before["speckv"] != __version__:
                raise refuse(f"it was made by speckv {before['speckv']}, and this is {__version__}")
            if before.get("code") != self.manifest["code"]:
                raise refuse("it was made by other code of the same version")
            different = [name for name in _SAME if before[name] != _plain(self.manifest[name])]
            if different:
                raise refuse(f"{' and '.join(different)} {'differ' if len(different) > 1 else 'differs'}")
            self.limits_before = before["limits"]
            self.manifest["started"] = before["started"]
        except (KeyError, TypeError, AttributeError):
            raise refuse("its manifest.json is not that of a sweep") from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.close()

    def file_of(self, point: int) -> Path:
        return self.path / _POINTS / f"{point:05d}.parquet"

    def steps_of(self, scenario_digest: str) -> Path:
        return self.path / _STEPS / f"{scenario_digest}.parquet"

    def put(self, point: int, table: pa.Table) -> None:
        """Write a point's rows whole."""
        _write(self.file_of(point), table)

    def put_steps(self, scenario_digest: str, content: bytes) -> None:
        file = self.steps_of(scenario_digest)
        file.parent.mkdir(exist_ok=True)
        with written_whole(file) as partial:
            partial.write_bytes(content)

    def put_time(self, point: int, seed: int, outcome: Outcome) -> None:
        file = self.path / _TIMES
        head = "" if file.exists() else "point,seed,status,wall_s,peak_rss_mb,ended\n"
        line = f"{point},{seed},{outcome.status},{outcome.wall_s},{outcome.peak_rss_mb},{_now()}\n"
        with open(file, "a", encoding="utf-8") as stream:
            stream.write(head + line)

    def closed(self) -> SweepResult:
        """Give all files the same columns, so that anything that reads Parquet reads them, and say it is complete."""
        files = _point_files(self.path)
        self._align(files)
        counts: dict[str, int] = {}
        for file in files:
            for status in _read(file, ["status"]).column("status").to_pylist():
                counts[status] = counts.get(status, 0) + 1
        self.manifest |= {"complete": True, "finished": _now(), "counts": dict(sorted(counts.items()))}
        results.write_json(self.path / results.MANIFEST, self.manifest)
        return SweepResult(self.path, self.manifest)

    @staticmethod
    def _align(files: Sequence[Path]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        schemas = {file: pq.read_schema(file) for file in files}
        types: dict[str, pa.DataType] = {}
        for schema in schemas.values():
            for field in schema:
                known = types.setdefault(field.name, field.type)
                if known != field.type:
                    types[field.name] = pa.float64()
        whole = pa.schema(types.items())
        for file, schema in schemas.items():
            if schema != whole:
                table = _read(file)
                columns = [
                    table.column(name).cast(kind) if name in table.column_names else pa.nulls(len(table), kind)
                    for name, kind in types.items()
                ]
                _write(file, pa.table(columns, schema=whole))


class _Running:
    """One call's work: what is missing, what is equal, what comes back."""

    def __init__(self, file: SweepFile, folder: _Folder, watch: Callable[[SweepProgress], None] | None) -> None:
        self._file = file
        self._folder = folder
        self._watch = watch
        self._points = list(file.points())
        self._kinds = {key: _kind([point[key] for point in self._points]) for key in file.keys}
        self._rows: dict[int, dict[int, dict[str, Any]]] = {}
        """By point and seed; a point's are dropped once all are there."""
        self._known: dict[str, Outcome] = {}
        """By digest: what need not be run again."""
        self._asked: dict[str, list[tuple[int, int]]] = {}
        """By digest, while it runs: the rows that wait for it."""
        self._jobs: dict[int, str] = {}
        self._done = self._failed = self._num_running = 0
        self._began = time.monotonic()
        self._finished_points: set[int] = set()
        self._find()
        self._done_before = self._done

    @property
    def complete(self) -> bool:
        return self.missing == 0

    @property
    def missing(self) -> int:
        return len(self._points) * len(self._file.seeds) - self._done

    def told(self, once: str) -> str:
        """For a message: where things stand, and what must be put right."""
        total = len(self._points) * len(self._file.seeds)
        kept = (
            f"what had ended is kept ({self._done} of {total} runs)"
            if self._done
            else f"none of {total} runs had ended"
        )
        return f"{kept}; once {once}, the same command goes on from there"

    def run(self, workers: Backend) -> None:
        limits = self._file.sweep.limits
        finished = run_jobs(workers, self._missing_jobs(), Limits(limits.time_s, limits.memory_mb), self._tell)
        for job, outcome in finished:
            self._take(self._jobs.pop(job.number), outcome)
        self._tell(0)

    def _find(self) -> None:
        """Read what an earlier call has finished; leave out what may come out otherwise now."""
        limits = self._folder.manifest["limits"]
        again = {"crashed"} | ({"memory_limit"} if limits["memory_mb"] is None else set())  # then it was the machine's
        if self._folder.limits_before is not None and self._folder.limits_before != limits:
            again |= {"time_limit", "memory_limit"}
        for point in range(len(self._points)):
            file = self._folder.file_of(point)
            if not file.is_file():
                continue
            for row in _read(file).to_pylist():
                digest = row["scenario_digest"]
                if row["status"] in again or row["seed"] not in self._file.seeds:
                    continue
                if self._file.sweep.steps and row["status"] == "ok" and not self._folder.steps_of(digest).is_file():
                    continue
                self._rows.setdefault(point, {})[row["seed"]] = row
                self._count(row["status"])
                if digest is not None:
                    figures = {name: row[name] for name in list(row)[len(_BEFORE) + len(self._kinds) + len(_AFTER) :]}
                    self._known[digest] = Outcome(row["status"], row["error"], row["stopped_by"], figures)
            self._drop_if_finished(point)

    def _missing_jobs(self) -> Iterator[Job]:
        """What is still to be run, made as workers come free; rows that need no run are written on the way."""
        number = 0
        for point, values in enumerate(self._points):
            missing = [
                seed
                for seed in self._file.seeds
                if point not in self._finished_points and seed not in self._rows.get(point, {})
            ]
            if not missing:
                continue
            try:
                scenario = _scenario(self._file, values)
            except ScenarioError as error:
                reason = " ".join(str(problem) for problem in error.problems)
                outcome = Outcome("refused", " ".join(reason.split()))
                for seed in missing:
                    self._record(point, seed, None, outcome)
                continue
            for seed in missing:
                seeded = scenario.model_copy(update={"seed": seed})
                digest = run_digest(seeded)
                if digest in self._known:
                    self._record(point, seed, digest, self._known[digest])
                elif digest in self._asked:
                    self._asked[digest].append((point, seed))
                else:
                    self._asked[digest] = [(point, seed)]
                    self._jobs[number] = digest
                    yield Job(number, seeded, self._file.sweep.steps)
                    number += 1

    def _take(self, digest: str, outcome: Outcome) -> None:
        if outcome.steps is not None and outcome.status == "ok":
            self._folder.put_steps(digest, outcome.steps)
        waiting = self._asked.pop(digest)
        if outcome.status != "crashed":
            self._known[digest] = Outcome(outcome.status, outcome.error, outcome.stopped_by, outcome.figures)
        for point, seed in waiting:
            self._record(point, seed, digest, outcome)
        self._folder.put_time(*waiting[0], outcome)

    def _record(self, point: int, seed: int, digest: str | None, outcome: Outcome) -> None:
        values = self._points[point]
        axes = {key: _cell(values[key], kind) for key, kind in self._kinds.items()}
        after = (outcome.status, outcome.error, outcome.stopped_by, digest)
        row = {"point": point, "seed": seed, **axes, **dict(zip(_AFTER, after, strict=True)), **outcome.figures}
        rows = self._rows.setdefault(point, {})
        rows[seed] = row
        self._folder.put(point, self._table([rows[seed] for seed in sorted(rows)]))
        self._count(outcome.status)
        self._drop_if_finished(point)

    def _table(self, rows: list[dict[str, Any]]) -> pa.Table:
        """A point's rows in the order of the columns: fixed ones, axes, fixed ones, figures as the summary has them."""
        import pyarrow as pa

        kinds: dict[str, Any] = dict.fromkeys(_BEFORE, pa.int64())
        kinds |= {key: _ARROW[kind]() for key, kind in self._kinds.items()}
        kinds |= dict.fromkeys(_AFTER, pa.string())
        for row in rows:
            for name, value in row.items():
                if name not in kinds or (isinstance(value, float) and kinds[name] == pa.int64()):
                    whole = isinstance(value, int) and not isinstance(value, bool)
                    kinds[name] = pa.int64() if whole else pa.float64()
        return pa.table({name: pa.array([row.get(name) for row in rows], kind) for name, kind in kinds.items()})

    def _drop_if_finished(self, point: int) -> None:
        if len(self._rows.get(point, ())) == len(self._file.seeds):
            del self._rows[point]
            self._finished_points.add(point)

    def _count(self, status: str) -> None:
        self._done += 1
        self._failed += status != "ok"

    def _tell(self, num_running: int) -> None:
        if self._watch is None:
            return
        now_done = self._done - self._done_before
        pace = (time.monotonic() - self._began) / now_done if now_done else None
        left_s = None if pace is None else pace * self.missing
        total = len(self._points) * len(self._file.seeds)
        self._watch(SweepProgress(total, self._done, self._failed, num_running, left_s))


# Points


def _base(file: SweepFile) -> str | Path:
    """The scenario as `load_scenario` takes it; a path counts from the sweep's folder, then from the working one."""
    text = file.sweep.scenario
    if file.file is not None and (Path(text).suffix in (".yaml", ".yml") or "/" in text):
        beside = file.file.parent / text
        if beside.exists():
            return beside
    return text


def _scenario(file: SweepFile, values: Mapping[str, Plain]) -> Scenario:
    return variant(_base(file), {**file.sweep.set, **values})


def _first_that_loads(file: SweepFile) -> Scenario:
    """The scenario of the first point that makes one. Raises SweepError, as the first point has it, if none does."""
    refused: ScenarioError | None = None
    for values in file.points():
        try:
            return _scenario(file, values)
        except ScenarioError as error:
            refused = refused or error
    assert refused is not None
    raise SweepError([_told_here(problem, file) for problem in refused.problems], file.label)


def _told_here(problem: Problem, file: SweepFile) -> Problem:
    """A problem with a key that the sweep sets, at the line of the sweep that sets it."""
    if problem.override is None:
        return problem
    key = problem.override.partition("=")[0]
    return Problem(
        problem.reason, problem.key, problem.value, problem.allowed, problem.nearest, file.label, file.place(key).line
    )


def _facts_of_base(scenario: Scenario) -> str:
    """SHA-256 of the scenario's file, whose place does not matter."""
    assert scenario.file is not None
    return hashlib.sha256(scenario.file.read_bytes()).hexdigest()


def _inputs(scenario: Scenario) -> list[Path]:
    """Files that the scenario reads and its digest does not cover; one that is missing is told when it is run."""
    files = []
    try:
        if scenario.workload.trace is not None:
            files.append(trace_path(scenario))
        if isinstance(scenario.acceptance, Replay):
            files.append(replay_path(scenario))
    except ScenarioError:
        pass
    return files


# Columns and files

Kind = Literal["int", "float", "bool", "text", "json"]


def _arrow(name: str) -> Callable[[], Any]:
    def kind() -> Any:
        import pyarrow as pa

        return getattr(pa, name)()

    return kind


_ARROW: Final[Mapping[Kind, Callable[[], Any]]] = {
    "int": _arrow("int64"),
    "float": _arrow("float64"),
    "bool": _arrow("bool_"),
    "text": _arrow("string"),
    "json": _arrow("string"),
}


def _kind(values: Sequence[Plain]) -> Kind:
    """What holds all values of an axis; JSON where nothing simpler does."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int} and all(abs(value) < 2**63 for value in values if isinstance(value, int)):
        return "int"
    if kinds <= {int, float}:
        return "float"
    if kinds == {bool}:
        return "bool"
    return "text" if kinds == {str} else "json"


def _cell(value: Plain, kind: Kind) -> Any:
    if value is None:
        return None
    if kind == "float":
        return float(value)  # type: ignore[arg-type]
    return json.dumps(value, sort_keys=True) if kind == "json" else value


def _point_files(folder: Path) -> list[Path]:
    return sorted((folder / _POINTS).glob("*.parquet"))


def _read(file: Path, columns: list[str] | None = None) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as source:
            return source.read(columns=columns)
    except (OSError, pa.ArrowException) as error:
        again = "; once that file is removed, the sweep's command makes its runs again"
        raise ResultsError(f"cannot read {file}: {' '.join(str(error).split()).rstrip('.')}{again}") from error


def _write(file: Path, table: pa.Table) -> None:
    """Write a table whole: whoever reads it finds the old one or the new one. Raises OSError."""
    import pyarrow.parquet as pq

    with written_whole(file) as partial:
        pq.write_table(table, partial)


def _cannot(path: Path, error: OSError) -> str:
    if isinstance(error, FileExistsError | NotADirectoryError):
        in_the_way = next((place for place in (path, *path.parents) if place.exists() and not place.is_dir()), None)
        if in_the_way is not None:
            return f"cannot write {path}: {in_the_way} is in the way, and is no folder"
    return f"cannot write {path}: {reason(error)}"


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class _CallableModule(ModuleType):
    """`import sim; sim.sweep(...)`: the submodule's name is the function's."""

    def __call__(self, *args: Any, **kwargs: Any) -> SweepResult:
        return sweep(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
