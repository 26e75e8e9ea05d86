"""Model shapes: what a model weighs, what a token's KV takes, which matrices a step multiplies.

Knows a Hugging Face `config.json` and a few models by name. Must not know cards, time or policies; a drafter is a
shape beside its target, not a policy.

Decoders with full attention have a shape here: grouped queries or latent (MLA), with a dense MLP or a mixture of
experts. Anything else (windows, hybrids, linear attention) is refused by name, because its KV would be counted wrongly.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from sim.models.names import UnknownName, plain

__all__ = [
    "DRAFTER_METHODS",
    "DTYPE_BYTES",
    "DrafterShape",
    "Experts",
    "LatentAttention",
    "Linear",
    "MixtureOfExperts",
    "ModelShape",
    "ShapeError",
    "UnknownName",
    "drafter_shape",
    "dtype_bytes",
    "kv_dtype_bytes",
    "load_shape",
    "model_names",
]

DTYPE_BYTES: Final[Mapping[str, int]] = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}
"""Bytes an element, by vLLM's `dtype`; `fp8` stands for fp8 linear layers with a 16-bit embedding and lm_head."""

_KV_DTYPE_BYTES: Final[Mapping[str, int]] = {
    **DTYPE_BYTES,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}

DRAFTER_METHODS: Final = ("eagle", "eagle3", "mtp", "draft_model", "ngram")
"""Drafting methods that have a shape, in vLLM's words."""


class ShapeError(ValueError):
    """A shape that cannot be read or is not supported. The text names the file, the key, the value, what is allowed."""


