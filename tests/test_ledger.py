"""Both accounts by hand, turn by turn, and their slot-seconds.

In the tables times are ms and a row holds from its time on. Columns of the reservations: in flight, placeholder,
committed, garbage, lookahead, slack, cached, free; of the content: valid, garbage, blank.
"""

from __future__ import annotations

from typing import Any

import pytest

from sim.models.acceptance import Replay
from sim.observers.ledger import CONTENT_CLASSES, RESERVATION_CLASSES, Ledger
from tests.by_hand import MS, Simulated, reset_at, small_settings, spec
from tests.naive_accounts import NaiveAccounts
from workloads.spec import Segment, prompt_stream, shared_stream

Row = tuple[int, ...]


class Snapshots:
    """The accounts after each record that changes them, by ms; of several at one time the last."""

    def __init__(self) -> None:
        self.reservations: dict[float, Row] = {}
        self.content: dict[float, Row] = {}
        self.ledger: Ledger

    def _note(self, now: int, *facts: Any) -> None:
        self.reservations[now / MS] = self.ledger.reservations()
        self.content[now / MS] = self.ledger.content()[:3]

    scheduled = step_ended = updated = interrupted = closed = _note


def changes(rows: dict[float, Row]) -> dict[float, Row]:
    """Without those that repeat the one before."""
    kept: dict[float, Row] = {}
    for time, row in rows.items():
        if not kept or list(kept.values())[-1] != row:
            kept[time] = row
    return kept


def run(specs: Any, settings: Any, **arguments: Any) -> tuple[Simulated, Snapshots]:
    snapshots = Snapshots()
    simulated = Simulated(specs, settings, **arguments)
    snapshots.ledger = simulated.ledger
    simulated.engine.add_observer(snapshots)
    simulated.engine.add_observer(NaiveAccounts(simulated.scheduler, simulated.ledger))
    return simulated.run(), snapshots


def slot_ms(seconds: dict[str, float]) -> dict[str, int]:
    found = {name: round(value * 1000, 6) for name, value in seconds.items()}
    assert all(value == int(value) for value in found.values())
    return {name: int(value) for name, value in found.items()}


