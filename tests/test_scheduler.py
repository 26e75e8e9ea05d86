"""The scheduler's decisions by hand: exact tokens, drafts, blocks and counters, turn by turn.

In the tables N = num_tokens, C = num_computed_tokens, ph = num_output_placeholders; blocks hold 4 tokens where nothing
else is said. Rules: vLLM 0.32, and what its earlier releases do otherwise.
"""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.crash import EngineCrash
from sim.core.draft_length import draft_length_table
from sim.core.request import PREEMPTED, RUNNING, Request
from sim.policies.stale_output import DrainedInTokens
from sim.records import DISCARDED, FRESH, STALE_DELIVERED, STALE_DROPPED, UNKNOWN
from tests.by_hand import VLLM_PRESETS, Tokens, Turns


def counters(request: Request) -> tuple[int, int, int]:
    """N, C, ph."""
    return request.num_tokens, request.num_computed_tokens, request.num_output_placeholders


def ids(requests: Any) -> list[str]:
    return [request.id for request in requests]


# Budgets


def test_chunked_prefill_under_the_token_budget() -> None:
    """Budget 8, prompts of 10 and 6: 8 of r0; its last 2 and all 6 of r1; then a token each."""
    turns = Turns(max_num_batched_tokens=8)
    first, second = turns.add(10), turns.add(6)
    assert turns.schedule() == {"r0": (8, 0)}
    assert turns.batch.samples == [False]
    assert first.is_prefill_chunk
    assert turns.update().delivered == [0]
    assert turns.schedule() == {"r0": (2, 0), "r1": (6, 0)}
    assert turns.batch.samples == [True, True]
    assert turns.batch.num_running_frames == 1
    assert turns.update().delivered == [1, 1]
    assert (counters(first), counters(second)) == ((11, 10, 0), (7, 6, 0))
    assert turns.step() == {"r0": (1, 0), "r1": (1, 0)}


def test_the_token_budget_binds_before_the_input_budget() -> None:
    """6 tokens to schedule, 8 of input, a draft model (1 draft slot a request) with K = 2, all rejected.

    | turn | r0 | tokens, input left | r1 | tokens, input left |
    | 0 | min(10, 6, 8 - 1) = 6 | 0, 1 | - | |
    | 1 | 4 | 2, 3 | min(6, 2, 3 - 1) = 2 | 0, 0 |
    | 2 | 1 + 2 = 3 | 3, 4 | min(4, 3, 4 - 1) = 3 | 0, 0 |
    | 3 | 3 | 3, 4 | min(1, 3, 3) = 1, the end of its prompt | 2, 2 |
    """
    turns = Turns(method="draft_model", k=2, max_num_batched_tokens=8, max_num_scheduled_tokens=6)
    turns.add(10)
    turns.add(6)
    assert turns.step() == {"r0": (6, 0)}
    assert turns.step() == {"r0": (4, 0), "r1": (2, 0)}
    assert turns.step() == {"r0": (3, 2), "r1": (3, 0)}
    assert turns.step() == {"r0": (3, 2), "r1": (1, 0)}
    assert turns.step() == {"r0": (3, 2), "r1": (3, 2)}


def test_the_input_budget_binds_before_the_token_budget() -> None:
    """8 of each, K = 2 with a draft model. r2 waits as long as 1 or less of the input is left.

    | turn | r0 | tokens, input left | r1 | tokens, input left |
    | 0 | min(10, 8, 8 - 1) = 7 | 1, 0 | - | |
    | 1 | 3 | 5, 4 | min(6, 5, 4 - 1) = 3 | 2, 0 |
    | 2 | 1 + 2 | 5, 4 | 3 | 2, 0 |
    | 3 | 1 + 2 | 5, 4 | min(1 + 2, 5, 4 - 1) = 3 | 2, 0 |
    """
    turns = Turns(method="draft_model", k=2, max_num_batched_tokens=8)
    for prompt in (10, 6, 1):
        turns.add(prompt)
    assert turns.step() == {"r0": (7, 0)}
    assert turns.step() == {"r0": (3, 0), "r1": (3, 0)}
    assert turns.step() == {"r0": (3, 2), "r1": (3, 0)}
    assert turns.step() == {"r0": (3, 2), "r1": (3, 2)}
    assert ids(turns.scheduler.waiting) == ["r2"]


def test_a_budget_cuts_the_drafts_of_a_frame() -> None:
    """K = 5 and a budget of 4: 1 + 3 of the 5 drafts fit."""
    turns = Turns(method="ngram", k=5, max_num_batched_tokens=4)
    turns.add(4)
    assert turns.step() == {"r0": (4, 0)}
    assert turns.step() == {"r0": (4, 3)}


@pytest.mark.parametrize(("preset", "expected"), [("vllm-0.32", 23), ("vllm-0.28", 23), ("vllm-0.26", 16)])
def test_draft_slots_by_version(preset: str, expected: int) -> None:
    """A draft model, 24 tokens, 8 requests at most. Per request since 0.28: 24 - 1. Before, the configuration takes
    1 * 8 off what may be scheduled: 16."""
    turns = Turns(preset, "draft_model", 2, max_num_batched_tokens=24, max_num_seqs=8)
    turns.add(30)
    assert turns.step() == {"r0": (expected, 0)}


