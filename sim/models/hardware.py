"""Cards as numbers: peaks, memory, and how much of the peaks the kernels reach.

Knows datasheets and fitted efficiencies, each with its source. Must not know models, steps or policies.

Peaks are the datasheets' dense figures. `memory_bytes` is what CUDA reports to a process (torch's "total capacity"),
which is less than the datasheet's: it is what vLLM multiplies by `gpu_memory_utilization`. Efficiencies are fits to
public kernel measurements (aiconfigurator: H100, H200, A100, B200); their held-out errors, mean absolute: linear
layers 6 to 8 percent, decode attention 9 to 11, prefill attention 6 to 7, all-reduce 7 to 18, fp8 linear layers 17
(this analytic form is poor there). A card with `calibrated` False has the H100's efficiencies put on its own
datasheet, which nobody has checked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sim.models.names import UnknownName, plain

__all__ = [
    "AllReduce",
    "DecodeEfficiency",
    "Hardware",
    "LinearEfficiency",
    "PrefillEfficiency",
    "UnknownName",
    "custom_hardware",
    "hardware",
    "hardware_names",
]

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class LinearEfficiency:
    """One linear layer takes ((F / compute P)^p + (B / memory W)^p)^(1/p) + t0_us."""

    compute: float
    memory: float
    t0_us: float
    p: float


@dataclass(frozen=True, slots=True)
class DecodeEfficiency:
    """Decode attention of one layer takes t0_us + KV bytes / (memory W)."""

    memory: float
    t0_us: float


@dataclass(frozen=True, slots=True)
class PrefillEfficiency:
    """Prefill attention of one layer takes F / (compute P) + B / (memory W) + t0_us."""

    compute: float
    memory: float
    t0_us: float


@dataclass(frozen=True, slots=True)
class AllReduce:
    """One all-reduce over `tp` cards takes t0_us + bytes / bandwidth (bytes a second)."""

    tp: int
    t0_us: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Hardware:
    """One card, and the link to its neighbours.

    `bf16_flops`, `fp8_flops` in operations a second, dense (None: no such unit; fp8 weights are then computed in
    bf16); `bandwidth` in bytes a second; `memory_bytes` as CUDA reports it. `linear_fp8` are the efficiencies of fp8
    linear layers against the fp8 peak. `fp8_kv_factor` is the time of decode attention on an fp8 cache over its time
    on a bf16 cache of as many tokens. `flash_attention` is 3 where a request with several query tokens reads its KV
    split over the card, 2 where it does not. `notes` say what was taken from elsewhere or is not validated.
    """

    name: str
    bf16_flops: float
    fp8_flops: float | None
    bandwidth: float
    memory_bytes: int
    num_sms: int
    calibrated: bool
    linear: LinearEfficiency
    linear_fp8: LinearEfficiency
    decode: DecodeEfficiency
    prefill: PrefillEfficiency
    allreduce: tuple[AllReduce, ...]
    fp8_kv_factor: float
    flash_attention: int
    notes: tuple[str, ...] = ()

    def allreduce_for(self, tp: int) -> AllReduce:
        """The all-reduce over `tp` cards; ValueError names the sizes there are figures for."""
        for entry in self.allreduce:
            if entry.tp == tp:
                return entry
        allowed = ", ".join(str(size) for size in [1, *(entry.tp for entry in self.allreduce)])
        raise ValueError(f"tensor_parallel_size {tp}: no all-reduce figure for {self.name}; allowed: {allowed}")


# fp8 linear layers, fitted here to aiconfigurator's H200 table (vLLM 0.24): mean absolute error 17 percent. No other
# card has a figure, so all take it.
_LINEAR_FP8_H200 = LinearEfficiency(compute=0.63, memory=0.81, t0_us=6.3, p=1.4)

# Prefill attention: `compute` and `t0_us` are published fits; `memory` was fitted here to the same tables (H200,
# A100; prompts without a history), B counted as KV read plus query and output rows. It gives 6.1 and 6.3 percent.
_PREFILL_MEMORY_HOPPER = 0.32
_PREFILL_MEMORY_A100 = 0.40

# fp8 KV: decode attention takes 0.68 of the bf16 time at long contexts (H200 table); 1 and more below 500 tokens.
_FP8_KV_FACTOR = 0.68

_ALLREDUCE_H100 = (AllReduce(2, 4.3, 263e9), AllReduce(4, 5.1, 194e9), AllReduce(8, 6.6, 206e9))
_ALLREDUCE_H200 = (AllReduce(2, 4.5, 270e9), AllReduce(4, 5.2, 202e9), AllReduce(8, 6.7, 220e9))
_ALLREDUCE_A100 = (AllReduce(2, 5.1, 181e9), AllReduce(4, 6.3, 121e9), AllReduce(8, 7.9, 108e9))

_FA3_NOTE = "several query tokens a request (verification) in decode attention: as one token, not validated"

# NVIDIA H100 SXM5 datasheet: 989.4 TFLOP/s bf16, 1,978.9 fp8 (dense), 3.35 TB/s, 80 GB; 132 SMs (Hopper white paper).
_H100 = Hardware(
    name="H100-SXM",
    bf16_flops=989.4e12,
    fp8_flops=1978.9e12,
    bandwidth=3.35e12,
    memory_bytes=int(79.19 * _GIB),
    num_sms=132,
    calibrated=True,
    linear=LinearEfficiency(compute=0.815, memory=0.875, t0_us=3.8, p=3.1),
    linear_fp8=_LINEAR_FP8_H200,
    decode=DecodeEfficiency(memory=0.861, t0_us=7.0),
    prefill=PrefillEfficiency(compute=0.694, memory=_PREFILL_MEMORY_HOPPER, t0_us=13.0),
    allreduce=_ALLREDUCE_H100,
    fp8_kv_factor=_FP8_KV_FACTOR,
    flash_attention=3,
    notes=(
        "decode attention t0, prefill attention memory, fp8 KV factor and fp8 linear layers are the H200's",
        _FA3_NOTE,
    ),
)

# NVIDIA H200 SXM datasheet: arithmetic as H100, 4.8 TB/s, 141 GB.
_H200 = replace(
    _H100,
    name="H200",
    bandwidth=4.8e12,
    memory_bytes=int(139.80 * _GIB),
    linear=LinearEfficiency(compute=0.805, memory=0.836, t0_us=4.0, p=3.4),
    decode=DecodeEfficiency(memory=0.815, t0_us=7.0),
    prefill=PrefillEfficiency(compute=0.685, memory=_PREFILL_MEMORY_HOPPER, t0_us=13.0),
    allreduce=_ALLREDUCE_H200,
    notes=(_FA3_NOTE,),
)

# NVIDIA A100 80GB SXM datasheet: 312 TFLOP/s bf16, no fp8, 2,039 GB/s, 80 GB; 108 SMs (Ampere white paper).
_A100 = Hardware(
    name="A100-SXM-80GB",
    bf16_flops=312e12,
    fp8_flops=None,
    bandwidth=2.039e12,
    memory_bytes=int(79.15 * _GIB),
    num_sms=108,
    calibrated=True,
    linear=LinearEfficiency(compute=0.77, memory=0.78, t0_us=7.0, p=1.6),
    # Weight-only fp8: the bf16 kernels' efficiencies on one byte a weight.
    linear_fp8=LinearEfficiency(compute=0.77, memory=0.78, t0_us=7.0, p=1.6),
    decode=DecodeEfficiency(memory=0.717, t0_us=7.0),
    prefill=PrefillEfficiency(compute=0.577, memory=_PREFILL_MEMORY_A100, t0_us=13.0),
    allreduce=_ALLREDUCE_A100,
    fp8_kv_factor=_FP8_KV_FACTOR,
    flash_attention=2,
    notes=("decode and prefill attention t0 and fp8 KV factor are the H200's", "fp8 weights: computed in bf16"),
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
    linear=LinearEfficiency(compute=0.72, memory=0.81, t0_us=3.8, p=2.4),
    notes=("decode and prefill attention, all-reduce, fp8 KV factor and fp8 linear layers are the H200's", _FA3_NOTE),
)

_UNCALIBRATED_NOTE = "not calibrated: the datasheet with the H100's efficiencies"


def custom_hardware(
    name: str,
    *,
    bf16_tflops: float,
    bandwidth_gbs: float,
    memory_gib: float,
    num_sms: int,
    fp8_tflops: float | None = None,
) -> Hardware:
    """A card known by its datasheet only: the H100's efficiencies on its numbers, `calibrated` False.

    `bf16_tflops`, `fp8_tflops`: dense, in 10^12 operations a second; `bandwidth_gbs`: 10^9 bytes a second;
    `memory_gib`: what CUDA reports, in GiB. FlashAttention 2 (no split in a verification) is assumed, and the H100's
    all-reduce (NVLink). Raises ValueError for a number that is not positive and finite.
    """
    numbers = {"bf16_tflops": bf16_tflops, "bandwidth_gbs": bandwidth_gbs, "memory_gib": memory_gib, "num_sms": num_sms}
    if fp8_tflops is not None:
        numbers["fp8_tflops"] = fp8_tflops
    for key, value in numbers.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{key}: must be a positive number, got {value!r}")
    return replace(
        _H100,
        name=name,
        bf16_flops=bf16_tflops * 1e12,
        fp8_flops=None if fp8_tflops is None else fp8_tflops * 1e12,
        bandwidth=bandwidth_gbs * 1e9,
        memory_bytes=int(memory_gib * _GIB),
        num_sms=num_sms,
        calibrated=False,
        flash_attention=2,
        notes=(_UNCALIBRATED_NOTE,),
    )


def _pcie_gen4(card: Hardware) -> Hardware:
    """No NVLink: a ring moves 2 (n - 1) / n of the bytes over PCIe Gen4 x16, 32 GB/s a direction; 20 us is a guess."""
    sizes = (2, 4, 8)
    rings = tuple(AllReduce(tp, 20.0, 32e9 / (2 * (tp - 1) / tp)) for tp in sizes)
    return replace(card, allreduce=rings, notes=(*card.notes, "all-reduce over PCIe Gen4: an estimate"))


# NVIDIA Ada GPU architecture white paper: 165.2 TFLOP/s bf16 with fp32 accumulation, 330.3 fp8, 1,008 GB/s, 128 SMs.
_RTX_4090 = _pcie_gen4(
    custom_hardware(
        "RTX-4090",
        bf16_tflops=165.2,
        fp8_tflops=330.3,
        bandwidth_gbs=1008,
        memory_gib=25_250_627_584 / _GIB,  # as a real vLLM 0.19 run reported it (LLMServingSim)
        num_sms=128,
    )
)
# NVIDIA L40S datasheet: 362.05 TFLOP/s bf16, 733 fp8 (dense), 864 GB/s, 48 GB, 142 RT cores (one an SM).
_L40S = _pcie_gen4(
    custom_hardware("L40S", bf16_tflops=362.05, fp8_tflops=733, bandwidth_gbs=864, memory_gib=44.39, num_sms=142)
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
