"""One run in memory, from a scenario to its figures in one flat row: what a worker of a sweep does.

Knows how a scenario is varied, simulated and summed up; must not know who asked, or how workers are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from sim.build import build
from sim.observers.metrics import Metrics
from sim.policies.presets import PRESETS
from sim.recording import read_recording
from sim.run import BAD_INPUT, recorder_of, summarise
from sim.scenario import Scenario, load_scenario

Figures = dict[str, int | float | None]
"""`summary.json` with nested names joined by `_`: `ttft_ms_mean`. Lists are left out."""

Status = Literal["ok", "refused", "failed", "time_limit", "memory_limit", "crashed"]
"""`refused`: the scenario cannot be run. `failed`: it broke off. `crashed`: the worker died, or lacked what every run
needs, such as room on its disk; that is nothing of the scenario's, and another try may do."""

K_KEY: Final = "engine.speculative_config.num_speculative_tokens"
_SPECULATION: Final = "engine.speculative_config"
_NO_FIGURES: Final = ("schema_version", "drafter_pool", "garbage")
"""The last two are mappings, or null where there is nothing to tell of."""


@dataclass(frozen=True)
class Job:
    """A scenario to run, with its seed; `number` tells the answers apart."""

    number: int
    scenario: Scenario
    steps: bool | str = False
    """Which table of steps to return as well, as in a scenario's `output.steps`."""


@dataclass(frozen=True)
class Outcome:
    """What became of a run. Two runs of one scenario differ in `wall_s` and `peak_rss_mb` only."""

    status: Status
    error: str | None = None
    stopped_by: str | None = None
    figures: Figures = field(default_factory=dict)
    settings: dict[str, int] = field(default_factory=dict)
    """What the engine was given: `num_gpu_blocks`, `max_num_seqs`, `max_num_scheduled_tokens`, and `draft_slots`, which
    each scheduled request takes of those tokens."""
    steps: bytes | None = None
    """The table of steps, a Parquet file."""
    wall_s: float = 0.0
    peak_rss_mb: float = 0.0


def variant(scenario: str | Path, values: Mapping[str, Any], overrides: Sequence[str] = ()) -> Scenario:
    """The scenario with `overrides` as `load_scenario` takes them, then with keys set to plain values.

    Keys above others are set first. No drafts a step (K = 0) means no speculation: then `engine.speculative_config` is
    null, and what else is set below it has no effect. Raises ScenarioError.
    """
    without = values.get(K_KEY, None) == 0 and values.get(K_KEY) is not False
    written = [
        f"{key}={json.dumps(value, ensure_ascii=False)}"
        for key, value in sorted(values.items(), key=lambda item: item[0].count("."))
        if not (without and (key == _SPECULATION or key.startswith(f"{_SPECULATION}.")))
    ]
    if without:
        written.append(f"{_SPECULATION}=null")
    return load_scenario(scenario, [*overrides, *written])


def run_digest(scenario: Scenario) -> str:
    """SHA-256 of all that a run's figures depend on: equal ones need not be run twice.

    That leaves out the name, what is written, and acceptance where nothing is drafted.
    """
    resolved = scenario.resolved()
    del resolved["name"], resolved["output"]
    if resolved["engine"]["speculative_config"] is None:
        resolved["acceptance"] = None
    text = json.dumps(resolved, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def measure(job: Job) -> Outcome:
    """Run the scenario and sum it up. Whatever goes wrong is in the outcome; only Ctrl-C comes out as an exception."""
    began = time.perf_counter()
    try:
        outcome = _measure(job)
    except BAD_INPUT as error:
        outcome = Outcome("refused", _one_line(error))
    except MemoryError:
        outcome = Outcome("memory_limit", "the worker could not get more memory")
    except OSError as error:
        outcome = Outcome(
            "crashed", f"the worker could not go on: {error.filename or tempfile.gettempdir()}: {reason(error)}"
        )
    except Exception as error:
        outcome = Outcome("failed", f"{type(error).__name__}: {_one_line(error)}")
    return _timed(outcome, time.perf_counter() - began)


def flat_figures(summary: Mapping[str, Any], prefix: str = "") -> Figures:
    """The numbers of a summary under joined names; lists, texts and the schema's version are left out."""
    figures: Figures = {}
    for name, value in summary.items():
        if isinstance(value, Mapping):
            figures |= flat_figures(value, f"{prefix}{name}_")
        elif (value is None or isinstance(value, int | float)) and prefix + name not in _NO_FIGURES:
            figures[prefix + name] = value
    return figures


def _measure(job: Job) -> Outcome:
    scenario = job.scenario
    simulation = build(scenario)
    settings = simulation.settings
    speculation = scenario.engine.speculative_config
    with tempfile.TemporaryDirectory(prefix="speckv-") as name:
        folder = Path(name)
        recorder = None
        if job.steps:
            recorder = recorder_of(simulation, folder, read_recording(job.steps))
        metrics = Metrics(
            None if recorder is None else recorder.request_row,
            num_speculative_tokens=0 if speculation is None else speculation.num_speculative_tokens,
            slo_ttft_ms=scenario.slo.ttft_ms,
            slo_tpot_ms=scenario.slo.tpot_ms,
            slo_e2el_ms=scenario.slo.e2el_ms,
        )
        simulation.add_observer(metrics)
        simulation.run()
        if recorder is not None:
            recorder.close()
        steps = (folder / "steps.parquet").read_bytes() if recorder is not None else None
    figures = flat_figures(summarise(metrics, simulation))
    error = None
    if simulation.stopped_by == "crash":
        error = f"{scenario.engine.preset} would have crashed here: {simulation.crash}"
    return Outcome(
        "ok" if error is None else "failed",
        error,
        simulation.stopped_by,
        figures,
        {
            "num_gpu_blocks": settings.num_gpu_blocks,
            "max_num_seqs": settings.max_num_seqs,
            "max_num_scheduled_tokens": settings.max_num_scheduled_tokens or settings.max_num_batched_tokens,
            "draft_slots": settings.draft_slots if PRESETS[scenario.engine.preset].draft_slots_per_request else 0,
        },
        steps,
    )


def _timed(outcome: Outcome, wall_s: float) -> Outcome:
    import resource
    import sys
    from dataclasses import replace

    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
    return replace(outcome, wall_s=round(wall_s, 3), peak_rss_mb=round(peak, 1))


def reason(error: OSError) -> str:
    """What the system says of it; pyarrow's own words hide that."""
    return os.strerror(error.errno) if error.errno else _one_line(error)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
