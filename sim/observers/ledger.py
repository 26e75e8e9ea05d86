"""Where every slot of the pool is: both accounts, at every record and integrated over time.

Told records, never asks: it keeps its own view of requests and counts blocks; `invariants` holds that view, and every
block, against the pool. The classes are defined in `docs/ledger.md`. For one owner, in slots from the start of its
block table:

    F = C - I     certain      C = num_computed_tokens, I = tokens in flight (stale ones left out)
    W             end of what returned frames wrote since admission
    R             end of what the latest frame was given, until it returns

    0 ........ F ............ C ......... W ......... R ......... held blocks * block_size
      committed  in flight,     garbage     lookahead   slack
                 placeholder

A shared block counts once: its owners beyond the first are taken off `committed`, since whoever hits a block has it as
certain from the start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.records import (
    DISCARDED,
    FREED,
    FRESH,
    HIT,
    TAKEN,
    Batch,
    BlockOperation,
    Interruption,
    Returned,
)

if TYPE_CHECKING:
    from mypy_extensions import i64

    from sim.core.request import Request

RESERVATION_CLASSES = (
    "in_flight",
    "placeholder",
    "committed",
    "garbage",
    "lookahead",
    "slack",
    "cached",
    "free",
)
CONTENT_CLASSES = ("valid", "garbage", "blank", "cached", "free")


class Account:
    """One owner's place in both accounts, in tokens or slots."""

    __slots__ = (
        "blocks",
        "capacity",
        "certain",
        "closed",
        "computed",
        "content_valid",
        "content_written",
        "drafts",
        "garbage",
        "hit",
        "lookahead",
        "reserved",
        "short",
        "written",
    )

    def __init__(self, computed: int) -> None:
        self.computed: i64 = computed
        self.hit: i64 = computed
        self.closed = False
        """Its request was preempted, aborted or has ended: frames in flight are stale."""
        self.certain: i64 = computed
        """F: C less what is in flight."""
        self.drafts: i64 = 0
        """Of what is in flight: drafts."""
        self.blocks: i64 = 0
        self.capacity: i64 = 0
        """Slots of these blocks."""
        self.written: i64 = computed
        self.reserved: i64 = 0
        self.garbage: i64 = 0
        self.lookahead: i64 = 0
        self.content_valid: i64 = computed
        self.content_written: i64 = computed
        self.short: tuple[int, int] | None = None

    @property
    def in_flight(self) -> int:
        """I, in tokens."""
        return self.computed - self.certain


