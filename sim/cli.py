"""The command `speckv`: what is typed, what is printed, and with which code it ends.

Knows the commands; their work is done elsewhere, and imported only when it is asked for. Every error is one message on
standard error. Exit codes: 0 done, 1 failed while running, 2 bad input, 130 Ctrl-C.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn, ParamSpec, TypeVar

import typer

from sim import __version__
from sim.commands.acceptance import app as _acceptance
from sim.commands.again import blockmap as _blockmap
from sim.commands.again import explain as _explain
from sim.commands.again import timeline as _timeline
from sim.commands.calibrate import app as _calibrate
from sim.commands.compare import compare as _compare
from sim.commands.conform import conform as _conform
from sim.commands.importing import import_ as _import
from sim.commands.listing import list_ as _list
from sim.commands.report import report as _report
from sim.commands.sweep import sweep as _sweep
from sim.commands.tune import capacity as _capacity
from sim.commands.tune import tune as _tune
from sim.commands.validate import validate as _validate
from sim.commands.workload import app as _workload
from sim.compiled import CORE

_FAILED, _BAD_INPUT, _INTERRUPTED = 1, 2, 130

_P = ParamSpec("_P")
_R = TypeVar("_R")

app = typer.Typer(
    name="speckv",
    help="What speculative decoding does to a paged KV cache, simulated.",
    epilog="Start with: speckv run quickstart",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The console script. Does not return: it ends the process with the exit code.

    Cyclic garbage is looked for seldom, and at exit only in what came last: imports make many objects that stay, and
    looking through them took a fifth of a small run.
    """
    if CORE.error is not None:
        _fail(CORE.error, _BAD_INPUT)
    gc.set_threshold(50_000, 50, 100)
    try:
        app()
    except KeyboardInterrupt:
        _fail("interrupted", _INTERRUPTED)
    finally:
        gc.freeze()


def _fail(message: str, code: int) -> NoReturn:
    """Print the message and end with the code."""
    print(f"speckv: {message}", file=sys.stderr)
    raise SystemExit(code)


def _interruptible(command: Callable[_P, _R]) -> Callable[_P, _R]:
    """Ctrl-C where a command has nothing better to do with it."""

    @functools.wraps(command)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt:
            _fail("interrupted", _INTERRUPTED)

    return wrapped


def _show_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


