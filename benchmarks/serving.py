"""The 60 serving rows of aiconfigurator (vLLM, Llama-3.1-70B fp8 on 1 to 8 H200) against the simulator, closed loop.

    python benchmarks/serving.py [DATA] [--waves N] [--again]

DATA: a folder with `gpu/aic_serving_H200_vllm.csv` (default: ../shared/data beside the repository; docs/timing.md says
where the data come from). Each row is a whole simulation with the row's own concurrency, lengths and tensor
parallelism. The cache is fp8 as well: on one card 32 requests of 9,216 tokens run at once in the rows, which no 16-bit
cache holds. Accounts of TPOT, each as mean absolute error:

- kernels only: constants from kernel tables. What is no kernel is 6.5 us a layer (LLMServingSim's profile of the small
  ones) and the scenario's own host time, with the synchronous scheduling of the rows' date; nothing from serving.
- two constants, a shape left out: overhead a step and a sampled token, fitted with all kernels as they are on the rows
  of the other (isl, osl) shapes. Fitted to all rows, they are the overhead in scenarios/calibrations.
- two constants that benchmarks/verification.py's regression would choose, on these rows.
- five constants, a shape left out: overhead a step, a layer and a sampled token, a factor on the linear layers, one on
  attention and communication.

Fitted is, as in all fits of this project, what has the smallest mean absolute relative error. How well the rows
determine the two constants is told by fitting them to 400 samples of 60 rows, drawn with replacement.

A step's cost enters the TPOT of every request that is between its first and its last token while it runs, and lengths
are fixed, so a row's TPOT is linear in these constants as long as the order of events stays as it was. `--again` runs
all rows once more as shipped, with asynchronous scheduling, and tells how far that holds. TTFT is told, not fitted: how
many requests were sent, and how they were spread, is not in the rows; here all start at once, and the first are left
out.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from measured import data_folder
from numpy.typing import NDArray
from scipy.optimize import linprog

from sim.build import build
from sim.models.timing import StepCost, StepShape
from sim.records import Batch, Returned
from sim.scenario import load_scenario

LAYERS = 80
LAYER_US = 6.5
REGRESSION_US = (946.0, 13.2)
"""A step and a sampled token, as benchmarks/verification.py prints "the line's own wish"."""
KERNELS = (
    f"timing.per_layer_us={LAYER_US}",
    "timing.per_step_us=0",
    "timing.per_sampled_token_us=0",
    "engine.async_scheduling=false",
)
SETTINGS = """model: llama-3.1-70b
hardware: h200
engine:
  quantization: fp8
  kv_cache_dtype: fp8
  tensor_parallel_size: {tp}
  max_model_len: {length}
  max_num_seqs: 256
  max_num_batched_tokens: 8192
  gpu_memory_utilization: 0.9
workload:
  synthetic:
    num_requests: {requests}
    prompt_tokens: {isl}
    output_tokens: {osl}
    arrivals: {{process: closed_loop, concurrency: {concurrency}}}
"""

Floats = NDArray[np.float64]


@dataclass
class Row:
    """One measured row."""

    isl: int
    osl: int
    concurrency: int
    tp: int
    ttft_ms: float
    tpot_ms: float


@dataclass
class Watch:
    """Adds up what the steps cost, weighted with the requests that are between their first and last token."""

    first: dict[int, int] = field(default_factory=dict)
    arrived_ns: dict[int, int] = field(default_factory=dict)
    ttft_ns: dict[int, int] = field(default_factory=dict)
    tpot_ns: list[float] = field(default_factory=list)
    tokens: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    total: Floats = field(default_factory=lambda: np.zeros(6))
    before: dict[int, Floats] = field(default_factory=dict)
    means: list[Floats] = field(default_factory=list)

    def arrived(self, now: int, request: Any) -> None:
        self.arrived_ns[request.index] = now

    def step_started(self, now: int, batch: Batch, shape: StepShape, cost: StepCost) -> None:
        kernels = cost.linear + cost.arithmetic + cost.padding
        moved = cost.attention_decode + cost.attention_prefill + cost.allreduce
        self.total = self.total + np.array([1, LAYERS, shape.num_sampled_tokens, kernels, moved, cost.overhead])

    def updated(self, now: int, returned: Returned) -> None:
        for request, tokens in zip(returned.batch.requests, returned.delivered, strict=True):
            if tokens:
                index = request.index
                self.tokens[index] += tokens
                if index not in self.first:
                    self.first[index] = now
                    self.before[index] = self.total
                    self.ttft_ns[index] = now - self.arrived_ns[index]
        for request in returned.finished:
            index = request.index
            after = self.tokens[index] - 1
            self.tpot_ns.append((now - self.first[index]) / after)
            self.means.append((self.total - self.before[index]) / after)


def read_rows(data: Path) -> list[Row]:
    """The rows of the file; other models and cards would be other files."""
    with (data / "gpu" / "aic_serving_H200_vllm.csv").open(newline="") as file:
        return [
            Row(
                int(row["isl"]),
                int(row["osl"]),
                int(float(row["concurrency"])),
                int(float(row["tp_size"])),
                float(row["silicon_ttft_ms"]),
                float(row["silicon_tpot_ms"]),
            )
            for row in csv.DictReader(file)
        ]


def simulate_row(row: Row, waves: int, overrides: tuple[str, ...]) -> tuple[float, float, Floats]:
    """(mean TPOT ms, mean TTFT ms after the first wave, mean sums a token) of a row."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "row.yaml"
        file.write_text(
            SETTINGS.format(
                tp=row.tp,
                length=row.isl + row.osl + 8,
                requests=row.concurrency * waves,
                isl=row.isl,
                osl=row.osl,
                concurrency=row.concurrency,
            )
        )
        simulation = build(load_scenario(file, overrides))
    watch = Watch()
    simulation.add_observer(watch)
    simulation.run()
    later = [ns for index, ns in watch.ttft_ns.items() if index >= row.concurrency] or list(watch.ttft_ns.values())
    return float(np.mean(watch.tpot_ns)) / 1e6, float(np.mean(later)) / 1e6, np.mean(watch.means, axis=0)


