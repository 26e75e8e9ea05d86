"""What a step costs: sums over its frames go in, integer nanoseconds by part come out.

Knows a model's shape, a card, its calibration and the published forms. Must not know requests, batches or policies: the
engine fills a `StepShape` as it walks the frames.

A step is a sum of parts, each with its own form (docs/timing.md); `TimingModel.notes` lists what of it is not
validated. Nobody has published an error under speculation. A card's constants stand in its calibration; those that are
not a card's are in `TimingParams`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Final, NamedTuple

from sim.models.calibration import AllReduce, Calibration, Grid, LinearLayers
from sim.models.hardware import Hardware
from sim.models.shapes import (
    DrafterShape,
    Experts,
    Linear,
    ModelShape,
    dtype_bytes,
    kv_dtype_bytes,
)

__all__ = ["ATTENTION_KERNELS", "NO_COST", "StepCost", "StepShape", "TimingModel", "TimingParams", "capture_sizes"]

_ACTIVATION_BYTES: Final = 2
"""Activations, and what an all-reduce sends, are 16-bit."""

_MEMO_ROWS: Final = 65536
"""Row counts beyond a step's are rarely seen twice; they are not kept."""
_Known = tuple[int, float, float, float, float, int, int, int, int]

ATTENTION_KERNELS: Final = ("fa2", "fa3", "flashinfer")
"""fa2: KV is not split where a request has several query tokens. fa3, flashinfer: it is."""
_QUERY_TILE: Final = 128
"""Query rows, those of all query heads of a KV head packed, that fa3 and flashinfer take through the KV at once."""


_SUMS: Final = (
    "decode_kv_tokens",
    "decode_qk_pairs",
    "decode_reqs",
    "decode_tokens",
    "draft_context_pairs",
    "draft_context_tokens",
    "max_decode_kv_tokens",
    "max_prefill_kv_tokens",
    "moved_rows",
    "num_draft_reqs",
    "num_prefills",
    "num_reqs",
    "num_sampled_tokens",
    "num_spec_tokens",
    "num_tokens",
    "prefill_kv_tokens",
    "prefill_qk_pairs",
    "prefill_tokens",
)


class StepShape:
    """What one step does, in sums over its frames. Filled by the engine; `clear` makes it ready for the next step.

    A frame with a chunk of prefill counts under `prefill_*`; one that decodes or verifies under `decode_*`.
    """

    __slots__ = _SUMS

    def __init__(self) -> None:
        self.num_reqs = 0
        """Frames."""
        self.num_tokens = 0
        """Rows of the forward pass, drafts included."""
        self.num_sampled_tokens = 0
        """Rows that are sampled or verified: 1 + drafts for every frame that samples."""
        self.decode_reqs = 0
        """Frames that decode or verify."""
        self.decode_tokens = 0
        """Their rows."""
        self.decode_kv_tokens = 0
        """Sum of their context lengths, once a request, this step's rows included."""
        self.decode_qk_pairs = 0
        """Sum over them of rows times context: what verification's arithmetic goes by."""
        self.max_decode_kv_tokens = 0
        """The longest of these contexts."""
        self.prefill_tokens = 0
        """Rows of prefill chunks."""
        self.prefill_kv_tokens = 0
        """Sum over chunks of history + chunk."""
        self.max_prefill_kv_tokens = 0
        """The longest history + chunk."""
        self.prefill_qk_pairs = 0
        """Sum over chunks of n rows of n * history + n (n + 1) / 2: the pairs that a causal mask leaves."""
        self.draft_context_tokens = 0
        """Context that the drafter computes anew since it keeps no KV, over all requests."""
        self.draft_context_pairs = 0
        """Its pairs under the causal mask."""
        self.moved_rows = 0
        """Rows of KV, of all layers, that a token tree's compaction moves."""
        self.num_prefills = 0
        """Chunks."""
        self.num_draft_reqs = 0
        """Requests that get drafts proposed after this step."""
        self.num_spec_tokens = 0
        """Drafts each of them gets."""

    def clear(self) -> None:
        """All sums back to 0."""
        self.num_reqs = self.num_tokens = self.num_sampled_tokens = 0
        self.decode_reqs = self.decode_tokens = self.decode_kv_tokens = self.max_decode_kv_tokens = 0
        self.prefill_tokens = self.prefill_kv_tokens = self.prefill_qk_pairs = self.num_prefills = 0
        self.decode_qk_pairs = self.max_prefill_kv_tokens = 0
        self.draft_context_tokens = self.draft_context_pairs = self.moved_rows = 0
        self.num_draft_reqs = self.num_spec_tokens = 0

    def add_decode(self, rows: int, context: int) -> None:
        """A frame that decodes (1 row) or verifies (1 + drafts); `context` is its length with these rows."""
        self.num_reqs += 1
        self.num_tokens += rows
        self.num_sampled_tokens += rows
        self.decode_reqs += 1
        self.decode_tokens += rows
        self.decode_kv_tokens += context
        self.decode_qk_pairs += rows * context
        if context > self.max_decode_kv_tokens:
            self.max_decode_kv_tokens = context

    def add_prefill(self, rows: int, history: int, sampled: int) -> None:
        """A chunk of prefill on a history; `sampled`: 1 if it is the last one, else 0."""
        self.num_reqs += 1
        self.num_tokens += rows
        self.num_sampled_tokens += sampled
        self.num_prefills += 1
        self.prefill_tokens += rows
        self.prefill_kv_tokens += history + rows
        self.prefill_qk_pairs += rows * history + rows * (rows + 1) // 2
        if history + rows > self.max_prefill_kv_tokens:
            self.max_prefill_kv_tokens = history + rows

    def __repr__(self) -> str:
        return f"StepShape({', '.join(f'{name}={getattr(self, name)}' for name in _SUMS)})"


