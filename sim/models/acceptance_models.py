"""Further acceptance models: spread between requests, memory from step to step, n-gram matches, drift, trees, classes.

Knows rates, draws and output positions. Must not know steps of an engine, its K or its policies: as in
`sim.models.acceptance`, `runs` is a pure function of (seed, request, output position), in any chunks and any order.

Position 0 is the token that the prefill samples, so the first verification stands at position 1; a verification at
position p that accepts a drafts is followed by one at p + a + 1. Models with memory are chains along positions, never
along an engine's steps, so that twins which differ in K, or one that was preempted, meet the same luck. What that means
for each of them stands in its docstring, and in docs/acceptance.md.

Rates of a model with spread between requests are those of all verifications pooled, over requests that are equally
long in tokens: a request whose drafts fail takes more verifications and weighs more, as in an engine's counters.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from sim.models.acceptance import PURPOSE, AcceptanceError, AcceptanceModel, Geometric, PerPosition
from workloads.streams import uniforms

__all__ = [
    "DRIFT_SCALE",
    "FIRST_POSITION",
    "BetaRequests",
    "Drafting",
    "Drift",
    "HiddenMarkov",
    "MarkovSteps",
    "MatchAndRun",
    "Mixture",
    "Tree",
    "acceptance_model",
    "accepted_variance",
    "drafted_of",
    "drafted_share_of",
    "tokens_per_step_of",
    "walked_runs",
]

FIRST_POSITION: Final = 1
"""Where the first verification of a request stands: the prefill has sampled position 0."""

DRIFT_SCALE: Final = 64.0
"""Positions over which the logarithm of `Drift` is linear at first."""

ESTIMATE_SEED, ESTIMATE_REQUESTS, ESTIMATE_TOKENS = 0, 256, 1024
"""Where a rate has no closed form it is counted over so many requests of so many tokens, walked under this seed."""

_QUANTILES: Final = 4096
_EFFECTS: Final = 201
_MEMO: Final = 65_536
_MAX_RUN: Final = 64

T = TypeVar("T")


def _special() -> Any:
    """SciPy's special functions; they take a tenth of a second to import, and most models do without."""
    from scipy import special

    return special


class Drafting(AcceptanceModel, Protocol):
    """An acceptance model that also says where there is a draft at all."""

    def drafted(self, request: int, first: int, count: int) -> NDArray[np.bool_]:
        """Entry j of `count`: whether the drafter proposes anything at output position first + j. Where it does not,
        `runs` says 0: an engine that puts K placeholders there all the same has them all rejected."""
        ...

    def drafted_share(self, k: int) -> float:
        """Share of the verifications that have drafts, walking with k."""
        ...

    def tokens_per_step(self, k: int) -> float:
        """Tokens a step, those without drafts included; `mean_acceptance_length` is over steps with drafts."""
        ...


class _Model:
    """What follows from the unconditional rates; a draft everywhere unless a model says otherwise."""

    seed: int
    max_run: int

    def unconditional_rates(self, k: int) -> list[float]:
        """See AcceptanceModel."""
        raise NotImplementedError

    def conditional_rates(self, k: int) -> list[float]:
        """See AcceptanceModel."""
        before = [1.0, *self.unconditional_rates(k)]
        return [after / ahead if ahead > 0 else 0.0 for ahead, after in pairwise(before)]

    def mean_acceptance_length(self, k: int) -> float:
        """See AcceptanceModel."""
        return 1.0 + sum(self.unconditional_rates(k))

    def drafted(self, request: int, first: int, count: int) -> NDArray[np.bool_]:
        """See Drafting."""
        return np.ones(count, dtype=np.bool_)

    def drafted_share(self, k: int) -> float:
        """See Drafting."""
        return 1.0

    def tokens_per_step(self, k: int) -> float:
        """See Drafting."""
        return 1.0 + self.drafted_share(k) * (self.mean_acceptance_length(k) - 1.0)


