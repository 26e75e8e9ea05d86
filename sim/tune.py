"""Which K? The setting of a server that serves most, found in few runs, and how sure that is.

Knows candidates, halving and what vLLM calls the settings; must not know how runs are made or shown.

Successive halving over seeds: all candidates see seed 0, the better half of them more seeds, and so on until two are
left, which get the rest of the budget. All see the same seeds in the same order, and differences are taken seed by
seed. Candidates whose objective is within `TIE` of the best count as equal, and so do those that three seeds or more do
not tell apart from it; the one with the shorter mean time from arrival to end goes first. At low load all serve what
comes, and latency is what is left to choose by; else it varies less from seed to seed than a count of good requests.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from sim.outcome import K_KEY, Outcome, run_digest, variant
from sim.paired import Interval, Runs, interval, paired_difference, runs, with_seed
from sim.scenario import Scenario, ScenarioError, load_scenario
from sim.scenario_errors import Problem

TIE: Final = 0.0025
"""Objectives this near, as a share of the best, are equal."""
BUDGET: Final = 4
"""A full grid takes so many times the runs of the search."""
_SEEDS_TO_TELL: Final = 3
"""From so many seeds on an interval of differences says something."""
_FACTORS: Final = (2.0, 4.0)
_SPECULATION: Final = "engine.speculative_config"
_ARRIVALS: Final = "workload.synthetic.arrivals"

Objective = Literal["goodput", "output_throughput"]
_FIGURE: Final[Mapping[Objective, str]] = {"goodput": "request_goodput", "output_throughput": "output_throughput"}


class TuneFailed(Exception):
    """No candidate could be run; the message has the first one's reason."""


class Candidate(NamedTuple):
    """Settings of a server. None: as the scenario has it."""

    k: int
    drafter: str | None = None
    """`method` or `method:model`."""
    max_num_seqs: int | None = None
    watermark: float | None = None
    table: tuple[tuple[int, int, int], ...] | None = None
    """`num_speculative_tokens_per_batch_size`."""

    def values(self, base: Scenario) -> dict[str, Any]:
        """The scenario's keys that it sets. Another drafter than the scenario's has its method's usual acceptance."""
        values: dict[str, Any] = {K_KEY: self.k}
        if self.k and self.drafter is not None:
            method, _, model = self.drafter.partition(":")
            speculation = base.engine.speculative_config
            if speculation is None or speculation.method != method or (model and model != speculation.model):
                values[_SPECULATION] = {"method": method, "model": model or None, "num_speculative_tokens": self.k}
                values["acceptance"] = None
        if self.k and self.table is not None:
            values[f"{_SPECULATION}.num_speculative_tokens_per_batch_size"] = [list(row) for row in self.table]
        if self.max_num_seqs is not None:
            values["engine.max_num_seqs"] = self.max_num_seqs
        if self.watermark is not None:
            values["engine.watermark"] = self.watermark
        return values

    def __str__(self) -> str:
        parts = [f"K = {self.k}" if self.k else "no speculation"]
        parts += [self.drafter] if self.drafter and self.k else []
        parts += ["K by batch size"] if self.table else []
        parts += [f"max_num_seqs {self.max_num_seqs}"] if self.max_num_seqs is not None else []
        parts += [f"watermark {self.watermark:g}"] if self.watermark is not None else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Score:
    """How a candidate did, over the seeds 0, 1, ... that it was given."""

    candidate: Candidate
    objective: list[float]
    e2el_ms: list[float]

    @property
    def mean(self) -> float:
        """Of the objective."""
        return interval(self.objective).mean


@dataclass(frozen=True)
class LoadChange:
    """The least load found at which another candidate is better by the same measure."""

    factor: float
    """Of the scenario's load; the answer changes between this and the next smaller (or larger) step looked at."""
    load: float
    key: str
    """What `load` is a value of."""
    candidate: Candidate
    gain: Interval
    """Of the objective over the recommendation's there."""
    in_latency: bool
    """Whether the two are equal in the objective there, and latency decided."""
    saved_ms: Interval
    """Of the mean time from arrival to end, against the recommendation's there."""


