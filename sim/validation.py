"""A simulation held against what was measured: errors by figure, courses over time, and which input is to blame.

Knows scenarios, their simulation and measured figures. Must not know formats of sources (`measured_runs`) or the
terminal. Nothing is fitted: the blame re-simulates with one input changed at a time and says what that takes away.

The rule. A figure's error is |s - m| / max(|s|, |m|, small), from 0 to 1; a group's (TTFT, TPOT, throughput, ...) the
mean of its figures', and the whole error the mean over groups. Inputs are the number of blocks, acceptance, step cost
and arrival times. One that the source itself confirms is cleared. Each other is replaced by what the source says of
it, if anything, and is made 1.25 times smaller and larger (acceptance: the odds of each draft, by 1.5), then, on the
better side, by the root and the square of that. The input that takes away most of the error by one of these changes
is the likeliest to blame, if that is a quarter or more. That makes at most `MOST_RUNS` simulations.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim import __version__
from sim.build import Simulation, build
from sim.core.crash import EngineCrash
from sim.device import StepTimer
from sim.measured_runs import FIGURES, Course, Measured
from sim.models.timing import StepCost, StepShape
from sim.observers.metrics import Metrics
from sim.records import Batch, Returned
from sim.run import BAD_INPUT, summarise
from sim.scenario import Scenario, resolved_scenario, trace_path
from workloads.traces import Columns, Trace, TraceError

__all__ = ["INPUTS", "MOST_RUNS", "Blame", "Compared", "Trial", "Validation", "validate", "write_validation"]

Floats = NDArray[np.float64]

INPUTS: Final = ("number of blocks", "acceptance", "step cost", "arrival times")
"""What can be to blame."""
MOST_RUNS: Final = 1 + 4 * 5
"""Simulations of one validation, at most."""
_FACTORS: Final = {"number of blocks": 1.25, "acceptance": 1.5, "step cost": 1.25, "arrival times": 1.25}
_BLAMED_FROM: Final = 0.25
_AS_GOOD_AS_NONE: Final = 0.02
_SMALL: Final = {"running": 1.0, "waiting": 1.0, "usage": 1.0, "preemptions": 1.0, "prefix hits": 1.0}
"""Requests, percent, preemptions per 1,000 tokens: less than this is not told apart from nothing by its ratio."""
_SAMPLES: Final = 400


class Compared(NamedTuple):
    """A figure on both sides."""

    name: str
    measured: float
    simulated: float

    @property
    def error(self) -> float | None:
        """Relative to what was measured; None where that is 0."""
        return None if self.measured == 0 else self.simulated / self.measured - 1

    @property
    def distance(self) -> float:
        """From 0 (equal) to 1; what is below `_SMALL` counts as small on both sides."""
        largest = max(abs(self.measured), abs(self.simulated), _SMALL.get(FIGURES[self.name].group, 0.0))
        return 0.0 if largest == 0 else abs(self.simulated - self.measured) / largest


@dataclass(frozen=True)
class Trial:
    """One input changed. `removed`: share of the error that went with it; None where it could not be simulated."""

    input: str
    change: str
    removed: float | None
    note: str = ""


@dataclass(frozen=True)
class Blame:
    """Which input is most likely wrong. `input`: None where none is; `sentence` says it, and why."""

    input: str | None
    sentence: str
    cleared: Mapping[str, str]
    trials: tuple[Trial, ...]


@dataclass(frozen=True)
class Validation:
    """A scenario held against a measurement."""

    name: str
    compared: tuple[Compared, ...]
    error: float
    """The mean over groups, 0 to 1."""
    over_time: Mapping[str, float]
    """Mean absolute difference from the measured course, by figure, in its unit."""
    blame: Blame | None
    measured: Measured
    simulated: Mapping[str, Course]
    shift_s: float
    """What was added to the measured times so that 0 is the first arrival."""
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The content of `validation.json`."""
        blame = self.blame
        return {
            "speckv": __version__,
            "scenario": self.name,
            "sources": self.measured.kinds,
            "error": self.error,
            "figures": {
                entry.name: {
                    "measured": entry.measured,
                    "simulated": entry.simulated,
                    "error": entry.error,
                    "unit": FIGURES[entry.name].unit,
                }
                for entry in self.compared
            },
            "over_time": dict(self.over_time),
            "blame": None
            if blame is None
            else {
                "input": blame.input,
                "sentence": blame.sentence,
                "cleared": dict(blame.cleared),
                "trials": [trial.__dict__ for trial in blame.trials],
            },
            "notes": list(self.measured.notes),
            "warnings": list(self.warnings),
        }


