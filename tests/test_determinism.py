"""Law 9 below the command: the same scenario and seed give the same records, whatever the hash seed or the
observers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sim.build import build
from sim.scenario import load_scenario
from tests.record_digest import SCENARIOS, digest

REPOSITORY = Path(__file__).resolve().parent.parent


def in_a_process(hash_seed: int, *arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "tests.record_digest", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return run.stdout


def test_two_hash_seeds_with_and_without_check() -> None:
    """Two processes, and this one: the digests of all scenarios' records and the slot-seconds to the last digit."""
    plain = in_a_process(0)
    assert plain.count("\n") == len(SCENARIOS)
    assert in_a_process(4242, "--check") == plain
    here = "".join(f"{name} {' '.join(digest(name, check=False)[:2])}\n" for name in SCENARIOS)
    assert here == plain


def test_the_seed_matters() -> None:
    one, _, num_records = digest("quickstart", check=False)
    other, _, _ = digest("quickstart", check=False, overrides=("seed=1",))
    assert num_records > 500
    assert one != other


@pytest.mark.parametrize("name", ["quickstart", "resets-and-aborts"])
def test_the_scenarios_are_worth_it(name: str) -> None:
    """They preempt, so that the pool's order and the prefix cache have had their say."""
    simulation = build(load_scenario(name, SCENARIOS[name]))
    simulation.run()
    assert simulation.scheduler.num_preemptions > 0
