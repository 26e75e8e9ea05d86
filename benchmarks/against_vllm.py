"""Time per request and step in the scheduler: speckv's beside that of an installed vLLM, on the same case, in one run.

    python benchmarks/against_vllm.py --python oracle/bin/python [--case
    tests/conformance/cases/26-large-batch.case.json.gz]

Both sides are timed around `schedule` and `update` (`update_from_output` in vLLM) alone, over the same turns; neither
side's time for playing the device or writing the trace counts. Interpreted or compiled, speckv says which one ran.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sim.core.scheduler
from sim.case_files import read_case
from sim.conform.live import Worker, find_python
from sim.policies.presets import PRESETS
from sim.replay import _Replay

CASE = Path(__file__).parents[1] / "tests/conformance/cases/26-large-batch.case.json.gz"


class Timed:
    """A scheduler whose decisions are timed; everything else passes through."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.seconds = 0.0
        self.schedule = self._timed(scheduler.schedule)
        self.update = self._timed(scheduler.update)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            self.seconds += time.perf_counter() - start
            return result

        return call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


def ours(case: dict[str, Any], preset: str) -> tuple[float, int]:
    """Seconds in the scheduler and request-steps."""
    replay = _Replay(case, PRESETS[preset])
    timed = Timed(replay.scheduler)
    replay.scheduler = timed  # type: ignore[assignment]
    trace = replay.run(200_000)
    return timed.seconds, sum(len(row.get("scheduled", ())) for row in trace["turns"])


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=None, help="the Python that has vLLM")
    parser.add_argument("--case", type=Path, default=CASE)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    case = read_case(args.case)
    how = "compiled" if not str(sim.core.scheduler.__file__).endswith(".py") else "interpreted"
    ratios = []
    with Worker(find_python(args.python)) as worker:
        for _ in range(args.repeat):
            worker.ask(case, 200_000)
            answer = worker.answer()
            vllm_s = answer["schedule_s"] + answer["update_s"]
            own_s, request_steps = ours(case, "vllm-0.32")
            ratios.append(vllm_s / own_s)
            print(
                f"vLLM {worker.version} {1e6 * vllm_s / request_steps:.1f} us, speckv ({how}) "
                f"{1e6 * own_s / request_steps:.2f} us a request-step over {request_steps:,}: {ratios[-1]:.1f} times "
                f"less",
                flush=True,
            )
    print(f"median {statistics.median(ratios):.1f} times less ({min(ratios):.1f} to {max(ratios):.1f})")
    sys.exit(0)


if __name__ == "__main__":
    main()
