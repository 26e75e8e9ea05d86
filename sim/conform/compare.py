"""Where two traces of one case part: as data, and as text that a person can read.

Knows the trace format. Must not know who made the traces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["ABSENT", "Difference", "Trace", "decisions", "first_difference"]

Trace = dict[str, Any]
"""A trace as JSON gives it: ``turns``, a list of rows, and ``summary``."""

# In the order in which a turn decides them.
_FIELDS = (
    "events", "scheduled", "preempted", "admitted", "resumed", "after_schedule", "free_blocks", "returned",
    "delivered", "finished", "after_update", "free_blocks_after_update", "waiting",
)  # fmt: skip
_ORDERED = frozenset(("scheduled", "admitted", "resumed", "after_schedule", "returned", "delivered", "after_update"))
# The parts of a request's state in ``after_schedule`` and ``after_update``, and of ``scheduled``.
_PARTS = {
    "after_schedule": ("num_computed_tokens", "num_tokens", "num_output_placeholders", "blocks"),
    "after_update": ("num_computed_tokens", "num_tokens", "num_output_placeholders", "blocks"),
    "scheduled": ("tokens", "drafts"),
}
_NUM_CONTEXT_LINES = 10
_LONGEST_VALUE = 200


class _Absent:
    """What stands for a value that one side does not have (None is a value that JSON has)."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two traces part.

    ``row`` counts rows from 0, ``turn`` is the turn of the row; both are None for the summary. ``field`` is the field
    of the row or of the summary, ``"turn"`` where the turns themselves differ, ``"rows"`` where a trace ends early and
    ``"crash"`` where only one side fell over. ``request`` and ``part`` (``"order"``, or a name such as
    ``"num_computed_tokens"``) are None where the whole field is meant. ``before`` holds the last decisions on which
    both agree, oldest first.
    """

    row: int | None
    turn: int | None
    field: str
    request: str | None
    part: str | None
    expected: Any
    actual: Any
    before: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Where it is, in words: turn, field, request and part."""
        where = "summary" if self.turn is None else f"turn {self.turn}"
        words = [where if self.row is None else f"{where} (row {self.row})", self.field]
        if self.request is not None:
            words.append(f"request {self.request}")
        if self.part is not None:
            words.append(self.part)
        return ", ".join(words)

    def text(self, expected_name: str = "expected", actual_name: str = "actual") -> str:
        """The place, both values under the names given, and the decisions before it; several lines."""
        width = max(len(expected_name), len(actual_name))
        lines = [
            f"{self.place}:",
            f"  {expected_name:>{width}}  {_shown(self.expected)}",
            f"  {actual_name:>{width}}  {_shown(self.actual)}",
        ]
        if self.before:
            lines.append("decisions before it, on which both agree:")
            lines += [f"  {line}" for line in self.before]
        return "\n".join(lines)


def first_difference(expected: Trace, actual: Trace) -> Difference | None:
    """The first difference of two traces in the order in which things were decided; None where they are equal.

    The order of keys counts where the format says so (batches and the running list).
    """
    want_rows, got_rows = expected["turns"], actual["turns"]
    for index, (want, got) in enumerate(zip(want_rows, got_rows, strict=False)):
        if want != got or _orders(want) != _orders(got):
            found = _difference_in_row(want, got)
            if found is not None:
                name, request, part, one, other = found
                before = _agreed(want_rows[:index], want, name)
                return Difference(index, want.get("turn"), name, request, part, one, other, before)
    if len(want_rows) != len(got_rows):
        index = min(len(want_rows), len(got_rows))
        turn = (want_rows if len(want_rows) > index else got_rows)[index].get("turn")
        before = _agreed(want_rows[:index], {}, "")
        return Difference(index, turn, "rows", None, None, len(want_rows), len(got_rows), before)
    want_summary, got_summary = expected["summary"], actual["summary"]
    for name in (*want_summary, *got_summary):
        one, other = want_summary.get(name, ABSENT), got_summary.get(name, ABSENT)
        if one != other:
            request, one, other = _narrow(one, other)
            return Difference(None, None, name, request, None, one, other, _agreed(want_rows, {}, ""))
    return None


