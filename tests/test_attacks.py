"""What an attack on the whole command once found, so that it stays found."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import sim
from sim.build import build
from sim.cli import app
from sim.core.block_hashes import BlockHashes
from sim.records import Batch
from sim.scenario import ScenarioError, load_scenario
from tests.by_hand import Turns
from workloads.traces import TraceError

CASE = Path(__file__).parent / "conformance" / "cases" / "23-all-accepted.case.json.gz"


def speckv(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_replay_writes_into_a_pipe_and_leaves_it_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    small = {
        "format": 1,
        "engine": {
            "async_scheduling": False,
            "method": "none",
            "num_speculative_tokens": 0,
            "block_size": 4,
            "num_gpu_blocks": 9,
            "max_num_seqs": 2,
            "max_num_batched_tokens": 8,
            "max_model_len": 32,
            "enable_prefix_caching": True,
        },
        "requests": [{"id": "a", "arrival_turn": 0, "prompt": [["p", 3]], "max_tokens": 1, "accepted": [0]}],
    }
    case = tmp_path / "case.json"
    case.write_text(json.dumps(small))
    reader = os.open(pipe, os.O_RDWR)  # so that opening it for writing does not wait
    try:
        done = speckv("replay", str(case), "--engine", "vllm-0.32", "--output", str(pipe))
        assert done.exit_code == 0, done.output
        assert json.loads(os.read(reader, 65536))["summary"]["num_output_tokens"] == {"a": 1}
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_pipe_is_no_case_and_no_trace(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = speckv("replay", str(pipe), "--engine", "vllm-0.32", "--output", str(tmp_path / "t.json"))
    assert done.exit_code == 2
    assert "is not a regular file" in done.output
    scenario = load_scenario("azure-conv", [f"workload.trace.path={pipe}"])
    with pytest.raises((TraceError, ScenarioError), match="not a"):
        build(scenario)


def test_rows_of_k_that_make_no_table_are_bad_input(tmp_path: Path) -> None:
    import gzip

    case = json.loads(gzip.decompress(CASE.read_bytes()))
    case["engine"]["num_speculative_tokens_per_batch_size"] = [[2, 3, 1]]
    file = tmp_path / "case.json"
    file.write_text(json.dumps(case))
    done = speckv("replay", str(file), "--engine", "vllm-0.32", "--output", str(tmp_path / "t.json"))
    assert done.exit_code == 2
    assert "the first row must start at batch size 1" in done.output
    assert not (tmp_path / "t.json").exists()


def test_a_long_prefill_is_no_livelock(tmp_path: Path) -> None:
    """12,000 steps that deliver nothing, since a step computes one token of the prompt: it ends all the same."""
    result = sim.simulate(
        "minimal",
        [
            "engine={max_num_batched_tokens: 1, max_num_seqs: 1, speculative_config: null}",
            "workload={synthetic: {num_requests: 1, prompt_tokens: 12000, output_tokens: 2, "
            "arrivals: {process: all_at_once}}}",
            "timing.fixed_step_ms=1",
            "output={pictures: false, steps: false}",
        ],
        out=tmp_path,
    )
    assert result.summary["num_finished"] == 1
    assert result.summary["num_steps"] == 12_001
    assert result.manifest["stopped_by"] is None


def test_arrivals_beyond_the_end_of_time_are_the_scenarios_problem() -> None:
    scenario = load_scenario("minimal", ["workload={synthetic: {arrivals: {process: poisson, rate: 1.0e-9}}}"])
    with pytest.raises(ScenarioError, match="arrivals reach"):
        build(scenario)


def test_a_request_that_never_fits_can_be_turned_away(tmp_path: Path) -> None:
    """Prompts of 10 to 400 tokens, a model length of 200: those of 200 or more are refused, the others are served."""
    settings = [
        "engine={max_model_len: 200, speculative_config: null}",
        "workload={refuse_too_long: true, synthetic: {num_requests: 40, prompt_tokens: {distribution: quantiles, "
        "points: [[0, 10], [1, 199]]}, output_tokens: 2}}",
        "output={pictures: false, steps: false}",
    ]
    assert sim.simulate("minimal", settings, out=tmp_path).summary["num_refused"] == 0
    trace = tmp_path / "t.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,199,4\n2023-11-16 18:15:46.7805900,200,4\n2023-11-16 18:15:46.8805900,20,4\n"
    )
    given = ["engine={max_model_len: 200}", f"workload={{trace: {{path: {trace}}}}}", "output.pictures=false"]
    with pytest.raises(ScenarioError, match="request 1 has a prompt of 200"):
        sim.simulate("minimal", given, out=tmp_path)
    summary = sim.simulate("minimal", [*given, "workload.refuse_too_long=true"], out=tmp_path).summary
    assert (summary["num_finished"], summary["num_refused"]) == (2, 1)


def test_a_victim_of_fewest_outputs_leaves_no_hash_of_what_was_never_written(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="shadow execution needs torch")
    file = tmp_path / "s.yaml"
    file.write_text(
        """\
