"""What a workload hands over: requests with their content, and the protocol of a workload.

Knows: how content is named (streams and segments). Must not know: where requests come from or what serves them.

A prompt is a list of segments, each a stretch of a numbered stream of tokens. Worked example: request 3 has shared
prefix 0 of 100 tokens and 20 tokens of its own, and request 4 is the next turn of that conversation, with 5 tokens of
output and 8 new tokens between them:

    request 3   (2, 0, 100) (13, 0, 20)                       120 tokens
    request 4   (2, 0, 100) (13, 0, 20) (12, 0, 5) (17, 0, 8)   133 tokens
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

Segment = tuple[int, int, int]
"""(stream, start, count): tokens start .. start + count - 1 of a stream."""


def output_stream(index: int) -> int:
    """The stream of what request `index` generates, from position 0."""
    return 4 * index


def prompt_stream(index: int) -> int:
    """The stream of the prompt tokens that request `index` has to itself."""
    return 4 * index + 1


def shared_stream(number: int) -> int:
    """The stream of shared prefix `number`."""
    return 4 * number + 2


def trace_stream(block_id: int) -> int:
    """The stream of a block that a trace names by `block_id`."""
    return 4 * block_id + 3


def merge_segments(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """The same content in its one spelling: empty segments left out, and neighbours that continue each other joined.

    Raises ValueError for a negative stream, start or count.
    """
    merged: list[Segment] = []
    for stream, start, count in segments:
        if stream < 0 or start < 0 or count < 0:
            raise ValueError(f"stream, start and count must be 0 or more, got segment {(stream, start, count)}")
        if count == 0:
            continue
        if merged:
            last_stream, last_start, last_count = merged[-1]
            if last_stream == stream and last_start + last_count == start:
                merged[-1] = (stream, last_start, last_count + count)
                continue
        merged.append((stream, start, count))
    return tuple(merged)


@dataclass(slots=True, unsafe_hash=True)  # `frozen` would make it four times as slow to make
class RequestSpec:
    """One request as the world sends it. Not to be changed.

    index               number of the request in the run, from 0; does not depend on what else happens
    arrival_ns          when it arrives, ns after the start of the run
    prompt              its content, merged; two blocks are equal if and only if their segments are
    num_prompt_tokens   the sum of the segments' counts, > 0
    max_tokens          the true number of output tokens, > 0
    priority            lower is served first, as in vLLM
    conversation, turn  which conversation (-1: none) and which turn of it, from 0

    Raises ValueError where these do not fit together.
    """

    index: int
    arrival_ns: int
    prompt: tuple[Segment, ...]
    num_prompt_tokens: int
    max_tokens: int
    priority: int = 0
    conversation: int = -1
    turn: int = 0

    def __post_init__(self) -> None:
        if self.index < 0 or self.arrival_ns < 0:
            raise ValueError(f"index and arrival_ns must be 0 or more, got {self.index} and {self.arrival_ns}")
        if self.num_prompt_tokens < 1 or self.max_tokens < 1:
            raise ValueError(
                f"request {self.index}: num_prompt_tokens and max_tokens must be 1 or more, "
                f"got {self.num_prompt_tokens} and {self.max_tokens}"
            )
        total = 0
        for segment in self.prompt:
            total += segment[2]
        if total != self.num_prompt_tokens:
            raise ValueError(
                f"request {self.index}: num_prompt_tokens is {self.num_prompt_tokens}, but the segments hold {total}"
            )


class Workload(Protocol):
    """Requests over time. One object serves one run at a time; calling `arrivals` begins it anew."""

    @property
    def num_requests(self) -> int | None:
        """How many requests there are in all, or None where nobody has counted."""
        ...

    def arrivals(self) -> Iterator[RequestSpec]:
        """The requests known in advance, in order; `arrival_ns` never decreases."""
        ...

    def after(self, spec: RequestSpec, finish_ns: int) -> Sequence[RequestSpec]:
        """What the end of `spec` at `finish_ns` sets off; each arrives at `finish_ns` or later."""
        ...
