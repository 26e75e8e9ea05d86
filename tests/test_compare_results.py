"""`speckv compare`: differences of summaries by hand, and intervals as scipy has them."""

import json
import shutil
from pathlib import Path

import pytest
from scipy import stats
from typer.testing import CliRunner

import sim
from sim.differences import _by_unit, compare, picture
from sim.results import COMPARISON, ResultsError

TINY = """
engine: {num_gpu_blocks: 60, max_model_len: 256, max_num_seqs: 8, speculative_config: {method: eagle3, num_speculative_tokens: 3}}
timing: {fixed_step_ms: 10}
workload:
  synthetic:
    num_requests: 30
    arrivals: {process: poisson, rate: 20}
    prompt_tokens: {distribution: uniform, min: 8, max: 90}
    output_tokens: {distribution: uniform, min: 1, max: 60}
output: {pictures: false, steps: false}
"""  # noqa: E501


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], sim.run.Result]:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.yaml").write_text(TINY)
    k = "engine.speculative_config.num_speculative_tokens"
    return {
        (drafts, seed): sim.simulate(folder / "tiny.yaml", [f"{k}={drafts}", f"seed={seed}"], out=folder / "results")
        for drafts in (3, 1)
        for seed in (0, 1, 2)
    }


def test_seeds_of_a_scenario_are_one_group_with_a_paired_interval(runs: dict[tuple[int, int], sim.run.Result]) -> None:
    found = compare([run.folder for run in runs.values()])
    assert [group.label for group in found.groups] == ["num_speculative_tokens=3", "num_speculative_tokens=1"]
    assert [list(group.runs) for group in found.groups] == [[0, 1, 2], [0, 1, 2]]
    first, second = found.of("e2el_ms_mean")
    three, one = ([runs[k, seed].summary["e2el_ms"]["mean"] for seed in (0, 1, 2)] for k in (3, 1))
    assert first.mean == pytest.approx(sum(three) / 3)
    assert first.difference is None
    assert second.mean == pytest.approx(sum(one) / 3)
    assert second.difference is not None
    expected = stats.ttest_rel(one, three).confidence_interval()
    assert second.difference.low == pytest.approx(expected.low)
    assert second.difference.high == pytest.approx(expected.high)
    assert second.share == pytest.approx(sum(one) / sum(three) - 1)


def test_a_folder_of_runs_stands_for_all_of_them(runs: dict[tuple[int, int], sim.run.Result]) -> None:
    found = compare([runs[3, 0].folder.parent], everything=True)
    assert len(found.groups) == 2
    assert found.of("slot_seconds_committed")


def test_labels_show_what_differs_and_nothing_else() -> None:
    from sim.differences import _labels

    def scenario(requests: int, k: int | None, blocks: int | None = None) -> dict[str, object]:
        speculation = None if k is None else {"method": "eagle3", "model": None, "num_speculative_tokens": k}
        acceptance = None if k is None else {"model": "geometric", "rate": 0.6}
        engine = {"num_gpu_blocks": blocks, "speculative_config": speculation}
        return {"engine": engine, "acceptance": acceptance, "workload": {"num_requests": requests, "rate": 4}}

    assert _labels([scenario(10, 3), scenario(20, 3)]) == ["num_requests=10", "num_requests=20"]
    assert _labels([scenario(10, 3), scenario(10, None)]) == ["num_speculative_tokens=3", "no speculation"]
    assert _labels([scenario(10, 3, 90), scenario(10, 3)]) == ["num_gpu_blocks=90", "num_gpu_blocks=null"]
    assert _labels([scenario(10, 1, 90), scenario(10, 3)]) == [
        "num_gpu_blocks=90, num_speculative_tokens=1",
        "num_speculative_tokens=3",
    ]
    lengths = [{"prompt": {"min": 1, "max": 9}, "output": {"min": 2, "max": size}} for size in (4, 5)]
    assert _labels(lengths) == ["max=4", "max=5"]
    assert _labels([*lengths, {**lengths[0], "prompt": {"min": 1, "max": 3}}]) == [
        "prompt.max=9, output.max=4",
        "prompt.max=9, output.max=5",
        "prompt.max=3, output.max=4",
    ]


