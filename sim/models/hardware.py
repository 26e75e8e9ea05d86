"""Cards as numbers: peaks, bandwidth, memory, each from a datasheet.

Knows datasheets. Must not know models, steps or policies, nor how much of the peaks the kernels reach: that is a
`Calibration` (`sim.models.calibration`), read from `scenarios/calibrations/`.

Peaks are the datasheets' dense figures. `memory_bytes` is what CUDA reports to a process (torch's "total capacity"),
which is less than the datasheet's: it is what vLLM multiplies by `gpu_memory_utilization`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sim.models.names import UnknownName, plain

__all__ = ["Hardware", "UnknownName", "custom_hardware", "hardware", "hardware_names"]

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Hardware:
    """One card.

    `bf16_flops`, `fp8_flops` in operations a second, dense (None: no such unit; fp8 weights are then computed in
    bf16); `bandwidth` in bytes a second; `memory_bytes` as CUDA reports it. `flash_attention` is the version that vLLM
    takes on it: 3 reads the KV of a request with several query tokens split over the card, 2 does not. `calibration`
    names the file of its own kernels' figures; None: there is none, and the H100's are put on its datasheet, which
    nobody has checked. `pcie`: no NVLink.
    """

    name: str
    bf16_flops: float
    fp8_flops: float | None
    bandwidth: float
    memory_bytes: int
    num_sms: int
    flash_attention: int
    calibration: str | None
    pcie: bool = False

    @property
    def calibrated(self) -> bool:
        """Whether its own kernels were measured."""
        return self.calibration is not None


# NVIDIA H100 SXM5 datasheet: 989.4 TFLOP/s bf16, 1,978.9 fp8 (dense), 3.35 TB/s, 80 GB; 132 SMs (Hopper white paper).
_H100 = Hardware(
    name="H100-SXM",
    bf16_flops=989.4e12,
    fp8_flops=1978.9e12,
    bandwidth=3.35e12,
    memory_bytes=int(79.19 * _GIB),
    num_sms=132,
    flash_attention=3,
    calibration="h100",
)

# NVIDIA H200 SXM datasheet: arithmetic as H100, 4.8 TB/s, 141 GB.
_H200 = replace(_H100, name="H200", bandwidth=4.8e12, memory_bytes=int(139.80 * _GIB), calibration="h200")

# NVIDIA A100 80GB SXM datasheet: 312 TFLOP/s bf16, no fp8, 2,039 GB/s, 80 GB; 108 SMs (Ampere white paper).
_A100 = Hardware(
    name="A100-SXM-80GB",
    bf16_flops=312e12,
    fp8_flops=None,
    bandwidth=2.039e12,
    memory_bytes=int(79.15 * _GIB),
    num_sms=108,
    flash_attention=2,
    calibration="a100",
)

# NVIDIA DGX B200 datasheet, an eighth of it: 2.25 PFLOP/s bf16, 4.5 fp8 (dense), 8 TB/s, 180 GB; 148 SMs.
_B200 = replace(
    _H200,
    name="B200",
    bf16_flops=2250e12,
    fp8_flops=4500e12,
    bandwidth=8.0e12,
    memory_bytes=int(178.35 * _GIB),
    num_sms=148,
    calibration="b200",
)


def custom_hardware(
    name: str,
    *,
    bf16_tflops: float,
    bandwidth_gbs: float,
    memory_gib: float,
    num_sms: int,
    fp8_tflops: float | None = None,
) -> Hardware:
    """A card known by its datasheet only, without a calibration.

    `bf16_tflops`, `fp8_tflops`: dense, in 10^12 operations a second; `bandwidth_gbs`: 10^9 bytes a second;
    `memory_gib`: what CUDA reports, in GiB. FlashAttention 2 (no split in a verification) is assumed, and NVLink.
    Raises ValueError for a number that is not positive and finite.
    """
    numbers = {"bf16_tflops": bf16_tflops, "bandwidth_gbs": bandwidth_gbs, "memory_gib": memory_gib, "num_sms": num_sms}
    if fp8_tflops is not None:
        numbers["fp8_tflops"] = fp8_tflops
    for key, value in numbers.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{key}: must be a positive number, got {value!r}")
    return Hardware(
        name=name,
        bf16_flops=bf16_tflops * 1e12,
        fp8_flops=None if fp8_tflops is None else fp8_tflops * 1e12,
        bandwidth=bandwidth_gbs * 1e9,
        memory_bytes=int(memory_gib * _GIB),
        num_sms=num_sms,
        flash_attention=2,
        calibration=None,
    )


# NVIDIA Ada GPU architecture white paper: 165.2 TFLOP/s bf16 with fp32 accumulation, 330.3 fp8, 1,008 GB/s, 128 SMs.
_RTX_4090 = replace(
    custom_hardware(
        "RTX-4090",
        bf16_tflops=165.2,
        fp8_tflops=330.3,
        bandwidth_gbs=1008,
        memory_gib=25_250_627_584 / _GIB,  # as a real vLLM 0.19 run reported it (LLMServingSim)
        num_sms=128,
    ),
    calibration="rtx-4090",
    pcie=True,
)
# NVIDIA L40S datasheet: 362.05 TFLOP/s bf16, 733 fp8 (dense), 864 GB/s, 48 GB, 142 RT cores (one an SM).
_L40S = replace(
    custom_hardware("L40S", bf16_tflops=362.05, fp8_tflops=733, bandwidth_gbs=864, memory_gib=44.39, num_sms=142),
    pcie=True,
)

_CARDS: tuple[tuple[Hardware, tuple[str, ...]], ...] = (
    (_H100, ("h100", "h100-sxm5", "h100-80gb", "NVIDIA H100 80GB HBM3", "h100_sxm")),
    (_H200, ("h200-sxm", "NVIDIA H200", "h200_sxm")),
    (_A100, ("a100", "a100-sxm", "a100-80gb", "a100-sxm4-80gb", "NVIDIA A100-SXM4-80GB", "a100_sxm")),
    (_B200, ("b200-sxm", "NVIDIA B200", "b200_sxm")),
    (_RTX_4090, ("rtx4090", "4090", "NVIDIA GeForce RTX 4090")),
    (_L40S, ("NVIDIA L40S",)),
)
_BY_NAME = {plain(name): card for card, aliases in _CARDS for name in (card.name, *aliases)}


def hardware(name: str) -> Hardware:
    """The card of that name; case, blanks, `-` and `_` make no difference. Raises UnknownName."""
    card = _BY_NAME.get(plain(name))
    if card is None:
        raise UnknownName("hardware", name, hardware_names())
    return card


def hardware_names() -> tuple[str, ...]:
    """The names of all cards, without their aliases."""
    return tuple(card.name for card, _ in _CARDS)
