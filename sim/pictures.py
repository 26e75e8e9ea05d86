"""The picture of a finished run, drawn from its table of steps: the pool by class, queues, tokens a step.

Knows the columns and how to draw; must not know how they came about. Reads the table in chunks and thins it to at most
`POINTS` points over time, so a long run takes no more memory than a short one. matplotlib is imported when something is
drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from sim.results import PICTURE, step_chunks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS: Final = 2_000
"""Most points over time that a picture has."""
_TOKEN_POINTS: Final = 250
"""The same for tokens a step, where single prefills would be too thin to be seen."""

_DPI: Final = 120
_WIDTH, _HEIGHT = 10.0, 12.0  # inches, so 1,200 pixels by 1,440

# Colours by Okabe and Ito ("Color Universal Design", 2008), told apart by all common kinds of colour vision.
_BLACK, _ORANGE, _SKY, _GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
_BLUE, _VERMILION, _PURPLE = "#0072B2", "#D55E00", "#CC79A7"
_GREY, _PALE = "#BBBBBB", "#EEEEEE"

_POOL: Final = (
    ("res_committed", "committed", _BLUE),
    ("res_in_flight", "in flight", _SKY),
    ("res_placeholder", "placeholder", _ORANGE),
    ("res_garbage", "garbage", _VERMILION),
    ("res_lookahead", "lookahead", _GREEN),
    ("res_slack", "slack", _PURPLE),
    ("res_cached", "cached", _GREY),
    ("res_free", "free", _PALE),
)
COLOURS: Final = {label: colour for _, label, colour in _POOL}
"""By class of the account of reservations."""
_SPECULATIVE: Final = ("res_placeholder", "res_garbage", "res_lookahead", "res_slack")
_TOKENS: Final = ("num_prefill_tokens", "num_tokens", "num_draft_tokens", "num_accepted_tokens")
_STATES: Final = (*(name for name, _, _ in _POOL), "content_garbage", "num_running", "num_waiting")


@dataclass(frozen=True, slots=True)
class Thinned:
    """A run's steps over time, in bins. Arrays have one entry a bin, `edges_s` one more."""

    edges_s: NDArray[np.float64]
    states: dict[str, NDArray[np.float64]]
    """Means over time of what holds from one schedule to the next."""
    token_edges_s: NDArray[np.float64]
    tokens: dict[str, NDArray[np.float64]]
    """Means a step over the steps scheduled in the bin (of `token_edges_s`); 0 where there is none."""
    num_steps: int
    """Rows of the table: steps, unless it was thinned when it was recorded."""


def thin(folder: Path, points: int = POINTS) -> Thinned:
    """Read a run's table of steps into bins: one a step if that makes no more than `points`, else equal ones in time.

    Tokens have bins of their own, fewer of them.

    What a schedule leaves holds until the next; the last until its step is taken back. The means are exact.

    Raises:
        ResultsError: the run has no table of steps.
        ValueError: the table is empty.
    """
    num_steps, first_ns, last_ns, times = _extent(folder, points)
    if num_steps == 0:
        raise ValueError(f"{folder}: no step was taken, so there is nothing to draw")
    end_ns = max(last_ns, first_ns + 1)
    edges = _edges(times, num_steps, end_ns, points)
    token_edges = _edges(times, num_steps, end_ns, min(points, _TOKEN_POINTS))
    integrals = {name: np.zeros(len(edges) - 1) for name in _STATES}
    sums = {name: np.zeros(len(token_edges) - 1) for name in _TOKENS}
    counts = np.zeros(len(token_edges) - 1)
    carried: dict[str, NDArray[Any]] | None = None
    for chunk in step_chunks(folder, ["scheduled_ns", "num_steps", *_STATES, *_TOKENS]):
        at = np.clip(np.searchsorted(token_edges, chunk["scheduled_ns"], side="right") - 1, 0, len(counts) - 1)
        counts += np.bincount(at, weights=chunk["num_steps"], minlength=len(counts))
        for name in _TOKENS:
            sums[name] += np.bincount(at, weights=chunk[name], minlength=len(counts))
        if carried is not None:
            chunk = {name: np.concatenate([carried[name], column]) for name, column in chunk.items()}
        _integrate(edges, chunk["scheduled_ns"], chunk, integrals)
        carried = {name: column[-1:] for name, column in chunk.items()}
    assert carried is not None
    _integrate(edges, np.append(carried["scheduled_ns"], edges[-1]), carried, integrals)
    widths = np.diff(edges)
    return Thinned(
        edges / 1e9,
        {name: integral / widths for name, integral in integrals.items()},
        token_edges / 1e9,
        {name: total / np.maximum(counts, 1) for name, total in sums.items()},
        num_steps,
    )


