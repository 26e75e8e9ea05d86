"""`speckv validate`: what sources say, worked out by hand, and blame that finds the input that was changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sim.cli import app
from sim.importing import import_sources
from sim.measured_runs import Measured, MeasuredError, read_measured
from sim.scenario import Scenario, load_scenario
from sim.validation import MOST_RUNS, Compared, _simulated, validate, write_validation

DATA = Path(__file__).parent.parent.parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the shared data are not there")
STEM = "llmservingsim_realvllm_RTX4090_Llama-3.1-8B"


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def line(at: str, made: float, running: int, waiting: int, more: str = "", engine: str = "000") -> str:
    return (
        f"(APIServer pid=1) INFO 12-31 {at} [loggers.py:360] Engine {engine}: Avg prompt throughput: 10.0 tokens/s, "
        f"Avg generation throughput: {made} tokens/s, Running: {running} reqs, Waiting: {waiting} reqs{more}, "
        "GPU KV cache usage: 50.0%, Prefix cache hit rate: 25.0%\n"
    )


# Sources


def test_a_log(tmp_path: Path) -> None:
    drafts = (
        "INFO 12-31 23:59:51 [metrics.py:125] SpecDecoding metrics: Mean acceptance length: 2.62, Accepted throughput: "
        "1.30 tokens/s, Drafted throughput: 2.40 tokens/s, Accepted: 13 tokens, Drafted: 24 tokens, Per-position "
        "acceptance rate: 0.750, 0.500, 0.375, Avg Draft acceptance rate: 54.2%\n"
    )
    text = line("23:59:30", 0, 0, 0) + line("23:59:40", 100, 4, 1, ", Deferred: 2 reqs, Preemptions: 3") + "other\n"
    text += line("23:59:50", 300, 6, 3, ", Preemptions: 1") + drafts + line("23:59:50", 1, 90, 0, engine="001")
    text += line("23:59:50", 5, 5, 5)[:150] + "\n" + line("00:00:00", 0, 0, 0).replace("12-31", "01-01")
    measured = read_measured([write(tmp_path, "server.log", text)])
    # Two lines count: 400 tokens/s over intervals of 10 s are 4,000 tokens, with 4 preemptions.
    assert measured.figures == pytest.approx(
        {
            "output_throughput": 200.0,
            "running": 5.0,
            "waiting": 2.0,
            "kv_cache_usage": 50.0,
            "preemptions_per_1000_tokens": 1.0,
            "prefix_hit_rate": 25.0,
            "mean_acceptance_length": 2.625,  # 8 drafts of 3, 13 accepted
        }
    )
    assert measured.courses["running"].times_s.tolist() == [0.0, 10.0]
    assert any("1 lines of figures were cut" in note for note in measured.notes)
    assert any("001" in note for note in measured.notes)


def scrape(at: str, running: int, made: int, first: float, count: int, drafts: int = 0) -> str:
    name = '{engine="0",model_name="demo"}'
    text = (
        "# TYPE vllm:num_requests_running gauge\n"
        f"vllm:num_requests_running{name} {running}.0{at}\n"
        f'vllm:num_requests_waiting_by_reason{{engine="0",model_name="demo",reason="capacity"}} 7.0{at}\n'
        f'vllm:num_requests_running{{engine="1",model_name="demo"}} 99.0{at}\n'
        f"vllm:kv_cache_usage_perc{name} 0.5{at}\n"
        f"vllm:num_preemptions_total{name} {made / 500}{at}\n"
        f"vllm:prefix_cache_queries_total{name} {made}{at}\nvllm:prefix_cache_hits_total{name} {made / 4}{at}\n"
        f"vllm:generation_tokens_total{name} {made}{at}\n"
        f"vllm:time_to_first_token_seconds_sum{name} {first}{at}\n"
        f"vllm:time_to_first_token_seconds_count{name} {count}{at}\n"
        f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="777",engine="0"}} 1.0{at}\n'
    )
    if drafts:
        text += f"vllm:spec_decode_num_drafts_total{name} {drafts}{at}\n"
        per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        text += f'{per_position}{{engine="0",position="0"}} {drafts / 2}{at}\n'
        text += f'{per_position}{{engine="0",position="1"}} {drafts / 4}{at}\n'
    return text


def test_two_scrapes_are_subtracted(tmp_path: Path) -> None:
    files = [
        write(tmp_path, "1.prom", scrape(" 1000000", 4, 1000, 1.0, 10, 8)),
        write(tmp_path, "2.prom", scrape(" 1010000", 8, 5000, 4.0, 30, 16)),
    ]
    measured = read_measured(files)
    assert measured.figures == pytest.approx(
        {
            "running": 6.0,
            "kv_cache_usage": 50.0,
            "output_throughput": 400.0,  # 4,000 tokens in 10 s
            "preemptions_per_1000_tokens": 2.0,
            "prefix_hit_rate": 25.0,
            "ttft_ms_mean": 150.0,  # 3 s over 20 requests
            "mean_acceptance_length": 1.75,
        }
    )
    assert measured.num_gpu_blocks == 777
    together = write(tmp_path, "both.prom", "".join(file.read_text(encoding="utf-8") for file in files))
    assert read_measured([together]).figures["output_throughput"] == 400.0
    without = [
        write(tmp_path, "3.prom", scrape("", 4, 1000, 1.0, 10)),
        write(tmp_path, "4.prom", scrape("", 8, 5000, 4.0, 30)),
    ]
    assert "output_throughput" not in read_measured(without).figures
    assert read_measured(without, interval_s=20).figures["output_throughput"] == 200.0


def bench(**more: Any) -> dict[str, Any]:
    return {
        "duration": 4.0,
        "completed": 2,
        "request_throughput": 0.5,
        "output_throughput": 2.0,
        "input_lens": [10, 20, 30],
        "output_lens": [3, 5, 0],
        "ttfts": [0.1, 0.3, 0.0],
        "itls": [[0.1, 0.3], [0.5, 0.5], []],
        "start_times": [100.5, 100.0, 101.0],
        "errors": ["", "", "timeout"],
        **more,
    }


def test_a_benchmark_result_with_details(tmp_path: Path) -> None:
    measured = read_measured([write(tmp_path, "bench.json", json.dumps(bench(mean_tpot_ms=225.0)))])
    figures = measured.figures
    assert figures["ttft_ms_mean"] == pytest.approx(200.0)
    assert figures["tpot_ms_mean"] == 225.0  # as printed; (0.4 / 2 + 1.0 / 4) / 2 as well
    assert figures["tpot_ms_median"] == pytest.approx(225.0)
    assert figures["e2el_ms_mean"] == pytest.approx(900.0)  # 0.5 and 1.3 s
    assert figures["in_system"] == pytest.approx(0.45)  # 1.8 request-seconds in 4 s
    assert measured.requests == ((0, 20, 5), (500_000_000, 10, 3))
    assert measured.courses["in_system"].values.tolist() == [1, 2, 1, 0]


def recorded(arrival: float, queued: float, first: float, last: float, prompt: int = 8, output: int = 5) -> str:
    return json.dumps(
        {
            "request_id": "x",
            "input_toks": prompt,
            "output_toks": output,
            "arrival_time": arrival,
            "queued_ts": queued,
            "scheduled_ts": queued,
            "first_token_ts": first,
            "last_token_ts": last,
        }
    )


def test_a_recorded_run(tmp_path: Path) -> None:
    # Two clocks: the second request is queued 0.2 s after it arrives, the first at once, so the clocks lie 900 s apart.
    rows = [recorded(1000.0, 100.0, 101.0, 103.0), recorded(1001.0, 101.2, 102.0, 106.0)]
    requests = write(tmp_path, "requests.jsonl", "\n".join(rows) + "\n")
    series = write(
        tmp_path,
        "timeseries.csv",
        "t,prompt_throughput,gen_throughput,running,waiting,kv_cache_pct\n1.0,8,0,1,0,10\n2.0,8,2,2,1,30\n3.0,0,0,0,0,0\n",
    )
    meta = write(tmp_path, "meta.json", json.dumps({"kv_cache": {"num_gpu_blocks": 64}, "resolved_config": {}}))
    measured = read_measured([requests, series, meta])
    assert measured.figures["ttft_ms_mean"] == pytest.approx(1000.0)  # 1.0 s, and 2.0 - 1.0 s
    assert measured.figures["tpot_ms_mean"] == pytest.approx(750.0)  # 2 / 4 and 4 / 4 s
    assert measured.figures["duration_s"] == pytest.approx(6.0)
    assert measured.figures["output_throughput"] == pytest.approx(10 / 6)
    assert (measured.figures["running"], measured.figures["waiting"]) == (1.5, 0.5)
    assert measured.num_gpu_blocks == 64
    assert measured.requests == ((0, 8, 5), (1_000_000_000, 8, 5))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.txt", "", "a.txt: is empty"),
        ("b.txt", "nothing of interest\n", "b.txt: of an unknown kind"),
        ("c.json", '{"request_throughput": 1,\n "duration": }\n', "c.json:2: malformed JSON"),
        ("d.json", '{"a": 1}\n', "d.json:1: JSON of an unknown kind"),
        ("e.json", json.dumps(bench(duration="long")), "duration = 'long': expected a number"),
        ("f.json", json.dumps(bench(ttfts=[0.1])), "ttfts: expected a list of 3 entries"),
        ("g.json", json.dumps(bench(itls=[3, [], []])), "entry 0 of itls = 3"),
        ("h.prom", "vllm:num_requests_running 1.0\nvllm:num_requests_waiting much\n", "h.prom:2: "),
        ("i.prom", 'vllm:num_requests_running{engine="0"\n', "i.prom:1: "),
        ("j.jsonl", recorded(1, 1, 2, 3) + "\n{\n", "j.jsonl:2: malformed JSON"),
        ("k.jsonl", recorded(1, 1, 2, 3) + '\n{"arrival_time": 3}\n', "k.jsonl:2: queued_ts, first_token_ts"),
        ("l.jsonl", recorded(1, 1, 2, 3, 0) + "\n", "l.jsonl:1: input_toks"),
        ("m.csv", "t,gen_throughput,running,waiting,kv_cache_pct\n1,2,3,4,5\n2,3,4\n", "m.csv:3: 3 fields"),
        ("n.csv", "t,gen_throughput,running,waiting,kv_cache_pct\n1,2,3,4,5\n1,2,3,4,5\n", "n.csv:3: t = 1"),
        ("o.csv", "t,running,waiting\n1,2,3\n", "o.csv:1: no column gen_throughput, kv_cache_pct"),
        ("p.csv", "t,gen_throughput,running,waiting,kv_cache_pct\n1,2,x,4,5\n", "p.csv:2: running = 'x'"),
        ("q.log", "x Avg generation throughput: 12.0 tok\n", "first at line 1"),
    ],
)
def test_malformed_sources_are_told_with_their_lines(tmp_path: Path, name: str, text: str, said: str) -> None:
    result = CliRunner().invoke(app, ["validate", "minimal", "--against", str(write(tmp_path, name, text))])
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


def test_a_counter_that_falls_is_a_restart(tmp_path: Path) -> None:
    files = [
        write(tmp_path, "1.prom", scrape(" 1000", 1, 500, 1, 1)),
        write(tmp_path, "2.prom", scrape(" 2000", 1, 5, 1, 1)),
    ]
    with pytest.raises(MeasuredError, match="restart"):
        read_measured(files)


# Comparing and blame


def test_errors_and_distances() -> None:
    assert Compared("running", 10, 12).error == pytest.approx(0.2)
    assert Compared("running", 10, 12).distance == pytest.approx(1 / 6)
    assert Compared("waiting", 0, 3).error is None
    assert (Compared("waiting", 0, 3).distance, Compared("waiting", 0, 0).distance) == (1.0, 0.0)
    assert Compared("waiting", 0.0, 0.01).distance == pytest.approx(0.01)  # a hundredth of a request is nothing


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    """A pool that fills, so that its size, the drafts, the steps' time and the arrivals all show."""
    text = """
model: llama-3.1-8b
hardware: h100
engine:
  num_gpu_blocks: 700
  max_model_len: 4096
  speculative_config: {method: eagle3, num_speculative_tokens: 3}
acceptance: {model: per_position, rates: [0.6, 0.6, 0.6], convention: conditional}
workload:
  synthetic:
    num_requests: 60
    arrivals: {process: poisson, rate: 20}
    prompt_tokens: {distribution: uniform, min: 100, max: 400}
    output_tokens: {distribution: uniform, min: 50, max: 250}
"""
    return load_scenario(write(tmp_path, "small.yaml", text))


