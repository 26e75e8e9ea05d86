"""A small decoder with random weights: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

The shape is that of a real model in small (or in full, where there is room). `plain_decode` is the yardstick: no cache,
no pages, no drafts; `forward` takes the attention as an argument, so both run the same layers. Knows tensors and token
ids; must not know requests, blocks or schedulers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sim.models.shapes import ModelShape

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query [tokens, num_heads, head_dim], key and value [tokens, num_kv_heads, head_dim]) -> as the query."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes, in the words of a `config.json`."""

    num_layers: int = 2
    hidden_size: int = 32
    intermediate_size: int = 48
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 8
    vocab_size: int = 61
    rope_theta: float = 10_000.0

    @classmethod
    def of(cls, shape: ModelShape, num_layers: int | None = None) -> DecoderShape:
        """The shape of a model file, with fewer layers where asked."""
        return cls(
            shape.num_layers if num_layers is None else num_layers,
            shape.hidden_size,
            shape.intermediate_size,
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
            shape.vocab_size,
        )


@dataclass(frozen=True, slots=True)
class _Layer:
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class Decoder:
    """Random weights drawn from one seed, and the forward pass over a flat batch of tokens."""

    def __init__(
        self,
        shape: DecoderShape,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        """Weights are drawn on the CPU in float64 and then converted, so every device and dtype has the same model.

        Raises:
            ValueError: num_key_value_heads does not divide num_attention_heads, or head_dim is odd.
        """
        if shape.num_attention_heads % shape.num_key_value_heads or shape.head_dim % 2:
            raise ValueError(
                f"num_key_value_heads {shape.num_key_value_heads} must divide num_attention_heads "
                f"{shape.num_attention_heads}, and head_dim {shape.head_dim} must be even"
            )
        self.shape = shape
        self.dtype = dtype
        self.device = torch.device(device)
        self.scale = shape.head_dim**-0.5
        generator = torch.Generator().manual_seed(seed)

        def draw(outputs: int, inputs: int, gain: float = 1.0) -> Tensor:
            weights = torch.randn(outputs, inputs, generator=generator, dtype=torch.float64)
            return (weights * gain * inputs**-0.5).to(dtype).to(self.device)

        hidden, query = shape.hidden_size, shape.num_attention_heads * shape.head_dim
        kv, mlp = shape.num_key_value_heads * shape.head_dim, shape.intermediate_size
        # Attention that is sharp and weighs as much as the token itself: otherwise a random model falls into a loop of
        # a few tokens, and wrong KV would not show in its output.
        self.embedding = draw(shape.vocab_size, hidden, hidden**0.5)
        self.layers = [
            _Layer(
                draw(query, hidden, 2.0),
                draw(kv, hidden, 2.0),
                draw(kv, hidden),
                draw(hidden, query, 3.0),
                draw(mlp, hidden),
                draw(mlp, hidden),
                draw(hidden, mlp, 2.0),
            )
            for _ in range(shape.num_layers)
        ]
        self.lm_head = draw(shape.vocab_size, hidden, 2.0)
        half = torch.arange(shape.head_dim // 2, dtype=torch.float64)
        self._frequencies = (shape.rope_theta ** (-half / (shape.head_dim // 2))).to(self.device)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [tokens, hidden_size] of a flat batch; `tokens` and `positions` are int64 [tokens]."""
        shape = self.shape
        hidden = self.embedding[tokens]
        angles = positions.to(torch.float64)[:, None] * self._frequencies
        cosine, sine = angles.cos().to(self.dtype)[:, None], angles.sin().to(self.dtype)[:, None]
        for number, layer in enumerate(self.layers):
            normed = _rms_norm(hidden)
            query = (normed @ layer.query.T).unflatten(1, (shape.num_attention_heads, shape.head_dim))
            key = (normed @ layer.key.T).unflatten(1, (shape.num_key_value_heads, shape.head_dim))
            value = (normed @ layer.value.T).unflatten(1, (shape.num_key_value_heads, shape.head_dim))
            mixed = attend(number, _rotate(query, cosine, sine), _rotate(key, cosine, sine), value)
            hidden = hidden + mixed.flatten(1) @ layer.output.T
            normed = _rms_norm(hidden)
            gated = torch.nn.functional.silu(normed @ layer.gate.T) * (normed @ layer.up.T)
            hidden = hidden + gated @ layer.down.T
        return _rms_norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab_size] of hidden states [rows, hidden_size]."""
        return hidden @ self.lm_head.T

    def plain_decode(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy decoding without cache, pages or drafts: all tokens are computed anew for each one."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            positions = torch.arange(len(tokens), device=self.device)
            hidden = self.forward(torch.tensor(tokens, device=self.device), positions, self._attend_densely)
            tokens.append(int(self.logits(hidden[-1:]).argmax()))
        return tokens[len(prompt) :]

    def _attend_densely(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        group = self.shape.num_attention_heads // self.shape.num_key_value_heads
        keys, values = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * self.scale
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=query.device).triu(1)
        weights = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values)


def _rms_norm(hidden: Tensor) -> Tensor:
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions, first half against second half."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
