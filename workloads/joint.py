"""Lengths of prompt and output that belong together: by a rank correlation, or as pairs that a trace has.

Knows: distributions of lengths and draws. Must not know: arrivals, or who serves the requests.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workloads.lengths import Lengths
from workloads.prompts import SharedPrefixes
from workloads.sessions import CHUNK, Opening, opening_prompt
from workloads.spec import RequestSpec
from workloads.streams import uniforms

_SMALLEST, _LARGEST = 2.0**-54, 1.0 - 2.0**-53


class JointLengths(Protocol):
    """A distribution of pairs (prompt, output), given by a function of two uniforms."""

    def at(
        self, first: NDArray[np.float64], second: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Lengths of prompts and outputs that belong to independent uniforms in [0, 1); the same shape."""
        ...


@dataclass(frozen=True)
class Copula:
    """Any two distributions, tied by a Gaussian copula with Spearman's rank correlation `rank_correlation`.

    The normal correlation behind it is r = 2 sin(pi rank_correlation / 6) (Kruskal, "Ordinal measures of association",
    1958), and the output's uniform is Phi(r z1 + sqrt(1 - r**2) z2). Rounding to whole numbers weakens it a little.
    With 0 the outputs are those of the second uniform alone. Raises ValueError unless -1 <= rank_correlation <= 1.
    """

    prompt: Lengths
    output: Lengths
    rank_correlation: float = 0.0

    def __post_init__(self) -> None:
        if not -1.0 <= self.rank_correlation <= 1.0:
            raise ValueError(f"rank_correlation must lie between -1 and 1, got {self.rank_correlation}")

    def at(
        self, first: NDArray[np.float64], second: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `JointLengths`."""
        if self.rank_correlation != 0.0:
            r = 2.0 * math.sin(math.pi * self.rank_correlation / 6.0)
            from scipy.special import ndtr, ndtri

            z1 = ndtri(np.maximum(first, _SMALLEST))
            z2 = ndtri(np.maximum(second, _SMALLEST))
            mixed = ndtr(r * z1 + math.sqrt(max(0.0, 1.0 - r * r)) * z2)
            second = np.minimum(np.asarray(mixed, dtype=np.float64), _LARGEST)
        return self.prompt.at(first), self.output.at(second)


class Resampled:
    """Pairs of a trace, drawn with replacement, each alike; held at 16 bytes a pair.

    Raises ValueError where there is no pair.
    """

    def __init__(self, pairs: Iterable[tuple[int, int]]) -> None:
        prompts, outputs = array("i"), array("i")
        for prompt, output in pairs:
            prompts.append(prompt)
            outputs.append(output)
        if not prompts:
            raise ValueError("there is no pair of lengths to draw from")
        self._prompts = np.frombuffer(prompts, dtype=np.intc).astype(np.int64)
        self._outputs = np.frombuffer(outputs, dtype=np.intc).astype(np.int64)

    def at(
        self, first: NDArray[np.float64], second: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `JointLengths`; the second uniform has no effect."""
        which = np.floor(first * len(self._prompts)).astype(np.int64)
        return self._prompts[which], self._outputs[which]


@dataclass(frozen=True)
class JointRequests:
    """Independent requests, as `SingleRequests`, whose lengths come in pairs. Raises ValueError for none at all."""

    seed: int
    num_requests: int
    lengths: JointLengths
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
            own_tokens, max_tokens = self.lengths.at(
                uniforms(self.seed, "prompt", requests, 0, 1), uniforms(self.seed, "output", requests, 0, 1)
            )
            prefixes = [None] * count if self.shared is None else self.shared.segments(self.seed, first, count)
            for index, prefix, own, output in zip(
                range(first, first + count), prefixes, own_tokens.tolist(), max_tokens.tolist(), strict=True
            ):
                prompt, num_prompt_tokens = opening_prompt(prefix, index, own)
                yield Opening(index, prompt, num_prompt_tokens, output, -1)

    def follow(self, spec: RequestSpec, finish_ns: int) -> RequestSpec | None:
        """None: each request stands alone."""
        return None
