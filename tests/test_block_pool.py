"""The free queue's order by hand, and the pool against a model made of a list and two dicts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sim.core.block_pool import BlockPool, Freeing
from sim.core.prefix_cache import PrefixCache
from sim.policies.freeing import all_to_tail, hashless_first
from tests.by_hand import hashes_of


def a_pool(num_blocks: int, freeing: Freeing = hashless_first) -> BlockPool:
    return BlockPool(num_blocks, PrefixCache(num_blocks), freeing)


def everything(pool: BlockPool) -> tuple[Any, ...]:
    return pool.free_queue(), pool.num_free, list(pool.refs), list(pool.cache.hashes), pool.usage


def test_a_fresh_queue_is_in_id_order_and_without_the_null_block() -> None:
    pool = a_pool(6)
    assert pool.free_queue() == [1, 2, 3, 4, 5]
    assert pool.num_free == 5
    assert pool.refs == [0, 0, 0, 0, 0, 0]
    assert pool.usage == 0.0


@pytest.mark.parametrize(
    ("freeing", "bare"),
    [(all_to_tail, [2, 3, 4, 5, 6, 7, 1, 0]), (hashless_first, [1, 0, 2, 3, 4, 5, 6, 7])],
    ids=["before-0.24", "since-0.24"],
)
def test_eight_blocks_take_two_free_in_reverse(freeing: Freeing, bare: list[int]) -> None:
    """The known answer is for a bare pool, whose blocks are 0 to 7. Here block 0 is the null block, so the eight are
    1 to 8, and every id stands one higher:

        fresh                                1 2 3 4 5 6 7 8
        take 2                          1 2 | 3 4 5 6 7 8
        free 2, 1; all to the tail           3 4 5 6 7 8 2 1     less one: 2 3 4 5 6 7 1 0
        free 2, 1; hashless to the head      2 1 3 4 5 6 7 8     less one: 1 0 2 3 4 5 6 7
    """
    pool = a_pool(9, freeing)
    assert pool.take(2) == ([1, 2], [])
    assert pool.free_queue() == [3, 4, 5, 6, 7, 8]
    pool.release([2, 1])
    assert [block - 1 for block in pool.free_queue()] == bare


@pytest.mark.parametrize(
    ("freeing", "expected"),
    [(all_to_tail, [6, 5, 4, 3, 2, 1]), (hashless_first, [5, 4, 6, 3, 2, 1])],
    ids=["before-0.24", "since-0.24"],
)
def test_a_table_with_a_hashed_front_is_freed_backwards(freeing: Freeing, expected: list[int]) -> None:
    """Blocks 1 to 5 are held, 1 to 3 hashed; 6 is free. The walk is 5 4 3 2 1: the hashless 5 4 go to the head as a
    group in that order, the hashed 3 2 1 to the tail, so a shared prefix's first block is evicted last."""
    pool = a_pool(7, freeing)
    pool.take(5)
    pool.cache.insert([1, 2, 3], hashes_of([101, 102, 103]))
    pool.release([5, 4, 3, 2, 1])
    assert pool.free_queue() == expected


def test_hits_leave_the_middle_of_the_queue_and_the_rest_keeps_its_order() -> None:
    pool = a_pool(8)
    pool.take(5)
    pool.cache.insert([1, 2, 3, 4, 5], hashes_of([101, 102, 103, 104, 105]))
    pool.release([5, 4, 3, 2, 1])
    assert pool.free_queue() == [6, 7, 5, 4, 3, 2, 1]
    pool.touch([1, 3])  # the tail, and one between two others
    assert pool.free_queue() == [6, 7, 5, 4, 2]
    pool.touch([1, 5])  # held already: one more reference, no place in the queue; and the first that can be hit
    assert pool.free_queue() == [6, 7, 4, 2]
    assert pool.refs[1:] == [2, 0, 1, 0, 1, 0, 0]
    assert pool.num_free == 4
    pool.release([3, 1])  # 3 has nobody left, 1 has one
    assert pool.free_queue() == [6, 7, 4, 2, 3]
    assert pool.refs[1:] == [1, 0, 0, 0, 1, 0, 0]
    assert pool.take(5)[0] == [6, 7, 4, 2, 3]


def test_taken_blocks_lose_their_hash_hit_blocks_keep_it() -> None:
    pool = a_pool(4)
    pool.take(3)
    pool.cache.insert([1, 2], hashes_of([101, 102]))
    pool.release([3, 2, 1])
    assert pool.free_queue() == [3, 2, 1]
    pool.touch([1])
    assert pool.take(2) == ([3, 2], [2])
    assert pool.cache.hashes == [None, 101, None, None]
    assert pool.cache.find(101) == 1
    assert pool.cache.find(102) is None


