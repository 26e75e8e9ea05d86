"""Slots for a request, by hand: what is hit, what is taken, what is refused, and who is evicted first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from sim.core.block_pool import BlockPool
from sim.core.kv_cache import KVCache
from sim.core.prefix_cache import PrefixCache
from sim.core.request import RUNNING, Request
from sim.policies.drafters import DRAFTERS
from sim.policies.freeing import hashless_first
from sim.records import EVICTED, FREED, HASHED, HIT, TAKEN
from tests.by_hand import Tokens


def a_cache(num_blocks: int, block_size: int = 4, max_model_len: int = 1000, **changes: Any) -> KVCache:
    pool = BlockPool(num_blocks, PrefixCache(num_blocks), hashless_first)
    return KVCache(pool, block_size, max_model_len, **changes)


def a_request(cache: KVCache, index: int, prompt: int | Sequence[int]) -> Request:
    """With so many tokens of its own, or with these."""
    tokens = range(1000 * (index + 1), 1000 * (index + 1) + prompt) if isinstance(prompt, int) else prompt
    return Request(f"r{index}", index, len(tokens), 50, Tokens(tokens, cache.block_size, 10**6 * (index + 1)))


def admit(cache: KVCache, request: Request, *, chunk: int | None = None, lookahead: int = 0, runs: bool = False) -> int:
    """Look up and admit with all tokens that are left, or a chunk of them; returns the tokens hit, -1 if refused."""
    hit = cache.lookup(request)
    found = len(hit) * cache.block_size
    num_tokens = request.num_tokens - found if chunk is None else chunk
    if not cache.admit(request, hit, found, num_tokens, lookahead, runs):
        return -1
    request.become(RUNNING)
    request.num_computed_tokens = found + num_tokens
    return found


def everything(cache: KVCache, *requests: Request) -> tuple[Any, ...]:
    pool = cache.pool
    tables = [(list(request.block_table), request.num_cached_blocks) for request in requests]
    return pool.free_queue(), pool.num_free, list(pool.refs), list(pool.cache.hashes), list(cache.operations), tables


def test_an_identical_prompt_of_64_tokens_in_blocks_of_16_hits_48_and_takes_one_block() -> None:
    """At most N - 1 = 63 tokens are looked up, so 63 // 16 = 3 blocks. The last is computed again, in a block of its
    own: nothing is deduplicated."""
    cache = a_cache(20, 16)
    first, second = a_request(cache, 0, range(64)), a_request(cache, 1, range(64))
    assert admit(cache, first) == 0
    assert cache.take_operations() == [(TAKEN, 0, [1, 2, 3, 4]), (HASHED, 0, [1, 2, 3, 4])]
    free = cache.pool.num_free
    assert admit(cache, second) == 48
    assert free - cache.pool.num_free == 1
    assert second.block_table == [1, 2, 3, 5]
    assert cache.take_operations() == [(HIT, 1, [1, 2, 3]), (TAKEN, 1, [5]), (HASHED, 1, [5])]
    assert cache.pool.refs[1:6] == [2, 2, 2, 1, 1]

    # Blocks 4 and 5 hold the same; a longer prompt finds the first inserted, and the other once that is gone.
    longer = a_request(cache, 2, range(65))
    assert cache.lookup(longer) == [1, 2, 3, 4]
    cache.pool.cache.evict([4])
    assert cache.lookup(longer) == [1, 2, 3, 5]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("none", 8),
        ("ngram", 8),
        ("ngram_gpu", 8),
        ("draft_model", 8),
        ("eagle", 4),
        ("eagle3", 4),
        ("mtp", 4),
    ],
)
def test_a_reuse_of_8_tokens_in_blocks_of_4_by_drafter(method: str, expected: int) -> None:
    """EAGLE-like drafters compute the last block of a hit again."""
    cache = a_cache(20, 4, drop_last_hit_block=DRAFTERS[method].drop_last_hit_block)
    admit(cache, a_request(cache, 0, [*range(8), 100]))
    assert admit(cache, a_request(cache, 1, [*range(8), 200])) == expected


def test_a_hit_of_one_block_that_is_dropped_is_no_hit() -> None:
    cache = a_cache(20, 4, drop_last_hit_block=True)
    admit(cache, a_request(cache, 0, [*range(4), 100]))
    assert admit(cache, a_request(cache, 1, [*range(4), 200])) == 0


def test_a_hit_is_a_run_from_the_start() -> None:
    """H(i) hashes H(i - 1): with another first block, equal blocks behind it are not equal; and a gap ends the run."""
    cache = a_cache(20)
    admit(cache, a_request(cache, 0, range(16)))
    assert cache.lookup(a_request(cache, 1, [99, *range(1, 16)])) == []
    assert cache.lookup(a_request(cache, 2, [*range(7), 99, *range(8, 16)])) == [1]
    cache.pool.cache.evict([2])
    assert cache.lookup(a_request(cache, 3, range(16))) == [1]


def test_without_prefix_caching_nothing_is_hashed_or_hit() -> None:
    cache = a_cache(20, enable_prefix_caching=False)
    admit(cache, a_request(cache, 0, range(16)))
    assert admit(cache, a_request(cache, 1, range(16))) == 0
    assert cache.pool.cache.hashes == [None] * 20


@pytest.mark.parametrize(("usable", "admitted"), [(9, False), (10, True)])
def test_whole_prompt_check(usable: int, admitted: bool) -> None:
    """A chunk of 4 of 40 tokens needs one block of 4, but all ten must be free."""
    cache = a_cache(usable + 1)
    request = a_request(cache, 0, 40)
    before = everything(cache, request)
    assert (admit(cache, request, chunk=4) == 0) == admitted
    if admitted:
        assert request.block_table == [1]
    else:
        assert everything(cache, request) == before


def test_the_whole_prompt_ends_at_the_model_length() -> None:
    """A prompt that has grown beyond it (40 of 36) asks for 9 blocks, not 10."""
    cache = a_cache(10, max_model_len=36)
    assert admit(cache, a_request(cache, 0, 40), chunk=4) == 0


@pytest.mark.parametrize(
    ("watermark", "runs", "admitted"),
    [
        (0.0, True, True),  # 8 of 8
        (0.10, True, True),  # int(0.10 * 9) = 0: the null block counts, but rounding is down
        (0.12, True, False),  # int(0.12 * 9) = 1: 9 would have to be free
        (0.12, False, True),  # nobody runs: no watermark
        (0.99, False, True),
    ],
)
def test_watermark(watermark: float, runs: bool, admitted: bool) -> None:
    """A prompt of 8 blocks in a pool of 9, of which 8 can be held."""
    cache = a_cache(9, watermark=watermark)
    request = a_request(cache, 0, 32)
    before = everything(cache, request)
    assert (admit(cache, request, runs=runs) == 0) == admitted
    if not admitted:
        assert everything(cache, request) == before


@pytest.mark.parametrize(("prompt", "runs", "admitted"), [(16, True, True), (17, True, False), (17, False, True)])
def test_watermark_and_whole_prompt_check_add_up(prompt: int, runs: bool, admitted: bool) -> None:
    """Usable 6, watermark int(0.3 * 7) = 2: 4 blocks of prompt pass, 5 do not, though the chunk needs one only."""
    cache = a_cache(7, watermark=0.3)
    assert (admit(cache, a_request(cache, 0, prompt), chunk=4, runs=runs) == 0) == admitted


def test_a_running_request_may_go_below_the_watermark() -> None:
    cache = a_cache(4, watermark=0.5)
    request = a_request(cache, 0, 8)
    admit(cache, request)
    assert cache.extend(request, 1, 0)
    assert cache.pool.num_free == 0


@pytest.mark.parametrize(("others", "admitted"), [(0, True), (1, False)])
def test_idle_hit_blocks_count_as_needed(others: int, admitted: bool) -> None:
    """Usable 4; a freed prompt of 2 full blocks can be hit. A prompt of 4 blocks with this hit takes all 4: 2 of its
    own and 2 that are free as long as nobody holds them. With one block held by somebody else it does not fit."""
    cache = a_cache(5)
    first = a_request(cache, 0, range(8))
    admit(cache, first)
    cache.free(first)
    for index in range(others):
        admit(cache, a_request(cache, 2 + index, 4))
    request = a_request(cache, 1, range(16))
    assert cache.pool.num_free == 4 - others
    before = everything(cache, request)
    assert admit(cache, request) == (8 if admitted else -1)
    if not admitted:
        assert everything(cache, request) == before


def test_blocks_that_somebody_holds_are_hit_for_nothing() -> None:
    """Usable 4, 2 of them held by the first. The second shares these and takes the other 2."""
    cache = a_cache(5)
    admit(cache, a_request(cache, 0, range(8)))
    second = a_request(cache, 1, range(16))
    assert admit(cache, second) == 8
    assert second.block_table == [1, 2, 3, 4]
    assert cache.pool.num_free == 0


@pytest.mark.parametrize(("lookahead", "blocks"), [(0, 2), (1, 3), (4, 3), (5, 4)])
def test_lookahead_slots_are_given_and_not_hashed(lookahead: int, blocks: int) -> None:
    cache = a_cache(10)
    request = a_request(cache, 0, 8)
    assert admit(cache, request, lookahead=lookahead) == 0
    assert len(request.block_table) == blocks
    assert request.num_cached_blocks == 2


def test_slots_end_at_the_model_length() -> None:
    """8 computed + 3 + 5 lookahead would be 16 slots, 4 blocks; with a length of 12 there are 3."""
    cache = a_cache(10, max_model_len=12)
    request = a_request(cache, 0, 8)
    admit(cache, request, lookahead=5)
    assert cache.extend(request, 3, 5)
    assert len(request.block_table) == 3


def test_extend_takes_blocks_beyond_those_held_and_is_refused_whole() -> None:
    """8 computed and 2 blocks held. One more token is a third block. 9 more want 3 more blocks, and 2 are free."""
    cache = a_cache(6)
    request = a_request(cache, 0, 8)
    admit(cache, request)
    assert cache.extend(request, 1, 0)
    assert request.block_table == [1, 2, 3]
    assert cache.extend(request, 4, 0)  # fits what is held
    assert request.block_table == [1, 2, 3]
    before = everything(cache, request)
    assert not cache.extend(request, 5, 8)
    assert everything(cache, request) == before
    assert cache.extend(request, 5, 7)
    assert request.block_table == [1, 2, 3, 4, 5]


def test_only_confirmed_tokens_are_hashed() -> None:
    """8 computed of 9 confirmed. A frame of 1 + 3 drafts ends at 12, a full block, but only 9 are confirmed. When 12
    are, the block is hashed."""
    cache = a_cache(10)
    request = a_request(cache, 0, 8)
    admit(cache, request)
    request.num_tokens = 9
    cache.take_operations()
    assert cache.extend(request, 4, 0)
    assert cache.take_operations() == [(TAKEN, 0, [3])]
    request.num_computed_tokens = 12
    request.num_tokens = 13
    assert cache.extend(request, 1, 0)
    assert cache.take_operations() == [(TAKEN, 0, [4]), (HASHED, 0, [3])]
    assert request.num_cached_blocks == 3


def test_eviction_order_the_end_of_what_ended_first() -> None:
    """Usable 6, blocks of 4; r0 has 9 tokens (blocks 1 2 3, of them 1 2 full), r1 has 8 (blocks 4 5, both full).

    fresh rest                          6
    r0 ends: walk 3 2 1                 3 6 2 1         (3 has no hash: head; 2 1: tail)
    r1 ends: walk 5 4                   3 6 2 1 5 4
    r2 of 9 tokens takes                3 6 2           evicts 2: r0's first block is still there
    r3 of 5 tokens takes                1 5             evicts the rest of r0's prefix, and the end of r1's
    """
    cache = a_cache(7)
    first, second = a_request(cache, 0, 9), a_request(cache, 1, 8)
    admit(cache, first)
    admit(cache, second)
    cache.take_operations()
    cache.free(first)
    assert cache.pool.free_queue() == [3, 6, 2, 1]
    cache.free(second)
    assert cache.pool.free_queue() == [3, 6, 2, 1, 5, 4]
    assert cache.take_operations() == [(FREED, 0, [3, 2, 1]), (FREED, 1, [5, 4])]
    assert first.block_table == []
    assert (first.num_cached_blocks, second.num_cached_blocks) == (0, 0)

    assert cache.lookup(a_request(cache, 10, range(1000, 1009))) == [1, 2]
    admit(cache, a_request(cache, 2, 9))
    assert cache.take_operations()[:2] == [(EVICTED, 2, [2]), (TAKEN, 2, [3, 6, 2])]
    assert cache.lookup(a_request(cache, 11, range(1000, 1009))) == [1]
    admit(cache, a_request(cache, 3, 5))
    assert cache.take_operations()[:2] == [(EVICTED, 3, [1, 5]), (TAKEN, 3, [1, 5])]
    assert cache.lookup(a_request(cache, 12, range(1000, 1009))) == []
    assert cache.lookup(a_request(cache, 13, range(2000, 2009))) == [4]


def test_a_reset_waits_until_nothing_is_held() -> None:
    cache = a_cache(7)
    request = a_request(cache, 0, range(8))
    admit(cache, request)
    before = everything(cache, request)
    assert cache.reset() is False
    assert everything(cache, request) == before
    cache.free(request)
    cache.take_operations()
    assert cache.reset() is True
    assert cache.take_operations() == [(EVICTED, -1, [1, 2])]
    assert cache.lookup(a_request(cache, 1, range(9))) == []
    assert cache.reset() is True
    assert cache.take_operations() == []


def test_freeing_nothing_does_nothing() -> None:
    cache = a_cache(7)
    request = a_request(cache, 0, 8)
    before = everything(cache, request)
    cache.free(request)
    assert everything(cache, request) == before
