"""Cost of the whole command on a real trace, beside a plain SimPy loop in the same run.

    python benchmarks/whole_run.py TRACE.csv [--repeat 3]

TRACE is the Azure LLM inference trace of 2023, conversations (19,366 rows). It is played at 8 times its speed on
Llama-3.1-8B, H100, EAGLE-3, K = 5, asynchronous, steps recorded. What is counted is the CPU time of the command,
start-up and pictures included, per request and step. The ping-pong loop (two SimPy processes that wake each other in
turn) says how fast this machine runs SimPy at all, so that the ratio means something elsewhere.
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
import time
from pathlib import Path

import simpy


def ping_pong(rounds: int) -> float:
    """CPU microseconds for one round: two events made, triggered and waited for."""
    env = simpy.Environment()
    balls = {"event": env.event()}

    def player(first: bool):  # type: ignore[no-untyped-def]
        for _ in range(rounds):
            if first:
                yield env.timeout(1)
                ball, balls["event"] = balls["event"], env.event()
                ball.succeed()
            else:
                yield balls["event"]

    env.process(player(True))
    env.process(player(False))
    start = time.process_time()
    env.run()
    return (time.process_time() - start) / rounds * 1e6


def whole_command(trace: Path, out: Path) -> tuple[float, float, int]:
    """CPU seconds, peak megabytes and request-steps of one run of the command."""
    command = [sys.executable, "-m", "sim", "run", "azure-conv", "--out", str(out), "--force", "--quiet", "--json"]
    for setting in (
        f"workload.trace.path={trace}",
        "workload.trace.time_scale=8",
        "workload.trace.max_requests=null",
        "engine.speculative_config.num_speculative_tokens=5",
    ):
        command += ["--set", setting]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    manifest = json.loads(next(out.glob("azure-conv/*/manifest.json")).read_text())
    return cpu, manifest["peak_rss_mb"], json.loads(done.stdout)["num_request_steps"]


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    rows = []
    for _ in range(args.repeat):
        loop = ping_pong(200_000)
        with tempfile.TemporaryDirectory() as out:
            cpu, megabytes, request_steps = whole_command(args.trace.resolve(), Path(out))
        rows.append((cpu / request_steps * 1e6, loop, megabytes))
        print(
            f"{request_steps:,} request-steps, {cpu:.1f} s CPU: {rows[-1][0]:.2f} us each, {megabytes:.0f} MB; "
            f"ping-pong {loop:.2f} us a round, ratio {rows[-1][0] / loop:.2f}",
            flush=True,
        )
    cost = [row[0] for row in rows]
    ratio = [row[0] / row[1] for row in rows]
    print(
        f"median {statistics.median(cost):.2f} us a request-step ({min(cost):.2f} to {max(cost):.2f}), "
        f"{statistics.median(ratio):.2f} ping-pong rounds; load average {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
