"""Distributions beside the ledger: what garbage does in memory, and blocks that nothing certain is in.

Told records, after the ledger, and shown its accounts; must not know the scheduler. The classes are the ledger's
(`docs/ledger.md`). Costs two to three times what the ledger does, so a scenario asks for it (`output.distributions`).

Worked example, K = 5, blocks of 16, 1018 slots valid. A step takes the last confirmed token and 5 drafts, of which 2
are accepted, and ends at 24 ms; the next ends at 37 ms and accepts none; then the request ends, at 39 ms.

    24 ms   3 rejected, slots 1021 to 1023: 3 garbage slots in block 63, 0 in others; the rollback stays in its block
    37 ms   rows 1021 to 1026 are written: 3 rows over garbage, which lived 13 ms; 5 rejected, slots 1022 to 1026: 2 in
            block 63 and 3 in block 64, which holds nothing else; the rollback crosses into block 63
    39 ms   5 garbage slots are freed after 2 ms
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from sim.observers.metrics import ROOM_COLUMNS, IntervalHistogram, Room
from sim.records import FREED, Batch, BlockOperation, Interruption, Returned

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sim.core.request import Request

ONLY: Final = ("placeholder", "garbage", "lookahead", "overhang")
"""Blocks are counted that hold nothing but one of these: see `Garbage.block_seconds`."""


class Owner(Protocol):
    """What is read of one owner's account."""

    computed: int
    drafts: int
    written: int
    reserved: int
    blocks: int
    content_valid: int
    content_written: int


class Accounts(Protocol):
    """What is read of the ledger."""

    @property
    def accounts(self) -> Mapping[int, Owner]:
        """Requests that hold blocks, by index."""


class _Stay:
    """One request from its admission to the end of its blocks."""

    __slots__ = ("blocks", "drafts", "epoch", "only", "room_ns", "segments", "since", "valid", "written")

    def __init__(self, now: int, epoch: int, valid: int, room_ns: list[int]) -> None:
        self.epoch = epoch
        self.room_ns = room_ns
        """The request's, over all its stays: ns times placeholders, garbage slots, held blocks."""
        self.since = now
        """Its integrals run to here."""
        self.valid = valid
        self.written = valid
        """Slots from `valid` to here are garbage."""
        self.segments: list[tuple[int, int]] = []
        """They by age, in order of position: (end, when they were written)."""
        self.drafts = 0
        self.blocks = 0
        self.only = (0, 0, 0, 0)


