"""A request's counters and its legal transitions.

Knows nothing of pools, schedulers or time. `arrival` is only compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from sim.core.block_hashes import BlockHashes

if TYPE_CHECKING:
    from mypy_extensions import i64  # an int that a compiled core keeps as it is

WAITING: Final = 0
RUNNING: Final = 1
PREEMPTED: Final = 2
FINISHED: Final = 3
STATUS_NAMES: Final = ("waiting", "running", "preempted", "finished")

_LEGAL: Final = (
    (False, True, False, True),  # waiting: admitted, or aborted
    (False, False, True, True),  # running: preempted, stopped or aborted
    (False, True, False, True),  # preempted: admitted again, stopped by output that was in flight, or aborted
    (False, False, False, False),  # finished: for good
)


class IllegalTransition(Exception):
    """A request was asked for a transition that its status does not have. Nothing has been changed."""


class Content(Protocol):
    """What a request's tokens are, as far as the prefix cache has to know."""

    def extend_hashes(self, hashes: BlockHashes, count: int) -> None:
        """Append hashes of full blocks, in order, until there are `count` or more.

        Two blocks have the same hash if and only if they and all blocks before them hold the same tokens
        (up to collisions of their hashes).
        """


class Request:
    """One request as the scheduler sees it. Counters are vLLM's, in tokens."""

    __slots__ = (
        "arrival",
        "async_tokens_to_discard",
        "block_hashes",
        "block_table",
        "cached_end",
        "content",
        "drop_stale_output",
        "end_tokens",
        "epoch",
        "id",
        "index",
        "is_prefill_chunk",
        "max_tokens",
        "most_tokens",
        "num_cached_blocks",
        "num_computed_tokens",
        "num_drafts",
        "num_in_flight_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_reserved_tokens",
        "num_slots",
        "num_stale_output_tokens",
        "num_tokens",
        "priority",
        "status",
    )

    def __init__(
        self,
        id: str,
        index: int,
        num_prompt_tokens: int,
        max_tokens: int,
        content: Content,
        *,
        arrival: int = 0,
        priority: int = 0,
        num_output_limit: int | None = None,
    ) -> None:
        if num_prompt_tokens < 1 or max_tokens < 1:
            raise ValueError(f"request {id}: a prompt of {num_prompt_tokens} and max_tokens of {max_tokens}; both >= 1")
        self.id = id
        self.index: i64 = index
        self.arrival = arrival
        self.priority = priority
        self.content = content
        self.num_prompt_tokens: i64 = num_prompt_tokens
        self.max_tokens: i64 = max_tokens
        self.most_tokens: i64 = num_prompt_tokens + max_tokens
        """Prompt and max_tokens."""
        self.end_tokens: i64 = num_prompt_tokens + min(
            max_tokens, max_tokens if num_output_limit is None else num_output_limit
        )
        """Tokens with which the request stops: `most_tokens`, or less where an end token or the model's length comes
        first."""
        self.status: i64 = WAITING
        self.num_tokens: i64 = num_prompt_tokens
        """Confirmed tokens: prompt and delivered output."""
        self.num_computed_tokens: i64 = 0
        self.num_output_placeholders: i64 = 0
        self.num_drafts: i64 = 0
        """Drafts proposed for the next frame."""
        self.num_in_flight_tokens: i64 = 0
        self.num_stale_output_tokens: i64 = 0
        """Tokens of frames in flight whose request has been preempted since (0.27 on)."""
        self.drop_stale_output = False
        self.async_tokens_to_discard: i64 = 0
        """0.22 to 0.26: what a reset of running requests marked for discarding."""
        self.is_prefill_chunk = False
        """After its last schedule the request was still short of its confirmed tokens."""
        self.num_preemptions: i64 = 0
        self.epoch: i64 = 0
        """num_preemptions, and one more once it has ended: frames of an earlier epoch are stale."""
        self.block_table: list[int] = []
        self.block_hashes = BlockHashes()
        self.num_reserved_tokens: i64 = 0
        """End of the slots that were reserved last; kept where the reservation or the undoing wants to know."""
        self.num_cached_blocks: i64 = 0
        """Leading blocks of the table that have joined the prefix cache since admission."""
        self.cached_end: i64 = 0
        """Tokens with which the next block of the table is full and may join."""
        self.num_slots: i64 = 0
        """Of the blocks in the table."""

    @property
    def num_output_tokens(self) -> int:
        """Delivered output."""
        return self.num_tokens - self.num_prompt_tokens

    def become(self, status: int) -> None:
        """Change the status.

        Raises:
            IllegalTransition: the transition is not in the table; nothing has been changed.
        """
        if not _LEGAL[self.status][status]:
            raise IllegalTransition(f"request {self.id}: {STATUS_NAMES[self.status]} to {STATUS_NAMES[status]}")
        self.status = status

    def hashes(self, count: int) -> BlockHashes:
        """Hashes of at least the first `count` full blocks. The request must have that many full blocks of tokens."""
        hashes = self.block_hashes
        if hashes.num_blocks < count:
            self.content.extend_hashes(hashes, count)
        return hashes

    def __repr__(self) -> str:
        return (
            f"Request({self.id!r}, {STATUS_NAMES[self.status]}, num_tokens={self.num_tokens}, "
            f"num_computed_tokens={self.num_computed_tokens}, placeholders={self.num_output_placeholders})"
        )