def test_incomplete_runs_in_a_folder_are_left_out(runs: dict[tuple[int, int], sim.run.Result], tmp_path: Path) -> None:
    for number, (k, started) in enumerate([(3, "2026-01-02"), (1, "2026-01-01"), (1, "2026-01-03")]):
        folder = tmp_path / "all" / str(number)
        folder.mkdir(parents=True)
        manifest = json.loads((runs[k, 0].folder / "manifest.json").read_text())
        changed = manifest | {"started": started, "complete": number < 2}
        (folder / "manifest.json").write_text(json.dumps(changed))
        (folder / "summary.json").write_text((runs[k, 0].folder / "summary.json").read_text())
    found = compare([tmp_path / "all"])
    assert [group.label for group in found.groups] == ["num_speculative_tokens=1", "num_speculative_tokens=3"]
    (left_out,) = found.left_out
    assert left_out == f"{tmp_path / 'all' / '2'} is incomplete"


def test_without_common_seeds_there_is_no_interval(runs: dict[tuple[int, int], sim.run.Result]) -> None:
    found = compare([runs[3, 0].folder, runs[1, 1].folder])
    (_, second) = found.of("ttft_ms_mean")
    assert second.difference is not None
    assert second.difference.low is None
    assert second.difference.mean == pytest.approx(
        runs[1, 1].summary["ttft_ms"]["mean"] - runs[3, 0].summary["ttft_ms"]["mean"]
    )


def test_the_picture_is_drawn(runs: dict[tuple[int, int], sim.run.Result], tmp_path: Path) -> None:
    picture(compare([run.folder for run in runs.values()]), tmp_path / "differences.png")
    assert (tmp_path / "differences.png").read_bytes().startswith(b"\x89PNG")


def test_figures_of_different_units_have_scales_of_their_own(runs: dict[tuple[int, int], sim.run.Result]) -> None:
    rows = _by_unit(compare([run.folder for run in runs.values()]))
    assert {"request_throughput", "output_throughput"} <= set(rows["a second"])
    assert {"ttft_ms_mean", "e2el_ms_p99"} <= set(rows["ms"])
    assert "slot_seconds_committed" in rows["slot-s"]
    assert all("_ms_" in name for name in rows["ms"])


def test_what_cannot_be_compared_is_said(runs: dict[tuple[int, int], sim.run.Result], tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="one scenario alone"):
        compare([runs[3, 0].folder, runs[3, 1].folder])
    with pytest.raises(ResultsError, match="one scenario alone; a comparison needs two or more"):
        compare([runs[3, 0].folder, runs[3, 0].folder])
    for seed, said in ((0, "they differ only in what is recorded;"), (1, "only in seed and what is recorded;")):
        recorded = shutil.copytree(runs[3, seed].folder, tmp_path / f"recorded{seed}")
        facts = json.loads((recorded / "manifest.json").read_text())
        facts["scenario"]["output"]["steps"] = True
        (recorded / "manifest.json").write_text(json.dumps(facts))
        with pytest.raises(ResultsError, match=said):
            compare([runs[3, 0].folder, recorded])
        shutil.rmtree(recorded)
    with pytest.raises(ResultsError, match="holds no run"):
        compare([tmp_path])
    broken = tmp_path / "broken"
    broken.mkdir()
    manifest = json.loads((runs[3, 0].folder / "manifest.json").read_text()) | {"complete": False}
    (broken / "manifest.json").write_text(json.dumps(manifest))
    (broken / "summary.json").write_text("{}")
    with pytest.raises(ResultsError, match="is incomplete"):
        compare([runs[1, 0].folder, broken])