class StepCost(NamedTuple):
    """Nanoseconds by part; the parts are disjoint.

    `linear` is what the linear layers take for one row (reading their weights: memory), `arithmetic` what the rows
    there are add to it, `padding` what CUDA graph padding adds; `attention_decode` reads KV, `allreduce` is
    communication; `overhead` is host and small kernels, with what an eager step waits for its launches; `drafting` the
    proposal after the step; `jitter` what a draw adds or takes, 0 unless the scenario asks for it.
    """

    linear: int = 0
    padding: int = 0
    attention_decode: int = 0
    attention_prefill: int = 0
    allreduce: int = 0
    overhead: int = 0
    drafting: int = 0
    compaction: int = 0
    """Moving the accepted branch of token trees to the front: each row is read and written once."""
    arithmetic: int = 0
    jitter: int = 0

    @property
    def total(self) -> int:
        """The step in nanoseconds."""
        return sum(self)


NO_COST: Final = StepCost()


@dataclass(frozen=True, slots=True)
class TimingParams:
    """Costs that belong to the engine, not to a card. Microseconds, unless the name says otherwise."""

    per_layer_us: float | None = None
    """Small kernels of a layer that do not depend on its rows; None takes the calibration's."""
    per_step_us: float | None = None
    """Host work of a step that the device waits for; None takes the calibration's."""
    per_sampled_token_us: float | None = None
    """A sampled or verified token: sampler, detokenisation, output; None takes the calibration's."""
    draft_round_us: float = 1700.0
    """Host glue of a round of drafting, n-gram excepted. NVIDIA, aisimulate 0.13: 1.7 ms, H200, chains."""
    draft_step_us: float | None = None
    """One forward of the drafter on the requests' rows; None computes it. Published: 0.845 ms a step beside 5.1 ms a
    round for a 120B model (vLLM pull request 32628); 2.14 ms a round, nearly flat in K (SpecDecode-Bench, H100)."""
    ngram_share: float = 0.005875
    """N-gram's proposal as a part of the target's step (SpecDecode-Bench, H100)."""
    eager_layer_us: float = 546.0
    """Launching a layer outside CUDA graphs; the step takes at least that for each layer, unless its kernels take
    longer. NVIDIA, aisimulate 0.13: a model of 28 layers takes 15.3 ms eager, 1.4 ms in a graph (H100)."""
    attention_kernel: str | None = None
    """One of ATTENTION_KERNELS; None takes the card's."""

    def __post_init__(self) -> None:
        for parameter in fields(self):
            value = getattr(self, parameter.name)
            if parameter.name == "attention_kernel":
                continue
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{parameter.name}: must be 0 or more, got {value!r}")
        if self.attention_kernel is not None and self.attention_kernel not in ATTENTION_KERNELS:
            allowed = ", ".join(ATTENTION_KERNELS)
            raise ValueError(f"attention_kernel: must be one of {allowed}, got {self.attention_kernel!r}")


