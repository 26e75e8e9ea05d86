"""Acceptance models fitted by maximum likelihood to what was observed, with 95 percent intervals, and compared.

Knows counts of accepted drafts, likelihoods and scipy's optimisers. Must not know files or formats: they are
`sim.acceptance_sources`.

Every fit is a likelihood of steps: the chance of what a step accepted, given what came before. The held-out figure is
nats a step over five folds, request i in fold i mod 5 (record i where only sums are known), each predicted from the
other four. Intervals come from the observed information on the scale of logits or logarithms (rates that are shares
have Wilson's); they take the model to be true.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from sim.models.acceptance import AcceptanceError, AcceptanceModel
from sim.models.acceptance_models import DRIFT_SCALE, FIRST_POSITION, acceptance_model

__all__ = [
    "MODELS",
    "Counts",
    "Evidence",
    "Figures",
    "Fit",
    "Parameter",
    "Steps",
    "fit",
    "geometric_rate",
    "steps_from_lengths",
    "unsupported",
]

FOLDS: Final = 5
_Z: Final = 1.959963984540054
_FEWEST_REQUESTS: Final = 10

Floats = NDArray[np.float64]


# What was observed


@dataclass(frozen=True)
class Steps:
    """Every verification of every request, in order.

    `accepted[r]`: drafts accepted by the steps of request r, 0 to `k`. `drafted[r]`: whether each had drafts; None
    where that was not recorded (then a step that accepted nothing may have had none). `first`: output position of a
    request's first step. Raises AcceptanceError for no steps or a number outside 0 to k.
    """

    k: int
    accepted: tuple[NDArray[np.int64], ...]
    drafted: tuple[NDArray[np.bool_], ...] | None = None
    first: int = FIRST_POSITION

    def __post_init__(self) -> None:
        if not self.accepted or not any(a.size for a in self.accepted):
            raise AcceptanceError("there is no step to fit")
        for number, accepted in enumerate(self.accepted):
            if accepted.size and not 0 <= int(accepted.min()) <= int(accepted.max()) <= self.k:
                raise AcceptanceError(f"request {number}: accepted drafts must be 0 to K = {self.k}")

    @property
    def num_steps(self) -> int:
        """Verifications, those without drafts included."""
        return sum(a.size for a in self.accepted)

    def of(self, requests: Sequence[int]) -> Steps:
        """Those requests alone."""
        drafted = None if self.drafted is None else tuple(self.drafted[r] for r in requests)
        return Steps(self.k, tuple(self.accepted[r] for r in requests), drafted, self.first)

    @cached_property
    def flat(self) -> _Flat:
        """All steps with drafts in one row."""
        size = [a.size for a in self.accepted]
        accepted = np.concatenate(self.accepted)
        previous = np.concatenate([np.concatenate([[self.k + 1], a[:-1]])[: a.size] for a in self.accepted])
        position = np.concatenate(
            [self.first + np.concatenate([[0], np.cumsum(a + 1)[:-1]])[: a.size] for a in self.accepted]
        )
        request = np.repeat(np.arange(len(size)), size)
        if self.drafted is None:
            return _Flat(accepted, previous, position, request, accepted.size)
        there = np.concatenate(self.drafted)
        return _Flat(accepted[there], previous[there], position[there], request[there], there.size)


@dataclass(frozen=True)
class _Flat:
    accepted: NDArray[np.int64]
    previous: NDArray[np.int64]
    """Accepted by the step before; K + 1 for a request's first."""
    position: NDArray[np.int64]
    request: NDArray[np.int64]
    num_steps: int
    """Steps without drafts included."""


@dataclass(frozen=True)
class Counts:
    """Sums as vLLM counts them. Row g: `num_drafts[g]` verifications with drafts, of which `accepted[g, i]` accepted
    draft i + 1; shape (groups, k). Groups are folds for the held-out likelihood, or one."""

    k: int
    num_drafts: Floats
    accepted: Floats

    def __post_init__(self) -> None:
        if not self.num_drafts.sum() > 0:
            raise AcceptanceError("there is no verification with drafts to fit")
        edges = np.hstack([self.num_drafts[:, None], self.accepted])
        if (edges < 0).any() or (np.diff(edges.sum(axis=0)) > 1e-6 * self.num_drafts.sum()).any():
            raise AcceptanceError("accepted at a position: must be 0 or more, and never above the position before")

    @property
    def num_steps(self) -> int:
        """Verifications with drafts."""
        return round(float(self.num_drafts.sum()))


@dataclass(frozen=True)
class Figures:
    """A few numbers without counts: unconditional rates, or a mean length with the bonus token."""

    k: int
    rates: tuple[float, ...] | None = None
    length: float | None = None


Evidence = Steps | Counts | Figures


def steps_from_lengths(lengths: Sequence[Sequence[int]], k: int, first: int = FIRST_POSITION) -> Steps:
    """Walk recorded accepted lengths with K = k: p += min(length[p], k + 1), from position `first`.

    `lengths[r][p]`: tokens that a verification at output position p of request r yields, the bonus token included. The
    last step of a request is left out: the end of the output cuts it. A request with no other step gives none.
    """
    if k < 1:
        raise AcceptanceError(f"k = {k!r}: must be 1 or more")
    walks = []
    for sequence in lengths:
        accepted = []
        position, end = first, len(sequence)
        while position < end:
            step = min(sequence[position], k + 1)
            accepted.append(step - 1)
            position += step
        walks.append(np.asarray(accepted[:-1], dtype=np.int64))
    return Steps(k, tuple(walks), None, first)


# What comes out