@dataclass
class Tuning:
    """The answer, and what it rests on."""

    objective: Objective
    best: Score
    runner_up: Score | None
    scores: list[Score]
    """Of all candidates, best first; those dropped early have few seeds."""
    refused: dict[Candidate, str]
    """Candidates that cannot be run, and why."""
    num_runs: int = 0
    """Of the search."""
    num_grid_runs: int = 0
    """What a full grid with all seeds takes."""
    flags: list[str] = field(default_factory=list)
    """The recommendation, for vLLM's command line."""
    changes: list[LoadChange] = field(default_factory=list)
    same_at: list[float] = field(default_factory=list)
    """Loads looked at where the recommendation stays, as factors of the scenario's."""
    num_load_runs: int = 0
    table: list[list[int]] | None = None
    """`num_speculative_tokens_per_batch_size`, if asked for and any drafts are worth it."""
    table_gain: Interval | None = None
    """Objective with the table less that of the best fixed K, seed by seed."""

    @property
    def margin(self) -> Interval | None:
        """Best less runner-up over the seeds that both saw; None without a runner-up."""
        if self.runner_up is None:
            return None
        common = min(len(self.best.objective), len(self.runner_up.objective))
        return paired_difference(self.best.objective[:common], self.runner_up.objective[:common])

    @property
    def told_apart(self) -> bool:
        """Whether best and runner-up differ by more than the seeds do; true without a runner-up."""
        return self.margin is None or self.margin.excludes_zero

    @property
    def more_seeds_may_tell(self) -> bool:
        """Whether best and runner-up are not told apart, and may differ by more than counts as equal."""
        margin = self.margin
        if margin is None or margin.low is None or margin.high is None or margin.excludes_zero:
            return False
        return max(-margin.low, margin.high) > TIE * abs(self.best.mean)

    @property
    def one_k(self) -> bool:
        """Whether the K by batch size is the same for all sizes, so that vLLM needs no table."""
        return self.table is not None and len(self.table) == 1

    @property
    def tied(self) -> bool:
        """Whether the two are equal in the objective, and latency decided."""
        margin = self.margin
        if margin is None:
            return False
        if abs(margin.mean) <= TIE * abs(self.best.mean):
            return True
        return margin.num_values >= _SEEDS_TO_TELL and not margin.excludes_zero


def tune(
    scenario: str | Path,
    overrides: Sequence[str] = (),
    *,
    objective: Objective = "goodput",
    k: Iterable[int] = range(9),
    drafters: Sequence[str] = (),
    max_num_seqs: Sequence[int] = (),
    watermarks: Sequence[float] = (),
    seeds: int = 20,
    by_batch_size: bool = False,
    loads: bool = True,
    jobs: int | None = None,
    watch: Callable[[int], None] | None = None,
) -> Tuning:
    """Find the candidate with the highest objective, among all combinations of what is given.

    `k`: drafts a step, 0 for none. `seeds`: as many as the finalists may see; the search makes at most a quarter of the
    runs of a grid with all of them, unless the grid is so small that the last two would see less than two seeds.
    `loads` looks for the load at which the answer changes, `by_batch_size` for K by
    batch size. `watch` is told how many runs have ended.

    Raises:
        ScenarioError: the scenario cannot be run, or has no `slo` for goodput.
        TuneFailed: no candidate could be run.
        ValueError: an argument out of range.
    """
    ks = sorted(set(k))
    if not ks or ks[0] < 0:
        raise ValueError(f"k: {ks or 'nothing'}; needs numbers of drafts from 0 up")
    if seeds < 1:
        raise ValueError(f"seeds must be 1 or more, got {seeds}")
    base = load_scenario(scenario, overrides)
    if objective == "goodput" and not any(base.slo.model_dump().values()):
        problem = Problem("goodput counts requests within limits, and there are none", "slo", allowed="limits in `slo`")
        raise ScenarioError([problem], None if base.file is None else str(base.file))
    candidates = [
        Candidate(*settings)
        for settings in product(ks, drafters or (None,), max_num_seqs or (None,), watermarks or (None,))
    ]
    with runs(jobs, watch) as made:
        search = _Search(scenario, overrides, base, objective, made)
        tuning = search.found(candidates, seeds)
        if loads and len(tuning.best.objective) > 1:  # One seed says too little of this load to compare with others.
            before = made.num_runs
            search.other_loads(tuning, ks)
            tuning.num_load_runs = made.num_runs - before
        if by_batch_size:
            search.by_batch_size(tuning, ks)
    tuning.flags = _flags(tuning, base)
    return tuning


