"""What a request-step costs, whole program, at the margin: the cases of `docs/performance.md`.

    python benchmarks/cases.py [--full] [--keep] [--rates 8 30 100] [--requests 1000 6000] [--cores plain compiled]

512 prompt and 128 output tokens, Poisson arrivals, Llama-3.1-8B on an H100, without speculation and with EAGLE-3,
K = 5, ledger on, steps recorded, no picture. Each case is the command run at two sizes; its cost is the difference of
the CPU seconds over the difference of the request-steps, so that start-up does not count. Both cores take turns, and a
ping-pong of two SimPy processes (`whole_run.py`) runs beside every repeat: ratios are within one repeat, so that they
mean something on another machine. `--full` is 5,000 and 50,000 requests; `--keep` adds a row a case to `history.csv`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from whole_run import ping_pong

REPOSITORY = Path(__file__).resolve().parents[1]
HISTORY = Path(__file__).resolve().with_name("history.csv")
CORES = ("plain", "compiled")
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

PEERS = (
    ("Vidur, event loop (no block ids, prefix cache or speculation)", 1e6 / 134_000, 1e6 / 61_000),
    ("vLLM, its own scheduler alone", 1e6 / 37_000, 1e6 / 37_000),
    ("AISimulate, compiled (no slot ledger), at the margin", 1e6 / 900_000, 1e6 / 900_000),
)
"""Microseconds a request-step on this workload, best and worst, measured once on a machine of the same class. Vidur
and vLLM by the whole, AISimulate at 30 requests a second."""


class Run(NamedTuple):
    """One run of the command."""

    cpu_s: float
    peak_mb: float
    summary: dict[str, Any]
    version: str = ""


def command(*settings: str, core: str, options: Sequence[str] = ()) -> Run:
    """Run the scenario with these overrides on a core, in a process of its own. Exits with its message if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        scenario = Path(folder, "case.yaml")
        scenario.write_text(SCENARIO)
        line = [sys.executable, "-m", "sim", "run", str(scenario), "--out", folder, "--quiet", "--json", *options]
        for setting in settings:
            line += ["--set", setting]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(line, capture_output=True, text=True, cwd=REPOSITORY, env=environment(core))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise SystemExit(done.stderr)
        (written,) = Path(folder).glob("case/*/manifest.json")
        manifest = json.loads(written.read_text())
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(cpu_s, manifest["peak_rss_mb"], json.loads(done.stdout), manifest["versions"]["speckv"])


def environment(core: str) -> dict[str, str]:
    """The variables of a process that runs this tree on a core, the same from one to the next."""
    return {**os.environ, "SPECKV_CORE": core, "PYTHONPATH": str(REPOSITORY), "PYTHONHASHSEED": "0"}


def margin(few: Run, many: Run) -> float:
    """CPU microseconds for one request-step more."""
    steps = many.summary["num_request_steps"] - few.summary["num_request_steps"]
    return (many.cpu_s - few.cpu_s) / steps * 1e6


def missing(core: str) -> str | None:
    """Why this core cannot run here, or None."""
    line = [sys.executable, "-c", "from sim.compiled import CORE; print(CORE.error or '')"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=REPOSITORY, env=environment(core), check=True)
    return done.stdout.strip() or None


def runnable(cores: Iterable[str]) -> list[str]:
    """Those of the cores that can run here; says which cannot, and ends if that is all of them."""
    found = []
    for core in cores:
        reason = missing(core)
        if reason is None:
            found.append(core)
        else:
            print(f"Not measured, {core}: {reason}", flush=True)
    if not found:
        raise SystemExit("No core to measure.")
    return found


def machine() -> str:
    """What it ran on, and whether something else ran as well."""
    load, processors = os.getloadavg()[0], os.cpu_count() or 1
    busy = ": BUSY, take the ratios and not the times" if load > processors + 0.5 else ""
    return f"Python {platform.python_version()}, {platform.machine()}, load {load:.1f} on {processors} processors{busy}"


@dataclass
class Case:
    """What was measured of one case, an entry a repeat."""

    name: str
    core: str
    version: str = ""
    batch: float = 0.0
    peak_mb: float = 0.0
    cost_us: list[float] = field(default_factory=list)
    ping_pong_us: list[float] = field(default_factory=list)

    def add(self, few: Run, many: Run, ping_pong_us: float) -> None:
        """One repeat: a small run, a large one, and a round of ping-pong beside them."""
        self.version = many.version
        self.batch = many.summary["num_request_steps"] / many.summary["num_steps"]
        self.peak_mb = max(self.peak_mb, many.peak_mb)
        self.cost_us.append(margin(few, many))
        self.ping_pong_us.append(ping_pong_us)

    def over(self, beside_us: list[float]) -> float:
        """What it cost by what was measured beside it, the median over the repeats."""
        return statistics.median(own / beside for own, beside in zip(self.cost_us, beside_us, strict=True))


