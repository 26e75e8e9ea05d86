"""The blocks: who refers to them, and in which order free ones are handed out.

Knows nothing of requests or tokens. Block 0 is the null block and is never handed out. The free queue is a chain of
pieces, each a list of blocks that became free together, so that a request's blocks come and go as slices. A free block
may have a hash: then it can still be hit. Its entry stays in the queue and is crossed off when it is met. Only blocks
with a hash are hit, and those join at the tail, so that the entries of a block that do not hold stand before the one
that does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from sim.core.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from mypy_extensions import i64

Freeing = Callable[["BlockPool", list[int], int], None]
"""Puts blocks that nobody refers to any more, in the order of the walk, into the free queue. It is told how many
of them have a hash, and only reads the list."""


class BlockPool:
    """`num_blocks` blocks in all, the null block included, as vLLM's `num_gpu_blocks`."""

    __slots__ = (
        "_num_touched",
        "_piece",
        "_pieces",
        "_position",
        "_touched",
        "cache",
        "extra_refs",
        "freeing",
        "num_blocks",
        "num_cached",
        "num_free",
        "refs",
    )

    def __init__(self, num_blocks: int, cache: PrefixCache, freeing: Freeing) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_gpu_blocks is {num_blocks}; at least 2, since block 0 is the null block")
        self.num_blocks = num_blocks
        self.cache = cache
        self.freeing = freeing
        self.refs: list[int] = [0] * num_blocks
        self.num_free: i64 = num_blocks - 1
        self.num_cached: i64 = 0
        """Free blocks that have a hash."""
        self.extra_refs: i64 = 0
        """References beyond the first, over all held blocks."""
        self._piece = list(range(1, num_blocks))
        self._position = 0
        self._pieces: deque[tuple[list[int], int]] = deque()
        """What follows `_piece`: pieces of the queue, and where each begins."""
        self._touched: dict[int, int] = {}
        """Entries by block that no longer hold, since the block was hit while it was free."""
        self._num_touched = 0
        """Those of all blocks."""

    def take(self, count: int) -> tuple[list[int], list[int]]:
        """Hand out `count` blocks from the head; returns them and those of them that lost a hash.

        Raises:
            ValueError: fewer are free; nothing has been changed.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} are free")
        behind = self._position + count
        if behind < len(self._piece) and not self._touched:
            taken = self._piece[self._position : behind]
            self._position = behind
        else:
            taken = self._next(count)
            while len(taken) < count:
                taken = taken + self._next(count - len(taken))
        refs = self.refs
        pages = self.cache.pages
        num_hashed: i64 = 0
        for block in taken:
            refs[block] = 1
            if pages[block] is not None:
                num_hashed += 1
        self.num_free -= count
        if num_hashed == 0:
            return taken, []
        evicted = taken if num_hashed == count else [block for block in taken if pages[block] is not None]
        self.cache.evict_hashed(evicted)
        self.num_cached -= num_hashed
        return taken, evicted

    def _next(self, count: int) -> list[int]:
        """Take up to `count` entries off the first piece of the queue; those of them that count."""
        first = self._position
        entries = self._piece[first : first + count]
        first += len(entries)
        if first >= len(self._piece) and self._pieces:
            self._piece, first = self._pieces.popleft()
        self._position = first
        if not self._touched:
            return entries
        holding = [block for block in entries if self._counts(block, self._touched)]
        self._num_touched -= len(entries) - len(holding)
        return holding

    def _counts(self, block: int, touched: dict[int, int]) -> bool:
        """Whether the entry that is met next for this block still holds; one that does not is crossed off."""
        pending = touched.get(block)
        if pending is None:
            return True
        if pending > 1:
            touched[block] = pending - 1
        else:
            del touched[block]
        return False

    def touch(self, blocks: list[int]) -> None:
        """Refer to blocks once more; those that were free leave the queue.

        Raises:
            ValueError: the null block is among them, or a free one without a hash; nothing has been changed.
        """
        refs = self.refs
        pages = self.cache.pages
        for block in blocks:
            if block == 0:
                raise ValueError("the null block cannot be referred to")
            if refs[block] == 0 and pages[block] is None:
                raise ValueError(f"block {block} is free and holds nothing that could be hit")
        touched = self._touched
        for block in blocks:
            before = refs[block]
            if before == 0:
                touched[block] = touched.get(block, 0) + 1
                self._num_touched += 1
                self.num_free -= 1
                self.num_cached -= 1
            else:
                self.extra_refs += 1
            refs[block] = before + 1
        if self._num_touched > self.num_blocks:
            self._tidy()

    def _tidy(self) -> None:
        """Leave out the entries that do not hold: a prefix that is hit again and again adds to them each time."""
        self._piece, self._position = self.free_queue(), 0
        self._pieces.clear()
        self._touched.clear()
        self._num_touched = 0

    def release(self, walk: list[int]) -> None:
        """Refer to different blocks once less, in this order; those that nobody refers to any more become free.

        The list is kept, and must not be changed afterwards.

        Raises:
            ValueError: a block is the null block or nobody refers to it; nothing has been changed.
        """
        refs = self.refs
        pages = self.cache.pages
        counts = [refs[block] for block in walk]
        free = walk
        num_hashed: i64 = 0
        if counts.count(1) != len(walk):
            for block in walk:
                if refs[block] == 0:
                    raise ValueError(f"block {block} is released, but nobody refers to it")
            for block in walk:
                refs[block] = refs[block] - 1
            free = [block for block in walk if refs[block] == 0]
            self.extra_refs -= len(walk) - len(free)
        for block in free:
            refs[block] = 0
            if pages[block] is not None:
                num_hashed += 1
        self.freeing(self, free, num_hashed)
        self.num_free += len(free)
        self.num_cached += num_hashed

    def append(self, blocks: list[int]) -> None:
        """Put blocks at the tail of the free queue, in order. For freeing policies. The list is kept."""
        if blocks:
            self._pieces.append((blocks, 0))

    def prepend(self, blocks: list[int]) -> None:
        """Put blocks at the head of the free queue as a group, in order. For freeing policies. The list is kept."""
        if blocks:
            self._pieces.appendleft((self._piece, self._position))
            self._piece = blocks
            self._position = 0

    def free_queue(self) -> list[int]:
        """Free blocks from head to tail. For checks and tests: it walks the whole queue."""
        touched = dict(self._touched)
        pieces = [(self._piece, self._position), *self._pieces]
        entries = [block for piece, position in pieces for block in piece[position:]]
        return [block for block in entries if self._counts(block, touched)]

    @property
    def num_held(self) -> int:
        """Blocks that somebody refers to, without the null block."""
        return self.num_blocks - 1 - self.num_free

    @property
    def usage(self) -> float:
        """vLLM's kv_cache_usage_perc: held blocks over all but the null block, 0 to 1."""
        num_free: int = self.num_free
        return 1.0 - num_free / (self.num_blocks - 1)
