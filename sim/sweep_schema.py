"""What a sweep's YAML may say, read and checked; and the points that its axes make.

Knows: axes, samples, seeds and limits. Must not know: how YAML is spelled (`scenario_source`), what a scenario's keys
mean, or how a point is run. Types are strict and errors are told as a scenario's are.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from sim.recording import ALLOWED
from sim.scenario_errors import Problem, ScenarioError, nearest_name
from sim.scenario_messages import problem_at, translate
from sim.scenario_schema import Section, Spelled, checked_recording, wrong
from sim.scenario_source import KeyPath, Place, Plain, Source, read_file
from sim.shipped import shipped_scenarios
from workloads.streams import uniforms

__all__ = [
    "Axes",
    "PointLimits",
    "Random",
    "Sobol",
    "Sweep",
    "SweepError",
    "SweepFile",
    "read_sweep",
    "sweep_from",
]

MAX_POINTS: Final = 100_000
_MAX_SEED: Final = 2**63 - 1

_Values = Annotated[list[Any], Field(min_length=1, max_length=10_000)]
_Columns = dict[str, _Values]
_Rows = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_POINTS)]
_Key = Annotated[str, Field(min_length=1, max_length=500)]


class SweepError(ScenarioError):
    """A sweep that cannot be run; `problems` has every reason found, `str()` tells them all."""

    def _text(self) -> str:
        text = super()._text()
        return text.replace("scenario", "sweep", 1)


class Uniform(Section):
    """Any number from min to max alike."""

    distribution: Literal["uniform"]
    key: _Key = Field(description="The scenario's key.")
    min: float = Field(description="The smallest.")
    max: float = Field(description="The largest.")

    @model_validator(mode="after")
    def _ordered(self) -> Uniform:
        _check_order(self.min, self.max)
        return self

    def at(self, u: float) -> float:
        """The value whose share of smaller ones is u, in [0, 1)."""
        return self.min + u * (self.max - self.min)


class LogUniform(Section):
    """Numbers from min to max whose logarithms are alike."""

    distribution: Literal["log_uniform"]
    key: _Key = Field(description="The scenario's key.")
    min: float = Field(gt=0, description="The smallest.")
    max: float = Field(gt=0, description="The largest.")

    @model_validator(mode="after")
    def _ordered(self) -> LogUniform:
        _check_order(self.min, self.max)
        return self

    def at(self, u: float) -> float:
        """The value whose share of smaller ones is u, in [0, 1)."""
        return min(self.min * math.exp(u * math.log(self.max / self.min)), self.max)


class Whole(Section):
    """Each whole number from min to max, both included, alike."""

    distribution: Literal["whole"]
    key: _Key = Field(description="The scenario's key.")
    min: int = Field(ge=-(2**31), le=2**31, description="The smallest.")
    max: int = Field(ge=-(2**31), le=2**31, description="The largest.")

    @model_validator(mode="after")
    def _ordered(self) -> Whole:
        _check_order(self.min, self.max)
        return self

    def at(self, u: float) -> int:
        """The value whose share of smaller ones is u, in [0, 1)."""
        return self.min + int(u * (self.max - self.min + 1))


class LogWhole(Section):
    """Whole numbers from min to max, both included, small ones as often as their logarithms are far apart."""

    distribution: Literal["log_whole"]
    key: _Key = Field(description="The scenario's key.")
    min: int = Field(ge=1, le=2**31, description="The smallest.")
    max: int = Field(ge=1, le=2**31, description="The largest.")

    @model_validator(mode="after")
    def _ordered(self) -> LogWhole:
        _check_order(self.min, self.max)
        return self

    def at(self, u: float) -> int:
        """The value whose share of smaller ones is u, in [0, 1)."""
        return min(int(self.min * math.exp(u * math.log((self.max + 1) / self.min))), self.max)


class Choice(Section):
    """One of the values given, all alike."""

    distribution: Literal["choice"]
    key: _Key = Field(description="The scenario's key.")
    values: _Values = Field(description="The values.")

    def at(self, u: float) -> Any:
        """The value whose share of earlier ones is u, in [0, 1)."""
        return self.values[int(u * len(self.values))]


Range = Annotated[Uniform | LogUniform | Whole | LogWhole | Choice, Field(discriminator="distribution")]


class Random(Section):
    """Points drawn independently."""

    n: int = Field(ge=1, le=MAX_POINTS, description="How many.")
    seed: int = Field(default=0, ge=0, le=_MAX_SEED, description="Of the draws.")
    over: list[Range] = Field(min_length=1, max_length=100, description="A distribution for each key.")


class Sobol(Section):
    """Points that fill the space evenly: a Sobol sequence, shifted at random as a whole."""

    n: int = Field(ge=1, le=2**16, description="How many: a power of two, or the points are not even.")
    seed: int = Field(default=0, ge=0, le=_MAX_SEED, description="Of the shift.")
    over: list[Range] = Field(min_length=1, max_length=100, description="A distribution for each key.")

    @model_validator(mode="after")
    def _power(self) -> Sobol:
        if self.n & (self.n - 1):
            raise wrong(f"{self.n} points of a Sobol sequence are not even", "n", "a power of two")
        return self


class Axes(Section):
    """What is varied. Where several kinds are given, each point of one meets each of the others."""

    grid: _Columns | None = Field(default=None, description="Values for each key; every combination is a point.")
    list: _Rows | None = Field(default=None, description="Points, each a mapping from keys to values.")
    zip: _Columns | None = Field(default=None, description="Values for each key; the first of each make a point, ...")
    random: Random | None = Field(default=None, description="Points drawn at random.")
    sobol: Sobol | None = Field(default=None, description="Points that fill the space evenly.")


class PointLimits(Section):
    """What a run may take; one that takes more is ended, and its row says so. null: no limit."""

    time_s: float | None = Field(default=None, gt=0, le=1e7, description="Wall time, seconds.")
    memory_mb: float | None = Field(
        default=None, gt=0, le=1e9, description="Resident memory of the worker, MB of 10^6 bytes; looked at often."
    )


class Sweep(Section):
    """A sweep: a scenario, what is varied, and how often each point is drawn."""

    name: str = Field(
        default="",
        max_length=100,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Letters, digits and ._- only; names the folder. Default: the file's name.",
    )
    scenario: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="What is run: a file, looked for beside the sweep and then in the working directory, or the name "
        "of a scenario that comes with speckv."
    )
    set: dict[str, Any] = Field(default={}, description="Keys of the scenario that are set for all points.")
    axes: Axes = Field(default=Axes(), description="What is varied.")
    seeds: (
        Annotated[int, Field(ge=1, le=100_000)]
        | Annotated[list[Annotated[int, Field(ge=0, le=_MAX_SEED)]], Field(min_length=1, max_length=100_000)]
    ) = Field(default=1, description="The seeds of every point: a list, or how many from 0 on.")
    limits: PointLimits = Field(default=PointLimits(), description="What a run may take.")
    steps: Annotated[bool | str, Spelled(ALLOWED)] = Field(
        default=False, description="The table of steps that is kept of every run, as a scenario's `output.steps`."
    )

    @field_validator("steps", mode="before")
    @classmethod
    def _recording(cls, value: object) -> bool | str:
        return checked_recording(value)


@dataclass(frozen=True)
class SweepFile:
    """A sweep that has been checked, and where it was written."""

    sweep: Sweep
    source: Source

    @property
    def label(self) -> str | None:
        """The file as messages name it."""
        return self.source.label

    @property
    def file(self) -> Path | None:
        """The file it was read from."""
        return self.source.file

    @property
    def name(self) -> str:
        """What the folder is called."""
        if self.sweep.name or self.file is None:
            return self.sweep.name or "sweep"
        return re.sub(r"[^A-Za-z0-9._-]", "-", self.file.stem).lstrip("._-")[:100] or "sweep"

    @property
    def seeds(self) -> list[int]:
        """The seeds of every point, in the order of the rows: rising."""
        seeds = self.sweep.seeds
        return list(range(seeds)) if isinstance(seeds, int) else sorted(seeds)

    @property
    def keys(self) -> list[str]:
        """The keys that are varied, in the order of the columns."""
        return list(self._places())

    @property
    def num_points(self) -> int:
        """How many points the axes make."""
        return math.prod(len(part) for part in _sizes(self.sweep.axes))

    def points(self) -> Iterator[dict[str, Plain]]:
        """The points in order, each from key to value; the last axis changes fastest. One point without axes."""
        for parts in itertools.product(*_parts(self.sweep.axes)):
            yield {key: value for part in parts for key, value in part.items()}

    def place(self, key: str) -> Place:
        """Where the axis or the setting of that key is written."""
        return self.source.place(self._places().get(key, ("set", key)))

    def _places(self) -> dict[str, KeyPath]:
        axes = self.sweep.axes
        places: dict[str, KeyPath] = {key: ("axes", "grid", key) for key in axes.grid or ()}
        places |= {key: ("axes", "list", 0, key) for row in (axes.list or ())[:1] for key in row}
        places |= {key: ("axes", "zip", key) for key in axes.zip or ()}
        for name, sample in (("random", axes.random), ("sobol", axes.sobol)):
            ranges = () if sample is None else sample.over
            places |= {over.key: ("axes", name, "over", number, "key") for number, over in enumerate(ranges)}
        return places


def read_sweep(path_or_name: str | Path) -> SweepFile:
    """Read a sweep's file, or one of the shipped sweeps by its name, and check it.

    Raises:
        SweepError: with every problem found. That the scenario's keys exist is checked where the points are made.
    """
    try:
        source = read_file(_find_sweep(path_or_name))
    except SweepError:
        raise
    except ScenarioError as error:
        raise SweepError(error.problems, error.source) from None
    return sweep_from(source)


def sweep_from(source: Source) -> SweepFile:
    """Check a sweep that has been read. Raises SweepError."""
    try:
        sweep = Sweep.model_validate(source.data)
    except ValidationError as error:
        raise SweepError(translate(error, source, Sweep), source.label) from None
    problems = list(_problems(sweep, source))
    if problems:
        raise SweepError(problems, source.label)
    return SweepFile(sweep, source)


def _find_sweep(path_or_name: str | Path) -> Path:
    text = str(path_or_name)
    if isinstance(path_or_name, Path) or Path(text).suffix in (".yaml", ".yml") or "/" in text or "\\" in text:
        return Path(path_or_name)
    try:
        shipped = sorted(file.stem for file in (shipped_scenarios() / "sweeps").glob("*.yaml"))
    except FileNotFoundError as error:
        raise SweepError([Problem(str(error))]) from None
    if text in shipped:
        return shipped_scenarios() / "sweeps" / f"{text}.yaml"
    allowed = f"a path to a YAML file, or one of {', '.join(shipped)}"
    nearest = nearest_name(text, shipped)
    raise SweepError([Problem("there is no sweep of that name", "sweep", text, allowed, nearest)])


def _check_order(low: float, high: float) -> None:
    if low > high:
        raise wrong(f"min {low} is above max {high}", "min", f"at most {high}")


def _problems(sweep: Sweep, source: Source) -> Iterator[Problem]:
    """What is wrong between the parts of a sweep."""
    axes = sweep.axes
    if isinstance(sweep.seeds, list) and len(set(sweep.seeds)) < len(sweep.seeds):
        yield problem_at(source, ("seeds",), "a seed is given twice", "each seed once")
    if axes.zip is not None and len({len(values) for values in axes.zip.values()}) > 1:
        lengths = ", ".join(f"{key}: {len(values)}" for key, values in axes.zip.items())
        yield problem_at(source, ("axes", "zip"), f"the lists differ in length ({lengths})", "lists of one length")
    rows = axes.list or []
    for number, row in enumerate(rows):
        if set(row) != set(rows[0]):
            missing = ", ".join(sorted(set(row) ^ set(rows[0])))
            reason = f"point {number} and point 0 differ in their keys: {missing}"
            yield problem_at(source, ("axes", "list", number), reason, "the same keys in every point", shown=False)
    seen: dict[str, KeyPath] = {}
    for path in _written_keys(sweep):
        key = str(path[-1])
        if path[-1] == "key":  # of a range: the name is the value
            sample = axes.random if path[1] == "random" else axes.sobol
            assert sample is not None
            assert isinstance(path[3], int)
            key = sample.over[path[3]].key
        if not all(part.strip() for part in key.split(".")) or "=" in key:
            allowed = "a dotted key, such as engine.max_num_seqs"
            yield problem_at(source, path, f"{key!r} is no key of a scenario", allowed, shown=False)
        elif key == "seed":
            yield problem_at(source, path, "the seeds of a sweep are its own", "the key `seeds`")
        elif key == "name" or key.split(".")[0] == "output":
            reason = "has no meaning in a sweep, which writes one dataset"
            yield problem_at(source, path, reason, "keys that change the run; `steps: true` for tables of steps")
        elif key in seen:
            where = ".".join(str(part) for part in seen[key][:2])
            yield problem_at(source, path, f"{key} is set twice, also under {where}", "each key once", shown=False)
        seen.setdefault(key, path)
    count = math.prod(len(part) for part in _sizes(axes))
    if count > MAX_POINTS:
        yield problem_at(source, ("axes",), f"make {count} points", f"at most {MAX_POINTS}", shown=False)


def _written_keys(sweep: Sweep) -> Iterator[KeyPath]:
    axes = sweep.axes
    yield from (("set", key) for key in sweep.set)
    yield from (("axes", "grid", key) for key in axes.grid or ())
    yield from (("axes", "list", 0, key) for row in (axes.list or ())[:1] for key in row)
    yield from (("axes", "zip", key) for key in axes.zip or ())
    for name, sample in (("random", axes.random), ("sobol", axes.sobol)):
        yield from (("axes", name, "over", number, "key") for number in range(len(sample.over) if sample else 0))


def _sizes(axes: Axes) -> Iterator[range]:
    yield from (range(len(values)) for values in (axes.grid or {}).values())
    if axes.list is not None:
        yield range(len(axes.list))
    if axes.zip:
        yield range(len(next(iter(axes.zip.values()))))
    for sample in (axes.random, axes.sobol):
        if sample is not None:
            yield range(sample.n)


def _parts(axes: Axes) -> list[list[Mapping[str, Plain]]]:
    parts: list[list[Mapping[str, Plain]]] = [
        [{key: value} for value in values] for key, values in (axes.grid or {}).items()
    ]
    if axes.list is not None:
        parts.append(list(axes.list))
    if axes.zip:
        parts.append([dict(zip(axes.zip, row, strict=True)) for row in zip(*axes.zip.values(), strict=True)])
    if axes.random is not None:
        draws = [uniforms(axes.random.seed, f"sweep {over.key}", 0, 0, axes.random.n) for over in axes.random.over]
        parts.append(_placed(axes.random.over, list(zip(*(column.tolist() for column in draws), strict=True))))
    if axes.sobol is not None:
        parts.append(_placed(axes.sobol.over, _sobol(axes.sobol)))
    return parts


def _placed(ranges: list[Range], draws: list[tuple[float, ...]]) -> list[Mapping[str, Plain]]:
    return [{over.key: over.at(u) for over, u in zip(ranges, row, strict=True)} for row in draws]


def _sobol(sample: Sobol) -> list[tuple[float, ...]]:
    """The first n of the sequence, each coordinate shifted round the unit interval (Cranley and Patterson 1976).

    The shift is speckv's own draw, so the points do not depend on another library's random numbers.
    """
    from scipy.stats import qmc

    sequence = qmc.Sobol(len(sample.over), scramble=False).random_base2(sample.n.bit_length() - 1)
    shifts = [float(uniforms(sample.seed, f"sweep {over.key}", 0, 0, 1)[0]) for over in sample.over]
    return [tuple(float(x + shift) % 1.0 for x, shift in zip(row, shifts, strict=True)) for row in sequence.tolist()]
