"""What was measured of a server: a `vllm bench serve` result, metrics, a log, or a recorded run (LLMServingSim's).

Knows the formats, told by their content, and turns each into figures under common names and into courses over time.
Must not know scenarios or simulations. Formats are vLLM 0.32's (`vllm/benchmarks/serve.py`,
`vllm/v1/metrics/loggers.py`). Every error names the file and, where it has lines, the line.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.acceptance_sources import read_sources
from sim.models.acceptance import AcceptanceError
from sim.models.acceptance_fit import Counts
from sim.vllm_settings import SettingsError, read_cache_config, read_json_object, text_lines

__all__ = ["FIGURES", "Course", "Figure", "Measured", "MeasuredError", "read_measured"]

Floats = NDArray[np.float64]


class MeasuredError(ValueError):
    """A source that cannot be read. The message names file and line, the value and what is allowed."""


class Figure(NamedTuple):
    """How a figure is called, its unit, and which of the compared things it belongs to."""

    label: str
    unit: str
    group: str


FIGURES: Final[Mapping[str, Figure]] = {
    **{
        f"{name}_ms_{which}": Figure(f"{label}, {which}", "ms", label)
        for name, label in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2el", "end to end"))
        for which in ("mean", "median", "p99")
    },
    "output_throughput": Figure("output throughput", "tokens/s", "throughput"),
    "request_throughput": Figure("request throughput", "requests/s", "throughput"),
    "duration_s": Figure("duration", "s", "throughput"),
    "running": Figure("running, mean", "requests", "running"),
    "waiting": Figure("waiting, mean", "requests", "waiting"),
    "in_system": Figure("under way, mean", "requests", "running"),
    "kv_cache_usage": Figure("KV cache usage, mean", "percent", "usage"),
    "preemptions_per_1000_tokens": Figure("preemptions per 1,000 output tokens", "", "preemptions"),
    "prefix_hit_rate": Figure("prefix cache hit rate", "percent", "prefix hits"),
    "mean_acceptance_length": Figure("mean acceptance length", "tokens", "acceptance"),
}


class Course(NamedTuple):
    """A figure over time."""

    times_s: Floats
    values: Floats
    known_origin: bool
    """Whether time 0 is the first arrival; else it is that of the source's own clock."""


@dataclass
class Measured:
    """What the sources say together."""

    figures: dict[str, float] = field(default_factory=dict)
    courses: dict[str, Course] = field(default_factory=dict)
    num_gpu_blocks: int | None = None
    rates: tuple[float, ...] | None = None
    """Accepted by position, of all drafts (unconditional)."""
    requests: tuple[tuple[int, int, int], ...] | None = None
    """Arrival in ns from the first, prompt and output tokens, in order of arrival."""
    notes: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)

    def put(self, figures: Mapping[str, float], path: Path) -> None:
        """Take figures that no source before had."""
        for name, value in figures.items():
            if name not in self.figures:
                self.figures[name] = value
            elif not math.isclose(self.figures[name], value, rel_tol=0.01, abs_tol=1e-9):
                self.notes.append(
                    f"{path}: {FIGURES[name].label} {value:.4g} is left out; before: {self.figures[name]:.4g}"
                )


def read_measured(names: Sequence[str | Path], *, interval_s: float | None = None) -> Measured:
    """Read the sources together; several metrics scrapes are a series, in their order.

    `interval_s`: time between scrapes that have no timestamps. Raises MeasuredError.
    """
    if not names:
        raise MeasuredError("no source was given")
    measured = Measured()
    scrapes: list[Path] = []
    try:
        for name in names:
            path = Path(name)
            kind, whole = _kind_of(path)
            if kind == "metrics":
                scrapes.append(path)
                continue
            measured.kinds.append(kind)
            if kind == "bench":
                _bench(measured, path, whole)
            elif kind == "meta":
                _meta(measured, path, whole)
            elif kind == "requests":
                _requests(measured, path)
            elif kind == "time series":
                _time_series(measured, path)
            else:
                _log(measured, path)
        if scrapes:
            measured.kinds.append("metrics")
            _metrics(measured, scrapes, interval_s)
    except (SettingsError, AcceptanceError) as error:
        raise MeasuredError(str(error)) from None
    if not measured.figures:
        raise MeasuredError(f"{', '.join(map(str, names))}: no figure to compare with")
    return measured


