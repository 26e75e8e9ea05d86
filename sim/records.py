"""The typed facts that the core hands out, and nothing else.

A record stands for one batch or one event; a batch has a frame for each request in it. A record is valid during the
call that hands it over, and its frames are used again: who wants to keep something copies it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from mypy_extensions import i64

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


class Frame:
    """One request in one step: what its schedule decided, and later what became of it.

    It is used again and again. Until something is settled it has what was settled when it was used last.
    """

    __slots__ = (
        "epoch",
        "fate",
        "num_computed_tokens",
        "num_delivered",
        "num_drafts",
        "num_rejected",
        "num_sampled",
        "num_tokens",
        "num_trimmed",
        "request",
        "samples",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.num_tokens: i64 = 0
        """Tokens of the frame, drafts included."""
        self.num_drafts: i64 = 0
        """Of them drafts."""
        self.num_computed_tokens: i64 = 0
        """The request's before this schedule; for an admitted frame what it hit in the prefix cache."""
        self.epoch: i64 = 0
        """num_preemptions of the request at this schedule: the frame is stale once the request has more."""
        self.samples = False
        """Whether the frame yields tokens; otherwise it is a chunk of prefill or of a recomputation."""
        self.num_sampled: i64 = 0
        """Tokens that the device sampled: accepted drafts and one more, 0 for a chunk. Settled when it launches."""
        self.num_rejected: i64 = 0
        """Drafts that were not accepted, settled with them."""
        self.num_delivered: i64 = 0
        """Of the sampled tokens those that were added to the request: known, as what follows, once the batch has been
        taken back."""
        self.num_trimmed: i64 = 0
        """Of them those beyond the end of the request."""
        self.fate: i64 = FRESH

    @property
    def num_accepted(self) -> int:
        """Drafts that were accepted."""
        return self.num_sampled - 1 if self.samples else 0


class Batch:
    """What one schedule decided: the frames of a step, in batch order, and what had to be done for them.

    Frames of running requests come first, then those admitted in this step (index >= num_running_frames). `requests`,
    `tokens` and so on are the frames' attributes as columns, put together when they are asked for.
    """

    __slots__ = (
        "block_operations",
        "cached_blocks",
        "extra_refs",
        "frames",
        "held_blocks",
        "hits",
        "is_settled",
        "lookahead",
        "max_model_len",
        "num_accepted_tokens",
        "num_chunk_frames",
        "num_draft_tokens",
        "num_drafting_frames",
        "num_running_frames",
        "num_spec_tokens",
        "number",
        "preempted",
        "proposed",
        "reserved",
        "resumed",
        "total_tokens",
    )

    def __init__(self, number: int, lookahead: int, max_model_len: int) -> None:
        self.number = number
        """Number of the schedule that made it, from 0."""
        self.frames: list[Frame] = []
        self.num_running_frames = 0
        self.total_tokens = 0
        self.num_draft_tokens = 0
        """Drafts of all frames."""
        self.num_drafting_frames = 0
        """Frames that have any."""
        self.num_chunk_frames = 0
        """Frames that do not sample."""
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
        self.is_settled = False
        """The device has launched it, so that it is known what its frames sample and which drafts they get accepted."""
        self.num_accepted_tokens = 0
        """`accepted`, added up; settled with it."""

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def requests(self) -> list[Request]:
        return [frame.request for frame in self.frames]

    @property
    def tokens(self) -> list[int]:
        return [frame.num_tokens for frame in self.frames]

    @property
    def drafts(self) -> list[int]:
        return [frame.num_drafts for frame in self.frames]

    @property
    def computed(self) -> list[int]:
        return [frame.num_computed_tokens for frame in self.frames]

    @property
    def samples(self) -> list[bool]:
        return [frame.samples for frame in self.frames]

    @property
    def epochs(self) -> list[int]:
        return [frame.epoch for frame in self.frames]

    @property
    def accepted(self) -> list[int]:
        """Accepted drafts by frame; empty until the batch is settled."""
        return [frame.num_accepted for frame in self.frames] if self.is_settled else []

    def settle(self, sampled: list[int]) -> None:
        """What was sampled, by frame: accepted drafts + 1, or 0 for a chunk. For who is no `sim.device`.

        Raises:
            ValueError: as many numbers as frames are needed, each from 1 to drafts + 1, or 0 for a chunk. Nothing has
                been changed.
        """
        if len(sampled) != len(self.frames):
            raise ValueError(f"{len(sampled)} numbers of sampled tokens for {len(self.frames)} frames")
        for frame, num_sampled in zip(self.frames, sampled):
            if (num_sampled < 1 or num_sampled > frame.num_drafts + 1) if frame.samples else num_sampled != 0:
                raise ValueError(f"{num_sampled} sampled tokens for a frame with {frame.num_drafts} drafts")
        total: i64 = 0
        for frame, num_sampled in zip(self.frames, sampled):
            frame.num_sampled = num_sampled
            frame.num_rejected = 0
            if frame.samples:
                frame.num_rejected = frame.num_drafts + 1 - num_sampled
                total += num_sampled - 1
        self.num_accepted_tokens = total
        self.is_settled = True


class Returned:
    """What one update did: the fate of each frame of the batch that came back, in its frames."""

    __slots__ = (
        "batch",
        "block_operations",
        "cached_blocks",
        "extra_refs",
        "finished",
        "held_blocks",
        "num_delivered_tokens",
        "num_rejected_tokens",
        "num_sampled_tokens",
        "num_stale_frames",
    )

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.num_sampled_tokens = 0
        """`sampled`, added up."""
        self.num_delivered_tokens = 0
        """`delivered`, added up."""
        self.num_rejected_tokens = 0
        """`rejected`, added up."""
        self.num_stale_frames = 0
        """Frames whose fate is another than `FRESH`."""
        self.finished: list[Request] = []
        self.block_operations: list[BlockOperation] = []
        self.held_blocks = 0
        self.cached_blocks = 0
        self.extra_refs = 0
        """As a batch has them."""

    @property
    def sampled(self) -> list[int]:
        return [frame.num_sampled for frame in self.batch.frames]

    @property
    def delivered(self) -> list[int]:
        return [frame.num_delivered for frame in self.batch.frames]

    @property
    def trimmed(self) -> list[int]:
        return [frame.num_trimmed for frame in self.batch.frames]

    @property
    def rejected(self) -> list[int]:
        return [frame.num_rejected for frame in self.batch.frames]

    @property
    def fates(self) -> list[int]:
        return [frame.fate for frame in self.batch.frames]


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

    def step_started(self, now: int, batch: Batch, shape: object, cost: object) -> None:
        """The device begins a step, which is settled: `sim.models.timing` has the shape and the cost."""

    def step_ended(self, now: int, batch: Batch) -> None:
        """The device has ended a step."""

    def updated(self, now: int, returned: Returned) -> None:
        """An update has ended."""

    def interrupted(self, now: int, interruption: Interruption) -> None:
        """An abort or a reset has been carried out."""

    def crashed(self, now: int) -> None:
        """The engine fell in the middle of a schedule or an update, of which nothing is told; `closed` follows."""

    def closed(self, now: int) -> None:
        """The run is over."""