def accepted_variance(model: AcceptanceModel, k: int) -> float:
    """Variance of the drafts accepted by a verification with k drafts: sum (2 i - 1) u_i - (sum u_i)^2, with the
    unconditional rates u_i; between requests and within them together."""
    rates = model.unconditional_rates(k)
    return sum((2 * i - 1) * rate for i, rate in enumerate(rates, start=1)) - sum(rates) ** 2


def drafted_of(model: AcceptanceModel, request: int, first: int, count: int) -> NDArray[np.bool_]:
    """`Drafting.drafted`; true everywhere for a model that does not have it."""
    drafted = getattr(model, "drafted", None)
    if drafted is None:
        return np.ones(count, dtype=np.bool_)
    answer: NDArray[np.bool_] = drafted(request, first, count)
    return answer


def drafted_share_of(model: AcceptanceModel, k: int) -> float:
    """`Drafting.drafted_share`; 1 for a model that does not have it."""
    share = getattr(model, "drafted_share", None)
    return 1.0 if share is None else float(share(k))


def tokens_per_step_of(model: AcceptanceModel, k: int) -> float:
    """`Drafting.tokens_per_step`; the mean acceptance length for a model that does not have it."""
    tokens = getattr(model, "tokens_per_step", None)
    return model.mean_acceptance_length(k) if tokens is None else float(tokens(k))


def acceptance_model(section: Mapping[str, Any], seed: int) -> AcceptanceModel:
    """The model that an `acceptance` section of a scenario names, for all but replay and profile.

    Keys are the models' own parameters; a key that is None counts as left out. Raises AcceptanceError for a name that
    is not known or a parameter that does not fit.
    """
    name = str(section.get("model"))
    given = {key: value for key, value in section.items() if key != "model" and value is not None}
    if name == "mixture":
        classes = given["classes"]
        return Mixture(
            seed,
            [entry["weight"] for entry in classes],
            [acceptance_model(entry["acceptance"], seed) for entry in classes],
        )
    if name not in _BY_NAME:
        raise AcceptanceError(f"model = {name!r}: must be one of {', '.join([*_BY_NAME, 'mixture'])}")
    return _BY_NAME[name](seed, **given)


