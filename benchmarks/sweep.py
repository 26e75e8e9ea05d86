"""A sweep on two cores against one: the ratio of their speeds, measured in one run.

    python benchmarks/sweep.py [--points 200] [--requests 150]

The points are runs of the quickstart at 200 different rates. Both sweeps start with no worker running, so the ratio
includes the start of the workers and what only the parent does. Prints the times, the CPU seconds of the parent and of
the workers, the ratio, and whether the two datasets are equal byte by byte. On a machine with other work to do the
ratio says little; the CPU seconds then say what it can be at best, where workers and parent share two cores.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import sim


def of_children() -> float:
    """CPU seconds of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Run the two sweeps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--requests", type=int, default=150)
    given = parser.parse_args()
    rates = [round(4 + 20 * number / given.points, 6) for number in range(given.points)]
    sweep = {
        "name": "speed",
        "scenario": "quickstart",
        "set": {"workload.synthetic.num_requests": given.requests},
        "axes": {"grid": {"workload.synthetic.arrivals.rate": rates}},
    }
    seconds: dict[int, float] = {}
    datasets = []
    with TemporaryDirectory() as folder:
        for jobs in (1, 2):
            began, ours, theirs = time.perf_counter(), time.process_time(), of_children()
            result = sim.sweep(sweep, out=Path(folder) / str(jobs), jobs=jobs)
            seconds[jobs] = time.perf_counter() - began
            datasets.append({file.name: file.read_bytes() for file in (result.folder / "points").iterdir()})
            ours, theirs = time.process_time() - ours, of_children() - theirs
            told = f"{seconds[jobs]:.1f} s, {given.points} points; CPU: parent {ours:.1f} s, workers {theirs:.1f} s"
            print(f"{jobs} worker{'s' if jobs > 1 else ''}: {told}", flush=True)
    print(f"ratio {seconds[1] / seconds[2]:.2f}; the rows are {'equal' if datasets[0] == datasets[1] else 'NOT equal'}")


if __name__ == "__main__":
    main()