@app.command(
    epilog="""Examples:

    speckv run quickstart

    speckv run my.yaml --set engine.speculative_config.num_speculative_tokens=3 --set seed=1

    speckv run my.yaml --json --quiet | jq .tpot_ms.p99

    speckv run my.yaml --check --out elsewhere

    speckv run my.yaml --record steps=window:1s

    speckv run quickstart --against K=0 --seeds 5"""
)
@_interruptible
def run(
    scenario: Annotated[
        str, typer.Argument(metavar="SCENARIO", help="A YAML file, or the name of a scenario that comes with speckv.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set any key of the scenario; may be given several times."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where results go: DIR/<name>/<id>/.")] = Path(
        "results"
    ),
    record: Annotated[
        str | None,
        typer.Option(
            "--record",
            metavar="steps=WHICH",
            help="Rows of the table of steps: all, none, every:100 (the first step and each 100th from there on) or "
            "window:1s (one a second of simulated time, sums and means). Short for --set output.steps=WHICH.",
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Hold laws 1 to 6 at every record; slower.")] = False,
    shadow: Annotated[
        bool,
        typer.Option("--shadow", help="Check by shadow execution that every read finds the right writes; needs torch."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary alone, as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no table; print where the results are.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Run it anew even if its results are there.")] = False,
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--against",
            metavar="KEY=VALUE",
            help="Compare with the scenario changed so, on the same requests and draws; may be given several times. "
            "K=0 is no speculation, and the default once --seeds is given.",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", metavar="N", min=1, help="Pairs to compare, by seed; 5 by default.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", min=1, help="Runs of a comparison at a time.")] = 1,
) -> None:
    """Run a scenario and write its results.

    The same scenario and seed are run once: asked for again, the results are found and shown.
    """
    if against or seeds is not None:
        from sim.commands.against import run_against

        if check or force or shadow or record is not None:
            _fail(
                "--check, --shadow, --force and --record are for single runs, and have no meaning with --against",
                _BAD_INPUT,
            )
        run_against(
            scenario,
            overrides or (),
            against or ("K=0",),
            seeds=seeds or 5,
            jobs=jobs,
            out=out,
            as_json=as_json,
            quiet=quiet,
        )
        return
    from sim.results import ResultsError
    from sim.run import BAD_INPUT, RunFailed, simulate
    from sim.terminal import ProgressBar, show_summary

    changes = [*(overrides or ()), *(() if record is None else (_recorded(record),))]
    try:
        with ProgressBar(shown=not quiet) as bar:
            result = simulate(scenario, changes, out=out, check=check, force=force, shadow=shadow, watch=bar)
    except BAD_INPUT as error:
        _fail(str(error), _BAD_INPUT)
    except RunFailed as error:
        _fail(f"{error}\nspeckv: what was recorded until then is in {error.folder}, marked incomplete", _FAILED)
    except ResultsError as error:
        _fail(str(error), _FAILED)
    for warning in result.manifest["warnings"]:
        print(f"speckv: warning: {warning}", file=sys.stderr)
    if result.found:
        print("speckv: this scenario and seed have been run before; --force runs them anew", file=sys.stderr)
    if as_json:
        print(json.dumps(result.summary, indent=2))
    elif quiet:
        print(result.folder)
    else:
        show_summary(result)
    if shadow:
        found = result.manifest["shadow"]
        print(
            f"shadow execution: {found['num_reads']:,} reads of {found['num_writes']:,} writes, "
            f"{found['num_findings']} wrong"
        )
        for finding in found["findings"][:10]:
            print(f"  {finding}")
        if found["num_findings"]:
            raise SystemExit(_FAILED)
    if result.manifest["stopped_by"] == "interrupt":
        _fail(f"interrupted; the results so far are in {result.folder}, marked incomplete", _INTERRUPTED)


def _recorded(text: str) -> str:
    """What `--record` sets; ends with a message where it means nothing."""
    from sim.recording import ALLOWED, RecordingError, read_recording

    table, equals, which = text.partition("=")
    try:
        if not equals or table != "steps":
            read_recording(text if not equals else which)
            raise RecordingError("is not of the form steps=WHICH", text if not equals else which)
        return f"output.steps={read_recording(which)}"
    except RecordingError as error:
        meant = "" if error.nearest is None else f"; did you mean `steps={error.nearest}`?"
        allowed = f"steps=WHICH, with {ALLOWED}"
        _fail(f"--record {text!r}: {error}{meant}\n      allowed: {allowed}", _BAD_INPUT)


@app.command(
    epilog="""Example:

    speckv replay cases/05-eagle3-async-roomy.case.json.gz --engine vllm-0.32 --output trace.json"""
)
@_interruptible
def replay(
    case: Annotated[Path, typer.Argument(metavar="CASE", help="A scripted case: JSON, gzipped if it ends in .gz.")],
    engine: Annotated[str, typer.Option("--engine", metavar="PRESET", help="Whose rules hold, such as vllm-0.32.")],
    output: Annotated[
        Path, typer.Option("--output", metavar="TRACE", help="Where the trace goes; gzipped if it ends in .gz.")
    ],
) -> None:
    """Step the core through a scripted case, without a clock, and write what it decides turn by turn."""
    from sim.case_files import CaseError, read_case, write_trace
    from sim.core.crash import EngineCrash
    from sim.policies.presets import PRESETS
    from sim.replay import replay_case
    from sim.scenario_errors import nearest_name

    if engine not in PRESETS:
        nearest = nearest_name(engine, list(PRESETS))
        meant = "" if nearest is None else f"; did you mean `{nearest}`?"
        _fail(f"--engine {engine}: no such preset; allowed: {', '.join(PRESETS)}{meant}", _BAD_INPUT)
    try:
        trace = replay_case(read_case(case), PRESETS[engine])
    except CaseError as error:
        _fail(str(error), _BAD_INPUT)
    except ValueError as error:  # what only shows once it is built: rows of K that overlap, text that is none
        _fail(f"{case}: {error}", _BAD_INPUT)
    except EngineCrash as error:
        _fail(f"{case}: {engine} would have crashed: {error}", _FAILED)
    try:
        write_trace(output, trace)
    except OSError as error:
        _fail(f"cannot write {output}: {error.strerror or error}", _FAILED)
    stalled = trace["summary"].get("stalled", [])
    if stalled:
        print(
            f"speckv: stalled, never to be scheduled again: {len(stalled)} request{'s' if len(stalled) > 1 else ''}: "
            f"{', '.join(stalled[:10])}{', ...' if len(stalled) > 10 else ''}",
            file=sys.stderr,
        )


app.command(
    epilog="""Examples:

    speckv conform tests/conformance/cases

    speckv conform --vllm --python oracle/bin/python --cases 3000

    PYTHONPATH=vllm-0.24 speckv conform --vllm --python oracle/bin/python --cases 300"""
)(_conform)


app.command(epilog="Example:\n\n    speckv explain results/quickstart/ID --request r7")(_interruptible(_explain))
app.command(epilog="Example:\n\n    speckv timeline results/quickstart/ID -o run.json.gz")(_interruptible(_timeline))
app.command(epilog="Example:\n\n    speckv blockmap results/quickstart/ID -o blocks.png --from 1 --to 3")(
    _interruptible(_blockmap)
)


app.add_typer(_calibrate, name="calibrate")
app.add_typer(_workload, name="workload")
app.add_typer(_acceptance, name="acceptance")


app.command(epilog="Example:\n\n    speckv sweep small --jobs 2")(_interruptible(_sweep))
app.command(epilog="Example:\n\n    speckv tune quickstart --k 0:8 --by-batch-size")(_interruptible(_tune))
app.command(epilog="Example:\n\n    speckv capacity quickstart --attainment 0.95")(_interruptible(_capacity))
app.command(epilog="Example:\n\n    speckv compare results/with/ID results/without/ID")(_interruptible(_compare))
app.command(name="list", epilog="Example:\n\n    speckv list results")(_interruptible(_list))
app.command(epilog="Example:\n\n    speckv report results/quickstart/ID -o report.html")(_interruptible(_report))
app.command(name="import", epilog="Example:\n\n    speckv import 'vllm serve MODEL ...' server.log -o mine.yaml")(
    _interruptible(_import)
)
app.command(epilog="Example:\n\n    speckv validate mine.yaml --against bench.json server.log -o validation")(
    _interruptible(_validate)
)


@app.command()
def version() -> None:
    """Print the version, and which core runs: compiled or plain."""
    print(f"speckv {__version__}\ncore: {CORE}")
