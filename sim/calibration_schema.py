"""A calibration as YAML: every key, its type and range; from a file to a `Calibration`, and back to text.

Knows: the file's names and the folder of the shipped ones. Must not know: how YAML is spelled (`scenario_source`), how
a calibration is fitted, or what a step costs. The YAML files are the only place where a card's constants stand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sim.models.calibration import (
    AllReduce,
    Calibration,
    DecodeAttention,
    Elementwise,
    Evidence,
    Grid,
    LinearLayers,
    NoSplit,
    Overhead,
    PrefillAttention,
)
from sim.scenario_errors import Problem, ScenarioError, nearest_name
from sim.scenario_source import Source, dotted, read_file
from sim.shipped import shipped_scenarios

__all__ = ["calibration_names", "calibration_text", "load_calibration", "read_calibration"]

_FALLBACK: Final = "h100"
"""Whose shares of the peaks stand in where a card has no calibration of its own."""

_Positive = Annotated[float, Field(gt=0, lt=1e12)]
_NotNegative = Annotated[float, Field(ge=0, lt=1e12)]
_Share = Annotated[float, Field(gt=0, le=1.5, description="of a peak; boost clocks can pass 1")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Evidence(_Strict):
    source: str = ""
    how: str = ""
    points: int = Field(default=0, ge=0)
    held_out_percent: _NotNegative | None = None
    analytic_percent: _NotNegative | None = None
    grid_percent: _NotNegative | None = None
    ranges: dict[str, tuple[float, float]] = {}
    borrowed: str | None = None
    residuals: tuple[float, ...] = ()

    @field_validator("ranges")
    @classmethod
    def _ordered(cls, ranges: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        for axis, (low, high) in ranges.items():
            if low > high:
                raise ValueError(f"{axis} runs from {low:g} to {high:g}")
        return ranges

    def made(self) -> Evidence:
        return Evidence(**{name: getattr(self, name) for name in type(self).model_fields})


class _Grid(_Strict):
    axes: tuple[str, ...]
    knots: tuple[tuple[float, ...], ...]
    log_factors: tuple[float, ...]

    @model_validator(mode="after")
    def _whole(self) -> _Grid:
        self.made()
        return self

    def made(self) -> Grid:
        return Grid(self.axes, self.knots, self.log_factors)


class _Linear(_Strict):
    compute: _Share
    memory: _Share
    t0_us: _NotNegative
    p: Annotated[float, Field(ge=1, le=100)]
    grid: _Grid | None = None
    evidence: _Evidence = _Evidence()

    @field_validator("grid")
    @classmethod
    def _axes(cls, grid: _Grid | None) -> _Grid | None:
        return _with_axes(grid, ("rows", "outputs", "inputs"))

    def made(self) -> LinearLayers:
        grid = None if self.grid is None else self.grid.made()
        return LinearLayers(self.compute, self.memory, self.t0_us, self.p, grid, self.evidence.made())


class _Decode(_Strict):
    memory: _Share
    t0_us: _NotNegative
    pair_ns: _NotNegative = 0.0
    grid: _Grid | None = None
    evidence: _Evidence = _Evidence()

    @field_validator("grid")
    @classmethod
    def _axes(cls, grid: _Grid | None) -> _Grid | None:
        return _with_axes(grid, ("requests", "context", "kv_heads", "group"))

    def made(self) -> DecodeAttention:
        grid = None if self.grid is None else self.grid.made()
        return DecodeAttention(self.memory, self.t0_us, self.pair_ns, grid, self.evidence.made())


class _Prefill(_Strict):
    compute: _Share
    memory: _Share
    t0_us: _NotNegative
    walk_us_per_1000: _NotNegative = 0.0
    evidence: _Evidence = _Evidence()

    def made(self) -> PrefillAttention:
        return PrefillAttention(self.compute, self.memory, self.t0_us, self.walk_us_per_1000, self.evidence.made())


class _NoSplit(_Strict):
    us_per_1000_tokens: _Positive
    slots_per_sm: _Positive
    memory: _Share
    tile_us: _NotNegative = 0.0
    l2_mb: _Positive = 40.0
    evidence: _Evidence = _Evidence()

    def made(self) -> NoSplit:
        walk, slots = self.us_per_1000_tokens, self.slots_per_sm
        return NoSplit(walk, slots, self.memory, self.tile_us, self.l2_mb, self.evidence.made())


class _AllReduce(_Strict):
    tp: int = Field(ge=2, le=1024)
    t0_us: _NotNegative
    bandwidth: Annotated[float, Field(gt=0, lt=1e15)]
    points: tuple[tuple[float, float], ...] = ()
    evidence: _Evidence = _Evidence()

    @field_validator("points")
    @classmethod
    def _rising(cls, points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        sizes = [size for size, _ in points]
        if sizes != sorted(set(sizes)) or any(size <= 0 or us <= 0 for size, us in points):
            raise ValueError("pairs [bytes, us], both positive, bytes rising")
        return points

    def made(self) -> AllReduce:
        return AllReduce(self.tp, self.t0_us, self.bandwidth, self.points, self.evidence.made())


class _Elementwise(_Strict):
    memory: Annotated[float, Field(gt=0, le=10)]
    evidence: _Evidence = _Evidence()

    def made(self) -> Elementwise:
        return Elementwise(self.memory, self.evidence.made())


class _Overhead(_Strict):
    per_layer_us: _NotNegative
    per_step_us: _NotNegative
    per_sampled_token_us: _NotNegative
    evidence: _Evidence = _Evidence()

    def made(self) -> Overhead:
        return Overhead(self.per_layer_us, self.per_step_us, self.per_sampled_token_us, self.evidence.made())


class _File(_Strict):
    name: str = Field(min_length=1, max_length=100)
    card: str = Field(min_length=1, max_length=100)
    source: str
    linear: dict[str, _Linear]
    decode: dict[str, _Decode]
    prefill: dict[str, _Prefill]
    no_split: _NoSplit
    allreduce: tuple[_AllReduce, ...] = ()
    elementwise: _Elementwise
    overhead: _Overhead
    fp8_kv_factor: _Positive = 1.0

    @field_validator("linear", "decode", "prefill")
    @classmethod
    def _types(cls, parts: dict[str, Any]) -> dict[str, Any]:
        if "bfloat16" not in parts or not set(parts) <= {"bfloat16", "fp8"}:
            raise ValueError(f"needs bfloat16, and may have fp8; has {', '.join(parts) or 'nothing'}")
        return parts

    def made(self) -> Calibration:
        return Calibration(
            self.name,
            self.card,
            self.source,
            {key: part.made() for key, part in self.linear.items()},
            {key: part.made() for key, part in self.decode.items()},
            {key: part.made() for key, part in self.prefill.items()},
            self.no_split.made(),
            tuple(entry.made() for entry in self.allreduce),
            self.elementwise.made(),
            self.overhead.made(),
            self.fp8_kv_factor,
        )


def _with_axes(grid: _Grid | None, axes: tuple[str, ...]) -> _Grid | None:
    if grid is not None and grid.axes != axes:
        raise ValueError(f"axes {list(grid.axes)}: must be {list(axes)}")
    return grid


def calibration_names() -> tuple[str, ...]:
    """The calibrations that come with speckv."""
    return tuple(sorted(file.stem for file in (shipped_scenarios() / "calibrations").glob("*.yaml")))


def load_calibration(name: str | None) -> Calibration:
    """A shipped calibration by its name; None takes the one that stands in for cards without their own.

    Raises ScenarioError for an unknown name, or where the file is damaged.
    """
    wanted = _FALLBACK if name is None else name
    names = calibration_names()
    if wanted not in names:
        problem = Problem(
            "there is no calibration of that name",
            key="timing.calibration",
            value=wanted,
            allowed=f"a path to a YAML file, or one of {', '.join(names)}",
            nearest=nearest_name(wanted, names),
        )
        raise ScenarioError([problem])
    return read_calibration(shipped_scenarios() / "calibrations" / f"{wanted}.yaml")


def read_calibration(path: Path) -> Calibration:
    """The calibration in a file. Raises ScenarioError naming file, key, value and what is allowed."""
    try:
        stamp = path.stat().st_mtime_ns
    except (OSError, ValueError):
        stamp = 0
    return _read(path, stamp)


@lru_cache(maxsize=32)
def _read(path: Path, stamp: int) -> Calibration:
    source = read_file(path)
    try:
        return _File.model_validate(source.data).made()
    except ValidationError as error:
        raise ScenarioError([_problem(source, entry) for entry in error.errors()], source.label) from None


def _problem(source: Source, entry: Mapping[str, Any]) -> Problem:
    path = tuple(entry["loc"])
    value = entry["input"] if entry["type"] != "missing" and not isinstance(entry["input"], dict | list) else None
    line = source.place(path).line
    return Problem(str(entry["msg"]), key=dotted(path), value=value, file=source.label, line=line)


# Back to text


def calibration_text(calibration: Calibration) -> str:
    """The YAML of a calibration; `read_calibration` gives the same one back, numbers to six digits."""
    lines = [f"name: {_text(calibration.name)}", f"card: {_text(calibration.card)}"]
    lines.append(f"source: {_text(calibration.source)}")
    for key in ("linear", "decode", "prefill"):
        lines.append(f"{key}:")
        for dtype, part in getattr(calibration, key).items():
            lines.append(f"  {dtype}:")
            lines += _part(part, "    ")
    lines.append("no_split:")
    lines += _part(calibration.no_split, "  ")
    if calibration.allreduce:
        lines.append("allreduce:")
        for entry in calibration.allreduce:
            body = _part(entry, "    ")
            lines += ["  -" + body[0][3:], *body[1:]]
    for key in ("elementwise", "overhead"):
        lines.append(f"{key}:")
        lines += _part(getattr(calibration, key), "  ")
    lines.append(f"fp8_kv_factor: {_number(calibration.fp8_kv_factor)}")
    return "\n".join(lines) + "\n"


def _part(part: Any, indent: str) -> list[str]:
    lines = []
    for name in type(part).__slots__:
        value = getattr(part, name)
        if value is None or (isinstance(value, tuple | dict) and not value):
            continue
        if isinstance(value, Grid):
            lines.append(f"{indent}grid:")
            lines.append(f"{indent}  axes: [{', '.join(value.axes)}]")
            lines.append(f"{indent}  knots:")
            lines += [f"{indent}    - {_list(knots)}" for knots in value.knots]
            lines.append(f"{indent}  log_factors:")
            width = 12
            logs = [f"{log:.3f}" for log in value.log_factors]
            rows = [", ".join(logs[start : start + width]) for start in range(0, len(logs), width)]
            lines += [f"{indent}    [", *(f"{indent}      {row}," for row in rows), f"{indent}    ]"]
        elif isinstance(value, Evidence):
            lines.append(f"{indent}evidence:")
            body = _part(value, f"{indent}  ")
            lines = lines[:-1] if not body else lines + body
        elif isinstance(value, Mapping):
            lines.append(f"{indent}{name}:")
            lines += [f"{indent}  {axis}: {_list(limits)}" for axis, limits in value.items()]
        elif isinstance(value, tuple) and value and isinstance(value[0], tuple):
            lines.append(f"{indent}{name}:")
            lines += [f"{indent}  - {_list(pair)}" for pair in value]
        elif isinstance(value, tuple):
            lines.append(f"{indent}{name}: {_list(value)}")
        elif isinstance(value, str):
            if value:
                lines.append(f"{indent}{name}: {_text(value)}")
        elif not (name == "points" and value == 0):
            lines.append(f"{indent}{name}: {_number(value)}")
    return lines


def _list(values: Sequence[float]) -> str:
    return "[" + ", ".join(_number(value) for value in values) + "]"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e16 else f"{value:.6g}"


def _text(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
    return f'"{escaped}"'
