"""A generator that stands in for a trace, and how far it differs from it.

Knows: summaries of traces, arrival processes and distributions. Must not know: formats of files, scenarios, or servers.

What is taken from the trace: the rate and its bursts (or its course over time), the quantiles of prompts and outputs
and their rank correlation (a Gaussian copula), and shared prefixes. What is not: which request follows which, the times
of a conversation's turns, and how sharing goes with length.

- Arrivals. For gaps drawn independently the dispersion (see `Summary`) is the square of the gaps' coefficient of
  variation. Where it is more than twice that and more than 2, the rate drifts, and a table of rates stands in, Poisson
  within each row. Else gamma gaps, with 1 / burstiness the smaller of the two: gaps alone overstate bursts where a
  trace's clock ticks coarsely and many requests come at one tick.
- Shared prefixes. A share of the requests begins with a prefix, of the length that was found in earlier blocks, cut at
  its 99th percentile; there is a prefix for each 20 such requests, at most 1,000, and the share is raised by the 5
  percent that its first uses are. The rest of a prompt is its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from workloads.arrivals import AllAtOnce, Arrivals, Gamma, Piecewise, Poisson
from workloads.conversations import Conversations
from workloads.inspect import Summary, conversation_requests, inspect_requests, rank_correlation
from workloads.joint import Copula, JointRequests
from workloads.lengths import Quantiles
from workloads.open_loop import OpenLoop
from workloads.prompts import SharedPrefixes
from workloads.sessions import Sessions

Points = tuple[tuple[float, int], ...]
"""Points (p, tokens) of an inverse distribution function, p from 0 to 1."""

LEVELS: Final = (
    *(0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75),
    *(0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999, 1.0),
)
_USES_A_PREFIX = 20
_MOST_PREFIXES = 1000
_LEAST_SHARED = 0.005
_MOST_ROWS = 48
_REQUESTS_A_ROW = 30
_MOST_COMPARED = 200_000


@dataclass(frozen=True)
class Shared:
    """Shared prefixes, as `SharedPrefixes` has them: how many, how long, and the share of requests with one."""

    count: int
    tokens: Points
    fraction: float


@dataclass(frozen=True)
class StandIn:
    """A generator that stands in for a trace.

    num_requests        of the trace; with `turns`, its conversations
    rate_per_s          of requests; None where the trace has no times
    burstiness          of gamma gaps, 1 for Poisson
    rates, repeat_s     rows (from_s, rate_per_s) of a rate that changes, instead of burstiness; then it begins anew
    prompt, output      quantiles; prompt without shared prefixes, and with `turns` what is new in a turn
    rank_correlation    of prompt and output
    shared              None: nothing is shared
    turns               quantiles of the turns of a conversation; None: single requests
    """

    num_requests: int
    rate_per_s: float | None
    burstiness: float
    prompt: Points
    output: Points
    rank_correlation: float = 0.0
    shared: Shared | None = None
    rates: tuple[tuple[float, float], ...] = ()
    repeat_s: float | None = None
    turns: Points | None = None

    def process(self) -> Arrivals:
        """When requests arrive; all at once where there is no rate."""
        if self.rates:
            return Piecewise(self.rates, self.repeat_s)
        if self.rate_per_s is None:
            return AllAtOnce()
        if self.burstiness == 1.0:
            return Poisson(self.rate_per_s)
        return Gamma(self.rate_per_s, self.burstiness)

    def sessions(self, seed: int, num_sessions: int) -> Sessions:
        """What is asked for."""
        prompt, output = Quantiles(self.prompt), Quantiles(self.output)
        shared = None
        if self.shared is not None:
            shared = SharedPrefixes(self.shared.count, Quantiles(self.shared.tokens), self.shared.fraction)
        if self.turns is not None:
            return Conversations(seed, num_sessions, Quantiles(self.turns), prompt, output, shared)
        return JointRequests(seed, num_sessions, Copula(prompt, output, self.rank_correlation), shared)

    def workload(self, seed: int, num_sessions: int | None = None) -> OpenLoop:
        """An open loop of as many requests (or conversations) as the trace had, unless told."""
        return OpenLoop(self.sessions(seed, num_sessions or self.num_requests), self.process(), seed)


@dataclass(frozen=True)
class Compared:
    """One figure of a trace and of what stands in for it."""

    name: str
    trace: float
    stand_in: float

    @property
    def error(self) -> float | None:
        """Relative difference; None where the trace's figure is 0."""
        return None if self.trace == 0 else self.stand_in / self.trace - 1


