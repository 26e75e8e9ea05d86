"""What a simulated request's tokens are, as the prefix cache has to know it: a key for each full block.

Tokens have names, not values: a stream and a position in it. Two blocks hold the same tokens if and only if they are
made of the same pieces of the same streams. Knows workloads' segments; no pool, no scheduler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sim.core.block_hashes import BlockHash, BlockHashes, run_start
from workloads.spec import Segment, output_stream

if TYPE_CHECKING:
    from mypy_extensions import i64

_AHEAD: Final = 64
"""Blocks of output that are named at once: all of them only go on, however long it will be."""


class SegmentContent:
    """The content of one request: its prompt's segments, then its own output."""

    __slots__ = ("_block_size", "_num_prompt_tokens", "_output", "_segments")

    def __init__(self, index: int, prompt: tuple[Segment, ...], num_prompt_tokens: int, block_size: int) -> None:
        self._output = output_stream(index)
        self._segments = prompt
        self._num_prompt_tokens = num_prompt_tokens
        self._block_size = block_size

    def extend_hashes(self, hashes: BlockHashes, count: int) -> None:
        """See `sim.core.request.Content`; there may be more of the output.

        A tuple of integers has the same hash in every process.

        A block that only goes on with the stream that the one before ended with has the next number. Any other starts
        at a number of its own: a hash of the block before and of its stream and start where it is one piece, else of
        its pieces.
        """
        index = hashes.num_blocks
        until: i64 = count
        if index * self._block_size > self._num_prompt_tokens:
            hashes.go_on(max(until - index, _AHEAD))
            return
        while index < until:
            going_on: i64 = self._going_on(index) if index > 0 else 0
            if going_on > until - index:
                going_on = until - index
            if going_on > 0:
                hashes.go_on(going_on)
                index += going_on
            else:
                hashes.append(self._hash(index, hashes[-1] if index > 0 else 0))
                index += 1

    def _going_on(self, index: i64) -> i64:
        """How many blocks from this one on only go on, as far as is seen at a glance: one by one `_hash` says it."""
        size: i64 = self._block_size
        start = index * size
        position: i64 = 0
        for _, _, count in self._segments:
            behind = position + count
            if behind >= start + size:
                return behind // size - index if position <= start - size else 0
            position = behind
        return 0

    def _hash(self, index: int, parent: BlockHash) -> BlockHash:
        """Of block `index`, behind one with the hash `parent`."""
        start = index * self._block_size
        if start == self._num_prompt_tokens:
            return run_start(hash((parent, self._output, 0)))
        if index == 0 and self._segments[0][2] >= self._block_size:
            return run_start(hash((0, self._segments[0][0], self._segments[0][1])))
        pieces = self.pieces(index)
        if len(pieces) > 3:
            return run_start(hash((parent, *pieces)))
        if index > 0 and self._goes_on(index, pieces):
            return parent + 1
        return run_start(hash((parent, pieces[0], pieces[1])))

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
