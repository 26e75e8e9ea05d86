"""One run from a scenario to a folder of results: what the command and the Python interface share.

Knows the order of things and what is written when; must not know how anything is shown in a terminal.
"""

from __future__ import annotations

import gc
import platform
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sim import __version__, results
from sim.build import RequestNeverFits, Simulation, build
from sim.compiled import CORE
from sim.observers.garbage import Garbage
from sim.observers.metrics import Metrics, RequestRow
from sim.observers.recorder import Recorder, TableFormat
from sim.recording import Recording
from sim.scenario import Scenario, ScenarioError, length_files, load_scenario, replay_path, trace_path
from sim.scenario_schema import Replay
from workloads.traces import TraceError

if TYPE_CHECKING:
    import pandas as pd

BAD_INPUT = (ScenarioError, TraceError, RequestNeverFits)
"""What `simulate` raises for a scenario that cannot be run; nothing has been written then."""


class RunFailed(Exception):
    """A run that broke off. The message says why; what was recorded until then is in `folder`, marked incomplete."""

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder


class Progress(NamedTuple):
    """How far a run is."""

    now_ns: int
    """Simulated time."""
    num_requests: int | None
    """In all, where known."""
    num_ended: int
    """Finished or aborted."""
    num_request_steps: int


@dataclass(frozen=True)
class Result:
    """A run that has ended, and where it lies."""

    folder: Path
    summary: dict[str, Any]
    manifest: dict[str, Any]
    found: bool
    """It had been run before, and nothing was simulated now."""

    @property
    def complete(self) -> bool:
        """Whether it ran to the end that the scenario sets."""
        return bool(self.manifest["complete"])

    def requests(self) -> pd.DataFrame:
        """The table of requests, one row each in the order in which they ended. Raises ResultsError."""
        return results.read_table(self.folder, "requests")

    def steps(self) -> pd.DataFrame:
        """The table of steps, one row each in order, or of what `output.steps` asked for instead.

        Raises ResultsError, also where the scenario wants none.
        """
        return results.read_table(self.folder, "steps")


