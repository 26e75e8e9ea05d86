"""Fits the forms of a calibration to measured tables, with shapes held out, and holds a calibration against others.

Knows points and forms. Must not know files (`measured_tables` reads them, `calibration_schema` writes the result) or
how anything is printed.

What is minimised is the mean absolute relative error. Held out are whole shapes (linear layers by outputs and inputs,
attention by heads) where there are several, else every fifth point; the error told is that of predictions for what the
fit had not seen. A grid corrects the form where it does better on what was held out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.sparse import coo_matrix, csr_matrix, diags, identity, vstack
from scipy.sparse.linalg import spsolve

from sim.measured_tables import AttentionPoint, IterationPoint, LinearPoint, ReducePoint, SmallPoint, Tables
from sim.models.calibration import (
    AllReduce,
    Calibration,
    DecodeAttention,
    Elementwise,
    Evidence,
    Grid,
    LinearLayers,
    NoSplit,
    Overhead,
    PrefillAttention,
)
from sim.models.hardware import Hardware
from sim.models.shapes import ModelShape, dtype_bytes
from sim.models.timing import StepShape, TimingModel, TimingParams

__all__ = ["CheckLine", "FitLine", "check_calibration", "fit_calibration"]

Floats = NDArray[np.float64]

_FOLDS: Final = 5
_LARGE_LAYER: Final = 16_000_000
"""Bytes of a layer's 16-bit weights from which on it is read from memory, not from a cache, in most tables."""
_LINEAR_KNOTS: Final = (
    (1, 8, 32, 64, 128, 256, 512, 2048, 16384),
    (768, 2048, 4096, 8192, 65536),
    (256, 1024, 2048, 4096, 16384),
)
_DECODE_KNOTS: Final = (
    (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048),
    (2, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072),
    (1, 2, 4, 8),
    (4, 8),
)
_RESIDUAL_QUANTILES: Final = 21


@dataclass(frozen=True, slots=True)
class FitLine:
    """One part of a fit: errors in percent on what was held out; None where there is none."""

    part: str
    points: int
    analytic: float | None
    grid: float | None
    chosen: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class CheckLine:
    """One part of a check: mean absolute error and mean signed error, in percent, over so many points."""

    part: str
    points: int
    error: float
    bias: float


@dataclass(frozen=True, slots=True)
class _Fitted:
    """A fit's numbers and what they got on what was held out."""

    values: tuple[float, ...]
    held_out: Floats
    """log(predicted / measured), of the analytic form, in the order of the points."""


def fit_calibration(
    tables: Tables, card: Hardware, base: Calibration, name: str, shape: ModelShape | None = None
) -> tuple[Calibration, list[FitLine]]:
    """`base` with every part that the tables cover fitted anew, and what came out by part.

    `base` should be the card's own, or one put on it with `for_card`. `shape`: the model of vLLM's iteration log, which
    does not name it; without it those lines are left. Raises ValueError where the tables hold too little to fit.
    """
    lines: list[FitLine] = []
    files = "; ".join(f"{path.name} ({format_})" for path, format_ in tables.files)
    source = f"speckv calibrate fit: {files}"
    if base.source:
        source += f"; what these do not cover as in {base.name} ({base.source})"
    made = replace(base.for_card(card), name=name, card=card.name, source=source)

    linear = dict(made.linear)
    for dtype in ("bfloat16", "fp8"):
        points = [point for point in tables.linear if point.dtype == dtype]
        if len(points) >= 20:
            linear[dtype] = _fit_linear(points, dtype, card, lines)
    decode, prefill, no_split = dict(made.decode), dict(made.prefill), made.no_split
    for dtype in ("bfloat16", "fp8"):
        own = [point for point in tables.attention if point.kv_dtype == dtype]
        alone = [point for point in own if point.decodes and not point.chunks and point.query_len == 1]
        # Prompts of one token are no chunks.
        chunks = [point for point in own if point.chunks and not point.decodes and point.chunk >= 16]
        if len(alone) >= 20:
            decode[dtype] = _fit_decode(alone, dtype, card, tables.graph_us, lines)
        if len(chunks) >= 20:
            prefill[dtype] = _fit_prefill(chunks, dtype, card, lines)
        several = [point for point in own if point.decodes and (point.chunks or point.query_len > 1)]
        if len(several) >= 20 and dtype == "bfloat16" and card.flash_attention == 2:
            no_split = _fit_no_split(several, decode[dtype], prefill[dtype], card, no_split, lines)
    if "fp8" not in card_dtypes(card):
        decode.pop("fp8", None)
    reduce = _fit_reduce([point for point in tables.reduce if _same_card(point.gpu, card)], lines)
    elementwise, overhead = made.elementwise, made.overhead
    if len(tables.small) >= 10:
        elementwise, per_layer = _fit_small(tables.small, card, lines)
        # The fixed part of these kernels is what a layer costs beside its rows; host and sampler stay as they were.
        note = f"per_layer_us from {len(tables.small)} points of small kernels"
        how = "; ".join(text for text in (note, overhead.evidence.how) if text)
        overhead = Overhead(
            per_layer, overhead.per_step_us, overhead.per_sampled_token_us, replace(overhead.evidence, how=how)
        )
    made = replace(
        made,
        linear=linear,
        decode=decode,
        prefill=prefill,
        no_split=no_split,
        allreduce=reduce or made.allreduce,
        elementwise=elementwise,
        overhead=overhead,
    )
    if tables.iterations and shape is not None:
        made = replace(made, overhead=_fit_iterations(tables.iterations, made, card, shape, lines))
    made = _sourced(made, files)
    if not lines:
        raise ValueError("nothing to fit: no part has enough points (20 of linear layers or attention, 10 of others)")
    return made, lines


