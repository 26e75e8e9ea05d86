"""What the notebooks need beside `sim` itself: figures of several runs side by side, pictures drawn into given axes.

Knows finished runs, their tables, and the drawings of `sim.pictures`; must not know the engine. Whoever calls it makes
the axes and gives titles; the colours are Okabe and Ito's, each class of slots has the one of `overview.png`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd

from sim.explain import Snapshot, snapshot
from sim.observers.blocks import Blocks
from sim.pictures import COLOURS, thin
from sim.recording import Recording, read_recording
from sim.resimulate import recorded_scenario, repeat
from sim.run import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sim.build import Simulation
    from sim.records import Batch, Interruption, Returned

PALETTE: Final = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000")
"""Colours of things that are no classes of slots, in the order in which to take them."""
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")
"""Markers to go with them, so that no line is known by its colour alone."""
PRESET_COLOURS: Final = {
    "article": "#D55E00",
    "vllm-0.24": "#56B4E9",
    "vllm-0.26": "#E69F00",
    "vllm-0.32": "#0072B2",
    "claimed": "#000000",
}
"""What is drawn under one of these names always has its colour; `claimed` is what the article says."""
CONTENT_COLOURS: Final = {"valid": COLOURS["committed"], "garbage": COLOURS["garbage"], "blank": COLOURS["free"]}
"""By class of the account of content."""
CLASSES: Final = tuple(COLOURS)
"""Of the account of reservations, by their labels in pictures: from `committed` up to `free`."""

POINTS: Final = 400
"""Most points over time that a picture of occupancy has."""

_RESERVATION: Final = {
    "c": "committed",
    "i": "in flight",
    "p": "placeholder",
    "g": "garbage",
    "l": "lookahead",
    ".": "slack",
}
_CONTENT: Final = {"v": "valid", "x": "garbage", "-": "blank"}
_ON_DARK: Final = ("committed", "valid", "garbage", "lookahead")


def use_style() -> None:
    """Set matplotlib's defaults for a page: fonts, grid, colours, a resolution that keeps a notebook small."""
    import matplotlib as mpl
    from cycler import cycler

    mpl.rcParams.update(
        {
            "axes.axisbelow": True,
            "axes.grid": True,
            "axes.grid.axis": "y",
            "axes.prop_cycle": cycler(color=PALETTE),
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlelocation": "left",
            "axes.titlesize": 11,
            "figure.constrained_layout.use": True,
            "figure.dpi": 90,
            "font.size": 10,
            "grid.color": "#CCCCCC",
            "grid.linewidth": 0.5,
            "legend.frameon": False,
            "savefig.dpi": 90,
        }
    )


def value(result: Result, key: str) -> Any:
    """A figure of a run's summary by its path, such as `slot_seconds.lookahead` or `ttft_ms.p99`.

    Raises KeyError with what there is.
    """
    found: Any = result.summary
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            there = ", ".join(found) if isinstance(found, Mapping) else repr(found)
            raise KeyError(f"{key}: there is no {part}; there is {there}")
        found = found[part]
    return found


def side_by_side(results: Mapping[str, Result], rows: Mapping[str, str | Callable[[Result], object]]) -> pd.DataFrame:
    """A table for reading: a column a run, a row a figure, by its path in the summary or worked out from the result.

    Cells are text: whole numbers with commas, others to three digits or to the unit, a dash for none.
    """
    columns = {
        name: [shown(value(result, row) if isinstance(row, str) else row(result)) for row in rows.values()]
        for name, result in results.items()
    }
    return pd.DataFrame(columns, index=pd.Index(list(rows)))


def shown(number: object) -> str:
    """A number as a table shows it."""
    if number is None:
        return "-"
    if isinstance(number, bool | np.bool_):
        return "yes" if number else "no"
    if isinstance(number, int | np.integer):
        return f"{int(number):,}"
    if isinstance(number, float | np.floating):
        real = float(number)
        return f"{real:,.0f}" if abs(real) >= 100 else f"{real:.3g}"
    return str(number)


def running_seconds(result: Result) -> float:
    """Request-seconds of running: the running list's length, integrated from each schedule to the next.

    Of a table of windows, integrated over them. Raises ValueError where steps have been left out.
    """
    if _recording(result).window_ns is not None:
        windows = result.steps()
        return float(((windows["to_ns"] - windows["from_ns"]) * windows["num_running"]).sum() / 1e9)
    steps = _all_steps(result)
    times = np.append(steps["scheduled_ns"].to_numpy(), steps["updated_ns"].iloc[-1])
    return float(np.sum(np.diff(times) * steps["num_running"].to_numpy()) / 1e9)


def _recording(result: Result) -> Recording:
    return read_recording(result.manifest["scenario"]["output"]["steps"])