@pytest.mark.parametrize("preset", VLLM_PRESETS)
def test_long_prefill_threshold(preset: str) -> None:
    """A threshold of 4 holds for two; for one alone it does not in 0.32."""
    alone = Turns(preset, long_prefill_token_threshold=4)
    alone.add(10)
    assert alone.step() == {"r0": (10 if preset == "vllm-0.32" else 4, 0)}

    both = Turns(preset, long_prefill_token_threshold=4)
    both.add(10)
    both.add(3)
    assert both.step() == {"r0": (4, 0), "r1": (3, 0)}
    assert both.step() == {"r0": (4, 0), "r1": (1, 0)}
    both.scheduler.abort("r1")
    assert both.step() == {"r0": (2, 0)}


def test_the_exemption_counts_who_waits_too() -> None:
    """r0 runs and r1 waits (one request at most): that is two, so r0's chunk is cut."""
    turns = Turns(long_prefill_token_threshold=4, max_num_seqs=1)
    turns.add(10)
    turns.add(3)
    assert turns.step() == {"r0": (4, 0)}
    assert turns.step() == {"r0": (4, 0)}
    turns.scheduler.abort("r1")
    assert turns.step() == {"r0": (2, 0)}


def test_max_num_seqs_and_no_overtaking() -> None:
    turns = Turns(max_num_seqs=2, num_gpu_blocks=11)
    turns.add(4)
    turns.add(80)  # more blocks than are left
    turns.add(4)
    assert turns.step() == {"r0": (4, 0)}
    assert ids(turns.scheduler.waiting) == ["r1", "r2"]
    turns.scheduler.abort("r1")
    turns.add(4)
    assert turns.step() == {"r0": (1, 0), "r2": (4, 0)}
    assert ids(turns.scheduler.waiting) == ["r3"]


def test_the_model_length_caps_a_frame_and_ends_a_request() -> None:
    """Length 12, prompt 10, K = 3: after the prefill N = 11, C = 10; a frame has 12 - 10 - 1 = 1 token and no drafts;
    its output makes 12, and that is the end, though max_tokens is 100."""
    turns = Turns(method="ngram", k=3, max_model_len=12)
    request = turns.add(10)
    assert turns.step() == {"r0": (10, 0)}
    assert turns.schedule() == {"r0": (1, 0)}
    returned = turns.update()
    assert ids(returned.finished) == ["r0"]
    assert request.num_output_tokens == 2


# Speculation: rejection, delivery, stop


def test_the_article_s_counters_in_sync_mode() -> None:
    """Prompt 1018, blocks of 16, K = 5 with EAGLE-3. C goes 1018, 1024, 1021; the blocks stay."""
    turns = Turns(method="eagle3", k=5, block_size=16, max_num_batched_tokens=2000)
    request = turns.add(1018)
    turns.step()
    assert counters(request) == (1019, 1018, 0)
    assert turns.schedule() == {"r0": (6, 5)}
    assert counters(request) == (1019, 1024, 0)
    assert len(request.block_table) == 65  # 1018 + 6 + 5 lookahead = 1029 slots
    returned = turns.update(r0=2)
    assert (returned.rejected, returned.delivered) == ([3], [3])
    assert counters(request) == (1022, 1021, 0)
    assert len(request.block_table) == 65


def test_the_article_s_counters_in_async_mode() -> None:
    """Prompt 1012. Turn 2 schedules 1018 to 1024 with turn 1's frame in flight; that returns with 2 of 5 drafts: 1021.

    | turn | after schedule N C ph | returns | after update N C ph |
    | 0 | 1012 1012 1 | | |
    | 1 | 1012 1018 7 | prefill: 1 token | 1013 1018 6 |
    | 2 | 1013 1024 12 | 2 accepted, 3 rejected | 1016 1021 6 |
    """
    turns = Turns(method="eagle3", k=5, block_size=16, max_num_batched_tokens=2000, async_scheduling=True)
    request = turns.add(1012)
    turns.schedule()
    assert counters(request) == (1012, 1012, 1)
    assert turns.schedule() == {"r0": (6, 5)}
    assert counters(request) == (1012, 1018, 7)
    turns.update()
    assert counters(request) == (1013, 1018, 6)
    assert turns.schedule() == {"r0": (6, 5)}
    assert counters(request) == (1013, 1024, 12)
    assert request.num_in_flight_tokens == 12
    turns.update(r0=2)
    assert counters(request) == (1016, 1021, 6)
    assert request.num_in_flight_tokens == 6


def test_a_rejection_frees_nothing() -> None:
    """Blocks of 2, a prompt of 3, K = 2, all rejected. The frame writes positions 3 (the last confirmed token), 4 and
    5; block 3 (positions 4, 5) only held drafts and is kept."""
    turns = Turns(method="ngram", k=2, block_size=2)
    request = turns.add(3)
    turns.step()
    assert request.block_table == [1, 2]
    assert turns.schedule() == {"r0": (3, 2)}
    assert request.block_table == [1, 2, 3]
    returned = turns.update()
    assert returned.rejected == [2]
    assert counters(request) == (5, 4, 0)
    assert request.block_table == [1, 2, 3]
    assert returned.block_operations == []
    assert turns.schedule() == {"r0": (3, 2)}
    assert request.block_table == [1, 2, 3, 4]  # up to 4 + 3 = 7 slots


