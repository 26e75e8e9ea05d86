"""The typed facts that the core hands out, and nothing else.

A record stands for one batch or one event and holds parallel columns: entry i of every column belongs to frame i (one
request in one step). A record is valid during the call that hands it over; who wants to keep something copies it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from sim.core.request import Request

TAKEN: Final = 0
"""Block operation: blocks left the free queue for their owner, and lost their hash if they had one."""
HIT: Final = 1
"""Block operation: cached blocks were found and are now (also) the owner's."""
FREED: Final = 2
"""Block operation: the owner let go of blocks, in the order of the walk."""
EVICTED: Final = 3
"""Block operation: blocks lost their hash; the owner is who takes them, or -1 at a reset of the prefix cache."""
HASHED: Final = 4
"""Block operation: full blocks of the owner joined the prefix cache."""

BlockOperation = tuple[int, int, list[int]]
"""(kind, index of the owning request, block ids in order)"""

FRESH: Final = 0
"""Fate of a returned frame: its request is as the frame left it."""
STALE_DELIVERED: Final = 1
"""Fate: the request was preempted while the frame was in flight; its tokens are delivered all the same."""
STALE_DROPPED: Final = 2
"""Fate: the request was preempted while the frame was in flight; its tokens are thrown away."""
UNKNOWN: Final = 3
"""Fate: the request was finished or aborted while the frame was in flight; the frame is ignored."""
DISCARDED: Final = 4
"""Fate: rolled back like a fresh frame, then its tokens are thrown away (`async_tokens_to_discard`, 0.22 to 0.26)."""
FATES: Final = ("fresh", "stale_delivered", "stale_dropped", "unknown", "discarded")


class Batch:
    """What one schedule decided: the frames of a step, in batch order, and what had to be done for them.

    Frames of running requests come first, then those admitted in this step (index >= num_running_frames).
    """

    __slots__ = (
        "accepted",
        "block_operations",
        "cached_blocks",
        "computed",
        "drafts",
        "epochs",
        "extra_refs",
        "held_blocks",
        "hits",
        "lookahead",
        "max_model_len",
        "num_draft_tokens",
        "num_drafting_frames",
        "num_running_frames",
        "num_spec_tokens",
        "number",
        "preempted",
        "proposed",
        "requests",
        "reserved",
        "resumed",
        "samples",
        "tokens",
        "total_tokens",
    )

    def __init__(self, number: int, lookahead: int, max_model_len: int) -> None:
        self.number = number
        """Number of the schedule that made it, from 0."""
        self.requests: list[Request] = []
        self.tokens: list[int] = []
        """Tokens of the frame, drafts included."""
        self.drafts: list[int] = []
        """Of them drafts."""
        self.computed: list[int] = []
        """num_computed_tokens before this schedule; for an admitted frame what it hit in the prefix cache."""
        self.samples: list[bool] = []
        """Whether the frame yields tokens; otherwise it is a chunk of prefill or of a recomputation."""
        self.epochs: list[int] = []
        """num_preemptions of the request at this schedule: the frame is stale once the request has more."""
        self.num_running_frames = 0
        self.total_tokens = 0
        self.num_draft_tokens = 0
        """Drafts of all frames."""
        self.num_drafting_frames = 0
        """Frames that have any."""
        self.num_spec_tokens = 0
        """Drafts that the step proposes for each of its requests' next frame."""
        self.lookahead = lookahead
        """num_lookahead_tokens of this step: slots that a frame was given beyond its own tokens."""
        self.max_model_len = max_model_len
        self.reserved: list[int] = []
        """End of the slots each frame was given, where it is not min(computed + tokens + lookahead, max_model_len)."""
        self.preempted: list[Request] = []
        """Preempted by this schedule, in order."""
        self.resumed: list[bool] = []
        """Of the admitted frames: whether the request had been preempted before. Entry 0 is the first admission."""
        self.hits: int = 0
        """Tokens found in the prefix cache by all admitted frames together."""
        self.block_operations: list[BlockOperation] = []
        self.held_blocks = 0
        """What these operations have led to: blocks that somebody refers to."""
        self.cached_blocks = 0
        """Free blocks that have a hash."""
        self.extra_refs = 0
        """References beyond the first, over all held blocks."""
        self.proposed: list[int] = []
        """Drafts that the drafter proposes for each frame's request, where that may be fewer than `num_spec_tokens`;
        else empty. Settled with `accepted`."""
        self.accepted: list[int] = []
        """Accepted drafts by frame; settled when the device launches the batch, empty until then."""

    def __len__(self) -> int:
        return len(self.requests)


class Returned:
    """What one update did: the fate of each frame of the batch that came back."""

    __slots__ = (
        "batch",
        "block_operations",
        "cached_blocks",
        "delivered",
        "extra_refs",
        "fates",
        "finished",
        "held_blocks",
        "num_delivered_tokens",
        "num_rejected_tokens",
        "rejected",
        "sampled",
        "trimmed",
    )

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.sampled: list[int] = []
        """Tokens that the device sampled for the frame: accepted drafts and one more, 0 for a chunk."""
        self.delivered: list[int] = []
        """Of them tokens that were added to the request."""
        self.trimmed: list[int] = []
        """Of them tokens beyond the end of the request."""
        self.rejected: list[int] = []
        """Drafts of the frame that were not accepted."""
        self.num_delivered_tokens = 0
        """`delivered`, added up."""
        self.num_rejected_tokens = 0
        """`rejected`, added up."""
        self.fates: list[int] = []
        self.finished: list[Request] = []
        self.block_operations: list[BlockOperation] = []
        self.held_blocks = 0
        self.cached_blocks = 0
        self.extra_refs = 0
        """As a batch has them."""


class Interruption:
    """What an event from outside did: an abort, or a reset of the prefix cache."""

    __slots__ = ("block_operations", "cached_blocks", "done", "extra_refs", "held_blocks", "kind", "requests")

    def __init__(self, kind: str, requests: list[Request], block_operations: list[BlockOperation], done: bool) -> None:
        self.kind = kind
        """`abort` or `reset_prefix_cache`."""
        self.requests = requests
        """Aborted, or preempted by the reset (last of the running list first)."""
        self.block_operations = block_operations
        self.done = done
        """False if nothing was to be aborted, or the cache could not be reset since blocks were held."""
        self.held_blocks = 0
        self.cached_blocks = 0
        self.extra_refs = 0
        """As a batch has them."""


Record = Batch | Returned | Interruption
"""What tells of block operations."""


class Observer(Protocol):
    """What an observer may implement. Times are simulated, in integer nanoseconds."""

    def arrived(self, now: int, request: Request) -> None:
        """A request reaches the scheduler."""

    def scheduled(self, now: int, batch: Batch) -> None:
        """A schedule has ended."""

    def step_ended(self, now: int, batch: Batch) -> None:
        """The device has ended a step; `batch.accepted` is settled."""

    def updated(self, now: int, returned: Returned) -> None:
        """An update has ended."""

    def interrupted(self, now: int, interruption: Interruption) -> None:
        """An abort or a reset has been carried out."""

    def crashed(self, now: int) -> None:
        """The engine fell in the middle of a schedule or an update, of which nothing is told; `closed` follows."""

    def closed(self, now: int) -> None:
        """The run is over."""
