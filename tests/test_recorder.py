"""The tables: which row a step gives, and that files are readable, bounded in memory and the same every time."""

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest

from sim.core.request import Request
from sim.observers import recorder as recorder_module
from sim.observers.ledger import CONTENT_CLASSES, RESERVATION_CLASSES
from sim.observers.metrics import REQUEST_COLUMNS, RequestRow
from sim.observers.recorder import STEP_COLUMNS, WINDOW_COLUMNS, Recorder
from sim.records import Batch, Interruption, Returned
from tests.by_hand import a_frame


class Cost(NamedTuple):
    """Parts as of `sim.models.timing.StepCost`."""

    linear: int = 1
    padding: int = 2
    attention_decode: int = 3
    attention_prefill: int = 4
    allreduce: int = 5
    overhead: int = 6
    drafting: int = 7
    compaction: int = 9
    arithmetic: int = 10
    jitter: int = -1

    @property
    def total(self) -> int:
        return sum(self)


class Ledger:
    """Accounts that a test moves by hand."""

    block_size = 4

    def __init__(self) -> None:
        self.garbage = 0
        self.held_blocks = 0
        self.base = 0

    def reservations(self) -> tuple[int, ...]:
        return tuple(self.base + number for number in range(8))

    def content(self) -> tuple[int, ...]:
        return self.base + 10, self.base + 11, self.base + 12, 99, 99

    def slot_seconds(self) -> dict[str, float]:
        raise AssertionError("only windows ask for integrals")

    content_slot_seconds = slot_seconds


class Scheduler:
    def __init__(self) -> None:
        self.running: list[int] = [1, 2]
        self.waiting: list[int] = [3]


class Blank:
    def block_hash(self, parent: int, index: int) -> int:
        return 0


WHO = [Request(f"r{index}", index, 8, 4, Blank()) for index in range(3)]


def make_batch(number: int, frames: list[tuple[int, int, bool]], resumed: tuple[bool, ...] = ()) -> Batch:
    """Frames are (tokens, of them drafts, samples)."""
    batch = Batch(number, 0, 100)
    for who, (tokens, drafts, samples) in zip(WHO, frames, strict=False):
        batch.frames.append(a_frame(who, tokens, drafts, 0, samples))
    batch.total_tokens = sum(batch.tokens)
    batch.num_draft_tokens = sum(batch.drafts)
    batch.num_chunk_frames = batch.samples.count(False)
    batch.resumed = list(resumed)
    batch.num_running_frames = len(frames) - len(resumed)
    batch.num_spec_tokens = 3
    return batch


def take_back(batch: Batch, accepted: list[int]) -> Returned:
    batch.settle([count + 1 if samples else 0 for count, samples in zip(accepted, batch.samples, strict=True)])
    returned = Returned(batch)
    returned.num_sampled_tokens = returned.num_delivered_tokens = sum(returned.sampled)
    return returned


def drive(folder: Path, format: recorder_module.TableFormat = "parquet") -> None:
    """Two steps that overlap, one of them mixed, with a preemption by a reset between them."""
    ledger = Ledger()
    recorder = Recorder(folder, ledger, Scheduler(), format=format)
    first = make_batch(0, [(4, 3, True), (4, 3, True), (20, 0, False)], resumed=(True,))
    first.hits = 16
    ledger.base, ledger.held_blocks = 100, 5
    recorder.scheduled(10, first)
    recorder.step_started(11, first, None, Cost())
    recorder.interrupted(12, Interruption("reset_prefix_cache", [WHO[0]], [], True))
    recorder.interrupted(12, Interruption("abort", [WHO[0]], [], True))
    empty = make_batch(1, [])
    empty.preempted = [WHO[1]]
    recorder.scheduled(13, empty)
    second = make_batch(2, [(1, 0, True)], resumed=(False,))
    second.preempted = [WHO[2]]
    ledger.base = 200
    recorder.scheduled(14, second)
    returned = take_back(first, [2, 0, 0])
    ledger.base = 300
    recorder.step_ended(20, first)
    recorder.step_started(20, second, None, Cost(linear=8))
    ledger.garbage = 4
    recorder.updated(21, returned)
    returned = take_back(second, [0])
    recorder.step_ended(30, second)
    recorder.updated(31, returned)
    never_ended = make_batch(3, [(1, 0, True)])
    recorder.scheduled(32, never_ended)
    recorder.step_started(33, never_ended, None, Cost())
    row: dict[str, object] = {"request": 5, "id": "r5", "status": "finished", "ttft_ms": 0.1}
    recorder.request_row(tuple(row.get(name) for name, _ in REQUEST_COLUMNS))  # type: ignore[misc]
    recorder.close()


