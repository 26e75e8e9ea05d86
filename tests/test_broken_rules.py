"""Rules broken on purpose, one a time: the comparison finds each, on a recorded case or within 200 random ones.

The random cases stand here against the unbroken simulator, which gives on them what a live vLLM 0.32 gives
(docs say on how many that was checked).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sim.conform.cases import seeded_case
from sim.conform.compare import first_difference
from sim.core.crash import EngineCrash
from sim.policies.presets import PRESETS
from sim.replay import replay_case
from tests.broken import BROKEN, applied

FOLDER = Path(__file__).parent / "conformance" / "cases"
PRESET = "vllm-0.32"
MAX_TURNS = 400
NUM_RANDOM = 200


def load(path: Path) -> Any:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


@cache
def recorded() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Recorded cases and traces, the largest case last."""
    pairs = []
    for path in sorted(FOLDER.glob("*.case.json.gz")):
        case = load(path)
        pairs.append((case, load(path.with_name(f"{case['name']}.{PRESET}.trace.json.gz"))))
    return sorted(pairs, key=lambda pair: len(pair[0]["requests"]))


@cache
def drawn() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    pairs = []
    for index in range(NUM_RANDOM):
        case = seeded_case(0, index)
        try:
            pairs.append((case, replay_case(case, PRESETS[PRESET], MAX_TURNS)))
        except EngineCrash:
            continue
    return pairs


def all_pairs() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    yield from drawn()
    yield from recorded()


def differs(case: dict[str, Any], trace: dict[str, Any]) -> bool:
    try:
        replayed = replay_case(case, PRESETS[PRESET], max(MAX_TURNS, len(trace["turns"])))
    except Exception:
        return True  # a broken rule may break the simulator's own bounds
    return first_difference(trace, replayed) is not None


def test_there_are_twenty() -> None:
    assert len(BROKEN) >= 20


@pytest.mark.plain_core
@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_broken_rule_is_found(name: str) -> None:
    pairs = list(all_pairs())
    with applied(BROKEN[name]):
        assert any(differs(case, trace) for case, trace in pairs), BROKEN[name].says
