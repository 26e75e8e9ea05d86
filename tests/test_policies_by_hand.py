"""Both accounts of one request over 20 steps, written out for each way to undo a rejection.

The rows follow from the definitions of `docs/ledger.md` and the rules said here, not from a run. Synchronous, blocks
of 4, K = 3, a prompt of 10, EAGLE-3 (3 slots of lookahead), one request alone. Before a step F = C; the step takes the
last confirmed token and 3 drafts, so C = F + 4, R = C + 3 and the table has ceil(R / 4) blocks or more; `a` of the
drafts are accepted, and then C = F = F + 1 + a and W = F + 4 of before.

Steps 1 to 16 meet every pair of C modulo 4 and accepted drafts once (a walk over all edges between the four places in a
block), so that every rollback within a block, to its edge and across it is there.

A line of a table is a step: its number, accepted drafts, then

    as scheduled        in flight, placeholder, committed, garbage, lookahead, slack | blocks | valid, garbage, blank
    when it has ended                                                                         | valid, garbage, blank
    as updated          committed, garbage, lookahead, slack | blocks | valid, garbage, blank

(When a step ends the reservations stay as they are; after an update nothing is in flight.) The last step ends the
request, which then holds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from sim.core.settings import Rules
from sim.device import Device, TokenTree
from sim.models.acceptance import Replay
from sim.policies.axes import UNDO, rules_with
from sim.policies.presets import PRESETS
from sim.records import Batch, Returned
from tests.by_hand import FixedTime, Simulated, small_settings, spec
from tests.naive_accounts import NaiveAccounts

OVERWRITE = """
 0 0 | 10  0  0  0  3  3 |  4 |  0  0 16 | 10  0  6 | 10  0  0  6 |  4 | 10  0  6
 1 0 |  1  3 10  0  3  3 |  5 | 10  0 10 | 11  3  6 | 11  3  0  6 |  5 | 11  3  6
 2 0 |  1  3 11  0  3  2 |  5 | 11  3  6 | 12  3  5 | 12  3  0  5 |  5 | 12  3  5
 3 0 |  1  3 12  0  3  1 |  5 | 12  3  5 | 13  3  4 | 13  3  0  4 |  5 | 13  3  4
 4 0 |  1  3 13  0  3  0 |  5 | 13  3  4 | 14  3  3 | 14  3  0  3 |  5 | 14  3  3
 5 1 |  1  3 14  0  3  3 |  6 | 14  3  7 | 16  2  6 | 16  2  0  6 |  6 | 16  2  6
 6 1 |  1  3 16  0  3  1 |  6 | 16  2  6 | 18  2  4 | 18  2  0  4 |  6 | 18  2  4
 7 2 |  1  3 18  0  3  3 |  7 | 18  2  8 | 21  1  6 | 21  1  0  6 |  7 | 21  1  6
 8 1 |  1  3 21  0  3  0 |  7 | 21  1  6 | 23  2  3 | 23  2  0  3 |  7 | 23  2  3
 9 1 |  1  3 23  0  3  2 |  8 | 23  2  7 | 25  2  5 | 25  2  0  5 |  8 | 25  2  5
