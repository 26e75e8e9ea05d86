"""Time per request and step in the scheduler: speckv's beside that of an installed vLLM, on the same cases, in one run.

    python benchmarks/against_vllm.py --python oracle/bin/python [--batch 200] [--repeat 5] [--case FILE ...]

The cases are 26 of `tests/conformance` (a batch of 128) and one that is made here: three times `--batch` requests of
512 and 128 tokens, all there at once, of which `--batch` run at a time, EAGLE-3, K = 5, accepted at a rate of 0.65. The
decisions are compared as well, so that both have done the same.

Both sides are timed around `schedule` and `update` (`update_from_output` in vLLM) alone, over the same turns, in
processor time less what it takes to read the clock, and without Python's garbage collection. What plays the device does
not count: neither writing the trace nor making the sampled tokens, which both are handed. Hashing full blocks counts,
with SHA-256 in vLLM, as it is by default, and Python's hash in speckv. Interpreted or compiled, speckv says which ran.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sim.case_files import read_case
from sim.compiled import CORE
from sim.conform.compare import first_difference
from sim.conform.live import Worker, find_python, preset_of
from sim.core.block_hashes import BlockHashes, run_start
from sim.policies.presets import PRESETS
from sim.replay import ScriptedContent, _Replay

CASE = Path(__file__).resolve().parents[1] / "tests/conformance/cases/26-large-batch.case.json.gz"
MAX_TURNS = 200_000
AT_START = "import gc, time\ngc.disable()\ntime.perf_counter = time.thread_time\n"
"""What the worker's Python executes first: its driver times by `time.perf_counter`."""


def batch_case(batch: int, k: int = 5, rate: float = 0.65) -> dict[str, Any]:
    """A case that keeps `batch` requests running until the last of three times as many have been admitted."""
    rng = random.Random(batch)

    def accepted() -> int:
        return next((drafts for drafts in range(k) if rng.random() >= rate), k)

    requests = [
        {
            "id": f"r{number}",
            "arrival_turn": 0,
            "prompt": [[f"p:r{number}", 512]],
            "max_tokens": 128,
            "accepted": [accepted() for _ in range(64)],
        }
        for number in range(3 * batch)
    ]
    engine = {
        "async_scheduling": True,
        "method": "eagle3",
        "num_speculative_tokens": k,
        "block_size": 16,
        "num_gpu_blocks": 44 * batch,
        "max_num_seqs": batch,
        "max_num_batched_tokens": 8192,
        "max_model_len": 4096,
        "enable_prefix_caching": True,
        "watermark": 0.0,
        "policy": "fcfs",
        "long_prefill_token_threshold": 0,
    }
    return {"format": 1, "name": f"batch-{batch}", "engine": engine, "requests": requests, "events": []}


class Handed:
    """A scripted content whose tokens have been made beforehand."""

    def __init__(self, scripted: ScriptedContent, num_tokens: int, block_size: int) -> None:
        self._tokens = [scripted._at(position) for position in range(num_tokens)]
        self._block_size = block_size

    def extend_hashes(self, hashes: BlockHashes, count: int) -> None:
        """See `sim.core.request.Content`."""
        size = self._block_size
        for start in range(len(hashes) * size, count * size, size):
            hashes.append(run_start(hash((hashes[-1] if hashes else 0, *self._tokens[start : start + size]))))


class HandedReplay(_Replay):
    """A replay that is handed its tokens."""

    def add_arrivals(self, turn: int) -> None:
        """As in any replay, and then the tokens of what has come."""
        known = len(self.requests)
        super().add_arrivals(turn)
        for request in list(self.requests.values())[known:]:
            assert isinstance(request.content, ScriptedContent)
            size: int = self.engine["block_size"]
            request.content = Handed(request.content, request.num_prompt_tokens + request.max_tokens + size, size)


class Timed:
    """A scheduler whose decisions are timed; everything else passes through."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.seconds = 0.0
        self.schedule = self._timed(scheduler.schedule)
        self.update = self._timed(scheduler.update)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.thread_time()
            result = function(*args)
            self.seconds += time.thread_time() - start
            return result

        return call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


def ours(case: dict[str, Any], preset: str) -> tuple[float, dict[str, Any]]:
    """Seconds in the scheduler, and the trace."""
    replay = HandedReplay(case, PRESETS[preset])
    timed = Timed(replay.scheduler)
    replay.scheduler = timed  # type: ignore[assignment]
    gc.collect()
    gc.disable()
    try:
        trace = replay.run(MAX_TURNS)
    finally:
        gc.enable()
    return timed.seconds, trace


def reading_s(times: int = 2_000) -> float:
    """Seconds that pass between two readings of the clock, one after the other."""
    found = [-time.thread_time() + time.thread_time() for _ in range(times)]
    return statistics.median(found)


def compare(worker: Worker, case: dict[str, Any], repeat: int) -> float:
    """Time both on the case, in turns; prints a line a repeat and returns the median of the ratios."""
    preset = preset_of(worker.version)
    if preset is None:
        raise SystemExit(f"no preset follows vLLM {worker.version}")
    ratios = []
    for _ in range(repeat):
        worker.ask(case, MAX_TURNS)
        answer = worker.answer()
        own_s, trace = ours(case, preset)
        differs = first_difference(answer["trace"], trace)
        if differs is not None:
            raise SystemExit(f"{case['name']}: the decisions differ, so the times mean nothing: {differs}")
        scheduled = [len(row["scheduled"]) for row in trace["turns"] if row.get("scheduled")]
        timed = sum(("scheduled" in row) + ("returned" in row) for row in trace["turns"]) * reading_s()
        own_s -= timed
        vllm_s = answer["schedule_s"] + answer["update_s"] - timed
        ratios.append(vllm_s / own_s)
        print(
            f"{case['name']}: vLLM {worker.version} {1e6 * vllm_s / sum(scheduled):.1f} us, speckv ({CORE.name}) "
            f"{1e6 * own_s / sum(scheduled):.2f} us a request-step over {sum(scheduled):,} (median batch "
            f"{statistics.median(scheduled):.0f}): {ratios[-1]:.1f} times less",
            flush=True,
        )
    median = statistics.median(ratios)
    print(f"{case['name']}: median {median:.1f} times less ({min(ratios):.1f} to {max(ratios):.1f})", flush=True)
    return median


def main() -> None:
    """Run the benchmark and print its lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=None, help="the Python that has vLLM")
    parser.add_argument("--case", type=Path, nargs="*", default=[CASE], help="files of cases; none is allowed")
    parser.add_argument("--batch", type=int, default=200, help="requests that run at a time in the case made here")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    if CORE.error is not None:
        parser.error(CORE.error)
    cases = [read_case(path) for path in args.case]
    if args.batch:
        cases.append(batch_case(args.batch))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(AT_START)
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        with Worker(find_python(args.python), path) as worker:
            for case in cases:
                compare(worker, case, args.repeat)
    print(f"core: {CORE}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")


if __name__ == "__main__":
    main()
