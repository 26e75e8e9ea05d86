"""What a run shows in a terminal: progress while it lasts, and a summary that fits 80 columns and 24 lines.

Knows the summary's names and rich; must not know how a figure comes about. Everything here can be left out of a run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from sim.run import Progress, Result

_QUIET_S: Final = 2.0
"""A run that ends sooner shows no progress."""
_REDRAW_S: Final = 0.1
_WIDTH: Final = 80


class Line:
    """A bar with facts beside it on standard error, while something lasts and if somebody can see it."""

    def __init__(self, title: str, shown: bool, quiet_s: float = 0.0) -> None:
        """`quiet_s`: what ends sooner shows nothing."""
        self.began = time.monotonic()
        self._title = title
        self._shown = shown and sys.stderr.isatty()
        self._quiet_s = quiet_s
        self._drawn = 0.0
        self._task: TaskID | None = None
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[facts]}"),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
        )

    def show(self, completed: int, total: int | None, facts: Callable[[], str]) -> None:
        """Show how far it is, if it is time to draw again."""
        now = time.monotonic()
        if not self._shown or now - self.began < self._quiet_s or now - self._drawn < _REDRAW_S:
            return
        self._drawn = now
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=total, facts="")
        self._bar.update(self._task, completed=completed, facts=facts())
        self._bar.refresh()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._bar.stop()


class ProgressBar(Line):
    """Of a run: simulated time, requests and speed."""

    def __init__(self, shown: bool) -> None:
        super().__init__("simulating", shown, _QUIET_S)

    def __call__(self, progress: Progress) -> None:
        """Show how far the run is."""

        def facts() -> str:
            of = "" if progress.num_requests is None else f" of {progress.num_requests:,}"
            speed = progress.num_request_steps / (time.monotonic() - self.began)
            return f"{progress.now_ns / 1e9:,.1f} s  {progress.num_ended:,}{of} requests  {speed:,.0f} request-steps/s"

        self.show(progress.num_ended, progress.num_requests, facts)


def show_summary(result: Result) -> None:
    """Print a run's summary and where everything lies, on standard output."""
    console = Console(highlight=False, soft_wrap=True)
    summary = result.summary
    if result.manifest["stopped_by"] is not None:
        state = "stopped by" if result.complete else "incomplete, stopped by"
        console.print(Text(f"{state} {result.manifest['stopped_by']}", "bold"))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _lines(summary):
        table.add_row(name, Text(text))
    wide = Console(highlight=False, width=max(min(console.width, 100), 40))
    wide.print(table)
    wide.print(_latencies(summary))
    wide.print(_slots(summary))
    wide.print(Text(_memory(summary)))
    pictures = sorted(result.folder.glob("overview.png"))
    console.print(Text.assemble(("results  ", "bold"), str(result.folder)))
    if pictures:
        console.print(Text.assemble(("picture  ", "bold"), str(pictures[0])))


def _lines(summary: dict[str, Any]) -> list[tuple[str, str]]:
    requests = f"{summary['num_finished']:,} finished"
    for name in ("num_aborted", "num_unfinished"):
        if summary[name]:
            requests += f", {summary[name]:,} {name.removeprefix('num_')}"
    requests += f" in {summary['duration_s']:,.2f} s simulated, {summary['num_steps']:,} steps"
    throughput = (
        f"{_number(summary['request_throughput'])} requests/s, {_number(summary['output_throughput'])} tokens/s"
    )
    if summary["request_goodput"] is not None:
        throughput += f", goodput {_number(summary['request_goodput'])} requests/s"
    usage = summary["kv_cache_usage_perc"]
    cache = (
        f"{_percent(usage['mean'])} used (most {_percent(usage['max'])}), prefix hits "
        f"{_percent(_share(summary['prefix_cache_hits'], summary['prefix_cache_queries']))}, "
        f"{summary['num_preemptions']:,} preemptions"
    )
    lines = [("requests", requests), ("throughput", throughput), ("KV cache", cache)]
    if summary["num_drafts"]:
        accepted = _share(summary["num_accepted_tokens"], summary["num_draft_tokens"])
        length = summary["mean_acceptance_length"]
        lines.append(("speculation", f"{length:.2f} tokens a verification, {_percent(accepted)} of drafts accepted"))
    return lines


def _latencies(summary: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    table.add_column("latency, ms", style="bold", min_width=11)
    for name in ("mean", "median", "p90", "p99"):
        table.add_column(name, justify="right", min_width=9)
    for key, label in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("itl_ms", "ITL"), ("e2el_ms", "end to end")):
        values = summary[key]
        table.add_row(label, *(_number(values[name]) for name in ("mean", "median", "p90", "p99")))
    return table


def _slots(summary: dict[str, Any]) -> Table:
    """Where the pool's room went, in percent of all slot-seconds: what is held, and what is not quite in use."""
    slots = summary["slot_seconds"]
    whole = sum(seconds for name, seconds in slots.items() if not name.startswith("placeholder_"))
    left = ["committed", "in_flight", "placeholder_accepted", "placeholder_rejected", "garbage"]
    right = ["lookahead", "slack", "cached", "free"]
    cells = [(name.replace("_", " "), _percent(_share(slots[name], whole), 2)) for name in left + right]
    cells.append(("", ""))
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for heading in ("room, % of slot-seconds", ""):
        table.add_column(heading, style="bold", min_width=22)
        table.add_column("", justify="right", min_width=8)
    for first, second in zip(cells[: len(left)], cells[len(left) :], strict=True):
        table.add_row(*first, *second)
    return table


def _memory(summary: dict[str, Any]) -> str:
    """What the other account says of rejected drafts; the shares above do not have it."""
    content = summary["content_slot_seconds"]
    share = _percent(_share(content["garbage"], sum(content.values())), 2)
    return f"beside that, of what device memory holds {share} is garbage of rejected drafts"


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _percent(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{share * 100:.{digits}f} %"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) < 100 else f"{value:.1f}"
