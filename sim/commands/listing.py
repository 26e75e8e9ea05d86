"""`speckv list`: which runs, sweeps and comparisons a folder holds, so that a folder can be named to other commands.

Knows what is printed of manifests and summaries. Exit codes: 0 done, 2 the folder does not exist.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

__all__ = ["list_"]

_BAD_INPUT = 2
_HEADINGS: Final = ("folder", "started", "K", "seed")
_FIGURES: Final = ("requests", "tokens/s", "TTFT p50 ms", "TPOT ms", "preempted")
_SPECULATION: Final = "engine.speculative_config"
_IN_COLUMNS: Final = ("seed", "output.steps", f"{_SPECULATION}.num_speculative_tokens")
"""Keys that are shown whether they were set or not."""
_MOST: Final = 60


class _Row(NamedTuple):
    started: str = ""
    drafts: str = ""
    seed: str = ""
    figures: tuple[str, ...] = ()
    text: str = ""
    """What was set, or what it is if there are no figures."""


def list_(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="Where to look, two levels down.", show_default=False)
    ] = Path("results"),
) -> None:
    """List what is in a folder of results, by default `results`: the oldest first, with their main figures.

    What is in the first column is what explain, timeline, blockmap, compare and report take; of a sweep the report
    alone, and of a comparison none of them. The last column has what was set and how steps were recorded, if not all.
    """
    from sim import results

    if not folder.is_dir():
        print(f"speckv: {folder} is no folder; speckv run makes results", file=sys.stderr)
        raise SystemExit(_BAD_INPUT)
    found = results.runs_below(folder) or ([folder] if (folder / results.MANIFEST).exists() else [])
    rows = [(_of_run(place), str(place)) for place in found]
    rows += [(_of_comparison(place), str(place)) for place in results.comparisons_below(folder)]
    if not rows:
        print(f"no runs in {folder}")
        return
    rows.sort(key=lambda row: (row[0].started, row[1]))
    lines = [(_Row(*_HEADINGS[1:], _FIGURES, "set"), _HEADINGS[0]), *rows]
    widths = [max(len(name) for _, name in lines)]
    widths += [max(len(cells[place]) for cells, _ in lines) for place in range(3)]
    for cells, name in lines:
        left = f"{name:<{widths[0]}}  {cells.started:<{widths[1]}}  {cells.drafts:>{widths[2]}}"
        right = [f"{figure:>11}" for figure in cells.figures]
        print("  ".join((left, f"{cells.seed:>{widths[3]}}", *right, cells.text)).rstrip())


def _of_run(folder: Path) -> _Row:
    """A run or a sweep; of a damaged folder what is wrong."""
    from sim import results

    try:
        manifest = results.read_json(folder / results.MANIFEST)
        started = str(manifest["started"])[:19].replace("T", " ")
        if "num_points" in manifest:
            state = "" if manifest["complete"] else ", incomplete"
            return _Row(started, text=f"sweep, {manifest['num_runs']:,} runs{state}")
        scenario = manifest["scenario"]
        speculation = scenario["engine"]["speculative_config"]
        drafts = "0" if speculation is None else str(speculation["num_speculative_tokens"])
        row = _Row(started, drafts, str(manifest["seed"]), text=_set(manifest))
        if not manifest["complete"]:
            why = manifest["stopped_by"] or "under way, or killed"
            return row._replace(text=f"incomplete: {why}{row.text and '; '}{row.text}")
        summary = results.read_json(folder / results.SUMMARY)
        return row._replace(
            figures=(
                f"{summary['num_finished']:,}",
                _number(summary["output_throughput"]),
                _number(summary["ttft_ms"]["median"]),
                _number(summary["tpot_ms"]["mean"]),
                f"{summary['num_preemptions']:,}",
            )
        )
    except (results.ResultsError, KeyError, TypeError, AttributeError) as error:
        return _Row(text=f"damaged: {error}")


def _of_comparison(folder: Path) -> _Row:
    """It does not know the time of day, but its file does."""
    from sim import results

    file = folder / results.COMPARISON
    try:
        content = results.read_json(file)
        written = datetime.fromtimestamp(file.stat().st_mtime, UTC).isoformat(" ", "seconds")[:19]
        twin = ", ".join("K=0" if one == f"{_SPECULATION}=null" else _short(one) for one in content["changes"])
        seeds = f"{len(content['seeds'])} seed{'s' if len(content['seeds']) > 1 else ''}"
        return _Row(written, text=f"comparison against {twin}, {seeds}")
    except (results.ResultsError, OSError, KeyError, TypeError, AttributeError) as error:
        return _Row(text=f"damaged: {error}")


def _set(manifest: Mapping[str, Any]) -> str:
    """What tells runs of one scenario apart, beside K and the seed, as far as the manifest knows."""
    steps = manifest["scenario"]["output"]["steps"]
    shown = [] if steps is True else [f"steps={steps or 'none'}"]
    for one in manifest.get("set") or ():
        key, _, value = one.partition("=")
        if key.strip() not in _IN_COLUMNS and (key.strip(), value.strip()) != (_SPECULATION, "null"):
            shown.append(_short(one))
    text = ", ".join(shown)
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."


def _short(change: str) -> str:
    """`rate=3` of `workload.synthetic.arrivals.rate=3`."""
    key, equals, value = change.partition("=")
    return f"{key.strip().rpartition('.')[2]}{equals}{value.strip()}"


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
