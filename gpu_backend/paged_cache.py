"""A paged KV cache in torch: the layout, the mapping from positions to slots, and writes through it.

Knows blocks, slots and tensors. Must not know requests, schedulers or models.

Layout: that of vLLM's flash attention backend (0.32), one tensor a layer,

    [2, num_blocks, block_size, num_kv_heads, head_dim]        keys, then values

so a slot is `block * block_size + offset`, and indexes a layer's keys seen as [num_slots, num_kv_heads, head_dim].
Block 0 is the null block; padded entries of a block table point to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor


def block_table(tables: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Tensor:
    """Block tables of several requests as one tensor [requests, longest], int32, padded with the null block."""
    lengths = np.fromiter(map(len, tables), dtype=np.int64, count=len(tables))
    padded = np.zeros((len(tables), max(int(lengths.max(initial=0)), 1)), dtype=np.int32)
    inside = np.arange(padded.shape[1]) < lengths[:, None]
    padded[inside] = np.fromiter(chain.from_iterable(tables), dtype=np.int32, count=int(lengths.sum()))
    return torch.from_numpy(padded).to(device)


def slot_mapping(table: Tensor, requests: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """The slot of each token.

    Args:
        table: [requests, max_blocks], integer, as from `block_table`.
        requests: [tokens], int64: the row of the table that each token belongs to.
        positions: [tokens], int64: its position in that request.
        block_size: slots of a block.

    Returns:
        [tokens], int64.

    Raises:
        IndexError: a position lies beyond the columns of the table.
    """
    column = torch.div(positions, block_size, rounding_mode="floor")
    return table[requests, column].to(torch.int64) * block_size + positions % block_size


class PagedCache:
    """The KV of all layers. `layers[i]` is the tensor of layer i, in the layout above."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        fill: float = 0,
    ) -> None:
        """`fill`: what every element holds at first; NaN to see whether anything reads what nobody wrote."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (2, num_blocks, block_size, num_kv_heads, head_dim)
        self.layers = [torch.full(shape, fill, dtype=dtype, device=device) for _ in range(num_layers)]

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write tokens' keys and values, both [tokens, num_kv_heads, head_dim], into slots [tokens]."""
        flat = self.layers[layer].flatten(1, 2)
        flat[0].index_copy_(0, slots, keys)
        flat[1].index_copy_(0, slots, values)

    def fill_slots(self, slots: Tensor, value: float) -> None:
        """Overwrite slots [n] in every layer."""
        for layer in self.layers:
            layer.flatten(1, 2)[:, slots] = value

    def fill_blocks(self, blocks: Sequence[int], value: float) -> None:
        """Overwrite whole blocks in every layer."""
        if not blocks:
            return
        for layer in self.layers:
            layer[:, torch.tensor(blocks, device=layer.device)] = value

    def fill_all(self, value: float) -> None:
        """Overwrite everything."""
        for layer in self.layers:
            layer.fill_(value)