EXPECTED = [
    {
        **{"step": 0, "scheduled_ns": 10, "started_ns": 11, "ended_ns": 20, "updated_ns": 21},
        **{"num_reqs": 3, "num_running": 2, "num_waiting": 1, "num_prefill_reqs": 1},
        **{"num_tokens": 28, "num_prefill_tokens": 20, "num_draft_tokens": 6, "num_accepted_tokens": 2},
        **{"num_sampled_tokens": 4, "num_delivered_tokens": 4, "num_admitted": 0, "num_resumed": 1},
        **{"num_preempted": 0, "prefix_hit_tokens": 16, "num_spec_tokens": 3},
        **{"res_in_flight": 100, "res_placeholder": 101, "res_committed": 102, "res_garbage": 103},
        **{"res_lookahead": 104, "res_slack": 105, "res_cached": 106, "res_free": 107},
        **{"res_garbage_after_update": 4, "content_valid": 310, "content_garbage": 311, "content_blank": 312},
        **{"held_blocks": 5, "cost_linear": 1, "cost_padding": 2, "cost_attention_decode": 3},
        **{
            "cost_attention_prefill": 4,
            "cost_allreduce": 5,
            "cost_overhead": 6,
            "cost_drafting": 7,
            "cost_compaction": 9,
            "cost_arithmetic": 10,
            "cost_jitter": -1,
            "cost_total": 46,
        },
    },
    {
        **{"step": 2, "scheduled_ns": 14, "started_ns": 20, "ended_ns": 30, "updated_ns": 31},
        **{"num_reqs": 1, "num_running": 2, "num_waiting": 1, "num_prefill_reqs": 0},
        **{"num_tokens": 1, "num_prefill_tokens": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0},
        **{"num_sampled_tokens": 1, "num_delivered_tokens": 1, "num_admitted": 1, "num_resumed": 0},
        # One by the reset, one by a schedule that launched nothing, one by its own.
        **{"num_preempted": 3, "prefix_hit_tokens": 0, "num_spec_tokens": 3},
        **{"res_in_flight": 200, "res_placeholder": 201, "res_committed": 202, "res_garbage": 203},
        **{"res_lookahead": 204, "res_slack": 205, "res_cached": 206, "res_free": 207},
        **{"res_garbage_after_update": 4, "content_valid": 310, "content_garbage": 311, "content_blank": 312},
        **{"held_blocks": 5, "cost_linear": 8, "cost_padding": 2, "cost_attention_decode": 3},
        **{
            "cost_attention_prefill": 4,
            "cost_allreduce": 5,
            "cost_overhead": 6,
            "cost_drafting": 7,
            "cost_compaction": 9,
            "cost_arithmetic": 10,
            "cost_jitter": -1,
            "cost_total": 53,
        },
    },
]


def test_a_step_gives_a_row_once_it_was_taken_back(tmp_path: Path) -> None:
    drive(tmp_path)
    table = pq.read_table(tmp_path / "steps.parquet")
    assert tuple(table.column_names) == STEP_COLUMNS
    assert table.to_pylist() == EXPECTED
    assert table.schema.metadata[b"speckv.schema_version"] == b"1"


def test_a_request_row_keeps_its_gaps(tmp_path: Path) -> None:
    drive(tmp_path)
    (row,) = pq.read_table(tmp_path / "requests.parquet").to_pylist()
    assert {name: value for name, value in row.items() if value is not None} == {
        "request": 5,
        "id": "r5",
        "status": "finished",
        "ttft_ms": 0.1,
    }


def test_csv_says_the_same(tmp_path: Path) -> None:
    drive(tmp_path, "csv")
    with (tmp_path / "steps.csv").open(newline="") as file:
        rows = [{name: int(value) for name, value in row.items()} for row in csv.DictReader(file)]
    assert rows == EXPECTED
    with (tmp_path / "requests.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["id"], row["ttft_ms"], row["tpot_ms"]) == ("r5", "0.1", "")


@pytest.mark.parametrize("format", ["parquet", "csv"])
def test_the_same_rows_give_the_same_bytes(tmp_path: Path, format: recorder_module.TableFormat) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        drive(tmp_path / name, format)
    for table in (f"steps.{format}", f"requests.{format}"):
        assert (tmp_path / "one" / table).read_bytes() == (tmp_path / "two" / table).read_bytes()


def test_rows_leave_memory_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "ROWS", 3)
    recorder = Recorder(tmp_path, Ledger(), Scheduler())
    row: RequestRow = tuple(None for _ in REQUEST_COLUMNS)
    for number in range(7):
        step = make_batch(number, [(1, 0, True)])
        recorder.scheduled(number, step)
        recorder.step_started(number, step, None, Cost())
        returned = take_back(step, [0])
        recorder.step_ended(number, step)
        recorder.updated(number, returned)
        recorder.request_row(row)
    recorder.close()
    for table in ("steps", "requests"):
        with pq.ParquetFile(tmp_path / f"{table}.parquet") as file:
            assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [3, 3, 1]
    steps = pq.read_table(tmp_path / "steps.parquet")
    assert np.array_equal(steps.column("step").to_numpy(), np.arange(7))


