"""`speckv import`: a scenario from what is running. What is typed and printed; the work is `sim.importing`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

_FAILED, _BAD_INPUT = 1, 2


def import_(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="A `vllm serve` command line in quotes or a file that holds one, a start-up log, a metrics scrape, a "
            "trace, an acceptance source.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE.yaml", help="Where it goes; default: printed.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a key whatever the sources say, such as hardware=h200."),
    ] = None,
) -> None:
    """Write a scenario of what a server was told, with a comment for where each value comes from."""
    from sim.importing import ImportFailed, import_sources
    from sim.scenario import ScenarioError

    try:
        imported = import_sources(sources, overrides or (), output=output)
    except (ImportFailed, ScenarioError) as error:
        _fail(str(error), _BAD_INPUT)
    for text in imported.not_modelled:
        print(f"speckv: not modelled: {text}", file=sys.stderr)
    for text in imported.warnings:
        print(f"speckv: warning: {text}", file=sys.stderr)
    if imported.assumed:
        print(f"speckv: assumed: {', '.join(imported.assumed)}", file=sys.stderr)
    if output is None:
        print(imported.text, end="")
        return
    try:
        output.write_text(imported.text, encoding="utf-8", newline="\n")
    except OSError as error:
        _fail(f"cannot write {output}: {error.strerror or error}", _FAILED)
    print(f"written: {output}")


def _fail(message: str, code: int) -> NoReturn:
    print(f"speckv: {message}", file=sys.stderr)
    raise SystemExit(code)
