"""The clock: exact times of every schedule, launch, end and update, of what comes in, and of how a run ends.

Times are ms. A line of a log is (time, what, request index to a number): tokens of the prompt for `arrived`, of the
frame for `scheduled` and `started`, accepted drafts for `ended`, delivered tokens for `updated`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from sim.core.request import Request
from sim.engine import OutsideEvent, RequestNeverFits
from sim.models.acceptance import Geometric
from sim.policies.presets import PRESETS
from sim.records import Batch, Interruption, Returned
from tests.by_hand import LOSSY, MS, VLLM_PRESETS, Simulated, abort_at, reset_at, small_settings, spec
from workloads.closed_loop import ClosedLoop
from workloads.lengths import Fixed
from workloads.sessions import SingleRequests


def timed(specs: Sequence[Any], is_async: bool, **arguments: Any) -> Simulated:
    """No speculation; a schedule takes 1, a step 10, an update 2."""
    settings = small_settings(async_scheduling=is_async)
    return Simulated(specs, settings, **{"schedule_ms": 1, "update_ms": 2, **arguments})


def times(simulated: Simulated, *what: str) -> list[tuple[float, str, dict[int, int]]]:
    return [line for line in simulated.log.lines if line[1] in what]


def test_sync_the_scheduler_s_time_lies_between_the_steps() -> None:
    """One request, 3 tokens: 1 + 10 + 2 a turn, 39 in all."""
    simulated = timed([spec(0, 8, 3)], False).run()
    assert simulated.log.lines == [
        (0, "arrived", {0: 8}),
        (1, "scheduled", {0: 8}),
        (1, "started", {0: 8}),
        (11, "ended", {0: 0}),
        (13, "updated", {0: 1}),
        (14, "scheduled", {0: 1}),
        (14, "started", {0: 1}),
        (24, "ended", {0: 0}),
        (26, "updated", {0: 1}),
        (27, "scheduled", {0: 1}),
        (27, "started", {0: 1}),
        (37, "ended", {0: 0}),
        (39, "updated", {0: 1}),
        (39, "closed", {}),
    ]
    assert simulated.engine.stopped_by is None
    assert (simulated.engine.num_steps, simulated.engine.num_request_steps) == (3, 3)
    assert simulated.engine.now == 39 * MS


def test_async_the_scheduler_s_time_is_behind_the_step_in_flight() -> None:
    """The same. Schedule 1 is there at 2, so step 1 begins at 11 when step 0 ends; schedule 2 is there at 14, and so
    on. Step 2 ends at 31: 10 a step but for the first schedule. In turn 3 nothing is left to schedule (it is sure to
    finish)."""
    simulated = timed([spec(0, 8, 3)], True).run()
    assert simulated.log.lines == [
        (0, "arrived", {0: 8}),
        (1, "scheduled", {0: 8}),
        (1, "started", {0: 8}),
        (2, "scheduled", {0: 1}),
        (11, "ended", {0: 0}),
        (11, "started", {0: 1}),
        (13, "updated", {0: 1}),
        (14, "scheduled", {0: 1}),
        (21, "ended", {0: 0}),
        (21, "started", {0: 1}),
        (23, "updated", {0: 1}),
        (24, "scheduled", {}),
        (31, "ended", {0: 0}),
        (33, "updated", {0: 1}),
        (33, "closed", {}),
    ]
    assert simulated.engine.num_steps == 3


@pytest.mark.parametrize(("is_async", "expected"), [(False, [0, 10, 20, 30]), (True, [0, 10, 20, 30])])
def test_with_no_time_of_its_own_both_are_the_same(is_async: bool, expected: list[float]) -> None:
    simulated = timed([spec(0, 8, 4)], is_async, schedule_ms=0, update_ms=0).run()
    assert [line[0] for line in times(simulated, "started")] == expected
    assert simulated.engine.now == 40 * MS


@pytest.mark.parametrize(("is_async", "step_ms", "expected"), [(False, 2, 5), (True, 2, 3), (True, 5, 5)])
def test_a_host_slower_than_the_device_sets_the_pace(is_async: bool, step_ms: float, expected: float) -> None:
    """Schedule 1 and update 2: sync 1 + 2 + 2 a step; async 1 + 2 where the step is shorter, else the step."""
    simulated = timed([spec(0, 8, 30)], is_async, step_ms=step_ms).run()
    starts = [line[0] for line in times(simulated, "started")]
    gaps = [later - earlier for earlier, later in pairwise(starts[5:])]
    assert set(gaps) == {expected}


@pytest.mark.parametrize("is_async", [False, True])
def test_who_arrives_during_a_step_is_taken_in_after_its_update(is_async: bool) -> None:
    """r1 comes at 5 and r2 at 13, the very moment of the update: both are in the next schedule, at 14."""
    specs = [spec(0, 8, 3), spec(1, 8, 1, 5 * MS), spec(2, 8, 1, 13 * MS)]
    simulated = timed(specs, is_async).run()
    assert times(simulated, "arrived") == [(0, "arrived", {0: 8}), (13, "arrived", {1: 8}), (13, "arrived", {2: 8})]
    assert (14, "scheduled", {0: 1, 1: 8, 2: 8}) in simulated.log.lines


def test_who_arrives_while_the_scheduler_is_at_work_waits_for_the_next_schedule() -> None:
    """Sync: r1 comes at 13.5, the schedule runs from 13 to 14; r1 is in the next one, after the update at 26."""
    simulated = timed([spec(0, 8, 3), spec(1, 8, 1, round(13.5 * MS))], False).run()
    assert (14, "scheduled", {0: 1}) in simulated.log.lines
    assert (26, "arrived", {1: 8}) in simulated.log.lines
    assert (27, "scheduled", {0: 1, 1: 8}) in simulated.log.lines


def test_who_arrives_behind_an_async_engine_that_waits_for_its_step() -> None:
    """Async: r1 comes at 3, when two batches are in flight; nothing is scheduled before the update at 13."""
    simulated = timed([spec(0, 8, 9), spec(1, 8, 1, 3 * MS)], True).run()
    assert times(simulated, "scheduled")[:3] == [
        (1, "scheduled", {0: 8}),
        (2, "scheduled", {0: 1}),
        (14, "scheduled", {0: 1, 1: 8}),
    ]


@pytest.mark.parametrize("is_async", [False, True])
def test_an_idle_engine_sleeps(is_async: bool) -> None:
    """r0 is done at 13; r1 comes at 1000. Nothing happens in between but, in async mode, the empty schedule that tells
    the workers that r0 has ended; r1 is scheduled at 1001."""
    simulated = timed([spec(0, 8, 1), spec(1, 8, 1, 1000 * MS)], is_async).run()
    lines = [line for line in simulated.log.lines if line[2]]
    assert lines[4] == (13, "updated", {0: 1})
    assert lines[5:] == [
        (1000, "arrived", {1: 8}),
        (1001, "scheduled", {1: 8}),
        (1001, "started", {1: 8}),
        (1011, "ended", {1: 0}),
        (1013, "updated", {1: 1}),
    ]
    assert simulated.engine.now == 1013 * MS


def test_an_idle_engine_does_not_count_steps() -> None:
    simulated = timed([spec(0, 8, 1, 500 * MS)], False).run()
    assert simulated.log.lines[0] == (500, "arrived", {0: 8})
    assert simulated.engine.num_steps == 1


def test_a_reset_takes_effect_at_the_next_turn() -> None:
    """Sync: asked for at 5, done at 13 after the update. r0 (9 tokens confirmed) is computed again from 14 on."""
    simulated = timed([spec(0, 8, 3)], False, events=[reset_at(5)]).run()
    assert times(simulated, "reset_prefix_cache", "scheduled") == [
        (1, "scheduled", {0: 8}),
        (13, "reset_prefix_cache", {0: 0}),
        (14, "scheduled", {0: 9}),
        (27, "scheduled", {0: 1}),
    ]
    assert simulated.engine.now == 39 * MS


def test_an_async_reset_costs_the_frame_in_flight() -> None:
    """Async: at 13 the frame of schedule 1 is in flight. Its token is dropped (update at 23), so the run takes one step
    more than without the reset."""
    simulated = timed([spec(0, 8, 3)], True, events=[reset_at(5)]).run()
    assert times(simulated, "reset_prefix_cache", "scheduled", "updated") == [
        (1, "scheduled", {0: 8}),
        (2, "scheduled", {0: 1}),
        (13, "updated", {0: 1}),
        (13, "reset_prefix_cache", {0: 0}),
        (14, "scheduled", {0: 9}),
        (23, "updated", {0: 0}),
        (24, "scheduled", {0: 1}),
        (33, "updated", {0: 1}),
        (34, "scheduled", {}),
        (43, "updated", {0: 1}),
    ]


def test_an_abort_at_a_time() -> None:
    """Async: asked for at 15, done at 23; schedule 2's frame is in flight, ends at 31 and is ignored at 33."""
    simulated = timed([spec(0, 8, 30)], True, events=[abort_at(0, 15)]).run()
    assert times(simulated, "abort", "updated", "closed") == [
        (13, "updated", {0: 1}),
        (23, "updated", {0: 1}),
        (23, "abort", {0: 0}),
        (33, "updated", {0: 0}),
        (33, "closed", {}),
    ]


