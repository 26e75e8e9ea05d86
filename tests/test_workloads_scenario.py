"""Workloads as a scenario names them: traces of every kind, tables of rates, bursts, profiles, tenants."""

import json
from pathlib import Path

import pytest

from sim.build import build
from sim.scenario import ScenarioError, load_scenario
from workloads.profiles import PROFILES
from workloads.traces import TraceError

TIMES = "timing: {fixed_step_ms: 10, schedule_ms: 0, update_ms: 0}\nengine: {num_gpu_blocks: 40000}\n"


def scenario(folder: Path, workload: str) -> Path:
    path = folder / "case.yaml"
    path.write_text(f"{TIMES}workload: {workload}\n", encoding="utf-8")
    return path


def refusal(folder: Path, workload: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        build(load_scenario(scenario(folder, workload)))
    return str(caught.value)


def test_every_published_trace_runs_as_it_is(shared_data: Path, tmp_path: Path) -> None:
    """Twenty requests of each, to the end; ShareGPT's conversations are started by a process, with a warning."""
    files = sorted((shared_data / "traces").iterdir())
    files.append(shared_data / "vllm_formats" / "vllm_bench_serve_detailed_synthetic.json")
    for file in files:
        simulation = build(load_scenario(scenario(tmp_path, f"{{trace: {{path: {file}, max_requests: 20}}}}")))
        simulation.run()
        assert simulation.stopped_by is None
        warned = " ".join(simulation.warnings)
        assert ("has no times" in warned) == ("sharegpt_format" in file.name)
        assert ("failed requests: 1" in warned) == ("SYNTHETIC_burstgpt" in file.name)


def test_trace_options(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("t,p,o\n1,5,5\n0,5,5\n2,6,x\n3,7,7\n", encoding="utf-8")
    given = "{trace: {path: own.csv, columns: {arrival: t, prompt_tokens: p, output_tokens: o}, skip_bad_rows: %s}}"
    simulation = build(load_scenario(scenario(tmp_path, given % "true")))
    assert simulation.num_requests == 2
    assert "2 rows left out (t: out of order: 1; o: must be a whole number" in simulation.warnings[-1]
    with pytest.raises(TraceError, match="line 3, t: earlier than 1 on line 2"):
        build(load_scenario(scenario(tmp_path, given % "false")))
    clash = "{trace: {path: own.csv, format: azure, columns: {arrival: t, prompt_tokens: p, output_tokens: o}}}"
    assert "has no meaning with format azure" in refusal(tmp_path, clash)
    (tmp_path / "own.csv").write_text("arrival_s,prompt_tokens,output_tokens\n1,5,5\n", encoding="utf-8")
    assert "only sharegpt" in refusal(tmp_path, "{trace: {path: own.csv, tokenizer: x}}")


def test_sharegpt(tmp_path: Path) -> None:
    """Two turns, the second 3 s after the first: 4 answer tokens of 10 ms each come before and after."""
    said = [{"from": who, "value": "x" * 16} for who in ("human", "gpt") * 2]
    (tmp_path / "talk.json").write_text(json.dumps([{"id": 1, "conversations": said}]), encoding="utf-8")
    given = "{trace: {path: talk.json, arrivals: {process: all_at_once}, think_time_s: 3}}"
    simulation = build(load_scenario(scenario(tmp_path, given)), check=True)
    simulation.run()
    assert simulation.num_requests == 2
    assert simulation.warnings == []
    assert simulation.now == (4 * 10 + 3_000 + 4 * 10) * 10**6
    missing = refusal(tmp_path, "{trace: {path: talk.json, tokenizer: /nowhere/at/all}}")
    assert "workload.trace.tokenizer" in missing


def test_profiles_are_spelled_out(tmp_path: Path) -> None:
    for name, profile in PROFILES.items():
        loaded = load_scenario(scenario(tmp_path, f"{{profile: {{name: {name}, num_requests: 7, rate: 2.5}}}}"))
        assert loaded.workload.profile is None
        synthetic = loaded.workload.synthetic
        assert synthetic is not None
        assert synthetic.length_correlation == profile.stand_in.rank_correlation
        simulation = build(loaded)
        assert simulation.num_requests == 7
        again = tmp_path / "again.yaml"
        again.write_text(json.dumps(loaded.resolved()), encoding="utf-8")
        assert load_scenario(again).digest() == loaded.digest()
    assert "workload.profile.rate: is needed" in refusal(tmp_path, "{profile: {name: sharegpt}}")
    assert "did you mean" in refusal(tmp_path, "{profile: {name: azure-2023-con}}")


def test_tenants_run_under_the_laws(tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text(
        "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i},{100 + i},{5 + i}\n" for i in range(9)),
        encoding="utf-8",
    )
    given = """
  tenants:
    - {name: chat, profile: {name: azure-2023-conv, num_requests: 8, rate: 20}}
    - name: agents
      synthetic:
        num_requests: 2
        arrivals: {process: on_off, on_rate: 2, on_s: 3, off_s: 5}
        prompt_tokens: 40
        output_tokens: 8
        shared_prefix: {tokens: 64}
        conversations: {turns: 3, first_prompt_tokens: 300, think_time_s: {distribution: exponential, mean: 0.5}}
    - name: like
      synthetic:
        num_requests: 5
        lengths_from: {path: pairs.csv}
        arrivals: {process: piecewise, rates: [[0, 1], [2, 9]]}
"""
    smaller = ["engine.num_gpu_blocks=1500"]  # the laws look at every block
    simulation = build(load_scenario(scenario(tmp_path, given), smaller), check=True)
    simulation.run()
    assert simulation.num_requests == 8 + 6 + 5
    assert simulation.stopped_by is None


WRONG = {
    "two kinds": ("{profile: {name: azure-2023-conv}, synthetic: {}}", "both are given: synthetic and profile"),
    "tenant of nothing": ("{tenants: [{name: a}]}", "exactly one of synthetic and profile, and neither"),
    "tenants alike": (
        "{tenants: [{name: a, synthetic: {}}, {name: a, synthetic: {}}]}",
        "two tenants have the same name",
    ),
    "table": ("{synthetic: {arrivals: {process: piecewise, rates: [[1, 2]]}}}", "row 0 is from 1 s on"),
    "endless": ("{synthetic: {arrivals: {process: piecewise, rates: [[0, 2], [1, 0]]}}}", "the last rate is 0"),
    "repeat": ("{synthetic: {arrivals: {process: piecewise, rates: [[0, 2], [5, 1]], repeat_s: 5}}}", "above 5"),
    "burst": ("{synthetic: {arrivals: {process: on_off, on_rate: 1, on_s: 1}}}", "off_s: is needed"),
    "pairs": ("{synthetic: {length_correlation: 0.5, conversations: {turns: 2}}}", "no meaning with conversations"),
    "both pairs": ("{synthetic: {length_correlation: 0.5, lengths_from: {path: x}}}", "brings the correlation"),
    "no file": ("{synthetic: {lengths_from: {path: nowhere.csv}}}", "there is no such file"),
    "columns": ("{trace: {path: x, columns: {arrival: a, prompt_tokens: a, output_tokens: b}}}", "the same name"),
    "tenant's priority": ("{tenants: [{name: a, synthetic: {priority: 1}}]}", "workload.tenants.0.synthetic.priority"),
    "seconds": (
        "{synthetic: {conversations: {turns: 2, think_time_s: {distribution: exponential}}}}",
        "mean: is needed",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_told(tmp_path: Path, case: str) -> None:
    workload, message = WRONG[case]
    assert message in refusal(tmp_path, workload)
