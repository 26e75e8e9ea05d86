"""The tables of a run, streamed to files row by row: one of steps or of windows of time, one of requests.

Told records, and shown two things that records do not say: the ledger's accounts and how many requests run and wait.
Knows file formats; must not know what the figures mean. Memory holds at most `ROWS` rows a table. The same rows give
the same bytes: nothing of the time or the machine goes into a file.

Columns are made from buffers, since pyarrow imports pandas for any other conversion, which takes a third of a second.
"""

from __future__ import annotations

import csv
from array import array
from collections.abc import Sequence, Sized
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Any, Final, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from sim.observers.metrics import REQUEST_COLUMNS, RequestRow
from sim.records import Batch, Interruption, Returned

SCHEMA_VERSION: Final = 1
ROWS = 16_384
"""Rows a row group; a full one is written. No constant, so that tests of the compiled core can have it smaller."""

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
_COUNTS: Final = (
    "num_reqs",
    "num_prefill_reqs",
    "num_tokens",
    "num_prefill_tokens",
    "num_draft_tokens",
    "num_admitted",
    "num_resumed",
    "num_preempted",
    "prefix_hit_tokens",
    "num_spec_tokens",
)
"""What `_counts` tells of a step."""
# In the order in which a step brings them: scheduled, started, ended, updated.
_AS_KNOWN: Final = (
    *_COUNTS,
    "step",
    "scheduled_ns",
    "num_running",
    "num_waiting",
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

# Of a window, in the order in which its steps bring them.
_SUMMED: Final = (*_COUNTS, *_COSTS, "num_accepted_tokens", "num_sampled_tokens", "num_delivered_tokens")
_CONTENT: Final = ("content_valid", "content_garbage", "content_blank")
_LEVELS: Final = (*_RESERVATIONS, *_CONTENT, "held_blocks", "num_running", "num_waiting")
_NOT_OF_WINDOWS: Final = ("step", "scheduled_ns", "started_ns", "ended_ns", "updated_ns", "res_garbage_after_update")
WINDOW_COLUMNS: Final = (
    "window",
    "from_ns",
    "to_ns",
    "num_steps",
    *(name for name in STEP_COLUMNS if name not in _NOT_OF_WINDOWS),
)
"""Columns of the table of windows: those of steps, summed over the `num_steps` steps that were taken back in the window
or, where they are levels, their means over its time, which are floating-point numbers."""


class Accounts(Protocol):
    """What the recorder reads of the ledger: what holds now, and integrals up to the latest record it was told of."""

    block_size: int

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

    def slot_seconds(self) -> dict[str, float]:
        """The integral of `reservations`, under the names of the classes."""

    def content_slot_seconds(self) -> dict[str, float]:
        """The integral of `content`."""


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
        format: TableFormat = "parquet",
        every: int = 1,
        window_ns: int | None = None,
    ) -> None:
        """Opens the files, and replaces what had their names. Raises OSError.

        `scheduler` is asked for the lengths of its two queues only. `every`: the first step has a row and each
        so-manyth from there on; with 0 there is no table of steps, and it must not be told of any. With `window_ns`
        the table is one of windows, and it is `windows` that has to be told.
        """
        self._ledger = ledger
        self._scheduler = scheduler
        self._every = every
        self._steps: _StepTable | None = None
        self.windows: Windows | None = None
        if window_ns is not None:
            self.windows = Windows(folder, ledger, scheduler, window_ns, format)
        elif every:
            self._steps = _StepTable(folder, format, every)
        self._requests = _RequestTable(folder, format)
        self._under_way: dict[int, list[int]] = {}
        """Values by `_AS_KNOWN`, as far as they are known, of the steps launched, not taken back, and to be written."""
        self._left_out = 0
        """Steps still to be launched before the next that is written."""
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
        if self._left_out:
            self._left_out -= 1
            self._num_preempted = 0
            return
        self._left_out = self._every - 1
        row = _counts(batch, self._num_preempted)
        row += (
            batch.number,
            now,
            len(self._scheduler.running),
            len(self._scheduler.waiting),
            self._ledger.held_blocks,
        )
        row += self._ledger.reservations()
        self._under_way[batch.number] = row
        self._num_preempted = 0

    def step_started(self, now: int, batch: Batch, shape: object, cost: Any) -> None:
        """The device begins it, and it is known what it will cost: `cost` is a tuple of the parts but for the total, in
        ns, which it has as an attribute."""
        row = self._under_way.get(batch.number)
        if row is not None:
            row.append(now)
            row += cost
            row.append(cost.total)

    def step_ended(self, now: int, batch: Batch) -> None:
        """The device has ended it."""
        row = self._under_way.get(batch.number)
        if row is not None:
            valid, garbage, blank, *_ = self._ledger.content()
            row += (now, batch.num_accepted_tokens, valid, garbage, blank)

    def updated(self, now: int, returned: Returned) -> None:
        """It has been taken back: its row is complete. Raises OSError."""
        row = self._under_way.pop(returned.batch.number, None)
        if row is not None:
            row += (now, returned.num_sampled_tokens, returned.num_delivered_tokens, self._ledger.garbage)
            assert self._steps is not None
            self._steps.add(row)

    def interrupted(self, now: int, interruption: Interruption) -> None:
        """Preemptions by a reset count with the next step's."""
        if interruption.kind != "abort":
            self._num_preempted += len(interruption.requests)

    def closed(self, now: int) -> None:
        """The run is over, or broke off."""
        if self.windows is not None:
            self.windows.closed(now)

    def close(self) -> None:
        """Write what is left and make the files readable. Raises OSError. Call it however the run ended."""
        try:
            if self._steps is not None:
                self._steps.close()
            if self.windows is not None:
                self.windows.close()
        finally:
            self._requests.close()


