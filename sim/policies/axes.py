"""The axes by name, and a preset with some of them set otherwise. Names are those of a scenario's `engine.policies`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from sim.core.settings import Reservation, Rules, Undo
from sim.policies.caching import ACCEPTED, DROP_BLOCK, DROP_NOTHING, DROP_TOKEN, PROMPT_AND_FINISH, PROMPT_ONLY
from sim.policies.drafter_kv import NOWHERE, OWN_POOL_FREED, OWN_POOL_KEPT, SHARED
from sim.policies.reservation import ExactLookahead, MaxDraft, TwoFrames, WorstCase
from sim.policies.stale_output import DiscardedInFrames, DrainedInTokens
from sim.policies.undo import CommitTail, Compact, FreeRejected, Overwrite, Rewind
from sim.policies.victim import fewest_outputs, last_admitted

UNDO: Final[dict[str, Undo]] = {
    "overwrite": Overwrite(),
    "rewind": Rewind(),
    "free_rejected": FreeRejected(),
    "commit_tail": CommitTail(),
    "compact": Compact(),
}
RESERVATION: Final[dict[str, Reservation]] = {
    "exact_lookahead": ExactLookahead(),
    "worst_case": WorstCase(),
    "two_frames": TwoFrames(),
    "max_draft": MaxDraft(),
}
DRAFTER_KV: Final = {
    "none": NOWHERE,
    "shared": SHARED,
    "own_pool_freed": OWN_POOL_FREED,
    "own_pool_kept": OWN_POOL_KEPT,
}
PREFIX_CACHE: Final = {"accepted": ACCEPTED, "prompt_only": PROMPT_ONLY, "prompt_and_finish": PROMPT_AND_FINISH}
LAST_HIT: Final = (DROP_BLOCK, DROP_TOKEN, DROP_NOTHING)
VICTIM: Final = {"last_admitted": last_admitted, "fewest_outputs": fewest_outputs}
STALE_WHEN: Final = ("reset", "any_preemption")
STALE_HOW: Final = ("count_frames", "count_tokens", "deliver", "drop")
DRAFT_LENGTH: Final = ("fixed", "adaptive", "best_by_cost")
AXES: Final[dict[str, tuple[str, ...]]] = {
    "undo": tuple(UNDO),
    "reservation": tuple(RESERVATION),
    "drafter_kv": tuple(DRAFTER_KV),
    "stale_when": STALE_WHEN,
    "stale_how": STALE_HOW,
    "prefix_cache": tuple(PREFIX_CACHE),
    "last_hit": LAST_HIT,
    "victim": tuple(VICTIM),
    "draft_length": DRAFT_LENGTH,
}
"""The names on each axis."""


def stale_output(when: str, how: str) -> DiscardedInFrames | DrainedInTokens:
    """`count_tokens` and `drop` come to the same: a counter in tokens tells the stale frames apart exactly."""
    if how == "count_frames":
        return DiscardedInFrames(rolls_back_first=True, any_preemption=when == "any_preemption")
    return DrainedInTokens(drops_after="nothing" if how == "deliver" else when)


def stale_names(rules: Rules) -> tuple[str, str]:
    """When and how, of a preset's rules."""
    policy = rules.stale_output
    if isinstance(policy, DiscardedInFrames):
        return "any_preemption" if policy.any_preemption else "reset", "count_frames"
    assert isinstance(policy, DrainedInTokens)
    if policy.drops_after == "nothing":
        return "reset", "deliver"
    return policy.drops_after, "count_tokens"


def rules_with(
    rules: Rules,
    *,
    undo: str | None = None,
    reservation: str | None = None,
    prefix_cache: str | None = None,
    stale_when: str | None = None,
    stale_how: str | None = None,
    victim: str | None = None,
) -> Rules:
    """The rules with the named values; None leaves a preset's own. Raises KeyError for a name that an axis lacks."""
    changes: dict[str, Any] = {}
    if undo is not None:
        changes["undo"] = UNDO[undo]
    if reservation is not None:
        changes["reservation"] = RESERVATION[reservation]
    if prefix_cache is not None:
        changes["cache_outputs"] = PREFIX_CACHE[prefix_cache].outputs
        changes["cache_at_finish"] = PREFIX_CACHE[prefix_cache].at_finish
    if victim is not None:
        changes["victim"] = VICTIM[victim]
    if stale_when is not None or stale_how is not None:
        own_when, own_how = stale_names(rules)
        changes["stale_output"] = stale_output(stale_when or own_when, stale_how or own_how)
    return replace(rules, **changes)
