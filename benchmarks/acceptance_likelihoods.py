"""Every acceptance model on the recorded drafts: held-out nats a step, K = 5. Takes some minutes.

    python benchmarks/acceptance_likelihoods.py [DATA]

DATA: a folder with `acceptance/specdecodebench_*.jsonl.gz` (default: ../shared/data beside the repository). Walks begin
at position 0, as for the figures that were published with the recordings; loops of 4,000 tokens and more are left out.
"""

from __future__ import annotations

import gzip
import json
import sys
import time

from measured import data_folder

from sim.models.acceptance_fit import MODELS, fit, steps_from_lengths


def main() -> None:
    """Print a row for each model."""
    names = [
        "acceptance/specdecodebench_sharegpt.jsonl.gz",
        "acceptance/specdecodebench_gsm8k.jsonl.gz",
    ]
    data = data_folder(sys.argv[1] if len(sys.argv) > 1 else None, *names)
    for dataset in ("sharegpt", "gsm8k"):
        for drafter in ("eagle3", "ngram"):
            with gzip.open(data / "acceptance" / f"specdecodebench_{dataset}.jsonl.gz", "rt") as file:
                every = [json.loads(line)[f"{drafter}_tokens_per_step"] for line in file if line.strip()]
            steps = steps_from_lengths([lengths for lengths in every if len(lengths) < 4000], 5, first=0)
            for model in MODELS:
                if model == "tree":
                    continue
                began = time.perf_counter()
                found = fit(model, steps)
                took = time.perf_counter() - began
                print(f"{dataset:9} {drafter:7} {model:15} {found.held_out:.4f}  ({took:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
