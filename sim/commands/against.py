"""`speckv run --against`: what is typed and printed of a comparison with a twin. The work is `sim.against`.

Knows the command line and rich. Errors are one message on standard error, exit code 1 or 2.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from sim.against import Comparison
    from sim.paired import Interval

_FAILED, _BAD_INPUT = 1, 2
_ROUNDING: Final = 1e-9
"""Differences below this share of the figure are rounding, and print as 0."""

_SHOWN: Final = (
    ("output_throughput", "output tokens/s", 1.0),
    ("request_throughput", "requests/s", 1.0),
    ("ttft_ms_mean", "TTFT, mean ms", 1.0),
    ("ttft_ms_p99", "TTFT, p99 ms", 1.0),
    ("tpot_ms_mean", "TPOT, mean ms", 1.0),
    ("e2el_ms_mean", "end to end, mean ms", 1.0),
    ("num_preemptions", "preemptions", 1.0),
    ("recomputed_tokens", "recomputed tokens", 1.0),
    ("prefix_cache_hits", "prefix hits, tokens", 1.0),
    ("num_stale_tokens_dropped", "stale tokens dropped", 1.0),
    ("kv_cache_usage_mean", "pool used, %", 100.0),
    ("share_committed", "  committed, %", 100.0),
    ("share_placeholder_accepted", "  placeholder acc., %", 100.0),
    ("share_placeholder_rejected", "  placeholder rej., %", 100.0),
    ("share_garbage", "  garbage, %", 100.0),
    ("share_lookahead", "  lookahead, %", 100.0),
    ("share_slack", "  slack, %", 100.0),
)
_OF_PARTS: Final = (
    ("output_throughput", "tokens/s", 1.0),
    ("tpot_ms_mean", "TPOT ms", 1.0),
    ("num_preemptions", "preempt.", 1.0),
    ("prefix_cache_hits", "hits", 1.0),
    ("kv_cache_usage_mean", "used, %", 100.0),
)


def run_against(
    scenario: str,
    overrides: Sequence[str],
    changes: Sequence[str],
    *,
    seeds: int,
    jobs: int,
    out: Path,
    as_json: bool,
    quiet: bool,
) -> None:
    """Compare, write the comparison and show it. Ends the process where that fails."""
    from sim.against import AgainstFailed, against, write
    from sim.run import BAD_INPUT

    def watch(done: int, whole: int) -> None:
        if not quiet and sys.stderr.isatty():
            print(f"\rspeckv: {done} of {whole} runs", end="\n" if done == whole else "", file=sys.stderr, flush=True)

    for change in changes:
        key, equals, value = change.partition("=")
        if equals and key.strip() == "k":
            _fail(f"--against {change}: no such key; did you mean `K={value.strip()}`?", _BAD_INPUT)
    try:
        comparison = against(scenario, changes, seeds, overrides=overrides, jobs=jobs, watch=watch)
        folder = write(comparison, out)
    except BAD_INPUT as error:
        _fail(str(error), _BAD_INPUT)
    except AgainstFailed as error:
        _fail(str(error), _FAILED)
    except OSError as error:
        _fail(f"cannot write the comparison: {error}", _FAILED)
    if as_json:
        print(json.dumps(comparison.as_json(), indent=2))
    elif quiet:
        print(folder)
    else:
        _show(comparison)
        print(f"results  {folder}")


def _show(comparison: Comparison) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    count = len(comparison.seeds)
    seeds = f"{count} seeds" if count > 1 else "1 seed, so no intervals"
    console.print(f"{comparison.name} against {', '.join(comparison.changes)}: {seeds}", style="bold")
    if count == 2:
        console.print("two pairs give wide intervals (12.7 standard errors to each side); more seeds, narrower ones")
    console.print(f"held fixed: {'; '.join(comparison.held_fixed)}")
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    table.add_column("", style="bold", no_wrap=True)
    for heading in ("scenario", "twin", "difference", "95 percent interval"):
        table.add_column(heading, justify="right")
    for name, label, scale in _SHOWN:
        if name in comparison.differences:
            one, other = (_number(value * scale) for value in comparison.figures[name])
            found = _settled(comparison.differences[name], comparison.figures[name])
            table.add_row(label, one, other, _signed(found.mean * scale), _range(found, scale))
    console.print(table)
    if not comparison.parts:
        return
    console.print("\nwhat each part adds (mean ± half of the 95 percent interval)", style="bold")
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    table.add_column("", style="bold", no_wrap=True)
    shown = [entry for entry in _OF_PARTS if entry[0] in comparison.differences and any(comparison.figures[entry[0]])]
    for _, label, _ in shown:
        table.add_column(label, justify="right", no_wrap=True)
    for part in comparison.parts:
        if part.missing is None:
            table.add_row(
                part.name.replace("_", " "),
                *(
                    _plus_minus(_settled(part.differences[name], comparison.figures[name]), scale)
                    for name, _, scale in shown
                ),
            )
    table.add_row(
        "whole",
        *(
            _plus_minus(_settled(comparison.differences[name], comparison.figures[name]), scale)
            for name, _, scale in shown
        ),
        style="bold",
    )
    console.print(table)
    for part in comparison.parts:
        if part.missing is not None:
            console.print(f"no {part.name}: {part.missing}")


def _settled(found: Interval, figures: tuple[float, float]) -> Interval:
    """The same with 0 for what is only rounding: below `_ROUNDING` of the figure."""
    least = _ROUNDING * max(abs(figure) for figure in figures)

    def kept(value: float) -> float:
        return 0.0 if abs(value) <= least else value

    low, high = (None if end is None else kept(end) for end in (found.low, found.high))
    return replace(found, mean=kept(found.mean), low=low, high=high)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _signed(value: float) -> str:
    return f"{value:+,.0f}" if abs(value) >= 1000 else "0" if value == 0 else f"{value:+.3g}"


def _range(found: Interval, scale: float) -> str:
    if found.low is None or found.high is None:
        return "-"
    return f"{_signed(found.low * scale)} to {_signed(found.high * scale)}"


def _plus_minus(found: Interval, scale: float) -> str:
    mean = found.mean * scale
    if found.high is None or found.high == found.mean:
        return _rounded(mean, "+") if mean else "0"
    half = (found.high - found.mean) * scale
    return f"{_rounded(mean, '+')} ±{_rounded(half, '')}"


def _rounded(value: float, sign: str) -> str:
    """Two digits that count, one where it is tiny, and all of a larger whole."""
    size = abs(value)
    digits = ",.0f" if size >= 10 else ".1f" if size >= 1 else ".2g" if size >= 0.01 else ".1g"
    return f"{value:{sign}{digits}}"


def _fail(message: str, code: int) -> NoReturn:
    print(f"speckv: {message}", file=sys.stderr)
    raise SystemExit(code)