# Simulating


class _Course:
    """Queues, blocks and tokens of a run over time, as it tells of them."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.times: list[int] = []
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.held: list[int] = []
        self.delivered_at: list[int] = []
        self.delivered: list[int] = []

    def scheduled(self, now: int, batch: Batch) -> None:
        scheduler = self._simulation.scheduler
        self.times.append(now)
        self.running.append(len(scheduler.running))
        self.waiting.append(len(scheduler.waiting))
        self.held.append(self._simulation.ledger.held_blocks)

    def updated(self, now: int, returned: Returned) -> None:
        self.delivered_at.append(now)
        self.delivered.append(returned.num_delivered_tokens)


class _Slower:
    """Another timer's costs, each times a factor."""

    def __init__(self, timer: StepTimer, factor: float) -> None:
        self._timer = timer
        self._factor = factor

    def step_cost(self, step: StepShape) -> StepCost:
        cost = self._timer.step_cost(step)
        return cost._replace(jitter=cost.jitter + round(cost.total * (self._factor - 1)))


@dataclass
class _Simulated:
    figures: dict[str, float]
    courses: dict[str, Course]
    rates: list[float]
    num_gpu_blocks: int
    warnings: list[str] = field(default_factory=list)


def _simulated(scenario: Scenario, step_factor: float = 1.0) -> _Simulated:
    """Simulate it. Raises BAD_INPUT and EngineCrash."""
    simulation = build(scenario)
    if step_factor != 1.0:
        device = simulation.device
        device.timer = _Slower(device.timer, step_factor)
    speculation = scenario.engine.speculative_config
    k = 0 if speculation is None else speculation.num_speculative_tokens
    metrics = Metrics(None, num_speculative_tokens=k)
    course = _Course(simulation)
    simulation.add_observer(metrics)
    simulation.add_observer(course)
    simulation.run()
    if simulation.stopped_by == "crash":
        raise EngineCrash(f"{scenario.engine.preset} would have crashed here: {simulation.crash}")
    summary = summarise(metrics, simulation)
    figures: dict[str, float] = {}
    for name in FIGURES:
        head, _, which = name.rpartition("_")
        value = summary[head].get(which) if head.endswith("_ms") else summary.get(name)
        if value is not None:
            figures[name] = float(value)
    figures["kv_cache_usage"] = 100 * summary["kv_cache_usage_perc"]["mean"]
    tokens, queries = summary["num_output_tokens"], summary["prefix_cache_queries"]
    if tokens:
        figures["preemptions_per_1000_tokens"] = 1000 * summary["num_preemptions"] / tokens
    figures["prefix_hit_rate"] = 100 * summary["prefix_cache_hits"] / queries if queries else 0.0
    courses = _courses(course, simulation)
    for name in ("running", "waiting", "in_system"):
        figures[name] = _mean(courses[name], figures["duration_s"])
    drafts = summary["num_drafts"]
    rates = [count / drafts for count in summary["accepted_per_pos"]] if drafts else []
    return _Simulated(figures, courses, rates, summary["num_gpu_blocks"], list(simulation.warnings))


def _courses(course: _Course, simulation: Simulation) -> dict[str, Course]:
    times = np.asarray(course.times, dtype=np.float64) / 1e9
    running, waiting = (np.asarray(column, dtype=np.float64) for column in (course.running, course.waiting))
    usage = 100 * np.asarray(course.held, dtype=np.float64) / (simulation.settings.num_gpu_blocks - 1)
    made = np.cumsum(np.asarray(course.delivered, dtype=np.float64))
    return {
        "running": Course(times, running, True),
        "waiting": Course(times, waiting, True),
        "in_system": Course(times, running + waiting, True),
        "kv_cache_usage": Course(times, usage, True),
        "tokens": Course(np.asarray(course.delivered_at, dtype=np.float64) / 1e9, made, True),
    }