def _sourced(made: Calibration, files: str) -> Calibration:
    """Parts that say how they were fitted and not from what were fitted just now."""

    def said(evidence: Evidence) -> Evidence:
        fresh = not evidence.source and evidence.borrowed is None and evidence.points
        return replace(evidence, source=files) if fresh else evidence

    return replace(
        made,
        linear={key: replace(part, evidence=said(part.evidence)) for key, part in made.linear.items()},
        decode={key: replace(part, evidence=said(part.evidence)) for key, part in made.decode.items()},
        prefill={key: replace(part, evidence=said(part.evidence)) for key, part in made.prefill.items()},
        no_split=replace(made.no_split, evidence=said(made.no_split.evidence)),
        allreduce=tuple(replace(part, evidence=said(part.evidence)) for part in made.allreduce),
        elementwise=replace(made.elementwise, evidence=said(made.elementwise.evidence)),
        overhead=replace(made.overhead, evidence=said(made.overhead.evidence)),
    )


def card_dtypes(card: Hardware) -> tuple[str, ...]:
    """Types whose kernels the card has."""
    return ("bfloat16",) if card.fp8_flops is None else ("bfloat16", "fp8")


def check_calibration(calibration: Calibration, tables: Tables, card: Hardware) -> list[CheckLine]:
    """The calibration's errors on all points of the tables, by part; parts without points are left out."""
    forms = calibration.for_card(card)
    found: dict[str, list[float]] = {}
    for point in tables.linear:
        part = forms.linear.get(point.dtype)
        if part is not None:
            error = _linear_us(part, point.dtype, card, point.m, point.n, point.k) / point.us
            found.setdefault(f"linear {point.dtype}", []).append(error)
            if 2 * point.n * point.k >= _LARGE_LAYER:
                found.setdefault(f"linear {point.dtype}, weights from 16 MB", []).append(error)
    models: dict[tuple[str, int, int, int], TimingModel] = {}
    for attention in tables.attention:
        key = (attention.kv_dtype, attention.heads, attention.kv_heads, attention.head_dim)
        model = models.get(key)
        if model is None:
            model = models[key] = _one_layer(calibration, card, *key)
        step = _step_of(attention)
        cost = model.step_cost(step)
        graph_us = tables.graph_us if attention.decodes and not attention.chunks else 0.0
        error = ((cost.attention_decode + cost.attention_prefill) / 1e3 + graph_us) / attention.us
        found.setdefault(_attention_name(attention), []).append(error)
    for reduce in tables.reduce:
        entry = next((entry for entry in forms.allreduce if entry.tp == reduce.tp), None)
        if entry is not None and _same_card(reduce.gpu, card):
            found.setdefault(f"all-reduce over {reduce.tp}", []).append(entry.us(reduce.bytes) / reduce.us)
    for small in tables.small:
        us = forms.overhead.per_layer_us + _small_us(small, forms.elementwise.memory, card)
        found.setdefault("small kernels of a layer", []).append(us / small.us)
    return [
        CheckLine(
            part, len(ratios), 100 * float(np.mean(np.abs(np.array(ratios) - 1))), 100 * (float(np.mean(ratios)) - 1)
        )
        for part, ratios in found.items()
    ]


