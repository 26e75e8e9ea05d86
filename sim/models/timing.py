"""What a step costs: sums over its frames go in, integer nanoseconds by part come out.

Knows a model's shape, a card and the published forms. Must not know requests, batches or policies: the engine fills a
`StepShape` as it walks the frames.

A step is a sum of parts, each with its own form; `TimingModel.notes` lists what of it is not validated. Nobody has
published an error under speculation. Forms and constants are fits to public measurements (see `sim.models.hardware`);
those that are not a card's are in `TimingParams`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Final, NamedTuple

from sim.models.hardware import Hardware, LinearEfficiency
from sim.models.shapes import (
    DrafterShape,
    Linear,
    ModelShape,
    dtype_bytes,
    kv_dtype_bytes,
)

__all__ = ["NO_COST", "StepCost", "StepShape", "TimingModel", "TimingParams", "capture_sizes"]

_ACTIVATION_BYTES: Final = 2
"""Activations, and what an all-reduce sends, are 16-bit."""

_FA2_NOSPLIT_MEMORY: Final = 0.46
_MEMO_ROWS: Final = 65536
"""Row counts beyond a step's are rarely seen twice; they are not kept."""
_FA2_WAVES: Final = 1.3
"""FlashAttention 2 without split: KV bytes over 0.46 of the bandwidth, or query heads over 1.3 times the SMs."""


