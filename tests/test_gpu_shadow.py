"""Shadow execution on the clock: whole simulations written slot by slot, and every read checked."""

from __future__ import annotations

from contextlib import suppress

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `gpu`: torch is not installed")

from gpu_backend.shadow import Shadow  # noqa: E402
from sim.core.block_hashes import BlockHashes  # noqa: E402
from sim.core.request import Request  # noqa: E402
from sim.records import TAKEN, Batch, Interruption  # noqa: E402
from tests.by_hand import a_frame  # noqa: E402
from tests.gpu_faults import FAULTS, NAMES  # noqa: E402
from tests.gpu_simulations import random_simulation  # noqa: E402

torch.set_num_threads(1)

SOUND = ("vllm-0.32", "vllm-0.30", "vllm-0.28")


@pytest.mark.parametrize("part", range(4))
def test_200_random_simulations_without_a_finding(part: int) -> None:
    """Async and sync, with preemptions, hits of other requests' blocks, aborts and resets."""
    preemptions = hits = reused = 0
    for seed in range(50 * part, 50 * part + 50):
        engine, shadow = random_simulation(seed, SOUND)
        engine.run()
        assert engine.stopped_by is None, seed
        assert shadow.findings == [], seed
        assert shadow.num_steps == engine.num_steps
        preemptions += engine.scheduler.num_preemptions
        hits += shadow.num_hit_reads
        reused += shadow.num_reused_in_flight
    assert min(preemptions, hits, reused) >= 100


def test_vllm_0_24_with_resets_may_find() -> None:
    """Its rollback of discarded frames moves the scheduler behind the device, so block tables come out too short."""
    findings = []
    for seed in range(25):
        engine, shadow = random_simulation(seed, ["vllm-0.24"], resets=True)
        engine.run()
        findings += shadow.findings
    assert any("its block table holds" in finding for finding in findings)


@pytest.mark.parametrize("fault", NAMES)
def test_planted_faults_are_found_in_simulations(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, _ = FAULTS[fault]
    plant(monkeypatch)
    found = 0
    for seed in range(16):
        engine, shadow = random_simulation(seed, SOUND, resets="reset" in fault)
        # Where the core itself falls over what is no longer there, what was found until then counts.
        with suppress(ValueError):
            engine.run()
        found += bool(shadow.findings)
    assert found >= 2


# By hand: one request of block size 2, whose frames are written out here.


class _NoContent:
    def extend_hashes(self, hashes: BlockHashes, count: int) -> None:
        while len(hashes) < count:
            hashes.append(hash((hashes[-1] if hashes else 0, len(hashes))))


def _request(index: int, table: list[int], num_tokens: int) -> Request:
    request = Request(f"r{index}", index, num_tokens, 100, _NoContent())
    request.block_table = table
    return request


def _step(
    shadow: Shadow,
    number: int,
    frames: list[tuple[Request, int, int, int, int]],
    num_running: int,
    taken: list[int],
) -> None:
    """Frames as (request, tokens, drafts, computed, accepted), scheduled and run."""
    batch = Batch(number, 0, 1000)
    batch.num_running_frames = num_running
    for request, num_tokens, num_drafts, computed, _ in frames:
        batch.frames.append(a_frame(request, num_tokens, num_drafts, computed))
        batch.total_tokens += num_tokens
    if taken:
        batch.block_operations.append((TAKEN, frames[0][0].index, taken))
    shadow.scheduled(0, batch)
    batch.settle([accepted + 1 for *_, accepted in frames])
    shadow.step_started(0, batch, None, None)
    shadow.step_ended(0, batch)


def test_a_rejected_draft_is_written_over_by_hand() -> None:
    """Prefill of 3 into blocks 4 and 5, then a token and 2 drafts, 1 of them accepted: positions 3, 4 and garbage 5.

    The next frame begins at 5 and finds everything in front of it right.
    """
    shadow = Shadow(8, 2)
    request = _request(0, [4, 5], 3)
    _step(shadow, 0, [(request, 3, 0, 0, 0)], 0, [4, 5])
    request.block_table.append(6)
    _step(shadow, 1, [(request, 3, 2, 3, 1)], 1, [6])
    keys, steps = shadow.cache.layers[0].view(2, -1)
    assert keys[8:14].tolist() == [0, 1, 2, 3, 4, -2 - 5]
    assert steps[8:14].tolist() == [0, 0, 0, 1, 1, 1]
    _step(shadow, 2, [(request, 1, 0, 5, 0)], 1, [])
    assert keys[13] == 5
    assert shadow.findings == []
    assert (shadow.num_writes, shadow.num_reads) == (3 + 3 + 1, 3 + 6 + 6)


def test_a_slot_that_was_given_away_is_found_by_hand() -> None:
    shadow = Shadow(8, 2)
    one, other = _request(0, [4, 5], 3), _request(1, [5], 2)
    _step(shadow, 0, [(one, 3, 0, 0, 0)], 0, [4, 5])
    _step(shadow, 1, [(other, 2, 0, 0, 0)], 0, [5])
    _step(shadow, 2, [(one, 1, 0, 3, 0)], 1, [])
    assert shadow.findings == [
        "step 2: request r0 reads position 2 of 4 in block 5, slot 0, and finds position 0 of request r1, written in "
        "step 1 (1 slots are wrong)"
    ]


def test_after_a_reset_nothing_is_right_by_hand() -> None:
    shadow = Shadow(8, 2)
    request, follower = _request(0, [4], 2), _request(1, [4, 5], 4)
    _step(shadow, 0, [(request, 2, 0, 0, 0)], 0, [4])
    shadow.interrupted(0, Interruption("reset_prefix_cache", [], [], False))
    _step(shadow, 1, [(follower, 2, 0, 2, 0)], 0, [5])
    assert shadow.findings == []  # Block 4 was hit, and its content is the same.
    assert shadow.num_hit_reads == 2
    shadow.interrupted(0, Interruption("reset_prefix_cache", [], [], True))
    third = _request(2, [4, 6], 4)
    _step(shadow, 2, [(third, 2, 0, 2, 0)], 0, [6])
    assert len(shadow.findings) == 1
    assert "request r2 reads position 0 of 4 in block 4, slot 0, and finds nothing" in shadow.findings[0]
    assert "(2 slots are wrong)" in shadow.findings[0]


def test_two_writers_of_one_slot_are_found_by_hand() -> None:
    shadow = Shadow(8, 2)
    one, other = _request(0, [4], 1), _request(1, [4], 1)
    _step(shadow, 0, [(one, 1, 0, 0, 0), (other, 1, 0, 0, 0)], 0, [4])
    assert shadow.findings[0].startswith("step 0 writes slot 8 twice: position 0 of request r0 and position 0 of ")


def test_findings_are_counted_beyond_those_that_are_kept() -> None:
    shadow = Shadow(8, 2, max_findings=1)
    request = _request(0, [4], 1)
    for number in range(3):
        _step(shadow, number, [(request, 5, 0, 0, 0)], 0, [])
    assert (len(shadow.findings), shadow.num_findings) == (1, 3)
