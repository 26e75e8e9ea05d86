"""Files of `speckv replay`: scripted cases in, traces out, plain JSON or gzipped by their suffix.

Knows the case's format (`docs/conformance.md`) as far as it can be wrong; must not know what a scheduler does with it.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from sim.scenario_errors import nearest_name, shorten
from sim.whole_files import written_whole

CASE_FORMAT: Final = 1

_MOST: Final = 10_000_000
"""Larger numbers are a slip, and would fill the memory."""

_METHODS: Final = ("none", "ngram", "ngram_gpu", "eagle", "eagle3", "mtp", "draft_model")
_EVENTS: Final = ("abort", "reset_prefix_cache")

Check = Callable[[Any], bool]


class CaseError(ValueError):
    """A case that cannot be replayed. The message names the file, the key, the value and what is allowed."""


def read_case(path: Path) -> dict[str, Any]:
    """A case, checked as far as a replay relies on it.

    Raises:
        CaseError: it cannot be read, is no JSON, has another format number, or a key is missing or wrong.
    """
    case = _read_json(path, "case")
    _Checker(path).case(case)
    assert isinstance(case, dict)
    return case


def read_trace(path: Path) -> dict[str, Any]:
    """A trace, checked as far as a comparison relies on it.

    Raises:
        CaseError: it cannot be read, is no JSON, or is not an object with `turns` and `summary`.
    """
    trace = _read_json(path, "trace")
    if not isinstance(trace, dict):
        raise CaseError(f"{path}: is {shorten(repr(trace))}; allowed: an object with `turns` and `summary`")
    for key, kind, allowed in (("turns", list, "a list of rows"), ("summary", dict, "an object")):
        if key not in trace:
            raise CaseError(f"{path}: `{key}` is missing; allowed: {allowed}")
        if not isinstance(trace[key], kind):
            raise CaseError(f"{path}: `{key}` is {shorten(repr(trace[key]))}; allowed: {allowed}")
    for number, row in enumerate(trace["turns"]):
        if not isinstance(row, dict) or type(row.get("turn")) is not int:
            raise CaseError(f"{path}: `turns.{number}` is {shorten(repr(row))}; allowed: an object with a `turn`")
    return trace


def _read_json(path: Path, what: str) -> Any:
    if path.exists() and not path.is_file():
        raise CaseError(f"{path}: is not a regular file; allowed: JSON, gzipped if it ends in .gz")
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CaseError(
            f"{path}: not text in UTF-8 (byte {error.start}); allowed: JSON, gzipped if it ends in .gz"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CaseError(f"{path}: damaged or cut short as a gzip file ({error}); allowed: a whole gzip file") from None
    except OSError as error:
        raise CaseError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise CaseError(f"{path}:{error.lineno}: not JSON, or cut short: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise CaseError(f"{path}: nested too deeply for a {what}") from None
    except ValueError as error:
        raise CaseError(f"{path}: not a {what}: {error}") from None


def write_trace(path: Path, trace: dict[str, Any]) -> None:
    """Write a trace whole or not at all; the same trace gives the same bytes. A device or a pipe is written to.

    Raises OSError.
    """
    content = (json.dumps(trace, separators=(",", ":")) + "\n").encode()
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    with written_whole(path) as partial:
        partial.write_bytes(content)


def _whole(least: int) -> tuple[Check, str]:
    allowed = f"a whole number from {least} to {_MOST:,}"
    return (lambda value: type(value) is int and least <= value <= _MOST), allowed


_TRUTH: Final[tuple[Check, str]] = (lambda value: type(value) is bool), "true or false"
_TEXT: Final[tuple[Check, str]] = (lambda value: isinstance(value, str)), "text"
_SHARE: Final[tuple[Check, str]] = (
    (lambda value: type(value) in (int, float) and 0 <= value < 1),
    "a number from 0 to below 1",
)


def _triples(value: Any) -> bool:
    return value is None or (
        isinstance(value, list)
        and all(isinstance(row, list) and len(row) == 3 and all(_whole(0)[0](x) for x in row) for row in value)
    )


def _segments(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(s, list) and len(s) == 2 and _TEXT[0](s[0]) and _whole(1)[0](s[1]) for s in value)
    )


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(_whole(0)[0](count) for count in value)


class _Checker:
    """Looks at one case, and raises at the first thing that is wrong."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def case(self, case: Any) -> None:
        if not isinstance(case, dict):
            raise self._wrong("the whole file", case, "an object with `format`, `engine` and `requests`")
        if "format" not in case:
            raise CaseError(f"{self._path}: `format` is missing; allowed: {CASE_FORMAT}")
        if case["format"] != CASE_FORMAT or type(case["format"]) is not int:
            raise self._wrong("format", case["format"], f"{CASE_FORMAT}, the only format there is")
        engine = self._object("engine", case.get("engine"), "engine" in case)
        self._engine(engine)
        requests = self._list("requests", case.get("requests"), "requests" in case)
        ids: set[str] = set()
        for number, request in enumerate(requests):
            self._request(f"requests[{number}]", request, engine)
            if request["id"] in ids:
                raise self._wrong(f"requests[{number}].id", request["id"], "ids that differ")
            ids.add(request["id"])
        for number, event in enumerate(self._list("events", case.get("events") or [], True)):
            self._event(f"events[{number}]", event)

    def _engine(self, engine: dict[str, Any]) -> None:
        for key in ("async_scheduling", "enable_prefix_caching"):
            self._need("engine", engine, key, *_TRUTH)
        for key, least in (
            ("block_size", 1),
            ("num_gpu_blocks", 2),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("max_model_len", 2),
        ):
            self._need("engine", engine, key, *_whole(least))
        self._may("engine", engine, "num_speculative_tokens", *_whole(0))
        self._may("engine", engine, "long_prefill_token_threshold", *_whole(0))
        self._may("engine", engine, "watermark", *_SHARE)
        self._may("engine", engine, "policy", lambda value: value in ("fcfs", "priority"), "fcfs or priority")
        self._may("engine", engine, "batches_in_flight", lambda value: _whole(1)[0](value) and value <= 64, "1 to 64")
        rows = "rows [first, last, K] of whole numbers, or null"
        self._may("engine", engine, "num_speculative_tokens_per_batch_size", _triples, rows)
        if engine.get("num_speculative_tokens", 0):
            self._need("engine", engine, "method", _TEXT[0], ", ".join(_METHODS))
        if "method" in engine and engine["method"] not in _METHODS:
            raise self._wrong("engine.method", engine["method"], ", ".join(_METHODS), _METHODS)
        if engine.get("num_speculative_tokens", 0) and engine["method"] == "none":
            raise self._wrong("engine.method", "none", "a drafter, as num_speculative_tokens is not 0")

    def _request(self, place: str, request: Any, engine: dict[str, Any]) -> None:
        request = self._object(place, request, True)
        self._need(place, request, "id", *_TEXT)
        self._need(place, request, "prompt", _segments, "segments [stream, count], count of 1 or more")
        self._need(place, request, "max_tokens", *_whole(1))
        self._need(place, request, "arrival_turn", *_whole(0))
        self._may(place, request, "eos_at", lambda value: value is None or _whole(0)[0](value), "0 or more, or null")
        self._may(place, request, "priority", lambda value: type(value) is int, "a whole number")
        if engine.get("num_speculative_tokens", 0):
            drafts = "a list of whole numbers, one or more"
            self._need(place, request, "accepted", lambda value: _counts(value) and len(value) > 0, drafts)
        prompt = sum(count for _, count in request["prompt"])
        if prompt >= engine["max_model_len"]:
            fitting = f"fewer tokens than engine.max_model_len, {engine['max_model_len']}"
            raise self._wrong(f"{place}.prompt", f"{prompt} tokens", fitting)

    def _event(self, place: str, event: Any) -> None:
        event = self._object(place, event, True)
        self._need(place, event, "turn", *_whole(0))
        self._need(place, event, "type", _TEXT[0], ", ".join(_EVENTS))
        if event["type"] not in _EVENTS:
            raise self._wrong(f"{place}.type", event["type"], ", ".join(_EVENTS), _EVENTS)
        if event["type"] == "abort":
            self._need(place, event, "id", *_TEXT)
        else:
            self._need(place, event, "reset_running_requests", *_TRUTH)

    def _need(self, place: str, value: dict[str, Any], key: str, right: Check, allowed: str) -> None:
        if key not in value:
            raise CaseError(f"{self._path}: `{place}.{key}` is missing; allowed: {allowed}")
        self._may(place, value, key, right, allowed)

    def _may(self, place: str, value: dict[str, Any], key: str, right: Check, allowed: str) -> None:
        if key in value and not right(value[key]):
            raise self._wrong(f"{place}.{key}", value[key], allowed)

    def _object(self, place: str, value: Any, there: bool) -> dict[str, Any]:
        if not there:
            raise CaseError(f"{self._path}: `{place}` is missing; allowed: an object")
        if not isinstance(value, dict):
            raise self._wrong(place, value, "an object")
        return value

    def _list(self, place: str, value: Any, there: bool) -> list[Any]:
        if not there:
            raise CaseError(f"{self._path}: `{place}` is missing; allowed: a list")
        if not isinstance(value, list):
            raise self._wrong(place, value, "a list")
        return value

    def _wrong(self, key: str, value: Any, allowed: str, names: tuple[str, ...] = ()) -> CaseError:
        nearest = nearest_name(value, names) if names and isinstance(value, str) else None
        meant = "" if nearest is None else f"; did you mean `{nearest}`?"
        return CaseError(f"{self._path}: `{key}` is {shorten(json.dumps(value))}; allowed: {allowed}{meant}")
