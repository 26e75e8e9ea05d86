"""Hashes of a request's full blocks, kept as runs of consecutive numbers.

A block that only goes on with what the block before it ended with may have the next number; so a prompt and an output
that nobody shares are two runs, whatever their length. Knows nothing of tokens, blocks or caches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from mypy_extensions import i64

BlockHash: TypeAlias = int
"""A hash of a full block's content and of all before it: a signed 64-bit number."""


class BlockHashes:
    """As a list of numbers, but for what it costs."""

    __slots__ = ("_ends", "_last_start", "_shifts", "num_blocks")

    def __init__(self) -> None:
        self.num_blocks: i64 = 0
        """Full blocks of which the hash is known."""
        self._ends: list[int] = []
        """By run: the number of the block behind it."""
        self._shifts: list[int] = []
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
        return self._shifts[self._run(index)] + index

    def numbers(self, count: int) -> list[BlockHash]:
        """The first `count`, or as many as there are. For checks and tests."""
        return [self[index] for index in range(min(count, len(self)))]

    def append(self, block_hash: BlockHash) -> None:
        """The next block's."""
        shift = block_hash - self.num_blocks
        self.num_blocks += 1
        if self._shifts and self._shifts[-1] == shift:
            self._ends[-1] = self.num_blocks
        else:
            self._last_start = self.num_blocks - 1
            self._shifts.append(shift)
            self._ends.append(self.num_blocks)

    def go_on(self, count: i64) -> None:
        """The next blocks have the next numbers. There must be one already."""
        self.num_blocks += count
        self._ends[-1] = self.num_blocks

    def following(self, index: int) -> tuple[BlockHash, int]:
        """The hash of this block, and of how many blocks from it on the hashes are consecutive numbers."""
        if index >= self._last_start:
            return self._shifts[-1] + index, self.num_blocks - index
        run = self._run(index)
        return self._shifts[run] + index, self._ends[run] - index

    def _run(self, index: int) -> int:
        ends = self._ends
        run = len(ends) - 1
        while run > 0 and index < ends[run - 1]:
            run -= 1
        return run
