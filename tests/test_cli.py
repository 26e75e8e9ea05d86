"""The command from outside: what it prints, what it leaves, and the code it ends with."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

import sim
from sim.cli import app
from sim.compiled import CORE

TINY = """
engine: {num_gpu_blocks: 30, max_model_len: 256, max_num_seqs: 8, speculative_config: {method: eagle3, num_speculative_tokens: 3}}
timing: {fixed_step_ms: 10}
workload:
  synthetic:
    num_requests: 40
    arrivals: {process: poisson, rate: 20}
    prompt_tokens: {distribution: uniform, min: 8, max: 90}
    output_tokens: {distribution: uniform, min: 1, max: 60}
slo: {ttft_ms: 1000}
"""  # noqa: E501

SUMMARY_NAMES = """
schema_version num_requests num_finished num_steps num_request_steps duration_s request_throughput output_throughput
request_goodput ttft_ms tpot_ms itl_ms e2el_ms num_preemptions prefix_cache_queries prefix_cache_hits
kv_cache_usage_perc num_drafts num_draft_tokens num_accepted_tokens accepted_per_pos mean_acceptance_length
slot_seconds content_slot_seconds
""".split()


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    scenario = tmp_path / "tiny.yaml"
    scenario.write_text(TINY)
    return scenario


def speckv(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def process(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sim", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(sim.__file__).parent.parent)}
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run_folder(out: Path) -> Path:
    (folder,) = out.glob("*/*")
    return folder


def test_a_run_leaves_what_it_says(tiny: Path, tmp_path: Path) -> None:
    done = speckv("run", "tiny.yaml")
    assert done.exit_code == 0
    folder = run_folder(tmp_path / "results")
    assert str(folder.relative_to(tmp_path)) in done.stdout
    assert "40 finished" in done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) <= 23
    assert max(len(line) for line in lines) <= 80
    assert {path.name for path in folder.iterdir()} == {
        *("manifest.json", "summary.json", "requests.parquet", "steps.parquet"),
        "overview.png",
    }
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["complete"] is True
    assert manifest["name"] == "tiny"
    assert manifest["scenario"]["timing"]["fixed_step_ms"] == 10
    assert manifest["versions"]["speckv"] == sim.__version__
    for name in ("wall_s", "cpu_s", "peak_rss_mb"):
        assert manifest[name] > 0


def test_the_tables_and_the_summary_agree(tiny: Path, tmp_path: Path) -> None:
    result = sim.simulate("tiny.yaml", out="elsewhere", check=True)
    assert result.folder.is_relative_to("elsewhere")
    summary = result.summary
    assert set(SUMMARY_NAMES) <= set(summary)
    requests, steps = result.requests(), result.steps()
    assert len(requests) == summary["num_requests"] == summary["num_finished"] == 40
    assert len(steps) == summary["num_steps"]
    assert steps["num_reqs"].sum() == summary["num_request_steps"]
    assert summary["num_preemptions"] == requests["num_preemptions"].sum() == steps["num_preempted"].sum() > 0
    assert summary["num_output_tokens"] == requests["num_output_tokens"].sum() == steps["num_delivered_tokens"].sum()
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_trimmed_tokens", "recomputed_tokens"):
        assert summary[name] == requests[name].sum()
    assert summary["num_accepted_tokens"] == sum(summary["accepted_per_pos"])
    # Law 5: what was sampled is delivered, trimmed, dropped or came too late.
    late = ("num_trimmed_tokens", "num_stale_tokens_dropped", "num_ignored_tokens")
    assert steps["num_sampled_tokens"].sum() == summary["num_output_tokens"] + sum(summary[name] for name in late)
    # Each schedule's classes add up to the pool without its null block.
    reserved = steps[[name for name in steps.columns if name.startswith("res_") and name != "res_garbage_after_update"]]
    assert set(reserved.sum(axis=1)) == {29 * 16}
    parts = [name for name in steps.columns if name.startswith("cost_") and name != "cost_total"]
    assert (steps[parts].sum(axis=1) == steps["cost_total"]).all()
    assert (steps["ended_ns"] - steps["started_ns"] == 10_000_000).all()
    assert requests["ttft_ms"].mean() == pytest.approx(summary["ttft_ms"]["mean"])
    assert requests["e2el_ms"].quantile(0.9) == pytest.approx(summary["e2el_ms"]["p90"])
    assert requests["tpot_ms"].quantile(0.99) == pytest.approx(summary["tpot_ms"]["p99"])
    good = (requests["ttft_ms"] <= 1000).sum()
    assert summary["request_goodput"] == pytest.approx(good / summary["duration_s"])


def test_the_same_run_is_found_and_force_repeats_it(tiny: Path, tmp_path: Path) -> None:
    assert speckv("run", "tiny.yaml", "--quiet").exit_code == 0
    folder = run_folder(tmp_path / "results")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    again = speckv("run", "tiny.yaml", "--quiet")
    assert again.exit_code == 0
    assert "run before" in again.stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    anew = speckv("run", "tiny.yaml", "--quiet", "--force")
    assert "run before" not in anew.stderr
    for name in ("summary.json", "requests.parquet", "steps.parquet"):
        assert (folder / name).read_bytes() == before[name]
    other = speckv("run", "tiny.yaml", "--quiet", "--set", "seed=1")
    assert "run before" not in other.stderr
    assert len(list((tmp_path / "results" / "tiny").iterdir())) == 2


def test_a_changed_trace_is_not_the_same_run(tiny: Path, tmp_path: Path) -> None:
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    (tmp_path / "trace.csv").write_text(head + "2023-11-16 18:15:46.6805900,44,9\n")
    (tmp_path / "t.yaml").write_text("workload: {trace: {path: trace.csv}}\n")
    assert json.loads(speckv("run", "t.yaml", "--json").stdout)["num_output_tokens"] == 9
    (tmp_path / "trace.csv").write_text(head + "2023-11-16 18:15:46.6805900,44,11\n")
    assert json.loads(speckv("run", "t.yaml", "--json").stdout)["num_output_tokens"] == 11


def test_json_is_all_there_is_on_standard_output(tiny: Path, tmp_path: Path) -> None:
    done = speckv("run", "tiny.yaml", "--json")
    written = (run_folder(tmp_path / "results") / "summary.json").read_text()
    assert json.loads(done.stdout) == json.loads(written)


def test_csv_says_the_same_as_parquet(tiny: Path) -> None:
    one = sim.simulate("tiny.yaml", out="one")
    two = sim.simulate("tiny.yaml", ["output.format=csv"], out="two")
    assert one.summary == two.summary
    pd.testing.assert_frame_equal(one.steps(), two.steps(), check_dtype=False)
    pd.testing.assert_frame_equal(one.requests(), two.requests(), check_dtype=False)
    assert (two.folder / "overview.png").is_file()


def test_tables_and_pictures_can_be_left_out(tiny: Path, tmp_path: Path) -> None:
    assert speckv("run", "tiny.yaml", "--set", "output.steps=false", "--quiet").exit_code == 0
    kept = {path.name for path in run_folder(tmp_path / "results").iterdir()}
    assert kept == {"manifest.json", "summary.json", "requests.parquet"}


def test_a_limit_is_an_end(tiny: Path) -> None:
    result = sim.simulate("tiny.yaml", ["limits.max_steps=7"])
    assert (result.complete, result.manifest["stopped_by"]) == (True, "max_steps")
    assert set(result.requests()["status"]) <= {"finished", "unfinished"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.yaml"], "nowhere.yaml"),
        (["tiny.yaml", "--set", "engine.max_num_seq=3"], "did you mean `max_num_seqs`"),
        (["tiny.yaml", "--set", "engine.num_gpu_blocks=4"], "num_gpu_blocks"),
        (["tiny.yaml", "--set", "workload={trace: {path: bad.csv}}"], "bad.csv"),
    ],
)
def test_bad_input_ends_with_2_and_writes_nothing(tiny: Path, tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "bad.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,44,zero\n")
    done = speckv("run", *arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "results").exists()


def test_a_file_in_the_way_ends_with_1(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file")
    done = speckv("run", "tiny.yaml")
    assert done.exit_code == 1
    assert "is in the way" in done.stderr


@pytest.mark.plain_core
def test_results_that_cannot_be_written_end_with_1_and_say_so(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: object, row: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sim.observers.recorder._StepTable.add", full)
    done = speckv("run", "tiny.yaml")
    assert done.exit_code == 1
    assert "No space left on device" in done.stderr
    manifest = json.loads((run_folder(tmp_path / "results") / "manifest.json").read_text())
    assert manifest["complete"] is False
    assert "No space left on device" in manifest["stopped_by"]


def test_ctrl_c_leaves_readable_results(tiny: Path, tmp_path: Path) -> None:
    running = process("run", "tiny.yaml", "--set", "workload.synthetic.num_requests=1000000", cwd=tmp_path)
    for _ in range(600):
        if list(tmp_path.glob("results/*/*/manifest.json")):
            break
        time.sleep(0.1)
    time.sleep(1.0)
    running.send_signal(signal.SIGINT)
    stdout, stderr = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "Traceback" not in stderr
    assert "marked incomplete" in stderr
    assert "incomplete, stopped by interrupt" in stdout
    folder = run_folder(tmp_path / "results")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["complete"], manifest["stopped_by"]) == (False, "interrupt")
    summary = json.loads((folder / "summary.json").read_text())
    steps = pd.read_parquet(folder / "steps.parquet")
    assert len(steps) == summary["num_steps"] > 0
    requests = pd.read_parquet(folder / "requests.parquet")
    assert len(requests) == summary["num_requests"]
    assert (requests["status"] == "finished").sum() == summary["num_finished"]


def test_help_is_quick_and_loads_no_library() -> None:
    show = "import sys; from sim.cli import app; app(['--help'], standalone_mode=False); "
    show += (
        "print(sorted({'numpy', 'pandas', 'pyarrow', 'matplotlib', 'pydantic', 'rich', 'simpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for command in ("run", "replay", "version"):
        assert command in done.stdout
        assert speckv(command, "--help").exit_code == 0


def test_the_version() -> None:
    said = f"speckv {sim.__version__}\ncore: {CORE}\n"
    assert speckv("--version").stdout == speckv("version").stdout == said


# Replaying cases

CASE: dict[str, Any] = {
    "format": 1,
    "name": "small",
    "engine": {
        "async_scheduling": False,
        "method": "eagle3",
        "num_speculative_tokens": 2,
        "block_size": 4,
        "num_gpu_blocks": 20,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 64,
        "enable_prefix_caching": True,
        "watermark": 0.0,
        "policy": "fcfs",
        "long_prefill_token_threshold": 0,
    },
    "requests": [{"id": "a", "arrival_turn": 0, "prompt": [["p", 6]], "max_tokens": 4, "accepted": [1]}],
    "events": [],
}


def changed(*path: str | int, to: object) -> dict[str, Any]:
    case = json.loads(json.dumps(CASE))
    at = case
    for part in path[:-1]:
        at = at[part]
    if to is None:
        del at[path[-1]]
    else:
        at[path[-1]] = to
    assert isinstance(case, dict)
    return case


def replay(case: str, output: str = "trace.json", engine: str = "vllm-0.32") -> Any:
    return speckv("replay", case, "--engine", engine, "--output", output)


def test_a_replay_goes_from_file_to_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt, then 1 + 1 accepted a turn: outputs 1, 3, 4 of 4 (the last token that was sampled is trimmed)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "case.json").write_text(json.dumps(CASE))
    (tmp_path / "case.json.gz").write_bytes(gzip.compress(json.dumps(CASE).encode(), mtime=0))
    assert replay("case.json").exit_code == 0
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert [row["delivered"] for row in trace["turns"] if row.get("delivered")] == [{"a": 1}, {"a": 2}, {"a": 1}]
    assert trace["summary"]["num_output_tokens"] == {"a": 4}
    assert replay("case.json.gz", "trace.json.gz").exit_code == 0
    assert json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes())) == trace


def test_a_replay_names_requests_that_stall(tmp_path: Path) -> None:
    """vLLM 0.24 left r11 stalled in this recorded case, so the replay does too."""
    case = Path(__file__).parent / "conformance" / "cases" / "29-stalled-after-reset.case.json.gz"
    done = replay(str(case), str(tmp_path / "trace.json"), "vllm-0.24")
    assert done.exit_code == 0
    assert done.stderr == "speckv: stalled, never to be scheduled again: 1 request: r11\n"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (changed("format", to=2), "`format` is 2; allowed: 1"),
        (changed("format", to=None), "`format` is missing"),
        (changed("engine", to=None), "`engine` is missing"),
        (changed("engine", "block_size", to=None), "`engine.block_size` is missing"),
        (changed("engine", "block_size", to=0), "`engine.block_size` is 0; allowed: a whole number from 1"),
        (changed("engine", "method", to="eagle33"), "did you mean `eagle3`?"),
        (changed("requests", 0, "accepted", to=None), "`requests[0].accepted` is missing"),
        (changed("requests", 0, "prompt", to=[]), "`requests[0].prompt` is []"),
        (changed("events", to=[{"turn": 1, "type": "abrt"}]), "did you mean `abort`?"),
    ],
)
def test_a_wrong_case_is_named_by_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "case.json").write_text(json.dumps(case))
    done = replay("case.json")
    assert done.exit_code == 2
    assert "case.json" in done.stderr
    assert said in done.stderr
    assert not (tmp_path / "trace.json").exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("case.json", json.dumps(CASE)[:200].encode(), "case.json:1: not JSON, or cut short"),
        ("case.json", b"\x00\xff" * 20, "not text in UTF-8"),
        ("case.json", b"[]", "`the whole file` is []"),
        ("case.json", b"[" * 100_000, "nested too deeply"),
        ("case.json.gz", gzip.compress(json.dumps(CASE).encode(), mtime=0)[:100], "damaged or cut short"),
        ("case.json.gz", b"no gzip at all", "damaged or cut short"),
        ("missing.json", None, "No such file"),
    ],
)
def test_a_damaged_case_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes | None, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    done = replay(name)
    assert done.exit_code == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_engine_is_told_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "case.json").write_text(json.dumps(CASE))
    done = replay("case.json", engine="vllm-0.33")
    assert done.exit_code == 2
    assert "did you mean `vllm-0.3" in done.stderr
    assert replay("case.json", "nowhere/trace.json").exit_code == 1