class _Lifetimes(IntervalHistogram):
    """How long slots were garbage: percentiles, and slots by powers of two of a millisecond."""

    __slots__ = ("_powers",)

    def __init__(self) -> None:
        super().__init__()
        self._powers: Counter[int] = Counter()

    def add(self, duration_ns: int, count: int) -> None:
        """Count so many slots."""
        super().add(duration_ns, count)
        self._powers[(duration_ns // 1_000_000).bit_length()] += count

    def figures(self) -> dict[str, Any]:
        """In ms; `bins` are (from, below, slots), those that are empty left out."""
        if not self.count:
            return {"mean": None, "median": None, "p90": None, "p99": None, "bins": []}
        median, p90, p99 = (value / 1e6 for value in self.percentiles_ns([50, 90, 99]))
        bins = [[1 << power >> 1, 1 << power, self._powers[power]] for power in sorted(self._powers)]
        return {"mean": self.mean_ns() / 1e6, "median": median, "p90": p90, "p99": p99, "bins": bins}


class Garbage:
    """Distributions over one run."""

    def __init__(self, ledger: Accounts, block_size: int) -> None:
        """`ledger` is to be told of each record before this."""
        self._ledger = ledger
        self.block_size = block_size
        self._stays: dict[int, _Stay] = {}
        self._room_ns: dict[int, list[int]] = {}
        """By request that was admitted and has not ended."""
        self._ended: dict[int, Room] = {}
        self._rejected: dict[int, int] = {}
        self._crossings = 0
        self._overwritten = _Lifetimes()
        self._freed = _Lifetimes()
        self._places: dict[tuple[int, int], int] = {}
        """(Place of the first garbage slot in its block, garbage slots) at the ends of steps."""
        self._now = 0
        self._only = [0, 0, 0, 0]
        """Blocks by `ONLY`, now."""
        self._only_ns = [0, 0, 0, 0]

    # Records

    def scheduled(self, now: int, batch: Batch) -> None:
        """Owners leave, join and grow."""
        self._pass_time(now)
        for request in batch.preempted:
            self._leave(now, request)
        stays, accounts = self._stays, self._ledger.accounts
        count = self._count
        for frame in batch.frames[batch.num_running_frames :]:
            index = frame.request.index
            room_ns = self._room_ns.setdefault(index, [0, 0, 0])
            stays[index] = _Stay(now, frame.epoch, accounts[index].content_valid, room_ns)
        for frame in batch.frames:
            index = frame.request.index
            stay, account = stays[index], accounts[index]
            if stay.drafts != account.drafts or stay.blocks != account.blocks:
                self._room(now, stay)
                stay.drafts = account.drafts
                stay.blocks = account.blocks
            count(stay, account)

    def step_ended(self, now: int, batch: Batch) -> None:
        """Rows are written: over garbage, and new garbage."""
        self._pass_time(now)
        stays, accounts, size = self._stays, self._ledger.accounts, self.block_size
        rejected, places = self._rejected, self._places
        count = self._count
        ages: dict[int, int] = {}
        """Slots written over, by when they were written."""
        for frame in batch.frames:
            index = frame.request.index
            stay = stays.get(index)
            if stay is None or stay.epoch != frame.epoch:
                continue
            first = stay.valid
            end = first + frame.num_tokens
            account = accounts[index]
            valid, written = account.content_valid, account.content_written
            if frame.num_drafts and frame.samples:
                number = frame.num_drafts - frame.num_accepted
                rejected[number] = rejected.get(number, 0) + 1
                if number and (end - 1) // size > (valid - 1) // size:
                    self._crossings += 1
            before = stay.written
            if before == first and written == valid:
                stay.valid = stay.written = valid
                continue
            self._room(now, stay)
            segments = stay.segments
            if before > first:
                if len(segments) == 1 and before <= end:
                    since = segments[0][1]
                    ages[since] = ages.get(since, 0) + before - first
                    segments = []
                else:
                    segments = _overwritten(segments, first, end, ages)
            if written > valid:
                new_end = end if end < written else written
                if new_end > valid:
                    segments = [(new_end, now), *segments]
                place = valid % size, written - valid
                places[place] = places.get(place, 0) + 1
            stay.segments = segments
            stay.valid = valid
            stay.written = written
            count(stay, account)
        for since, slots in ages.items():
            self._overwritten.add(now - since, slots)

    def updated(self, now: int, returned: Returned) -> None:
        """Promises are settled; what was rejected may be freed; those that have ended leave."""
        self._pass_time(now)
        for request in returned.finished:
            self._leave(now, request)
        if returned.block_operations:
            self._shrink(now, returned.block_operations)
        stays, accounts, count = self._stays, self._ledger.accounts, self._count
        for frame in returned.batch.frames:
            index = frame.request.index
            stay = stays.get(index)
            if stay is None:
                continue
            account = accounts[index]
            if stay.drafts != account.drafts or stay.blocks != account.blocks:
                self._room(now, stay)
                stay.drafts = account.drafts
                stay.blocks = account.blocks
            count(stay, account)
        for request in returned.finished:
            self._end(request.index)

    def interrupted(self, now: int, interruption: Interruption) -> None:
        """Those aborted or preempted leave."""
        self._pass_time(now)
        for request in interruption.requests:
            self._leave(now, request)
            if interruption.kind == "abort":
                self._end(request.index)

    def closed(self, now: int) -> None:
        """The rest of the time passes. What is garbage still has no end."""
        self._pass_time(now)
        for stay in self._stays.values():
            self._room(now, stay)
        for index in list(self._room_ns):
            self._end(index)

    # Following one owner

    def _count(self, stay: _Stay, account: Owner) -> None:
        """Blocks without anything certain, by what they hold; see `block_seconds`."""
        size, computed, written = self.block_size, account.computed, account.written
        reach = computed if computed > written else written
        reserved = account.reserved
        ahead = ((reserved if reserved > reach else reach) - 1) // size
        drafts = account.drafts
        first = computed - drafts
        only = (
            (computed - 1) // size - (first - 1) // size if drafts and first > 0 else 0,
            (stay.written - 1) // size - (stay.valid - 1) // size,
            ahead - (reach - 1) // size,
            account.blocks - 1 - ahead if account.blocks > ahead else 0,
        )
        before = stay.only
        if only != before:
            totals = self._only
            totals[0] += only[0] - before[0]
            totals[1] += only[1] - before[1]
            totals[2] += only[2] - before[2]
            totals[3] += only[3] - before[3]
            stay.only = only

    def _free(self, now: int, stay: _Stay, end: int) -> None:
        """Garbage from `end` on is freed."""
        start = stay.valid
        left = []
        for segment_end, written in stay.segments:
            cut = max(start, end)
            if segment_end > cut:
                self._freed.add(now - written, segment_end - cut)
            if min(segment_end, end) > start:
                left.append((min(segment_end, end), written))
            start = segment_end
        stay.segments = left
        stay.written = max(min(stay.written, end), stay.valid)

    def _shrink(self, now: int, operations: Iterable[BlockOperation]) -> None:
        """Blocks of owners that go on were freed."""
        for kind, owner, _ in operations:
            stay = self._stays.get(owner) if kind == FREED else None
            account = self._ledger.accounts.get(owner)
            if stay is not None and account is not None and account.content_written < stay.written:
                self._room(now, stay)
                self._free(now, stay, account.content_written)

    def _leave(self, now: int, request: Request) -> None:
        stay = self._stays.pop(request.index, None)
        if stay is None:
            return
        self._room(now, stay)
        self._free(now, stay, stay.valid)
        for number in range(4):
            self._only[number] -= stay.only[number]

    def _room(self, now: int, stay: _Stay) -> None:
        """Integrate a request's room up to now."""
        elapsed = now - stay.since
        if elapsed:
            stay.since = now
            room = stay.room_ns
            room[0] += stay.drafts * elapsed
            room[1] += (stay.written - stay.valid) * elapsed
            room[2] += stay.blocks * elapsed

    def _end(self, index: int) -> None:
        placeholder, garbage, blocks = self._room_ns.pop(index, (0, 0, 0))
        self._ended[index] = (placeholder / 1e9, garbage / 1e9, blocks / 1e9)

    def _pass_time(self, now: int) -> None:
        elapsed = now - self._now
        if elapsed:
            self._now = now
            for number, blocks in enumerate(self._only):
                self._only_ns[number] += blocks * elapsed

    # What came of it

    def room(self, index: int) -> Room:
        """Of a request that has ended, or at the end of the run of any; blocks that it shared count in full."""
        return self._ended.get(index, (0.0, 0.0, 0.0))

    def block_seconds(self) -> dict[str, float]:
        """Block-seconds of blocks that hold nothing more certain than the class they are named after.

        `placeholder`: the block begins with a draft in flight; `garbage`: with a slot that is garbage in memory;
        `lookahead`: with room written ahead in; `overhang`: it lies wholly behind what its owner's frame was given. A
        block can be a placeholder's by the first account and garbage by the second.
        """
        return {name: total / 1e9 for name, total in zip(ONLY, self._only_ns, strict=True)}

    def slots_per_block(self) -> list[int]:
        """Entry i: blocks with i garbage slots, looked at whenever a step of their owner has ended; entry 0 is 0."""
        size = self.block_size
        counts = [0] * (size + 1)
        for (first, garbage), seen in self._places.items():
            left = garbage
            place = first
            while left:
                here = min(size - place, left)
                counts[here] += seen
                left -= here
                place = 0
        return counts

    def rejected_tokens(self) -> list[int]:
        """Entry i: verifications that rejected i drafts."""
        return [self._rejected.get(number, 0) for number in range(max(self._rejected, default=-1) + 1)]

    def figures(self) -> dict[str, Any]:
        """`garbage` of a run's summary (`docs/results.md`)."""
        rejected = self.rejected_tokens()
        return {
            "rejected_tokens": rejected,
            "num_rollbacks": sum(rejected[1:]),
            "num_rollbacks_across_blocks": self._crossings,
            "rows_written_twice": self._overwritten.count,
            "slots_freed": self._freed.count,
            "overwritten_after_ms": self._overwritten.figures(),
            "freed_after_ms": self._freed.figures(),
            "slots_per_block": self.slots_per_block(),
            "block_seconds": self.block_seconds(),
            "by_request": {
                name: _statistics([room[number] for room in self._ended.values()])
                for number, (name, _) in enumerate(ROOM_COLUMNS)
            },
        }


def _overwritten(segments: list[tuple[int, int]], start: int, end: int, ages: dict[int, int]) -> list[tuple[int, int]]:
    """Garbage from `start` to `end` is written over and counted in `ages`; returns what is left."""
    left = []
    for segment_end, written in segments:
        cut = min(segment_end, end)
        if cut > start:
            ages[written] = ages.get(written, 0) + cut - start
            start = cut
        if segment_end > end:
            left.append((segment_end, written))
    return left


def _statistics(values: list[float]) -> dict[str, float | None]:
    """Mean, median, p90, p99 and most of the values."""
    if not values:
        return dict.fromkeys(("mean", "median", "p90", "p99", "max"))
    median, p90, p99 = (float(value) for value in np.percentile(values, [50, 90, 99]))
    return {"mean": sum(values) / len(values), "median": median, "p90": p90, "p99": p99, "max": max(values)}
