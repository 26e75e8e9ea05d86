"""Requests, shared prefixes, conversations, and the open and closed loops that start them."""

import heapq
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.arrivals import AllAtOnce, Constant, Poisson
from workloads.closed_loop import ClosedLoop
from workloads.conversations import Conversations
from workloads.lengths import Fixed, LogNormal, Uniform
from workloads.open_loop import OpenLoop
from workloads.prompts import SharedPrefixes
from workloads.sessions import CHUNK, Sessions, SingleRequests
from workloads.spec import (
    RequestSpec,
    Segment,
    Workload,
    merge_segments,
    output_stream,
    prompt_stream,
    shared_stream,
    trace_stream,
)

SECOND = 1_000_000_000


def tokens(segments: tuple[Segment, ...]) -> list[tuple[int, int]]:
    """Segments token by token: (stream, position)."""
    return [(stream, position) for stream, start, count in segments for position in range(start, start + count)]


def serve(workload: Workload, service_ns: Callable[[RequestSpec], int]) -> list[tuple[RequestSpec, int]]:
    """An ample server: each request ends `service_ns` after it arrives. Returns (request, end) in order of ends."""
    ends: list[tuple[int, int, RequestSpec]] = []
    served: list[tuple[RequestSpec, int]] = []
    arrivals = workload.arrivals()
    coming = next(arrivals, None)
    while ends or coming is not None:
        if coming is not None and (not ends or coming.arrival_ns <= ends[0][0]):
            heapq.heappush(ends, (coming.arrival_ns + service_ns(coming), coming.index, coming))
            coming = next(arrivals, None)
            continue
        end_ns, _, spec = heapq.heappop(ends)
        served.append((spec, end_ns))
        for following in workload.after(spec, end_ns):
            assert following.arrival_ns >= end_ns
            heapq.heappush(ends, (following.arrival_ns + service_ns(following), following.index, following))
    return served


# --- spec ---------------------------------------------------------------------------------------------------------


def test_streams_never_collide() -> None:
    streams = [make(n) for make in (output_stream, prompt_stream, shared_stream, trace_stream) for n in range(1000)]
    assert len(set(streams)) == len(streams)
    assert [output_stream(5), prompt_stream(5), shared_stream(5), trace_stream(5)] == [20, 21, 22, 23]


def test_merging_by_hand() -> None:
    assert merge_segments([(1, 0, 4), (1, 4, 3), (1, 8, 1), (2, 9, 0), (1, 9, 2), (2, 11, 1)]) == (
        (1, 0, 7),
        (1, 8, 3),
        (2, 11, 1),
    )
    assert merge_segments([(1, 0, 0)]) == ()
    with pytest.raises(ValueError, match=r"got segment \(1, 0, -1\)"):
        merge_segments([(1, 0, -1)])


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(0, 4)), max_size=12))
def test_merging_keeps_the_tokens_and_has_one_spelling(segments: list[Segment]) -> None:
    merged = merge_segments(segments)
    assert tokens(merged) == tokens(tuple(segments))
    assert merge_segments([(stream, position, 1) for stream, position in tokens(merged)]) == merged


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": -1}, "index"),
        ({"arrival_ns": -1}, "arrival_ns"),
        ({"max_tokens": 0}, "max_tokens must be 1 or more"),
        ({"num_prompt_tokens": 0, "prompt": ()}, "num_prompt_tokens"),
        ({"num_prompt_tokens": 4}, "num_prompt_tokens is 4, but the segments hold 3"),
    ],
)
def test_a_request_that_does_not_add_up_is_refused(change: dict[str, int], message: str) -> None:
    spec = RequestSpec(index=0, arrival_ns=0, prompt=((1, 0, 3),), num_prompt_tokens=3, max_tokens=1)
    with pytest.raises(ValueError, match=message):
        replace(spec, **change)  # type: ignore[arg-type]


# --- independent requests -----------------------------------------------------------------------------------------