10 3 |  1  3 25  0  3  0 |  8 | 25  2  5 | 29  0  3 | 29  0  0  3 |  8 | 29  0  3
11 2 |  1  3 29  0  3  0 |  9 | 29  0  7 | 32  1  3 | 32  1  0  3 |  9 | 32  1  3
12 3 |  1  3 32  0  3  1 | 10 | 32  1  7 | 36  0  4 | 36  0  0  4 | 10 | 36  0  4
13 2 |  1  3 36  0  3  1 | 11 | 36  0  8 | 39  1  4 | 39  1  0  4 | 11 | 39  1  4
14 3 |  1  3 39  0  3  2 | 12 | 39  1  8 | 43  0  5 | 43  0  0  5 | 12 | 43  0  5
15 2 |  1  3 43  0  3  2 | 13 | 43  0  9 | 46  1  5 | 46  1  0  5 | 13 | 46  1  5
16 3 |  1  3 46  0  3  3 | 14 | 46  1  9 | 50  0  6 | 50  0  0  6 | 14 | 50  0  6
17 0 |  1  3 50  0  3  3 | 15 | 50  0 10 | 51  3  6 | 51  3  0  6 | 15 | 51  3  6
18 2 |  1  3 51  0  3  2 | 15 | 51  3  6 | 54  1  5 | 54  1  0  5 | 15 | 54  1  5
19 3 |  1  3 54  0  3  3 | 16 | 54  1  9 | 58  0  6 |  0  0  0  0 |  0 |  0  0  0
"""
"""Nothing is given back: the table only grows, and what a rejection leaves is slack and garbage behind C."""

REWIND = """
 0 0 | 10  0  0  0  3  3 |  4 |  0  0 16 | 10  0  6 | 10  0  0  6 |  4 | 10  0  6
 1 0 |  1  3 10  0  3  3 |  5 | 10  0 10 | 11  3  6 | 11  3  0  2 |  4 | 11  3  2
 2 0 |  1  3 11  0  3  2 |  5 | 11  3  6 | 12  3  5 | 12  3  0  1 |  4 | 12  3  1
 3 0 |  1  3 12  0  3  1 |  5 | 12  3  5 | 13  3  4 | 13  3  0  0 |  4 | 13  3  0
 4 0 |  1  3 13  0  3  0 |  5 | 13  3  4 | 14  3  3 | 14  3  0  3 |  5 | 14  3  3
 5 1 |  1  3 14  0  3  3 |  6 | 14  3  7 | 16  2  6 | 16  2  0  2 |  5 | 16  2  2
 6 1 |  1  3 16  0  3  1 |  6 | 16  2  6 | 18  2  4 | 18  2  0  4 |  6 | 18  2  4
 7 2 |  1  3 18  0  3  3 |  7 | 18  2  8 | 21  1  6 | 21  1  0  2 |  6 | 21  1  2
 8 1 |  1  3 21  0  3  0 |  7 | 21  1  6 | 23  2  3 | 23  2  0  3 |  7 | 23  2  3
 9 1 |  1  3 23  0  3  2 |  8 | 23  2  7 | 25  2  5 | 25  2  0  1 |  7 | 25  2  1
10 3 |  1  3 25  0  3  0 |  8 | 25  2  5 | 29  0  3 | 29  0  0  3 |  8 | 29  0  3
11 2 |  1  3 29  0  3  0 |  9 | 29  0  7 | 32  1  3 | 32  1  0  3 |  9 | 32  1  3
12 3 |  1  3 32  0  3  1 | 10 | 32  1  7 | 36  0  4 | 36  0  0  4 | 10 | 36  0  4
13 2 |  1  3 36  0  3  1 | 11 | 36  0  8 | 39  1  4 | 39  1  0  4 | 11 | 39  1  4
14 3 |  1  3 39  0  3  2 | 12 | 39  1  8 | 43  0  5 | 43  0  0  5 | 12 | 43  0  5
15 2 |  1  3 43  0  3  2 | 13 | 43  0  9 | 46  1  5 | 46  1  0  5 | 13 | 46  1  5
16 3 |  1  3 46  0  3  3 | 14 | 46  1  9 | 50  0  6 | 50  0  0  6 | 14 | 50  0  6
17 0 |  1  3 50  0  3  3 | 15 | 50  0 10 | 51  3  6 | 51  3  0  2 | 14 | 51  3  2
18 2 |  1  3 51  0  3  2 | 15 | 51  3  6 | 54  1  5 | 54  1  0  5 | 15 | 54  1  5
19 3 |  1  3 54  0  3  3 | 16 | 54  1  9 | 58  0  6 |  0  0  0  0 |  0 |  0  0  0
"""
"""The end of what was reserved goes back by the rejected drafts: R = F + 7 - (3 - a), which is the new C + 3; the table
keeps ceil(R / 4). So blocks wholly behind it are freed, and garbage, which ends at F + 4 <= C + 3, stays in memory."""

FREE_REJECTED = """
 0 0 | 10  0  0  0  3  3 |  4 |  0  0 16 | 10  0  6 | 10  0  0  6 |  4 | 10  0  6
 1 0 |  1  3 10  0  3  3 |  5 | 10  0 10 | 11  3  6 | 11  1  0  0 |  3 | 11  1  0
 2 0 |  1  3 11  0  3  2 |  5 | 11  1  8 | 12  3  5 | 12  0  0  0 |  3 | 12  0  0
 3 0 |  1  3 12  0  3  1 |  5 | 12  0  8 | 13  3  4 | 13  3  0  0 |  4 | 13  3  0
 4 0 |  1  3 13  0  3  0 |  5 | 13  3  4 | 14  3  3 | 14  2  0  0 |  4 | 14  2  0
 5 1 |  1  3 14  0  3  3 |  6 | 14  2  8 | 16  2  6 | 16  0  0  0 |  4 | 16  0  0
 6 1 |  1  3 16  0  3  1 |  6 | 16  0  8 | 18  2  4 | 18  2  0  0 |  5 | 18  2  0
 7 2 |  1  3 18  0  3  3 |  7 | 18  2  8 | 21  1  6 | 21  1  0  2 |  6 | 21  1  2
 8 1 |  1  3 21  0  3  0 |  7 | 21  1  6 | 23  2  3 | 23  1  0  0 |  6 | 23  1  0
 9 1 |  1  3 23  0  3  2 |  8 | 23  1  8 | 25  2  5 | 25  2  0  1 |  7 | 25  2  1
