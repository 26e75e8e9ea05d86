"""The tables of a run, streamed to files row by row: one of steps, one of requests.

Told records, and shown two things that records do not say: the ledger's accounts and how many requests run and wait.
Knows file formats; must not know what the figures mean. Memory holds at most `ROWS` rows a table. The same rows give
the same bytes: nothing of the time or the machine goes into a file.
"""

from __future__ import annotations

import csv
from array import array
from collections.abc import Sized
from operator import attrgetter
from pathlib import Path
from typing import Final, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from sim.observers.metrics import REQUEST_COLUMNS, RequestRow
from sim.records import Batch, Interruption, Returned

SCHEMA_VERSION: Final = 1
ROWS: Final = 16_384
"""Rows a row group; a full one is written."""

TableFormat = Literal["parquet", "csv"]

_RESERVATIONS: Final = (
    "res_in_flight",
    "res_placeholder",
    "res_committed",
    "res_garbage",
    "res_lookahead",
    "res_slack",
    "res_cached",
    "res_free",
)
_COST_PARTS: Final = (
    "linear",
    "padding",
    "attention_decode",
    "attention_prefill",
    "allreduce",
    "overhead",
    "drafting",
    "compaction",
    "arithmetic",
    "jitter",
    "total",
)
_COSTS: Final = tuple(f"cost_{part}" for part in _COST_PARTS)
_costs_of: Final = attrgetter(*_COST_PARTS)
# In the order in which a step brings them: scheduled, started, ended, updated.
_AS_KNOWN: Final = (
    "step",
    "scheduled_ns",
    "num_reqs",
    "num_running",
    "num_waiting",
    "num_prefill_reqs",
    "num_tokens",
    "num_prefill_tokens",
    "num_draft_tokens",
    "num_admitted",
    "num_resumed",
    "num_preempted",
    "prefix_hit_tokens",
    "num_spec_tokens",
    "held_blocks",
    *_RESERVATIONS,
    "started_ns",
    *_COSTS,
    "ended_ns",
    "num_accepted_tokens",
    "content_valid",
    "content_garbage",
    "content_blank",
    "updated_ns",
    "num_sampled_tokens",
    "num_delivered_tokens",
    "res_garbage_after_update",
)
STEP_COLUMNS: Final = (
    "step",
    "scheduled_ns",
    "started_ns",
    "ended_ns",
    "updated_ns",
    "num_reqs",
    "num_running",
    "num_waiting",
    "num_prefill_reqs",
    "num_tokens",
    "num_prefill_tokens",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_sampled_tokens",
    "num_delivered_tokens",
    "num_admitted",
    "num_resumed",
    "num_preempted",
    "prefix_hit_tokens",
    "num_spec_tokens",
    *_RESERVATIONS,
    "res_garbage_after_update",
    "content_valid",
    "content_garbage",
    "content_blank",
    "held_blocks",
    *_COSTS,
)
"""Columns of the table of steps, all whole numbers: ns, tokens, slots (`res_`, `content_`), ns of a step (`cost_`)."""

_POSITIONS: Final = [_AS_KNOWN.index(name) for name in STEP_COLUMNS]


class Accounts(Protocol):
    """What the recorder reads of the ledger."""

    @property
    def garbage(self) -> int:
        """Slots of that class in the account of reservations."""

    @property
    def held_blocks(self) -> int:
        """Blocks that somebody refers to."""

    def reservations(self) -> tuple[int, ...]:
        """Slots in flight, placeholder, committed, garbage, lookahead, slack, cached, free."""

    def content(self) -> tuple[int, ...]:
        """Slots valid, garbage, blank, and others that are not recorded."""


class Queues(Protocol):
    """What the recorder reads of the scheduler: two lengths."""

    @property
    def running(self) -> Sized:
        """The running list."""

    @property
    def waiting(self) -> Sized:
        """The waiting queue."""


