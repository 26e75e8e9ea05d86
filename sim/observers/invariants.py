"""Laws 1 to 6 of `docs/ledger.md`, held at every record: double entry.

The ledger derives its view from records alone; this observer holds that view, each block as the records' operations
leave it, and the requests' counters against the pool and the scheduler themselves. It walks nearly everything at
every record, so a run under `--check` is slower. It changes nothing.
"""

from __future__ import annotations

from collections import Counter

from sim.core.request import RUNNING, Request
from sim.core.scheduler import Scheduler
from sim.observers.blocks import Blocks
from sim.observers.ledger import Ledger
from sim.records import FRESH, STALE_DELIVERED, Batch, Interruption, Returned

_SMALL_POOL = 2000
_THOROUGH = 50
"""A pool of more blocks than `_SMALL_POOL` is walked block by block at every `_THOROUGH`th record."""


class LawBroken(Exception):
    """A law does not hold. The message names it, the time and both sides."""


class Invariants:
    """Raises `LawBroken` at the first record after which a law does not hold.

    `lossy`: the preset is known to lose tokens or placeholders; breaches of law 3 are counted in `num_losses` instead.
    """

    def __init__(self, scheduler: Scheduler, ledger: Ledger, *, async_scheduling: bool, lossy: bool) -> None:
        self.scheduler = scheduler
        self.ledger = ledger
        self.async_scheduling = async_scheduling
        self.lossy = lossy
        self.blocks = Blocks(ledger.num_blocks)
        self.num_losses = 0
        self.num_records = 0
        self._crashed = False
        self._in_flight: dict[int, tuple[list[Request], list[int], list[int], list[bool], list[int]]] = {}
        self._drafted = 0
        self._accepted = 0
        self._rejected = 0
        self._returned = 0
        self._delivered = 0
        self._trimmed = 0
        self._discarded = 0

    def scheduled(self, now: int, batch: Batch) -> None:
        self.blocks.follow(batch.block_operations)
        if batch.total_tokens > 0:
            self._in_flight[batch.number] = (
                list(batch.requests),
                list(batch.tokens),
                list(batch.drafts),
                list(batch.samples),
                list(batch.epochs),
            )
        size = self.ledger.block_size
        for request, num_tokens in zip(batch.requests, batch.tokens, strict=True):
            position = request.num_computed_tokens
            if position > len(request.block_table) * size:
                raise LawBroken(
                    f"law 6 at {now} ns: request {request.id} is to write {num_tokens} tokens up to {position}, "
                    f"it holds {len(request.block_table)} blocks of {size}"
                )
        self._hold(now)

    def step_ended(self, now: int, batch: Batch) -> None:
        for request, num_drafts, accepted, samples in zip(
            batch.requests, batch.drafts, batch.accepted, batch.samples, strict=True
        ):
            if not samples:
                continue
            if not 0 <= accepted <= num_drafts:
                raise LawBroken(f"law 5 at {now} ns: request {request.id} accepts {accepted} of {num_drafts} drafts")
            self._drafted += num_drafts
            self._accepted += accepted
        self._hold(now)

    def updated(self, now: int, returned: Returned) -> None:
        self.blocks.follow(returned.block_operations)
        batch = returned.batch
        self._in_flight.pop(batch.number)
        for number, num_drafts in enumerate(batch.drafts):
            sampled, rejected = returned.sampled[number], returned.rejected[number]
            delivered, trimmed = returned.delivered[number], returned.trimmed[number]
            self._rejected += rejected
            self._returned += sampled
            self._delivered += delivered
            self._trimmed += trimmed
            if returned.fates[number] not in (FRESH, STALE_DELIVERED):
                self._discarded += sampled
            if num_drafts and sampled and num_drafts != rejected + sampled - 1:
                raise LawBroken(
                    f"law 5 at {now} ns: request {batch.requests[number].id} drafted {num_drafts}, "
                    f"accepted {sampled - 1}, rejected {rejected}"
                )
        if self._returned != self._delivered + self._trimmed + self._discarded:
            raise LawBroken(
                f"law 5 at {now} ns: {self._returned} tokens returned, {self._delivered} delivered, "
                f"{self._trimmed} trimmed, {self._discarded} discarded"
            )
        self._hold(now)

    def interrupted(self, now: int, interruption: Interruption) -> None:
        self.blocks.follow(interruption.block_operations)
        self._hold(now)

    def crashed(self, now: int) -> None:
        self._crashed = True

    def closed(self, now: int) -> None:
        if self._crashed:
            return  # Half a decision has changed the pool, and no record tells of it.
        self._hold(now)
        self._blocks(now)
        if not self._in_flight and self._drafted != self._accepted + self._rejected:
            raise LawBroken(
                f"law 5 at {now} ns: {self._drafted} drafted, {self._accepted} accepted, {self._rejected} rejected"
            )

    def _hold(self, now: int) -> None:
        self.num_records += 1
        self._conservation(now)
        self._pool(now)
        self._counters(now)
        self._garbage(now)
        if not self.lossy:
            self._recount(now)

    def _conservation(self, now: int) -> None:
        ledger = self.ledger
        pool = (ledger.num_blocks - 1) * ledger.block_size
        for name, classes in (("reservations", ledger.reservations()), ("content", ledger.content())):
            if sum(classes) != pool or min(classes) < 0:
                raise LawBroken(f"law 1 at {now} ns: {name} {classes} against a pool of {pool} slots")

    def _recount(self, now: int) -> None:
        """The running totals against a count over all owners, class by class, so that no remainder hides a mistake."""
        ledger = self.ledger
        size = ledger.block_size
        in_flight = placeholder = certain = garbage = lookahead = valid = content_garbage = 0
        for account in ledger.accounts.values():
            computed, written = account.computed, account.written
            capacity = account.blocks * size
            in_flight += account.in_flight - account.drafts
            placeholder += account.drafts
            certain += computed - account.in_flight
            garbage += max(min(written, capacity) - computed, 0)
            lookahead += max(account.reserved - max(computed, written), 0)
            valid += account.content_valid
            content_garbage += account.content_written - account.content_valid
            if not max(computed, written, account.reserved, account.content_written) <= capacity:
                raise LawBroken(
                    f"law 1 at {now} ns: an owner of {capacity} slots uses more: computed {computed}, "
                    f"written {written}, reserved {account.reserved}"
                )
        shared = ledger.extra_refs * size
        counted = (in_flight, placeholder, certain - shared, garbage, lookahead, valid - shared, content_garbage)
        kept = (
            ledger.in_flight,
            ledger.placeholder,
            ledger.committed,
            ledger.garbage,
            ledger.lookahead,
            ledger.content_valid,
            ledger.content_garbage,
        )
        if counted != kept:
            names = "in flight, placeholder, committed, garbage, lookahead, valid, garbage in memory"
            raise LawBroken(f"law 1 at {now} ns: {names}: {counted} counted, {kept} kept")

    def _pool(self, now: int) -> None:
        """Every block's references by the pool's operations, at every record; the free queue, owners and hashes block
        by block too, in a large pool at every fiftieth record and in sums at the others."""
        pool = self.scheduler.pool
        ledger = self.ledger
        blocks = self.blocks
        held, cached, extra_refs = blocks.num_held, blocks.num_cached, blocks.extra_refs
        counts = (pool.num_blocks - 1 - pool.num_free, pool.num_cached, pool.extra_refs, len(pool.cache))
        if counts != (held, cached, extra_refs, blocks.hashed.count(1)):
            raise LawBroken(
                f"law 2 at {now} ns: held blocks, cached ones, references beyond the first and hashes {counts} by the "
                f"pool, {(held, cached, extra_refs, blocks.hashed.count(1))} by its operations"
            )
        if (held, cached, extra_refs) != (ledger.held_blocks, ledger.cached_blocks, ledger.extra_refs):
            raise LawBroken(
                f"law 2 at {now} ns: held blocks, cached ones and references beyond the first "
                f"{(held, cached, extra_refs)} by the pool's operations, "
                f"{(ledger.held_blocks, ledger.cached_blocks, ledger.extra_refs)} by the ledger"
            )
        if pool.refs != blocks.refs or pool.num_blocks <= _SMALL_POOL or self.num_records % _THOROUGH == 0:
            self._blocks(now)

    def _blocks(self, now: int) -> None:
        pool = self.scheduler.pool
        by_operations = self.blocks
        queue = pool.free_queue()
        if len(queue) != pool.num_free or len(set(queue)) != len(queue):
            raise LawBroken(f"law 2 at {now} ns: a free queue of {len(queue)} blocks, {pool.num_free} are counted free")
        owners: Counter[int] = Counter()
        for request in self.scheduler.requests.values():
            owners.update(request.block_table)
        free = set(queue)
        for block in range(1, pool.num_blocks):
            refs = pool.refs[block]
            if (refs == 0) != (block in free) or refs != owners[block] or refs != by_operations.refs[block]:
                raise LawBroken(
                    f"law 2 at {now} ns: block {block} has {refs} references, {owners[block]} owners, "
                    f"{by_operations.refs[block]} by the pool's operations, and is {'' if block in free else 'not '}"
                    f"in the free queue"
                )
            hashed = pool.cache.pages[block] is not None
            if hashed != bool(by_operations.hashed[block]) or (refs > 1 and not hashed):
                raise LawBroken(
                    f"law 2 at {now} ns: block {block} with {refs} owners {'has a' if hashed else 'has no'} hash, "
                    f"by the pool's operations {'has one' if by_operations.hashed[block] else 'none'}"
                )

    def _counters(self, now: int) -> None:
        promised: Counter[int] = Counter()
        in_flight: Counter[int] = Counter()
        for requests, tokens, drafts, samples, epochs in self._in_flight.values():
            for request, num_tokens, num_drafts, sampling, epoch in zip(
                requests, tokens, drafts, samples, epochs, strict=True
            ):
                if epoch == request.num_preemptions:
                    in_flight[request.index] += num_tokens
                    promised[request.index] += 1 + num_drafts if sampling else 0
        for request in self.scheduler.requests.values():
            expected = promised[request.index] if self.async_scheduling else 0
            if request.num_output_placeholders != expected:
                if self.lossy:
                    self.num_losses += 1
                    continue
                raise LawBroken(
                    f"law 3 at {now} ns: request {request.id} has {request.num_output_placeholders} placeholders, "
                    f"{expected} are in flight"
                )
            account = self.ledger.accounts.get(request.index)
            if (account is None) != (request.status != RUNNING):
                raise LawBroken(f"law 3 at {now} ns: request {request} and its account do not agree")
            if account is None or self.lossy:
                continue
            certain = request.num_computed_tokens - in_flight[request.index]
            if (account.computed, account.computed - account.in_flight, account.blocks) != (
                request.num_computed_tokens,
                certain,
                len(request.block_table),
            ):
                raise LawBroken(
                    f"law 3 at {now} ns: request {request.id} has computed {request.num_computed_tokens}, certain "
                    f"{certain}, {len(request.block_table)} blocks; by the ledger {account.computed}, "
                    f"{account.computed - account.in_flight}, {account.blocks}"
                )
            if certain > request.num_tokens:
                raise LawBroken(f"law 3 at {now} ns: request {request} is certain of {certain} tokens")

    def _garbage(self, now: int) -> None:
        size = self.ledger.block_size
        if self.lossy:
            return
        for request in self.scheduler.running:
            if request.num_cached_blocks * size > request.num_tokens:
                raise LawBroken(
                    f"law 4 at {now} ns: request {request.id} has {request.num_cached_blocks} cached blocks of {size} "
                    f"with {request.num_tokens} confirmed tokens"
                )
            account = self.ledger.accounts[request.index]
            if account.content_valid > request.num_tokens + account.in_flight:
                raise LawBroken(f"law 4 at {now} ns: request {request}: {account.content_valid} slots count as valid")
