"""Scenarios that are right: what they resolve to, held against vLLM 0.32's defaults, and against themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sim.scenario import (
    Scenario,
    ScenarioError,
    card,
    check_fits,
    drafter,
    load_scenario,
    replay_path,
    target_shape,
    trace_path,
)
from sim.scenario_schema import FixedTokens, Geometric, LognormalTokens, PerPosition, Poisson
from sim.shipped import shipped_scenarios

SHIPPED = sorted(shipped_scenarios().glob("*.yaml"))
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_scenario(text: str) -> Path:
        file = tmp_path / "case.yaml"
        file.write_text(text, encoding="utf-8")
        return file

    return write_scenario


@pytest.fixture
def load(write: Write) -> Callable[..., Scenario]:
    def load_text(text: str, *overrides: str) -> Scenario:
        return load_scenario(write(text), overrides)

    return load_text


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_scenario_loads_by_path_and_by_name(file: Path) -> None:
    by_path, by_name = load_scenario(file), load_scenario(file.stem)
    assert by_path.name == file.stem
    assert by_path.resolved() == by_name.resolved()
    assert by_path.digest() == by_name.digest()


def test_the_scenarios_that_should_be_there_are() -> None:
    wanted = "azure-conv closed-loop dynamic-k minimal mooncake ngram no-speculation quickstart resets-and-aborts"
    assert set(wanted.split()) <= {file.stem for file in SHIPPED}


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_resolved_is_json_and_itself_the_same_scenario(file: Path, tmp_path: Path) -> None:
    scenario = load_scenario(file)
    again = tmp_path / "again.yaml"
    again.write_text(json.dumps(scenario.resolved(), allow_nan=False), encoding="utf-8")  # JSON is YAML
    reread = load_scenario(again)
    assert reread.resolved() == scenario.resolved()
    assert list(reread.resolved()) == list(scenario.resolved())
    assert reread.digest() == scenario.digest()


def test_minimal_has_five_lines_of_yaml_at_most() -> None:
    lines = (shipped_scenarios() / "minimal.yaml").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.strip() and not line.startswith("#")]) <= 5


def test_defaults_are_those_of_vllm_0_32_on_an_h100(load: Callable[..., Scenario]) -> None:
    engine = load("seed: 0").engine
    assert engine.gpu_memory_utilization == 0.92  # CacheConfig
    assert engine.block_size == 16  # CacheConfig.DEFAULT_BLOCK_SIZE
    assert engine.watermark == 0.0  # SchedulerConfig
    assert engine.scheduling_policy == "fcfs"
    assert engine.long_prefill_token_threshold == 0
    assert engine.enable_prefix_caching
    assert engine.async_scheduling
    # EngineArgs.get_batch_defaults, OPENAI_API_SERVER, 70 GiB and more, not an A100
    assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (1024, 8192)
    assert engine.max_model_len == 131072  # Llama-3.1-8B's max_position_embeddings


@pytest.mark.parametrize(
    ("hardware", "seqs", "tokens"), [("a100", 256, 2048), ("h200", 1024, 8192), ("b200", 1024, 16384)]
)
def test_batch_limits_by_card(load: Callable[..., Scenario], hardware: str, seqs: int, tokens: int) -> None:
    engine = load(f"hardware: {hardware}").engine
    assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (seqs, tokens)


def test_batch_limits_follow_what_is_given(load: Callable[..., Scenario]) -> None:
    assert load("engine: {max_num_batched_tokens: 100}").engine.max_num_seqs == 100
    few = load("engine: {max_num_seqs: 2, max_model_len: 1000}").engine
    assert few.max_num_batched_tokens == 2000


def test_a_card_by_its_datasheet(load: Callable[..., Scenario]) -> None:
    text = "hardware: {name: gh1, tflops: 100, bandwidth_gb_s: 1000, memory_gb: 24, num_sms: 80}"
    scenario = load(text)
    own = card(scenario)
    assert (own.bf16_flops, own.bandwidth, own.memory_bytes, own.num_sms) == (1e14, 1e12, 24 * 2**30, 80)
    assert scenario.engine.max_num_batched_tokens == 2048  # under 70 GiB


def test_ngram_falls_back_to_synchronous_and_says_so(load: Callable[..., Scenario]) -> None:
    """vLLM 0.32, config/vllm.py: unset becomes False with a warning for methods that cannot; True is refused."""
    text = "engine: {speculative_config: {method: ngram, num_speculative_tokens: 3}}"
    scenario = load(text)
    assert scenario.engine.async_scheduling is False
    assert any("ngram" in warning for warning in scenario.warnings)
    assert load(text, "engine.speculative_config.method=ngram_gpu").engine.async_scheduling is True
    with pytest.raises(ScenarioError, match="vLLM refuses asynchronous scheduling with method ngram"):
        load(text, "engine.async_scheduling=true")


def test_default_acceptance_is_there_with_speculation_and_only_then(load: Callable[..., Scenario]) -> None:
    text = "engine: {speculative_config: {method: eagle3, num_speculative_tokens: 3}}"
    assert load(text).acceptance == Geometric(model="geometric", rate=0.65)
    assert load("seed: 1").acceptance is None


def test_default_rates_give_the_lengths_they_were_taken_from() -> None:
    """1 + r + ... + r^K: EAGLE-3 2.56 and n-gram 1.45 tokens at K = 5 (ShareGPT), a draft model 2.78 at K = 3."""
    from sim.scenario import ACCEPTANCE_RATES

    for method, k, tokens in (("eagle3", 5, 2.56), ("ngram", 5, 1.45), ("draft_model", 3, 2.78)):
        length = sum(ACCEPTANCE_RATES[method] ** position for position in range(k + 1))
        assert length == pytest.approx(tokens, abs=0.1), method


def test_synthetic_acceptance_becomes_unconditional_rates(load: Callable[..., Scenario]) -> None:
    base = "method: eagle3, num_speculative_tokens: 3, rejection_sample_method: synthetic"
    rates = load(f"engine: {{speculative_config: {{{base}, synthetic_acceptance_rates: [0.67, 0.435, 0.278]}}}}")
    assert rates.acceptance == PerPosition(model="per_position", rates=[0.67, 0.435, 0.278], convention="unconditional")
    # SpeculativeConfig._acceptance_length_to_rates: length 2.5 is 1.5 drafts: one in full, half of the next.
    length = load(f"engine: {{speculative_config: {{{base}, synthetic_acceptance_length: 2.5}}}}")
    assert isinstance(length.acceptance, PerPosition)
    assert length.acceptance.rates == [1.0, 0.5, 0.0]
    longest = load(f"engine: {{speculative_config: {{{base}, synthetic_acceptance_length: 4}}}}")
    assert isinstance(longest.acceptance, PerPosition)
    assert longest.acceptance.rates == [1.0, 1.0, 1.0]


def test_rows_of_k_are_sorted_and_capped_with_a_warning(load: Callable[..., Scenario]) -> None:
    rows = "[[17, 64, 3], [1, 16, 8]]"
    scenario = load(
        "engine: {speculative_config: {method: eagle3, num_speculative_tokens: 5, "
        f"num_speculative_tokens_per_batch_size: {rows}}}}}"
    )
    speculation = scenario.engine.speculative_config
    assert speculation is not None
    assert speculation.num_speculative_tokens_per_batch_size == [[1, 16, 8], [17, 64, 3]]
    assert any("gets 5" in warning for warning in scenario.warnings)


def test_speculative_configs_as_vllm_users_write_them(load: Callable[..., Scenario], shared_data: Path) -> None:
    file = shared_data / "vllm_formats/speculative_config_examples.json"
    for example in json.loads(file.read_text(encoding="utf-8")):
        if example["method"] == "draft_model":
            example["model"] = "llama-3.2-1b"  # the example's checkpoint does not exist
        speculation = load(f"engine: {{speculative_config: {json.dumps(example)}}}").engine.speculative_config
        assert speculation is not None
        written = speculation.model_dump(mode="json")
        assert {key: written[key] for key in example} == example


def test_vllms_other_names_count(load: Callable[..., Scenario]) -> None:
    engine = load("engine: {num_gpu_blocks_override: 9000, policy: priority}").engine
    assert (engine.num_gpu_blocks, engine.scheduling_policy) == (9000, "priority")
    assert load("seed: 0", "engine.num_gpu_blocks_override=9001").engine.num_gpu_blocks == 9001


def test_a_bare_number_is_a_fixed_length(load: Callable[..., Scenario]) -> None:
    synthetic = load("workload: {synthetic: {prompt_tokens: 7}}").workload.synthetic
    assert synthetic is not None
    assert synthetic.prompt_tokens == FixedTokens(distribution="fixed", tokens=7)
    assert synthetic.arrivals == Poisson(process="poisson", rate=4.0)


def test_open_ends_close_at_max_model_len(load: Callable[..., Scenario]) -> None:
    """A prompt has max_model_len - 1 tokens at most, its shared prefix included; a context max_model_len."""
    synthetic = load(
        "engine: {max_model_len: 1000}\n"
        "workload: {synthetic: {prompt_tokens: {distribution: lognormal, median: 50, sigma: 1}, output_tokens: 20,\n"
        "  shared_prefix: {tokens: 100}}}"
    ).workload.synthetic
    assert synthetic is not None
    assert isinstance(synthetic.prompt_tokens, LognormalTokens)
    assert synthetic.prompt_tokens.max == 1000 - 1 - 100
    turns = "conversations: {turns: 3}"
    talk = load(f"workload: {{synthetic: {{prompt_tokens: 5, output_tokens: 5, {turns}}}}}").workload.synthetic
    assert talk is not None
    assert talk.conversations is not None
    assert talk.conversations.max_context_tokens == 131072


def test_short_models_run_with_the_default_load(load: Callable[..., Scenario]) -> None:
    synthetic = load("engine: {max_model_len: 512}").workload.synthetic
    assert synthetic is not None
    assert isinstance(synthetic.prompt_tokens, LognormalTokens)
    assert synthetic.prompt_tokens.max == 511


def test_name_is_the_file_stem_made_fit(tmp_path: Path) -> None:
    file = tmp_path / "my load, 2nd.yaml"
    file.write_text("seed: 1", encoding="utf-8")
    assert load_scenario(file).name == "my-load--2nd"


def test_overrides(load: Callable[..., Scenario]) -> None:
    text = "events: [{type: abort, request: 1, at_s: 2}, {type: abort, request: 2, at_s: 2}]"
    scenario = load(
        text,
        "engine.speculative_config.num_speculative_tokens=2",
        "engine.speculative_config.method=eagle3",
        "engine.speculative_config.num_speculative_tokens=4",
        "events.1.at_s=7.5",
        "workload.synthetic.arrivals={process: constant, rate: 2}",
        "name=other",
    )
    assert scenario.engine.speculative_config is not None
    assert scenario.engine.speculative_config.num_speculative_tokens == 4
    assert [event.at_s for event in scenario.events] == [2.0, 7.5]
    assert scenario.name == "other"
    assert load("engine: {max_num_seqs: 7}", "engine.max_num_seqs=null").engine.max_num_seqs == 1024


def test_twin_without_speculation_needs_one_override() -> None:
    twin = load_scenario("quickstart", ["engine.speculative_config=null"])
    assert twin.engine.speculative_config is None
    assert drafter(twin) is None


def test_digest_changes_with_every_setting_and_not_with_spelling(load: Callable[..., Scenario]) -> None:
    plain = load("seed: 3").digest()
    assert load("# note\nseed: 3\nengine: {block_size: 16}").digest() == plain
    assert load("seed: 4").digest() != plain
    assert load("seed: 3", "timing.update_ms=0.4").digest() != plain
    assert len(plain) == 64


def test_yaml_1_2_scalars(load: Callable[..., Scenario]) -> None:
    """1e3 is a number and 010 is ten (PyYAML's YAML 1.1 has a text and eight)."""
    synthetic = load("seed: 010\nworkload: {synthetic: {arrivals: {process: poisson, rate: 1e3}}}")
    assert synthetic.seed == 10
    assert synthetic.workload.synthetic is not None
    assert synthetic.workload.synthetic.arrivals == Poisson(process="poisson", rate=1000.0)


def test_files_are_looked_for_beside_the_scenario_then_in_the_working_directory(
    load: Callable[..., Scenario], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    scenario = load(
        "workload: {trace: {path: t.csv}}\nacceptance: {model: replay, path: r.jsonl}\n"
        "engine: {speculative_config: {method: eagle3, num_speculative_tokens: 2}}"
    )
    with pytest.raises(ScenarioError, match=r"workload\.trace\.path = 't\.csv': there is no such file"):
        trace_path(scenario)
    (elsewhere / "t.csv").touch()
    assert trace_path(scenario).resolve() == (elsewhere / "t.csv").resolve()
    (tmp_path / "t.csv").touch()
    assert trace_path(scenario).resolve() == (tmp_path / "t.csv").resolve()
    (tmp_path / "r.jsonl").touch()
    assert replay_path(scenario) == tmp_path / "r.jsonl"


def test_a_model_by_its_config_json(load: Callable[..., Scenario], tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 100,
        "max_position_embeddings": 777,
    }
    (tmp_path / "small.json").write_text(json.dumps(config), encoding="utf-8")
    scenario = load("model: small.json\nworkload: {synthetic: {prompt_tokens: 5, output_tokens: 5}}")
    assert scenario.engine.max_model_len == 777
    assert target_shape(scenario).num_layers == 2


def test_check_fits_counts_the_null_block() -> None:
    check_fits(num_blocks=5, block_size=16, max_len=64)
    with pytest.raises(ScenarioError, match=r"needs 5 blocks .* the pool has 4"):
        check_fits(num_blocks=5, block_size=16, max_len=65)


def test_a_pool_below_max_model_len_is_a_warning(load: Callable[..., Scenario]) -> None:
    """vLLM would not start; speckv simulates the requests that fit."""
    scenario = load("engine: {num_gpu_blocks: 64, max_model_len: 1024}")  # 63 usable, 64 needed
    assert any("vLLM would not start" in warning for warning in scenario.warnings)
    assert load("engine: {num_gpu_blocks: 65, max_model_len: 1024}").warnings == ()
