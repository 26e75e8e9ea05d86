"""Several workloads at once on one server: merged in order of time, with nothing in common but the server.

Knows: workloads and how content is named. Must not know: where the workloads come from, or what serves them.

Tenant k of n has the requests offset[k] + 0, 1, 2, ..., where offset counts the requests of the tenants before it, and
its conversations, shared prefixes and named blocks c become c n + k. So all numbers are disjoint, and those of a tenant
do not depend on how the others are served. Worked example, two tenants of 2 and 1 requests, each with shared prefix 0:

    tenant 0   request 0   (2, 0, 100) (1, 0, 10)       shared_stream(0) and prompt_stream(0)
               request 1   (2, 0, 100) (5, 0, 10)
    tenant 1   request 2   (6, 0, 100) (9, 0, 10)       shared_stream(0 * 2 + 1) and prompt_stream(2)
"""

from __future__ import annotations

import hashlib
import heapq
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from workloads.spec import RequestSpec, Segment, Workload


def tenant_seed(seed: int, tenant: int) -> int:
    """A seed of the tenant's own, 63 bits: draws of two tenants do not depend on each other."""
    digest = hashlib.blake2b(f"{seed}:tenant {tenant}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Tenants:
    """The tenants' workloads as one. Raises ValueError for none, and where one does not say its num_requests.

    Requests that arrive at the same time come in order of tenants.
    """

    def __init__(self, tenants: Sequence[Workload]) -> None:
        counts: list[int] = []
        for number, tenant in enumerate(tenants):
            if tenant.num_requests is None:
                raise ValueError(f"tenant {number} does not say how many requests it has")
            counts.append(tenant.num_requests)
        if not counts:
            raise ValueError("there must be a tenant")
        self._tenants = list(tenants)
        self._offsets = [0, *accumulate(counts)]

    @property
    def num_requests(self) -> int:
        """Of all tenants."""
        return self._offsets[-1]

    def tenant_of(self, index: int) -> int:
        """Whose request this is. Raises IndexError for a number that is nobody's."""
        if not 0 <= index < self.num_requests:
            raise IndexError(f"there are {self.num_requests} requests, from 0; got {index}")
        return bisect_right(self._offsets, index) - 1

    def arrivals(self) -> Iterator[RequestSpec]:
        """All tenants' requests in order of time."""
        streams = [map(self._given(number), tenant.arrivals()) for number, tenant in enumerate(self._tenants)]
        return heapq.merge(*streams, key=_arrival_ns)

    def after(self, spec: RequestSpec, finish_ns: int) -> Sequence[RequestSpec]:
        """What the end of a tenant's request sets off among its own."""
        number = self.tenant_of(spec.index)
        own = self._own(number, spec)
        given = self._given(number)
        return [given(following) for following in self._tenants[number].after(own, finish_ns)]

    def _given(self, number: int) -> _Renumbered:
        return _Renumbered(self._offsets[number], number, len(self._tenants))

    def _own(self, number: int, spec: RequestSpec) -> RequestSpec:
        return self._given(number).back(spec)


def _arrival_ns(spec: RequestSpec) -> int:
    return spec.arrival_ns


class _Renumbered:
    """From a tenant's own numbers to those of the whole, and back."""

    def __init__(self, offset: int, number: int, of: int) -> None:
        self._offset = offset
        self._number = number
        self._of = of

    def __call__(self, spec: RequestSpec) -> RequestSpec:
        conversation = spec.conversation if spec.conversation < 0 else spec.conversation * self._of + self._number
        return self._copy(spec, spec.index + self._offset, conversation, [self._there(*part) for part in spec.prompt])

    def back(self, spec: RequestSpec) -> RequestSpec:
        """The inverse of calling."""
        conversation = spec.conversation if spec.conversation < 0 else spec.conversation // self._of
        return self._copy(spec, spec.index - self._offset, conversation, [self._here(*part) for part in spec.prompt])

    def _there(self, stream: int, start: int, count: int) -> Segment:
        number, kind = divmod(stream, 4)
        number = number + self._offset if kind < 2 else number * self._of + self._number
        return 4 * number + kind, start, count

    def _here(self, stream: int, start: int, count: int) -> Segment:
        number, kind = divmod(stream, 4)
        number = number - self._offset if kind < 2 else number // self._of
        return 4 * number + kind, start, count

    def _copy(self, spec: RequestSpec, index: int, conversation: int, prompt: Sequence[Segment]) -> RequestSpec:
        return RequestSpec(
            index,
            spec.arrival_ns,
            tuple(prompt),
            spec.num_prompt_tokens,
            spec.max_tokens,
            spec.priority,
            conversation,
            spec.turn,
        )
