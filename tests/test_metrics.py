"""Metrics on sequences of records small enough to be reckoned by hand."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.core.request import Request
from sim.device import SimulatedRequest
from sim.observers.metrics import REQUEST_COLUMNS, IntervalHistogram, Metrics, RequestRow
from sim.records import (
    DISCARDED,
    FRESH,
    STALE_DELIVERED,
    STALE_DROPPED,
    UNKNOWN,
    Batch,
    Interruption,
    Returned,
)
from tests.by_hand import a_frame
from workloads.spec import RequestSpec

MS = 1_000_000


class Blank:
    """Content that nobody asks for."""

    def block_hash(self, parent: int, index: int) -> int:
        raise AssertionError("metrics know no blocks")


def request(index: int = 0, prompt: int = 8, max_tokens: int = 4) -> Request:
    return Request(f"r{index}", index, prompt, max_tokens, Blank())


def batch(*frames: tuple[Request, int, int, int, bool], admitted: tuple[bool, ...] = ()) -> Batch:
    """Frames are (request, computed, tokens, of them drafts, samples); the last ones admitted: resumed or not."""
    made = Batch(0, 0, 1000)
    for who, computed, tokens, drafts, samples in frames:
        made.frames.append(a_frame(who, tokens, drafts, computed, samples))
        who.is_prefill_chunk = not samples
    made.num_running_frames = len(frames) - len(admitted)
    made.resumed = list(admitted)
    made.total_tokens = sum(made.tokens)
    made.num_draft_tokens = sum(made.drafts)
    made.num_chunk_frames = made.samples.count(False)
    made.num_drafting_frames = len(made.drafts) - made.drafts.count(0)
    return made


def returned(
    of: Batch,
    sampled: list[int],
    fates: list[int] | None = None,
    delivered: list[int] | None = None,
    finished: tuple[Request, ...] = (),
) -> Returned:
    made = Returned(of)
    of.settle(sampled)
    columns = zip(of.frames, fates or [FRESH] * len(sampled), sampled if delivered is None else delivered, strict=True)
    for frame, fate, kept in columns:
        frame.fate = fate
        frame.num_delivered = kept
        frame.num_trimmed = frame.num_sampled - kept if fate in (FRESH, STALE_DELIVERED) else 0
        frame.request.num_tokens += kept
    made.num_stale_frames = sum(map(bool, made.fates))
    made.finished = list(finished)
    made.num_delivered_tokens = sum(made.delivered)
    made.num_rejected_tokens = sum(made.rejected)
    return made


def named(row: RequestRow) -> dict[str, Any]:
    return {name: value for (name, _), value in zip(REQUEST_COLUMNS, row, strict=True)}


def test_the_worked_example() -> None:
    rows: list[RequestRow] = []
    metrics = Metrics(rows.append, num_speculative_tokens=2, slo_ttft_ms=10, slo_tpot_ms=3)
    one = request()
    metrics.arrived(0, one)
    prefill = batch((one, 0, 8, 0, True), admitted=(False,))
    metrics.scheduled(1 * MS, prefill)
    metrics.updated(10 * MS, returned(prefill, [1]))
    first = batch((one, 8, 3, 2, True))
    metrics.scheduled(11 * MS, first)
    metrics.updated(16 * MS, returned(first, [2]))
    second = batch((one, 10, 3, 2, True))
    metrics.scheduled(17 * MS, second)
    metrics.updated(20 * MS, returned(second, [3], delivered=[1], finished=(one,)))
    metrics.closed(20 * MS)

    assert named(rows[0]) == {
        "request": 0,
        "id": "r0",
        "status": "finished",
        "conversation": None,
        "turn": None,
        "arrival_ns": 0,
        "first_scheduled_ns": 1 * MS,
        "first_token_ns": 10 * MS,
        "finish_ns": 20 * MS,
        "num_prompt_tokens": 8,
        "num_output_tokens": 4,
        "ttft_ms": 10.0,
        "tpot_ms": pytest.approx(10 / 3),
        "e2el_ms": 20.0,
        "itl_mean_ms": 5.0,
        "itl_max_ms": 6.0,
        "num_deliveries": 3,
        "prefix_hit_tokens": 0,
        "recomputed_tokens": 0,
        "num_preemptions": 0,
        "num_drafts": 2,
        "num_draft_tokens": 4,
        "num_accepted_tokens": 3,
        "num_discarded_tokens": 0,
        "num_trimmed_tokens": 2,
        "placeholder_slot_s": None,
        "garbage_slot_s": None,
        "held_block_s": None,
    }
    figures = metrics.figures()
    assert (figures["num_steps"], figures["num_request_steps"]) == (3, 3)
    assert (figures["num_drafts"], figures["num_draft_tokens"], figures["num_accepted_tokens"]) == (2, 4, 3)
    assert figures["accepted_per_pos"] == [2, 1]
    assert figures["mean_acceptance_length"] == 2.5
    assert figures["duration_s"] == 0.02
    assert figures["request_throughput"] == pytest.approx(50)
    assert figures["output_throughput"] == pytest.approx(200)
    assert figures["request_goodput"] == 0  # TPOT is over its limit of 3 ms.
    assert figures["itl_ms"]["mean"] == 5.0
    assert figures["itl_ms"]["median"] == pytest.approx(5.0, rel=1e-3)
    assert figures["ttft_ms"] == {"mean": 10.0, "median": 10.0, "p90": 10.0, "p99": 10.0}


def test_nothing_at_all_has_no_means() -> None:
    metrics = Metrics()
    metrics.closed(0)
    figures = metrics.figures()
    assert figures["mean_acceptance_length"] is None
    assert figures["request_throughput"] is None
    assert figures["request_goodput"] is None
    assert figures["accepted_per_pos"] == []
    assert figures["ttft_ms"] == figures["itl_ms"] == {"mean": None, "median": None, "p90": None, "p99": None}


def test_percentiles_are_linear_between_ranks() -> None:
    metrics = Metrics()
    for index, ttft_ms in enumerate([40, 10, 30, 20]):
        one = request(index, max_tokens=1)
        metrics.arrived(0, one)
        prefill = batch((one, 0, 8, 0, True), admitted=(False,))
        metrics.scheduled(0, prefill)
        metrics.updated(ttft_ms * MS, returned(prefill, [1], finished=(one,)))
    metrics.closed(100 * MS)
    # Ranks 0 to 3: the median at 1.5, p90 at 2.7, p99 at 2.97.
    assert metrics.figures()["ttft_ms"] == pytest.approx({"mean": 25, "median": 25, "p90": 37, "p99": 39.7})
    assert metrics.figures()["tpot_ms"]["mean"] is None  # One output has no time between tokens.


def test_a_request_counts_from_when_its_workload_sent_it() -> None:
    rows: list[RequestRow] = []
    metrics = Metrics(rows.append)

    one = SimulatedRequest(RequestSpec(0, 2 * MS, ((1, 0, 8),), 8, 1, conversation=7, turn=1), Blank())
    metrics.arrived(3 * MS, one)
    prefill = batch((one, 4, 4, 0, True), admitted=(False,))
    metrics.scheduled(4 * MS, prefill)
    metrics.updated(9 * MS, returned(prefill, [1], finished=(one,)))
    row = named(rows[0])
    assert (row["arrival_ns"], row["ttft_ms"], row["e2el_ms"]) == (2 * MS, 7.0, 7.0)
    assert (row["conversation"], row["turn"], row["prefix_hit_tokens"]) == (7, 1, 4)
    assert (row["tpot_ms"], row["itl_mean_ms"], row["itl_max_ms"]) == (None, None, None)


def test_what_is_computed_again_after_preemptions() -> None:
    """Prompt 8. Two outputs, so 9 tokens have KV. Preempted; 4 hit, 3 again. Preempted; nothing hit: all 9 again."""
    rows: list[RequestRow] = []
    metrics = Metrics(rows.append)
    one = request(max_tokens=3)
    metrics.arrived(0, one)
    for computed, tokens, admitted in ((0, 8, (False,)), (8, 1, ())):
        step = batch((one, computed, tokens, 0, True), admitted=admitted)
        metrics.scheduled(0, step)
        metrics.updated(0, returned(step, [1]))

    def preempt() -> None:
        one.num_preemptions += 1
        lost = batch()
        lost.preempted = [one]
        metrics.scheduled(0, lost)

    preempt()
    chunk = batch((one, 4, 3, 0, False), admitted=(True,))
    metrics.scheduled(0, chunk)
    metrics.updated(0, returned(chunk, [0]))
    preempt()
    whole = batch((one, 0, 10, 0, True), admitted=(True,))
    metrics.scheduled(0, whole)
    metrics.updated(5, returned(whole, [1], finished=(one,)))
    row = named(rows[0])
    assert row["recomputed_tokens"] == 3 + 9
    assert (row["num_preemptions"], row["prefix_hit_tokens"]) == (2, 0)
    assert metrics.figures()["num_preemptions"] == 2
    assert metrics.figures()["recomputed_tokens"] == 12


def test_fates_of_frames_as_vllm_counts_them() -> None:
    """Five verifications of 2 drafts, 2 accepted each but for the last; only three of them are counted."""
    rows: list[RequestRow] = []
    metrics = Metrics(rows.append, num_speculative_tokens=2)
    everyone = [request(index, max_tokens=100) for index in range(5)]
    for who in everyone:
        metrics.arrived(0, who)
    gone = everyone[3]
    metrics.interrupted(1, Interruption("abort", [gone], [], True))
    step = batch(*((who, 8, 3, 2, True) for who in everyone))
    fates = [STALE_DELIVERED, STALE_DROPPED, DISCARDED, UNKNOWN, FRESH]
    metrics.updated(2, returned(step, [3, 3, 3, 3, 1], fates, delivered=[3, 0, 0, 0, 1]))
    metrics.closed(3)
    figures = metrics.figures()
    assert (figures["num_drafts"], figures["num_draft_tokens"], figures["num_accepted_tokens"]) == (3, 6, 4)
    assert figures["accepted_per_pos"] == [2, 2]
    assert figures["num_stale_tokens_delivered"] == 3
    assert figures["num_stale_tokens_dropped"] == 6
    assert figures["num_ignored_tokens"] == 3
    # Law 5: what was sampled is delivered, trimmed or thrown away.
    assert 3 + 3 + 3 + 3 + 1 == 4 + figures["num_trimmed_tokens"] + 6 + 3
    by_request = {row[0]: named(row) for row in rows}
    assert [by_request[i]["status"] for i in range(5)] == ["unfinished"] * 3 + ["aborted", "unfinished"]
    assert [by_request[i]["num_drafts"] for i in range(5)] == [1, 0, 1, 0, 1]
    assert [by_request[i]["num_accepted_tokens"] for i in range(5)] == [2, 0, 2, 0, 0]
    assert [by_request[i]["num_discarded_tokens"] for i in range(5)] == [0, 3, 3, 0, 0]
    assert by_request[3]["finish_ns"] == 1
    assert by_request[0]["finish_ns"] is None
    assert by_request[0]["e2el_ms"] is None


def test_a_reset_preempts() -> None:
    metrics = Metrics()
    one = request()
    metrics.arrived(0, one)
    step = batch((one, 0, 8, 0, True), admitted=(False,))
    metrics.scheduled(0, step)
    metrics.interrupted(1, Interruption("reset_prefix_cache", [one], [], True))
    assert metrics.figures()["num_preemptions"] == 1


@given(st.lists(st.tuples(st.integers(0, 2**55), st.integers(1, 5)), min_size=1, max_size=60))
def test_the_histogram_is_as_fine_as_it_says(durations: list[tuple[int, int]]) -> None:
    histogram = IntervalHistogram()
    for duration, count in durations:
        histogram.add(duration, count)
    every = np.repeat([d for d, _ in durations], [n for _, n in durations]).astype(np.float64)
    assert histogram.mean_ns() == pytest.approx(every.mean(), rel=1e-12)
    asked = [0.0, 37.5, 50.0, 90.0, 99.0, 100.0]
    assert histogram.percentiles_ns(asked) == pytest.approx(np.percentile(every, asked).tolist(), rel=1 / 2048 + 1e-9)


def test_the_histogram_is_exact_for_short_durations_and_bounded_for_all() -> None:
    histogram = IntervalHistogram()
    for duration in range(2048):
        histogram.add(duration, 1)
    assert histogram.percentiles_ns([50.0]) == [1023.5]
    for exponent in range(11, 63):
        for step in range(2048):
            histogram.add((1 << exponent) + (step << exponent - 11), 1)
    assert len(histogram._bins) == 2048 + 52 * 1024
