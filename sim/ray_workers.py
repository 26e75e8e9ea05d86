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
"""How long a cluster may take to say that it is there."""


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
        self._actors: dict[int, Any] = {}
        self._answers: dict[int, Any] = {}
        try:
            if self._ours:
                cpus = {"num_cpus": num_slots, "include_dashboard": False} if address is None else {}
                with _path_for_workers():
                    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, **cpus)
            there = ray.get(ray.remote(_version).remote())
            if there != __version__:
                self.close()
                raise BackendGone(f"the Ray cluster has speckv {there}, and this is {__version__}")
            self.num_slots = num_slots or max(int(ray.cluster_resources().get("CPU", 1)), 1)
        except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
            where = "a Ray cluster here" if address is None else f"the Ray cluster at {address}"
            raise BackendGone(f"cannot use {where}: {' '.join(str(error).split())}") from error
        self._actor_class = ray.remote(num_cpus=1, max_concurrency=2, max_restarts=0)(_Actor)

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
        try:
            ready, _ = self._ray.wait(list(by_answer), num_returns=1, timeout=timeout_s)
        except self._ray.exceptions.RayError as error:
            raise BackendGone(f"the Ray cluster is gone: {_short(error)}") from error
        for answer in ready:
            slot = by_answer[answer]
            try:
                answers.append((slot, self._ray.get(answer)))
            except self._ray.exceptions.RayActorError:
                self.kill(slot)
                self._check_cluster()
                answers.append((slot, "its Ray actor died"))
            except self._ray.exceptions.RayError as error:
                self.kill(slot)
                self._check_cluster()
                answers.append((slot, _short(error)))
        return answers

    def _check_cluster(self) -> None:
        """A worker has died: is it alone? Raises BackendGone if there is no cluster to make another on."""
        until = time.monotonic() + _ANSWER_S
        while True:
            try:
                if self._ray.cluster_resources().get("CPU", 0) >= 1:
                    return
                reason = "no node is left"
            except Exception as error:
                reason = _short(error)
            if time.monotonic() > until:
                raise BackendGone(f"the Ray cluster is gone: {reason}")
            time.sleep(0.5)

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
        for slot in list(self._actors):
            self.kill(slot)
        if self._ours:
            self._ray.shutdown()


class _Actor:
    """What a slot runs."""

    def __init__(self) -> None:
        self._began: float | None = None

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
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise BackendGone(f"cannot use the Ray cluster at {address}: {error}") from error


def _version() -> str:
    return __version__


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