def test_single_requests_by_hand() -> None:
    workload = OpenLoop(SingleRequests(1, 2, Fixed(20), Fixed(5), SharedPrefixes(1, Fixed(100))), Constant(2.0), 1)
    assert list(workload.arrivals()) == [
        RequestSpec(0, 0, ((2, 0, 100), (1, 0, 20)), 120, 5),
        RequestSpec(1, SECOND // 2, ((2, 0, 100), (5, 0, 20)), 120, 5),
    ]
    assert workload.num_requests == 2
    assert list(workload.after(next(workload.arrivals()), 7)) == []


LENGTHS = st.sampled_from([Fixed(3), Uniform(1, 9), LogNormal(20, 1.0, maximum=200)])
SHARED = st.one_of(
    st.none(), st.builds(SharedPrefixes, st.integers(1, 5), LENGTHS, st.floats(0, 1), st.sampled_from([0.0, 1.0]))
)
SINGLE = st.builds(SingleRequests, st.integers(0, 99), st.integers(1, 60), LENGTHS, LENGTHS, SHARED)
CONVERSATIONS = st.builds(
    Conversations,
    seed=st.integers(0, 99),
    num_conversations=st.integers(1, 25),
    turns=st.sampled_from([Fixed(1), Fixed(3), Uniform(1, 6)]),
    user_lengths=LENGTHS,
    output_lengths=LENGTHS,
    shared=SHARED,
    think_ms=st.sampled_from([None, Fixed(2), Uniform(1, 4000)]),
    max_context_tokens=st.sampled_from([None, 600, 700]),
)
SESSIONS: st.SearchStrategy[Sessions] = st.one_of(SINGLE, CONVERSATIONS)
WORKLOADS: st.SearchStrategy[Workload] = st.one_of(
    st.builds(OpenLoop, SESSIONS, st.sampled_from([Poisson(3.0), AllAtOnce()]), st.integers(0, 9)),
    st.builds(ClosedLoop, SESSIONS, st.integers(1, 30)),
)


def quick(spec: RequestSpec) -> int:
    return 1 + spec.max_tokens


def uneven(spec: RequestSpec) -> int:
    return 1 + (spec.index * 7919) % 13 * SECOND


@given(WORKLOADS)
def test_every_workload_keeps_the_contract(workload: Workload) -> None:
    known = list(workload.arrivals())
    assert [spec.arrival_ns for spec in known] == sorted(spec.arrival_ns for spec in known)
    served = [spec for spec, _ in serve(workload, uneven)]
    assert sorted(spec.index for spec in served) == list(range(len(served)))
    assert workload.num_requests == len(served)
    for spec in served:
        assert spec.prompt == merge_segments(spec.prompt)
        assert spec.num_prompt_tokens == sum(count for _, _, count in spec.prompt)


@given(WORKLOADS)
def test_what_a_request_asks_for_does_not_depend_on_how_others_are_served(workload: Workload) -> None:
    def by_index(service_ns: Callable[[RequestSpec], int]) -> dict[int, RequestSpec]:
        return {spec.index: replace(spec, arrival_ns=0) for spec, _ in serve(workload, service_ns)}

    assert by_index(quick) == by_index(uneven)


@given(SINGLE, st.integers(1, 60))
def test_the_first_of_many_are_the_first_of_few(sessions: SingleRequests, few: int) -> None:
    many = list(islice(OpenLoop(replace(sessions, num_requests=1000), Poisson(3.0), 4).arrivals(), few))
    assert list(OpenLoop(replace(sessions, num_requests=few), Poisson(3.0), 4).arrivals()) == many


def test_chunks_do_not_show() -> None:
    sessions = SingleRequests(1, CHUNK + 5, Uniform(1, 9), Uniform(1, 9))
    across = [opening.index for opening in sessions.openings()]
    assert across == list(range(CHUNK + 5))


def test_lengths_have_their_distribution_and_are_independent() -> None:
    """Uniform on 1..99: mean 50, variance (99**2 - 1) / 12."""
    specs = list(OpenLoop(SingleRequests(1, 20_000, Uniform(1, 99), Uniform(1, 99)), Poisson(1.0), 1).arrivals())
    prompt = np.array([spec.num_prompt_tokens for spec in specs])
    output = np.array([spec.max_tokens for spec in specs])
    gaps = np.diff([0] + [spec.arrival_ns for spec in specs])
    band = 4.5 * math.sqrt((99**2 - 1) / 12 / 20_000)
    assert abs(prompt.mean() - 50) < band
    assert abs(output.mean() - 50) < band
    for one, other in ((prompt, output), (prompt, gaps), (output, gaps)):
        assert abs(np.corrcoef(one, other)[0, 1]) < 4.5 / math.sqrt(20_000)


# --- shared prefixes ----------------------------------------------------------------------------------------------


def test_shared_fraction_and_choice() -> None:
    n = 40_000
    segments = SharedPrefixes(4, Uniform(10, 90), fraction=0.3).segments(1, 0, n)
    used = [segment for segment in segments if segment is not None]
    assert abs(len(used) - 0.3 * n) < 4.5 * math.sqrt(n * 0.3 * 0.7)
    counts = Counter(used)
    # One length a prefix, so four different segments, each a quarter.
    assert sorted(stream for stream, _, _ in counts) == [shared_stream(number) for number in range(4)]
    for count in counts.values():
        assert abs(count - len(used) / 4) < 4.5 * math.sqrt(len(used) * 3 / 16)


def test_zipf_weights() -> None:
    """With exponent 1 over three prefixes the weights are 6/11, 3/11, 2/11."""
    n = 40_000
    counts = Counter(segment for segment in SharedPrefixes(3, Fixed(8), zipf=1.0).segments(1, 0, n))
    for number, weight in enumerate((6 / 11, 3 / 11, 2 / 11)):
        assert abs(counts[(shared_stream(number), 0, 8)] - weight * n) < 4.5 * math.sqrt(n * weight * (1 - weight))


def test_a_larger_fraction_only_adds() -> None:
    less = SharedPrefixes(3, Uniform(1, 50), fraction=0.2).segments(1, 100, 500)
    more = SharedPrefixes(3, Uniform(1, 50), fraction=0.6).segments(1, 100, 500)
    assert all(before in (None, after) for before, after in zip(less, more, strict=True))
    assert SharedPrefixes(3, Fixed(1), fraction=0.0).segments(1, 0, 99) == [None] * 99
    assert None not in SharedPrefixes(3, Fixed(1), fraction=1.0).segments(1, 0, 99)
    assert (
        SharedPrefixes(3, Uniform(1, 50)).segments(1, 7, 3) == SharedPrefixes(3, Uniform(1, 50)).segments(1, 0, 10)[7:]
    )


# --- conversations ------------------------------------------------------------------------------------------------


def test_conversation_by_hand() -> None:
    """Prefix of 100, three turns of 20 new tokens and 5 answered, 2 s of thought, one second of service."""
    sessions = Conversations(
        1, 2, Fixed(3), Fixed(20), Fixed(5), shared=SharedPrefixes(1, Fixed(100)), think_ms=Fixed(2000)
    )
    served = serve(OpenLoop(sessions, Constant(0.1), 1), lambda spec: SECOND)
    assert [spec for spec, _ in served] == [
        RequestSpec(0, 0, ((2, 0, 100), (1, 0, 20)), 120, 5, conversation=0, turn=0),
        RequestSpec(1, 3 * SECOND, ((2, 0, 100), (1, 0, 20), (0, 0, 5), (5, 0, 20)), 145, 5, conversation=0, turn=1),
        RequestSpec(
            2,
            6 * SECOND,
            ((2, 0, 100), (1, 0, 20), (0, 0, 5), (5, 0, 20), (4, 0, 5), (9, 0, 20)),
            170,
            5,
            conversation=0,
            turn=2,
        ),
        RequestSpec(3, 10 * SECOND, ((2, 0, 100), (13, 0, 20)), 120, 5, conversation=1, turn=0),
        RequestSpec(
            4, 13 * SECOND, ((2, 0, 100), (13, 0, 20), (12, 0, 5), (17, 0, 20)), 145, 5, conversation=1, turn=1
        ),
        RequestSpec(
            5,
            16 * SECOND,
            ((2, 0, 100), (13, 0, 20), (12, 0, 5), (17, 0, 20), (16, 0, 5), (21, 0, 20)),
            170,
            5,
            conversation=1,
            turn=2,
        ),
    ]
    assert sessions.num_requests == 6


@pytest.mark.parametrize(("room", "turns"), [(24, None), (25, 1), (49, 1), (50, 2), (74, 2), (75, 3), (10_000, 3)])
def test_a_conversation_ends_where_the_next_turn_would_not_fit(room: int, turns: int | None) -> None:
    """Turn t of 20 new tokens and 5 answered fills 25 (t + 1) tokens."""

    def make() -> Conversations:
        return Conversations(1, 4, Fixed(3), Fixed(20), Fixed(5), max_context_tokens=room)

    if turns is None:
        with pytest.raises(ValueError, match="first turn of conversation 0 needs 25 tokens of context and max_context"):
            make()
        return
    assert make().num_requests == 4 * turns
    assert len(serve(OpenLoop(make(), AllAtOnce(), 1), quick)) == 4 * turns


@given(CONVERSATIONS)
def test_each_prompt_repeats_all_that_was_said(sessions: Conversations) -> None:
    served = {spec.index: (spec, end_ns) for spec, end_ns in serve(OpenLoop(sessions, Poisson(1.0), 1), quick)}
    for index in range(len(served)):
        spec, _ = served[index]
        if spec.turn == 0:
            assert sessions.shared is not None or spec.prompt == ((prompt_stream(index), 0, spec.num_prompt_tokens),)
            continue
        before, end_ns = served[index - 1]
        assert (before.conversation, before.turn) == (spec.conversation, spec.turn - 1)
        said = tokens(before.prompt) + [(output_stream(before.index), n) for n in range(before.max_tokens)]
        new = spec.num_prompt_tokens - len(said)
        assert tokens(spec.prompt) == said + [(prompt_stream(index), n) for n in range(new)]
        assert spec.arrival_ns >= end_ns
        if sessions.think_ms is None:
            assert spec.arrival_ns == end_ns
        if sessions.max_context_tokens is not None:
            assert spec.num_prompt_tokens + spec.max_tokens <= sessions.max_context_tokens


def test_think_time_has_its_distribution() -> None:
    """Uniform on 1..999 ms: mean 500 ms."""
    sessions = Conversations(1, 1000, Fixed(5), Fixed(2), Fixed(2), think_ms=Uniform(1, 999))
    served = {spec.index: (spec, end_ns) for spec, end_ns in serve(OpenLoop(sessions, AllAtOnce(), 1), quick)}
    pauses = [spec.arrival_ns - served[i - 1][1] for i, (spec, _) in served.items() if spec.turn]
    assert abs(np.mean(pauses) / 1e6 - 500) < 4.5 * math.sqrt((999**2 - 1) / 12 / len(pauses))


# --- closed loop --------------------------------------------------------------------------------------------------


def test_closed_loop_by_hand() -> None:
    """Two at a time, served in 3, 1, 1, 5 s: 1 starts 2 at 1 s, 2 starts 3 at 2 s; nothing is left for 0 and 3."""
    workload = ClosedLoop(SingleRequests(1, 4, Fixed(8), Fixed(8)), 2)
    served = serve(workload, lambda spec: (3, 1, 1, 5)[spec.index] * SECOND)
    assert [(spec.index, spec.arrival_ns // SECOND, end_ns // SECOND) for spec, end_ns in served] == [
        (1, 0, 1),
        (2, 1, 2),
        (0, 0, 3),
        (3, 2, 7),
    ]
    assert serve(workload, quick) == serve(workload, quick)


@given(SESSIONS, st.integers(1, 30))
def test_closed_loop_holds_its_concurrency(sessions: Sessions, concurrency: int) -> None:
    served = serve(ClosedLoop(sessions, concurrency), uneven)
    openings = sorted(spec.arrival_ns for spec, _ in served if spec.turn == 0)
    # By session, the end of its last request: `served` is in order of ends.
    last = {spec.conversation if spec.conversation >= 0 else -1 - spec.index: end_ns for spec, end_ns in served}
    ends = sorted(last.values())
    together = min(concurrency, sessions.num_sessions)
    assert openings[:together] == [0] * together
    # The session started as number k + concurrency starts at the moment of the k-th end.
    assert openings[together:] == ends[: len(openings) - together]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SingleRequests(1, 0, Fixed(1), Fixed(1)), "num_requests must be 1 or more, got 0"),
        (lambda: Conversations(1, 0, Fixed(1), Fixed(1), Fixed(1)), "num_conversations must be 1 or more, got 0"),
        (lambda: ClosedLoop(SingleRequests(1, 1, Fixed(1), Fixed(1)), 0), "concurrency must be 1 or more, got 0"),
        (lambda: SharedPrefixes(0, Fixed(1)), "number of shared prefixes must be 1 or more, got 0"),
        (lambda: SharedPrefixes(1, Fixed(1), fraction=1.5), "must lie between 0 and 1, got 1.5"),
        (lambda: SharedPrefixes(1, Fixed(1), zipf=-1.0), "zipf must be a number of 0 or more, got -1.0"),
    ],
)
def test_impossible_parameters_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is matched below, without escapes
        make()
    assert message in str(caught.value)
