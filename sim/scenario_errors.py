"""What is wrong with a scenario, as facts and as text.

Knows how a problem is told to a person: where it stands, which key, which value, what is allowed and what was
probably meant. Must not know YAML, pydantic or any single setting.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["ABSENT", "Absent", "Problem", "ScenarioError", "nearest_name", "shorten"]

_SHOWN_CHARACTERS = 60
_SHOWN_PROBLEMS = 25


class Absent:
    """The value of a key that is not there (None is a value that YAML can write)."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT = Absent()


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    ``file`` and ``line`` (from 1) say where, or ``override`` holds the ``--set`` text that brought the value in;
    ``key`` is the dotted path, empty for the whole file; ``value`` is what stands there, or ``ABSENT``; ``reason``
    says what is wrong, ``allowed`` what would be right, ``nearest`` the name that was probably meant.
    """

    reason: str
    key: str = ""
    value: object = ABSENT
    allowed: str = ""
    nearest: str | None = None
    file: str | None = None
    line: int | None = None
    override: str | None = None

    @property
    def place(self) -> str:
        """``file:line``, ``file``, or ``--set KEY=VALUE``."""
        if self.override is not None:
            return f"--set {shorten(self.override)}"
        if self.file is None:
            return ""
        return self.file if self.line is None else f"{self.file}:{self.line}"

    def __str__(self) -> str:
        text = self.reason
        if self.key:
            shown = "" if isinstance(self.value, Absent) else f" = {shorten(repr(self.value))}"
            text = f"{shorten(self.key, 160)}{shown}: {text}"
        if self.place:
            text = f"{self.place}: {text}"
        if self.nearest is not None:
            text += f"; did you mean `{self.nearest}`?"
        if self.allowed:
            text += f"\n      allowed: {self.allowed}"
        return text


class ScenarioError(ValueError):
    """A scenario that cannot be run; ``problems`` has every reason found, ``str()`` tells them all."""

    def __init__(self, problems: Iterable[Problem], source: str | None = None) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        self.source = source
        super().__init__(self._text())

    def _text(self) -> str:
        count = len(self.problems)
        subject = "the scenario" if self.source is None else f"scenario {self.source}"
        lines = [f"{subject} cannot be run: {count} problem{'' if count == 1 else 's'}"]
        lines += [f"  - {problem}" for problem in self.problems[:_SHOWN_PROBLEMS]]
        if count > _SHOWN_PROBLEMS:
            lines.append(f"  - and {count - _SHOWN_PROBLEMS} more")
        return "\n".join(_printable(line) for text in lines for line in text.split("\n"))


def shorten(text: str, limit: int = _SHOWN_CHARACTERS) -> str:
    """``text`` on one printable line of at most ``limit`` characters."""
    if len(text) > limit:
        text = text[: limit - 3] + "..."
    return _printable(text)


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def nearest_name(name: str, names: Sequence[str]) -> str | None:
    """The entry of ``names`` that ``name`` most resembles, or None if nothing comes near."""
    if len(name) > 200:  # difflib's time grows with the product of the lengths
        return None
    folded = {entry.lower().replace("-", "_"): entry for entry in names}
    found = difflib.get_close_matches(name.lower().replace("-", "_"), list(folded), n=1, cutoff=0.6)
    return folded[found[0]] if found else None
