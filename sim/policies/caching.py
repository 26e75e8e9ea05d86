"""Axis: which full blocks join the prefix cache, and what a hit loses under a drafter that needs hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Caching:
    """When blocks join."""

    outputs: bool
    """Blocks that hold output join as they fill."""
    at_finish: bool
    """What is computed joins when the request ends, all but its last token."""


ACCEPTED: Final = Caching(outputs=True, at_finish=False)
"""Every full block of confirmed tokens, outputs too (vLLM)."""
PROMPT_ONLY: Final = Caching(outputs=False, at_finish=False)
"""Blocks of the prompt alone (as the article tells it)."""
PROMPT_AND_FINISH: Final = Caching(outputs=False, at_finish=True)
"""Blocks of the prompt as they fill, and the rest at the end (SGLang; TensorRT-LLM's context blocks)."""

DROP_BLOCK: Final = "drop_block"
"""EAGLE-like drafters recompute the last block of a hit (vLLM)."""
DROP_TOKEN: Final = "drop_token"
"""They lose one token of what could be hit (SGLang)."""
DROP_NOTHING: Final = "drop_nothing"
"""A hit is a hit (the article; vLLM since 0.30 on request)."""