def test_one_request_alone_in_sync_mode() -> None:
    """The article's example: K = 5 with EAGLE-3, blocks of 16, prompt 1018; C goes 1018, 1024, 1021.

    Pool 79 blocks = 1264 slots. A step takes 10, a schedule 1, an update 2. Turn 0 is the prefill, turn 1 accepts 2
    of 5, turn 2 none; with that the 5 tokens of output are there. R = C + n + 5.

    | ms | what | C | F | W | R | in flight | placeh. | committed | garbage | lookah. | slack | blocks |
    | 1 | schedule 0 | 1018 | 0 | 0 | 1023 | 1018 | 0 | 0 | 0 | 5 | 1 | 64 |
    | 13 | update 0 | 1018 | 1018 | 1018 | - | 0 | 0 | 1018 | 0 | 0 | 6 | 64 |
    | 14 | schedule 1 | 1024 | 1018 | 1018 | 1029 | 1 | 5 | 1018 | 0 | 5 | 11 | 65 |
    | 26 | update 1 | 1021 | 1021 | 1024 | - | 0 | 0 | 1021 | 3 | 0 | 16 | 65 |
    | 27 | schedule 2 | 1027 | 1021 | 1024 | 1032 | 1 | 5 | 1021 | 0 | 5 | 8 | 65 |
    | 39 | update 2 | ended: 63 blocks of confirmed tokens stay cached | 0 |

    The three garbage slots are 1021, 1022, 1023: the end of the 64th block. The reservations show them for the 1 ms of
    host time before they are promised again; memory holds them until step 2 has ended, and then the 5 of turn 2:

    | ms | what | valid | garbage | blank |
    | 1 | blocks taken | 0 | 0 | 1024 |
    | 11 | step 0 ends | 1018 | 0 | 6 |
    | 14 | a block more | 1018 | 0 | 22 |
    | 24 | step 1 ends: 1018 to 1023 written | 1021 | 3 | 16 |
    | 37 | step 2 ends: 1021 to 1026 written | 1022 | 5 | 13 |
    | 39 | ended | 0 | 0 | 0 |
    """
    settings = small_settings("eagle3", 5, num_gpu_blocks=80, block_size=16, max_num_batched_tokens=2000)
    simulated, snapshots = run(
        [spec(0, 1018, 5)], settings, acceptance=Replay([[1, 3, 1, 1, 1]]), schedule_ms=1, update_ms=2
    )
    assert changes(snapshots.reservations) == {
        1: (1018, 0, 0, 0, 5, 1, 0, 240),
        13: (0, 0, 1018, 0, 0, 6, 0, 240),
        14: (1, 5, 1018, 0, 5, 11, 0, 224),
        26: (0, 0, 1021, 3, 0, 16, 0, 224),
        27: (1, 5, 1021, 0, 5, 8, 0, 224),
        39: (0, 0, 0, 0, 0, 0, 1008, 256),
    }
    assert changes(snapshots.content) == {
        1: (0, 0, 1024),
        11: (1018, 0, 6),
        14: (1018, 0, 22),
        24: (1021, 3, 16),
        37: (1022, 5, 13),
        39: (0, 0, 0),
    }
    ledger = simulated.ledger
    assert slot_ms(ledger.slot_seconds()) == {
        "in_flight": 1018 * 12 + 1 * 12 + 1 * 12,
        "placeholder": 5 * 12 + 5 * 12,
        "committed": 1018 * 1 + 1018 * 12 + 1021 * 1 + 1021 * 12,
        "garbage": 3 * 1,
        "lookahead": 5 * 12 * 3,
        "slack": 1 * 12 + 6 * 1 + 11 * 12 + 16 * 1 + 8 * 12,
        "cached": 0,
        "free": 1264 * 1 + 240 * 13 + 224 * 25,
        "placeholder_accepted": 2 * 12,
        "placeholder_rejected": 3 * 12 + 5 * 12,
        "placeholder_discarded": 0,
    }
    assert slot_ms(ledger.content_slot_seconds()) == {
        "valid": 1018 * 13 + 1021 * 13 + 1022 * 2,
        "garbage": 3 * 13 + 5 * 2,
        "blank": 1024 * 10 + 6 * 3 + 22 * 10 + 16 * 13 + 13 * 2,
        "cached": 0,
        "free": 1264 * 1 + 240 * 13 + 224 * 25,
    }
    assert ledger.usage_mean() == pytest.approx((64 * 13 + 65 * 25) / (39 * 79), rel=1e-12)
    assert ledger.usage_max() == 65 / 79
    assert ledger.stale_write_slots == 0