class Windows:
    """Writes `steps` into a folder as one row a window of simulated time, by `WINDOW_COLUMNS`.

    An observer, told *before* the ledger: at the first record behind a window's end, the ledger still is as it was at
    that end, and its integrals need only be carried on to there. Where a window ends nothing is looked at but a number.

    Windows are half-open. A step counts in the window in which it is taken back, with all that it brought; what is
    under way when the run stops does not count. The last window ends with the run. Rows are written as windows end.
    """

    def __init__(
        self, folder: Path, ledger: Accounts, scheduler: Queues, window_ns: int, format: TableFormat = "parquet"
    ) -> None:
        """Opens the file, and replaces what had its name. Raises OSError."""
        self._ledger = ledger
        self._scheduler = scheduler
        self._window_ns = window_ns
        self._table = _WindowTable(folder, format, window_ns)
        self._start_ns = 0
        self._end_ns = window_ns
        """Of the window under way."""
        self._now = 0
        """Of the latest record."""
        self._ledger_now = 0
        """Of the latest record that the ledger has been told."""
        self._before = self._integrals(0)
        """The ledger's integrals when the window began, by `_RESERVATIONS` and `_CONTENT`."""
        self._running = 0
        self._waiting = 0
        self._running_ns = 0
        self._waiting_ns = 0
        """Integrals over the window, up to the latest record."""
        self._num_steps = 0
        self._sums = [0] * len(_SUMMED)
        self._under_way: dict[int, list[int]] = {}
        """Values by `_SUMMED`, as far as they are known, of the steps launched and not taken back."""
        self._num_preempted = 0
        """Since the last step that was launched."""

    def arrived(self, now: int, request: object) -> None:
        """The queues have changed."""
        self._pass_time(now)

    def scheduled(self, now: int, batch: Batch) -> None:
        """A step is launched, unless its batch is empty."""
        self._pass_time(now)
        self._ledger_now = now
        self._num_preempted += len(batch.preempted)
        if batch.total_tokens > 0:
            self._under_way[batch.number] = _counts(batch, self._num_preempted)
            self._num_preempted = 0

    def step_started(self, now: int, batch: Batch, shape: object, cost: Any) -> None:
        """The device begins it, and it is known what it will cost."""
        row = self._under_way[batch.number]
        row += cost
        row.append(cost.total)

    def step_ended(self, now: int, batch: Batch) -> None:
        """The device has ended it."""
        self._pass_time(now)
        self._ledger_now = now
        self._under_way[batch.number].append(batch.num_accepted_tokens)

    def updated(self, now: int, returned: Returned) -> None:
        """It has been taken back, and counts."""
        self._pass_time(now)
        self._ledger_now = now
        row = self._under_way.pop(returned.batch.number)
        row += (returned.num_sampled_tokens, returned.num_delivered_tokens)
        sums = self._sums
        for number, value in enumerate(row):
            sums[number] += value
        self._num_steps += 1

    def interrupted(self, now: int, interruption: Interruption) -> None:
        """Preemptions by a reset count with the next step's."""
        self._pass_time(now)
        self._ledger_now = now
        if interruption.kind != "abort":
            self._num_preempted += len(interruption.requests)

    def closed(self, now: int) -> None:
        """The run is over, and with it the window. A second time does nothing."""
        self._pass_time(now)
        if now > self._start_ns or self._num_steps:
            self._end_window(now)
            self._start_ns = now
            self._end_ns = now + self._window_ns

    def close(self) -> None:
        """Write what is left and make the file readable. Raises OSError. Call it however the run ended."""
        self._table.close()

    def _pass_time(self, now: int) -> None:
        """Up to a record: nothing has changed since the one before."""
        while now >= self._end_ns:
            self._end_window(self._end_ns)
            self._start_ns = self._end_ns
            # Windows that nothing happens in are one row together: there may be millions between two requests.
            self._end_ns += max((now - self._end_ns) // self._window_ns, 1) * self._window_ns
        elapsed = now - self._now
        if elapsed:
            self._running_ns += self._running * elapsed
            self._waiting_ns += self._waiting * elapsed
            self._now = now
        self._running = len(self._scheduler.running)
        self._waiting = len(self._scheduler.waiting)

    def _end_window(self, end_ns: int) -> None:
        """Write the row of the window that began where the one before ended."""
        start_ns = self._start_ns
        length_ns = end_ns - start_ns
        after = self._integrals(end_ns)
        means: list[float] = []
        if length_ns:
            elapsed = end_ns - self._now
            self._running_ns += self._running * elapsed
            self._waiting_ns += self._waiting * elapsed
            seconds = length_ns / 1e9
            means += [(total - before) / seconds for total, before in zip(after, self._before, strict=True)]
            means.append(sum(means[len(_RESERVATIONS) :]) / self._ledger.block_size)
            means.append(self._running_ns / length_ns)
            means.append(self._waiting_ns / length_ns)
        else:  # The run ended where the window began: what held there.
            levels = (*self._ledger.reservations(), *self._ledger.content()[: len(_CONTENT)])
            means += [float(level) for level in levels]
            means.append(sum(means[len(_RESERVATIONS) :]) / self._ledger.block_size)
            means.append(float(self._running))
            means.append(float(self._waiting))
        self._table.add([start_ns // self._window_ns, start_ns, end_ns, self._num_steps, *self._sums], means)
        self._now = end_ns
        self._before = after
        self._running_ns = self._waiting_ns = 0
        self._num_steps = 0
        self._sums = [0] * len(_SUMMED)

    def _integrals(self, now: int) -> list[float]:
        """The ledger's integrals up to `now`, in slot-seconds, by `_RESERVATIONS` and `_CONTENT`."""
        seconds = (now - self._ledger_now) / 1e9
        slots = self._ledger.slot_seconds()
        content = self._ledger.content_slot_seconds()
        found: list[float] = []
        for name, level in zip(_RESERVATIONS, self._ledger.reservations(), strict=True):
            found.append(slots[name[4:]] + level * seconds)
        for name, level in zip(_CONTENT, self._ledger.content()[: len(_CONTENT)], strict=True):
            found.append(content[name[8:]] + level * seconds)
        return found


def _counts(batch: Batch, num_preempted: int) -> list[int]:
    """What a schedule that launches a step says of it, by `_COUNTS`."""
    num_drafts = batch.num_draft_tokens
    num_frames = len(batch.frames)
    num_prefills = 0
    prefill_tokens = 0
    if batch.num_chunk_frames or batch.total_tokens - num_drafts != num_frames:
        for frame in batch.frames:
            if not frame.samples or frame.num_tokens != 1 + frame.num_drafts:
                num_prefills += 1
                prefill_tokens += frame.num_tokens
    num_resumed = sum(batch.resumed)
    return [
        num_frames,
        num_prefills,
        batch.total_tokens,
        prefill_tokens,
        num_drafts,
        len(batch.resumed) - num_resumed,
        num_resumed,
        num_preempted,
        batch.hits,
        batch.num_spec_tokens,
    ]


_packed: Final = Struct(f"{len(_AS_KNOWN)}q").pack


class _StepTable:
    """Rows of whole numbers, gathered in one flat array."""

    def __init__(self, folder: Path, format: TableFormat, every: int) -> None:
        schema = pa.schema([pa.field(name, pa.int64(), nullable=False) for name in STEP_COLUMNS])
        self._file = _open(folder, "steps", format, schema, {"speckv.every": str(every)} if every > 1 else {})
        self._flat = array("q")

    def add(self, row: list[int]) -> None:
        flat = self._flat
        flat.frombytes(_packed(*row))  # a quarter of what `extend` takes
        if len(flat) >= ROWS * len(_AS_KNOWN):
            self._flush()

    def _flush(self) -> None:
        if self._flat:
            rows = np.frombuffer(self._flat, dtype=np.int64).reshape(-1, len(_AS_KNOWN))
            self._file.write_numbers([rows[:, position] for position in _POSITIONS])
        self._flat = array("q")

    def close(self) -> None:
        try:
            self._flush()
        finally:
            self._file.close()


class _WindowTable:
    """Rows of whole numbers and of means, gathered in two flat arrays."""

    def __init__(self, folder: Path, format: TableFormat, window_ns: int) -> None:
        schema = pa.schema(
            [pa.field(name, pa.float64() if name in _LEVELS else pa.int64(), nullable=False) for name in WINDOW_COLUMNS]
        )
        self._file = _open(folder, "steps", format, schema, {"speckv.window_ns": str(window_ns)})
        self._numbers = array("q")
        self._means = array("d")

    def add(self, numbers: list[int], means: list[float]) -> None:
        self._numbers.extend(numbers)
        self._means.extend(means)
        if len(self._means) >= ROWS * len(_LEVELS):
            self._flush()

    def _flush(self) -> None:
        if self._numbers:
            whole = ("window", "from_ns", "to_ns", "num_steps", *_SUMMED)
            numbers = np.frombuffer(self._numbers, dtype=np.int64).reshape(-1, len(whole))
            means = np.frombuffer(self._means, dtype=np.float64).reshape(-1, len(_LEVELS))
            columns: dict[str, NDArray[Any]] = {name: numbers[:, place] for place, name in enumerate(whole)}
            columns.update({name: means[:, place] for place, name in enumerate(_LEVELS)})
            self._file.write_numbers([columns[name] for name in WINDOW_COLUMNS])
        self._numbers = array("q")
        self._means = array("d")

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
        self._file = _open(folder, "requests", format, schema, {})
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

    def write_numbers(self, columns: Sequence[NDArray[Any]]) -> None:
        arrays = [_numbers(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))

    def write_rows(self, rows: list[RequestRow]) -> None:
        columns = zip(*rows, strict=True)
        arrays = [_column(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


class _Csv:
    """One CSV file; an empty field stands for what does not apply."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._writer.writerow(schema.names)

    def write_numbers(self, columns: Sequence[NDArray[Any]]) -> None:
        self._writer.writerows(zip(*(column.tolist() for column in columns), strict=True))

    def write_rows(self, rows: list[RequestRow]) -> None:
        self._writer.writerows(rows)

    def close(self) -> None:
        self._file.close()


def _numbers(column: NDArray[Any], kind: pa.DataType, valid: pa.Buffer | None = None) -> pa.Array:
    return pa.Array.from_buffers(kind, len(column), [valid, pa.py_buffer(np.ascontiguousarray(column))])


def _column(values: Sequence[int | float | str | None], kind: pa.DataType) -> pa.Array:
    """A column of a request's table, with nulls for None."""
    if kind != pa.string():
        if values[0] is None and values.count(None) == len(values):
            return pa.nulls(len(values), kind)
        with suppress(TypeError):  # which integers raise for None; numbers with a point become no number
            whole = np.array(values, np.int64 if kind == pa.int64() else np.float64)
            if whole.dtype == np.int64 or not np.isnan(whole).any():
                return _numbers(whole, kind)
    missing = np.fromiter((value is None for value in values), dtype=np.bool_, count=len(values))
    valid = pa.py_buffer(np.packbits(~missing, bitorder="little")) if missing.any() else None
    if kind == pa.string():
        texts = [b"" if value is None else str(value).encode() for value in values]
        ends = np.cumsum([0, *map(len, texts)], dtype=np.int32)
        return pa.Array.from_buffers(kind, len(texts), [valid, pa.py_buffer(ends), pa.py_buffer(b"".join(texts))])
    column = np.array([0 if value is None else value for value in values], np.int64 if kind == pa.int64() else float)
    return _numbers(column, kind, valid)


def _open(folder: Path, table: str, format: TableFormat, schema: pa.Schema, further: dict[str, str]) -> _Parquet | _Csv:
    path = folder / f"{table}.{format}"
    if format == "csv":
        return _Csv(path, schema)
    facts = {"speckv.schema_version": str(SCHEMA_VERSION), "speckv.table": table, **further}
    return _Parquet(path, schema.with_metadata(facts))