def test_what_lies_beyond_the_end_is_trimmed() -> None:
    """max_tokens 3: one output by the prefill, then 2 drafts accepted make 3, of which 1 is too many."""
    turns = Turns(method="ngram", k=5)
    request = turns.add(4, max_tokens=3)
    turns.step()
    turns.schedule()
    returned = turns.update(r0=2)
    assert (returned.sampled, returned.delivered, returned.trimmed, returned.rejected) == ([3], [2], [1], [3])
    assert request.num_output_tokens == 3
    assert ids(returned.finished) == ["r0"]
    assert turns.scheduler.running == []
    assert turns.scheduler.pool.num_free == 100


def test_drafts_are_not_proposed_for_a_chunk() -> None:
    """Sync: a request that is a prefill chunk gets none, the step after its prefill has K."""
    turns = Turns(method="ngram", k=3, max_num_batched_tokens=6)
    turns.add(10)
    assert turns.step() == {"r0": (6, 0)}
    assert turns.step() == {"r0": (4, 0)}
    assert turns.step() == {"r0": (4, 3)}


def test_accepted_output_joins_the_hash_chain() -> None:
    """Blocks of 4, prompt of 6. r0's outputs at positions 6 and 7 fill block 2; once both are confirmed and another
    frame is scheduled it is hashed, and a prompt that repeats them hits 8 tokens."""
    turns = Turns(method="ngram", k=3)
    turns.add(range(6))
    turns.step()  # N = 7
    turns.step(r0=3)  # computes 6 to 9; N = 11
    turns.step()
    again = turns.add([*range(6), *(1_000_000 + position for position in (6, 7)), 5])
    turns.schedule()
    assert turns.batch.hits == 8
    assert again.block_table[:2] == [1, 2]


# Guard at the end of generation


def test_no_frame_beyond_what_is_sure_to_finish() -> None:
    """Async, no drafts, prompt 4, max_tokens 2: two frames are enough. In turn 2, ph > 0 and C + 2 - ph = 5 + 2 - 1 =
    6 = 4 + 2, so r0 is skipped."""
    turns = Turns(async_scheduling=True)
    request = turns.add(4, max_tokens=2)
    assert turns.schedule() == {"r0": (4, 0)}
    assert turns.schedule() == {"r0": (1, 0)}
    turns.update()
    assert counters(request) == (5, 5, 1)
    assert turns.schedule() == {}
    assert ids(turns.update().finished) == ["r0"]


def test_the_guard_with_drafts() -> None:
    """Async, K = 2, prompt 4, max_tokens 3, all rejected; 4 + 3 = 7.

    | turn | C + 2 - ph | n | after schedule N C ph | after update N C ph |
    | 0 | - | 4 | 4 4 1 | |
    | 1 | 5 | 3 | 4 7 4 | 5 7 3 |
    | 2 | 6 | 3 | 5 10 6 | 6 8 3 |
    | 3 | 7: skipped | - | 6 8 3 | finished |
    """
    turns = Turns(method="ngram_gpu", k=2, async_scheduling=True)
    request = turns.add(4, max_tokens=3)
    turns.schedule()
    assert counters(request) == (4, 4, 1)
    assert turns.schedule() == {"r0": (3, 2)}
    assert counters(request) == (4, 7, 4)
    turns.update()
    assert counters(request) == (5, 7, 3)
    assert turns.schedule() == {"r0": (3, 2)}
    assert counters(request) == (5, 10, 6)
    turns.update()
    assert counters(request) == (6, 8, 3)
    assert turns.schedule() == {}
    assert ids(turns.update().finished) == ["r0"]


def test_a_frame_behind_the_end_is_ignored() -> None:
    """As above, but turn 1's frame has both drafts accepted: 3 outputs are there with turn 2's frame in flight."""
    turns = Turns(method="ngram_gpu", k=2, async_scheduling=True)
    request = turns.add(4, max_tokens=3)
    turns.schedule()
    turns.schedule()
    turns.update()
    turns.schedule()
    returned = turns.update(r0=2)
    assert (returned.delivered, returned.trimmed) == ([2], [1])
    assert ids(returned.finished) == ["r0"]
    assert turns.scheduler.pool.num_free == 100  # at once, with a frame in flight
    assert turns.scheduler.has_requests()  # the workers are still to be told
    assert turns.schedule() == {}
    assert not turns.scheduler.has_requests()
    late = turns.update(r0=2)
    assert (late.fates, late.delivered, late.finished) == ([UNKNOWN], [0], [])
    assert request.num_output_tokens == 3


# Preemption