def decisions(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The decisions of a row as lines, each with the last field of the row that it tells of."""
    turn = f"turn {row['turn']}"
    for event in row.get("events", ()):
        what = f"abort {event['id']}" if event["type"] == "abort" else _reset_in_words(event)
        yield "events", f"{turn} {what}"
    if "scheduled" in row:
        yield "free_blocks", f"{turn} schedule {_schedule_in_words(row)}; {row['free_blocks']} blocks free"
    if "returned" in row:
        words = [
            f"{name} {sampled}" if row["delivered"].get(name) == sampled
            else f"{name} {sampled} ({row['delivered'].get(name)} delivered)"
            for name, sampled in row["returned"].items()
        ]  # fmt: skip
        if row["finished"]:
            words.append(f"finished {' '.join(row['finished'])}")
        free = row["free_blocks_after_update"]
        yield "free_blocks_after_update", f"{turn} return {', '.join(words)}; {free} blocks free"


def _reset_in_words(event: dict[str, Any]) -> str:
    what = "reset prefix cache" + (" and running requests" if event["reset_running_requests"] else "")
    return f"{what}: {'done' if event.get('done') else 'not done'}"


def _schedule_in_words(row: dict[str, Any]) -> str:
    words = []
    for name, (count, drafts) in row["scheduled"].items():
        told = f"{name} {count}" + (f" (drafts {drafts})" if drafts else "")
        for kind in ("admitted", "resumed"):
            if name in row[kind]:
                told += f" {kind}" + (f" with hit {row[kind][name]}" if row[kind][name] else "")
        words.append(told)
    if row["preempted"]:
        words.append(f"preempted {' '.join(row['preempted'])}")
    return ", ".join(words) or "nothing"


def _agreed(rows: list[dict[str, Any]], row: dict[str, Any], name: str) -> tuple[str, ...]:
    """The last decisions of the rows, and of the row up to the field in which the traces part."""
    lines: list[str] = []
    if name in _FIELDS and "turn" in row:
        reached = _FIELDS.index(name)
        lines = [line for last, line in decisions(row) if _FIELDS.index(last) < reached]
    for earlier in reversed(rows):
        if len(lines) >= _NUM_CONTEXT_LINES:
            break
        lines = [line for _, line in decisions(earlier)] + lines
    return tuple(lines[-_NUM_CONTEXT_LINES:])


def _orders(row: dict[str, Any]) -> list[list[str]]:
    return [list(row[name]) for name in _ORDERED if isinstance(row.get(name), dict)]


def _difference_in_row(
    want: dict[str, Any], got: dict[str, Any]
) -> tuple[str, str | None, str | None, Any, Any] | None:
    others = [name for name in (*want, *got) if name not in _FIELDS]
    for name in (*dict.fromkeys(others), *_FIELDS):
        one, other = want.get(name, ABSENT), got.get(name, ABSENT)
        if one != other:
            request, one, other = _narrow(one, other)
            if request is not None and name in _PARTS and isinstance(one, list) and isinstance(other, list):
                for part, first, second in zip(_PARTS[name], one, other, strict=False):
                    if first != second:
                        return name, request, part, first, second
            return name, request, None, one, other
        if name in _ORDERED and isinstance(one, dict) and list(one) != list(other):
            return name, None, "order", list(one), list(other)
    return None


def _narrow(one: Any, other: Any) -> tuple[str | None, Any, Any]:
    """The first request for which two mappings differ, with its values; values that are no mappings stay."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in (*one, *other):
            if one.get(name, ABSENT) != other.get(name, ABSENT):
                return name, one.get(name, ABSENT), other.get(name, ABSENT)
    return None, one, other


def _shown(value: Any) -> str:
    text = repr(value) if value is ABSENT else json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} ..."
