"""Shadow execution: a simulation's own batches, written into a paged cache slot by slot, and every read checked.

An observer. It is told the core's records and drives a `PagedCache` of integers with them: the key of a slot is what it
holds (request and position), the value is the step that wrote it. At every step it writes the rows of all frames
through their block tables and slot mappings, then reads every position of every context, as attention would, and asks
for exactly the right writes. So it finds what counters cannot: a hit on a block whose content is gone, garbage that is
read, a block that was given away while a step in flight still wrote it.

What is right, for request r at position x: a row that r wrote at position x and that was not a rejected draft; or such
a row of another request whose tokens up to the end of that block are the same (by the core's chain of block hashes).
Nothing is right in a block since it changed hands, and nothing anywhere since a reset of the prefix cache.

Block tables are copied when a batch is scheduled; steps run in the order of their schedules, when the device begins
them. True positions follow from the records (`DevicePositions`). Knows records, requests and the cache; it asks the
scheduler nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_backend import paged_cache
from gpu_backend.paged_cache import PagedCache
from gpu_backend.positions import DevicePositions
from sim.core.request import FINISHED, Request
from sim.records import TAKEN, Batch, Interruption

_BLANK = -1
_POSITION_BITS = 31
_POSITION = (1 << _POSITION_BITS) - 1
# What a slot holds is request << 31 | position; of a rejected draft -2 less that.


@dataclass(frozen=True, slots=True)
class _Scheduled:
    """A batch between its schedule and its step."""

    number: int
    tables: list[list[int]]
    taken: list[int]
    oldest_in_flight: int
    """Number of the oldest batch whose step had not ended at this schedule."""


class Shadow:
    """Attach it to a simulation (`add_observer`) and read `findings` when the run is over."""

    def __init__(
        self, num_blocks: int, block_size: int, *, max_findings: int = 100, device: torch.device | str = "cpu"
    ) -> None:
        """The pool's size as vLLM counts it, the null block included; `max_findings`: how many are kept as text."""
        self.block_size = block_size
        self.cache = PagedCache(1, num_blocks, block_size, 1, 1, torch.int64, device, _BLANK)
        self.findings: list[str] = []
        """One sentence for each frame that read or wrote what it should not, the first `max_findings` of them."""
        self.num_findings = 0
        self.num_steps = 0
        self.num_writes = 0
        """Rows written, in slots."""
        self.num_reads = 0
        """Positions read and checked, in slots."""
        self.num_hit_reads = 0
        """Of them slots that another request wrote."""
        self.num_stale_frames = 0
        """Frames that began after their request had been preempted, aborted or finished."""
        self.num_reused_in_flight = 0
        """Blocks handed to a new owner while a step in flight was still to write them. Harmless as long as the device
        runs steps in order and the new owner writes after it; where it does harm, that is a finding."""
        self._max_findings = max_findings
        self._device = torch.device(device)
        self._positions = DevicePositions()
        self._requests: dict[int, Request] = {}
        self._pending: deque[_Scheduled | None] = deque()
        """Batches whose step has not begun, in order; None is a reset."""
        self._in_flight: deque[int] = deque()
        self._common: dict[tuple[int, int], tuple[int, bool]] = {}
        """By pair of requests: full blocks that were compared and are equal, and whether the next one differs."""

    # Records

    def scheduled(self, now: int, batch: Batch) -> None:
        """Keep what the step will need: the block tables as they are now."""
        for request in batch.requests[batch.num_running_frames :]:
            self._requests[request.index] = request
        if batch.total_tokens <= 0:
            return
        self._in_flight.append(batch.number)
        self._pending.append(
            _Scheduled(
                batch.number,
                [list(request.block_table) for request in batch.requests],
                [block for kind, _, blocks in batch.block_operations if kind == TAKEN for block in blocks],
                self._in_flight[0],
            )
        )

    def step_started(self, now: int, batch: Batch, shape: Any, cost: Any) -> None:
        """Run the step: writes of all frames, then the reads of all frames, then the rejected rows become garbage."""
        scheduled = self._pending.popleft()
        while scheduled is None:
            self.cache.fill_all(_BLANK)
            scheduled = self._pending.popleft()
        assert scheduled.number == batch.number, "steps begin in the order of their schedules"
        self.num_steps += 1
        self._hand_over(scheduled)
        before = self._positions.before(batch)
        self._positions.after(batch, before)
        frames = [number for number, num_tokens in enumerate(batch.tokens) if num_tokens > 0]
        late = [
            request.num_preemptions != epoch or request.status == FINISHED
            for request, epoch in zip(batch.requests, batch.epochs, strict=True)
        ]
        self.num_stale_frames += sum(late)
        frames = [number for number in frames if self._fits(batch, scheduled, number, before[number])]
        if not frames:
            return
        tables = [scheduled.tables[number] for number in frames]
        table = paged_cache.block_table(tables, self._device)
        owners = self._tensor([batch.requests[number].index for number in frames])
        starts = self._tensor([before[number] for number in frames])
        counts = self._tensor([batch.tokens[number] for number in frames])
        slots, held, row = self._write(batch, table, owners, starts, counts)
        self._read(batch, table, owners, starts + counts)
        # From the record, not from the positions: what is to be found is that the two do not fit together.
        right = self._tensor(
            [
                before[number] + batch.tokens[number] - batch.drafts[number] + batch.accepted[number]
                if batch.samples[number]
                else before[number] + batch.tokens[number]
                for number in frames
            ]
        )
        rejected = (held & _POSITION) >= right[row]
        if bool(rejected.any()):
            self.cache.layers[0].view(2, -1)[0][slots[rejected]] = -2 - held[rejected]

    def step_ended(self, now: int, batch: Batch) -> None:
        """The step is not in flight any more."""
        self._in_flight.popleft()

    def interrupted(self, now: int, interruption: Interruption) -> None:
        """A reset of the prefix cache: nothing is right any more, once the steps scheduled before it have run."""
        if interruption.kind == "reset_prefix_cache" and interruption.done:
            self._pending.append(None)

    # The step

    def _hand_over(self, scheduled: _Scheduled) -> None:
        """Blocks that changed hands: count those that a step in flight wrote meanwhile, then blank them."""
        if not scheduled.taken:
            return
        blocks = torch.tensor(scheduled.taken, device=self._device)
        written_at = self.cache.layers[0][1, blocks].view(len(blocks), -1)
        self.num_reused_in_flight += int((written_at >= scheduled.oldest_in_flight).any(1).sum())
        self.cache.fill_blocks(scheduled.taken, _BLANK)

    def _fits(self, batch: Batch, scheduled: _Scheduled, number: int, position: int) -> bool:
        room = len(scheduled.tables[number]) * self.block_size
        if position < 0 or position + batch.tokens[number] > room:
            self._find(
                f"step {batch.number}: request {batch.requests[number].id} is to write positions {position} to "
                f"{position + batch.tokens[number] - 1}; its block table holds {room} slots"
            )
            return False
        return True

    def _write(
        self, batch: Batch, table: Tensor, owners: Tensor, starts: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write all rows; returns their slots, what they hold and their frames, each [rows]."""
        row = torch.repeat_interleave(torch.arange(len(counts), device=self._device), counts)
        first = torch.cumsum(counts, 0) - counts
        position = starts[row] + torch.arange(len(row), device=self._device) - first[row]
        slots = paged_cache.slot_mapping(table, row, position, self.block_size)
        held = owners[row] << _POSITION_BITS | position
        self.num_writes += len(row)
        ordered, by_slot = torch.sort(slots)
        twice = (ordered[1:] == ordered[:-1]).nonzero().flatten()
        if len(twice):
            one, other = (self._said(int(held[by_slot[at]])) for at in (twice[0], twice[0] + 1))
            self._find(f"step {batch.number} writes slot {int(ordered[twice[0]])} twice: {one} and {other}")
        steps = torch.full_like(held, batch.number)
        self.cache.write(0, held.view(-1, 1, 1), steps.view(-1, 1, 1), slots)
        return slots, held, row

    def _read(self, batch: Batch, table: Tensor, owners: Tensor, ends: Tensor) -> None:
        """Read positions 0 to end - 1 of every frame through its block table, block by block."""
        size = self.block_size
        num_blocks = (ends + size - 1) // size
        frame = torch.repeat_interleave(torch.arange(len(ends), device=self._device), num_blocks)
        first = torch.cumsum(num_blocks, 0) - num_blocks
        column = torch.arange(len(frame), device=self._device) - first[frame]
        blocks = table[frame, column].to(torch.int64)
        held = self.cache.layers[0][0, blocks].view(len(blocks), size)
        offsets = torch.arange(size, device=self._device)
        position = (column * size)[:, None] + offsets
        other = held != (owners[frame] << _POSITION_BITS)[:, None] + position
        other &= position < ends[frame][:, None]
        self.num_reads += int(ends.sum())
        where, offset = other.nonzero(as_tuple=True)
        if len(where) == 0:
            return
        reader, found, asked = frame[where], held[where, offset], position[where, offset]
        writer, written_as = found >> _POSITION_BITS, found & _POSITION
        good = (found >= 0) & (written_as == asked)
        good &= asked < self._common_tokens(owners[reader], writer, asked, good)
        self.num_hit_reads += int(good.sum())
        bad = (~good).nonzero().flatten()
        for number in torch.unique(reader[bad]).tolist():
            wrong = bad[reader[bad] == number]
            at = wrong[0]
            block, step = int(blocks[where[at]]), int(self.cache.layers[0][1, blocks[where[at]], offset[at]])
            self._find(
                f"step {batch.number}: request {self._requests[int(owners[number])].id} reads position "
                f"{int(asked[at])} of {int(ends[number])} in block {block}, slot {int(offset[at])}, and finds "
                f"{self._said(int(found[at]), step)} ({len(wrong)} slots are wrong)"
            )

    def _common_tokens(self, readers: Tensor, writers: Tensor, asked: Tensor, candidates: Tensor) -> Tensor:
        """By slot: tokens of the reader that are known to be the writer's too, in full blocks."""
        common = torch.zeros_like(readers)
        if not bool(candidates.any()):
            return common
        reader, writer = readers[candidates], writers[candidates]
        pairs, pair_of = torch.unique(reader << 32 | writer, return_inverse=True)
        last = torch.zeros_like(pairs).scatter_reduce_(0, pair_of, asked[candidates], "amax")
        tokens = [
            self._compare(pair >> 32, pair & 0xFFFFFFFF, position // self.block_size + 1) * self.block_size
            for pair, position in zip(pairs.tolist(), last.tolist(), strict=True)
        ]
        common[candidates] = self._tensor(tokens)[pair_of]
        return common

    def _compare(self, reader: int, writer: int, num_blocks: int) -> int:
        """Leading full blocks that two requests have in common, up to num_blocks."""
        equal, differs = self._common.get((reader, writer), (0, False))
        if differs or equal >= num_blocks:
            return equal
        hashes = []
        for index in (reader, writer):
            request = self._requests[index]
            hashes.append(request.hashes(min(num_blocks, request.num_tokens // self.block_size)).numbers(num_blocks))
        shorter = min(map(len, hashes))
        while equal < shorter and hashes[0][equal] == hashes[1][equal]:
            equal += 1
        self._common[reader, writer] = (equal, equal < shorter)
        return equal

    # Words

    def _tensor(self, numbers: list[int]) -> Tensor:
        return torch.from_numpy(np.array(numbers, dtype=np.int64)).to(self._device)

    def _said(self, held: int, step: int | None = None) -> str:
        """What a slot holds, in words."""
        if held == _BLANK:
            return "nothing: no step has written it since the block changed hands"
        kind = "a rejected draft at position" if held < _BLANK else "position"
        held = -2 - held if held < _BLANK else held
        request = self._requests[held >> _POSITION_BITS].id
        return f"{kind} {held & _POSITION} of request {request}" + ("" if step is None else f", written in step {step}")

    def _find(self, finding: str) -> None:
        self.num_findings += 1
        if len(self.findings) < self._max_findings:
            self.findings.append(finding)