def _mean(course: Course, end_s: float) -> float:
    """Over the time from the first to the end, each value holding until the next."""
    if not course.times_s.size:
        return 0.0
    widths = np.diff(np.append(course.times_s, max(end_s, float(course.times_s[-1]))))
    whole = float(widths.sum())
    return float((course.values * widths).sum() / whole) if whole else float(course.values[-1])


def _at(course: Course, times_s: Floats) -> Floats:
    """The values that hold at these times; 0 before the first and, for a queue, after the last."""
    if not course.times_s.size:
        return np.zeros(len(times_s))
    place = np.searchsorted(course.times_s, times_s, side="right") - 1
    return np.where(place >= 0, course.values[np.maximum(place, 0)], 0.0)


def _rate(tokens: Course, times_s: Floats) -> Floats:
    """Tokens a second in the interval that ends at each time."""
    if not len(times_s):
        return times_s
    first = times_s[0] - (times_s[1] - times_s[0] if len(times_s) > 1 else 1.0)
    edges = np.concatenate([[first], times_s])
    return np.diff(_at(tokens, edges)) / np.diff(edges)


# Comparing


def validate(
    scenario: Scenario, measured: Measured, *, blame: bool = True, watch: Callable[[int], None] | None = None
) -> Validation:
    """Simulate the scenario and hold it against the measurement. `watch` is told how many simulations are done.

    `blame`: also find out which input is to blame. Raises BAD_INPUT where the scenario cannot be run, EngineCrash where
    the engine that it follows would have crashed, and ValueError where nothing on both sides can be compared.
    """
    done = 0

    def run(changed: Scenario, step_factor: float = 1.0) -> _Simulated:
        nonlocal done
        result = _simulated(changed, step_factor)
        done += 1
        if watch is not None:
            watch(done)
        return result

    base = run(scenario)
    compared = _compare(measured, base)
    if not compared:
        raise ValueError("the sources have no figure that the simulation has too")
    shift = _shift(measured, base)
    told = _Blaming(scenario, measured, base, compared, run).told() if blame else None
    return Validation(
        scenario.name or "scenario",
        tuple(compared),
        _error(compared),
        _over_time(measured, base, shift),
        told,
        measured,
        base.courses,
        shift,
        tuple(base.warnings),
    )


def _compare(measured: Measured, simulated: _Simulated) -> list[Compared]:
    return [
        Compared(name, measured.figures[name], simulated.figures[name])
        for name in FIGURES
        if name in measured.figures and name in simulated.figures
    ]


def _error(compared: list[Compared]) -> float:
    groups: dict[str, list[float]] = {}
    for entry in compared:
        groups.setdefault(FIGURES[entry.name].group, []).append(entry.distance)
    return sum(sum(distances) / len(distances) for distances in groups.values()) / len(groups)


def _shift(measured: Measured, simulated: _Simulated) -> float:
    """Where the measured clock starts: the first sample closes the interval in which the first request came, and where
    in that interval is told by the running requests alone, to a tenth."""
    course = measured.courses.get("running")
    if course is None or course.known_origin or not course.times_s.size:
        return 0.0
    interval = float(np.median(np.diff(course.times_s))) if len(course.times_s) > 1 else 0.0
    best, least = 0.0, math.inf
    for tenth in range(11):
        shift = interval * tenth / 10 - float(course.times_s[0])
        gap = float(np.abs(_at(simulated.courses["running"], course.times_s + shift) - course.values).mean())
        if gap < least:
            best, least = shift, gap
    return best


def _over_time(measured: Measured, simulated: _Simulated, shift: float) -> dict[str, float]:
    result = {}
    for name, course in measured.courses.items():
        times = course.times_s + (0.0 if course.known_origin else shift)
        if name in simulated.courses and len(times) > 1:
            result[name] = float(np.abs(_at(simulated.courses[name], times) - course.values).mean())
    return result


# Blame


