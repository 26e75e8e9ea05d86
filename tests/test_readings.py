"""Readings of the rules that the handed-out traces do not tell apart, each with a case of its own recorded on vLLM.

The traces in `conformance/readings` were recorded with `sim/conform/driver.py` on five releases. That a case tells the
readings apart is shown by changing the rule in the simulator, which then no longer gives what vLLM recorded.

Two readings need three batches in flight, as pipeline parallelism has them; their cases say so in the engine's
`batches_in_flight`, which the case format does not have. No case reaches two more: that rejections of stale output do
not roll back from 0.28 on (both counters are zero while such output can be delivered), and that drafts for a prefill
chunk are ignored without async scheduling (the format proposes drafts only to frames that sample).
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sim.conform.compare import first_difference
from sim.core.crash import EngineCrash
from sim.core.settings import Rules
from sim.policies.presets import PRESETS, VLLM_PRESETS
from sim.replay import _Replay
from tests.broken import READINGS, applied

FOLDER = Path(__file__).parent / "conformance" / "readings"


def load(name: str) -> Any:
    with gzip.open(FOLDER / name, "rt", encoding="utf-8") as file:
        return json.load(file)


def replay(case: dict[str, Any], rules: Rules) -> dict[str, Any]:
    machine = _Replay(case, rules)
    machine.depth = case["engine"].get("batches_in_flight", machine.depth)
    return machine.run(2000)


def test_every_reading_has_its_case_and_five_traces() -> None:
    assert {path.name.removesuffix(".case.json.gz") for path in FOLDER.glob("*.case.json.gz")} == set(READINGS)
    assert len(list(FOLDER.glob("*.trace.json.gz"))) == 5 * len(READINGS)


@pytest.mark.parametrize("name", sorted(READINGS))
def test_five_releases_decide_as_recorded(name: str) -> None:
    case = load(f"{name}.case.json.gz")
    for preset in VLLM_PRESETS:
        difference = first_difference(load(f"{name}.{preset}.trace.json.gz"), replay(case, PRESETS[preset]))
        assert difference is None, f"{preset}: {difference.text()}"


@pytest.mark.plain_core
@pytest.mark.parametrize("name", sorted(READINGS))
def test_the_other_reading_decides_otherwise(name: str) -> None:
    case, reading = load(f"{name}.case.json.gz"), READINGS[name]
    for preset in reading.presets:
        recorded = load(f"{name}.{preset}.trace.json.gz")
        with applied(reading):
            try:
                assert first_difference(recorded, replay(case, PRESETS[preset])) is not None, reading.says
            except EngineCrash:
                pass  # vLLM did not crash here, so that is another decision as well