def _all_steps(result: Result) -> pd.DataFrame:
    recording = _recording(result)
    if recording != Recording():
        raise ValueError(f"output.steps = {str(recording)!r}: each step is needed here; allowed: all")
    return result.steps()


def slots_per_request(result: Result) -> pd.Series[float]:
    """Mean slots of a running request, by class: slot-seconds over request-seconds of running.

    The reservations' classes that requests hold, `placeholder` also split by what became of it, and `content_garbage`.
    """
    seconds = running_seconds(result)
    slots = result.summary["slot_seconds"]
    held = {name: total / seconds for name, total in slots.items() if name not in ("cached", "free")}
    held["content_garbage"] = result.summary["content_slot_seconds"]["garbage"] / seconds
    return pd.Series(held, dtype=float)


def beyond_known(result: Result) -> pd.Series[int]:
    """Slots promised to a run's only request beyond the tokens that are known when a step is scheduled, by step.

    Known are its prompt and the output that earlier steps have delivered by then. Raises ValueError for more requests,
    and without all steps.
    """
    if result.summary["num_requests"] != 1:
        raise ValueError(
            f"num_requests: one request alone can be followed by steps, got {value(result, 'num_requests')}"
        )
    steps = _all_steps(result)
    prompt = int(result.requests()["num_prompt_tokens"].iloc[0])
    delivered = np.concatenate([[0], np.cumsum(steps["num_delivered_tokens"].to_numpy())])
    back = np.searchsorted(steps["updated_ns"].to_numpy(), steps["scheduled_ns"].to_numpy(), side="right")
    promised = steps[["res_committed", "res_in_flight", "res_placeholder", "res_garbage", "res_lookahead"]].sum(axis=1)
    return pd.Series(promised.to_numpy() - prompt - delivered[back], index=steps["step"].to_numpy(), dtype=int)


class _Watcher:
    """Takes down one request's account around some steps."""

    def __init__(self, simulation: Simulation, index: int, steps: Sequence[int]) -> None:
        self._ledger = simulation.ledger
        self._blocks = Blocks(self._ledger.num_blocks)
        self._index = index
        self._steps = frozenset(steps)
        self.moments: list[Snapshot] = []

    def scheduled(self, now: int, batch: Batch) -> None:
        self._blocks.follow(batch.block_operations)
        self._look(now, batch, "scheduled")

    def step_ended(self, now: int, batch: Batch) -> None:
        self._look(now, batch, "ended")

    def updated(self, now: int, returned: Returned) -> None:
        self._blocks.follow(returned.block_operations)
        self._look(now, returned.batch, "taken back")

    def interrupted(self, now: int, interruption: Interruption) -> None:
        self._blocks.follow(interruption.block_operations)

    def _look(self, now: int, batch: Batch, what: str) -> None:
        if batch.number not in self._steps:
            return
        for request in batch.requests:
            if request.index == self._index:
                seen = snapshot(self._ledger, self._blocks, request, now, f"step {batch.number} {what}")
                if seen is not None:
                    self.moments.append(seen)


def moments(result: Result, steps: Sequence[int], request: int = 0) -> list[Snapshot]:
    """A request's account when each of these steps was scheduled, had ended and was taken back, in order of time.

    The run is made again, which is why it must be short. Raises CannotRepeat where it cannot be.
    """
    scenario, _ = recorded_scenario(result.folder)
    found: list[_Watcher] = []

    def observe(simulation: Simulation) -> _Watcher:
        found.append(_Watcher(simulation, request, steps))
        return found[0]

    repeat(scenario, observe)
    return found[0].moments


def draw_blocks(axes: Axes, seen: Sequence[Snapshot], first_block: int, num_blocks: int, *, content: bool) -> None:
    """Draw some blocks of a request slot by slot, a row for each moment, the first on top, with the classes' legend.

    `content`: what memory holds, else the account of reservations. Blocks that are not held stay white.
    """
    from matplotlib.patches import Patch, Rectangle

    size = seen[0].block_size
    start, end = first_block * size, (first_block + num_blocks) * size
    names = _CONTENT if content else _RESERVATION
    colour_of = CONTENT_COLOURS if content else COLOURS
    used = []
    for row, moment in enumerate(seen):
        letters = (moment.content() if content else moment.reservations())[start:end]
        for place, letter in enumerate(letters):
            name = names[letter]
            used.append(name)
            axes.add_patch(
                Rectangle(
                    (start + place, row + 0.1), 1, 0.8, facecolor=colour_of[name], edgecolor="white", linewidth=0.8
                )
            )
            axes.text(
                start + place + 0.5,
                row + 0.5,
                letter,
                ha="center",
                va="center",
                fontsize=7,
                color="white" if name in _ON_DARK else "black",
            )
    for block in range(first_block, first_block + num_blocks):
        axes.axvline(block * size, color="black", linewidth=1)
        axes.text(block * size + size / 2, -0.15, f"block {block}", ha="center", va="bottom", fontsize=9)
    axes.set_xlim(start, end)
    axes.set_ylim(len(seen), 0)
    axes.set_yticks(np.arange(len(seen)) + 0.5, [moment.what for moment in seen])
    axes.set_xticks(np.arange(start, end + 1, 4))
    axes.tick_params(axis="y", length=0)
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    handles = [
        Patch(facecolor=colour_of[name], edgecolor="#666666", label=name) for name in names.values() if name in used
    ]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9)


