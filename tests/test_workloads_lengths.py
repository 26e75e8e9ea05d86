"""Length distributions against their theory, and the parameters that they refuse."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.lengths import Fixed, Lengths, LogNormal, Quantiles, Uniform, largest
from workloads.streams import uniforms

N = 200_000
U = uniforms(3, "length", np.arange(N, dtype=np.int64), 0, 1)
TOP = 1.0 - 2.0**-53


def at(lengths: Lengths, *u: float) -> list[int]:
    return lengths.at(np.array(u)).tolist()


def test_by_hand() -> None:
    assert at(Fixed(7), 0.0, 0.5, TOP) == [7, 7, 7]
    # Four numbers, a quarter of [0, 1) each.
    assert at(Uniform(3, 6), 0.0, 0.2499, 0.25, 0.5, 0.75, TOP) == [3, 3, 4, 5, 6, 6]
    assert at(Uniform(1, 2**31 - 1), TOP) == [2**31 - 1]
    # Half-way along each straight piece.
    quantiles = Quantiles([(0.0, 10), (0.5, 100), (0.9, 300), (1.0, 1000)])
    assert at(quantiles, 0.0, 0.25, 0.5, 0.7, 0.9, 0.95, TOP) == [10, 55, 100, 200, 300, 650, 1000]
    # The normal's quartile is 0.6745 standard deviations from its median.
    assert at(LogNormal(100, 1.0), 0.25, 0.5, 0.75) == [
        round(100 * math.exp(-0.6744898)),
        100,
        round(100 * math.exp(0.6744898)),
    ]
    assert at(LogNormal(100, 0.0), 0.0, 0.5, TOP) == [100, 100, 100]
    assert at(LogNormal(100, 3.0, 20, 400), 0.0, 0.5, TOP) == [20, 100, 400]
    assert at(LogNormal(0.01, 0.1), 0.0, 0.5, TOP) == [1, 1, 1]
    assert at(LogNormal(100, 1e6, 1, 400), 0.0, 0.499, 0.501, TOP) == [1, 1, 400, 400]


def test_largest_is_a_bound_that_is_reached() -> None:
    assert largest(Fixed(7)) == 7
    assert largest(Uniform(3, 6)) == 6
    assert largest(Quantiles([(0, 1), (1, 50)])) == 50
    assert largest(LogNormal(100, 1.0, maximum=4096)) == 4096


def test_uniform_moments() -> None:
    """Mean (low + high) / 2 and variance (n**2 - 1) / 12 over n whole numbers."""
    drawn = Uniform(11, 110).at(U)
    variance = (100**2 - 1) / 12
    assert abs(drawn.mean() - 60.5) < 4.5 * math.sqrt(variance / N)
    assert drawn.var() == pytest.approx(variance, rel=0.01)


@pytest.mark.parametrize(("mean", "sd"), [(500.0, 300.0), (1024.0, 1024.0), (200.0, 20.0)])
def test_lognormal_mean_and_sd(mean: float, sd: float) -> None:
    drawn = LogNormal.from_mean(mean, sd, maximum=10**6).at(U)
    assert abs(drawn.mean() - mean) < 4.5 * sd / math.sqrt(N)
    assert drawn.std() == pytest.approx(sd, rel=0.03)


def test_lognormal_median_and_sigma() -> None:
    drawn = LogNormal(300, 0.8).at(U)
    # A median of n draws has standard deviation 1 / (2 f sqrt(n)), with density f = 1 / (300 * 0.8 * sqrt(2 pi)).
    assert abs(np.median(drawn) - 300) < 4.5 * 300 * 0.8 * math.sqrt(2 * math.pi) / (2 * math.sqrt(N)) + 0.5
    assert np.log(drawn).std() == pytest.approx(0.8, rel=0.01)


def test_quantiles_come_back() -> None:
    drawn = Quantiles([(0.0, 4), (0.5, 128), (0.9, 2048), (1.0, 8192)]).at(U)
    for p, value in ((0.5, 128), (0.9, 2048)):
        below = (drawn <= value).mean()
        assert abs(below - p) < 4.5 * math.sqrt(p * (1 - p) / N) + 0.005
    assert drawn.min() >= 4
    assert drawn.max() <= 8192


LENGTHS: st.SearchStrategy[Lengths] = st.one_of(
    st.builds(Fixed, st.integers(1, 10**6)),
    st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)).map(lambda pair: Uniform(min(pair), max(pair))),
    st.builds(LogNormal, st.floats(0.1, 1e5), st.floats(0.0, 1.2)),
    st.builds(LogNormal, st.floats(1e-3, 1e9), st.floats(0.0, 50.0), st.integers(1, 9), st.integers(9, 10**9)),
    st.lists(st.integers(1, 10**6), min_size=2, max_size=6).map(
        lambda values: Quantiles([(n / (len(values) - 1), value) for n, value in enumerate(sorted(values))])
    ),
)


@given(LENGTHS, st.lists(st.floats(0.0, TOP), min_size=1, max_size=20))
def test_whole_numbers_from_1_that_never_fall_in_u(lengths: Lengths, u: list[float]) -> None:
    drawn = lengths.at(np.array(sorted(u)))
    assert drawn.dtype == np.int64
    assert drawn.min() >= 1
    assert (np.diff(drawn) >= 0).all()
    assert drawn.max() <= largest(lengths)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fixed(0), "value must be a whole number from 1 to 2147483647, got 0"),
        (lambda: Fixed(-5), "got -5"),
        (lambda: Fixed(1.5), "got 1.5"),  # type: ignore[arg-type]
        (lambda: Fixed(True), "got True"),
        (lambda: Uniform(0, 4), "low must be"),
        (lambda: Uniform(5, 4), "low must not be above high, got low=5 and high=4"),
        (lambda: LogNormal(0, 1), "median must be a number above 0, got 0"),
        (lambda: LogNormal(NAN, 1), "median"),
        (lambda: LogNormal(INF, 1), "median"),
        (lambda: LogNormal(10, -1), "sigma must be a number of 0 or more, got -1"),
        (lambda: LogNormal(10, 1, 20, 10), "minimum=20 and maximum=10"),
        (lambda: LogNormal(10, 1, 0), "minimum must be"),
        (lambda: LogNormal(100, 3.0), "give a maximum"),
        (lambda: LogNormal.from_mean(0, 1), "mean must be a number above 0, got 0"),
        (lambda: LogNormal.from_mean(10, -1), "sd must be a number of 0 or more, got -1"),
        (lambda: LogNormal.from_mean(10, NAN), "sd"),
        (lambda: Quantiles([]), "at least two points"),
        (lambda: Quantiles([(0.0, 1), (0.5, 2)]), "end at p=1"),
        (lambda: Quantiles([(0.1, 1), (1.0, 2)]), "begin at p=0"),
        (lambda: Quantiles([(0.0, 1), (0.5, 3), (0.5, 4), (1.0, 5)]), "p must increase, got 0.5 after 0.5"),
        (lambda: Quantiles([(0.0, 1), (0.5, 3), (1.0, 2)]), "values must not fall, got 2 at p=1.0 after 3"),
        (lambda: Quantiles([(0.0, 0), (1.0, 2)]), "the value at p=0.0 must be from 1"),
        (lambda: Quantiles([(0.0, 1), (1.0, NAN)]), "the value at p=1.0"),
        (lambda: Quantiles([(-0.1, 1), (1.0, 2)]), "p must lie between 0 and 1, got -0.1"),
    ],
)
def test_impossible_parameters_are_refused(make: Callable[[], Lengths], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is matched below, without escapes
        make()
    assert message in str(caught.value)
