"""What a run was like: facts by request, and the figures of the summary.

Told records, never asks. Knows times, tokens and fates; must not know blocks, files or the scheduler. A request's row
is handed on when it ends, so memory holds the requests under way, and three numbers for each that has finished.

Worked example, one request (prompt 8, 4 outputs, K = 2) that arrives at 0: a prefill that returns at 10 ms delivers
token 1; a verification that returns at 16 ms accepts one of 2 drafts and delivers tokens 2 and 3; another returns at
20 ms, accepts both, and only token 4 is kept.

    TTFT 10 ms, end to end 20 ms, TPOT (20 - 10) / (4 - 1) = 3.333 ms, gaps 6 and 4 ms
    2 drafts, 4 draft tokens, 3 accepted, 2 trimmed; accepted by position [2, 1]; mean acceptance length 1 + 3 / 2
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.records import DISCARDED, STALE_DELIVERED, UNKNOWN, Batch, Interruption, Returned

if TYPE_CHECKING:
    from mypy_extensions import i64

    from sim.core.request import Request

RequestRow = tuple[int | float | str | None, ...]
"""Values by `REQUEST_COLUMNS`."""

Room = tuple[float, float, float]
"""Of one request over its life: slot-seconds of placeholders and of garbage in memory, and block-seconds held."""

ROOM_COLUMNS: Final[tuple[tuple[str, str], ...]] = (
    ("placeholder_slot_s", "float64"),
    ("garbage_slot_s", "float64"),
    ("held_block_s", "float64"),
)
REQUEST_COLUMNS: Final[tuple[tuple[str, str], ...]] = (
    ("request", "int64"),
    ("id", "string"),
    ("status", "string"),
    ("conversation", "int64"),
    ("turn", "int64"),
    ("arrival_ns", "int64"),
    ("first_scheduled_ns", "int64"),
    ("first_token_ns", "int64"),
    ("finish_ns", "int64"),
    ("num_prompt_tokens", "int64"),
    ("num_output_tokens", "int64"),
    ("ttft_ms", "float64"),
    ("tpot_ms", "float64"),
    ("e2el_ms", "float64"),
    ("itl_mean_ms", "float64"),
    ("itl_max_ms", "float64"),
    ("num_deliveries", "int64"),
    ("prefix_hit_tokens", "int64"),
    ("recomputed_tokens", "int64"),
    ("num_preemptions", "int64"),
    ("num_drafts", "int64"),
    ("num_draft_tokens", "int64"),
    ("num_accepted_tokens", "int64"),
    ("num_discarded_tokens", "int64"),
    ("num_trimmed_tokens", "int64"),
    *ROOM_COLUMNS,
)
"""Name and type of each column of a request's row; what does not apply is None (`docs/results.md`)."""


class IntervalHistogram:
    """Durations in whole ns, any number of them in bounded memory.

    1,024 bins to a power of two, at most 55,296 in all: a percentile is off by at most 1/2048 of itself (0.05 percent),
    and by nothing below 2,048 ns. The mean is exact.
    """

    __slots__ = ("_bins", "count", "total_ns")

    def __init__(self) -> None:
        self._bins: dict[int, int] = {}
        """Count by lower edge: the duration with all but its 11 leading bits cleared."""
        self.count = 0
        self.total_ns = 0

    def add(self, duration_ns: int, count: int) -> None:
        """Count a duration (>= 0) so many times."""
        self.count += count
        self.total_ns += duration_ns * count
        shift = duration_ns.bit_length() - 11
        edge = duration_ns >> shift << shift if shift > 0 else duration_ns
        bins = self._bins
        bins[edge] = bins.get(edge, 0) + count

    def mean_ns(self) -> float:
        """The mean. Raises ZeroDivisionError while it is empty."""
        return self.total_ns / self.count

    def percentiles_ns(self, percents: list[float]) -> list[float]:
        """As numpy's default (linear between ranks), with the middle of its bin for each duration. It is not empty."""
        edges = sorted(self._bins)
        middles = [edge + ((1 << max(edge.bit_length() - 11, 0)) - 1) / 2 for edge in edges]
        behind = np.cumsum([self._bins[edge] for edge in edges])
        found = []
        for percent in percents:
            rank = percent / 100 * (self.count - 1)
            low = int(rank)
            first, second = (
                middles[int(np.searchsorted(behind, at, side="right"))] for at in (low, min(low + 1, self.count - 1))
            )
            found.append(first + (second - first) * (rank - low))
        return found