def test_the_command_prints_a_table(runs: dict[tuple[int, int], sim.run.Result], tmp_path: Path) -> None:
    from sim.cli import app

    folder = str(runs[3, 0].folder.parent)
    done = CliRunner().invoke(app, ["compare", folder])
    assert done.exit_code == 0, done.output
    assert "[1] num_speculative_tokens=" in done.stdout
    assert "e2el_ms_mean" in done.stdout
    as_json = CliRunner().invoke(app, ["compare", folder, "--json", "--picture", str(tmp_path / "d.svg")])
    assert len(json.loads(as_json.stdout)["groups"]) == 2
    assert (tmp_path / "d.svg").is_file()
    assert CliRunner().invoke(app, ["compare", folder, "--picture", str(tmp_path / "d.nothing")]).exit_code == 2
    assert CliRunner().invoke(app, ["compare", str(tmp_path)]).exit_code == 2


def test_the_runs_of_a_folder_are_listed(runs: dict[tuple[int, int], sim.run.Result], tmp_path: Path) -> None:
    from sim.cli import app

    folder = runs[3, 0].folder.parent
    (tmp_path / "out").mkdir()
    shutil.copytree(folder, tmp_path / "out" / folder.name)
    damaged = tmp_path / "out" / folder.name / runs[3, 0].folder.name / "summary.json"
    damaged.write_text("{")
    (tmp_path / "out" / "sweep").mkdir()
    facts = {"num_points": 2, "num_runs": 6, "complete": False, "started": "2026-01-02T03:04:05+00:00"}
    (tmp_path / "out" / "sweep" / "manifest.json").write_text(json.dumps(facts))
    against = tmp_path / "out" / folder.name / "0123456789-seed0-against"
    against.mkdir()
    comparison = {"changes": ["engine.speculative_config=null", "engine.watermark=0.1"], "seeds": [0, 1]}
    (against / COMPARISON).write_text(json.dumps(comparison))
    stopped = tmp_path / "out" / folder.name / runs[3, 1].folder.name / "manifest.json"
    stopped.write_text(json.dumps(json.loads(stopped.read_text()) | {"complete": False, "stopped_by": None}))
    done = CliRunner().invoke(app, ["list", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    rows = {line.split()[0].rsplit("/", 1)[-1]: line.split() for line in done.stdout.splitlines()}
    assert " ".join(rows[against.name][3:]) == "comparison against K=0, watermark=0.1, 2 seeds"
    assert rows[runs[1, 2].folder.name][3:5] == ["1", "2"]  # K and seed
    assert rows[runs[1, 2].folder.name][-1] == "steps=none"
    assert " ".join(rows[runs[3, 1].folder.name][3:]) == "3 1 incomplete: under way, or killed; steps=none"
    alone = CliRunner().invoke(app, ["list", str(against)])
    assert "comparison against K=0, watermark=0.1, 2 seeds" in alone.stdout
    lines = "".join(done.stdout.split())
    for run in runs.values():
        assert run.folder.name in lines
    assert lines.count("damaged:cannotread") == 1
    assert "sweep,6runs,incomplete" in lines
    assert "2026-01-0203:04:05" in lines
    assert f"{runs[1, 0].summary['output_throughput']:.4g}" in done.stdout
    assert CliRunner().invoke(app, ["list", str(tmp_path / "nowhere")]).exit_code == 2


def test_what_was_set_tells_rows_apart(tmp_path: Path) -> None:
    """K and the seed have columns of their own; a value of a long key is under its last name."""
    from sim.commands.listing import _set

    facts = {"scenario": {"output": {"steps": True}}, "set": None}
    assert _set(facts) == ""
    k = "engine.speculative_config.num_speculative_tokens"
    facts["set"] = ["seed=3", f"{k}=2", "engine.speculative_config=null", "workload.synthetic.arrivals.rate = 7"]
    assert _set(facts) == "rate=7"
    assert _set(facts | {"scenario": {"output": {"steps": "window:1s"}}}) == "steps=window:1s, rate=7"
    assert _set(facts | {"set": [f"workload.trace={'x' * 100}"]}) == f"trace={'x' * 51}..."


@pytest.mark.parametrize("command", [["sweep", "small", "--out", ""], ["report", ".", "-o", " "]])
def test_an_empty_path_is_refused(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sim.cli import app

    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert "is empty; allowed: a path, such as . for the working directory" in " ".join(done.output.split())
    assert not list(tmp_path.iterdir())
