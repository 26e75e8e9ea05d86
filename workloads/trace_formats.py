"""The formats of request traces: what their columns are called, what they mean, and how to tell one from another.

Knows: the formats below. Must not know: requests, or who serves them. Each reader hands out `Row`s in the file's order,
or, where a file is not in order of time by design, sorted.

azure         CSV with a header: TIMESTAMP, ContextTokens, GeneratedTokens; further columns are ignored. Azure LLM
              inference traces of 2023 (timestamps without a zone, 7 decimals) and 2024 (6 decimals or none, and a
              zone); source: github.com/Azure/AzurePublicDataset.
burstgpt      CSV: Timestamp (s), Request tokens, Response tokens; version 3 adds Session ID; the rest is ignored. A
              response of 0 tokens is a failed request: left out and counted. Source: github.com/HPMLL/BurstGPT.
mooncake      JSON lines: timestamp (ms), input_length, output_length (tokens), hash_ids (one per block of the prompt,
              the last may be partial; equal ids are equal content); source: github.com/kvcache-ai/Mooncake, FAST'25
              traces, blocks of 512 tokens.
sharegpt      JSON, a list of {id, conversations: [{from: human or gpt, value}]}, or one such object a line. It has no
              arrival times; see `sharegpt`.
llmservingsim JSON lines: input_toks, output_toks, arrival_time_ns, and perhaps input_tok_ids, whose equal beginnings
              become equal blocks; source: github.com/casys-kaist/LLMServingSim.
vidur         CSV: arrived_at (s), num_prefill_tokens, num_decode_tokens; source: github.com/microsoft/vidur.
vllm_bench    what `vllm bench serve --save-result --save-detailed` writes: one JSON object with the lists input_lens,
              output_lens, start_times (s), errors. Failed requests are left out and counted. Sorted by start time.
guidellm      a report of `guidellm benchmark` as JSON: benchmarks, each with requests by status; the successful ones
              are read, the others counted. Releases to 0.3 have start_time, later ones request_start_time (s). All
              benchmarks of a report are read, in order of time, as the server saw them. Source:
              github.com/vllm-project/guidellm.
columns       CSV, JSON lines or Parquet with columns named by the user (`Columns`), or called arrival_s (or _ms, _us,
              _ns), prompt_tokens and output_tokens.

UTF-8 with or without a byte-order mark, LF or CRLF, plain or gzip (told by the suffix .gz or the first bytes). Blank
lines are passed over.
"""

from __future__ import annotations

import difflib
import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np

from workloads.json_stream import JsonReader
from workloads.trace_source import (
    LARGEST_TOKENS,
    NS_PER,
    Clock,
    Row,
    Source,
    TraceError,
    csv_fields,
    csv_header,
    find_column,
    json_object,
    shorten,
    tokens,
    whole_number,
)

Format = Literal[
    "azure", "burstgpt", "mooncake", "sharegpt", "llmservingsim", "vidur", "vllm_bench", "guidellm", "columns"
]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)

_CSV: Final[Mapping[Format, tuple[str, ...]]] = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
    "vidur": ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
}
_JSON_LINES: Final[Mapping[Format, tuple[str, ...]]] = {
    "mooncake": ("timestamp", "input_length", "output_length", "hash_ids"),
    "llmservingsim": ("arrival_time_ns", "input_toks", "output_toks"),
}
_BENCH_KEYS = ("input_lens", "output_lens", "start_times", "errors")
_PARQUET = b"PAR1"
_BATCH = 16_384
_FAILED = "failed requests"

ParseFields = Callable[[int, list[str]], Row | None]


