"""Step costs of decoding and verifying against SpecDecode-Bench's regression of real vLLM (Llama-3.1-8B, one H100).

    python benchmarks/verification.py [--set PER_STEP_US PER_SAMPLED_TOKEN_US]

Their regression, fitted to runs of vLLM on InstructCoder with batches of 1, 8, 16, 32 and 64, is 5.886 ms + 21.0 us a
batched token + 39.3 ns a KV token + 1.207 ms a step. The grid: 1 to 64 requests, 1 to 6 tokens a request, contexts of
256 to 4,096 tokens. Printed: the error of every cell, the parts of some, the same figures for the published forms of
the H100 (an analytic form a part, no grid) over the published range of the overhead constants, and the two overhead
constants that the regression itself would ask for. Nothing here is kept: no constant is fitted to this regression.

The two constants are the overhead a step and a sampled or verified token. `--set` tries others than the calibration's.
No measured data are read: the regression's constants and the card's calibration come with the repository.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from sim.calibration_schema import load_calibration
from sim.models.calibration import Calibration, DecodeAttention, LinearLayers, Overhead
from sim.models.hardware import hardware
from sim.models.shapes import load_shape
from sim.models.specdecodebench import LinearStepCost
from sim.models.timing import StepCost, StepShape, TimingModel, capture_sizes

ROWS = (1, 2, 3, 4, 5, 6)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (256, 512, 1024, 2048, 4096)
CELLS = tuple(product(ROWS, BATCHES, CONTEXTS))
ALLOWED = 8.0

Floats = NDArray[np.float64]


def regression_ms() -> Floats:
    """Theirs, a figure a cell."""
    theirs = LinearStepCost()
    seconds = [theirs.forward(batch * context, batch * rows) + theirs.overhead for rows, batch, context in CELLS]
    return 1e3 * np.array(seconds)


def model_costs(calibration: Calibration) -> list[StepCost]:
    """Ours, a cost a cell; CUDA graphs are captured for the tokens a request, as vLLM does."""
    costs = []
    shape, card = load_shape("llama-3.1-8b"), hardware("h100")
    models = {rows: TimingModel(shape, card, calibration, captured=capture_sizes(256, 8192, rows - 1)) for rows in ROWS}
    for rows, batch, context in CELLS:
        step = StepShape()
        for _ in range(batch):
            step.add_decode(rows, context)
        costs.append(models[rows].step_cost(step))
    return costs


def percent(calibration: Calibration) -> Floats:
    """Our errors, a figure a cell."""
    ours = np.array([cost.total / 1e6 for cost in model_costs(calibration)])
    return np.asarray(100 * (ours / regression_ms() - 1))


def summary(name: str, errors: Floats) -> None:
    """Print a line of figures."""
    worst = int(np.argmax(np.abs(errors)))
    rows, batch, context = CELLS[worst]
    print(
        f"{name:<52}{np.mean(np.abs(errors)):>6.1f}{errors[worst]:>+8.1f}  at {batch} x {rows} on {context:,};"
        f" {np.sum(np.abs(errors) > ALLOWED)} of {len(CELLS)} beyond {ALLOWED:g}"
    )


def with_overhead(calibration: Calibration, per_step_us: float, per_token_us: float) -> Calibration:
    """The calibration with two other constants."""
    return replace(calibration, overhead=Overhead(calibration.overhead.per_layer_us, per_step_us, per_token_us))


def wanted(calibration: Calibration) -> tuple[float, float]:
    """The two constants for which the worst cell is least off, in microseconds."""
    bare = np.array([cost.total / 1e6 for cost in model_costs(with_overhead(calibration, 0.0, 0.0))])
    target = regression_ms()
    tokens = np.array([batch * rows for rows, batch, _ in CELLS])
    columns = np.column_stack([1e-3 / target, 1e-3 * tokens / target])
    missing, worst = 1 - bare / target, -np.ones((len(CELLS), 1))
    found = np.asarray(
        linprog(
            [0, 0, 1],
            A_ub=np.block([[columns, worst], [-columns, worst]]),
            b_ub=np.concatenate([missing, -missing]),
        ).x
    )
    return float(found[0]), float(found[1])


def main() -> None:
    """Print the grid, the parts and the bounds."""
    calibration = load_calibration("h100")
    if "--set" in sys.argv:
        at = sys.argv.index("--set")
        calibration = with_overhead(calibration, float(sys.argv[at + 1]), float(sys.argv[at + 2]))
    errors = percent(calibration)
    cells = dict(zip(CELLS, errors, strict=True))
    print("percent by context" + "".join(f"{context:>8,}" for context in CONTEXTS))
    for rows, batch in product(ROWS, BATCHES):
        line = "".join(f"{cells[rows, batch, context]:>+8.1f}" for context in CONTEXTS)
        print(f"{batch:>6} x {rows} tokens  {line}")
    costs = dict(zip(CELLS, model_costs(calibration), strict=True))
    theirs = dict(zip(CELLS, regression_ms(), strict=True))
    print(f"\n{'ms':<20}{'theirs':>8}{'ours':>8}{'linear':>8}{'at rows':>8}{'padding':>8}{'KV':>8}{'overhead':>9}")
    for cell in ((1, 1, 1024), (1, 64, 1024), (4, 32, 1024), (4, 64, 1024), (6, 64, 256), (6, 64, 1024), (6, 64, 4096)):
        rows, batch, context = cell
        cost = costs[cell]
        parts = (cost.linear, cost.arithmetic, cost.padding, cost.attention_decode)
        told = "".join(f"{part / 1e6:>8.2f}" for part in (cost.total, *parts))
        print(f"{f'{batch} x {rows} on {context:,}':<20}{theirs[cell]:>8.2f}{told}{cost.overhead / 1e6:>9.2f}")
    print(f"\n{'percent':<52}{'mean':>6}{'worst':>8}")
    overhead = calibration.overhead
    summary(f"ours: {overhead.per_step_us:g} us a step, {overhead.per_sampled_token_us:g} us a token", errors)
    # timing.md of the data: 14 us a layer, and 0.8 to 1.1 ms and 12 to 20 us, "the H200 rows alone its upper end".
    forms = replace(
        calibration,
        linear={"bfloat16": LinearLayers(0.815, 0.875, 3.8, 3.1)},
        decode={"bfloat16": DecodeAttention(0.861, 7.0)},
        elementwise=replace(calibration.elementwise, memory=1e9),
        overhead=Overhead(14.0, 0.0, 0.0),
    )
    for step_us, token_us in ((800.0, 12.0), (950.0, 16.0), (1100.0, 20.0)):
        changed = with_overhead(forms, step_us, token_us)
        summary(f"published forms: {step_us:g} us a step, {token_us:g} us a token", percent(changed))
    best = wanted(calibration)
    summary(f"the line's own wish: {best[0]:.0f} us and {best[1]:.1f} us", percent(with_overhead(calibration, *best)))


if __name__ == "__main__":
    main()