def walked_runs(
    model: AcceptanceModel, request: int, k: int, num_tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Drafts accepted, at most k, and whether there was a draft, by step of one request of `num_tokens` output tokens.

    The walk begins at position 1 and ends with the last step that begins before `num_tokens`; that step is not cut.
    """
    count = max(num_tokens - FIRST_POSITION, 0)
    runs = np.minimum(model.runs(request, FIRST_POSITION, count), k).tolist()
    steps = []
    position = 0
    while position < count:
        steps.append(position)
        position += runs[position] + 1
    at = np.asarray(steps, dtype=np.int64)
    accepted = np.asarray(runs, dtype=np.int64)[at]
    return accepted, drafted_of(model, request, FIRST_POSITION, count)[at]


class BetaRequests(_Model):
    """Geometric within a request, with a rate of its own that is Beta(alpha, beta) over requests.

    Pooled rates are E[w p^i] / E[w] with w = 1 / (1 + p + ... + p^k), over 4,096 equally likely quantiles of the Beta.
    The mean of the requests' own means is in closed form: `mean_over_requests`. `alpha`, `beta` above 0.
    """

    def __init__(self, seed: int, alpha: float, beta: float, max_run: int = _MAX_RUN) -> None:
        for name, value in (("alpha", alpha), ("beta", beta)):
            if not 0 < value < math.inf:
                raise AcceptanceError(f"{name} = {value!r}: must be above 0")
        _check_max_run(max_run)
        self.seed, self.alpha, self.beta, self.max_run = seed, float(alpha), float(beta), max_run
        self._table = lru_cache(maxsize=4096)(self._powers)

    def rate(self, request: int) -> float:
        """The conditional rate of that request."""
        u = uniforms(self.seed, f"{PURPOSE} request", request, 0, 1)[0]
        return float(_special().betaincinv(self.alpha, self.beta, u))

    def runs(self, request: int, first: int, count: int) -> NDArray[np.int64]:
        """See AcceptanceModel."""
        return _thresholded(uniforms(self.seed, PURPOSE, request, first, count), self._table(request))

    def unconditional_rates(self, k: int) -> list[float]:
        """See AcceptanceModel; pooled over verifications."""
        quantiles = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
        rates = _special().betaincinv(self.alpha, self.beta, quantiles)
        powers = rates[:, None] ** np.arange(k + 1)
        powers[:, self.max_run + 1 :] = 0.0
        weights = 1.0 / powers.sum(axis=1)
        return [float(x) for x in (weights @ powers[:, 1:]) / weights.sum()]

    def mean_over_requests(self, k: int) -> float:
        """Tokens a verification on average over requests, each counted once: 1 + sum over i of
        prod over j < i of (alpha + j) / (alpha + beta + j)."""
        total = power = 1.0
        for j in range(min(k, self.max_run)):
            power *= (self.alpha + j) / (self.alpha + self.beta + j)
            total += power
        return total

    def _powers(self, request: int) -> NDArray[np.float64]:
        powers: NDArray[np.float64] = self.rate(request) ** np.arange(1, self.max_run + 1, dtype=np.float64)
        return powers


class MarkovSteps(_Model):
    """What a step accepts depends on what the step before accepted, and on the request.

    `rates[a]` are the K conditional rates after a step that accepted a of K drafts, a = 0 ... K; `first` those of a
    request's first step (None: the average over the chain). `request_sigma`: standard deviation of a normal number,
    drawn for each request, that is added to the logit of every rate.

    K is the model's own: the table decides it. The step before a position p is the last step that began before p on
    the walk that starts at position 1 and is made with this K. An engine that drafts K each time is on this walk, and
    sees exactly the table. One that drafts otherwise, or was preempted, leaves the walk and may come back; off it,
    inside a step that accepted a, it sees the row of a. More than K drafts are never accepted.
    """

    def __init__(
        self,
        seed: int,
        rates: Sequence[Sequence[float]],
        first: Sequence[float] | None = None,
        request_sigma: float = 0.0,
    ) -> None:
        k = len(rates) - 1
        if k < 1:
            raise AcceptanceError("rates: needs a row for each number of accepted drafts, 0 to K, so two or more")
        for a, row in enumerate(rates):
            if len(row) != k:
                raise AcceptanceError(f"rates[{a}] has {len(row)} rates: {k + 1} rows mean K = {k}, so {k} rates a row")
            _check_rates(f"rates[{a}]", row)
        if first is not None:
            if len(first) != k:
                raise AcceptanceError(f"first has {len(first)} rates: expected K = {k}")
            _check_rates("first", first)
        if not 0 <= request_sigma < math.inf:
            raise AcceptanceError(f"request_sigma = {request_sigma!r}: must be 0 or more")
        self.seed, self.max_run, self.request_sigma = seed, k, float(request_sigma)
        self.rates = [[float(rate) for rate in row] for row in rates]
        rows = np.asarray(self.rates)
        if first is None:
            average, _ = _stationary_rates(np.cumprod(rows, axis=1))
            first = _conditional(average)
        self.first = [float(rate) for rate in first]
        self._logits = _special().logit(np.vstack([rows, self.first]))
        self._tables = lru_cache(maxsize=4096)(self._ascending)
        self._memo: dict[int, tuple[int, int, int]] = {}

    def effect(self, request: int) -> float:
        """What is added to the logits of that request's rates."""
        if self.request_sigma == 0:
            return 0.0
        u = float(uniforms(self.seed, f"{PURPOSE} request", request, 0, 1)[0])
        return self.request_sigma * float(_special().ndtri(min(max(u, 2.0**-54), 1 - 2.0**-53)))

    def runs(self, request: int, first: int, count: int) -> NDArray[np.int64]:
        """See AcceptanceModel."""
        k = self.max_run
        tables = self._tables(request)
        position, step_at, row = self._memo.get(request, (0, FIRST_POSITION, k + 1))
        if position > first:
            position, step_at, row = 0, FIRST_POSITION, k + 1
        runs = []
        for u in uniforms(self.seed, PURPOSE, request, position, first + count - position).tolist():
            run = k - bisect_right(tables[row], u)
            runs.append(run)
            if position == step_at:
                row = run
                step_at = position + run + 1
            position += 1
        _remember(self._memo, request, (first + count, step_at, row))
        return np.asarray(runs[len(runs) - count :], dtype=np.int64)

    def unconditional_rates(self, k: int) -> list[float]:
        """See AcceptanceModel. For the model's own K from the chain's stationary law, integrated over the requests'
        effect, and 0 beyond it; for a smaller k counted over 256 requests of 1,024 tokens under seed 0, whose effects
        are evenly spread quantiles."""
        own = self.max_run
        if k < own:
            return _counted_rates(_EvenEffects(ESTIMATE_SEED, self.rates, self.first, self.request_sigma), k)
        effects, weights = _normal_grid(self.request_sigma)
        pooled = np.zeros(own)
        total = 0.0
        for effect, weight in zip(effects, weights, strict=True):
            rates, _ = _stationary_rates(np.cumprod(_special().expit(self._logits[: own + 1] + effect), axis=1))
            steps = weight / (1.0 + rates.sum())
            pooled += steps * rates
            total += steps
        return [float(rate) for rate in pooled / total] + [0.0] * (k - own)

    def _ascending(self, request: int) -> list[list[float]]:
        rates = _special().expit(self._logits + self.effect(request))
        ascending: list[list[float]] = np.cumprod(rates, axis=1)[:, ::-1].tolist()
        return ascending


class _EvenEffects(MarkovSteps):
    """With the requests' effects spread evenly, for an estimate."""

    def effect(self, request: int) -> float:
        """Quantile (request + 1/2) / 256."""
        return self.request_sigma * float(_special().ndtri((request + 0.5) / ESTIMATE_REQUESTS))


class HiddenMarkov(_Model):
    """A hidden state moves along output positions; a verification at a position accepts by the state there.

    `transitions[i][j]`: from state i at a position to j at the next. `rates[i]`: conditional rates in state i, as many
    for each. `start`: law of the state at position 1, None for the stationary one; position 0 has the state of position
    1. The chain knows no steps and no K. With k drafts the state moves 1 + accepted positions from step to step, so the
    rates follow from the stationary law of sum over a of P(a | i) A^(a + 1).
    """

    def __init__(
        self,
        seed: int,
        transitions: Sequence[Sequence[float]],
        rates: Sequence[Sequence[float]],
        start: Sequence[float] | None = None,
    ) -> None:
        n = len(transitions)
        if n < 1 or len(rates) != n:
            raise AcceptanceError(f"{n} rows of transitions and {len(rates)} of rates: need one of each for each state")
        for i, row in enumerate(transitions):
            if len(row) != n:
                raise AcceptanceError(f"transitions[{i}] has {len(row)} entries for {n} states")
            _check_law(f"transitions[{i}]", row)
        for i, row in enumerate(rates):
            if len(row) != len(rates[0]) or not row:
                raise AcceptanceError(f"rates[{i}] has {len(row)} rates; every state needs as many, and one or more")
            _check_rates(f"rates[{i}]", row)
        if start is not None:
            if len(start) != n:
                raise AcceptanceError(f"start has {len(start)} entries for {n} states")
            _check_law("start", start)
        self.seed, self.max_run = seed, len(rates[0])
        matrix = np.asarray(transitions, dtype=np.float64)
        self._matrix = matrix / matrix.sum(axis=1, keepdims=True)
        self._start = _stationary(self._matrix) if start is None else np.asarray(start, dtype=np.float64)
        self._unconditional = np.cumprod(np.asarray(rates, dtype=np.float64), axis=1)
        self._ascending = np.ascontiguousarray(self._unconditional[:, ::-1])
        self._edges = np.cumsum(self._matrix, axis=1)[:, :-1].tolist()
        self._start_edges = np.cumsum(self._start)[:-1].tolist()
        self._memo: dict[int, tuple[int, int]] = {}

    def states(self, request: int, first: int, count: int) -> NDArray[np.int64]:
        """The hidden state at output positions first ... first + count - 1."""
        position, state = self._memo.get(request, (FIRST_POSITION, 0))
        if position > first:
            position = FIRST_POSITION
        stop = first + count
        states = []
        for u in uniforms(self.seed, f"{PURPOSE} state", request, position, max(stop - position, 1)).tolist():
            state = bisect_right(self._start_edges if position == FIRST_POSITION else self._edges[state], u)
            states.append(state)
            position += 1
        if first < FIRST_POSITION:
            states.insert(0, states[0])
        if stop >= position:
            _remember(self._memo, request, (position, state))
        skipped = len(states) - count if stop >= FIRST_POSITION + 1 else 0
        return np.asarray(states[skipped : skipped + count], dtype=np.int64)

    def runs(self, request: int, first: int, count: int) -> NDArray[np.int64]:
        """See AcceptanceModel."""
        draws = uniforms(self.seed, PURPOSE, request, first, count)
        states = self.states(request, first, count)
        runs = np.zeros(count, dtype=np.int64)
        for state, ascending in enumerate(self._ascending):
            there = states == state
            runs[there] = self.max_run - np.searchsorted(ascending, draws[there], side="right")
        return runs

    def unconditional_rates(self, k: int) -> list[float]:
        """See AcceptanceModel; of a long request."""
        rates = np.zeros((self._matrix.shape[0], k))
        width = min(k, self.max_run)
        rates[:, :width] = self._unconditional[:, :width]
        law = -np.diff(np.hstack([np.ones((rates.shape[0], 1)), rates, np.zeros((rates.shape[0], 1))]), axis=1)
        steps = np.zeros_like(self._matrix)
        power = np.eye(rates.shape[0])
        for a in range(k + 1):
            power = power @ self._matrix
            steps += law[:, a, None] * power
        return [float(rate) for rate in _stationary(steps) @ rates]


class MatchAndRun(_Model):
    """N-gram drafting: a match is found or not, in bursts, and then runs on.

    Along output positions: where the position before had no match, one begins with probability `start`; where a match
    has just ended, with `again`. The i-th token of a match is right with the conditional rate `rates[i - 1]`, the last
    of which holds from there on; at the first wrong token the match ends. A verification inside a match has drafts and
    accepts what is left of it; one outside has none. So a match longer than K goes on in the next step, and K changes
    nothing of it. At position 1 no match has come before.

    `mean_acceptance_length` and the rates are over steps with drafts, as vLLM prints them; `tokens_per_step` is over
    all. Closed form: the step chain over "no match" and the depth in a match.
    """

    def __init__(self, seed: int, start: float, again: float, rates: Sequence[float], max_run: int = _MAX_RUN) -> None:
        _check_rates("start, again", [start, again])
        if not rates:
            raise AcceptanceError("rates: must not be empty")
        _check_rates("rates", rates)
        _check_max_run(max_run)
        self.seed, self.max_run = seed, max_run
        self.start, self.again = float(start), float(again)
        self.rates = [float(rate) for rate in rates]
        self._memo: dict[int, tuple[int, int, float]] = {}

    def runs(self, request: int, first: int, count: int) -> NDArray[np.int64]:
        """See AcceptanceModel."""
        return self._walk(request, first, count)[0]

    def drafted(self, request: int, first: int, count: int) -> NDArray[np.bool_]:
        """See Drafting: whether there is a match."""
        return self._walk(request, first, count)[1]

    def drafted_share(self, k: int) -> float:
        """See Drafting."""
        return 1.0 - float(self._steps(k)[0])

    def unconditional_rates(self, k: int) -> list[float]:
        """See AcceptanceModel; over steps with drafts. 0 where there never is a match."""
        law = self._steps(k)[1:]
        if law.sum() <= 0:
            return [0.0] * k
        rates = law @ self._survival(k)[:, 1:] / law.sum()
        rates[self.max_run :] = 0.0
        return [float(rate) for rate in rates]

    def _walk(self, request: int, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        rates = self.rates
        last = len(rates) - 1
        position, depth, chance = self._memo.get(request, (0, -1, self.start))
        if position > first:
            position, depth, chance = 0, -1, self.start
        stop = first + count
        base = position
        drafted: list[bool] = []
        right: list[bool] = []
        ahead = stop + self.max_run
        accept = uniforms(self.seed, PURPOSE, request, base, ahead - base).tolist()
        match = uniforms(self.seed, f"{PURPOSE} match", request, base, ahead - base).tolist()
        while position < ahead and (position < stop or depth >= 0):
            if position == stop:
                _remember(self._memo, request, (position, depth, chance))
            number = position - base
            if depth < 0 and position >= FIRST_POSITION and match[number] < chance:
                depth = 0
            if depth < 0:
                drafted.append(False)
                right.append(False)
                chance = self.start
            else:
                drafted.append(True)
                accepted = accept[number] < rates[depth if depth < last else last]
                right.append(accepted)
                depth = depth + 1 if accepted else -1
                if not accepted:
                    chance = self.again
            position += 1
        if position == stop:
            _remember(self._memo, request, (position, depth, chance))
        wrong = ~np.asarray(right, dtype=np.bool_)
        places = np.arange(len(right))
        after = np.where(wrong, places, len(right))
        after = np.minimum.accumulate(after[::-1])[::-1]
        runs = np.minimum(after - places, self.max_run)
        span = slice(first - base, stop - base)
        return runs[span].astype(np.int64), np.asarray(drafted, dtype=np.bool_)[span]

    def _rate_at(self, depth: int) -> float:
        return self.rates[min(depth, len(self.rates) - 1)]

    def _survival(self, k: int) -> NDArray[np.float64]:
        """Row d: probabilities that a verification at depth d of a match accepts 0, 1, ..., k or more."""
        n = len(self.rates)
        rates = np.array([[self._rate_at(d + i) for i in range(k)] for d in range(n)]).reshape(n, k)
        return np.hstack([np.ones((n, 1)), np.cumprod(rates, axis=1)])

    def _steps(self, k: int) -> NDArray[np.float64]:
        """Stationary law at the steps: entry 0 without a match, entry 1 + d at depth d (the last: or deeper)."""
        n = len(self.rates)
        chain = np.zeros((n + 1, n + 1))
        chain[0, 0], chain[0, 1] = 1.0 - self.start, self.start
        full = self._survival(k)[:, k]
        for d in range(n):
            goes_on = full[d] * self._rate_at(d + k)  # the bonus token is the match's, too
            chain[1 + d, 1 + min(d + k + 1, n - 1)] += goes_on
            chain[1 + d, 1] += (1.0 - goes_on) * self.again
            chain[1 + d, 0] += (1.0 - goes_on) * (1.0 - self.again)
        return _stationary(chain)


class Drift(_Model):
    """One conditional rate that changes along the request: logit(rate at p) = logit(`rate`) + `slope` ln(1 + p / 64).

    `rate` strictly between 0 and 1, `slope` any number. Rates are exact averages over the verifications of a request of
    `horizon` output tokens, by the probability that the walk with k visits each position.
    """

    def __init__(self, seed: int, rate: float, slope: float, horizon: int = 512, max_run: int = _MAX_RUN) -> None:
        if not 0 < rate < 1:
            raise AcceptanceError(f"rate = {rate!r}: must be above 0 and below 1")
        if not -math.inf < slope < math.inf:
            raise AcceptanceError(f"slope = {slope!r}: must be a number")
        if horizon < 2:
            raise AcceptanceError(f"horizon: must be 2 or more, got {horizon!r}")
        _check_max_run(max_run)
        self.seed, self.rate, self.slope, self.horizon, self.max_run = seed, float(rate), float(slope), horizon, max_run

    def rate_at(self, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """The conditional rate at those output positions."""
        logits = _special().logit(self.rate) + self.slope * np.log1p(positions / DRIFT_SCALE)
        rates: NDArray[np.float64] = np.clip(_special().expit(logits), 1e-300, 1 - 1e-15)
        return rates

    def runs(self, request: int, first: int, count: int) -> NDArray[np.int64]:
        """See AcceptanceModel."""
        draws = uniforms(self.seed, PURPOSE, request, first, count)
        rates = self.rate_at(np.arange(first, first + count))
        with np.errstate(divide="ignore"):
            exact = np.log(draws) / np.log(rates)  # rate^run > draw
        runs: NDArray[np.int64] = np.minimum(np.ceil(exact) - 1, self.max_run).astype(np.int64)
        return runs

    def unconditional_rates(self, k: int) -> list[float]:
        """See AcceptanceModel; over a request of `horizon` tokens."""
        rates = self.rate_at(np.arange(self.horizon))
        powers = rates[:, None] ** np.arange(k + 1)
        powers[:, self.max_run + 1 :] = 0.0
        law = powers.copy()
        law[:, :-1] -= powers[:, 1:]
        visits = np.zeros(self.horizon + k + 1)
        visits[FIRST_POSITION] = 1.0
        for position in range(FIRST_POSITION, self.horizon):
            visits[position + 1 : position + k + 2] += visits[position] * law[position]
        visits = visits[: self.horizon]
        return [float(rate) for rate in visits @ powers[:, 1:] / visits.sum()]


class Tree(PerPosition):
    """A tree of drafts, by level: a level goes on if one of its candidates is accepted.

    `rates[i]`: the rate of a single candidate at level i, given that the level before was accepted; `widths[i]`: how
    many candidates the accepted node has there. Assumes that the candidates of a node are accepted independently, so
    level i is passed with 1 - (1 - rate)^width. A run is a depth; widths of 1 are a chain.
    """

    def __init__(self, seed: int, rates: Sequence[float], widths: Sequence[int]) -> None:
        if len(rates) != len(widths):
            raise AcceptanceError(f"{len(rates)} rates and {len(widths)} widths: need one of each for each level")
        for level, width in enumerate(widths):
            if width < 1:
                raise AcceptanceError(f"widths[{level}] = {width!r}: must be 1 or more")
        _check_rates("rates", rates)
        super().__init__(seed, [1.0 - (1.0 - rate) ** width for rate, width in zip(rates, widths, strict=True)])


class Mixture(_Model):
    """Classes of requests, each with a model of its own; the class is drawn for each request.

    `weights`: in proportion, shares of the requests. Rates are pooled over verifications with drafts: a class counts by
    its share of the requests over its tokens a step. `models` should have one seed, the mixture's.
    """

    def __init__(self, seed: int, weights: Sequence[float], models: Sequence[AcceptanceModel]) -> None:
        if len(weights) != len(models) or not models:
            raise AcceptanceError(f"{len(weights)} weights for {len(models)} models: need one each, and one or more")
        for number, weight in enumerate(weights):
            if not 0 <= weight < math.inf:
                raise AcceptanceError(f"weights[{number}] = {weight!r}: must be 0 or more")
        if not sum(weights) > 0:
            raise AcceptanceError("weights: one must be above 0")
        self.seed, self.models = seed, list(models)
        self.weights = [float(weight) / sum(weights) for weight in weights]
        self._edges = np.cumsum(self.weights)[:-1].tolist()
        self.max_run = max(int(getattr(model, "max_run", _MAX_RUN)) for model in models)

    def model(self, request: int) -> AcceptanceModel:
        """The model of that request's class."""
        u = float(uniforms(self.seed, f"{PURPOSE} class", request, 0, 1)[0])
        return self.models[bisect_right(self._edges, u)]

    def runs(self, request: int, first: int, count: int) -> NDArray[np.int64]:
        """See AcceptanceModel."""
        return self.model(request).runs(request, first, count)

    def drafted(self, request: int, first: int, count: int) -> NDArray[np.bool_]:
        """See Drafting."""
        return drafted_of(self.model(request), request, first, count)

    def drafted_share(self, k: int) -> float:
        """See Drafting."""
        steps = self._steps_per_token(k)
        return float(steps @ [drafted_share_of(model, k) for model in self.models] / steps.sum())

    def unconditional_rates(self, k: int) -> list[float]:
        """See AcceptanceModel."""
        drafts = self._steps_per_token(k) * [drafted_share_of(model, k) for model in self.models]
        if drafts.sum() <= 0:
            return [0.0] * k
        rates = np.array([model.unconditional_rates(k) for model in self.models])
        return [float(rate) for rate in drafts @ rates / drafts.sum()]

    def _steps_per_token(self, k: int) -> NDArray[np.float64]:
        return np.asarray(self.weights) / [tokens_per_step_of(model, k) for model in self.models]


_BY_NAME: Final[Mapping[str, Callable[..., AcceptanceModel]]] = {
    "geometric": Geometric,
    "per_position": PerPosition,
    "beta": BetaRequests,
    "markov": MarkovSteps,
    "hidden_markov": HiddenMarkov,
    "match_and_run": MatchAndRun,
    "drift": Drift,
    "tree": Tree,
}


def _check_max_run(max_run: int) -> None:
    if max_run < 1:
        raise AcceptanceError(f"max_run: must be above 0, got {max_run!r}")


def _check_rates(name: str, rates: Sequence[float]) -> None:
    for number, rate in enumerate(rates):
        if not 0 <= rate <= 1:
            raise AcceptanceError(f"{name}[{number}] = {rate!r}: must be between 0 and 1")


def _check_law(name: str, law: Sequence[float]) -> None:
    _check_rates(name, law)
    if abs(sum(law) - 1.0) > 1e-3:
        raise AcceptanceError(f"{name} adds up to {sum(law):.6g}: probabilities add up to 1")


def _thresholded(draws: NDArray[np.float64], unconditional: NDArray[np.float64]) -> NDArray[np.int64]:
    """As in `sim.models.acceptance`: a run is the number of unconditional rates above the draw."""
    runs: NDArray[np.int64] = unconditional.size - np.searchsorted(unconditional[::-1], draws, side="right")
    return runs.astype(np.int64)


def _conditional(unconditional: NDArray[np.float64]) -> list[float]:
    before = [1.0, *unconditional.tolist()]
    return [after / ahead if ahead > 0 else 0.0 for ahead, after in pairwise(before)]


def _stationary(chain: NDArray[np.float64]) -> NDArray[np.float64]:
    """The long-run law of a chain (rows add up to 1); the average of the states reached from all alike if several."""
    n = chain.shape[0]
    lazy = 0.5 * (chain + np.eye(n))
    for _ in range(60):  # the 2^60th power
        lazy = lazy @ lazy
        lazy /= lazy.sum(axis=1, keepdims=True)
    law: NDArray[np.float64] = lazy.mean(axis=0)
    return law


def _stationary_rates(unconditional: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Unconditional rates in the long run of a step chain, and the law of the accepted drafts.

    Row a of `unconditional`, shape (K + 1, K): rates after a step that accepted a.
    """
    edges = np.hstack([np.ones((unconditional.shape[0], 1)), unconditional, np.zeros((unconditional.shape[0], 1))])
    law = _stationary(-np.diff(edges, axis=1))
    return law @ unconditional, law


def _normal_grid(sigma: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Points and weights for the expectation over a normal number of that standard deviation."""
    if sigma == 0:
        return np.zeros(1), np.ones(1)
    points = np.linspace(-6.0, 6.0, _EFFECTS)
    weights = np.exp(-0.5 * points**2)
    return sigma * points, weights / weights.sum()


def _counted_rates(model: AcceptanceModel, k: int) -> list[float]:
    steps = 0
    accepted = np.zeros(k + 1)
    for request in range(ESTIMATE_REQUESTS):
        walk, _ = walked_runs(model, request, k, ESTIMATE_TOKENS)
        accepted += np.bincount(walk, minlength=k + 1)
        steps += walk.size
    return [float(accepted[i:].sum() / steps) for i in range(1, k + 1)]


def _remember(memo: dict[int, T], request: int, where: T) -> None:
    """Keep where a request's chain stands: only a matter of speed, any call can begin anew."""
    if request not in memo and len(memo) >= _MEMO:
        memo.clear()
    memo[request] = where
