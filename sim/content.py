"""What a simulated request's tokens are, as the prefix cache has to know it: a key for each full block.

Tokens have names, not values: a stream and a position in it. Two blocks hold the same tokens if and only if they are
made of the same pieces of the same streams. Knows workloads' segments; no pool, no scheduler.
"""

from __future__ import annotations

from sim.core.request import BlockHash
from workloads.spec import Segment, output_stream


class SegmentContent:
    """The content of one request: its prompt's segments, then its own output."""

    __slots__ = ("_block_size", "_num_prompt_tokens", "_output", "_segments")

    def __init__(self, index: int, prompt: tuple[Segment, ...], num_prompt_tokens: int, block_size: int) -> None:
        self._output = output_stream(index)
        self._segments = prompt
        self._num_prompt_tokens = num_prompt_tokens
        self._block_size = block_size

    def extend_hashes(self, hashes: list[BlockHash], count: int) -> None:
        """See `sim.core.request.Content`. A tuple of integers has the same hash in every process.

        What is hashed is the block before and what is new: nothing where the block only goes on with the stream that
        the one before ended with, its stream and start where it is one piece, else its pieces.
        """
        size = self._block_size
        parent: BlockHash = hashes[-1] if hashes else 0
        index = len(hashes)
        if len(self._segments) == 1:
            stream, first, tokens = self._segments[0]
            whole = min(count, tokens // size)
            while index < whole:
                parent = hash((parent,)) if index > 0 else hash((parent, stream, first))
                hashes.append(parent)
                index += 1
        prompt = self._num_prompt_tokens
        while index < count:
            if index * size > prompt:
                parent = hash((parent,))
            else:
                pieces = self.pieces(index)
                if len(pieces) > 3:
                    parent = hash((parent, *pieces))
                elif index > 0 and self._goes_on(index, pieces):
                    parent = hash((parent,))
                else:
                    parent = hash((parent, pieces[0], pieces[1]))
            hashes.append(parent)
            index += 1

    def _goes_on(self, index: int, piece: list[int]) -> bool:
        """Whether block `index`, which is one piece, begins where the block before it ended."""
        stream, start, count = self.pieces(index - 1)[-3:]
        return stream == piece[0] and start + count == piece[1]

    def pieces(self, index: int) -> list[int]:
        """Block `index` as (stream, start, count) triples in one flat list; pieces that continue each other are one."""
        start = index * self._block_size
        end = start + self._block_size
        flat: list[int] = []
        position = 0
        if start < self._num_prompt_tokens:
            for stream, first, count in self._segments:
                behind = position + count
                if behind > start:
                    low = max(position, start)
                    _join(flat, stream, first + low - position, min(behind, end) - low)
                    if behind >= end:
                        return flat
                position = behind
        low = max(start, self._num_prompt_tokens)
        _join(flat, self._output, low - self._num_prompt_tokens, end - low)
        return flat


def _join(flat: list[int], stream: int, start: int, count: int) -> None:
    if flat and flat[-3] == stream and flat[-2] + flat[-1] == start:
        flat[-1] += count
    else:
        flat += (stream, start, count)
