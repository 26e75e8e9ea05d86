"""Fits recover what made the data, and come out on recorded data as others found; SpecDecode-Bench is reproduced."""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.models.acceptance import AcceptanceError, AcceptanceModel, Geometric, PerPosition
from sim.models.acceptance_fit import (
    MODELS,
    Counts,
    Figures,
    Steps,
    fit,
    geometric_rate,
    steps_from_lengths,
    unsupported,
)
from sim.models.acceptance_models import (
    BetaRequests,
    Drift,
    HiddenMarkov,
    MarkovSteps,
    MatchAndRun,
    Mixture,
    Tree,
    walked_runs,
)
from sim.models.specdecodebench import Recorded, combined, drawn, lockstep_speedup

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
needs_data = pytest.mark.skipif(
    not (DATA / "acceptance").is_dir(), reason="the recorded acceptance (../shared/data) is not here"
)

TRIES = 100
# Of 100 intervals of 95 percent, fewer than 88 hold with a probability of 0.0015.
AT_LEAST = 88

MARKOV = [[0.5, 0.4], [0.6, 0.55], [0.75, 0.8]]
FIRST = [0.6, 0.6]


def sampled(model: AcceptanceModel, k: int, requests: int, tokens: int, flags: bool = False) -> Steps:
    walks = [walked_runs(model, request, k, tokens) for request in range(requests)]
    drafted = tuple(there for _, there in walks) if flags else None
    return Steps(k, tuple(accepted for accepted, _ in walks), drafted)


def table(rates: list[list[float]], first: list[float]) -> dict[str, float]:
    truth = {f"rates[{a}][{i}]": rate for a, row in enumerate(rates) for i, rate in enumerate(row)}
    return truth | {f"first[{i}]": rate for i, rate in enumerate(first)}


CASES: list[tuple[str, dict[str, float], Callable[[int], Steps | Counts], dict[str, Any]]] = [
    ("geometric", {"rate": 0.65}, lambda s: sampled(Geometric(s, 0.65), 4, 4, 100), {}),
    (
        "per_position",
        {"rates[0]": 0.7, "rates[1]": 0.6, "rates[2]": 0.8},
        lambda s: sampled(PerPosition(s, [0.7, 0.6, 0.8]), 3, 4, 150),
        {},
    ),
    ("beta", {"alpha": 6.0, "beta": 4.0}, lambda s: sampled(BetaRequests(s, 6, 4), 4, 60, 120), {}),
    ("markov", table(MARKOV, FIRST), lambda s: sampled(MarkovSteps(s, MARKOV, FIRST), 2, 60, 60), {}),
    (
        "markov_request",
        table(MARKOV, FIRST) | {"request_sigma": 0.6},
        lambda s: sampled(MarkovSteps(s, MARKOV, FIRST, 0.6), 2, 80, 60),
        {},
    ),
    (
        "match_and_run",
        {"start": 0.15, "again": 0.35, "rates[0]": 0.6, "rates[1]": 0.7, "rates[2]": 0.8},
        lambda s: sampled(MatchAndRun(s, 0.15, 0.35, [0.6, 0.7, 0.8]), 3, 12, 250, True),
        {},
    ),
    ("drift", {"rate": 0.5, "slope": 0.5}, lambda s: sampled(Drift(s, 0.5, 0.5), 4, 12, 150), {}),
    (
        "mixture",
        {"classes[0].acceptance.rate": 0.4, "classes[1].acceptance.rate": 0.75, "classes[0].weight": 0.4},
        lambda s: sampled(Mixture(s, [0.4, 0.6], [Geometric(s, 0.4), Geometric(s, 0.75)]), 4, 60, 60),
        {},
    ),
    (
        "tree",
        {"rates[0]": 0.5, "rates[1]": 0.6},
        lambda s: sampled(Tree(s, [0.5, 0.6], [3, 2]), 2, 4, 100),
        {"widths": [3, 2]},
    ),
]


@pytest.mark.parametrize(("model", "truth", "sample", "options"), CASES, ids=[case[0] for case in CASES])
def test_true_parameters_lie_in_their_intervals(
    model: str, truth: dict[str, float], sample: Callable[[int], Steps], options: dict[str, Any]
) -> None:
    held: Counter[str] = Counter()
    for seed in range(TRIES):
        found = fit(model, sample(seed), held_out=False, **options)
        for parameter in found.parameters:
            if parameter.name in truth and parameter.low is not None and parameter.high is not None:
                held[parameter.name] += parameter.low <= truth[parameter.name] <= parameter.high
    assert {name: held[name] for name in truth if held[name] < AT_LEAST} == {}


def test_a_hidden_markov_fit_predicts_as_well_as_the_truth() -> None:
    true = ([[0.97, 0.03], [0.02, 0.98]], [[0.3, 0.4, 0.5], [0.75, 0.8, 0.8]])
    seen, fresh = (sampled(HiddenMarkov(seed, *true), 3, 80, 300) for seed in (1, 2))
    kind = MODELS["hidden_markov"](3, None, 2)
    theta = kind.fit(seen)
    start = [0.4, 0.6]  # the stationary law of these transitions
    truth = np.concatenate([np.ravel(true[0]), np.ravel(true[1]), start])
    told, best = (kind.log_likelihood(at, fresh) / fresh.num_steps for at in (theta, truth))
    assert told == pytest.approx(best, abs=0.005)


