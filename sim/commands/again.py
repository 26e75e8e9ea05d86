"""`speckv explain`, `timeline` and `blockmap`: commands on a finished run that make it again.

Knows what is typed and printed; the work is `sim.explain`, `sim.timeline` and `sim.block_map`. Errors are one message
on standard error, exit code 1 where something cannot be written, else 2.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from sim.commands.paths import given_path

_FAILED, _BAD_INPUT = 1, 2

_Result = Annotated[
    Path, typer.Argument(metavar="RESULT", help="A folder that `speckv run` has written: results/<name>/<id>.")
]


def explain(
    result: _Result,
    request: Annotated[
        str | None, typer.Option("--request", metavar="ID", help="A request, by its id (r7) or number.")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", metavar="N", help="A step, by the number in the table.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every step of the request; block tables of all requests of the step.")
    ] = False,
) -> None:
    """Tell the story of a request or of a step, with its block table slot by slot.

    The run is made again for it. Both options together: that request in that step.
    """
    from sim.explain import NothingToExplain
    from sim.explain import explain as told

    with _ended_well():
        try:
            print(told(result, request=request, step=step, everything=everything), end="")
        except NothingToExplain as error:
            _fail(str(error), _BAD_INPUT)


def timeline(
    result: _Result,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", parser=given_path, metavar="FILE", help="Where it goes; gzipped if it ends in .gz."
        ),
    ],
) -> None:
    """Write a run as a trace that ui.perfetto.dev and chrome://tracing open.

    The run is made again for it: steps, scheduler, a lane for each request, and counters for every class of slots.
    """
    from sim.timeline import write_timeline

    with _ended_well():
        write_timeline(result, output, _clock())
    print(output)


def blockmap(
    result: _Result,
    output: Annotated[
        Path, typer.Option("--output", "-o", parser=given_path, metavar="FILE", help="Where the picture goes: a .png.")
    ],
    from_s: Annotated[float | None, typer.Option("--from", metavar="S", help="From this simulated second.")] = None,
    to_s: Annotated[float | None, typer.Option("--to", metavar="S", help="To this simulated second.")] = None,
) -> None:
    """Draw the pool's blocks over time, by what their slots are, and where garbage lies in memory.

    The run is made again for it.
    """
    from sim.block_map import block_map, draw_block_map

    if output.suffix.lower() != ".png":
        _fail(f"--output {output}: allowed: a file that ends in .png", _BAD_INPUT)
    with _ended_well():
        try:
            seen = block_map(result, from_s, to_s, _clock())
        except ValueError as error:
            _fail(str(error), _BAD_INPUT)
        draw_block_map(seen, f"{result.resolve().parent.name} / {result.resolve().name}: the pool by blocks", output)
    print(output)


@contextmanager
def _ended_well() -> Iterator[None]:
    from sim.resimulate import CannotRepeat
    from sim.results import ResultsError

    try:
        yield
    except (ResultsError, CannotRepeat) as error:
        _fail(str(error), _BAD_INPUT)
    except OSError as error:
        _fail(f"cannot write {error.filename}: {error.strerror or error}", _FAILED)


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
