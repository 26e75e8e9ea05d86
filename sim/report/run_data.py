"""What a report of a run shows besides its summary: the pool over time, the blocks, the requests.

Knows the tables of a folder of results and how a run is made again; must not know HTML. What a run did not keep, or
cannot be made again, is left out, with a note that says why.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from sim import results
from sim.block_map import COLUMNS, Looker
from sim.observers.ledger import RESERVATION_CLASSES
from sim.pictures import thin
from sim.records import Batch, Interruption, Returned
from sim.report.columns import numbers, packed, runs, short
from sim.resimulate import CannotRepeat, recorded_scenario, repeat
from sim.results import ResultsError

if TYPE_CHECKING:
    import pandas as pd

    from sim.build import Simulation
    from sim.core.request import Request

_DAMAGED: Final = (ResultsError, ValueError, KeyError, OSError)
"""What reading a table raises that is missing, cut short (pyarrow's are ValueErrors or OSErrors), or another's."""
_MAP_COLUMNS: Final = COLUMNS // 2
_STATUSES: Final = ("finished", "aborted", "unfinished")
_COUNTS: Final = (
    "num_prompt_tokens",
    "num_output_tokens",
    "num_deliveries",
    "prefix_hit_tokens",
    "recomputed_tokens",
    "num_preemptions",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_discarded_tokens",
    "num_trimmed_tokens",
    "conversation",
    "turn",
)
_MEASURES: Final = ("tpot_ms", "itl_mean_ms", "itl_max_ms", "placeholder_slot_s", "garbage_slot_s", "held_block_s")


def over_time(folder: Path) -> tuple[dict[str, Any] | None, str | None]:
    """The account of reservations, queues and tokens a step in bins over time, or why there are none."""
    try:
        thinned = thin(folder)
    except _DAMAGED as error:
        return None, f"No pictures over time: {_why(folder, 'steps', error)}."
    states = {name: [short(value) for value in values.tolist()] for name, values in thinned.states.items()}
    tokens = {name: [short(value) for value in values.tolist()] for name, values in thinned.tokens.items()}
    return {
        "edges_s": [short(edge, 9) for edge in thinned.edges_s.tolist()],
        "states": {name: packed(values) for name, values in states.items()},
        "token_edges_s": [short(edge, 9) for edge in thinned.token_edges_s.tolist()],
        "tokens": {name: packed(values) for name, values in tokens.items()},
        "num_steps": thinned.num_steps,
    }, None


def request_rows(folder: Path) -> tuple[dict[str, Any] | None, str | None]:
    """The table of requests by number, packed, or why there is none. Times are whole µs, those of a request's life
    from its arrival on."""
    try:
        return _packed_requests(results.read_table(folder, "requests").sort_values("request", kind="stable")), None
    except _DAMAGED as error:
        return None, f"No requests to look at, and no latencies: {_why(folder, 'requests', error)}."


def _packed_requests(frame: pd.DataFrame) -> dict[str, Any]:
    ids = frame["id"].astype(str).tolist()
    usual = all(name == f"r{index}" for name, index in zip(ids, frame["request"], strict=True))
    columns: dict[str, Any] = {
        "request": numbers(frame["request"]),
        "id": None if usual else ids,
        "status": packed([_STATUSES.index(status) for status in frame["status"]]),
        "arrival_us": numbers(frame["arrival_ns"] // 1000),
    }
    for name in ("first_scheduled", "first_token", "finish"):
        columns[f"{name}_us"] = numbers(_since_arrival(frame, f"{name}_ns"))
    columns |= {name: numbers(frame[name]) for name in _COUNTS}
    columns |= {name: numbers(frame[name], 5) for name in _MEASURES}
    return {"num_rows": len(frame), "statuses": _STATUSES, "columns": columns}


def _why(folder: Path, table: results.Table, error: Exception) -> str:
    """What is wrong with a table, which a run that is made again has whole."""
    if isinstance(error, ResultsError):
        return str(error)
    what = f"it has no column {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
    return f"{results.table_file(folder, table)} is damaged ({what}); speckv run --force makes it again"


def again(folder: Path, watch: Callable[[int], None] | None = None) -> tuple[dict[str, Any] | None, str | None]:
    """What only making the run again tells, or why it cannot: its blocks over time, and when who was preempted."""
    try:
        scenario, _ = recorded_scenario(folder)
        duration_s = float(results.read_json(folder / results.SUMMARY)["duration_s"])
        if duration_s <= 0:
            return None, "No map of blocks: the run has no duration."
        times: NDArray[np.float64] = duration_s * (np.arange(_MAP_COLUMNS) + 0.5) / _MAP_COLUMNS
        found: list[_Watcher] = []

        def observe(simulation: Simulation) -> _Watcher:
            found.append(_Watcher(simulation, np.floor(times * 1e9).astype(np.int64)))
            return found[0]

        repeat(scenario, observe, watch=watch, before_ledger=True)
    except (CannotRepeat, ResultsError) as error:
        return None, f"No map of blocks, and no times of preemptions, since the run cannot be made again: {error}"
    watcher = found[0]
    return {
        "blocks": _blocks(watcher.looker, times),
        "preemptions": {str(request): spans for request, spans in sorted(watcher.spans.items())},
    }, None


class _Watcher:
    """Looks at the blocks, and notes when requests are preempted and admitted again, in µs."""

    def __init__(self, simulation: Simulation, times_ns: NDArray[np.int64]) -> None:
        self.looker = Looker(simulation, times_ns)
        self.spans: dict[int, list[list[int | None]]] = {}
        """By request: [preempted, admitted again or None]."""

    def scheduled(self, now: int, batch: Batch) -> None:
        self.looker.scheduled(now, batch)
        self._preempted(now, batch.preempted)
        if any(batch.resumed):
            for number, resumed in enumerate(batch.resumed):
                if resumed:
                    spans = self.spans.get(batch.requests[batch.num_running_frames + number].index)
                    if spans and spans[-1][1] is None:
                        spans[-1][1] = now // 1000

    def step_ended(self, now: int, batch: Batch) -> None:
        self.looker.step_ended(now, batch)

    def updated(self, now: int, returned: Returned) -> None:
        self.looker.updated(now, returned)

    def interrupted(self, now: int, interruption: Interruption) -> None:
        self.looker.interrupted(now, interruption)
        if interruption.kind == "reset_prefix_cache":
            self._preempted(now, interruption.requests)

    def closed(self, now: int) -> None:
        self.looker.closed(now)

    def _preempted(self, now: int, requests: list[Request]) -> None:
        for request in requests:
            self.spans.setdefault(request.index, []).append([now // 1000, None])


def _blocks(looker: Looker, times: NDArray[np.float64]) -> dict[str, Any]:
    most = float(looker.garbage.max(initial=0.0))
    whole = looker.blocks_per_row == 1 and most <= 255
    unit = 1.0 if whole else max(most, 1e-9) / 255
    return {
        "first_s": float(times[0]),
        "step_s": float(times[1] - times[0]),
        "columns": looker.classes.shape[1],
        "rows": looker.classes.shape[0],
        "num_blocks": looker.num_blocks,
        "block_size": looker.block_size,
        "blocks_per_row": looker.blocks_per_row,
        "names": RESERVATION_CLASSES,
        "classes": runs(looker.classes),
        "garbage": runs(np.round(looker.garbage / unit).astype(np.uint8)),
        "garbage_unit": unit,
        "garbage_most": most,
    }


def _since_arrival(frame: pd.DataFrame, name: str) -> pd.Series[Any]:
    """Whole µs from arrival to this time, missing where it is."""
    return frame[name] // 1000 - frame["arrival_ns"] // 1000
