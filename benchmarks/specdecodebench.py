"""SpecDecode-Bench against this project: their simulator reproduced, with their recordings and with fitted models.

    python benchmarks/specdecodebench.py [DATA]

DATA: a folder with `acceptance/specdecodebench_*.jsonl.gz` and `published/specdecodebench_simulated_speedups.csv`
(default: ../shared/data beside the repository). They simulate 300 requests, drawn with Python's generator under seed
42.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measured import data_folder

from sim.models.acceptance_fit import fit, steps_from_lengths
from sim.models.specdecodebench import Drafting, Recorded, combined, drawn, lockstep_speedup

LOOP_TOKENS = 4000
FITTED = {"eagle3": "markov", "ngram": "markov"}
ORACLE_K = 20
"""The recordings' drafts are 20 long, so a model of the oracle's runs has 20 positions."""


def recordings(data: Path, dataset: str) -> list[dict[str, Any]]:
    """The recorded requests, in the file's order."""
    with gzip.open(data / "acceptance" / f"specdecodebench_{dataset}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file if line.strip()]


def chosen(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The 300 that they simulate."""
    return random.Random(42).sample(list(entries), k=300)


def lengths(entry: dict[str, Any], proposer: str) -> list[int]:
    """The entry's accepted lengths; `combined` takes the better of the two."""
    eagle3, ngram = entry["eagle3_tokens_per_step"], entry["ngram_tokens_per_step"]
    return combined(eagle3, ngram) if proposer == "combined" else eagle3 if proposer == "eagle3" else ngram


def published(data: Path) -> list[tuple[str, Drafting, int | None, int, float]]:
    """Rows: data set, proposer, K (None: oracle), batch size, speedup."""
    with (data / "published" / "specdecodebench_simulated_speedups.csv").open() as file:
        return [
            (
                row["dataset"],
                row["proposer"],  # type: ignore[misc]
                None if row["policy"] == "ORACLE" else int(row["policy"].removeprefix("FIXED_")),
                int(row["batch_size"]),
                float(row["speedup"]),
            )
            for row in csv.DictReader(file)
        ]


def modelled(entries: Sequence[dict[str, Any]], proposer: str, k: int | None, model: str) -> list[Recorded]:
    """As many requests of the same sizes, with acceptance drawn from a model fitted to all but the loops."""
    every = [lengths(entry, proposer) for entry in entries]
    fitted = fit(model, steps_from_lengths([x for x in every if len(x) < LOOP_TOKENS], k or ORACLE_K), held_out=False)
    built = fitted.build(0)
    return [
        drawn(built, number, entry["prompt_tokens"], len(lengths(entry, proposer)))
        for number, entry in enumerate(chosen(entries))
    ]


def main() -> None:
    """Print every published row beside ours."""
    names = [
        "acceptance/specdecodebench_sharegpt.jsonl.gz",
        "acceptance/specdecodebench_gsm8k.jsonl.gz",
        "published/specdecodebench_simulated_speedups.csv",
    ]
    data = data_folder(sys.argv[1] if len(sys.argv) > 1 else None, *names)
    models: dict[tuple[str, str, int | None], list[Recorded]] = {}
    print("data set  proposer  K       batch  published  arrays  index as meant  fitted  (error %)")
    worst = {"arrays": 0.0, "fitted": 0.0}
    errors: list[float] = []
    for dataset, proposer, k, size, speedup in published(data):
        entries = recordings(data, dataset)
        requests = [Recorded(e["prompt_tokens"], lengths(e, proposer)) for e in chosen(entries)]
        ours = lockstep_speedup(requests, size, k, proposer)
        meant = lockstep_speedup(requests, size, k, proposer, "meant")
        worst["arrays"] = max(worst["arrays"], abs(ours - speedup))
        line = f"{dataset:9} {proposer:9} {k or 'oracle':6} {size:6}  {speedup:9.4f}  {ours:6.4f}  {meant:14.4f}"
        if proposer in FITTED:
            key = (dataset, proposer, k)
            if key not in models:
                models[key] = modelled(entries, proposer, k, FITTED[proposer])
            guess = lockstep_speedup(models[key], size, k, proposer)
            errors.append(guess / speedup - 1)
            worst["fitted"] = max(worst["fitted"], abs(errors[-1]))
            line += f"  {guess:6.4f}  {100 * errors[-1]:+.2f}"
        print(line, flush=True)
    mean = sum(errors) / len(errors)
    print(
        f"arrays: at most {worst['arrays']:.4f} off; fitted: mean error {100 * mean:+.2f} %, at most "
        f"{100 * worst['fitted']:.2f} %"
    )


if __name__ == "__main__":
    main()