class StepShape:
    """What one step does, in sums over its frames. Filled by the engine; `clear` makes it ready for the next step.

    A frame with a chunk of prefill counts under `prefill_*`; one that decodes or verifies under `decode_*`.
    """

    __slots__ = (
        "decode_kv_tokens",
        "decode_reqs",
        "decode_tokens",
        "draft_context_pairs",
        "draft_context_tokens",
        "max_decode_kv_tokens",
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
        self.max_decode_kv_tokens = 0
        """The longest of these contexts."""
        self.prefill_tokens = 0
        """Rows of prefill chunks."""
        self.prefill_kv_tokens = 0
        """Sum over chunks of history + chunk."""
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
        self.num_draft_reqs = self.num_spec_tokens = 0

    def add_decode(self, rows: int, context: int) -> None:
        """A frame that decodes (1 row) or verifies (1 + drafts); `context` is its length with these rows."""
        self.num_reqs += 1
        self.num_tokens += rows
        self.num_sampled_tokens += rows
        self.decode_reqs += 1
        self.decode_tokens += rows
        self.decode_kv_tokens += context
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

    def __repr__(self) -> str:
        return f"StepShape({', '.join(f'{name}={getattr(self, name)}' for name in self.__slots__)})"


class StepCost(NamedTuple):
    """Nanoseconds by part; the parts are disjoint.

    `linear` is for the rows there are, `padding` what CUDA graph padding adds to it; `overhead` is host and small
    kernels, with what an eager step waits for its launches; `drafting` the proposal after the step.
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

    @property
    def total(self) -> int:
        """The step in nanoseconds."""
        return sum(self)


NO_COST: Final = StepCost()


@dataclass(frozen=True, slots=True)
class TimingParams:
    """Costs that belong to the engine, not to a card. Microseconds, unless the name says otherwise."""

    per_layer_us: float = 14.0
    """Norms, rotary embedding, activation and cache write of a layer. Fit to 60 H200 serving rows (aiconfigurator)."""
    per_step_us: float = 950.0
    """Host work of a step that the device waits for. Fits to serving rows range from 800 to 1,100."""
    per_sampled_token_us: float = 16.0
    """A sampled or verified token: sampler, detokenisation, output. The fits range from 12 to 20."""
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
    fa2_us_per_1000_tokens: float = 25.0
    """FlashAttention 2 with several query tokens: walking a context without a split. Measured: 21 to 29 (40 on an RTX
    3090; aiconfigurator, LLMServingSim, vllm-project/flash-attention pull request 193)."""
    flash_attention: int | None = None
    """2 or 3; None takes the card's."""

    def __post_init__(self) -> None:
        for parameter in fields(self):
            value = getattr(self, parameter.name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{parameter.name}: must be 0 or more, got {value!r}")
        if self.flash_attention not in (None, 2, 3):
            raise ValueError(f"flash_attention: must be 2 or 3, got {self.flash_attention!r}")


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

    `drafter` None: no drafting. `captured`: the captured sizes, ascending, as `capture_sizes` gives them; empty: every
    step is eager. `dtype`, `kv_cache_dtype` as in vLLM (`fp8` weights: fp8 linear layers). Raises ShapeError for a
    dtype that is not known or a `tp` that does not divide the model, ValueError for a `tp` without all-reduce figures.

    Padding: a step of up to the largest captured size runs in a graph, with its rows padded up to the next one; full
    graphs (pure decode) and piecewise ones (mixed batches) cost the same here. Beyond, it is eager and not padded.
    """

    shape: ModelShape
    card: Hardware
    tp: int = 1
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    drafter: DrafterShape | None = None
    captured: Sequence[int] = field(default_factory=lambda: capture_sizes(1024, 8192))
    params: TimingParams = field(default_factory=TimingParams)

    def __post_init__(self) -> None:
        card, shape, params = self.card, self.shape, self.params
        self._sizes = list(self.captured)
        self._largest = self._sizes[-1] if self._sizes else 0
        fp8 = dtype_bytes(self.dtype) == 1
        self._kv_bytes = kv_dtype_bytes(self.kv_cache_dtype, self.dtype)
        efficiency = card.linear_fp8 if fp8 else card.linear
        peak = card.fp8_flops if fp8 and card.fp8_flops is not None else card.bf16_flops
        self._layers = _LinearTimes(
            [(linear, shape.num_layers) for linear in shape.layer_linears(self.tp)],
            efficiency,
            peak,
            card.bandwidth,
            dtype_bytes(self.dtype),
        )
        head_bytes = max(2, dtype_bytes(self.dtype))
        self._head = _LinearTimes(
            [(shape.lm_head(self.tp), 1)], card.linear, card.bf16_flops, card.bandwidth, head_bytes
        )
        self._attention = _AttentionTimes(shape, card, self.tp, self._kv_bytes, params)
        row_bytes = shape.kv_bytes_per_token(self._kv_bytes, self.tp)
        self._move_ns_per_row = 1e9 * 2 * row_bytes / card.bandwidth
        self._overhead_ns = 1e3 * (params.per_step_us + params.per_layer_us * shape.num_layers)
        self._launch_ns = 1e3 * params.eager_layer_us * shape.num_layers
        self._reduce_t0_ns = self._reduce_ns_per_row = 0.0
        if self.tp > 1:
            link = card.allreduce_for(self.tp)
            # Two a layer: after attention and after the MLP.
            self._reduce_t0_ns = 1e3 * 2 * shape.num_layers * link.t0_us
            self._reduce_ns_per_row = (
                1e9 * 2 * shape.num_layers * shape.hidden_size * _ACTIVATION_BYTES / link.bandwidth
            )
        self._drafting = (
            None
            if self.drafter is None or self.drafter.layers is None
            else _DraftTimes(self.drafter, self.drafter.layers, card, self.tp, self._kv_bytes, params)
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What of these costs is estimated, borrowed or not validated."""
        notes = list(self.card.notes)
        if dtype_bytes(self.dtype) == 1:
            notes.append("fp8 linear layers: this form is 17 to 20 percent off")
        if self._attention.splits:
            notes.append("verification costs as much attention as decoding (FlashAttention 3): not validated")
        else:
            notes.append("prefill chunks beside decodes cost more than the sum on FlashAttention 2")
        if self.drafter is not None:
            notes.append("nobody has published an error under speculation")
        return tuple(notes)

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
        params = self.params
        rows = self.padded(tokens)
        linear = self._layers.ns(tokens) + self._head.ns(step.num_sampled_tokens)
        padding = self._layers.ns(rows) - self._layers.ns(tokens) if rows != tokens else 0.0
        decode = self._attention.decode_ns(step) if step.decode_reqs else 0.0
        prefill = self._attention.prefill_ns(step) if step.num_prefills else 0.0
        reduce = self._reduce_t0_ns + self._reduce_ns_per_row * rows
        overhead = self._overhead_ns + 1e3 * params.per_sampled_token_us * step.num_sampled_tokens
        if tokens > self._largest:
            overhead += max(0.0, self._launch_ns - (linear + decode + prefill + reduce))
        drafting = 0.0
        if self._drafting is not None:
            drafting = self._drafting.ns(step, rows, self.padded(step.num_draft_reqs))
        elif self.drafter is not None and step.num_draft_reqs and step.num_spec_tokens:
            drafting = params.ngram_share * (linear + padding + decode + prefill + reduce + overhead)
        return StepCost(
            round(linear),
            round(padding),
            round(decode),
            round(prefill),
            round(reduce),
            round(overhead),
            round(drafting),
            round(self._move_ns_per_row * step.moved_rows),
        )


class _LinearTimes:
    """Times of a set of linear layers by rows, each computed once."""

    __slots__ = ("_by_rows", "_p", "_t0_ns", "_terms")

    def __init__(
        self,
        linears: Sequence[tuple[Linear, int]],
        efficiency: LinearEfficiency,
        peak: float,
        bandwidth: float,
        element_bytes: int,
    ) -> None:
        self._p = efficiency.p
        self._t0_ns = 1e3 * efficiency.t0_us
        # Per layer: how many, compute ns a row, ns for its weights.
        self._terms = [
            (
                times,
                1e9 * 2 * linear.n * linear.k / (efficiency.compute * peak),
                1e9 * linear.n * linear.k * element_bytes / (efficiency.memory * bandwidth),
            )
            for linear, times in linears
        ]
        self._by_rows: dict[int, float] = {0: 0.0}

    def ns(self, rows: int) -> float:
        known = self._by_rows.get(rows)
        if known is None:
            p = self._p
            known = sum(
                times * (((rows * compute) ** p + memory**p) ** (1 / p) + self._t0_ns)
                for times, compute, memory in self._terms
            )
            if rows < _MEMO_ROWS:
                self._by_rows[rows] = known
        return known


class _AttentionTimes:
    """Attention of all layers of one model on one rank."""

    __slots__ = (
        "_decode_ns_per_token",
        "_decode_t0_ns",
        "_nosplit_ns_per_token",
        "_nosplit_waves_per_token",
        "_prefill_ns_per_kv",
        "_prefill_ns_per_pair",
        "_prefill_ns_per_row",
        "_prefill_t0_ns",
        "_walk_ns_per_token",
        "splits",
    )

    def __init__(self, shape: ModelShape, card: Hardware, tp: int, kv_element_bytes: int, params: TimingParams) -> None:
        layers = shape.num_layers
        heads, _ = shape.heads(tp)
        factor = card.fp8_kv_factor if kv_element_bytes == 1 else 1.0
        # The fp8 factor is a time over the bf16 cache's, so bytes are counted in 16 bits here.
        kv_bytes = shape.kv_bytes_per_token(2 if kv_element_bytes == 1 else kv_element_bytes, tp)
        bandwidth, decode, prefill = card.bandwidth, card.decode, card.prefill
        self._decode_t0_ns = 1e3 * layers * decode.t0_us
        self._decode_ns_per_token = 1e9 * factor * kv_bytes / (decode.memory * bandwidth)
        version = params.flash_attention or card.flash_attention
        self.splits = version != 2
        self._nosplit_ns_per_token = 1e9 * factor * kv_bytes / (_FA2_NOSPLIT_MEMORY * bandwidth)
        self._walk_ns_per_token = layers * params.fa2_us_per_1000_tokens
        self._nosplit_waves_per_token = self._walk_ns_per_token * heads / (card.num_sms * _FA2_WAVES)
        self._prefill_t0_ns = 1e3 * layers * prefill.t0_us
        # Four operations a pair and element of a head: two products, two each.
        self._prefill_ns_per_pair = 1e9 * 4 * layers * heads * shape.head_dim / (prefill.compute * card.bf16_flops)
        self._prefill_ns_per_kv = 1e9 * kv_bytes / (prefill.memory * bandwidth)
        row_bytes = 2 * heads * shape.head_dim * _ACTIVATION_BYTES  # query in, output out
        self._prefill_ns_per_row = 1e9 * layers * row_bytes / (prefill.memory * bandwidth)

    def decode_ns(self, step: StepShape) -> float:
        kv_tokens = step.decode_kv_tokens
        if self.splits or (step.decode_tokens <= step.decode_reqs and not step.num_prefills):
            return self._decode_t0_ns + self._decode_ns_per_token * kv_tokens
        # FlashAttention 2 splits KV only if no request of the batch has more than one query token. So one with the
        # longest context, or as many as fill the card, walks it in order. For equal contexts this is
        # max(KV bytes / (.46 W), c ctx max(1, B heads / SMs / 1.3)), with the query heads of a rank.
        return max(
            self._decode_t0_ns + self._decode_ns_per_token * kv_tokens,
            self._nosplit_ns_per_token * kv_tokens,
            self._walk_ns_per_token * step.max_decode_kv_tokens,
            self._nosplit_waves_per_token * kv_tokens,
        )

    def one_token_ns(self, kv_tokens: int) -> float:
        """Decoding one token a request over contexts of `kv_tokens` in all."""
        return self._decode_t0_ns + self._decode_ns_per_token * kv_tokens

    def causal_ns(self, pairs: int, tokens: int) -> float:
        """Attention of whole contexts computed from nothing, `tokens` rows with `pairs` under the mask."""
        return (
            self._prefill_t0_ns
            + self._prefill_ns_per_pair * pairs
            + (self._prefill_ns_per_kv + self._prefill_ns_per_row) * tokens
        )

    def prefill_ns(self, step: StepShape) -> float:
        return (
            self._prefill_t0_ns
            + self._prefill_ns_per_pair * step.prefill_qk_pairs
            + self._prefill_ns_per_kv * step.prefill_kv_tokens
            + self._prefill_ns_per_row * step.prefill_tokens
        )


class _DraftTimes:
    """A round of drafting with layers of its own: K forwards, the first of them over all rows of the step.

    As in vLLM 0.32 (v1/spec_decode): the first forward covers the target's rows, prompts and rejected drafts
    included, since it also writes the drafter's KV; so it runs at K = 0 too. The other K - 1 have a row a request.
    """

    __slots__ = (
        "_attention",
        "_first",
        "_head",
        "_later",
        "_link_ns_per_row",
        "_link_t0_ns",
        "_params",
        "_small_ns",
    )

    def __init__(
        self,
        drafter: DrafterShape,
        layers: ModelShape,
        card: Hardware,
        tp: int,
        kv_element_bytes: int,
        params: TimingParams,
    ) -> None:
        linears = [(linear, layers.num_layers) for linear in drafter.layer_linears(tp)]
        # The projection is on every rank, not split.
        projection = [] if drafter.projection is None else [(drafter.projection, 1)]
        later = linears + (projection if drafter.projection_each_forward else [])

        def times(of: Sequence[tuple[Linear, int]]) -> _LinearTimes:
            return _LinearTimes(of, card.linear, card.bf16_flops, card.bandwidth, 2)

        head = drafter.lm_head(tp)
        self._first = times(linears + projection)
        self._later = times(later)
        self._head = times([] if head is None else [(head, 1)])
        self._attention = _AttentionTimes(layers, card, tp, kv_element_bytes, params)
        self._small_ns = 1e3 * params.per_layer_us * layers.num_layers
        self._link_t0_ns = self._link_ns_per_row = 0.0
        if tp > 1:
            link = card.allreduce_for(tp)
            self._link_t0_ns = 1e3 * 2 * layers.num_layers * link.t0_us
            self._link_ns_per_row = (
                1e9 * 2 * layers.num_layers * layers.hidden_size * _ACTIVATION_BYTES / link.bandwidth
            )
        self._params = params

    def ns(self, step: StepShape, rows: int, draft_rows: int) -> float:
        """`rows`, `draft_rows`: those of the step and of the requests that get drafts, padded."""
        params = self._params
        forwards = step.num_spec_tokens if step.num_draft_reqs else 0
        cost = 1e3 * params.draft_round_us
        if step.draft_context_tokens:
            cost += self._first.ns(step.draft_context_tokens) + self._attention.causal_ns(
                step.draft_context_pairs, step.draft_context_tokens
            )
        if params.draft_step_us is not None:
            cost += 1e3 * params.draft_step_us * forwards
            if step.num_prefills:  # its prompt rows are not in the figure
                cost += self._first.ns(step.prefill_tokens) + self._attention.prefill_ns(step)
            return cost
        cost += self._first.ns(rows) + self._small_ns + self._link_t0_ns + self._link_ns_per_row * rows
        if step.decode_reqs:
            cost += self._attention.decode_ns(step)
        if step.num_prefills:
            cost += self._attention.prefill_ns(step)
        if forwards:
            cost += self._head.ns(step.num_draft_reqs) * forwards
            cost += (forwards - 1) * (
                self._later.ns(draft_rows)
                + self._attention.one_token_ns(step.decode_kv_tokens)
                + self._small_ns
                + self._link_t0_ns
                + self._link_ns_per_row * draft_rows
            )
        return cost