class _Facts:
    """One request under way."""

    __slots__ = (
        "arrival_ns",
        "chunk_end",
        "computed_before",
        "first_scheduled_ns",
        "first_token_ns",
        "itl_max_ns",
        "last_ns",
        "num_deliveries",
        "num_discarded_accepted",
        "num_discarded_drafts",
        "num_discarded_tokens",
        "num_draft_tokens",
        "num_plain",
        "num_trimmed_tokens",
        "prefix_hit_tokens",
        "recomputed_tokens",
        "request",
        "stay_hit",
    )

    def __init__(self, request: Request, arrival_ns: int) -> None:
        self.request = request
        self.arrival_ns: i64 = arrival_ns
        self.first_scheduled_ns: int | None = None
        self.first_token_ns: int | None = None
        self.last_ns: i64 = 0
        """When tokens were delivered last, if any were."""
        self.itl_max_ns: i64 = 0
        self.num_deliveries: i64 = 0
        self.num_plain: i64 = 0
        """Deliveries of frames without drafts; all others verified some."""
        self.num_draft_tokens: i64 = 0
        self.num_discarded_drafts: i64 = 0
        """Verified frames whose tokens were discarded, but which count as drafted and accepted all the same."""
        self.num_discarded_accepted: i64 = 0
        self.num_discarded_tokens: i64 = 0
        self.num_trimmed_tokens: i64 = 0
        self.prefix_hit_tokens: int | None = None
        self.stay_hit: int | None = None
        """What its latest admission found in the prefix cache; None while it is not running."""
        self.chunk_end: i64 = 0
        """Where its latest chunk of prefill or recomputation ends."""
        self.computed_before: i64 = 0
        """Confirmed tokens that some stay among the running requests had computed."""
        self.recomputed_tokens: i64 = 0


