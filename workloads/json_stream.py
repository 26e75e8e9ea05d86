"""Large JSON documents, read piece by piece: what is asked for is decoded, and no more than that is held.

Knows: JSON and lines. Must not know: what any document means.

A reader stands before a value; `members` and `elements` go into it, `value` decodes it whole, `skip` passes over it.
Each key and each element must be taken or skipped before the next is asked for.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator

from workloads.trace_source import Source, TraceError, shorten

_CHUNK = 1 << 18
_LONGEST_VALUE = 1 << 28
_WHITE = " \t\r\n"
_NEAR_THE_END = 16
"""A value that is cut off fails within so many characters of the end, if not inside a string."""


class JsonReader:
    """Reads the file of a `Source` forward. All methods raise TraceError, with the line, for what is not JSON."""

    def __init__(self, source: Source) -> None:
        self.path = source.path
        self.line = 1
        """The line of the next value, from 1."""
        self._chunks = source.chunks(_CHUNK)
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("strict").decode
        self._json = json.JSONDecoder()
        self._text = ""
        self._at = 0
        self._more = True

    def peek(self) -> str:
        """The first character of what comes next; empty at the end of the file."""
        while True:
            text, at = self._text, self._at
            while at < len(text) and text[at] in _WHITE:
                at += 1
            self._go(at)
            if at < len(text):
                return text[at]
            if not self._fill(_CHUNK):
                return ""

    def value(self) -> object:
        """The next value, whole."""
        if not self.peek():
            raise self._cut_short()
        grow = _CHUNK
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                unfinished = (
                    error.pos >= len(self._text) - _NEAR_THE_END
                    or error.msg.startswith("Unterminated string")
                    or error.msg.startswith("Invalid \\uXXXX escape")
                )
                if unfinished and len(self._text) - self._at < _LONGEST_VALUE:
                    if self._fill(grow):
                        grow *= 2
                        continue
                    raise self._cut_short() from error
                self.line += self._text.count("\n", self._at, error.pos)
                raise self._wrong(error.pos, f"not JSON: {error.msg}") from error
            except RecursionError as error:
                raise self._wrong(self._at, "not JSON: nested too deeply") from error
            if end == len(self._text) and self._fill(grow):  # a number may go on
                continue
            self._go(end)
            return value

    def skip(self) -> None:
        """Pass over the next value; of a list, one element is held at a time."""
        if self.peek() == "[":
            for _ in self.elements():
                self.value()
        else:
            self.value()

    def members(self) -> Iterator[str]:
        """The keys of the object that comes next; take or skip the value of each before asking for the next key."""
        self._take("{")
        if self.peek() == "}":
            self._take("}")
            return
        while True:
            key = self.value()
            if not isinstance(key, str):
                raise self._wrong(self._at, "not JSON: a key must be text")
            self._take(":")
            yield key
            if self._take(",}") == "}":
                return

    def elements(self) -> Iterator[None]:
        """Once for each element of the list that comes next; take or skip it before asking for the next."""
        self._take("[")
        if self.peek() == "]":
            self._take("]")
            return
        while True:
            yield
            if self._take(",]") == "]":
                return

    def _take(self, allowed: str) -> str:
        found = self.peek()
        if not found:
            raise self._cut_short()
        if found not in allowed:
            raise self._wrong(self._at, f"not JSON: expected {' or '.join(allowed)}")
        self._at += 1
        return found

    def _cut_short(self) -> TraceError:
        line = self.line + self._text.count("\n", self._at)
        return TraceError(self.path, line, None, None, "the file ends in the middle: it is cut short", "cut short")

    def _wrong(self, at: int, message: str) -> TraceError:
        shown = shorten(self._text[max(at - 20, self._at) : at + 40]) or None
        return TraceError(self.path, self.line, None, shown, message, "not JSON")

    def _go(self, to: int) -> None:
        self.line += self._text.count("\n", self._at, to)
        self._at = to
        if to > 4 * _CHUNK:
            self._text = self._text[to:]
            self._at = 0

    def _fill(self, wanted: int) -> bool:
        """Have up to `wanted` more bytes; whether there were any."""
        pieces: list[str] = []
        got = 0
        while self._more and got < wanted:
            chunk = next(self._chunks, b"")
            self._more = bool(chunk)
            got += len(chunk)
            line = self.line + self._text.count("\n", self._at) + sum(piece.count("\n") for piece in pieces)
            if b"\0" in chunk:
                line += chunk[: chunk.index(b"\0")].count(b"\n")
                raise TraceError(self.path, line, None, None, "not a text file: it holds a NUL byte")
            try:
                pieces.append(self._decode(chunk, final=not self._more))
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                byte = error.object[error.start]
                raise TraceError(self.path, line, None, f"byte 0x{byte:02x}", "not UTF-8 text") from error
        if not got:
            return False
        self._text = self._text[self._at :] + "".join(pieces)
        self._at = 0
        return True
