"""`speckv report`: a run or a sweep as one page of HTML.

Knows what is typed and printed; the work is `sim.report`'s. Exit codes: 0 done, 1 the page cannot be written, 2 bad
input.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from sim.commands.paths import given_path

__all__ = ["report"]

_FAILED, _BAD_INPUT = 1, 2


def report(
    result: Annotated[
        Path, typer.Argument(metavar="RESULT|SWEEP", help="A folder that `speckv run` or `speckv sweep` has written.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", parser=given_path, metavar="FILE", help="Where the page goes: an .html.")
    ],
    question: Annotated[
        str | None,
        typer.Option("--question", metavar="TEXT", help="What it answers; by default made from the settings."),
    ] = None,
    no_blocks: Annotated[
        bool, typer.Option("--no-blocks", help="Without the map of blocks, for which a run is made again.")
    ] = False,
) -> None:
    """Write one page that shows a run or a sweep to others: it holds everything, and asks for no network.

    A run is made again for the map of its blocks and the times of its preemptions.
    """
    from sim.report import write_report
    from sim.results import ResultsError, refuse_comparison

    try:
        refuse_comparison(result)
        without = write_report(result, output, question=question, blocks=not no_blocks, watch=_clock())
    except ResultsError as error:
        _fail(str(error), _BAD_INPUT)
    except OSError as error:
        _fail(f"cannot write {output}: {error.strerror or error}", _FAILED)
    for said in without:
        print(f"speckv: {said}", file=sys.stderr)
    print(output)


def _clock() -> Callable[[int], None] | None:
    """Simulated time on standard error, if somebody can see it."""
    if not sys.stderr.isatty():
        return None

    def show(now_ns: int) -> None:
        print(f"\rspeckv: {now_ns / 1e9:,.1f} s simulated", end="", file=sys.stderr, flush=True)

    return show


def _fail(message: str, code: int) -> NoReturn:
    print(f"speckv: {message}", file=sys.stderr)
    raise SystemExit(code)
