"""The first 40 of the random scenarios of `benchmarks/laws.py`; where nothing may be lost, counted slot by slot too."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from sim.build import Simulation
from sim.policies.presets import PRESETS
from tests.naive_accounts import NaiveAccounts

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmarks" / "laws.py"


def benchmark() -> Any:
    found = importlib.util.spec_from_file_location("laws_benchmark", BENCHMARK)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # Its dataclasses look there.
    found.loader.exec_module(module)
    return module


def test_the_laws_hold_on_40_random_scenarios() -> None:
    laws = benchmark()
    naive: list[NaiveAccounts] = []

    def attach(simulation: Simulation) -> None:
        assert simulation.invariants is not None
        if not simulation.invariants.lossy:
            naive.append(NaiveAccounts(simulation.scheduler, simulation.ledger))
            simulation.add_observer(naive[-1])

    found = [laws.run(number, attach) for number in range(40)]
    broken = {each.drawn.number: (each.broken, each.drawn.all_overrides) for each in found if each.broken}
    assert not broken
    # Not a law: that these are about something.
    assert {each.drawn.preset for each in found} == set(PRESETS)
    assert min(Counter(each.drawn.pool for each in found)[pool] for pool in laws.POOLS) >= 4
    assert sum(each.preemptions > 0 for each in found) >= 10
    assert len(naive) >= 20
    assert sum(each.num_records for each in naive) > 2000
    assert any(each.losses for each in found)
    assert sum(len(each.drawn.axes) for each in found) > 60


def test_a_scenario_is_its_number() -> None:
    laws = benchmark()
    assert laws.draw(7) == laws.draw(7)
    assert laws.draw(7).overrides != laws.draw(7 + len(PRESETS)).overrides