def test_fcfs_the_last_is_the_request_itself() -> None:
    """4 blocks. r0 has 7 tokens, r1 has 8, two blocks each.

    | turn | r0 | r1 | free queue after |
    | 0 | 7 of 1 2 | 8 of 3 4 | - |
    | 1 | slot 8 is there | slot 9 is not: it is the last, and goes | 4 3 (both hashed, walked backwards) |
    | 2 | slot 9: takes 4 | 9 tokens, 4 of them hit (3): 2 + 1 blocks, 1 is free | 3 |
    | | its third output: ends, walk 4 2 1 | | 4 3 2 1 |
    | 3 | | hits 3, takes 4 and 2 | 1 |
    """
    turns = Turns(num_gpu_blocks=5)
    first, second = turns.add(7, max_tokens=3), turns.add(8)
    assert turns.step() == {"r0": (7, 0), "r1": (8, 0)}
    assert (first.block_table, second.block_table) == ([1, 2], [3, 4])

    assert turns.schedule() == {"r0": (1, 0)}
    assert turns.preempted() == ["r1"]
    assert (second.status, counters(second), second.num_preemptions) == (PREEMPTED, (9, 0, 0), 1)
    assert ids(turns.scheduler.waiting) == ["r1"]
    pool = turns.scheduler.pool
    assert pool.free_queue() == [4, 3]
    turns.update()

    assert turns.schedule() == {"r0": (1, 0)}
    assert turns.preempted() == []
    assert pool.free_queue() == [3]
    assert ids(turns.update().finished) == ["r0"]
    assert pool.free_queue() == [4, 3, 2, 1]

    assert turns.schedule() == {"r1": (5, 0)}
    assert (turns.batch.computed, turns.batch.resumed, turns.batch.hits) == ([4], [True], 4)
    assert second.block_table == [3, 4, 2]
    assert second.status == RUNNING
    assert turns.scheduler.num_preemptions == 1
    assert turns.scheduler.prefix_cache_queries == 15  # first admissions only


def test_fcfs_the_last_makes_room_and_nobody_is_admitted_in_that_step() -> None:
    """4 blocks. r0's ninth slot costs r1 its two blocks. r2 would fit into the one that is left, but waits."""
    turns = Turns(num_gpu_blocks=5)
    turns.add(8)
    turns.add(7)
    turns.step()
    turns.add(3)
    assert turns.schedule() == {"r0": (1, 0)}
    assert turns.preempted() == ["r1"]
    assert turns.scheduler.pool.num_free == 1
    assert ids(turns.scheduler.waiting) == ["r1", "r2"]


def test_fcfs_several_go_and_come_back_in_order() -> None:
    """4 blocks, K = 5: r0 (8 tokens) wants 8 + 6 = 14 slots, two blocks more; r2 goes, then r1. r3 waits behind
    them."""
    turns = Turns(method="ngram", k=5, num_gpu_blocks=5)
    for prompt in (8, 4, 4, 4):
        turns.add(prompt)
    assert list(turns.step()) == ["r0", "r1", "r2"]
    assert turns.schedule() == {"r0": (6, 5)}
    assert turns.preempted() == ["r2", "r1"]
    assert ids(turns.scheduler.waiting) == ["r1", "r2", "r3"]


def test_priority_a_scheduled_victim_gives_its_budget_back() -> None:
    """Blocks of 8, 4 of them; budget 13; K = 3, all rejected. r0 is worst (9), then r2 (1), r1 is best (0).

    | turn | r0 | r1 | r2 | blocks held |
    | 0 | 8 | | | 1 |
    | 1 | 1 + 3 | 8 | 13 - 4 - 8 = 1 of 8 | 2 + 1 + 1 |
    | 2 | 1 + 3, then out | 1 + 3: slot 9 to 12, none free | 7 | 2 + 1 |

    With r0's 4 back, 13 - 4 = 9 are left for r2's 7; without them there would be 5.
    """
    turns = Turns(method="ngram", k=3, block_size=8, num_gpu_blocks=5, max_num_batched_tokens=13, priority=True)
    worst = turns.add(8, priority=9)
    assert turns.step() == {"r0": (8, 0)}
    turns.add(8, priority=0)
    turns.add(8, priority=1)
    assert turns.step() == {"r0": (4, 3), "r1": (8, 0), "r2": (1, 0)}
    assert turns.scheduler.pool.num_free == 0
    assert turns.schedule() == {"r1": (4, 3), "r2": (7, 0)}
    assert turns.preempted() == ["r0"]
    assert worst.num_in_flight_tokens == 0
    assert (turns.batch.total_tokens, turns.batch.num_running_frames) == (11, 2)
    assert ids(turns.scheduler.running) == ["r1", "r2"]


def test_priority_the_first_in_the_list_goes_on_a_tie() -> None:
    turns = Turns(num_gpu_blocks=4, priority=True)
    turns.add(4, priority=0, arrival=0)
    turns.add(4, priority=1, arrival=5)
    turns.add(3, priority=1, arrival=5)
    assert list(turns.step()) == ["r0", "r1", "r2"]
    turns.schedule()
    assert turns.preempted() == ["r1"]


def test_priority_a_later_arrival_goes_first() -> None:
    turns = Turns(num_gpu_blocks=4, priority=True)
    turns.add(4, priority=0, arrival=0)
    turns.add(4, priority=1, arrival=7)
    turns.add(3, priority=1, arrival=5)
    assert list(turns.step()) == ["r0", "r2", "r1"]
    turns.schedule()
    assert turns.preempted() == ["r1"]


