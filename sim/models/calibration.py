"""What a card's kernels were measured to reach: the numbers of a calibration, and the forms they go into.

Knows forms and their constants, each with where it comes from, its error on what was held out and the range it holds
for. Must not know models, steps, files or policies: `sim.calibration_schema` reads the YAML that the numbers stand in,
`sim.models.hardware` has the datasheets.

Every form may carry a `Grid`: a smooth correction, fitted to measurements, of what the form alone says.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Final

from sim.models.hardware import Hardware

__all__ = [
    "AllReduce",
    "Calibration",
    "DecodeAttention",
    "Elementwise",
    "Evidence",
    "Grid",
    "LinearLayers",
    "NoSplit",
    "Overhead",
    "PrefillAttention",
]

_PCIE_T0_US: Final = 20.0
_PCIE_BYTES_S: Final = 32e9
_RING_SIZES: Final = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Why a part's numbers are believed.

    `held_out_percent`: mean absolute error on shapes or points that the fit had not seen; None where nobody measured
    it. `points`: measurements behind it. `ranges`: for each axis the smallest and the largest value measured.
    `borrowed`: the card whose figures these are, where it is another one. `residuals`: evenly spaced quantiles of
    log(measured / predicted) on what was held out.
    """

    source: str = ""
    how: str = ""
    points: int = 0
    held_out_percent: float | None = None
    analytic_percent: float | None = None
    grid_percent: float | None = None
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    borrowed: str | None = None
    residuals: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Grid:
    """A factor by several positive quantities, interpolated linearly in their logarithms and constant outside.

    `knots`: rising values, a tuple an axis; `log_factors`: natural logarithms at their product, the last axis fastest.
    """

    axes: tuple[str, ...]
    knots: tuple[tuple[float, ...], ...]
    log_factors: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.knots) or not self.axes:
            raise ValueError(f"axes: {len(self.axes)} names for {len(self.knots)} lists of knots")
        for axis, knots in zip(self.axes, self.knots, strict=True):
            rising = all(one < other for one, other in pairwise(knots))
            if not knots or knots[0] <= 0 or not rising or not all(map(math.isfinite, knots)):
                raise ValueError(f"knots of {axis}: must be positive and rise, got {list(knots)}")
        size = math.prod(len(knots) for knots in self.knots)
        if len(self.log_factors) != size or not all(map(math.isfinite, self.log_factors)):
            raise ValueError(f"log_factors: {size} finite numbers are wanted, got {len(self.log_factors)}")

    def log_factor(self, *values: float) -> float:
        """The logarithm of the factor at one value an axis."""
        strides, stride = [], 1
        for knots in reversed(self.knots):
            strides.append(stride)
            stride *= len(knots)
        strides.reverse()
        corners: list[tuple[tuple[int, float], ...]] = []
        for knots, value, step in zip(self.knots, values, strides, strict=True):
            low, share = _place(knots, value)
            corners.append(((low * step, 1 - share), ((low + 1) * step, share)) if share else ((low * step, 1.0),))
        total = 0.0
        for corner in product(*corners):
            weight, index = 1.0, 0
            for offset, share in corner:
                weight *= share
                index += offset
            total += weight * self.log_factors[index]
        return total

    def sliced(self, **fixed: float) -> Grid:
        """The grid over the remaining axes, in order, with these held at their values."""
        kept = [number for number, axis in enumerate(self.axes) if axis not in fixed]
        logs = tuple(
            self.log_factor(
                *(fixed[axis] if axis in fixed else point[kept.index(number)] for number, axis in enumerate(self.axes))
            )
            for point in product(*(self.knots[number] for number in kept))
        )
        return Grid(tuple(self.axes[n] for n in kept), tuple(self.knots[n] for n in kept), logs)