class Recorder:
    """Writes `steps` and `requests` into a folder.

    As an observer, told after the ledger, it gathers steps. A step's row is written once it has been taken back, in
    that order; what is under way when the run stops has none. Requests' rows are handed to `request_row`.
    """

    def __init__(
        self,
        folder: Path,
        ledger: Accounts,
        scheduler: Queues,
        *,
        format: TableFormat = "parquet",
        steps: bool = True,
    ) -> None:
        """Opens the files, and replaces what had their names. Raises OSError.

        `scheduler` is asked for the lengths of its two queues only. Without `steps` it must not be told of any.
        """
        self._ledger = ledger
        self._scheduler = scheduler
        self._steps: _StepTable | None = _StepTable(folder, format) if steps else None
        self._requests = _RequestTable(folder, format)
        self._under_way: dict[int, list[int]] = {}
        """Values by `_AS_KNOWN`, as far as they are known, of the steps launched and not taken back."""
        self._num_preempted = 0
        """Since the last step that was launched."""

    def request_row(self, row: RequestRow) -> None:
        """A request's row, by `REQUEST_COLUMNS`. Raises OSError."""
        self._requests.add(row)

    def scheduled(self, now: int, batch: Batch) -> None:
        """A step is launched, unless its batch is empty."""
        self._num_preempted += len(batch.preempted)
        if batch.total_tokens <= 0:
            return
        num_drafts = sum(batch.drafts)
        num_frames = len(batch.requests)
        num_prefills = prefill_tokens = 0
        if batch.total_tokens - num_drafts != num_frames or not all(batch.samples):
            for num_tokens, drafts, samples in zip(batch.tokens, batch.drafts, batch.samples, strict=True):
                if not samples or num_tokens != 1 + drafts:
                    num_prefills += 1
                    prefill_tokens += num_tokens
        num_resumed = sum(batch.resumed)
        self._under_way[batch.number] = [
            batch.number,
            now,
            num_frames,
            len(self._scheduler.running),
            len(self._scheduler.waiting),
            num_prefills,
            batch.total_tokens,
            prefill_tokens,
            num_drafts,
            len(batch.resumed) - num_resumed,
            num_resumed,
            self._num_preempted,
            batch.hits,
            batch.num_spec_tokens,
            self._ledger.held_blocks,
            *self._ledger.reservations(),
        ]
        self._num_preempted = 0

    def step_started(self, now: int, batch: Batch, shape: object, cost: object) -> None:
        """The device begins it, and it is known what it will cost: `cost` has the parts as attributes, in ns."""
        self._under_way[batch.number] += (now, *_costs_of(cost))

    def step_ended(self, now: int, batch: Batch) -> None:
        """The device has ended it."""
        valid, garbage, blank, *_ = self._ledger.content()
        self._under_way[batch.number] += (now, sum(batch.accepted), valid, garbage, blank)

    def updated(self, now: int, returned: Returned) -> None:
        """It has been taken back: its row is complete. Raises OSError."""
        row = self._under_way.pop(returned.batch.number)
        row += (now, sum(returned.sampled), sum(returned.delivered), self._ledger.garbage)
        assert self._steps is not None
        self._steps.add(row)

    def interrupted(self, now: int, interruption: Interruption) -> None:
        """Preemptions by a reset count with the next step's."""
        if interruption.kind != "abort":
            self._num_preempted += len(interruption.requests)

    def close(self) -> None:
        """Write what is left and make the files readable. Raises OSError. Call it however the run ended."""
        try:
            if self._steps is not None:
                self._steps.close()
        finally:
            self._requests.close()


class _StepTable:
    """Rows of whole numbers, gathered in one flat array."""

    def __init__(self, folder: Path, format: TableFormat) -> None:
        schema = pa.schema([pa.field(name, pa.int64(), nullable=False) for name in STEP_COLUMNS])
        self._file = _open(folder, "steps", format, schema)
        self._flat = array("q")

    def add(self, row: list[int]) -> None:
        flat = self._flat
        flat.extend(row)
        if len(flat) >= ROWS * len(_AS_KNOWN):
            self._flush()

    def _flush(self) -> None:
        if self._flat:
            rows = np.frombuffer(self._flat, dtype=np.int64).reshape(-1, len(_AS_KNOWN))
            self._file.write_numbers(rows[:, _POSITIONS])
        self._flat = array("q")

    def close(self) -> None:
        try:
            self._flush()
        finally:
            self._file.close()


class _RequestTable:
    """Rows of several types, gathered as tuples."""

    def __init__(self, folder: Path, format: TableFormat) -> None:
        types = {"int64": pa.int64(), "float64": pa.float64(), "string": pa.string()}
        schema = pa.schema([pa.field(name, types[kind]) for name, kind in REQUEST_COLUMNS])
        self._file = _open(folder, "requests", format, schema)
        self._rows: list[RequestRow] = []

    def add(self, row: RequestRow) -> None:
        self._rows.append(row)
        if len(self._rows) >= ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._file.write_rows(self._rows)
        self._rows = []

    def close(self) -> None:
        try:
            self._flush()
        finally:
            self._file.close()


class _Parquet:
    """One Parquet file; each write is a row group."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema = schema
        self._writer = pq.ParquetWriter(
            path,
            schema,
            version="2.6",
            compression="zstd",
            compression_level=3,
            use_dictionary=[field.name for field in schema if field.name == "status"],
        )

    def write_numbers(self, rows: NDArray[np.int64]) -> None:
        columns = np.ascontiguousarray(rows.T)
        self._writer.write_table(pa.Table.from_arrays([pa.array(column) for column in columns], schema=self._schema))

    def write_rows(self, rows: list[RequestRow]) -> None:
        columns = zip(*rows, strict=True)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


class _Csv:
    """One CSV file; an empty field stands for what does not apply."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._writer.writerow(schema.names)

    def write_numbers(self, rows: NDArray[np.int64]) -> None:
        self._writer.writerows(rows.tolist())

    def write_rows(self, rows: list[RequestRow]) -> None:
        self._writer.writerows(rows)

    def close(self) -> None:
        self._file.close()


def _open(folder: Path, table: str, format: TableFormat, schema: pa.Schema) -> _Parquet | _Csv:
    path = folder / f"{table}.{format}"
    if format == "csv":
        return _Csv(path, schema)
    facts = {"speckv.schema_version": str(SCHEMA_VERSION), "speckv.table": table}
    return _Parquet(path, schema.with_metadata(facts))
