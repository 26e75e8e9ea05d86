"""Readers of public request traces, a line at a time.

Knows: the file formats below and what may be wrong with a file. Must not know: who serves the requests.

azure      CSV with a header: TIMESTAMP, ContextTokens, GeneratedTokens; further columns are ignored. Azure LLM
           inference traces of 2023 (timestamps without a zone, 7 decimals) and 2024 (6 decimals or none, and a zone);
           source: github.com/Azure/AzurePublicDataset. These traces tell nothing of content, so no prompt shares any.
mooncake   JSON lines: timestamp (ms), input_length, output_length (tokens), hash_ids (one per `block_tokens` tokens of
           the prompt, the last may be partial); source: github.com/kvcache-ai/Mooncake, FAST'25 traces, 512 tokens.
           Equal ids are equal content.

UTF-8 with or without a byte-order mark, LF or CRLF, plain or gzip by the suffix .gz. Blank lines are passed over.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, cast, get_args

from workloads.spec import RequestSpec, Segment, prompt_stream, trace_stream

Format = Literal["azure", "mooncake"]
FORMATS: tuple[Format, ...] = get_args(Format)

_LARGEST_TOKENS = 2**31 - 1
_LONGEST_LINE = 16 * 1024 * 1024
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?", re.ASCII)


class TraceError(ValueError):
    """A trace that cannot be read: which file, which line (from 1), which column, what stood there, what is wrong.

    `line`, `column` and `value` are None where they do not apply.
    """

    def __init__(self, path: Path, line: int | None, column: str | None, value: object, message: str) -> None:
        self.path = path
        self.line = line
        self.column = column
        self.value = value
        self.message = message
        where = str(path) if line is None else f"{path}, line {line}"
        if column is not None:
            where += f", {column}"
        shown = "" if value is None else f" (got {_shorten(value)})"
        super().__init__(f"{where}: {message}{shown}")


class _Row(NamedTuple):
    """One request as the file has it; `time_ns` counts from an origin of the format's own."""

    line: int
    time_ns: int
    time_text: str
    num_prompt_tokens: int
    max_tokens: int
    hash_ids: Sequence[int] | None


class Trace:
    """The requests of a trace file, read as they are asked for (see `Workload`); they set nothing off.

    The first row arrives at 0 and every other at its distance from the first, divided by `time_scale`: 8 plays the
    trace eight times faster. At most `max_requests` rows are read. Rows get the indices 0, 1, 2, ...

    Making a Trace reads nothing but the first line, and that only for the format "auto". Reading raises TraceError at
    the first thing wrong; call `check` to have it before a run.
    Raises ValueError for a time_scale not above 0, max_requests or block_tokens below 1, and an unknown format.
    """

    def __init__(
        self,
        path: str | Path,
        format: str = "auto",
        *,
        time_scale: float = 1.0,
        max_requests: int | None = None,
        block_tokens: int = 512,
    ) -> None:
        if not 0 < time_scale < float("inf"):
            raise ValueError(f"time_scale must be a number above 0, got {time_scale}")
        if max_requests is not None and max_requests < 1:
            raise ValueError(f"max_requests must be 1 or more, got {max_requests}")
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be 1 or more, got {block_tokens}")
        if format != "auto" and format not in FORMATS:
            raise ValueError(f"format must be one of auto, {', '.join(FORMATS)}, got {format!r}")
        self.path = Path(path)
        self.format: Format = detect_format(self.path) if format == "auto" else cast(Format, format)
        self.time_scale = time_scale
        self.max_requests = max_requests
        self.block_tokens = block_tokens
        self.num_requests: int | None = None

    def check(self) -> int:
        """Read every row that a run will use, build nothing, and return their number (then also `num_requests`).

        Raises TraceError.
        """
        count = 0
        for _ in self._rows():
            count += 1
        self.num_requests = count
        return count

    def arrivals(self) -> Iterator[RequestSpec]:
        """The rows in order. Raises TraceError on the way."""
        first_ns: int | None = None
        for index, row in enumerate(self._rows()):
            if first_ns is None:
                first_ns = row.time_ns
            after_ns = row.time_ns - first_ns
            yield RequestSpec(
                index=index,
                arrival_ns=after_ns if self.time_scale == 1.0 else round(after_ns / self.time_scale),
                prompt=self._prompt(index, row),
                num_prompt_tokens=row.num_prompt_tokens,
                max_tokens=row.max_tokens,
            )

    def after(self, spec: RequestSpec, finish_ns: int) -> Sequence[RequestSpec]:
        """Nothing."""
        return ()

    def _prompt(self, index: int, row: _Row) -> tuple[Segment, ...]:
        if row.hash_ids is None:
            return ((prompt_stream(index), 0, row.num_prompt_tokens),)
        size = self.block_tokens
        whole = [(trace_stream(block_id), 0, size) for block_id in row.hash_ids[:-1]]
        rest = row.num_prompt_tokens - len(whole) * size
        return (*whole, (trace_stream(row.hash_ids[-1]), 0, rest))

    def _rows(self) -> Iterator[_Row]:
        rows = _azure_rows(self.path) if self.format == "azure" else _mooncake_rows(self.path, self.block_tokens)
        count = 0
        before: _Row | None = None
        for row in rows:
            if before is not None and row.time_ns < before.time_ns:
                column = _AZURE_COLUMNS[0] if self.format == "azure" else _MOONCAKE_KEYS[0]
                raise TraceError(
                    self.path, row.line, column, row.time_text,
                    f"earlier than {before.time_text} on line {before.line}; a trace must be in order of time",
                )  # fmt: skip
            before = row
            count += 1
            yield row
            if count == self.max_requests:
                return
        if count == 0:
            raise TraceError(self.path, None, None, None, "has a header but no requests")