def fit(summary: Summary, arrivals: Literal["auto", "gamma", "piecewise"] = "auto") -> StandIn:
    """What stands in for a trace of single requests. Raises ValueError for fewer than 10 requests."""
    if summary.num_requests < 10:
        raise ValueError(f"a fit needs 10 requests or more, got {summary.num_requests}")
    pairs = summary.pairs
    shared = _shared(summary)
    prompt = tuple(zip(LEVELS, summary.prompt.quantiles(LEVELS), strict=True))
    own = pairs[:, 0]
    if shared is not None:
        own = np.maximum(pairs[:, 0] - np.minimum(pairs[:, 2], shared.tokens[-1][1]), 1)
        longest = max(1, summary.prompt.quantiles([1.0])[0] - shared.tokens[-1][1])
        prompt = points(np.minimum(own, longest))
    rates, repeat_s = _rates(summary, arrivals)
    return StandIn(
        num_requests=summary.num_requests,
        rate_per_s=_rounded(summary.rate_per_s) if summary.rate_per_s else None,
        burstiness=1.0 if rates else _burstiness(summary),
        prompt=prompt,
        output=tuple(zip(LEVELS, summary.output.quantiles(LEVELS), strict=True)),
        rank_correlation=round(rank_correlation(own, pairs[:, 1]), 3),
        shared=shared,
        rates=rates,
        repeat_s=repeat_s,
    )


def fit_conversations(turns: Sequence[Sequence[tuple[int, int]]]) -> StandIn:
    """What stands in for conversations without times: their turns, new tokens and answers, each drawn by itself.

    `turns`: for each conversation, (new prompt tokens, answer tokens) of each turn. Raises ValueError for none.
    """
    if not turns:
        raise ValueError("a fit needs a conversation")
    asked = np.array([max(turn[0], 1) for conversation in turns for turn in conversation], dtype=np.int64)
    answered = np.array([turn[1] for conversation in turns for turn in conversation], dtype=np.int64)
    lengths = np.array([len(conversation) for conversation in turns], dtype=np.int64)
    return StandIn(len(turns), None, 1.0, points(asked), points(answered), turns=points(lengths))


def points(lengths: NDArray[np.int64]) -> Points:
    """Points of the inverse distribution function at `LEVELS`."""
    found = np.quantile(lengths, LEVELS, method="inverted_cdf").astype(np.int64).tolist()
    return tuple(zip(LEVELS, found, strict=True))


def compare(summary: Summary, stand_in: StandIn, seed: int = 0) -> list[Compared]:
    """The trace's figures beside those of as many requests (at most 200,000) from the generator."""
    count = min(stand_in.num_requests, _MOST_COMPARED)
    block_tokens = summary.block_tokens
    if stand_in.turns is not None:
        generated = inspect_requests(
            conversation_requests(stand_in.sessions(seed, count)), block_tokens, has_times=False
        )
    else:
        generated = inspect_requests(stand_in.workload(seed, count).arrivals(), block_tokens, summary.has_times)
    names = ["rate_per_s", "gap_cv", "dispersion", "peak_rate_per_s"] if summary.has_times else []
    rows = [Compared(name, getattr(summary, name), getattr(generated, name)) for name in names]
    for what in ("prompt", "output"):
        ours, theirs = getattr(summary, what), getattr(generated, what)
        rows.append(Compared(f"{what}_tokens mean", ours.mean(), theirs.mean()))
        levels = (0.5, 0.9, 0.99)
        for level, a, b in zip(levels, ours.quantiles(levels), theirs.quantiles(levels), strict=True):
            rows.append(Compared(f"{what}_tokens p{100 * level:g}", a, b))
    for name in ("rank_correlation", "shared_token_share", "shared_request_share"):
        rows.append(Compared(name, getattr(summary, name), getattr(generated, name)))
    return rows


def _shared(summary: Summary) -> Shared | None:
    if summary.shared_token_share < _LEAST_SHARED:
        return None
    measured = len(summary.pairs) * summary.reuse_requests // summary.num_requests
    hits = summary.pairs[:measured, 2]
    found = hits[hits > 0]
    longest = int(np.quantile(found, 0.99, method="inverted_cdf"))
    uses = summary.shared_request_share * summary.num_requests
    count = min(max(round(uses / _USES_A_PREFIX), 1), _MOST_PREFIXES)
    fraction = min(1.0, summary.shared_request_share / (1 - count / max(uses, count + 1)))
    return Shared(count, points(np.minimum(found, longest)), round(fraction, 3))


def _burstiness(summary: Summary) -> float:
    square = summary.gap_cv**2
    if summary.dispersion > 0:
        square = min(square, max(summary.dispersion, 0.01))
    if square <= 0:
        return 1.0
    return _rounded(min(1 / square, 1000.0))


def _rates(
    summary: Summary, arrivals: Literal["auto", "gamma", "piecewise"]
) -> tuple[tuple[tuple[float, float], ...], float | None]:
    drifts = summary.dispersion > max(2 * summary.gap_cv**2, 2.0)
    if arrivals == "gamma" or not summary.windows or (arrivals == "auto" and not drifts):
        return (), None
    rows = min(_MOST_ROWS, max(1, summary.num_requests // _REQUESTS_A_ROW))
    each = -(-len(summary.windows) // rows)
    table: list[tuple[float, float]] = []
    for first in range(0, len(summary.windows), each):
        counts = summary.windows[first : first + each]
        from_s = first * summary.window_s
        lasting_s = min(from_s + len(counts) * summary.window_s, summary.duration_s) - from_s
        if lasting_s > 0:
            table.append((_rounded(from_s), _rounded(sum(counts) / lasting_s)))
    return tuple(table), max(_rounded(summary.duration_s), math.nextafter(table[-1][0], math.inf))


def _rounded(value: float) -> float:
    """To five digits."""
    return float(f"{value:.5g}")
