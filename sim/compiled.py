"""Which core runs: the one compiled ahead of time, or the plain sources that it was compiled from.

`setup.py` puts the compiled modules beside their sources, with a record of what the sources were. This file, the first
of `sim` to be imported, chooses one of the two for the whole process, never a mixture. It knows where files lie; it
must not know what they hold, and imports next to nothing: everything that starts waits for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from importlib.util import source_hash
from types import ModuleType
from typing import Final, NamedTuple

VARIABLE: Final = "SPECKV_CORE"
"""Environment variable: `plain` or `compiled`; if it is not set, compiled where that is there and fits its sources."""

_PACKAGES: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_SUFFIX: Final = EXTENSION_SUFFIXES[0]  # of this Python and platform: others may have been compiled for as well
_RECORD: Final = os.path.join(_PACKAGES, "sim", f"_core__mypyc{_SUFFIX}.txt")
_NOTHING_RUNS_WITHOUT: Final = ("sim.core", "sim.records")


class Core(NamedTuple):
    """Which core runs."""

    name: str
    """`compiled` or `plain`."""
    reason: str | None = None
    """Why it is the plain one."""
    error: str | None = None
    """Why there is none: what the environment variable asks for cannot be had."""

    def __str__(self) -> str:
        return self.name if self.reason is None else f"{self.name} ({self.reason})"


def _misfit() -> str | None:
    """Why the compiled core cannot run: it is not there, or its sources have changed since. None if it can."""
    again = "; `make compile` builds it" if os.path.exists(os.path.join(_PACKAGES, "pyproject.toml")) else ""
    try:
        with open(_RECORD, encoding="utf-8", errors="replace") as record:
            lines = [line.rstrip().split(" ", 2) for line in record]
    except OSError:
        return f"none was compiled for this Python{again}"
    whole = bool(lines) and (lines[0][0] == "failed" or lines[-1][0] == "end")
    if not whole or any(len(line) != 3 for line in lines):
        return f"{_RECORD} is damaged{again and again + ' again'}"
    for kind, was, source in lines:
        if kind == "failed":
            return f"it could not be compiled: {source}"
        if kind in ("recipe", "end"):
            continue
        try:
            with open(os.path.join(_PACKAGES, source), "rb") as file:
                now = source_hash(file.read()).hex()
        except OSError:
            now = "gone"
        if now != was:
            return f"the compiled core is older than {source}{again and again + ' again'}"
        if kind == "compiled" and not os.path.exists(os.path.join(_PACKAGES, source.removesuffix(".py") + _SUFFIX)):
            return f"the compiled {source} is missing{again and again + ' again'}"
    library = _RECORD.removesuffix(".txt")
    return None if os.path.exists(library) else f"{library} is missing{again and again + ' again'}"


def _choose(asked: str | None) -> Core:
    if asked == "plain":
        return Core("plain", f"{VARIABLE}=plain")
    if asked not in (None, "", "compiled"):
        return Core("plain", error=f"{VARIABLE}={asked!r}: no such core; allowed: plain, compiled, or not set")
    misfit = _misfit()
    if misfit is None:
        return Core("compiled")
    if asked == "compiled":
        return Core("plain", error=f"{VARIABLE}=compiled: there is no compiled core that fits: {misfit}")
    return Core("plain", misfit)


class _Sources:
    """Finds modules of `sim` by their sources only, whatever was compiled beside them."""

    def __init__(self, core: Core) -> None:
        self._error = core.error
        self._finders: dict[str, FileFinder] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is None or not name.startswith("sim."):
            return None
        if self._error is not None and name.startswith(_NOTHING_RUNS_WITHOUT):
            raise ImportError(self._error, name=name)
        for folder in path:
            finder = self._finders.get(folder)
            if finder is None:
                finder = self._finders[folder] = FileFinder(folder, (SourceFileLoader, SOURCE_SUFFIXES))
            found = finder.find_spec(name)
            if found is not None:
                return found
        return None


CORE: Final = _choose(os.environ.get(VARIABLE))
"""Which core runs in this process."""
if CORE.name == "plain":
    sys.meta_path.insert(0, _Sources(CORE))
