"""Stories of requests and steps: block tables slot by slot, held to the ledger; and runs that cannot be made again."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sim.cli import app
from sim.explain import NothingToExplain, RequestWatcher, Snapshot, explain, snapshot, tell_request
from sim.models.acceptance import Replay
from sim.observers.blocks import Blocks
from sim.records import Batch, Returned
from sim.resimulate import CannotRepeat
from sim.results import ResultsError
from sim.run import simulate
from sim.sweep import sweep
from tests.by_hand import Simulated, small_settings, spec

TINY = """
engine: {num_gpu_blocks: 30, max_model_len: 256, max_num_seqs: 8, speculative_config: {method: eagle3, num_speculative_tokens: 3}}
timing: {fixed_step_ms: 10}
output: {pictures: false}
workload:
  synthetic:
    num_requests: 40
    arrivals: {process: poisson, rate: 20}
    prompt_tokens: {distribution: uniform, min: 8, max: 90}
    output_tokens: {distribution: uniform, min: 1, max: 60}
"""  # noqa: E501


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return simulate("tiny.yaml").folder


def test_a_block_table_by_hand() -> None:
    """The article's block 63 (`tests/test_ledger.py` has the numbers): slots 1008 to 1023, K = 5, accepted 2.

    Scheduled: C = 1024, 1018 certain, one row in flight, drafts 1019 to 1023; memory is right up to 1018. When the step
    has ended 1021 are right and three are garbage; when it is taken back, C = 1021. Block 64 is room for the drafter.
    """
    settings = small_settings("eagle3", 5, num_gpu_blocks=80, block_size=16, max_num_batched_tokens=2000)
    simulated = Simulated(
        [spec(0, 1018, 5)], settings, acceptance=Replay([[1, 3, 1, 1, 1]]), schedule_ms=1, update_ms=2
    )
    watcher = RequestWatcher(simulated.ledger, 0, None)
    simulated.engine.add_observer(watcher)
    simulated.run()
    assert watcher.story is not None
    frame = watcher.story.frames[1]
    assert (frame.tokens, frame.drafts, frame.accepted, frame.rejected, frame.delivered) == (6, 5, 2, 3, 3)

    def drawn(moment: Snapshot, block: int) -> tuple[str, str]:
        slots = slice(16 * block, 16 * block + 16)
        return moment.reservations()[slots], moment.content()[slots]

    assert [drawn(moment, 63) for moment in frame.moments] == [
        ("ccccccccccippppp", "vvvvvvvvvv------"),
        ("ccccccccccippppp", "vvvvvvvvvvvvvxxx"),
        ("cccccccccccccggg", "vvvvvvvvvvvvvxxx"),
    ]
    assert [drawn(moment, 64) for moment in frame.moments] == [
        ("lllll...........", "----------------"),
        ("lllll...........", "----------------"),
        ("................", "----------------"),
    ]
    lines = tell_request(watcher.story)
    assert any("0 to 62  63 blocks committed and valid" in line for line in lines)
    assert any("is finished with 5 tokens" in line for line in lines)


def test_the_drawings_are_the_ledgers() -> None:
    """Letters of all owners add up to the ledger's classes, at every schedule; nobody shares a block here."""
    settings = small_settings("eagle3", 5, num_gpu_blocks=31, async_scheduling=True, max_num_seqs=6)
    runs = [[1 + (7 * request + 3 * at) % 6 for at in range(40)] for request in range(8)]
    simulated = Simulated([spec(n, 9 + n, 40, 7_000_000 * n) for n in range(8)], settings, acceptance=Replay(runs))
    ledger = simulated.ledger
    blocks = Blocks(ledger.num_blocks)
    seen = 0

    class Checker:
        def scheduled(self, now: int, batch: Batch) -> None:
            nonlocal seen
            blocks.follow(batch.block_operations)
            owners = [simulated.scheduler.requests[f"r{index}"] for index in ledger.accounts]
            shots = [snapshot(ledger, blocks, request, now, "") for request in owners]
            letters = Counter("".join(shot.reservations() for shot in shots if shot is not None))
            memory = Counter("".join(shot.content() for shot in shots if shot is not None))
            assert tuple(letters[letter] for letter in "ipcgl.") == ledger.reservations()[:6]
            assert tuple(memory[letter] for letter in "vx-") == ledger.content()[:3]
            seen += 1

        def updated(self, now: int, returned: Returned) -> None:
            blocks.follow(returned.block_operations)

    simulated.engine.add_observer(Checker())
    simulated.run()
    assert seen > 50
    assert simulated.scheduler.num_preemptions > 0


def test_the_story_of_a_preempted_request(tiny: Path) -> None:
    requests = json.loads(_requests(tiny))
    chosen = max(requests, key=lambda row: row["num_preemptions"])
    text = explain(tiny, request=chosen["id"])
    assert text.count("is preempted by schedule") == chosen["num_preemptions"] > 0
    assert text.count("is admitted") == chosen["num_preemptions"] + 1
    assert f"is finished with {chosen['num_output_tokens']} tokens of output" in text
    assert "reserved: c committed" in text
    assert explain(tiny, request=str(chosen["request"])) == text


def _requests(folder: Path) -> str:
    import pandas as pd

    return str(pd.read_parquet(folder / "requests.parquet").to_json(orient="records"))


