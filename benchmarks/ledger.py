"""What the ledger and the distributions cost by request and step: the same records handed to each, in one process.

    python benchmarks/ledger.py [SCENARIO] [--requests N]

Calls to both are timed in one run; times are the processor's, of this thread.
Prints microseconds a request and step, and the ratio to a step of the scheduler and engine alone. The issue allows the
ledger 1 microsecond.
"""

from __future__ import annotations

import argparse
import time
from timeit import repeat
from typing import Any

from sim.build import build
from sim.compiled import CORE
from sim.observers.garbage import Garbage
from sim.scenario import load_scenario


class Timed:
    """An observer whose calls are timed."""

    def __init__(self, observer: Any) -> None:
        self.spent_ns = 0
        for name in ("arrived", "scheduled", "step_started", "step_ended", "updated", "interrupted", "closed"):
            handler = getattr(observer, name, None)
            if handler is not None:
                setattr(self, name, self._timed(handler))

    def _timed(self, handler: Any) -> Any:
        def call(*facts: Any) -> None:
            began = time.thread_time_ns()
            handler(*facts)
            self.spent_ns += time.thread_time_ns() - began

        return call


def measure(scenario: str, num_requests: int) -> tuple[float, float, float, int]:
    """Microseconds a request-step: all else, the ledger, the distributions; and the number of request-steps."""
    loaded = load_scenario(scenario, [f"workload.synthetic.num_requests={num_requests}"])
    simulation = build(loaded)
    settings = simulation.settings
    timed = Timed(simulation.ledger), Timed(Garbage(simulation.ledger, settings.block_size))
    observers = simulation._observers
    observers[observers.index(simulation.ledger)] = timed[0]
    simulation.add_observer(timed[1])
    began = time.thread_time_ns()
    simulation.run()
    whole = time.thread_time_ns() - began
    steps = simulation.num_request_steps
    costs = [observer.spent_ns / steps / 1e3 for observer in timed]
    return whole / steps / 1e3 - sum(costs), costs[0], costs[1], steps


def main() -> None:
    """Print the best of three."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario", nargs="?", default="quickstart")
    parser.add_argument("--requests", type=int, default=300)
    arguments = parser.parse_args()
    loop = min(repeat("for i in numbers: x = i + 1", "numbers = range(1000)", number=300)) / 300
    rounds = [measure(arguments.scenario, arguments.requests) for _ in range(3)]
    rest, ledger, distributions = (min(found[number] for found in rounds) for number in range(3))
    print(f"{arguments.scenario}, {CORE.name} core, {rounds[0][3]:,} request-steps; the best of three")
    print("  microseconds a request-step")
    print(f"  (a turn of the loop `for i in numbers: x = i + 1` takes {loop * 1e6:.0f} ns here)")
    print(f"  scheduler, engine, device   {rest:6.3f}")
    print(f"  ledger                      {ledger:6.3f}   {ledger / rest:5.2f} of it; allowed: 1")
    print(f"  distributions of garbage    {distributions:6.3f}   {distributions / rest:5.2f} of it; opt-in")


if __name__ == "__main__":
    main()
