"""What a request-step costs, whole program, at the margin: the cases of `docs/performance.md`.

    python benchmarks/cases.py [--rates 8 30 100] [--requests 5000 50000] [--cores plain compiled] [--repeat 3]

512 prompt and 128 output tokens, Poisson arrivals, Llama-3.1-8B on an H100, without speculation and with EAGLE-3,
K = 5, ledger on, steps recorded, no picture. Each case is the command run at two sizes; its cost is the difference of
the CPU seconds over the difference of the request-steps, so that start-up does not count. Ratios are to a ping-pong of
two SimPy processes in the same run (see `whole_run.py`), so that they mean something on another machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCENARIO = """
seed: 0
model: llama-3.1-8b
hardware: h100
engine:
  max_model_len: 8192
  max_num_seqs: 256
  speculative_config: {method: eagle3, num_speculative_tokens: 5}
acceptance: {model: geometric, rate: 0.65}
workload:
  synthetic:
    num_requests: 1000
    arrivals: {process: poisson, rate: 30}
    prompt_tokens: {distribution: fixed, tokens: 512}
    output_tokens: {distribution: fixed, tokens: 128}
output: {pictures: false}
"""


def command(out: Path, core: str, *settings: str) -> tuple[float, float, dict[str, float]]:
    """CPU seconds, peak megabytes and summary of one run of the command."""
    scenario = out / "case.yaml"
    scenario.write_text(SCENARIO)
    line = [sys.executable, "-m", "sim", "run", str(scenario), "--out", str(out), "--force", "--quiet", "--json"]
    for setting in settings:
        line += ["--set", setting]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        line,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "SPECKV_CORE": core},
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    manifest = json.loads(max(out.glob("case/*/manifest.json"), key=os.path.getmtime).read_text())
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, manifest["peak_rss_mb"], json.loads(done.stdout)


def main() -> None:
    """Run the cases and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="*", default=[8, 30, 100])
    parser.add_argument("--requests", type=int, nargs=2, default=[5000, 50000])
    parser.add_argument("--cores", nargs="*", default=["plain", "compiled"])
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    print(f"{'core':<9} {'rate':>5} {'K':>2} {'batch':>6} {'us a request-step':>18} {'MB':>6}")
    for core in given.cores:
        for rate in given.rates:
            for k in (0, 5):
                settings = [f"workload.synthetic.arrivals.rate={rate}"]
                if k == 0:
                    settings.append("engine.speculative_config=null")
                costs = []
                for _ in range(given.repeat):
                    runs = []
                    with tempfile.TemporaryDirectory() as out:
                        for count in given.requests:
                            runs.append(command(Path(out), core, *settings, f"workload.synthetic.num_requests={count}"))
                    (few, _, small), (many, megabytes, big) = runs
                    steps = big["num_request_steps"] - small["num_request_steps"]
                    costs.append((many - few) / steps * 1e6)
                batch = big["num_request_steps"] / big["num_steps"]
                spread = f"{statistics.median(costs):.2f} ({min(costs):.2f}-{max(costs):.2f})"
                print(f"{core:<9} {rate:>5g} {k:>2} {batch:>6.1f} {spread:>18} {megabytes:>6.0f}", flush=True)


if __name__ == "__main__":
    main()
