"""What the figures of a summary mean, in the words of a report: a name, a unit, a sentence, and which way is better.

Knows the names of `summary.json` and of the columns of a sweep, which are the same with nested names joined by `_`.
Must not know how a figure comes about, or how a page looks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

Better = Literal["more", "less", ""]


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a figure is."""

    label: str
    unit: str
    text: str
    better: Better = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a summary. `name` is joined by `.` as in `summary.json`; `value` a number, a list or None."""

    name: str
    group: str
    value: Any
    meaning: Meaning


CLASSES: Final[Mapping[str, str]] = {
    "committed": "computed and confirmed",
    "in_flight": "in a step that has not come back: prefill, recomputation, and the one certain row of each frame",
    "placeholder": "drafts in a step that has not come back, padding included",
    "garbage": "rejected drafts, promised to nobody again yet",
    "lookahead": "room that the drafter writes ahead in",
    "slack": "rounding up to whole blocks, and whole blocks beyond what is needed",
    "cached": "held by nobody, with content that can still be hit",
    "free": "held by nobody, without content",
}
"""The account of reservations: what the scheduler has promised (`docs/ledger.md`)."""

_PLACEHOLDERS: Final[Mapping[str, str]] = {
    "placeholder_accepted": "of the placeholders: drafts that were accepted",
    "placeholder_rejected": "of the placeholders: drafts that were rejected",
    "placeholder_discarded": "of the placeholders: of frames whose request was preempted, aborted or ended first",
}
CONTENT: Final[Mapping[str, str]] = {
    "valid": "the right keys and values of a confirmed token",
    "garbage": "written, rejected, and not yet written over",
    "blank": "held, and not written for this owner",
    "cached": "held by nobody, with content that can still be hit",
    "free": "held by nobody, without content",
}
"""The account of content: what device memory holds."""
_DRAFTER_SLOTS: Final[Mapping[str, str]] = {
    "context": "the drafter's keys and values of confirmed tokens",
    "drafts": "those of drafts",
    "slack": "rounding up to whole blocks",
    "free": "in blocks that nobody holds",
}
_STATISTICS: Final[Mapping[str, str]] = {
    "mean": "mean",
    "median": "half lie below",
    "p90": "90 percent lie below",
    "p99": "99 percent lie below",
    "max": "the largest",
}
_BLOCK_SECONDS: Final[Mapping[str, str]] = {
    "placeholder": "blocks with nothing more certain in them than drafts in flight",
    "garbage": "blocks with nothing more certain in them than garbage in memory",
    "lookahead": "blocks with nothing more certain in them than lookahead",
    "overhang": "blocks wholly beyond what their owner's frame was given",
}

_SPEED, _LATENCY, _CACHE = "Load and speed", "Latency", "Cache and preemption"
_SPECULATION, _ROOM, _MEMORY = "Speculation", "Room, as the scheduler promises it", "Content, as memory holds it"
_DRAFTER, _GARBAGE = "The drafter", "Garbage, slot by slot"
_HIDDEN: Final = ("schema_version",)
"""Not a figure."""

_FIGURES: Final[Mapping[str, tuple[str, Meaning]]] = {
    "num_requests": (_SPEED, Meaning("requests", "", "requests that arrived")),
    "num_finished": (_SPEED, Meaning("finished", "", "requests that got all their tokens")),
    "num_aborted": (_SPEED, Meaning("aborted", "", "requests that were aborted")),
    "num_unfinished": (_SPEED, Meaning("unfinished", "", "requests that had not ended when the run did")),
    "num_refused": (
        _SPEED,
        Meaning("refused", "", "requests turned away since the engine could never serve them; not among the requests"),
    ),
    "num_steps": (_SPEED, Meaning("steps", "", "steps that came back")),
    "num_request_steps": (_SPEED, Meaning("request-steps", "", "frames in these steps: one request in one step each")),
    "duration_s": (_SPEED, Meaning("duration", "s", "simulated time to the end of the run", "less")),
    "request_throughput": (_SPEED, Meaning("request throughput", "1/s", "finished requests a second", "more")),
    "output_throughput": (_SPEED, Meaning("output throughput", "tokens/s", "delivered tokens a second", "more")),
    "request_goodput": (
        _SPEED,
        Meaning("goodput", "1/s", "finished requests within all limits of slo a second; none without limits", "more"),
    ),
    "num_output_tokens": (_SPEED, Meaning("output tokens", "tokens", "delivered")),
    "ttft_ms": (_LATENCY, Meaning("TTFT", "ms", "from arrival to the first token, of finished requests", "less")),
    "tpot_ms": (
        _LATENCY,
        Meaning("TPOT", "ms", "time per output token after the first, of finished requests with two or more", "less"),
    ),
    "itl_ms": (_LATENCY, Meaning("ITL", "ms", "time between deliveries, each of one token or more", "less")),
    "e2el_ms": (_LATENCY, Meaning("end to end", "ms", "from arrival to the last token, of finished requests", "less")),
    "kv_cache_usage_perc": (
        _CACHE,
        Meaning("KV cache usage", "of 1", "held blocks over all but the null block: mean over time, and the most"),
    ),
    "num_preemptions": (_CACHE, Meaning("preemptions", "", "for lack of blocks, and by resets", "less")),
    "recomputed_tokens": (
        _CACHE,
        Meaning("recomputed", "tokens", "confirmed tokens that were computed again after a preemption", "less"),
    ),
    "prefix_cache_queries": (_CACHE, Meaning("prefix queries", "tokens", "looked up at first admissions")),
    "prefix_cache_hits": (_CACHE, Meaning("prefix hits", "tokens", "found at first admissions", "more")),
    "num_gpu_blocks": (_CACHE, Meaning("blocks", "", "of the pool, with the null block")),
    "block_size": (_CACHE, Meaning("block size", "tokens", "slots of a block")),
    "block_bytes": (_CACHE, Meaning("block bytes", "B", "of a block on one rank")),
    "num_drafts": (_SPECULATION, Meaning("verifications", "", "frames with drafts that were verified")),
    "num_draft_tokens": (_SPECULATION, Meaning("drafts", "tokens", "drafts in them")),
    "num_accepted_tokens": (_SPECULATION, Meaning("accepted", "tokens", "drafts that were accepted")),
    "accepted_per_pos": (_SPECULATION, Meaning("accepted by position", "tokens", "first draft, second draft, ...")),
    "mean_acceptance_length": (
        _SPECULATION,
        Meaning("acceptance length", "tokens", "1 + accepted / verifications; none without drafts", "more"),
    ),
    "num_trimmed_tokens": (
        _SPECULATION,
        Meaning("trimmed", "tokens", "sampled beyond a request's end in its last frame"),
    ),
    "num_ignored_tokens": (_SPECULATION, Meaning("ignored", "tokens", "sampled by a frame after a request's last")),
    "num_stale_tokens_dropped": (
        _SPECULATION,
        Meaning("stale, dropped", "tokens", "sampled for requests that had been preempted meanwhile, and lost"),
    ),
    "num_stale_tokens_delivered": (
        _SPECULATION,
        Meaning("stale, delivered", "tokens", "sampled for requests that had been preempted meanwhile, and delivered"),
    ),
    "slot_seconds": (_ROOM, Meaning("room", "slot-s", "slots times the time that they were in this class")),
    "byte_seconds": (_ROOM, Meaning("room in bytes", "B·s", "the same, times the bytes of a slot")),
    "content_slot_seconds": (_MEMORY, Meaning("content", "slot-s", "slots times the time that they held this")),
    "stale_write_slots": (
        _MEMORY,
        Meaning("stale writes", "slots", "written by frames whose request did not hold them any more"),
    ),
    "moved_rows": (_MEMORY, Meaning("moved rows", "rows", "of KV moved by the compaction of token trees")),
    "drafter_pool": (_DRAFTER, Meaning("drafter's pool", "", "a drafter's own blocks; none where it has none")),
    "drafter_outside_bytes_per_request": (
        _DRAFTER,
        Meaning("outside any pool", "B", "what the drafter keeps of a request outside any pool, on one rank"),
    ),
    "garbage": (_GARBAGE, Meaning("garbage", "", "distributions; none unless output.distributions is true")),
}

_DRAFTER_FIGURES: Final[Mapping[str, Meaning]] = {
    "num_blocks": Meaning("blocks", "", "of the drafter's pool"),
    "block_bytes": Meaning("block bytes", "B", "of a block of the drafter's pool"),
    "peak_blocks": Meaning("most blocks", "", "in use at once"),
    "num_refused": Meaning("refused", "", "rounds of drafting that found no room", "less"),
    "slot_seconds": Meaning("room", "slot-s", "slots times time in this class"),
    "byte_seconds": Meaning("bytes", "B·s", "bytes of blocks in use, times time"),
}
_GARBAGE_FIGURES: Final[Mapping[str, Meaning]] = {
    "rejected_tokens": Meaning("rejected", "", "verifications that rejected 0, 1, 2, ... drafts"),
    "num_rollbacks": Meaning("rollbacks", "", "verifications that rejected any"),
    "num_rollbacks_across_blocks": Meaning(
        "across blocks", "", "of them those whose last row lies in a later block than the last right one"
    ),
    "rows_written_twice": Meaning("written twice", "rows", "rows that a later step wrote over garbage"),
    "slots_freed": Meaning("freed", "slots", "garbage that was freed with its block instead"),
    "overwritten_after_ms": Meaning("overwritten after", "ms", "how long garbage lived that was written over"),
    "freed_after_ms": Meaning("freed after", "ms", "how long garbage lived that was freed with its block"),
    "slots_per_block": Meaning(
        "slots per block", "", "blocks with 0, 1, 2, ... garbage slots, looked at when a step of their owner ends"
    ),
    "block_seconds": Meaning("block-seconds", "block-s", "of blocks, by the most certain thing in them"),
    "by_request": Meaning("by request", "", "over requests"),
}
_BY_REQUEST: Final[Mapping[str, tuple[str, str]]] = {
    "placeholder_slot_s": ("slot-s", "placeholders"),
    "garbage_slot_s": ("slot-s", "garbage in memory"),
    "held_block_s": ("block-s", "blocks held, shared ones in full"),
}


def figures(summary: Mapping[str, Any]) -> list[Figure]:
    """Every figure of a summary with what it means, nested ones one by one, in groups.

    A name that is not known here is shown as well, and says so.
    """
    found = [one for name, value in summary.items() if name not in _HIDDEN for one in _flat(name, (name,), value)]
    order = {group: number for number, group in enumerate(dict.fromkeys(group for group, _ in _FIGURES.values()))}
    return sorted(found, key=lambda one: order.get(one.group, len(order)))


def meaning_of(path: tuple[str, ...]) -> Meaning | None:
    """What the figure at this place of a summary means, such as `("ttft_ms", "mean")`; None if it is not known."""
    name, *rest = path
    if name not in _FIGURES:
        return None
    meaning = _FIGURES[name][1]
    if not rest:
        return meaning
    if name in ("slot_seconds", "byte_seconds"):
        return _of_class(meaning, rest, {**CLASSES, **_PLACEHOLDERS})
    if name == "content_slot_seconds":
        return _of_class(meaning, rest, CONTENT)
    if name == "drafter_pool":
        return _of_drafter(rest)
    if name == "garbage":
        return _of_garbage(rest)
    return _of_statistic(meaning, rest)


def column_meaning(column: str) -> Meaning | None:
    """The same for a column of a sweep, such as `ttft_ms_mean`; None if it is not known."""
    for path in _splits(column):
        meaning = meaning_of(path)
        if meaning is not None:
            return meaning
    return None


def _splits(column: str) -> list[tuple[str, ...]]:
    """The places in a summary that a joined name can stand for."""
    found: list[tuple[str, ...]] = [(column,)]
    for name in (*_FIGURES, *_DRAFTER_FIGURES, *_GARBAGE_FIGURES, *_BY_REQUEST):
        if column.startswith(f"{name}_"):
            found += [(name, *rest) for rest in _splits(column[len(name) + 1 :])]
    return found


def _flat(top: str, path: tuple[str, ...], value: Any) -> list[Figure]:
    if isinstance(value, Mapping):
        return [one for name, inner in value.items() for one in _flat(top, (*path, str(name)), inner)]
    unknown = Meaning(path[-1], "", "no explanation: this figure is not known to this version of the report")
    group = _FIGURES[top][0] if top in _FIGURES else "Others"
    return [Figure(".".join(path), group, value, meaning_of(path) or unknown)]


def _of_class(whole: Meaning, rest: list[str], classes: Mapping[str, str]) -> Meaning | None:
    if len(rest) != 1 or rest[0] not in classes:
        return None
    return Meaning(f"{whole.label}: {rest[0].replace('_', ' ')}", whole.unit, classes[rest[0]])


def _of_statistic(whole: Meaning, rest: list[str]) -> Meaning | None:
    if len(rest) != 1 or rest[0] not in _STATISTICS:
        return None
    return Meaning(f"{whole.label}, {rest[0]}", whole.unit, f"{whole.text}: {_STATISTICS[rest[0]]}", whole.better)


def _of_drafter(rest: list[str]) -> Meaning | None:
    whole = _DRAFTER_FIGURES.get(rest[0])
    if whole is None or len(rest) == 1:
        return whole
    return _of_class(whole, rest[1:], _DRAFTER_SLOTS)


def _of_garbage(rest: list[str]) -> Meaning | None:
    whole = _GARBAGE_FIGURES.get(rest[0])
    if whole is None or len(rest) == 1:
        return whole
    if rest[0] == "block_seconds":
        return _of_class(whole, rest[1:], _BLOCK_SECONDS)
    if rest[0] == "by_request" and rest[1] in _BY_REQUEST:
        unit, text = _BY_REQUEST[rest[1]]
        return _of_statistic(Meaning(text, unit, f"{text} of a request"), rest[2:])
    if rest[1:] == ["bins"]:
        return Meaning(f"{whole.label}, by time", "", f"{whole.text}: from, below, slots")
    return _of_statistic(whole, rest[1:])
