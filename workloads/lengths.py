"""Distributions of whole numbers from 1 up: tokens of a prompt or an output, turns, milliseconds of thought.

Knows: inverse distribution functions. Must not know: what is counted, or where the uniforms come from.

All draw by inverse CDF, one uniform a number, so the same draw under other parameters keeps its rank, and the largest
value that can occur is `at` of the largest uniform (`largest` below).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_LARGEST_UNIFORM = 1.0 - 2.0**-53
_LARGEST_LENGTH = 2**31 - 1
_inverse = NormalDist().inv_cdf


def _ndtri(u: float | NDArray[np.float64]) -> NDArray[np.float64]:
    """The inverse of the normal distribution at uniforms in [0, 1), in the shape of `u`.

    Python's own (Wichura's AS 241) and not SciPy's, which takes a seventh of a second to import. The two differ by a
    few units in the last place of a double.
    """
    flat = [_inverse(one) if one > 0.0 else -math.inf for one in np.ravel(u).tolist()]
    return np.asarray(flat, dtype=np.float64).reshape(np.shape(u))


class Lengths(Protocol):
    """A distribution of whole numbers from 1 up, given by its inverse CDF."""

    def at(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        """The numbers that belong to uniforms in [0, 1); same shape, 1 or more, never decreasing in u."""
        ...


def largest(lengths: Lengths) -> int:
    """The largest number that can be drawn: a bound to hold against `max_model_len` before a run."""
    return int(lengths.at(np.array([_LARGEST_UNIFORM]))[0])


@dataclass(frozen=True)
class Fixed:
    """Always `value`. Raises ValueError unless 1 <= value < 2**31."""

    value: int

    def __post_init__(self) -> None:
        _whole("value", self.value)

    def at(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        """`value` everywhere."""
        return np.full(u.shape, self.value, dtype=np.int64)


@dataclass(frozen=True)
class Uniform:
    """Each whole number from `low` to `high`, both included, alike. Raises ValueError unless 1 <= low <= high."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _whole("low", self.low)
        _whole("high", self.high)
        if self.low > self.high:
            raise ValueError(f"low must not be above high, got low={self.low} and high={self.high}")

    def at(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        """low + floor(u * how many numbers there are)."""
        return self.low + np.floor(u * (self.high - self.low + 1)).astype(np.int64)


@dataclass(frozen=True)
class LogNormal:
    """exp(Normal(ln median, sigma)), rounded to the nearest whole number, then clipped to [minimum, maximum].

    `median` in the unit counted, `sigma` the standard deviation of the logarithm; `from_mean` takes mean and standard
    deviation. The moments are those before rounding and clipping. Raises ValueError for a median not above 0, a
    negative sigma, minimum > maximum, and a tail that passes 2**31 - 1 where no maximum cuts it.
    """

    median: float
    sigma: float
    minimum: int = 1
    maximum: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.median) and self.median > 0):
            raise ValueError(f"median must be a number above 0, got {self.median}")
        if not (math.isfinite(self.sigma) and self.sigma >= 0):
            raise ValueError(f"sigma must be a number of 0 or more, got {self.sigma}")
        _whole("minimum", self.minimum)
        if self.maximum is not None:
            _whole("maximum", self.maximum)
            if self.minimum > self.maximum:
                raise ValueError(
                    f"minimum must not be above maximum, got minimum={self.minimum} and maximum={self.maximum}"
                )
        elif math.log(self.median) + self.sigma * float(_ndtri(_LARGEST_UNIFORM)) > math.log(_LARGEST_LENGTH):
            raise ValueError(
                f"the tail of a log-normal with median={self.median} and sigma={self.sigma} passes {_LARGEST_LENGTH}: "
                f"give a maximum"
            )

    @classmethod
    def from_mean(cls, mean: float, sd: float, minimum: int = 1, maximum: int | None = None) -> LogNormal:
        """The log-normal with this mean and standard deviation (before rounding and clipping).

        sigma**2 = ln(1 + (sd / mean)**2), median = mean * exp(-sigma**2 / 2). Raises ValueError for mean <= 0, sd < 0.
        """
        if not (math.isfinite(mean) and mean > 0):
            raise ValueError(f"mean must be a number above 0, got {mean}")
        if not (math.isfinite(sd) and sd >= 0):
            raise ValueError(f"sd must be a number of 0 or more, got {sd}")
        variance = math.log1p((sd / mean) ** 2)
        return cls(mean * math.exp(-variance / 2), math.sqrt(variance), minimum, maximum)

    def at(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        """median * exp(sigma * normal quantile of u), rounded and clipped."""
        ceiling = float(_LARGEST_LENGTH if self.maximum is None else self.maximum)
        if self.sigma == 0.0:
            values = np.full(u.shape, self.median)
        else:
            # Cut in logarithms, where a long tail cannot overflow.
            logs = math.log(self.median) + self.sigma * _ndtri(u)
            values = np.exp(np.minimum(logs, math.log(ceiling) + 1.0))
        rounded: NDArray[np.float64] = np.clip(np.rint(values), float(self.minimum), ceiling)
        return rounded.astype(np.int64)


@dataclass(frozen=True)
class Quantiles:
    """Given by points of its inverse CDF: (p, value) pairs, straight lines between them, rounded to whole numbers.

    The first p is 0 (the smallest value) and the last is 1 (the largest). Raises ValueError where they are not, where
    p does not increase, where a value falls, or where one is below 1 or not below 2**31.
    """

    points: Sequence[tuple[float, float]]

    def __post_init__(self) -> None:
        if len(self.points) < 2:
            raise ValueError(f"quantiles need at least two points (p, value), got {len(self.points)}")
        for p, value in self.points:
            if not 0.0 <= p <= 1.0:
                raise ValueError(f"quantiles: p must lie between 0 and 1, got {p}")
            if not 1.0 <= value <= _LARGEST_LENGTH:
                raise ValueError(f"quantiles: the value at p={p} must be from 1 to {_LARGEST_LENGTH}, got {value}")
        for (p, value), (next_p, next_value) in zip(self.points, self.points[1:], strict=False):
            if next_p <= p:
                raise ValueError(f"quantiles: p must increase, got {next_p} after {p}")
            if next_value < value:
                raise ValueError(f"quantiles: values must not fall, got {next_value} at p={next_p} after {value}")
        if self.points[0][0] != 0.0 or self.points[-1][0] != 1.0:
            raise ValueError(
                f"quantiles must begin at p=0 (the smallest value) and end at p=1 (the largest), "
                f"got p={self.points[0][0]} to p={self.points[-1][0]}"
            )

    def at(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        """Linear interpolation between the points, rounded to the nearest whole number."""
        p, values = zip(*self.points, strict=True)
        rounded: NDArray[np.float64] = np.rint(np.interp(u, p, values))
        return rounded.astype(np.int64)


def _whole(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST_LENGTH:
        raise ValueError(f"{name} must be a whole number from 1 to {_LARGEST_LENGTH}, got {value!r}")
