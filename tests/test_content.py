"""The name of a block's content: equal exactly where the block and all before it hold the same tokens."""

from __future__ import annotations

import random

from sim.content import SegmentContent
from sim.core.block_hashes import BlockHash, BlockHashes
from workloads.spec import Segment, merge_segments, output_stream

Token = tuple[int, int]
"""(stream, place in it)"""


def tokens(index: int, prompt: tuple[Segment, ...], count: int) -> list[Token]:
    """The first `count` tokens of a request, one by one."""
    spelled = [(stream, start + place) for stream, start, many in prompt for place in range(many)]
    return spelled + [(output_stream(index), place) for place in range(count - len(spelled))]


def test_hashes_are_equal_where_the_tokens_are() -> None:
    """Against tokens spelled out: short prompts of few streams, so that many blocks are equal and many nearly so."""
    rng = random.Random(1)
    hash_of: dict[tuple[int, tuple[Token, ...]], BlockHash] = {}
    held_by: dict[tuple[int, BlockHash], tuple[Token, ...]] = {}
    met = 0
    for _ in range(5000):
        size = rng.choice([1, 2, 4])
        drawn = [
            (rng.choice([0, 1, 2, 3, 4, 6]), rng.choice([0, 0, 1, 2, 4]), rng.randint(1, 6))
            for _ in range(rng.randint(1, 4))
        ]
        prompt = merge_segments(drawn)
        num_prompt_tokens = sum(count for _, _, count in prompt)
        num_tokens = num_prompt_tokens + rng.randint(0, 9)
        index = rng.randint(0, 1)
        content = SegmentContent(index, prompt, num_prompt_tokens, size)
        hashes = BlockHashes()
        while len(hashes) < num_tokens // size:
            content.extend_hashes(hashes, min(num_tokens // size, len(hashes) + rng.randint(1, 5)))
        spelled = tokens(index, prompt, num_tokens)
        for number, block_hash in enumerate(hashes.numbers(num_tokens // size)):
            held = tuple(spelled[: (number + 1) * size])
            met += (size, held) in hash_of
            assert hash_of.setdefault((size, held), block_hash) == block_hash
            assert held_by.setdefault((size, block_hash), held) == held
    assert met > 1000  # so that equal content has been met, not only different
