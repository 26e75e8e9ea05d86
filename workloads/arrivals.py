"""When requests arrive in an open loop: as a Poisson or gamma renewal process, evenly, or all at once.

Knows: rates and uniforms. Must not know: what a request asks for, or how it is served.

The gap before request i depends on (seed, i) alone, by inverse CDF; gaps are rounded to whole nanoseconds and then
summed as integers, so the times do not depend on how many are computed at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincinv

from workloads.streams import uniforms

_CHUNK = 16_384
_LATEST_NS = 2**63 - 1


class Arrivals(Protocol):
    """A process of arrival times."""

    def times_ns(self, seed: int, first: int, count: int, before_ns: int) -> NDArray[np.int64]:
        """Times of arrivals first .. first + count - 1, shape (count,), ns, never decreasing.

        `before_ns` is the time of arrival first - 1, and 0 for the first of all.
        """
        ...


@dataclass(frozen=True)
class Poisson:
    """Exponential gaps with mean 1 / `rate_per_s`; the first request comes after the first gap.

    Raises ValueError unless the rate is a number above 0.
    """

    rate_per_s: float

    def __post_init__(self) -> None:
        _positive("rate_per_s", self.rate_per_s)

    def times_ns(self, seed: int, first: int, count: int, before_ns: int) -> NDArray[np.int64]:
        """See `Arrivals`."""
        gaps_s: NDArray[np.float64] = -np.log1p(-_gap_uniforms(seed, first, count)) / self.rate_per_s
        return _sum_gaps(before_ns, gaps_s)


@dataclass(frozen=True)
class Gamma:
    """Gamma gaps with mean 1 / `rate_per_s` and coefficient of variation 1 / sqrt(`burstiness`).

    As `vllm bench serve --request-rate --burstiness`: shape = burstiness, scale = 1 / (rate * burstiness), so 1 is
    Poisson, below 1 is burstier, above 1 more even. Raises ValueError unless both are numbers above 0.
    """

    rate_per_s: float
    burstiness: float

    def __post_init__(self) -> None:
        _positive("rate_per_s", self.rate_per_s)
        _positive("burstiness", self.burstiness)

    def times_ns(self, seed: int, first: int, count: int, before_ns: int) -> NDArray[np.int64]:
        """See `Arrivals`."""
        standard = np.asarray(gammaincinv(self.burstiness, _gap_uniforms(seed, first, count)), dtype=np.float64)
        return _sum_gaps(before_ns, standard / (self.rate_per_s * self.burstiness))


@dataclass(frozen=True)
class Constant:
    """Request i at i / `rate_per_s`, so the first at 0. Raises ValueError unless the rate is a number above 0."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _positive("rate_per_s", self.rate_per_s)

    def times_ns(self, seed: int, first: int, count: int, before_ns: int) -> NDArray[np.int64]:
        """See `Arrivals`; needs no draws."""
        times = np.arange(first, first + count, dtype=np.float64) * 1e9 / self.rate_per_s
        _refuse_beyond(float(times[-1]) if count else 0.0)
        return np.rint(times).astype(np.int64)


@dataclass(frozen=True)
class AllAtOnce:
    """Everything at time 0."""

    def times_ns(self, seed: int, first: int, count: int, before_ns: int) -> NDArray[np.int64]:
        """See `Arrivals`; needs no draws."""
        return np.zeros(count, dtype=np.int64)


def arrival_times_ns(arrivals: Arrivals, seed: int, count: int) -> Iterator[int]:
    """The times of the first `count` arrivals one by one, ns, computed a chunk at a time."""
    before_ns = 0
    for first in range(0, count, _CHUNK):
        times = arrivals.times_ns(seed, first, min(_CHUNK, count - first), before_ns)
        before_ns = int(times[-1])
        yield from times.tolist()


def _gap_uniforms(seed: int, first: int, count: int) -> NDArray[np.float64]:
    return uniforms(seed, "arrival", np.arange(first, first + count, dtype=np.int64), 0, 1)


def _sum_gaps(before_ns: int, gaps_s: NDArray[np.float64]) -> NDArray[np.int64]:
    gaps_ns = np.rint(gaps_s * 1e9)
    _refuse_beyond(before_ns + float(gaps_ns.sum()))
    times: NDArray[np.int64] = before_ns + np.cumsum(gaps_ns.astype(np.int64))
    return times


def _refuse_beyond(latest_ns: float) -> None:
    if not latest_ns < _LATEST_NS:
        raise ValueError(
            f"arrivals reach {latest_ns / 1e9:.3g} s, later than 64-bit nanoseconds can tell "
            f"({_LATEST_NS / 1e9:.3g} s): the rate is too low for so many requests"
        )


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a number above 0, got {value}")