def test_an_abort_while_the_engine_is_idle_finds_nobody() -> None:
    simulated = timed([spec(0, 8, 1)], False, events=[abort_at(0, 100)]).run()
    assert times(simulated, "abort") == []
    assert simulated.engine.now == 100 * MS


def test_events_in_an_idle_engine_are_carried_out_at_their_time() -> None:
    simulated = timed([spec(0, 8, 1)], False, events=[reset_at(100, 200)]).run()
    assert [line[0] for line in times(simulated, "reset_prefix_cache")] == [100, 200]


def test_a_recurring_event_does_not_keep_a_run_alive() -> None:
    every_20 = OutsideEvent("reset_prefix_cache", lambda: range(20 * MS, 10**15, 20 * MS), recurring=True)
    simulated = timed([spec(0, 8, 3)], False, events=[every_20]).run()
    assert [line[0] for line in times(simulated, "reset_prefix_cache")] == [26]
    assert simulated.engine.now == 39 * MS


class Concurrency:
    """How many requests are unfinished, at most and in all."""

    def __init__(self) -> None:
        self.now = self.most = self.total = 0

    def arrived(self, now: int, request: Request) -> None:
        self.total += 1
        self.now += 1
        self.most = max(self.most, self.now)

    def updated(self, now: int, returned: Returned) -> None:
        self.now -= len(returned.finished)

    def interrupted(self, now: int, interruption: Interruption) -> None:
        if interruption.kind == "abort":
            self.now -= len(interruption.requests)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("concurrency", [1, 3, 10, 50])
