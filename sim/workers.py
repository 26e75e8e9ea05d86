"""Worker processes that run scenarios, one at a time each, and can be killed: a slot is a process that is restarted.

Knows processes, limits and answers; must not know what a sweep is or where results are written. A worker writes no
file that stays: whoever started it does. It ends with its parent, even if that is killed.

Workers are fresh interpreters and not copies made by `multiprocessing`, so a script or a notebook that starts them
needs no `if __name__ == "__main__"`, and nothing of the parent's state gets into a run.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from sim.outcome import Job, Outcome, measure

TRIES: Final = 3
"""How often a run is tried whose worker dies without having been killed for a limit."""
_LOOK_S: Final = 0.05
"""How often limits are looked at."""
_BEGUN: Final = "begun"
_THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class BackendGone(Exception):
    """There is nothing left to run on. The message says what happened."""


class Usage(NamedTuple):
    """What a run has taken."""

    time_s: float
    """Wall time since it began; 0 while its worker is still starting."""
    memory_mb: float | None
    """Resident memory of the worker in MB of 10^6 bytes; None where it cannot be told."""


class Backend(Protocol):
    """Where runs are made: slots of one worker each, numbered from 0."""

    num_slots: int

    def submit(self, slot: int, job: Job) -> None:
        """Give an idle slot a run; starts its worker if there is none. Raises BackendGone."""

    def wait(self, slots: Sequence[int], timeout_s: float) -> list[tuple[int, Outcome | str]]:
        """Slots among these that have an answer, or whose worker has died (then why). Waits at most so long."""

    def usage(self, slot: int) -> Usage:
        """What the slot's run has taken so far."""

    def kill(self, slot: int) -> None:
        """End the slot's worker at once."""

    def close(self) -> None:
        """End all workers."""


@dataclass(frozen=True)
class Limits:
    """What a run may take; None: no limit."""

    time_s: float | None = None
    memory_mb: float | None = None


def run_jobs(
    backend: Backend,
    jobs: Iterable[Job],
    limits: Limits = Limits(),
    tell: Callable[[int], None] | None = None,
) -> Iterator[tuple[Job, Outcome]]:
    """Run all jobs and yield each with its outcome as it ends, in no certain order.

    `jobs` is drawn from as slots come free, and one ahead, so that no worker waits while its answer is dealt with.
    `tell` is called with the number of runs under way, a few times a second. A run beyond its limits is ended by
    killing its worker; one whose worker dies by itself is tried `TRIES` times. Raises BackendGone, once everything that
    had ended has been yielded; the workers live on until `backend.close()`.
    """
    waiting = iter(jobs)
    ahead: Job | None = None
    again: list[Job] = []
    tried: dict[int, int] = {}
    running: dict[int, Job] = {}
    ended: list[tuple[Job, Outcome]] = []
    idle = list(range(backend.num_slots - 1, -1, -1))
    limited = limits.time_s is not None or limits.memory_mb is not None
    while True:
        gone: BackendGone | None = None
        while idle and gone is None:
            if again:
                job = again.pop()
            else:
                drawn, ahead = (next(waiting, None) if ahead is None else ahead), None
                if drawn is None:
                    break
                job = drawn
            try:
                backend.submit(idle[-1], job)
                running[idle.pop()] = job
            except BackendGone as error:
                gone = error
        yield from ended
        ended.clear()
        if gone is not None:
            raise gone
        if ahead is None:
            ahead = next(waiting, None)
        if tell is not None:
            tell(len(running))
        if not running:
            return
        for slot, answer in backend.wait(list(running), _LOOK_S if limited else 0.25):
            job = running.pop(slot)
            idle.append(slot)
            if isinstance(answer, Outcome):
                ended.append((job, answer))
                continue
            tried[job.number] = tried.get(job.number, 0) + 1
            if tried[job.number] < TRIES:
                again.append(job)
            else:
                ended.append((job, Outcome("crashed", f"the worker died {TRIES} times, last: {answer}")))
        for slot, job in list(running.items()) if limited else ():
            over = _over(backend.usage(slot), limits)
            if over is not None:
                backend.kill(slot)
                del running[slot]
                idle.append(slot)
                ended.append((job, over))


def _over(usage: Usage, limits: Limits) -> Outcome | None:
    if limits.time_s is not None and usage.time_s > limits.time_s:
        return Outcome("time_limit", f"took more than {limits.time_s:g} s")
    if limits.memory_mb is not None and usage.memory_mb is not None and usage.memory_mb > limits.memory_mb:
        return Outcome("memory_limit", f"took more than {limits.memory_mb:g} MB")
    return None


