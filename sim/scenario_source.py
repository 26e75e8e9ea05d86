"""From the text of a scenario to plain Python values, each with the line it stands on.

The only place that reads YAML. Knows syntax: mappings, lists, scalars, lines, ``--set`` overrides. Must not know
what any key means.

Scalars follow YAML 1.2's core schema, not PyYAML's 1.1: ``yes`` and ``on`` are text, ``1e3`` is a number, a date is
text and ``010`` is ten. Duplicate keys, tags, anchors, aliases and a second document are errors. The parser is driven
event by event with bounds on size, depth and number of values, so no input makes it run away.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from sim.scenario_errors import Problem, ScenarioError

__all__ = ["KeyPath", "Place", "Source", "apply_override", "dotted", "read_file", "read_text"]

MAX_BYTES = 1_000_000
MAX_DEPTH = 24
MAX_VALUES = 50_000
MAX_DIGITS = 400  # a longer number is neither an integer nor a float that anything could hold

Plain = dict[str, "Plain"] | list["Plain"] | str | int | float | bool | None
KeyPath = tuple[str | int, ...]

_INTEGER = re.compile(r"[-+]?[0-9]+")
_OTHER_BASE = re.compile(r"0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, float | bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value was written: a line of the file (from 1), or the text of a ``--set``."""

    line: int | None = None
    override: str | None = None


@dataclass(slots=True)
class Source:
    """A scenario as written: ``data``, the file it came from if any, and where each key path stands."""

    data: dict[str, Plain]
    file: Path | None
    places: dict[KeyPath, Place]

    @property
    def label(self) -> str | None:
        """The file as messages name it."""
        return None if self.file is None else str(self.file)

    def place(self, path: KeyPath) -> Place:
        """Where ``path`` stands, or the nearest thing around it that was written."""
        for length in range(len(path), -1, -1):
            found = self.places.get(path[:length])
            if found is not None:
                return found
        return Place()

    def rename(self, section: KeyPath, old: str, new: str) -> None:
        """Let the key ``old`` of the mapping at ``section`` count as ``new``."""
        mapping = get(self.data, section)
        assert isinstance(mapping, dict)
        mapping[new] = mapping.pop(old)
        before, after = (*section, old), (*section, new)
        for path in [path for path in self.places if path[: len(before)] == before]:
            self.places[after + path[len(before) :]] = self.places.pop(path)


def dotted(path: KeyPath) -> str:
    """``("events", 0, "at_s")`` as ``events.0.at_s``, the spelling that ``--set`` takes."""
    return ".".join(str(part) for part in path)


def get(data: Plain, path: KeyPath) -> Plain:
    """The value at ``path``; KeyError if there is none."""
    for part in path:
        if isinstance(data, dict) and isinstance(part, str) and part in data:
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int) and 0 <= part < len(data):
            data = data[part]
        else:
            raise KeyError(part)
    return data