@dataclass(frozen=True)
class Columns:
    """What the columns of a user's own file are called.

    unit    of the arrival times: s, ms, us, ns, or iso (YYYY-MM-DD hh:mm:ss, perhaps with decimals and a zone). Columns
            of Parquet that hold timestamps are read as such, whatever the unit says.

    Raises ValueError for another unit and for one name given twice.
    """

    arrival: str
    prompt_tokens: str
    output_tokens: str
    unit: str = "s"

    def __post_init__(self) -> None:
        if self.unit != "iso" and self.unit not in NS_PER:
            raise ValueError(f"unit must be one of {', '.join(NS_PER)}, iso, got {self.unit!r}")
        if len(set(self.names)) < 3:
            raise ValueError(f"columns must have three different names, got {', '.join(self.names)}")

    @property
    def names(self) -> tuple[str, str, str]:
        """Arrival, prompt, output."""
        return self.arrival, self.prompt_tokens, self.output_tokens


def default_columns(names: Sequence[str]) -> Columns | None:
    """The columns of a file that says it itself: arrival_s (or _ms, _us, _ns), prompt_tokens, output_tokens."""
    for unit in NS_PER:
        if {f"arrival_{unit}", "prompt_tokens", "output_tokens"} <= set(names):
            return Columns(f"arrival_{unit}", "prompt_tokens", "output_tokens", unit)
    return None


def time_column(format: Format, columns: Columns | None) -> str:
    """What the format calls the time of arrival."""
    if format == "columns":
        return "arrival" if columns is None else columns.arrival
    named = {**_CSV, **_JSON_LINES, "vllm_bench": ("start_times",), "guidellm": ("start_time",)}
    return named[format][0]


def read_rows(source: Source, format: Format, block_tokens: int, columns: Columns | None) -> Iterator[Row]:
    """The rows of the file. Raises TraceError (see `Source.bad`), and ValueError for sharegpt, which has no times."""
    path = source.path
    if format == "azure":
        return _csv_rows(source, lambda number, names: _azure(path, number, names))
    if format == "burstgpt":
        return _csv_rows(source, lambda number, names: _burstgpt(source, number, names))
    if format == "vidur":
        return _csv_rows(
            source,
            lambda number, names: _by_name(
                path, number, names, Columns("arrived_at", "num_prefill_tokens", "num_decode_tokens")
            ),
        )
    if format == "mooncake":
        return _json_lines(source, lambda number, line: _mooncake(path, number, line, block_tokens))
    if format == "llmservingsim":
        return _json_lines(source, lambda number, line: _llmservingsim(path, number, line, block_tokens))
    if format == "vllm_bench":
        return _vllm_bench(source)
    if format == "guidellm":
        return _guidellm(source)
    if format == "columns":
        return _columns(source, columns)
    raise ValueError("sharegpt has no arrival times: read it with workloads.sharegpt and start it by a process")


# Telling them apart


def detect_format(path: str | Path) -> Format:
    """The format, by the names in the header, or in the first JSON object.

    Raises TraceError where no format has two of them or more, misspellings allowed.
    """
    source = Source(Path(path))
    if source.starts_with(_PARQUET):
        return "columns"
    first = _first_characters(source)
    if first in ("{", "["):
        found, guess = _json_format(source, first)
        number = 1
    else:
        number, line = next(source.lines())
        found = csv_header(source.path, number, line)
        guess = _nearest(found, _CSV)
    if guess is not None:
        return guess
    if default_columns(found) is not None:
        return "columns"
    raise TraceError(
        source.path, number, None, ", ".join(found),
        f"cannot tell the format; {_spellings()}, and others by their `columns`",
    )  # fmt: skip


def _spellings() -> str:
    known = [f"{format} is CSV with {', '.join(names)}" for format, names in _CSV.items()]
    known += [f"{format} is JSON lines with {', '.join(names)}" for format, names in _JSON_LINES.items()]
    known += ["sharegpt is JSON with conversations", "vllm_bench is JSON with input_lens, output_lens, start_times"]
    return "; ".join([*known, "guidellm is JSON with benchmarks"])


def _first_characters(source: Source) -> str:
    for _, line in source.lines():
        return line.lstrip()[0]
    raise TraceError(source.path, None, None, None, "is empty")


