"""Rates that change, bursts, lengths in pairs, tenants, and fits, against theory and by hand."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from sim.commands.workload import app
from workloads.arrivals import AllAtOnce, Arrivals, Constant, OnOff, Piecewise, Poisson
from workloads.conversations import Conversations
from workloads.fit import compare, fit, fit_conversations
from workloads.inspect import PrefixReuse, conversation_requests, inspect_requests, rank_correlation
from workloads.joint import Copula, JointRequests, Resampled
from workloads.lengths import Fixed, LogNormal, Uniform
from workloads.open_loop import OpenLoop
from workloads.profiles import PROFILES
from workloads.prompts import SharedPrefixes
from workloads.sessions import SingleRequests
from workloads.spec import RequestSpec, trace_stream
from workloads.streams import uniforms
from workloads.tenants import Tenants, tenant_seed
from workloads.traces import Trace

# --- arrivals -----------------------------------------------------------------------------------------------------


def test_piecewise_by_its_table() -> None:
    """Counts in each row are Poisson with mean rate times length; none come where the rate is 0."""
    times = Piecewise([(0, 10), (10, 0), (20, 2)], 40).times_ns(1, 0, 28_000, 0) / 1e9
    periods = int(times[-1] // 40)
    edges = np.concatenate([np.arange(periods)[:, None] * 40 + [0, 10, 20], [[periods * 40] * 3]])
    counts = np.histogram(times, edges.ravel()[: 3 * periods + 1])[0].reshape(-1, 3)
    for row, mean in enumerate((100.0, 0.0, 40.0)):
        assert abs(counts[:, row].mean() - mean) <= 4.5 * math.sqrt(mean / periods)
    assert counts[:, 0].var() / 100 == pytest.approx(1, abs=4.5 * math.sqrt(2 / periods))


def test_one_row_is_poisson() -> None:
    """The same draws, so the same times up to a nanosecond a gap."""
    difference = Piecewise([(0, 5)]).times_ns(3, 0, 1000, 0) - Poisson(5.0).times_ns(3, 0, 1000, 0)
    assert np.abs(difference).max() <= 1000


@pytest.mark.parametrize("regular", [False, True])
def test_on_off_rate(regular: bool) -> None:
    """(20 * 3 + 1 * 1) / 4 a second in the long run."""
    times = OnOff(20, 3, 1, 1, regular).times_ns(1, 0, 300_000, 0)
    assert 300_000 / (times[-1] / 1e9) == pytest.approx(61 / 4, rel=0.03)


def test_on_off_dispersion() -> None:
    """Variance over mean of the counts in long windows: 1 + 2 rate a / (a + b)**2 with a = 1 / on_s, b = 1 / off_s.

    The limit for an interrupted Poisson process (Fischer and Meier-Hellstern, "The Markov-modulated Poisson process
    cookbook", 1993): here 1 + 2 * 20 * 0.5 / 2.25 = 9.89.
    """
    times = OnOff(20, 2, 1).times_ns(2, 0, 400_000, 0)
    window = 40 * 10**9
    counts = np.bincount(times // window)[:-1]
    limit = 1 + 2 * 20 * 0.5 / 1.5**2
    assert counts.var() / counts.mean() == pytest.approx(limit, rel=4.5 * math.sqrt(2 / len(counts)) + 0.05)


RATES = st.floats(1e-2, 1e4)
PROCESSES: st.SearchStrategy[Arrivals] = st.one_of(
    st.builds(
        lambda a, b, repeat: Piecewise([(0, a), (1.5, 0), (2.5, b)], repeat), RATES, RATES, st.sampled_from([None, 4.0])
    ),
    st.builds(OnOff, RATES, st.floats(0.01, 100), st.floats(0.01, 100), st.floats(0, 10), st.booleans()),
)


@given(PROCESSES, st.integers(0, 10**6), st.integers(1, 200), st.integers(1, 40))
def test_any_chunking_gives_the_same_times(process: Arrivals, seed: int, count: int, chunk: int) -> None:
    whole = process.times_ns(seed, 0, count, 0)
    assert (np.diff(whole, prepend=0) >= 0).all()
    pieces: list[int] = []
    for first in range(0, count, chunk):
        pieces += process.times_ns(seed, first, min(chunk, count - first), pieces[-1] if pieces else 0).tolist()
    assert pieces == whole.tolist()


def test_tables_that_make_no_sense() -> None:
    for rates, repeat_s, message in (
        ([], None, "must begin at 0 s, got no row"),
        ([(1, 1)], None, "must begin at 0 s, got 1"),
        ([(0, 1), (0, 2)], None, "must rise, got 0 s after 0 s"),
        ([(0, -1)], None, "rates must be numbers of 0 or more"),
        ([(0, 0)], None, "must have one above 0"),
        ([(0, 1), (5, 2)], 5.0, "repeat_s must be above the last time"),
    ):
        with pytest.raises(ValueError, match=message):
            Piecewise(rates, repeat_s)
    with pytest.raises(ValueError, match="no more requests come: the rate is 0 from 1 s on"):
        Piecewise([(0, 1), (1, 0)]).times_ns(1, 0, 100, 0)
    with pytest.raises(ValueError, match="off_s must be a number above 0"):
        OnOff(1, 1, 0)


# --- lengths in pairs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [-0.8, -0.3, 0.3, 0.9])
def test_copula_has_the_rank_correlation(wanted: float) -> None:
    """And each length keeps its own distribution, the prompts draw by draw."""
    requests = np.arange(40_000)
    first, second = uniforms(1, "prompt", requests, 0, 1), uniforms(1, "output", requests, 0, 1)
    long, wide = LogNormal(1e5, 1.0, maximum=10**8), Uniform(1, 10**6)
    prompts, outputs = Copula(long, wide, wanted).at(first, second)
    assert rank_correlation(prompts, outputs) == pytest.approx(wanted, abs=4.5 / math.sqrt(len(requests)))
    assert (prompts == long.at(first)).all()
    assert outputs.mean() == pytest.approx(5e5, rel=0.02)
    assert np.quantile(outputs, 0.9) == pytest.approx(9e5, rel=0.02)


def test_copula_of_none_and_of_all() -> None:
    first, second = np.array([0.0, 0.6, 1 - 2.0**-53]), np.array([0.25, 0.0, 0.75])
    assert Copula(Uniform(1, 4), Uniform(1, 4), 0.0).at(first, second)[1].tolist() == [2, 1, 4]
    assert Copula(Uniform(1, 4), Uniform(1, 4), 1.0).at(first, second)[1].tolist() == [1, 3, 4]
    assert Copula(Uniform(1, 4), Uniform(1, 4), -1.0).at(first, second)[1].tolist() == [4, 2, 1]


def test_resampled_pairs_stay_together() -> None:
    lengths = Resampled([(10, 1), (20, 2), (30, 3)])
    prompts, outputs = lengths.at(np.array([0.0, 0.34, 0.99]), np.zeros(3))
    assert list(zip(prompts.tolist(), outputs.tolist(), strict=True)) == [(10, 1), (20, 2), (30, 3)]
    specs = list(OpenLoop(JointRequests(1, 3000, lengths), Constant(1.0), 1).arrivals())
    assert {(spec.num_prompt_tokens, spec.max_tokens) for spec in specs} == {(10, 1), (20, 2), (30, 3)}
    with pytest.raises(ValueError, match="no pair"):
        Resampled([])


# --- agents and tenants ---------------------------------------------------------------------------------------------


def test_an_agent_begins_with_its_task() -> None:
    """800 tokens of task, then 30 of a tool's result in each later turn, 10 answered, 2 s of tool each."""
    agents = Conversations(
        1, 2, Fixed(3), Fixed(30), Fixed(10), think_ms=Fixed(2_000), max_context_tokens=2_000, first_lengths=Fixed(800)
    )
    spec = next(agents.openings()).at(5)
    assert spec.num_prompt_tokens == 800
    second = agents.follow(spec, 1_000)
    assert second is not None
    assert (second.arrival_ns, second.num_prompt_tokens) == (2_000_001_000, 800 + 10 + 30)
    assert agents.num_requests == 6


def test_tenants_by_hand() -> None:
    """The worked example of the module: 2 and 1 requests, each with a shared prefix of its own."""
    shared = SharedPrefixes(1, Fixed(100))
    both = Tenants(
        [OpenLoop(SingleRequests(s, n, Fixed(10), Fixed(5), shared), Constant(1.0), s) for s, n in ((1, 2), (2, 1))]
    )
    assert list(both.arrivals()) == [
        RequestSpec(0, 0, ((2, 0, 100), (1, 0, 10)), 110, 5),
        RequestSpec(2, 0, ((6, 0, 100), (9, 0, 10)), 110, 5),
        RequestSpec(1, 1_000_000_000, ((2, 0, 100), (5, 0, 10)), 110, 5),
    ]
    assert both.num_requests == 3
    assert [both.tenant_of(index) for index in range(3)] == [0, 0, 1]


def test_tenants_have_nothing_in_common() -> None:
    """Walked to their ends, a tenant's requests are its own workload's, renumbered; no stream is shared."""

    def own(number: int) -> OpenLoop:
        seed = tenant_seed(7, number)
        talks = Conversations(seed, 5, Uniform(1, 4), Uniform(1, 50), Uniform(1, 9), SharedPrefixes(3, Fixed(40)))
        return OpenLoop(talks, Poisson(3.0), seed)

    alone = [sorted(walk(own(number)), key=lambda spec: spec.index) for number in range(3)]
    together = sorted(walk(Tenants([own(number) for number in range(3)])), key=lambda spec: spec.index)
    assert [spec.index for spec in together] == list(range(sum(map(len, alone))))
    streams: list[set[int]] = []
    for number, specs in enumerate(alone):
        theirs = together[: len(specs)]
        together = together[len(specs) :]
        for mine, seen in zip(specs, theirs, strict=True):
            assert (mine.arrival_ns, mine.num_prompt_tokens, mine.max_tokens, mine.turn) == (
                seen.arrival_ns, seen.num_prompt_tokens, seen.max_tokens, seen.turn,
            )  # fmt: skip
            assert [part[1:] for part in mine.prompt] == [part[1:] for part in seen.prompt]
            assert seen.conversation % 3 == number
        streams.append({stream for spec in theirs for stream, _, _ in spec.prompt})
    assert len(set().union(*streams)) == sum(map(len, streams))
    assert len({tenant_seed(7, number) for number in range(100)}) == 100


def walk(workload: OpenLoop | Tenants) -> list[RequestSpec]:
    specs: list[RequestSpec] = []
    waiting = list(workload.arrivals())
    while waiting:
        spec = waiting.pop()
        specs.append(spec)
        waiting += workload.after(spec, spec.arrival_ns + 1_000)
    return specs


# --- summaries and fits ---------------------------------------------------------------------------------------------


def test_summary_by_hand() -> None:
    """Gaps 1, 1 and 4 s: mean 2, deviation sqrt(2). Blocks of 4: the second prompt has one of before, the third two."""
    a, b, c = (trace_stream(n) for n in range(3))
    specs = [
        RequestSpec(0, 0, ((a, 0, 4), (b, 0, 4)), 8, 5),
        RequestSpec(1, 10**9, ((a, 0, 4), (c, 0, 2)), 6, 7),
        RequestSpec(2, 2 * 10**9, ((a, 0, 4), (b, 0, 4), (c, 0, 1)), 9, 1),
        RequestSpec(3, 6 * 10**9, ((b, 0, 4),), 4, 9),  # the same block behind another is another
    ]
    summary = inspect_requests(specs, block_tokens=4)
    assert (summary.num_requests, summary.duration_s, summary.rate_per_s) == (4, 6.0, 0.5)
    assert summary.gap_cv == pytest.approx(math.sqrt(2) / 2)
    assert summary.shared_token_share == 12 / 27
    assert summary.shared_request_share == 0.5
    assert summary.rank_correlation == pytest.approx(-1.0)  # ranks 3 2 4 1 and 2 3 1 4: 1 - 6 * 20 / 60
    assert summary.prompt.quantiles([0, 0.25, 0.26, 1]) == [4, 4, 6, 9]
    assert json.loads(json.dumps(summary.as_dict()))["output_tokens"]["mean"] == 5.5
    assert summary.pairs.tolist() == [[8, 5, 0], [6, 7, 4], [9, 1, 8], [4, 9, 0]]


def test_reuse_of_answers_in_conversations() -> None:
    """10 tokens, 6 answered, 10 new: of 26, the first 16 were there, four blocks of 4."""
    talks = Conversations(1, 3, Fixed(2), Fixed(10), Fixed(6))
    reuse = PrefixReuse(4)
    assert [reuse.hit_tokens(spec) for spec in conversation_requests(talks)] == [0, 16] * 3


def test_a_fit_recovers_what_made_the_data() -> None:
    """Gamma of burstiness 0.5, rate 20, log-normal lengths with rank correlation 0.6, prefixes of 200 in 40 percent."""
    made = JointRequests(
        3, 20_000, Copula(LogNormal(300, 0.8), LogNormal(100, 1.0), 0.6), SharedPrefixes(5, Fixed(200), 0.4)
    )
    from workloads.arrivals import Gamma

    summary = inspect_requests(OpenLoop(made, Gamma(20.0, 0.5), 3).arrivals())
    found = fit(summary)
    assert found.rate_per_s == pytest.approx(20, rel=0.05)
    assert found.burstiness == pytest.approx(0.5, rel=0.25)
    assert not found.rates
    assert found.rank_correlation == pytest.approx(0.6, abs=0.03)
    assert found.shared is not None
    assert found.shared.fraction == pytest.approx(0.4, abs=0.03)
    assert dict(found.output)[0.5] == pytest.approx(100, rel=0.05)
    errors = {row.name: row.error for row in compare(summary, found)}
    for name in ("prompt_tokens mean", "prompt_tokens p50", "output_tokens p90", "shared_token_share"):
        error = errors[name]
        assert error is not None
        assert abs(error) < 0.1, name


def test_a_fit_sees_that_the_rate_drifts() -> None:
    process = Piecewise([(0, 5), (200, 30), (400, 5)], 1000.0)
    summary = inspect_requests(OpenLoop(SingleRequests(1, 8_000, Fixed(10), Fixed(10)), process, 1).arrivals())
    assert fit(summary, "gamma").rates == ()
    rates = dict(fit(summary).rates)
    assert max(rates.values()) == pytest.approx(30, rel=0.15)
    assert min(rates.values()) == pytest.approx(5, rel=0.3)
    with pytest.raises(ValueError, match="10 requests or more"):
        fit(inspect_requests([]))


def test_a_fit_of_conversations() -> None:
    found = fit_conversations([[(10, 5), (3, 4)], [(20, 6)]] * 50)
    assert found.turns is not None
    sessions = found.sessions(1, 1000)
    assert sessions.num_requests == pytest.approx(1500, rel=0.1)
    assert isinstance(found.process(), AllAtOnce)


def test_profiles_stand_in_for_published_traces(shared_data: Path) -> None:
    """What the profiles give against the traces they were fitted to; the Azure code trace is a few bursts."""
    for name, file, tolerance in (
        ("azure-2023-conv", "azure2023_conv.csv", 0.05),
        ("azure-2023-code", "azure2023_code_1000.csv", 0.2),
        ("mooncake-conversation", "mooncake_fast25_conversation_1000.jsonl", 0.2),
    ):
        trace = Trace(shared_data / "traces" / file)
        summary = inspect_requests(trace.arrivals(), trace.block_tokens if trace.format == "mooncake" else 16)
        assert fit(summary) == PROFILES[name].stand_in, f"refit: {PROFILES[name].command}"
        errors = {row.name: row.error for row in compare(summary, PROFILES[name].stand_in)}
        for figure in ("rate_per_s", "prompt_tokens mean", "output_tokens mean", "output_tokens p50"):
            error = errors[figure]
            assert error is not None
            assert abs(error) < tolerance, (name, figure, error)


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{i / 4},{100 + i % 7},{20 + i % 5}\n" for i in range(200))
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows + "x,1,1\n", encoding="utf-8")
    run = CliRunner().invoke
    refused = run(app, ["inspect", str(trace)])
    assert refused.exit_code == 2
    assert "line 202, arrived_at: must be a number of seconds" in refused.stderr
    told = run(app, ["inspect", str(trace), "--skip-bad-rows", "--json", "--picture", str(tmp_path / "p.png")])
    assert told.exit_code == 0, told.stderr
    summary = json.loads(told.stdout)
    assert (summary["format"], summary["num_requests"], summary["rate_per_s"]) == ("vidur", 200, 4.0)
    assert sum(summary["left_out"].values()) == 1
    assert (tmp_path / "p.png").stat().st_size > 10_000
    assert "1: arrived_at" in run(app, ["inspect", str(trace), "--skip-bad-rows"]).stdout
    part = tmp_path / "part.yaml"
    assert run(app, ["fit", str(trace), "--skip-bad-rows", "-o", str(part)]).exit_code == 0
    from sim.build import build
    from sim.scenario import load_scenario

    simulation = build(load_scenario(part))
    assert simulation.num_requests == 200
    assert "vidur" in run(app, ["formats"]).stdout
    assert run(app, ["inspect", str(trace), "--columns", "a,b"]).exit_code == 2
    assert run(app, ["fit", str(trace), "--arrivals", "hawkes"]).exit_code == 2
