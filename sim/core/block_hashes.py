"""Hashes of a request's full blocks, kept as runs of consecutive numbers.

A block that only goes on with what the block before it ended with may have the next number; so a prompt and an output
that nobody shares are two runs, whatever their length. Knows nothing of tokens, blocks or caches.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from mypy_extensions import i64

BlockHash: TypeAlias = int
"""A hash of a full block's content and of all before it: from -2^62 on and below 2^62, as `run_start` gives it."""

PAGE_BITS: Final = 6
"""The prefix cache has hashes on pages of 64 consecutive numbers."""


def run_start(number: int) -> BlockHash:
    """A hash that others can follow, of any number of 64 bits: it is the first of a page, and far from 64 bits' end."""
    return number >> 1 & -1 << PAGE_BITS


class BlockHashes:
    """As a list of numbers, but for what it costs."""

    __slots__ = ("_last_start", "ends", "num_blocks", "shifts")

    def __init__(self) -> None:
        self.num_blocks: i64 = 0
        """Full blocks of which the hash is known."""
        self.ends: list[int] = []
        """By run: the number of the block behind it."""
        self.shifts: list[int] = []
        """By run: a block's hash less its number."""
        self._last_start: i64 = 0
        """Of the last run: the number of its first block."""

    def __len__(self) -> int:
        """`num_blocks`."""
        return self.num_blocks

    def __getitem__(self, index: int) -> BlockHash:
        """The hash of this block, or with a negative index counted from the end. Raises IndexError."""
        known: int = self.num_blocks
        if index < 0:
            index += known
        if not 0 <= index < known:
            raise IndexError(f"block {index} of {known}")
        return self.shifts[self.run_of(index)] + index

    def numbers(self, count: int) -> list[BlockHash]:
        """The first `count`, or as many as there are. For checks and tests."""
        return [self[index] for index in range(min(count, len(self)))]

    def append(self, block_hash: BlockHash) -> None:
        """The next block's."""
        shift = block_hash - self.num_blocks
        self.num_blocks += 1
        if self.shifts and self.shifts[-1] == shift:
            self.ends[-1] = self.num_blocks
        else:
            self._last_start = self.num_blocks - 1
            self.shifts.append(shift)
            self.ends.append(self.num_blocks)

    def go_on(self, count: i64) -> None:
        """The next blocks have the next numbers. There must be one already."""
        self.num_blocks += count
        self.ends[-1] = self.num_blocks

    def run_of(self, index: int) -> int:
        """The run that this block is in."""
        return len(self.ends) - 1 if index >= self._last_start else bisect_right(self.ends, index)
