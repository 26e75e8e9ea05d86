"""The blocks: who refers to them, and in which order free ones are handed out.

Knows nothing of requests or tokens. Block 0 is the null block and is never handed out. The free queue is a doubly
linked list in two integer lists, with one more entry (number `num_blocks`) as head and tail in one. A free block may
have a hash: then it can still be hit, and is taken out of the middle of the queue.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.core.prefix_cache import PrefixCache

Freeing = Callable[["BlockPool", list[int]], None]
"""Puts blocks that nobody refers to any more, in the order of the walk, into the free queue; the list it only reads."""


class BlockPool:
    """`num_blocks` blocks in all, the null block included, as vLLM's `num_gpu_blocks`."""

    __slots__ = ("_next", "_previous", "cache", "freeing", "num_blocks", "num_free", "refs")

    def __init__(self, num_blocks: int, cache: PrefixCache, freeing: Freeing) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_gpu_blocks is {num_blocks}; at least 2, since block 0 is the null block")
        self.num_blocks = num_blocks
        self.cache = cache
        self.freeing = freeing
        self.refs = [0] * num_blocks
        self.refs[0] = 1
        self.num_free = num_blocks - 1
        # Block 1 follows the end entry, block num_blocks - 1 precedes it.
        self._next = [*range(1, num_blocks + 1), 1]
        self._previous = [num_blocks, num_blocks, *range(1, num_blocks)]

    def take(self, count: int) -> tuple[list[int], list[int]]:
        """Hand out `count` blocks from the head; returns them and those of them that lost a hash.

        Raises:
            ValueError: fewer are free; nothing has been changed.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} are free")
        end = self.num_blocks
        successors = self._next
        refs = self.refs
        hashes = self.cache.hashes
        taken: list[int] = []
        evicted: list[int] = []
        block = successors[end]
        for _ in range(count):
            refs[block] = 1
            taken.append(block)
            if hashes[block] is not None:
                evicted.append(block)
            block = successors[block]
        if evicted:
            self.cache.evict(evicted)
        successors[end] = block
        self._previous[block] = end
        self.num_free -= count
        return taken, evicted

    def touch(self, blocks: list[int]) -> None:
        """Refer to blocks once more; those that were free leave the queue.

        Raises:
            ValueError: the null block is among them; nothing has been changed.
        """
        if 0 in blocks:
            raise ValueError("the null block cannot be referred to")
        refs = self.refs
        for block in blocks:
            if refs[block] == 0:
                before, after = self._previous[block], self._next[block]
                self._next[before] = after
                self._previous[after] = before
                self.num_free -= 1
            refs[block] += 1

    def release(self, walk: list[int]) -> None:
        """Refer to different blocks once less, in this order; those that nobody refers to any more become free.

        Raises:
            ValueError: a block is the null block or nobody refers to it; nothing has been changed.
        """
        refs = self.refs
        for block in walk:
            if block == 0 or refs[block] == 0:
                raise ValueError(f"block {block} is released, but nobody refers to it")
        still_held = 0
        for block in walk:
            left = refs[block] - 1
            refs[block] = left
            if left:
                still_held += 1
        free = walk if still_held == 0 else [block for block in walk if refs[block] == 0]
        self.freeing(self, free)
        self.num_free += len(free)

    def append(self, blocks: list[int]) -> None:
        """Put blocks at the tail of the free queue, in order. For freeing policies."""
        end = self.num_blocks
        successors, predecessors = self._next, self._previous
        last = predecessors[end]
        for block in blocks:
            successors[last] = block
            predecessors[block] = last
            last = block
        successors[last] = end
        predecessors[end] = last

    def prepend(self, blocks: list[int]) -> None:
        """Put blocks at the head of the free queue as a group, in order. For freeing policies."""
        end = self.num_blocks
        successors, predecessors = self._next, self._previous
        first = successors[end]
        last = end
        for block in blocks:
            successors[last] = block
            predecessors[block] = last
            last = block
        successors[last] = first
        predecessors[first] = last

    def free_queue(self) -> list[int]:
        """Free blocks from head to tail. For checks and tests: it walks the whole queue."""
        queue: list[int] = []
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            queue.append(block)
            block = self._next[block]
        return queue

    @property
    def usage(self) -> float:
        """vLLM's kv_cache_usage_perc: held blocks over all but the null block, 0 to 1."""
        return 1.0 - self.num_free / (self.num_blocks - 1)
