"""What garbage does, by hand; laws that tie it to the ledger; and the closed forms of rejection and of dropped hits."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sim.build import build
from sim.models.acceptance import Replay
from sim.models.memory import drafter_outside_bytes
from sim.models.shapes import drafter_shape, load_shape
from sim.observers.garbage import Garbage
from sim.policies.axes import rules_with
from sim.policies.presets import PRESETS
from sim.run import simulate
from sim.scenario import load_scenario
from tests.by_hand import Simulated, Turns, small_settings, spec


def followed(specs: Any, settings: Any, **arguments: Any) -> tuple[Simulated, Garbage]:
    simulated = Simulated(specs, settings, **arguments)
    garbage = Garbage(simulated.ledger, settings.block_size)
    simulated.engine.add_observer(garbage)
    return simulated.run(), garbage


def test_blocks_of_16() -> None:
    """K = 5, prompt 1018, 5 outputs; a step 10 ms, a schedule 1, an update 2. Accepted 2, then 0.

    | ms | what | garbage in memory |
    | 24 | step 1 wrote 1018 to 1023, 1021 right | 1021 to 1023: 3 in block 63 |
    | 37 | step 2 wrote 1021 to 1026, 1022 right | 3 rows over garbage of 13 ms; 1022 to 1026: 2 and 3 in 63 and 64 |
    | 39 | ended | 5 freed after 2 ms |

    Step 2's rollback goes from block 64 into block 63, step 1's stays in 63. Block 64 is nothing but garbage from 37 to
    39, begins with a placeholder (the drafts are 1022 to 1026) from 27 to 39, with lookahead (1024 to 1028) from 14 to
    26, and lies behind all that is needed from 26 to 27.
    """
    settings = small_settings("eagle3", 5, num_gpu_blocks=80, block_size=16, max_num_batched_tokens=2000)
    _, garbage = followed(
        [spec(0, 1018, 5)], settings, acceptance=Replay([[1, 3, 1, 1, 1]]), schedule_ms=1, update_ms=2
    )
    found = garbage.figures()
    assert found["rejected_tokens"] == [0, 0, 0, 1, 0, 1]
    assert (found["num_rollbacks"], found["num_rollbacks_across_blocks"]) == (2, 1)
    assert (found["rows_written_twice"], found["slots_freed"]) == (3, 5)
    assert found["overwritten_after_ms"]["mean"] == 13
    assert found["overwritten_after_ms"]["bins"] == [[8, 16, 3]]
    assert found["freed_after_ms"]["mean"] == 2
    assert found["freed_after_ms"]["bins"] == [[2, 4, 5]]
    assert found["slots_per_block"] == [0, 0, 1, 2] + [0] * 13
    assert found["block_seconds"] == {"placeholder": 0.012, "garbage": 0.002, "lookahead": 0.012, "overhang": 0.001}
    placeholders, slots, blocks = garbage.room(0)
    assert placeholders == pytest.approx((5 * 12 + 5 * 12) / 1e3)
    assert slots == pytest.approx((3 * 13 + 5 * 2) / 1e3)
    assert blocks == pytest.approx((64 * 13 + 65 * 25) / 1e3)


def test_blocks_of_2() -> None:
    """K = 5, prompt 3, 7 outputs, no host time: steps end at 10, 20 and 30 ms. Accepted 2, then 2.

    At 20 slots 3 to 8 are written and 3 to 5 right: 6, 7 fill block 3, and 8 half of block 4; the rollback goes from
    block 4 back into block 2. At 30 slots 6 to 11 are written, three of them over garbage, and 6 to 8 are right: 9 half
    of block 4, 10 and 11 block 5; the rollback crosses into block 4. Blocks 3 and 4 are nothing but garbage for 10 ms.
    """
    settings = small_settings("ngram", 5, block_size=2)
    _, garbage = followed([spec(0, 3, 7)], settings, acceptance=Replay([[3] * 7]))
    found = garbage.figures()
    assert found["rejected_tokens"] == [0, 0, 0, 2]
    assert found["num_rollbacks_across_blocks"] == 2
    assert (found["rows_written_twice"], found["slots_freed"]) == (3, 3)
    assert found["overwritten_after_ms"]["median"] == pytest.approx(10, rel=1e-3)
    assert found["freed_after_ms"]["bins"] == [[0, 1, 3]]
    assert found["slots_per_block"] == [0, 2, 2]
    assert found["block_seconds"]["garbage"] == pytest.approx(0.020)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("undo", ["overwrite", "rewind", "free_rejected"])
def test_what_is_rejected_is_overwritten_or_freed(undo: str, is_async: bool) -> None:
    """Every rejected row becomes garbage, and every garbage slot ends one way; integrals are the ledger's."""
    settings = small_settings("eagle3", 5, num_gpu_blocks=31, async_scheduling=is_async, max_num_seqs=6)
    runs = [[1 + (7 * request + 3 * at) % 6 for at in range(40)] for request in range(8)]
    simulated, garbage = followed(
        [spec(number, 9 + number, 40, 7_000_000 * number) for number in range(8)],
        settings,
        rules=rules_with(PRESETS["vllm-0.32"], undo=undo),
        acceptance=Replay(runs),
        schedule_ms=1,
        update_ms=2,
    )
    found = garbage.figures()
    assert simulated.scheduler.num_preemptions > 0
    rejected = sum(number * frames for number, frames in enumerate(found["rejected_tokens"]))
    assert found["rows_written_twice"] + found["slots_freed"] == rejected > 0
    rooms = [garbage.room(number) for number in range(8)]
    ledger = simulated.ledger
    assert sum(room[0] for room in rooms) == pytest.approx(ledger.slot_seconds()["placeholder"])
    assert sum(room[1] for room in rooms) == pytest.approx(ledger.content_slot_seconds()["garbage"])
    assert sum(found["block_seconds"].values()) < sum(room[2] for room in rooms)