class Inline:
    """The calling process itself, a run at a time: no start-up, and no limits."""

    num_slots = 1

    def __init__(self) -> None:
        self._job: Job | None = None

    def submit(self, slot: int, job: Job) -> None:
        """Remember it."""
        self._job = job

    def wait(self, slots: Sequence[int], timeout_s: float) -> list[tuple[int, Outcome | str]]:
        """Run it."""
        assert self._job is not None
        return [(0, measure(self._job))]

    def usage(self, slot: int) -> Usage:
        """Not looked at."""
        return Usage(0.0, None)

    def kill(self, slot: int) -> None:
        """Cannot be done."""

    def close(self) -> None:
        """Nothing to end."""


class LocalWorkers:
    """Processes on this machine."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._workers: dict[int, _Worker] = {}

    def submit(self, slot: int, job: Job) -> None:
        """Give an idle slot a run; starts its worker if there is none, or if it died while idle."""
        worker = self._workers.get(slot)
        if worker is None or worker.process.poll() is not None:
            self.kill(slot)
            try:
                worker = self._workers[slot] = _Worker()
            except OSError as error:
                raise BackendGone(f"cannot start a worker process: {error.strerror or error}") from error
        worker.send(job)

    def wait(self, slots: Sequence[int], timeout_s: float) -> list[tuple[int, Outcome | str]]:
        """Slots that have an answer or whose worker has died."""
        by_connection = {self._workers[slot].connection: slot for slot in slots}
        answers: list[tuple[int, Outcome | str]] = []
        for ready in wait(list(by_connection), timeout_s):
            slot = by_connection[ready]  # type: ignore[index]
            try:
                answer = pickle.loads(self._workers[slot].connection.recv_bytes())
            except (EOFError, OSError, pickle.UnpicklingError):
                answers.append((slot, self._post_mortem(slot)))
                continue
            if answer == _BEGUN:
                self._workers[slot].began = time.monotonic()
            else:
                answers.append((slot, answer))
        return answers

    def _post_mortem(self, slot: int) -> str:
        process = self._workers[slot].process
        try:
            code = process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = None
        self.kill(slot)
        if code is None:
            return "it stopped answering"
        if code >= 0:
            return f"it ended with code {code}"
        hint = ", as where memory runs out" if -code == signal.SIGKILL else ""
        return f"signal {signal.Signals(-code).name}{hint}"

    def usage(self, slot: int) -> Usage:
        """Time since the worker said that it had begun, and resident memory as Linux tells it."""
        worker = self._workers[slot]
        time_s = 0.0 if worker.began is None else time.monotonic() - worker.began
        return Usage(time_s, resident_mb(worker.process.pid))

    def kill(self, slot: int) -> None:
        """End the slot's worker at once."""
        worker = self._workers.pop(slot, None)
        if worker is not None:
            worker.end()

    def close(self) -> None:
        """End all workers."""
        for slot in list(self._workers):
            self.kill(slot)


class _Worker:
    """A fresh interpreter, a connection to it, and a pipe that tells it when this process ends."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parent.parent)
        code = f"import sys; sys.path.insert(0, {root!r}); from sim.workers import serve; serve({theirs.fileno()})"
        environment = {**dict.fromkeys(_THREADS, "1"), **os.environ}
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,  # Ctrl-C is for the parent, which then ends its workers.
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        self.began: float | None = None
        """When the run under way began."""

    def send(self, job: Job) -> None:
        self.began = None
        try:
            self.connection.send_bytes(pickle.dumps(job))
        except OSError:
            pass  # It has just died; `wait` finds its connection closed.

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()
        assert self.process.stdin is not None
        self.process.stdin.close()


def serve(descriptor: int) -> None:
    """A worker's life: take a job, answer with its outcome, until the parent is gone."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    connection: Connection[Any, Any] = Connection(descriptor)
    while True:
        try:
            job = pickle.loads(connection.recv_bytes())
            connection.send_bytes(pickle.dumps(_BEGUN))
            connection.send_bytes(pickle.dumps(measure(job)))
        except (EOFError, OSError):
            return


def _end_with_parent() -> None:
    os.read(0, 1)  # Nothing is ever written: it returns when the other end is closed.
    os._exit(1)


def resident_mb(pid: int | str) -> float | None:
    """Resident memory of a process, MB of 10^6 bytes; None if it has ended or the system is not Linux."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def num_cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(len(os.sched_getaffinity(0)), 1)
    return os.cpu_count() or 1