class Ledger:
    """Both accounts of one pool. All attributes named after a class are slots, now."""

    def __init__(self, num_blocks: int, block_size: int, *, lossy: bool = True) -> None:
        """`lossy`: the preset may lose count of its tokens, so that this has to be looked for at every frame."""
        self._lossy = lossy
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.accounts: dict[int, Account] = {}
        """Requests that hold blocks, by index."""
        self._account_of: dict[Request, Account] = {}
        """The same by request, which is found faster."""
        self.held_blocks = 0
        self.extra_refs = 0
        """References beyond the first, over all held blocks."""
        self.cached_blocks = 0
        """Free blocks that have a hash."""
        self.garbage = 0
        self.lookahead = 0
        self._rows = 0
        """Tokens in flight that are no drafts."""
        self._drafts = 0
        self._certain = 0
        """Sum of F over owners: committed slots, shared ones counted for every owner."""
        self._short_rows = 0
        self._short_drafts = 0
        """Tokens in flight that would stand in front of slot 0; see `_recount`."""
        self._content_valid = 0
        self.content_garbage = 0
        self.stale_write_slots = 0
        """Slots that frames wrote whose request no longer held them when the step ended."""
        self._now = 0
        # Integrals of what stands above, in ns.
        self._rows_ns = 0
        self._drafts_ns = 0
        self._certain_ns = 0
        self._garbage_ns = 0
        self._lookahead_ns = 0
        self._held_block_ns = 0
        self._cached_block_ns = 0
        self._extra_refs_ns = 0
        self._short_rows_ns = 0
        self._short_drafts_ns = 0
        self._content_valid_ns = 0
        self._content_garbage_ns = 0
        self._max_held_blocks = 0
        self._frames: dict[int, tuple[int, list[Account]]] = {}
        """By number of a batch in flight: when it was scheduled, and the account of each frame."""
        self._accepted_ns = 0
        self._rejected_ns = 0

    # Slots by class, now

    @property
    def in_flight(self) -> int:
        return self._rows - self._short_rows

    @property
    def placeholder(self) -> int:
        return self._drafts - self._short_drafts

    @property
    def committed(self) -> int:
        return self._certain + self._short_rows + self._short_drafts - self.extra_refs * self.block_size

    @property
    def slack(self) -> int:
        owned = (self.held_blocks + self.extra_refs) * self.block_size
        return owned - self._certain - self._rows - self._drafts - self.garbage - self.lookahead

    @property
    def cached(self) -> int:
        return self.cached_blocks * self.block_size

    @property
    def free(self) -> int:
        return (self.num_blocks - 1 - self.held_blocks - self.cached_blocks) * self.block_size

    @property
    def content_valid(self) -> int:
        return self._content_valid - self.extra_refs * self.block_size

    @property
    def content_blank(self) -> int:
        return self.held_blocks * self.block_size - self.content_valid - self.content_garbage

    def reservations(self) -> tuple[int, ...]:
        """Slots by `RESERVATION_CLASSES`; they add up to the pool without the null block."""
        return (
            self.in_flight,
            self.placeholder,
            self.committed,
            self.garbage,
            self.lookahead,
            self.slack,
            self.cached,
            self.free,
        )

    def content(self) -> tuple[int, ...]:
        """Slots by `CONTENT_CLASSES`; they add up to the pool without the null block."""
        return self.content_valid, self.content_garbage, self.content_blank, self.cached, self.free

    # Integrals over time

    def slot_seconds(self) -> dict[str, float]:
        """Slot-seconds by class, placeholders split by what became of them.

        `placeholder_discarded` belongs to frames whose request was preempted, aborted or ended before they returned.
        """
        size = self.block_size
        in_flight = self._rows_ns - self._short_rows_ns
        placeholder = self._drafts_ns - self._short_drafts_ns
        shared = self._extra_refs_ns * size
        held = self._held_block_ns * size
        cached = self._cached_block_ns * size
        committed = self._certain_ns + self._short_rows_ns + self._short_drafts_ns - shared
        slack = held + shared - self._certain_ns - self._rows_ns - self._drafts_ns - self._garbage_ns
        slack -= self._lookahead_ns
        free = self._now * (self.num_blocks - 1) * size - held - cached
        totals = (in_flight, placeholder, committed, self._garbage_ns, self._lookahead_ns, slack, cached, free)
        seconds = {name: total / 1e9 for name, total in zip(RESERVATION_CLASSES, totals, strict=True)}
        seconds["placeholder_accepted"] = self._accepted_ns / 1e9
        seconds["placeholder_rejected"] = self._rejected_ns / 1e9
        seconds["placeholder_discarded"] = (placeholder - self._accepted_ns - self._rejected_ns) / 1e9
        return seconds

    def content_slot_seconds(self) -> dict[str, float]:
        """Slot-seconds by class of the content account."""
        size = self.block_size
        held = self._held_block_ns * size
        cached = self._cached_block_ns * size
        valid = self._content_valid_ns - self._extra_refs_ns * size
        blank = held - valid - self._content_garbage_ns
        free = self._now * (self.num_blocks - 1) * size - held - cached
        totals = (valid, self._content_garbage_ns, blank, cached, free)
        return {name: total / 1e9 for name, total in zip(CONTENT_CLASSES, totals, strict=True)}

    def usage_mean(self) -> float:
        """Mean of vLLM's kv_cache_usage_perc over time, 0 to 1."""
        return self._held_block_ns / (self._now * (self.num_blocks - 1)) if self._now else 0.0

    def usage_max(self) -> float:
        """Most of it, 0 to 1."""
        return self._max_held_blocks / (self.num_blocks - 1)

    def _pass_time(self, now: int) -> None:
        """What the classes are made of is integrated; the classes follow, since they are sums of it."""
        elapsed = now - self._now
        if elapsed == 0:
            return
        self._now = now
        self._rows_ns += self._rows * elapsed
        self._drafts_ns += self._drafts * elapsed
        self._certain_ns += self._certain * elapsed
        self._garbage_ns += self.garbage * elapsed
        self._lookahead_ns += self.lookahead * elapsed
        self._held_block_ns += self.held_blocks * elapsed
        self._cached_block_ns += self.cached_blocks * elapsed
        self._content_valid_ns += self._content_valid * elapsed
        self._content_garbage_ns += self.content_garbage * elapsed
        if self.extra_refs:
            self._extra_refs_ns += self.extra_refs * elapsed
        if self._short_rows or self._short_drafts:
            self._short_rows_ns += self._short_rows * elapsed
            self._short_drafts_ns += self._short_drafts * elapsed

    # Records

    def scheduled(self, now: int, batch: Batch) -> None:
        """Owners leave, join and grow; frames are in flight."""
        self._pass_time(now)
        for request in batch.preempted:
            self._close(request)
        accounts = self.accounts
        account_of = self._account_of
        frames = batch.frames
        for number in range(batch.num_running_frames, len(frames)):
            request = frames[number].request
            hit = frames[number].num_computed_tokens
            account = Account(hit)
            accounts[request.index] = account
            account_of[request] = account
            self._certain += hit
            self._content_valid += hit
        if batch.block_operations:
            self._grow_and_shrink(batch.block_operations)
            self._count_blocks(batch.held_blocks, batch.cached_blocks, batch.extra_refs)
        if not frames:
            return
        owners = [account_of[frame.request] for frame in frames]
        self._frames[batch.number] = (now, owners)
        lookahead: i64 = batch.lookahead
        longest: i64 = batch.max_model_len
        lossy = self._lossy
        garbage_delta: i64 = 0
        lookahead_delta: i64 = 0
        given = iter(batch.reserved) if batch.reserved else None
        for account, frame in zip(owners, frames):
            computed = frame.num_computed_tokens
            end = computed + frame.num_tokens
            if lossy and computed != account.computed:  # See `sim.policies.stale_output`.
                self._certain += computed - account.computed
                account.certain += computed - account.computed
                account.short = account.short or (0, 0)
            account.computed = end
            account.drafts += frame.num_drafts
            if lossy and account.short is not None:
                self._recount(account)
            reserved = end + lookahead
            if given is not None:
                reserved = next(given)
            if reserved > longest:
                reserved = longest
            account.reserved = reserved
            reach = account.written
            garbage: i64 = 0
            if reach > end:
                garbage = reach - end
            else:
                reach = end
            before = account.garbage
            if garbage != before:
                garbage_delta += garbage - before
                account.garbage = garbage
            ahead = reserved - reach if reserved > reach else 0
            lookahead_delta += ahead - account.lookahead
            account.lookahead = ahead
        self.garbage += garbage_delta
        self.lookahead += lookahead_delta
        self._rows += batch.total_tokens - batch.num_draft_tokens
        self._drafts += batch.num_draft_tokens

    def step_ended(self, now: int, batch: Batch) -> None:
        """The step's rows are in memory, and its rejections are known to the device."""
        self._pass_time(now)
        lossy = self._lossy
        valid_delta: i64 = batch.total_tokens - batch.num_draft_tokens + batch.num_accepted_tokens
        written_delta: i64 = 0
        for account, frame in zip(self._frames[batch.number][1], batch.frames):
            num_tokens = frame.num_tokens
            if account.closed:
                self.stale_write_slots += num_tokens
                valid_delta -= num_tokens - (frame.num_rejected if frame.samples else frame.num_drafts)
                continue
            end = account.content_valid + num_tokens
            valid = end - (frame.num_rejected if frame.samples else frame.num_drafts)
            written = account.content_written
            if lossy and end > account.capacity:  # Its counters may be wrong; see `_recount`.
                end = account.capacity
                if valid > end:
                    valid_delta -= valid - end
                    valid = end
            account.content_valid = valid
            if end > written:
                account.content_written = end
                written_delta += end - written
        self._content_valid += valid_delta
        self.content_garbage += written_delta - valid_delta

    def updated(self, now: int, returned: Returned) -> None:
        """Frames are no longer in flight; rejections are rolled back; what ended leaves."""
        self._pass_time(now)
        batch = returned.batch
        scheduled_at, owners = self._frames.pop(batch.number)
        lossy = self._lossy
        held_ns = now - scheduled_at
        garbage_delta: i64 = 0
        lookahead_delta: i64 = 0
        all_fresh = returned.num_stale_frames == 0
        rejected_total: i64 = returned.num_rejected_tokens
        tokens_total: i64 = batch.total_tokens
        drafts_total: i64 = batch.num_draft_tokens
        for account, frame in zip(owners, batch.frames):
            num_tokens = frame.num_tokens
            if account.closed:
                tokens_total -= num_tokens
                drafts_total -= frame.num_drafts
                rejected_total -= frame.num_rejected
                continue
            end = account.certain + num_tokens
            account.drafts -= frame.num_drafts
            computed = account.computed
            latest = end == computed  # No other frame is in flight.
            reach = account.written
            if end > reach:
                account.written = reach = end
            rejected = frame.num_rejected
            if rejected:
                if all_fresh or frame.fate == FRESH or frame.fate == DISCARDED:
                    computed -= rejected
                    account.computed = computed
                    end -= rejected
                else:
                    rejected_total -= rejected
            account.certain = end
            if lossy and account.short is not None:
                self._recount(account)
            garbage: i64 = 0
            if reach > computed:
                garbage = reach - computed
            else:
                reach = computed
            before = account.garbage
            if garbage != before:
                garbage_delta += garbage - before
                account.garbage = garbage
            ahead: i64 = 0
            if latest:
                account.reserved = 0
            elif account.reserved > reach:
                ahead = account.reserved - reach
            before = account.lookahead
            if ahead != before:
                lookahead_delta += ahead - before
                account.lookahead = ahead
        self._certain += tokens_total - rejected_total
        self.garbage += garbage_delta
        self.lookahead += lookahead_delta
        self._rows -= tokens_total - drafts_total
        self._drafts -= drafts_total
        self._rejected_ns += rejected_total * held_ns
        self._accepted_ns += (drafts_total - rejected_total) * held_ns
        for request in returned.finished:
            self._close(request)
        if returned.block_operations:
            self._grow_and_shrink(returned.block_operations)
            self._count_blocks(returned.held_blocks, returned.cached_blocks, returned.extra_refs)

    def interrupted(self, now: int, interruption: Interruption) -> None:
        """Those aborted or preempted leave."""
        self._pass_time(now)
        for request in interruption.requests:
            self._close(request)
        if interruption.block_operations:
            self._count_blocks(interruption.held_blocks, interruption.cached_blocks, interruption.extra_refs)

    def closed(self, now: int) -> None:
        """The rest of the time passes."""
        self._pass_time(now)

    def _close(self, request: Request) -> None:
        """Take an owner out of both accounts; its blocks follow by their operations."""
        account = self.accounts.pop(request.index, None)
        if account is None:
            return
        del self._account_of[request]
        account.closed = True
        self._certain -= account.certain
        self._rows -= account.in_flight - account.drafts
        self._drafts -= account.drafts
        if account.short is not None:
            self._short_rows -= account.short[0]
            self._short_drafts -= account.short[1]
        self.garbage -= account.garbage
        self.lookahead -= account.lookahead
        self._content_valid -= account.content_valid
        self.content_garbage -= account.content_written - account.content_valid

    def _shrink(self, account: Account, num_blocks: int) -> None:
        """An owner that goes on has let go of blocks at its end: what was written there is no longer its own."""
        account.blocks -= num_blocks
        account.capacity = account.blocks * self.block_size
        if account.written > account.capacity:
            account.written = account.capacity
            garbage = max(account.written - account.computed, 0)
            self.garbage += garbage - account.garbage
            account.garbage = garbage
        if account.content_written > account.capacity:
            self.content_garbage -= account.content_written - account.capacity
            account.content_written = account.capacity
        if account.reserved > account.capacity:
            account.reserved = account.capacity
            ahead = max(account.reserved - max(account.written, account.computed), 0)
            self.lookahead += ahead - account.lookahead
            account.lookahead = ahead

    def _recount(self, account: Account) -> None:
        """Only for presets with a known loss: num_computed_tokens may fall so low that F lies within the hit, or
        below 0.

        What is in flight then counts from the end of the hit on; the rest of it is taken off, rows first.
        """
        assert account.short is not None
        missing = max(account.in_flight - account.computed + account.hit, 0)
        rows = min(missing, account.in_flight - account.drafts)
        self._short_rows += rows - account.short[0]
        self._short_drafts += missing - rows - account.short[1]
        account.short = (rows, missing - rows)

    def _grow_and_shrink(self, operations: list[BlockOperation]) -> None:
        """What owners that stay have taken and let go of."""
        size = self.block_size
        accounts = self.accounts
        for kind, owner, blocks in operations:
            if kind == TAKEN or kind == HIT:
                account = accounts.get(owner)
                if account is not None:
                    account.blocks += len(blocks)
                    account.capacity = account.blocks * size
            elif kind == FREED and owner in accounts:
                self._shrink(accounts[owner], len(blocks))

    def _count_blocks(self, held: int, cached: int, extra_refs: int) -> None:
        """A record's block operations have led to this."""
        self.held_blocks = held
        self.cached_blocks = cached
        self.extra_refs = extra_refs
        if held > self._max_held_blocks:
            self._max_held_blocks = held