class _Blaming:
    """Re-simulations with one input changed at a time."""

    def __init__(
        self,
        scenario: Scenario,
        measured: Measured,
        base: _Simulated,
        compared: list[Compared],
        run: Callable[..., _Simulated],
    ) -> None:
        self._scenario = scenario
        self._measured = measured
        self._base = base
        self._error = _error(compared)
        self._run = run
        self._trials: list[Trial] = []
        self._sizes: dict[str, tuple[float, float]] = {}
        """By input: the best factor so far, and what it removes."""

    def told(self) -> Blame:
        cleared = {name: reason for name in INPUTS if (reason := self._cleared(name)) is not None}
        if self._error < _AS_GOOD_AS_NONE:
            return Blame(None, f"no input is to blame: the error is {100 * self._error:.1f} percent", cleared, ())
        with tempfile.TemporaryDirectory(prefix="speckv-") as folder:
            for name in INPUTS:
                if name not in cleared:
                    self._as_measured(name, Path(folder))
                    for factor in (1 / _FACTORS[name], _FACTORS[name]):
                        self._try(name, factor)
                    if name in self._sizes:
                        factor = self._sizes[name][0]
                        for further in (math.sqrt(factor), factor * factor):
                            self._try(name, further)
        likeliest = max(self._trials, key=lambda trial: trial.removed or 0.0, default=None)
        if likeliest is None or (likeliest.removed or 0.0) < _BLAMED_FROM:
            most = ""
            if likeliest is not None and likeliest.removed:
                share = f"{100 * likeliest.removed:.0f} percent of it"
                most = f"; most goes with {likeliest.input} ({likeliest.change}): {share}"
            return Blame(None, f"no input alone explains a quarter of the error{most}", cleared, tuple(self._trials))
        assert likeliest.removed is not None
        sentence = (
            f"{likeliest.input}: with {likeliest.change}, {100 * likeliest.removed:.0f} percent of the error is gone"
        )
        return Blame(likeliest.input, sentence, cleared, tuple(self._trials))

    def _cleared(self, name: str) -> str | None:
        """Why the input is not to blame; None where it may be."""
        scenario, measured, base = self._scenario, self._measured, self._base
        if name == "number of blocks" and measured.num_gpu_blocks == base.num_gpu_blocks:
            return f"the source has {base.num_gpu_blocks} blocks, as the scenario"
        if name == "acceptance":
            length = measured.figures.get("mean_acceptance_length")
            if scenario.engine.speculative_config is None:
                return "nothing is drafted"
            simulated = base.figures.get("mean_acceptance_length")
            if length is not None and simulated is not None and abs(simulated / length - 1) < 0.01:
                return f"the mean acceptance length is {simulated:.3f}, within 1 percent of the source's"
        if name == "step cost" and scenario.timing.fixed_step_ms is not None:
            return "every step takes timing.fixed_step_ms"
        if name == "arrival times":
            if measured.requests is not None and self._requests() == measured.requests:
                return "the scenario plays the source's requests at the source's times"
            if self._scaled_arrivals(1.0) is None:
                return "all requests come at once"
        return None

    def _requests(self) -> tuple[tuple[int, int, int], ...] | None:
        """Those of the scenario's trace, for a comparison; None where there are too many, or no trace."""
        trace = self._scenario.workload.trace
        if trace is None or trace.time_scale != 1.0 or self._measured.requests is None:
            return None
        named = trace.columns
        columns = None
        if named is not None:
            columns = Columns(named.arrival, named.prompt_tokens, named.output_tokens, named.unit)
        try:
            read = Trace(
                trace_path(self._scenario),
                trace.format,
                columns=columns,
                max_requests=min(trace.max_requests or len(self._measured.requests) + 1, 10**8),
                skip_bad_rows=trace.skip_bad_rows,
            )
            rows = tuple((spec.arrival_ns, spec.num_prompt_tokens, spec.max_tokens) for spec in read.arrivals())
        except (TraceError, ValueError):
            return None
        close = len(rows) == len(self._measured.requests) and all(
            abs(one[0] - other[0]) <= 1_000_000 and one[1:] == other[1:]
            for one, other in zip(rows, self._measured.requests, strict=True)
        )
        return self._measured.requests if close else rows

    def _changed(self, **parts: Any) -> Scenario:
        data = self._scenario.resolved()
        for key, value in parts.items():
            if isinstance(value, dict) and isinstance(data[key], dict) and key in ("engine", "timing"):
                data[key] = data[key] | value
            else:
                data[key] = value
        return resolved_scenario(data, self._scenario.file)

    def _judge(self, name: str, change: str, make: Callable[[], Scenario], step_factor: float = 1.0) -> float | None:
        try:
            result = self._run(make(), step_factor)
        except (*BAD_INPUT, EngineCrash) as error:
            self._trials.append(Trial(name, change, None, " ".join(str(error).split())[:200]))
            return None
        removed = 1 - _error(_compare(self._measured, result)) / self._error
        self._trials.append(Trial(name, change, removed))
        return removed

    def _as_measured(self, name: str, folder: Path) -> None:
        measured = self._measured
        if name == "number of blocks" and measured.num_gpu_blocks is not None:
            blocks = measured.num_gpu_blocks
            self._judge(
                name, f"the {blocks} blocks of the source", lambda: self._changed(engine={"num_gpu_blocks": blocks})
            )
        elif name == "acceptance" and measured.rates is not None:
            if len(measured.rates) >= len(self._base.rates):
                section = {"model": "per_position", "rates": list(measured.rates), "convention": "unconditional"}
                self._judge(name, "the source's rates by position", lambda: self._changed(acceptance=section))
        elif name == "arrival times" and measured.requests is not None:
            file = folder / "requests.jsonl"
            with file.open("w", encoding="utf-8") as out:
                for arrival, prompt, output in measured.requests:
                    out.write(f'{{"arrival_ns": {arrival}, "prompt_tokens": {prompt}, "output_tokens": {output}}}\n')
            workload = {"trace": {"path": str(file), "format": "columns"}}
            self._judge(name, "the source's requests at their times", lambda: self._changed(workload=workload))

    def _try(self, name: str, factor: float) -> None:
        shown = f"{factor:.2f} times"
        removed: float | None
        if name == "number of blocks":
            blocks = max(2, round(self._base.num_gpu_blocks * factor))
            change = f"{blocks} blocks ({shown} as many)"
            removed = self._judge(name, change, lambda: self._changed(engine={"num_gpu_blocks": blocks}))
        elif name == "acceptance":
            rates = _better(self._base.rates, factor)
            if not rates:
                return
            section = {"model": "per_position", "rates": rates, "convention": "conditional"}
            change = f"odds of each draft {shown} as high (rates {', '.join(f'{rate:.2f}' for rate in rates[:5])})"
            removed = self._judge(name, change, lambda: self._changed(acceptance=section))
        elif name == "step cost":
            timing = self._scenario.timing
            host = {"schedule_ms": timing.schedule_ms * factor, "update_ms": timing.update_ms * factor}
            removed = self._judge(name, f"steps {shown} as long", lambda: self._changed(timing=host), factor)
        else:
            workload = self._scaled_arrivals(factor)
            removed = self._judge(name, f"requests {shown} as fast", lambda: self._changed(workload=workload))
        if removed is not None and removed > self._sizes.get(name, (1.0, -math.inf))[1]:
            self._sizes[name] = (factor, removed)

    def _scaled_arrivals(self, factor: float) -> dict[str, Any] | None:
        """The workload with everything coming so much faster; None where there is no rate to change."""
        workload = self._scenario.resolved()["workload"]
        found = False
        trace = workload["trace"]
        if trace is not None and (trace["arrivals"] is None or trace["format"] != "sharegpt"):
            trace["time_scale"] *= factor
            found = True
        elif trace is not None:
            found = _scale_process(trace["arrivals"], factor)
        if workload["synthetic"] is not None:
            found = _scale_process(workload["synthetic"]["arrivals"], factor)
        for tenant in workload["tenants"] or ():
            found = _scale_process(tenant["synthetic"]["arrivals"], factor) or found
        return workload if found else None


