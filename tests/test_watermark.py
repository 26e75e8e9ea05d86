"""The published effect of the watermark, on the load that is kept in `scenarios/watermark.yaml`, made smaller."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmarks" / "watermark.py"


def benchmark() -> Any:
    found = importlib.util.spec_from_file_location("watermark_benchmark", BENCHMARK)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_a_higher_watermark_preempts_less() -> None:
    """vLLM pull request 44594: 1065, 400 and 187 preemptions. The ranking is what can be held, in each of three
    seeds."""
    watermark = benchmark()
    assert watermark.PUBLISHED == (1065, 400, 187)
    rows = watermark.preemptions(3, overrides=("workload.synthetic.num_requests=200",))
    assert all(watermark.ranked(row) for row in rows), rows