_FORMATS: Final = (
    "read are: a result of vllm bench serve (JSON), metrics (`vllm:...`), a log (`Avg generation throughput: ...`), "
    "and a recorded run: requests (JSON lines with arrival_time, first_token_ts, ...), time series (CSV with t, "
    "running, waiting, kv_cache_pct), meta.json"
)
_SERIES: Final = ("t", "gen_throughput", "running", "waiting", "kv_cache_pct")


def _kind_of(path: Path) -> tuple[str, Any]:
    """The kind of a file, and its content where it is one JSON object."""
    first = None
    for number, line in text_lines(path):
        text = line.strip()
        if not text:
            continue
        if first is None:
            first = text
            if text[0] == "{":
                try:
                    row = json.loads(text)
                except (ValueError, RecursionError):
                    row = None
                if isinstance(row, dict) and {"arrival_time", "first_token_ts"} & set(row):
                    return "requests", None
                whole = read_json_object(path)
                if isinstance(whole, dict) and ("resolved_config" in whole or "kv_cache" in whole):
                    return "meta", whole
                if isinstance(whole, dict) and ("request_throughput" in whole or "ttfts" in whole):
                    return "bench", whole
                raise MeasuredError(f"{path}:{number}: JSON of an unknown kind; {_FORMATS}")
            if {"running", "waiting"} <= set(text.split(",")):
                return "time series", None
        if text.startswith("vllm:"):
            return "metrics", None
        if _STATS in text or "SpecDecoding metrics:" in text:
            return "log", None
    if first is None:
        raise MeasuredError(f"{path}: is empty")
    raise MeasuredError(f"{path}: of an unknown kind; {_FORMATS}")


# The log

_STATS: Final = "Avg generation throughput:"
_STATS_LINE: Final = re.compile(
    r"(?:Engine (\d+)|(\d+) Engines Aggregated): Avg prompt throughput: ([0-9.]+) tokens/s, "
    r"Avg generation throughput: ([0-9.]+) tokens/s, Running: (\d+) reqs, Waiting: (\d+) reqs(.*)$"
)
_PREEMPTIONS: Final = re.compile(r"Preemptions: (\d+)")
_USAGE: Final = re.compile(r"KV cache usage: ([0-9.]+)%")
_HITS: Final = re.compile(r"(?<!External )Prefix cache hit rate: ([0-9.]+)%")
_TIME: Final = re.compile(r"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b")


def _log(measured: Measured, path: Path) -> None:
    rows: list[tuple[float, float, float, float, float]] = []
    preemptions = 0
    hit_rate = math.nan
    engine: str | None = None
    others: set[str] = set()
    broken: list[int] = []
    has_drafts = False
    clock = _Clock()
    for number, line in text_lines(path):
        has_drafts = has_drafts or "SpecDecoding metrics:" in line
        if _STATS not in line:
            continue
        found = _STATS_LINE.search(line)
        usage = None if found is None else _USAGE.search(found[7])
        stamp = _TIME.search(line)
        if found is None or usage is None or stamp is None:
            broken.append(number)
            continue
        named = found[1] or f"{found[2]} aggregated"
        if engine is None:
            engine = named
        if named != engine:
            others.add(named)
            continue
        try:
            time_s = clock.seconds(stamp)
        except ValueError:
            raise MeasuredError(
                f"{path}:{number}: {stamp[0]!r} is no time: expected month-day hour:minute:second"
            ) from None
        rows.append((time_s, float(found[4]), float(found[5]), float(found[6]), float(usage[1])))
        if (lost := _PREEMPTIONS.search(found[7])) is not None:
            preemptions += int(lost[1])
        if (hits := _HITS.search(found[7])) is not None:
            hit_rate = float(hits[1])
    if broken:
        shown = ", ".join(map(str, broken[:3]))
        measured.notes.append(
            f"{path}: {len(broken)} lines of figures were cut or malformed and left out (lines {shown})"
        )
    if others:
        measured.notes.append(f"{path}: engines {', '.join(sorted(others))} are left out; compared is engine {engine}")
    active = [number for number, row in enumerate(rows) if row[1] > 0 or row[2] > 0]
    figures: dict[str, float] = {}
    if active:
        table = np.asarray(rows[active[0] : active[-1] + 1], dtype=np.float64)
        times = table[:, 0]
        _put_courses(measured, times, table[:, 1:])
        figures = dict(
            zip(("output_throughput", "running", "waiting", "kv_cache_usage"), table[:, 1:].mean(0), strict=True)
        )
        step = float(np.median(np.diff(times))) if len(times) > 1 else 10.0
        tokens = float(table[:, 1].sum()) * step
        if tokens > 0:
            figures["preemptions_per_1000_tokens"] = 1000 * preemptions / tokens
        if not math.isnan(hit_rate):
            figures["prefix_hit_rate"] = hit_rate
            measured.notes.append(f"{path}: the prefix hit rate of a log is that of the last requests before its end")
    elif rows or broken:
        where = f" (first at line {broken[0]})" if broken else ""
        if not has_drafts:
            raise MeasuredError(
                f"{path}: {len(rows)} lines of an idle server and {len(broken)} cut or malformed{where}: expected "
                "`Engine 000: Avg prompt throughput: ..., Running: ... reqs, Waiting: ... reqs, ... usage: ...%`"
            )
    if has_drafts:
        try:
            figures |= _drafts(measured, [path])
        except AcceptanceError as error:
            measured.notes.append(str(error))
    measured.put({name: float(value) for name, value in figures.items()}, path)