10 3 |  1  3 25  0  3  0 |  8 | 25  2  5 | 29  0  3 | 29  0  0  3 |  8 | 29  0  3
11 2 |  1  3 29  0  3  0 |  9 | 29  0  7 | 32  1  3 | 32  0  0  0 |  8 | 32  0  0
12 3 |  1  3 32  0  3  1 | 10 | 32  0  8 | 36  0  4 | 36  0  0  4 | 10 | 36  0  4
13 2 |  1  3 36  0  3  1 | 11 | 36  0  8 | 39  1  4 | 39  1  0  0 | 10 | 39  1  0
14 3 |  1  3 39  0  3  2 | 12 | 39  1  8 | 43  0  5 | 43  0  0  5 | 12 | 43  0  5
15 2 |  1  3 43  0  3  2 | 13 | 43  0  9 | 46  1  5 | 46  1  0  1 | 12 | 46  1  1
16 3 |  1  3 46  0  3  3 | 14 | 46  1  9 | 50  0  6 | 50  0  0  6 | 14 | 50  0  6
17 0 |  1  3 50  0  3  3 | 15 | 50  0 10 | 51  3  6 | 51  1  0  0 | 13 | 51  1  0
18 2 |  1  3 51  0  3  2 | 15 | 51  1  8 | 54  1  5 | 54  1  0  1 | 14 | 54  1  1
19 3 |  1  3 54  0  3  3 | 16 | 54  1  9 | 58  0  6 |  0  0  0  0 |  0 |  0  0  0
"""
"""Only what is right keeps its blocks: ceil(C / 4). Garbage survives in the last of them alone."""

COMMIT_TAIL = """
 0 0 | 10  0  0  0  0  2 |  3 |  0  0 12 | 10  0  2 | 10  0  0  2 |  3 | 10  0  2
 1 0 |  1  3 10  0  4  2 |  5 | 10  0 10 | 11  3  6 | 11  3  0  6 |  5 | 11  3  6
 2 0 |  1  3 11  0  4  1 |  5 | 11  3  6 | 12  3  5 | 12  3  0  5 |  5 | 12  3  5
 3 0 |  1  3 12  0  4  0 |  5 | 12  3  5 | 13  3  4 | 13  3  0  4 |  5 | 13  3  4
 4 0 |  1  3 13  0  4  3 |  6 | 13  3  8 | 14  3  7 | 14  3  0  7 |  6 | 14  3  7
 5 1 |  1  3 14  0  4  2 |  6 | 14  3  7 | 16  2  6 | 16  2  0  6 |  6 | 16  2  6
 6 1 |  1  3 16  0  4  0 |  6 | 16  2  6 | 18  2  4 | 18  2  0  4 |  6 | 18  2  4
 7 2 |  1  3 18  0  4  2 |  7 | 18  2  8 | 21  1  6 | 21  1  0  6 |  7 | 21  1  6
 8 1 |  1  3 21  0  4  3 |  8 | 21  1 10 | 23  2  7 | 23  2  0  7 |  8 | 23  2  7
 9 1 |  1  3 23  0  4  1 |  8 | 23  2  7 | 25  2  5 | 25  2  0  5 |  8 | 25  2  5
