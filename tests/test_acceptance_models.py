"""Acceptance models with memory and spread: hand calculations, purity in any chunks, rates that the draws confirm."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.models.acceptance import AcceptanceError, AcceptanceModel, Geometric, PerPosition
from sim.models.acceptance_models import (
    BetaRequests,
    Drift,
    HiddenMarkov,
    MarkovSteps,
    MatchAndRun,
    Mixture,
    Tree,
    acceptance_model,
    accepted_variance,
    drafted_of,
    drafted_share_of,
    tokens_per_step_of,
    walked_runs,
)
from sim.models.acceptance_profiles import ACCEPTANCE_PROFILES

ROWS = [[0.57, 0.58, 0.6], [0.6, 0.6, 0.62], [0.65, 0.62, 0.62], [0.75, 0.72, 0.7]]

MODELS: dict[str, Callable[[int], AcceptanceModel]] = {
    "beta": lambda s: BetaRequests(s, 40, 25),
    "markov": lambda s: MarkovSteps(s, ROWS),
    "markov_request": lambda s: MarkovSteps(s, ROWS, [0.5, 0.5, 0.5], 0.2),
    "hidden_markov": lambda s: HiddenMarkov(s, [[0.9, 0.1], [0.05, 0.95]], [[0.3, 0.4, 0.5], [0.7, 0.75, 0.8]]),
    "match_and_run": lambda s: MatchAndRun(s, 0.12, 0.3, [0.55, 0.6, 0.7]),
    "drift": lambda s: Drift(s, 0.5, 0.4, horizon=512),
    "tree": lambda s: Tree(s, [0.6, 0.5], [3, 2]),
    "mixture": lambda s: Mixture(s, [1, 3], [Geometric(s, 0.5), MatchAndRun(s, 0.2, 0.5, [0.6, 0.8])]),
}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


@each_model
@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 400), max_size=6), request=st.integers(0, 50), before=st.integers(0, 300))
def test_runs_do_not_depend_on_how_they_are_asked_for(
    make: Callable[[int], AcceptanceModel], cuts: list[int], request: int, before: int
) -> None:
    whole = make(5).runs(request, 0, 400)
    drafted = drafted_of(make(5), request, 0, 400)
    model = make(5)
    model.runs(request, before, 7)  # out of order
    model.runs(request + 1, 0, 30)
    edges = [0, *sorted(cuts), 400]
    parts = [model.runs(request, a, b - a) for a, b in pairwise(edges)]
    assert np.concatenate(parts).tolist() == whole.tolist()
    parts_drafted = [drafted_of(model, request, a, b - a) for a, b in pairwise(edges)]
    assert np.concatenate(parts_drafted).tolist() == drafted.tolist()
    assert not whole[~drafted].any()


def test_runs_are_the_same_under_any_hash_seed() -> None:
    program = (
        "from tests.test_acceptance_models import MODELS\n"
        "print([m(3).runs(2, 0, 50).tolist() for m in MODELS.values()])"
    )
    root = Path(__file__).parent.parent
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            cwd=root,
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


@each_model
@pytest.mark.parametrize("k", [2, 3])
def test_the_rates_are_those_of_a_walk(make: Callable[[int], AcceptanceModel], k: int) -> None:
    model = make(11)
    walks = [walked_runs(model, request, k, 512) for request in range(150)]
    accepted = np.concatenate([walk for walk, _ in walks])
    drafted = np.concatenate([there for _, there in walks])
    with_drafts = accepted[drafted]
    rates = [float((with_drafts >= i).mean()) for i in range(1, k + 1)]
    assert model.unconditional_rates(k) == pytest.approx(rates, abs=0.02)
    assert model.mean_acceptance_length(k) == pytest.approx(1 + with_drafts.mean(), abs=0.05)
    assert drafted_share_of(model, k) == pytest.approx(drafted.mean(), abs=0.03)
    assert tokens_per_step_of(model, k) == pytest.approx(1 + accepted.mean(), abs=0.05)
    assert accepted_variance(model, k) == pytest.approx(with_drafts.var(), rel=0.06)
    conditional = np.cumprod(model.conditional_rates(k)).tolist()
    assert conditional == pytest.approx(model.unconditional_rates(k))


def test_beta_by_hand() -> None:
    # Beta(2, 1), K = 2: E p = 2/3, E p^2 = 2 3 / (3 4) = 1/2, so 1 + 2/3 + 1/2 tokens over requests.
    assert BetaRequests(0, 2, 1).mean_over_requests(2) == pytest.approx(1 + 2 / 3 + 1 / 2)
    # Pooled over verifications, K = 1: 1 / (1 + p) steps a token, so E[p / (1 + p)] / E[1 / (1 + p)], density 2p.
    inverse = 2 * (1 - np.log(2))
    assert BetaRequests(0, 2, 1).unconditional_rates(1) == pytest.approx([(1 - inverse) / inverse], abs=1e-4)
    rates = [BetaRequests(9, 4, 2).rate(request) for request in range(3000)]
    assert np.mean(rates) == pytest.approx(4 / 6, abs=0.015)
    assert np.var(rates) == pytest.approx(4 * 2 / (36 * 7), rel=0.1)


def test_a_markov_table_of_equal_rows_is_per_position() -> None:
    row = [0.6, 0.5, 0.7]
    alike = MarkovSteps(4, [row] * 4, row)
    assert alike.runs(3, 0, 200).tolist() == PerPosition(4, row).runs(3, 0, 200).tolist()
    assert alike.unconditional_rates(3) == pytest.approx([0.6, 0.3, 0.21])


def test_the_markov_chain_in_the_long_run() -> None:
    # K = 1: after a rejection accept with 1/4, after an acceptance with 3/4: in the long run one half.
    model = MarkovSteps(0, [[0.25], [0.75]])
    assert model.unconditional_rates(1) == pytest.approx([0.5])
    accepted, _ = walked_runs(model, 0, 1, 60_000)
    after = accepted[1:]
    assert after[accepted[:-1] == 0].mean() == pytest.approx(0.25, abs=0.01)
    assert after[accepted[:-1] == 1].mean() == pytest.approx(0.75, abs=0.01)


def test_a_hidden_state_that_never_moves_is_a_mixture() -> None:
    model = HiddenMarkov(3, [[1.0, 0.0], [0.0, 1.0]], [[0.0], [1.0]], [0.25, 0.75])
    runs = [model.runs(request, 1, 40) for request in range(2000)]
    assert all(run.min() == run.max() for run in runs)
    assert np.mean([run[0] for run in runs]) == pytest.approx(0.75, abs=0.03)


def test_the_hidden_chain_moves_by_position() -> None:
    model = HiddenMarkov(3, [[0.9, 0.1], [0.3, 0.7]], [[0.5], [0.5]])
    states = np.concatenate([model.states(request, 1, 500) for request in range(100)])
    assert states.mean() == pytest.approx(0.25, abs=0.02)  # 0.1 / (0.1 + 0.3)


def test_a_match_runs_on_whatever_k_is() -> None:
    model = MatchAndRun(8, 0.1, 0.3, [0.6, 0.9], max_run=64)
    runs, drafted = model.runs(0, 0, 3000), model.drafted(0, 0, 3000)
    going = runs[:-1] > 0
    # One position on, the same match: one token less to accept, and there is a draft.
    assert (runs[1:][going] == runs[:-1][going] - 1).all()
    assert drafted[1:][going].all()
    # A match begins with `start` after a position without one (and not before position 1).
    fresh = ~drafted[1:-1]
    assert drafted[2:][fresh].mean() == pytest.approx(0.1, abs=0.03)


def test_match_and_run_by_hand() -> None:
    # Every token of a match is wrong, again = start = 1/4: a quarter of the steps have drafts, none is accepted.
    wrong = MatchAndRun(0, 0.25, 0.25, [0.0])
    assert wrong.drafted_share(3) == pytest.approx(0.25)
    assert wrong.mean_acceptance_length(3) == 1
    # K = 1, rate r, start s, again g: N -> D s; D -> D: r^2 + (1 - r^2) g.
    s, g, r = 0.2, 0.5, 0.6
    stays = r * r + (1 - r * r) * g
    model = MatchAndRun(0, s, g, [r])
    assert model.drafted_share(1) == pytest.approx(s / (s + 1 - stays))
    assert model.unconditional_rates(1) == pytest.approx([r])
    assert model.tokens_per_step(1) == pytest.approx(1 + r * s / (s + 1 - stays))


def test_both_published_figures_of_ngrams_on_blazedit() -> None:
    # 4.59 tokens over drafted steps, 2.96 over all.
    model = acceptance_model(ACCEPTANCE_PROFILES["ngram-blazedit"].section, 0)
    assert model.mean_acceptance_length(5) == pytest.approx(4.59, abs=0.005)
    assert tokens_per_step_of(model, 5) == pytest.approx(2.96, abs=0.01)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("ngram-gsm8k", 1.18), ("ngram-sharegpt", 1.45), ("draft-qwen3-1.7b", 2.78), ("eagle3-mt-bench", 3.54)],
)
def test_profiles_yield_the_published_tokens_a_step(name: str, tokens: float) -> None:
    profile = ACCEPTANCE_PROFILES[name]
    assert tokens_per_step_of(acceptance_model(profile.section, 0), profile.k) == pytest.approx(tokens, abs=0.008)


def test_drift_without_slope_is_geometric() -> None:
    assert Drift(6, 0.7, 0.0).runs(2, 0, 300).tolist() == Geometric(6, 0.7).runs(2, 0, 300).tolist()
    # At position 64 the logarithm is ln 2.
    rate = Drift(0, 0.5, 1.0).rate_at(np.array([0, 64]))
    assert rate.tolist() == pytest.approx([0.5, 2 / 3])


def test_a_tree_by_level() -> None:
    # 1 - 0.5^2 = 0.75, then 0.6: a tree of widths 1 is a chain.
    assert Tree(0, [0.5, 0.6], [2, 1]).unconditional_rates(2) == pytest.approx([0.75, 0.45])
    assert Tree(2, [0.5, 0.6], [1, 1]).runs(1, 0, 50).tolist() == PerPosition(2, [0.5, 0.6]).runs(1, 0, 50).tolist()


def test_a_mixture_weighs_by_steps() -> None:
    # Half of the requests accept everything with K = 1 (2 tokens a step), half nothing: 1/3 of the steps accept.
    model = Mixture(0, [1, 1], [PerPosition(0, [1.0]), PerPosition(0, [0.0])])
    assert model.unconditional_rates(1) == pytest.approx([1 / 3])


def test_twins_that_differ_in_k_meet_the_same_luck() -> None:
    for make in MODELS.values():
        model = make(1)
        assert model.runs(4, 17, 5).tolist() == make(1).runs(4, 0, 100)[17:22].tolist()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: BetaRequests(0, 0, 1), r"alpha = 0: must be above 0"),
        (lambda: MarkovSteps(0, [[0.5]]), "two or more"),
        (lambda: MarkovSteps(0, [[0.5], [0.5, 0.4]]), r"rates\[1\] has 2 rates"),
        (lambda: MarkovSteps(0, [[0.5], [1.5]]), r"rates\[1\]\[0\] = 1.5"),
        (lambda: HiddenMarkov(0, [[0.5, 0.4], [0, 1]], [[0.5], [0.5]]), r"transitions\[0\] adds up to 0.9"),
        (lambda: HiddenMarkov(0, [[1.0]], [[0.5], [0.5]]), "one of each for each state"),
        (lambda: MatchAndRun(0, 0.1, 1.2, [0.5]), "1.2: must be between 0 and 1"),
        (lambda: MatchAndRun(0, 0.1, 0.2, []), "must not be empty"),
        (lambda: Drift(0, 1.0, 0.1), "rate = 1.0"),
        (lambda: Tree(0, [0.5], [1, 2]), "1 rates and 2 widths"),
        (lambda: Tree(0, [0.5], [0]), r"widths\[0\] = 0"),
        (lambda: Mixture(0, [0.0], [Geometric(0, 0.5)]), "one must be above 0"),
        (lambda: acceptance_model({"model": "guess"}, 0), "must be one of geometric"),
    ],
)
def test_what_is_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises(AcceptanceError, match=text):
        make()