def measured_as(scenario: Scenario, step_factor: float = 1.0) -> Measured:
    run = _simulated(scenario, step_factor)
    courses = {name: course._replace(known_origin=False) for name, course in run.courses.items() if name != "tokens"}
    return Measured(figures=dict(run.figures), courses=courses, kinds=["made"])


def with_(scenario: Scenario, *overrides: str) -> Scenario:
    assert scenario.file is not None
    return load_scenario(scenario.file, overrides)


def test_a_scenario_held_against_itself_has_no_error(scenario: Scenario) -> None:
    result = validate(scenario, measured_as(scenario))
    assert result.error == 0
    assert result.shift_s == 0 or abs(result.shift_s) < 0.05
    assert result.blame is not None
    assert result.blame.input is None


@pytest.mark.parametrize(
    ("culprit", "make"),
    [
        ("number of blocks", lambda s: measured_as(with_(s, "engine.num_gpu_blocks=420"))),
        ("acceptance", lambda s: measured_as(with_(s, "acceptance.rates=[0.75, 0.75, 0.75]"))),
        ("step cost", lambda s: measured_as(with_(s, "timing.schedule_ms=0.26", "timing.update_ms=0.39"), 1.3)),
        ("arrival times", lambda s: measured_as(with_(s, "workload.synthetic.arrivals.rate=13"))),
    ],
)
def test_blame_finds_what_was_changed(scenario: Scenario, culprit: str, make: Callable[[Scenario], Measured]) -> None:
    runs = []
    result = validate(scenario, make(scenario), watch=runs.append)
    assert result.blame is not None
    assert result.blame.input == culprit, result.blame
    assert runs[-1] <= MOST_RUNS


