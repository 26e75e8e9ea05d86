"""Faults to plant: one rule of paging, rollback or the prefix cache broken, for tests that must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from gpu_backend import paged_cache, positions
from sim.core.prefix_cache import PrefixCache
from sim.core.scheduler import Scheduler
from sim.records import Batch, Returned


def _slot_mapping_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token is written one slot in front of where it belongs."""
    right = paged_cache.slot_mapping

    def shifted(table: Tensor, requests: Tensor, at: Tensor, block_size: int) -> Tensor:
        return (right(table, requests, at, block_size) - 1).clamp(min=0)

    monkeypatch.setattr(paged_cache, "slot_mapping", shifted)


def _block_freed_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks behind the confirmed tokens are freed when a step returns, though the step in flight still writes them."""
    right = Scheduler.update

    def freeing(self: Scheduler, batch: Batch, sampled: list[int] | None = None) -> Returned:
        returned = right(self, batch, sampled)
        for request in self.running:
            self.kv_cache.trim(request, request.num_tokens)
        return returned

    monkeypatch.setattr(Scheduler, "update", freeing)


def _rollback_one_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rejected draft stays."""
    right = positions.position_after

    def short(position: int, num_tokens: int, num_drafts: int, accepted: int) -> int:
        return right(position, num_tokens, num_drafts, min(accepted + 1, num_drafts))

    monkeypatch.setattr(positions, "position_after", short)


def _hit_not_invalidated_at_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset says that it emptied the prefix cache; it has not."""

    def keeping(self: PrefixCache) -> list[int]:
        return []

    monkeypatch.setattr(PrefixCache, "clear", keeping)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], dict[str, Any]]] = {
    "a slot mapping off by one": (_slot_mapping_off_by_one, {}),
    "a block freed early": (_block_freed_early, {"is_async": True}),
    "a rollback one short": (_rollback_one_short, {}),
    "a hit not invalidated at reset": (_hit_not_invalidated_at_reset, {}),
}
"""By name: how to plant it, and what a scene needs for it to matter."""

_IN_THE_CORE = (_block_freed_early, _hit_not_invalidated_at_reset)
NAMES = [
    pytest.param(name, marks=pytest.mark.plain_core) if plant in _IN_THE_CORE else name
    for name, (plant, _) in FAULTS.items()
]
"""For `parametrize`: faults in the core can only be planted in its sources."""