def test_one_request_alone_in_async_mode() -> None:
    """The same engine with two batches in flight, prompt 1012, so that C goes 1018, 1024, 1021 with frames of 6 in
    flight: schedule 1 ends at 1018, schedule 2 at 1024, and update 1, with 2 of 5 accepted, takes 3 back.

    A schedule takes 1, a step 10, an update 2; step t + 1 begins when step t ends. Turn 2 accepts 1 of 5, and with that
    the 6 tokens of output are there, with turn 3's frame still in flight; its step ends at 41, its update at 43.

    | ms | what | C | F | W | R | in flight | placeh. | committed | garbage | lookah. | slack | blocks |
    | 1 | schedule 0 | 1012 | 0 | 0 | 1017 | 1012 | 0 | 0 | 0 | 5 | 7 | 64 |
    | 2 | schedule 1 | 1018 | 0 | 0 | 1023 | 1013 | 5 | 0 | 0 | 5 | 1 | 64 |
    | 13 | update 0 | 1018 | 1012 | 1012 | 1023 | 1 | 5 | 1012 | 0 | 5 | 1 | 64 |
    | 14 | schedule 2 | 1024 | 1012 | 1012 | 1029 | 2 | 10 | 1012 | 0 | 5 | 11 | 65 |
    | 23 | update 1 | 1021 | 1015 | 1018 | 1029 | 1 | 5 | 1015 | 0 | 8 | 11 | 65 |
    | 24 | schedule 3 | 1027 | 1015 | 1018 | 1032 | 2 | 10 | 1015 | 0 | 5 | 8 | 65 |
    | 33 | update 2 | ended: 63 blocks cached | 0 |

    The garbage of turn 1 (1015, 1016, 1017) is under the next placeholders all the time; memory holds it for a step:

    | ms | what | valid | garbage | blank |
    | 1 | blocks taken | 0 | 0 | 1024 |
    | 11 | step 0 ends | 1012 | 0 | 12 |
    | 14 | a block more | 1012 | 0 | 28 |
    | 21 | step 1 ends: 1012 to 1017 written | 1015 | 3 | 22 |
    | 31 | step 2 ends: 1015 to 1020 written | 1017 | 4 | 19 |
    | 33 | ended | 0 | 0 | 0 |
    """
    settings = small_settings(
        "eagle3", 5, num_gpu_blocks=80, block_size=16, max_num_batched_tokens=2000, async_scheduling=True
    )
    simulated, snapshots = run(
        [spec(0, 1012, 6)], settings, acceptance=Replay([[1, 3, 1, 1, 2, 1]]), schedule_ms=1, update_ms=2
    )
    assert changes(snapshots.reservations) == {
        1: (1012, 0, 0, 0, 5, 7, 0, 240),
        2: (1013, 5, 0, 0, 5, 1, 0, 240),
        13: (1, 5, 1012, 0, 5, 1, 0, 240),
        14: (2, 10, 1012, 0, 5, 11, 0, 224),
        23: (1, 5, 1015, 0, 8, 11, 0, 224),
        24: (2, 10, 1015, 0, 5, 8, 0, 224),
        33: (0, 0, 0, 0, 0, 0, 1008, 256),
    }
    assert changes(snapshots.content) == {
        1: (0, 0, 1024),
        11: (1012, 0, 12),
        14: (1012, 0, 28),
        21: (1015, 3, 22),
        31: (1017, 4, 19),
        33: (0, 0, 0),
    }
    ledger = simulated.ledger
    assert slot_ms(ledger.slot_seconds()) == {
        "in_flight": 1012 * 1 + 1013 * 11 + 1 * 1 + 2 * 9 + 1 * 1 + 2 * 9,
        "placeholder": 5 * 11 + 5 * 1 + 10 * 9 + 5 * 1 + 10 * 9,
        "committed": 1012 * 10 + 1015 * 10,
        "garbage": 0,
        "lookahead": 5 * 1 + 5 * 11 + 5 * 1 + 5 * 9 + 8 * 1 + 5 * 9,
        "slack": 7 * 1 + 1 * 11 + 1 * 1 + 11 * 9 + 11 * 1 + 8 * 9,
        "cached": 1008 * 10,
        "free": 1264 * 1 + 240 * 13 + 224 * 19 + 256 * 10,
        # Turn 1's frame is out from 2 to 23, turn 2's from 14 to 33, turn 3's from 24 until its request ends at 33.
        "placeholder_accepted": 2 * 21 + 1 * 19,
        "placeholder_rejected": 3 * 21 + 4 * 19,
        "placeholder_discarded": 5 * 9,
    }
    assert slot_ms(ledger.content_slot_seconds()) == {
        "valid": 1012 * 10 + 1015 * 10 + 1017 * 2,
        "garbage": 3 * 10 + 4 * 2,
        "blank": 1024 * 10 + 12 * 3 + 28 * 7 + 22 * 10 + 19 * 2,
        "cached": 1008 * 10,
        "free": 1264 * 1 + 240 * 13 + 224 * 19 + 256 * 10,
    }
    assert ledger.stale_write_slots == 6  # turn 3's frame, whose request had ended


