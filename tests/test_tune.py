"""Which K, and how much load: answers that a full grid or queueing theory gives as well."""

import json
from itertools import product
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sim.capacity import CapacityFailed, Pressure, capacity, deciding_seed, limit_of
from sim.outcome import K_KEY, Job, measure, variant
from sim.paired import interval, paired_difference, with_seed
from sim.scenario import ScenarioError, load_scenario
from sim.tune import Candidate, LoadChange, Score, TuneFailed, Tuning, ranking, tune

# On the step-cost model, 30 requests with 16 under way: whether drafts pay depends on K.
SMALL = """
model: llama-3.1-8b
hardware: h100
engine: {num_gpu_blocks: 2000, max_model_len: 1024, max_num_seqs: 64, speculative_config: {method: eagle3, num_speculative_tokens: 3}}
acceptance: {model: geometric, rate: 0.6}
workload:
  synthetic:
    num_requests: 30
    arrivals: {process: closed_loop, concurrency: 16}
    prompt_tokens: {distribution: uniform, min: 50, max: 200}
    output_tokens: {distribution: uniform, min: 20, max: 100}
"""  # noqa: E501

# One request at a time, 10 steps of 10 ms each: a server of exactly 10 requests a second.
ONE_SEAT = """
engine: {num_gpu_blocks: 100, max_model_len: 256, max_num_seqs: 1, async_scheduling: false}
timing: {fixed_step_ms: 10, schedule_ms: 0, update_ms: 0}
workload:
  synthetic:
    num_requests: 300
    arrivals: {process: constant, rate: 3}
    prompt_tokens: 20
    output_tokens: 10
slo: {e2el_ms: 150}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SMALL)
    (tmp_path / "seat.yaml").write_text(ONE_SEAT)
    return tmp_path


# Statistics


def test_the_paired_interval_is_students() -> None:
    """Differences 1, 2, 3: mean 2, standard error 1/sqrt(3), and t(0.975, 2) is 4.3027 in every table."""
    found = paired_difference([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert found.mean == 2
    assert found.low == pytest.approx(2 - 4.3027 / 3**0.5, abs=1e-4)
    assert found.high == pytest.approx(2 + 4.3027 / 3**0.5, abs=1e-4)
    assert not found.excludes_zero
    assert paired_difference([2.0, 3.0], [1.0, 2.0]).excludes_zero
    alone = interval([5.0])
    assert (alone.mean, alone.low, alone.high, alone.excludes_zero) == (5, None, None, False)
    half = found.over(-4.0)
    assert half is not None
    assert half.mean == -0.5
    assert half.low is not None
    assert half.high is not None
    assert half.low < half.mean < half.high


def test_equals_in_the_objective_are_ranked_by_latency() -> None:
    slow, quick, less = Candidate(1), Candidate(2), Candidate(3)
    scores = [Score(slow, [10.0], [50.0]), Score(less, [9.0], [1.0]), Score(quick, [9.99], [40.0])]
    assert [score.candidate for score in ranking(scores)] == [quick, slow, less]


# tune


def test_tune_finds_what_the_full_grid_finds_in_a_quarter_of_the_runs(folder: Path) -> None:
    ks, seeds = [0, 1, 2, 4, 8], 8
    tuning = tune("small.yaml", objective="output_throughput", k=ks, seeds=seeds, loads=False, jobs=1)
    grid = {
        k: interval(
            [
                measure(Job(0, with_seed(variant("small.yaml", {K_KEY: k}), seed))).figures["output_throughput"] or 0.0
                for seed in range(seeds)
            ]
        ).mean
        for k in ks
    }
    assert tuning.num_grid_runs == len(ks) * seeds
    assert tuning.num_runs <= tuning.num_grid_runs / 4
    assert grid[tuning.best.candidate.k] >= 0.99 * max(grid.values())
    assert grid[tuning.best.candidate.k] > 1.05 * grid[0]
    assert tuning.scores[0] is tuning.best
    assert {score.candidate.k for score in tuning.scores} == set(ks)


def test_drafts_that_cost_nothing_are_worth_having_all(folder: Path) -> None:
    """With steps of one length each more draft can only help, and without acceptance none does: then all are equal."""
    common = ["timing.fixed_step_ms=10", "engine.num_gpu_blocks=5000", "workload.synthetic.num_requests=20"]
    tuning = tune("small.yaml", common, objective="output_throughput", k=[0, 2, 6], seeds=4, loads=False, jobs=1)
    assert tuning.best.candidate.k == 6
    assert tuning.flags == ["""--speculative-config '{"method": "eagle3", "num_speculative_tokens": 6}'"""]
    none = [*common, "acceptance.rate=0"]
    tuning = tune("small.yaml", none, objective="output_throughput", k=[0, 6], seeds=4, loads=False, jobs=1)
    assert tuning.tied


def test_tune_looks_at_other_drafters_seats_and_loads(folder: Path) -> None:
    tuning = tune(
        "small.yaml",
        ["timing.fixed_step_ms=10", "workload.synthetic.num_requests=20"],
        objective="output_throughput",
        k=[0, 3],
        drafters=["eagle3", "ngram", "no-such-method"],
        max_num_seqs=[4, 16],
        watermarks=[0.0],
        seeds=4,
        jobs=1,
    )
    # A step costs the same whoever drafts, so the drafter that is accepted more often wins, with all seats.
    assert tuning.best.candidate == Candidate(3, "eagle3", 16, 0.0)
    assert tuning.flags[1:] == ["--max-num-seqs 16", "--watermark 0"]
    # Without drafts the drafter makes no difference: 2 drafters x 2 seats with K = 3, and 2 seats without.
    assert len(tuning.scores) == 6
    assert [candidate.drafter for candidate in tuning.refused] == ["no-such-method"] * 2
    assert all("did you mean" in reason or "is not known" in reason for reason in tuning.refused.values())


def test_a_scenario_without_arrivals_has_a_load_all_the_same(folder: Path) -> None:
    """The README's five lines leave `arrivals` out, so that a rate alone would be one of no process."""
    file = folder / "five.yaml"
    lines = "model: llama-3.1-8b\nhardware: h100\n"
    lines += "engine: {speculative_config: {method: eagle3, num_speculative_tokens: 3}}\n"
    file.write_text(lines + "workload: {synthetic: {num_requests: 4, output_tokens: 8}}\n")
    tuning = tune(file, k=[1, 2], objective="output_throughput", seeds=2, jobs=1)
    assert sorted(tuning.same_at + [change.factor for change in tuning.changes])
    with pytest.raises(CapacityFailed, match="keep the limits at every rate"):
        capacity(file, ["slo={ttft_ms: 60000}"], seeds=1, jobs=1)


