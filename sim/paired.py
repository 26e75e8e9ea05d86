"""Runs compared on the same seeds: twins see the same arrivals, lengths and acceptance, so that differences show early.

Knows outcomes and Student's t; must not know which question is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from sim.outcome import Job, Outcome, run_digest
from sim.scenario import Scenario
from sim.workers import Backend, Inline, LocalWorkers, num_cores, run_jobs

CONFIDENCE: Final = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 percent confidence interval; no interval from a single value."""

    mean: float
    low: float | None
    high: float | None
    num_values: int

    def over(self, base: float) -> Interval | None:
        """The same as a share of `base`; None if that is 0."""
        if not base:
            return None
        if self.low is None or self.high is None:
            return Interval(self.mean / base, None, None, self.num_values)
        low, high = sorted((self.low / base, self.high / base))
        return Interval(self.mean / base, low, high, self.num_values)

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval is all on one side of 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def interval(values: Sequence[float]) -> Interval:
    """Mean and Student's 95 percent interval of independent values. Of -1, 0 and 4: 1, from -5.57 to 7.57.

    Raises ValueError if there are none.
    """
    count = len(values)
    if not count:
        raise ValueError("a mean of no values")
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean, None, None, 1)
    from scipy import stats

    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)
    reach = float(stats.t.ppf(0.5 + CONFIDENCE / 2, count - 1)) * spread
    return Interval(mean, mean - reach, mean + reach, count)


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Interval:
    """First minus second, value by value (the same seeds in the same order)."""
    return interval([one - other for one, other in zip(first, second, strict=True)])


class Runs:
    """Runs that are made once each, however often they are asked for."""

    def __init__(self, workers: Backend, tell: Callable[[int], None] | None = None) -> None:
        self._workers = workers
        self._tell = tell
        self._known: dict[tuple[str, bool], Outcome] = {}
        self.num_runs = 0
        """Made so far."""

    def outcomes(self, scenarios: Sequence[Scenario], *, steps: bool = False) -> list[Outcome]:
        """The outcome of each, in order. `tell` is called with `num_runs` as they end."""
        keys = [(run_digest(scenario), steps) for scenario in scenarios]
        missing = {key: scenario for key, scenario in zip(keys, scenarios, strict=True) if key not in self._known}
        order = list(missing)
        jobs = [Job(number, missing[key], steps) for number, key in enumerate(order)]
        for job, outcome in run_jobs(self._workers, jobs):
            self._known[order[job.number]] = outcome
            self.num_runs += 1
            if self._tell is not None:
                self._tell(self.num_runs)
        return [self._known[key] for key in keys]


@contextmanager
def runs(jobs: int | None = None, tell: Callable[[int], None] | None = None) -> Iterator[Runs]:
    """Runs on so many worker processes, by default one a core; with one they are made in this process."""
    count = jobs or num_cores()
    workers: Backend = Inline() if count == 1 else LocalWorkers(count)
    try:
        yield Runs(workers, tell)
    finally:
        workers.close()


def with_seed(scenario: Scenario, seed: int) -> Scenario:
    """The same with another seed."""
    return scenario.model_copy(update={"seed": seed})