def test_a_closed_loop_never_exceeds_its_concurrency(concurrency: int, is_async: bool) -> None:
    workload = ClosedLoop(SingleRequests(0, 20, Fixed(8), Fixed(3)), concurrency)
    simulated = timed(workload, is_async, events=[abort_at(0, 12), abort_at(4, 30, 60)])  # type: ignore[arg-type]
    watcher = Concurrency()
    simulated.engine.add_observer(watcher)
    simulated.run()
    assert (watcher.most, watcher.total, watcher.now) == (min(concurrency, 20), 20, 0)


def test_a_closed_loop_of_one_is_one_after_the_other() -> None:
    """Sync, 2 tokens each: 26 a request; the next arrives when the one before has ended."""
    workload = ClosedLoop(SingleRequests(0, 3, Fixed(8), Fixed(2)), 1)
    simulated = timed(workload, False).run()  # type: ignore[arg-type]
    assert times(simulated, "arrived") == [(0, "arrived", {0: 8}), (26, "arrived", {1: 8}), (52, "arrived", {2: 8})]


# How a run ends


@pytest.mark.parametrize("is_async", [False, True])
def test_requests_that_can_never_be_scheduled_end_the_run(is_async: bool) -> None:
    """4 blocks of 4. r1's prompt of 20 never fits; r2 waits behind it for good."""
    settings = small_settings(num_gpu_blocks=5, async_scheduling=is_async)
    simulated = Simulated([spec(0, 8, 2), spec(1, 20, 2), spec(2, 4, 2)], settings).run()
    assert simulated.engine.stopped_by == "stalled"
    assert [request.index for request in simulated.engine.stalled] == [1, 2]
    assert simulated.engine.now == 20 * MS


def test_a_stalled_engine_waits_for_what_is_still_to_come() -> None:
    """r0 never fits; it is aborted at 50, and r1, which came at 30, is served."""
    settings = small_settings(num_gpu_blocks=5)
    simulated = Simulated([spec(0, 20, 2), spec(1, 4, 1, 30 * MS)], settings, events=[abort_at(0, 50)]).run()
    assert simulated.engine.stopped_by is None
    assert times(simulated, "abort", "updated") == [(50, "abort", {0: 0}), (60, "updated", {1: 1})]


def test_a_stalled_engine_does_not_wait_for_recurring_events_for_ever() -> None:
    every_20 = OutsideEvent("reset_prefix_cache", lambda: range(20 * MS, 10**15, 20 * MS), recurring=True)
    simulated = Simulated([spec(0, 20, 2)], small_settings(num_gpu_blocks=5), events=[every_20]).run()
    assert simulated.engine.stopped_by == "stalled"