def test_the_classes_have_names_in_the_order_of_the_tables() -> None:
    assert RESERVATION_CLASSES == (
        "in_flight",
        "placeholder",
        "committed",
        "garbage",
        "lookahead",
        "slack",
        "cached",
        "free",
    )
    assert CONTENT_CLASSES == ("valid", "garbage", "blank", "cached", "free")


def behind_a_shared_prefix(index: int, own: int) -> tuple[Segment, ...]:
    return (shared_stream(0), 0, 8), (prompt_stream(index), 0, own)


def test_shared_blocks_count_once() -> None:
    """Blocks of 4, 20 of them, no speculation; prompts of 8 shared tokens and 2 or 1 of their own. Steps of 10.

    | ms | r0 | r1 | in flight | committed | slack | blocks |
    | 0 | 10 in flight | | 10 | 0 | 2 | 3 |
    | 10 | 10 certain, 1 in flight | hits 8, 1 in flight | 2 | 10 + 8 - 8 | 1 + 3 | 3 + 3 - 2 |
    | 20 | 11 certain, 1 in flight | ended | 1 | 11 | 0 | 3 |
    | 30 | ended: 3 full blocks of 12 confirmed tokens | | 0 | 0 | 0 | 0 |
    """
    specs = [
        spec(0, behind_a_shared_prefix(0, 2), 3),
        spec(1, behind_a_shared_prefix(1, 1), 1, arrival_ns=5 * MS),
    ]
    _, snapshots = run(specs, small_settings(num_gpu_blocks=21))
    assert snapshots.reservations == {
        0: (10, 0, 0, 0, 0, 2, 0, 68),
        10: (2, 0, 10, 0, 0, 4, 0, 64),
        20: (1, 0, 11, 0, 0, 0, 0, 68),
        30: (0, 0, 0, 0, 0, 0, 12, 68),
    }
    assert snapshots.content == {0: (0, 0, 12), 10: (10, 0, 6), 20: (11, 0, 1), 30: (0, 0, 0)}


def test_a_block_that_is_hit_while_it_is_computed_is_in_flight() -> None:
    """As above, both at 0: r1 hits the 8 tokens that r0 computes in the same step. They are in flight once and
    committed not at all, and nothing is in memory before the step has ended."""
    specs = [spec(0, behind_a_shared_prefix(0, 2), 2), spec(1, behind_a_shared_prefix(1, 1), 2)]
    _, snapshots = run(specs, small_settings(num_gpu_blocks=21))
    assert snapshots.reservations[0] == (11, 0, 0, 0, 0, 5, 0, 64)
    assert snapshots.content[0] == (0, 0, 16)
    assert snapshots.reservations[10] == (2, 0, 11, 0, 0, 3, 0, 64)
    assert snapshots.content[10] == (11, 0, 5)


def test_preempted_and_resumed() -> None:
    """4 blocks of 4, no speculation, steps of 10. r0: 7 tokens and 3 of output; r1: 8 and 2.

    | ms | r0 | r1 | in flight | committed | slack | cached | free |
    | 0 | 7 of 8 | 8 of 8 | 15 | 0 | 1 | 0 | 0 |
    | 10 | 7 + 1 of 8 | preempted: its two full blocks stay cached | 1 | 7 | 0 | 8 | 0 |
    | 20 | 8 + 1 of 12, its third block evicts one of them | | 1 | 8 | 3 | 4 | 0 |
    | 30 | ended: 2 full blocks, one without a hash | F = C = 4 hit, 5 in flight; evicts one | 5 | 4 | 3 | 4 | 0 |
    | 40 | | ended: 2 full blocks | 0 | 0 | 0 | 4 + 8 | 4 |

    A resumed request's content begins with what it hit: 4 valid and 8 blank at 30, and 9 valid at 40.
    """
    simulated, snapshots = run([spec(0, 7, 3), spec(1, 8, 2)], small_settings(num_gpu_blocks=5))
    assert snapshots.reservations == {
        0: (15, 0, 0, 0, 0, 1, 0, 0),
        10: (1, 0, 7, 0, 0, 0, 8, 0),
        20: (1, 0, 8, 0, 0, 3, 4, 0),
        30: (5, 0, 4, 0, 0, 3, 4, 0),
        40: (0, 0, 0, 0, 0, 0, 12, 4),
    }
    assert snapshots.content == {0: (0, 0, 16), 10: (7, 0, 1), 20: (8, 0, 4), 30: (4, 0, 8), 40: (0, 0, 0)}
    assert simulated.scheduler.num_preemptions == 1