def read_azure(path: str | Path, *, time_scale: float = 1.0, max_requests: int | None = None) -> Trace:
    """A trace in the Azure format; see `Trace`."""
    return Trace(path, "azure", time_scale=time_scale, max_requests=max_requests)


def read_mooncake(
    path: str | Path, *, time_scale: float = 1.0, max_requests: int | None = None, block_tokens: int = 512
) -> Trace:
    """A trace in the Mooncake format; see `Trace`. `block_tokens` is the number of tokens a hash id stands for."""
    return Trace(path, "mooncake", time_scale=time_scale, max_requests=max_requests, block_tokens=block_tokens)


def check_trace(path: str | Path, format: str = "auto", *, block_tokens: int = 512) -> int:
    """Read a whole trace and return its number of requests. Raises TraceError at the first thing wrong."""
    return Trace(path, format, block_tokens=block_tokens).check()


def detect_format(path: str | Path) -> Format:
    """The format by the first line that is not blank: a JSON object is mooncake, a CSV header azure.

    Raises TraceError where the line names fewer than two of its columns, misspellings allowed.
    """
    path = Path(path)
    for number, line in _lines(path):
        if line.lstrip().startswith("{"):
            found = list(_json_object(path, number, line))
            guess: Format = "mooncake"
            known: Sequence[str] = _MOONCAKE_KEYS
        else:
            found, guess, known = _fields(path, number, line), "azure", _AZURE_COLUMNS
        lowered = [name.lower() for name in found]
        near = [name for name in known if difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.8)]
        if len(near) >= 2:
            return guess
        raise TraceError(
            path, number, None, ", ".join(found),
            f"cannot tell the format; azure is CSV with {', '.join(_AZURE_COLUMNS)}, "
            f"mooncake is JSON lines with {', '.join(_MOONCAKE_KEYS)}",
        )  # fmt: skip
    raise TraceError(path, None, None, None, "is empty")


def _azure_rows(path: Path) -> Iterator[_Row]:
    columns: list[str] | None = None
    zone: tuple[str, int] | None = None
    for number, line in _lines(path):
        fields = _fields(path, number, line)
        if columns is None:
            columns = fields
            at_time, at_prompt, at_output = (_find(path, number, name, columns) for name in _AZURE_COLUMNS)
            continue
        if len(fields) != len(columns):
            what = "is cut short" if len(fields) < len(columns) else "is too long"
            raise TraceError(path, number, None, line, f"line {what}: {len(fields)} of {len(columns)} columns")
        time_ns, zone_text = _timestamp_ns(path, number, fields[at_time])
        if zone is None:
            zone = (zone_text, number)
        elif zone_text != zone[0]:
            raise TraceError(
                path, number, _AZURE_COLUMNS[0], fields[at_time],
                f"mixed time zones: {zone_text or 'no zone'} here, {zone[0] or 'no zone'} on line {zone[1]}",
            )  # fmt: skip
        yield _Row(
            number,
            time_ns,
            fields[at_time],
            _tokens(path, number, _AZURE_COLUMNS[1], _whole_number(fields[at_prompt])),
            _tokens(path, number, _AZURE_COLUMNS[2], _whole_number(fields[at_output])),
            None,
        )
    if columns is None:
        raise TraceError(path, None, None, None, "is empty")


