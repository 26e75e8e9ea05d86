"""The core against recorded decisions of released vLLM versions, field by field and in the order of their keys.

`conformance/cases` holds the scripted cases and the decisions of 0.24 and 0.32 on them; `conformance/readings` small
cases on which two readings of the rules part, with the decisions of all five versions; `conformance/live` cases that
were recorded for a question of ours (blocks of 2, a prompt of 3, K = 2, every draft rejected), of all five too. A
golden file here is another program's decision, never our own.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sim.conform.compare import first_difference
from sim.policies.presets import PRESETS, VLLM_PRESETS
from sim.replay import replay_case

FOLDER = Path(__file__).parent / "conformance"
SUFFIX = ".case.json.gz"
CASES = sorted((FOLDER / "cases").glob(f"*{SUFFIX}"))
READINGS = sorted((FOLDER / "readings").glob(f"*{SUFFIX}"))
LIVE = sorted((FOLDER / "live").glob(f"*{SUFFIX}"))


def text_of(file: Path) -> bytes:
    return gzip.decompress(file.read_bytes())


def read(file: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(text_of(file))
    return value


def check(case: Path, preset: str) -> None:
    recorded = read(case.with_name(f"{case.name.removesuffix(SUFFIX)}.{preset}.trace.json.gz"))
    replayed = replay_case(read(case), PRESETS[preset])
    # As text, since the order of keys is that of the batch, of the running list and of the waiting queue.
    if json.dumps(replayed) != json.dumps(recorded):
        pytest.fail(f"{case.name}, {preset}: {first_difference(recorded, replayed) or 'the order of keys'}")


@pytest.mark.parametrize("preset", ["vllm-0.32", "vllm-0.24"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.removesuffix(SUFFIX))
def test_a_recorded_case(case: Path, preset: str) -> None:
    check(case, preset)


@pytest.mark.parametrize("preset", VLLM_PRESETS)
@pytest.mark.parametrize("case", READINGS, ids=lambda case: case.name.removesuffix(SUFFIX))
def test_a_reading(case: Path, preset: str) -> None:
    check(case, preset)


@pytest.mark.parametrize("preset", VLLM_PRESETS)
@pytest.mark.parametrize("case", LIVE, ids=lambda case: case.name.removesuffix(SUFFIX))
def test_a_case_of_our_own(case: Path, preset: str) -> None:
    check(case, preset)


def test_vllm_keeps_the_block_that_only_held_drafts() -> None:
    """Blocks of 2, a prompt of 3, n-gram with K = 2, sync. The prefill holds 2 blocks; the frame behind it reaches slot
    6 and takes a third. Both drafts are rejected: 4 slots are computed, which 2 blocks hold, and vLLM keeps all 3."""
    (case,) = (case for case in LIVE if "rejected-small-blocks-ngram" in case.name)
    recorded = read(case.with_name(f"{case.name.removesuffix(SUFFIX)}.vllm-0.32.trace.json.gz"))
    first, second = (row["after_update"]["r0"] for row in recorded["turns"][:2])
    assert first == [3, 4, 0, [1, 2]]
    assert second == [4, 5, 0, [1, 2, 3]]


def test_all_29_cases_are_there() -> None:
    assert [int(case.name[:2]) for case in CASES] == list(range(1, 30))
    assert READINGS
    assert len(LIVE) == 4


def test_they_are_the_cases_beside_the_repository(shared_conformance: Path) -> None:
    """Where the folder that they came from is there, nothing has been changed in them."""
    for case in CASES:
        for file in (case, *case.parent.glob(f"{case.name.removesuffix(SUFFIX)}.vllm-*.trace.json.gz")):
            assert text_of(file) == text_of(shared_conformance / "cases" / file.name), file.name


def test_a_trace_that_differs_is_found() -> None:
    """The comparison can fail: 0.24 does not decide case 14 (resets) as 0.32 did."""
    case = next(case for case in CASES if case.name.startswith("14-"))
    recorded = read(case.with_name("14-reset-prefix-cache.vllm-0.32.trace.json.gz"))
    assert first_difference(recorded, replay_case(read(case), PRESETS["vllm-0.24"])) is not None