def test_placeholders_of_a_frame_that_a_reset_made_stale_are_discarded() -> None:
    """Async, K = 3, prompt 8, 2 tokens of output, blocks of 4, steps of 10; schedule and update take no time.

    | ms | what | in flight | placeholder | committed | slack | blocks |
    | 0 | prefill and a frame of 1 + 3 | 9 | 3 | 0 | 0 | 3 |
    | 10 | the prefill returns; reset (it came at 5); all 9 are computed again | 9 | 0 | 0 | 3 | 3 |
    | 20 | the stale frame ends and returns, dropped. It wrote 4 slots that were no longer its own | as before |
    | 30 | the recomputation returns with the second token: ended, 2 full blocks |

    The frame's 3 placeholders were held from 0 to 10, and are nobody's acceptance or rejection.
    """
    settings = small_settings("ngram_gpu", 3, num_gpu_blocks=11, async_scheduling=True)
    simulated, snapshots = run([spec(0, 8, 2)], settings, acceptance=Replay([[2]]), events=[reset_at(5)])
    assert snapshots.reservations == {
        0: (9, 3, 0, 0, 0, 0, 0, 28),
        10: (9, 0, 0, 0, 0, 3, 0, 28),
        20: (9, 0, 0, 0, 0, 3, 0, 28),
        30: (0, 0, 0, 0, 0, 0, 8, 32),
    }
    seconds = slot_ms(simulated.ledger.slot_seconds())
    assert (seconds["placeholder"], seconds["placeholder_discarded"]) == (30, 30)
    assert (seconds["placeholder_accepted"], seconds["placeholder_rejected"]) == (0, 0)
    assert simulated.ledger.stale_write_slots == 4
    assert simulated.log.lines[-1][0] == 30


def test_overhang_is_slack() -> None:
    """Blocks of 2, prompt 3, K = 2 sync, all rejected, no lookahead: after the rejection the third block holds
    nothing but garbage; that is garbage until it is promised again, and rounding is slack."""
    settings = small_settings("ngram", 2, block_size=2, num_gpu_blocks=11)
    _, snapshots = run([spec(0, 3, 3)], settings, acceptance=Replay([[1]]), update_ms=1, schedule_ms=1)
    # 1: prefill. 12: update. 13: 1 + 2 from 3. 24: update: C = 4, W = 6. 25: 1 + 2 from 4. 36: ended.
    assert snapshots.reservations[12] == (0, 0, 3, 0, 0, 1, 0, 16)
    assert snapshots.reservations[13] == (1, 2, 3, 0, 0, 0, 0, 14)
    assert snapshots.reservations[24] == (0, 0, 4, 2, 0, 0, 0, 14)
    assert snapshots.reservations[25] == (1, 2, 4, 0, 0, 1, 0, 12)
    assert snapshots.content[24] == (4, 2, 0)


def test_a_ledger_that_was_told_nothing() -> None:
    ledger = Ledger(11, 4)
    assert ledger.reservations() == (0, 0, 0, 0, 0, 0, 0, 40)
    assert ledger.usage_mean() == 0.0
    ledger.closed(2 * MS)
    assert ledger.slot_seconds()["free"] == pytest.approx(0.08)