def read_file(file: Path) -> Source:
    """Read a scenario file; ScenarioError if it is missing, no regular file, too large, not text or not YAML."""

    def refuse(reason: str, allowed: str = "") -> ScenarioError:
        return ScenarioError([Problem(reason, allowed=allowed, file=str(file))], str(file))

    try:
        if not file.exists():
            raise refuse("there is no such file")
        if file.is_dir():
            raise refuse("is a directory", "a YAML file")
        if not file.is_file():
            raise refuse("is not a regular file", "a YAML file")
        if file.stat().st_size > MAX_BYTES:
            raise refuse(f"has {file.stat().st_size} bytes", f"at most {MAX_BYTES} bytes")
        raw = file.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, ScenarioError):
            raise
        raise refuse(f"cannot be read: {error}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise refuse(f"is not UTF-8 text (byte {error.start})", "a YAML file in UTF-8") from None
    if "\0" in text:
        raise refuse("holds null bytes: it is a binary file, not text", "a YAML file in UTF-8")
    return read_text(text, file)


def read_text(text: str, file: Path | None = None) -> Source:
    """Read the text of a scenario; ScenarioError with the line if it is not a YAML mapping with plain text keys."""
    label = None if file is None else str(file)
    if len(text) > MAX_BYTES:
        raise ScenarioError([Problem(f"has {len(text)} characters", allowed=f"at most {MAX_BYTES}", file=label)], label)
    places: dict[KeyPath, Place] = {}
    data = _Reader(text, label, places).document()
    if data is None:
        raise ScenarioError(
            [Problem("is empty", allowed="a mapping, such as `model: llama-3.1-8b`", file=label)], label
        )
    if not isinstance(data, dict):
        kind = "a list" if isinstance(data, list) else "a single value"
        raise ScenarioError(
            [Problem(f"holds {kind}", allowed="a mapping, such as `model: llama-3.1-8b`", file=label, line=1)], label
        )
    return Source(data, file, places)


def apply_override(source: Source, override: str) -> None:
    """Apply ``a.b.0.c=VALUE`` to ``source``: VALUE is YAML, missing mappings on the way are made.

    Whether the key exists is for the schema to say; that the way to it leads through mappings and lists is said here.
    Raises ScenarioError naming the override.
    """

    def refuse(reason: str, key: str = "", allowed: str = "") -> ScenarioError:
        return ScenarioError([Problem(reason, key=key, allowed=allowed, override=override)], source.label)

    name, equals, text = override.partition("=")
    parts: list[str] = [part.strip() for part in name.split(".")]
    if not _encodable(override):
        raise refuse("is not UTF-8 text")
    if not equals or not all(parts):
        raise refuse("is not an override", allowed="KEY=VALUE, such as engine.max_num_seqs=64")
    if len(parts) > MAX_DEPTH:
        raise refuse(f"goes {len(parts)} levels down", allowed=f"at most {MAX_DEPTH}")
    if len(text) > MAX_BYTES:
        raise refuse(f"has {len(text)} characters", allowed=f"at most {MAX_BYTES}")
    try:
        value = _Reader(text, None, {}).document()
    except ScenarioError as error:
        raise refuse("; ".join(problem.reason for problem in error.problems)) from None

    container: Plain = source.data
    path: KeyPath = ()
    for position, part in enumerate(parts):
        last = position == len(parts) - 1
        step: str | int = part
        if isinstance(container, list):
            if not re.fullmatch(r"[0-9]{1,9}", part) or int(part) >= len(container):
                allowed = f"an index from 0 to {len(container) - 1}" if container else "nothing: the list is empty"
                raise refuse(f"`{part}` is no entry of a list of {len(container)}", dotted((*path, part)), allowed)
            step = int(part)
            path = (*path, step)
            if last:
                container[step] = value
            else:
                if container[step] is None:
                    container[step] = {}
                container = container[step]
        elif isinstance(container, dict):
            path = (*path, step)
            if last:
                container[part] = value
            else:
                if container.get(part) is None:
                    container[part] = {}
                    source.places[path] = Place(override=override)
                container = container[part]
        else:
            raise refuse(f"`{dotted(path)}` is a single value, so it has no `{part}`", dotted((*path, part)))
    for below in [known for known in source.places if known[: len(path)] == path]:
        del source.places[below]
    source.places[path] = Place(override=override)


_FAST_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", None)
"""libyaml's, eight times as fast: a calibration has thousands of numbers. Not every PyYAML comes with it."""
_DISPUTED: Final = re.compile(r"[\t?!]")
"""Of ASCII what libyaml and PyYAML do not read alike everywhere: a tab or `?` within plain text, a lone `!`."""


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _line(event: yaml.Event) -> int | None:
    return None if event.start_mark is None else event.start_mark.line + 1


class _Reader:
    """One pass over the parser's events. ``places`` is filled as a side effect."""

    def __init__(self, text: str, label: str | None, places: dict[KeyPath, Place]) -> None:
        self._text = text
        self._label = label
        self._places = places
        self._values = 0

    def document(self) -> Plain:
        """The one document, read by libyaml where that is sure to say the same; errors are always told by PyYAML."""
        if _FAST_LOADER is not None and self._text.isascii() and not _DISPUTED.search(self._text):
            try:
                return self._document(_FAST_LOADER)
            except ScenarioError:
                self._places.clear()
                self._values = 0
        return self._document(yaml.SafeLoader)

    def _document(self, loader: Any) -> Plain:
        try:
            events: Iterator[yaml.Event] = iter(yaml.parse(self._text, Loader=loader))
            next(events)  # the start of the stream
            if isinstance(next(events), yaml.StreamEndEvent):
                return None
            data = self._value(next(events), events, ())
            next(events)  # the end of the document
            after = next(events)
            if not isinstance(after, yaml.StreamEndEvent):
                raise self._refuse("has a second document (`---`)", after, allowed="one document")
            return data
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            said = " ".join(part for part in (error.context, error.problem) if part)
            raise ScenarioError(
                [Problem(f"is not YAML: {said}", file=self._label, line=None if mark is None else mark.line + 1)],
                self._label,
            ) from None
        except yaml.YAMLError as error:
            said = str(error).splitlines()[0] if str(error) else "it cannot be read"
            raise ScenarioError([Problem(f"is not YAML: {said}", file=self._label)], self._label) from None
        except (ValueError, OverflowError) as error:  # PyYAML lets some escape, such as an escaped code point too large
            if isinstance(error, ScenarioError):
                raise
            raise ScenarioError([Problem(f"is not YAML: {error}", file=self._label)], self._label) from None

    def _refuse(self, reason: str, event: yaml.Event, path: KeyPath = (), allowed: str = "") -> ScenarioError:
        line = _line(event)
        return ScenarioError(
            [Problem(reason, key=dotted(path), allowed=allowed, file=self._label, line=line)], self._label
        )

    def _refuse_surrogates(self, event: yaml.ScalarEvent, path: KeyPath) -> None:
        if not _encodable(event.value):
            raise self._refuse("holds half a surrogate pair, which is no character", event, path)

    def _value(self, event: yaml.Event, events: Iterator[yaml.Event], path: KeyPath) -> Plain:
        self._values += 1
        if self._values > MAX_VALUES:
            raise self._refuse(f"has more than {MAX_VALUES} values", event)
        if len(path) > MAX_DEPTH:
            raise self._refuse(f"is nested more than {MAX_DEPTH} deep", event, path[:3])
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise self._refuse("anchors and aliases (& and *) are not read here", event, path, "write the value out")
        tag = getattr(event, "tag", None)
        if tag is not None and tag != "!":
            raise self._refuse(f"tags are not read here: {tag}", event, path, "a plain value")
        self._places.setdefault(path, Place(_line(event)))
        if isinstance(event, yaml.ScalarEvent):
            self._refuse_surrogates(event, path)
            if event.style or tag == "!":
                return str(event.value)
            return self._scalar(event, path)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._list(events, path)
        return self._mapping(events, path)

    def _list(self, events: Iterator[yaml.Event], path: KeyPath) -> list[Plain]:
        entries: list[Plain] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            entries.append(self._value(event, events, (*path, len(entries))))
        return entries

    def _mapping(self, events: Iterator[yaml.Event], path: KeyPath) -> dict[str, Plain]:
        entries: dict[str, Plain] = {}
        lines: dict[str, int | None] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
                raise self._refuse("anchors and aliases (& and *) are not read here", event, path)
            if not isinstance(event, yaml.ScalarEvent):
                raise self._refuse("a key is a list or a mapping", event, path, "text")
            self._refuse_surrogates(event, path)
            key = event.value if event.style else self._scalar(event, path)
            if not isinstance(key, str):
                raise self._refuse(f"the key {event.value[:40]!r} is not text", event, path, "a name, such as `model`")
            if key == "<<":
                raise self._refuse("merges (<<) are not read here", event, path, "write the keys out")
            here = (*path, key)
            if key in entries:
                reason = f"the key is given twice, first on line {lines[key]}"
                raise self._refuse(reason, event, here, "each key once")
            line = lines[key] = _line(event)
            self._places[here] = Place(line)
            entries[key] = self._value(next(events), events, here)
        return entries

    def _scalar(self, event: yaml.ScalarEvent, path: KeyPath) -> str | int | float | bool | None:
        text: str = event.value
        if text in _WORDS:
            return _WORDS[text]
        if len(text) > MAX_DIGITS:
            if _INTEGER.fullmatch(text) or _FLOAT.fullmatch(text):
                raise self._refuse(f"is a number of {len(text)} characters", event, path, f"at most {MAX_DIGITS}")
            return text
        if _INTEGER.fullmatch(text):
            return int(text)
        if _OTHER_BASE.fullmatch(text):
            return int(text, 0)
        if _FLOAT.fullmatch(text):
            return float(text)
        return text
