"""A trace file as it lies on disk: its lines, decoded and numbered; what is wrong with them; what is left out.

Knows: files, gzip, UTF-8, spellings of numbers and times. Must not know: which columns a format has, or what a row is
for.

Every error of a row goes through `Source.bad`, which raises it or, where bad rows are to be skipped, counts it by
reason. Errors of the file as a whole (no such file, a header without a column) are raised in either case.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, cast

LARGEST_TOKENS: Final = 2**31 - 1
_LATEST_NS = 2**63 - 1
_LONGEST_LINE = 16 * 1024 * 1024
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?", re.ASCII)
_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}
NS_PER: Final[Mapping[str, int]] = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
"""Nanoseconds in each unit of time that a column may have."""
_UNIT_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}

Progress = Callable[[int, float], None]
"""Told now and then: rows read so far, and the share of the file that is behind, 0 to 1."""


class TraceError(ValueError):
    """A trace that cannot be read: which file, which line (from 1), which column, what stood there, what is wrong.

    `line`, `column` and `value` are None where they do not apply; `reason` is `message` without what differs from row
    to row, for counting.
    """

    def __init__(
        self, path: Path, line: int | None, column: str | None, value: object, message: str, reason: str = ""
    ) -> None:
        self.path = path
        self.line = line
        self.column = column
        self.value = value
        self.message = message
        self.reason = reason or message
        where = str(path) if line is None else f"{path}, line {line}"
        if column is not None:
            where += f", {column}"
        shown = "" if value is None else f" (got {shorten(value)})"
        super().__init__(f"{where}: {message}{shown}")


class Row(NamedTuple):
    """One request as the file has it; `time_ns` counts from an origin of the format's own.

    `hash_ids` name the prompt's blocks where the file does; `session` the conversation it belongs to.
    """

    line: int
    time_ns: int
    time_text: str
    num_prompt_tokens: int
    max_tokens: int
    hash_ids: Sequence[int] | None = None
    session: str | None = None


class Source:
    """One reading of one file.

    `left_out` counts, by reason, what has been passed over so far: bad rows where `skip_bad_rows`, and, always, rows
    that a format says were no served requests (`leave_out`).
    """

    def __init__(self, path: Path, skip_bad_rows: bool = False) -> None:
        self.path = path
        self.skip_bad_rows = skip_bad_rows
        self.left_out: Counter[str] = Counter()
        self.fraction: Callable[[], float] = lambda: 0.0
        """The share of the file that has been read, 0 to 1."""

    def bad(self, error: TraceError) -> None:
        """A row that cannot be used. Raises the error unless bad rows are skipped; then counts it."""
        if not self.skip_bad_rows:
            raise error
        column = "" if error.column is None else f"{error.column.partition('[')[0]}: "
        self.left_out[column + error.reason] += 1

    def leave_out(self, reason: str, count: int = 1) -> None:
        """Rows that are right and still no requests, such as failed ones."""
        self.left_out[reason] += count

    def lines(self) -> Iterator[tuple[int, str]]:
        """The lines that are not blank, with their numbers, decoded and without their ends."""
        number = 0
        too_long = False
        try:
            with self._opened() as file:
                while raw := file.readline(_LONGEST_LINE + 1):
                    if too_long:  # what is left of a line that was told of
                        too_long = not raw.endswith(b"\n")
                        continue
                    number += 1
                    if len(raw) > _LONGEST_LINE:
                        too_long = not raw.endswith(b"\n")
                        self.bad(TraceError(self.path, number, None, None, f"line longer than {_LONGEST_LINE} bytes"))
                        continue
                    try:
                        text = self._decoded(number, raw)
                    except TraceError as error:
                        self.bad(error)
                        continue
                    text = text.rstrip("\r\n")
                    if text and not text.isspace():
                        yield number, text
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self.bad(
                TraceError(self.path, None, None, None, f"broken gzip after line {number}: {error}", "broken gzip")
            )

    def chunks(self, size: int) -> Iterator[bytes]:
        """The file in pieces of up to `size` bytes, unzipped."""
        try:
            with self._opened() as file:
                while chunk := file.read(size):
                    yield chunk
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self.bad(TraceError(self.path, None, None, None, f"broken gzip: {error}", "broken gzip"))

    def starts_with(self, magic: bytes) -> bool:
        """Whether the file, as it lies there, begins so."""
        with _told(self.path), self.path.open("rb") as file:
            return file.read(len(magic)) == magic

    def _decoded(self, number: int, raw: bytes) -> str:
        if b"\0" in raw:
            raise TraceError(self.path, number, None, None, "not a text file: it holds a NUL byte")
        try:
            return raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            byte = f"byte 0x{raw[error.start]:02x}"
            raise TraceError(self.path, number, None, byte, "not UTF-8 text") from error

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        """The file, unzipped where its name or its first bytes say so."""
        if self.path.exists() and not self.path.is_file() and not self.path.is_dir():
            raise TraceError(self.path, None, None, None, "is not a regular file")
        with _told(self.path), self.path.open("rb") as raw:
            size = max(self.path.stat().st_size, 1)
            self.fraction = lambda: 1.0 if raw.closed else min(1.0, raw.tell() / size)
            zipped = self.path.suffix == ".gz" or raw.peek(2)[:2] == b"\x1f\x8b"
            yield cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if zipped else raw


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Errors of the operating system become TraceErrors."""
    try:
        yield
    except gzip.BadGzipFile:
        raise
    except IsADirectoryError as error:
        raise TraceError(path, None, None, None, "is a folder, not a file") from error
    except FileNotFoundError as error:
        raise TraceError(path, None, None, None, "no such file") from error
    except OSError as error:
        raise TraceError(path, None, None, None, f"cannot be read: {error.strerror or error}") from error