def _same_card(said: str, card: Hardware) -> bool:
    return not said or card.name.lower().startswith(said.lower())


def _attention_name(point: AttentionPoint) -> str:
    if point.chunks and point.decodes:
        return f"decodes beside a chunk {point.kv_dtype}"
    if point.chunks:
        return f"prefill attention {point.kv_dtype}"
    if point.query_len > 1:
        return f"verification {point.kv_dtype}"
    return f"decode attention {point.kv_dtype}" + ("" if point.context >= 256 else ", contexts below 256")


def _step_of(point: AttentionPoint) -> StepShape:
    step = StepShape()
    context = max(1, round(point.context))
    if point.decodes:
        step.num_reqs = step.decode_reqs = point.decodes
        step.decode_tokens = step.num_tokens = point.decodes * point.query_len
        step.decode_kv_tokens = point.decodes * context
        step.decode_qk_pairs = step.decode_tokens * context
        step.max_decode_kv_tokens = context
    for _ in range(point.chunks):
        step.add_prefill(point.chunk, point.history, 0)
    return step


def _one_layer(
    calibration: Calibration, card: Hardware, kv_dtype: str, heads: int, kv_heads: int, head_dim: int
) -> TimingModel:
    shape = ModelShape("one layer", 1, heads * head_dim, 256, heads, kv_heads, head_dim, 256, False, 2**20, "a table")
    kv = "fp8" if kv_dtype == "fp8" else "auto"
    return TimingModel(
        shape, card, calibration, kv_cache_dtype=kv, captured=(), params=TimingParams(eager_layer_us=0.0)
    )


# Grids: least squares over a product of hat functions in logarithms, smooth and drawn to 0 where nothing is measured


def _hats(values: Floats, knots: Sequence[Sequence[float]]) -> csr_matrix:
    """[points, grid values]: how much each grid value counts for each point; `values` is [points, axes]."""
    count = len(values)
    places = []
    for axis, axis_knots in enumerate(knots):
        logs = np.log(np.asarray(axis_knots, dtype=np.float64))
        x = np.clip(np.log(values[:, axis]), logs[0], logs[-1])
        low = np.clip(np.searchsorted(logs, x, side="right") - 1, 0, max(len(logs) - 2, 0))
        width = logs[np.minimum(low + 1, len(logs) - 1)] - logs[low]
        share = np.divide(x - logs[low], width, out=np.zeros(count), where=width > 0)
        places.append((low, share, len(logs)))
    rows, columns, weights = [], [], []
    for corner in product((0, 1), repeat=len(knots)):
        column = np.zeros(count, dtype=np.int64)
        weight = np.ones(count)
        for up, (low, share, length) in zip(corner, places, strict=True):
            column = column * length + np.minimum(low + up, length - 1)
            weight = weight * (share if up else 1 - share)
        rows.append(np.arange(count))
        columns.append(column)
        weights.append(weight)
    size = math.prod(len(axis_knots) for axis_knots in knots)
    made = coo_matrix((np.concatenate(weights), (np.concatenate(rows), np.concatenate(columns))), shape=(count, size))
    return made.tocsr()


def _curvature(lengths: Sequence[int]) -> csr_matrix:
    """Second differences along every axis."""
    size = math.prod(lengths)
    numbers = np.arange(size).reshape(lengths)
    found = [csr_matrix((0, size))]
    for axis, length in enumerate(lengths):
        if length < 3:
            continue
        moved = np.moveaxis(numbers, axis, 0)
        before, here, after = moved[:-2].ravel(), moved[1:-1].ravel(), moved[2:].ravel()
        row = np.arange(len(here))
        ones = np.ones(len(here))
        entries = (np.concatenate([row, row, row]), np.concatenate([before, here, after]))
        found.append(coo_matrix((np.concatenate([ones, -2 * ones, ones]), entries), shape=(len(here), size)).tocsr())
    return vstack(found).tocsr()


