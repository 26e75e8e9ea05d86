"""What says how many drafts were accepted: vLLM's log, its metrics, benchmark results, requests, recordings, numbers.

Knows formats, read by content, and what they count; gives `Evidence` for `sim.models.acceptance_fit`. Must not know how
anything is fitted. A text is read line by line and summed as it goes, so a log of any length takes little memory.

Formats are vLLM 0.32's: the log line of `vllm/v1/spec_decode/metrics.py` (`SpecDecoding metrics: ...`, one for each
interval, with counts of that interval only), the Prometheus counters `vllm:spec_decode_*` (totals since the start), the
result of `vllm bench serve`, and detailed request metrics with `per_step_accepted`. Every error names the file and the
line, the value, and what is allowed.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from sim.models.acceptance import AcceptanceError, read_accepted_lengths
from sim.models.acceptance_fit import FOLDS, Counts, Evidence, Figures, Steps, steps_from_lengths

__all__ = ["LOOP_TOKENS", "Source", "read_sources"]

LOOP_TOKENS: Final = 4000
"""A recording of so many tokens or more is a request that loops: left out of fits, and counted."""

_MARK: Final = b"SpecDecoding metrics:"
_NUMBER: Final = rb"([0-9]+(?:\.[0-9]+)?|nan)"
_LINE: Final = re.compile(
    rb"SpecDecoding metrics: Mean acceptance length: " + _NUMBER + rb", Accepted throughput: [^,]*, "
    rb"Drafted throughput: [^,]*, Accepted: ([0-9]+) tokens, Drafted: ([0-9]+) tokens, "
    rb"Per-position acceptance rate: ((?:[0-9.]+|nan)(?:, (?:[0-9.]+|nan))*), "
    rb"Avg Draft acceptance rate: (?:[0-9]+(?:\.[0-9]+)?|nan)%"
)
_COUNTER: Final = re.compile(
    r"vllm:spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(?:_total)?"
    r"(?:\{(.*)\})?\s+(\S+)(?:\s+\S+)?\s*$"
)
_POSITION: Final = re.compile(r'(?:^|,)\s*position="([^"]*)"')
_TYPED: Final = ("rates", "conditional", "length")
_MOST_DRAFTS: Final = 1000


@dataclass(frozen=True)
class Source:
    """What was read. `kind`: log, metrics, bench, requests, recording or numbers."""

    kind: str
    evidence: Evidence
    notes: tuple[str, ...] = ()
    """What was left out, estimated or mixed."""


def read_sources(names: Sequence[str], k: int | None = None, drafter: str | None = None) -> Source:
    """Read SOURCE... as `speckv acceptance fit` takes them.

    One name: a file (plain or gzipped), or numbers: `rates=0.67,0.44,0.28` (unconditional, as vLLM prints them),
    `conditional=...`, or `length=2.4` (a mean length with the bonus token, needs `k`). Two metrics scrapes are
    subtracted, the first from the second. Several logs, or several files of requests or recordings, are joined. `k`:
    drafts a step; needed for a recording and for a length, else it must be what the source says. `drafter`: which
    column of a recording (its field is `<drafter>_tokens_per_step`; default eagle3). Raises AcceptanceError.
    """
    if not names:
        raise AcceptanceError("no source was given")
    if k is not None and not 1 <= k <= _MOST_DRAFTS:
        raise AcceptanceError(f"k = {k}: must be from 1 to {_MOST_DRAFTS}")
    if any(name.partition("=")[0] in _TYPED and "=" in name for name in names):
        if len(names) > 1:
            raise AcceptanceError(f"{names[0]} ...: typed numbers are one source, and {len(names)} were given")
        return _typed(names[0], k)
    kinds = {name: _kind_of(Path(name)) for name in names}
    kind = kinds[names[0]]
    for name, other in kinds.items():
        if other != kind:
            raise AcceptanceError(f"{name} is a {other} and {names[0]} a {kind}: sources read together are of one kind")
    paths = [Path(name) for name in names]
    if kind == "log":
        source = _logs(paths, k)
    elif kind == "metrics":
        source = _metrics(paths)
    elif kind == "bench":
        source = _bench(paths)
    elif kind == "requests":
        source = _requests(paths, k)
    else:
        source = _recordings(paths, k, drafter)
    if k is not None and source.evidence.k != k:
        raise AcceptanceError(f"{names[0]}: was made with K = {source.evidence.k}, and k = {k} was asked for")
    return source


# Telling what a file is


def _lines(path: Path) -> Iterator[bytes]:
    """The lines, without the line's end, of a plain or gzipped file."""
    if path.exists() and not path.is_file():
        raise AcceptanceError(f"{path}: is not a regular file")
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if zipped else path.open("rb") as file:
            yield from file
    except OSError as error:
        raise AcceptanceError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (EOFError, zlib.error) as error:
        raise AcceptanceError(f"{path}: a damaged archive ({error})") from None


