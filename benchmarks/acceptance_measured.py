"""Measured speedups against this simulator: SpecDecode-Bench's H100, Llama-3.1-8B, by batch size and drafter.

    python benchmarks/acceptance_measured.py [DATA] [--markdown]

DATA: a folder with `acceptance/specdecodebench_*.jsonl.gz` and `published/specdecodebench_measured_speedups.csv`
(default: ../shared/data beside the repository; docs/timing.md says where the data come from). Each cell is two whole
simulations, with and without drafts: the recorded requests (loops of 4,000 tokens and more left out) all at once into
`max_num_seqs` = batch size, eight times the batch and at least a hundred of them, recorded acceptance replayed,
everything else at its default. No constant is tuned. Measured was vLLM 0.10; the rules here are the default preset's,
scheduling synchronously as 0.10 did.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
import tempfile
from pathlib import Path

from measured import data_folder

from sim.build import build
from sim.scenario import load_scenario

SIZES = (1, 16, 64, 128)
LOOP_TOKENS = 4000
MODEL = "L3.1-8B"
DATASETS = ("gsm8k", "sharegpt")
DRAFTERS = ("ngram", "eagle3")


def write_inputs(data: Path, dataset: str, folder: Path) -> tuple[list[int], list[int]]:
    """Recordings without loops, and a trace of the same requests; returns their output and prompt tokens."""
    with gzip.open(data / "acceptance" / f"specdecodebench_{dataset}.jsonl.gz", "rt") as file:
        entries = [json.loads(line) for line in file if line.strip()]
    kept = [entry for entry in entries if len(entry["eagle3_tokens_per_step"]) < LOOP_TOKENS]
    with (folder / "recorded.jsonl").open("w") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in kept)
    return [min(len(entry["eagle3_tokens_per_step"]), len(entry["ngram_tokens_per_step"])) for entry in kept], [
        entry["prompt_tokens"] for entry in kept
    ]


def simulate(folder: Path, outputs: list[int], prompts: list[int], size: int, drafter: str | None, k: int) -> float:
    """Output tokens a simulated second."""
    # As many requests as fill the batch eight times, but at least a hundred.
    count = max(100, 8 * size)
    chosen = [number % len(outputs) for number in range(count)]
    with (folder / "trace.csv").open("w") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
        file.writelines(f"2024-01-01 00:00:00.0000000,{prompts[n]},{outputs[n]}\n" for n in chosen)
    speculation = "null" if drafter is None else f"{{method: {drafter}, num_speculative_tokens: {k}}}"
    acceptance = "null" if drafter is None else f"{{model: replay, path: recorded.jsonl, drafter: {drafter}}}"
    (folder / "scenario.yaml").write_text(
        f"model: llama-3.1-8b\nhardware: h100\nengine: {{max_num_seqs: {size}, async_scheduling: false, "
        f"enable_prefix_caching: false, max_model_len: 8192, speculative_config: {speculation}}}\n"
        f"acceptance: {acceptance}\nworkload: {{trace: {{path: trace.csv, format: azure}}}}\n"
    )
    simulation = build(load_scenario(folder / "scenario.yaml"))
    simulation.run()
    return sum(outputs[n] for n in chosen) / (simulation.now / 1e9)


def main() -> None:
    """Print the table: measured, simulated, error in percent; rows without recordings by name."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--markdown"]
    markdown = "--markdown" in sys.argv
    names = [f"acceptance/specdecodebench_{dataset}.jsonl.gz" for dataset in DATASETS]
    published = "published/specdecodebench_measured_speedups.csv"
    data = data_folder(arguments[0] if arguments else None, published, *names)
    with (data / published).open() as file:
        rows = list(csv.DictReader(file))
    without: list[str] = []
    bar = "| " if markdown else ""
    print(f"{bar}data set | drafter | K | batch 1 | batch 16 | batch 64 | batch 128 |"[: None if markdown else -2])
    if markdown:
        print("| --- | --- | --- | --- | --- | --- | --- |")
    plain: dict[tuple[str, int], float] = {}
    for row in rows:
        dataset, drafter, k = row["dataset"], row["proposer"], int(row["k"])
        if row["model"] != MODEL or dataset not in DATASETS or drafter not in DRAFTERS:
            without.append(f"{row['model']} {dataset} {drafter} K = {k}")
            continue
        cells = []
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            outputs, prompts = write_inputs(data, dataset, folder)
            for size in SIZES:
                if (dataset, size) not in plain:
                    plain[dataset, size] = simulate(folder, outputs, prompts, size, None, 0)
                speedup = simulate(folder, outputs, prompts, size, drafter, k) / plain[dataset, size]
                measured = float(row[f"bs{size}"])
                cells.append(f"{measured:.2f}, {speedup:.2f}, {100 * (speedup / measured - 1):+.0f}")
        line = " | ".join([dataset, drafter, str(k), *cells])
        print(f"| {line} |" if markdown else line, flush=True)
    print(f"\nNo recordings for: {'; '.join(without)}")


if __name__ == "__main__":
    main()