10 3 |  1  3 25  0  4  3 |  9 | 25  2  9 | 29  0  7 | 29  0  0  7 |  9 | 29  0  7
11 2 |  1  3 29  0  4  3 | 10 | 29  0 11 | 32  1  7 | 32  1  0  7 | 10 | 32  1  7
12 3 |  1  3 32  0  4  0 | 10 | 32  1  7 | 36  0  4 | 36  0  0  4 | 10 | 36  0  4
13 2 |  1  3 36  0  4  0 | 11 | 36  0  8 | 39  1  4 | 39  1  0  4 | 11 | 39  1  4
14 3 |  1  3 39  0  4  1 | 12 | 39  1  8 | 43  0  5 | 43  0  0  5 | 12 | 43  0  5
15 2 |  1  3 43  0  4  1 | 13 | 43  0  9 | 46  1  5 | 46  1  0  5 | 13 | 46  1  5
16 3 |  1  3 46  0  4  2 | 14 | 46  1  9 | 50  0  6 | 50  0  0  6 | 14 | 50  0  6
17 0 |  1  3 50  0  4  2 | 15 | 50  0 10 | 51  3  6 | 51  3  0  6 | 15 | 51  3  6
18 2 |  1  3 51  0  4  1 | 15 | 51  3  6 | 54  1  5 | 54  1  0  5 | 15 | 54  1  5
19 3 |  1  3 54  0  4  2 | 16 | 54  1  9 | 58  0  6 |  0  0  0  0 |  0 |  0  0  0
"""
"""With SGLang's reservation, committed + 2 (K + 1) = F + 8, and no lookahead beside it: R is 4 slots
beyond C. The prefill is given its 10 slots."""

COMPACT = """
 0 0 | 10  0  0  0  3  3 |  4 |  0  0 16 | 10  0  6 | 10  0  0  6 |  4 | 10  0  6
 1 0 |  1  3 10  0  3  3 |  5 | 10  0 10 | 11  3  6 | 11  3  0  6 |  5 | 11  3  6
 2 0 |  1  3 11  0  3  2 |  5 | 11  3  6 | 12  3  5 | 12  3  0  5 |  5 | 12  3  5
 3 0 |  1  3 12  0  3  1 |  5 | 12  3  5 | 13  3  4 | 13  3  0  4 |  5 | 13  3  4
 4 0 |  1  3 13  0  3  0 |  5 | 13  3  4 | 14  3  3 | 14  3  0  3 |  5 | 14  3  3
 5 1 |  1  3 14  0  3  3 |  6 | 14  3  7 | 16  2  6 | 16  2  0  6 |  6 | 16  2  6
 6 1 |  1  3 16  0  3  1 |  6 | 16  2  6 | 18  2  4 | 18  2  0  4 |  6 | 18  2  4
 7 2 |  1  3 18  0  3  3 |  7 | 18  2  8 | 21  1  6 | 21  1  0  6 |  7 | 21  1  6
 8 1 |  1  3 21  0  3  0 |  7 | 21  1  6 | 23  2  3 | 23  2  0  3 |  7 | 23  2  3
 9 1 |  1  3 23  0  3  2 |  8 | 23  2  7 | 25  2  5 | 25  2  0  5 |  8 | 25  2  5
