"""Time and memory against requests, batch, pool and K: a table, fitted exponents and `docs/images/scaling.png`.

    python benchmarks/scaling.py [--quick] [--core compiled] [--panels requests batch pool k] [--picture FILE]

The scenario is that of `cases.py`, one thing changed at a time. Every point is the command in processes of its own:

- requests: 10^3 to 10^6 at 30 a second, steps recorded by windows of 10 s; CPU seconds less those of a run of 10
- batch: max_num_seqs 8 to 1,024, with as many users who each send the next request when the last has ended; the cost
  of a step at the margin, that is, the difference of two sizes of run
- pool: 10^3 to 10^6 blocks under 16 such users; the cost of a request-step at the margin, and what start-up takes
- K: 0 to 8 under 64 such users; the cost of a request-step at the margin

The exponent is the slope of a line through the logarithms (with K + 1 for K): 1 is linear, 0 does not depend on it.
`--quick` leaves out the upper end of each, and every other K.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from cases import CORES, REPOSITORY, Run, command, machine, margin, missing

PICTURE = REPOSITORY / "docs" / "images" / "scaling.png"
WINDOWS = ("--record", "steps=window:10s")


class Point(NamedTuple):
    """One measurement: what was changed, and what it cost."""

    at: float
    cost: float
    """In the unit of the panel."""
    peak_mb: float
    note: str = ""


class Panel(NamedTuple):
    """One thing that is changed."""

    name: str
    axis: str
    unit: str
    points: list[Point]
    offset: int = 0
    """Added to `at` where a logarithm is taken."""
    from_at: float = 0
    """The exponent is fitted from there on."""


def exponent(at: Sequence[float], cost: Sequence[float]) -> float:
    """The slope of the line through the logarithms, by least squares. Both above 0, two points or more."""
    x, y = [math.log(each) for each in at], [math.log(each) for each in cost]
    return round(statistics.linear_regression(x, y).slope, 3) + 0.0  # not -0.0


def users(count: int) -> str:
    """So many who send one request after the other."""
    return f"workload.synthetic.arrivals={{process: closed_loop, concurrency: {count}}}"


def requests_of(count: int) -> str:
    """A run of so many requests."""
    return f"workload.synthetic.num_requests={count}"


def pair(few: int, many: int, settings: Sequence[str], core: str, repeat: int) -> tuple[float, Run, Run]:
    """CPU microseconds a request-step at the margin, the median of some pairs of runs, and the last pair."""
    costs = []
    for _ in range(repeat):
        small, large = (command(*settings, requests_of(count), core=core, options=WINDOWS) for count in (few, many))
        costs.append(margin(small, large))
    return statistics.median(costs), small, large


def by_requests(core: str, quick: bool, repeat: int) -> Panel:
    """CPU seconds of whole runs."""
    panel = Panel("requests", "requests", "CPU seconds, without start-up", [], from_at=10_000)
    start = statistics.median(command(requests_of(10), core=core, options=WINDOWS).cpu_s for _ in range(3))
    print(f"start-up, with 10 requests: {start:.2f} CPU s", flush=True)
    for count in (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)[: 5 if quick else 7]:
        runs = [command(requests_of(count), core=core, options=WINDOWS) for _ in range(repeat if count < 1e5 else 1)]
        cpu_s = statistics.median(run.cpu_s for run in runs) - start
        steps = runs[-1].summary["num_request_steps"]
        note = f"{cpu_s / steps * 1e6:.2f} us a request-step"
        show(panel, Point(count, cpu_s, max(run.peak_mb for run in runs), note))
    return panel


def by_batch(core: str, quick: bool, repeat: int) -> Panel:
    """CPU microseconds a step, all requests of it together."""
    panel = Panel("batch", "max_num_seqs", "CPU microseconds a step", [])
    for batch in (8, 16, 32, 64, 128, 256, 512, 1024)[: 6 if quick else 8]:
        settings = [
            users(batch),
            f"engine.max_num_seqs={batch}",
            "engine.max_num_batched_tokens=16384",
            "engine.num_gpu_blocks=60000",
        ]
        few = max(2 * batch, 300)
        cost, _, large = pair(few, few + max(8 * batch, 8000), settings, core, repeat)
        mean = large.summary["num_request_steps"] / large.summary["num_steps"]
        show(panel, Point(batch, cost * mean, large.peak_mb, f"{cost:.2f} us a request-step, {mean:.1f} in a step"))
    return panel


def by_pool(core: str, quick: bool, repeat: int) -> Panel:
    """CPU microseconds a request-step under a load that does not depend on the pool."""
    panel = Panel("pool", "blocks in the pool", "CPU microseconds a request-step", [])
    for blocks in (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)[: 5 if quick else 7]:
        cost, small, large = pair(1000, 13_000, [users(16), f"engine.num_gpu_blocks={blocks}"], core, repeat)
        start = small.cpu_s - cost * small.summary["num_request_steps"] / 1e6
        show(panel, Point(blocks, cost, large.peak_mb, f"start-up {start:.2f} CPU s"))
    return panel


def by_k(core: str, quick: bool, repeat: int) -> Panel:
    """CPU microseconds a request-step."""
    panel = Panel("K", "K, drafts a step", "CPU microseconds a request-step", [], offset=1)
    for k in range(0, 9, 2 if quick else 1):
        drafts = "null" if k == 0 else f"{{method: eagle3, num_speculative_tokens: {k}}}"
        cost, _, large = pair(1000, 13_000, [users(64), f"engine.speculative_config={drafts}"], core, repeat)
        a_request = large.summary["num_request_steps"] / 13_000
        show(panel, Point(k, cost, large.peak_mb, f"{cost * a_request:.0f} us a request of {a_request:.1f} steps"))
    return panel


PANELS: dict[str, Callable[[str, bool, int], Panel]] = {
    "requests": by_requests,
    "batch": by_batch,
    "pool": by_pool,
    "k": by_k,
}


def show(panel: Panel, point: Point) -> None:
    """Add a point, and print it as a row of a table."""
    panel.points.append(point)
    print(f"| {panel.name} {point.at:,.0f} | {point.cost:,.2f} | {point.peak_mb:.0f} | {point.note} |", flush=True)


def exponents(panel: Panel) -> tuple[float, float]:
    """Of the cost and of the peak memory."""
    fitted = [point for point in panel.points if point.at >= panel.from_at]
    at = [point.at + panel.offset for point in fitted]
    return exponent(at, [point.cost for point in fitted]), exponent(at, [point.peak_mb for point in fitted])


def draw(panels: Sequence[Panel], core: str, picture: Path) -> None:
    """A panel each, time on the left and memory on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(2, 2, figsize=(11, 8), layout="constrained")
    for axes, panel in zip(grid.flat, panels, strict=False):
        at = [point.at for point in panel.points]
        time, memory = exponents(panel)
        axes.plot(at, [point.cost for point in panel.points], "o-", color="#0072B2", label=f"time, exponent {time:.2f}")
        axes.set(xlabel=panel.axis, ylabel=panel.unit)
        right = axes.twinx()
        peaks = [point.peak_mb for point in panel.points]
        right.plot(at, peaks, "s--", color="#D55E00", label=f"memory, exponent {memory:.2f}")
        right.set(ylabel="peak MB of the process")
        if panel.offset == 0:
            axes.set(xscale="log", yscale="log")
            right.set(yscale="log")
            axes.set_ylim(min(p.cost for p in panel.points) / 3, max(p.cost for p in panel.points) * 3)
        else:
            axes.set_ylim(0, 1.5 * max(point.cost for point in panel.points))
        right.set_ylim(50, max(1000, 2 * max(peaks)))
        right.yaxis.set_minor_formatter("")
        axes.set_title(f"against {panel.axis}")
        lines = [*axes.get_lines(), *right.get_lines()]
        axes.legend(lines, [str(line.get_label()) for line in lines], loc="upper left")
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(f"speckv, {core} core: 512 + 128 tokens, EAGLE-3 (K = 5 where it is not what is changed)")
    figure.savefig(picture, dpi=110, metadata={"Software": None})


def main() -> None:
    """Measure the panels, print their tables, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core", choices=CORES, default="compiled")
    parser.add_argument("--panels", nargs="*", choices=PANELS, default=list(PANELS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="without the upper end of each")
    parser.add_argument("--picture", type=Path, help=f"where it goes; with all panels and not --quick, {PICTURE.name}")
    given = parser.parse_args()
    reason = missing(given.core)
    if reason is not None:
        parser.error(f"{reason} (--core plain measures the other)")
    print(f"core {given.core}; {machine()}")
    panels = []
    for name in given.panels:
        panels.append(PANELS[name](given.core, given.quick, given.repeat))
        time, memory = exponents(panels[-1])
        print(f"exponents against {panels[-1].axis}: time {time:.2f}, memory {memory:.2f}", flush=True)
    picture = given.picture
    if picture is None and not given.quick and len(panels) == len(PANELS):
        picture = PICTURE
    if picture is not None:
        draw(panels, given.core, picture)
        print(f"drawn: {picture}")
    print(machine())


if __name__ == "__main__":
    main()
