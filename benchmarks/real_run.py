"""A real vLLM under cache pressure against the simulator: LLMServingSim's run, RTX 4090, 300 requests, 2,588 blocks.

    python benchmarks/real_run.py [DATA] [--picture FILE.png] [--set KEY=VALUE ...]

DATA: a folder with `real_vllm/` (default: ../shared/data beside the repository; docs/timing.md says where the data come
from). Simulated from the run's own arrivals and lengths, with the calibration fitted from `llmservingsim_*_RTX4090_*`
(scenarios/calibrations/rtx-4090.yaml); vLLM 0.19 ran, and the nearest preset is taken. Nothing is tuned to the run.
Printed: median TPOT, mean latency (queued to last token), mean TTFT, and the mean absolute errors of usage, running and
waiting, second by second.
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from measured import data_folder

from sim.build import build
from sim.records import Batch, Returned
from sim.scenario import load_scenario

SETTINGS = """model: llama-3.1-8b
hardware: rtx 4090
engine: {preset: vllm-0.24, num_gpu_blocks: 2588, block_size: 16, max_num_seqs: 256, max_num_batched_tokens: 2048,
         max_model_len: 32768}
workload: {trace: {path: run.jsonl, format: llmservingsim}}
"""


class Watch:
    """Times of the requests, and the pool and queues at the end of every second."""

    def __init__(self) -> None:
        self.simulation: Any = None
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.arrival: dict[int, int] = {}
        self.tokens: dict[int, int] = {}
        self.seconds: list[tuple[float, int, int]] = []
        self.preemptions = 0

    def arrived(self, now: int, request: Any) -> None:
        self.arrival[request.index] = now

    def scheduled(self, now: int, batch: Batch) -> None:
        scheduler, ledger = self.simulation.scheduler, self.simulation.ledger
        usage = ledger.held_blocks / (self.simulation.settings.num_gpu_blocks - 1)
        while len(self.seconds) < now // 1_000_000_000:
            self.seconds.append((usage, len(scheduler.running), len(scheduler.waiting)))

    def updated(self, now: int, returned: Returned) -> None:
        for request, tokens in zip(returned.batch.requests, returned.delivered, strict=True):
            if tokens:
                self.first.setdefault(request.index, now)
                self.last[request.index] = now
                self.tokens[request.index] = self.tokens.get(request.index, 0) + tokens


def main() -> None:
    """Run it and print the comparison."""
    words = sys.argv[1:]
    overrides, picture, data = [], None, None
    while words:
        word = words.pop(0)
        if word == "--set":
            overrides.append(words.pop(0))
        elif word == "--picture":
            picture = Path(words.pop(0))
        else:
            data = word
    stem = "llmservingsim_realvllm_RTX4090_Llama-3.1-8B"
    names = [f"real_vllm/{stem}_requests.jsonl", f"real_vllm/{stem}_timeseries.csv"]
    folder = data_folder(data, *names) / "real_vllm"
    requests = [json.loads(line) for line in (folder / f"{stem}_requests.jsonl").open()]
    start = min(request["queued_ts"] for request in requests)
    order = sorted(requests, key=lambda request: request["queued_ts"])
    with tempfile.TemporaryDirectory() as temporary:
        lines = [
            json.dumps(
                {
                    "input_toks": request["input_toks"],
                    "output_toks": request["output_toks"],
                    "arrival_time_ns": round((request["queued_ts"] - start) * 1e9),
                }
            )
            for request in order
        ]
        (Path(temporary) / "run.jsonl").write_text("\n".join(lines) + "\n")
        file = Path(temporary) / "run.yaml"
        file.write_text(SETTINGS)
        simulation = build(load_scenario(file, overrides))
        watch = Watch()
        watch.simulation = simulation
        simulation.add_observer(watch)
        simulation.run()

    def compared(name: str, ours: float, measured: float, unit: str) -> None:
        print(f"{name:<14}{ours:>10.3f}{measured:>10.3f} {unit:<4}{100 * (ours / measured - 1):>+8.1f} percent")

    print(f"{'':<14}{'simulated':>10}{'measured':>10}")
    pairs = [(index, request) for index, request in enumerate(order) if request["output_toks"] > 1]
    ours = [(watch.last[i] - watch.first[i]) / (watch.tokens[i] - 1) / 1e6 for i, _ in pairs]
    theirs = [1e3 * (r["last_token_ts"] - r["first_token_ts"]) / (r["output_toks"] - 1) for _, r in pairs]
    compared("median TPOT", float(np.median(ours)), float(np.median(theirs)), "ms")
    compared("mean TPOT", float(np.mean(ours)), float(np.mean(theirs)), "ms")
    latency = [(watch.last[i] - watch.arrival[i]) / 1e9 for i in range(len(order))]
    ttft = [(watch.first[i] - watch.arrival[i]) / 1e9 for i in range(len(order))]
    compared(
        "mean latency",
        float(np.mean(latency)),
        float(np.mean([r["last_token_ts"] - r["queued_ts"] for r in order])),
        "s",
    )
    compared(
        "mean TTFT", float(np.mean(ttft)), float(np.mean([r["first_token_ts"] - r["queued_ts"] for r in order])), "s"
    )
    compared("whole run", max(watch.last.values()) / 1e9, max(r["last_token_ts"] for r in order) - start, "s")
    with (folder / f"{stem}_timeseries.csv").open(newline="") as opened:
        series = [
            (float(r["t"]), float(r["kv_cache_pct"]), int(r["running"]), int(r["waiting"]))
            for r in csv.DictReader(opened)
        ]
    length = min(len(series), len(watch.seconds))
    measured_series = np.array([row[1:] for row in series[:length]])
    simulated = np.array([(100 * usage, running, waiting) for usage, running, waiting in watch.seconds[:length]])
    errors = np.mean(np.abs(simulated - measured_series), axis=0)
    for name, error, mean in zip(
        ("usage, percent", "running", "waiting"), errors, measured_series.mean(axis=0), strict=True
    ):
        print(f"{name:<16} mean absolute error {error:.1f} over {length} s (mean measured {mean:.1f})")
    if picture is not None:
        _draw(picture, measured_series, simulated)


def _draw(file: Path, measured: Any, simulated: Any) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 1, figsize=(8, 7), sharex=True, constrained_layout=True)
    for number, name in enumerate(("KV cache usage, %", "running", "waiting")):
        axes[number].plot(measured[:, number], color="0.35", lw=1.2, label="vLLM 0.19, RTX 4090")
        axes[number].plot(simulated[:, number], color="tab:red", lw=1.0, label="simulated")
        axes[number].set_ylabel(name)
        axes[number].grid(alpha=0.3)
    axes[0].legend()
    axes[2].set_xlabel("seconds")
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
