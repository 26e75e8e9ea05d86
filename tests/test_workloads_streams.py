"""The random numbers: pure, the same in every process, uniform, and independent along every argument."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from workloads import streams
from workloads.streams import uniforms

N = 200_000
REQUESTS = np.arange(N, dtype=np.int64)

# Each varies one argument and holds the others.
ALONG: dict[str, Callable[[], NDArray[np.float64]]] = {
    "draws": lambda: uniforms(1, "arrival", 0, 0, N),
    "draws of a late request": lambda: uniforms(1, "arrival", 10**9, 10**6, N),
    "requests": lambda: uniforms(1, "arrival", REQUESTS, 0, 1),
    "requests, a later draw": lambda: uniforms(1, "arrival", REQUESTS, 7, 1),
    "seeds": lambda: np.concatenate([uniforms(seed, "arrival", 3, 5, 1) for seed in range(20_000)]),
    "purposes": lambda: np.concatenate([uniforms(0, f"purpose{n}", 0, 0, 1) for n in range(20_000)]),
    "the diagonal": lambda: np.concatenate([uniforms(0, "arrival", n, n, 1) for n in range(20_000)]),
}


@pytest.mark.parametrize("along", ALONG)
def test_uniform_and_uncorrelated(along: str) -> None:
    u = ALONG[along]()
    assert 0.0 <= u.min()
    assert u.max() < 1.0
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    # Under independence a lagged correlation is about Normal(0, 1/n).
    for lag in (1, 2, 3, 4, 16, 256):
        r = np.corrcoef(u[:-lag], u[lag:])[0, 1]
        assert abs(r) < 4.5 / np.sqrt(len(u)), lag
    # Pairs of neighbours fill the unit square evenly: chi-squared over 16 x 16 cells.
    cells = (u[: len(u) // 2 * 2] * 16).astype(int).reshape(-1, 2)
    counts = np.bincount(cells[:, 0] * 16 + cells[:, 1], minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-3


def test_neighbours_in_every_argument_are_independent_of_each_other() -> None:
    base = uniforms(1, "prompt", REQUESTS, 0, 1)
    others = {
        "seed": uniforms(2, "prompt", REQUESTS, 0, 1),
        "negative seed": uniforms(-1, "prompt", REQUESTS, 0, 1),
        "purpose": uniforms(1, "output", REQUESTS, 0, 1),
        "request": uniforms(1, "prompt", REQUESTS + 1, 0, 1),
        "draw": uniforms(1, "prompt", REQUESTS, 1, 1),
    }
    for name, other in others.items():
        assert abs(np.corrcoef(base, other)[0, 1]) < 4.5 / np.sqrt(N), name


def test_bits_are_fair_and_doubles_have_53_of_them() -> None:
    scaled = uniforms(1, "x", REQUESTS, 0, 1) * 2.0**53
    whole = scaled.astype(np.uint64)
    assert (scaled == whole).all()
    for bit in range(53):
        ones = int(((whole >> np.uint64(bit)) & np.uint64(1)).sum())
        assert abs(ones - N / 2) < 4.5 * np.sqrt(N) / 2, bit


def test_finaliser_is_the_published_one() -> None:
    """SplitMix64 from seed 1234567, as its reference program prints it (rosettacode.org, Pseudo-random numbers)."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    states = [(1234567 + n * streams._WEYL) % 2**64 for n in range(1, 6)]
    assert [streams._finalise_int(state) for state in states] == published
    assert streams._finalise(np.array(states, dtype=np.uint64)).tolist() == published


@given(
    seed=st.integers(-(2**70), 2**70),
    purpose=st.text(max_size=8),
    request=st.integers(0, 2**62),
    first=st.integers(0, 2**40),
    count=st.integers(0, 12),
)
def test_bulk_equals_one_at_a_time_and_arrays_equal_integers(
    seed: int, purpose: str, request: int, first: int, count: int
) -> None:
    bulk = uniforms(seed, purpose, request, first, count)
    assert bulk.shape == (count,)
    assert bulk.dtype == np.float64
    assert bulk.tolist() == [uniforms(seed, purpose, request, first + j, 1)[0] for j in reversed(range(count))][::-1]
    requests = np.array([[request, 0], [request + 1, request]], dtype=np.int64)
    by_array = uniforms(seed, purpose, requests, first, 1)
    assert by_array.shape == (2, 2)
    assert by_array.ravel().tolist() == [uniforms(seed, purpose, int(r), first, 1)[0] for r in requests.ravel()]


def test_the_same_in_every_process_whatever_the_hash_seed() -> None:
    program = "from workloads.streams import uniforms; print(uniforms(5, 'acceptance', 17, 3, 8).tolist())"
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for hash_seed in ("0", "1", "4242")
    }
    assert printed == {str(uniforms(5, "acceptance", 17, 3, 8).tolist())}


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="first=-1"):
        uniforms(0, "x", 0, -1, 1)
    with pytest.raises(ValueError, match="count=-2"):
        uniforms(0, "x", 0, 0, -2)
    with pytest.raises(ValueError, match="request must be 0 or more, got -3"):
        uniforms(0, "x", -3, 0, 1)
    with pytest.raises(ValueError, match="request must be 0 or more, got -4"):
        uniforms(0, "x", np.array([1, -4]), 0, 1)
    with pytest.raises(ValueError, match="count=1"):
        uniforms(0, "x", np.array([1, 2]), 0, 3)
    assert uniforms(0, "x", np.array([], dtype=np.int64), 0, 1).shape == (0,)
