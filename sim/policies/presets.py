"""Named engines: a value on every axis, and the release it follows. Data only."""

from __future__ import annotations

from typing import Final

from sim.core.settings import Rules
from sim.policies.freeing import hashless_first
from sim.policies.padding import beside_running, beside_running_or_hit, never
from sim.policies.reservation import ExactLookahead
from sim.policies.stale_output import DiscardedInFrames, DrainedInTokens
from sim.policies.undo import Overwrite
from sim.policies.victim import last_admitted

PRESETS: Final = {
    "vllm-0.32": Rules(
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
    ),
    "vllm-0.30": Rules(
        stale_output=DrainedInTokens(),
        freeing=hashless_first,
        padding=beside_running_or_hit,
        padding_survives_threshold=False,
        lone_prefill_exempt=False,
        draft_slots_per_request=True,
        negative_frames=False,
        skipped_victim_moves_index=True,
        undo=Overwrite(),
        reservation=ExactLookahead(),
        victim=last_admitted,
        cache_outputs=True,
        cache_at_finish=False,
        reports_reset_preemptions=True,
    ),
    "vllm-0.28": Rules(
        stale_output=DrainedInTokens(),
        freeing=hashless_first,
        padding=beside_running,
        padding_survives_threshold=True,
        lone_prefill_exempt=False,
        draft_slots_per_request=True,
        negative_frames=False,
        skipped_victim_moves_index=True,
        undo=Overwrite(),
        reservation=ExactLookahead(),
        victim=last_admitted,
        cache_outputs=True,
        cache_at_finish=False,
        reports_reset_preemptions=True,
    ),
    "vllm-0.26": Rules(
        stale_output=DiscardedInFrames(rolls_back_first=False),
        freeing=hashless_first,
        padding=beside_running,
        padding_survives_threshold=True,
        lone_prefill_exempt=False,
        draft_slots_per_request=False,
        negative_frames=True,
        skipped_victim_moves_index=False,
        undo=Overwrite(),
        reservation=ExactLookahead(),
        victim=last_admitted,
        cache_outputs=True,
        cache_at_finish=False,
        reports_reset_preemptions=True,
    ),
    "vllm-0.24": Rules(
        stale_output=DiscardedInFrames(rolls_back_first=True),
        freeing=hashless_first,
        padding=never,
        padding_survives_threshold=True,
        lone_prefill_exempt=False,
        draft_slots_per_request=False,
        negative_frames=True,
        skipped_victim_moves_index=False,
        undo=Overwrite(),
        reservation=ExactLookahead(),
        victim=last_admitted,
        cache_outputs=True,
        cache_at_finish=False,
        reports_reset_preemptions=False,
    ),
}

DEFAULT_PRESET: Final = "vllm-0.32"
