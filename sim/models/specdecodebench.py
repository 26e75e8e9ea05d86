"""SpecDecode-Bench's simulator, reproduced: a linear step cost, and lock-step batches of copies of one request.

Knows their published constants and rules (SpecDecode-Bench/simulator; Liu and others, "Speculative Decoding:
Performance or Illusion?", 2025). Must not know this simulator's engine or timing model: it is a second opinion, and a
way to feed both with the same acceptance.

Their index: `lengths[p]` is what a verification that begins at output position p yields, and after the prefill one
token (position 0) is there, so the first verification stands at position 1. Their walk reads `lengths[0]` for it, and
`lengths[generated - 1]` always: one position early. `walk="theirs"` does that and gives their figures; `walk="meant"`
reads the position where the verification stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from sim.models.acceptance import AcceptanceModel
from sim.models.acceptance_models import FIRST_POSITION

__all__ = ["Drafting", "LinearStepCost", "Recorded", "combined", "drawn", "lockstep_speedup", "throughputs"]

Drafting = Literal["eagle3", "ngram", "combined"]
Walk = Literal["theirs", "meant"]


@dataclass(frozen=True)
class LinearStepCost:
    """Seconds. Their regression of vLLM on an H100 with Llama-3.1-8B, batch sizes 1 to 64 (predictor.py)."""

    per_kv_token: float = 3.92645679e-08
    per_batched_token: float = 2.10103129e-05
    fixed: float = 5.88590713e-03
    draft_per_kv_token: float = 2.37768493e-09
    draft_per_token: float = 8.41429603e-07
    draft_fixed: float = 2.13526175e-03
    ngram_share: float = 0.005875
    overhead: float = 1.20683946e-03

    def forward(self, kv_tokens: float, batched_tokens: float) -> float:
        """A forward pass of the target."""
        return self.per_kv_token * kv_tokens + self.per_batched_token * batched_tokens + self.fixed


@dataclass(frozen=True)
class Recorded:
    """A request: prompt tokens, and by output position the tokens that a verification there yields (1 or more)."""

    prompt_tokens: int
    lengths: Sequence[int]


NGRAM_FALSE_MATCH: Final = 0.2
"""A verification that accepts nothing had drafts so often (theirs, for gsm8k and sharegpt); else it is one token. They
draw it for each copy; here its expectation is taken."""


def combined(eagle3: Sequence[int], ngram: Sequence[int]) -> list[int]:
    """Their combined proposer: at every position the better of the two, as far as both go."""
    return [max(a, b) for a, b in zip(eagle3, ngram, strict=False)]


def drawn(model: AcceptanceModel, request: int, prompt_tokens: int, num_tokens: int) -> Recorded:
    """A request of `num_tokens` output tokens whose lengths come from a model, as `walk="theirs"` reads them."""
    return Recorded(prompt_tokens, (model.runs(request, FIRST_POSITION, num_tokens) + 1).tolist())


def throughputs(
    request: Recorded,
    batch_size: int,
    k: int | None,
    drafting: Drafting,
    walk: Walk = "theirs",
    cost: LinearStepCost | None = None,
) -> tuple[float, float]:
    """Tokens a second without and with speculation, of `batch_size` copies in lock step, prefill included.

    `k`: drafts a step; None is their oracle, which drafts exactly what is accepted. EAGLE-3 pays for drafting by
    context and rows; n-grams a share of the verification, nothing where there is no draft; combined (oracle only) pays
    as n-grams do, always.
    """
    cost = cost or LinearStepCost()
    lengths, tokens, size = request.lengths, len(request.lengths), batch_size
    ahead = 0 if walk == "theirs" else 1
    prefill = cost.forward(0, size * request.prompt_tokens) + cost.overhead
    kv = size * (request.prompt_tokens + 1)
    steps = tokens - 1
    plain = prefill + steps * (cost.forward(kv, size) + cost.overhead)
    plain += cost.per_kv_token * size * steps * (steps - 1) / 2
    speculative, generated = prefill, 1
    while generated < tokens:
        place = generated - 1 + ahead
        length = lengths[place]
        rows: float = length if k is None else k + 1
        with_drafts = 1.0
        if drafting == "ngram":
            if k is None:
                with_drafts = float(length > 1)
            elif length == 1:
                with_drafts = NGRAM_FALSE_MATCH
                rows = 1 + with_drafts * k
        verify = cost.forward(kv, size * rows)
        yields = min(length, k + 1) if k is not None else length
        if drafting == "eagle3":
            # Copy by copy, each sees what those before it have added.
            seen = kv + (size - 1) / 2 * yields
            draft = cost.draft_per_kv_token * seen + cost.draft_per_token * rows + cost.draft_fixed
        else:
            draft = with_drafts * cost.ngram_share * verify
        speculative += verify + draft + cost.overhead
        generated += yields
        kv += size * yields
    return size * tokens / plain, size * tokens / speculative


def lockstep_speedup(
    requests: Sequence[Recorded],
    batch_size: int,
    k: int | None,
    drafting: Drafting,
    walk: Walk = "theirs",
    cost: LinearStepCost | None = None,
) -> float:
    """Their figure: the mean of the requests' tokens a second with speculation over the mean without."""
    pairs = [throughputs(request, batch_size, k, drafting, walk, cost) for request in requests]
    return sum(with_drafts for _, with_drafts in pairs) / sum(without for without, _ in pairs)
