"""Content to block: duplicates are kept, and a lookup finds the one that was inserted first."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sim.core.prefix_cache import PrefixCache
from tests.by_hand import hashes_of


def test_what_is_inserted_is_found_until_it_is_evicted() -> None:
    cache = PrefixCache(4)
    assert cache.find(7) is None
    cache.insert([2, 1], hashes_of([7, 8]))
    assert (cache.find(7), cache.find(8), len(cache)) == (2, 1, 2)
    assert cache.hashes == [None, 8, 7, None]
    cache.evict([2])
    assert (cache.find(7), cache.find(8), len(cache)) == (None, 1, 1)


def test_duplicates_the_first_inserted_is_found() -> None:
    """Blocks 3, 1 and 2 come to hold the same, in this order. Each is found once those before it have gone."""
    cache = PrefixCache(4)
    for block in (3, 1, 2):
        cache.insert([block], hashes_of([7]))
    assert len(cache) == 3
    for block in (3, 1, 2):
        assert cache.find(7) == block
        cache.evict([block])
    assert cache.find(7) is None
    assert len(cache) == 0


def test_duplicates_one_from_the_middle_goes() -> None:
    cache = PrefixCache(5)
    cache.insert([3, 1, 2], hashes_of([7, 7, 7]))
    cache.evict([1])
    cache.evict([3])
    assert cache.find(7) == 2
    cache.insert([1], hashes_of([7]))  # back, and now behind 2
    assert cache.find(7) == 2
    cache.evict([2])
    assert cache.find(7) == 1


def test_clear_takes_everything_and_names_it_by_id() -> None:
    cache = PrefixCache(6)
    cache.insert([5, 2, 3], hashes_of([7, 7, 8]))
    assert cache.clear() == [2, 3, 5]
    assert cache.hashes == [None] * 6
    assert (cache.find(7), cache.find(8), len(cache)) == (None, None, 0)
    cache.insert([2], hashes_of([7]))
    assert cache.find(7) == 2


def test_a_second_hash_and_one_that_is_not_there_are_refused() -> None:
    cache = PrefixCache(3)
    cache.insert([1], hashes_of([7]))
    with pytest.raises(ValueError, match="block 1 has a hash already"):
        cache.insert([1], hashes_of([8]))
    with pytest.raises(KeyError, match="block 2 has no hash"):
        cache.evict([2])
    assert (cache.find(7), cache.find(8), len(cache)) == (1, None, 1)


class CacheMachine(RuleBasedStateMachine):
    """A cache beside a list of (hash, block) in order of insertion."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(10)
        self.entries: list[tuple[int, int]] = []

    def hashed(self) -> list[int]:
        return sorted(block for _, block in self.entries)

    @rule(
        blocks=st.lists(st.integers(1, 9), min_size=1, max_size=6, unique=True),
        first=st.sampled_from([0, 1, 60, 63, 64]),
        skipped=st.sets(st.integers(1, 5)),
    )
    def insert(self, blocks: list[int], first: int, skipped: set[int]) -> None:
        """Numbers that follow each other but for some: runs, over the end of a page of 64, with gaps and duplicates."""
        numbers = [first]
        for place in range(1, len(blocks)):
            numbers.append(numbers[-1] + (2 if place in skipped else 1))
        before = [99, *numbers]  # the cache is told where to begin
        if any(block in self.hashed() for block in blocks):
            with pytest.raises(ValueError, match="has a hash already"):
                self.cache.insert(blocks, hashes_of(before), 1)
        else:
            self.cache.insert(blocks, hashes_of(before), 1)
            self.entries += zip(numbers, blocks, strict=True)

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.hashed()), unique=True))
        self.cache.evict(blocks)
        self.entries = [entry for entry in self.entries if entry[1] not in blocks]

    @rule()
    def clear(self) -> None:
        assert self.cache.clear() == self.hashed()
        self.entries = []

    @invariant()
    def they_agree(self) -> None:
        assert len(self.cache) == len(self.entries)
        expected = [next((block for held, block in self.entries if held == wanted), None) for wanted in range(80)]
        assert [self.cache.find(wanted) for wanted in range(80)] == expected
        for first in (0, 60, 63):
            there = list(takewhile(lambda block: block is not None, expected[first:76]))
            assert self.cache.find_all(hashes_of(range(first, 76)), 76 - first) == there
        assert self.cache.hashes == [
            next((held for held, block in self.entries if block == wanted), None) for wanted in range(10)
        ]


TestCacheAgainstAModel = CacheMachine.TestCase
TestCacheAgainstAModel.settings = settings(max_examples=150, stateful_step_count=25)