def _kind_of(path: Path) -> str:
    first = None
    for number, line in enumerate(_lines(path), start=1):
        text = line.removeprefix(b"\xef\xbb\xbf").lstrip() if number == 1 else line.lstrip()
        if first is None and text.strip():
            first = text
            if text[:1] in b"{[":
                kind = _kind_of_json(path, text)
                if kind is not None:
                    return kind
        if _MARK in line:
            return "log"
        if text.startswith(b"vllm:spec_decode_"):
            return "metrics"
    if first is None:
        raise AcceptanceError(f"{path}: is empty")
    raise AcceptanceError(
        f"{path}: holds nothing about drafts. Read are: log lines with `SpecDecoding metrics:`, metrics with "
        "`vllm:spec_decode_num_drafts_total`, results of vllm bench serve with `spec_decode_acceptance_length`, JSON "
        "of requests with `per_step_accepted`, recordings with `..._tokens_per_step`"
    )


def _kind_of_json(path: Path, first: bytes) -> str | None:
    """By the keys in the first line, or in the whole of a file that calls itself JSON; None for neither."""
    texts: list[bytes | None] = [first, None] if ".json" in path.name.lower() else [first]
    for text in texts:
        if text is None:
            text = b"".join(_lines(path))
        if b'"per_step_accepted"' in text:
            return "requests"
        if re.search(rb'"[A-Za-z0-9_]*_tokens_per_step"', text):
            return "recording"
        if b'"spec_decode_acceptance_length"' in text or b'"spec_decode_per_position_acceptance_rates"' in text:
            return "bench"
        if re.match(rb"\[\s*\[\s*[0-9]|\[\s*[0-9]+\s*[,\]]", text) and b"{" not in text:
            return "recording"
    return None


# The log


def _logs(paths: Sequence[Path], k: int | None) -> Source:
    """Counts of an interval: drafts = drafted / K, accepted at a position = rate x drafts, to the nearest whole number.

    Rates have three decimals, so this is exact up to 500 drafts in an interval, and within 0.05 percent beyond.
    Intervals go to folds in turn. Engines and restarts need no care, since every line counts its own interval; a
    restart with another K does: the K with the most drafts is taken, unless `k` says which.
    """
    sums: dict[int, list[list[int]]] = {}  # K: by fold: drafts, then accepted by position
    lines = idle = 0
    broken: list[str] = []
    num_broken = 0
    engines: set[bytes] = set()
    for path in paths:
        for number, line in enumerate(_lines(path), start=1):
            place = line.find(_MARK)
            if place < 0:
                continue
            found = _LINE.match(line, place)
            if found is None:
                num_broken += 1
                if len(broken) < 3:
                    broken.append(f"{path}:{number}")
                continue
            lines += 1
            drafted = int(found[3])
            if drafted == 0:
                idle += 1
                continue
            counts = _interval(found[1], int(found[2]), drafted, found[4])
            if counts is None:
                num_broken += 1
                if len(broken) < 3:
                    broken.append(f"{path}:{number}")
                continue
            if len(engines) < 64:
                engines.add(line[: line.find(b")")] if line[:1] == b"(" else b"")
            length = len(counts) - 1
            folds = sums.get(length)
            if folds is None:
                folds = sums[length] = [[0] * (length + 1) for _ in range(FOLDS)]
            fold = folds[lines % FOLDS]
            for i, count in enumerate(counts):
                fold[i] += count
    if not sums:
        where = f" (first: {', '.join(broken)})" if broken else ""
        raise AcceptanceError(
            f"{paths[0]}: {num_broken + lines} lines with `SpecDecoding metrics:`, {num_broken} of them cut or "
            f"malformed{where}, {idle} of idle intervals, so there is nothing to fit"
        )
    notes = []
    if num_broken:
        notes.append(f"{num_broken} lines were cut or malformed and left out (first: {', '.join(broken)})")
    if idle:
        notes.append(f"{idle} intervals without drafts")
    if len(engines) > 1:
        notes.append(f"{len(engines)} engines or processes were added up")
    chosen = k if k in sums else max(sums, key=lambda length: sum(fold[0] for fold in sums[length]))
    if len(sums) > 1:
        shares = ", ".join(f"K = {length}: {sum(fold[0] for fold in sums[length])} drafts" for length in sorted(sums))
        notes.append(f"drafted with several K ({shares}); fitted is K = {chosen}")
    table = np.asarray(sums[chosen], dtype=np.float64)
    return Source("log", Counts(chosen, table[:, 0], table[:, 1:]), tuple(notes))


