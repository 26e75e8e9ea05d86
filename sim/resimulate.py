"""A finished run made again, for what its tables do not hold: same scenario, same seed, so the same decisions.

Knows manifests and how a run is built; must not know what is looked for. It says so where the run cannot be made again.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sim import __version__, results
from sim.build import RequestNeverFits, Simulation, build
from sim.results import ResultsError
from sim.scenario import Scenario, ScenarioError, resolved_scenario
from workloads.traces import TraceError


class CannotRepeat(Exception):
    """The run can no longer be made again as it was; the message says why."""


def recorded_scenario(folder: Path) -> tuple[Scenario, dict[str, Any]]:
    """The scenario of a folder of results, and its manifest.

    Raises:
        ResultsError: it is no folder of results.
        CannotRepeat: its scenario, the files it reads or the code are not what they were.
    """
    runs = results.runs_below(folder)
    if runs:
        listed = "".join(f"\n  {run}" for run in runs[:20]) + (
            f"\n  ... {len(runs) - 20} more" if len(runs) > 20 else ""
        )
        raise ResultsError(f"{folder} is no run but holds {len(runs)}; name one of them:{listed}")
    results.refuse_comparison(folder)
    manifest = results.read_json(folder / results.MANIFEST)
    if "num_points" in manifest:
        raise ResultsError(_is_a_sweep(folder, manifest))
    try:
        file = None if manifest["scenario_file"] is None else Path(manifest["scenario_file"])
        resolved, digest, inputs = manifest["scenario"], manifest["scenario_digest"], manifest["inputs"]
        version = manifest["versions"]["speckv"]
    except (KeyError, TypeError) as error:
        raise ResultsError(f"{folder / results.MANIFEST} is no manifest of a run: {error} is missing") from error
    if manifest.get("schema_version") != results.SCHEMA_VERSION or not isinstance(resolved, dict):
        raise ResultsError(
            f"{folder / results.MANIFEST}: schema_version {manifest.get('schema_version')!r}; "
            f"this speckv reads {results.SCHEMA_VERSION}"
        )
    made_by = "" if version == __version__ else f" (the run was made by speckv {version}, this is {__version__})"
    try:
        scenario = resolved_scenario(resolved, file)
    except ScenarioError as error:
        raise CannotRepeat(f"{folder}: its scenario is not understood any more{made_by}:\n{error}") from error
    if scenario.digest() != digest:
        raise CannotRepeat(
            f"{folder}: the scenario in its manifest has the digest {scenario.digest()[:10]}, and the run's was "
            f"{digest[:10]}: the manifest was changed, or speckv fills in other defaults now{made_by}"
        )
    for fact in inputs:
        try:
            (now,) = results.input_facts([Path(fact["path"])])
        except OSError as error:
            raise CannotRepeat(f"{folder}: it read {fact['path']}, and now: {error.strerror or error}") from error
        if now != fact:
            sizes = f"{fact['bytes']:,} bytes then, {now['bytes']:,} now"
            raise CannotRepeat(f"{folder}: {fact['path']} has changed since the run: {sizes}")
    if manifest.get("code") != results.code_digest():
        again = _command(manifest["scenario_file"], manifest.get("set") or [], "--force")
        raise CannotRepeat(
            f"{folder}: speckv's code has changed since the run{made_by}, and with it perhaps what the run would be; "
            f"this makes it anew: {again}"
        )
    return scenario, manifest


def _is_a_sweep(folder: Path, manifest: Mapping[str, Any]) -> str:
    """That it is none of its runs, which a sweep does not keep, and how to make one of them."""
    fixed = manifest.get("set")
    values = [f"{key}={value}" for key, value in fixed.items()] if isinstance(fixed, Mapping) else []
    values += [f"{key}=VALUE" for key in manifest.get("columns", ())]
    command = _command(manifest.get("scenario_file"), [*values, "seed=N"])
    return (
        f"{folder} is a sweep, which keeps figures and no runs; one of its {manifest.get('num_runs')} runs, with the "
        f"values of its row: {command}"
    )


def _command(scenario: str | None, values: Sequence[str], *options: str) -> str:
    words = [word for value in values for word in ("--set", value)]
    return shlex.join(["speckv", "run", scenario or "SCENARIO", *words, *options])


def repeat(
    scenario: Scenario,
    observe: Callable[[Simulation], Any],
    done: Callable[[], bool] = lambda: False,
    watch: Callable[[int], None] | None = None,
    *,
    before_ledger: bool = False,
) -> Simulation:
    """Run it again with the observer that `observe` makes, until `done` says so or to its end.

    It is told after the ledger, or before it. `done` is asked every 200 steps, and `watch` told the simulated ns.
    Raises CannotRepeat where it cannot be built.
    """
    try:
        simulation = build(scenario)
        simulation.add_observer(observe(simulation), before_ledger=before_ledger)

        def tick(now_ns: int) -> bool:
            if watch is not None:
                watch(now_ns)
            return not done()

        simulation.run(tick)
    except (ScenarioError, TraceError, RequestNeverFits) as error:
        raise CannotRepeat(str(error)) from error
    return simulation