def simulate(
    scenario: Scenario | str | Path,
    overrides: Sequence[str] = (),
    *,
    out: str | Path = "results",
    check: bool = False,
    force: bool = False,
    shadow: bool = False,
    watch: Callable[[Progress], None] | None = None,
) -> Result:
    """Run a scenario into `out/<name>/<id>/`, or find that it has been run there before.

    `scenario`: as `load_scenario` returns it, or what it takes, with `overrides` such as `"seed=3"`. `check` holds laws
    1 to 6 at every record. `force` runs it anew even if its results are there. `watch` is told every 200 steps.
    `shadow` writes into every slot of a tensor who wrote it, and looks at every read whether the right writes are there
    (`docs/gpu_backend.md`); it needs torch, and always runs anew. What it finds stands in the manifest.
    Ctrl-C ends the run at the next such moment; its results are then marked incomplete (`Result.complete`).

    Raises:
        BAD_INPUT: the scenario cannot be run; nothing has been written.
        ResultsError: the folder cannot be made; nothing has been simulated.
        RunFailed: the run broke off: a law did not hold, the results could not be written, or the engine that the
            preset follows would have crashed.
    """
    started = _Clock()
    given = None if isinstance(scenario, Scenario) else list(overrides)
    if not isinstance(scenario, Scenario):
        scenario = load_scenario(scenario, overrides)
    elif overrides:
        raise TypeError("overrides belong to load_scenario where the scenario is loaded already")
    digest = scenario.digest()
    folder = results.run_folder(Path(out), scenario.name or "scenario", digest, scenario.seed)
    inputs = _inputs(scenario)
    code = results.code_digest()
    if not force and not shadow:
        manifest = results.find_complete(folder, digest, __version__, code, inputs, checked=check)
        if manifest is not None:
            _draw(scenario, folder, missing_only=True)
            return Result(folder, results.read_json(folder / results.SUMMARY), manifest, found=True)
    simulation = build(scenario, check=check)
    shadowing = _shadow(simulation) if shadow else None
    manifest = {
        "schema_version": results.SCHEMA_VERSION,
        "name": scenario.name or "scenario",
        "id": folder.name,
        "complete": False,
        "stopped_by": None,
        "started": started.date,
        "finished": None,
        "wall_s": None,
        "simulation_wall_s": None,
        "cpu_s": None,
        "peak_rss_mb": None,
        "checked": check,
        "versions": _versions(),
        "code": code,
        "core": CORE.name,
        "preset": scenario.engine.preset,
        "seed": scenario.seed,
        "scenario_file": None if scenario.file is None else str(scenario.file),
        "set": given,
        "scenario_digest": digest,
        "scenario": scenario.resolved(),
        "inputs": inputs,
        "warnings": list(simulation.warnings),
    }
    results.prepare(folder, manifest)
    try:
        summary, failure = _run(scenario, simulation, folder, manifest, watch)
    except BAD_INPUT:
        results.discard(folder)
        raise
    except OSError as error:
        reason = f"cannot write the results in {folder}: {error.strerror or error}"
        manifest["stopped_by"] = f"failure: {reason}"
        started.into(manifest)
        with suppress(OSError):  # Where there was no room for a table, there may be some for this.
            results.write_json(folder / results.MANIFEST, manifest)
        raise RunFailed(reason, folder) from error
    if shadowing is not None:
        manifest["shadow"] = {
            "num_findings": shadowing.num_findings,
            "findings": shadowing.findings,
            "num_steps": shadowing.num_steps,
            "num_writes": shadowing.num_writes,
            "num_reads": shadowing.num_reads,
            "num_reused_in_flight": shadowing.num_reused_in_flight,
        }
    if failure is None and manifest["stopped_by"] != "interrupt":
        note = _draw(scenario, folder)
        if note is not None:
            manifest["warnings"].append(note)
    started.into(manifest)
    try:
        results.write_json(folder / results.MANIFEST, manifest)
    except OSError as error:
        raise RunFailed(f"cannot write the results in {folder}: {error.strerror or error}", folder) from error
    if failure is not None:
        raise RunFailed(str(failure), folder) from (failure if isinstance(failure, Exception) else None)
    return Result(folder, summary, manifest, found=False)


def _shadow(simulation: Simulation) -> Any:
    """Shadow execution of everything that the device does from now on."""
    try:
        from gpu_backend.shadow import Shadow
    except ImportError as error:
        raise results.ResultsError(f"shadow execution needs torch ({error}): pip install 'speckv[gpu]'") from None
    shadow = Shadow(simulation.settings.num_gpu_blocks, simulation.settings.block_size)
    simulation.add_observer(shadow)
    return shadow


