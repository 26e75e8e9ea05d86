"""Long runs: memory is bounded by what is alive, and nothing is imported that a run has no use for."""

import gc
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from sim.build import build
from sim.observers import recorder as recorder_module
from sim.recording import Recording
from sim.run import _measured, recorder_of
from sim.scenario import load_scenario

FEW, MANY = 300, 1_500
SETTINGS = (
    "engine.num_gpu_blocks=60",
    "engine.max_num_seqs=8",
    "workload.synthetic.prompt_tokens=40",
    "workload.synthetic.output_tokens=4",
)


def memory(folder: Path, num_requests: int, overrides: tuple[str, ...]) -> int:
    """Bytes that Python has allocated when a run has just ended, less those from before it was built."""
    scenario = load_scenario("minimal", [f"workload.synthetic.num_requests={num_requests}", *SETTINGS, *overrides])
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    simulation = build(scenario)
    recorder = recorder_of(simulation, folder, Recording(window_ns=10**9))
    told = _measured(scenario, simulation, recorder.request_row)
    simulation.run()
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    recorder.close()
    assert told[0].num_finished + told[0].num_aborted == num_requests
    return after - before


@pytest.mark.parametrize(
    "overrides",
    [
        ("workload.synthetic.arrivals={process: poisson, rate: 60}",),
        (
            "engine.speculative_config=null",
            "workload.synthetic.arrivals={process: closed_loop, concurrency: 8}",
            "events=[{type: abort, rate_per_s: 5}, {type: reset_prefix_cache, every_s: 3}]",
        ),
    ],
    ids=["open-loop", "closed-loop"],
)
def test_a_request_that_has_ended_leaves_three_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    """TTFT, TPOT and end-to-end latency, 8 bytes each, in arrays that have up to an eighth to spare.

    All else is bounded: rows by `ROWS`, blocks and their hashes by the pool, memoised times and gaps by their bins. How
    full those are still differs between the two runs; 16 bytes a request are left for them. A single object kept of
    each request, such as its row (500 bytes) or its account (170), would be far above that.
    """
    monkeypatch.setattr(recorder_module, "ROWS", 16)
    tracemalloc.start(1)
    try:
        memory(tmp_path, 100, overrides)  # whatever is made once
        growth = memory(tmp_path, MANY, overrides) - memory(tmp_path, FEW, overrides)
    finally:
        tracemalloc.stop()
    assert growth <= 24 * (MANY * 9 / 8 - FEW) + 16 * (MANY - FEW)


LIBRARIES = (
    "IPython",
    "joblib",
    "matplotlib",
    "numpy",
    "pandas",
    "PIL",
    "pyarrow",
    "pydantic",
    "rich",
    "scipy",
    "simpy",
)
"""Those that take long to import."""


def imported_by(*arguments: str, cwd: Path) -> set[str]:
    code = (
        "import json, sys\n"
        "from sim.cli import main\n"
        "try:\n    main()\n"
        f"finally:\n    print(json.dumps([name for name in {LIBRARIES!r} if name in sys.modules]), file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stderr.splitlines()[-1])
    return set(found)


@pytest.mark.parametrize("arguments", [("--help",), ("run", "--help"), ("--version",)])
def test_help_imports_no_library(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert imported_by(*arguments, cwd=tmp_path) <= {"pydantic"}  # typer looks whether there is one


@pytest.mark.parametrize("steps", ["all", "window:1s"])
def test_a_small_run_imports_what_it_needs(tmp_path: Path, steps: str) -> None:
    """Neither pandas (pyarrow imports it for conversions) nor SciPy (for a normal distribution), and matplotlib only
    where a picture is drawn."""
    small = ("run", "quickstart", "--quiet", "--record", f"steps={steps}", "--set", "workload.synthetic.num_requests=5")
    needed = {"numpy", "pyarrow", "pydantic", "rich", "simpy"}
    assert imported_by(*small, "--set", "output.pictures=false", cwd=tmp_path) == needed
    assert imported_by(*small, cwd=tmp_path) == needed | {"matplotlib", "PIL"}