@lru_cache(maxsize=4096)
def _interval(length: bytes, accepted: int, drafted: int, rates: bytes) -> tuple[int, ...] | None:
    """Drafts, then accepted by position; None where the figures contradict each other."""
    shares, mean = _numbers(rates), float(length)
    if shares is None or mean != mean or accepted > drafted:
        return None
    k = len(shares)
    drafts = round(drafted / k)
    if drafts == 0 or abs(1.0 + accepted / drafts - mean) > 0.0051:
        # Not K drafts each time (dynamic K, or a proposal that was cut): the mean length tells how many there were.
        if mean <= 1.0:
            return None
        drafts = round(accepted / (mean - 1.0))
        if drafts <= 0 or drafts * k < drafted:
            return None
    counts = [drafts]
    before = drafts
    for share in shares:
        count = round(share * drafts)
        if count > before:
            return None
        counts.append(count)
        before = count
    return tuple(counts)


@lru_cache(maxsize=65_536)
def _numbers(rates: bytes) -> tuple[float, ...] | None:
    try:
        shares = tuple(float(rate) for rate in rates.split(b", "))
    except ValueError:
        return None
    return shares if all(share == share for share in shares) else None


# Metrics


def _metrics(paths: Sequence[Path]) -> Source:
    if len(paths) > 2:
        raise AcceptanceError(f"{len(paths)} scrapes were given: one is taken as it is, of two the first is subtracted")
    scrapes = [_scrape(path) for path in paths]
    drafts, accepted = scrapes[-1]
    if len(scrapes) == 2:
        before, accepted_before = scrapes[0]
        if len(accepted_before) > len(accepted):
            raise AcceptanceError(f"{paths[0]} has {len(accepted_before)} positions and {paths[1]} {len(accepted)}")
        accepted_before += [0.0] * (len(accepted) - len(accepted_before))
        drafts -= before
        accepted = [now - then for now, then in zip(accepted, accepted_before, strict=True)]
        if drafts < 0 or min(accepted) < 0:
            raise AcceptanceError(
                f"{paths[1]}: counts less than {paths[0]}: the earlier scrape comes first, and no restart lies between"
            )
    if drafts == 0:
        raise AcceptanceError(f"{paths[-1]}: vllm:spec_decode_num_drafts_total counts no drafts")
    table = np.array([[drafts, *accepted]])
    _check_falling(f"{paths[-1]}", [drafts, *accepted])
    return Source("metrics", Counts(len(accepted), table[:, 0], table[:, 1:]))


def _scrape(path: Path) -> tuple[float, list[float]]:
    """Drafts, and accepted by position, over all engines and models of one scrape."""
    drafts: float | None = None
    by_position: dict[int, float] = {}
    for number, line in enumerate(_lines(path), start=1):
        if not line.startswith(b"vllm:spec_decode_") or b"_created" in line:
            continue
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        found = _COUNTER.match(text)
        if found is None:
            raise AcceptanceError(
                f"{path}:{number}: {_shown(text)}: expected a vllm:spec_decode_ counter and its value"
            )
        try:
            value = float(found[3])
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise AcceptanceError(f"{path}:{number}: value {found[3]!r}: expected a number, 0 or more")
        if found[1] == "drafts":
            drafts = value + (drafts or 0.0)
        elif found[1] == "accepted_tokens_per_pos":
            position = _POSITION.search(found[2] or "")
            if position is None or not position[1].isdigit() or int(position[1]) >= _MOST_DRAFTS:
                raise AcceptanceError(f'{path}:{number}: {_shown(text)}: expected position="0", "1", ...')
            by_position[int(position[1])] = by_position.get(int(position[1]), 0.0) + value
    if drafts is None:
        raise AcceptanceError(f"{path}: vllm:spec_decode_num_drafts_total is missing")
    if sorted(by_position) != list(range(len(by_position))) or not by_position:
        seen = ", ".join(map(str, sorted(by_position))) or "none"
        raise AcceptanceError(
            f"{path}: vllm:spec_decode_num_accepted_tokens_per_pos_total has positions {seen}: expected 0 to K - 1"
        )
    return drafts, [by_position[i] for i in range(len(by_position))]