def _place(knots: Sequence[float], value: float) -> tuple[int, float]:
    """The knot below, and the share of the way to the next in logarithms; the ends hold beyond them."""
    if value <= knots[0]:
        return 0, 0.0
    if value >= knots[-1]:
        return len(knots) - 1, 0.0
    low = bisect_right(knots, value) - 1
    return low, math.log(value / knots[low]) / math.log(knots[low + 1] / knots[low])


@dataclass(frozen=True, slots=True)
class LinearLayers:
    """One linear layer takes ((F / compute P)^p + (B / memory W)^p)^(1/p) + t0_us, times the grid's factor.

    F = 2 m n k operations, B the bytes of its n k weights, P the peak of its type, W the bandwidth; the grid's axes are
    rows m, outputs n and inputs k.
    """

    compute: float
    memory: float
    t0_us: float
    p: float
    grid: Grid | None = None
    evidence: Evidence = Evidence()


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """Decode attention of one layer takes t0_us + B / (memory W) + pair_ns a request and KV head, times the grid's.

    B: bytes of the KV of all requests, once a request. The grid's axes are requests, tokens of context (their mean), KV
    heads of a rank and query heads a KV head.
    """

    memory: float
    t0_us: float
    pair_ns: float = 0.0
    grid: Grid | None = None
    evidence: Evidence = Evidence()


@dataclass(frozen=True, slots=True)
class PrefillAttention:
    """Prefill attention of one layer takes t0_us + max(F / (compute P) + B / (memory W), walk_us_per_1000 L).

    F: 4 operations a pair under the causal mask, query head and element of it; B: KV read, query and output rows; L:
    the longest history with its chunk, in 1,000 tokens, which one tile walks from end to end.
    """

    compute: float
    memory: float
    t0_us: float
    walk_us_per_1000: float = 0.0
    evidence: Evidence = Evidence()


@dataclass(frozen=True, slots=True)
class NoSplit:
    """FlashAttention 2 where some request has more than one query token: each tile walks its context from end to end.

    A tile (a query head of a request) takes tile_us and us_per_1000_tokens; `slots_per_sm` tiles of an SM go on at
    once. KV is read at `memory` of the bandwidth, and again for the query heads of its group that do not run at the
    same time, as far as what one KV head has of all requests does not stay in `l2_mb` (10^6 bytes).
    """

    us_per_1000_tokens: float
    slots_per_sm: float
    memory: float
    tile_us: float = 0.0
    l2_mb: float = 40.0
    evidence: Evidence = Evidence()


@dataclass(frozen=True, slots=True)
class AllReduce:
    """One all-reduce over `tp` cards: t0_us + bytes / bandwidth, or `points` (bytes, us), straight in logarithms."""

    tp: int
    t0_us: float
    bandwidth: float
    points: tuple[tuple[float, float], ...] = ()
    evidence: Evidence = Evidence()

    def us(self, num_bytes: float) -> float:
        """Microseconds for a message of so many bytes."""
        points = self.points
        if not points:
            return self.t0_us + 1e6 * num_bytes / self.bandwidth
        if num_bytes <= points[0][0]:
            return points[0][1]
        last, last_us = points[-1]
        if num_bytes >= last:
            return last_us * num_bytes / last
        sizes = [size for size, _ in points]
        low, share = _place(sizes, num_bytes)
        return math.exp((1 - share) * math.log(points[low][1]) + share * math.log(points[low + 1][1]))


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Norms, rotary embedding, activation: what a layer's rows move, over `memory` of the bandwidth."""

    memory: float
    evidence: Evidence = Evidence()


@dataclass(frozen=True, slots=True)
class Overhead:
    """What is no kernel of the forms above: microseconds a layer, a step, a sampled or verified token."""

    per_layer_us: float
    per_step_us: float
    per_sampled_token_us: float
    evidence: Evidence = Evidence()