class Metrics:
    """Facts by request, and what the summary says of all of them.

    As vLLM does, a verified frame counts as drafted and accepted as soon as its output is looked at: also if tokens
    beyond the request's end are trimmed and, with its 0.32 rules, if the request was preempted and its output is
    delivered all the same; not if the output is dropped, or the request has ended.
    """

    def __init__(
        self,
        on_row: Callable[[RequestRow], None] | None = None,
        *,
        num_speculative_tokens: int = 0,
        slo_ttft_ms: float | None = None,
        slo_tpot_ms: float | None = None,
        slo_e2el_ms: float | None = None,
        room: Callable[[int], Room] | None = None,
    ) -> None:
        """`on_row` is handed the row of each request that ends, and at the end of the run of each that has not.

        `room` is asked for the room of one whose row is made, by index, where somebody has followed it.
        """
        self._on_row = on_row
        self._room = room
        self._slo_ms = (slo_ttft_ms, slo_tpot_ms, slo_e2el_ms)
        self._num_speculative_tokens = num_speculative_tokens
        self._live: dict[Request, _Facts] = {}
        """Requests under way."""
        self._ttft_ns = array("q")
        self._e2el_ns = array("q")
        self._tpot_ms = array("d")
        self._itl = IntervalHistogram()
        self._sampled = [0] * (num_speculative_tokens + 2)
        """Frames by number of tokens they sampled; grows where a frame has more drafts than that."""
        self.num_requests = 0
        self.num_finished = 0
        self.num_aborted = 0
        self.num_unfinished = 0
        self.num_good = 0
        """Finished within all limits of the service level."""
        self.num_steps = 0
        """Steps that came back."""
        self.num_request_steps = 0
        """Their frames."""
        self.num_preemptions = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_delivered_tokens = 0
        self.num_trimmed_tokens = 0
        self.num_stale_tokens_dropped = 0
        self.num_stale_tokens_delivered = 0
        self.num_ignored_tokens = 0
        """Sampled for requests that had ended by then."""
        self.recomputed_tokens = 0
        self.duration_ns = 0

    def arrived(self, now: int, request: Request) -> None:
        """Begin its facts. It counts as arrived when its workload says, which may be before the scheduler looks."""
        self.num_requests += 1
        spec = getattr(request, "spec", None)
        self._live[request] = _Facts(request, now if spec is None else spec.arrival_ns)

    def scheduled(self, now: int, batch: Batch) -> None:
        """Note preemptions, admissions and where chunks end."""
        live = self._live
        frames = batch.frames
        if batch.preempted:
            self.num_preemptions += len(batch.preempted)
            for request in batch.preempted:
                _end_stay(live[request])
        first_admitted = batch.num_running_frames
        for number in range(first_admitted, len(frames)):
            frame = frames[number]
            facts = live[frame.request]
            facts.stay_hit = frame.num_computed_tokens
            if not batch.resumed[number - first_admitted]:
                facts.first_scheduled_ns = now
                facts.prefix_hit_tokens = frame.num_computed_tokens
        for frame in frames if batch.num_chunk_frames else ():
            if not frame.samples:
                live[frame.request].chunk_end = frame.num_computed_tokens + frame.num_tokens

    def updated(self, now: int, returned: Returned) -> None:
        """Count what came back. The loop runs for every frame of the run."""
        batch = returned.batch
        frames = batch.frames
        counts = self._sampled
        live = self._live
        gap_of_many: i64 = -1
        many: i64 = 0
        verified = batch.num_draft_tokens > 0
        most: i64 = len(counts) - 1
        for frame in frames:
            num_drafts = frame.num_drafts
            num_sampled = frame.num_sampled
            if verified:
                if num_sampled > most:
                    counts.extend([0] * (num_sampled - most))
                    most = num_sampled
                counts[num_sampled] = counts[num_sampled] + 1
            if not frame.num_delivered:
                if frame.fate and num_sampled:
                    self._count_waste(frame.request, num_drafts, num_sampled, frame.fate)
                continue
            facts = live[frame.request]
            deliveries = facts.num_deliveries
            facts.num_deliveries = deliveries + 1
            if num_drafts:
                facts.num_draft_tokens += num_drafts
            else:
                facts.num_plain += 1
            gap = now - facts.last_ns
            facts.last_ns = now
            if deliveries == 0:
                facts.first_token_ns = now
                continue
            if gap > facts.itl_max_ns:
                facts.itl_max_ns = gap
            if gap != gap_of_many:
                if many:
                    self._itl.add(gap_of_many, many)
                gap_of_many = gap
                many = 0
            many += 1
        if many:
            self._itl.add(gap_of_many, many)
        num_draft_tokens = batch.num_draft_tokens
        self.num_steps += 1
        self.num_request_steps += len(frames)
        self.num_delivered_tokens += returned.num_delivered_tokens
        if num_draft_tokens:
            self.num_drafts += batch.num_drafting_frames
            self.num_draft_tokens += num_draft_tokens
            self.num_accepted_tokens += num_draft_tokens - returned.num_rejected_tokens
        if returned.num_stale_frames:
            for frame in frames:
                if frame.fate == STALE_DELIVERED:
                    self.num_stale_tokens_delivered += frame.num_delivered
        if returned.finished:
            for frame in frames:
                if frame.num_trimmed:
                    live[frame.request].num_trimmed_tokens += frame.num_trimmed
                    self.num_trimmed_tokens += frame.num_trimmed
            for request in returned.finished:
                self._finish(now, live.pop(request))

    def interrupted(self, now: int, interruption: Interruption) -> None:
        """Note who was preempted or aborted."""
        if interruption.kind != "abort":
            self.num_preemptions += len(interruption.requests)
            for request in interruption.requests:
                _end_stay(self._live[request])
            return
        for request in interruption.requests:
            self.num_aborted += 1
            self._hand_on(self._live.pop(request), "aborted", now, None, None)

    def closed(self, now: int) -> None:
        """The run is over: hand on the rows of those that have not ended, in order of arrival."""
        self.duration_ns = now
        for facts in self._live.values():
            self.num_unfinished += 1
            self._hand_on(facts, "unfinished", None, None, None)
        self._live.clear()

    def _count_waste(self, request: Request, num_drafts: int, num_sampled: int, fate: int) -> None:
        """Tokens of a frame of which nothing was delivered."""
        if fate != DISCARDED and num_drafts:
            self.num_drafts -= 1
            self.num_draft_tokens -= num_drafts
            self.num_accepted_tokens -= num_sampled - 1
            self._sampled[num_sampled] -= 1
        if fate == UNKNOWN:
            self.num_ignored_tokens += num_sampled
            return
        self.num_stale_tokens_dropped += num_sampled
        facts = self._live[request]
        facts.num_discarded_tokens += num_sampled
        if fate == DISCARDED and num_drafts:
            facts.num_discarded_drafts += 1
            facts.num_draft_tokens += num_drafts
            facts.num_discarded_accepted += num_sampled - 1

    def _finish(self, now: int, facts: _Facts) -> None:
        """The latencies of a request that has finished, and its row."""
        assert facts.first_token_ns is not None
        ttft_ns: int = facts.first_token_ns - facts.arrival_ns
        e2el_ns: int = now - facts.arrival_ns
        decoding_ns: int = facts.last_ns - facts.first_token_ns
        outputs: int = facts.request.num_output_tokens
        tpot_ms = decoding_ns / (outputs - 1) / 1e6 if outputs > 1 else None
        self.num_finished += 1
        self._ttft_ns.append(ttft_ns)
        self._e2el_ns.append(e2el_ns)
        if tpot_ms is not None:
            self._tpot_ms.append(tpot_ms)
        most_ttft_ms, most_tpot_ms, most_e2el_ms = self._slo_ms
        self.num_good += (
            (most_ttft_ms is None or ttft_ns / 1e6 <= most_ttft_ms)
            and (most_tpot_ms is None or (tpot_ms or 0.0) <= most_tpot_ms)
            and (most_e2el_ms is None or e2el_ns / 1e6 <= most_e2el_ms)
        )
        self._hand_on(facts, "finished", now, tpot_ms, e2el_ns / 1e6)

    def _hand_on(
        self, facts: _Facts, status: str, finish_ns: int | None, tpot_ms: float | None, e2el_ms: float | None
    ) -> None:
        """The row of a request whose facts are complete. Columns: `REQUEST_COLUMNS`."""
        _end_stay(facts)
        self.recomputed_tokens += facts.recomputed_tokens
        if self._on_row is None:
            return
        request = facts.request
        spec = getattr(request, "spec", None)
        in_conversation = spec is not None and spec.conversation >= 0
        arrival: int = facts.arrival_ns
        first = facts.first_token_ns
        last: int = facts.last_ns
        longest: int = facts.itl_max_ns
        gaps: int = facts.num_deliveries - 1
        delivered_accepted = request.num_output_tokens + facts.num_trimmed_tokens - facts.num_deliveries
        self._on_row(
            (
                request.index,
                request.id,
                status,
                spec.conversation if spec is not None and in_conversation else None,
                spec.turn if spec is not None and in_conversation else None,
                arrival,
                facts.first_scheduled_ns,
                first,
                finish_ns,
                request.num_prompt_tokens,
                request.num_output_tokens,
                None if first is None else (first - arrival) / 1e6,
                tpot_ms,
                e2el_ms,
                (last - first) / gaps / 1e6 if first is not None and gaps > 0 else None,
                longest / 1e6 if gaps > 0 else None,
                facts.num_deliveries,
                facts.prefix_hit_tokens,
                facts.recomputed_tokens,
                request.num_preemptions,
                facts.num_deliveries - facts.num_plain + facts.num_discarded_drafts,
                facts.num_draft_tokens,
                delivered_accepted + facts.num_discarded_accepted,
                facts.num_discarded_tokens,
                facts.num_trimmed_tokens,
                *((None, None, None) if self._room is None else self._room(request.index)),
            )
        )

    # The summary

    def accepted_per_pos(self) -> list[int]:
        """Entry i: drafts at position i that were accepted; one entry a draft of K."""
        counts = self._sampled
        return [sum(counts[position + 2 :]) for position in range(self._num_speculative_tokens)]

    def figures(self) -> dict[str, Any]:
        """The summary's figures that follow from requests and frames; None where there is nothing to take one of.

        Times ending in `_s` are seconds, `_ms` milliseconds, throughputs are a second of simulated time.
        """
        seconds = self.duration_ns / 1e9
        has_slo = any(limit is not None for limit in self._slo_ms)
        return {
            "num_requests": self.num_requests,
            "num_finished": self.num_finished,
            "num_aborted": self.num_aborted,
            "num_unfinished": self.num_unfinished,
            "num_steps": self.num_steps,
            "num_request_steps": self.num_request_steps,
            "duration_s": seconds,
            "request_throughput": self.num_finished / seconds if seconds else None,
            "output_throughput": self.num_delivered_tokens / seconds if seconds else None,
            "request_goodput": self.num_good / seconds if seconds and has_slo else None,
            "ttft_ms": _statistics(np.frombuffer(self._ttft_ns, dtype=np.int64), 1e6),
            "tpot_ms": _statistics(np.frombuffer(self._tpot_ms, dtype=np.float64), 1.0),
            "itl_ms": self._itl_statistics(),
            "e2el_ms": _statistics(np.frombuffer(self._e2el_ns, dtype=np.int64), 1e6),
            "num_output_tokens": self.num_delivered_tokens,
            "num_preemptions": self.num_preemptions,
            "recomputed_tokens": self.recomputed_tokens,
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "accepted_per_pos": self.accepted_per_pos(),
            "mean_acceptance_length": 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None,
            "num_trimmed_tokens": self.num_trimmed_tokens,
            "num_ignored_tokens": self.num_ignored_tokens,
            "num_stale_tokens_dropped": self.num_stale_tokens_dropped,
            "num_stale_tokens_delivered": self.num_stale_tokens_delivered,
        }

    def _itl_statistics(self) -> dict[str, float | None]:
        if not self._itl.count:
            return dict.fromkeys(_STATISTICS)
        median, p90, p99 = self._itl.percentiles_ns([50, 90, 99])
        return {"mean": self._itl.mean_ns() / 1e6, "median": median / 1e6, "p90": p90 / 1e6, "p99": p99 / 1e6}


_STATISTICS: Final = ("mean", "median", "p90", "p99")


def _statistics(values: np.ndarray[Any, Any], unit: float) -> dict[str, float | None]:
    """Mean, median, p90 and p99 of the values, over the unit; linear between ranks."""
    if not len(values):
        return dict.fromkeys(_STATISTICS)
    mean = float(values.sum()) / len(values)
    return dict(zip(_STATISTICS, (float(x) / unit for x in (mean, *np.percentile(values, [50, 90, 99]))), strict=True))


def _end_stay(facts: _Facts) -> None:
    """A request leaves the running ones, or ends: of what it had computed before, what has it computed again?

    Counted up to the tokens that were confirmed, or to the end of the latest chunk if it left before the whole was
    computed again.
    """
    if facts.stay_hit is None:
        return
    request = facts.request
    if request.is_prefill_chunk:
        reached = facts.chunk_end
    elif request.num_in_flight_tokens:
        reached = request.num_tokens
    else:
        reached = request.num_tokens - 1  # The KV of the last token is written by the frame that reads it.
    facts.recomputed_tokens += max(min(facts.computed_before, reached) - facts.stay_hit, 0)
    facts.computed_before = max(facts.computed_before, reached)
    facts.stay_hit = None