def _grid_values(values: Floats, logs: Floats, knots: Sequence[Sequence[float]], smooth: float, pull: float) -> Floats:
    """Grid values for `logs` at `values`; weighted anew a few times, so that the absolute error counts."""
    hats = _hats(values, knots)
    bend = _curvature([len(axis) for axis in knots])
    fixed = smooth * (bend.T @ bend) + pull * identity(hats.shape[1])
    weights = np.ones(len(logs))
    found = np.zeros(hats.shape[1])
    for _ in range(8):
        system = hats.T @ diags(weights) @ hats + fixed
        found = np.asarray(spsolve(system.tocsc(), hats.T @ (weights * logs)))
        weights = 0.05 / np.maximum(np.abs(logs - hats @ found), 0.02)
    return found


def _folds(groups: Sequence[object]) -> NDArray[np.int64]:
    """A fold a point: groups together where there are at least three, else every fifth point."""
    names = sorted(set(groups), key=repr)
    if len(names) >= 3:
        order = np.random.default_rng(0).permutation(len(names)) % min(_FOLDS, len(names))
        fold_of = dict(zip(names, order.tolist(), strict=True))
        return np.array([fold_of[group] for group in groups])
    return _point_folds(len(groups))


def _point_folds(count: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).permutation(count) % _FOLDS


def _fitted(
    predict: Callable[[Sequence[float]], Floats],
    measured: Floats,
    starts: Sequence[Sequence[float]],
    low: Sequence[float],
    folds: NDArray[np.int64],
) -> _Fitted:
    """Constants over all points, and the errors of those fitted without the fold that each point is in."""

    def fit(chosen: NDArray[np.bool_]) -> tuple[float, ...]:
        def loss(array: Floats) -> float:
            values = tuple(float(value) for value in array)
            if any(value < least for value, least in zip(values, low, strict=True)):
                return 1e3
            return float(np.mean(np.abs(predict(values)[chosen] / measured[chosen] - 1)))

        tries = [minimize(loss, start, method="Nelder-Mead", options={"maxiter": 1500}) for start in starts]
        best = min(tries, key=lambda one: float(one.fun))
        return tuple(float(value) for value in best.x)

    held_out = np.zeros(len(measured))
    for fold in sorted(set(folds.tolist())):
        inside = folds == fold
        held_out[inside] = np.log(predict(fit(~inside))[inside] / measured[inside])
    return _Fitted(fit(np.ones(len(measured), dtype=bool)), held_out)


def _percent(logs: Floats) -> float:
    return 100 * float(np.mean(np.abs(np.expm1(logs))))


def _with_grid(
    values: Floats,
    predicted: Floats,
    measured: Floats,
    knots: Sequence[Sequence[float]],
    folds: NDArray[np.int64],
    smooth: float,
    pull: float,
) -> tuple[Floats, Floats]:
    """(grid values over all points, log errors on what was held out) of a correction of `predicted`."""
    logs = np.log(measured / predicted)
    held_out = np.zeros(len(logs))
    for fold in sorted(set(folds.tolist())):
        inside = folds == fold
        grid = _grid_values(values[~inside], logs[~inside], knots, smooth, pull)
        held_out[inside] = _hats(values[inside], knots) @ grid - logs[inside]
    return _grid_values(values, logs, knots, smooth, pull), held_out


def _covered(knots: Sequence[Sequence[float]], values: Floats) -> tuple[tuple[float, ...], ...]:
    """The knots that lie within what was measured, its ends included."""
    kept = []
    for axis, axis_knots in enumerate(knots):
        low, high = float(values[:, axis].min()), float(values[:, axis].max())
        inside = [float(knot) for knot in axis_knots if low < knot < high]
        kept.append((low, *inside, high) if high > low else (low,))
    return tuple(kept)


def _residuals(logs: Floats) -> tuple[float, ...]:
    """Quantiles of log(measured / predicted)."""
    return tuple(float(value) for value in np.quantile(-logs, np.linspace(0, 1, _RESIDUAL_QUANTILES)))


# The parts