10 2 |  1  3 25  0  3  0 |  8 | 25  2  5 | 28  1  3 | 28  1  0  3 |  8 | 28  1  3
11 2 |  1  3 28  0  3  1 |  9 | 28  1  7 | 31  1  4 | 31  1  0  4 |  9 | 31  1  4
12 2 |  1  3 31  0  3  2 | 10 | 31  1  8 | 34  1  5 | 34  1  0  5 | 10 | 34  1  5
13 0 |  1  3 34  0  3  3 | 11 | 34  1  9 | 35  3  6 | 35  3  0  6 | 11 | 35  3  6
14 1 |  1  3 35  0  3  2 | 11 | 35  3  6 | 37  2  5 | 37  2  0  5 | 11 | 37  2  5
15 0 |  1  3 37  0  3  0 | 11 | 37  2  5 | 38  3  3 | 38  3  0  3 | 11 | 38  3  3
16 2 |  1  3 38  0  3  3 | 12 | 38  3  7 | 41  1  6 | 41  1  0  6 | 12 | 41  1  6
17 1 |  1  3 41  0  3  0 | 12 | 41  1  6 | 43  2  3 | 43  2  0  3 | 12 | 43  2  3
18 2 |  1  3 43  0  3  2 | 13 | 43  2  7 | 46  1  5 | 46  1  0  5 | 13 | 46  1  5
19 0 |  1  3 46  0  3  3 | 14 | 46  1  9 | 47  3  6 |  0  0  0  0 |  0 |  0  0  0
"""
"""A tree of 2 nodes and 1 below: at most 2 of the 3 drafts are accepted. The slots are those of `overwrite`."""

MOVED = (0, 0, 0, 0, 0, 1, 1, 2, 0, 0, 1, 2, 1, 0, 0, 0, 2, 0, 1, 0)
"""By step, of the tree: its rows are 0 the confirmed token, 1 and 2 the first level, 3 the second. The accepted branch
is to stand in rows 1 and 2. Of the first level row 2 is the accepted one where the output position is odd, and it moves
then; the one node of the second level stands in row 3 and moves always. Output positions are F - 9: 1, 2, 3, 4, 5, 7,
9, 12, 14, 16, 19, 22, 25, 26, 28, 29, 32, 34, 37."""


class Line:
    """A step of a table."""

    def __init__(self, text: str) -> None:
        first, scheduled, blocks, content, ended, updated, kept, after = (
            tuple(map(int, part.split())) for part in text.split("|")
        )
        self.step, self.accepted = first
        self.scheduled = (*scheduled, *blocks, *content)
        self.ended = (*scheduled, *blocks, *ended)
        self.updated = (0, 0, *updated, *kept, *after)


def lines(table: str) -> list[Line]:
    return [Line(text) for text in table.strip().splitlines()]


class Steps:
    """What the ledger shows at each step: the classes of held slots, the blocks of the request's table, content."""

    def __init__(self, simulated: Simulated) -> None:
        self.simulated = simulated
        self.scheduled_rows: list[tuple[int, ...]] = []
        self.ended_rows: list[tuple[int, ...]] = []
        self.updated_rows: list[tuple[int, ...]] = []
        self.accepted: list[int] = []
        self.moved: list[int] = []
        simulated.engine.add_observer(self)

    def _row(self) -> tuple[int, ...]:
        ledger = self.simulated.ledger
        blocks = sum(len(request.block_table) for request in self.simulated.scheduler.running)
        return *ledger.reservations()[:6], blocks, *ledger.content()[:3]

    def scheduled(self, now: int, batch: Batch) -> None:
        if batch.requests:
            self.scheduled_rows.append(self._row())

    def step_started(self, now: int, batch: Batch, shape: Any, cost: Any) -> None:
        self.moved.append(shape.moved_rows)

    def step_ended(self, now: int, batch: Batch) -> None:
        self.ended_rows.append(self._row())
        self.accepted.append(batch.accepted[0])

    def updated(self, now: int, returned: Returned) -> None:
        self.updated_rows.append(self._row())


def replay(accepted: Iterable[int]) -> tuple[Replay, int]:
    """Acceptance that gives the steps after the prefill these drafts, and the output tokens that come of it."""
    lengths = [1]
    for drafts in accepted:
        lengths += [1 + drafts] + [1] * drafts
    return Replay([lengths]), len(lengths)


def simulate(rules: Rules, table: str, lookahead: int, tree: TokenTree | None = None) -> Steps:
    acceptance, max_tokens = replay(line.accepted for line in lines(table)[1:])
    settings = small_settings("eagle3", 3, num_lookahead_tokens=lookahead)
    simulated = Simulated([spec(0, 10, max_tokens)], settings, rules, schedule_ms=1, update_ms=1, acceptance=acceptance)
    if tree is not None:
        simulated.engine.device = Device(FixedTime(10), acceptance, tree=tree)
    simulated.engine.add_observer(NaiveAccounts(simulated.scheduler, simulated.ledger))
    steps = Steps(simulated)
    simulated.run()
    return steps


def check(steps: Steps, table: str) -> None:
    expected = lines(table)
    assert [line.step for line in expected] == list(range(20))
    assert steps.accepted == [line.accepted for line in expected]
    for number, line in enumerate(expected):
        assert steps.scheduled_rows[number] == line.scheduled, f"step {number} as scheduled"
        assert steps.ended_rows[number] == line.ended, f"step {number} when it has ended"
        assert steps.updated_rows[number] == line.updated, f"step {number} as updated"
    assert len(steps.scheduled_rows) == len(steps.updated_rows) == 20


@pytest.mark.parametrize(
    ("undo", "table"), [("overwrite", OVERWRITE), ("rewind", REWIND), ("free_rejected", FREE_REJECTED)]
)
def test_20_steps_by_hand(undo: str, table: str) -> None:
    check(simulate(rules_with(PRESETS["vllm-0.32"], undo=undo), table, 3), table)


def test_20_steps_by_hand_of_commit_tail() -> None:
    rules = rules_with(PRESETS["vllm-0.32"], undo="commit_tail", reservation="two_frames")
    check(simulate(rules, COMMIT_TAIL, 0), COMMIT_TAIL)