def test_the_story_of_a_step(tiny: Path) -> None:
    import pandas as pd

    steps = pd.read_parquet(tiny / "steps.parquet")
    row = steps[(steps["num_draft_tokens"] > 6) & (steps["num_accepted_tokens"] < 5)].iloc[3]
    text = explain(tiny, step=int(row["step"]))
    assert f"{row['num_tokens']} tokens in {row['num_reqs']} requests, {row['num_draft_tokens']} of them drafts" in text
    assert f"{row['num_running']} running, {row['num_waiting']} waiting" in text
    assert f"{row['res_committed']:,} committed" in text
    assert f"{row['content_garbage']:,} garbage" in text
    request = text.split("Block table of ")[1].split(":")[0]
    both = explain(tiny, request=request, step=int(row["step"]), everything=True)
    assert f"Its block table in step {row['step']}:" in both
    table = both.split("  what\n")[1].split("\n\n")[0].splitlines()
    garbage = [line.split()[8] for line in table if "..." not in line]
    assert all(text == "-" or text.isdigit() for text in garbage)  # "-" once it has been preempted or has ended
    assert garbage.count("-") < len(garbage) / 2


def test_a_request_in_a_step_is_that_steps_part_alone(tiny: Path) -> None:
    """What it had computed before, and the tokens that the schedule adds, are what its block table begins with."""
    whole = explain(tiny, request="r3", everything=True)
    frames = [line.split() for line in whole.split("  what\n")[1].split("\n\n")[0].splitlines()]
    for frame in (frames[0], frames[len(frames) // 2]):
        text = explain(tiny, request="r3", step=int(frame[0]))
        assert text.startswith(f"Request r3 in step {frame[0]}\n")
        said = f"in {len(frames)} steps, {frames[0][0]} to {frames[-1][0]}, and is finished; --request r3 alone tells"
        assert said in text
        (told,) = text.split("  what\n")[1].split("\n\n")[0].splitlines()
        assert told.split() == frame
        assert "more; --all lists them" not in text
        before, tokens = int(frame[3]), int(frame[4])
        assert f"scheduled in step {frame[0]}: num_computed_tokens now {before + tokens}," in text
        assert text.count("num_computed_tokens now") <= 3
        assert "computed before: num_computed_tokens before the step's schedule" in text
    assert "is admitted by schedule" in explain(tiny, request="r3", step=int(frames[0][0]))
    assert "is admitted by schedule" not in explain(tiny, request="r3", step=int(frames[-1][0]))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "name a request, a step, or both"),
        ({"request": "r40"}, "r0 to r39"),
        ({"request": "zero"}, "no such name"),
        ({"step": 10**6}, "the last one is"),
        ({"request": "r39", "step": 0}, "was not in step 0"),
    ],
)
def test_what_is_not_there_is_said(tiny: Path, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(NothingToExplain, match=said):
        explain(tiny, **asked)


def test_runs_that_cannot_be_made_again(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"manifest\.json"):
        explain(tmp_path, request="r1")
    manifest = json.loads((tiny / "manifest.json").read_text())
    for change, said in (
        ({"scenario": {**manifest["scenario"], "seed": 5}}, "digest"),
        ({"scenario": {**manifest["scenario"], "nonsense": 5}}, "not understood any more"),
        ({"code": "0" * 12, "set": ["seed=0"]}, "has changed since the run, .* speckv run tiny.yaml --set seed=0 --f"),
        ({"code": None}, "code has changed since the run"),
        ({"code": None, "versions": {"speckv": "0.0.1"}}, r"the run was made by speckv 0\.0\.1"),
        ({"inputs": [{"path": "gone.csv", "bytes": 1, "modified_ns": 1}]}, "gone.csv"),
        ({"inputs": [{"path": "tiny.yaml", "bytes": 1, "modified_ns": 1}]}, "has changed since the run: 1 bytes then"),
    ):
        (tiny / "manifest.json").write_text(json.dumps({**manifest, **change}))
        with pytest.raises(CannotRepeat, match=said):
            explain(tiny, request="r1")
    (tiny / "manifest.json").write_text("{}")
    with pytest.raises(ResultsError, match="no manifest of a run"):
        explain(tiny, request="r1")


def test_a_sweep_and_a_comparison_are_called_so(tiny: Path, tmp_path: Path) -> None:
    drafts, blocks = "engine.speculative_config.num_speculative_tokens", "engine.num_gpu_blocks"
    given = {"name": "s", "scenario": "tiny.yaml", "axes": {"grid": {drafts: [1]}}, "set": {blocks: 40}, "seeds": 1}
    folder = sweep(given, jobs=1).folder
    command = rf"speckv run .*tiny\.yaml --set {blocks}=40 --set {drafts}=VALUE --set seed=N"
    with pytest.raises(ResultsError, match=f"is a sweep, which keeps figures and no runs; .* 1 runs, .*{command}"):
        explain(folder, request="r1")
    (tmp_path / "comparison.json").write_text('{"changes": ["K=1"], "seeds": [0, 1]}')
    with pytest.raises(
        ResultsError, match=r"is a comparison, .*; speckv run SCENARIO --against K=1 --seeds 2 shows it"
    ):
        explain(tmp_path, request="r1")


def test_the_command(tiny: Path) -> None:
    done = CliRunner().invoke(app, ["explain", str(tiny), "--request", "r3"])
    assert done.exit_code == 0
    assert done.stdout.startswith("Request r3: finished")
    everything = CliRunner().invoke(app, ["explain", str(tiny), "--request", "r3", "--all"])
    assert "--all lists them" not in everything.stdout
    parent = CliRunner().invoke(app, ["explain", str(tiny.parent), "--request", "r3"])
    assert parent.exit_code == 2
    assert f"holds 1; name one of them:\n  {tiny}" in parent.stderr
    for arguments in (["--request", "r99"], []):
        done = CliRunner().invoke(app, ["explain", str(tiny), *arguments])
        assert done.exit_code == 2
        assert done.stderr.startswith("speckv: ")