# JSON


def _bench(paths: Sequence[Path]) -> Source:
    if len(paths) > 1:
        raise AcceptanceError(f"{len(paths)} benchmark results were given: one is read")
    path = paths[0]
    result = _parsed(path, b"".join(_lines(path)), 1)
    if isinstance(result, list) and len(result) == 1:
        result = result[0]
    if not isinstance(result, dict):
        raise AcceptanceError(f"{path}: expected one JSON object, the result of vllm bench serve")
    rates = result.get("spec_decode_per_position_acceptance_rates")
    drafts = result.get("spec_decode_num_drafts")
    if rates is None:
        length = _figure(path, result, "spec_decode_acceptance_length")
        drafted = result.get("spec_decode_draft_tokens")
        if not isinstance(drafted, int) or not isinstance(drafts, int) or drafts <= 0 or drafted < drafts:
            raise AcceptanceError(f"{path}: spec_decode_per_position_acceptance_rates: missing, and K cannot be told")
        return Source("bench", Figures(round(drafted / drafts), None, length))
    if not isinstance(rates, list) or not rates or len(rates) > _MOST_DRAFTS:
        raise AcceptanceError(f"{path}: spec_decode_per_position_acceptance_rates: expected a list of rates")
    for number, rate in enumerate(rates):
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
            raise AcceptanceError(
                f"{path}: spec_decode_per_position_acceptance_rates[{number}] = {rate!r}: must be between 0 and 1"
            )
    _check_falling(f"{path}: spec_decode_per_position_acceptance_rates", rates)
    if drafts is None:
        return Source("bench", Figures(len(rates), tuple(map(float, rates))))
    if isinstance(drafts, bool) or not isinstance(drafts, int) or drafts <= 0:
        raise AcceptanceError(f"{path}: spec_decode_num_drafts = {drafts!r}: must be a whole number above 0")
    table = np.array([[float(drafts), *(round(rate * drafts) for rate in rates)]])
    return Source("bench", Counts(len(rates), table[:, 0], table[:, 1:]))


def _requests(paths: Sequence[Path], k: int | None) -> Source:
    accepted: list[np.ndarray[Any, np.dtype[np.int64]]] = []
    drafted: list[np.ndarray[Any, np.dtype[np.bool_]]] = []
    longest = without = cut = 0
    for path in paths:
        for place, entry in _objects(path):
            found = _speculation(entry)
            if found is None:
                without += 1
                continue
            own = _whole_numbers(place, found, "per_step_accepted")
            if not own:
                without += 1
                continue
            tried = _whole_numbers(place, found, "per_step_drafted") if "per_step_drafted" in found else None
            if tried is not None and len(tried) != len(own):
                raise AcceptanceError(
                    f"{place}: per_step_drafted has {len(tried)} entries and per_step_accepted {len(own)}"
                )
            top = found.get("num_spec_tokens") or max(tried or own)
            if isinstance(top, bool) or not isinstance(top, int) or not 1 <= top <= _MOST_DRAFTS:
                raise AcceptanceError(f"{place}: num_spec_tokens = {top!r}: must be from 1 to {_MOST_DRAFTS}")
            longest = max(longest, top)
            for number, a in enumerate(own):
                limit = top if tried is None else tried[number]
                if a > limit:
                    raise AcceptanceError(
                        f"{place}: per_step_accepted[{number}] = {a}: must be at most the {limit} that were drafted"
                    )
                cut += tried is not None and 0 < limit < top and a == limit
            accepted.append(np.asarray(own, dtype=np.int64))
            drafted.append(np.asarray([True] * len(own) if tried is None else [d > 0 for d in tried], dtype=np.bool_))
    if not accepted:
        raise AcceptanceError(f"{paths[0]}: no request has per_step_accepted with an entry")
    notes = []
    if without:
        notes.append(f"{without} requests without a verification were left out")
    if cut:
        notes.append(f"{cut} steps accepted all of fewer than K drafts: they count as a rejection of the next")
    everywhere = all(d.all() for d in drafted)
    return Source("requests", Steps(longest, tuple(accepted), None if everywhere else tuple(drafted)), tuple(notes))


