"""Axis: where the drafter's keys and values live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class DrafterKV:
    """One way to keep them."""

    in_target_blocks: bool
    """Same block table, more bytes a block."""
    own_pool: bool
    """A pool beside the target's, in the drafter's own shape."""
    freed_after_verification: bool
    """Nothing is kept across steps; each round recomputes the context."""


NOWHERE: Final = DrafterKV(in_target_blocks=False, own_pool=False, freed_after_verification=False)
"""The drafter has no KV (the article's self-speculation)."""
SHARED: Final = DrafterKV(in_target_blocks=True, own_pool=False, freed_after_verification=False)
"""In the target's blocks, for the request's life (vLLM, SGLang v2, TensorRT-LLM's target layers)."""
OWN_POOL_FREED: Final = DrafterKV(in_target_blocks=False, own_pool=True, freed_after_verification=True)
"""A small pool of its own, freed after each verification (the article's two models)."""
OWN_POOL_KEPT: Final = DrafterKV(in_target_blocks=False, own_pool=True, freed_after_verification=False)
"""A pool of its own, block by block beside the target's (TensorRT-LLM's mirrored manager; SGLang v1's own worker)."""
