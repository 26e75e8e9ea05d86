"""A request's counters, its table of transitions, and that an illegal event changes nothing."""

from __future__ import annotations

from inspect import isdatadescriptor
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.core.request import FINISHED, PREEMPTED, RUNNING, STATUS_NAMES, WAITING, IllegalTransition, Request
from tests.by_hand import Tokens

LEGAL = {
    (WAITING, RUNNING),  # admitted
    (WAITING, FINISHED),  # aborted
    (RUNNING, PREEMPTED),
    (RUNNING, FINISHED),  # stopped or aborted
    (PREEMPTED, RUNNING),  # admitted again
    (PREEMPTED, FINISHED),  # aborted, or stopped by output that was in flight
}
STATUSES = (WAITING, RUNNING, PREEMPTED, FINISHED)
WAY_TO = {WAITING: [], RUNNING: [RUNNING], PREEMPTED: [RUNNING, PREEMPTED], FINISHED: [RUNNING, FINISHED]}

ATTRIBUTES = [name for name, kind in vars(Request).items() if isdatadescriptor(kind) and not name.startswith("_")]
"""Of either core: the compiled one has no `__slots__`."""


def a_request(**changes: Any) -> Request:
    return Request("a", 0, 7, 5, Tokens(range(7), 4), **changes)


def everything(request: Request) -> dict[str, Any]:
    """All that a request has, lists copied."""
    found = {name: getattr(request, name) for name in ATTRIBUTES}
    return {name: list(value) if isinstance(value, list) else value for name, value in found.items()}


def test_a_new_request() -> None:
    request = a_request(arrival=3, priority=2)
    assert (request.id, request.index, request.arrival, request.priority) == ("a", 0, 3, 2)
    assert request.status == WAITING
    assert (request.num_prompt_tokens, request.num_tokens, request.max_tokens) == (7, 7, 5)
    assert (request.most_tokens, request.end_tokens) == (12, 12)
    counters = [name for name in ATTRIBUTES if name.startswith("num_")]
    zero = [name for name in counters if name not in ("num_prompt_tokens", "num_tokens")]
    assert {name: getattr(request, name) for name in zero} == dict.fromkeys(zero, 0)
    assert request.block_table == []
    assert len(request.block_hashes) == 0
    assert not request.is_prefill_chunk


@pytest.mark.parametrize(("limit", "expected"), [(None, 5), (3, 3), (5, 5), (9, 5)])
def test_an_end_token_comes_first_or_max_tokens_does(limit: int | None, expected: int) -> None:
    assert a_request(num_output_limit=limit).end_tokens == 7 + expected


@pytest.mark.parametrize(("prompt", "max_tokens"), [(0, 5), (7, 0), (-1, 5), (7, -2)])
def test_lengths_below_one_are_refused(prompt: int, max_tokens: int) -> None:
    with pytest.raises(ValueError, match=rf"request a: a prompt of {prompt} and max_tokens of {max_tokens}"):
        Request("a", 0, prompt, max_tokens, Tokens([], 4))


@pytest.mark.parametrize(("before", "after"), list(product(STATUSES, STATUSES)))
def test_every_pair_of_statuses(before: int, after: int) -> None:
    request = a_request()
    for status in WAY_TO[before]:
        request.become(status)
    snapshot = everything(request)
    if (before, after) in LEGAL:
        request.become(after)
        assert request.status == after
        snapshot["status"] = after
    else:
        with pytest.raises(IllegalTransition, match=f"request a: {STATUS_NAMES[before]} to {STATUS_NAMES[after]}"):
            request.become(after)
    assert everything(request) == snapshot


@given(st.lists(st.sampled_from(STATUSES), max_size=20))
def test_any_walk_follows_the_table(walk: list[int]) -> None:
    request = a_request()
    status = WAITING
    for wanted in walk:
        if (status, wanted) in LEGAL:
            request.become(wanted)
            status = wanted
        else:
            with pytest.raises(IllegalTransition):
                request.become(wanted)
        assert request.status == status


@given(st.lists(st.integers(0, 4), max_size=8))
def test_hashes_are_made_when_asked_for_and_kept(counts: list[int]) -> None:
    """In whatever portions they are asked for, they are the same."""
    request = Request("a", 0, 16, 1, Tokens(range(16), 4))
    at_once = Request("b", 1, 16, 1, Tokens(range(16), 4)).hashes(4).numbers(4)
    most = 0
    for count in counts:
        most = max(most, count)
        assert request.hashes(count).numbers(count) == at_once[:count]
        assert len(request.block_hashes) == most
    assert len(set(at_once)) == 4


def test_what_it_prints() -> None:
    assert repr(a_request()) == "Request('a', waiting, num_tokens=7, num_computed_tokens=0, placeholders=0)"