def test_usage_leaves_the_null_block_out() -> None:
    """vLLM: 1 - free / (blocks - 1). Of 9 blocks 8 can be held; 2 held is a quarter."""
    pool = a_pool(9)
    pool.take(2)
    assert pool.usage == 0.25
    pool.take(6)
    assert pool.usage == 1.0
    assert pool.free_queue() == []


def test_errors_change_nothing() -> None:
    pool = a_pool(5)
    pool.take(2)
    before = everything(pool)
    with pytest.raises(ValueError, match="3 blocks asked for, 2 are free"):
        pool.take(3)
    with pytest.raises(ValueError, match="block 4 is released, but nobody refers to it"):
        pool.release([4])
    with pytest.raises(ValueError, match="block 0 is released"):
        pool.release([0])
    assert everything(pool) == before


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_has_a_block_beside_the_null_block(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=f"num_gpu_blocks is {num_blocks}; at least 2"):
        a_pool(num_blocks)


def test_a_prefix_that_is_hit_again_and_again_takes_no_more_room() -> None:
    """Each hit leaves entries in the queue that no longer hold; there are never more than twice as many as blocks."""
    pool = a_pool(100)
    blocks, _ = pool.take(50)
    pool.cache.insert(blocks, hashes_of(list(range(50))))
    pool.release(blocks[::-1])
    for _ in range(1000):
        pool.touch(blocks)
        pool.release(blocks[::-1])
        assert len(pool._piece) + sum(len(piece) for piece, _ in pool._pieces) <= 300
    assert pool.free_queue() == [*range(51, 100), *blocks[::-1]]


class PoolMachine(RuleBasedStateMachine):
    """A pool beside a list (the queue) and two dicts (references, hashes), for both ways of freeing."""

    pool: BlockPool

    @initialize(num_blocks=st.integers(2, 12), head=st.booleans())
    def start(self, num_blocks: int, head: bool) -> None:
        self.head = head
        self.pool = a_pool(num_blocks, hashless_first if head else all_to_tail)
        self.queue = list(range(1, num_blocks))
        self.refs: dict[int, int] = {}
        self.hashes: dict[int, int] = {}
        self.next_hash = 1000

    @rule(count=st.integers(0, 12))
    def take(self, count: int) -> None:
        if count > len(self.queue):
            with pytest.raises(ValueError, match="are free"):
                self.pool.take(count)
            return
        expected, self.queue = self.queue[:count], self.queue[count:]
        evicted = [block for block in expected if block in self.hashes]
        assert self.pool.take(count) == (expected, evicted)
        for block in expected:
            self.refs[block] = 1
            self.hashes.pop(block, None)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        some = st.lists(st.integers(1, self.pool.num_blocks - 1), unique=True)
        blocks = [block for block in data.draw(some) if block in self.refs or block in self.hashes]
        self.pool.touch(blocks)
        for block in blocks:
            self.refs[block] = self.refs.get(block, 0) + 1
            if block in self.queue:
                self.queue.remove(block)

    @rule(data=st.data())
    def touch_one_that_holds_nothing(self, data: st.DataObject) -> None:
        empty = [block for block in self.queue if block not in self.hashes]
        block = data.draw(st.sampled_from([0, *empty]))
        with pytest.raises(ValueError, match=r"cannot be referred to|holds nothing"):
            self.pool.touch([*list(self.refs)[:1], block])

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        walk = data.draw(st.lists(st.sampled_from(sorted(self.refs)), unique=True))
        self.pool.release(walk)
        free = []
        for block in walk:
            self.refs[block] -= 1
            if not self.refs[block]:
                del self.refs[block]
                free.append(block)
        if self.head:
            hashless = [block for block in free if block not in self.hashes]
            hashed = [block for block in free if block in self.hashes]
            self.queue = [*hashless, *self.queue, *hashed]
        else:
            self.queue += free

    @rule(data=st.data())
    def release_one_that_nobody_holds(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([0, *self.queue]))
        with pytest.raises(ValueError, match=f"block {block} is released"):
            self.pool.release([block])

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def give_a_hash(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.refs)))
        if block in self.hashes:
            with pytest.raises(ValueError, match=f"block {block} has a hash already"):
                self.pool.cache.insert([block], hashes_of([self.next_hash]))
        else:
            self.pool.cache.insert([block], hashes_of([self.next_hash]))
            self.hashes[block] = self.next_hash
        self.next_hash += 1

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "queue"):
            return
        pool = self.pool
        blocks = range(1, pool.num_blocks)
        assert pool.free_queue() == self.queue
        assert pool.num_free == len(self.queue)
        assert pool.refs == [0, *(self.refs.get(block, 0) for block in blocks)]
        assert pool.cache.hashes == [None, *(self.hashes.get(block) for block in blocks)]
        assert pool.usage == pytest.approx(len(self.refs) / (pool.num_blocks - 1))


TestPoolAgainstAModel = PoolMachine.TestCase
TestPoolAgainstAModel.settings = settings(max_examples=60, stateful_step_count=25)
