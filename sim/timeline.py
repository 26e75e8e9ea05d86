"""A run as a timeline in the trace-event format that Perfetto and Chrome open.

The run is made again (`sim.resimulate`) and written as it goes, so a long one takes no more memory than a short one.
Knows records, the ledger's accounts and the file format. Three processes:

    engine    the device's steps; the scheduler's time (schedule, update)
    requests  a lane each: the request, and inside of it waiting, running and preempted
    pool      counters in slots: both accounts, by class; and the lengths of the queues

Source of the format: "Trace Event Format", the Chromium project; times are in microseconds.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from sim.build import Simulation
from sim.observers.ledger import CONTENT_CLASSES, RESERVATION_CLASSES
from sim.records import Batch, Interruption, Returned
from sim.resimulate import recorded_scenario, repeat
from sim.whole_files import written_whole

if TYPE_CHECKING:
    from sim.core.request import Request

ENGINE: Final = 1
REQUESTS: Final = 2
POOL: Final = 3
_DEVICE: Final = 1
_SCHEDULER: Final = 2


class Timeline:
    """Writes the events of a run as it is told of it, after the ledger. Ends are written by `closed`."""

    def __init__(self, stream: IO[str], simulation: Simulation, schedule_ns: int, update_ns: int) -> None:
        """`schedule_ns`, `update_ns`: what the scheduler takes before each record of it. The stream is not closed."""
        self._stream = stream
        self._ledger = simulation.ledger
        self._scheduler = simulation.scheduler
        self._schedule_ns = schedule_ns
        self._update_ns = update_ns
        self._open: dict[int, str] = {}
        """State of the requests under way, by index."""
        self._last: dict[str, tuple[int, ...]] = {}
        """What each counter was set to last."""
        stream.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        self._separator = ""
        for process, name in ((ENGINE, "engine"), (REQUESTS, "requests"), (POOL, "pool")):
            self._event("M", process, 0, name="process_name", args={"name": name})
            self._event("M", process, 0, name="process_sort_index", args={"sort_index": process})
        self._event("M", ENGINE, _DEVICE, name="thread_name", args={"name": "device"})
        self._event("M", ENGINE, _SCHEDULER, name="thread_name", args={"name": "scheduler"})

    def arrived(self, now: int, request: Request) -> None:
        """A lane begins, with a wait."""
        spec = getattr(request, "spec", None)
        at = now if spec is None else spec.arrival_ns
        lane = request.index + 1
        self._event("M", REQUESTS, lane, name="thread_name", args={"name": request.id})
        self._event("M", REQUESTS, lane, name="thread_sort_index", args={"sort_index": lane})
        lengths = {"num_prompt_tokens": request.num_prompt_tokens, "max_tokens": request.max_tokens}
        self._event("B", REQUESTS, lane, at, name=request.id, args=lengths)
        self._become(at, request, "waiting")

    def scheduled(self, now: int, batch: Batch) -> None:
        """Preemptions, admissions, and what they leave."""
        self._event(
            "X",
            ENGINE,
            _SCHEDULER,
            now - self._schedule_ns,
            name="schedule",
            dur=self._schedule_ns,
            args={"step": batch.number},
        )
        for request in batch.preempted:
            self._become(now, request, "preempted")
        for number in range(batch.num_running_frames, len(batch.requests)):
            self._become(now, batch.requests[number], "running", {"prefix_hit_tokens": batch.computed[number]})
        self._count_reservations(now)

    def step_started(self, now: int, batch: Batch, shape: object, cost: Any) -> None:
        """A step on the device; what it will cost is known."""
        args = {
            "step": batch.number,
            "num_reqs": len(batch.requests),
            "num_tokens": batch.total_tokens,
            "num_draft_tokens": batch.num_draft_tokens,
            "num_accepted_tokens": batch.num_accepted_tokens,
            **{f"cost_{name}": value for name, value in cost._asdict().items() if value},
        }
        self._event("X", ENGINE, _DEVICE, now, name=f"step {batch.number}", dur=cost.total, args=args)

    def step_ended(self, now: int, batch: Batch) -> None:
        """Memory has changed."""
        self._count(now, "in memory", dict(zip(CONTENT_CLASSES, self._ledger.content(), strict=True)))

    def updated(self, now: int, returned: Returned) -> None:
        """Ends, and what they leave."""
        step = {"step": returned.batch.number}
        self._event("X", ENGINE, _SCHEDULER, now - self._update_ns, name="update", dur=self._update_ns, args=step)
        for request in returned.finished:
            self._end(now, request.index, {"num_output_tokens": request.num_output_tokens})
        self._count_reservations(now)

    def interrupted(self, now: int, interruption: Interruption) -> None:
        """An abort or a reset."""
        self._event("i", ENGINE, _SCHEDULER, now, name=interruption.kind, s="p")
        for request in interruption.requests:
            if interruption.kind == "abort":
                self._end(now, request.index, {"aborted": True})
            else:
                self._become(now, request, "preempted")
        self._count_reservations(now)

    def closed(self, now: int) -> None:
        """The lanes that are open end here, and the file is complete."""
        for index in list(self._open):
            self._end(now, index, {"unfinished": True})
        self._stream.write("\n]}\n")

    def _become(self, now: int, request: Request, state: str, args: dict[str, Any] | None = None) -> None:
        lane = request.index + 1
        if request.index in self._open:
            self._event("E", REQUESTS, lane, now)
        self._open[request.index] = state
        self._event("B", REQUESTS, lane, now, name=state, **({} if args is None else {"args": args}))

    def _end(self, now: int, index: int, args: dict[str, Any]) -> None:
        if self._open.pop(index, None) is not None:
            self._event("E", REQUESTS, index + 1, now)
            self._event("E", REQUESTS, index + 1, now, args=args)

    def _count_reservations(self, now: int) -> None:
        self._count(now, "reserved", dict(zip(RESERVATION_CLASSES, self._ledger.reservations(), strict=True)))
        queues = {"running": len(self._scheduler.running), "waiting": len(self._scheduler.waiting)}
        self._count(now, "queues", queues)

    def _count(self, now: int, name: str, values: dict[str, int]) -> None:
        now_values = tuple(values.values())
        if self._last.get(name) != now_values:
            self._last[name] = now_values
            self._event("C", POOL, 0, now, name=name, args=values)

    def _event(self, phase: str, process: int, thread: int, at: int | None = None, **fields: Any) -> None:
        """One event; `at` and `dur` are ns."""
        event: dict[str, Any] = {"ph": phase, "pid": process, "tid": thread}
        if at is not None:
            event["ts"] = at / 1000
        if "dur" in fields:
            fields["dur"] /= 1000
        event.update(fields)
        self._stream.write(f"{self._separator}{json.dumps(event, separators=(',', ':'))}")
        self._separator = ",\n"


def write_timeline(folder: Path, path: Path, watch: Callable[[int], None] | None = None) -> None:
    """Make the run of a folder of results again, and write its timeline; gzipped if the name ends in `.gz`.

    Raises:
        ResultsError: `folder` is no folder of results.
        CannotRepeat: the run cannot be made again as it was.
        OSError: the file cannot be written.
    """
    scenario, _ = recorded_scenario(folder)
    schedule_ns, update_ns = (round(ms * 1e6) for ms in (scenario.timing.schedule_ms, scenario.timing.update_ms))
    with written_whole(path) as partial, _opened(partial, path.suffix == ".gz") as stream:
        repeat(scenario, lambda simulation: Timeline(stream, simulation, schedule_ns, update_ns), watch=watch)


def _opened(path: Path, zipped: bool) -> IO[str]:
    if not zipped:
        return path.open("w", encoding="ascii")
    # Without a name and a time in it, so that the same run gives the same bytes.
    return io.TextIOWrapper(gzip.GzipFile(path, "wb", compresslevel=6, mtime=0), encoding="ascii")
