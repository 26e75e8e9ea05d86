"""What the scheduler is set to: vLLM's settings, and the named rules in which versions differ.

Data only. Where a value is not ours to choose it is vLLM's default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.core.block_pool import Freeing
    from sim.core.request import Request
    from sim.records import Batch, Returned

    Victim = Callable[[list[Request]], Request]
    """Axis: whom to preempt when blocks are lacking."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One engine, as the scheduler needs to know it. Sizes in tokens, blocks or requests."""

    num_gpu_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_num_scheduled_tokens: int | None = None
    """Token budget of a step; None: max_num_batched_tokens, which is the input budget."""
    max_model_len: int = 131072
    enable_prefix_caching: bool = True
    watermark: float = 0.0
    priority: bool = False
    """Scheduling policy `priority` instead of `fcfs`."""
    long_prefill_token_threshold: int = 0
    async_scheduling: bool = True
    num_speculative_tokens: int = 0
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()
    """Rows (first, last, K): K by number of requests in the batch. Empty: K is fixed."""
    num_lookahead_tokens: int = 0
    """Slots beyond its own tokens that each frame is given for the drafter."""
    draft_slots: int = 0
    """Input tokens that the drafter adds for each request, taken off the input budget."""
    drop_last_hit_block: bool = False
    hit_margin_tokens: int = 0
    """Tokens at the end of a prompt that may not be hit, beside the last one."""


class StaleOutput(Protocol):
    """Axis: what becomes of output that was in flight when its request was preempted."""

    frames_count: bool
    """Whether a stale frame that is delivered still rolls back and drains the counters."""

    def preempted(self, request: Request, by_reset: bool) -> None:
        """The request has just been preempted; its counters still stand as before, but for num_computed_tokens = 0."""

    def must_wait(self, request: Request) -> bool:
        """Whether a preempted request may not be admitted yet."""

    def returned(self, request: Request, num_tokens: int, num_sampled: int, stale: bool) -> int:
        """Fate of a returned frame, for requests that were preempted since, or owe something to be discarded."""


class Padding(Protocol):
    """Axis: tokens of an admitted frame that has one token to compute: 1, or 1 + K, or 0 to stop admitting."""

    def __call__(
        self, hit: int, num_speculative_tokens: int, budget: int, max_model_len: int, running_frames: bool
    ) -> int:
        """`hit`: tokens found in the prefix cache; `running_frames`: a running request is scheduled in this step."""


class Undo(Protocol):
    """Axis: what happens to a request's blocks when drafts are rejected."""

    frees: bool
    """Whether anything may be freed at all."""
    compacts: bool
    """Whether accepted rows of a tree are moved to the front."""

    def kept_tokens(self, request: Request, num_rejected: int, num_lookahead_tokens: int) -> int:
        """Tokens that keep their blocks; the request's counters have been rolled back."""


class Reservation(Protocol):
    """Axis: how many slots a frame is given."""

    exact: bool
    """The frame and its lookahead, no more: then nobody needs to ask."""

    def slots(self, request: Request, computed: int, num_new_tokens: int, lookahead: int, num_drafts: int) -> int:
        """End of the slots for a frame of num_new_tokens behind `computed`; `num_drafts` is the configured K."""


class DraftLength(Protocol):
    """Axis: K where it is neither fixed nor a table."""

    def length(self, batch: Batch) -> int:
        """K for the frames after this batch."""

    def observe(self, returned: Returned) -> None:
        """A batch has come back."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Where released versions differ, one axis a field."""

    stale_output: StaleOutput
    freeing: Freeing
    padding: Padding
    padding_survives_threshold: bool
    """A padded frame that the long-prefill threshold cuts keeps its K drafts; else the engine crashes (0.30 on)."""
    lone_prefill_exempt: bool
    """The long-prefill threshold does not hold for a request that is alone (0.32)."""
    draft_slots_per_request: bool
    """Draft slots are taken off the input budget by scheduled request (0.28 on). Before, the engine's configuration
    took them off max_num_scheduled_tokens once, times max_num_seqs."""
    negative_frames: bool
    """A frame whose token count comes out below zero is scheduled all the same (before 0.28), else it is skipped."""
    skipped_victim_moves_index: bool
    """A victim in front of the request in hand moves it forward even if the step had skipped the victim (0.28 on)."""
    undo: Undo
    reservation: Reservation
    victim: Victim
    cache_outputs: bool
    """Blocks that hold output join the prefix cache as they fill."""
    cache_at_finish: bool
    """What is computed joins the prefix cache when the request ends, all but its last token."""
    reports_reset_preemptions: bool
    """`preempted_req_ids` names those that a reset preempted since the last schedule."""