def capture_sizes(max_num_seqs: int, max_num_batched_tokens: int, num_spec_tokens: int = 0) -> tuple[int, ...]:
    """The batch sizes, in tokens, that vLLM 0.32 captures CUDA graphs for; ascending.

    1, 2, 4, then by 8 below 256 and by 16 from there, up to min(512, 2 * max_num_seqs * (K + 1), token budget). Under
    speculation the same grid over requests, times K + 1, joins it, and all are rounded up to multiples of K + 1, what
    then exceeds the largest is dropped (config/vllm.py, config/compilation.py). Data-centre Blackwell captures up to
    1,024 there; this is not followed.
    """
    query = num_spec_tokens + 1
    largest = min(512, 2 * max_num_seqs * query)

    def grid(top: int) -> set[int]:
        return {size for size in (1, 2, 4, *range(8, 256, 8), *range(256, top + 1, 16)) if size <= top}

    top = min(largest, max_num_batched_tokens)
    sizes = grid(top)
    if max_num_batched_tokens <= top:
        sizes.add(max_num_batched_tokens)
    requests = min(max_num_seqs, 512)
    decode = {n * query for n in grid(requests) | {requests}}
    sizes |= {size for size in decode if size <= min(largest, max_num_batched_tokens)}
    if query > 1:
        top = max(sizes)
        rounded = {-(-size // query) * query for size in sizes}
        sizes = {size for size in rounded if size <= top} or ({query} if query <= top else set())
    return tuple(sorted(sizes))


@dataclass(eq=False)
class TimingModel:
    """Step costs of one model on one card (times `tp`), with or without a drafter.

    `calibration`: what the card's kernels reach; one that was fitted on another card is put on this one's datasheet.
    `drafter` None: no drafting. `captured`: the captured sizes, ascending, as `capture_sizes` gives them; empty: every
    step is eager. `dtype`, `kv_cache_dtype` as in vLLM (`fp8` weights: fp8 linear layers). Raises ShapeError for a
    dtype that is not known or a `tp` that does not divide the model, ValueError for a `tp` without all-reduce figures.

    Padding: a step of up to the largest captured size runs in a graph, with its rows padded up to the next one; full
    graphs (pure decode) and piecewise ones (mixed batches) cost the same here. Beyond, it is eager and not padded.
    """

    shape: ModelShape
    card: Hardware
    calibration: Calibration
    tp: int = 1
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    drafter: DrafterShape | None = None
    captured: Sequence[int] = field(default_factory=lambda: capture_sizes(1024, 8192))
    params: TimingParams = field(default_factory=TimingParams)

    def __post_init__(self) -> None:
        card, shape, params = self.card, self.shape, self.params
        forms = self._forms = self.calibration.for_card(card)
        self._sizes = list(self.captured)
        self._by_tokens: dict[tuple[int, int], _Known] = {}
        """`_without_attention` by tokens and sampled ones."""
        self._largest = self._sizes[-1] if self._sizes else 0
        self._kv_bytes = kv_dtype_bytes(self.kv_cache_dtype, self.dtype)
        self._layers = _LinearTimes(shape.linears(self.tp), forms, card, self.dtype, shape.experts(self.tp))
        self._layers_one_row_ns = self._layers.ns(1)
        head_dtype = "bfloat16" if dtype_bytes(self.dtype) == 1 else self.dtype
        self._head = _LinearTimes(((shape.lm_head(self.tp), 1),), forms, card, head_dtype)
        self._head_one_row_ns = self._head.ns(1)
        self._attention = _AttentionTimes(shape, card, forms, self.tp, self._kv_bytes, params)
        nowhere = (0.0, math.inf)
        self._most_rows = 2 * self._layers.ranges.get("rows", nowhere)[1]
        self._most_requests = 2 * self._attention.ranges.get("requests", nowhere)[1]
        self._longest = 2 * self._attention.ranges.get("context", nowhere)[1]
        row_bytes = shape.kv_bytes_per_token(self._kv_bytes, self.tp)
        self._move_ns_per_row = 1e9 * 2 * row_bytes / card.bandwidth
        overhead = forms.overhead
        per_step = overhead.per_step_us if params.per_step_us is None else params.per_step_us
        per_layer = self._per_layer_us = overhead.per_layer_us if params.per_layer_us is None else params.per_layer_us
        per_token = (
            overhead.per_sampled_token_us if params.per_sampled_token_us is None else params.per_sampled_token_us
        )
        self._overhead_ns = 1e3 * (per_step + per_layer * shape.num_layers)
        self._sampled_ns = 1e3 * per_token
        self._small_ns_per_row = _small_ns_per_row(shape, card, forms, self.tp)
        self._launch_ns = 1e3 * params.eager_layer_us * shape.num_layers
        self._reduce = _ReduceTimes(shape, forms.allreduce_for(self.tp)) if self.tp > 1 else None
        self._drafting = (
            None
            if self.drafter is None or self.drafter.layers is None
            else _DraftTimes(self.drafter, self.drafter.layers, card, forms, self.tp, self._kv_bytes, params, per_layer)
        )
        if self._drafting is not None:
            self._drafting.attention.share_table(self._attention)

    @property
    def notes(self) -> tuple[str, ...]:
        """What of these costs is estimated, borrowed or not validated."""
        notes = list(self._forms.notes)
        if dtype_bytes(self.dtype) == 1 and "fp8" not in self._forms.linear:
            notes.append(f"fp8 linear layers on {self.card.name}: no table; bf16 kernels on one byte a weight")
        if self._attention.kernel == "fa3":
            notes.append("verification costs as much attention as decoding (FlashAttention 3): not validated")
        elif self._attention.kernel == "flashinfer":
            notes.append("FlashInfer: FlashAttention 3's figures, not validated")
        else:
            notes.append("FlashAttention 2: prefill chunks beside decodes, validated on an RTX 4090 alone")
        if self.shape.moe is not None:
            notes.append(
                "mixture of experts: experts touched as if the router spread evenly; grouped kernels not measured"
            )
        if self.shape.mla is not None:
            notes.append("latent attention: forms of grouped-query kernels on its bytes and operations, not measured")
        if self.drafter is not None:
            notes.append("nobody has published an error under speculation")
        return tuple(notes)

    def outside(self, step: StepShape) -> str | None:
        """The first quantity of the step that lies outside what the calibration was measured on; None inside.

        Only axes with a range count; a factor of 2 beyond it is let pass.
        """
        if step.num_tokens > self._most_rows:
            return f"{step.num_tokens} tokens in a step; linear layers were measured up to {self._most_rows / 2:g}"
        if step.decode_reqs > self._most_requests:
            return f"{step.decode_reqs} decoding requests; measured up to {self._most_requests / 2:g}"
        if step.decode_kv_tokens > self._longest * step.decode_reqs:
            mean = step.decode_kv_tokens / step.decode_reqs
            return f"contexts of {mean:.0f} tokens; decode attention was measured up to {self._longest / 2:g}"
        return None

    def padded(self, num_tokens: int) -> int:
        """The rows a step of that many tokens runs with."""
        if not 0 < num_tokens <= self._largest:
            return num_tokens
        return self._sizes[bisect_left(self._sizes, num_tokens)]

    def step_cost(self, step: StepShape) -> StepCost:
        """What the step takes. Cost of a call: a few microseconds; a step without tokens costs nothing."""
        tokens = step.num_tokens
        if tokens <= 0:
            return NO_COST
        sampled = step.num_sampled_tokens
        known = self._by_tokens.get((tokens, sampled))
        if known is None:
            known = self._without_attention(tokens, sampled)
            if len(self._by_tokens) < _MEMO_ROWS:
                self._by_tokens[tokens, sampled] = known
        rows, layers, reduce, overhead, so_far, linear_ns, padding_ns, reduce_ns, arithmetic_ns = known
        decode, prefill = self._attention.ns(step)
        if tokens > self._largest:
            overhead += max(0.0, self._launch_ns - (layers + decode + prefill + reduce))
        drafting = 0.0
        if self._drafting is not None:
            drafting = self._drafting.ns(step, rows, self.padded(step.num_draft_reqs))
        elif self.drafter is not None and step.num_draft_reqs and step.num_spec_tokens:
            drafting = self.params.ngram_share * (so_far + decode + prefill + reduce + overhead)
        return StepCost(
            linear_ns,
            padding_ns,
            round(decode) if decode else 0,
            round(prefill) if prefill else 0,
            reduce_ns,
            round(overhead),
            round(drafting) if drafting else 0,
            round(self._move_ns_per_row * step.moved_rows) if step.moved_rows else 0,
            arithmetic_ns,
        )

    def _without_attention(self, tokens: int, sampled: int) -> _Known:
        """What depends on no context: the rows; the times of the layers, of all-reduce, of the overhead, and of linear
        layers, arithmetic and padding together; and the parts that are settled by it, whole."""
        rows = self.padded(tokens)
        layers = self._layers.ns(tokens)
        linear = min(layers, self._layers_one_row_ns)
        arithmetic = layers - linear
        if sampled:
            head = self._head.ns(sampled)
            linear += min(head, self._head_one_row_ns)
            arithmetic += max(0.0, head - self._head_one_row_ns)
        padding = max(0.0, self._layers.ns(rows) - layers) if rows != tokens else 0.0
        reduce = 0.0 if self._reduce is None else self._reduce.ns(rows)
        overhead = self._overhead_ns + self._sampled_ns * sampled + self._small_ns_per_row * rows
        so_far = linear + arithmetic + padding
        settled = round(linear), round(padding), round(reduce), round(arithmetic)
        return rows, layers, reduce, overhead, so_far, *settled


def _small_ns_per_row(shape: ModelShape, card: Hardware, forms: Calibration, tp: int) -> float:
    """Norms, rotary embedding and activation of all layers for one row: bytes in and out, fused as vLLM does."""
    heads, kv_heads = shape.heads(tp)
    qkv = (heads + 2 * kv_heads) * shape.head_dim
    mlp = shape.intermediate_size // tp
    if shape.moe is not None:
        mlp = (shape.moe.num_experts_per_tok + shape.moe.num_shared_experts) * shape.moe.intermediate_size // tp
    # Two norms, each reads and writes hidden state and residual; rotary in place; activation reads two, writes one.
    elements = 2 * 4 * shape.hidden_size + 2 * qkv + 3 * mlp
    per_layer = elements * _ACTIVATION_BYTES / (forms.elementwise.memory * card.bandwidth)
    return 1e9 * shape.num_layers * per_layer


class _ReduceTimes:
    """The all-reduces of a step by rows, each computed once: two a layer, after attention and after the MLP."""

    __slots__ = ("_by_rows", "_link", "_row_bytes", "_times")

    def __init__(self, shape: ModelShape, link: AllReduce) -> None:
        self._link = link
        self._times = 2 * shape.num_layers
        self._row_bytes = shape.hidden_size * _ACTIVATION_BYTES
        self._by_rows: dict[int, float] = {}

    def ns(self, rows: int) -> float:
        known = self._by_rows.get(rows)
        if known is None:
            known = 1e3 * self._times * self._link.us(rows * self._row_bytes)
            if rows < _MEMO_ROWS:
                self._by_rows[rows] = known
        return known


class _LinearTimes:
    """Times of a set of linear layers, and of experts, by rows, each computed once."""

    __slots__ = ("_by_rows", "_experts", "_grid", "_p", "_t0_ns", "_terms", "ranges")

    def __init__(
        self,
        linears: Sequence[tuple[Linear, int]],
        forms: Calibration,
        card: Hardware,
        dtype: str,
        experts: Experts | None = None,
    ) -> None:
        element_bytes = dtype_bytes(dtype)
        part, peak = _linear_form(forms, card, dtype)
        bandwidth = card.bandwidth
        self.ranges: Mapping[str, tuple[float, float]] = part.evidence.ranges
        self._p = part.p
        self._t0_ns = 1e3 * part.t0_us
        self._grid = part.grid
        # Per layer: how many, compute ns a row, ns for its weights, outputs, inputs.
        self._terms = [
            (
                times,
                1e9 * 2 * linear.n * linear.k / (part.compute * peak),
                1e9 * linear.n * linear.k * element_bytes / (part.memory * bandwidth),
                linear.n,
                linear.k,
            )
            for linear, times in linears
        ]
        self._experts: tuple[Experts, tuple[tuple[float, float], ...]] | None = None
        if experts is not None:
            costs = tuple(
                (
                    1e9 * 2 * matrix.n * matrix.k / (part.compute * peak),
                    1e9 * matrix.n * matrix.k * element_bytes / (part.memory * bandwidth),
                )
                for matrix in (experts.gate_up, experts.down)
            )
            self._experts = (experts, costs)
        self._by_rows: dict[int, float] = {0: 0.0}

    def ns(self, rows: int) -> float:
        known = self._by_rows.get(rows)
        if known is None:
            known = self._computed(rows)
            if self._grid is not None:  # measured times dip here and there; fewer rows never cost more here
                below = [int(knot) for knot in self._grid.knots[0] if knot < rows]
                if below:
                    known = max(known, self.ns(below[-1]))
            if rows < _MEMO_ROWS:
                self._by_rows[rows] = known
        return known

    def _computed(self, rows: int) -> float:
        p, grid = self._p, self._grid
        total = 0.0
        for times, compute, memory, n, k in self._terms:
            one = ((rows * compute) ** p + memory**p) ** (1 / p) + self._t0_ns
            if grid is not None:
                one *= math.exp(grid.log_factor(rows, n, k))
            total += times * one
        if self._experts is not None:
            experts, costs = self._experts
            # Weights of the experts that the batch touches are read once, each token's rows pass through its own.
            touched = experts.moe.expected_experts(rows)
            expert_rows = rows * experts.moe.num_experts_per_tok
            for compute, memory in costs:
                one = ((expert_rows * compute) ** p + (touched * memory) ** p) ** (1 / p) + self._t0_ns
                total += experts.layers * one
        return total


def _linear_form(forms: Calibration, card: Hardware, dtype: str) -> tuple[LinearLayers, float]:
    """The form for a weight's type, and the peak it is a share of."""
    if dtype_bytes(dtype) != 1:
        return forms.linear["bfloat16"], card.bf16_flops
    if card.fp8_flops is not None and "fp8" in forms.linear:
        return forms.linear["fp8"], card.fp8_flops
    # Weight-only fp8: bf16 kernels on one byte a weight. Their grid was measured on two.
    part = forms.linear["bfloat16"]
    return LinearLayers(part.compute, part.memory, part.t0_us, part.p, None, part.evidence), card.bf16_flops


class _AttentionTimes:
    """Attention of all layers of one model on one rank."""

    __slots__ = (
        "_compute_ns_per_pair",
        "_decode_ns_per_token",
        "_decode_t0_ns",
        "_group",
        "_kv_head_share_of_l2",
        "_nosplit_ns_per_token",
        "_pair_ns",
        "_prefill_ns_per_kv",
        "_prefill_ns_per_pair",
        "_prefill_ns_per_row",
        "_prefill_t0_ns",
        "_prefill_walk_ns",
        "_slots",
        "_table",
        "_tile_ns",
        "_walk_ns_per_token",
        "_waves_ns_per_token",
        "kernel",
        "ranges",
        "splits",
    )

    def __init__(
        self,
        shape: ModelShape,
        card: Hardware,
        forms: Calibration,
        tp: int,
        kv_element_bytes: int,
        params: TimingParams,
    ) -> None:
        layers = shape.num_layers
        heads, kv_heads = shape.heads(tp)
        mla = shape.mla
        fp8 = kv_element_bytes == 1
        own_fp8 = fp8 and "fp8" in forms.decode
        decode = forms.decode["fp8" if own_fp8 else "bfloat16"]
        prefill = forms.prefill["fp8" if fp8 and "fp8" in forms.prefill else "bfloat16"]
        factor = forms.fp8_kv_factor if fp8 and not own_fp8 else 1.0
        # That factor is a time over the bf16 cache's, so bytes are counted in 16 bits with it.
        kv_bytes = shape.kv_bytes_per_token(2 if fp8 and not own_fp8 else kv_element_bytes, tp)
        bandwidth = card.bandwidth
        self._decode_t0_ns = 1e3 * layers * decode.t0_us
        self._decode_ns_per_token = 1e9 * factor * kv_bytes / (decode.memory * bandwidth)
        self._pair_ns = layers * kv_heads * decode.pair_ns
        self.ranges: Mapping[str, tuple[float, float]] = decode.evidence.ranges
        self._group = heads // kv_heads
        self._table: _Table | None = None
        if decode.grid is not None and mla is None:
            self._table = _Table(decode.grid.sliced(kv_heads=kv_heads, group=self._group))
        self.kernel = params.attention_kernel or ("fa2" if card.flash_attention == 2 else "fa3")
        self.splits = self.kernel != "fa2"
        no_split = forms.no_split
        self._nosplit_ns_per_token = 1e9 * factor * kv_bytes / (no_split.memory * bandwidth)
        self._walk_ns_per_token = layers * no_split.us_per_1000_tokens
        self._slots = card.num_sms * no_split.slots_per_sm
        self._waves_ns_per_token = self._walk_ns_per_token * heads / self._slots
        self._tile_ns = 1e3 * layers * no_split.tile_us * heads / self._slots
        self._kv_head_share_of_l2 = kv_bytes / (layers * kv_heads * no_split.l2_mb * 1e6)
        self._prefill_t0_ns = 1e3 * layers * prefill.t0_us
        self._prefill_walk_ns = layers * prefill.walk_us_per_1000
        # Four operations a pair and element of a head: two products, two each.
        flops = 4 * heads * shape.head_dim
        row_bytes = 2 * heads * shape.head_dim * _ACTIVATION_BYTES  # query in, output out
        decode_flops = flops
        if mla is not None:
            query_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
            flops = 2 * heads * (query_dim + mla.v_head_dim)
            row_bytes = heads * (query_dim + mla.v_head_dim) * _ACTIVATION_BYTES
            # Decoding works on the latent vector itself: the up-projections are absorbed.
            decode_flops = 2 * heads * (mla.cached_elements + mla.kv_lora_rank)
        self._prefill_ns_per_pair = 1e9 * layers * flops / (prefill.compute * card.bf16_flops)
        self._compute_ns_per_pair = 1e9 * layers * decode_flops / (prefill.compute * card.bf16_flops)
        self._prefill_ns_per_kv = 1e9 * kv_bytes / (prefill.memory * bandwidth)
        self._prefill_ns_per_row = 1e9 * layers * row_bytes / (prefill.memory * bandwidth)

    def share_table(self, other: _AttentionTimes) -> None:
        """Ask the other's table where it says the same: it keeps its last answer."""
        own, table = self._table, other._table
        if own is not None and table is not None and own.says_the_same(table):
            self._table = table

    def ns(self, step: StepShape) -> tuple[float, float]:
        """Decoding's part and prefill's."""
        requests = step.decode_reqs
        if not step.num_prefills:
            if not requests:
                return 0.0, 0.0
            if self.splits or step.decode_tokens <= requests:
                return self._split_ns(step), 0.0
            return self._decode_t0_ns + self._nosplit_ns(step), 0.0
        chunks = self._chunks_ns(step)
        if not requests:
            return 0.0, chunks
        if self.splits:
            return self._split_ns(step), chunks
        # FlashAttention 2 takes all frames in one launch without a split: the work adds up, and the longest context is
        # walked from end to end beside it.
        decode = self._nosplit_ns(step)
        longest = max(step.max_decode_kv_tokens, step.max_prefill_kv_tokens)
        return max(decode, self._prefill_t0_ns + self._walk_ns_per_token * longest - chunks), chunks

    def _split_ns(self, step: StepShape) -> float:
        requests, kv_tokens = step.decode_reqs, step.decode_kv_tokens
        read = self._decode_ns_per_token * kv_tokens
        tiles = -(-step.decode_tokens * self._group // (requests * _QUERY_TILE))
        if tiles > 1:  # rows beyond a tile read the KV again
            read *= tiles
        one_token = self._decode_t0_ns + self._pair_ns * requests + read
        if self._table is not None:
            one_token *= self._table.factor(requests, kv_tokens / requests)
        return max(one_token, self._decode_t0_ns + self._compute_ns_per_pair * step.decode_qk_pairs)

    def _nosplit_ns(self, step: StepShape) -> float:
        # FlashAttention 2 splits KV only if no request of the batch has more than one query token. So one with the
        # longest context, or as many as fill the card, walks it in order.
        requests, kv_tokens = step.decode_reqs, step.decode_kv_tokens
        # Tiles go by requests, then by heads: the heads of a group that do not fit beside each other read KV again,
        # unless what a KV head has of all requests stays in the cache.
        missed = min(max(self._kv_head_share_of_l2 * kv_tokens - 0.5, 0.0), 1.0)
        again = self._group / min(self._group, max(1.0, self._slots / requests)) - 1.0
        return max(
            self._nosplit_ns_per_token * kv_tokens * (1.0 + missed * again),
            self._walk_ns_per_token * step.max_decode_kv_tokens,
            self._waves_ns_per_token * kv_tokens + self._tile_ns * requests,
        )

    def one_token_ns(self, requests: int, kv_tokens: int) -> float:
        """Decoding one token a request over contexts of `kv_tokens` in all."""
        if not requests or not kv_tokens:
            return self._decode_t0_ns
        time = self._decode_t0_ns + self._pair_ns * requests + self._decode_ns_per_token * kv_tokens
        return time if self._table is None else time * self._table.factor(requests, kv_tokens / requests)

    def causal_ns(self, pairs: int, tokens: int) -> float:
        """Attention of whole contexts computed from nothing, `tokens` rows with `pairs` under the mask."""
        return (
            self._prefill_t0_ns
            + self._prefill_ns_per_pair * pairs
            + (self._prefill_ns_per_kv + self._prefill_ns_per_row) * tokens
        )

    def _chunks_ns(self, step: StepShape) -> float:
        return self._prefill_t0_ns + max(
            self._prefill_ns_per_pair * step.prefill_qk_pairs
            + self._prefill_ns_per_kv * step.prefill_kv_tokens
            + self._prefill_ns_per_row * step.prefill_tokens,
            self._prefill_walk_ns * step.max_prefill_kv_tokens,
        )


class _Table:
    """A two-dimensional grid made quick: a row of factors' logarithms by requests, each made once."""

    __slots__ = ("_by_row", "_columns", "_last_column", "_last_factor", "_last_row", "_rows", "_shares", "_values")

    def __init__(self, grid: Grid) -> None:
        rows, columns = grid.knots
        self._last_row = 0
        self._last_column = 0.0
        self._last_factor = 1.0
        self._rows = [math.log(knot) for knot in rows]
        self._columns = [math.log(knot) for knot in columns]
        self._shares = [1.0 / (after - before) for before, after in pairwise(self._columns)]
        width = len(columns)
        self._values = [list(grid.log_factors[n * width : (n + 1) * width]) for n in range(len(rows))]
        self._by_row: dict[int, list[float]] = {}

    def says_the_same(self, other: _Table) -> bool:
        """Whether every factor is equal."""
        return (self._rows, self._columns, self._values) == (other._rows, other._columns, other._values)

    def factor(self, row: int, column: float) -> float:
        """The factor for so many requests with contexts of `column` tokens in the mean."""
        if row == self._last_row and column == self._last_column:  # a drafter asks several times a step
            return self._last_factor
        values = self._by_row.get(row)
        if values is None:
            values = self._by_row[row] = self._between(row)
        columns = self._columns
        y = math.log(column)
        if y <= columns[0]:
            log_factor = values[0]
        elif y >= columns[-1]:
            log_factor = values[-1]
        else:
            j = bisect_right(columns, y) - 1
            log_factor = values[j] + (y - columns[j]) * self._shares[j] * (values[j + 1] - values[j])
        found = math.exp(log_factor)
        self._last_row = row
        self._last_column = column
        self._last_factor = found
        return found

    def _between(self, row: int) -> list[float]:
        rows, values = self._rows, self._values
        x = min(max(math.log(row), rows[0]), rows[-1])
        if x == rows[-1]:
            return values[-1]
        i = bisect_right(rows, x) - 1
        u = (x - rows[i]) / (rows[i + 1] - rows[i])
        return [low + u * (high - low) for low, high in zip(values[i], values[i + 1], strict=True)]


class _DraftTimes:
    """A round of drafting with layers of its own: K forwards, the first of them over all rows of the step.

    As in vLLM 0.32 (v1/spec_decode): the first forward covers the target's rows, prompts and rejected drafts
    included, since it also writes the drafter's KV; so it runs at K = 0 too. The other K - 1 have a row a request.
    """

    __slots__ = ("_first", "_head", "_later", "_params", "_reduce", "_small_ns", "_small_ns_per_row", "attention")

    def __init__(
        self,
        drafter: DrafterShape,
        layers: ModelShape,
        card: Hardware,
        forms: Calibration,
        tp: int,
        kv_element_bytes: int,
        params: TimingParams,
        per_layer_us: float,
    ) -> None:
        linears = list(drafter.linears(tp))
        # The projection is on every rank, not split.
        projection = [] if drafter.projection is None else [(drafter.projection, 1)]
        later = linears + (projection if drafter.projection_each_forward else [])
        experts = layers.experts(tp)
        head = drafter.lm_head(tp)
        self._first = _LinearTimes(linears + projection, forms, card, "bfloat16", experts)
        self._later = _LinearTimes(later, forms, card, "bfloat16", experts)
        self._head = _LinearTimes([] if head is None else [(head, 1)], forms, card, "bfloat16")
        self.attention = _AttentionTimes(layers, card, forms, tp, kv_element_bytes, params)
        self._small_ns = 1e3 * per_layer_us * layers.num_layers
        self._small_ns_per_row = _small_ns_per_row(layers, card, forms, tp)
        self._reduce = _ReduceTimes(layers, forms.allreduce_for(tp)) if tp > 1 else None
        self._params = params

    def ns(self, step: StepShape, rows: int, draft_rows: int) -> float:
        """`rows`, `draft_rows`: those of the step and of the requests that get drafts, padded."""
        params, attention = self._params, self.attention
        forwards = step.num_spec_tokens if step.num_draft_reqs else 0
        cost = 1e3 * params.draft_round_us
        if step.draft_context_tokens:
            cost += self._first.ns(step.draft_context_tokens) + attention.causal_ns(
                step.draft_context_pairs, step.draft_context_tokens
            )
        if params.draft_step_us is not None:
            cost += 1e3 * params.draft_step_us * forwards
            if step.num_prefills:  # its prompt rows are not in the figure
                cost += self._first.ns(step.prefill_tokens) + attention.ns(step)[1]
            return cost
        cost += self._first.ns(rows) + self._small(rows) + sum(attention.ns(step))
        if forwards:
            cost += self._head.ns(step.num_draft_reqs) * forwards
            cost += (forwards - 1) * (
                self._later.ns(draft_rows)
                + attention.one_token_ns(step.decode_reqs, step.decode_kv_tokens)
                + self._small(draft_rows)
            )
        return cost

    def _small(self, rows: int) -> float:
        reduce = 0.0 if self._reduce is None else self._reduce.ns(rows)
        return self._small_ns + self._small_ns_per_row * rows + reduce