def _linear_us(part: LinearLayers, dtype: str, card: Hardware, m: float, n: float, k: float) -> float:
    peak, size = _peak(card, dtype), dtype_bytes(dtype)
    compute, memory = 2 * m * n * k / (part.compute * peak), n * k * size / (part.memory * card.bandwidth)
    us = 1e6 * float((compute**part.p + memory**part.p) ** (1 / part.p)) + part.t0_us
    return us if part.grid is None else us * math.exp(part.grid.log_factor(m, n, k))


def _peak(card: Hardware, dtype: str) -> float:
    return card.fp8_flops if dtype == "fp8" and card.fp8_flops is not None else card.bf16_flops


def _fit_linear(points: Sequence[LinearPoint], dtype: str, card: Hardware, lines: list[FitLine]) -> LinearLayers:
    m, n, k, measured = (
        np.array([getattr(p, name) for p in points], dtype=np.float64) for name in ("m", "n", "k", "us")
    )
    size, peak = dtype_bytes(dtype), _peak(card, dtype)
    folds = _folds([(point.n, point.k) for point in points])

    def predict(values: Sequence[float]) -> Floats:
        compute, memory, t0, p = values
        work, weights = 2e6 * m * n * k / (compute * peak), 1e6 * n * k * size / (memory * card.bandwidth)
        # As a multiple of the larger: the powers of small times would underflow.
        top = np.maximum(work, weights)
        return np.asarray(top * ((work / top) ** p + (weights / top) ** p) ** (1 / p) + t0)

    fitted = _fitted(predict, measured, [(0.8, 0.8, 4.0, 3.0), (0.6, 0.8, 6.0, 1.5)], (0.05, 0.05, 0.0, 1.0), folds)
    values = np.column_stack([m, n, k])
    knots = _covered(_LINEAR_KNOTS, values)
    grid, with_grid = _with_grid(values, predict(fitted.values), measured, knots, folds, 0.3, 0.05)
    large = 2 * n * k >= _LARGE_LAYER
    analytic, corrected = _percent(fitted.held_out), _percent(with_grid)
    chosen = corrected < analytic
    best = with_grid if chosen else fitted.held_out
    note = ""
    if large.any() and not large.all():
        of_large = (_percent(fitted.held_out[large]), _percent(with_grid[large]))
        note = f"weights from 16 MB: analytic {of_large[0]:.1f}, grid {of_large[1]:.1f}"
    lines.append(FitLine(f"linear {dtype}", len(points), analytic, corrected, "grid" if chosen else "analytic", note))
    shapes = len({(point.n, point.k) for point in points})
    evidence = Evidence(
        how=f"{shapes} shapes in {len(set(folds.tolist()))} parts, each held out in turn"
        + (f"; {note}" if note else ""),
        points=len(points),
        held_out_percent=min(analytic, corrected),
        analytic_percent=analytic,
        grid_percent=corrected,
        ranges=_ranges(rows=m, outputs=n, inputs=k),
        residuals=_residuals(best),
    )
    kept = Grid(("rows", "outputs", "inputs"), knots, tuple(grid.tolist())) if chosen else None
    compute, memory, t0, p = fitted.values
    return LinearLayers(compute, memory, t0, p, kept, evidence)


def _ranges(**quantities: Floats) -> dict[str, tuple[float, float]]:
    return {name: (float(values.min()), float(values.max())) for name, values in quantities.items()}