def test_priority_waiting_is_by_priority_arrival_and_id_as_a_string() -> None:
    turns = Turns(priority=True)
    for number in range(11):
        turns.add(4, priority=0, arrival=5 if number != 7 else 4)
    turns.add(4, priority=-1, arrival=9)
    expected = ["r11", "r7", "r0", "r1", "r10", "r2", "r3", "r4", "r5", "r6", "r8", "r9"]
    assert ids(turns.scheduler.waiting) == expected
    assert list(turns.schedule()) == expected


# Watermark and admission


@pytest.mark.parametrize(("watermark", "expected"), [(0.0, ["r0", "r1"]), (0.25, ["r0"])])
def test_the_watermark_holds_once_somebody_is_admitted(watermark: float, expected: list[str]) -> None:
    """7 usable blocks of 8, watermark int(0.25 * 8) = 2. r0 (4 blocks) is alone and exempt; r1 (3 blocks) is admitted
    in the same step, so somebody runs: 3 + 2 > 3."""
    turns = Turns(num_gpu_blocks=8, watermark=watermark)
    turns.add(16)
    turns.add(12)
    assert list(turns.schedule()) == expected


# Padding to 1 + K


def padded(preset: str, **changes: Any) -> Turns:
    return Turns(preset, method="ngram", k=3, **changes)


SINCE_030 = ("vllm-0.32", "vllm-0.30")
SINCE_026 = (*SINCE_030, "vllm-0.28", "vllm-0.26")


@pytest.mark.parametrize("preset", VLLM_PRESETS)
def test_padding_alone_and_without_a_hit(preset: str) -> None:
    turns = padded(preset)
    turns.add(1)
    assert turns.schedule() == {"r0": (1, 0)}


@pytest.mark.parametrize("preset", VLLM_PRESETS)
def test_padding_alone_after_a_hit(preset: str) -> None:
    """9 tokens, 8 of them hit: since 0.30 a frame of 1 + 3, before it is one token."""
    turns = padded(preset)
    turns.add(range(9), max_tokens=1)
    turns.step()
    turns.add(range(9))
    assert turns.schedule() == {"r1": (4, 3) if preset in SINCE_030 else (1, 0)}
    assert turns.batch.computed == [8]


@pytest.mark.parametrize("preset", VLLM_PRESETS)
@pytest.mark.parametrize("hit", [False, True])
def test_padding_beside_a_running_frame(preset: str, hit: bool) -> None:
    turns = padded(preset)
    turns.add(range(9))
    turns.step()
    turns.add(range(9) if hit else [5])
    assert turns.schedule() == {"r0": (4, 3), "r1": (4, 3) if preset in SINCE_026 else (1, 0)}
    if preset in SINCE_026:
        assert turns.update(r1=2).delivered == [1, 3]  # placeholders are drafts like others


@pytest.mark.parametrize("preset", VLLM_PRESETS)
def test_admissions_do_not_count_as_running_frames(preset: str) -> None:
    turns = padded(preset)
    turns.add(8)
    turns.add(1)
    assert turns.schedule() == {"r0": (8, 0), "r1": (1, 0)}


@pytest.mark.parametrize("preset", VLLM_PRESETS)
def test_no_padding_beside_a_prefill_chunk(preset: str) -> None:
    """12 of r0's 20, then the other 8: it was a chunk after the step before."""
    turns = padded(preset, max_num_batched_tokens=12)
    turns.add(20)
    turns.step()
    turns.add(1)
    assert turns.schedule() == {"r0": (8, 0), "r1": (1, 0)}


@pytest.mark.parametrize("preset", VLLM_PRESETS)
def test_no_padding_under_a_table_of_draft_lengths(preset: str) -> None:
    turns = padded(preset, num_speculative_tokens_per_batch_size=((1, 16, 3),))
    turns.add(9)
    turns.step()
    turns.add(1)
    assert turns.schedule() == {"r0": (4, 3), "r1": (1, 0)}


@pytest.mark.parametrize("preset", VLLM_PRESETS)
def test_a_padded_frame_that_exceeds_the_budget_ends_admission(preset: str) -> None:
    """Budget 6, r0 takes 4: 2 are left for 1 + 3."""
    turns = padded(preset, max_num_batched_tokens=6)
    turns.add(6)
    turns.step()
    turns.add(1)
    expected = {"r0": (4, 3)} if preset in SINCE_026 else {"r0": (4, 3), "r1": (1, 0)}
    assert turns.schedule() == expected


@pytest.mark.parametrize(
    ("preset", "max_model_len", "expected"),
    [
        ("vllm-0.32", 5, (4, 3)),  # 0 + 1 + 3 + 1 <= 5
        ("vllm-0.32", 4, (1, 0)),
        ("vllm-0.32", 3, (1, 0)),
        ("vllm-0.30", 4, (1, 0)),
        ("vllm-0.28", 4, (4, 3)),  # 0 + 1 + 3 <= 4
        ("vllm-0.28", 3, None),
        ("vllm-0.26", 3, None),
        ("vllm-0.24", 3, (1, 0)),
    ],
)
def test_padding_at_the_model_length(preset: str, max_model_len: int, expected: tuple[int, int] | None) -> None:
    turns = padded(preset, max_model_len=max_model_len)
    turns.add(1)
    turns.step()
    turns.add(1)
    assert turns.schedule().get("r1") == expected


