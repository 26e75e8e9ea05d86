"""Recorded traces as workloads: the requests of a file, in order, as they are asked for.

Knows: rows of traces and what content they share. Must not know: who serves the requests, or how a format is spelled
(`trace_formats`, where the formats are described).

What prompts share is what the file says: blocks of equal names where it has them, and, where it has conversations but
no content (burstgpt version 3, guidellm), what follows if a conversation repeats itself: a prompt at least as long as
the one before it and its answer together begins with them; a shorter one shares nothing. The arrivals are those of the
file in either case. A conversation not seen for the last 100,000 conversations begins anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from workloads.spec import RequestSpec, Segment, merge_segments, output_stream, prompt_stream, trace_stream
from workloads.trace_formats import FORMATS, Columns, Format, as_format, detect_format, read_rows, time_column
from workloads.trace_source import Progress, Row, Source, TraceError

__all__ = [
    "FORMATS",
    "Columns",
    "Format",
    "Progress",
    "Trace",
    "TraceError",
    "check_trace",
    "detect_format",
    "read_azure",
    "read_mooncake",
]

_PROGRESS_ROWS = 65_536
_CONVERSATIONS_HELD = 100_000
_BLOCK_TOKENS = {"llmservingsim": 16}


class Trace:
    """The requests of a trace file, read as they are asked for (see `Workload`); they set nothing off.

    The first row arrives at 0 and every other at its distance from the first, divided by `time_scale`: 8 plays the
    trace eight times faster. At most `max_requests` rows are read. Rows get the indices 0, 1, 2, ...

    block_tokens     tokens that a block name stands for: mooncake 512 and llmservingsim 16, unless told
    columns          what the columns are called, for the format "columns"
    skip_bad_rows    leave out rows that cannot be used, those out of order among them, and count them in `left_out`
    progress         told every 65,536 rows

    Making a Trace reads nothing but the beginning, and that only for the format "auto". Reading raises TraceError at
    the first thing wrong; call `check` to have it before a run. `left_out` counts, by reason, what the latest reading
    has passed over so far.
    Raises ValueError for a time_scale not above 0, max_requests or block_tokens below 1, an unknown format, columns for
    another format, and sharegpt, which has no times; TraceError where "auto" cannot tell the format.
    """

    def __init__(
        self,
        path: str | Path,
        format: str = "auto",
        *,
        time_scale: float = 1.0,
        max_requests: int | None = None,
        block_tokens: int | None = None,
        columns: Columns | None = None,
        skip_bad_rows: bool = False,
        progress: Progress | None = None,
    ) -> None:
        if not 0 < time_scale < float("inf"):
            raise ValueError(f"time_scale must be a number above 0, got {time_scale}")
        if max_requests is not None and max_requests < 1:
            raise ValueError(f"max_requests must be 1 or more, got {max_requests}")
        if block_tokens is not None and block_tokens < 1:
            raise ValueError(f"block_tokens must be 1 or more, got {block_tokens}")
        self.path = Path(path)
        if format != "auto":
            self.format: Format = as_format(format)
        elif columns is not None:
            self.format = "columns"
        else:
            self.format = detect_format(self.path)
        if columns is not None and self.format != "columns":
            raise ValueError(f"columns are for the format columns, and the format is {self.format}")
        if self.format == "sharegpt":
            raise ValueError(
                f"{self.path}: sharegpt has no arrival times; it needs a process that starts conversations"
            )
        self.time_scale = time_scale
        self.max_requests = max_requests
        self.block_tokens = block_tokens or _BLOCK_TOKENS.get(self.format, 512)
        self.columns = columns
        self.skip_bad_rows = skip_bad_rows
        self.num_requests: int | None = None
        self._progress = progress
        self._source = Source(self.path, skip_bad_rows)

    @property
    def left_out(self) -> dict[str, int]:
        """What the latest reading has passed over so far: reason and number of rows, most first."""
        return dict(self._source.left_out.most_common())

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
        conversations = _Conversations()
        for index, row in enumerate(self._rows()):
            if first_ns is None:
                first_ns = row.time_ns
            after_ns = row.time_ns - first_ns
            arrival_ns = after_ns if self.time_scale == 1.0 else round(after_ns / self.time_scale)
            if row.session is not None:
                yield conversations.request(index, arrival_ns, row, row.session)
                continue
            prompt = self._prompt(index, row)
            yield RequestSpec(index, arrival_ns, prompt, row.num_prompt_tokens, row.max_tokens)

    def after(self, spec: RequestSpec, finish_ns: int) -> Sequence[RequestSpec]:
        """Nothing."""
        return ()

    def lengths(self) -> Iterator[tuple[int, int]]:
        """Tokens of prompt and output of each row, in order. Raises TraceError on the way."""
        return ((row.num_prompt_tokens, row.max_tokens) for row in self._rows())

    def _prompt(self, index: int, row: Row) -> tuple[Segment, ...]:
        if row.hash_ids is None:
            return ((prompt_stream(index), 0, row.num_prompt_tokens),)
        size = self.block_tokens
        whole = [(trace_stream(block_id), 0, size) for block_id in row.hash_ids[:-1]]
        rest = row.num_prompt_tokens - len(whole) * size
        return (*whole, (trace_stream(row.hash_ids[-1]), 0, rest))

    def _rows(self) -> Iterator[Row]:
        source = self._source = Source(self.path, self.skip_bad_rows)
        count = 0
        before: Row | None = None
        for row in read_rows(source, self.format, self.block_tokens, self.columns):
            if before is not None and row.time_ns < before.time_ns:
                column = time_column(self.format, self.columns)
                source.bad(
                    TraceError(
                        self.path, row.line, column, row.time_text,
                        f"earlier than {before.time_text} on line {before.line}; a trace must be in order of time",
                        "out of order",
                    )
                )  # fmt: skip
                continue
            before = row
            count += 1
            yield row
            if self._progress is not None and count % _PROGRESS_ROWS == 0:
                self._progress(count, source.fraction())
            if count == self.max_requests:
                return
        if count == 0:
            raise TraceError(self.path, None, None, None, f"has a header but no requests{_said(self.left_out)}")


def _said(left_out: dict[str, int]) -> str:
    listed = "; ".join(f"{reason}: {count}" for reason, count in left_out.items())
    return f" that can be used; left out: {listed}" if listed else ""


class _Conversations:
    """What was last said in each conversation, for those that were seen lately."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, RequestSpec] = OrderedDict()
        self._count = 0

    def request(self, index: int, arrival_ns: int, row: Row, session: str) -> RequestSpec:
        """The request of this row, as the next turn of its conversation."""
        last = self._last.pop(session, None)
        history: tuple[Segment, ...] = ()
        said = 0
        if last is None:
            conversation, turn = self._count, 0
            self._count += 1
        else:
            conversation, turn = last.conversation, last.turn + 1
            history = (*last.prompt, (output_stream(last.index), 0, last.max_tokens))
            said = last.num_prompt_tokens + last.max_tokens
        if row.num_prompt_tokens < said:
            history, said = (), 0
        own = (prompt_stream(index), 0, row.num_prompt_tokens - said)
        prompt = merge_segments((*history, own))
        spec = RequestSpec(
            index, arrival_ns, prompt, row.num_prompt_tokens, row.max_tokens, conversation=conversation, turn=turn
        )
        self._last[session] = spec
        if len(self._last) > _CONVERSATIONS_HELD:
            self._last.popitem(last=False)
        return spec


def read_azure(path: str | Path, *, time_scale: float = 1.0, max_requests: int | None = None) -> Trace:
    """A trace in the Azure format; see `Trace`."""
    return Trace(path, "azure", time_scale=time_scale, max_requests=max_requests)


def read_mooncake(
    path: str | Path, *, time_scale: float = 1.0, max_requests: int | None = None, block_tokens: int = 512
) -> Trace:
    """A trace in the Mooncake format; see `Trace`. `block_tokens` is the number of tokens a hash id stands for."""
    return Trace(path, "mooncake", time_scale=time_scale, max_requests=max_requests, block_tokens=block_tokens)


def check_trace(path: str | Path, format: str = "auto", *, block_tokens: int | None = None) -> int:
    """Read a whole trace and return its number of requests. Raises TraceError at the first thing wrong."""
    return Trace(path, format, block_tokens=block_tokens).check()
