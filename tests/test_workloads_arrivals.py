"""Arrival processes against their theory, whole nanoseconds, and purity."""

import math
from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from workloads import arrivals
from workloads.arrivals import AllAtOnce, Arrivals, Constant, Gamma, Poisson, arrival_times_ns

N = 200_000


def gaps_s(process: Arrivals, seed: int = 1) -> NDArray[np.float64]:
    return np.diff(process.times_ns(seed, 0, N, 0), prepend=0) / 1e9


def test_by_hand() -> None:
    assert Constant(4.0).times_ns(9, 0, 4, 0).tolist() == [0, 250_000_000, 500_000_000, 750_000_000]
    assert Constant(3.0).times_ns(9, 1, 3, 0).tolist() == [333_333_333, 666_666_667, 1_000_000_000]
    assert AllAtOnce().times_ns(9, 0, 3, 0).tolist() == [0, 0, 0]


def test_poisson() -> None:
    """Gaps are exponential: mean 1 / rate, variance 1 / rate**2 (whose estimate has variance 8 / (rate**4 n))."""
    gaps = gaps_s(Poisson(20.0))
    assert abs(gaps.mean() - 1 / 20) < 4.5 / 20 / math.sqrt(N)
    assert abs(gaps.var() - 1 / 400) < 4.5 / 400 * math.sqrt(8 / N)
    assert stats.kstest(gaps, stats.expon(scale=1 / 20).cdf).pvalue > 1e-3


def test_poisson_counts() -> None:
    """Counts in equal windows are Poisson: their variance is their mean."""
    times = Poisson(20.0).times_ns(1, 0, N, 0)
    counts = np.bincount(times[times < 9_000 * 10**9] // 10**9, minlength=9_000)
    assert abs(counts.mean() - 20) < 4.5 * math.sqrt(20 / 9_000)
    assert abs(counts.var() / counts.mean() - 1) < 4.5 * math.sqrt(2 / 9_000)


@pytest.mark.parametrize("burstiness", [0.25, 0.5, 1.0, 4.0, 100.0])
def test_gamma(burstiness: float) -> None:
    """As numpy draws for `vllm bench serve`: shape = burstiness, scale = 1 / (rate burstiness), so CV = shape**-0.5."""
    gaps = gaps_s(Gamma(20.0, burstiness))
    cv = 1 / math.sqrt(burstiness)
    assert abs(gaps.mean() - 1 / 20) < 4.5 * cv / 20 / math.sqrt(N)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.02)
    if burstiness < 0.5:
        return  # 0.8% of these gaps are below half a nanosecond: an atom at 0 that a Kolmogorov test sees
    assert stats.kstest(gaps, stats.gamma(burstiness, scale=1 / (20 * burstiness)).cdf).pvalue > 1e-3


def test_gamma_of_burstiness_1_is_poisson() -> None:
    difference = Gamma(20.0, 1.0).times_ns(1, 0, 1000, 0) - Poisson(20.0).times_ns(1, 0, 1000, 0)
    # Each gap is rounded once in each, so a sum of n gaps differs by n ns at most.
    assert np.abs(difference).max() <= 1000


def test_gaps_are_independent() -> None:
    for process in (Poisson(20.0), Gamma(20.0, 4.0)):
        gaps = gaps_s(process)
        assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 4.5 / math.sqrt(N)


def test_seeds_differ_and_rates_share_their_draws() -> None:
    assert Poisson(1.0).times_ns(1, 0, 5, 0).tolist() != Poisson(1.0).times_ns(2, 0, 5, 0).tolist()
    slow, fast = gaps_s(Poisson(1.0)), gaps_s(Poisson(10.0))
    assert np.allclose(slow, 10 * fast, rtol=0, atol=1e-8)


RATES = st.floats(1e-3, 1e6)
PROCESSES: st.SearchStrategy[Arrivals] = st.one_of(
    st.builds(Poisson, RATES),
    st.builds(Gamma, RATES, st.floats(0.05, 50.0)),
    st.builds(Constant, RATES),
    st.just(AllAtOnce()),
)


@given(PROCESSES, st.integers(0, 10**6), st.integers(1, 300), st.integers(1, 40))
def test_any_chunking_gives_the_same_times(process: Arrivals, seed: int, count: int, chunk: int) -> None:
    whole = process.times_ns(seed, 0, count, 0)
    assert whole.dtype == np.int64
    assert whole[0] >= 0
    assert (np.diff(whole) >= 0).all()
    pieces: list[int] = []
    for first in range(0, count, chunk):
        before_ns = pieces[-1] if pieces else 0
        pieces += process.times_ns(seed, first, min(chunk, count - first), before_ns).tolist()
    assert pieces == whole.tolist()


def test_streaming_crosses_chunks_and_stops() -> None:
    count = 2 * arrivals._CHUNK + 3
    streamed = list(arrival_times_ns(Poisson(5.0), 1, count))
    assert streamed == Poisson(5.0).times_ns(1, 0, count, 0).tolist()
    assert list(islice(arrival_times_ns(Poisson(5.0), 1, 10**12), 100)) == streamed[:100]
    assert list(arrival_times_ns(Poisson(5.0), 1, 0)) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poisson(0.0), "rate_per_s must be a number above 0, got 0.0"),
        (lambda: Poisson(float("nan")), "rate_per_s"),
        (lambda: Constant(-2.0), "got -2.0"),
        (lambda: Gamma(1.0, 0.0), "burstiness must be a number above 0, got 0.0"),
        (lambda: Gamma(float("inf"), 1.0), "rate_per_s"),
        (lambda: Poisson(1e-12).times_ns(1, 0, 100, 0), "the rate is too low for so many requests"),
        (lambda: Constant(1e-12).times_ns(1, 0, 100, 0), "the rate is too low for so many requests"),
    ],
)
def test_impossible_parameters_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is matched below, without escapes
        make()
    assert message in str(caught.value)