def _scale_process(process: dict[str, Any], factor: float) -> bool:
    kind = process["process"]
    if kind == "closed_loop":
        process["concurrency"] = max(1, round(process["concurrency"] * factor))
    elif kind == "piecewise":
        process["rates"] = [[from_s / factor, rate * factor] for from_s, rate in process["rates"]]
        if process["repeat_s"] is not None:
            process["repeat_s"] /= factor
    elif kind == "on_off":
        for key in ("on_rate", "off_rate"):
            process[key] *= factor
        for key in ("on_s", "off_s"):
            process[key] /= factor
    elif "rate" in process:
        process["rate"] *= factor
    else:
        return False
    return True


def _better(rates: list[float], factor: float) -> list[float]:
    """Conditional rates with odds so many times as high, from unconditional ones."""
    result, before = [], 1.0
    for rate in rates:
        conditional = min(max(rate / before if before > 0 else 0.0, 1e-6), 1 - 1e-6)
        odds = conditional / (1 - conditional) * factor
        result.append(odds / (1 + odds))
        before = rate
    return result


# Writing


def write_validation(validation: Validation, folder: Path) -> list[Path]:
    """Write `validation.json` and the picture `validation.png` into the folder. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "validation.json"
    report.write_text(json.dumps(validation.as_json(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    picture = folder / "validation.png"
    _draw(validation, picture)
    return [report, picture]


_PANELS: Final = (
    ("running", "running"),
    ("waiting", "waiting"),
    ("in_system", "under way"),
    ("kv_cache_usage", "KV cache usage, percent"),
    ("output_throughput", "output tokens/s"),
)
_MEASURED, _SIMULATED = "#000000", "#D55E00"


def _draw(validation: Validation, file: Path) -> None:
    from matplotlib.figure import Figure as Canvas

    measured = validation.measured.courses
    panels = [(name, label) for name, label in _PANELS if name in measured or name not in ("in_system",)]
    if "in_system" in measured and "running" not in measured:
        panels = [(name, label) for name, label in panels if name not in ("running", "waiting")]
    elif "running" in measured:
        panels = [(name, label) for name, label in panels if name != "in_system"]
    canvas = Canvas(figsize=(10, 2 * len(panels) + 3), layout="constrained")
    axes = canvas.subplots(len(panels) + 1, 1, squeeze=False)[:, 0]
    end = max([1.0, *(float(course.times_s[-1]) for course in validation.simulated.values() if course.times_s.size)])
    grid = np.linspace(0.0, end, _SAMPLES)
    for axis, (name, label) in zip(axes, panels, strict=False):
        course = measured.get(name)
        times = grid
        if course is not None:
            times = course.times_s + (0.0 if course.known_origin else validation.shift_s)
            axis.plot(
                times,
                course.values,
                color=_MEASURED,
                linewidth=1.2,
                label="measured",
                marker="." if len(times) < 3 else "",
            )
        if name == "output_throughput":
            axis.plot(
                times, _rate(validation.simulated["tokens"], times), color=_SIMULATED, linewidth=1.0, label="simulated"
            )
        else:
            axis.plot(grid, _at(validation.simulated[name], grid), color=_SIMULATED, linewidth=1.0, label="simulated")
        axis.set_ylabel(label, fontsize=8)
        axis.set_ylim(bottom=0)
        axis.set_xlim(0, max(end, float(times[-1]) if len(times) else end))
    axes[0].legend(frameon=False, fontsize=8, loc="upper right")
    axes[len(panels) - 1].set_xlabel("seconds from the first arrival", fontsize=8)
    bars = [entry for entry in validation.compared if entry.error is not None]
    axis = axes[-1]
    errors = [100 * entry.error for entry in bars if entry.error is not None]
    axis.barh(range(len(bars)), errors, color=_SIMULATED)
    axis.set_yticks(range(len(bars)), [FIGURES[entry.name].label for entry in bars], fontsize=7)
    axis.invert_yaxis()
    axis.axvline(0, color=_MEASURED, linewidth=0.8)
    axis.set_xlabel("error of the simulation, percent of what was measured", fontsize=8)
    canvas.suptitle(f"{validation.name}: simulated against measured", fontsize=10)
    canvas.savefig(file, dpi=120, metadata={"Software": None})
