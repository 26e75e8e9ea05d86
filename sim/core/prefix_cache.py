"""Which block holds which content: hash to blocks, first inserted first.

Knows nothing of free queues or references. Two blocks may hold the same content (vLLM does not deduplicate); a lookup
finds the one inserted first.
"""

from __future__ import annotations

from sim.core.request import BlockHash


class PrefixCache:
    """Hash to block, and block to hash."""

    __slots__ = ("_duplicates", "_first", "hashes")

    def __init__(self, num_blocks: int) -> None:
        self.hashes: list[BlockHash | None] = [None] * num_blocks
        """By block id: the hash of its content, None if it has none."""
        self._first: dict[BlockHash, int] = {}
        self._duplicates: dict[BlockHash, list[int]] = {}

    def __len__(self) -> int:
        """Number of blocks that have a hash."""
        return len(self._first) + sum(map(len, self._duplicates.values()))

    def find(self, block_hash: BlockHash) -> int | None:
        """The block that holds this content, the first inserted if several do."""
        return self._first.get(block_hash)

    def insert(self, blocks: list[int], block_hashes: list[BlockHash], index: int = 0) -> None:
        """Give blocks their hashes, in order: the first block the hash at `index`.

        Raises:
            ValueError: a block has one already; those before it have been inserted.
        """
        hashes = self.hashes
        first = self._first
        for block in blocks:
            if hashes[block] is not None:
                raise ValueError(f"block {block} has a hash already")
            block_hash = block_hashes[index]
            index += 1
            hashes[block] = block_hash
            if first.setdefault(block_hash, block) != block:
                self._duplicates.setdefault(block_hash, []).append(block)

    def evict(self, blocks: list[int]) -> None:
        """Take different blocks' hashes away.

        Raises:
            KeyError: a block has none; nothing has been changed.
        """
        hashes = self.hashes
        duplicates = self._duplicates
        for block in blocks:
            if hashes[block] is None:
                raise KeyError(f"block {block} has no hash")
        for block in blocks:
            block_hash = hashes[block]
            hashes[block] = None
            if duplicates and block_hash in duplicates:
                self._evict_duplicate(block, block_hash)
            else:
                del self._first[block_hash]

    def _evict_duplicate(self, block: int, block_hash: BlockHash) -> None:
        others = self._duplicates[block_hash]
        if self._first[block_hash] == block:
            self._first[block_hash] = others.pop(0)
        else:
            others.remove(block)
        if not others:
            del self._duplicates[block_hash]

    def clear(self) -> list[int]:
        """Take all hashes away; returns the blocks that had one, by id."""
        had = [block for block, block_hash in enumerate(self.hashes) if block_hash is not None]
        for block in had:
            self.hashes[block] = None
        self._first.clear()
        self._duplicates.clear()
        return had
