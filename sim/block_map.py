"""A picture of the pool, block by block over time: what most of a block's slots are, and where garbage lies in memory.

The run is made again (`sim.resimulate`), and looked at in at most `COLUMNS` instants at equal distances; what happens
between them is not drawn, and nothing is averaged over time. Blocks are rows by their number; where there are more than
`ROWS`, neighbours share a row, coloured as most of them are. Knows records and the ledger's accounts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from sim import results
from sim.build import Simulation
from sim.observers.blocks import Blocks
from sim.observers.ledger import RESERVATION_CLASSES
from sim.pictures import COLOURS
from sim.records import FREED, HIT, TAKEN, Batch, BlockOperation, Interruption, Returned
from sim.resimulate import recorded_scenario, repeat

if TYPE_CHECKING:
    from sim.observers.ledger import Account

COLUMNS: Final = 1_000
"""Most instants."""
ROWS: Final = 500
"""Most rows of blocks."""

_CLASSES: Final = tuple(name.replace("_", " ") for name in RESERVATION_CLASSES)
_COMMITTED: Final = _CLASSES.index("committed")
_SLACK: Final = _CLASSES.index("slack")
_CACHED: Final = _CLASSES.index("cached")
_FREE: Final = _CLASSES.index("free")


@dataclass(frozen=True, slots=True)
class BlockMap:
    """What was seen. Rows are blocks from number 1 on (0 is vLLM's null block), columns instants."""

    times_s: NDArray[np.float64]
    classes: NDArray[np.uint8]
    """(rows, columns): index into the account of reservations' classes, of most slots."""
    garbage: NDArray[np.float32]
    """(rows, columns): slots of a block that are garbage in memory; the mean where blocks share a row."""
    blocks_per_row: int
    num_blocks: int
    block_size: int


class Looker:
    """Takes down the pool at the instants. It must be told before the ledger, which then stands as it stood until now:
    so nothing is drawn but what is looked at, however often it changes."""

    def __init__(self, simulation: Simulation, times_ns: NDArray[np.int64]) -> None:
        self._ledger = simulation.ledger
        self.block_size = simulation.settings.block_size
        self.num_blocks = simulation.settings.num_gpu_blocks - 1
        self.blocks_per_row = -(-self.num_blocks // ROWS)
        self._times = times_ns
        self._next = 0
        rows = -(-self.num_blocks // self.blocks_per_row)
        self.classes = np.zeros((rows, len(times_ns)), dtype=np.uint8)
        self.garbage = np.zeros((rows, len(times_ns)), dtype=np.float32)
        self._blocks = Blocks(self.num_blocks + 1)
        self._tables: dict[int, list[int]] = {}
        """Blocks in order, by owner."""
        self._whole = np.full(self.num_blocks + 1, _FREE, dtype=np.uint8)
        """By block: free, cached, or committed for all that somebody holds."""
        self._touched: set[int] = set()
        """Blocks whose entry in `_whole` may be out of date."""

    @property
    def done(self) -> bool:
        return self._next >= len(self._times)

    def scheduled(self, now: int, batch: Batch) -> None:
        self._look(now)
        self._follow(batch.block_operations)

    def step_ended(self, now: int, batch: Batch) -> None:
        self._look(now)

    def updated(self, now: int, returned: Returned) -> None:
        self._look(now)
        self._follow(returned.block_operations)

    def interrupted(self, now: int, interruption: Interruption) -> None:
        self._look(now)
        self._follow(interruption.block_operations)

    def closed(self, now: int) -> None:
        self._look(now + 1)

    def _look(self, now: int) -> None:
        """Take down the instants before `now`: until then nothing has changed."""
        if self.done or self._times[self._next] >= now:
            return
        classes, garbage = self._in_rows(*self.drawn())
        while not self.done and self._times[self._next] < now:
            self.classes[:, self._next] = classes
            self.garbage[:, self._next] = garbage
            self._next += 1

    def _in_rows(
        self, classes: NDArray[np.uint8], garbage: NDArray[np.uint16]
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        size = self.blocks_per_row
        if size == 1:
            return classes[1:], garbage[1:].astype(np.float32)
        rows = len(self.classes)
        row = np.arange(self.num_blocks) // size
        counts = np.bincount(row * len(_CLASSES) + classes[1:], minlength=rows * len(_CLASSES))
        mean = np.bincount(row, weights=garbage[1:], minlength=rows) / np.bincount(row, minlength=rows)
        most = counts.reshape(rows, len(_CLASSES)).argmax(axis=1)
        return most.astype(np.uint8), mean.astype(np.float32)

    def _follow(self, operations: list[BlockOperation]) -> None:
        """Keep the tables, and what the blocks are."""
        self._blocks.follow(operations)
        for kind, owner, blocks in operations:
            self._touched.update(blocks)
            if kind in (TAKEN, HIT):
                self._tables.setdefault(owner, []).extend(blocks)
            elif kind == FREED:
                gone = set(blocks)
                left = [block for block in self._tables[owner] if block not in gone]
                if left:
                    self._tables[owner] = left
                else:
                    del self._tables[owner]

    def drawn(self) -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:
        """By block, the null block included: its class, and its slots that are garbage in memory."""
        refs, hashed = self._blocks.refs, self._blocks.hashed
        for block in self._touched:
            self._whole[block] = _COMMITTED if refs[block] else _CACHED if hashed[block] else _FREE
        self._touched.clear()
        classes = self._whole.copy()
        garbage = np.zeros(self.num_blocks + 1, dtype=np.uint16)
        size = self.block_size
        for owner, account in self._ledger.accounts.items():
            table = self._tables.get(owner, [])
            certain = account.computed - account.in_flight
            first = max(min(certain, account.content_valid) // size, 0)
            reach = max(account.computed, account.written, account.reserved, account.content_written)
            last = min(-(-reach // size), len(table))
            for number in range(first, last):
                block, low = table[number], number * size
                kind = _most(account, low, size)
                if kind != _COMMITTED:  # A block that several hold is in flight if it is so for one of them.
                    classes[block] = kind
                dirty = min(account.content_written, low + size) - max(account.content_valid, low)
                if dirty > 0:
                    garbage[block] = dirty
            classes[table[max(first, last) :]] = _SLACK
        return classes, garbage


def _most(account: Account, start: int, size: int) -> int:
    """The class that most slots of a block have, by the account of reservations; of equal ones the more certain."""
    certain = account.computed - account.in_flight
    reach = max(account.computed, account.written)
    ends = (
        (_COMMITTED, certain),
        (0, certain + account.in_flight - account.drafts),
        (1, account.computed),
        (3, reach),
        (4, max(reach, account.reserved)),
        (5, start + size),
    )
    best, most = 5, 0
    low = start
    for kind, end in ends:
        high = min(max(end, low), start + size)
        if high - low > most:
            best, most = kind, high - low
        low = high
    return best


def block_map(
    folder: Path, from_s: float | None = None, to_s: float | None = None, watch: Callable[[int], None] | None = None
) -> BlockMap:
    """Look at the blocks of a folder of results, from and to these simulated seconds; by default all of the run.

    Raises:
        ResultsError: `folder` is no folder of results.
        CannotRepeat: the run cannot be made again as it was.
        ValueError: there is nothing between these times.
    """
    scenario, _ = recorded_scenario(folder)
    duration_s = float(results.read_json(folder / results.SUMMARY)["duration_s"])
    first = 0.0 if from_s is None else from_s
    last = duration_s if to_s is None else min(to_s, duration_s)
    if not 0 <= first < last:
        raise ValueError(f"from {first:g} s to {last:g} s: the run goes from 0 to {duration_s:g} s")
    width = (last - first) / COLUMNS
    times: NDArray[np.float64] = np.asarray(first + width * (np.arange(COLUMNS) + 0.5), dtype=np.float64)
    found: list[Looker] = []

    def observe(simulation: Simulation) -> Looker:
        found.append(Looker(simulation, np.floor(times * 1e9).astype(np.int64)))
        return found[0]

    repeat(scenario, observe, lambda: found[0].done, watch, before_ledger=True)
    looker = found[0]
    return BlockMap(times, looker.classes, looker.garbage, looker.blocks_per_row, looker.num_blocks, looker.block_size)


def draw_block_map(seen: BlockMap, title: str, path: Path) -> None:
    """Draw it: classes above, garbage in memory below. Raises OSError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    half = (seen.times_s[1] - seen.times_s[0]) / 2 if len(seen.times_s) > 1 else 0.5
    extent = (seen.times_s[0] - half, seen.times_s[-1] + half, 0.5, seen.num_blocks + 0.5)
    shared = "" if seen.blocks_per_row == 1 else f", {seen.blocks_per_row} blocks a row"
    apart = f"{2 * half:.3g} s" if half >= 0.5 else f"{2e3 * half:.3g} ms"
    every = f"looked at every {apart}{shared}"
    image: dict[str, Any] = {"aspect": "auto", "origin": "lower", "extent": extent, "interpolation": "nearest"}
    with matplotlib.rc_context({"font.size": 10}):
        figure = Figure(figsize=(12, 11), layout="none")  # type: ignore[arg-type]  # "none" is allowed, and missing in the stubs
        above, below = figure.subplots(2, 1, sharex=True)
        figure.subplots_adjust(left=0.075, right=0.86, top=0.92, bottom=0.055, hspace=0.14)
        colours = [COLOURS[name] for name in _CLASSES]
        above.imshow(seen.classes, cmap=ListedColormap(colours), vmin=-0.5, vmax=len(colours) - 0.5, **image)
        above.set_title(f"What most slots of a block are ({every})", loc="left", fontsize=11)
        present = set(np.unique(seen.classes).tolist())
        handles = [
            Patch(facecolor=COLOURS[name], edgecolor="#666666", linewidth=0.5, label=name)
            for number, name in enumerate(_CLASSES)
            if number in present
        ]
        above.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.01), frameon=False)
        most = max(float(seen.garbage.max()), 1.0)
        heat = LinearSegmentedColormap.from_list("garbage", ["#FFFFFF", "#F0A070", "#D55E00", "#3B1A00"])
        shown = below.imshow(seen.garbage, cmap=heat, vmin=0, vmax=most, **image)
        below.set_title(
            f"Garbage in memory: slots of rejected drafts, of {seen.block_size} a block", loc="left", fontsize=11
        )
        left, bottom, width, height = below.get_position().bounds
        bar = figure.colorbar(shown, cax=figure.add_axes((left + width + 0.012, bottom, 0.015, height)))
        bar.set_label("garbage slots a block")
        for axes in (above, below):
            axes.set_ylabel("block number")
        below.set_xlabel("simulated time (s)")
        figure.suptitle(title, fontweight="bold", y=0.975)
        figure.savefig(path, dpi=120)
