"""Blocks by hand, against a real run, and vLLM's batch limits."""

import dataclasses

import pytest

from sim.models.hardware import custom_hardware, hardware
from sim.models.memory import BatchLimits, NoRoomForKV, batch_limits, plan_memory, reserve_bytes
from sim.models.shapes import drafter_shape, load_shape

GIB = 2**30


def test_blocks_by_hand() -> None:
    # 24 GiB * 0.5 = 12,884,901,888; Llama-3.2-1B weighs 2,471,628,800; reserve 1 GiB = 1,073,741,824; left
    # 9,339,531,264. A block of 16 tokens takes 16 * 2 * 16 layers * 8 heads * 64 * 2 bytes = 524,288: 17,813.7 blocks.
    card = custom_hardware("mine", bf16_tflops=1, bandwidth_gbs=1, memory_gib=24, num_sms=1)
    shape = load_shape("llama-3.2-1b")
    limits = BatchLimits(256, 2048)
    plan = plan_memory(card, shape, limits=limits, gpu_memory_utilization=0.5, reserve=GIB)
    assert (plan.block_bytes, plan.kv_bytes, plan.num_gpu_blocks) == (524_288, 9_339_531_264, 17_813)


def test_a_drafter_takes_weights_and_a_share_of_every_block() -> None:
    shape, limits = load_shape("llama-3.1-8b"), BatchLimits(256, 2048)
    alone = plan_memory(hardware("h100"), shape, limits=limits)
    drafter = drafter_shape(shape, "eagle3")
    beside = plan_memory(hardware("h100"), shape, limits=limits, drafter=drafter)
    # One layer beside 32.
    assert beside.block_bytes * 32 == alone.block_bytes * 33
    assert beside.drafter_block_bytes == beside.block_bytes // 33
    assert alone.kv_bytes - beside.kv_bytes == drafter.weight_bytes()


def test_a_real_run() -> None:
    # LLMServingSim's record of vLLM 0.19: Llama-3.1-8B, RTX 4090, utilization 0.9, 256 requests, 2,048 tokens:
    # num_gpu_blocks 2,588. The reserve is our estimate; 2 percent of the pool is the tolerance.
    plan = plan_memory(
        hardware("RTX 4090"), load_shape("llama-3.1-8b"), limits=BatchLimits(256, 2048), gpu_memory_utilization=0.9
    )
    assert plan.num_gpu_blocks == pytest.approx(2588, rel=0.02)


def test_ranks_split_weights_and_blocks() -> None:
    shape, limits = load_shape("llama-3.1-70b"), BatchLimits(256, 2048)
    with pytest.raises(NoRoomForKV, match=r"weights 141,107,412,992"):
        plan_memory(hardware("h100"), shape, limits=limits)
    plan = plan_memory(hardware("h100"), shape, limits=limits, tp=4)
    assert plan.block_bytes == 16 * 327_680 // 4
    # All but the norms (161 of 8,192 numbers) is split.
    assert plan.weight_bytes == pytest.approx(141_107_412_992 / 4, rel=1e-4)


def test_more_room_never_gives_fewer_blocks() -> None:
    shape, limits = load_shape("llama-3.1-8b"), BatchLimits(256, 2048)
    blocks = [
        plan_memory(hardware("h100"), shape, limits=limits, gpu_memory_utilization=u / 100).num_gpu_blocks
        for u in range(30, 101, 10)
    ]
    assert blocks == sorted(blocks)
    fewer = plan_memory(hardware("h100"), shape, limits=BatchLimits(1024, 8192)).num_gpu_blocks
    assert fewer < plan_memory(hardware("h100"), shape, limits=limits).num_gpu_blocks
    assert reserve_bytes(shape, 1, BatchLimits(1024, 8192)) > reserve_bytes(shape, 1, limits)


def test_utilization_out_of_range() -> None:
    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        plan_memory(hardware("h100"), load_shape("llama-3.1-8b"), limits=BatchLimits(1, 1), gpu_memory_utilization=1.01)


@pytest.mark.parametrize(
    ("card", "seqs", "tokens"),
    [("h100", 1024, 8192), ("h200", 1024, 8192), ("a100", 256, 2048), ("b200", 1024, 16_384), ("l40s", 256, 2048)],
)
def test_batch_limits_of_the_api_server(card: str, seqs: int, tokens: int) -> None:
    # vLLM 0.32, engine/arg_utils.py, get_batch_defaults.
    assert batch_limits(hardware(card), 131_072) == (seqs, tokens)


def test_batch_limits_follow_what_was_given() -> None:
    h100 = hardware("h100")
    assert batch_limits(h100, 131_072, max_num_batched_tokens=512) == (512, 512)
    assert batch_limits(h100, 1000, max_num_seqs=4) == (4, 4000)
    assert batch_limits(h100, 1000, max_num_seqs=64, max_num_batched_tokens=32) == (64, 32)
    at_70 = dataclasses.replace(h100, memory_bytes=70 * GIB)
    below = dataclasses.replace(h100, memory_bytes=70 * GIB - 1)
    assert (batch_limits(at_70, 10_000).max_num_seqs, batch_limits(below, 10_000).max_num_seqs) == (1024, 256)
