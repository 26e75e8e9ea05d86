"""Which steps a run writes down: `all`, `none`, `every:100` or `window:1s`.

Knows how that is written. Must not know tables or scenarios.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from sim.scenario_errors import nearest_name

__all__ = ["ALLOWED", "Recording", "RecordingError", "read_recording"]

ALLOWED: Final = (
    "all or none (or true or false), every:N with N from 1, or window:DURATION from 1ms to 1000000h, such as window:1s"
)

_KINDS: Final = ("all", "none", "every:100", "window:1s")
_UNITS: Final = {"h": 3_600 * 10**9, "min": 60 * 10**9, "s": 10**9, "ms": 10**6}
_MEANT: Final = {
    **{"": "s", "sec": "s", "second": "s", "m": "min", "min": "min", "minute": "min", "hr": "h", "hour": "h"},
    **{"msec": "ms", "milli": "ms", "millisecond": "ms"},
}
"""Units by what else they are called, without the plural."""
_LEAST_NS: Final = 10**6
_MOST_NS: Final = 10**6 * _UNITS["h"]
_DURATION: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([a-z]*)")


class RecordingError(ValueError):
    """What was written means no recording; `nearest` is what was probably meant."""

    def __init__(self, reason: str, nearest: str | None = None) -> None:
        self.nearest = nearest
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class Recording:
    """Which rows the table of steps has."""

    every: int = 1
    """The first step's, and each so-manyth from there on; 0: there is no table."""
    window_ns: int | None = None
    """Instead, one row for so much simulated time, in whole ns."""

    def __str__(self) -> str:
        if self.window_ns is not None:
            return f"window:{_duration(self.window_ns)}"
        return {0: "none", 1: "all"}.get(self.every, f"every:{self.every}")

    @property
    def written(self) -> bool | str:
        """As a scenario has it: true for all, false for none, else text. Equal ones are written alike."""
        return bool(self.every) if self.window_ns is None and self.every < 2 else str(self)


def read_recording(value: object) -> Recording:
    """What a scenario or a command line says: true, false, or text as in `ALLOWED`. Raises RecordingError."""
    if isinstance(value, bool):
        return Recording(int(value))
    if not isinstance(value, str):
        if isinstance(value, int):
            raise RecordingError("is a whole number", f"every:{value}" if value > 0 else None)
        raise RecordingError("is no text")
    if value in ("all", "none"):
        return Recording(int(value == "all"))
    kind, _, detail = value.partition(":")
    if kind == "every":
        if re.fullmatch(r"0*[1-9][0-9]{0,11}", detail):
            return Recording(int(detail))
        raise RecordingError("has no number of steps, a whole number from 1", None if detail else "every:100")
    if kind == "window":
        return Recording(window_ns=_window_ns(detail))
    if value in ("yes", "no", "on", "off"):
        raise RecordingError("is text, not true or false (YAML 1.2)")
    nearest = nearest_name(kind, [one.partition(":")[0] for one in _KINDS])
    if nearest is not None:
        usual = next(one for one in _KINDS if one.startswith(nearest))
        nearest = f"{nearest}:{detail}" if detail and ":" in usual else usual
    raise RecordingError("is not known", nearest)


def _window_ns(text: str) -> int:
    found = _DURATION.fullmatch(text)
    if found is None:
        raise RecordingError("has no duration, a number with a unit", "window:1s")
    number, unit = found.groups()
    if unit not in _UNITS:
        reason = f"has the unit {unit!r}, not one of ms, s, min, h" if unit else "has no unit: ms, s, min or h"
        meant = _MEANT.get(unit.removesuffix("s"))
        raise RecordingError(reason, None if meant is None else f"window:{number}{meant}")
    exact = Decimal(number) * _UNITS[unit]
    if exact != int(exact) or not _LEAST_NS <= exact <= _MOST_NS:
        raise RecordingError("is no whole number of ns from 1 ms to 1,000,000 h")
    return int(exact)


def _duration(ns: int) -> str:
    """In the largest unit in which it is a whole number, else in ms."""
    for unit, length in _UNITS.items():
        if ns % length == 0:
            return f"{ns // length}{unit}"
    return f"{Decimal(ns) / _UNITS['ms']:f}ms"
