"""The scheduler: who computes how much in the next step, and what a returned step changes.

Knows requests, slots and rules; no clock, no device. Sync and async differ in one thing: with async scheduling a
frame's output is taken for granted in placeholders before it is known. Rules: vLLM's V1 scheduler; what differs between
its versions comes in as `Rules`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sim.core.batch import BatchBuilder
from sim.core.block_pool import BlockPool
from sim.core.crash import EngineCrash
from sim.core.draft_length import draft_length_table
from sim.core.kv_cache import KVCache
from sim.core.prefix_cache import PrefixCache
from sim.core.queues import FcfsQueue, PriorityQueue, WaitingQueue
from sim.core.request import FINISHED, PREEMPTED, RUNNING, Request
from sim.core.settings import DraftLength, Rules, Settings
from sim.records import DISCARDED, FRESH, STALE_DROPPED, UNKNOWN, Batch, Frame, Interruption, Returned

if TYPE_CHECKING:
    from mypy_extensions import i64

_UNLIMITED: Final = 1 << 40
"""More tokens than any frame has."""


class Scheduler:
    """Running and waiting requests over one block pool."""

    __slots__ = (
        "_draft_length",
        "_draft_lengths",
        "_draft_slots",
        "_num_schedules",
        "_rules",
        "_settings",
        "_spare_frames",
        "_token_budget",
        "_unreported_finish",
        "kv_cache",
        "num_preemptions",
        "pool",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "requests",
        "running",
        "waiting",
    )

    def __init__(self, settings: Settings, rules: Rules, draft_length: DraftLength | None = None) -> None:
        """`draft_length`: None for a K that is fixed, or the settings' table."""
        self._settings = settings
        self._rules = rules
        cache = PrefixCache(settings.num_gpu_blocks)
        self.pool = BlockPool(settings.num_gpu_blocks, cache, rules.freeing)
        self.kv_cache = KVCache(
            self.pool,
            settings.block_size,
            settings.max_model_len,
            enable_prefix_caching=settings.enable_prefix_caching,
            drop_last_hit_block=settings.drop_last_hit_block,
            hit_margin_tokens=settings.hit_margin_tokens,
            cache_outputs=rules.cache_outputs,
            watermark=settings.watermark,
            reservation=None if rules.reservation.exact else rules.reservation,
            tracks_reservation=rules.undo.frees,
            num_drafts=settings.num_speculative_tokens,
        )
        self._draft_length = draft_length
        self._token_budget = settings.max_num_scheduled_tokens or settings.max_num_batched_tokens
        self._draft_slots = settings.draft_slots if rules.draft_slots_per_request else 0
        self._draft_lengths: list[int] | None = None
        if settings.num_speculative_tokens_per_batch_size:
            self._draft_lengths = draft_length_table(
                settings.num_speculative_tokens_per_batch_size, settings.num_speculative_tokens, settings.max_num_seqs
            )
        self.requests: dict[str, Request] = {}
        """Unfinished requests by id."""
        self.running: list[Request] = []
        self.waiting: WaitingQueue = PriorityQueue() if settings.priority else FcfsQueue()
        self._num_schedules = 0
        self._spare_frames: list[Frame] = []
        self._unreported_finish = False
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        """Tokens looked up at first admissions."""
        self.prefix_cache_hits = 0

    def has_requests(self) -> bool:
        """Whether a schedule is due: requests are unfinished, or finished and the workers do not know yet."""
        return bool(self.requests) or self._unreported_finish

    def add(self, request: Request) -> None:
        """A new request joins the waiting queue.

        Raises:
            ValueError: its id is in use.
        """
        if request.id in self.requests:
            raise ValueError(f"request id {request.id!r} is in use")
        request.end_tokens = min(request.end_tokens, self._settings.max_model_len)
        self.requests[request.id] = request
        self.waiting.add(request)

    def schedule(self) -> Batch:
        """Decide the next step. The batch may be empty."""
        settings = self._settings
        batch = Batch(self._num_schedules, settings.num_lookahead_tokens, settings.max_model_len)
        self._num_schedules += 1
        builder = BatchBuilder(
            batch, self._token_budget, settings.max_num_batched_tokens, self._draft_slots, self._spare_frames
        )
        threshold = settings.long_prefill_token_threshold
        if self._rules.lone_prefill_exempt and len(self.running) + len(self.waiting) <= 1:
            threshold = 0
        prefill_scheduled = self._schedule_running(builder, threshold)
        batch.num_running_frames = len(batch.frames)
        if not batch.preempted:
            self._schedule_waiting(builder, threshold, prefill_scheduled)
        batch.total_tokens = self._token_budget - builder.token_budget
        self._advance(batch)
        self._unreported_finish = False
        pool = self.pool
        batch.block_operations = self.kv_cache.take_operations()
        batch.held_blocks, batch.cached_blocks, batch.extra_refs = pool.num_held, pool.num_cached, pool.extra_refs
        return batch

    def _schedule_running(self, builder: BatchBuilder, threshold: int) -> bool:
        """Frames for the running requests, in list order; returns whether one of them was a prefill chunk."""
        settings = self._settings
        running = self.running
        kv_cache = self.kv_cache
        frames = builder.batch.frames
        spare = self._spare_frames
        always_extends = kv_cache.always_extends
        draft_slots: i64 = self._draft_slots
        negative_frames = self._rules.negative_frames
        lookahead: i64 = settings.num_lookahead_tokens
        longest: i64 = settings.max_model_len - 1
        token_room: i64 = builder.token_budget
        input_room: i64 = builder.input_budget - draft_slots
        most: i64 = threshold if threshold > 0 else _UNLIMITED
        prefill_scheduled = False
        first = 0
        walks = True
        while walks:  # Once, and again from behind a request that room was made for: the list has changed.
            walks = False
            for request in running[first:] if first > 0 else running:
                if token_room <= 0 or input_room <= 0:
                    break
                placeholders = request.num_output_placeholders
                computed = request.num_computed_tokens
                if computed + 2 - placeholders >= request.most_tokens and placeholders > 0:
                    continue  # What is in flight is sure to finish it.
                confirmed = request.num_tokens
                uncomputed = confirmed + placeholders - computed
                proposed = request.num_drafts
                num_tokens = uncomputed + proposed
                if num_tokens > most:
                    num_tokens = most
                if num_tokens > token_room:
                    num_tokens = token_room
                if num_tokens > input_room:
                    num_tokens = input_room
                end = computed + num_tokens
                if end > longest:
                    end = longest
                    num_tokens = end - computed
                if num_tokens <= 0 and not (num_tokens < 0 and negative_frames):
                    continue
                cached_end = request.cached_end
                if (
                    always_extends
                    or end + lookahead > request.num_slots
                    or (confirmed >= cached_end and end >= cached_end)
                ):
                    while not kv_cache.extend(request, num_tokens, lookahead):
                        if not walks:
                            walks = True
                            first = running.index(request)
                        builder.token_budget, builder.input_budget = token_room, input_room + draft_slots
                        first = self._make_room(builder, first)
                        token_room, input_room = builder.token_budget, builder.input_budget - draft_slots
                        if request.status != RUNNING:
                            return prefill_scheduled
                if request.is_prefill_chunk:
                    prefill_scheduled = True
                num_drafts: i64 = 0
                if proposed:
                    if num_tokens > uncomputed:
                        num_drafts = num_tokens - uncomputed
                        if num_drafts > proposed:
                            num_drafts = proposed
                    request.num_drafts = 0
                frame = spare.pop() if spare else Frame(request)
                frame.request = request
                frame.num_tokens = num_tokens
                frame.num_drafts = num_drafts
                frame.num_computed_tokens = computed
                frame.epoch = request.epoch
                frames.append(frame)
                token_room -= num_tokens
                input_room -= num_tokens + draft_slots
                if walks:
                    first += 1
                    break
        builder.token_budget, builder.input_budget = token_room, input_room + draft_slots
        return prefill_scheduled

    def _make_room(self, builder: BatchBuilder, index: int) -> int:
        """Preempt one running request; returns where the request in hand now stands in the running list."""
        running = self.running
        victim = self._victim(index)
        position = len(running) - 1 if victim is running[-1] else running.index(victim)
        del running[position]
        scheduled = builder.remove(victim)
        self._preempt(victim, False)
        builder.batch.preempted.append(victim)
        if position < index and (scheduled or self._rules.skipped_victim_moves_index):
            return index - 1
        return index

    def _victim(self, index: int) -> Request:
        """Whom to preempt: the largest (priority, arrival), the first on a tie, or as the rule says of those that
        stand at `index` or behind, which this step has not scheduled yet.

        Priority may choose one that was scheduled in this step already. Its blocks of this step keep their hashes, as
        in vLLM, though nobody will write them.
        """
        if self._settings.priority:
            return max(self.running, key=_priority_and_arrival)
        return self._rules.victim(self.running[index:])

    def _schedule_waiting(self, builder: BatchBuilder, threshold: int, prefill_scheduled: bool) -> None:
        """Admissions, in queue order, until one does not fit."""
        settings = self._settings
        kv_cache = self.kv_cache
        waiting = self.waiting
        batch = builder.batch
        draft_slots = self._draft_slots
        num_spec_tokens = settings.num_speculative_tokens
        fixed = self._draft_lengths is None and self._draft_length is None
        may_pad = num_spec_tokens > 0 and fixed and not prefill_scheduled
        passed_over: list[Request] = []
        while builder.token_budget > 0 and len(waiting) > 0 and builder.input_budget > draft_slots:
            if len(self.running) >= settings.max_num_seqs:
                break
            request = waiting.peek()
            if self._rules.stale_output.must_wait(request):
                passed_over.append(waiting.pop())
                continue
            hit = kv_cache.lookup(request)
            num_hit = len(hit) * settings.block_size
            num_tokens = request.num_tokens - num_hit
            budget = min(builder.token_budget, builder.input_budget - draft_slots)
            num_drafts = 0
            if num_tokens == 1 and may_pad:
                num_tokens = self._rules.padding(
                    num_hit, num_spec_tokens, budget, settings.max_model_len, batch.num_running_frames > 0
                )
                if num_tokens == 0:
                    break
                num_drafts = num_tokens - 1
            if 0 < threshold < num_tokens:
                num_tokens = threshold
            num_tokens = min(num_tokens, budget)
            if not kv_cache.admit(
                request, hit, num_hit, num_tokens, settings.num_lookahead_tokens, len(self.running) > 0
            ):
                break
            if num_drafts and num_tokens <= num_drafts and not self._rules.padding_survives_threshold:
                raise EngineCrash(
                    f"request {request.id}: padded to 1 + {num_spec_tokens} tokens, then cut by a "
                    f"long_prefill_token_threshold of {threshold}"
                )
            waiting.pop()
            resumed = request.status == PREEMPTED
            if not resumed:
                self.prefix_cache_queries += request.num_tokens
                self.prefix_cache_hits += num_hit
            request.become(RUNNING)
            request.num_computed_tokens = num_hit
            self.running.append(request)
            batch.resumed.append(resumed)
            batch.hits += num_hit
            builder.add(request, num_tokens, num_drafts, num_hit)
        for request in reversed(passed_over):
            waiting.put_back(request)

    def _advance(self, batch: Batch) -> None:
        """Count the batch as computed and, with async scheduling, its output as placeholders."""
        num_spec_tokens = self._settings.num_speculative_tokens
        if self._draft_lengths is not None and batch.frames:
            num_spec_tokens = self._draft_lengths[len(batch.frames)]
        elif self._draft_length is not None and batch.frames:
            num_spec_tokens = self._draft_length.length(batch)
        batch.num_spec_tokens = num_spec_tokens
        promises = self._settings.async_scheduling
        total_drafts: i64 = 0
        plain: i64 = 0
        chunks: i64 = 0
        for frame in batch.frames:
            request = frame.request
            num_tokens = frame.num_tokens
            num_drafts = frame.num_drafts
            if num_drafts:
                total_drafts += num_drafts
            else:
                plain += 1
            computed = request.num_computed_tokens + num_tokens
            request.num_computed_tokens = computed
            request.num_in_flight_tokens += num_tokens
            if computed < request.num_tokens + request.num_output_placeholders:
                request.is_prefill_chunk = True
                frame.samples = False
                chunks += 1
                continue
            request.is_prefill_chunk = False
            frame.samples = True
            if promises:
                request.num_output_placeholders += 1 + num_drafts
                request.num_drafts = num_spec_tokens
        batch.num_draft_tokens = total_drafts
        batch.num_drafting_frames = len(batch.frames) - plain
        batch.num_chunk_frames = chunks
        if not self._rules.reservation.exact:
            batch.reserved = [frame.request.num_reserved_tokens for frame in batch.frames]

    def _preempt(self, request: Request, by_reset: bool) -> None:
        """Take a request's blocks away and put it back to the head of the waiting queue."""
        request.become(PREEMPTED)
        self.kv_cache.free(request)
        request.num_computed_tokens = 0
        request.num_drafts = 0
        request.num_preemptions += 1
        request.epoch += 1
        self.num_preemptions += 1
        self._rules.stale_output.preempted(request, by_reset)
        self.waiting.put_back(request)

    def update(self, batch: Batch, sampled: list[int] | None = None) -> Returned:
        """Take a returned batch back; `sampled` are the tokens by frame if the batch has not been settled yet.

        Raises:
            ValueError: see `Batch.settle`; or nothing says what was sampled. Nothing has been changed.
        """
        if sampled is not None:
            batch.settle(sampled)
        elif not batch.is_settled:
            raise ValueError(f"batch {batch.number} comes back, and nothing says what it sampled")
        result = Returned(batch)
        stale_output = self._rules.stale_output
        if self._rules.negative_frames and min(batch.tokens) < 0:
            raise EngineCrash(f"a batch with a frame of {min(batch.tokens)} tokens returned")
        is_async = self._settings.async_scheduling
        undo_frees = self._rules.undo.frees
        may_discard = stale_output.frames_count
        stopped_running = False
        num_lost: i64 = 0
        num_stale: i64 = 0
        for frame in batch.frames:
            request = frame.request
            num_sampled = frame.num_sampled
            rejected = frame.num_rejected
            frame.fate = fate = FRESH
            frame.num_trimmed = 0
            counts = True
            if request.epoch != frame.epoch or (may_discard and request.async_tokens_to_discard):
                fate = self._fate(request, frame.num_tokens, num_sampled, frame.epoch)
                if fate != FRESH:
                    counts = may_discard
                    num_stale += 1
                    frame.fate = fate
                    if fate == STALE_DROPPED or fate == UNKNOWN:
                        frame.num_delivered = 0
                        num_lost += num_sampled
                        continue
            else:
                request.num_in_flight_tokens -= frame.num_tokens
            computed = request.num_computed_tokens
            placeholders = request.num_output_placeholders
            if rejected and counts:
                if computed > 0:
                    computed -= rejected
                    request.num_computed_tokens = computed
                if placeholders > 0:
                    placeholders -= rejected
                    request.num_output_placeholders = placeholders
                if undo_frees and fate == FRESH:
                    self._trim(request, rejected)
            if num_sampled == 0 or (fate != FRESH and fate == DISCARDED):
                frame.num_delivered = 0
                num_lost += num_sampled
                continue
            kept = num_sampled
            confirmed = request.num_tokens + kept
            ends = confirmed >= request.end_tokens
            if ends:
                trimmed = min(confirmed - request.end_tokens, kept - 1)
                if trimmed:
                    kept -= trimmed
                    confirmed -= trimmed
                    num_lost += trimmed
                    frame.num_trimmed = trimmed
            frame.num_delivered = kept
            request.num_tokens = confirmed
            if is_async:
                if counts:
                    placeholders -= kept
                    request.num_output_placeholders = placeholders
                    if placeholders < 0:
                        raise EngineCrash(f"request {request.id}: num_output_placeholders fell below zero")
                certain = computed - placeholders
                if certain >= request.cached_end and request.status == RUNNING:
                    self.kv_cache.commit(request, certain)
            if ends:
                result.finished.append(request)
                if request.status == RUNNING:
                    stopped_running = True
                else:
                    self.waiting.remove(request)
                self._finish(request)
        result.num_sampled_tokens = batch.num_accepted_tokens + len(batch.frames) - batch.num_chunk_frames
        result.num_delivered_tokens = result.num_sampled_tokens - num_lost
        result.num_rejected_tokens = batch.num_draft_tokens - batch.num_accepted_tokens
        if batch.num_chunk_frames:  # Where a preset has lost count of its tokens, a chunk may have drafts.
            result.num_rejected_tokens = sum([frame.num_rejected for frame in batch.frames])
        result.num_stale_frames = num_stale
        if stopped_running:
            self.running = [request for request in self.running if request.status == RUNNING]
        if self._draft_length is not None:
            self._draft_length.observe(result)
        if not is_async:
            self._propose(batch)
        pool = self.pool
        result.block_operations = self.kv_cache.take_operations()
        result.held_blocks, result.cached_blocks, result.extra_refs = pool.num_held, pool.num_cached, pool.extra_refs
        return result

    def _fate(self, request: Request, num_tokens: int, num_sampled: int, epoch: int) -> int:
        """Fate of a frame whose request has been preempted, has ended, or owes something to be discarded."""
        if request.status == FINISHED:
            return UNKNOWN
        request.num_in_flight_tokens -= num_tokens
        return self._rules.stale_output.returned(request, num_tokens, num_sampled, request.num_preemptions != epoch)

    def _trim(self, request: Request, num_rejected: int) -> None:
        """Undo a rejection in the block table as well."""
        kept = self._rules.undo.kept_tokens(request, num_rejected, self._settings.num_lookahead_tokens)
        self.kv_cache.trim(request, kept)

    def _propose(self, batch: Batch) -> None:
        """Without async scheduling the drafts for the next frame are known only now."""
        proposed = batch.proposed or [batch.num_spec_tokens] * len(batch.frames)
        if len(proposed) != len(batch.frames):
            raise ValueError(f"{len(proposed)} numbers of proposed drafts for {len(batch.frames)} frames")
        for frame, num_drafts in zip(batch.frames, proposed):
            request = frame.request
            if frame.samples and request.status != FINISHED:
                request.num_drafts = 0 if request.is_prefill_chunk else num_drafts

    def recycle(self, batch: Batch) -> None:
        """Nobody looks any more at a batch that has been taken back: it gives its frames away, to be used again."""
        self._spare_frames.extend(batch.frames)
        batch.frames = []

    def _finish(self, request: Request) -> None:
        if self._rules.cache_at_finish and request.status == RUNNING:
            certain = request.num_computed_tokens - request.num_in_flight_tokens
            self.kv_cache.commit_all(request, min(certain, request.num_tokens - 1))
        request.become(FINISHED)
        request.epoch += 1
        self.kv_cache.free(request)
        del self.requests[request.id]
        self._unreported_finish = True

    def abort(self, id: str) -> Interruption:
        """End a request from outside, wherever it stands; unknown and finished ones are ignored (`done` is False)."""
        request = self.requests.get(id)
        if request is None:
            return self._interruption("abort", [], False)
        if request.status == RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._finish(request)
        return self._interruption("abort", [request], True)

    def reset_prefix_cache(self, reset_running_requests: bool) -> Interruption:
        """Empty the prefix cache; `done` is False if blocks are held. Running requests are preempted first if asked."""
        preempted: list[Request] = []
        if reset_running_requests:
            while self.running:
                request = self.running.pop()
                self._preempt(request, True)
                preempted.append(request)
        done = self.kv_cache.reset()
        return self._interruption("reset_prefix_cache", preempted, done)

    def _interruption(self, kind: str, requests: list[Request], done: bool) -> Interruption:
        pool = self.pool
        told = Interruption(kind, requests, self.kv_cache.take_operations(), done)
        told.held_blocks, told.cached_blocks, told.extra_refs = pool.num_held, pool.num_cached, pool.extra_refs
        return told


def _priority_and_arrival(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival
