"""How much load? The highest request rate at which enough requests keep the limits of `slo`, and what is in the way.

Knows bisection and what a step table says about waiting; must not know how runs are made or shown.

A rate meets the limits if, over the seeds, a share `attainment` of the requests that were not aborted finishes within
all of them. Seeds are paired: at another rate the same requests come in the same order, only faster. Bisection is on
the logarithm.

What limits it is read from runs just above the answer, by time from the first to the last first admission:

    blocks       requests wait although there are seats and tokens left in the step: admission lacks blocks
    budget       requests wait, and the step is at its token budget
    sequences    requests wait, and max_num_seqs run

whichever holds most of the time, if together they hold for more of the time than requests may miss the limits
(1 - `attainment`): then waiting can account for the misses. Otherwise steps are just too slow: `acceptance` if the same
load without drafts keeps more requests within the limits, `compute` if not. The shares, how long the pool was full and
the preemptions are in the answer.

Seeds can differ wildly, above all where requests are preempted: the answer has the shares and the preemptions by seed,
and says so where leaving one seed out would turn it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from sim.outcome import K_KEY, Outcome, variant
from sim.paired import Interval, Runs, interval, runs, with_seed
from sim.scenario import Scenario, ScenarioError, load_scenario
from sim.scenario_errors import Problem
from sim.tune import load_of, with_load

FULL: Final = 0.95
"""Share of the pool's blocks from which on it is full: a request's next blocks may not fit any more."""
_DOUBLINGS: Final = 12
_LONG_ENOUGH: Final = 5.0
"""Arrivals should go on for so many times as long as a request takes: a shorter burst meets an empty server."""

Limit = Literal["blocks", "budget", "sequences", "acceptance", "compute"]


class CapacityFailed(Exception):
    """A run failed, or no rate was found; the message says which."""


@dataclass(frozen=True)
class Pressure:
    """Shares of the time between the first and the last schedule while requests were still arriving."""

    blocks: float
    """Requests waited although seats and budget were left."""
    budget: float
    """They waited, and the step had no tokens left."""
    sequences: float
    """They waited, and max_num_seqs ran."""
    full: float
    """`FULL` of the blocks or more were held."""
    num_preemptions: int
    """Of several runs together."""


@dataclass(frozen=True)
class Tried:
    """A load that was tried: share of requests within the limits."""

    load: float
    attainment: Interval
    meets: bool
    by_seed: tuple[float, ...]
    """The shares with the seeds 0, 1, ..."""


@dataclass(frozen=True)
class Capacity:
    """The answer. `highest` meets the limits and `above` does not."""

    key: str
    """What a load is a value of: `workload.synthetic.arrivals.rate` in requests a second, or the trace's time scale."""
    attainment: float
    highest: Tried
    above: Tried
    limit: Limit
    why: str
    pressure: Pressure
    """At `above`: mean shares over the seeds, and the sum of their preemptions."""
    preemptions_by_seed: list[int]
    """At `above`, with the seeds 0, 1, ..."""
    tried: list[Tried]
    num_runs: int
    request_rate: float
    """Requests a second at `highest`; of a trace, up to the last first admission."""
    warning: str | None
    """Why the answer may be too high, if so."""
    one_seed: str | None
    """Which seed decides, if one alone would turn the answer."""


def capacity(
    scenario: str | Path,
    overrides: Sequence[str] = (),
    *,
    attainment: float = 0.9,
    seeds: int = 3,
    tolerance: float = 0.02,
    jobs: int | None = None,
    watch: Callable[[int], None] | None = None,
) -> Capacity:
    """Find the highest load that meets the scenario's `slo`, to `tolerance` of itself.

    `attainment`: share of the requests that must keep all limits. `watch` is told how many runs have ended.

    Raises:
        ScenarioError: the scenario cannot be run, has no limits, or nothing in it sets a rate.
        CapacityFailed: a run failed, or limits hold (or break) at every load tried.
        ValueError: an argument out of range.
    """
    if not 0 < attainment <= 1:
        raise ValueError(f"attainment must be above 0 and at most 1, got {attainment}")
    if seeds < 1:
        raise ValueError(f"seeds must be 1 or more, got {seeds}")
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must be between 0 and 1, got {tolerance}")
    base = load_scenario(scenario, overrides)
    label = None if base.file is None else str(base.file)
    if not any(base.slo.model_dump().values()):
        problem = Problem(
            "capacity is the load that keeps limits, and there are none", "slo", allowed="limits in `slo`"
        )
        raise ScenarioError([problem], label)
    load = load_of(base, 1.0)
    if load is None or not load[0].endswith((".rate", ".time_scale")):
        reason = "has no rate that could be raised"
        raise ScenarioError([Problem(reason, "workload.synthetic.arrivals", allowed="arrivals with a rate")], label)
    with runs(jobs, watch) as made:
        return _Search(scenario, overrides, base, load[0], attainment, seeds, made).found(load[1], tolerance)


class _Search:
    def __init__(
        self,
        scenario: str | Path,
        overrides: Sequence[str],
        base: Scenario,
        key: str,
        attainment: float,
        seeds: int,
        made: Runs,
    ) -> None:
        self._scenario = scenario
        self._overrides = overrides
        self._base = base
        self._key = key
        self._attainment = attainment
        self._seeds = seeds
        self._made = made
        self._tried: dict[float, Tried] = {}

    def _load(self, load: float) -> dict[str, Any]:
        return with_load(self._base, self._key, load)

    def found(self, start: float, tolerance: float) -> Capacity:
        low, high = self._bracket(start)
        while high / low > 1 + tolerance:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self._meets(middle) else (low, middle)
        limit, why, pressures = self._limit(high)
        rate = low
        if not self._key.endswith(".rate"):
            (played,) = self._outcomes(self._load(low), steps=True)[:1]
            seconds = _arrival_s(played)
            rate = (played.figures["num_requests"] or 0) / seconds if seconds else 0.0
        tried = sorted(self._tried.values(), key=lambda one: one.load)
        return Capacity(
            self._key,
            self._attainment,
            self._tried[low],
            self._tried[high],
            limit,
            why,
            _together(pressures),
            [one.num_preemptions for one in pressures],
            tried,
            self._made.num_runs,
            rate,
            self._too_short(low, rate),
            self._one_seed(low, high),
        )

    def _one_seed(self, *loads: float) -> str | None:
        """The first of the loads at which one seed decides, if there is such a load."""
        for load in loads:
            shares = self._tried[load].by_seed
            seed = deciding_seed(shares, self._attainment)
            if seed is not None:
                turned = "break" if self._tried[load].meets else "keep"
                return (
                    f"one seed decides: at {self._key.rsplit('.', 1)[-1]} {load:.4g} seeds keep {min(shares):.1%} to "
                    f"{max(shares):.1%}, and without seed {seed} ({shares[seed]:.1%}) requests would {turned} the "
                    "limits there; more seeds or longer runs say more"
                )
        return None

    def _too_short(self, load: float, rate: float) -> str | None:
        """A burst that is over before the server has filled says little about a load that stays."""
        (played,) = self._outcomes(self._load(load))[:1]
        arriving_s = (played.figures["num_requests"] or 0) / rate if rate else 0.0
        takes_s = (played.figures["e2el_ms_mean"] or 0.0) / 1e3
        if arriving_s >= _LONG_ENOUGH * takes_s:
            return None
        return (
            f"requests arrive for {arriving_s:.1f} s at this load and take {takes_s:.1f} s each: the run is a burst, "
            "and a load that stays may be too much; give it more requests"
        )

    def _bracket(self, start: float) -> tuple[float, float]:
        """A load that meets the limits, and one twice as high that does not."""
        load = start
        meets = self._meets(load)
        for _ in range(_DOUBLINGS):
            following = load * 2 if meets else load / 2
            if self._meets(following) != meets:
                return (load, following) if meets else (following, load)
            load = following
        held = "keep" if meets else "break"
        raise CapacityFailed(
            f"requests {held} the limits at every {self._key.rsplit('.', 1)[-1]} from {min(start, load):g} to "
            f"{max(start, load):g}; " + (self._no_end(load) if meets else "the limits cannot be kept at any load")
        )

    def _no_end(self, load: float) -> str:
        """Why even the highest load tried keeps the limits: mostly since the run is over before anybody has to wait."""
        (played,) = self._outcomes(self._load(load), steps=True)[:1]
        arriving_s = _arrival_s(played)
        if self._key.endswith(".rate"):
            arriving_s = (played.figures["num_requests"] or 0) / load
        takes_s = (played.figures["e2el_ms_mean"] or 0.0) / 1e3
        if arriving_s >= _LONG_ENOUGH * takes_s:
            return "give stricter limits"
        return (
            f"at the last, requests arrive for {arriving_s:.2g} s and take {takes_s:.2g} s each: the run is too short, "
            "a burst that the server takes in whatever its rate; give it more requests, or stricter limits"
        )

    def _meets(self, load: float) -> bool:
        if load not in self._tried:
            by_seed = tuple(self._within(outcome) for outcome in self._outcomes(self._load(load)))
            within = interval(by_seed)
            self._tried[load] = Tried(load, within, within.mean >= self._attainment, by_seed)
        return self._tried[load].meets

    @staticmethod
    def _within(outcome: Outcome) -> float:
        figures = outcome.figures
        count = (figures["num_requests"] or 0) - (figures["num_aborted"] or 0)
        good = (figures["request_goodput"] or 0.0) * (figures["duration_s"] or 0.0)
        return good / count if count else 1.0

    def _outcomes(self, values: dict[str, Any], *, steps: bool = False) -> list[Outcome]:
        scenario = variant(self._scenario, values, self._overrides)
        seeded = [with_seed(scenario, seed) for seed in range(self._seeds)]
        outcomes = self._made.outcomes(seeded, steps=steps)
        for outcome in outcomes:
            if outcome.status != "ok":
                raise CapacityFailed(f"{self._key} = {values[self._key]:g}: {outcome.error or outcome.status}")
        return outcomes

    def _limit(self, load: float) -> tuple[Limit, str, list[Pressure]]:
        outcomes = self._outcomes(self._load(load), steps=True)
        pressures = [pressure_of(outcome) for outcome in outcomes]
        limit, why = limit_of(_together(pressures), 1 - self._attainment)
        if limit == "compute" and self._base.engine.speculative_config is not None:
            without = interval([self._within(one) for one in self._outcomes({**self._load(load), K_KEY: 0})])
            if without.mean > self._tried[load].attainment.mean:
                return (
                    "acceptance",
                    f"steps are too slow, and without drafts {without.mean:.1%} of the requests keep the limits here, "
                    f"with them {self._tried[load].attainment.mean:.1%}: too few drafts are accepted for their cost",
                    pressures,
                )
        return limit, why, pressures


def deciding_seed(shares: Sequence[float], attainment: float) -> int | None:
    """The seed without which the mean of the shares would be on the other side of `attainment`; None if there is none.

    Near the answer the means are near `attainment`, so seeds count as different only where they are further apart than
    requests may miss the limits (1 - `attainment`). Of several, the one furthest from the mean.
    """
    if len(shares) < 2 or max(shares) - min(shares) <= 1 - attainment:
        return None
    mean = interval(shares).mean
    turning = [
        seed
        for seed in range(len(shares))
        if (interval([*shares[:seed], *shares[seed + 1 :]]).mean >= attainment) != (mean >= attainment)
    ]
    return max(turning, key=lambda seed: abs(shares[seed] - mean), default=None)