def test_the_hidden_markov_likelihood_by_hand() -> None:
    # Two steps, K = 1, accepting 1 then 0: the state moves two positions between them.
    matrix, rates, start = np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([[0.3], [0.7]]), np.array([0.5, 0.5])
    kind = MODELS["hidden_markov"](1, None, 2)
    theta = np.concatenate([matrix.ravel(), rates.ravel(), start])
    expected = start * rates[:, 0] @ np.linalg.matrix_power(matrix, 2) @ (1 - rates[:, 0])
    steps = Steps(1, (np.array([1, 0]),))
    assert kind.log_likelihood(theta, steps) == pytest.approx(np.log(expected))


def test_the_match_and_run_likelihood_by_hand() -> None:
    # K = 1, one request, accepting 0 then 1 with unknown drafts. Start s, again g, rate r at every depth.
    s, g, r = 0.3, 0.4, 0.6
    kind = MODELS["match_and_run"](1, None, 3)
    theta = np.log(np.array([s, g, r]) / (1 - np.array([s, g, r])))
    # The first accepted nothing: no match (1 - s), or one whose first token was wrong s (1 - r); then a match is right.
    expected = (1 - s) * s * r + s * (1 - r) * g * r
    assert kind.log_likelihood(theta, Steps(1, (np.array([0, 1]),))) == pytest.approx(np.log(expected))
    # With drafts known: none, then one that is right, then the match's bonus token and its next are right.
    flags = (np.array([False, True, True]),)
    known = Steps(1, (np.array([0, 1, 1]),), flags)
    # Or the bonus token was the match's end, and another match begins.
    expected = (1 - s) * s * (r * r * r + r * (1 - r) * g * r)
    # Less what the share of steps with drafts tells by itself, which `fit` adds for every model.
    share = 2 * np.log(2.5 / 4) + np.log(1.5 / 4)
    assert kind.log_likelihood(theta, known) == pytest.approx(np.log(expected) - share)


def test_counts_give_the_rates_they_count() -> None:
    # vLLM's own sample: 8 drafts of K = 3 accept 6, 4, 3: unconditional 0.750, 0.500, 0.375.
    counts = Counts(3, np.array([8.0]), np.array([[6.0, 4.0, 3.0]]))
    found = fit("per_position", counts)
    assert [p.value for p in found.parameters] == pytest.approx([6 / 8, 4 / 6, 3 / 4])
    assert found.build(0).unconditional_rates(3) == pytest.approx([0.75, 0.5, 0.375], abs=1e-5)
    # One rate: 13 accepted of 18 that were judged.
    assert fit("geometric", counts).parameters[0].value == pytest.approx(13 / 18)
    assert unsupported("beta", counts) == "needs every step of single requests, and the source has sums"


def test_a_mean_length_gives_the_rate_with_that_length() -> None:
    assert geometric_rate(1 + 0.6 + 0.36 + 0.216, 3) == pytest.approx(0.6)
    # Qwen3-1.7B drafting for Qwen3-32B, K = 3: 2.78 tokens a step.
    rate = geometric_rate(2.78, 3)
    assert Geometric(0, rate).mean_acceptance_length(3) == pytest.approx(2.78)
    assert fit("geometric", Figures(3, None, 2.78)).section["rate"] == pytest.approx(rate, abs=1e-6)
    with pytest.raises(AcceptanceError, match="from 1 to 4"):
        geometric_rate(4.5, 3)
    with pytest.raises(AcceptanceError, match="needs more than a mean length"):
        fit("per_position", Figures(3, None, 2.78))


def test_steps_are_walked_and_the_cut_one_is_left_out() -> None:
    # From position 1 with K = 2: min(4, 3) = 3 tokens, at 4 one, at 5 two to the end: cut.
    steps = steps_from_lengths([[1, 4, 3, 2, 1, 2, 1]], 2)
    assert [a.tolist() for a in steps.accepted] == [[2, 0]]
    assert steps.flat.position.tolist() == [1, 4]
    assert steps.flat.previous.tolist() == [3, 2]
    with pytest.raises(AcceptanceError, match="no step"):
        steps_from_lengths([[1]], 2)


# Recorded data