def _fit_decode(
    points: Sequence[AttentionPoint], dtype: str, card: Hardware, graph_us: float, lines: list[FitLine]
) -> DecodeAttention:
    requests = np.array([p.decodes for p in points], dtype=np.float64)
    context = np.array([max(p.context, 1.0) for p in points], dtype=np.float64)
    kv_heads = np.array([p.kv_heads for p in points], dtype=np.float64)
    group = np.array([p.heads / p.kv_heads for p in points], dtype=np.float64)
    measured = np.array([p.us for p in points], dtype=np.float64)
    dims = np.array([p.head_dim for p in points], dtype=np.float64)
    read = requests * context * kv_heads * dims * 2 * dtype_bytes(dtype)
    pairs = requests * kv_heads
    shapes = [(p.heads, p.kv_heads) for p in points]
    folds = _folds(shapes)
    by_point = _point_folds(len(points))

    def form(values: Sequence[float]) -> Floats:
        memory, t0, pair = values
        return np.asarray(1e6 * read / (memory * card.bandwidth) + t0 + pair * pairs / 1e3)

    def predict(values: Sequence[float]) -> Floats:
        return form(values) + graph_us

    start = max(float(measured.min()) - graph_us, 0.1)
    starts = [(0.8, start, 20.0), (0.5, start, 0.0)]
    fitted = _fitted(predict, measured, starts, (0.02, 0.0, 0.0), folds)
    values = np.column_stack([requests, context, kv_heads, group])
    knots = _covered(_DECODE_KNOTS, values)
    net = np.maximum(measured - graph_us, 0.05 * measured)
    grid, by_points = _with_grid(values, form(fitted.values), net, knots, by_point, 0.01, 0.005)
    _, by_shapes = _with_grid(values, form(fitted.values), net, knots, folds, 0.1, 0.01)
    # Errors against what was measured, the graph's replay included.
    by_points = np.log((net * np.exp(by_points) + graph_us) / measured)
    by_shapes = np.log((net * np.exp(by_shapes) + graph_us) / measured)
    analytic, corrected = _percent(fitted.held_out), _percent(by_points)
    chosen = corrected < analytic
    long = context >= 256
    note = f"grid on shapes held out {_percent(by_shapes):.1f}"
    if long.any() and not long.all():
        note += (
            f"; contexts from 256: analytic {_percent(fitted.held_out[long]):.1f}, grid {_percent(by_points[long]):.1f}"
        )
    name = f"decode attention {dtype}"
    lines.append(FitLine(name, len(points), analytic, corrected, "grid" if chosen else "analytic", note))
    evidence = Evidence(
        how=f"analytic: {len(set(shapes))} shapes held out in turn; grid: every fifth point; {note}"
        + (f"; {graph_us:g} us of graph replay and cache write taken off" if graph_us else ""),
        points=len(points),
        held_out_percent=min(analytic, corrected),
        analytic_percent=analytic,
        grid_percent=corrected,
        ranges=_ranges(requests=requests, context=context, kv_heads=kv_heads, group=group),
        residuals=_residuals(by_points if chosen else fitted.held_out),
    )
    kept = Grid(("requests", "context", "kv_heads", "group"), knots, tuple(grid.tolist())) if chosen else None
    memory, t0, pair = fitted.values
    return DecodeAttention(memory, t0, pair, kept, evidence)


def _prefill_sums(points: Sequence[AttentionPoint], dtype: str) -> tuple[Floats, Floats, Floats]:
    """(operations, bytes, longest history + chunk) of the chunks."""
    chunk = np.array([p.chunk for p in points], dtype=np.float64)
    history = np.array([p.history for p in points], dtype=np.float64)
    count = np.array([p.chunks for p in points], dtype=np.float64)
    heads = np.array([p.heads * p.head_dim for p in points], dtype=np.float64)
    kv = np.array([p.kv_heads * p.head_dim for p in points], dtype=np.float64)
    pairs = count * (chunk * history + chunk * (chunk + 1) / 2)
    moved = count * ((chunk + history) * kv * 2 * dtype_bytes(dtype) + chunk * heads * 2 * 2)
    return 4 * pairs * heads, moved, history + chunk


def _fit_prefill(
    points: Sequence[AttentionPoint], dtype: str, card: Hardware, lines: list[FitLine]
) -> PrefillAttention:
    work, moved, longest = _prefill_sums(points, dtype)
    rows = np.array([p.chunk for p in points], dtype=np.float64)
    measured = np.array([p.us for p in points], dtype=np.float64)
    shapes = [(p.heads, p.kv_heads) for p in points]
    folds = _folds(shapes)

    def predict(values: Sequence[float]) -> Floats:
        compute, memory, t0, walk = values
        summed = 1e6 * (work / (compute * card.bf16_flops) + moved / (memory * card.bandwidth))
        return np.asarray(t0 + np.maximum(summed, walk * longest / 1e3))

    start = (0.65, 0.3, float(measured.min()), 20.0)
    fitted = _fitted(predict, measured, [start, (*start[:3], 0.0)], (0.02, 0.02, 0.0, 0.0), folds)
    error = _percent(fitted.held_out)
    note = ""
    large = rows >= 64
    if large.any() and not large.all():
        note = f"chunks from 64 rows: {_percent(fitted.held_out[large]):.1f}"
    lines.append(FitLine(f"prefill attention {dtype}", len(points), error, None, "analytic", note))
    held = f"{len(set(shapes))} shapes held out in turn" if len(set(shapes)) >= 3 else "every fifth point held out"
    evidence = Evidence(
        how=held + (f"; {note}" if note else ""),
        points=len(points),
        held_out_percent=error,
        analytic_percent=error,
        ranges=_ranges(rows=rows, context=longest),
        residuals=_residuals(fitted.held_out),
    )
    compute, memory, t0, walk = fitted.values
    return PrefillAttention(compute, memory, t0, walk, evidence)