# CSV and JSON


def csv_fields(path: Path, number: int, line: str) -> list[str]:
    """The fields of one line. Raises TraceError for quotes that do not close."""
    if '"' not in line:
        return [field.strip() for field in line.split(",")]
    try:
        return [field.strip() for field in next(csv.reader([line], strict=True))]
    except csv.Error as error:
        raise TraceError(path, number, None, line, f"not a line of CSV: {error}", "not a line of CSV") from error


def csv_header(path: Path, number: int, line: str) -> list[str]:
    """The names of the columns. Raises TraceError where another separator than the comma stands between them."""
    columns = csv_fields(path, number, line)
    if len(columns) == 1:
        for separator, name in _OTHER_SEPARATORS.items():
            if separator in line:
                raise TraceError(
                    path, number, None, line, f"the columns are separated by {name}; write commas between them"
                )
    return columns


def json_object(path: Path, number: int, line: str) -> Mapping[str, object]:
    """The object on this line. Raises TraceError where there is none."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        message = f"not a JSON object, or cut short: {error}"
        raise TraceError(path, number, None, line, message, "not a JSON object, or cut short") from error
    if not isinstance(values, dict):
        raise TraceError(path, number, None, line, "must be a JSON object")
    return values


def find_column(path: Path, number: int | None, name: str, columns: Sequence[str]) -> int:
    """Where the column stands. Raises TraceError, with the nearest name, if it is missing, and if it is there twice."""
    if columns.count(name) == 1:
        return columns.index(name)
    if name in columns:
        raise TraceError(path, number, name, None, "this column is there twice")
    lowered = {column.lower(): column for column in columns}
    near = difflib.get_close_matches(name.lower(), lowered, n=1)
    hint = f"did you mean {lowered[near[0]]!r}?" if near else f"there are {shorten(', '.join(columns))}"
    raise TraceError(path, number, name, None, f"this column is missing; {hint}", "this column is missing")


# Values


class Clock:
    """Reads the times of one column, nanoseconds from an origin of its own: text with a date, or numbers of a unit.

    `unit`: s, ms, us, ns, or iso for YYYY-MM-DD hh:mm:ss perhaps with 9 decimals and a zone, in all rows the same.
    """

    def __init__(self, path: Path, column: str, unit: str) -> None:
        self._path = path
        self._column = column
        self._unit = unit
        self._zone: tuple[str, int] | None = None

    def time_ns(self, number: int, value: object) -> int:
        """Raises TraceError for what is no time of this unit."""
        if self._unit == "iso":
            if isinstance(value, str):
                return self._date_ns(number, value)
            raise self._wrong(number, value, "must be text with a date and a time")
        scale = NS_PER[self._unit]
        exact: Decimal | int | float | None = None
        if isinstance(value, str):
            if value.isascii() and "_" not in value:
                try:
                    exact = Decimal(value) * scale
                except InvalidOperation:
                    exact = None
                if exact is not None and not exact.is_finite():  # comparing NaN would raise
                    exact = None
        elif isinstance(value, int | float) and not isinstance(value, bool):
            exact = value * scale
        if exact is None or not 0 <= exact <= _LATEST_NS:  # NaN is in no range
            raise self._wrong(number, value, f"must be a number of {_UNIT_NAMES[self._unit]}, 0 or more")
        return round(exact)

    def _wrong(self, number: int, value: object, message: str) -> TraceError:
        return TraceError(self._path, number, self._column, "nothing" if value in ("", None) else value, message)

    def _date_ns(self, number: int, text: str) -> int:
        match = _TIMESTAMP.fullmatch(text)
        try:
            if match is None:
                raise ValueError
            seconds = _seconds(match[1])
        except ValueError:
            message = "not a time; write YYYY-MM-DD hh:mm:ss, perhaps with up to 9 decimals and a zone"
            raise TraceError(self._path, number, self._column, text or "nothing", message) from None
        zone = match[3] or ""
        if self._zone is None:
            self._zone = (zone, number)
        elif zone != self._zone[0]:
            raise TraceError(
                self._path, number, self._column, text,
                f"mixed time zones: {zone or 'no zone'} here, {self._zone[0] or 'no zone'} on line {self._zone[1]}",
                "mixed time zones",
            )  # fmt: skip
        return seconds * 1_000_000_000 + int((match[2] or "").ljust(9, "0"))


@lru_cache(maxsize=64)
def _seconds(text: str) -> int:
    moment = datetime.fromisoformat(text)
    return moment.toordinal() * 86_400 + moment.hour * 3_600 + moment.minute * 60 + moment.second


def whole_number(text: str) -> object:
    """The number, or the text itself where it is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else text


def tokens(path: Path, number: int, column: str, value: object, least: int = 1) -> int:
    """A number of tokens from `least` up. Raises TraceError for anything else."""
    if type(value) is not int or not least <= value <= LARGEST_TOKENS:
        shown = "nothing" if value in ("", None) else value
        message = f"must be a whole number of tokens, {least} to {LARGEST_TOKENS}"
        raise TraceError(path, number, column, shown, message)
    return value


def shorten(value: object) -> str:
    """A value as an error shows it: on one line, at most 80 characters."""
    text = str(value)
    if not text.isprintable():
        text = ascii(text)[1:-1]
    return text if len(text) <= 80 else f"{text[:77]}..."
