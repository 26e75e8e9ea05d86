"""Sessions: what a user asks for, apart from when. A session is one request, or a conversation of several.

Knows: lengths, prefixes and draws. Must not know: arrival processes; those are `open_loop` and `closed_loop`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from workloads.lengths import Lengths
from workloads.prompts import SharedPrefixes
from workloads.spec import RequestSpec, Segment, prompt_stream
from workloads.streams import uniforms

CHUNK = 16_384
"""How many sessions are drawn at once; bounds the memory and changes no value."""


@dataclass(slots=True, unsafe_hash=True)  # not `frozen`, as `RequestSpec`
class Opening:
    """The first request of a session, without its arrival. Fields as in `RequestSpec`."""

    index: int
    prompt: tuple[Segment, ...]
    num_prompt_tokens: int
    max_tokens: int
    conversation: int

    def at(self, arrival_ns: int) -> RequestSpec:
        """The request, arriving at `arrival_ns`."""
        return RequestSpec(
            self.index, arrival_ns, self.prompt, self.num_prompt_tokens, self.max_tokens, 0, self.conversation, 0
        )


class Sessions(Protocol):
    """A numbered population of sessions. Its methods are pure: they may be called in any order and again."""

    @property
    def num_sessions(self) -> int:
        """How many sessions there are."""
        ...

    @property
    def num_requests(self) -> int:
        """How many requests they make in all."""
        ...

    def openings(self) -> Iterator[Opening]:
        """The first request of each session, in order of sessions."""
        ...

    def follow(self, spec: RequestSpec, finish_ns: int) -> RequestSpec | None:
        """The session's next request once `spec` has finished at `finish_ns`; None where the session ends."""
        ...


@dataclass(frozen=True)
class SingleRequests:
    """Independent requests: request i has its own prompt tokens, perhaps behind a shared prefix.

    Raises ValueError for fewer than one request.
    """

    seed: int
    num_requests: int
    prompt_lengths: Lengths
    output_lengths: Lengths
    shared: SharedPrefixes | None = None

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise ValueError(f"num_requests must be 1 or more, got {self.num_requests}")

    @property
    def num_sessions(self) -> int:
        """One session a request."""
        return self.num_requests

    def openings(self) -> Iterator[Opening]:
        """See `Sessions`."""
        for first in range(0, self.num_requests, CHUNK):
            count = min(CHUNK, self.num_requests - first)
            requests = np.arange(first, first + count, dtype=np.int64)
            own_tokens = self.prompt_lengths.at(uniforms(self.seed, "prompt", requests, 0, 1)).tolist()
            max_tokens = self.output_lengths.at(uniforms(self.seed, "output", requests, 0, 1)).tolist()
            prefixes = [None] * count if self.shared is None else self.shared.segments(self.seed, first, count)
            for index, prefix, own, output in zip(
                range(first, first + count), prefixes, own_tokens, max_tokens, strict=True
            ):
                prompt, num_prompt_tokens = opening_prompt(prefix, index, own)
                yield Opening(index, prompt, num_prompt_tokens, output, -1)

    def follow(self, spec: RequestSpec, finish_ns: int) -> RequestSpec | None:
        """None: each request stands alone."""
        return None


def opening_prompt(prefix: Segment | None, index: int, own_tokens: int) -> tuple[tuple[Segment, ...], int]:
    """The prompt of request `index` and its length: a shared prefix, if any, and `own_tokens` of its own."""
    own = (prompt_stream(index), 0, own_tokens)
    if prefix is None:
        return (own,), own_tokens
    return (prefix, own), prefix[2] + own_tokens