def _fit_no_split(
    points: Sequence[AttentionPoint],
    decode: DecodeAttention,
    prefill: PrefillAttention,
    card: Hardware,
    before: NoSplit,
    lines: list[FitLine],
) -> NoSplit:
    work, moved, longest_chunk = _prefill_sums(points, "bfloat16")
    chunked = np.array([p.chunks > 0 for p in points])
    requests = np.array([p.decodes for p in points], dtype=np.float64)
    context = np.array([p.context for p in points], dtype=np.float64)
    heads = np.array([p.heads for p in points], dtype=np.float64)
    kv_bytes = np.array([p.kv_heads * p.head_dim * 4 for p in points], dtype=np.float64)
    measured = np.array([p.us for p in points], dtype=np.float64)
    in_chunks = 1e6 * (work / (prefill.compute * card.bf16_flops) + moved / (prefill.memory * card.bandwidth)) * chunked
    in_chunks = np.maximum(in_chunks, prefill.walk_us_per_1000 * longest_chunk / 1e3 * chunked)
    t0 = np.where(chunked, prefill.t0_us, decode.t0_us)

    tokens = requests * context
    group = np.array([p.heads / p.kv_heads for p in points], dtype=np.float64)
    kv_heads = np.array([p.kv_heads for p in points], dtype=np.float64)
    missed = np.clip(kv_bytes / kv_heads * tokens / (before.l2_mb * 1e6) - 0.5, 0.0, 1.0)
    longest = np.maximum(context, np.where(chunked, longest_chunk, 0.0))

    def predict(values: Sequence[float]) -> Floats:
        walk, slots, memory, tile = values
        at_once = card.num_sms * slots
        again = group / np.minimum(group, np.maximum(1.0, at_once / requests)) - 1.0
        summed = np.maximum(
            1e6 * kv_bytes * tokens * (1 + missed * again) / (memory * card.bandwidth),
            np.maximum(walk / 1e3 * context, (walk / 1e3 * tokens + tile * requests) * heads / at_once),
        )
        return np.asarray(t0 + np.maximum(summed + in_chunks, walk / 1e3 * longest))

    folds = _point_folds(len(points))
    starts = [(before.us_per_1000_tokens, before.slots_per_sm, before.memory, 3.0), (30.0, 1.0, 0.9, 5.0)]
    fitted = _fitted(predict, measured, starts, (0.1, 0.05, 0.01, 0.0), folds)
    error = _percent(fitted.held_out)
    long = requests * context >= 16_384
    note = f"16k tokens of KV and more: {_percent(fitted.held_out[long]):.1f}" if long.any() else ""
    lines.append(FitLine("no-split attention", len(points), error, None, "analytic", note))
    evidence = Evidence(
        how="every fifth point held out" + (f"; {note}" if note else ""),
        points=len(points),
        held_out_percent=error,
        analytic_percent=error,
        ranges=_ranges(requests=requests, context=context),
    )
    walk, slots, memory, tile = fitted.values
    return NoSplit(walk, slots, memory, tile, before.l2_mb, evidence)