def test_what_the_source_confirms_is_cleared(scenario: Scenario) -> None:
    measured = measured_as(scenario, 1.4)
    measured.num_gpu_blocks = 700
    result = validate(scenario, measured)
    assert result.blame is not None
    assert {"number of blocks", "acceptance"} <= set(result.blame.cleared)
    assert not any(trial.input == "number of blocks" for trial in result.blame.trials)


def test_what_the_source_says_of_an_input_is_tried(scenario: Scenario) -> None:
    measured = measured_as(with_(scenario, "engine.num_gpu_blocks=350"))
    measured.num_gpu_blocks = 350
    result = validate(scenario, measured)
    assert result.blame is not None
    first = result.blame.trials[0]
    assert first.change == "the 350 blocks of the source"
    assert first.removed == 1.0


def test_files_and_command(tmp_path: Path, scenario: Scenario) -> None:
    result = validate(scenario, measured_as(scenario, 1.2), blame=False)
    report, picture = write_validation(result, tmp_path / "out")
    assert json.loads(report.read_text(encoding="utf-8"))["blame"] is None
    assert picture.stat().st_size > 10_000
    log = write(tmp_path, "server.log", line("10:00:00", 100, 4, 1) + line("10:00:10", 300, 6, 3))
    said = CliRunner().invoke(
        app, ["validate", str(scenario.file), "--against", str(log), "--no-blame", "--json", "--set", "seed=2"]
    )
    assert said.exit_code == 0, said.output
    assert '"output_throughput"' in said.output


