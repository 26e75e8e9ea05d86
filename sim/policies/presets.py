"""Named engines: a value on every axis, and the release it follows. Data only.

`PRESETS` holds what the scheduler asks; `TRAITS` what is around it: the drafter's KV, hits, and what the engine can do.
The presets of other engines than vLLM take their values on these axes; the loop over running and waiting requests is
vLLM's in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from sim.core.settings import Rules
from sim.policies.caching import DROP_BLOCK, DROP_NOTHING, DROP_TOKEN
from sim.policies.drafter_kv import NOWHERE, OWN_POOL_FREED, OWN_POOL_KEPT, SHARED, DrafterKV
from sim.policies.freeing import hashless_first
from sim.policies.padding import beside_running, beside_running_or_hit, never
from sim.policies.reservation import ExactLookahead, MaxDraft, TwoFrames
from sim.policies.stale_output import DiscardedInFrames, DrainedInTokens
from sim.policies.undo import CommitTail, FreeRejected, Overwrite, Rewind
from sim.policies.victim import fewest_outputs, last_admitted


@dataclass(frozen=True, slots=True)
class Traits:
    """What a preset says beside the scheduler's rules."""

    source: str
    last_hit: str = DROP_BLOCK
    drafter_kv: DrafterKV = SHARED
    drafter_kv_of_two_models: DrafterKV | None = None
    """For method draft_model, where it differs."""
    lookahead: bool = True
    """The drafter's slots are reserved as num_lookahead_tokens; else the reservation covers them."""
    draft_slots: bool = True
    """Drafting takes input tokens of the step's budget (vLLM)."""
    runs_async: bool = True


_VLLM_0_32: Final = Rules(
    stale_output=DrainedInTokens(),
    freeing=hashless_first,
    padding=beside_running_or_hit,
    padding_survives_threshold=False,
    lone_prefill_exempt=True,
    draft_slots_per_request=True,
    negative_frames=False,
    skipped_victim_moves_index=True,
    undo=Overwrite(),
    reservation=ExactLookahead(),
    victim=last_admitted,
    cache_outputs=True,
    cache_at_finish=False,
    reports_reset_preemptions=True,
)
_VLLM_0_30: Final = replace(_VLLM_0_32, lone_prefill_exempt=False)
_VLLM_0_28: Final = replace(_VLLM_0_30, padding=beside_running, padding_survives_threshold=True)
_VLLM_0_26: Final = replace(
    _VLLM_0_28,
    stale_output=DiscardedInFrames(rolls_back_first=False),
    draft_slots_per_request=False,
    negative_frames=True,
    skipped_victim_moves_index=False,
)
_VLLM_0_24: Final = replace(
    _VLLM_0_26,
    stale_output=DiscardedInFrames(rolls_back_first=True),
    padding=never,
    reports_reset_preemptions=False,
)
_OTHER_ENGINE: Final = replace(
    _VLLM_0_32,
    stale_output=DrainedInTokens(drops_after="any_preemption"),
    padding=never,
    cache_outputs=False,
    cache_at_finish=True,
)

PRESETS: Final[dict[str, Rules]] = {
    "vllm-0.32": _VLLM_0_32,
    "vllm-0.30": _VLLM_0_30,
    "vllm-0.28": _VLLM_0_28,
    "vllm-0.26": _VLLM_0_26,
    "vllm-0.24": _VLLM_0_24,
    "article": replace(
        _VLLM_0_24,
        stale_output=DiscardedInFrames(rolls_back_first=True, any_preemption=True),
        cache_outputs=False,
    ),
    "sglang-0.5.23": replace(_OTHER_ENGINE, undo=CommitTail(), reservation=TwoFrames(), victim=fewest_outputs),
    "sglang-0.5.6": replace(_OTHER_ENGINE, undo=FreeRejected()),
    "trtllm": replace(_OTHER_ENGINE, undo=Rewind(), reservation=MaxDraft()),
}

TRAITS: Final[dict[str, Traits]] = {
    "vllm-0.32": Traits("vLLM 0.32, compared live; see docs/conformance.md"),
    "vllm-0.30": Traits("vLLM 0.30, compared live"),
    "vllm-0.28": Traits("vLLM 0.28, compared live"),
    "vllm-0.26": Traits("vLLM 0.26, compared live"),
    "vllm-0.24": Traits("vLLM 0.24, compared live"),
    "article": Traits(
        "the article that speckv started from, as written; see docs/article.md",
        last_hit=DROP_NOTHING,
        drafter_kv=NOWHERE,
        drafter_kv_of_two_models=OWN_POOL_FREED,
        lookahead=False,
        draft_slots=False,
    ),
    "sglang-0.5.23": Traits(
        "SGLang 0.5.23, overlap scheduler with the v2 speculative worker, as read",
        last_hit=DROP_TOKEN,
        lookahead=False,
        draft_slots=False,
    ),
    "sglang-0.5.6": Traits(
        "SGLang 0.5.6, v1 speculative worker (no overlap), as read",
        last_hit=DROP_TOKEN,
        drafter_kv=OWN_POOL_KEPT,
        draft_slots=False,
        runs_async=False,
    ),
    "trtllm": Traits(
        "TensorRT-LLM, PyTorch backend's KV cache manager, as read",
        last_hit=DROP_NOTHING,
        lookahead=False,
        draft_slots=False,
    ),
}

DEFAULT_PRESET: Final = "vllm-0.32"
VLLM_PRESETS: Final = tuple(name for name in PRESETS if name.startswith("vllm-"))
"""Those that are held to recorded and live decisions."""
