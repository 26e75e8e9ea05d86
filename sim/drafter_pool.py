"""A drafter's own blocks, beside the target's pool: its own shape, its own table, in its own bytes.

Two ways: kept with the request, or freed after each verification, so that every round of drafting starts by computing
the whole context again (as the article tells it of two models). It is asked by the device at each launch who can be
drafted for, and told like an observer what has been preempted, ended or aborted. Knows block counts only, no block
numbers: no decision of the scheduler depends on which of these blocks is whose.
"""

from __future__ import annotations

from typing import Any

from sim.records import Batch, Interruption, Returned

CLASSES = ("context", "drafts", "slack", "free")


class DrafterPool:
    """`num_blocks` blocks of `block_size` tokens, `block_bytes` each."""

    def __init__(self, num_blocks: int, block_size: int, block_bytes: int, *, freed_after_verification: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = block_bytes
        self.freed_after_verification = freed_after_verification
        self.used_blocks = 0
        self.peak_blocks = 0
        self.num_refused = 0
        """Rounds of a request that found no room; its next verification has no draft worth accepting."""
        self._held: dict[int, tuple[int, int, int]] = {}
        """By request: blocks, context tokens, draft tokens."""
        self._context = 0
        self._drafts = 0
        self._now = 0
        self._slot_ns = [0, 0, 0, 0]

    def grow(self, request: int, context: int, num_drafts: int) -> bool:
        """Room for a request's context and its next drafts; False, and nothing changed, if blocks are lacking."""
        need = (context + num_drafts + self.block_size - 1) // self.block_size
        blocks, old_context, old_drafts = self._held.get(request, (0, 0, 0))
        need = max(need, blocks)
        if self.used_blocks + need - blocks > self.num_blocks:
            self.num_refused += 1
            return False
        self._held[request] = (need, context, num_drafts)
        self.used_blocks += need - blocks
        self._context += context - old_context
        self._drafts += num_drafts - old_drafts
        self.peak_blocks = max(self.peak_blocks, self.used_blocks)
        return True

    def release(self, request: int) -> None:
        """A request lets go of all its blocks, if it has any."""
        held = self._held.pop(request, None)
        if held is not None:
            self.used_blocks -= held[0]
            self._context -= held[1]
            self._drafts -= held[2]

    def slots(self) -> tuple[int, int, int, int]:
        """Slots by `CLASSES`, now; they add up to the pool."""
        used = self.used_blocks * self.block_size
        return (
            self._context,
            self._drafts,
            used - self._context - self._drafts,
            self.num_blocks * self.block_size - used,
        )

    def slot_seconds(self) -> dict[str, float]:
        """Slot-seconds by class."""
        return {name: total / 1e9 for name, total in zip(CLASSES, self._slot_ns, strict=True)}

    def summary(self) -> dict[str, Any]:
        """What a run's summary says of it. Byte-seconds count whole blocks."""
        slot_seconds = self.slot_seconds()
        used = sum(slot_seconds.values()) - slot_seconds["free"]
        return {
            "num_blocks": self.num_blocks,
            "block_bytes": self.block_bytes,
            "freed_after_verification": self.freed_after_verification,
            "peak_blocks": self.peak_blocks,
            "num_refused": self.num_refused,
            "slot_seconds": slot_seconds,
            "byte_seconds": used / self.block_size * self.block_bytes,
        }

    def pass_time(self, now: int) -> None:
        """Integrate up to `now`. To be called before anything changes."""
        elapsed = now - self._now
        if elapsed:
            self._now = now
            for number, slots in enumerate(self.slots()):
                self._slot_ns[number] += slots * elapsed

    # Told like an observer

    def step_ended(self, now: int, batch: Batch) -> None:
        """A round that keeps nothing is over."""
        self.pass_time(now)
        if self.freed_after_verification:
            for request in batch.requests:
                self.release(request.index)

    def scheduled(self, now: int, batch: Batch) -> None:
        """The preempted let go."""
        self.pass_time(now)
        for request in batch.preempted:
            self.release(request.index)

    def updated(self, now: int, returned: Returned) -> None:
        """Those that ended let go."""
        self.pass_time(now)
        for request in returned.finished:
            self.release(request.index)

    def interrupted(self, now: int, interruption: Interruption) -> None:
        """The aborted and the reset let go."""
        self.pass_time(now)
        for request in interruption.requests:
            self.release(request.index)

    def closed(self, now: int) -> None:
        """The rest of the time passes."""
        self.pass_time(now)