def _fit_reduce(points: Sequence[ReducePoint], lines: list[FitLine]) -> tuple[AllReduce, ...]:
    made = []
    for tp in sorted({point.tp for point in points}):
        sizes: dict[int, float] = {}
        for point in points:
            if point.tp == tp:
                sizes.setdefault(point.bytes, point.us)
        size = np.array(sorted(sizes), dtype=np.float64)
        measured = np.array([sizes[int(value)] for value in size])
        if len(size) < 5:
            continue

        def predict(values: Sequence[float], size: Floats = size) -> Floats:
            return np.asarray(values[0] + size / (values[1] * 1e3))

        folds = np.arange(len(size)) % _FOLDS
        fitted = _fitted(predict, measured, [(5.0, 200.0)], (0.0, 1.0), folds)
        # A point between two others, from those two alone.
        between = np.exp(np.interp(np.log(size[1:-1]), np.log(size), np.log(measured)))
        for number in range(1, len(size) - 1):
            low, high = size[number - 1], size[number + 1]
            share = math.log(size[number] / low) / math.log(high / low)
            between[number - 1] = measured[number - 1] ** (1 - share) * measured[number + 1] ** share
        left_out = np.log(between / measured[1:-1])
        analytic, points_error = _percent(fitted.held_out), _percent(left_out)
        chosen = points_error < analytic
        lines.append(
            FitLine(f"all-reduce over {tp}", len(size), analytic, points_error, "grid" if chosen else "analytic")
        )
        evidence = Evidence(
            how="analytic: every fifth size held out; grid: each size from its neighbours",
            points=len(size),
            held_out_percent=min(analytic, points_error),
            analytic_percent=analytic,
            grid_percent=points_error,
            ranges=_ranges(bytes=size),
        )
        table = tuple(zip(size.tolist(), measured.tolist(), strict=True)) if chosen else ()
        made.append(AllReduce(tp, fitted.values[0], fitted.values[1] * 1e9, table, evidence))
    return tuple(made)


def _small_us(point: SmallPoint, memory: float, card: Hardware) -> float:
    return 1e6 * point.rows * point.elements * 2 / (memory * card.bandwidth)


def _fit_small(points: Sequence[SmallPoint], card: Hardware, lines: list[FitLine]) -> tuple[Elementwise, float]:
    moved = np.array([p.rows * p.elements * 2 for p in points], dtype=np.float64)
    measured = np.array([p.us for p in points], dtype=np.float64)

    def predict(values: Sequence[float]) -> Floats:
        return np.asarray(1e6 * moved / (values[0] * card.bandwidth) + values[1])

    fitted = _fitted(predict, measured, [(1.0, 10.0)], (0.05, 0.0), _point_folds(len(points)))
    error = _percent(fitted.held_out)
    lines.append(FitLine("small kernels of a layer", len(points), error, None, "analytic"))
    rows = np.array([p.rows for p in points], dtype=np.float64)
    evidence = Evidence(
        how="every fifth point held out",
        points=len(points),
        held_out_percent=error,
        analytic_percent=error,
        ranges=_ranges(rows=rows),
    )
    return Elementwise(fitted.values[0], evidence), fitted.values[1]


def _fit_iterations(
    points: Sequence[IterationPoint], made: Calibration, card: Hardware, shape: ModelShape, lines: list[FitLine]
) -> Overhead:
    """Overhead a step and a sampled token, from what logged iterations take beyond the kernels without contexts.

    A log line has no contexts, so decode attention beyond its fixed part goes into the token's cost.
    """
    bare = TimingModel(shape, card, made, params=TimingParams(per_step_us=0.0, per_sampled_token_us=0.0))
    kernels, sampled, measured = [], [], []
    for point in points:
        step = StepShape()
        for _ in range(point.generation_requests):
            step.add_decode(max(1, point.generation_tokens // max(point.generation_requests, 1)), 1)
        for _ in range(point.context_requests):
            step.add_prefill(max(1, point.context_tokens // point.context_requests), 0, 1)
        if step.num_tokens:
            kernels.append(bare.step_cost(step).total / 1e3)
            sampled.append(float(step.num_sampled_tokens))
            measured.append(point.us)
    if len(measured) < 5:
        return made.overhead
    fixed, tokens, times = np.array(kernels), np.array(sampled), np.array(measured)

    def predict(values: Sequence[float]) -> Floats:
        return np.asarray(fixed + values[0] + values[1] * tokens)

    fitted = _fitted(predict, times, [(1000.0, 16.0)], (0.0, 0.0), _point_folds(len(times)))
    error = _percent(fitted.held_out)
    lines.append(FitLine("overhead (iteration log)", len(times), error, None, "analytic"))
    evidence = Evidence(
        how="every fifth iteration held out; the log has no contexts",
        points=len(times),
        held_out_percent=error,
        analytic_percent=error,
    )
    per_step, per_token = fitted.values
    return Overhead(made.overhead.per_layer_us, per_step, per_token, evidence)
