"""Where the time goes: CPU microseconds a request-step, part by part, on the workload of `cases.py`.

    python benchmarks/by_part.py [--rate 30] [--k 5] [--requests 3000] [--repeat 3]      # SPECKV_CORE chooses the core

The parts are called here in a loop of their own, each call timed, less what it takes to read the clock: scheduler,
device, observers in the order in which a run has them, and the requests as they come. The loop is the engine's without
SimPy, so `clock` is what a run by the engine takes beyond the sum of them. `start-up` is not a part: it is once a run.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

from cases import SCENARIO, machine

from sim.build import Simulation, build
from sim.compiled import CORE
from sim.device import SimulatedRequest
from sim.records import Batch
from sim.run import _measured, recorder_of
from sim.scenario import load_scenario

PARTS = ("workload", "schedule", "update", "device", "ledger", "metrics", "recorder")
_clock = time.thread_time_ns


class Told:
    """The observers of a run, each by the name of the part that it is."""

    def __init__(self, **observers: Any) -> None:
        self._handlers: dict[str, list[tuple[str, Any]]] = {}
        for part, observer in observers.items():
            for what in ("arrived", "scheduled", "step_started", "step_ended", "updated"):
                handler = getattr(observer, what, None)
                if handler is not None:
                    self._handlers.setdefault(what, []).append((part, handler))

    def tell(self, spent: Spent, what: str, *facts: Any) -> None:
        """Hand it to all who want it, in order."""
        for part, handler in self._handlers.get(what, ()):
            spent.by(part, handler, *facts)


class Spent:
    """Processor time by part."""

    def __init__(self) -> None:
        self.ns = dict.fromkeys(PARTS, 0)
        self._reading_ns = statistics.median(-_clock() + _clock() for _ in range(2_000))
        self._calls = dict.fromkeys(PARTS, 0)

    def by(self, part: str, function: Any, *arguments: Any) -> Any:
        """Call it on this part's account."""
        began = _clock()
        result = function(*arguments)
        self.ns[part] += _clock() - began
        self._calls[part] += 1
        return result

    def us(self, part: str) -> float:
        """Microseconds, less what reading the clock took."""
        return (self.ns[part] - self._calls[part] * self._reading_ns) / 1e3


def simulation_of(settings: list[str], folder: Path) -> tuple[Simulation, Told]:
    """A simulation with what observes it, none of it run yet."""
    path = folder / "case.yaml"
    path.write_text(SCENARIO)
    scenario = load_scenario(path, settings)
    simulation = build(scenario)
    recorder = recorder_of(simulation, folder, scenario.output.recording)
    metrics, _ = _measured(scenario, simulation, recorder.request_row)
    return simulation, Told(ledger=simulation.ledger, recorder=recorder, metrics=metrics)


def loop(simulation: Simulation, told: Told) -> tuple[Spent, int]:
    """The engine's loop, asynchronous and without SimPy: time by part, and the number of request-steps."""
    engine = simulation._engine
    scheduler, device = engine.scheduler, engine.device
    spent = Spent()
    arrivals = engine._workload.arrivals()

    def next_request() -> SimulatedRequest | None:
        spec = next(arrivals, None)
        return None if spec is None else SimulatedRequest(spec, engine._content(spec))

    coming = spent.by("workload", next_request)
    in_flight: deque[tuple[int, Batch]] = deque()
    now = free_at = steps = 0
    while coming is not None or scheduler.requests or in_flight:
        while coming is not None and coming.spec.arrival_ns <= now:
            spent.by("workload", scheduler.add, coming)
            told.tell(spent, "arrived", now, coming)
            coming = spent.by("workload", next_request)
        launched = False
        if scheduler.has_requests():
            batch = spent.by("schedule", scheduler.schedule)
            told.tell(spent, "scheduled", now, batch)
            if batch.total_tokens > 0:
                launched = True
                steps += len(batch.frames)
                begins = max(now, free_at)
                shape, cost = spent.by("device", device.launch, batch, begins)
                told.tell(spent, "step_started", begins, batch, shape, cost)
                free_at = begins + cost.total
                in_flight.append((free_at, batch))
        if launched and len(in_flight) < 2:
            continue
        if not in_flight:
            if coming is not None:
                now = max(now, coming.spec.arrival_ns)
            continue
        now, batch = in_flight.popleft()
        told.tell(spent, "step_ended", now, batch)
        returned = spent.by("update", scheduler.update, batch)
        told.tell(spent, "updated", now, returned)
        spent.by("update", scheduler.recycle, batch)
    return spent, steps


def main() -> None:
    """Measure, and print a row a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=30)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    if CORE.error is not None:
        parser.error(CORE.error)
    speculation = "null" if given.k == 0 else f"{{method: eagle3, num_speculative_tokens: {given.k}}}"
    settings = [
        f"workload.synthetic.num_requests={given.requests}",
        f"workload.synthetic.arrivals.rate={given.rate:g}",
        f"engine.speculative_config={speculation}",
    ]
    found: dict[str, list[float]] = {part: [] for part in (*PARTS, "clock", "whole")}
    gc.disable()
    for _ in range(given.repeat):
        gc.collect()
        with tempfile.TemporaryDirectory() as folder:
            spent, steps = loop(*simulation_of(settings, Path(folder)))
            simulation, _ = simulation_of(settings, Path(folder))
            began = _clock()
            simulation.run()
            whole = (_clock() - began) / 1e3 / simulation.num_request_steps
        for part in PARTS:
            found[part].append(spent.us(part) / steps)
        found["clock"].append(whole - sum(found[part][-1] for part in PARTS))
        found["whole"].append(whole)
    print(f"{CORE.name}: {given.rate:g} requests a second, K = {given.k}, {steps:,} request-steps; {machine()}")
    print("| part | us a request-step | least-most | of the whole |\n| --- | --- | --- | --- |")
    whole = statistics.median(found["whole"])
    for part, costs in found.items():
        cost = statistics.median(costs)
        print(f"| {part} | {cost:.2f} | {min(costs):.2f}-{max(costs):.2f} | {cost / whole:.0%} |")
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