def waves_of(row: Row, waves: int) -> int:
    """Long answers take a wave less."""
    return waves if row.osl <= 2048 else max(1, waves - 1)


def told(name: str, simulated: Floats, measured: Floats) -> None:
    """Print an account's errors."""
    error = 100 * (simulated / measured - 1)
    print(f"{name:<44}{np.mean(np.abs(error)):>7.1f}{np.median(np.abs(error)):>8.1f}{np.mean(error):>+8.1f}")


def fitted(columns: Floats, fixed: Floats, measured: Floats) -> Floats:
    """Constants, 0 or more, for which columns @ constants + fixed has the smallest mean absolute relative error."""
    shares, wanted = columns / measured[:, None], (measured - fixed) / measured
    rows, constants = shares.shape
    # One more unknown a row: what its error is at most, whichever its sign.
    slack = np.eye(rows)
    found = linprog(
        np.concatenate([np.zeros(constants), np.ones(rows)]),
        A_ub=np.block([[shares, -slack], [-shares, -slack]]),
        b_ub=np.concatenate([wanted, -wanted]),
    )
    return np.asarray(found.x)[:constants]


def left_out(columns: Floats, fixed: Floats, measured: Floats, shapes: list[tuple[int, int]]) -> Floats:
    """Predictions for each shape's rows, with constants fitted to the other shapes'."""
    predicted = np.zeros(len(measured))
    for shape in sorted(set(shapes)):
        inside = np.array([other == shape for other in shapes])
        found = fitted(columns[~inside], fixed[~inside], measured[~inside])
        predicted[inside] = columns[inside] @ found + fixed[inside]
    return predicted


def main() -> None:
    """Run all rows and print the accounts."""
    words = sys.argv[1:]
    waves = 3
    if "--waves" in words:
        at = words.index("--waves")
        waves = int(words[at + 1])
        del words[at : at + 2]
    again = "--again" in words
    paths = [word for word in words if not word.startswith("--")]
    data = data_folder(paths[0] if paths else None, "gpu/aic_serving_H200_vllm.csv")
    rows = read_rows(data)
    results = []
    for number, row in enumerate(rows):
        results.append(simulate_row(row, waves_of(row, waves), KERNELS))
        print(f"{number + 1}/{len(rows)}", file=sys.stderr, end="\r")
    kernels, ttft = (np.array([result[part] for result in results]) for part in (0, 1))
    sums = np.array([result[2] for result in results])
    measured = np.array([row.tpot_ms for row in rows])
    shapes = [(row.isl, row.osl) for row in rows]
    per_step, per_layer, per_token = (sums[:, part] / 1e3 for part in range(3))
    linear, moved = sums[:, 3] / 1e6, sums[:, 4] / 1e6
    small_rows = sums[:, 5] / 1e6 - LAYER_US * per_layer

    print(f"{'TPOT, percent':<44}{'mean':>7}{'median':>8}{'bias':>8}")
    told("kernels only", kernels, measured)
    for shape in sorted(set(shapes)):
        inside = np.array([other == shape for other in shapes])
        told(f"  isl {shape[0]}, osl {shape[1]}", kernels[inside], measured[inside])
    two = np.column_stack([per_step, per_token])
    fixed = linear + moved + small_rows + LAYER_US * per_layer
    told("two constants, a shape left out", left_out(two, fixed, measured, shapes), measured)
    found = fitted(two, fixed, measured)
    told("two constants, fitted to all rows", two @ found + fixed, measured)
    name = f"two constants, {REGRESSION_US[0]:g} and {REGRESSION_US[1]:g} us"
    told(name, two @ np.array(REGRESSION_US) + fixed, measured)
    five = np.column_stack([per_step, per_layer, per_token, linear, moved])
    predicted = left_out(five, small_rows, measured, shapes)
    told("five constants, a shape left out", predicted, measured)
    for shape in sorted(set(shapes)):
        inside = np.array([other == shape for other in shapes])
        told(f"  isl {shape[0]}, osl {shape[1]}", predicted[inside], measured[inside])
    print(f"fitted to all rows: {found[0]:.0f} us a step, {found[1]:.1f} us a sampled token")
    samples = np.random.default_rng(0).integers(0, len(rows), (400, len(rows)))
    drawn = np.array([fitted(two[sample], fixed[sample], measured[sample]) for sample in samples])
    for name, low, high in zip(("a step", "a sampled token"), *np.percentile(drawn, (5, 95), axis=0), strict=True):
        print(f"  5 to 95 percent of the samples: {low:.0f} to {high:.0f} us {name}")
    low, high = np.percentile(drawn @ np.array([1, 384]), (5, 95)) / 1e3
    print(f"  5 to 95 percent of the samples: {low:.1f} to {high:.1f} ms a step of 384 sampled tokens")
    measured_ttft = np.array([row.ttft_ms for row in rows])
    told("TTFT, kernels only", ttft, measured_ttft)
    if again:
        shipped = [simulate_row(row, waves_of(row, waves), ()) for row in rows]
        told("TPOT as shipped, run again", np.array([result[0] for result in shipped]), measured)
        told("TTFT as shipped", np.array([result[1] for result in shipped]), measured_ttft)


if __name__ == "__main__":
    main()
