"""Random numbers as a pure function of (seed, purpose, request, draw number).

Knows: nothing but the four arguments. There is no state, so a draw does not depend on what was drawn before it, on
the order of calls, on the process or on PYTHONHASHSEED; draws in bulk equal draws one at a time.
Must not know: what the numbers are for. Nothing else in speckv is random.

The generator is counter-based. BLAKE2b of the seed and the purpose gives a key; the request number turns the key into
an origin and an odd stride, both 64-bit; draw n is the finaliser of `origin + n * stride`, its upper 53 bits as a
double. Finaliser: David Stafford's "Mix13", as in SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014). A stride per request keeps the counters of two requests from running along each other.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_WEYL = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd

_U1, _U11, _U27, _U30, _U31 = (np.uint64(bits) for bits in (1, 11, 27, 30, 31))
_U_MIX_1, _U_MIX_2, _U_WEYL = np.uint64(_MIX_1), np.uint64(_MIX_2), np.uint64(_WEYL)
_TO_UNIT = 2.0**-53


def uniforms(seed: int, purpose: str, request: int | NDArray[np.int64], first: int, count: int) -> NDArray[np.float64]:
    """Uniform doubles in [0, 1), multiples of 2**-53.

    Entry j is draw number `first + j` of that request for that purpose; shape (count,). `request` may instead be an
    integer array with `count` 1: then entry i is draw number `first` of request[i], in the shape of the array.

    Raises ValueError for a negative request, first or count, and for an array of requests with a count other than 1.
    """
    if first < 0 or count < 0:
        raise ValueError(f"first and count must be 0 or more, got first={first}, count={count}")
    origin_key, stride_key = _keys(seed, purpose)
    if isinstance(request, np.ndarray):
        if count != 1:
            raise ValueError(f"an array of requests takes count=1, got count={count}")
        if request.size and int(request.min()) < 0:
            raise ValueError(f"request must be 0 or more, got {int(request.min())}")
        counters = np.atleast_1d(request).astype(np.uint64) * _U_WEYL
        origin = _finalise(counters + np.uint64(origin_key))
        if first == 0:
            return _to_unit(_finalise(origin)).reshape(request.shape)
        stride = _finalise(counters + np.uint64(stride_key)) | _U1
        return _to_unit(_finalise(origin + stride * np.uint64(first))).reshape(request.shape)
    if request < 0:
        raise ValueError(f"request must be 0 or more, got {request}")
    weyl = int(request) * _WEYL
    start = _finalise_int(origin_key + weyl)
    step = _finalise_int(stride_key + weyl) | 1
    draws = np.arange(first, first + count, dtype=np.uint64)
    draws *= np.uint64(step)
    draws += np.uint64(start)
    return _to_unit(_finalise(draws))


def uniform_rows(seed: int, purpose: str, first_request: int, requests: int, count: int) -> NDArray[np.float64]:
    """Row i is `uniforms(seed, purpose, first_request + i, 0, count)`; shape (requests, count)."""
    origin_key, stride_key = _keys(seed, purpose)
    counters = np.arange(first_request, first_request + requests, dtype=np.uint64) * _U_WEYL
    origin = _finalise(counters + np.uint64(origin_key))
    stride = _finalise(counters + np.uint64(stride_key)) | _U1
    draws = np.arange(count, dtype=np.uint64) * stride[:, np.newaxis]
    draws += origin[:, np.newaxis]
    return _to_unit(_finalise(draws))


@lru_cache(maxsize=1024)
def _keys(seed: int, purpose: str) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{int(seed)}:{purpose}".encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def _finalise(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = z ^ (z >> _U30)
    z *= _U_MIX_1
    z ^= z >> _U27
    z *= _U_MIX_2
    z ^= z >> _U31
    return z


def _finalise_int(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def _to_unit(z: NDArray[np.uint64]) -> NDArray[np.float64]:
    return (z >> _U11).astype(np.float64) * _TO_UNIT