seed: 367964
engine:
  preset: sglang-0.5.23
  block_size: 1
  max_model_len: 1000
  speculative_config: {method: ngram_gpu, num_speculative_tokens: 5}
  num_gpu_blocks: 107
  max_num_seqs: 5
  max_num_batched_tokens: 100
  long_prefill_token_threshold: 7
acceptance: {model: geometric, rate: 1}
workload:
  synthetic:
    num_requests: 10
    prompt_tokens: {distribution: uniform, min: 1, max: 100}
    output_tokens: 1
    arrivals: {process: all_at_once}
output: {pictures: false}
"""
    )
    result = sim.simulate(file, out=tmp_path / "out", shadow=True)
    assert result.manifest["shadow"]["num_findings"] == 0
    assert result.summary["num_preemptions"] > 0
    shutil.rmtree(tmp_path / "out")


def test_0_26_falls_over_a_negative_frame_even_of_a_request_that_is_gone() -> None:
    """Found by a live comparison (case 885 of seed 103 of that day): the released update asserts that each frame
    has tokens before it asks whether the request still exists."""
    from sim.core.crash import EngineCrash
    from sim.core.request import Request
    from sim.core.scheduler import Scheduler
    from sim.core.settings import Settings
    from sim.policies.presets import PRESETS

    class Nothing:
        def extend_hashes(self, hashes: BlockHashes, count: int) -> None:
            while len(hashes) < count:
                hashes.append(len(hashes))

    scheduler = Scheduler(Settings(num_gpu_blocks=9, block_size=4, async_scheduling=False), PRESETS["vllm-0.26"])
    scheduler.add(Request("a", 0, 3, 4, Nothing()))
    batch = scheduler.schedule()
    batch.frames[0].num_tokens = -1
    scheduler.abort("a")
    with pytest.raises(EngineCrash, match="a frame of -1 tokens"):
        scheduler.update(batch, [1])


def test_a_chunk_with_drafts_leaves_no_hole_in_the_accounts() -> None:
    """Presets that lose count of placeholders (0.24, 0.26) admit a request again with a padded frame that is short of
    what it believes: a chunk, with drafts. Law 1 holds at every record all the same."""
    overrides = [
        "engine.preset=vllm-0.26",
        "engine.speculative_config={method: ngram_gpu, num_speculative_tokens: 7}",
        "engine.block_size=2",
        "engine.max_model_len=100",
        "engine.max_num_seqs=6",
        "engine.max_num_batched_tokens=1200",
        "engine.num_gpu_blocks=61",
        "timing.fixed_step_ms=5",
        "timing.schedule_ms=0.3",
        "limits.max_steps=400",
        "seed=5",
        "engine.scheduling_policy=priority",
        "acceptance={model: geometric, rate: 0.0}",
        "workload={synthetic: {num_requests: 30, arrivals: {process: constant, rate: 100}, "
        "prompt_tokens: {distribution: uniform, min: 1, max: 15}, "
        "output_tokens: {distribution: uniform, min: 10, max: 34}, "
        "shared_prefix: {count: 1, tokens: 12}, priority: {levels: [0, 1, 2]}}}",
        "events=["
        + ", ".join(
            f"{{type: reset_prefix_cache, reset_running_requests: true, at_s: {at}}}"
            for at in (0.12, 0.385, 0.485, 0.257)
        )
        + "]",
    ]
    simulation = build(load_scenario("minimal", overrides), check=True)
    chunks = []

    class Chunks:
        def scheduled(self, now: int, batch: Batch) -> None:
            chunks.extend(frame.num_drafts for frame in batch.frames if frame.num_drafts and not frame.samples)

    simulation.add_observer(Chunks())
    simulation.run()
    assert chunks  # so that it is what it says


def test_a_request_below_its_start_is_cut_by_the_models_length_alone() -> None:
    """0.24 may roll a request back below 0; its frame then ends at max_model_len - 1, by vLLM's
    `min(num_new_tokens, max_model_len - 1 - num_computed_tokens)`: 30 - 1 + 5 tokens from -5 on."""
    turns = Turns("vllm-0.24", "ngram_gpu", 20, max_model_len=30, async_scheduling=True)
    request = turns.add(20, 9)
    turns.step()
    request.num_computed_tokens = -5
    request.num_drafts = 20
    assert turns.schedule()["r0"][0] == 34


def test_a_batch_that_nobody_settled_is_refused_and_one_given_back_twice_gives_nothing() -> None:
    turns = Turns()
    for _ in range(2):
        turns.add(4)
    turns.schedule()
    with pytest.raises(ValueError, match="batch 0 comes back, and nothing says what it sampled"):
        turns.scheduler.update(turns.batch)
    assert turns.batch.accepted == []
    first = turns.batch
    turns.update()
    for _ in range(2):
        turns.scheduler.recycle(first)
    assert first.frames == []
    for _ in range(2):
        turns.add(4)
    turns.schedule()
    assert len({id(frame) for frame in turns.batch.frames}) == 4
