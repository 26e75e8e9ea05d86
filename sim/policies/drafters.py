"""What each drafter asks of the scheduler.

Source: vLLM 0.32, `SpeculativeConfig` (lookahead, draft slots) and the prefix cache's EAGLE rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Drafter:
    """One speculative method."""

    method: str
    has_lookahead: bool
    """K slots beyond each frame's own tokens, for the KV that the drafter writes ahead."""
    draft_slots: int
    """Input tokens a request that drafting adds to a step."""
    drop_last_hit_block: bool
    """The last block of a prefix hit is recomputed, for its hidden states."""
    runs_async: bool
    """Whether vLLM lets it run under async scheduling."""

    def num_lookahead_tokens(self, num_speculative_tokens: int) -> int:
        """Slots a frame is given beyond its own tokens."""
        return num_speculative_tokens if self.has_lookahead else 0


DRAFTERS: Final = {
    drafter.method: drafter
    for drafter in (
        Drafter("none", False, 0, False, True),
        Drafter("ngram", False, 0, False, False),
        Drafter("ngram_gpu", False, 0, False, True),
        Drafter("eagle", True, 0, True, True),
        Drafter("eagle3", True, 0, True, True),
        Drafter("mtp", True, 0, True, True),
        Drafter("draft_model", True, 1, False, True),
    )
}
