"""`speckv validate`: a scenario held against a measurement. What is typed and printed; the work is `sim.validation`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from sim.commands.paths import given_path

if TYPE_CHECKING:
    from sim.validation import Validation

_FAILED, _BAD_INPUT = 1, 2


def validate(
    scenario: Annotated[str, typer.Argument(metavar="SCENARIO", help="A YAML file, or a shipped scenario's name.")],
    against: Annotated[
        list[str],
        typer.Option(
            "--against",
            metavar="SOURCE...",
            help="vllm bench serve result, metrics (several are a series), log, or a recorded run's files.",
        ),
    ],
    more: Annotated[list[str] | None, typer.Argument(metavar="[SOURCE...]", help="Further sources.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", parser=given_path, metavar="FOLDER", help="Write the errors as JSON, and a picture."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key of the scenario.")
    ] = None,
    interval_s: Annotated[
        float | None, typer.Option("--interval-s", metavar="S", help="Between scrapes that have no timestamps.")
    ] = None,
    blame: Annotated[
        bool, typer.Option("--blame/--no-blame", help="Simulate again with inputs changed, to see which is wrong.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Simulate a scenario and hold it against what a server was measured to do.

    Prints the error by figure, and which input is most likely to blame: number of blocks, acceptance, step cost or
    arrival times (the rule: docs/import.md).
    """
    from sim.core.crash import EngineCrash
    from sim.measured_runs import MeasuredError, read_measured
    from sim.run import BAD_INPUT
    from sim.scenario import load_scenario
    from sim.validation import MOST_RUNS, write_validation
    from sim.validation import validate as validated

    if interval_s is not None and not 0 < interval_s < float("inf"):
        _fail(f"--interval-s {interval_s}: must be a number of seconds above 0", _BAD_INPUT)

    def watch(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\rspeckv: simulation {done} of at most {MOST_RUNS}", end="", file=sys.stderr, flush=True)

    try:
        measured = read_measured([*against, *(more or ())], interval_s=interval_s)
        result = validated(load_scenario(scenario, overrides or ()), measured, blame=blame, watch=watch)
    except (MeasuredError, *BAD_INPUT, ValueError) as error:
        _fail(str(error), _BAD_INPUT)
    except EngineCrash as error:
        _fail(str(error), _FAILED)
    if sys.stderr.isatty():
        print("", file=sys.stderr)
    written: list[Path] = []
    if output is not None:
        try:
            written = write_validation(result, output)
        except OSError as error:
            _fail(f"cannot write in {output}: {error.strerror or error}", _FAILED)
    for text in (*result.warnings, *measured.notes):
        print(f"speckv: {text}", file=sys.stderr)
    if as_json:
        print(json.dumps(result.as_json(), indent=2))
        return
    _show(result)
    for place in written:
        print(f"written: {place}")


def _show(result: Validation) -> None:
    from rich.console import Console
    from rich.table import Table

    from sim.measured_runs import FIGURES

    console = Console(highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, title=f"{result.name} against measured", title_justify="left")
    for name in ("", "measured", "simulated", "error", "over time"):
        table.add_column(name, justify="left" if not name else "right")
    for entry in result.compared:
        figure = FIGURES[entry.name]
        error = "-" if entry.error is None else f"{100 * entry.error:+.1f} %"
        over = result.over_time.get(entry.name)
        table.add_row(
            f"{figure.label}{f' ({figure.unit})' if figure.unit else ''}",
            _shown(entry.measured),
            _shown(entry.simulated),
            error,
            "" if over is None else f"+-{over:.3g}",
        )
    console.print(table)
    console.print(f"error over all: {100 * result.error:.1f} percent")
    blame = result.blame
    if blame is None:
        return
    for name, reason in blame.cleared.items():
        console.print(f"  cleared: {name}: {reason}")
    for trial in blame.trials:
        removed = (
            f"cannot be run: {trial.note}" if trial.removed is None else f"{100 * trial.removed:+.0f} percent gone"
        )
        console.print(f"  tried: {trial.input}: {trial.change}: {removed}")
    console.print(f"most likely to blame: {blame.sentence}" if blame.input else blame.sentence)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _fail(message: str, code: int) -> NoReturn:
    print(f"speckv: {message}", file=sys.stderr)
    raise SystemExit(code)
