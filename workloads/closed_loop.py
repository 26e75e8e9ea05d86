"""A closed loop: a fixed number of sessions at a time; the next starts when one ends.

Knows: sessions and their ends. Must not know: the server. (The contract is `Workload` in `spec`.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from workloads.sessions import Opening, Sessions
from workloads.spec import RequestSpec


class ClosedLoop:
    """`concurrency` sessions under way at a time, the first of them from time 0.

    Sessions start in order of their numbers, so the k-th to start is the same whatever finishes when. The state is how
    many have started; `arrivals` begins anew. Raises ValueError for a concurrency below 1.
    """

    def __init__(self, sessions: Sessions, concurrency: int) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency must be 1 or more, got {concurrency}")
        self.sessions = sessions
        self.concurrency = concurrency
        self._waiting: Iterator[Opening] = sessions.openings()

    @property
    def num_requests(self) -> int:
        """All requests of all sessions."""
        return self.sessions.num_requests

    def arrivals(self) -> Iterator[RequestSpec]:
        """The sessions of time 0: `concurrency` of them, or all where there are fewer."""
        self._waiting = self.sessions.openings()
        return iter([opening.at(0) for opening in islice(self._waiting, self.concurrency)])

    def after(self, spec: RequestSpec, finish_ns: int) -> Sequence[RequestSpec]:
        """The session's next request or, where it has ended, the start of the next session at `finish_ns`."""
        following = self.sessions.follow(spec, finish_ns)
        if following is not None:
            return (following,)
        opening = next(self._waiting, None)
        return () if opening is None else (opening.at(finish_ns),)