@needs_data
def test_the_shared_samples() -> None:
    formats = DATA / "vllm_formats"
    log = read_measured([formats / "vllm_log_synthetic.txt"]).figures
    assert (log["running"], log["waiting"], log["kv_cache_usage"], log["prefix_hit_rate"]) == (24, 3, 91.3, 37.5)
    metrics = read_measured([formats / "vllm_metrics_synthetic.prom"]).figures
    assert metrics["prefix_hit_rate"] == pytest.approx(37.5)
    detailed = read_measured([formats / "vllm_bench_serve_detailed_synthetic.json"]).figures
    assert detailed["ttft_ms_p99"] == 69.8
    assert {log["mean_acceptance_length"], metrics["mean_acceptance_length"]} == {2.625}


@needs_data
def test_the_recorded_real_run() -> None:
    files = [str(DATA / "real_vllm" / f"{STEM}_{name}") for name in ("meta.json", "requests.jsonl", "timeseries.csv")]
    result = validate(import_sources(files[:2]).scenario, read_measured(files))
    measured = {entry.name: entry.measured for entry in result.compared}
    # Published by its authors with the run: 300 requests, 195,753 output tokens, 184 seconds.
    assert measured["output_throughput"] == pytest.approx(195_753 / 183.57, rel=1e-4)
    assert measured["request_throughput"] == pytest.approx(300 / 183.57, rel=1e-4)
    assert result.blame is not None
    assert {"number of blocks", "acceptance", "arrival times"} == set(result.blame.cleared)
    assert all(entry.error is not None and abs(entry.error) < 0.15 for entry in result.compared)
