"""`speckv conform`: does the simulator decide what vLLM decides?

Knows how the comparison is asked for and shown; the comparison itself is `sim.conform`. Exit codes: 0 everything
agrees, 1 something differs, 2 bad input or no vLLM, 130 Ctrl-C.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

_DIFFERS, _BAD_INPUT = 1, 2
_TRACE_SUFFIXES = (".trace.json.gz", ".trace.json")


def _fail(message: str, code: int) -> NoReturn:
    print(f"speckv: {message}", file=sys.stderr)
    raise SystemExit(code)


def conform(
    cases: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FOLDER|TRACE]...",
            help="Folders of recorded NAME.PRESET.trace.json[.gz] with their NAME.case.json[.gz], or such traces.",
        ),
    ] = None,
    vllm: Annotated[
        bool, typer.Option("--vllm", help="Drive an installed vLLM on random cases instead of recorded traces.")
    ] = False,
    python: Annotated[
        str | None, typer.Option("--python", metavar="PATH", help="The Python that has it; else this environment's.")
    ] = None,
    num_cases: Annotated[int, typer.Option("--cases", metavar="N", min=1, help="Random cases to compare.")] = 200,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the random cases.")] = 0,
    first: Annotated[int, typer.Option("--first", min=0, metavar="I", help="Number of the first case.")] = 0,
    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar="PRESET", help="Hold it against this preset, not its release's own."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, metavar="N", help="vLLM processes beside each other.")] = 1,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Compare decisions with vLLM's: recorded ones, or those of a vLLM that is installed."""
    rules = None if engine is None else _preset(engine)
    if vllm:
        if cases:
            _fail("--vllm makes its own cases; leave the folders out", _BAD_INPUT)
        _live(python, num_cases, seed, first, engine, rules, jobs, quiet)
        return
    if python is not None:
        _fail("--python goes with --vllm", _BAD_INPUT)
    if not cases:
        _fail("name folders of recorded traces (tests/conformance/cases), or --vllm", _BAD_INPUT)
    _recorded(cases, engine)


def _preset(name: str) -> Any:
    from sim.policies.presets import PRESETS
    from sim.scenario_errors import nearest_name

    if name not in PRESETS:
        nearest = nearest_name(name, list(PRESETS))
        meant = "" if nearest is None else f"; did you mean `{nearest}`?"
        _fail(f"--engine {name}: no such preset; allowed: {', '.join(PRESETS)}{meant}", _BAD_INPUT)
    return PRESETS[name]


def _recorded(places: list[Path], engine: str | None) -> None:
    from sim.case_files import CaseError, read_case, read_trace
    from sim.conform.compare import first_difference
    from sim.core.crash import EngineCrash
    from sim.replay import replay_case

    agreeing: dict[str, list[int]] = {}
    total = 0
    for trace_path in _traces(places):
        name, preset = _parts(trace_path)
        if engine is not None and preset != engine:
            continue
        try:
            rules = _preset(preset)
            case_path = _case_of(trace_path, name)
            case, recorded = read_case(case_path), read_trace(trace_path)
        except CaseError as error:
            _fail(str(error), _BAD_INPUT)
        total += 1
        counts = agreeing.setdefault(preset, [0, 0])
        counts[1] += 1
        try:
            difference = first_difference(recorded, replay_case(case, rules))
        except EngineCrash as crash:
            print(f"{trace_path}: the preset ends with: {crash}")
            continue
        if difference is None:
            counts[0] += 1
        else:
            print(f"{trace_path}:\n{difference.text('recorded', preset)}")
    if total == 0:
        _fail(f"no recorded traces in {', '.join(map(str, places))}", _BAD_INPUT)
    for preset, (agree, count) in agreeing.items():
        print(f"{preset}: {agree} of {count} traces agree")
    if any(agree < count for agree, count in agreeing.values()):
        raise SystemExit(_DIFFERS)


def _traces(places: list[Path]) -> list[Path]:
    found: list[Path] = []
    for place in places:
        if place.is_dir():
            found += sorted(path for suffix in _TRACE_SUFFIXES for path in place.glob(f"*{suffix}"))
        elif place.exists():
            found.append(place)
        else:
            _fail(f"{place}: there is no such file or folder", _BAD_INPUT)
    return found


def _parts(trace: Path) -> tuple[str, str]:
    """Name of the case and preset, from NAME.PRESET.trace.json[.gz]; presets hold dots of their own."""
    from sim.policies.presets import PRESETS

    stem = next((trace.name.removesuffix(suffix) for suffix in _TRACE_SUFFIXES if trace.name.endswith(suffix)), None)
    if stem is not None:
        for preset in PRESETS:
            if stem.endswith(f".{preset}"):
                return stem.removesuffix(f".{preset}"), preset
    _fail(
        f"{trace}: the name says no case and preset; allowed: NAME.PRESET.trace.json[.gz] with PRESET one of "
        f"{', '.join(PRESETS)}",
        _BAD_INPUT,
    )


def _case_of(trace: Path, name: str) -> Path:
    for suffix in (".case.json.gz", ".case.json"):
        path = trace.with_name(name + suffix)
        if path.exists():
            return path
    _fail(f"{trace}: its case {name}.case.json[.gz] is not beside it", _BAD_INPUT)


def _live(
    python: str | None,
    num_cases: int,
    seed: int,
    first: int,
    engine: str | None,
    rules: Any,
    jobs: int,
    quiet: bool,
) -> None:
    from sim.conform.live import NoVllmError, WorkerError, closest_preset, compare_live, find_python

    started = time.monotonic()
    shown = 0.0

    def told(done: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if not quiet and sys.stderr.isatty() and now - shown > 0.5 and now - started > 2:
            shown = now
            left = (now - started) / done * (num_cases - done)
            print(f"\r{done:,} of {num_cases:,} cases agree so far, {left:.0f} s left  ", end="", file=sys.stderr)

    try:
        where = find_python(python)
        try:
            report = compare_live(where, num_cases, seed=seed, first=first, rules=rules, num_workers=jobs, told=told)
        except LookupError as error:
            print(error)
            print(closest_preset(where, min(num_cases, 200), seed=seed).text())
            raise SystemExit(_DIFFERS) from None
    except NoVllmError as error:
        _fail(str(error), _BAD_INPUT)
    except WorkerError as error:
        _fail(f"the vLLM process gave up: {error}", _DIFFERS)
    if shown:
        print(file=sys.stderr)
    print(report.text() if engine is None else report.text().replace("other rules", engine))
    if report.failure is not None:
        raise SystemExit(_DIFFERS)