@dataclass(frozen=True)
class Parameter:
    """A fitted number; `low`, `high`: its 95 percent interval, None where the source has no counts."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Fit:
    """One model, fitted. `section` is what a scenario says under `acceptance`."""

    model: str
    section: Mapping[str, Any]
    parameters: tuple[Parameter, ...]
    k: int
    num_steps: int
    log_likelihood: float | None
    """Nats a step on the data it was fitted to."""
    held_out: float | None
    """Nats a step on requests that were held out; None where there is too little to split."""
    notes: tuple[str, ...] = field(default=())

    def build(self, seed: int) -> AcceptanceModel:
        """The model, to draw from."""
        return acceptance_model(self.section, seed)


def unsupported(model: str, evidence: Evidence, widths: Sequence[int] | None = None) -> str | None:
    """Why that model cannot be fitted to this, or None if it can."""
    if model not in MODELS:
        raise AcceptanceError(f"model {model!r} is not known; allowed: {', '.join(MODELS)}")
    kind = MODELS[model]
    if kind.needs_widths and widths is None:
        return "needs the widths of the tree's levels"
    if isinstance(evidence, Figures):
        if model == "geometric" or (model in ("per_position", "tree") and evidence.rates is not None):
            return None
        return "needs more than a few rates" if evidence.rates is not None else "needs more than a mean length"
    if isinstance(evidence, Counts):
        return None if kind.from_sums else "needs every step of single requests, and the source has sums"
    usable = sum(1 for accepted in evidence.accepted if accepted.size)
    if model == "hidden_markov" and evidence.drafted is not None:
        return "has no word for steps without drafts, which the source tells apart; match_and_run has"
    if kind.fewest_requests > usable:
        return f"needs {kind.fewest_requests} requests, and the source has {usable}"
    return None


def fit(
    model: str, evidence: Evidence, *, widths: Sequence[int] | None = None, states: int = 3, held_out: bool = True
) -> Fit:
    """Fit that model (a name in `MODELS`).

    `widths`: of a tree's levels, for `tree`. `states`: of `hidden_markov`, or classes of `mixture` (states - 1).
    `held_out`: also fit five times to four fifths. Raises AcceptanceError where `unsupported` has a reason.
    """
    reason = unsupported(model, evidence, widths)
    if reason is not None:
        raise AcceptanceError(f"{model}: {reason}")
    kind = MODELS[model](evidence.k, widths, states)
    if isinstance(evidence, Figures):
        return _fit_figures(kind, model, evidence)
    theta = kind.fit(evidence)
    kind.near = theta
    parameters = kind.parameters(theta, evidence)
    total = kind.log_likelihood(theta, evidence) + _drafting(evidence, evidence)
    across = None
    parts = _parts(evidence)
    if held_out and len(parts) > 1:
        told = 0.0
        for number, part in enumerate(parts):
            rest = _joined([other for place, other in enumerate(parts) if place != number], evidence)
            told += kind.log_likelihood(kind.fit(rest), part) + _drafting(rest, part)
        across = told / sum(part.num_steps for part in parts)
    return Fit(
        model,
        {"model": kind.scenario_name or model, **kind.section(theta)},
        tuple(parameters),
        evidence.k,
        evidence.num_steps,
        total / evidence.num_steps,
        across,
        tuple(kind.notes),
    )


def geometric_rate(length: float, k: int) -> float:
    """The conditional rate with which k drafts yield `length` tokens: 1 + r + ... + r^k = length. Raises
    AcceptanceError for a length outside 1 to k + 1."""
    if not 1 <= length <= k + 1:
        raise AcceptanceError(f"length = {length!r}: with K = {k} a mean length is from 1 to {k + 1}")
    if length in (1, k + 1):
        return 0.0 if length == 1 else 1.0
    return float(optimize.brentq(lambda rate: sum(rate**i for i in range(k + 1)) - length, 0.0, 1.0, xtol=1e-14))


def _fit_figures(kind: _Kind, model: str, figures: Figures) -> Fit:
    if model == "geometric":
        length = 1.0 + sum(figures.rates) if figures.rates is not None else figures.length
        assert length is not None
        theta = np.array([geometric_rate(length, figures.k)])
    else:
        assert figures.rates is not None
        unconditional = np.array([[1.0, *figures.rates]])
        theta = kind.fit(Counts(figures.k, unconditional[:, 0], unconditional[:, 1:]))
    values = tuple(Parameter(p.name, p.value) for p in kind.parameters(theta, None))
    return Fit(model, {"model": model, **kind.section(theta)}, values, figures.k, 0, None, None)


def _parts(evidence: Steps | Counts) -> list[Steps | Counts]:
    if isinstance(evidence, Counts):
        there = [g for g in range(evidence.num_drafts.size) if evidence.num_drafts[g] > 0]
        return [Counts(evidence.k, evidence.num_drafts[[g]], evidence.accepted[[g]]) for g in there]
    requests = [r for r, accepted in enumerate(evidence.accepted) if accepted.size]
    if len(requests) < 2 * FOLDS:
        return []
    return [evidence.of(requests[fold::FOLDS]) for fold in range(FOLDS)]


def _joined(parts: Sequence[Steps | Counts], whole: Steps | Counts) -> Steps | Counts:
    if isinstance(whole, Counts):
        sums = [part for part in parts if isinstance(part, Counts)]
        drafts = np.concatenate([part.num_drafts for part in sums])
        return Counts(whole.k, drafts, np.vstack([part.accepted for part in sums]))
    steps = [part for part in parts if isinstance(part, Steps)]
    accepted = tuple(a for part in steps for a in part.accepted)
    drafted = None if whole.drafted is None else tuple(d for part in steps for d in part.drafted or ())
    return Steps(whole.k, accepted, drafted, whole.first)


def _drafting(seen: Steps | Counts, told: Steps | Counts) -> float:
    """Nats for whether there was a draft, by its share alone; MatchAndRun takes it off again, for it knows better."""
    if isinstance(seen, Counts) or isinstance(told, Counts) or told.drafted is None:
        return 0.0
    with_drafts, steps = seen.flat.accepted.size, seen.flat.num_steps
    if with_drafts == steps:
        return 0.0
    share = (with_drafts + 0.5) / (steps + 1.0)
    some = told.flat.accepted.size
    return some * math.log(share) + (told.flat.num_steps - some) * math.log1p(-share)


# The models, one class each: theta is a vector on the scale that is optimised


class _Kind(ABC):
    from_sums = False
    fewest_requests = 1
    needs_widths = False
    scenario_name = ""
    """Where a scenario calls the model otherwise."""

    def __init__(self, k: int, widths: Sequence[int] | None, states: int) -> None:
        self.k = k
        self.widths = widths
        self.states = states
        self.notes: list[str] = []
        self.near: Floats | None = None
        """Where a fit to a part of the data may begin: the fit to all of it."""

    @abstractmethod
    def fit(self, data: Steps | Counts) -> Floats: ...

    @abstractmethod
    def log_likelihood(self, theta: Floats, data: Steps | Counts) -> float: ...

    @abstractmethod
    def section(self, theta: Floats) -> dict[str, Any]: ...

    @abstractmethod
    def parameters(self, theta: Floats, data: Steps | Counts | None) -> list[Parameter]: ...


def _steps(data: Steps | Counts) -> Steps:
    assert isinstance(data, Steps)
    return data


def _tries(data: Steps | Counts) -> tuple[Floats, Floats]:
    """By position: drafts accepted, and drafts that came to be judged (all before them were accepted)."""
    if isinstance(data, Counts):
        accepted = data.accepted.sum(axis=0)
        return accepted, np.concatenate([[data.num_drafts.sum()], accepted[:-1]])
    counts = np.bincount(data.flat.accepted, minlength=data.k + 1).astype(np.float64)
    reached = counts[::-1].cumsum()[::-1]
    return reached[1:], reached[:-1]


def _share(accepted: Floats, judged: Floats) -> Floats:
    """accepted / judged; where that is 0, 1 or nothing, a half of a success and of a failure are added."""
    edge = (accepted <= 0) | (accepted >= judged)
    return np.where(edge, (accepted + 0.5) / (judged + 1.0), accepted / np.maximum(judged, 1e-300))


def _bernoulli(rates: Floats, accepted: Floats, judged: Floats) -> float:
    return float((special.xlogy(accepted, rates) + special.xlog1py(judged - accepted, -rates)).sum())


def _wilson(name: str, rate: float, accepted: float, judged: float) -> Parameter:
    if judged <= 0:
        return Parameter(name, rate, 0.0, 1.0)
    share = accepted / judged
    centre = (share + _Z**2 / (2 * judged)) / (1 + _Z**2 / judged)
    half = _Z / (1 + _Z**2 / judged) * math.sqrt(share * (1 - share) / judged + _Z**2 / (4 * judged**2))
    return Parameter(name, rate, max(centre - half, 0.0), min(centre + half, 1.0))


def _rounded(values: Floats) -> list[float]:
    return [round(float(value), 6) for value in values]


class _Geometric(_Kind):
    from_sums = True

    def fit(self, data: Steps | Counts) -> Floats:
        accepted, judged = _tries(data)
        return _share(accepted.sum(keepdims=True), judged.sum(keepdims=True))

    def log_likelihood(self, theta: Floats, data: Steps | Counts) -> float:
        return _bernoulli(theta, *_tries(data))

    def section(self, theta: Floats) -> dict[str, Any]:
        return {"rate": round(float(theta[0]), 6)}

    def parameters(self, theta: Floats, data: Steps | Counts | None) -> list[Parameter]:
        if data is None:
            return [Parameter("rate", float(theta[0]))]
        accepted, judged = _tries(data)
        return [_wilson("rate", float(theta[0]), float(accepted.sum()), float(judged.sum()))]


class _PerPosition(_Kind):
    from_sums = True

    def fit(self, data: Steps | Counts) -> Floats:
        return _share(*_tries(data))

    def log_likelihood(self, theta: Floats, data: Steps | Counts) -> float:
        return _bernoulli(theta, *_tries(data))

    def section(self, theta: Floats) -> dict[str, Any]:
        return {"rates": _rounded(theta), "convention": "conditional"}

    def parameters(self, theta: Floats, data: Steps | Counts | None) -> list[Parameter]:
        if data is None:
            return [Parameter(f"rates[{i}]", float(rate)) for i, rate in enumerate(theta)]
        accepted, judged = _tries(data)
        return [
            _wilson(f"rates[{i}]", float(theta[i]), float(accepted[i]), float(judged[i])) for i in range(theta.size)
        ]


class _Tree(_PerPosition):
    needs_widths = True

    def __init__(self, k: int, widths: Sequence[int] | None, states: int) -> None:
        super().__init__(k, widths, states)
        if widths is not None and (len(widths) != k or any(width < 1 for width in widths)):
            raise AcceptanceError(f"widths {list(widths)}: a tree of depth {k} needs {k} widths, each 1 or more")

    def _single(self, level: Floats) -> Floats:
        assert self.widths is not None
        single: Floats = 1.0 - (1.0 - level) ** (1.0 / np.asarray(self.widths, dtype=np.float64))
        return single

    def section(self, theta: Floats) -> dict[str, Any]:
        assert self.widths is not None
        return {"rates": _rounded(self._single(theta)), "widths": list(self.widths)}

    def parameters(self, theta: Floats, data: Steps | Counts | None) -> list[Parameter]:
        single = self._single(theta)
        found = []
        for i, level in enumerate(super().parameters(theta, data)):
            ends = [None if end is None else float(self._one(end, i)) for end in (level.low, level.high)]
            found.append(Parameter(f"rates[{i}]", float(single[i]), *ends))
        return found

    def _one(self, rate: float, level: int) -> float:
        assert self.widths is not None
        return 1.0 - float((1.0 - rate) ** (1.0 / self.widths[level]))


class _Beta(_Kind):
    fewest_requests = _FEWEST_REQUESTS

    def fit(self, data: Steps | Counts) -> Floats:
        accepted, rejected = _by_request(_steps(data))
        judged = accepted + rejected
        mean = float((accepted.sum() + 0.5) / (judged.sum() + 1.0))
        start = np.log([20 * mean, 20 * (1 - mean)])
        return _least(lambda theta: -self._total(theta, accepted, rejected), start, bounds=[(-7.0, 14.0)] * 2)

    def log_likelihood(self, theta: Floats, data: Steps | Counts) -> float:
        return self._total(theta, *_by_request(_steps(data)))

    @staticmethod
    def _total(theta: Floats, accepted: Floats, rejected: Floats) -> float:
        alpha, beta = np.exp(theta)
        return float((special.betaln(alpha + accepted, beta + rejected) - special.betaln(alpha, beta)).sum())

    def section(self, theta: Floats) -> dict[str, Any]:
        return {"alpha": round(math.exp(theta[0]), 6), "beta": round(math.exp(theta[1]), 6)}

    def parameters(self, theta: Floats, data: Steps | Counts | None) -> list[Parameter]:
        assert data is not None
        error = _errors(lambda at: -self.log_likelihood(at, data), theta)
        return [_ranged(name, np.exp, theta[i], error[i]) for i, name in enumerate(("alpha", "beta"))]


class _Markov(_Kind):
    """Row a: after a accepted; row K + 1: the first step."""

    def _table(self, data: Steps | Counts) -> tuple[Floats, Floats]:
        flat = _steps(data).flat
        k = self.k
        counts = np.zeros((k + 2, k + 1))
        np.add.at(counts, (flat.previous, flat.accepted), 1.0)
        reached = counts[:, ::-1].cumsum(axis=1)[:, ::-1]
        return reached[:, 1:], reached[:, :-1]

    def fit(self, data: Steps | Counts) -> Floats:
        return _share(*self._table(data)).ravel()

    def log_likelihood(self, theta: Floats, data: Steps | Counts) -> float:
        return _bernoulli(theta.reshape(self.k + 2, self.k), *self._table(data))

    def section(self, theta: Floats) -> dict[str, Any]:
        rows = [_rounded(row) for row in theta.reshape(self.k + 2, self.k)]
        return {"rates": rows[:-1], "first": rows[-1]}

    def parameters(self, theta: Floats, data: Steps | Counts | None) -> list[Parameter]:
        assert data is not None
        accepted, judged = (table.ravel() for table in self._table(data))
        names = _table_names(self.k)
        return [_wilson(names[i], float(theta[i]), float(accepted[i]), float(judged[i])) for i in range(theta.size)]


class _MarkovRequest(_Markov):
    """theta: logits of the table, then ln(sigma). The effect of a request is integrated over 121 even points."""

    fewest_requests = _FEWEST_REQUESTS
    scenario_name = "markov"
    _points = np.linspace(-5.0, 5.0, 121)
    _log_weights = -0.5 * _points**2 - special.logsumexp(-0.5 * _points**2)

    def _cells(self, data: Steps | Counts) -> tuple[Floats, Floats]:
        """Accepted and rejected, shape (requests, (K + 2) K)."""
        steps = _steps(data)
        flat, k = steps.flat, self.k
        counts = np.zeros((len(steps.accepted), k + 2, k + 1))
        np.add.at(counts, (flat.request, flat.previous, flat.accepted), 1.0)
        reached = counts[:, :, ::-1].cumsum(axis=2)[:, :, ::-1]
        accepted, judged = reached[:, :, 1:], reached[:, :, :-1]
        return accepted.reshape(len(counts), -1), (judged - accepted).reshape(len(counts), -1)

    def fit(self, data: Steps | Counts) -> Floats:
        accepted, rejected = self._cells(data)
        won, seen = accepted.sum(axis=0), (accepted + rejected).sum(axis=0)
        rates = _share(won, seen)
        start = np.append(special.logit(rates), math.log(0.3))
        # Scaled by about the square root of the information, so that all directions are alike.
        scale = 1.0 / np.sqrt(np.append(np.maximum(seen * rates * (1.0 - rates), 1.0), len(accepted)))
        edges = np.append(np.full(rates.size, 12.0), 7.0)
        both = lru_cache(maxsize=2)(lambda at: self._loss(np.array(at) * scale, accepted, rejected))

        def loss(at: Floats) -> float:
            return float(both(tuple(at.tolist()))[0])

        def gradient(at: Floats) -> Floats:
            slope: Floats = both(tuple(at.tolist()))[1] * scale
            return slope

        begin: Floats = start / scale
        bounds = list(zip((-edges / scale).tolist(), (edges / scale).tolist(), strict=True))
        found = optimize.minimize(loss, begin, jac=gradient, method="L-BFGS-B", bounds=bounds)
        best: Floats = found.x * scale
        return best

    def log_likelihood(self, theta: Floats, data: Steps | Counts) -> float:
        return -self._loss(theta, *self._cells(data))[0]

    def _loss(self, theta: Floats, accepted: Floats, rejected: Floats) -> tuple[float, Floats]:
        sigma = math.exp(theta[-1])
        logits = theta[:-1, None] + sigma * self._points
        right = special.expit(logits)
        joint = accepted @ special.log_expit(logits) + rejected @ special.log_expit(-logits) + self._log_weights
        total = special.logsumexp(joint, axis=1, keepdims=True)
        posterior = np.exp(joint - total)
        # d/dlogit of a cell: accepted - judged * right, averaged over the posterior of the request's effect.
        seen = posterior.T @ (accepted + rejected)  # (points, cells)
        won = posterior.T @ accepted
        slope = won - seen * right.T
        gradient = np.append(slope.sum(axis=0), sigma * float(self._points @ slope.sum(axis=1)))
        return -float(total.sum()), -gradient

    def section(self, theta: Floats) -> dict[str, Any]:
        sigma = round(math.exp(theta[-1]), 6)
        return {**super().section(special.expit(theta[:-1])), "request_sigma": sigma}

    def parameters(self, theta: Floats, data: Steps | Counts | None) -> list[Parameter]:
        assert data is not None
        accepted, rejected = self._cells(data)
        error = _errors_by_gradient(lambda at: self._loss(at, accepted, rejected)[1], theta)
        names = _table_names(self.k)
        rates = [_ranged(name, special.expit, theta[i], error[i]) for i, name in enumerate(names)]
        return [*rates, _ranged("request_sigma", np.exp, theta[-1], error[-1])]


class _HiddenMarkov(_Kind):
    """theta: transitions (n n), rates (n K), start (n), in a row; by expectation and maximisation along positions.

    A step that accepts a drafts is followed after 1 + a positions, so its part of the likelihood is
    diag(P(a | state)) A^(1 + a).
    """

    fewest_requests = _FEWEST_REQUESTS
    _rounds = 150
    _fewest_rounds = 15
    _settled = 1e-6
    """Nats a step that a round must still gain."""

    def _taken(self, theta: Floats) -> tuple[Floats, Floats, Floats]:
        n = self.states
        return theta[: n * n].reshape(n, n), theta[n * n : n * (n + self.k)].reshape(n, self.k), theta[-n:]

    def fit(self, data: Steps | Counts) -> Floats:
        n = self.states
        ordered = _Ordered(_steps(data))
        accepted, judged = _tries(data)
        overall = special.logit(_share(accepted, judged))
        spread = np.linspace(-0.8, 0.8, n) if n > 1 else np.zeros(1)
        rates = special.expit(overall + spread[:, None])
        matrix = np.full((n, n), 0.05 / max(n - 1, 1)) + np.eye(n) * (0.95 - 0.05 / max(n - 1, 1))
        if n == 1:
            matrix = np.ones((1, 1))
        start = np.full(n, 1.0 / n)
        if self.near is not None:
            matrix, rates, start = self._taken(self.near)
        before = -math.inf
        for number in range(self._rounds):
            total, moves, emitted, begun = ordered.expected(matrix, rates, start)
            matrix = (moves + 1e-9) / (moves + 1e-9).sum(axis=1, keepdims=True)
            start = (begun + 1e-9) / (begun + 1e-9).sum()
            reached = emitted[:, ::-1].cumsum(axis=1)[:, ::-1]
            rates = np.clip((reached[:, 1:] + 1e-6) / (reached[:, :-1] + 2e-6), 1e-6, 1 - 1e-6)
            if number > self._fewest_rounds and total - before < self._settled * ordered.num_steps:
                break
            before = total
        order = np.argsort(np.cumprod(rates, axis=1).sum(axis=1))
        return np.concatenate([matrix[order][:, order].ravel(), rates[order].ravel(), start[order]])

    def log_likelihood(self, theta: Floats, data: Steps | Counts) -> float:
        matrix, rates, start = self._taken(theta)
        return _Ordered(_steps(data)).forward(matrix, rates, start)[0]

    def section(self, theta: Floats) -> dict[str, Any]:
        matrix, rates, start = self._taken(theta)
        return {
            "transitions": [_rounded(row) for row in matrix],
            "rates": [_rounded(row) for row in rates],
            "start": _rounded(start),
        }

    def parameters(self, theta: Floats, data: Steps | Counts | None) -> list[Parameter]:
        """Intervals from the outer product of the requests' scores, on logits; none for the start and for what sits on
        an edge."""
        assert data is not None
        n, k = self.states, self.k
        matrix, rates, start = self._taken(theta)
        scores = _Ordered(_steps(data)).scores(matrix, rates, start)
        names = [f"transitions[{i}][{j}]" for i in range(n) for j in range(n) if j != i]
        names += [f"rates[{i}][{j}]" for i in range(n) for j in range(k)]
        values = np.concatenate([matrix[~np.eye(n, dtype=np.bool_)], rates.ravel()])
        inside = (values > 1e-4) & (values < 1 - 1e-4)
        information = scores[:, inside].T @ scores[:, inside]
        variance = np.full(values.size, np.nan)
        variance[inside] = np.diag(np.linalg.pinv(information))
        found = []
        for number, (name, value) in enumerate(zip(names, values.tolist(), strict=True)):
            if not inside[number]:
                found.append(Parameter(name, value))
                continue
            found.append(_ranged(name, special.expit, special.logit(value), math.sqrt(max(variance[number], 0.0))))
        return found


class _Ordered:
    """Requests with the longest first, so that step t concerns the first so many of them."""

    def __init__(self, steps: Steps) -> None:
        chosen = sorted((a for a in steps.accepted if a.size), key=lambda a: -a.size)
        self.k = steps.k
        longest = chosen[0].size
        self.lengths = np.array([a.size for a in chosen])
        self.accepted = np.zeros((longest, len(chosen)), dtype=np.int64)
        for number, a in enumerate(chosen):
            self.accepted[: a.size, number] = a
        self.active = (self.lengths[None, :] > np.arange(longest)[:, None]).sum(axis=1).tolist()
        self.num_steps = int(self.lengths.sum())

    def _law(self, rates: Floats) -> Floats:
        """Shape (K + 1, states): the chance of accepting a in a state."""
        edges = np.hstack([np.ones((rates.shape[0], 1)), np.cumprod(rates, axis=1), np.zeros((rates.shape[0], 1))])
        return -np.diff(edges, axis=1).T

    def _powers(self, matrix: Floats) -> Floats:
        powers = [matrix]
        for _ in range(self.k):
            powers.append(powers[-1] @ matrix)
        return np.array(powers)

    def forward(self, matrix: Floats, rates: Floats, start: Floats) -> tuple[float, Floats, Floats]:
        """Log-likelihood; the state's law at each step given it and all before, shape (steps, requests, states); and
        the chance of each step, shape (steps, requests), 1 where there is none."""
        longest, count = self.accepted.shape
        law, powers = self._law(rates), self._powers(matrix)
        filtered = np.zeros((longest, count, start.size))
        chance = np.ones((longest, count))
        believed = np.repeat(start[None, :], count, axis=0)
        for t, n in enumerate(self.active):
            a = self.accepted[t, :n]
            joint = believed[:n] * law[a]
            total = joint.sum(axis=1)
            chance[t, :n] = total
            joint /= total[:, None]
            filtered[t, :n] = joint
            believed = np.matmul(joint[:, None, :], powers[a])[:, 0, :]
        return float(np.log(chance).sum()), filtered, chance

    def _smoothed(self, matrix: Floats, rates: Floats, start: Floats) -> tuple[float, Floats, Floats, Floats]:
        """Log-likelihood, filtered laws, what follows (beta, scaled so that filtered * beta adds up to 1), and for each
        step t > 0 the factor emission * beta / chance that the gap before it ends in."""
        total, filtered, chance = self.forward(matrix, rates, start)
        law, powers = self._law(rates), self._powers(matrix)
        after = np.ones_like(filtered)
        ahead = np.zeros_like(filtered)
        for t in range(len(self.active) - 1, 0, -1):
            n = self.active[t]
            ahead[t, :n] = law[self.accepted[t, :n]] * after[t, :n] / chance[t, :n, None]
            after[t - 1, :n] = np.matmul(powers[self.accepted[t - 1, :n]], ahead[t, :n, :, None])[:, :, 0]
        return total, filtered, after, ahead

    def expected(self, matrix: Floats, rates: Floats, start: Floats) -> tuple[float, Floats, Floats, Floats]:
        """Log-likelihood; expected moves between states, one a position; expected steps by state and accepted drafts;
        expected states at the first step."""
        total, filtered, after, ahead = self._smoothed(matrix, rates, start)
        posterior = filtered * after
        there = self.lengths[None, :] > np.arange(len(self.active))[:, None]
        emitted = np.array([posterior[there & (self.accepted == a)].sum(axis=0) for a in range(self.k + 1)]).T
        moves = np.zeros_like(matrix)
        powers = [np.eye(matrix.shape[0])]
        for _ in range(self.k + 1):
            powers.append(powers[-1] @ matrix)
        followed = there[1:]
        for a in range(self.k + 1):
            gap = followed & (self.accepted[:-1] == a)
            pairs = filtered[:-1][gap].T @ ahead[1:][gap]
            for spent in range(a + 1):
                moves += powers[spent].T @ pairs @ powers[a - spent].T
        return total, moves * matrix, emitted, posterior[0].sum(axis=0)

    def scores(self, matrix: Floats, rates: Floats, start: Floats) -> Floats:
        """By request: the gradient of its log-likelihood in the logits of transitions (off the diagonal, the rest of
        the row scaled) and of rates."""
        _, filtered, after, ahead = self._smoothed(matrix, rates, start)
        n, k = rates.shape
        posterior = filtered * after
        there = self.lengths[None, :] > np.arange(len(self.active))[:, None]
        moves = np.zeros((len(self.lengths), n, n))
        powers = [np.eye(n)]
        for _ in range(k + 1):
            powers.append(powers[-1] @ matrix)
        emitted = np.zeros((len(self.lengths), n, k + 1))
        for a in range(k + 1):
            emitted[:, :, a] = np.where((there & (self.accepted == a))[:, :, None], posterior, 0.0).sum(axis=0)
            gap = there[1:] & (self.accepted[:-1] == a)
            pairs = np.einsum("tri,trj->rij", np.where(gap[:, :, None], filtered[:-1], 0.0), ahead[1:])
            for spent in range(a + 1):
                moves += powers[spent].T @ pairs @ powers[a - spent].T
        moves *= matrix
        # logit(m) grows by e: m by m (1 - m) e, the rest of the row shrinks in proportion.
        off = ~np.eye(n, dtype=np.bool_)
        by_move = (moves - moves.sum(axis=2, keepdims=True) * matrix)[:, off]
        reached = emitted[:, :, ::-1].cumsum(axis=2)[:, :, ::-1]
        by_rate = (reached[:, :, 1:] - reached[:, :, :-1] * rates).reshape(len(self.lengths), -1)
        return np.hstack([by_move, by_rate])


class _MatchAndRun(_Kind):
    """theta: logits of start, again and K rates.

    Steps fall into segments, each of which begins where the state is known: after a step that ended a match (or was
    known to have no draft). Inside a segment lie only steps that accepted all K, and steps that accepted none of which
    it is not known whether they had drafts. Equal segments are counted once.
    """

    def fit(self, data: Steps | Counts) -> Floats:
        segments = _Segments(_steps(data))
        accepted, judged = _tries(data)
        rates = _share(accepted, judged)
        if _steps(data).drafted is None:
            rates[0] = min(max(rates[0] * 4, 0.3), 0.7)
            self.notes = [
                "whether a step that accepted nothing had drafts was not recorded, so start, again and rates[0] are "
                "told apart only by their bursts"
            ]
        start = special.logit(np.concatenate([[0.1, 0.25], np.clip(rates, 0.05, 0.95)]))
        return _least(lambda theta: -segments.total(theta), start, bounds=[(-9.0, 9.0)] * start.size)

    def log_likelihood(self, theta: Floats, data: Steps | Counts) -> float:
        return _Segments(_steps(data)).total(theta) - _drafting(data, data)

    def section(self, theta: Floats) -> dict[str, Any]:
        values = special.expit(theta)
        start, again = _rounded(values[:2])
        return {"start": start, "again": again, "rates": _rounded(values[2:])}

    def parameters(self, theta: Floats, data: Steps | Counts | None) -> list[Parameter]:
        assert data is not None
        segments = _Segments(_steps(data))
        error = _errors(lambda at: -segments.total(at), theta)
        names = ["start", "again", *(f"rates[{i}]" for i in range(self.k))]
        return [_ranged(name, special.expit, theta[i], error[i]) for i, name in enumerate(names)]


class _Segments:
    """A segment is (how it begins, zeros before each full step, zeros before its end, how it ends)."""

    def __init__(self, steps: Steps) -> None:
        self.k = k = steps.k
        counted: Counter[tuple[int, tuple[int, ...], int]] = Counter()
        for number, accepted in enumerate(steps.accepted):
            known = None if steps.drafted is None else steps.drafted[number].tolist()
            begun, zeros, full = 0, 0, []
            for place, a in enumerate(accepted.tolist()):
                if a == k:
                    full.append(zeros)
                    zeros = 0
                    continue
                if a == 0 and known is None:
                    zeros += 1
                    continue
                undrafted = known is not None and not known[place]
                counted[begun, (*full, zeros), k if undrafted else a] += 1  # k: no draft
                begun, zeros, full = 0 if undrafted else 1, 0, []
            if full or zeros:
                counted[begun, (*full, zeros), -1] += 1  # -1: cut off
        # Those with the most full steps first, so that round t concerns the first so many.
        keys = sorted(counted, key=lambda key: -len(key[1]))
        self.counts = np.array([counted[key] for key in keys], dtype=np.float64)
        self.begun = np.array([key[0] for key in keys])
        self.ends = np.array([key[2] for key in keys])
        self.last = np.array([key[1][-1] for key in keys])
        depth = max((len(key[1]) for key in keys), default=1) - 1
        self.rounds = [np.array([key[1][t] for key in keys if len(key[1]) - 1 > t]) for t in range(depth)]
        self.most = max([int(self.last.max(initial=0)), *(int(z.max()) for z in self.rounds)])

    def total(self, theta: Floats) -> float:
        """The log-likelihood, in nats."""
        k = self.k
        values = special.expit(theta)
        start, again, rates = float(values[0]), float(values[1]), values[2:]
        n = rates.size
        at = rates[np.minimum(np.arange(n)[:, None] + np.arange(k + 1)[None, :], n - 1)]  # (depth, draft)
        survive = np.hstack([np.ones((n, 1)), np.cumprod(at[:, :k], axis=1)])
        fresh = np.zeros((2, n + 1))
        fresh[0, :2] = 1 - start, start
        fresh[1, :2] = 1 - again, again
        # Zeros act on (no match, first token of a match) only, once one has passed.
        zero = np.zeros((n + 1, n + 1))
        zero[0] = fresh[0]
        zero[1:] = (1 - rates)[:, None] * fresh[1]
        full = np.zeros((n + 1, n + 1))
        goes_on = survive[:, k] * at[:, k]
        for d in range(n):
            full[1 + d] = (survive[d, k] - goes_on[d]) * fresh[1]
            full[1 + d, 1 + min(d + k + 1, n - 1)] += goes_on[d]
        ends = np.zeros((k + 2, n + 1))  # by drafts accepted; entry k: no draft; the last: cut off
        ends[:k, 1:] = (survive[:, :k] - survive[:, 1:]).T
        ends[k, 0] = 1.0
        ends[-1] = 1.0
        powers = np.empty((self.most + 1, n + 1, n + 1))
        powers[0] = np.eye(n + 1)
        filled = 1
        while filled <= self.most:
            size = min(filled, self.most + 1 - filled)
            powers[filled : filled + size] = powers[:size] @ (powers[filled - 1] @ zero)
            filled += size
        believed = fresh[self.begun]
        logs = np.zeros(self.counts.size)
        for zeros in self.rounds:
            m = zeros.size
            moved = np.matmul(believed[:m, None, :], powers[zeros] @ full)[:, 0, :]
            chance = np.maximum(moved.sum(axis=1), 1e-300)
            logs[:m] += np.log(chance)
            believed[:m] = moved / chance[:, None]
        moved = np.matmul(believed[:, None, :], powers[self.last])[:, 0, :]
        logs += np.log(np.maximum((moved * ends[self.ends]).sum(axis=1), 1e-300))
        return float(self.counts @ logs)


class _Drift(_Kind):
    """theta: logit of the rate at position 0, slope."""

    def _by_position(self, data: Steps | Counts) -> tuple[Floats, Floats, Floats]:
        flat = _steps(data).flat
        positions, place = np.unique(flat.position, return_inverse=True)
        accepted = np.bincount(place, weights=flat.accepted.astype(np.float64))
        rejected = np.bincount(place, weights=(flat.accepted < self.k).astype(np.float64))
        far = np.log1p(positions / DRIFT_SCALE)
        return far, np.asarray(accepted, dtype=np.float64), np.asarray(rejected, dtype=np.float64)

    def fit(self, data: Steps | Counts) -> Floats:
        far, accepted, rejected = self._by_position(data)
        rate = (accepted.sum() + 0.5) / (accepted.sum() + rejected.sum() + 1.0)
        return _least(lambda theta: -self._total(theta, far, accepted, rejected), np.array([special.logit(rate), 0.0]))

    @staticmethod
    def _total(theta: Floats, far: Floats, accepted: Floats, rejected: Floats) -> float:
        logits = theta[0] + theta[1] * far
        return float(accepted @ special.log_expit(logits) + rejected @ special.log_expit(-logits))

    def log_likelihood(self, theta: Floats, data: Steps | Counts) -> float:
        return self._total(theta, *self._by_position(data))

    def section(self, theta: Floats) -> dict[str, Any]:
        return {"rate": round(float(special.expit(theta[0])), 6), "slope": round(float(theta[1]), 6)}

    def parameters(self, theta: Floats, data: Steps | Counts | None) -> list[Parameter]:
        assert data is not None
        observed = self._by_position(data)
        error = _errors(lambda at: -self._total(at, *observed), theta)
        return [
            _ranged("rate", special.expit, theta[0], error[0]),
            _ranged("slope", lambda x: x, theta[1], error[1]),
        ]


class _Mixture(_Kind):
    """Classes of geometric requests. theta: logits of the rates, rising; logits of the weights against the last."""

    fewest_requests = _FEWEST_REQUESTS

    def fit(self, data: Steps | Counts) -> Floats:
        accepted, rejected = _by_request(_steps(data))
        classes = max(self.states - 1, 1)
        own = (accepted + 0.5) / (accepted + rejected + 1.0)
        rates = np.quantile(own, (np.arange(classes) + 0.5) / classes)
        weights = np.full(classes, 1.0 / classes)
        before = -math.inf
        for _ in range(2000):
            joint = np.log(weights) + np.outer(accepted, np.log(rates)) + np.outer(rejected, np.log1p(-rates))
            total = special.logsumexp(joint, axis=1, keepdims=True)
            belongs = np.exp(joint - total)
            weights = np.maximum(belongs.mean(axis=0), 1e-9)
            weights /= weights.sum()
            rates = (belongs.T @ accepted + 1e-6) / (belongs.T @ (accepted + rejected) + 2e-6)
            if float(total.sum()) - before < 1e-8:
                break
            before = float(total.sum())
        order = np.argsort(rates)
        rates, weights = rates[order], weights[order]
        return np.concatenate([special.logit(rates), np.log(weights[:-1] / weights[-1])])

    @staticmethod
    def _taken(theta: Floats) -> tuple[Floats, Floats]:
        classes = (theta.size + 1) // 2
        return theta[:classes], special.log_softmax(np.append(theta[classes:], 0.0))

    def log_likelihood(self, theta: Floats, data: Steps | Counts) -> float:
        return self._total(theta, *_by_request(_steps(data)))

    def _total(self, theta: Floats, accepted: Floats, rejected: Floats) -> float:
        logits, weights = self._taken(theta)
        joint = weights + np.outer(accepted, special.log_expit(logits)) + np.outer(rejected, special.log_expit(-logits))
        return float(special.logsumexp(joint, axis=1).sum())

    def section(self, theta: Floats) -> dict[str, Any]:
        logits, weights = self._taken(theta)
        return {
            "classes": [
                {"weight": weight, "acceptance": {"model": "geometric", "rate": rate}}
                for weight, rate in zip(_rounded(np.exp(weights)), _rounded(special.expit(logits)), strict=True)
            ]
        }

    def parameters(self, theta: Floats, data: Steps | Counts | None) -> list[Parameter]:
        assert data is not None
        observed = _by_request(_steps(data))
        logits, weights = self._taken(theta)
        covariance = _covariance(lambda at: -self._total(at, *observed), theta)
        found = [
            _ranged(f"classes[{i}].acceptance.rate", special.expit, logit, math.sqrt(max(covariance[i, i], 0.0)))
            for i, logit in enumerate(logits)
        ]
        share = np.exp(weights)
        classes = logits.size
        for i in range(classes):
            slope = np.zeros(theta.size)
            slope[classes:] = -share[:-1]
            if i < classes - 1:
                slope[classes + i] += 1.0
            # d ln(w_i) = slope, so d logit(w_i) = slope / (1 - w_i).
            error = math.sqrt(max(float(slope @ covariance @ slope), 0.0)) / max(1.0 - float(share[i]), 1e-9)
            found.append(_ranged(f"classes[{i}].weight", special.expit, special.logit(share[i]), error))
        return found


MODELS: Final[Mapping[str, type[_Kind]]] = {
    "geometric": _Geometric,
    "per_position": _PerPosition,
    "beta": _Beta,
    "markov": _Markov,
    "markov_request": _MarkovRequest,
    "hidden_markov": _HiddenMarkov,
    "match_and_run": _MatchAndRun,
    "drift": _Drift,
    "mixture": _Mixture,
    "tree": _Tree,
}
"""What can be fitted. `markov_request` is `markov` with a request effect: a scenario says `markov` for both."""


def _by_request(steps: Steps) -> tuple[Floats, Floats]:
    """Drafts accepted and rejected (judged and refused: one a step that did not accept all), by request."""
    flat, count = steps.flat, len(steps.accepted)
    accepted = np.bincount(flat.request, weights=flat.accepted.astype(np.float64), minlength=count)
    rejected = np.bincount(flat.request, weights=(flat.accepted < steps.k).astype(np.float64), minlength=count)
    return np.asarray(accepted, dtype=np.float64), np.asarray(rejected, dtype=np.float64)


def _table_names(k: int) -> list[str]:
    rows = [f"rates[{a}]" for a in range(k + 1)] + ["first"]
    return [f"{row}[{i}]" for row in rows for i in range(k)]


def _least(
    loss: Callable[[Floats], float], start: Floats, bounds: Sequence[tuple[float, float]] | None = None
) -> Floats:
    found = optimize.minimize(loss, start, method="L-BFGS-B", bounds=bounds, options={"ftol": 1e-11, "gtol": 1e-6})
    best: Floats = found.x
    return best


def _ranged(name: str, scale: Callable[[Any], Any], theta: float, error: float) -> Parameter:
    value = float(scale(theta))
    if not math.isfinite(error) or error > 50:
        return Parameter(name, value)
    return Parameter(name, value, float(scale(theta - _Z * error)), float(scale(theta + _Z * error)))


def _covariance(loss: Callable[[Floats], float], theta: Floats, width: float = 2e-3) -> Floats:
    """The inverse of the observed information, by central differences of the loss."""
    n = theta.size
    steps = np.eye(n) * width
    information = np.empty((n, n))
    middle = loss(theta)
    for i in range(n):
        information[i, i] = (loss(theta + steps[i]) - 2 * middle + loss(theta - steps[i])) / width**2
        for j in range(i):
            information[i, j] = information[j, i] = (
                loss(theta + steps[i] + steps[j])
                - loss(theta + steps[i] - steps[j])
                - loss(theta - steps[i] + steps[j])
                + loss(theta - steps[i] - steps[j])
            ) / (4 * width**2)
    return _inverse(information)


def _errors(loss: Callable[[Floats], float], theta: Floats) -> Floats:
    variance = np.diag(_covariance(loss, theta))
    return np.sqrt(np.where(variance > 0, variance, np.inf))


def _errors_by_gradient(gradient: Callable[[Floats], Floats], theta: Floats, width: float = 1e-3) -> Floats:
    n = theta.size
    information = np.empty((n, n))
    for i in range(n):
        step = np.zeros(n)
        step[i] = width
        information[i] = (gradient(theta + step) - gradient(theta - step)) / (2 * width)
    variance = np.diag(_inverse(0.5 * (information + information.T)))
    return np.sqrt(np.where(variance > 0, variance, np.inf))


def _inverse(information: Floats) -> Floats:
    """The inverse over those parameters that the data say anything about; infinite for the others."""
    known = np.diag(information) > 1e-3
    inverse = np.full_like(information, np.inf)
    try:
        inverse[np.ix_(known, known)] = np.linalg.inv(information[np.ix_(known, known)])
    except np.linalg.LinAlgError:
        pass
    return inverse
