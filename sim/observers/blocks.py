"""Every block by itself: how many refer to it, and whether it has a hash.

Told records, never asks: it follows their block operations one by one. The ledger counts blocks only and does without;
this is for those who draw them, and for `invariants`, which holds it against the pool.
"""

from __future__ import annotations

from collections.abc import Iterable

from sim.records import FREED, HASHED, HIT, TAKEN, BlockOperation


class Blocks:
    """All blocks of a pool, the null block included. Whoever has one hands it the operations of every record."""

    def __init__(self, num_blocks: int) -> None:
        self.refs = [0] * num_blocks
        self.hashed = [0] * num_blocks
        """1 for a block that has a hash."""
        self.num_held = 0
        self.num_cached = 0
        """Free, with a hash."""
        self.extra_refs = 0
        """References beyond the first, over all blocks."""

    def follow(self, operations: Iterable[BlockOperation]) -> None:
        """The next record's operations, in order."""
        refs, hashed = self.refs, self.hashed
        for kind, _, blocks in operations:
            for block in blocks:
                before = refs[block]
                if kind == TAKEN or kind == HIT:
                    refs[block] = before + 1
                    self.extra_refs += before > 0
                    self.num_held += before == 0
                    self.num_cached -= before == 0 and hashed[block]
                elif kind == FREED:
                    refs[block] = before - 1
                    self.extra_refs -= before > 1
                    self.num_held -= before == 1
                    self.num_cached += before == 1 and hashed[block]
                else:
                    self.num_cached += (before == 0) * (int(kind == HASHED) - hashed[block])
                    hashed[block] = int(kind == HASHED)