@pytest.mark.parametrize("preset", VLLM_PRESETS)
def test_padding_cut_by_the_long_prefill_threshold(preset: str) -> None:
    """K = 3 and a threshold of 2. 0.30 and 0.32 fall over; 0.26 and 0.28 cut the frame and keep the drafts."""
    turns = padded(preset, long_prefill_token_threshold=2)
    turns.add(2)
    turns.step()
    turns.add(1)
    if preset in SINCE_030:
        with pytest.raises(EngineCrash, match=r"request r1: padded to 1 \+ 3 tokens, then cut by .* of 2"):
            turns.schedule()
    else:
        assert turns.schedule()["r1"] == ((2, 3) if preset in SINCE_026 else (1, 0))


def test_a_padded_frame_s_placeholders_in_async_mode() -> None:
    turns = Turns(method="ngram_gpu", k=3, async_scheduling=True)
    turns.add(9)
    turns.schedule()
    request = turns.add(1)
    assert turns.schedule() == {"r0": (4, 3), "r1": (4, 3)}
    assert counters(request) == (1, 4, 4)


# K by batch size


def test_the_table_with_gaps_and_a_tail() -> None:
    assert draft_length_table([(1, 2, 5), (5, 6, 3)], 5, 9) == [5, 5, 5, 5, 5, 3, 3, 3, 3, 3]
    assert draft_length_table([(1, 2, 9), (3, 9, 0)], 5, 4) == [5, 5, 5, 0, 0]  # no more than configured
    assert draft_length_table([(1, 1, 2)], 5, 1) == [2, 2]
    assert draft_length_table([(1, 64, 2), (65, 99, 1)], 5, 3) == [2, 2, 2, 2]


@pytest.mark.parametrize(
    "rows", [[], [(2, 3, 1)], [(1, 3, 2), (3, 4, 1)], [(1, 3, 2), (5, 4, 1)], [(1, 3, -1)], [(1, 0, 1)]]
)
def test_tables_that_are_none(rows: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ValueError, match="row"):
        draft_length_table(rows, 5, 8)


@pytest.mark.parametrize(("method", "is_async"), [("ngram", False), ("ngram_gpu", True)])
def test_a_step_s_batch_sets_the_width_of_the_next(method: str, is_async: bool) -> None:
    """K = 4 for one request and, by the gap, for two; 1 for three and, by the tail, for four.

    | step | batch | width of the next |
    | 0 | r0's prompt | 4 |
    | 1 | r0 1 + 4 | 4 |
    | 2 | r0 1 + 4, two prompts: three requests | 1 |
    | 3 | 1 + 1 each, and r3's prompt | 1 |
    | 4 | 1 + 1; only r0 and r1 are left: two | 4 |
    | 5 | 1 + 4 each | |
    """
    rows = ((1, 1, 4), (3, 3, 1))
    turns = Turns(method=method, k=4, num_speculative_tokens_per_batch_size=rows, async_scheduling=is_async)

    def step() -> dict[str, tuple[int, int]]:
        scheduled = turns.schedule()
        if not is_async or len(turns.in_flight) == 2:
            turns.update()
        return scheduled

    turns.add(5)
    assert step() == {"r0": (5, 0)}
    assert step() == {"r0": (5, 4)}
    turns.add(5)
    turns.add(5)
    assert step() == {"r0": (5, 4), "r1": (5, 0), "r2": (5, 0)}
    turns.add(5)
    assert step() == {"r0": (2, 1), "r1": (2, 1), "r2": (2, 1), "r3": (5, 0)}
    turns.scheduler.abort("r2")
    turns.scheduler.abort("r3")
    assert step() == {"r0": (2, 1), "r1": (2, 1)}
    assert step() == {"r0": (5, 4), "r1": (5, 4)}


def test_lookahead_keeps_the_configured_k_under_a_table() -> None:
    """Prompt 5, K = 4 by configuration and 1 by the table: 5 + 4 = 9 slots, three blocks; then 5 + 2 + 4 = 11."""
    turns = Turns(method="eagle3", k=4, num_speculative_tokens_per_batch_size=((1, 16, 1),))
    request = turns.add(5)
    turns.step()
    assert len(request.block_table) == 3
    assert turns.schedule() == {"r0": (2, 1)}
    assert turns.batch.lookahead == 4
    assert len(request.block_table) == 3


# Output that was in flight when its request was preempted


def at_the_reset(preset: str) -> tuple[Turns, Request]:
    """Async, K = 3, prompt 8: the prefill has returned, a frame of 1 + 3 is in flight, ph = 4; then a reset."""
    turns = Turns(preset, "ngram_gpu", 3, async_scheduling=True)
    request = turns.add(8)
    turns.schedule()
    assert turns.schedule() == {"r0": (4, 3)}
    turns.update()
    assert counters(request) == (9, 12, 4)
    interruption = turns.scheduler.reset_prefix_cache(True)
    assert interruption.done
    assert ids(interruption.requests) == ["r0"]
    return turns, request