class _Clock:
    """Seconds of times without a year; a jump back of half a year is the next year."""

    def __init__(self) -> None:
        self._year = 2000
        self._before = -math.inf

    def seconds(self, stamp: re.Match[str]) -> float:
        """Raises ValueError for a time that there is not."""
        month, day, hour, minute, second = (int(part) for part in stamp.groups())
        value = datetime(self._year, month, day, hour, minute, second).timestamp()
        if value < self._before - 180 * 86_400:
            self._year += 4
            value = datetime(self._year, month, day, hour, minute, second).timestamp()
        self._before = value
        return value


def _put_courses(measured: Measured, times: Floats, table: Floats) -> None:
    for column, name in enumerate(("output_throughput", "running", "waiting", "kv_cache_usage")):
        measured.courses.setdefault(name, Course(times - times[0], table[:, column], False))


def _drafts(measured: Measured, paths: Sequence[Path]) -> dict[str, float]:
    """The mean acceptance length of a source with drafts; also keeps its rates."""
    source = read_sources([str(path) for path in paths])
    evidence = source.evidence
    measured.notes.extend(f"{paths[0]}: {note}" for note in source.notes)
    if not isinstance(evidence, Counts):
        return {}
    rates = evidence.accepted.sum(axis=0) / evidence.num_drafts.sum()
    measured.rates = measured.rates or tuple(float(rate) for rate in rates)
    return {"mean_acceptance_length": 1.0 + float(rates.sum())}


# Metrics