def test_20_steps_by_hand_of_a_compacted_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which node of a level is accepted is drawn; here the draws are given."""

    def draws(seed: int, purpose: str, request: int, first: int, count: int) -> Any:
        assert purpose == "tree"
        return np.array([0.75 if first % 2 else 0.25, 0.5][:count])

    monkeypatch.setattr("sim.device.uniforms", draws)
    rules = rules_with(PRESETS["vllm-0.32"], undo="compact")
    steps = simulate(rules, COMPACT, 3, TokenTree(0, [2, 1]))
    check(steps, COMPACT)
    assert tuple(steps.moved) == MOVED
    assert steps.simulated.engine.device.moved_rows == sum(MOVED) == 11


def test_the_tables_meet_every_place_in_a_block_with_every_number_of_accepted_drafts() -> None:
    """Of the tables, not of the simulator."""
    for table, most in ((OVERWRITE, 3), (REWIND, 3), (FREE_REJECTED, 3), (COMMIT_TAIL, 3), (COMPACT, 2)):
        met = {(line.scheduled[2] % 4, line.accepted) for line in lines(table)[1:]}
        assert met == {(place, accepted) for place in range(4) for accepted in range(most + 1)}


NOTHING_ACCEPTED = {
    "overwrite": ((2, 2), (3, 3), (4, 4), (4, 4), (5, 5), (5, 5)),
    "commit_tail": ((2, 2), (3, 3), (4, 4), (4, 4), (5, 5), (5, 5)),
    "compact": ((2, 2), (3, 3), (4, 4), (4, 4), (5, 5), (5, 5)),
    "rewind": ((2, 2), (3, 2), (4, 3), (4, 3), (5, 4), (5, 4)),
    "free_rejected": ((2, 2), (3, 2), (4, 3), (4, 3), (5, 4), (5, 4)),
}
"""Blocks as scheduled and as updated, step by step. Blocks of 2, a prompt of 3, K = 2, no lookahead.

    step   C as scheduled   blocks that needs   C as updated   blocks that needs
    0      3                2                   3              2
    1      6                3                   4              2
    2      7                4                   5              3
    3      8                4                   6              3
    4      9                5                   7              4
    5      10               5                   8              4

vLLM keeps the block that held nothing but drafts (steps 1 to 5); the two that free give it back.
"""
WITH_LOOKAHEAD = {
    "overwrite": ((3, 3), (4, 4), (5, 5), (5, 5), (6, 6), (6, 6)),
    "commit_tail": ((3, 3), (4, 4), (5, 5), (5, 5), (6, 6), (6, 6)),
    "compact": ((3, 3), (4, 4), (5, 5), (5, 5), (6, 6), (6, 6)),
    "rewind": ((3, 3), (4, 3), (5, 4), (5, 4), (6, 5), (6, 5)),
    "free_rejected": ((3, 3), (4, 2), (5, 3), (5, 3), (6, 4), (6, 4)),
}
"""The same with EAGLE-3's 2 slots of lookahead: as scheduled ceil((C + 2) / 2). `rewind` takes the 2 rejected drafts
off the reserved end and keeps ceil((C + 2) / 2) of the C as updated; `free_rejected` keeps ceil(C / 2), so the block of
the lookahead goes with the drafts'. The prefill rejects nothing, so nothing is freed at step 0."""


@pytest.mark.parametrize(("method", "table"), [("ngram", NOTHING_ACCEPTED), ("eagle3", WITH_LOOKAHEAD)])
@pytest.mark.parametrize("undo", UNDO)
def test_blocks_of_2_a_prompt_of_3_two_drafts_and_none_accepted(undo: str, method: str, table: dict[str, Any]) -> None:
    settings = small_settings(method, 2, block_size=2)
    rules = rules_with(PRESETS["vllm-0.32"], undo=undo)
    simulated = Simulated([spec(0, 3, 7)], settings, rules, acceptance=Replay([[1]]), schedule_ms=1, update_ms=1)
    simulated.engine.add_observer(NaiveAccounts(simulated.scheduler, simulated.ledger))
    steps = Steps(simulated)
    simulated.run()
    blocks = [(before[6], after[6]) for before, after in zip(steps.scheduled_rows, steps.updated_rows, strict=True)]
    assert blocks[:-1] == list(table[undo])
    assert blocks[-1][1] == 0
