"""Published acceptance behaviour, as data: what a scenario means by `acceptance: {model: profile, name: ...}`.

Knows figures and where they come from. Must not know scenarios. `section` is what an `acceptance` section would say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["ACCEPTANCE_PROFILES", "AcceptanceProfile"]


@dataclass(frozen=True)
class AcceptanceProfile:
    """`k`: drafts a step that the figures were measured with; `source`: who measured what, and what is derived."""

    drafter: str
    target: str
    task: str
    k: int
    section: Mapping[str, Any]
    source: str


def _unconditional(*rates: float) -> dict[str, Any]:
    return {"model": "per_position", "rates": list(rates), "convention": "unconditional"}


_RECORDINGS = "SpecDecode-Bench, recorded drafts, loops of 4,000 tokens and more left out"
_EAGLE3_8B = ("EAGLE-3", "Llama-3.1-8B")

ACCEPTANCE_PROFILES: Final[Mapping[str, AcceptanceProfile]] = {
    "eagle3-gsm8k": AcceptanceProfile(
        *_EAGLE3_8B,
        "gsm8k",
        5,
        {"model": "beta", "alpha": 109.03, "beta": 58.92},
        f"{_RECORDINGS}; Beta over requests fitted at K = 5 (2.65 tokens a step)",
    ),
    "eagle3-sharegpt": AcceptanceProfile(
        *_EAGLE3_8B,
        "sharegpt",
        5,
        {"model": "beta", "alpha": 13.07, "beta": 7.94},
        f"{_RECORDINGS}; Beta over requests fitted at K = 5 (2.56 tokens a step)",
    ),
    "eagle3-mt-bench": AcceptanceProfile(
        *_EAGLE3_8B,
        "MT-bench",
        7,
        _unconditional(0.77, 0.59, 0.43, 0.29, 0.24, 0.14, 0.08),
        "published tokens a step for K = 2 to 7: 2.36 2.79 3.08 3.32 3.46 3.54; the rates are their differences, the "
        "first 1.36 split as one conditional rate",
    ),
    "eagle3-k3": AcceptanceProfile(
        *_EAGLE3_8B, "MT-bench", 3, _unconditional(0.730, 0.521, 0.355), "published rates for K = 3"
    ),
    "mtp-deepseek-v3": AcceptanceProfile(
        "MTP",
        "DeepSeek-V3",
        "mixed",
        1,
        _unconditional(0.875),
        "DeepSeek-V3 technical report: the second token is accepted 85 to 90 percent of the time; the middle",
    ),
    "mtp-gsm8k": AcceptanceProfile(
        "MTP",
        "a model with MTP",
        "gsm8k",
        8,
        _unconditional(0.76, 0.62, 0.51, 0.42, 0.36, 0.31, 0.27, 0.24),
        "published rates by position for K = 8",
    ),
    "draft-qwen3-1.7b": AcceptanceProfile(
        "Qwen3-1.7B",
        "Qwen3-32B",
        "mixed",
        3,
        {"model": "geometric", "rate": 0.7608},
        "published 2.78 tokens a step for K = 3; one conditional rate that yields it",
    ),
    "ngram-gsm8k": AcceptanceProfile(
        "n-gram",
        "Llama-3.1-8B",
        "gsm8k",
        5,
        {"model": "match_and_run", "start": 0.1329, "again": 0.2, "rates": [0.5294, 0.5475, 0.5881, 0.6309, 0.71]},
        "SpecDecode-Bench: drafts in 15 percent of the steps, rates .54 .56 .60 .64 .71 given a draft, K = 5, which "
        "the model's step rates meet; a match that has ended is followed by one with .2 (measured after a drafted "
        "step, those that go on included: .21 to .75)",
    ),
    "ngram-sharegpt": AcceptanceProfile(
        "n-gram",
        "Llama-3.1-8B",
        "sharegpt",
        5,
        {"model": "match_and_run", "start": 0.1318, "again": 0.2, "rates": [0.6237, 0.7042, 0.7751, 0.8615, 0.88]},
        "SpecDecode-Bench: drafts in 19 percent of the steps, rates .70 .77 .82 .87 .88 given a draft, K = 5 (1.45 "
        "tokens a step), which the model's step rates meet; a match that has ended is followed by one with .2",
    ),
    "ngram-blazedit": AcceptanceProfile(
        "n-gram",
        "not said",
        "blazedit (code edits)",
        5,
        {"model": "match_and_run", "start": 0.4789, "again": 0.2, "rates": [0.8915]},
        "published for K = 5: 4.59 tokens over drafted steps, 2.96 over all; one rate along a match, and a match that "
        "has ended is followed by one with .2 (assumed)",
    ),
}
"""By name."""