def _objects(path: Path) -> Iterator[tuple[str, Any]]:
    """JSON objects with their places: of a JSON document (an object, or a list of them) or of JSON lines."""
    lines = [(number, line) for number, line in enumerate(_lines(path), start=1) if line.strip()]
    try:
        document = json.loads(b"\n".join(line for _, line in lines))
    except (ValueError, RecursionError):
        document = None
    if document is None or len(lines) == 1:
        if document is not None and isinstance(document, list):
            yield from ((f"{path}: entry {number}", entry) for number, entry in enumerate(document))
            return
        if document is None and lines[0][1].strip() in (b"[", b"{"):
            _parsed(path, b"".join(_lines(path)), None)
        for number, line in lines:
            yield f"{path}:{number}", _parsed(path, line, number)
        return
    entries = document if isinstance(document, list) else [document]
    yield from ((f"{path}: entry {number}", entry) for number, entry in enumerate(entries))


def _speculation(entry: Any) -> dict[str, Any] | None:
    """The mapping with `per_step_accepted`: the entry itself, or below metrics and speculative_decoding."""
    for _ in range(4):
        if not isinstance(entry, dict):
            return None
        if "per_step_accepted" in entry:
            return entry
        entry = next((entry[key] for key in ("metrics", "speculative_decoding") if key in entry), None)
    return None


def _recordings(paths: Sequence[Path], k: int | None, drafter: str | None) -> Source:
    if k is None:
        raise AcceptanceError(f"{paths[0]}: a recording is walked with a number of drafts: say which, with -k")
    field = f"{drafter or 'eagle3'}_tokens_per_step"
    lengths = [sequence for path in paths for sequence in read_accepted_lengths(path, field)]
    kept = [sequence for sequence in lengths if len(sequence) < LOOP_TOKENS]
    notes = []
    if len(kept) < len(lengths):
        notes.append(f"{len(lengths) - len(kept)} requests of {LOOP_TOKENS} tokens or more (loops) were left out")
    return Source("recording", steps_from_lengths(kept, k), tuple(notes))


# Typed numbers


def _typed(text: str, k: int | None) -> Source:
    key, _, values = text.partition("=")
    try:
        numbers = [float(part) for part in values.split(",")]
    except ValueError:
        raise AcceptanceError(f"{text}: expected numbers with commas between them, such as {key}=0.67,0.44") from None
    if key == "length":
        if len(numbers) != 1 or k is None:
            raise AcceptanceError(f"{text}: a mean length is one number, and needs -k, the drafts a step")
        if not 1 <= numbers[0] <= k + 1:
            raise AcceptanceError(f"{text}: with K = {k} a mean length is from 1 to {k + 1}")
        return Source("numbers", Figures(k, None, numbers[0]))
    for number, rate in enumerate(numbers):
        if not 0 <= rate <= 1:
            raise AcceptanceError(f"{text}: entry {number} = {rate!r}: must be between 0 and 1")
    if key == "conditional":
        numbers = np.cumprod(numbers).tolist()
    _check_falling(text, numbers)
    if k is not None and k != len(numbers):
        raise AcceptanceError(f"{text}: {len(numbers)} rates, and k = {k} was asked for")
    return Source("numbers", Figures(len(numbers), tuple(numbers)))


# Checks


def _parsed(path: Path, text: bytes, number: int | None) -> Any:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise AcceptanceError(f"{path}:{number or 1}: not a text file") from None
    except json.JSONDecodeError as error:
        line = error.lineno + (number or 1) - 1
        raise AcceptanceError(f"{path}:{line}: malformed JSON ({error.msg}, column {error.colno})") from None
    except RecursionError:
        raise AcceptanceError(f"{path}:{number or 1}: malformed JSON (nested too deep)") from None


def _whole_numbers(place: str, entry: dict[str, Any], key: str) -> list[int]:
    values = entry[key]
    if not isinstance(values, list):
        raise AcceptanceError(f"{place}: {key}: expected a list of whole numbers, one a step")
    for number, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_DRAFTS:
            raise AcceptanceError(
                f"{place}: {key}[{number}] = {value!r}: expected a whole number from 0 to {_MOST_DRAFTS}"
            )
    return values


def _figure(path: Path, result: dict[str, Any], key: str) -> float:
    value = result.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= _MOST_DRAFTS + 1:
        raise AcceptanceError(f"{path}: {key} = {value!r}: expected a number, 1 or more")
    return float(value)


def _check_falling(place: str, values: Iterable[float]) -> None:
    before = math.inf
    for number, value in enumerate(values):
        if value > before:
            raise AcceptanceError(
                f"{place}: entry {number} = {value!r}: unconditional rates cannot rise (before: {before!r})"
            )
        before = value


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
