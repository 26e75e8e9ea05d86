"""Axis: in which order freed blocks join the free queue."""

from __future__ import annotations

from sim.core.block_pool import BlockPool


def hashless_first(pool: BlockPool, blocks: list[int], num_hashed: int) -> None:
    """Blocks without a hash go to the head as a group, those with one to the tail (vLLM 0.24 on)."""
    pages = pool.cache.pages
    num_hashless = len(blocks) - num_hashed
    hashless, hashed = blocks[:num_hashless], blocks[num_hashless:]
    for block in hashless:  # Nearly always the hashless come first: a table's end, walked backwards.
        if pages[block] is not None:
            hashless = [block for block in blocks if pages[block] is None]
            hashed = [block for block in blocks if pages[block] is not None]
            break
    pool.prepend(hashless)
    pool.append(hashed)


def all_to_tail(pool: BlockPool, blocks: list[int], num_hashed: int) -> None:
    """All blocks go to the tail (vLLM before 0.24)."""
    pool.append(blocks)
