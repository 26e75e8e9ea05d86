"""Comparing traces: every kind of difference is found, at the place where it is, and told readably."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sim.conform.compare import ABSENT, Difference, Trace, decisions, first_difference

CASES = Path(__file__).parent / "conformance" / "cases"


def recorded(name: str) -> Trace:
    with gzip.open(CASES / f"{name}.trace.json.gz", "rt", encoding="utf-8") as file:
        trace: Trace = json.load(file)
    return trace


@pytest.fixture(scope="module")
def original() -> Trace:
    return recorded("06-eagle3-async-tight.vllm-0.32")


@pytest.fixture
def changed(original: Trace) -> Trace:
    return copy.deepcopy(original)


def found(original: Trace, changed: Trace) -> Difference:
    difference = first_difference(original, changed)
    assert difference is not None
    return difference


def a_row(trace: Trace, *fields: str) -> int:
    """The first row, behind the tenth, in which these fields say something."""
    return next(i for i, row in enumerate(trace["turns"]) if i > 10 and all(row.get(name) for name in fields))


def test_a_trace_equals_itself(original: Trace, changed: Trace) -> None:
    assert first_difference(original, changed) is None


def test_the_two_releases_differ_where_the_reset_is_reported() -> None:
    # 0.32 reports as preempted whom a reset preempted, 0.24 does not (FORMAT of the recorded cases, `preempted`).
    difference = found(recorded("14-reset-prefix-cache.vllm-0.32"), recorded("14-reset-prefix-cache.vllm-0.24"))
    assert (difference.field, difference.request, difference.actual) == ("preempted", None, [])
    assert difference.before[-1] == f"turn {difference.turn} reset prefix cache and running requests: done"


@pytest.mark.parametrize(
    ("position", "part"),
    [(0, "num_computed_tokens"), (1, "num_tokens"), (2, "num_output_placeholders"), (3, "blocks")],
)
@pytest.mark.parametrize("field", ["after_schedule", "after_update"])
def test_each_part_of_a_request_has_its_name(
    original: Trace, changed: Trace, field: str, position: int, part: str
) -> None:
    index = a_row(original, field)
    request = list(original["turns"][index][field])[-1]
    state: list[Any] = changed["turns"][index][field][request]
    state[position] = state[position][:-1] if part == "blocks" else state[position] + 1
    difference = found(original, changed)
    assert (difference.row, difference.field, difference.request, difference.part) == (index, field, request, part)
    assert difference.actual == state[position]
    assert difference.expected == original["turns"][index][field][request][position]


@pytest.mark.parametrize("field", ["free_blocks", "free_blocks_after_update"])
def test_a_count_that_differs(original: Trace, changed: Trace, field: str) -> None:
    changed["turns"][12][field] += 1
    difference = found(original, changed)
    assert (difference.row, difference.field, difference.request) == (12, field, None)
    assert difference.actual == difference.expected + 1


@pytest.mark.parametrize("field", ["scheduled", "after_schedule", "returned", "delivered", "after_update"])
def test_order_counts(original: Trace, changed: Trace, field: str) -> None:
    index = next(i for i, row in enumerate(original["turns"]) if len(row.get(field, ())) > 1)
    row = changed["turns"][index]
    row[field] = dict(reversed(row[field].items()))
    difference = found(original, changed)
    assert (difference.row, difference.field, difference.part) == (index, field, "order")
    assert difference.actual == difference.expected[::-1]


def test_order_of_waiting_counts(original: Trace, changed: Trace) -> None:
    index = next(i for i, row in enumerate(original["turns"]) if len(row["waiting"]) > 1)
    changed["turns"][index]["waiting"].reverse()
    assert found(original, changed).field == "waiting"


def test_of_two_differences_the_one_decided_first_is_told(original: Trace, changed: Trace) -> None:
    index = a_row(original, "returned")
    changed["turns"][index]["waiting"] = ["nobody"]
    changed["turns"][index]["free_blocks"] += 1
    changed["turns"][index + 1]["turn"] += 1
    assert found(original, changed).field == "free_blocks"


def test_a_request_that_is_missing(original: Trace, changed: Trace) -> None:
    index = a_row(original, "scheduled")
    request = next(iter(original["turns"][index]["scheduled"]))
    del changed["turns"][index]["scheduled"][request]
    difference = found(original, changed)
    assert (difference.request, difference.actual) == (request, ABSENT)
    assert "(absent)" in difference.text()


def test_fields_that_one_side_lacks_or_has_too_many(original: Trace, changed: Trace) -> None:
    del changed["turns"][12]["returned"]
    assert found(original, changed).actual is ABSENT
    changed = copy.deepcopy(original)
    changed["turns"][12]["surplus"] = 1
    difference = found(original, changed)
    assert (difference.field, difference.expected) == ("surplus", ABSENT)


@pytest.mark.parametrize("longer", ["expected", "actual"])
def test_a_trace_that_ends_early(original: Trace, changed: Trace, longer: str) -> None:
    last = changed["turns"].pop()
    sides = (original, changed) if longer == "expected" else (changed, original)
    difference = found(*sides)
    assert (difference.field, difference.turn) == ("rows", last["turn"])
    assert abs(difference.expected - difference.actual) == 1


def test_the_summary_counts(original: Trace, changed: Trace) -> None:
    request = next(iter(changed["summary"]["num_preemptions"]))
    changed["summary"]["num_preemptions"][request] += 1
    difference = found(original, changed)
    assert (difference.turn, difference.field, difference.request) == (None, "num_preemptions", request)
    changed = copy.deepcopy(original)
    changed["summary"]["stalled"] = ["r0"]
    assert found(original, changed).actual == ["r0"]


def test_ten_lines_of_decisions_stand_before_it(original: Trace, changed: Trace) -> None:
    changed["turns"][40]["free_blocks_after_update"] += 1
    difference = found(original, changed)
    # The schedule of the same turn is agreed on, so it is the last line; the return of that turn is not.
    assert len(difference.before) == 10
    assert difference.before[-1].startswith(f"turn {original['turns'][40]['turn']} schedule ")
    assert difference.before[-2].startswith(f"turn {original['turns'][39]['turn']} return ")


def test_decisions_in_words() -> None:
    row = {
        "turn": 7,
        "events": [
            {"turn": 7, "type": "abort", "id": "r9"},
            {"turn": 7, "type": "reset_prefix_cache", "reset_running_requests": False, "done": False},
        ],
        "scheduled": {"r1": [6, 5], "r2": [40, 0], "r3": [8, 0]},
        "preempted": ["r4"],
        "admitted": {"r2": 0},
        "resumed": {"r3": 16},
        "free_blocks": 3,
        "returned": {"r1": 4, "r5": 2},
        "delivered": {"r1": 4, "r5": 0},
        "finished": ["r1"],
        "free_blocks_after_update": 5,
        "waiting": [],
    }
    assert [line for _, line in decisions(row)] == [
        "turn 7 abort r9",
        "turn 7 reset prefix cache: not done",
        "turn 7 schedule r1 6 (drafts 5), r2 40 admitted, r3 8 resumed with hit 16, preempted r4; 3 blocks free",
        "turn 7 return r1 4, r5 2 (0 delivered), finished r1; 5 blocks free",
    ]


def test_the_text_names_turn_request_field_and_both_values(original: Trace, changed: Trace) -> None:
    index = a_row(original, "after_update")
    request, state = next(iter(changed["turns"][index]["after_update"].items()))
    state[2] = -4
    text = found(original, changed).text("vLLM 0.32", "speckv").splitlines()
    assert text[0] == f"turn {index} (row {index}), after_update, request {request}, num_output_placeholders:"
    assert text[1].split(maxsplit=2) == ["vLLM", "0.32", str(original["turns"][index]["after_update"][request][2])]
    assert text[2].split() == ["speckv", "-4"]
    assert len(text) == 4 + 10
