"""`speckv list`: which runs and sweeps a folder holds, so that a folder can be named to the other commands.

Knows what is printed of manifests and summaries. Exit codes: 0 done, 2 the folder does not exist.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["list_"]

_BAD_INPUT = 2
_HEADINGS = ("folder", "started", "requests", "tokens/s", "TTFT p50 ms", "TPOT ms", "preempted")


def list_(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="Where to look, two levels down.", show_default=False)
    ] = Path("results"),
) -> None:
    """List the runs and sweeps in a folder of results, by default `results`: the oldest first, with their main figures.

    What is in the first column is what explain, timeline, blockmap, compare and report take.
    """
    from sim import results

    if not folder.is_dir():
        print(f"speckv: {folder} is no folder; speckv run makes results", file=sys.stderr)
        raise SystemExit(_BAD_INPUT)
    found = results.runs_below(folder) or ([folder] if (folder / results.MANIFEST).exists() else [])
    if not found:
        print(f"no runs in {folder}")
        return
    rows = sorted((started, (str(place), started, *cells)) for place in found for started, cells in [_cells(place)])
    lines = [_HEADINGS, *(row for _, row in rows)]
    first, second = (max(len(line[place]) for line in lines) for place in (0, 1))
    for place, started, *figures in lines:
        right = figures if len(figures) == 1 else [f"{figure:>11}" for figure in figures]
        print("  ".join((f"{place:<{first}}", f"{started:<{second}}", *right)).rstrip())


def _cells(folder: Path) -> tuple[str, tuple[str, ...]]:
    """When it was started, and its figures; of a sweep how many runs, of a damaged folder what is wrong."""
    from sim import results

    try:
        manifest = results.read_json(folder / results.MANIFEST)
        started = str(manifest["started"])[:19].replace("T", " ")
        if "num_points" in manifest:
            state = "" if manifest["complete"] else ", incomplete"
            return started, (f"sweep, {manifest['num_runs']:,} runs{state}",)
        if not manifest["complete"]:
            return started, (f"incomplete: {manifest['stopped_by']}",)
        summary = results.read_json(folder / results.SUMMARY)
        return started, (
            f"{summary['num_finished']:,}",
            _number(summary["output_throughput"]),
            _number(summary["ttft_ms"]["median"]),
            _number(summary["tpot_ms"]["mean"]),
            f"{summary['num_preemptions']:,}",
        )
    except (results.ResultsError, KeyError, TypeError) as error:
        return "", (f"damaged: {error}",)


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