def _edges(times: list[int], num_steps: int, end_ns: int, points: int) -> NDArray[np.float64]:
    """A bin a step, if they are no more than `points`; else that many of equal length."""
    if num_steps <= points:
        return np.unique(np.array([*times, end_ns], dtype=np.float64))
    return np.linspace(times[0], end_ns, points + 1)


def _extent(folder: Path, points: int) -> tuple[int, int, int, list[int]]:
    """Number of steps, first schedule, last update, and the times of the first `points` schedules."""
    num_steps = first_ns = last_ns = 0
    times: list[int] = []
    for chunk in step_chunks(folder, ["scheduled_ns", "updated_ns"]):
        scheduled = chunk["scheduled_ns"]
        if num_steps == 0:
            first_ns = int(scheduled[0])
        if num_steps < points:
            times += scheduled[: points - num_steps].tolist()
        num_steps += len(scheduled)
        last_ns = int(chunk["updated_ns"][-1])
    return num_steps, first_ns, last_ns, times


def _integrate(
    edges: NDArray[np.float64],
    times: NDArray[Any],
    columns: dict[str, NDArray[Any]],
    integrals: dict[str, NDArray[np.float64]],
) -> None:
    """Add each column's integral over [times[0], times[-1]] by bin; entry i holds from times[i] to times[i + 1]."""
    spans = np.diff(times.astype(np.float64))
    for name, integral in integrals.items():
        running = np.concatenate([[0.0], np.cumsum(columns[name][: len(spans)] * spans)])
        integral += np.diff(np.interp(edges, times, running))