def test_k_by_batch_size_makes_vllms_table(folder: Path) -> None:
    tuning = tune(
        "small.yaml",
        ["engine.max_num_seqs=8"],
        objective="output_throughput",
        k=[0, 3],
        seeds=4,
        by_batch_size=True,
        loads=False,
        jobs=1,
    )
    assert tuning.table is not None
    assert tuning.table[0][0] == 1
    assert tuning.table[-1][1] == 8
    assert all(before[1] + 1 == after[0] for before, after in zip(tuning.table, tuning.table[1:], strict=False))
    key = "engine.speculative_config.num_speculative_tokens_per_batch_size"
    load_scenario("small.yaml", [f"{key}={json.dumps(tuning.table)}"])  # vLLM's own checks


def test_tune_says_what_is_wrong(folder: Path) -> None:
    with pytest.raises(ScenarioError, match="goodput counts requests within limits, and there are none"):
        tune("small.yaml")
    with pytest.raises(TuneFailed, match=r"no candidate could be run: .*num_speculative_tokens"):
        tune("small.yaml", objective="output_throughput", k=[5000], jobs=1)
    with pytest.raises(ValueError, match="from 0 up"):
        tune("small.yaml", k=[-1])


def test_the_command_prints_flags_and_writes_the_table(folder: Path) -> None:
    from sim.cli import app

    arguments = ["tune", "small.yaml", "--objective", "output_throughput", "--k", "0,3", "--seeds", "2", "--jobs", "1"]
    arguments += ["--by-batch-size", "--set", "engine.max_num_seqs=4"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("recommended  --speculative-config '{")
    assert "runner-up    no speculation: the first is ahead by +" in done.stdout
    assert "by batch size  K = 3 at every size: no table is needed" in done.stdout
    assert not (folder / "num_speculative_tokens_per_batch_size.json").exists()
    assert "more than a quarter of the grid" in done.stdout  # two candidates with two seeds each are the grid
    as_json = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert as_json["best"]["candidate"]["k"] == 3
    assert as_json["margin"]["mean"] > 0
    assert CliRunner().invoke(app, ["tune", "small.yaml"]).exit_code == 2
    wrong = CliRunner().invoke(app, ["tune", "small.yaml", "--k", "3:1"])
    assert wrong.exit_code == 2
    assert "--k 3:1: the first is above the last" in wrong.stderr


def test_finalists_that_are_not_told_apart_come_with_what_settles_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Differences 1, -1, 0.3: mean 0.1, far within Student's interval; four times the seeds have half of it."""
    from sim.commands.tune import _show_tuning

    first, second = Score(Candidate(3), [11.0, 9.0, 10.3], [1.0] * 3), Score(Candidate(2), [10.0] * 3, [2.0] * 3)
    tuning = Tuning("goodput", first, second, [first, second], {}, num_runs=18, num_grid_runs=72)
    assert tuning.more_seeds_may_tell
    _show_tuning(tuning, 8, None)
    said = capsys.readouterr().out
    settles = (
        "they had 3 of 8 seeds, all that a quarter of the grid's runs left them; --seeds 32 about halves the interval"
    )
    assert said.count(settles) == 1
    # All serve what comes: no number of seeds tells equal ones apart. And some that differ are told apart already.
    assert not Tuning("goodput", second, second, [second], {}).more_seeds_may_tell
    better = Score(Candidate(4), [12.0, 12.1, 12.2], [1.0] * 3)
    assert not Tuning("goodput", better, second, [better, second], {}).more_seeds_may_tell


def test_at_other_loads_it_says_where_nothing_changes_and_what_is_better(capsys: pytest.CaptureFixture[str]) -> None:
    from sim.commands.tune import _show_tuning

    best, other = Score(Candidate(3), [10.0, 11.0], [1.0, 1.0]), Candidate(4)
    key, gain, saved = "workload.synthetic.arrivals.rate", interval([0.2, 0.21]), interval([30.0, 31.0])
    tuning = Tuning("goodput", best, None, [best], {}, num_load_runs=9, same_at=[4.0, 2.0])
    tuning.changes = [LoadChange(0.5, 6.0, key, other, gain, False, saved)]
    _show_tuning(tuning, 2, None)
    said = capsys.readouterr().out
    assert "at other loads  the same at 2 and 4 times this load\n" in said
    assert "K = 4 is better at rate 6 (0.5 times), by +0.205 (" in said
    assert "latency" not in said
    tuning.changes = [LoadChange(0.5, 6.0, key, other, interval([0.1, -0.1]), True, saved)]
    _show_tuning(tuning, 2, None)
    said = capsys.readouterr().out
    assert "K = 4 is better at rate 6 (0.5 times) in latency, by +30.5 (" in said
    assert ") ms from arrival to end; in requests/s within the limits the two are as good as equal there" in said


def test_drafts_that_cost_nothing_are_best_at_the_other_loads_too(folder: Path) -> None:
    """Steps of 10 ms whatever K is: more drafts deliver more tokens a second at every load."""
    keys = ["timing.fixed_step_ms=10", "workload.synthetic.num_requests=16"]
    tuning = tune("small.yaml", keys, objective="output_throughput", k=[0, 6], seeds=2, jobs=1)
    assert tuning.best.candidate.k == 6
    assert not tuning.changes
    assert sorted(tuning.same_at) == [0.25, 0.5, 2.0, 4.0]


def test_one_k_for_all_sizes_needs_no_table() -> None:
    one = Score(Candidate(3), [10.0, 11.0], [1.0, 1.0])
    tuning = Tuning("output_throughput", one, None, [one], {}, table=[[1, 2, 3], [3, 4, 0]])
    assert not tuning.one_k
    assert Tuning("output_throughput", one, None, [one], {}, table=[[1, 4, 3]]).one_k


def test_the_recommendation_names_what_was_refused_and_what_one_seed_says(folder: Path) -> None:
    """Three rates: K = 4 to 6 cannot be tried."""
    from sim.cli import app

    rates = "acceptance={model: per_position, convention: unconditional, rates: [0.7, 0.5, 0.3]}"
    arguments = ["tune", "small.yaml", "--objective", "output_throughput", "--k", "0,3,4,5,6", "--seeds", "1"]
    done = CliRunner().invoke(app, [*arguments, "--jobs", "1", "--set", rates])
    assert done.exit_code == 0, done.output
    headline = done.stdout.splitlines()[:4]
    assert headline[1].strip().startswith("of what could be tried: K = 4 to 6 were refused: ")
    assert headline[2].endswith("over 1 seed")
    assert "one seed gives no interval" in headline[3]
    assert "at other loads  " not in done.stdout
    assert ", 0 more at other loads" in done.stdout


# The shape that is known


def test_speculation_wins_at_low_load_and_loses_at_high_load(folder: Path) -> None:
    """And at high load many drafts lose more than few, and less the more of them are accepted."""
    keys = {"workload.synthetic.prompt_tokens": 300, "workload.synthetic.output_tokens": 60, "engine.max_num_seqs": 256}
    keys["engine.num_gpu_blocks"] = 20_000
    ratios = {}
    for load, rate in product((1, 256), (0.5, 0.8)):
        values = {**keys, "workload.synthetic.arrivals.concurrency": load, "acceptance.rate": rate}
        values["workload.synthetic.num_requests"] = 6 if load == 1 else 512
        speed = {
            k: measure(Job(0, variant("small.yaml", {**values, K_KEY: k}))).figures["output_throughput"] or 0.0
            for k in (0, 2, 8)
        }
        ratios |= {(load, rate, k): speed[k] / speed[0] for k in (2, 8)}
    assert ratios[1, 0.5, 8] > 1 > ratios[256, 0.5, 8]
    assert ratios[1, 0.8, 2] > 1
    assert ratios[256, 0.5, 8] < ratios[256, 0.5, 2]
    assert ratios[256, 0.5, 8] < ratios[256, 0.8, 8]
    assert all(ratios[1, rate, k] > ratios[256, rate, k] for rate in (0.5, 0.8) for k in (2, 8))


# capacity


def test_capacity_of_a_server_of_ten_requests_a_second(folder: Path) -> None:
    """D/D/1: below 10 a second nobody waits; at r above, request i waits i (1/10 - 1/r), and those up to 50 ms may.

    90 percent of 300 keep it up to 270 (0.1 - 1/r) = 0.05, that is r = 10.02.
    """
    found = capacity("seat.yaml", seeds=1, jobs=1, tolerance=0.005)
    assert found.highest.load <= 10.02 < found.above.load
    assert found.above.load / found.highest.load <= 1.005
    assert found.highest.meets
    assert not found.above.meets
    assert found.limit == "sequences"
    assert found.request_rate == found.highest.load
    assert found.warning is None


def test_capacity_says_when_blocks_are_in_the_way(folder: Path) -> None:
    """The same server, but with many seats, and a pool in which one request of two blocks fits and two do not."""
    overrides = ["engine.max_num_seqs=8", "engine.num_gpu_blocks=4"]
    found = capacity("seat.yaml", overrides, seeds=1, jobs=1, tolerance=0.02)
    assert found.highest.load <= 10.02 < found.above.load
    assert found.limit == "blocks"
    assert found.pressure.blocks > 0.5
    assert found.pressure.sequences == found.pressure.budget == 0


def test_what_limits_follows_from_who_waits_for_what() -> None:
    assert limit_of(Pressure(0.0, 0.05, 0.0, 0.0, 0), 0.1)[0] == "compute"
    assert limit_of(Pressure(0.0, 0.5, 0.2, 0.0, 0), 0.1)[0] == "budget"
    assert limit_of(Pressure(0.3, 0.1, 0.2, 0.4, 7), 0.1)[0] == "blocks"
    assert limit_of(Pressure(0.0, 0.1, 0.2, 0.0, 0), 0.1)[0] == "sequences"


@pytest.mark.parametrize(
    ("shares", "seed"),
    [
        ((0.64, 1.0, 1.0), 0),  # mean 0.88; without the first 1.0
        ((0.99, 1.0, 0.75), 1),  # mean 0.913; without the second 0.87, without the third more
        ((0.5, 0.6, 1.0), None),  # any two of them miss 0.9 as well
        ((0.88, 0.89, 0.92), None),  # on both sides, but no further apart than requests may miss the limits
        ((0.5,), None),
    ],
)
def test_a_seed_that_decides_alone_is_named(shares: tuple[float, ...], seed: int | None) -> None:
    assert deciding_seed(shares, 0.9) == seed


def test_capacity_shows_the_range_over_seeds_and_what_is_a_sum(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One value of the answer after the other, as the command shows them."""
    from sim.capacity import Capacity, Tried
    from sim.commands.tune import _show_capacity

    meets = Tried(7.0, interval([1.0, 1.0, 0.9]), True, (1.0, 1.0, 0.9))
    misses = Tried(7.3, interval([0.64, 1.0, 1.0]), False, (0.64, 1.0, 1.0))
    pressure = Pressure(0.5, 0.01, 0.0, 0.4, 715)
    why = limit_of(pressure, 0.1)[1]
    key, decides = "workload.synthetic.arrivals.rate", "one seed decides: ..."
    found = Capacity(
        key, 0.9, meets, misses, "blocks", why, pressure, [597, 89, 29], [meets, misses], 30, 7.0, None, decides
    )
    _show_capacity(found)
    said = capsys.readouterr().out
    assert "at 7.3 requests/s only 88.0% do (64.0% to 100.0% by seed, 3 seeds)" in said
    assert "715 preemptions in 3 runs together (29 to 597 a run)" in said
    assert said.count("wait for blocks") == said.count("the pool is full") == said.count("715") == 1
    assert "they also wait for tokens of the budget 1%, for seats 0% of the time" in said
    assert "warning   one seed decides: ..." in said


def test_capacity_tells_its_seeds_apart(folder: Path) -> None:
    """Poisson arrivals at one seat: queues, and so shares within the limit, differ between seeds."""
    arrivals = "workload.synthetic.arrivals={process: poisson, rate: 3}"
    found = capacity("seat.yaml", [arrivals, "workload.synthetic.num_requests=60"], seeds=2, jobs=1, tolerance=0.3)
    assert len(found.highest.by_seed) == len(found.preemptions_by_seed) == 2
    assert found.highest.attainment.mean == pytest.approx(sum(found.highest.by_seed) / 2)
    assert sum(found.preemptions_by_seed) == found.pressure.num_preemptions


def test_capacity_says_what_is_wrong(folder: Path) -> None:
    with pytest.raises(ScenarioError, match="there are none"):
        capacity("small.yaml")
    with pytest.raises(ScenarioError, match="has no rate that could be raised"):
        capacity("small.yaml", ["slo.ttft_ms=100"])
    with pytest.raises(CapacityFailed, match=r"keep the limits at every rate from .* too short, a burst"):
        capacity("seat.yaml", ["slo.e2el_ms=5000", "workload.synthetic.num_requests=20"], seeds=1, jobs=1)
    with pytest.raises(CapacityFailed, match="cannot be kept at any load"):
        capacity("seat.yaml", ["slo.e2el_ms=20", "workload.synthetic.num_requests=20"], seeds=1, jobs=1)


def test_the_command_says_the_rate_and_the_limit(folder: Path) -> None:
    from sim.cli import app

    arguments = ["capacity", "seat.yaml", "--seeds", "1", "--jobs", "1", "--set", "workload.synthetic.num_requests=100"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "limit     sequences: " in done.stdout
    assert json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["limit"] == "sequences"
    assert CliRunner().invoke(app, ["capacity", "small.yaml"]).exit_code == 2
