"""Known answers, the two conventions, purity and coupling, recorded lengths and their reader."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.models.acceptance import (
    AcceptanceError,
    AcceptanceModel,
    Geometric,
    PerPosition,
    Replay,
    read_accepted_lengths,
)


def tokens_a_step(model: AcceptanceModel, k: int, draws: int = 200_000) -> float:
    return float(np.minimum(model.runs(7, 0, draws), k).mean()) + 1


@pytest.mark.parametrize(
    ("rates", "convention", "expected"),
    [((0.7, 0.5, 0.2), "unconditional", 2.4), ((0.7, 0.5, 0.2), "conditional", 2.12)],
)
def test_the_two_conventions(rates: tuple[float, ...], convention: str, expected: float) -> None:
    model = PerPosition(3, rates, convention)  # type: ignore[arg-type]
    assert model.mean_acceptance_length(3) == pytest.approx(expected)
    assert tokens_a_step(model, 3) == pytest.approx(expected, abs=0.015)


def test_geometric_known_answer() -> None:
    # (1 - 0.8^6) / (1 - 0.8) = 3.68928: 3.69 tokens a step and 2.31 garbage rows of 6.
    model = Geometric(1, 0.8)
    assert model.mean_acceptance_length(5) == pytest.approx((1 - 0.8**6) / (1 - 0.8))
    assert round(model.mean_acceptance_length(5), 2) == 3.69
    assert 6 - tokens_a_step(model, 5) == pytest.approx(2.31, abs=0.02)
    assert model.conditional_rates(4) == pytest.approx([0.8] * 4)


@given(rate=st.floats(0, 0.999), k=st.integers(0, 64))
def test_geometric_mean_is_the_geometric_series(rate: float, k: int) -> None:
    assert Geometric(0, rate).mean_acceptance_length(k) == pytest.approx((1 - rate ** (k + 1)) / (1 - rate))


def test_certain_acceptance_and_rejection() -> None:
    assert set(Geometric(0, 1.0, max_run=9).runs(0, 0, 1000).tolist()) == {9}
    assert set(Geometric(0, 0.0).runs(0, 0, 1000).tolist()) == {0}
    assert Geometric(0, 0.5, max_run=3).unconditional_rates(5) == [0.5, 0.25, 0.125, 0, 0]
    # Beyond the last position nothing is accepted.
    assert set(PerPosition(0, [1.0, 1.0]).runs(0, 0, 100).tolist()) == {2}
    assert PerPosition(0, [1.0, 0.0, 1.0]).conditional_rates(3) == [1, 0, 0]


@given(
    seed=st.integers(0, 2**32),
    request=st.integers(0, 10_000),
    first=st.integers(0, 500),
    cuts=st.lists(st.integers(0, 40), min_size=1, max_size=5),
)
def test_one_draw_in_bulk_equals_many(seed: int, request: int, first: int, cuts: list[int]) -> None:
    model = Geometric(seed, 0.7)
    whole = model.runs(request, first, sum(cuts))
    parts, position = [], first
    for count in cuts:
        parts += model.runs(request, position, count).tolist()
        position += count
    assert whole.tolist() == parts
    assert whole.dtype == np.int64


def test_a_higher_rate_never_accepts_less() -> None:
    # One uniform against a table: models of one seed are coupled.
    low, high = Geometric(5, 0.6), Geometric(5, 0.7)
    assert bool((low.runs(3, 0, 5000) <= high.runs(3, 0, 5000)).all())


def test_requests_differ() -> None:
    model = Geometric(5, 0.6)
    assert model.runs(1, 0, 50).tolist() != model.runs(2, 0, 50).tolist()


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_is_a_share(rate: float) -> None:
    with pytest.raises(AcceptanceError, match="between 0 and 1"):
        Geometric(0, rate)
    with pytest.raises(AcceptanceError, match=r"rates\[1\]"):
        PerPosition(0, [0.5, rate])


def test_rates_that_are_refused() -> None:
    with pytest.raises(AcceptanceError, match=r"rates\[2\] = 0\.6: unconditional rates must not increase"):
        PerPosition(0, [0.7, 0.5, 0.6], "unconditional")
    with pytest.raises(AcceptanceError, match="must not be empty"):
        PerPosition(0, [])
    with pytest.raises(AcceptanceError, match="max_run"):
        Geometric(0, 0.5, max_run=0)


def test_replay_by_hand() -> None:
    # Request 0 walks 3, 1, 2, 1 with lengths by position; request 2 is sequence 0 again.
    model = Replay([[3, 2, 1, 1, 2, 1], [1]])
    assert model.runs(0, 0, 8).tolist() == [2, 1, 0, 0, 1, 0, 2, 1]
    assert model.runs(2, 4, 2).tolist() == [1, 0]
    assert model.runs(1, 0, 3).tolist() == [0, 0, 0]
    assert model.runs(3, 5, 1).tolist() == [0]
    # K = 2: steps at 0 (accepts 2), 3 (0), 4 (1); and one of the second sequence (0). K = 1 caps the first at 1.
    assert model.unconditional_rates(2) == [2 / 4, 1 / 4]
    assert model.conditional_rates(2) == [2 / 4, 1 / 2]
    assert model.mean_acceptance_length(2) == 1.75
    # At 0 (1 of 1), 2 (0), 3 (0), 4 (1), and the second sequence (0).
    assert model.unconditional_rates(1) == [2 / 5]


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "must not be empty"),
        ([[1], []], r"sequences\[1\]"),
        ([[1, 0]], r"sequences\[0\]\[1\] = 0"),
        ([[1.5]], "whole numbers"),
    ],
)
def test_recordings_that_are_refused(sequences: list[list[int]], message: str) -> None:
    with pytest.raises(AcceptanceError, match=message):
        Replay(sequences)


def test_the_reader_takes_lines_and_lists(tmp_path: Path) -> None:
    lines = [{"id": "a", "eagle3_tokens_per_step": [2, 1]}, {"id": "b", "eagle3_tokens_per_step": [1]}]
    text = "\n".join(json.dumps(line) for line in lines) + "\n\n"
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "b.json").write_text("[[2, 1],\n [1]]")
    (tmp_path / "c.jsonl").write_text("[2, 1]\n[1]\n")
    for name in ("a.jsonl", "a.jsonl.gz", "b.json", "c.jsonl"):
        assert read_accepted_lengths(tmp_path / name) == [[2, 1], [1]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'[1]\n{"x": [1]}', r"a\.jsonl:2: eagle3_tokens_per_step: missing; fields here: x"),
        ("a.jsonl", b"[1]\n\n[1, 0]", r"a\.jsonl:3\[1\] = 0: expected a whole number, 1 or more"),
        ("a.jsonl", b'[1]\n[1, "2"]', r"a\.jsonl:2\[1\] = '2'"),
        ("a.jsonl", b"[1]\n[true]", r"a\.jsonl:2\[0\] = True"),
        ("a.jsonl", b"[1]\noops", r"a\.jsonl:2: malformed JSON"),
        ("a.jsonl", b"[]", "not empty"),
        ("a.jsonl", b"", "holds no sequence"),
        ("a.json", b"[[1],\n[2,]]", "malformed JSON at line 2"),
        ("a.json", b"[[1], 3]", "entry 1: expected a list"),
        ("a.json", b"{}", "list of lists"),
        ("a.json", b"\xff\xfe", "not a text file"),
        ("a.jsonl.gz", b"not gzip", "cannot be read"),
        ("a.csv", b"1", r"must end in \.jsonl"),
    ],
)
def test_the_reader_says_where(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(AcceptanceError, match=message):
        read_accepted_lengths(tmp_path / name)


def test_the_reader_wants_a_file(tmp_path: Path) -> None:
    with pytest.raises(AcceptanceError, match="cannot be read"):
        read_accepted_lengths(tmp_path / "absent.jsonl")


# SpecDecode-Bench's recordings, walked by others: tokens a step at K = 1, 3, 5, 7 (loops of 4,000 tokens left out).
@pytest.mark.parametrize(
    ("data", "expected"),
    [("gsm8k", (1.70, 2.38, 2.65, 2.74)), ("sharegpt", (1.67, 2.30, 2.56, 2.68))],
)
def test_recorded_drafts(shared_data: Path, data: str, expected: tuple[float, ...]) -> None:
    file = shared_data / "acceptance" / f"specdecodebench_{data}.jsonl.gz"
    model = Replay([lengths for lengths in read_accepted_lengths(file) if len(lengths) < 4000])
    assert [model.mean_acceptance_length(k) for k in (1, 3, 5, 7)] == pytest.approx(expected, rel=0.01)


def test_recorded_ngram_drafts(shared_data: Path) -> None:
    file = shared_data / "acceptance" / "specdecodebench_gsm8k.jsonl.gz"
    model = Replay(read_accepted_lengths(file, "ngram_tokens_per_step"))
    assert model.mean_acceptance_length(5) == pytest.approx(1.18, rel=0.01)