def draw_occupancy(axes: Axes, result: Result, classes: Sequence[str] = CLASSES, *, garbage_line: bool = False) -> None:
    """Stack classes of slots over simulated time, in percent of the pool, with a legend beside it.

    `classes` are labels of `CLASSES`, the first at the bottom; `garbage_line` adds what memory holds as garbage. Raises
    ResultsError without a table of steps, KeyError for an unknown class.
    """
    seen = thin(result.folder, POINTS)
    states = {label: seen.states["res_" + label.replace(" ", "_")] for label in CLASSES}
    pool = float(sum(column[0] for column in states.values()))
    edges = seen.edges_s
    floor = np.zeros(len(edges))
    for label in classes:
        layer = states[label] / pool * 100
        top = floor + np.append(layer, layer[-1])
        axes.fill_between(edges, floor, top, step="post", color=COLOURS[label], label=label, linewidth=0)
        floor = top
    if garbage_line:
        garbage = seen.states["content_garbage"] / pool * 100
        axes.plot(
            edges,
            np.append(garbage, garbage[-1]),
            drawstyle="steps-post",
            color="black",
            linewidth=1.2,
            label="garbage in memory",
        )
    axes.set_xlim(float(edges[0]), float(edges[-1]))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("simulated time (s)")
    axes.set_ylabel("share of the pool (%)")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9)


def draw_bars(axes: Axes, table: pd.DataFrame, *, unit: str) -> None:
    """Bars in groups: a group a row of the table, a colour a column, each bar with its number on top."""
    width = 0.8 / len(table.columns)
    places = np.arange(len(table))
    for number, column in enumerate(table.columns):
        heights = table[column].to_numpy(dtype=float)
        middle = places + (number - (len(table.columns) - 1) / 2) * width
        bars = axes.bar(middle, heights, width * 0.94, color=colours(table.columns)[number], label=str(column))
        axes.bar_label(bars, labels=[shown(height) for height in heights], fontsize=8, padding=1)
    axes.set_xticks(places, [str(name) for name in table.index])
    axes.set_ylabel(unit)
    axes.margins(y=0.12)
    if len(table.columns) > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9)


def draw_stack(axes: Axes, table: pd.DataFrame, *, unit: str) -> None:
    """Stacked bars that lie: a bar a row of the table, the first on top, a layer a column, with its sum behind it."""
    places = np.arange(len(table))
    left = np.zeros(len(table))
    for number, column in enumerate(table.columns):
        widths = table[column].to_numpy(dtype=float)
        colour = colours(table.columns)[number]
        axes.barh(
            places, widths, left=left, height=0.65, color=colour, edgecolor="white", linewidth=0.5, label=str(column)
        )
        left = left + widths
    for place, total in enumerate(left.tolist()):
        axes.text(total, place, f" {shown(total)}", va="center", fontsize=9)
    axes.set_yticks(places, [str(name) for name in table.index])
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_xlim(0, float(left.max()) * 1.18)
    axes.grid(True, axis="x")
    axes.grid(False, axis="y")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9)


def draw_lines(axes: Axes, table: pd.DataFrame, *, xlabel: str, ylabel: str) -> None:
    """Lines with markers: one a column of the table, over its index; later ones are smaller, so that none is hidden."""
    for number, column in enumerate(table.columns):
        axes.plot(
            table.index.to_numpy(),
            table[column].to_numpy(dtype=float),
            color=colours(table.columns)[number],
            linestyle=("-", "--", ":", "-.")[number % 4],
            marker=MARKERS[number % len(MARKERS)],
            markersize=max(9.0 - 1.2 * number, 4.0),
            label=str(column),
        )
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9)


def colours(names: Sequence[object] | pd.Index[Any]) -> list[str]:
    """A colour for each: a preset's or a class of slots' own where the name is one, else `PALETTE`'s in order."""
    own = COLOURS | CONTENT_COLOURS | PRESET_COLOURS
    free = iter([colour for colour in PALETTE if colour not in {own.get(str(name)) for name in names}] + list(PALETTE))
    return [own.get(str(name)) or next(free) for name in names]