@pytest.mark.parametrize(
    ("preset", "expected", "lost"),
    [
        (
            # The stale frame rolls back too, and drives ph below zero; then three good frames are discarded, their
            # rejections rolled back but not their placeholders. At the end ph is 7, with one frame of 4 in flight.
            "vllm-0.24",
            [
                (DISCARDED, (9, 7, -1)),
                (DISCARDED, (9, 11, 3)),
                (DISCARDED, (9, 13, 5)),
                (DISCARDED, (9, 15, 7)),
                (FRESH, (11, 17, 7)),
            ],
            5,
        ),
        (
            # Nothing of a discarded frame is rolled back: ph is 13 at the end.
            "vllm-0.26",
            [
                (STALE_DROPPED, (9, 9, 1)),
                (STALE_DROPPED, (9, 13, 5)),
                (STALE_DROPPED, (9, 17, 9)),
                (STALE_DROPPED, (9, 21, 13)),
                (FRESH, (11, 23, 13)),
            ],
            5,
        ),
        (
            # The stale frame is dropped and changes nothing; no other is lost.
            "vllm-0.32",
            [
                (STALE_DROPPED, (9, 9, 1)),
                (FRESH, (10, 13, 4)),
                (FRESH, (12, 15, 4)),
                (FRESH, (14, 17, 4)),
                (FRESH, (16, 19, 4)),
            ],
            0,
        ),
    ],
    ids=["0.24", "0.26", "0.32"],
)
def test_stale_output_after_a_reset(preset: str, expected: list[tuple[int, tuple[int, int, int]]], lost: int) -> None:
    """K = 3, one frame in flight, one accepted draft in every frame: 0.24 and 0.26 set the counter to ph = 4 tokens and
    drain it by frames: the stale one, and three good ones of 1 + 2 + 2 = 5 tokens. Turn by turn after the reset: the
    recomputation of 9 is scheduled and the stale frame returns; then a frame of 4 is scheduled and the one before it
    returns. Columns: fate of what returns, N C ph after the update.
    """
    turns, request = at_the_reset(preset)
    lost_tokens = 0
    for turn, (fate, after) in enumerate(expected):
        assert turns.schedule() == {"r0": (9, 0) if turn == 0 else (4, 3)}
        returned = turns.update(r0=0 if turn == 1 else 1)
        assert returned.fates == [fate]
        assert counters(request) == after
        if turn > 0:
            lost_tokens += returned.sampled[0] - returned.delivered[0]
    assert lost_tokens == lost
    assert request.num_in_flight_tokens == 4  # ph should be the 4 of the one frame that is in flight
    assert (request.num_output_placeholders > 4) == (lost > 0)


@pytest.mark.parametrize("preset", VLLM_PRESETS)
def test_stale_output_after_a_lack_of_blocks_is_delivered(preset: str) -> None:
    """Async without drafts, 4 blocks. r0's ninth slot costs r1 its blocks with r1's prefill in flight. It returns
    with a token, which r1 gets: N = 8; 0.24 and 0.26 kept its placeholder until then."""
    turns = Turns(preset, async_scheduling=True, num_gpu_blocks=5)
    turns.add(8)
    request = turns.add(7)
    turns.schedule()
    assert turns.schedule() == {"r0": (1, 0)}
    assert turns.preempted() == ["r1"]
    assert counters(request) == (7, 0, 1 if preset in ("vllm-0.24", "vllm-0.26") else 0)
    returned = turns.update()
    assert returned.fates == [FRESH, STALE_DELIVERED]
    assert returned.delivered == [1, 1]
    assert counters(request) == (8, 0, 0)
    assert request.num_in_flight_tokens == 0


@pytest.mark.parametrize("preset", ["vllm-0.32", "vllm-0.24"])
def test_a_request_whose_stale_output_is_still_to_come_is_passed_over(preset: str) -> None:
    """As above, with a third batch while both are in flight (pipeline parallelism). r0 is aborted, so there is room.
    0.32 passes r1 over, admits r2 and puts r1 back to the head; 0.24 knows no such rule and resumes r1."""
    turns = Turns(preset, async_scheduling=True, num_gpu_blocks=5)
    turns.add(8)
    request = turns.add(7)
    turns.schedule()
    turns.schedule()
    turns.scheduler.abort("r0")
    turns.add(3)
    turns.add(2)
    if preset == "vllm-0.24":
        assert list(turns.schedule()) == ["r1", "r2", "r3"]
        return
    assert request.num_stale_output_tokens == 7
    assert turns.schedule() == {"r2": (3, 0), "r3": (2, 0)}
    assert ids(turns.scheduler.waiting) == ["r1"]
    turns.update()
    assert request.num_stale_output_tokens == 0
    assert list(turns.schedule()) == ["r2", "r3", "r1"]


@pytest.mark.parametrize(
    ("by_reset", "dropping", "owed", "drops"),
    [
        (False, False, 0, False),
        (True, False, 0, True),
        (False, True, 4, True),  # what was to be dropped stays to be dropped
        (False, True, 0, False),  # nothing of it is left
        (True, True, 4, True),
    ],
)
def test_since_0_27_a_drop_stays_as_long_as_something_is_owed(
    by_reset: bool, dropping: bool, owed: int, drops: bool
) -> None:
    request = Request("a", 0, 8, 8, Tokens(range(8), 4))
    request.num_in_flight_tokens = 9
    request.num_output_placeholders = 5
    request.drop_stale_output = dropping
    request.num_stale_output_tokens = owed
    DrainedInTokens().preempted(request, by_reset)
    assert request.drop_stale_output == drops
    assert request.num_stale_output_tokens == 9
    assert request.num_output_placeholders == 0