def _mooncake_rows(path: Path, block_tokens: int) -> Iterator[_Row]:
    number = None
    for number, line in _lines(path):
        values = _json_object(path, number, line)
        for key in _MOONCAKE_KEYS:
            if key not in values:
                _find(path, number, key, list(values))
        time_ms = values["timestamp"]
        if isinstance(time_ms, bool) or not isinstance(time_ms, int | float) or not 0 <= time_ms < 2**63 / 1e6:
            raise TraceError(path, number, "timestamp", time_ms, "must be a number of milliseconds, 0 or more")
        num_prompt_tokens = _tokens(path, number, "input_length", values["input_length"])
        max_tokens = _tokens(path, number, "output_length", values["output_length"])
        hash_ids = values["hash_ids"]
        if not isinstance(hash_ids, list):
            raise TraceError(path, number, "hash_ids", hash_ids, "must be a list of whole numbers, 0 or more")
        for hash_id in hash_ids:
            if type(hash_id) is not int or hash_id < 0:
                raise TraceError(path, number, "hash_ids", hash_id, "each id must be a whole number, 0 or more")
        blocks = -(-num_prompt_tokens // block_tokens)
        if len(hash_ids) != blocks:
            raise TraceError(
                path, number, "hash_ids", f"{len(hash_ids)} ids",
                f"an input_length of {num_prompt_tokens} in blocks of {block_tokens} tokens takes {blocks} ids",
            )  # fmt: skip
        yield _Row(number, round(time_ms * 1_000_000), f"{time_ms} ms", num_prompt_tokens, max_tokens, hash_ids)
    if number is None:
        raise TraceError(path, None, None, None, "is empty")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers, decoded and without their ends."""
    number = 0
    try:
        with _open(path) as file:
            while raw := file.readline(_LONGEST_LINE + 1):
                number += 1
                if len(raw) > _LONGEST_LINE:
                    raise TraceError(path, number, None, None, f"line longer than {_LONGEST_LINE} bytes")
                if b"\0" in raw:
                    raise TraceError(path, number, None, None, "not a text file: it holds a NUL byte")
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    byte = raw[error.start]
                    raise TraceError(path, number, None, f"byte 0x{byte:02x}", "not UTF-8 text") from error
                text = text.rstrip("\r\n")
                if text and not text.isspace():
                    yield number, text
    except IsADirectoryError as error:
        raise TraceError(path, None, None, None, "is a folder, not a file") from error
    except FileNotFoundError as error:
        raise TraceError(path, None, None, None, "no such file") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(path, None, None, None, f"broken gzip after line {number}: {error}") from error
    except OSError as error:
        raise TraceError(path, None, None, None, f"cannot be read: {error.strerror or error}") from error


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _fields(path: Path, number: int, line: str) -> list[str]:
    if '"' not in line:
        return [field.strip() for field in line.split(",")]
    try:
        return [field.strip() for field in next(csv.reader([line], strict=True))]
    except csv.Error as error:
        raise TraceError(path, number, None, line, f"not a line of CSV: {error}") from error


def _json_object(path: Path, number: int, line: str) -> Mapping[str, object]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(path, number, None, line, f"not a JSON object, or cut short: {error}") from error
    if not isinstance(values, dict):
        raise TraceError(path, number, None, line, "must be a JSON object")
    return values


def _find(path: Path, number: int, name: str, columns: Sequence[str]) -> int:
    """Where the column stands. Raises TraceError, with the nearest name, if it is missing, and if it is there twice."""
    if columns.count(name) == 1:
        return columns.index(name)
    if name in columns:
        raise TraceError(path, number, name, None, "this column is there twice")
    lowered = {column.lower(): column for column in columns}
    near = difflib.get_close_matches(name.lower(), lowered, n=1)
    hint = f"did you mean {lowered[near[0]]!r}?" if near else f"there are {_shorten(', '.join(columns))}"
    raise TraceError(path, number, name, None, f"this column is missing; {hint}")


def _timestamp_ns(path: Path, number: int, text: str) -> tuple[int, str]:
    """Nanoseconds since year 1 in the row's own zone, and the zone as written ("" for none)."""
    match = _TIMESTAMP.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        seconds = _seconds(match[1])
    except ValueError:
        raise TraceError(
            path, number, _AZURE_COLUMNS[0], text,
            "not a time; write YYYY-MM-DD hh:mm:ss, perhaps with up to 9 decimals and a zone",
        ) from None  # fmt: skip
    return seconds * 1_000_000_000 + int((match[2] or "").ljust(9, "0")), match[3] or ""


@lru_cache(maxsize=64)
def _seconds(text: str) -> int:
    moment = datetime.fromisoformat(text)
    return moment.toordinal() * 86_400 + moment.hour * 3_600 + moment.minute * 60 + moment.second


def _whole_number(text: str) -> object:
    """The number, or the text itself where it is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else text


def _tokens(path: Path, number: int, column: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= _LARGEST_TOKENS:
        shown = "nothing" if value == "" else value
        raise TraceError(path, number, column, shown, f"must be a whole number of tokens, 1 to {_LARGEST_TOKENS}")
    return value


def _shorten(value: object) -> str:
    text = str(value)
    if not text.isprintable():
        text = ascii(text)[1:-1]
    return text if len(text) <= 80 else f"{text[:77]}..."
