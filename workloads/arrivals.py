"""When requests arrive in an open loop: as a renewal process, at rates that change, in bursts, evenly, or all at once.

Knows: rates and uniforms. Must not know: what a request asks for, or how it is served.

The gap before request i depends on (seed, i) alone, by inverse CDF; gaps are rounded to whole nanoseconds and then
summed as integers, so the times do not depend on how many are computed at once. Where the rate changes, arrival i comes
when the rate, added up since arrival i - 1, has reached an exponential number that depends on (seed, i) alone.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

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
        from scipy.special import gammaincinv

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
class Piecewise:
    """A Poisson process whose rate is a table: `rates` has rows (from_s, rate_per_s), the first from 0.

    Each rate holds until the next row, the last for ever or, with `repeat_s`, until the table begins anew: a day of
    hourly rates has 24 rows and repeat_s 86,400. Two rows and repeat_s are regular bursts. Exact, by change of time: a
    unit Poisson process seen through the integral of the rate. Raises ValueError unless the times rise from 0 and end
    below repeat_s, and some rate is above 0; and, when drawn from, where a last rate of 0 lets no more requests come.
    """

    rates: Sequence[tuple[float, float]]
    repeat_s: float | None = None
    _starts_ns: list[int] = field(init=False, repr=False, compare=False)
    _rates: list[float] = field(init=False, repr=False, compare=False)
    _repeat_ns: int | None = field(init=False, repr=False, compare=False)
    _mass: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.rates or self.rates[0][0] != 0:
            raise ValueError(
                f"the table of rates must begin at 0 s, got {self.rates[0][0] if self.rates else 'no row'}"
            )
        before_s = -1.0
        for from_s, rate in self.rates:
            if not (math.isfinite(from_s) and from_s > before_s):
                raise ValueError(f"the times in a table of rates must rise, got {from_s} s after {before_s} s")
            if not (math.isfinite(rate) and rate >= 0):
                raise ValueError(f"rates must be numbers of 0 or more, got {rate} from {from_s} s on")
            before_s = from_s
        if not any(rate > 0 for _, rate in self.rates):
            raise ValueError("a table of rates must have one above 0")
        if self.repeat_s is not None and not (math.isfinite(self.repeat_s) and self.repeat_s > before_s):
            raise ValueError(f"repeat_s must be above the last time of the table, {before_s} s, got {self.repeat_s}")
        repeat_ns = None if self.repeat_s is None else round(self.repeat_s * 1e9)
        starts_ns = [round(from_s * 1e9) for from_s, _ in self.rates]
        object.__setattr__(self, "_starts_ns", starts_ns)
        object.__setattr__(self, "_rates", [rate for _, rate in self.rates])
        object.__setattr__(self, "_repeat_ns", repeat_ns)
        mass = math.inf
        if repeat_ns is not None:
            ends = [*starts_ns[1:], repeat_ns]
            mass = sum(
                rate * (end - start) / 1e9 for rate, start, end in zip(self._rates, starts_ns, ends, strict=True)
            )
        object.__setattr__(self, "_mass", mass)

    def times_ns(self, seed: int, first: int, count: int, before_ns: int) -> NDArray[np.int64]:
        """See `Arrivals`; one at a time, each from the one before."""
        return _one_by_one(self._after_ns, seed, first, count, before_ns)

    def _after_ns(self, time_ns: int, due: float) -> int:
        """When the rate, added up from `time_ns` on, reaches `due`."""
        repeat_ns = self._repeat_ns
        within = time_ns if repeat_ns is None else time_ns % repeat_ns
        if repeat_ns is not None and due > self._mass:
            periods = int(due // self._mass)
            due -= periods * self._mass
            time_ns += periods * repeat_ns
        row = bisect_right(self._starts_ns, within) - 1
        while True:
            rate = self._rates[row]
            if row + 1 < len(self._rates):
                left_ns: int | None = self._starts_ns[row + 1] - within
            elif repeat_ns is not None:
                left_ns = repeat_ns - within
            elif rate == 0:
                raise ValueError(f"no more requests come: the rate is 0 from {self.rates[-1][0]:g} s on")
            else:
                left_ns = None
            if rate > 0 and (left_ns is None or due <= rate * left_ns / 1e9):
                return time_ns + round(due / rate * 1e9)
            assert left_ns is not None
            due -= rate * left_ns / 1e9
            time_ns += left_ns
            row += 1
            within = within + left_ns
            if row == len(self._rates):
                row = within = 0


@dataclass(frozen=True)
class OnOff:
    """Bursts: a Poisson process with rate `on_rate_per_s` while on and `off_rate_per_s` while off, beginning on.

    The phases last `on_s` and `off_s`: exactly so where `regular`, else exponential times of these means (a two-state
    Markov-modulated Poisson process). The rate over a long time is (on_rate on_s + off_rate off_s) / (on_s + off_s).
    Raises ValueError unless on_rate_per_s, on_s and off_s are numbers above 0 and off_rate_per_s one of 0 or more.
    """

    on_rate_per_s: float
    on_s: float
    off_s: float
    off_rate_per_s: float = 0.0
    regular: bool = False

    def __post_init__(self) -> None:
        _positive("on_rate_per_s", self.on_rate_per_s)
        _positive("on_s", self.on_s)
        _positive("off_s", self.off_s)
        if not (math.isfinite(self.off_rate_per_s) and self.off_rate_per_s >= 0):
            raise ValueError(f"off_rate_per_s must be a number of 0 or more, got {self.off_rate_per_s}")

    def times_ns(self, seed: int, first: int, count: int, before_ns: int) -> NDArray[np.int64]:
        """See `Arrivals`; one at a time, each from the one before."""
        if self.regular:
            table = ((0.0, self.on_rate_per_s), (self.on_s, self.off_rate_per_s))
            return Piecewise(table, self.on_s + self.off_s).times_ns(seed, first, count, before_ns)
        phases = _phases(seed, self.on_s, self.off_s)

        def after_ns(time_ns: int, due: float) -> int:
            number = phases.at(time_ns)
            while True:
                rate = self.off_rate_per_s if number % 2 else self.on_rate_per_s
                left_ns = phases.end_ns(number) - time_ns
                if rate > 0 and due <= rate * left_ns / 1e9:
                    return time_ns + round(due / rate * 1e9)
                due -= rate * left_ns / 1e9
                time_ns += left_ns
                number += 1

        return _one_by_one(after_ns, seed, first, count, before_ns)


class _Phases:
    """When phases of random length end: even ones on, odd ones off; grows as it is asked."""

    def __init__(self, seed: int, on_s: float, off_s: float) -> None:
        self._seed = seed
        self._means_s = np.array([on_s, off_s])
        self._ends_ns: list[int] = []

    def at(self, time_ns: int) -> int:
        """The phase of this time; its end belongs to the next."""
        while not self._ends_ns or self._ends_ns[-1] <= time_ns:
            self._grow()
        return bisect_right(self._ends_ns, time_ns)

    def end_ns(self, number: int) -> int:
        """When phase `number` ends."""
        while number >= len(self._ends_ns):
            self._grow()
        return self._ends_ns[number]

    def _grow(self) -> None:
        first = len(self._ends_ns)
        numbers = np.arange(first, first + 1024, dtype=np.int64)
        lengths_s = -np.log1p(-uniforms(self._seed, "phase", numbers, 0, 1)) * self._means_s[numbers % 2]
        before_ns = self._ends_ns[-1] if self._ends_ns else 0
        self._ends_ns += _sum_gaps(before_ns, np.maximum(lengths_s, 1e-9)).tolist()


@lru_cache(maxsize=16)
def _phases(seed: int, on_s: float, off_s: float) -> _Phases:
    return _Phases(seed, on_s, off_s)


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


def _one_by_one(
    after_ns: Callable[[int, float], int], seed: int, first: int, count: int, before_ns: int
) -> NDArray[np.int64]:
    """Arrivals of which each follows from the time of the one before and an exponential number of mean 1."""
    times = np.empty(count, dtype=np.int64)
    dues: list[float] = (-np.log1p(-_gap_uniforms(seed, first, count))).tolist()
    for i, due in enumerate(dues):
        before_ns = after_ns(before_ns, due)
        _refuse_beyond(before_ns)
        times[i] = before_ns
    return times


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
