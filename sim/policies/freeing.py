"""Axis: in which order freed blocks join the free queue."""

from __future__ import annotations

from sim.core.block_pool import BlockPool


def hashless_first(pool: BlockPool, blocks: list[int]) -> None:
    """Blocks without a hash go to the head as a group, those with one to the tail (vLLM 0.24 on)."""
    hashes = pool.cache.hashes
    count = 0  # Nearly always the hashless come first: a table's end, walked backwards.
    for block in blocks:
        if hashes[block] is not None:
            break
        count += 1
    hashless, hashed = blocks[:count], blocks[count:]
    if any(hashes[block] is None for block in hashed):
        hashless = [block for block in blocks if hashes[block] is None]
        hashed = [block for block in blocks if hashes[block] is not None]
    pool.prepend(hashless)
    pool.append(hashed)


def all_to_tail(pool: BlockPool, blocks: list[int]) -> None:
    """All blocks go to the tail (vLLM before 0.24)."""
    pool.append(blocks)
