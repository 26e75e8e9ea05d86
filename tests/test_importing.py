"""`speckv import`: what a server was told comes back as a scenario that loads, with the origin of every value."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from typer.testing import CliRunner

from sim.cli import app
from sim.importing import Imported, ImportFailed, import_sources
from sim.scenario import load_scenario
from sim.vllm_settings import human_readable, read_command

DATA = Path(__file__).parent.parent.parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the shared data are not there")

SPECULATION = '{"method": "eagle3", "model": "org/draft", "num_speculative_tokens": 3}'

LOG = """(APIServer pid=11) INFO 03-05 11:58:01 [launcher.py:380] vLLM server version 0.30.1, serving model \
Qwen/Qwen3-8B
(APIServer pid=11) INFO 03-05 11:58:01 [api_utils.py:286] non-default args: {'model': 'Qwen/Qwen3-8B', \
'max_model_len': 8192, 'api_key': '***', 'compilation_config': CompilationConfig(mode=3, sizes=[1, 2]), \
'speculative_config': {'method': 'eagle3', 'model': 'org/draft', 'num_speculative_tokens': 3}, 'max_num_seqs': 128}
some other line
(EngineCore pid=12) INFO 03-05 11:58:20 [core.py:133] Initializing a V1 LLM engine (v0.30.1) with config: \
model='Qwen/Qwen3-8B', speculative_config=SpeculativeConfig(method='eagle3', model='org/draft', num_spec_tokens=3), \
tokenizer='Qwen/Qwen3-8B', dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=2, pipeline_parallel_size=1, \
quantization=None, enforce_eager=True, kv_cache_dtype=auto, enable_prefix_caching=False, enable_chunked_prefill=True
(EngineCore pid=12) INFO 03-05 11:58:50 [kv_cache_utils.py:2328] GPU KV cache size: 123,456 tokens, Maximum \
concurrency for 8,192 tokens per request: 15.07x
"""


def imported(*sources: str | Path, **more: object) -> Imported:
    return import_sources([str(source) for source in sources], **more)  # type: ignore[arg-type]


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    "line",
    [
        f"vllm serve llama-3.1-8b -tp 2 --max-model-len 32k --max-num-seqs 64 --speculative-config '{SPECULATION}'",
        f"vllm serve llama-3.1-8b --tensor_parallel_size=2 --max_model_len=32000 --max_num_seqs=64 -sc '{SPECULATION}'",
        "VLLM_X=1 vllm serve llama-3.1-8b --tensor-parallel-size 2 --max-model-len=32k --max-num-seqs 64 "
        "--spec-method eagle3 --spec-model org/draft --spec-tokens 3 > out.log 2>&1 &",
        "python -m vllm.entrypoints.openai.api_server --model llama-3.1-8b -tp=2 --max-model-len 32k --max-num-seqs 64 "
        "--speculative-config.method eagle3 --speculative_config.model=org/draft "
        "--speculative-config.num-speculative-tokens 3",
        "docker run --gpus all -p 8000:8000 vllm/vllm-openai:v0.32.0 --model llama-3.1-8b -tp 2 --max-model-len 32k "
        f"--max-num-seqs 64 --speculative-config='{SPECULATION}'",
    ],
)
def test_a_command_line_in_all_its_spellings(line: str) -> None:
    engine = imported(line).scenario.engine
    assert (engine.tensor_parallel_size, engine.max_model_len, engine.max_num_seqs) == (2, 32_000, 64)
    speculation = engine.speculative_config
    assert speculation is not None
    assert (speculation.method, speculation.model, speculation.num_speculative_tokens) == ("eagle3", "org/draft", 3)


def test_numbers_as_vllm_reads_them() -> None:
    # The examples in vLLM's own human_readable_int.
    assert [human_readable(text) for text in ("1k", "1K", "25.6k", "8192", "-1", "x", "1.5K")] == [
        *(1000, 1024, 25_600, 8192, -1, None, None),
    ]


def test_a_script_with_continued_lines_gives_their_numbers(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "serve.sh",
        "#!/bin/sh\n# vllm serve another --max-num-seqs 1\nexport A=1\nvllm serve llama-3.1-8b \\\n"
        "  --max-num-seqs 32 \\\n  --no-enable-prefix-caching  # for now\necho --max-num-seqs 99\n",
    )
    result = imported(script)
    assert result.scenario.engine.max_num_seqs == 32
    assert result.scenario.engine.enable_prefix_caching is False
    assert "max_num_seqs: 32  # from serve.sh:5: --max-num-seqs" in result.text
    assert "enable_prefix_caching: false  # from serve.sh:6" in result.text


def test_the_flags_of_a_command_end_with_it() -> None:
    names = [setting.name for setting in read_command("vllm serve m --dtype auto && rm --port 1", "x").settings]
    assert names == ["model", "dtype"]


def test_a_start_up_log(tmp_path: Path) -> None:
    result = imported(write(tmp_path, "server.log", LOG))
    engine = result.scenario.engine
    assert result.scenario.model == "Qwen/Qwen3-8B"
    assert engine.preset == "vllm-0.30"
    assert engine.num_gpu_blocks == 7716  # 123,456 tokens / 16
    assert (engine.max_num_seqs, engine.max_model_len, engine.tensor_parallel_size) == (128, 8192, 2)
    assert engine.enable_prefix_caching is False
    assert result.scenario.timing.cuda_graphs is False
    assert engine.speculative_config is not None
    assert engine.speculative_config.num_speculative_tokens == 3
    assert any("compilation_config" in text for text in result.not_modelled)
    assert "# assumed" not in next(line for line in result.text.splitlines() if "num_gpu_blocks" in line)
    assert "num_gpu_blocks: 7716  # from server.log:5" in result.text


def test_blocks_where_the_length_is_no_multiple_of_a_block(tmp_path: Path) -> None:
    # vLLM 0.32 prints int(blocks / ceil(100 / 16) * 100): 1,000 blocks print as int(14285.7).
    text = (
        "INFO 03-05 11:58:50 [x.py:1] GPU KV cache size: 14,285 tokens, Maximum concurrency for 100 tokens per request"
    )
    log = write(tmp_path, "server.log", text + ": 142.86x\n")
    assert imported("vllm serve llama-3.1-8b", log).scenario.engine.num_gpu_blocks == 1000
    # Releases before it printed blocks * 16 on a line of their own.
    old = write(tmp_path, "old.log", "INFO 03-05 11:58:50 [x.py:1] GPU KV cache size: 16,000 tokens\n")
    assert imported("vllm serve llama-3.1-8b --max-model-len 100", old).scenario.engine.num_gpu_blocks == 1000


def test_what_ran_counts_before_what_was_asked(tmp_path: Path) -> None:
    result = imported("vllm serve Qwen/Qwen3-8B -tp 4 --max-model-len auto", write(tmp_path, "server.log", LOG))
    assert result.scenario.engine.tensor_parallel_size == 2
    assert any("tensor_parallel_size" in text and "'4'" in text for text in result.warnings)
    assert not any("max_model_len" in text for text in result.warnings)


def test_of_several_starts_the_last_counts(tmp_path: Path) -> None:
    again = LOG.replace("123,456", "160,000").replace("'max_num_seqs': 128", "'max_num_seqs': 16")
    result = imported(write(tmp_path, "server.log", LOG + again))
    assert result.scenario.engine.num_gpu_blocks == 10_000
    assert result.scenario.engine.max_num_seqs == 16
    assert any("started 2 times" in text for text in result.warnings)


def test_what_is_not_modelled_is_said() -> None:
    result = imported(
        "vllm serve llama-3.1-8b --pipeline-parallel-size 2 -dp 1 --enable-lora --quantization awq --port 80 "
        "--api-key secret-key --frobnicate 3 --no-enable-chunked-prefill"
    )
    said = "\n".join(result.not_modelled)
    assert all(word in said for word in ("pipeline stages", "LoRA", "awq", "chunked prefill"))
    assert "data-parallel" not in said
    assert any("--frobnicate 3: not known" in text for text in result.ignored)
    assert any("--port 80: no meaning here" in text for text in result.ignored)
    assert "secret-key" not in result.text + repr(result)
    assert all(f"#   {text}" in result.text for text in result.not_modelled + result.ignored)


def test_every_assumed_value_has_its_comment(tmp_path: Path) -> None:
    result = imported(f"vllm serve llama-3.1-8b --speculative-config '{SPECULATION}'")
    assert {"hardware", "engine.preset", "engine.block_size", "acceptance", "workload"} <= set(result.assumed)
    for key in result.assumed:
        name = key.rpartition(".")[2]
        beside = re.search(rf"^ *{name}: .*# assumed: ", result.text, re.MULTILINE)
        above = re.search(rf"^ *# assumed: .*\n *{name}:$", result.text, re.MULTILINE)
        assert beside or above, key
    file = write(tmp_path, "mine.yaml", result.text)
    assert load_scenario(file).resolved() | {"name": ""} == result.scenario.resolved() | {"name": ""}


def test_typed_rates_a_json_and_a_fitted_file(tmp_path: Path) -> None:
    # Unconditional 0.6, 0.3, 0.15: conditional 0.6, 0.5, 0.5.
    result = imported("vllm serve llama-3.1-8b", SPECULATION, "rates=0.6,0.3,0.15")
    given = result.scenario.acceptance
    assert given is not None
    assert given.model == "per_position"
    assert given.rates == pytest.approx([0.6, 0.5, 0.5])
    fitted = write(tmp_path, "acceptance.yaml", "acceptance:\n  model: beta\n  alpha: 2.0\n  beta: 1.0\n")
    other = imported("vllm serve llama-3.1-8b", SPECULATION, fitted).scenario.acceptance
    assert other is not None
    assert other.model == "beta"
    shorter = imported("vllm serve llama-3.1-8b", SPECULATION, "rates=0.6,0.36")
    assert shorter.scenario.acceptance is not None
    assert shorter.scenario.acceptance.model == "geometric"
    assert any("drafts were 2 a step" in text for text in shorter.warnings)


def test_a_trace_lies_where_the_scenario_looks(tmp_path: Path) -> None:
    trace = write(tmp_path, "trace.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,10,5\n1.5,20,6\n")
    (tmp_path / "below").mkdir()
    target = tmp_path / "below" / "mine.yaml"
    result = imported("vllm serve llama-3.1-8b", trace, output=target)
    target.write_text(result.text, encoding="utf-8")
    loaded = load_scenario(target)
    assert loaded.workload.trace is not None
    assert (loaded.workload.trace.path, loaded.workload.trace.format) == ("../trace.csv", "vidur")


def test_metrics_tell_the_blocks(tmp_path: Path) -> None:
    scrape = write(
        tmp_path, "m.prom", 'vllm:cache_config_info{block_size="32",num_gpu_blocks="500",cache_dtype="auto"} 1.0\n'
    )
    engine = imported("vllm serve llama-3.1-8b --max-model-len 4096", scrape).scenario.engine
    assert (engine.block_size, engine.num_gpu_blocks) == (32, 500)


def test_bytes_of_kv_become_blocks() -> None:
    # Llama-3.1-8B: 32 layers, 8 heads of 128, keys and values of 2 bytes: 131,072 bytes a token, 2 MiB a block of 16.
    result = imported("vllm serve llama-3.1-8b --kv-cache-memory-bytes 2G --max-model-len 4096")
    assert result.scenario.engine.num_gpu_blocks == 1024


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.sh", "x\nvllm serve m --speculative-config '{\n", "a.sh:2: a quote ' is opened and never closed"),
        (
            "b.sh",
            "vllm serve llama-3.1-8b \\\n  --max-num-seqs many\n",
            "b.sh:2: --max-num-seqs: max_num_seqs = 'many'",
        ),
        (
            "c.sh",
            "vllm serve llama-3.1-8b --speculative-config '{\"method\": }'",
            "c.sh:1: --speculative-config: malformed",
        ),
        ("d.sh", "vllm serve llama-3.1-8b --max-num-seqs", "d.sh:1: --max-num-seqs: has no value"),
        ("e.log", LOG.replace(", 'max_num_seqs': 128}", ""), "e.log:2: the line is cut"),
        ("f.log", LOG.replace("num_spec_tokens=3)", "num"), "f.log:4: the line is cut"),
        ("g.txt", "", "is empty"),
        ("h.txt", "hello\n", "h.txt"),
        ("i.json", '{"method": "eagle3",\n', "i.json:"),
        ("j.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,x,5\n", "line 2"),
    ],
)
def test_malformed_sources_are_told_with_their_lines(tmp_path: Path, name: str, text: str, said: str) -> None:
    file = write(tmp_path, name, text)
    result = CliRunner().invoke(
        app, ["import", "vllm serve llama-3.1-8b", str(file)] if name > "g" else ["import", str(file)]
    )
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        (["nothing.log"], "no such file"),
        (["vllm serve org/unknown-model"], "--set"),
        (["--max-num-seqs 3"], "which model"),
        (["vllm serve llama-3.1-8b", "rates=2"], "between 0 and 1"),
        (["vllm serve llama-3.1-8b --speculative-config '[1]'"], "expected an object"),
    ],
)
def test_what_makes_no_scenario(sources: list[str], said: str) -> None:
    with pytest.raises(ImportFailed) as caught:
        import_sources(sources)
    assert said in str(caught.value)


def test_the_command_writes_what_loads(tmp_path: Path) -> None:
    target = tmp_path / "mine.yaml"
    arguments = ["import", "vllm serve llama-3.1-8b", "-o", str(target), "--set", "hardware=rtx-4090"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert load_scenario(target).hardware == "rtx-4090"
    assert "hardware: rtx-4090  # from --set" in target.read_text(encoding="utf-8")


@limits(max_examples=40, deadline=None)
@given(st.text(max_size=120))
def test_no_text_makes_a_traceback(text: str) -> None:
    try:
        import_sources([f"vllm serve llama-3.1-8b {text}"])
    except ImportFailed:
        return


@needs_data
def test_the_shared_samples() -> None:
    formats = DATA / "vllm_formats"
    for config in json.loads((formats / "speculative_config_examples.json").read_text()):
        if config["method"] == "mtp" or config.get("model") == "org/small":
            continue  # need a model with such layers, and a drafter that is known
        speculation = imported("vllm serve llama-3.1-8b", json.dumps(config)).scenario.engine.speculative_config
        assert speculation is not None
        assert speculation.num_speculative_tokens == config["num_speculative_tokens"]
    for name in ("vllm_log_synthetic.txt", "vllm_metrics_synthetic.prom", "vllm_bench_serve_detailed_synthetic.json"):
        given = imported("vllm serve llama-3.1-8b", SPECULATION, formats / name).scenario.acceptance
        assert given is not None
        assert given.model == "per_position"
        assert given.rates == pytest.approx([0.75, 2 / 3, 0.75], abs=1e-5)  # 0.75, 0.5, 0.375 unconditional


@needs_data
def test_the_recorded_run() -> None:
    stem = "llmservingsim_realvllm_RTX4090_Llama-3.1-8B"
    files = [DATA / "real_vllm" / f"{stem}_{name}" for name in ("meta.json", "requests.jsonl")]
    scenario = imported(*files).scenario
    assert scenario.hardware == "rtx-4090"
    assert (scenario.engine.num_gpu_blocks, scenario.engine.max_num_batched_tokens) == (2588, 2048)
    assert scenario.engine.preset == "vllm-0.24"
