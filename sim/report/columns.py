"""Tables packed for a page: columns as lists, no more digits than can be seen, nothing said twice.

Knows lists of numbers; must not know what they mean. A column that has one value only is that value, and
`unpack` in `page.js` makes it a list again.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray


def short(value: float, digits: int = 6) -> int | float | None:
    """A number with so many digits; whole ones as int, what is not finite as None."""
    if not np.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded


def packed(values: list[Any]) -> Any:
    """The list, or its one value; an empty list stays one."""
    return values[0] if values and all(value == values[0] for value in values) else values


def numbers(series: pd.Series[Any], digits: int = 6) -> Any:
    """A column of numbers, packed; missing ones are None. Whole numbers keep all their digits."""
    whole = pd.api.types.is_integer_dtype(series.dtype)
    values = [None if pd.isna(value) else int(value) if whole else short(float(value), digits) for value in series]
    return packed(values)


def runs(values: NDArray[np.uint8]) -> str:
    """Bytes, row by row, as base64 of pairs (value, how often it comes in a row: 1 to 255)."""
    flat = values.reshape(-1)
    if not flat.size:
        return ""
    starts = np.flatnonzero(np.concatenate([[True], flat[1:] != flat[:-1]]))
    lengths = np.diff(np.append(starts, flat.size))
    pieces = -(-lengths // 255)
    pairs = np.empty((int(pieces.sum()), 2), dtype=np.uint8)
    pairs[:, 0] = np.repeat(flat[starts], pieces)
    pairs[:, 1] = 255
    last = np.cumsum(pieces) - 1
    pairs[last, 1] = lengths - (pieces - 1) * 255
    return base64.b64encode(pairs.tobytes()).decode("ascii")