def recorded(dataset: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / "acceptance" / f"specdecodebench_{dataset}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file if line.strip()]


def lengths(dataset: str, field: str) -> list[list[int]]:
    """Without the loops of 4,000 tokens and more."""
    return [entry[field] for entry in recorded(dataset) if len(entry[field]) < 4000]


# shared/acceptance.md, K = 5, ShareGPT, EAGLE-3: held-out nats a step.
PUBLISHED = {
    "geometric": -1.586,
    "per_position": -1.579,
    "beta": -1.536,
    "markov": -1.551,
    "markov_request": -1.520,
}


@needs_data
def test_held_out_likelihoods_on_recorded_data() -> None:
    # Their walk begins at position 0, where a recording says 1 token: the prefill.
    steps = steps_from_lengths(lengths("sharegpt", "eagle3_tokens_per_step"), 5, first=0)
    assert steps.num_steps == 77_518
    found = {model: fit(model, steps).held_out for model in PUBLISHED}
    assert found == pytest.approx(PUBLISHED, abs=0.002)
    ranking = sorted(PUBLISHED, key=lambda model: PUBLISHED[model])
    assert sorted(found, key=lambda model: found[model] or 0.0) == ranking
    beta = fit("beta", steps, held_out=False)
    assert [p.value for p in beta.parameters] == pytest.approx([13.066, 7.936], abs=0.01)


@needs_data
def test_the_hidden_markov_likelihood_on_recorded_data() -> None:
    # Published: -1.522 with a state that moves once a step; here it moves once a position. One fold of five (the others
    # take a minute: benchmarks/acceptance_likelihoods.py), so measured against the Beta fit of the same fold, -1.536.
    steps = steps_from_lengths(lengths("sharegpt", "eagle3_tokens_per_step"), 5, first=0)
    every = range(len(steps.accepted))
    seen, told = steps.of([r for r in every if r % 5]), steps.of(list(every)[::5])
    of = {}
    for model in ("beta", "hidden_markov"):
        kind = MODELS[model](5, None, 3)
        kind_rounds = getattr(kind, "_rounds", None)
        if kind_rounds is not None:
            kind._rounds = 40  # type: ignore[attr-defined]
        of[model] = kind.log_likelihood(kind.fit(seen), told) / told.num_steps
    assert of["hidden_markov"] - of["beta"] == pytest.approx(-1.522 + 1.536, abs=0.01)


@needs_data
@pytest.mark.parametrize(
    ("dataset", "field", "nats"), [("gsm8k", "ngram_tokens_per_step", 0.1), ("sharegpt", "eagle3_tokens_per_step", 0.0)]
)
def test_one_rate_describes_eagle3_and_not_ngrams(dataset: str, field: str, nats: float) -> None:
    # acceptance.md: EAGLE-3 is at most 0.007 nats from geometric on average, n-grams 0.1 to 0.45.
    steps = steps_from_lengths(lengths(dataset, field), 5, first=0)
    away = (fit("per_position", steps).log_likelihood or 0.0) - (fit("geometric", steps).log_likelihood or 0.0)
    assert nats <= away <= (0.45 if nats else 0.0075)


# SpecDecode-Bench


@needs_data
def test_specdecodebench_is_reproduced() -> None:
    with (DATA / "published" / "specdecodebench_simulated_speedups.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 108
    for dataset in ("gsm8k", "sharegpt"):
        entries = random.Random(42).sample(recorded(dataset), k=300)
        for row in rows:
            # Every proposer and policy, at the ends and in the middle.
            if row["dataset"] != dataset or row["batch_size"] not in ("1", "16", "128"):
                continue
            proposer, k = row["proposer"], None if row["policy"] == "ORACLE" else int(row["policy"][-1])
            requests = []
            for entry in entries:
                eagle3, ngram = entry["eagle3_tokens_per_step"], entry["ngram_tokens_per_step"]
                own = {"eagle3": eagle3, "ngram": ngram, "combined": combined(eagle3, ngram)}[proposer]
                requests.append(Recorded(entry["prompt_tokens"], own))
            speedup = lockstep_speedup(requests, int(row["batch_size"]), k, proposer)  # type: ignore[arg-type]
            assert speedup == pytest.approx(float(row["speedup"]), abs=0.001), row


@needs_data
@pytest.mark.parametrize("dataset", ["gsm8k", "sharegpt"])
@pytest.mark.parametrize("proposer", ["eagle3", "ngram"])
def test_specdecodebench_with_a_fitted_model(dataset: str, proposer: str) -> None:
    field = f"{proposer}_tokens_per_step"
    entries = random.Random(42).sample(recorded(dataset), k=300)
    with (DATA / "published" / "specdecodebench_simulated_speedups.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if (row["dataset"], row["proposer"]) == (dataset, proposer)]
    errors = []
    for policy in ("FIXED_3", "FIXED_5"):
        k = int(policy[-1])
        model = fit("markov", steps_from_lengths(lengths(dataset, field), k), held_out=False).build(0)
        requests = [drawn(model, n, entry["prompt_tokens"], len(entry[field])) for n, entry in enumerate(entries)]
        for row in rows:
            if row["policy"] == policy and row["batch_size"] in ("1", "64"):
                speedup = lockstep_speedup(requests, int(row["batch_size"]), k, proposer)  # type: ignore[arg-type]
                errors.append(speedup / float(row["speedup"]) - 1)
    assert abs(np.mean(errors)) < 0.03
    assert max(map(abs, errors)) < 0.03