class _Search:
    """Scores of candidates under one scenario."""

    def __init__(
        self, scenario: str | Path, overrides: Sequence[str], base: Scenario, objective: Objective, made: Runs
    ) -> None:
        self._scenario = scenario
        self._overrides = overrides
        self._base = base
        self._objective: Objective = objective
        self._made = made

    def found(self, candidates: Sequence[Candidate], seeds: int) -> Tuning:
        """Successive halving over at most a quarter of the runs of the grid; of a tiny grid, over as many as it takes
        for each candidate to be seen and the last two to have two seeds."""
        usable, refused = self._usable(candidates)
        before = self._made.num_runs
        budget = max(len(usable) * seeds // BUDGET, len(usable))
        widths = [len(usable)]
        while widths[-1] > 2:
            widths.append((widths[-1] + 1) // 2)
        alive, seen, used = list(usable), 0, 0
        ranked: list[Score] = []
        dropped: list[Score] = []
        for number, width in enumerate(widths):
            last = number == len(widths) - 1
            spend = budget - used if last else budget // len(widths)
            more = max(spend // width, 0 if last else 1)
            seen_now = min(seeds, seen + more, seen + max((budget - used) // width, 0)) if seen else min(seeds, more)
            if last:
                seen_now = max(seen_now, min(seeds, 2))
            used += (seen_now - seen) * width
            seen = max(seen_now, 1)
            ranked = ranking(self._scores(usable, alive, seen, refused))
            if not ranked:
                raise TuneFailed(f"no candidate could be run: {next(iter(refused.values()))}")
            keep = len(ranked) if last else widths[number + 1]
            dropped = ranked[keep:] + dropped
            alive = [score.candidate for score in ranked[:keep]]
        scores = ranked + dropped
        runner_up = ranked[1] if len(ranked) > 1 else None
        made = self._made.num_runs - before
        return Tuning(self._objective, ranked[0], runner_up, scores, refused, made, num_grid_runs=len(usable) * seeds)

    def other_loads(self, tuning: Tuning, ks: Sequence[int]) -> None:
        """At twice and four times the load, and at a half and a quarter: the first at which another K is better.

        Fills in `changes`, and `same_at` with the loads before.
        """
        best = tuning.best.candidate
        rivals = [best._replace(k=k) for k in ks]
        for sign in (1, -1):
            for step in _FACTORS:
                factor = step**sign
                load = load_of(self._base, factor)
                if load is None:
                    return
                usable, refused = self._usable(rivals, with_load(self._base, *load))
                if best not in usable:
                    continue
                change = self._change(best, usable, refused, factor, load)
                if change is not None:
                    tuning.changes.append(change)
                    break
                if best not in refused:
                    tuning.same_at.append(factor)

    def _change(
        self,
        best: Candidate,
        usable: Mapping[Candidate, Scenario],
        refused: dict[Candidate, str],
        factor: float,
        load: tuple[str, float | int],
    ) -> LoadChange | None:
        first = ranking(self._scores(usable, list(usable), 1, refused))[0].candidate
        if first == best:
            return None
        both = ranking(self._scores(usable, [best, first], 3, refused))
        if len(both) < 2 or both[0].candidate == best:
            return None
        winner, loser = both
        return LoadChange(
            factor,
            load[1],
            load[0],
            first,
            paired_difference(winner.objective, loser.objective),
            winner.mean <= loser.mean or _equal(winner, loser),
            paired_difference(loser.e2el_ms, winner.e2el_ms),
        )

    def by_batch_size(self, tuning: Tuning, ks: Sequence[int]) -> None:
        """K for batches of 1, 2, 4, ...: most tokens a second with so many requests always under way.

        Each K holds up to the geometric middle between two sizes. Fills in `table` and what it gains over the best K.
        """
        synthetic = self._base.workload.synthetic
        if synthetic is None:
            allowed = "workload.synthetic, with the trace's lengths"
            problem = Problem("K by batch size is found with a fixed number of requests under way", "workload")
            raise ScenarioError([Problem(problem.reason, problem.key, allowed=allowed)])
        best = tuning.best.candidate
        sizes = [1]
        while sizes[-1] * 2 <= self._base.engine.max_num_seqs and sizes[-1] < 512:
            sizes.append(sizes[-1] * 2)
        choices = []
        for size in sizes:
            values = {
                _ARRIVALS: {"process": "closed_loop", "concurrency": size},
                "workload.synthetic.num_requests": max(24, 3 * size),
            }
            usable, refused = self._usable([best._replace(k=k) for k in ks], values)
            scores = self._scores(usable, list(usable), 1, refused, "output_throughput")
            if not scores:
                raise TuneFailed(f"no candidate could be run: {next(iter(refused.values()))}")
            most = max(score.mean for score in scores)
            choices.append(min(score.candidate.k for score in scores if score.mean >= (1 - TIE) * most))
        rows = _rows(sizes, choices, self._base.engine.max_num_seqs)
        if not any(row[2] for row in rows):
            return
        tuning.table = rows
        with_table = best._replace(k=max(row[2] for row in rows), table=tuple((row[0], row[1], row[2]) for row in rows))
        usable, refused = self._usable([best, with_table])
        scores = self._scores(usable, list(usable), len(tuning.best.objective), refused)
        by_candidate = {score.candidate: score for score in scores}
        if len(by_candidate) == 2:
            tuning.table_gain = paired_difference(by_candidate[with_table].objective, by_candidate[best].objective)

    def _usable(
        self, candidates: Sequence[Candidate], values: Mapping[str, Any] = {}
    ) -> tuple[dict[Candidate, Scenario], dict[Candidate, str]]:
        """Scenarios of those that make one; of equal ones the first."""
        usable: dict[Candidate, Scenario] = {}
        refused: dict[Candidate, str] = {}
        seen: set[str] = set()
        for candidate in candidates:
            try:
                scenario = variant(self._scenario, {**candidate.values(self._base), **values}, self._overrides)
            except ScenarioError as error:
                refused[candidate] = " ".join(" ".join(str(problem) for problem in error.problems).split())
                continue
            digest = run_digest(scenario)
            if digest not in seen:
                seen.add(digest)
                usable[candidate] = scenario
        if not usable:
            raise TuneFailed(f"no candidate could be run: {next(iter(refused.values()))}")
        return usable, refused

    def _scores(
        self,
        usable: Mapping[Candidate, Scenario],
        alive: Sequence[Candidate],
        seeds: int,
        refused: dict[Candidate, str],
        objective: Objective | None = None,
    ) -> list[Score]:
        """Of those alive, over seeds 0 to `seeds`; one that cannot be run goes to `refused`."""
        figure = _FIGURE[objective or self._objective]
        wanted = [with_seed(usable[candidate], seed) for candidate in alive for seed in range(seeds)]
        outcomes = iter(self._made.outcomes(wanted))
        scores = []
        for candidate in alive:
            own: list[Outcome] = [next(outcomes) for _ in range(seeds)]
            wrong = next((outcome for outcome in own if outcome.status != "ok"), None)
            if wrong is not None:
                refused[candidate] = wrong.error or wrong.status
                continue
            objectives = [float(outcome.figures[figure] or 0.0) for outcome in own]
            times = [float(outcome.figures["e2el_ms_mean"] or 0.0) for outcome in own]
            scores.append(Score(candidate, objectives, times))
        return scores


def ranking(scores: Sequence[Score]) -> list[Score]:
    """Best first: the highest mean, but those that are equal to it by their mean time from arrival to end."""
    if not scores:
        return []
    best = max(scores, key=lambda score: score.mean)
    equal = [score for score in scores if _equal(best, score)]
    others = [score for score in scores if score not in equal]
    return sorted(equal, key=lambda score: interval(score.e2el_ms).mean) + sorted(others, key=lambda score: -score.mean)


def _equal(best: Score, other: Score) -> bool:
    """Whether the other is within `TIE` of the best, or not told apart from it by the seeds."""
    if other.mean >= best.mean - TIE * abs(best.mean):
        return True
    if len(best.objective) < _SEEDS_TO_TELL or len(best.objective) != len(other.objective):
        return False
    return not paired_difference(best.objective, other.objective).excludes_zero


def load_of(scenario: Scenario, factor: float) -> tuple[str, float | int] | None:
    """The key that sets the scenario's load, and its value times `factor`; None where nothing sets it."""
    if scenario.workload.trace is not None:
        return "workload.trace.time_scale", scenario.workload.trace.time_scale * factor
    synthetic = scenario.workload.synthetic
    assert synthetic is not None
    rate = getattr(synthetic.arrivals, "rate", None)
    if isinstance(rate, int | float):
        return f"{_ARRIVALS}.rate", rate * factor
    concurrency = getattr(synthetic.arrivals, "concurrency", None)
    if isinstance(concurrency, int):
        return f"{_ARRIVALS}.concurrency", max(round(concurrency * factor), 1)
    return None


def with_load(scenario: Scenario, key: str, load: float | int) -> dict[str, Any]:
    """The keys that set the load: with a rate its process too, since a scenario may leave `arrivals` out."""
    synthetic = scenario.workload.synthetic
    if synthetic is None or not key.startswith(_ARRIVALS):
        return {key: load}
    return {f"{_ARRIVALS}.process": synthetic.arrivals.process, key: load}


def _rows(sizes: Sequence[int], choices: Sequence[int], last: int) -> list[list[int]]:
    """vLLM's rows [first, last, K] from the K of some sizes; neighbours with one K are one row."""
    rows: list[list[int]] = []
    for number, (size, k) in enumerate(zip(sizes, choices, strict=True)):
        end = last if number == len(sizes) - 1 else int((size * sizes[number + 1]) ** 0.5)
        first = rows[-1][1] + 1 if rows else 1
        if rows and rows[-1][2] == k:
            rows[-1][1] = end
        elif end >= first:
            rows.append([first, end, k])
    return rows


def _flags(tuning: Tuning, base: Scenario) -> list[str]:
    """The recommendation as vLLM takes it; with the table where it gains."""
    best = tuning.best.candidate
    gain = tuning.table_gain
    table = tuning.table if gain is not None and gain.mean > TIE * abs(tuning.best.mean) else None
    table = None if tuning.one_k else table
    k = max(row[2] for row in table) if table else best.k
    flags = []
    if k:
        speculation = base.engine.speculative_config
        method, _, model = (best.drafter or "").partition(":")
        config: dict[str, Any] = {"method": method or (speculation.method if speculation else "")}
        if not model and speculation is not None and speculation.model and config["method"] == speculation.method:
            model = speculation.model
        if model:
            config["model"] = model
        config["num_speculative_tokens"] = k
        if table:
            config["num_speculative_tokens_per_batch_size"] = table
        flags.append(f"--speculative-config {shlex.quote(json.dumps(config))}")
    if best.max_num_seqs is not None:
        flags.append(f"--max-num-seqs {best.max_num_seqs}")
    if best.watermark is not None:
        flags.append(f"--watermark {best.watermark:g}")
    return flags
