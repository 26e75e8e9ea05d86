"""An open loop: sessions start at times that do not depend on how they are served.

Knows: sessions and an arrival process. Must not know: the server. (The contract is `Workload` in `spec`.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workloads.arrivals import Arrivals, arrival_times_ns
from workloads.sessions import Sessions
from workloads.spec import RequestSpec


@dataclass(frozen=True)
class OpenLoop:
    """Session s starts at arrival s of the process. A workload without state."""

    sessions: Sessions
    process: Arrivals
    seed: int

    @property
    def num_requests(self) -> int:
        """All requests of all sessions."""
        return self.sessions.num_requests

    def arrivals(self) -> Iterator[RequestSpec]:
        """The first request of every session, made as they are asked for."""
        times = arrival_times_ns(self.process, self.seed, self.sessions.num_sessions)
        for opening, arrival_ns in zip(self.sessions.openings(), times, strict=True):
            yield opening.at(arrival_ns)

    def after(self, spec: RequestSpec, finish_ns: int) -> Sequence[RequestSpec]:
        """The session's next request, if it has one."""
        following = self.sessions.follow(spec, finish_ns)
        return () if following is None else (following,)
