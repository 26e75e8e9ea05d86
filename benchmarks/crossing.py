"""Where speculation stops to pay: output throughput against K = 0, by load, K and acceptance, on the timing model.

    python benchmarks/crossing.py [--out DIR] [--jobs N]

A fixed number of requests is always under way (a closed loop), prompts of 500 tokens and answers of 200, Llama-3.1-8B
on an H100 with EAGLE-3. Prints, for each K and acceptance rate, the speed-up at each load and the load at which it
passes 1. Expected, as published: speculation wins at low load and loses at high load; the crossing point falls with K
and rises with acceptance.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

import sim

K = "engine.speculative_config.num_speculative_tokens"
RATE = "acceptance.rate"
LOAD = "workload.synthetic.arrivals.concurrency"
LOADS = [1, 4, 16, 32, 64, 128, 256, 512]
KS = [1, 2, 4, 8]
RATES = [0.3, 0.5, 0.7]

SCENARIO = """
model: llama-3.1-8b
hardware: h100
engine: {max_model_len: 2048, max_num_seqs: 512, speculative_config: {method: eagle3, num_speculative_tokens: 4}}
acceptance: {model: geometric, rate: 0.5}
workload:
  synthetic:
    num_requests: 24
    arrivals: {process: closed_loop, concurrency: 1}
    prompt_tokens: 500
    output_tokens: 200
"""


def crossing(loads: list[float], ratios: list[float]) -> float | None:
    """The load at which the ratio falls through 1, straight between logarithms of loads; None if it does not."""
    for number in range(1, len(loads)):
        before, after = ratios[number - 1], ratios[number]
        if before >= 1 > after:
            share = (before - 1) / (before - after)
            return math.exp(math.log(loads[number - 1]) * (1 - share) + math.log(loads[number]) * share)
    return None


def speedups(frame: pd.DataFrame) -> pd.DataFrame:
    """Output throughput over that without speculation at the same load; rows (rate, K), columns loads."""
    table = frame.pivot_table(values="output_throughput", index=[RATE, K], columns=LOAD)
    base = table.xs(0, level=K)
    return table.drop(index=0, level=K).div(base.iloc[0], axis=1)


def main() -> None:
    """Run the sweep and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=None)
    parser.add_argument("--jobs", type=int, default=None)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        scenario = Path(folder) / "crossing.yaml"
        scenario.write_text(SCENARIO)
        points = [{LOAD: load, "workload.synthetic.num_requests": max(24, 3 * load)} for load in LOADS]
        sweep = {
            "name": "crossing",
            "scenario": str(scenario),
            "axes": {"grid": {K: [0, *KS], RATE: RATES}, "list": points},
        }
        result = sim.sweep(sweep, out=given.out or folder, jobs=given.jobs)
        table = speedups(result.table())
    print("acceptance   K  " + "".join(f"{load:>7}" for load in LOADS) + "   speed-up is 1 at")
    for (rate, k), row in table.iterrows():
        at = crossing(LOADS, row.tolist())
        told = f"{at:.0f}" if at is not None else "beyond" if row.iloc[-1] >= 1 else "never above"
        print(f"      {rate:>4}  {k:>3}  " + "".join(f"{value:>7.2f}" for value in row) + f"   {told}")


if __name__ == "__main__":
    main()
