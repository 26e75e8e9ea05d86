"""The device: where each request truly stands, how many drafts a frame gets accepted, and what a step costs.

The scheduler's position of a request is optimistic; the device's is true, since the worker takes rejected drafts off
before it launches the next frame. Both sampling and cost are settled when a batch is launched. Knows requests, batches
and models; no clock and no scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sim.core.crash import EngineCrash
from sim.core.request import RUNNING, Request
from sim.drafter_pool import DrafterPool
from sim.models.timing import StepCost, StepShape
from sim.records import Batch
from workloads.streams import uniforms

if TYPE_CHECKING:
    import numpy as np
    from mypy_extensions import i64
    from numpy.typing import NDArray

    from sim.core.request import Content
    from sim.models.acceptance import AcceptanceModel
    from workloads.spec import RequestSpec

_RUN_CHUNK = 256
_BEYOND = 16
"""Output positions behind the end that runs are drawn for as well: frames in flight may verify drafts there."""
_BULK = 64
"""Requests whose first runs are drawn at once, where the model can: they arrive one after the other."""


class StepTimer(Protocol):
    """What a step costs."""

    def step_cost(self, step: StepShape) -> StepCost:
        """Integer nanoseconds, by part."""


class SimulatedRequest(Request):
    """A request with its place on the device."""

    __slots__ = ("device_position", "drafted", "runs", "spec", "undrafted")

    def __init__(self, spec: RequestSpec, content: Content) -> None:
        super().__init__(
            f"r{spec.index}",
            spec.index,
            spec.num_prompt_tokens,
            spec.max_tokens,
            content,
            arrival=spec.arrival_ns,
            priority=spec.priority,
        )
        self.spec = spec
        self.device_position: i64 = 0
        """Tokens whose KV is right in device memory once all launched steps have ended."""
        self.runs: list[int] = []
        """By output position: drafts that a verification starting there gets accepted."""
        self.drafted: list[bool] = []
        """By output position: whether the drafter has anything to propose there."""
        self.undrafted = False
        """The last round of drafting had no room for it, so that its next frame verifies nothing worth accepting."""


class TokenTree:
    """Drafts as a tree: `widths` nodes a level; the rows of a frame are the last confirmed token, then level by level.

    Which node of a level is the accepted one is drawn evenly, from a stream of its own.
    """

    __slots__ = ("_first", "_seed", "widths")

    def __init__(self, seed: int, widths: Sequence[int]) -> None:
        self.widths = tuple(widths)
        self._seed = seed
        self._first = [1]
        for width in self.widths:
            self._first.append(self._first[-1] + width)

    @property
    def num_nodes(self) -> int:
        """Drafts of a frame."""
        return sum(self.widths)

    @property
    def depth(self) -> int:
        """Most drafts that can be accepted."""
        return len(self.widths)

    def moved_rows(self, request: int, output: int, accepted: int) -> int:
        """Accepted rows that do not stand at the front already, for the verification at this output position."""
        if accepted == 0:
            return 0
        draws = uniforms(self._seed, "tree", request, output, accepted)
        moved = 0
        for level in range(accepted):
            row = self._first[level] + int(draws[level] * self.widths[level])
            moved += row != level + 1
        return moved


class Device:
    """Plays the worker and its GPU."""

    __slots__ = (
        "_by_rounds",
        "_drafts_at",
        "_first_row",
        "_row_width",
        "_rows",
        "_rows_of",
        "acceptance",
        "moved_rows",
        "pool",
        "speculates",
        "timer",
        "tree",
    )

    def __init__(
        self,
        timer: StepTimer,
        acceptance: AcceptanceModel | None,
        pool: DrafterPool | None = None,
        tree: TokenTree | None = None,
        drafts_at: Callable[[int, int, int], NDArray[np.bool_]] | None = None,
    ) -> None:
        """`acceptance`: None without speculation; `pool`: the drafter's own, if it has one.

        `drafts_at(request, first, count)`: whether the drafter proposes anything at these output positions, where a
        proposal may be missing (n-grams, whose drafts the scheduler is told of after the step).
        """
        self.timer = timer
        self.acceptance = acceptance
        self.speculates = acceptance is not None
        self.pool = pool
        self.tree = tree
        self.moved_rows = 0
        """Rows of KV moved by compaction, in all."""
        self._by_rounds = pool is not None or tree is not None
        self._drafts_at = drafts_at
        self._rows_of: Callable[[int, int, int], NDArray[np.integer[Any]]] | None = getattr(acceptance, "rows", None)
        """`BulkAcceptance.rows`, where the model has it."""
        self._rows: bytes | NDArray[np.integer[Any]] = b""
        """First runs of `_BULK` requests from number `_first_row` on, `_row_width` of each."""
        self._row_width = 0
        self._first_row = 0

    def launch(self, batch: Batch, now: int) -> tuple[StepShape, StepCost]:
        """Settle a batch's accepted drafts and its cost; the requests' true positions move on."""
        shape = StepShape()
        decode_kv: i64 = 0
        longest: i64 = 0
        verify_pairs: i64 = 0
        prefills: i64 = 0
        prefill_tokens: i64 = 0
        prefill_kv: i64 = 0
        longest_prefill: i64 = 0
        pairs: i64 = 0
        sampled_rows: i64 = 0
        """Of frames that prefill and sample."""
        num_accepted: i64 = 0
        by_rounds = self._by_rounds
        frames = batch.frames
        for frame in frames[batch.num_running_frames :]:
            request = frame.request
            assert isinstance(request, SimulatedRequest)
            request.device_position = frame.num_computed_tokens
        for frame in frames:
            request = frame.request
            assert isinstance(request, SimulatedRequest)
            num_tokens = frame.num_tokens
            num_drafts = frame.num_drafts
            samples = frame.samples
            position = request.device_position
            end = position + num_tokens
            if samples and num_tokens == 1 + num_drafts:
                decode_kv += end
                verify_pairs += num_tokens * end
                if end > longest:
                    longest = end
            else:
                if samples:
                    sampled_rows += 1 + num_drafts
                    if num_drafts and num_drafts >= num_tokens:
                        raise EngineCrash(
                            f"request {request.id}: a frame of {num_tokens} tokens with {num_drafts} drafts"
                        )
                prefills += 1
                prefill_tokens += num_tokens
                prefill_kv += end
                pairs += num_tokens * position + (num_tokens * (num_tokens + 1)) // 2
                if end > longest_prefill:
                    longest_prefill = end
            if num_drafts and samples:
                output = end - num_drafts - request.num_prompt_tokens
                runs = request.runs
                if output >= len(runs):
                    self._extend_runs(request, output)
                accepted: i64 = runs[output]
                if accepted > num_drafts:
                    accepted = num_drafts
                if by_rounds:
                    accepted = self._accepted(request, output, accepted, shape)
                frame.num_sampled = accepted + 1
                num_accepted += accepted
                rejected = num_drafts - accepted
                frame.num_rejected = rejected
                end -= rejected
            else:
                frame.num_sampled = 1 if samples else 0
                frame.num_rejected = 0
            request.device_position = end
        batch.num_accepted_tokens = num_accepted
        batch.is_settled = True
        number = len(frames)
        decode_tokens = batch.total_tokens - prefill_tokens
        shape.num_reqs = number
        shape.num_tokens = batch.total_tokens
        shape.num_sampled_tokens = decode_tokens + sampled_rows  # a decoding frame samples in all its rows
        shape.decode_reqs = number - prefills
        shape.decode_tokens = decode_tokens
        shape.decode_kv_tokens = decode_kv
        shape.max_decode_kv_tokens = longest
        shape.decode_qk_pairs = verify_pairs
        shape.max_prefill_kv_tokens = longest_prefill
        shape.prefill_tokens = prefill_tokens
        shape.prefill_kv_tokens = prefill_kv
        shape.prefill_qk_pairs = pairs
        shape.num_prefills = prefills
        shape.num_draft_reqs = number - batch.num_chunk_frames if self.speculates else 0
        shape.num_spec_tokens = batch.num_spec_tokens if self.speculates else 0
        if self.tree is not None:
            shape.num_spec_tokens = self.tree.depth
        if self._drafts_at is not None:
            self._propose(batch, shape)
        if self.pool is not None:
            self._draft_in_own_pool(self.pool, batch, shape, now)
        return shape, self.timer.step_cost(shape)

    def _accepted(self, request: SimulatedRequest, output: int, run: int, shape: StepShape) -> int:
        """Accepted drafts where the round of drafting may have failed, or the drafts are a tree."""
        if request.undrafted:
            return 0
        if self.tree is not None:
            run = min(run, self.tree.depth)
            moved = self.tree.moved_rows(request.index, output, run)
            shape.moved_rows += moved
            self.moved_rows += moved
        return run

    def _draft_in_own_pool(self, pool: DrafterPool, batch: Batch, shape: StepShape, now: int) -> None:
        """Give each request that is drafted for its blocks of the drafter's pool, as far as they go."""
        pool.pass_time(now)
        drafted = 0
        for frame in batch.frames:
            request = frame.request
            assert isinstance(request, SimulatedRequest)
            if not frame.samples or request.status != RUNNING or request.num_preemptions != frame.epoch:
                continue
            context = request.device_position
            request.undrafted = not pool.grow(request.index, context, batch.num_spec_tokens)
            if request.undrafted:
                continue
            drafted += 1
            if pool.freed_after_verification:
                shape.draft_context_tokens += context
                shape.draft_context_pairs += context * (context + 1) // 2
        shape.num_draft_reqs = drafted

    def _propose(self, batch: Batch, shape: StepShape) -> None:
        """Say for whom the drafter finds nothing."""
        assert self._drafts_at is not None
        proposed = batch.proposed
        for frame in batch.frames:
            request = frame.request
            assert isinstance(request, SimulatedRequest)
            found = False
            if frame.samples:
                output = request.device_position + 1 - request.num_prompt_tokens
                known = len(request.drafted)
                if output >= known:
                    count = max(output + 1 - known, _RUN_CHUNK)
                    request.drafted += self._drafts_at(request.index, known, count).tolist()
                found = request.drafted[output]
            proposed.append(batch.num_spec_tokens if found else 0)
        shape.num_draft_reqs = sum(map(bool, proposed))

    def _extend_runs(self, request: SimulatedRequest, output: int) -> None:
        assert self.acceptance is not None
        runs = request.runs
        first = len(runs)
        ahead: int = max(request.max_tokens - first, 0) + _BEYOND
        count: int = max(output + 1 - first, min(ahead, _RUN_CHUNK))
        if first == 0 and self._rows_of is not None and count <= _RUN_CHUNK:
            row = request.index - self._first_row
            if not 0 <= row < _BULK or self._row_width < count:
                row = request.index % _BULK
                self._first_row = request.index - row
                self._row_width = -(-count // _BEYOND) * _BEYOND
                rows = self._rows_of(self._first_row, _BULK, self._row_width)
                # A list is made of bytes in a fraction of what it takes from numbers of 64 bits.
                self._rows = rows.astype("uint8", copy=False).tobytes() if rows.max() < 256 else rows.ravel()
            start = row * self._row_width
            drawn = self._rows[start : start + count]
            runs.extend(drawn if isinstance(drawn, bytes) else drawn.tolist())
            return
        runs.extend(self.acceptance.runs(request.index, first, count).tolist())
