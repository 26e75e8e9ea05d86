"""Cards: names, datasheet numbers, refusals."""

import pickle

import pytest

from sim.models.hardware import UnknownName, custom_hardware, hardware, hardware_names


@pytest.mark.parametrize("name", ["h100", "H100", "h100-sxm", "H100_SXM", "NVIDIA H100 80GB HBM3"])
def test_a_card_has_several_spellings(name: str) -> None:
    assert hardware(name).name == "H100-SXM"


def test_datasheets() -> None:
    h100, h200, a100, b200 = (hardware(name) for name in ("h100", "h200", "a100", "b200"))
    assert (h100.bf16_flops, h100.fp8_flops, h100.bandwidth, h100.num_sms) == (989.4e12, 1978.9e12, 3.35e12, 132)
    assert (h200.bf16_flops, h200.bandwidth, h200.num_sms) == (989.4e12, 4.8e12, 132)
    assert (a100.bf16_flops, a100.fp8_flops, a100.bandwidth, a100.num_sms) == (312e12, None, 2.039e12, 108)
    assert (b200.bf16_flops, b200.bandwidth, b200.num_sms) == (2250e12, 8e12, 148)
    assert all(card.calibrated for card in (h100, h200, a100, b200))


def test_unknown_card_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean H200") as caught:
        hardware("h20O")
    assert caught.value.known == sorted(hardware_names())
    assert isinstance(caught.value, KeyError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_card_of_ones_own_is_not_calibrated() -> None:
    card = custom_hardware("mine", bf16_tflops=100, bandwidth_gbs=1000, memory_gib=24, num_sms=100)
    assert not card.calibrated
    assert (card.bf16_flops, card.bandwidth, card.memory_bytes) == (100e12, 1e12, 24 * 2**30)
    assert hardware("rtx 4090").calibrated
    assert not hardware("l40s").calibrated


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf")])
def test_a_card_needs_positive_numbers(bad: float) -> None:
    with pytest.raises(ValueError, match="bandwidth_gbs"):
        custom_hardware("mine", bf16_tflops=100, bandwidth_gbs=bad, memory_gib=24, num_sms=100)
