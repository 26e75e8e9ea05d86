"""Scenarios that are wrong: each message names the place, the key, the value and what would be right."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sim.scenario import ScenarioError, load_scenario

K5 = "method: eagle3, num_speculative_tokens: 5"


def spec(text: str, rest: str = "") -> str:
    return f"engine: {{speculative_config: {{{text}}}{rest}}}"


def synthetic(text: str) -> str:
    return f"workload: {{synthetic: {{{text}}}}}"


BAD: list[tuple[str, str, list[str]]] = [
    # the file
    ("empty", "", ["is empty"]),
    ("only a comment", "# nothing\n", ["is empty"]),
    ("null", "null", ["is empty"]),
    ("a list", "- 1", ["holds a list", "a mapping"]),
    ("a scalar", "42", ["a single value"]),
    ("broken", "model: [1, 2", ["case.yaml:1", "not YAML"]),
    ("tab", "engine:\n\tblock_size: 5", ["case.yaml:2", "not YAML"]),
    ("two documents", "seed: 1\n---\nseed: 2", ["case.yaml:2", "second document"]),
    ("duplicate", "seed: 1\nmodel: x\nseed: 2", ["case.yaml:3", "seed", "twice", "line 1"]),
    ("duplicate below", "engine:\n  block_size: 1\n  block_size: 2", ["case.yaml:3", "engine.block_size", "twice"]),
    ("number as key", "5: 1", ["key '5' is not text"]),
    ("null as key", "~: 1", ["is not text"]),
    ("list as key", "? [a]\n: 1", ["a key is a list or a mapping"]),
    ("tag", "model: !!python/object:os.system x", ["tags are not read here"]),
    ("anchor", "model: &m llama-3.1-8b", ["anchors and aliases"]),
    ("merge", "engine: {<<: {a: 1}}", ["merges"]),
    ("long number", "seed: " + "9" * 5000, ["a number of 5000 characters"]),
    ("half a surrogate", 'name: "\\ud800"', ["surrogate"]),
    ("half a surrogate as key", '"\\ud800": 1', ["surrogate"]),
    ("code point", 'name: "\\UFFFFFFFF"', ["not YAML"]),
    ("bell", "name: a\x07b", ["not YAML"]),
    # keys
    ("top key", "modle: x", ["case.yaml:1", "modle", "unknown key", "did you mean `model`?"]),
    ("engine key", "engine:\n  max_num_seq: 4", ["case.yaml:2", "engine.max_num_seq = 4", "`max_num_seqs`"]),
    ("dash", "engine: {max-num-seqs: 4}", ["did you mean `max_num_seqs`?"]),
    ("unit left out", "slo: {ttft: 200}", ["did you mean `ttft_ms`?", "ttft_ms, tpot_ms, e2el_ms"]),
    ("vllm has it", "engine: {pipeline_parallel_size: 2}", ["vLLM has it, and speckv does not simulate it"]),
    ("chunked prefill", "engine: {enable_chunked_prefill: true}", ["chunked prefill is always on"]),
    ("deep key", synthetic("prompt_tokens: {distribution: uniform, mim: 1, max: 2}"), ["did you mean `min`?"]),
    ("alias and name", "engine: {num_gpu_blocks: 9, num_gpu_blocks_override: 8}", ["means num_gpu_blocks"]),
    # types
    ("text for int", 'seed: "5"', ["seed = '5'", "text, not a number", "leave the quotes out"]),
    ("bool for int", "seed: true", ["seed = True", "is true or false, not a number", "a whole number from 0"]),
    ("fraction for int", "engine: {block_size: 16.0}", ["a number with a fraction", "a whole number from 1 to 4096"]),
    ("int for bool", "output: {steps: 1}", ["is a whole number", "true or false"]),
    ("yes for bool", "output: {steps: yes}", ["is text, not true or false", "YAML 1.2"]),
    ("null for number", "engine: {block_size: null}", ["is null"]),
    ("list for mapping", "engine: [1]", ["engine = [1]", "is a list", "a mapping"]),
    ("null for mapping", "engine:", ["engine", "is null", "a mapping"]),
    ("mapping for list", "events: {type: abort}", ["events", "is a mapping", "a list"]),
    ("text for length", synthetic('prompt_tokens: "5"'), ["is text", "a whole number or a mapping"]),
    ("number for hardware", "hardware: 100", ["is a whole number", "text or a mapping"]),
    ("unit ms", "timing: {schedule_ms: 5ms}", ["has the unit 'ms'", "milliseconds", "units stand in the names"]),
    ("unit s", "limits: {max_time_s: 5s}", ["has the unit 's'", "seconds"]),
    ("unit GB", "hardware: {name: x, tflops: 1, bandwidth_gb_s: 1, memory_gb: 80GB, num_sms: 1}", ["'GB'", "in GB"]),
    ("unit k", "engine: {max_model_len: 32k}", ["has the unit 'k'", "in tokens"]),
    ("nan", "engine: {watermark: .nan}", ["finite"]),
    ("inf", synthetic("arrivals: {process: poisson, rate: .inf}"), ["finite"]),
    # ranges and names
    (
        "no drafts",
        "engine: {speculative_config: {method: ngram, num_speculative_tokens: 0}}",
        ["out of range", "no speculation is engine.speculative_config=null"],
    ),
    (
        "two kinds of workload",
        "workload: {trace: {path: x.csv}, synthetic: {}}",
        ["both are given", "--set workload.synthetic=null takes synthetic out"],
    ),
    ("negative seed", "seed: -1", ["seed = -1", "out of range"]),
    ("big seed", f"seed: {10**30}", ["seed", "9223372036854775807"]),
    ("name", "name: a/b", ["name = 'a/b'", "characters that a name may not have"]),
    ("dots as name", "name: ..", ["may not have"]),
    ("model", "model: lama-3.1-8b", ["model", "is not known", "`Llama-3.1-8B`"]),
    ("model file", "model: ./nowhere/config.json", ["model", "no such file"]),
    ("device as model", "model: /dev/zero", ["model", "is not a file"]),
    ("hardware", "hardware: h20", ["hardware", "is not known", "H200"]),
    ("preset", "engine: {preset: vllm-0.31}", ["engine.preset", "is not known", "vllm-0.32"]),
    ("dtype", "engine: {dtype: float16}", ["bfloat16"]),
    ("kv dtype", "engine: {kv_cache_dtype: fp4}", ["auto or bfloat16 or fp8"]),
    ("policy", "engine: {policy: fifo}", ["engine.scheduling_policy = 'fifo'", "fcfs or priority"]),
    ("watermark", "engine: {watermark: 1.0}", ["a number from 0 to below 1"]),
    ("utilization", "engine: {gpu_memory_utilization: 92}", ["above 0 and up to 1"]),
    ("block size", "engine: {block_size: 24}", ["is not a power of two"]),
    ("one block", "engine: {num_gpu_blocks: 1}", ["a whole number from 2"]),
    ("tp", "engine: {tensor_parallel_size: 3}", ["does not divide num_attention_heads 32"]),
    ("method", spec("method: eagel3, num_speculative_tokens: 3"), ["is not known", "did you mean `eagle3`?"]),
    ("process", synthetic("arrivals: {process: poison, rate: 1}"), ["did you mean `poisson`?", "closed_loop"]),
    ("no process", synthetic("arrivals: {rate: 1}"), ["workload.synthetic.arrivals.process", "is needed"]),
    ("rate 0", synthetic("arrivals: {process: poisson, rate: 0}"), ["above 0"]),
    ("time_scale", "workload: {trace: {path: x, time_scale: 0}}", ["time_scale", "above 0"]),
    ("no path", "workload: {trace: {}}", ["workload.trace.path", "is needed"]),
    # combinations
    ("K without method", spec("num_speculative_tokens: 3"), ["engine.speculative_config.method", "is needed"]),
    ("method without K", spec("method: eagle3"), ["speculative_config.num_speculative_tokens", "is needed"]),
    ("K 0", spec("method: eagle3, num_speculative_tokens: 0"), ["a whole number from 1"]),
    ("budget below K+1", spec(K5, ", max_num_batched_tokens: 5, max_num_seqs: 4"), ["K + 1 = 6", "is 5"]),
    ("budget below seqs", "engine: {max_num_batched_tokens: 4, max_num_seqs: 8}", ["below max_num_seqs 8", "vLLM"]),
    ("max_model_len", "engine: {max_model_len: 200000}", ["max_position_embeddings 131072"]),
    ("threshold", "engine: {long_prefill_token_threshold: 200000}", ["above max_model_len 131072"]),
    ("async ngram", spec("method: ngram, num_speculative_tokens: 2", ", async_scheduling: true"), ["ngram_gpu"]),
    ("draft tp", spec(K5 + ", draft_tensor_parallel_size: 2"), ["1 or tensor_parallel_size"]),
    ("lookup", spec(K5 + ", prompt_lookup_min: 4, prompt_lookup_max: 2"), ["above prompt_lookup_max 2"]),
    ("rates, not synthetic", spec(K5 + ", synthetic_acceptance_length: 2"), ["rejection_sample_method: synthetic"]),
    ("synthetic alone", spec(K5 + ", rejection_sample_method: synthetic"), ["exactly one of"]),
    (
        "number of rates",
        spec(K5 + ", rejection_sample_method: synthetic, synthetic_acceptance_rates: [0.5]"),
        ["1 rates for num_speculative_tokens 5"],
    ),
    (
        "length",
        spec(K5 + ", rejection_sample_method: synthetic, synthetic_acceptance_length: 6.5"),
        ["a number from 1 to 6"],
    ),
    ("rows start", spec(K5 + ", num_speculative_tokens_per_batch_size: [[2, 3, 1]]"), ["starts at batch size 2"]),
    ("rows overlap", spec(K5 + ", num_speculative_tokens_per_batch_size: [[1, 3, 1], [3, 4, 1]]"), ["overlap"]),
    ("rows shape", spec(K5 + ", num_speculative_tokens_per_batch_size: [[1, 3]]"), ["has 2 numbers"]),
    (
        "few rates",
        spec(K5) + "\nacceptance: {model: per_position, rates: [0.5], convention: conditional}",
        ["5 or more"],
    ),
    ("convention", "acceptance: {model: per_position, rates: [0.5]}", ["acceptance.convention", "is needed"]),
    (
        "rising",
        "acceptance: {model: per_position, rates: [0.5, 0.7], convention: unconditional}",
        ["cannot rise", "convention: conditional"],
    ),
    ("rate above 1", "acceptance: {model: geometric, rate: 1.5}", ["a number from 0 to 1"]),
    (
        "rate at once",
        synthetic("arrivals: {process: all_at_once, rate: 5}"),
        ["belongs to process: poisson or process: gamma or process: constant, not to process: all_at_once"],
    ),
    ("burstiness", synthetic("arrivals: {process: poisson, rate: 5, burstiness: 2}"), ["belongs to process: gamma"]),
    ("both workloads", "workload: {trace: {path: x}, synthetic: {}}", ["exactly one of trace and synthetic", "both"]),
    ("no workload", "workload: {}", ["exactly one of trace and synthetic", "neither"]),
    ("min above max", synthetic("prompt_tokens: {distribution: uniform, min: 9, max: 2}"), ["min 9 is above max 2"]),
    ("quantiles", synthetic("prompt_tokens: {distribution: quantiles, points: [[0, 5], [0.5, 9]]}"), ["0 to 0.5"]),
    ("priority", synthetic("priority: 1"), ["has no meaning under fcfs", "scheduling_policy: priority"]),
    ("weights", "engine: {policy: priority}\n" + synthetic("priority: {levels: [0, 1], weights: [1]}"), ["1 weights"]),
    (
        "prompt too long",
        "engine: {max_model_len: 100}\n" + synthetic("prompt_tokens: 100, output_tokens: 5"),
        ["prompts of up to 100 tokens", "max_model_len 100", "up to 99 tokens"],
    ),
    (
        "never fits",
        "engine: {num_gpu_blocks: 10}\n" + synthetic("prompt_tokens: 100, output_tokens: 46"),
        ["engine.num_gpu_blocks = 10", "needs 10 blocks (145 tokens in blocks of 16)", "has 9"],
    ),
    ("no time", "events: [{type: reset_prefix_cache}]", ["exactly one of at_s, every_s and rate_per_s", "none"]),
    ("two times", "events: [{type: reset_prefix_cache, at_s: 1, every_s: 1}]", ["at_s and every_s"]),
    ("abort", "events: [{type: abort, request: 1}]", ["needs request and at_s, or rate_per_s alone"]),
    ("abort both", "events: [{type: abort, request: 1, at_s: 1, rate_per_s: 1}]", ["goes without request"]),
    ("no such request", "events: [{type: abort, request: 100, at_s: 1}]", ["there are 100 requests", "0 to 99"]),
    (
        "event",
        "events:\n  - {type: abort, rate_per_s: 1}\n  - 5",
        ["case.yaml:3", "events.1 = 5", "reset_prefix_cache"],
    ),
]


@pytest.mark.parametrize(("text", "parts"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_scenario_says_what_is_wrong(tmp_path: Path, text: str, parts: list[str]) -> None:
    file = tmp_path / "case.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ScenarioError) as caught:
        load_scenario(file)
    message = str(caught.value)
    assert caught.value.problems
    assert "case.yaml" in message
    for part in parts:
        assert part in message, message


def test_all_problems_of_a_file_are_told_at_once_in_order_of_lines(tmp_path: Path) -> None:
    file = tmp_path / "case.yaml"
    file.write_text("slo: {ttft: 1}\nengine:\n  blocksize: 1\n  watermark: 2\nseed: x\n", encoding="utf-8")
    with pytest.raises(ScenarioError) as caught:
        load_scenario(file)
    assert [(problem.line, problem.key) for problem in caught.value.problems] == [
        (1, "slo.ttft"),
        (3, "engine.blocksize"),
        (4, "engine.watermark"),
        (5, "seed"),
    ]
    assert caught.value.problems[1].nearest == "block_size"
    assert caught.value.problems[2].value == 2


BAD_OVERRIDES: list[tuple[str, list[str]]] = [
    ("engine.max_num_seq=4", ["--set engine.max_num_seq=4", "did you mean `max_num_seqs`?"]),
    ("engine.max_num_seqs=many", ["--set", "is text, not a number"]),
    ("engine.max_num_seqs", ["is not an override", "KEY=VALUE"]),
    ("=4", ["is not an override"]),
    ("engine..x=4", ["is not an override"]),
    ("", ["is not an override"]),
    ("seed.x=4", ["`seed` is a single value"]),
    ("events.5.at_s=1", ["`5` is no entry of a list of 1", "an index from 0 to 0"]),
    ("events.-1.at_s=1", ["is no entry of a list"]),
    ("seed=[1", ["--set seed=[1", "not YAML"]),
    ("seed=&a 1", ["anchors and aliases"]),
    ("engine={block_size: 16, block_size: 8}", ["twice"]),
    (".".join("a" * 100) + "=1", ["100 levels"]),
]


@pytest.mark.parametrize(("override", "parts"), BAD_OVERRIDES, ids=[row[0][:20] for row in BAD_OVERRIDES])
def test_bad_override_names_itself(tmp_path: Path, override: str, parts: list[str]) -> None:
    file = tmp_path / "case.yaml"
    file.write_text("seed: 1\nevents: [{type: abort, request: 1, at_s: 1}]", encoding="utf-8")
    with pytest.raises(ScenarioError) as caught:
        load_scenario(file, [override])
    assert all(problem.override == override for problem in caught.value.problems)
    for part in parts:
        assert part in str(caught.value)


def test_unknown_name_of_a_scenario() -> None:
    with pytest.raises(ScenarioError, match="did you mean `quickstart`"):
        load_scenario("quikstart")


@pytest.mark.parametrize("name", ["", "nowhere/x.yaml", "a\0b", "a\0b.yaml", "x" * 5000, "x" * 5000 + ".yaml"])
def test_names_of_no_file(name: str) -> None:
    with pytest.raises(ScenarioError):
        load_scenario(name)


def test_files_that_are_no_scenarios(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="is a directory"):
        load_scenario(tmp_path)
    with pytest.raises(ScenarioError, match="not a regular file"):
        load_scenario(Path("/dev/zero"))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\x89PNG\r\n\x1a\n\x00\xff")
    with pytest.raises(ScenarioError, match="is not UTF-8 text"):
        load_scenario(binary)
    binary.write_bytes(b"model: \0")
    with pytest.raises(ScenarioError, match="null bytes"):
        load_scenario(binary)
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * 1_000_001)
    with pytest.raises(ScenarioError, match="1000001 bytes"):
        load_scenario(large)


LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
HEAVY = {
    "billion laughs": LAUGHS,
    "deep flow": "a: " + "[" * 100_000,
    "deep braces": "a: " + "{a: " * 100_000,
    "deep dashes": "- " * 100_000,
    "deep lines": "".join(" " * n + "a:\n" for n in range(1000)),
    "many values": "a: [" + "1," * 490_000 + "]",
    "many keys": "".join(f"k{n}: 1\n" for n in range(90_000)),
    "long scalar": "a: " + "x " * 490_000,
    "long unknown key": "a" * 1000 + ": 1",
    "many directives": "%X y\n" * 190_000,
    "many events": "events:\n" + "- {type: abort}\n" * 9_000,
}


@pytest.mark.parametrize("text", HEAVY.values(), ids=HEAVY)
def test_heavy_files_are_refused_in_time(tmp_path: Path, text: str) -> None:
    file = tmp_path / "case.yaml"
    file.write_text(text, encoding="utf-8")
    start = time.perf_counter()
    with pytest.raises(ScenarioError) as caught:
        load_scenario(file)
    assert time.perf_counter() - start < 20  # about 2 s alone on a slow core
    assert len(str(caught.value)) < 20_000