def test_a_schedule_that_only_preempts_is_no_stall() -> None:
    """Priority, 2 blocks of 4, r0 (4 tokens) and r1 (3) alike in priority and arrival. At 10 r0 lacks a block; on the
    tie the first in the list goes, which is r0 itself, and the loop stops: an empty batch. The next schedule, at
    once, has r1. r1 takes r0's old block at 20 and ends at 30; r0 computes its 5 tokens again and ends at 50."""
    settings = small_settings(num_gpu_blocks=3, priority=True)
    simulated = Simulated([spec(0, 4, 3), spec(1, 3, 3)], settings).run()
    assert times(simulated, "scheduled") == [
        (0, "scheduled", {0: 4, 1: 3}),
        (10, "scheduled", {}),
        (10, "scheduled", {1: 1}),
        (20, "scheduled", {1: 1}),
        (30, "scheduled", {0: 5}),
        (40, "scheduled", {0: 1}),
    ]
    assert simulated.engine.stopped_by is None
    assert simulated.engine.now == 50 * MS


def test_a_prompt_beyond_the_model_length_is_refused_on_arrival() -> None:
    settings = small_settings(max_model_len=16)
    simulated = Simulated([spec(0, 15, 2), spec(1, 16, 2, 5 * MS)], settings)
    with pytest.raises(RequestNeverFits, match=r"request 1: a prompt of 16 tokens; the engine takes at most 15"):
        simulated.run()


def test_a_request_that_could_never_end_is_refused_on_arrival() -> None:
    simulated = Simulated([spec(0, 15, 6)], small_settings(), max_request_tokens=20)
    with pytest.raises(RequestNeverFits, match="request 0: 15 prompt and 6 output tokens; the pool holds at most 20"):
        simulated.run()


@pytest.mark.parametrize("preset", VLLM_PRESETS)
def test_a_crash_of_the_engine_is_told(preset: str) -> None:
    """K = 3 and a threshold of 2: vLLM 0.30 and 0.32 fail an assertion once a padded frame is cut, at 10. What was
    recorded until then stands. 0.26 and 0.28 cut it to 2 tokens with 3 drafts: whatever is made of that, it is no
    traceback. 0.24 does not pad."""
    settings = small_settings("ngram", 3, long_prefill_token_threshold=2)
    simulated = Simulated(
        [spec(0, 2, 5), spec(1, 1, 5, 5 * MS)],
        settings,
        PRESETS[preset],
        acceptance=Geometric(0, 0.0),
        lossy=preset in LOSSY,
    ).run()
    engine = simulated.engine
    if preset in ("vllm-0.30", "vllm-0.32"):
        assert engine.stopped_by == "crash"
        assert engine.crash == "request r1: padded to 1 + 3 tokens, then cut by a long_prefill_token_threshold of 2"
        assert simulated.log.lines[-1] == (10, "closed", {})
        assert engine.num_steps == 1
    elif preset == "vllm-0.24":
        assert (engine.stopped_by, engine.crash) == (None, None)
    else:
        assert (engine.stopped_by, engine.crash is None) in ((None, True), ("crash", False))


def test_max_steps() -> None:
    """Sync: three steps have ended at 37, which the loop sees after the update at 39."""
    simulated = timed([spec(0, 8, 30)], False, max_steps=3).run()
    assert simulated.engine.stopped_by == "max_steps"
    assert simulated.engine.num_steps == 3
    assert simulated.log.lines[-1] == (39, "closed", {})


def test_max_time() -> None:
    """Sync: at 26, the first turn at or after 20, no schedule is begun."""
    simulated = timed([spec(0, 8, 30)], False, max_time_ns=20 * MS).run()
    assert simulated.engine.stopped_by == "max_time_s"
    assert simulated.log.lines[-1] == (26, "closed", {})


def test_a_limit_that_is_not_reached_does_not_stop_anything() -> None:
    simulated = timed([spec(0, 8, 3)], False, max_time_ns=40 * MS, max_steps=4).run()
    assert simulated.engine.stopped_by is None


def test_a_tick_that_says_no_ends_the_run() -> None:
    asked: list[int] = []

    def tick(now: int) -> bool:
        asked.append(now)
        return len(asked) < 3

    simulated = Simulated([spec(0, 8, 1000)], small_settings(num_gpu_blocks=301), schedule_ms=1, update_ms=2).run(tick)
    assert simulated.engine.stopped_by == "interrupt"
    # Before the first step, after 200 steps of 13 ms, after 400.
    assert asked == [0, 2600 * MS, 5200 * MS]
    assert simulated.log.lines[-1] == (5200, "closed", {})


class Half:
    """Implements one record only."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def scheduled(self, now: int, batch: Batch) -> None:
        self.batches.append(batch.number)


def test_an_observer_implements_what_it_likes_and_changes_nothing() -> None:
    plain = timed([spec(0, 8, 3), spec(1, 8, 2, 3 * MS)], True, check=False).run()
    watched = timed([spec(0, 8, 3), spec(1, 8, 2, 3 * MS)], True)
    half = Half()
    watched.engine.add_observer(half)
    watched.run()
    assert half.batches == list(range(len(half.batches)))
    assert plain.log.lines == watched.log.lines
