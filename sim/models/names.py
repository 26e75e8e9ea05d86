"""Names of cards and models: finding one, and saying which was meant where there is none.

Knows how a name is compared. Must not know what the names stand for.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UnknownName(KeyError):
    """Nothing has this name. `nearest` lists the names that come closest, `known` all of them, each in order."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        super().__init__(name)
        self.kind = kind
        self.name = name
        self.known = sorted(known)
        by_key = {plain(other): other for other in self.known}
        self.nearest = [by_key[key] for key in difflib.get_close_matches(plain(name), list(by_key), n=3, cutoff=0.5)]

    def __reduce__(self) -> tuple[type[UnknownName], tuple[str, str, list[str]]]:
        return UnknownName, (self.kind, self.name, self.known)

    def __str__(self) -> str:
        meant = f"; did you mean {' or '.join(self.nearest)}?" if self.nearest else ""
        return f"unknown {self.kind} {self.name!r}{meant} (known: {', '.join(self.known)})"


def plain(name: str) -> str:
    """The form in which names are compared: lower case, runs of blanks, `-` and `_` as one `-`."""
    return "-".join(name.lower().replace("_", " ").replace("-", " ").split())