def measure(rates: Sequence[float], requests: Sequence[int], cores: Sequence[str], repeat: int) -> Iterable[Case]:
    """Every case on every core, which take turns."""
    small, large = requests
    for rate in rates:
        for k in (0, 5):
            settings = [f"workload.synthetic.arrivals.rate={rate:g}"]
            if k == 0:
                settings.append("engine.speculative_config=null")
            cases = [Case(f"{rate:g}/s K={k}", core) for core in cores]
            for _ in range(repeat):
                for case in cases:
                    few, many = (
                        command(*settings, f"workload.synthetic.num_requests={count}", core=case.core)
                        for count in (small, large)
                    )
                    case.add(few, many, ping_pong(100_000))
            for case in cases:
                print(row(case, cases[0]), flush=True)
            yield from cases


def row(case: Case, first: Case) -> str:
    """A line of the table; `first` is the same case on the first of the cores."""
    cost = f"{statistics.median(case.cost_us):.2f} ({min(case.cost_us):.2f}-{max(case.cost_us):.2f})"
    rounds = case.over(case.ping_pong_us)
    part = "" if case is first else f"{case.over(first.cost_us):.2f}"
    return f"{case.name:<9} {case.core:<9} {case.batch:>6.1f} {cost:>18} {rounds:>10.2f} {part:>8} {case.peak_mb:>6.0f}"


def keep(cases: Sequence[Case], requests: Sequence[int], path: Path = HISTORY) -> None:
    """Append a row a case. No row says where it was measured, so ratios to ping-pong are what can be compared."""
    commit = said_by_git("rev-parse", "--short", "HEAD")
    changed = "+" if said_by_git("status", "--porcelain", "--untracked-files=no", "--", "sim", "workloads") else ""
    python = platform.python_version()
    columns = "date,version,commit,python,core,case,requests,median_us,least_us,most_us,ping_pong_us,rounds,load"
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(columns.split(","))
        for case in cases:
            figures = (
                statistics.median(case.cost_us),
                min(case.cost_us),
                max(case.cost_us),
                statistics.median(case.ping_pong_us),
                case.over(case.ping_pong_us),
            )
            writer.writerow(
                [f"{datetime.now(UTC):%Y-%m-%d}", case.version, commit + changed, python, case.core, case.name]
                + ["-".join(map(str, requests)), *(f"{figure:.3f}" for figure in figures)]
                + [f"{os.getloadavg()[0]:.1f}"]
            )
    print(f"{len(cases)} rows added to {path.name}")


def said_by_git(*arguments: str) -> str:
    """What git answers about this tree; empty where there is no git or no repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()


def main() -> None:
    """Run the cases and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="*", default=[8, 30, 100])
    parser.add_argument("--requests", type=int, nargs=2, default=[1000, 6000])
    parser.add_argument("--full", action="store_const", dest="requests", const=[5000, 50000])
    parser.add_argument("--cores", nargs="*", choices=CORES, default=CORES)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help=f"add a row a case to {HISTORY.name}")
    given = parser.parse_args()
    cores = runnable(core for core in CORES if core in given.cores)
    few, many = given.requests
    print(f"{few:,} and {many:,} requests, median of {given.repeat} (least-most); {machine()}")
    print(
        f"{'case':<9} {'core':<9} {'batch':>6} {'us a request-step':>18} {'ping-pongs':>10} {'of plain':>8} {'MB':>6}",
        flush=True,
    )
    cases = list(measure(given.rates, given.requests, cores, given.repeat))
    print("ping-pongs: the same cost in rounds of a SimPy ping-pong; of plain: by that of the plain core.")
    print("Others on this workload, as they were once measured on a machine of this class, us a request-step:")
    for name, best, worst in PEERS:
        print(f"  {name:<64} {best:.1f}" + (f" to {worst:.1f}" if f"{best:.1f}" != f"{worst:.1f}" else ""))
    print(machine())
    if given.keep:
        keep(cases, given.requests)


if __name__ == "__main__":
    main()
