"""What goes around a step-cost model: random jitter, and a note the first time a step leaves what was measured.

Knows step shapes and costs. Must not know requests, files or the engine. Draws are from a stream of their own, one a
step by its number, so that nothing else of the run is shifted by them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Final, Protocol

from sim.models.timing import StepCost, StepShape, TimingModel
from workloads.streams import uniforms

__all__ = ["Jittered", "Watched"]

_DRAWS: Final = 256
_NORMAL: Final = NormalDist()
_TINY: Final = 1e-12


class _Timer(Protocol):
    def step_cost(self, step: StepShape) -> StepCost: ...


class Jittered:
    """Another timer's costs, each times a random factor with median 1, and now and then a stall on top.

    `sigma`: standard deviation of the factor's natural logarithm; or `residuals`: evenly spaced quantiles of that
    logarithm, from the smallest to the largest, drawn by inverse distribution with straight lines between. A stall of
    `stall_ns` comes in a share `stall_rate` of the steps. What it all adds or takes stands in the cost's `jitter`.
    """

    def __init__(
        self,
        timer: _Timer,
        seed: int,
        *,
        sigma: float = 0.0,
        residuals: Sequence[float] = (),
        stall_rate: float = 0.0,
        stall_ns: int = 0,
    ) -> None:
        self._timer = timer
        self._seed = seed
        self._sigma = sigma
        self._residuals = list(residuals)
        self._stall_rate = stall_rate
        self._stall_ns = stall_ns
        self._number = 0
        self._draws: list[float] = []
        self._stalls: list[float] = []

    def step_cost(self, step: StepShape) -> StepCost:
        """The cost of the next step of the run."""
        place = self._number % _DRAWS
        if place == 0:
            self._draws = uniforms(self._seed, "step jitter", 0, self._number, _DRAWS).tolist()
            if self._stall_rate:
                self._stalls = uniforms(self._seed, "step stall", 0, self._number, _DRAWS).tolist()
        self._number += 1
        cost = self._timer.step_cost(step)
        extra = round(cost.total * math.expm1(self._log_factor(self._draws[place])))
        if self._stall_rate and self._stalls[place] < self._stall_rate:
            extra += self._stall_ns
        return cost._replace(jitter=extra)

    def _log_factor(self, u: float) -> float:
        quantiles = self._residuals
        if not quantiles:
            return self._sigma * _NORMAL.inv_cdf(min(max(u, _TINY), 1 - _TINY)) if self._sigma else 0.0
        at = u * (len(quantiles) - 1)
        low = min(int(at), len(quantiles) - 2) if len(quantiles) > 1 else 0
        high = min(low + 1, len(quantiles) - 1)
        return quantiles[low] + (at - low) * (quantiles[high] - quantiles[low])


class Watched:
    """A timing model's costs; `warn` is told once, when a step lies outside what its calibration was measured on."""

    def __init__(self, model: TimingModel, warn: Callable[[str], None]) -> None:
        self._model = model
        self._warn: Callable[[str], None] | None = warn

    def step_cost(self, step: StepShape) -> StepCost:
        """The model's."""
        if self._warn is not None:
            reason = self._model.outside(step)
            if reason is not None:
                self._warn(f"timing: outside the calibration {self._model.calibration.name}: {reason}")
                self._warn = None
        return self._model.step_cost(step)