# Events from outside


def test_an_abort_with_a_frame_in_flight() -> None:
    turns = Turns(async_scheduling=True)
    turns.add(8)
    turns.schedule()
    interruption = turns.scheduler.abort("r0")
    assert (interruption.kind, interruption.done, ids(interruption.requests)) == ("abort", True, ["r0"])
    assert turns.scheduler.pool.num_free == 100
    assert turns.update().fates == [UNKNOWN]
    assert not turns.scheduler.abort("r0").done
    assert not turns.scheduler.abort("nobody").done


def test_a_reset_preempts_all_last_first_and_empties_the_cache() -> None:
    turns = Turns()
    for _ in range(3):
        turns.add(8)
    turns.step()
    assert not turns.scheduler.reset_prefix_cache(False).done
    assert ids(turns.scheduler.running) == ["r0", "r1", "r2"]
    interruption = turns.scheduler.reset_prefix_cache(True)
    assert interruption.done
    assert ids(interruption.requests) == ["r2", "r1", "r0"]
    assert ids(turns.scheduler.waiting) == ["r0", "r1", "r2"]
    assert turns.scheduler.pool.cache.hashes == [None] * 101
    assert turns.schedule() == {"r0": (9, 0), "r1": (9, 0), "r2": (9, 0)}
    assert turns.batch.resumed == [True] * 3


# Errors change nothing


@pytest.mark.parametrize("sampled", [[], [1, 1], [0], [7], [-1]])
def test_numbers_that_cannot_be_are_refused(sampled: list[int]) -> None:
    """One frame of 1 + 5: 1 to 6 tokens."""
    turns = Turns(method="ngram", k=5)
    request = turns.add(8)
    turns.step()
    turns.schedule()
    before = counters(request), turns.scheduler.pool.free_queue(), request.num_in_flight_tokens
    with pytest.raises(ValueError, match="sampled tokens for"):
        turns.scheduler.update(turns.in_flight[0], sampled)
    assert (counters(request), turns.scheduler.pool.free_queue(), request.num_in_flight_tokens) == before
    turns.update(r0=5)
    assert request.num_output_tokens == 7


def test_a_chunk_samples_nothing() -> None:
    turns = Turns(max_num_batched_tokens=4)
    turns.add(8)
    turns.schedule()
    with pytest.raises(ValueError, match="1 sampled tokens for a frame with 0 drafts"):
        turns.scheduler.update(turns.in_flight[0], [1])


def test_an_id_that_is_in_use_is_refused() -> None:
    turns = Turns()
    request = turns.add(8)
    with pytest.raises(ValueError, match="request id 'r0' is in use"):
        turns.scheduler.add(request)
    assert len(turns.scheduler.waiting) == 1


# Slots beyond N


def most_slots_beyond(method: str, k: int, others_in_flight: int, accepted: int, preset: str) -> int:
    """Blocks of one token: the most that are held beyond N, over a whole request."""
    is_async = others_in_flight > 0
    turns = Turns(preset, method, k, block_size=1, num_gpu_blocks=400, async_scheduling=is_async)
    request = turns.add(20, max_tokens=120)
    most = 0
    while turns.scheduler.requests:
        turns.schedule()
        most = max(most, len(request.block_table) - request.num_tokens)
        if len(turns.in_flight) > others_in_flight:
            turns.update(**{request.id: min(accepted, turns.in_flight[0].drafts[0])})
        elif not turns.batch.total_tokens:
            turns.update()
    return most


@pytest.mark.parametrize("preset", ["vllm-0.32", "vllm-0.24"])
@pytest.mark.parametrize("accepted", [0, 2, 5])
@pytest.mark.parametrize(
    ("method", "k", "by_others_in_flight"),
    [
        ("none", 0, (0, 1, 2)),
        ("ngram", 5, (5,)),
        ("ngram_gpu", 5, (5, 11, 17)),
        ("eagle", 5, (10, 16, 22)),
        ("eagle3", 5, (10, 16, 22)),
        ("mtp", 5, (10, 16, 22)),
        ("draft_model", 5, (10, 16, 22)),
        ("eagle3", 1, (2, 4, 6)),
        ("ngram_gpu", 3, (3, 7, 11)),
    ],
)
def test_most_slots_beyond_the_confirmed_tokens(
    method: str, k: int, by_others_in_flight: tuple[int, ...], accepted: int, preset: str
) -> None:
    """(f + 1)(K + 1) - 1 + L with f other frames in flight: sync 0, async 1, and 2 with pipeline parallelism.

    For K = 5: sync 0 without speculation, 5 with n-grams, 10 with EAGLE or a draft model; async 1, 11 and 16.
    """
    lookahead = 0 if method in ("none", "ngram", "ngram_gpu") else k
    for others, expected in enumerate(by_others_in_flight):
        assert expected == (others + 1) * (k + 1) - 1 + lookahead
        assert most_slots_beyond(method, k, others, accepted, preset) == expected