def test_a_run_without_steps_leaves_readable_tables(tmp_path: Path) -> None:
    Recorder(tmp_path, Ledger(), Scheduler()).close()
    assert pq.read_table(tmp_path / "steps.parquet").num_rows == 0
    assert pq.read_table(tmp_path / "requests.parquet").num_rows == 0


def test_steps_can_be_left_out(tmp_path: Path) -> None:
    Recorder(tmp_path, Ledger(), Scheduler(), every=0).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["requests.parquet"]


class Integrating(Ledger):
    """The same, with the integrals of what a test moves, and a clock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.slot_ns = [0] * 8
        self.content_ns = [0] * 5

    def move(self, now: int, base: int) -> None:
        """What held until now, and what holds from now on."""
        for total, levels in ((self.slot_ns, self.reservations()), (self.content_ns, self.content())):
            for number, level in enumerate(levels):
                total[number] += level * (now - self.now)
        self.now, self.base = now, base

    def slot_seconds(self) -> dict[str, float]:
        return {name: total / 1e9 for name, total in zip(RESERVATION_CLASSES, self.slot_ns, strict=True)}

    def content_slot_seconds(self) -> dict[str, float]:
        return {name: total / 1e9 for name, total in zip(CONTENT_CLASSES, self.content_ns, strict=True)}


def test_a_window_ends_where_nothing_is_told(tmp_path: Path) -> None:
    """Windows of 100 ns. The class in flight is 0 until 30, 10 until 150, 4 until the end at 320:

    70 * 10 / 100 = 7, (50 * 10 + 50 * 4) / 100 = 7, and 4 in the idle third and in the 20 ns of the fourth; the next
    class is one slot more, and so on. Two run, one of them until 150; one waits from 20 to 30.
    """
    ledger, scheduler = Integrating(), Scheduler()
    scheduler.running, scheduler.waiting = [], []
    recorder = Recorder(tmp_path, ledger, scheduler, window_ns=100)
    windows = recorder.windows
    assert windows is not None
    scheduler.waiting = [3]
    windows.arrived(20, WHO[0])
    scheduler.running, scheduler.waiting = [1, 2], []
    step = make_batch(0, [(4, 3, True), (20, 0, False)], resumed=(True, False))
    step.preempted = [WHO[2]]
    windows.scheduled(30, step)
    ledger.move(30, 10)
    windows.step_started(40, step, None, Cost())
    returned = take_back(step, [2, 0])
    scheduler.running = [1]
    windows.step_ended(150, step)
    ledger.move(150, 4)
    windows.updated(150, returned)
    ledger.move(150, 4)
    windows.closed(320)
    recorder.closed(320)
    recorder.close()
    rows = pq.read_table(tmp_path / "steps.parquet").to_pylist()
    assert tuple(rows[0]) == WINDOW_COLUMNS
    assert [(row["window"], row["from_ns"], row["to_ns"], row["num_steps"]) for row in rows] == [
        *((0, 0, 100, 0), (1, 100, 200, 1), (2, 200, 300, 0), (3, 300, 320, 0))
    ]
    assert [row["res_in_flight"] for row in rows] == pytest.approx([7, 7, 4, 4])
    assert [row["res_free"] for row in rows] == pytest.approx([14, 14, 11, 11])
    assert [row["content_garbage"] for row in rows] == pytest.approx([18, 18, 15, 15])
    # Valid, garbage and blank are 10, 11 and 12 above the base: 3 * 7 + 33 slots of held blocks of 4.
    assert [row["held_blocks"] for row in rows] == pytest.approx([13.5, 13.5, 11.25, 11.25])
    assert [row["num_running"] for row in rows] == pytest.approx([1.4, 1.5, 1, 1])
    assert [row["num_waiting"] for row in rows] == pytest.approx([0.1, 0, 0, 0])
    told = (
        *("num_reqs", "num_tokens", "num_prefill_reqs", "num_prefill_tokens", "num_draft_tokens"),
        *("num_accepted_tokens", "num_sampled_tokens", "num_delivered_tokens", "num_admitted", "num_resumed"),
        *("num_preempted", "cost_linear", "cost_jitter", "cost_total"),
    )
    assert [rows[1][name] for name in told] == [2, 24, 1, 20, 3, 2, 3, 3, 1, 1, 1, 1, -1, 46]
    assert all(row[name] == 0 for row in (rows[0], rows[2], rows[3]) for name in told)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        Recorder(tmp_path / "nowhere", Ledger(), Scheduler())
