"""Shared prefixes: the system prompts that many requests begin with.

Knows: segments, lengths and draws. Must not know: arrivals, or which cache may profit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from workloads.lengths import Lengths
from workloads.spec import Segment, shared_stream
from workloads.streams import uniforms


@dataclass(frozen=True)
class SharedPrefixes:
    """`number` different prefixes, each with its own length; a `fraction` of the requests begins with one.

    A prefix comes on top of the tokens that a request has of its own, as `--random-prefix-len` does in
    `vllm bench serve`. Prefix n is picked with weight 1 / (n + 1)**`zipf`; 0 makes all alike. A request's choice
    depends on the seed and its number alone, and with a larger fraction whoever had a prefix keeps it.
    Raises ValueError unless number >= 1, 0 <= fraction <= 1 and zipf >= 0.
    """

    number: int
    lengths: Lengths
    fraction: float = 1.0
    zipf: float = 0.0
    _cumulative: NDArray[np.float64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ValueError(f"number of shared prefixes must be 1 or more, got {self.number}")
        if not 0.0 <= self.fraction <= 1.0:
            raise ValueError(f"fraction of requests with a shared prefix must lie between 0 and 1, got {self.fraction}")
        if not (math.isfinite(self.zipf) and self.zipf >= 0):
            raise ValueError(f"zipf must be a number of 0 or more, got {self.zipf}")
        cumulative = np.cumsum(np.arange(1, self.number + 1, dtype=np.float64) ** -self.zipf)
        object.__setattr__(self, "_cumulative", cumulative / cumulative[-1])

    def segments(self, seed: int, first: int, count: int) -> list[Segment | None]:
        """What requests first .. first + count - 1 begin with: a segment, or None for no shared prefix."""
        requests = np.arange(first, first + count, dtype=np.int64)
        has_one = uniforms(seed, "shared", requests, 0, 1) < self.fraction
        which = np.searchsorted(self._cumulative, uniforms(seed, "shared", requests, 1, 1), side="right")
        tokens = self.lengths.at(uniforms(seed, "shared_length", which, 0, 1))
        return [
            (shared_stream(n), 0, length) if has else None
            for n, length, has in zip(which.tolist(), tokens.tolist(), has_one.tolist(), strict=True)
        ]