def _json_format(source: Source, first: str) -> tuple[list[str], Format | None]:
    reader = JsonReader(source)
    if first == "[":
        for _ in reader.elements():
            if reader.peek() == "{":
                break
            raise TraceError(source.path, reader.line, None, None, "a list of JSON must hold objects (sharegpt)")
        else:
            raise TraceError(source.path, None, None, None, "is an empty list")
    found: list[str] = []
    for key in reader.members():
        found.append(key)
        if key == "conversations":
            return found, "sharegpt"
        if key == "input_lens":
            return found, "vllm_bench"
        if key == "benchmarks":
            return found, "guidellm"
        reader.skip()
    if {"total_input_tokens", "request_throughput"} <= set(found):
        raise TraceError(
            source.path, None, None, None,
            "a result of vllm bench serve without its requests; save it with --save-detailed",
        )  # fmt: skip
    return found, None if first == "[" else _nearest(found, _JSON_LINES)


def _nearest(found: Sequence[str], formats: Mapping[Format, tuple[str, ...]]) -> Format | None:
    """The format with most of its names among those found, two at least; misspellings count as half."""
    lowered = [name.lower() for name in found]
    best: tuple[float, Format] | None = None
    for format, names in formats.items():
        near = [name for name in names if difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.8)]
        score = sum(1.0 if name in found else 0.5 for name in near)
        if len(near) >= 2 and (best is None or score > best[0]):
            best = score, format
    return None if best is None else best[1]


# CSV


def _csv_rows(source: Source, make: Callable[[int, list[str]], ParseFields]) -> Iterator[Row]:
    """Rows of a CSV file; `make` reads its header and hands back what reads a row (None: passed over)."""
    path = source.path
    names: list[str] = []
    parse: ParseFields | None = None
    for number, line in source.lines():
        if parse is None:
            names = csv_header(path, number, line)
            parse = make(number, names)
            continue
        try:
            fields = csv_fields(path, number, line)
            if len(fields) != len(names):
                what = "is cut short" if len(fields) < len(names) else "is too long"
                message = f"line {what}: {len(fields)} of {len(names)} columns"
                raise TraceError(path, number, None, line, message, f"line {what}")
            row = parse(number, fields)
        except TraceError as error:
            source.bad(error)
            continue
        if row is not None:
            yield row
    if parse is None:
        raise TraceError(path, None, None, None, "is empty")


def _by_name(path: Path, number: int, names: list[str], columns: Columns) -> ParseFields:
    at_time, at_prompt, at_output = (find_column(path, number, name, names) for name in columns.names)
    clock = Clock(path, columns.arrival, columns.unit)
    prompt, output = columns.prompt_tokens, columns.output_tokens

    def parse(number: int, fields: list[str]) -> Row:
        return Row(
            number,
            clock.time_ns(number, fields[at_time]),
            fields[at_time],
            tokens(path, number, prompt, whole_number(fields[at_prompt])),
            tokens(path, number, output, whole_number(fields[at_output])),
        )

    return parse


