"""Slots for a request: lookup, admission, extension, commitment and release.

Knows requests and the pool; decides nothing about who is scheduled. Rules: vLLM 0.32, `KVCacheManager.allocate_slots`
and `FullAttentionManager`, for one group of full attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.core.block_pool import BlockPool
from sim.core.request import Request
from sim.core.settings import Reservation
from sim.records import EVICTED, FREED, HASHED, HIT, TAKEN, BlockOperation

if TYPE_CHECKING:
    from mypy_extensions import i64


class KVCache:
    """Block tables over one pool.

    `drop_last_hit_block`: EAGLE-like drafters recompute the last block of a hit, since the drafter needs the hidden
    states in front of the point of generation.
    """

    __slots__ = (
        "_num_drafts",
        "_reservation",
        "_tracks",
        "always_extends",
        "block_size",
        "cache_outputs",
        "drop_last_hit_block",
        "enable_prefix_caching",
        "hit_margin_tokens",
        "max_model_len",
        "operations",
        "pool",
        "watermark_blocks",
    )

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_model_len: int,
        *,
        enable_prefix_caching: bool = True,
        drop_last_hit_block: bool = False,
        hit_margin_tokens: int = 0,
        cache_outputs: bool = True,
        watermark: float = 0.0,
        reservation: Reservation | None = None,
        tracks_reservation: bool = False,
        num_drafts: int = 0,
    ) -> None:
        """`reservation`: None for exactly the frame and its lookahead; `num_drafts`: the configured K, for the others.

        `tracks_reservation`: keep `num_reserved_tokens` of each request, for those who undo by it.
        """
        self.pool = pool
        self.block_size: i64 = block_size
        self.max_model_len: i64 = max_model_len
        self.enable_prefix_caching = enable_prefix_caching
        self.drop_last_hit_block = drop_last_hit_block
        self.hit_margin_tokens = hit_margin_tokens
        self.cache_outputs = cache_outputs
        self._reservation = reservation
        self._tracks = tracks_reservation or reservation is not None
        self._num_drafts = num_drafts
        self.always_extends = self._tracks
        """`extend` has to be asked for every frame. Else not for one that ends, with its lookahead, within `num_slots`
        of its request, and before `cached_end`: there is nothing to take and nothing to commit."""
        self.watermark_blocks = int(watermark * pool.num_blocks)
        self.operations: list[BlockOperation] = []

    def take_operations(self) -> list[BlockOperation]:
        """Block operations since the last call, in order."""
        operations = self.operations
        self.operations = []
        return operations

    def lookup(self, request: Request) -> list[int]:
        """The longest run of cached blocks that covers at most num_tokens - 1, less the dropped last block."""
        if not self.enable_prefix_caching:
            return []
        count = max(request.num_tokens - 1 - self.hit_margin_tokens, 0) // self.block_size
        hit = self.pool.cache.find_all(request.hashes(count), count)
        if hit and self.drop_last_hit_block:
            hit.pop()
        return hit

    def extend(self, request: Request, num_new_tokens: i64, num_lookahead_tokens: i64) -> bool:
        """Slots for a running request's next tokens. False, and nothing changed, if blocks are lacking."""
        end = request.num_computed_tokens + num_new_tokens
        slots = end + num_lookahead_tokens
        if self._reservation is not None:
            slots = self._reservation.slots(
                request, request.num_computed_tokens, num_new_tokens, num_lookahead_tokens, self._num_drafts
            )
        if slots > self.max_model_len:
            slots = self.max_model_len
        block_size = self.block_size
        table = request.block_table
        need = (slots + block_size - 1) // block_size - len(table)
        if need > 0:
            if need > self.pool.num_free:
                return False
            self._take(request, need)
        if self._tracks:
            request.num_reserved_tokens = slots
        tokens = request.num_tokens
        if end < tokens:
            tokens = end
        if tokens >= request.cached_end:
            self.commit(request, tokens)
        return True

    def admit(
        self,
        request: Request,
        hit: list[int],
        num_computed_tokens: int,
        num_new_tokens: int,
        num_lookahead_tokens: int,
        somebody_runs: bool,
    ) -> bool:
        """Slots for a waiting request: whole-prompt check, watermark, then blocks. False and nothing changed if not."""
        block_size = self.block_size
        pool = self.pool
        refs = pool.refs
        idle = 0
        for block in hit:
            if refs[block] == 0:
                idle += 1
        held = len(hit)
        watermark = self.watermark_blocks if somebody_runs else 0
        whole = min(request.num_tokens, self.max_model_len)
        need = max((whole + block_size - 1) // block_size - held, 0) + idle
        if need + watermark > pool.num_free:
            return False
        end = num_computed_tokens + num_new_tokens
        slots = end + num_lookahead_tokens
        if self._reservation is not None:
            slots = self._reservation.slots(
                request, num_computed_tokens, num_new_tokens, num_lookahead_tokens, self._num_drafts
            )
        slots = min(slots, self.max_model_len)
        new = max((slots + block_size - 1) // block_size - held, 0)
        if new + idle + watermark > pool.num_free:
            return False
        if hit:
            pool.touch(hit)
            request.block_table.extend(hit)
            self.operations.append((HIT, request.index, hit))
        request.num_slots = held * block_size
        request.num_cached_blocks = held
        request.cached_end = (held + 1) * block_size
        request.num_reserved_tokens = slots
        if new:
            self._take(request, new)
        self.commit(request, min(end, request.num_tokens))
        return True

    def _take(self, request: Request, count: int) -> None:
        taken, evicted = self.pool.take(count)
        if evicted:
            self.operations.append((EVICTED, request.index, evicted))
        self.operations.append((TAKEN, request.index, taken))
        request.block_table.extend(taken)
        request.num_slots += count * self.block_size

    def commit(self, request: Request, num_tokens: i64) -> None:
        """Full blocks up to num_tokens join the prefix cache, unless they hold output and that is not cached yet."""
        if not self.cache_outputs and num_tokens > request.num_prompt_tokens:
            num_tokens = request.num_prompt_tokens
        self.commit_all(request, num_tokens)

    def commit_all(self, request: Request, num_tokens: i64) -> None:
        """Full blocks up to num_tokens join the prefix cache, whatever they hold."""
        size = self.block_size
        full = num_tokens // size
        first = request.num_cached_blocks
        if full <= first or not self.enable_prefix_caching:
            return
        table = request.block_table
        blocks = table[first:full]
        hashes = request.block_hashes
        if hashes.num_blocks < full:
            request.content.extend_hashes(hashes, full)
        self.pool.cache.insert(blocks, hashes, first, table[first - 1] if first > 0 else 0)
        request.num_cached_blocks = full
        request.cached_end = (full + 1) * size
        self.operations.append((HASHED, request.index, blocks))

    def trim(self, request: Request, num_tokens: int) -> None:
        """Let go of the blocks behind the first num_tokens tokens, the last of the table first."""
        kept = (num_tokens + self.block_size - 1) // self.block_size
        walk = request.block_table[kept:]
        if walk:
            walk.reverse()
            del request.block_table[kept:]
            request.num_slots = kept * self.block_size
            self.pool.release(walk)
            self.operations.append((FREED, request.index, walk))

    def free(self, request: Request) -> None:
        """Let go of all blocks, walking the table backwards."""
        walk = request.block_table
        if walk:
            walk.reverse()
            self.pool.release(walk)
            self.operations.append((FREED, request.index, walk))
            request.block_table = []
            request.num_slots = 0
        request.num_cached_blocks = 0

    def reset(self) -> bool:
        """Empty the prefix cache; False, and nothing changed, while any block is held."""
        if self.pool.num_free != self.pool.num_blocks - 1:
            return False
        evicted = self.pool.cache.clear()
        self.pool.num_cached = 0
        if evicted:
            self.operations.append((EVICTED, -1, evicted))
        return True