def _together(pressures: Sequence[Pressure]) -> Pressure:
    """Mean shares, and the sum of the preemptions."""
    count = len(pressures)
    return Pressure(
        sum(one.blocks for one in pressures) / count,
        sum(one.budget for one in pressures) / count,
        sum(one.sequences for one in pressures) / count,
        sum(one.full for one in pressures) / count,
        sum(one.num_preemptions for one in pressures),
    )


def limit_of(pressure: Pressure, may_miss: float) -> tuple[Limit, str]:
    """What limits, by the rule above, and the figures that say so; `compute` where nobody waits long.

    `may_miss`: share of requests that may miss the limits.
    """
    shares: dict[Limit, float] = {
        "blocks": pressure.blocks,
        "budget": pressure.budget,
        "sequences": pressure.sequences,
    }
    most = max(shares, key=lambda name: shares[name])
    waiting = sum(shares.values())
    if waiting <= may_miss:
        return "compute", f"requests wait to be admitted {waiting:.0%} of the time only; steps are too slow"
    if most == "blocks":
        return "blocks", (
            f"requests wait for blocks {pressure.blocks:.0%} of the time; the pool is full {pressure.full:.0%} of it"
        )
    if most == "budget":
        return "budget", f"requests wait {pressure.budget:.0%} of the time while steps are at their token budget"
    return "sequences", f"requests wait {pressure.sequences:.0%} of the time while max_num_seqs run"


def pressure_of(outcome: Outcome) -> Pressure:
    """Why requests waited, from a run's table of steps, each step counted for the time to the next schedule."""
    import numpy as np
    import pyarrow.parquet as pq

    assert outcome.steps is not None
    names = ["scheduled_ns", "num_reqs", "num_tokens", "num_running", "num_waiting", "num_admitted"]
    names += ["num_preempted", "held_blocks"]
    table = pq.read_table(io.BytesIO(outcome.steps), columns=names)
    columns = {name: table.column(name).to_numpy() for name in names}
    arriving = _while_arriving(columns["num_admitted"])
    times = columns["scheduled_ns"][:arriving]
    if len(times) < 2:
        return Pressure(0.0, 0.0, 0.0, 0.0, 0)
    spans = np.diff(times).astype(np.float64)
    whole = float(spans.sum())
    settings = outcome.settings
    last = slice(0, arriving - 1)
    waits = columns["num_waiting"][last] > 0
    no_seats = columns["num_running"][last] >= settings["max_num_seqs"]
    used = columns["num_tokens"] + settings["draft_slots"] * columns["num_reqs"]
    no_tokens = used[last] >= settings["max_num_scheduled_tokens"]
    full = columns["held_blocks"][last] >= FULL * (settings["num_gpu_blocks"] - 1)

    def share(steps: Any) -> float:
        return float(spans[steps].sum()) / whole if whole else 0.0

    return Pressure(
        share(waits & ~no_seats & ~no_tokens),
        share(waits & no_tokens),
        share(waits & no_seats & ~no_tokens),
        share(full),
        int(columns["num_preempted"].sum()),
    )


def _while_arriving(num_admitted: Any) -> int:
    """Steps up to the last first admission: after it a finite run only drains."""
    import numpy as np

    admitting = np.flatnonzero(num_admitted)
    return int(admitting[-1]) + 1 if len(admitting) else 0


def _arrival_s(outcome: Outcome) -> float:
    import pyarrow.parquet as pq

    assert outcome.steps is not None
    table = pq.read_table(io.BytesIO(outcome.steps), columns=["scheduled_ns", "num_admitted"])
    arriving = _while_arriving(table.column("num_admitted").to_numpy())
    times = table.column("scheduled_ns").to_numpy()
    return float(times[arriving - 1] - times[0]) / 1e9 if arriving > 1 else 0.0