def draw(folder: Path, title: str) -> Path:
    """Draw the picture of a run into its folder, four panels over simulated time; returns its path.

    Raises:
        ResultsError: the run has no table of steps.
        ValueError: the table is empty.
        OSError: it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    thinned = thin(folder)
    panels = (_draw_pool, _draw_speculative, _draw_queues, _draw_tokens)
    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="none")  # type: ignore[arg-type]  # "none" is allowed, and missing in the stubs
        axes = figure.subplots(len(panels), 1, sharex=True, height_ratios=(4, 3, 2.5, 2.5))
        figure.subplots_adjust(left=0.09, right=0.845, top=0.94, bottom=0.045, hspace=0.22)
        for panel, place in zip(panels, axes, strict=True):
            panel(place, thinned)
        axes[-1].set_xlabel("simulated time (s)")
        axes[-1].set_xlim(float(thinned.edges_s[0]), float(thinned.edges_s[-1]))
        figure.align_ylabels(axes)
        figure.suptitle(title, fontweight="bold", y=0.985)
        path = folder / PICTURE
        figure.savefig(path, dpi=_DPI)
    return path


def _pool_slots(thinned: Thinned) -> float:
    return float(sum(thinned.states[name][0] for name, _, _ in _POOL))


def _draw_pool(axes: Axes, thinned: Thinned) -> None:
    """The account of reservations, in percent of the pool."""
    pool = _pool_slots(thinned)
    shares = [thinned.states[name] / pool * 100 for name, _, _ in _POOL]
    _stack(axes, thinned.edges_s, shares, [(label, colour) for _, label, colour in _POOL])
    used = float(np.max(100 - shares[-1]))
    axes.set_ylim(0, 100 if used > 60 else max(used * 1.2, 1e-3))
    axes.set_ylabel("share of the pool (%)")
    axes.set_title(f"Pool occupancy by class ({pool:,.0f} slots)", loc="left", fontsize=11)
    _finish(axes, reverse=True)


def _draw_speculative(axes: Axes, thinned: Thinned) -> None:
    """The thin layers of the pool, enlarged, and the garbage that device memory holds."""
    pool = _pool_slots(thinned)
    chosen = [entry for entry in _POOL if entry[0] in _SPECULATIVE]
    shares = [thinned.states[name] / pool * 100 for name, _, _ in chosen]
    _stack(axes, thinned.edges_s, shares, [(label, colour) for _, label, colour in chosen])
    garbage = thinned.states["content_garbage"] / pool * 100
    label = "garbage in\nmemory (line)"
    _line(axes, thinned, garbage, label, _BLACK)
    axes.set_ylim(0, max(float(np.max(sum(shares))), float(np.max(garbage)), 1e-3) * 1.05)
    axes.set_ylabel("share of the pool (%)")
    axes.set_title("Drafts, lookahead and rounding", loc="left", fontsize=11)
    _finish(axes, reverse=True)


def _draw_queues(axes: Axes, thinned: Thinned) -> None:
    """Lengths of the running list and the waiting queue."""
    for name, label, colour in (("num_running", "running", _BLUE), ("num_waiting", "waiting", _VERMILION)):
        _line(axes, thinned, thinned.states[name], label, colour)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("requests")
    axes.set_title("Running and waiting", loc="left", fontsize=11)
    _finish(axes)


def _draw_tokens(axes: Axes, thinned: Thinned) -> None:
    """What a step's tokens are: prefill, one certain token a decoding frame, and drafts by what became of them."""
    tokens = thinned.tokens
    accepted, prefill = tokens["num_accepted_tokens"], tokens["num_prefill_tokens"]
    rejected = tokens["num_draft_tokens"] - accepted
    bonus = np.maximum(tokens["num_tokens"] - prefill - tokens["num_draft_tokens"], 0)
    layers = [("bonus", _BLUE), ("accepted drafts", _GREEN), ("rejected drafts", _VERMILION), ("prefill", _GREY)]
    _stack(axes, thinned.token_edges_s, [bonus, accepted, rejected, prefill], layers)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens a step")
    axes.set_title("Tokens a step", loc="left", fontsize=11)
    _finish(axes, reverse=True)


def _stack(
    axes: Axes,
    edges: NDArray[np.float64],
    layers: list[NDArray[np.float64]],
    names: list[tuple[str, str]],
) -> None:
    """Layers on each other, level in each bin; `names` are labels and colours."""
    floor = np.zeros(len(edges) - 1)
    for layer, (label, colour) in zip(layers, names, strict=True):
        top = floor + layer
        # The last value is repeated so that the last bin has its width.
        axes.fill_between(
            edges, np.append(floor, floor[-1]), np.append(top, top[-1]), step="post", color=colour, label=label, lw=0
        )
        floor = top


def _line(axes: Axes, thinned: Thinned, values: NDArray[np.float64], label: str, colour: str) -> None:
    """A line, level in each bin."""
    axes.plot(
        thinned.edges_s, np.append(values, values[-1]), drawstyle="steps-post", color=colour, label=label, linewidth=1
    )


def _finish(axes: Axes, *, reverse: bool = False) -> None:
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.grid(axis="y", color="#BBBBBB", linewidth=0.4)
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    if reverse:  # As the stack reads: from the top down, lines last.
        order = list(range(len(handles)))[::-1]
        handles, labels = [handles[i] for i in order], [labels[i] for i in order]
    axes.legend(handles, labels, loc="upper left", bbox_to_anchor=(1.005, 1.02), frameon=False, fontsize=9)
