"""Both accounts slot by slot, as `docs/ledger.md` defines them: slow, and made another way than the ledger.

It takes block tables, references and hashes from the scheduler itself, and classifies every slot of every held block on
its own, at every record. Only for presets without a known loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sim.core.request import Request
from sim.core.scheduler import Scheduler
from sim.observers.ledger import Ledger
from sim.records import FRESH, Batch, Interruption, Returned

IN_FLIGHT, PLACEHOLDER, COMMITTED, GARBAGE, LOOKAHEAD, SLACK = range(6)
VALID, SPOILT, BLANK = range(3)


@dataclass
class Owner:
    request: Request
    epoch: int
    computed: int
    frames: dict[int, tuple[int, int]] = field(default_factory=dict)
    """In flight: batch number to (tokens, of them drafts)."""
    written: int = 0
    reserved: int = 0
    latest: int = -1
    position: int = 0
    """The device's."""
    cells: dict[int, int] = field(default_factory=dict)
    """Content by position, where it is not blank."""

    def keep(self, slots: int) -> None:
        """What lay beyond is gone, also when blocks are taken there again."""
        self.written = min(self.written, slots)
        self.reserved = min(self.reserved, slots)
        for x in [x for x in self.cells if x >= slots]:
            del self.cells[x]

    def reservation(self, x: int) -> int:
        in_flight = sum(tokens for tokens, _ in self.frames.values())
        rows = sum(tokens - drafts for tokens, drafts in self.frames.values())
        certain = self.computed - in_flight
        if certain <= x < self.computed:
            return IN_FLIGHT if x < certain + rows else PLACEHOLDER
        if x < certain:
            return COMMITTED
        if x < self.written:
            return GARBAGE
        return LOOKAHEAD if x < self.reserved else SLACK


class NaiveAccounts:
    """An observer that compares the ledger with its own count after every record."""

    def __init__(self, scheduler: Scheduler, ledger: Ledger) -> None:
        self.scheduler = scheduler
        self.ledger = ledger
        self.owners: dict[int, Owner] = {}
        self.num_records = 0
        self.seen: set[int] = set()
        """Reservation classes that were not empty at some time."""

    def scheduled(self, now: int, batch: Batch) -> None:
        for request in batch.preempted:
            del self.owners[request.index]
        for number, request in enumerate(batch.requests):
            tokens, drafts, computed = batch.tokens[number], batch.drafts[number], batch.computed[number]
            if number >= batch.num_running_frames:
                owner = Owner(request, batch.epochs[number], computed, written=computed, position=computed)
                owner.cells = dict.fromkeys(range(computed), VALID)
                self.owners[request.index] = owner
            owner = self.owners[request.index]
            assert owner.computed == computed
            owner.computed += tokens
            owner.frames[batch.number] = (tokens, drafts)
            given = batch.reserved[number] if batch.reserved else computed + tokens + batch.lookahead
            owner.reserved = min(given, batch.max_model_len)
            owner.latest = batch.number
        self._compare(now)

    def step_ended(self, now: int, batch: Batch) -> None:
        for number, request in enumerate(batch.requests):
            owner = self.owners.get(request.index)
            if owner is None or owner.epoch != batch.epochs[number]:
                continue
            right = batch.tokens[number] - batch.drafts[number] + batch.accepted[number]
            for row in range(batch.tokens[number]):
                owner.cells[owner.position + row] = VALID if row < right else SPOILT
            owner.position += right
        self._compare(now)

    def updated(self, now: int, returned: Returned) -> None:
        batch = returned.batch
        for number, request in enumerate(batch.requests):
            owner = self.owners.get(request.index)
            if owner is None or owner.epoch != batch.epochs[number]:
                continue
            assert returned.fates[number] == FRESH
            in_flight = sum(tokens for tokens, _ in owner.frames.values())
            tokens, _ = owner.frames.pop(batch.number)
            owner.written = max(owner.written, owner.computed - in_flight + tokens)
            owner.computed -= returned.rejected[number]
            if owner.latest == batch.number:
                owner.reserved = 0
        for request in returned.finished:
            self.owners.pop(request.index, None)
        self._compare(now)

    def interrupted(self, now: int, interruption: Interruption) -> None:
        for request in interruption.requests:
            self.owners.pop(request.index, None)
        self._compare(now)

    def _compare(self, now: int) -> None:
        self.num_records += 1
        pool = self.scheduler.pool
        size = self.ledger.block_size
        held: dict[int, list[tuple[Owner, int]]] = {}
        for owner in self.owners.values():
            owner.keep(len(owner.request.block_table) * size)
            for place, block in enumerate(owner.request.block_table):
                held.setdefault(block, []).append((owner, place * size))
        reservations, content = [0] * 6, [0] * 3
        for users in held.values():
            for offset in range(size):
                classes = [owner.reservation(start + offset) for owner, start in users]
                cells = [owner.cells.get(start + offset, BLANK) for owner, start in users]
                if len(users) == 1:
                    reservations[classes[0]] += 1
                    content[cells[0]] += 1
                    continue
                # Shared: in flight if any owner has it in flight. Who hits a block has it as certain from the start,
                # and it is blank until the one who computes it has.
                assert set(classes) <= {IN_FLIGHT, COMMITTED}
                reservations[IN_FLIGHT if IN_FLIGHT in classes else COMMITTED] += 1
                content[BLANK if BLANK in cells else VALID] += 1
        free = [block for block in range(1, pool.num_blocks) if pool.refs[block] == 0]
        cached = sum(pool.cache.hashes[block] is not None for block in free) * size
        rest = (cached, len(free) * size - cached)
        assert self.ledger.reservations() == (*reservations, *rest), f"reservations at {now} ns"
        assert self.ledger.content() == (*content, *rest), f"content at {now} ns"
        self.seen.update(number for number, slots in enumerate((*reservations, *rest)) if slots)