def _run(
    scenario: Scenario,
    simulation: Simulation,
    folder: Path,
    manifest: dict[str, Any],
    watch: Callable[[Progress], None] | None,
) -> tuple[dict[str, Any], Exception | str | None]:
    """Run it with its tables and summary; returns the summary, and why it broke off if it did.

    The manifest is written with how it ended, once before the picture is drawn.
    """
    recorder = recorder_of(simulation, folder, scenario.output.recording, scenario.output.format)
    failure: Exception | str | None = None
    interrupted = False
    began = time.perf_counter()
    try:
        metrics, garbage = _measured(scenario, simulation, recorder.request_row)
        with _interruptible() as stop:

            def tick(now_ns: int) -> bool:
                if watch is not None:
                    watch(_progress(simulation, metrics, now_ns))
                return not stop.is_set()

            try:
                with _rarely_collected():
                    simulation.run(tick)
            except KeyboardInterrupt:  # The second Ctrl-C, or one that no handler could be set for.
                interrupted = True
            except (*BAD_INPUT, OSError):
                raise
            except Exception as error:
                failure = error
        if interrupted or failure is not None:
            metrics.closed(simulation.now)
            recorder.closed(simulation.now)
    except BaseException:
        _close_quietly(recorder)
        raise
    recorder.close()
    manifest["simulation_wall_s"] = round(time.perf_counter() - began, 3)
    manifest["stopped_by"] = "interrupt" if interrupted else simulation.stopped_by
    if failure is None and simulation.stopped_by == "crash":
        failure = f"{scenario.engine.preset} would have crashed here: {simulation.crash}"
    if failure is not None:
        manifest["stopped_by"] = (
            f"failure: {failure}" if isinstance(failure, Exception) else f"crash: {simulation.crash}"
        )
    manifest["warnings"] = list(simulation.warnings)  # some are only known once it has run
    if simulation.stopped_by == "stalled":
        ids = ", ".join(request.id for request in simulation.stalled[:5])
        manifest["warnings"].append(
            f"{len(simulation.stalled)} requests can never be scheduled again, as in the engine that "
            f"{scenario.engine.preset} follows: {ids}{', ...' if len(simulation.stalled) > 5 else ''}"
        )
    if simulation.stopped_by == "livelock":
        manifest["warnings"].append(
            f"{len(simulation.stalled)} requests run in circles: they preempt each other and deliver nothing, as in "
            f"the engine that {scenario.engine.preset} follows"
        )
    manifest["complete"] = failure is None and manifest["stopped_by"] != "interrupt"
    summary = summarise(metrics, simulation, garbage)
    results.write_json(folder / results.SUMMARY, summary)
    results.write_json(folder / results.MANIFEST, manifest)
    return summary, failure


def recorder_of(
    simulation: Simulation, folder: Path, recording: Recording, format: TableFormat = "parquet"
) -> Recorder:
    """Tables of what the simulation does from now on; it has not begun. Raises OSError. To be closed at its end."""
    recorder = Recorder(folder, simulation.ledger, simulation.scheduler, format, recording.every, recording.window_ns)
    if recorder.windows is not None:
        simulation.add_observer(recorder.windows, before_ledger=True)
    elif recording.every:
        simulation.add_observer(recorder)
    return recorder


def _measured(
    scenario: Scenario, simulation: Simulation, on_row: Callable[[RequestRow], None] | None
) -> tuple[Metrics, Garbage | None]:
    """What is measured of a run, told from now on; distributions where the scenario wants them."""
    speculation = scenario.engine.speculative_config
    garbage = Garbage(simulation.ledger, scenario.engine.block_size) if scenario.output.distributions else None
    if garbage is not None:
        simulation.add_observer(garbage)
    metrics = Metrics(
        on_row,
        num_speculative_tokens=0 if speculation is None else speculation.num_speculative_tokens,
        slo_ttft_ms=scenario.slo.ttft_ms,
        slo_tpot_ms=scenario.slo.tpot_ms,
        slo_e2el_ms=scenario.slo.e2el_ms,
        room=None if garbage is None else garbage.room,
    )
    simulation.add_observer(metrics)
    return metrics, garbage


def summarise(metrics: Metrics, simulation: Simulation, garbage: Garbage | None = None) -> dict[str, Any]:
    """The content of `summary.json` (`docs/results.md`): nothing in it depends on the machine or the time of day."""
    scheduler, ledger = simulation.scheduler, simulation.ledger
    slot_seconds = ledger.slot_seconds()
    slot_bytes = simulation.block_bytes / simulation.settings.block_size
    return {
        "schema_version": results.SCHEMA_VERSION,
        **metrics.figures(),
        "num_refused": simulation.num_refused,
        "prefix_cache_queries": scheduler.prefix_cache_queries,
        "prefix_cache_hits": scheduler.prefix_cache_hits,
        "kv_cache_usage_perc": {"mean": ledger.usage_mean(), "max": ledger.usage_max()},
        "num_gpu_blocks": simulation.settings.num_gpu_blocks,
        "block_size": simulation.settings.block_size,
        "block_bytes": simulation.block_bytes,
        "slot_seconds": slot_seconds,
        "byte_seconds": {name: seconds * slot_bytes for name, seconds in slot_seconds.items()},
        "content_slot_seconds": ledger.content_slot_seconds(),
        "stale_write_slots": ledger.stale_write_slots,
        "moved_rows": simulation.moved_rows,
        "drafter_pool": None if simulation.drafter_pool is None else simulation.drafter_pool.summary(),
        "drafter_outside_bytes_per_request": simulation.drafter_outside_bytes_per_request,
        "garbage": None if garbage is None else garbage.figures(),
    }


