"""`speckv compare`: runs side by side, with intervals where several seeds of a scenario are given.

Knows what is typed and printed; the work is `sim.differences`'s. Exit codes: 0 done, 2 bad input.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from sim.differences import Comparison, Difference

__all__ = ["compare"]

_BAD_INPUT = 2


def compare(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="RESULT RESULT...", help="Folders of runs, or folders that hold several of them."),
    ],
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="Draw the differences: .png, .svg or .pdf.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every figure of the summaries.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the differences as JSON.")] = False,
) -> None:
    """Show how the figures of runs differ from those of the first given; in a folder of runs, of the first started.

    Runs whose scenarios differ in the seed alone count as one; with two common seeds or more, differences have a 95
    percent interval.
    """
    from sim.differences import compare as compared
    from sim.differences import picture as draw
    from sim.results import ResultsError

    try:
        comparison = compared(results, everything=everything)
    except ResultsError as error:
        _fail(str(error), _BAD_INPUT)
    for said in comparison.left_out:
        print(f"speckv: left out: {said}", file=sys.stderr)
    if picture is not None:
        try:
            draw(comparison, picture)
        except (OSError, ValueError) as error:
            _fail(f"cannot draw {picture}: {error}", _BAD_INPUT)
    if as_json:
        groups = [{"label": group.label, "seeds": list(group.runs)} for group in comparison.groups]
        differences = [dataclasses.asdict(one) for one in comparison.differences]
        print(json.dumps({"groups": groups, "differences": differences}, indent=2))
    else:
        _show(comparison)


def _show(comparison: Comparison) -> None:
    from rich.console import Console
    from rich.table import Table

    for number, group in enumerate(comparison.groups):
        seeds = ", ".join(str(seed) for seed in group.runs)
        print(f"[{number}] {group.label}  (seed{'s' if len(group.runs) > 1 else ''} {seeds})")
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    table.add_column("figure", style="bold")
    table.add_column("[0]", justify="right")
    for number in range(1, len(comparison.groups)):
        table.add_column(f"[{number}]", justify="right")
        table.add_column(f"[{number}] - [0]", justify="right")
    for name in dict.fromkeys(one.figure for one in comparison.differences):
        first, *others = comparison.of(name)
        cells = [_number(first.mean)]
        for one in others:
            cells += [_number(one.mean), _difference(one)]
        table.add_row(name, *cells)
    console = Console(highlight=False, markup=False)
    wide = Console(highlight=False, markup=False, width=max(console.width, 60 + 45 * (len(comparison.groups) - 1)))
    wide.print(table)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _difference(one: Difference) -> str:
    if one.difference is None:
        return "-"
    if one.share is None:
        return f"{one.difference.mean:+.4g}"
    text = f"{one.share:+.1%}"
    if one.difference.low is not None and one.difference.high is not None and one.difference.mean:
        base = one.difference.mean / one.share
        low, high = sorted((one.difference.low / base, one.difference.high / base))
        text += f" ({low:+.1%} to {high:+.1%})"
    return text


def _fail(message: str, code: int) -> NoReturn:
    print(f"speckv: {message}", file=sys.stderr)
    raise SystemExit(code)