def _azure(path: Path, number: int, names: list[str]) -> ParseFields:
    return _by_name(path, number, names, Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", "iso"))


def _burstgpt(source: Source, number: int, names: list[str]) -> ParseFields:
    path = source.path
    time, prompt, output = _CSV["burstgpt"]
    at_time, at_prompt, at_output = (find_column(path, number, name, names) for name in (time, prompt, output))
    at_session = names.index("Session ID") if "Session ID" in names else None
    clock = Clock(path, time, "s")

    def parse(number: int, fields: list[str]) -> Row | None:
        time_ns = clock.time_ns(number, fields[at_time])
        num_prompt_tokens = tokens(path, number, prompt, whole_number(fields[at_prompt]))
        max_tokens = tokens(path, number, output, whole_number(fields[at_output]), least=0)
        if max_tokens == 0:
            source.leave_out(_FAILED)
            return None
        session = None if at_session is None else fields[at_session] or None
        return Row(number, time_ns, fields[at_time], num_prompt_tokens, max_tokens, None, session)

    return parse


# JSON lines


def _json_lines(source: Source, parse: Callable[[int, str], Row]) -> Iterator[Row]:
    number = None
    for number, line in source.lines():
        try:
            row = parse(number, line)
        except TraceError as error:
            source.bad(error)
            continue
        yield row
    if number is None:
        raise TraceError(source.path, None, None, None, "is empty")


def _mooncake(path: Path, number: int, line: str, block_tokens: int) -> Row:
    values = _with_keys(path, number, line, _JSON_LINES["mooncake"])
    time_ms = values["timestamp"]
    if isinstance(time_ms, bool) or not isinstance(time_ms, int | float) or not 0 <= time_ms < 2**63 / 1e6:
        raise TraceError(path, number, "timestamp", time_ms, "must be a number of milliseconds, 0 or more")
    num_prompt_tokens = tokens(path, number, "input_length", values["input_length"])
    max_tokens = tokens(path, number, "output_length", values["output_length"])
    hash_ids = values["hash_ids"]
    if not isinstance(hash_ids, list):
        raise TraceError(path, number, "hash_ids", hash_ids, "must be a list of whole numbers, 0 or more")
    for hash_id in hash_ids:
        if type(hash_id) is not int or hash_id < 0:
            raise TraceError(path, number, "hash_ids", hash_id, "each id must be a whole number, 0 or more")
    blocks = -(-num_prompt_tokens // block_tokens)
    if len(hash_ids) != blocks:
        sizes = (2**power for power in range(3, 16))
        fitting = [size for size in sizes if -(-num_prompt_tokens // size) == len(hash_ids)]
        hint = f"block_tokens {fitting[0]} would fit, but " if fitting else ""
        raise TraceError(
            path, number, "hash_ids", f"{len(hash_ids)} ids",
            f"{hint}an input_length of {num_prompt_tokens} in blocks of {block_tokens} tokens takes {blocks} ids",
            f"ids do not fit blocks of {block_tokens} tokens",
        )  # fmt: skip
    return Row(number, round(time_ms * 1_000_000), f"{time_ms} ms", num_prompt_tokens, max_tokens, hash_ids)


def _llmservingsim(path: Path, number: int, line: str, block_tokens: int) -> Row:
    names = _JSON_LINES["llmservingsim"]
    values = _with_keys(path, number, line, names)
    time_ns = values[names[0]]
    if type(time_ns) is not int or not 0 <= time_ns < 2**63:
        raise TraceError(path, number, names[0], time_ns, "must be a whole number of nanoseconds, 0 or more")
    num_prompt_tokens = tokens(path, number, names[1], values[names[1]])
    max_tokens = tokens(path, number, names[2], values[names[2]])
    ids = values.get("input_tok_ids")
    hash_ids = None if not ids else _block_ids(path, number, ids, num_prompt_tokens, block_tokens)
    return Row(number, time_ns, f"{time_ns} ns", num_prompt_tokens, max_tokens, hash_ids)


def _block_ids(path: Path, number: int, ids: object, num_prompt_tokens: int, block_tokens: int) -> list[int]:
    """A name for each block that two prompts share if and only if they are equal up to its end (56 bits of BLAKE2b)."""
    column = "input_tok_ids"
    if not isinstance(ids, list) or len(ids) != num_prompt_tokens:
        shown = f"{len(ids)} ids" if isinstance(ids, list) else ids
        message = f"must be a list of as many ids as input_toks, {num_prompt_tokens}"
        raise TraceError(path, number, column, shown, message, "not as many ids as input_toks")
    try:
        packed = array("I", ids).tobytes()
    except (TypeError, OverflowError) as error:
        raise TraceError(path, number, column, None, "each id must be a whole number, 0 to 4294967295") from error
    size = 4 * block_tokens
    names: list[int] = []
    digest = b""
    for start in range(0, len(packed), size):
        digest = hashlib.blake2b(digest + packed[start : start + size], digest_size=7).digest()
        names.append(int.from_bytes(digest, "little"))
    return names


def _with_keys(path: Path, number: int, line: str, names: Sequence[str]) -> Mapping[str, object]:
    values = json_object(path, number, line)
    for name in names:
        if name not in values:
            find_column(path, number, name, list(values))
    return values


# Columns of the user's own


def _columns(source: Source, columns: Columns | None) -> Iterator[Row]:
    if source.starts_with(_PARQUET):
        return _parquet(source, columns)
    first = _first_characters(source)
    if first == "[":
        raise TraceError(source.path, 1, None, None, "a list of JSON; write one object a line")
    if first == "{":
        return _json_lines(source, _JsonColumns(source.path, columns))
    return _csv_rows(
        source, lambda number, names: _by_name(source.path, number, names, _named(source.path, number, names, columns))
    )


def _named(path: Path, number: int | None, names: Sequence[str], columns: Columns | None) -> Columns:
    """The columns asked for, or those that the file names itself. Raises TraceError where they are not there."""
    chosen = columns or default_columns(names)
    if chosen is None:
        raise TraceError(
            path, number, None, ", ".join(names),
            "say which `columns` hold the arrival, prompt_tokens and output_tokens",
        )  # fmt: skip
    for name in chosen.names:
        find_column(path, number, name, list(names))
    return chosen


class _JsonColumns:
    """Reads a line of JSON by the names of its keys, which the first line may settle."""

    def __init__(self, path: Path, columns: Columns | None) -> None:
        self._path = path
        self._columns = columns
        self._clock: Clock | None = None if columns is None else Clock(path, columns.arrival, columns.unit)

    def __call__(self, number: int, line: str) -> Row:
        values = json_object(self._path, number, line)
        if self._columns is None:
            self._columns = _named(self._path, number, list(values), None)
        columns = self._columns
        if self._clock is None:
            self._clock = Clock(self._path, columns.arrival, columns.unit)
        for name in columns.names:
            if name not in values:
                find_column(self._path, number, name, list(values))
        time = values[columns.arrival]
        return Row(
            number,
            self._clock.time_ns(number, time),
            str(time),
            tokens(self._path, number, columns.prompt_tokens, values[columns.prompt_tokens]),
            tokens(self._path, number, columns.output_tokens, values[columns.output_tokens]),
        )


def _parquet(source: Source, columns: Columns | None) -> Iterator[Row]:
    """Rows of a Parquet file, a batch at a time; the "line" of a row is its number from 1."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = source.path
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            chosen = _named(path, None, names, columns)
            stamps = pa.types.is_timestamp(file.schema_arrow.field(chosen.arrival).type)
            clock = Clock(path, chosen.arrival, "ns" if stamps else chosen.unit)
            total = max(file.metadata.num_rows, 1)
            number = 0
            source.fraction = lambda: number / total
            for batch in file.iter_batches(batch_size=_BATCH, columns=list(chosen.names)):
                lists = []
                for name in chosen.names:
                    column = batch.column(name)
                    if stamps and name == chosen.arrival:
                        column = column.cast(pa.timestamp("ns")).cast(pa.int64())
                    lists.append(column.to_pylist())
                for time, prompt, output in zip(*lists, strict=True):
                    number += 1
                    try:
                        row = Row(
                            number,
                            clock.time_ns(number, time),
                            str(time),
                            tokens(path, number, chosen.prompt_tokens, _whole(prompt)),
                            tokens(path, number, chosen.output_tokens, _whole(output)),
                        )
                    except TraceError as error:
                        source.bad(error)
                        continue
                    yield row
    except pa.ArrowException as error:
        message = f"not a Parquet file that can be read, or cut short: {shorten(error)}"
        raise TraceError(path, None, None, None, message) from error
    except OSError as error:
        raise TraceError(path, None, None, None, f"cannot be read, or cut short: {shorten(error)}") from error


def _whole(value: object) -> object:
    """Tables with gaps hold whole numbers as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Reports: one document, not in order of time


class _Collected:
    """Requests of a report, 32 bytes each, to be sorted."""

    def __init__(self) -> None:
        self.lines = array("q")
        self.times = array("d")
        self.prompts = array("l")
        self.outputs = array("l")
        self.sessions: list[str | None] = []

    def add(self, line: int, time_s: float, prompt: int, output: int, session: str | None = None) -> None:
        self.lines.append(line)
        self.times.append(time_s)
        self.prompts.append(prompt)
        self.outputs.append(output)
        if session is not None or self.sessions:
            self.sessions += [None] * (len(self.times) - 1 - len(self.sessions))
            self.sessions.append(session)

    def rows(self) -> Iterator[Row]:
        """In order of time."""
        for i in np.argsort(np.frombuffer(self.times), kind="stable").tolist() if self.times else ():
            time_s = self.times[i]
            session = self.sessions[i] if self.sessions else None
            yield Row(
                self.lines[i], round(time_s * 1e9), f"{time_s} s", self.prompts[i], self.outputs[i], None, session
            )


def _second(path: Path, line: int, column: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**63 / 1e9:
        raise TraceError(path, line, column, value, "must be a number of seconds, 0 or more")
    return float(value)


def _vllm_bench(source: Source) -> Iterator[Row]:
    path = source.path
    lists: dict[str, list[tuple[int, Any]]] = {}
    try:
        reader = JsonReader(source)
        for key in reader.members():
            if key not in _BENCH_KEYS:
                reader.skip()
            elif reader.peek() != "[":
                raise TraceError(path, reader.line, key, None, "must be a list")
            else:
                lists[key] = [(reader.line, reader.value()) for _ in reader.elements()]
        if reader.peek():
            raise TraceError(path, reader.line, None, None, "holds more than one result; keep one in the file")
    except TraceError as error:
        source.bad(error)
    for key in _BENCH_KEYS[:3]:
        if key not in lists:
            raise TraceError(path, None, key, None, "this list is missing; save the result with --save-detailed")
    counts = {key: len(values) for key, values in lists.items()}
    if len({counts[key] for key in _BENCH_KEYS[:3]}) != 1:
        listed = ", ".join(f"{key} {counts[key]}" for key in _BENCH_KEYS[:3])
        message = "the lists differ in length"
        source.bad(TraceError(path, None, None, None, f"{message}: {listed}", message))
    collected = _Collected()
    failures = lists.get("errors", [])
    for i, ((line, prompt), (_, output), (at, start)) in enumerate(
        zip(*(lists[key] for key in _BENCH_KEYS[:3]), strict=False)
    ):
        try:
            num_output = tokens(path, line, f"output_lens[{i}]", output, least=0)
            if num_output == 0 or (i < len(failures) and failures[i][1]):
                source.leave_out(_FAILED)
                continue
            num_prompt = tokens(path, line, f"input_lens[{i}]", prompt)
            collected.add(line, _second(path, at, f"start_times[{i}]", start), num_prompt, num_output)
        except TraceError as error:
            source.bad(error)
    yield from collected.rows()


def _guidellm(source: Source) -> Iterator[Row]:
    collected = _Collected()
    found = False
    try:
        reader = JsonReader(source)
        for key in reader.members():
            if key != "benchmarks":
                reader.skip()
                continue
            for _ in reader.elements():
                for inner in reader.members():
                    if inner != "requests" or reader.peek() != "{":
                        reader.skip()
                        continue
                    found = True
                    for status in reader.members():
                        _guidellm_requests(source, reader, status, collected)
    except TraceError as error:
        source.bad(error)
    if not found:
        raise TraceError(source.path, None, "benchmarks", None, "holds no `requests`: a report without its requests")
    yield from collected.rows()


def _guidellm_requests(source: Source, reader: JsonReader, status: str, collected: _Collected) -> None:
    if reader.peek() != "[":
        reader.skip()
        return
    for _ in reader.elements():
        line = reader.line
        value = reader.value()
        if status != "successful":
            source.leave_out(_FAILED)
            continue
        try:
            collected.add(line, *_guidellm_request(source.path, line, value))
        except TraceError as error:
            source.bad(error)


def _guidellm_request(path: Path, line: int, value: object) -> tuple[float, int, int, str | None]:
    if not isinstance(value, dict):
        raise TraceError(path, line, "requests", value, "must be an object")
    info = value.get("info")
    info = info if isinstance(info, dict) else {}
    timings = info.get("timings")
    timings = timings if isinstance(timings, dict) else {}
    times = (
        value.get("request_start_time"),
        value.get("start_time"),
        timings.get("request_start"),
        timings.get("resolve_start"),
    )
    start = next((time for time in times if time is not None), None)
    conversation = info.get("conversation_id")
    return (
        _second(path, line, "start_time", "nothing" if start is None else start),
        tokens(path, line, "prompt_tokens", _usage(value, "prompt_tokens", "input_metrics")),
        tokens(path, line, "output_tokens", _usage(value, "output_tokens", "output_metrics")),
        conversation if isinstance(conversation, str) else None,
    )


def _usage(value: Mapping[str, Any], name: str, metrics: str) -> object:
    if value.get(name) is not None:
        return value[name]
    usage = value.get(metrics)
    if not isinstance(usage, dict):
        return None
    return usage["total_tokens"] if usage.get("total_tokens") is not None else usage.get("text_tokens")


# Conversations


_SAID_BY = {
    **dict.fromkeys(("human", "user", "system"), "asked"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing"), "answered"),
}


def sharegpt_turns(source: Source, count: Callable[[str], int]) -> Iterator[list[tuple[int, int]]]:
    """The answered turns of each conversation: tokens that are new in the prompt, tokens of the answer.

    Messages of others than the model since the last answer are the prompt of the next; what follows the last answer
    is dropped. An answer to nothing is context of the next turn. Conversations without an answered turn are left out
    and counted.
    """
    number = 0
    try:
        reader = JsonReader(source)
        for line, conversation in _conversations(reader):
            number += 1
            try:
                turns = _turns(source.path, line, conversation, count)
            except TraceError as error:
                source.bad(error)
                continue
            if turns:
                yield turns
            else:
                source.leave_out("conversations without an answered turn")
    except TraceError as error:
        source.bad(error)
    if number == 0 and not source.left_out:
        raise TraceError(source.path, None, None, None, "is empty")


def _conversations(reader: JsonReader) -> Iterator[tuple[int, object]]:
    if reader.peek() == "[":
        for _ in reader.elements():
            reader.peek()
            yield reader.line, reader.value()
    while reader.peek():
        yield reader.line, reader.value()


def _turns(path: Path, line: int, conversation: object, count: Callable[[str], int]) -> list[tuple[int, int]]:
    messages = conversation.get("conversations") if isinstance(conversation, dict) else None
    if not isinstance(messages, list):
        raise TraceError(path, line, "conversations", None, "must be a list of messages in an object")
    turns: list[tuple[int, int]] = []
    asked = 0
    for message in messages:
        said_by = message.get("from") if isinstance(message, dict) else None
        text = message.get("value") if isinstance(message, dict) else None
        kind = _SAID_BY.get(said_by) if isinstance(said_by, str) else None
        if kind is None:
            raise TraceError(
                path, line, "from", said_by, f"must be one of {', '.join(_SAID_BY)}", "message from nobody known"
            )
        if not isinstance(text, str):
            raise TraceError(path, line, "value", text, "must be text")
        num_tokens = count(text)
        if kind == "answered" and num_tokens and asked:
            turns.append((asked, num_tokens))
            asked = 0
        else:
            asked += num_tokens
    for told in chain.from_iterable(turns):
        if told > LARGEST_TOKENS:
            raise TraceError(path, line, "value", told, f"more than {LARGEST_TOKENS} tokens")
    return turns


def as_format(name: str) -> Format:
    """The format of that name. Raises ValueError for another name."""
    if name not in FORMATS:
        raise ValueError(f"format must be one of auto, {', '.join(FORMATS)}, got {name!r}")
    return name