@dataclass(frozen=True, slots=True)
class Calibration:
    """The forms of one card. `linear`, `decode`, `prefill` by type: `bfloat16` always, `fp8` where there is a table."""

    name: str
    card: str
    source: str
    linear: Mapping[str, LinearLayers]
    decode: Mapping[str, DecodeAttention]
    prefill: Mapping[str, PrefillAttention]
    no_split: NoSplit
    allreduce: tuple[AllReduce, ...]
    elementwise: Elementwise
    overhead: Overhead
    fp8_kv_factor: float = 1.0
    """Decode attention on an fp8 cache over that on a bf16 one, where `decode` has no fp8."""

    def for_card(self, card: Hardware) -> Calibration:
        """These forms on another card: its datasheet under the same shares of the peaks, without grids and points.

        The same calibration for the card that it was fitted on.
        """
        if card.name == self.card:
            return self
        borrowed = Evidence(borrowed=self.card, how=f"the shares of {self.card} on the datasheet of {card.name}")
        return replace(
            self,
            linear={key: replace(part, grid=None, evidence=borrowed) for key, part in self.linear.items()},
            decode={key: replace(part, grid=None, pair_ns=0.0, evidence=borrowed) for key, part in self.decode.items()},
            prefill={key: replace(part, evidence=borrowed) for key, part in self.prefill.items()},
            no_split=replace(self.no_split, evidence=borrowed),
            allreduce=_pcie_rings(card) if card.pcie else tuple(replace(e, evidence=borrowed) for e in self.allreduce),
            elementwise=replace(self.elementwise, evidence=borrowed),
            overhead=replace(self.overhead, evidence=borrowed),
        )

    def allreduce_for(self, tp: int) -> AllReduce:
        """The all-reduce over `tp` cards; ValueError names the sizes there are figures for."""
        for entry in self.allreduce:
            if entry.tp == tp:
                return entry
        allowed = ", ".join(str(size) for size in [1, *(entry.tp for entry in self.allreduce)])
        raise ValueError(f"tensor_parallel_size {tp}: no all-reduce figure for {self.card}; allowed: {allowed}")

    def parts(self) -> list[tuple[str, Evidence]]:
        """Every part's name with its evidence."""
        found = [(f"linear {key}", part.evidence) for key, part in self.linear.items()]
        found += [(f"decode attention {key}", part.evidence) for key, part in self.decode.items()]
        found += [(f"prefill attention {key}", part.evidence) for key, part in self.prefill.items()]
        found.append(("no-split attention", self.no_split.evidence))
        found += [(f"all-reduce over {entry.tp}", entry.evidence) for entry in self.allreduce]
        found += [("elementwise", self.elementwise.evidence), ("overhead", self.overhead.evidence)]
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        """What of it is another card's or has no measured error."""
        borrowed: dict[str, list[str]] = {}
        unchecked = []
        for name, evidence in self.parts():
            if evidence.borrowed is not None:
                borrowed.setdefault(evidence.borrowed, []).append(name)
            elif evidence.held_out_percent is None:
                unchecked.append(name)
        notes = [f"{', '.join(names)}: from {card}" for card, names in borrowed.items()]
        if unchecked:
            notes.append(f"{', '.join(unchecked)}: no error measured")
        return tuple(notes)

    @property
    def residuals(self) -> tuple[float, ...]:
        """Quantiles of log(measured / predicted) of the linear layers, the largest part of most steps; may be empty."""
        return self.linear["bfloat16"].evidence.residuals


def _pcie_rings(card: Hardware) -> tuple[AllReduce, ...]:
    """No NVLink: a ring moves 2 (n - 1) / n of the bytes over PCIe Gen4 x16, 32 GB/s a direction; 20 us is a guess."""
    evidence = Evidence(how="a ring over PCIe Gen4 x16: an estimate", borrowed=f"PCIe figures ({card.name})")
    return tuple(
        AllReduce(tp, _PCIE_T0_US, _PCIE_BYTES_S / (2 * (tp - 1) / tp), evidence=evidence) for tp in _RING_SIZES
    )
