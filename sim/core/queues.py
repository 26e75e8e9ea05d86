"""The waiting queue: first come first served, or by priority.

Knows requests' arrival, priority and id; nothing of why they wait.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from sim.core.request import Request


class WaitingQueue(Protocol):
    """Requests that wait to be admitted."""

    def add(self, request: Request) -> None:
        """A new request joins."""

    def put_back(self, request: Request) -> None:
        """A preempted request, or one that was passed over, returns to the head."""

    def peek(self) -> Request:
        """The next one, which stays."""

    def pop(self) -> Request:
        """The next one, which leaves."""

    def remove(self, request: Request) -> None:
        """One leaves from wherever it stands."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FcfsQueue:
    """In order of arrival; the preempted go to the head."""

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def put_back(self, request: Request) -> None:
        self._requests.appendleft(request)

    def peek(self) -> Request:
        return self._requests[0]

    def pop(self) -> Request:
        return self._requests.popleft()

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


class PriorityQueue:
    """By (priority, arrival, id as a string), the smallest first. There is no head to return to."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, str, Request]] = []

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.priority, request.arrival, request.id, request))

    def put_back(self, request: Request) -> None:
        self.add(request)

    def peek(self) -> Request:
        return self._heap[0][3]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[3]

    def remove(self, request: Request) -> None:
        self._heap = [entry for entry in self._heap if entry[3] is not request]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (entry[3] for entry in sorted(self._heap, key=lambda entry: entry[:3]))
