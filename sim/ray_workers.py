"""Workers on a Ray cluster: an actor a slot, which can be killed and made anew as a local process can.

Knows Ray, which is the extra `ray`; must not know what a sweep is. Every node needs speckv and the files that the
scenarios read, in the same places; results are written where the sweep was started.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from sim import __version__
from sim.outcome import Job, Outcome, measure
from sim.workers import BackendGone, Usage, resident_mb

_ANSWER_S: Final = 10.0
"""How long a cluster may take to say that it is there, or be out of reach before it counts as gone."""
_LOOK_S: Final = 2.0
"""How often is looked whether it still is."""
_TOKENS: Final = (
    "if it asks for a token, as Ray does from 2.59 on, RAY_AUTH_MODE=token must be set here, and the token be the "
    "cluster's; if it does not, RAY_AUTH_MODE=disabled"
)


class RayWorkers:
    """A slot is an actor with one CPU and, so that it can be asked for its memory while it runs, two threads."""

    def __init__(self, num_slots: int | None, address: str | None) -> None:
        """Join the cluster at `address`, or start one on this machine. `num_slots`: by default its CPUs.

        Raises BackendGone: Ray is not installed, or the cluster cannot be reached.
        """
        try:
            ray: Any = import_module("ray")
        except ImportError:
            raise BackendGone("backend ray needs Ray: pip install 'speckv[ray]'") from None
        self._ray = ray
        _check_reachable(address)
        self._ours = not ray.is_initialized()
        self._gone = False
        self._actors: dict[int, Any] = {}
        self._answers: dict[int, Any] = {}
        self._actor_class = ray.remote(num_cpus=1, max_concurrency=2, max_restarts=0)(_Actor)
        where = "a Ray cluster here" if address is None else f"the Ray cluster at {address}"
        hint = "" if address is None else f" ({_TOKENS})"
        try:
            if self._ours:
                cpus = {"num_cpus": num_slots, "include_dashboard": False} if address is None else {}
                with _path_for_workers():
                    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, **cpus)
            self._place: str | None = ray.get_runtime_context().gcs_address
            self._seen = self._looked = time.monotonic()
            actor = self._actors[0] = self._actor_class.remote()
            there = ray.get(actor.version.remote())
            self.num_slots = num_slots or max(int(ray.cluster_resources().get("CPU", 1)), 1)
        except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
            self.close()
            raise BackendGone(f"cannot use {where}: {_short(error)}{hint}") from error
        if there != __version__:
            self.close()
            raise BackendGone(f"{where} has speckv {there}, and this is {__version__}")

    def submit(self, slot: int, job: Job) -> None:
        """Give an idle slot a run; starts its actor if there is none."""
        try:
            if slot not in self._actors:
                self._actors[slot] = self._actor_class.remote()
            self._answers[slot] = self._actors[slot].run.remote(job)
        except self._ray.exceptions.RayError as error:
            raise BackendGone(f"the Ray cluster does not take work any more: {_short(error)}") from error

    def wait(self, slots: Sequence[int], timeout_s: float) -> list[tuple[int, Outcome | str]]:
        """Slots that have an answer or whose actor has died."""
        by_answer = {self._answers[slot]: slot for slot in slots}
        answers: list[tuple[int, Outcome | str]] = []
        self._look()
        try:
            ready, _ = self._ray.wait(list(by_answer), num_returns=1, timeout=timeout_s)
        except (ConnectionError, self._ray.exceptions.RayError) as error:
            raise BackendGone(f"the Ray cluster is gone: {_short(error)}") from error
        for answer in ready:
            slot = by_answer[answer]
            try:
                answers.append((slot, self._ray.get(answer)))
            except self._ray.exceptions.RayError as error:
                self.kill(slot)
                self._check_cluster()
                answers.append((slot, _short(error)))
        return answers

    def _check_cluster(self) -> None:
        """A worker has died: is it alone? Raises BackendGone if there is no cluster to make another on."""
        until = time.monotonic() + _ANSWER_S
        while True:
            self._look(now=True)
            try:
                if self._ray.cluster_resources().get("CPU", 0) >= 1:
                    return
                reason = "no node is left"
            except Exception as error:
                reason = _short(error)
            if time.monotonic() > until:
                raise BackendGone(f"the Ray cluster is gone: {reason}")
            time.sleep(0.5)

    def _look(self, now: bool = False) -> None:
        """Whether the cluster's head can still be reached. Raises BackendGone if it could not for some time.

        Ray by itself waits for a minute, and then ends the whole process.
        """
        if self._place is None or (time.monotonic() - self._looked < _LOOK_S and not now):
            return
        while not _listens(self._place):
            if time.monotonic() - self._seen > _ANSWER_S:
                self._gone = True
                raise BackendGone(f"the Ray cluster is gone: nothing answers at {self._place} any more")
            time.sleep(0.5)
        self._seen = self._looked = time.monotonic()

    def usage(self, slot: int) -> Usage:
        """As the slot's process tells it, where it answers."""
        try:
            usage: Usage = self._ray.get(self._actors[slot].usage.remote(), timeout=1)
        except (self._ray.exceptions.RayError, TimeoutError):
            return Usage(0.0, None)
        return usage

    def kill(self, slot: int) -> None:
        """End the slot's actor at once."""
        actor = self._actors.pop(slot, None)
        if actor is not None:
            try:
                self._ray.kill(actor)
            except self._ray.exceptions.RayError:
                pass

    def close(self) -> None:
        """End all actors, and the cluster if it was started here."""
        if not self._gone:  # Of a cluster that is gone Ray waits a minute for each answer.
            for slot in list(self._actors):
                self.kill(slot)
        if self._ours:
            self._ray.shutdown()


class _Actor:
    """What a slot runs."""

    def __init__(self) -> None:
        self._began: float | None = None

    def version(self) -> str:
        """Of its speckv."""
        return __version__

    def run(self, job: Job) -> Outcome:
        """One run. Ray gives it a thread of its own."""
        self._began = time.monotonic()
        try:
            return measure(job)
        finally:
            self._began = None

    def usage(self) -> Usage:
        """Asked in the other thread."""
        began = self._began
        return Usage(0.0 if began is None else time.monotonic() - began, resident_mb("self"))


def _check_reachable(address: str | None) -> None:
    """Ray itself tries for minutes. Raises BackendGone if nothing listens at `host:port`."""
    place = (address or "").removeprefix("ray://")
    if place.rpartition(":")[2].isdigit() and not _listens(place):
        raise BackendGone(f"cannot use the Ray cluster at {address}: nothing answers there")


def _listens(place: str) -> bool:
    """Whether something can be connected to at `host:port`."""
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_LOOK_S).close()
    except (OSError, OverflowError):
        return False
    return True


@contextmanager
def _path_for_workers() -> Iterator[None]:
    """A cluster that is started here runs the speckv that starts it."""
    before = os.environ.get("PYTHONPATH")
    root = str(Path(__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = root if before is None else os.pathsep.join((root, before))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