_SAMPLE: Final = re.compile(r"(vllm:[A-Za-z0-9_:]+)(?:\{(.*)\})? +(\S+)(?: +(\S+))?\s*$")
_ENGINE: Final = re.compile(r'(?:^|,)\s*engine="([^"]*)"')
_GAUGES: Final = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_usage",
    "vllm:gpu_cache_usage_perc": "kv_cache_usage",
}
_COUNTERS: Final = {
    f"vllm:{name}": name
    for name in (
        *("num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "generation_tokens", "request_success"),
        *(
            f"{name}_{part}"
            for name in (
                "time_to_first_token_seconds",
                "request_time_per_output_token_seconds",
                "e2e_request_latency_seconds",
            )
            for part in ("sum", "count")
        ),
    )
}


def _metrics(measured: Measured, paths: Sequence[Path], interval_s: float | None) -> None:
    scrapes: list[tuple[float | None, dict[str, float]]] = []
    for path in paths:
        scrapes += _scrapes(measured, path)
    times = [time for time, _ in scrapes]
    known = [time for time in times if time is not None]
    if len(known) < len(times):
        known = [number * interval_s for number in range(len(times))] if interval_s is not None else []
        if len(times) > 1 and interval_s is None:
            measured.notes.append(
                "the scrapes have no timestamps: no throughput and no course over time without --interval-s"
            )
    if any(later <= before for before, later in pairwise(known)):
        raise MeasuredError(f"{paths[0]}: the scrapes are not in order of time")
    last = dict(scrapes[-1][1])
    if len(scrapes) > 1:
        first = scrapes[0][1]
        for name in _COUNTERS.values():
            if name in last:
                last[name] -= first.get(name, 0.0)
                if last[name] < 0:
                    raise MeasuredError(
                        f"{paths[-1]}: {name} counts less than in the first scrape: they come in order of time, and no "
                        "restart lies between"
                    )
    figures: dict[str, float] = {}
    for name in ("running", "waiting", "kv_cache_usage"):
        values = np.asarray([values[name] for _, values in scrapes if name in values]) * (
            100.0 if name == "kv_cache_usage" else 1.0
        )
        if values.size:
            figures[name] = float(values.mean())
            if known and len(values) == len(known) > 1:
                measured.courses.setdefault(name, Course(np.asarray(known) - known[0], values, False))
    if len(scrapes) == 1 and figures:
        measured.notes.append(f"{paths[0]}: running, waiting and usage are those of one moment, held against means")
    tokens = last.get("generation_tokens", 0.0)
    if tokens > 0 and "num_preemptions" in last:
        figures["preemptions_per_1000_tokens"] = 1000 * last["num_preemptions"] / tokens
    if last.get("prefix_cache_queries", 0.0) > 0 and "prefix_cache_hits" in last:
        figures["prefix_hit_rate"] = 100 * last["prefix_cache_hits"] / last["prefix_cache_queries"]
    for name, figure in (
        ("time_to_first_token_seconds", "ttft_ms_mean"),
        ("request_time_per_output_token_seconds", "tpot_ms_mean"),
        ("e2e_request_latency_seconds", "e2el_ms_mean"),
    ):
        if last.get(f"{name}_count", 0.0) > 0 and f"{name}_sum" in last:
            figures[figure] = 1000 * last[f"{name}_sum"] / last[f"{name}_count"]
    if len(known) > 1:
        span = known[-1] - known[0]
        figures["output_throughput"] = tokens / span
        if "request_success" in last:
            figures["request_throughput"] = last["request_success"] / span
        made = np.asarray([values.get("generation_tokens", 0.0) for _, values in scrapes])
        measured.courses.setdefault(
            "output_throughput",
            Course(np.asarray(known[1:]) - known[0], np.diff(made) / np.diff(np.asarray(known)), False),
        )
    if any("drafts" in values for _, values in scrapes):
        ends = [paths[0], paths[-1]] if len(paths) > 1 else [paths[0]]
        if len(paths) == 1 and len(scrapes) > 1:
            measured.notes.append(f"{paths[0]}: acceptance is not read of several scrapes in one file")
        else:
            figures |= _drafts(measured, ends)
    measured.put(figures, paths[0])


def _scrapes(measured: Measured, path: Path) -> list[tuple[float | None, dict[str, float]]]:
    """The scrapes of one file: a name that comes again, or another timestamp, begins the next."""
    scrapes: list[tuple[float | None, dict[str, float]]] = []
    values: dict[str, float] = {}
    seen: set[str] = set()
    time: float | None = None
    engine: str | None = None
    others: set[str] = set()
    lines: list[tuple[int, str]] = []
    for number, line in text_lines(path):
        if not line.startswith("vllm:"):
            continue
        lines.append((number, line))
        found = _SAMPLE.match(line)
        if found is None:
            raise MeasuredError(f"{path}:{number}: {line[:80]!r}: expected a metric, its labels and its value")
        base = found[1].removesuffix("_total")
        name = _GAUGES.get(base) or _COUNTERS.get(base)
        if name is None and base == "vllm:spec_decode_num_drafts":
            name = "drafts"
        if name is None:
            continue
        value = _number(f"{path}:{number}: {found[1]}", found[3])
        own = _ENGINE.search(found[2] or "")
        if own is not None and own[1] != engine:
            if engine is not None:
                others.add(own[1])
                continue
            engine = own[1]
        stamp = None if found[4] is None else _number(f"{path}:{number}: timestamp", found[4]) / 1000
        key = f"{found[1]}{{{found[2] or ''}}}"
        if key in seen or (stamp is not None and time is not None and stamp != time):
            scrapes.append((time, values))
            values, seen = {}, set()
        time = stamp
        seen.add(key)
        values[name] = values.get(name, 0.0) + value
    scrapes.append((time, values))
    if others:
        measured.notes.append(f"{path}: engines {', '.join(sorted(others))} are left out; compared is engine {engine}")
    for setting in read_cache_config(lines, path).settings:
        if setting.name == "num_gpu_blocks" and str(setting.value).isdigit():
            measured.num_gpu_blocks = int(setting.value)
    return scrapes


# vllm bench serve


def _bench(measured: Measured, path: Path, result: dict[str, Any]) -> None:
    figures: dict[str, float] = {}
    for name in ("ttft", "tpot", "e2el"):
        for which in ("mean", "median", "p99"):
            value = result.get(f"{which}_{name}_ms")
            if value is not None:
                figures[f"{name}_ms_{which}"] = _number(f"{path}: {which}_{name}_ms", value)
    for key, name in (
        ("output_throughput", "output_throughput"),
        ("request_throughput", "request_throughput"),
        ("duration", "duration_s"),
    ):
        if result.get(key) is not None:
            figures[name] = _number(f"{path}: {key}", result[key])
    length = result.get("spec_decode_acceptance_length")
    if length is not None:
        figures["mean_acceptance_length"] = _number(f"{path}: spec_decode_acceptance_length", length)
        rates = result.get("spec_decode_per_position_acceptance_rates")
        if isinstance(rates, list) and rates:
            _drafts(measured, [path])
    if isinstance(result.get("start_times"), list):
        figures |= _bench_requests(measured, path, result, figures)
    measured.put(figures, path)


def _bench_requests(
    measured: Measured, path: Path, result: dict[str, Any], summary: Mapping[str, float]
) -> dict[str, float]:
    columns: dict[str, list[Any]] = {}
    for key in ("start_times", "input_lens", "output_lens", "ttfts", "itls"):
        column = result.get(key)
        if not isinstance(column, list) or len(column) != len(result["start_times"]):
            raise MeasuredError(
                f"{path}: {key}: expected a list of {len(result['start_times'])} entries, as start_times has"
            )
        columns[key] = column
    errors = result.get("errors") or [""] * len(columns["start_times"])
    rows = []
    for number, error in enumerate(errors[: len(columns["start_times"])]):
        if error:
            continue
        place = f"{path}: entry {number}"
        start, ttft = (_number(f"{place} of {key}", columns[key][number]) for key in ("start_times", "ttfts"))
        gaps = columns["itls"][number]
        if not isinstance(gaps, list):
            raise MeasuredError(f"{place} of itls = {gaps!r}: expected a list of seconds")
        decode = sum(_number(f"{place} of itls", gap) for gap in gaps)
        tokens = [columns[key][number] for key in ("input_lens", "output_lens")]
        if any(isinstance(count, bool) or not isinstance(count, int) or count < 0 for count in tokens):
            raise MeasuredError(f"{place} of input_lens, output_lens = {tokens}: expected whole numbers")
        rows.append((start, ttft, decode, *tokens))
    if not rows:
        raise MeasuredError(f"{path}: all {len(errors)} requests failed")
    if len(rows) < len(errors):
        measured.notes.append(f"{path}: {len(errors) - len(rows)} failed requests are left out")
    rows.sort()
    table = np.asarray(rows, dtype=np.float64)
    starts = table[:, 0] - table[0, 0]
    ends = starts + table[:, 1] + table[:, 2]
    if (table[:, 3:] >= 1).all():
        measured.requests = tuple(
            (round(start * 1e9), int(row[3]), int(row[4])) for start, row in zip(starts, table, strict=True)
        )
    several = table[:, 4] > 1
    figures = _statistics("ttft", table[:, 1])
    figures |= _statistics("tpot", table[several, 2] / (table[several, 4] - 1))
    figures |= _statistics("e2el", table[:, 1] + table[:, 2])
    span = summary.get("duration_s", float(ends.max()))
    figures["in_system"] = float((ends - starts).sum()) / span if span > 0 else math.nan
    _put_in_system(measured, starts, ends)
    return {name: value for name, value in figures.items() if name not in summary and not math.isnan(value)}


def _put_in_system(measured: Measured, starts: Floats, ends: Floats) -> None:
    times = np.sort(np.concatenate([starts, ends]))
    under_way = np.searchsorted(np.sort(starts), times, side="right") - np.searchsorted(
        np.sort(ends), times, side="right"
    )
    measured.courses.setdefault("in_system", Course(times, under_way.astype(np.float64), True))


def _statistics(name: str, seconds: Floats) -> dict[str, float]:
    if not seconds.size:
        return {}
    ms = seconds * 1e3
    return {
        f"{name}_ms_mean": float(ms.mean()),
        f"{name}_ms_median": float(np.median(ms)),
        f"{name}_ms_p99": float(np.percentile(ms, 99)),
    }


# A recorded run


def _meta(measured: Measured, path: Path, whole: dict[str, Any]) -> None:
    cache = whole.get("kv_cache")
    blocks = cache.get("num_gpu_blocks") if isinstance(cache, dict) else None
    if isinstance(blocks, bool) or not isinstance(blocks, int):
        raise MeasuredError(f"{path}: kv_cache.num_gpu_blocks = {blocks!r}: expected a whole number")
    measured.num_gpu_blocks = blocks


_REQUEST_KEYS: Final = ("arrival_time", "queued_ts", "first_token_ts", "last_token_ts", "input_toks", "output_toks")


def _requests(measured: Measured, path: Path) -> None:
    """LLMServingSim's requests. Their arrivals are on another clock than the rest; no request was queued before it
    came, so the clocks are set so that none is, by as little as that takes.
    """
    rows = []
    for number, line in text_lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = (
                f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else "nested too deep"
            )
            raise MeasuredError(f"{path}:{number}: malformed JSON ({reason})") from None
        if not isinstance(row, dict):
            raise MeasuredError(f"{path}:{number}: expected an object with {', '.join(_REQUEST_KEYS)}")
        missing = [key for key in _REQUEST_KEYS if key not in row]
        if missing:
            raise MeasuredError(f"{path}:{number}: {', '.join(missing)}: missing")
        rows.append([_number(f"{path}:{number}: {key}", row[key]) for key in _REQUEST_KEYS])
        if rows[-1][4] < 1 or rows[-1][5] < 1:
            raise MeasuredError(f"{path}:{number}: input_toks, output_toks: expected 1 token or more")
    if not rows:
        raise MeasuredError(f"{path}: is empty")
    rows.sort()
    table = np.asarray(rows, dtype=np.float64)
    arrivals = table[:, 0] - table[0, 0]
    queued, first, last = (table[:, column] - table[:, 1].min() for column in (1, 2, 3))
    offset = float((arrivals - queued).max())
    first, last = first + offset, last + offset
    outputs = table[:, 5]
    figures = _statistics("ttft", first - arrivals)
    several = outputs > 1
    figures |= _statistics("tpot", (last - first)[several] / (outputs[several] - 1))
    figures |= _statistics("e2el", last - arrivals)
    end = float(last.max())
    figures["duration_s"] = end
    figures["output_throughput"] = float(outputs.sum()) / end
    figures["request_throughput"] = len(rows) / end
    measured.requests = tuple(
        (round(arrival * 1e9), int(row[4]), int(row[5])) for arrival, row in zip(arrivals, table, strict=True)
    )
    _put_in_system(measured, arrivals, last)
    measured.notes.append(
        f"{path}: arrivals are on a clock of their own, set so that no request is queued before it arrives"
    )
    measured.put(figures, path)


def _time_series(measured: Measured, path: Path) -> None:
    names: list[str] | None = None
    rows: list[list[float]] = []
    for number, line in text_lines(path):
        if not line.strip():
            continue
        fields = [part.strip() for part in line.split(",")]
        if names is None:
            names = fields
            missing = [name for name in _SERIES if name not in names]
            if missing:
                raise MeasuredError(f"{path}:{number}: no column {', '.join(missing)}; there are {', '.join(names)}")
            continue
        if len(fields) != len(names):
            raise MeasuredError(f"{path}:{number}: {len(fields)} fields, and the header has {len(names)}")
        row = [_number(f"{path}:{number}: {name}", fields[names.index(name)]) for name in _SERIES]
        if rows and row[0] <= rows[-1][0]:
            raise MeasuredError(f"{path}:{number}: t = {row[0]:g} does not rise above the {rows[-1][0]:g} before")
        rows.append(row)
    active = [number for number, row in enumerate(rows) if any(row[1:4])]
    if not active:
        raise MeasuredError(f"{path}: nothing is running in it")
    table = np.asarray(rows[active[0] : active[-1] + 1], dtype=np.float64)
    _put_courses(measured, table[:, 0], table[:, 1:])
    means = table[:, 1:].mean(axis=0)
    figures = dict(zip(("output_throughput", "running", "waiting", "kv_cache_usage"), map(float, means), strict=True))
    if "output_throughput" in measured.figures:
        del figures["output_throughput"]
    measured.put(figures, path)


def _number(place: str, value: Any, convert: Callable[[Any], float] = float) -> float:
    try:
        number = math.nan if isinstance(value, bool) or value is None else convert(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise MeasuredError(f"{place} = {value!r}: expected a number, 0 or more")
    return number