def dtype_bytes(dtype: str) -> int:
    """Bytes of a weight of that `dtype`; ShapeError names what is allowed."""
    if dtype not in DTYPE_BYTES:
        raise ShapeError(f"dtype {dtype!r} is not known; allowed: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def kv_dtype_bytes(kv_cache_dtype: str, dtype: str) -> int:
    """Bytes of an element of the KV cache; `auto` is the model's dtype (16 bits for an fp8 model), as in vLLM."""
    if kv_cache_dtype == "auto":
        return max(2, dtype_bytes(dtype))
    if kv_cache_dtype not in _KV_DTYPE_BYTES:
        allowed = ", ".join(["auto", *_KV_DTYPE_BYTES])
        raise ShapeError(f"kv_cache_dtype {kv_cache_dtype!r} is not known; allowed: {allowed}")
    return _KV_DTYPE_BYTES[kv_cache_dtype]


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer on one rank: n outputs, k inputs, n * k weights."""

    name: str
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """The MLP of all layers but the first `num_dense_layers`: `num_experts` of `intermediate_size`, of which a token
    takes `num_experts_per_tok`, and `num_shared_experts` more of the same size that every token takes.

    `scoring_bias`: the router has a bias an expert (DeepSeek-V3).
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    num_shared_experts: int = 0
    num_dense_layers: int = 0
    scoring_bias: bool = False

    def expected_experts(self, num_tokens: float) -> float:
        """How many experts a batch of so many tokens touches on average, if the router spreads evenly.

        Each token leaves an expert out with probability 1 - k / E, so E (1 - (1 - k / E)^tokens).
        """
        left = 1.0 - self.num_experts_per_tok / self.num_experts
        return self.num_experts * (1.0 - math.pow(left, num_tokens))


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2 and V3): a token's KV is one vector for all heads.

    It has `kv_lora_rank + qk_rope_head_dim` elements, on every rank. `q_lora_rank` None: queries are projected at once.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def cached_elements(self) -> int:
        """Elements of KV a token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class Experts(NamedTuple):
    """The experts' matrices of one rank: `layers` layers, each expert with these two, split over the ranks."""

    layers: int
    moe: MixtureOfExperts
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with full attention, in the words of its `config.json`.

    `qk_norm` (Qwen3), `qkv_bias` (Qwen2) and `gated_mlp` only matter to the count of weights. `moe`: a mixture of
    experts; `intermediate_size` is then that of the dense layers, if any. `mla`: latent attention; then
    `num_key_value_heads` and `head_dim` have no influence. `num_mtp_layers`: layers for multi-token prediction that
    come with it. `source` says where the numbers come from.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    max_position_embeddings: int
    source: str
    qk_norm: bool = False
    qkv_bias: bool = False
    gated_mlp: bool = True
    moe: MixtureOfExperts | None = None
    mla: LatentAttention | None = None
    num_mtp_layers: int = 0

    def heads(self, tp: int) -> tuple[int, int]:
        """(query heads, KV heads) of one rank. KV heads are repeated where there are fewer than ranks, as in vLLM.

        Raises ShapeError where the heads do not divide.
        """
        if tp < 1 or self.num_attention_heads % tp:
            raise ShapeError(
                f"{self.name}: tensor_parallel_size {tp} does not divide num_attention_heads {self.num_attention_heads}"
            )
        if self.mla is not None:
            return self.num_attention_heads // tp, 1
        if self.num_key_value_heads % tp and tp % self.num_key_value_heads:
            raise ShapeError(
                f"{self.name}: tensor_parallel_size {tp} and num_key_value_heads {self.num_key_value_heads}: "
                "one must divide the other"
            )
        return self.num_attention_heads // tp, max(1, self.num_key_value_heads // tp)

    def layer_linears(self, tp: int = 1, qkv_inputs: int | None = None) -> tuple[Linear, ...]:
        """The matrices of one dense layer on one rank: attention, gate_up, down. `qkv_inputs`: if not hidden_size."""
        return (*self._attention_linears(tp, qkv_inputs), *self._mlp(self.intermediate_size, tp))

    def linears(self, tp: int = 1, qkv_inputs: int | None = None) -> tuple[tuple[Linear, int], ...]:
        """The matrices of all layers on one rank with their number, those that every token takes: experts are apart."""
        if self.moe is None:
            return tuple((linear, self.num_layers) for linear in self.layer_linears(tp, qkv_inputs))
        moe, dense = self.moe, self.moe.num_dense_layers
        sparse = self.num_layers - dense
        found = [(linear, self.num_layers) for linear in self._attention_linears(tp, qkv_inputs)]
        if dense:
            found += [(linear, dense) for linear in self._mlp(self.intermediate_size, tp)]
        found.append((Linear("router", moe.num_experts, self.hidden_size), sparse))
        if moe.num_shared_experts:
            shared = self._mlp(moe.num_shared_experts * moe.intermediate_size, tp)
            found += [(Linear(f"shared_{linear.name}", linear.n, linear.k), sparse) for linear in shared]
        return tuple(found)

    def experts(self, tp: int = 1) -> Experts | None:
        """The experts on one rank; None for a dense model. Every rank has a part of each expert."""
        if self.moe is None:
            return None
        gate_up, down = self._mlp(self.moe.intermediate_size, tp)
        return Experts(self.num_layers - self.moe.num_dense_layers, self.moe, gate_up, down)

    def _attention_linears(self, tp: int, qkv_inputs: int | None = None) -> tuple[Linear, ...]:
        query, kv = self.heads(tp)
        inputs = qkv_inputs or self.hidden_size
        if self.mla is None:
            return (
                Linear("qkv", (query + 2 * kv) * self.head_dim, inputs),
                Linear("o", self.hidden_size, query * self.head_dim),
            )
        mla = self.mla
        qk_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        # What comes in is projected on every rank; heads are split. kv_b is absorbed in decoding, its weights are read.
        first = [Linear("qkv_a", (mla.q_lora_rank or 0) + mla.cached_elements, inputs)]
        first.append(Linear("q_b", query * qk_dim, mla.q_lora_rank or inputs))
        first.append(Linear("kv_b", query * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank))
        return (*first, Linear("o", self.hidden_size, query * mla.v_head_dim))

    def _mlp(self, intermediate: int, tp: int) -> tuple[Linear, Linear]:
        if intermediate % tp:
            raise ShapeError(f"{self.name}: tensor_parallel_size {tp} does not divide intermediate_size {intermediate}")
        mlp = intermediate // tp
        return (
            Linear("gate_up", (2 if self.gated_mlp else 1) * mlp, self.hidden_size),
            Linear("down", self.hidden_size, mlp),
        )

    def lm_head(self, tp: int = 1) -> Linear:
        """The output projection on one rank (the vocabulary is split over the ranks)."""
        return Linear("lm_head", -(-self.vocab_size // tp), self.hidden_size)

    def num_linear_parameters(self, tp: int = 1) -> int:
        """Weights of all layers' matrices on one rank, all experts included."""
        dense = sum(times * linear.n * linear.k for linear, times in self.linears(tp))
        experts = self.experts(tp)
        if experts is None:
            return dense
        one = experts.gate_up.n * experts.gate_up.k + experts.down.n * experts.down.k
        return dense + experts.layers * experts.moe.num_experts * one

    def num_active_linear_parameters(self) -> int:
        """Weights of all layers' matrices that one token takes."""
        experts = self.experts()
        if experts is None:
            return self.num_linear_parameters()
        one = experts.gate_up.n * experts.gate_up.k + experts.down.n * experts.down.k
        idle = experts.moe.num_experts - experts.moe.num_experts_per_tok
        return self.num_linear_parameters() - experts.layers * idle * one

    def num_parameters(self) -> int:
        """All weights of the model, tied ones once."""
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        if self.mla is not None:
            norms += (self.mla.q_lora_rank or 0) + self.mla.kv_lora_rank
        biases = (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim if self.qkv_bias else 0
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        scores = 0
        if self.moe is not None and self.moe.scoring_bias:
            scores = (self.num_layers - self.moe.num_dense_layers) * self.moe.num_experts
        rest = self.num_layers * (norms + biases) + scores + self.hidden_size
        return self.num_linear_parameters() + rest + embeddings

    def weight_bytes(self, dtype: str, tp: int = 1) -> int:
        """Bytes of the weights on one rank; norms and biases, which every rank keeps, count as 16-bit."""
        size = dtype_bytes(dtype)
        linear = self.num_linear_parameters(tp)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        rest = self.num_parameters() - self.num_linear_parameters() - embeddings
        return linear * size + -(-embeddings // tp) * max(2, size) + rest * max(2, size)

    def kv_bytes_per_token(self, kv_element_bytes: int, tp: int = 1) -> int:
        """Bytes of the keys and values of one token, all layers, on one rank."""
        return self.num_layers * self.kv_bytes_per_token_and_layer(kv_element_bytes, tp)

    def kv_bytes_per_token_and_layer(self, kv_element_bytes: int, tp: int = 1) -> int:
        """Bytes of the keys and values of one token in one layer on one rank."""
        if self.mla is not None:
            return self.mla.cached_elements * kv_element_bytes
        return 2 * self.heads(tp)[1] * self.head_dim * kv_element_bytes

    def flops_per_token(self) -> int:
        """Operations of all linear layers for one token, lm_head included, attention not: two a weight it takes."""
        return 2 * (self.num_active_linear_parameters() + self.vocab_size * self.hidden_size)


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """What drafts: its layers, and what it shares with the target.

    `layers` is the drafter's own shape; None for n-gram, which has no weights and no KV. `projection` is the matrix
    that brings the target's hidden states in (None for a draft model), run once a round for `projection_each_forward`
    False. `qkv_inputs` is the width of the input to the first layer's qkv. `lm_head` rows are `draft_vocab_size`.
    `own_embedding`, `own_lm_head`: whether it brings its own, or uses the target's.
    """

    method: str
    layers: ModelShape | None
    projection: Linear | None = None
    projection_each_forward: bool = False
    qkv_inputs: int | None = None
    draft_vocab_size: int = 0
    own_embedding: bool = False
    own_lm_head: bool = False

    def kv_bytes_per_token(self, kv_element_bytes: int, tp: int = 1) -> int:
        """Bytes that the drafter adds to a token in the same block table, on one rank."""
        return 0 if self.layers is None else self.layers.kv_bytes_per_token(kv_element_bytes, tp)

    def layer_linears(self, tp: int = 1) -> tuple[Linear, ...]:
        """The matrices of one of its layers on one rank, experts apart; empty for n-gram."""
        return tuple(linear for linear, _ in self.linears(tp))

    def linears(self, tp: int = 1) -> tuple[tuple[Linear, int], ...]:
        """The matrices of all its layers on one rank with their number, experts apart; empty for n-gram."""
        return () if self.layers is None else self.layers.linears(tp, self.qkv_inputs)

    def _num_linear_parameters(self, tp: int) -> int:
        assert self.layers is not None
        extra = 0
        if self.qkv_inputs is not None:  # the first matrix reads wider rows than the target's
            wide, plain_one = self.linears(tp)[0], self.layers.linears(tp)[0]
            extra = wide[1] * wide[0].n * (wide[0].k - plain_one[0].k)
        return self.layers.num_linear_parameters(tp) + extra

    def lm_head(self, tp: int = 1) -> Linear | None:
        """Its output projection on one rank; None for n-gram."""
        if self.layers is None:
            return None
        return Linear("lm_head", -(-self.draft_vocab_size // tp), self.layers.hidden_size)

    def num_parameters(self) -> int:
        """Weights that the drafter adds to the target's."""
        if self.layers is None:
            return 0
        if self.method == "draft_model":
            return self.layers.num_parameters()
        linear = self._num_linear_parameters(1)
        projection = self.projection.n * self.projection.k if self.projection else 0
        vocabularies = (self.layers.vocab_size if self.own_embedding else 0) + (
            self.draft_vocab_size if self.own_lm_head else 0
        )
        return linear + projection + vocabularies * self.layers.hidden_size

    def weight_bytes(self, tp: int = 1) -> int:
        """Bytes that the drafter adds on one rank, 16-bit whatever the target; the projection is on every rank.

        vLLM's `draft_tensor_parallel_size` is the target's.
        """
        if self.layers is None:
            return 0
        if self.method == "draft_model":
            return self.layers.weight_bytes("bfloat16", tp)
        linear = self._num_linear_parameters(tp)
        projection = self.projection.n * self.projection.k if self.projection else 0
        vocabularies = (self.layers.vocab_size if self.own_embedding else 0) + (
            self.draft_vocab_size if self.own_lm_head else 0
        )
        return 2 * (linear + projection + -(-vocabularies * self.layers.hidden_size // tp))


def _llama(
    name: str, layers: int, hidden: int, mlp: int, heads: int, *, head_dim: int, tie: bool = False
) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=head_dim,
        vocab_size=128_256,
        tie_word_embeddings=tie,
        max_position_embeddings=131_072,
        source=f"config.json of meta-llama/{name}",
    )


def _qwen3(name: str, layers: int, hidden: int, mlp: int, heads: int, *, tie: bool = False) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=tie,
        max_position_embeddings=40_960,
        source=f"config.json of Qwen/{name}",
        qk_norm=True,
    )


def _qwen3_moe(name: str, layers: int, hidden: int, heads: int, kv_heads: int, expert: int) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=8 * expert,  # as the config has it; no layer is dense
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=False,
        max_position_embeddings=40_960,
        source=f"config.json of Qwen/{name}",
        qk_norm=True,
        moe=MixtureOfExperts(num_experts=128, num_experts_per_tok=8, intermediate_size=expert),
    )


_QWEN3_30B_A3B = _qwen3_moe("Qwen3-30B-A3B", 48, 2048, 32, 4, 768)
_QWEN3_235B_A22B = _qwen3_moe("Qwen3-235B-A22B", 94, 4096, 64, 4, 1536)
# Version 0.3: no sliding window (0.1 had one), a vocabulary of 32,768.
_MISTRAL_7B = ModelShape(
    name="Mistral-7B-v0.3",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14_336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32_768,
    tie_word_embeddings=False,
    max_position_embeddings=32_768,
    source="config.json of mistralai/Mistral-7B-v0.3",
)
_MIXTRAL_8X7B = ModelShape(
    name="Mixtral-8x7B-v0.1",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14_336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32_000,
    tie_word_embeddings=False,
    max_position_embeddings=32_768,
    source="config.json of mistralai/Mixtral-8x7B-v0.1",
    moe=MixtureOfExperts(num_experts=8, num_experts_per_tok=2, intermediate_size=14_336),
)
_DEEPSEEK_V3 = ModelShape(
    name="DeepSeek-V3",
    num_layers=61,
    hidden_size=7168,
    intermediate_size=18_432,
    num_attention_heads=128,
    num_key_value_heads=128,
    head_dim=128,
    vocab_size=129_280,
    tie_word_embeddings=False,
    max_position_embeddings=163_840,
    source="config.json of deepseek-ai/DeepSeek-V3",
    moe=MixtureOfExperts(
        num_experts=256,
        num_experts_per_tok=8,
        intermediate_size=2048,
        num_shared_experts=1,
        num_dense_layers=3,
        scoring_bias=True,
    ),
    mla=LatentAttention(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    num_mtp_layers=1,
)
_LLAMA_8B = _llama("Llama-3.1-8B", 32, 4096, 14_336, 32, head_dim=128)
_LLAMA_70B = _llama("Llama-3.1-70B", 80, 8192, 28_672, 64, head_dim=128)
_LLAMA_1B = _llama("Llama-3.2-1B", 16, 2048, 8192, 32, head_dim=64, tie=True)
_QWEN3_8B = _qwen3("Qwen3-8B", 36, 4096, 12_288, 32)
_QWEN3_32B = _qwen3("Qwen3-32B", 64, 5120, 25_600, 64)
_QWEN3_06B = _qwen3("Qwen3-0.6B", 28, 1024, 3072, 16, tie=True)
_QWEN3_17B = _qwen3("Qwen3-1.7B", 28, 2048, 6144, 16, tie=True)

_MODELS: Final[tuple[tuple[ModelShape, tuple[str, ...]], ...]] = (
    (
        _LLAMA_8B,
        (
            "meta-llama/Llama-3.1-8B",
            "meta-llama/Llama-3.1-8B-Instruct",
            "meta-llama/Meta-Llama-3.1-8B",
            "meta-llama/Meta-Llama-3.1-8B-Instruct",
        ),
    ),
    (
        _LLAMA_70B,
        (
            "meta-llama/Llama-3.1-70B",
            "meta-llama/Llama-3.1-70B-Instruct",
            "meta-llama/Meta-Llama-3.1-70B",
            "meta-llama/Meta-Llama-3.1-70B-Instruct",
            "meta-llama/Llama-3.3-70B-Instruct",  # the same shape
            "Llama-3.3-70B",
            "Llama-3.3-70B-Instruct",
        ),
    ),
    (_QWEN3_30B_A3B, ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-Base")),
    (_QWEN3_235B_A22B, ("Qwen/Qwen3-235B-A22B",)),
    (_MISTRAL_7B, ("Mistral-7B", "mistralai/Mistral-7B-v0.3", "mistralai/Mistral-7B-Instruct-v0.3")),
    (
        _MIXTRAL_8X7B,
        ("Mixtral-8x7B", "mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    ),
    (_DEEPSEEK_V3, ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3-0324")),
    (_LLAMA_1B, ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct")),
    (_QWEN3_8B, ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base")),
    (_QWEN3_32B, ("Qwen/Qwen3-32B",)),
    (_QWEN3_06B, ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B-Base")),
    (_QWEN3_17B, ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-1.7B-Base")),
)
_BY_NAME: Final = {plain(name): shape for shape, aliases in _MODELS for name in (shape.name, *aliases)}

_DRAFT_VOCAB: Final = 32_000


def _eagle3_head(target: ModelShape, name: str, source: str) -> tuple[ModelShape, ModelShape]:
    head = replace(
        target,
        name=name,
        num_layers=1,
        source=source,
        qk_norm=False,
        qkv_bias=False,
        tie_word_embeddings=False,
        moe=None,
        mla=None,
        num_mtp_layers=0,
    )
    return target, head


# Public EAGLE-3 heads: one Llama layer as wide as the target's, draft vocabulary 32,000. (head, its other names)
_EAGLE3_HEADS: Final[tuple[tuple[tuple[ModelShape, ModelShape], tuple[str, ...]], ...]] = (
    (
        _eagle3_head(
            _LLAMA_8B, "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "config.json of yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
        ),
        ("RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",),
    ),
    (
        # yuhuili/EAGLE3-LLaMA3.3-Instruct-70B is narrower than its target; this is the head of SpecForge's shape.
        _eagle3_head(
            _LLAMA_70B, "lmsys/SGLang-EAGLE3-LLaMA3.3-Instruct-70B", "SpecForge, configs/llama3-70B-ealge3.json"
        ),
        ("lmsys/sglang-EAGLE3-LLaMA3.3-Instruct-70B",),
    ),
    (
        _eagle3_head(_QWEN3_8B, "AngelSlim/Qwen3-8B_eagle3", "AngelSlim, train/configs/qwen3-8b-eagle3.json"),
        ("Tengyunw/qwen3_8b_eagle3", "RedHatAI/Qwen3-8B-speculator.eagle3"),
    ),
    (
        _eagle3_head(_QWEN3_32B, "AngelSlim/Qwen3-32B_eagle3", "AngelSlim, train/configs/qwen3-32b-eagle3.json"),
        ("RedHatAI/Qwen3-32B-speculator.eagle3",),
    ),
)
_EAGLE3_BY_NAME: Final = {plain(name): head for (_, head), aliases in _EAGLE3_HEADS for name in (head.name, *aliases)}
_DRAFT_MODELS: Final = {
    _LLAMA_8B.name: _LLAMA_1B,
    _LLAMA_70B.name: _LLAMA_1B,
    _QWEN3_8B.name: _QWEN3_06B,
    _QWEN3_32B.name: _QWEN3_17B,
    _QWEN3_30B_A3B.name: _QWEN3_06B,
    _QWEN3_235B_A22B.name: _QWEN3_17B,
}


def model_names() -> tuple[str, ...]:
    """The models that are known by name, without their Hugging Face ids."""
    return tuple(shape.name for shape, _ in _MODELS)


def load_shape(name_or_path: str | os.PathLike[str]) -> ModelShape:
    """The shape of a model: one known by name or Hugging Face id (case makes no difference), else a `config.json`.

    A path is that of a `config.json` or of a folder that holds one. Raises UnknownName for a name that is neither, and
    ShapeError, naming file, key and value, for a file that cannot be read or a model that has no shape here
    (sliding-window, hybrid or linear attention, other mixtures of experts, encoder-decoders, multi-modal models).
    """
    text = os.fspath(name_or_path)
    known = _BY_NAME.get(plain(text))
    if known is not None:
        return known
    if not os.path.lexists(text) and not _looks_like_a_path(text):
        raise UnknownName("model", text, (name for shape, aliases in _MODELS for name in (shape.name, *aliases)))
    return _read_config(Path(text))


def drafter_shape(target: ModelShape, method: str, draft_model: str | None = None) -> DrafterShape:
    """The drafter of `target` for one of DRAFTER_METHODS.

    `draft_model` names it: for eagle3 a head known here or its `config.json`; for draft_model a model as `load_shape`
    takes it. None: the head known for the target, else one layer of the target's shape; for draft_model the small
    model of the same family. eagle and mtp have one layer of the target's shape unless a `config.json` is given, and
    use the target's embedding and lm_head; eagle3 has a draft vocabulary of 32,000. In vLLM the drafter's layers share
    the target's block table, so their KV adds to every token of the pool. Raises ShapeError where there is no such
    drafter, UnknownName for an unknown name.
    """
    if method == "ngram":
        return DrafterShape(method="ngram", layers=None)
    if method == "draft_model":
        if draft_model is None:
            small = _DRAFT_MODELS.get(target.name)
            if small is None:
                raise ShapeError(f"method draft_model: no drafter is known for {target.name}; name one in draft_model")
        else:
            small = load_shape(draft_model)
        return DrafterShape(
            method=method, layers=small, draft_vocab_size=small.vocab_size, own_embedding=True, own_lm_head=True
        )
    if method not in DRAFTER_METHODS:
        raise ShapeError(f"method {method!r} is not known; allowed: {', '.join(DRAFTER_METHODS)}")
    if method == "eagle3":
        head = _eagle3_layer(target, draft_model)
        hidden = head.hidden_size
        # Three of the target's hidden states are projected to one; embedding and hidden state stand side by side.
        return DrafterShape(
            method=method,
            layers=head,
            projection=Linear("fc", hidden, 3 * target.hidden_size),
            projection_each_forward=False,
            qkv_inputs=2 * hidden,
            draft_vocab_size=min(_DRAFT_VOCAB, target.vocab_size),
            own_embedding=hidden != target.hidden_size,
            own_lm_head=True,
        )
    moe = target.moe
    if moe is not None:  # DeepSeek-V3's layer for prediction has experts, as all but the first of its layers
        moe = replace(moe, num_dense_layers=0) if method == "mtp" else None
    layer = replace(target, name=f"{target.name} {method} layer", num_layers=1, moe=moe, num_mtp_layers=0)
    if draft_model is not None and os.path.lexists(draft_model):
        layer = load_shape(draft_model)
    return DrafterShape(
        method=method,
        layers=layer,
        projection=Linear("fc", layer.hidden_size, 2 * target.hidden_size),
        projection_each_forward=True,
        draft_vocab_size=target.vocab_size,
    )


def _eagle3_layer(target: ModelShape, draft_model: str | None) -> ModelShape:
    if draft_model is not None:
        head = _EAGLE3_BY_NAME.get(plain(draft_model))
        if head is not None:
            if head.hidden_size != target.hidden_size:
                raise ShapeError(
                    f"{head.name} is a head for hidden_size {head.hidden_size}; {target.name} has {target.hidden_size}"
                )
            return head
        if not os.path.lexists(draft_model) and not _looks_like_a_path(draft_model):
            raise UnknownName("EAGLE-3 head", draft_model, (head.name for (_, head), _ in _EAGLE3_HEADS))
        return load_shape(draft_model)
    for (model, head), _ in _EAGLE3_HEADS:
        if model.name == target.name:
            return head
    return _eagle3_head(target, f"{target.name} eagle3 layer", "one layer of the target's shape")[1]


def _looks_like_a_path(text: str) -> bool:
    return text.endswith((".json", "/")) or text.startswith((".", "/", "~")) or text.count("/") > 1


# Keys of config.json that mean another kind of attention or of MLP, and its name.
_REFUSED_COUNTS: Final = {"moe_num_experts": "this mixture of experts", "attention_chunk_size": "chunked attention"}
_EXPERT_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_MOE_TYPES: Final = ("mixtral", "qwen3_moe", "deepseek_v3", "deepseek_v2")
_REFUSED_KEYS: Final = {
    "layers_block_type": "hybrid attention",
    "hybrid_override_pattern": "hybrid attention",
    "full_attention_interval": "hybrid attention",
    "attn_layer_period": "hybrid attention",
    "linear_attn_config": "linear attention",
    "linear_num_value_heads": "linear attention",
    "mamba_d_state": "state-space (Mamba) layers",
    "ssm_cfg": "state-space (Mamba) layers",
    "state_size": "state-space (Mamba) layers",
    "text_config": "multi-modal models",
    "vision_config": "multi-modal models",
}
_PLAIN_MLP: Final = ("gpt_neox", "phi", "starcoder2")


def _read_config(path: Path) -> ModelShape:
    file = path / "config.json" if path.is_dir() else path
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        where = f"{path}: no config.json in this folder" if path.is_dir() else f"{file}: no such file"
        raise ShapeError(where) from None
    except UnicodeDecodeError:
        raise ShapeError(f"{file}: not a text file; expected a Hugging Face config.json") from None
    except (OSError, ValueError) as error:  # the latter for a null character in the path
        raise ShapeError(f"{str(file)!r}: cannot be read ({error})") from None
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ShapeError(f"{file}:{error.lineno}: malformed JSON ({error.msg})") from None
    except RecursionError:
        raise ShapeError(f"{file}: malformed JSON (nested too deeply)") from None
    except ValueError as error:  # a number with too many digits
        raise ShapeError(f"{file}: malformed JSON ({error})") from None
    if not isinstance(config, dict):
        raise ShapeError(f"{file}: expected an object, got {_shown(config)}")
    return _shape_of(config, file)


def _shape_of(config: Mapping[str, object], file: Path) -> ModelShape:
    _refuse_other_kinds(config, file)
    model_type = config.get("model_type")
    kind = model_type if isinstance(model_type, str) else ""
    hidden = _count(config, "hidden_size", file)
    heads = _count(config, "num_attention_heads", file)
    kv_heads = heads if config.get("num_key_value_heads") is None else _count(config, "num_key_value_heads", file)
    if heads % kv_heads:
        raise ShapeError(f"{file}: num_key_value_heads = {kv_heads}: must divide num_attention_heads, which is {heads}")
    if config.get("head_dim") is not None:
        head_dim = _count(config, "head_dim", file)
    elif hidden % heads:
        raise ShapeError(
            f"{file}: head_dim: missing, and num_attention_heads {heads} does not divide hidden_size {hidden}"
        )
    else:
        head_dim = hidden // heads
    moe = _moe_of(config, kind, file)
    return ModelShape(
        name=_name_of(config, file),
        num_layers=_count(config, "num_hidden_layers", file),
        hidden_size=hidden,
        intermediate_size=_count(config, "intermediate_size", file),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_count(config, "vocab_size", file),
        # Left out, it is true in Gemma and false in the other families that are read here.
        tie_word_embeddings=_flag(config, "tie_word_embeddings", file, default=kind.startswith("gemma")),
        max_position_embeddings=_count(config, "max_position_embeddings", file),
        source=str(file),
        qk_norm=kind.startswith("qwen3"),
        qkv_bias=_flag(config, "attention_bias", file, default=kind == "qwen2"),
        gated_mlp=kind not in _PLAIN_MLP,
        moe=moe,
        mla=_mla_of(config, file),
        num_mtp_layers=_whole(config, "num_nextn_predict_layers", file),
    )


def _moe_of(config: Mapping[str, object], kind: str, file: Path) -> MixtureOfExperts | None:
    """The experts of Mixtral, Qwen3 and DeepSeek; ShapeError for a mixture of another kind."""
    key = next((key for key in _EXPERT_COUNTS if config.get(key) not in (None, False, 0)), None)
    if key is None:
        return None
    if kind not in _MOE_TYPES:
        raise ShapeError(
            f"{file}: {key} = {_shown(config[key])}: mixture of experts of model_type "
            f"{_shown(config.get('model_type'))} is not supported; allowed: {', '.join(_MOE_TYPES)}"
        )
    if config.get("decoder_sparse_step") not in (None, 1) or config.get("mlp_only_layers") not in (None, []):
        raise ShapeError(f"{file}: dense layers between sparse ones are not supported; decoder_sparse_step 1 is")
    if config.get("moe_layer_freq") not in (None, 1):
        raise ShapeError(f"{file}: moe_layer_freq = {_shown(config['moe_layer_freq'])}: only 1 is supported")
    own_size = "intermediate_size" if kind == "mixtral" else "moe_intermediate_size"
    moe = MixtureOfExperts(
        num_experts=_count(config, key, file),
        num_experts_per_tok=_count(config, "num_experts_per_tok", file),
        intermediate_size=_count(config, own_size, file),
        num_shared_experts=_whole(config, "n_shared_experts", file),
        num_dense_layers=_whole(config, "first_k_dense_replace", file),
        scoring_bias=config.get("topk_method") == "noaux_tc",
    )
    if moe.num_experts_per_tok > moe.num_experts:
        raise ShapeError(
            f"{file}: num_experts_per_tok = {moe.num_experts_per_tok}: there are {moe.num_experts} experts"
        )
    if moe.num_dense_layers > _count(config, "num_hidden_layers", file):
        raise ShapeError(f"{file}: first_k_dense_replace = {moe.num_dense_layers}: more than num_hidden_layers")
    return moe


def _mla_of(config: Mapping[str, object], file: Path) -> LatentAttention | None:
    if config.get("kv_lora_rank") in (None, False, 0):
        return None
    return LatentAttention(
        q_lora_rank=None if config.get("q_lora_rank") is None else _count(config, "q_lora_rank", file),
        kv_lora_rank=_count(config, "kv_lora_rank", file),
        qk_nope_head_dim=_count(config, "qk_nope_head_dim", file),
        qk_rope_head_dim=_count(config, "qk_rope_head_dim", file),
        v_head_dim=_count(config, "v_head_dim", file),
    )


def _refuse_other_kinds(config: Mapping[str, object], file: Path) -> None:
    only = "only decoders with full attention (grouped queries or latent) have a shape here"
    for key, kind in _REFUSED_COUNTS.items():
        value = config.get(key)
        if value is not None and value is not False and value != 0:
            raise ShapeError(f"{file}: {key} = {_shown(value)}: {kind} is not supported; {only}")
    for key, kind in _REFUSED_KEYS.items():
        if config.get(key) is not None:
            raise ShapeError(f"{file}: {key} = {_shown(config[key])}: {kind} not supported; {only}")
    if config.get("is_encoder_decoder") is True:
        raise ShapeError(f"{file}: is_encoder_decoder = true: encoder-decoders are not supported; {only}")
    layer_types = config.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list):
            raise ShapeError(f"{file}: layer_types = {_shown(layer_types)}: expected a list")
        for layer, kind_of_layer in enumerate(layer_types):
            if kind_of_layer != "full_attention":
                raise ShapeError(
                    f"{file}: layer_types[{layer}] = {_shown(kind_of_layer)}: hybrid attention is not supported; {only}"
                )
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window") is not False:
        raise ShapeError(
            f"{file}: sliding_window = {_shown(window)}: sliding-window attention is not supported; {only} "
            "(null, or use_sliding_window false, turns it off)"
        )


def _name_of(config: Mapping[str, object], file: Path) -> str:
    said = config.get("_name_or_path")
    if isinstance(said, str) and said.strip():
        return said
    return file.resolve().parent.name if file.name == "config.json" else file.stem


def _count(config: Mapping[str, object], key: str, file: Path) -> int:
    if key not in config:
        raise ShapeError(f"{file}: {key}: missing; expected a whole number above 0")
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ShapeError(f"{file}: {key} = {_shown(value)}: expected a whole number above 0")
    return value


def _whole(config: Mapping[str, object], key: str, file: Path) -> int:
    """A count that may be 0, left out or null."""
    value = config.get(key)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ShapeError(f"{file}: {key} = {_shown(value)}: expected a whole number from 0 on")
    return value


def _flag(config: Mapping[str, object], key: str, file: Path, *, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ShapeError(f"{file}: {key} = {_shown(value)}: expected true or false")
    return value


def _shown(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."