def _progress(simulation: Simulation, metrics: Metrics, now_ns: int) -> Progress:
    ended = metrics.num_finished + metrics.num_aborted
    return Progress(now_ns, simulation.num_requests, ended, simulation.num_request_steps)


def _close_quietly(recorder: Recorder) -> None:
    """Make the tables readable as far as they go; what went wrong before matters more than what goes wrong here."""
    with suppress(Exception):
        recorder.close()


def _draw(scenario: Scenario, folder: Path, *, missing_only: bool = False) -> str | None:
    """Draw the picture if the scenario wants one; returns why it could not be done."""
    recording = scenario.output.recording
    if not (scenario.output.pictures and recording.every):
        return None
    if missing_only and (folder / results.PICTURE).is_file():
        return None
    from sim import pictures

    model = scenario.model.rsplit("/", 1)[-1]
    hardware = scenario.hardware if isinstance(scenario.hardware, str) else scenario.hardware.name
    speculation = scenario.engine.speculative_config
    drafts = (
        "no speculation" if speculation is None else f"{speculation.method}, K = {speculation.num_speculative_tokens}"
    )
    thinned = "" if recording == Recording() else f" (steps={recording})"
    try:
        pictures.draw(folder, f"{scenario.name or 'scenario'}: {model} on {hardware}, {drafts}{thinned}")
    except (OSError, ValueError) as error:
        return f"no picture: {error}"
    return None


@contextmanager
def _rarely_collected() -> Iterator[None]:
    """Cyclic garbage looked for seldom: a run makes many objects and hardly a cycle (4 percent of the time)."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; the second one interrupts as usual."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, before)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # Somebody else has a plan for it.
        yield stop
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def _inputs(scenario: Scenario) -> list[dict[str, Any]]:
    """Files that the scenario names, and that a digest of it does not cover."""
    files = []
    if scenario.workload.trace is not None:
        files.append(trace_path(scenario))
    if isinstance(scenario.acceptance, Replay):
        files.append(replay_path(scenario))
    files += length_files(scenario)
    beside = [] if scenario.file is None else [scenario.file.parent]
    if scenario.timing.calibration is not None:
        files += [path for folder in (*beside, Path()) if (path := folder / scenario.timing.calibration).is_file()][:1]
    models = [scenario.model]
    if scenario.engine.speculative_config is not None and scenario.engine.speculative_config.model is not None:
        models.append(scenario.engine.speculative_config.model)
    for model in models:
        candidates = [path for folder in (*beside, Path()) for path in (folder / model, folder / model / "config.json")]
        files += [path for path in candidates if path.is_file()][:1]
    return results.input_facts(files)


def _versions() -> dict[str, str]:
    found = {"speckv": __version__, "python": platform.python_version()}
    for package in ("numpy", "pandas", "pyarrow", "pydantic", "scipy", "simpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


class _Clock:
    """Wall and processor time from here on."""

    def __init__(self) -> None:
        self.date = _now()
        self._wall = time.perf_counter()
        self._cpu = time.process_time()

    def into(self, manifest: dict[str, Any]) -> None:
        """Times and memory of the run so far. `peak_rss_mb` is the whole process's, in MB of 10^6 bytes."""
        unit = 1 if sys.platform == "darwin" else 1024
        manifest["finished"] = _now()
        manifest["wall_s"] = round(time.perf_counter() - self._wall, 3)
        manifest["cpu_s"] = round(time.process_time() - self._cpu, 3)
        manifest["peak_rss_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6, 1)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