LOADED = """
engine:
  num_gpu_blocks: 2000
  max_num_seqs: 16
  async_scheduling: false
  speculative_config: {method: eagle3, num_speculative_tokens: 5}
acceptance: {model: geometric, rate: 0.8}
timing: {fixed_step_ms: 10, schedule_ms: 0, update_ms: 0}
output: {distributions: true, pictures: false}
workload:
  synthetic:
    num_requests: 60
    arrivals: {process: all_at_once}
    prompt_tokens: {distribution: uniform, min: 20, max: 100}
    output_tokens: {distribution: fixed, tokens: 200}
"""


def test_closed_forms_of_rejection(tmp_path: Any) -> None:
    """K = 5, i.i.d. 0.8: E = (1 - 0.8^6) / 0.2 = 3.69 tokens a step and K + 1 - E = 2.31 rows rejected.

    Synchronous and without host time, garbage lives exactly until the next step of its request has ended: so memory
    holds that much of every decoding request, a request's last step left out.
    """
    file = tmp_path / "loaded.yaml"
    file.write_text(LOADED)
    summary = simulate(file, out=tmp_path).summary
    found = summary["garbage"]
    frames = found["rejected_tokens"]
    count = sum(frames)
    expected = 6 - (1 - 0.8**6) / (1 - 0.8)
    assert expected == pytest.approx(2.31, abs=0.005)
    mean = sum(number * seen for number, seen in enumerate(frames)) / count
    spread = math.sqrt(sum(seen * (number - mean) ** 2 for number, seen in enumerate(frames)) / count)
    assert count > 3000
    assert abs(mean - expected) < 4 * spread / math.sqrt(count)
    assert found["overwritten_after_ms"]["mean"] == 10
    assert found["freed_after_ms"]["mean"] == 0
    slot_seconds = summary["content_slot_seconds"]["garbage"]
    assert slot_seconds == pytest.approx(found["rows_written_twice"] * 0.010)
    decoding = (count - 60) * 0.010  # Request-seconds between a verification's end and the next one's.
    assert slot_seconds / decoding == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("method", ["eagle3", "none"])
def test_hits_under_the_dropped_block(size: int, method: str) -> None:
    """A prompt of L tokens comes again: max(0, (L - 1) // U - 1) * U are hit with EAGLE, (L - 1) // U * U without."""
    for length in (1, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100):
        turns = Turns(method=method, k=2 if method == "eagle3" else 0, block_size=size)
        prompt = list(range(length))
        turns.add(prompt, max_tokens=1)
        while turns.scheduler.requests:
            turns.step()
        turns.add(prompt, max_tokens=1)
        turns.schedule()
        full = (length - 1) // size
        assert turns.batch.hits == (max(full - 1, 0) if method == "eagle3" else full) * size


def test_what_a_drafter_keeps_outside() -> None:
    """Llama-3.1-8B: hidden states of 4,096 in 16 bits; one of its layers has 4,096 bytes of keys and values a token."""
    target = load_shape("llama-3.1-8b")
    for method, k, outside, expected in (
        ("eagle3", 3, False, 4 * 3 * 4096 * 2),
        ("eagle", 3, False, 4 * 4096 * 2),
        ("mtp", 1, False, 2 * 4096 * 2),
        ("eagle", 5, True, 6 * 4096 * 2 + 5 * 4096),
        ("ngram", 5, False, 0),
    ):
        drafter = drafter_shape(target, method, None)
        assert drafter_outside_bytes(target, drafter, k, kv_outside=outside) == expected
    assert drafter_outside_bytes(target, None, 0, kv_outside=False) == 0


def test_the_summary_has_bytes(tmp_path: Any) -> None:
    """A block of 16 of Llama-3.1-8B: 16 * 131,072 bytes, and 16 * 4,096 more with an EAGLE layer in it."""
    file = tmp_path / "loaded.yaml"
    file.write_text(LOADED)
    scenario = load_scenario(file, ["limits.max_steps=20", "output.distributions=false"])
    assert build(scenario).block_bytes == 16 * (131_072 + 4_096)
    result = simulate(scenario, out=tmp_path)
    assert result.summary["garbage"] is None
    assert result.summary["drafter_pool"] is None
    assert result.summary["drafter_outside_bytes_per_request"] == 6 * 3 * 4096 * 2
    for name, seconds in result.summary["slot_seconds"].items():
        assert result.summary["byte_seconds"][name] == pytest.approx(seconds * 135_168)
    assert result.requests()["garbage_slot_s"].isna().all()
    own = simulate(
        load_scenario(file, ["limits.max_steps=20", "engine.policies.drafter_kv=own_pool_kept"]), out=tmp_path
    )
    assert own.summary["drafter_pool"]["block_bytes"] == 16 * 4_096
    assert own.summary["block_bytes"] == 16 * 131_072
    assert (own.requests()["held_block_s"] >= 0).all()
