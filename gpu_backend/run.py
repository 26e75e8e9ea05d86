"""Greedy speculative decoding for real: the core's scheduler drives a small decoder on a paged cache.

A `Scene` is what happens, a `Worker` is the device (it has the tokens, the true positions, the cache and the drafter),
`decode` is the loop between them. Time is counted in turns: a turn is one iteration of the engine's step loop. What
came out has to equal `Decoder.plain_decode`, whatever was preempted, hit, rejected or reset on the way.

Steps run in the order of their schedules and as late as they can: with async scheduling the next step has been
scheduled, and blocks may have changed hands, before a step runs. So block tables are copied when they are handed out.
Knows the core and the decoder; policies come in with the scene's rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpu_backend import paged_cache
from gpu_backend.attention import RaggedBatch, paged_attention
from gpu_backend.decoder import Decoder
from gpu_backend.paged_cache import PagedCache
from gpu_backend.positions import DevicePositions
from sim.core.block_hashes import BlockHashes, run_start
from sim.core.request import FINISHED, Request
from sim.core.scheduler import Scheduler
from sim.core.settings import Rules, Settings
from sim.records import TAKEN, Batch

_NAN = float("nan")

Attention = Callable[[Tensor, Tensor, RaggedBatch, float], Tensor]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: its tokens, how many it wants, and the turn it arrives in."""

    prompt: tuple[int, ...]
    max_tokens: int
    arrival_turn: int = 0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """`abort` of a request by its number, or `reset_prefix_cache`."""

    turn: int
    kind: str
    request: int = 0
    reset_running_requests: bool = False


@dataclass(frozen=True, slots=True)
class Scene:
    """An engine, what it is asked, and what befalls it."""

    settings: Settings
    rules: Rules
    asks: tuple[Ask, ...]
    events: tuple[Event, ...] = ()
    acceptance_rate: float = 0.7
    """Probability that a draft is what plain decoding says."""
    seed: int = 0


@dataclass(slots=True)
class Decoded:
    """What came out of a scene, and what happened on the way."""

    outputs: list[list[int]]
    """By request: the delivered tokens; fewer than asked for where it was aborted or has stalled."""
    finished: list[bool]
    aborted: list[bool]
    num_steps: int = 0
    num_preemptions: int = 0
    num_hit_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0
    num_stale_frames: int = 0
    """Frames that ran after their request had been preempted, aborted or finished."""
    num_resets: int = 0
    stalled: list[int] = field(default_factory=list)


class TokenContent:
    """The tokens of one request as the prefix cache has to know them: hashes of real tokens."""

    def __init__(self, prompt: Sequence[int], block_size: int) -> None:
        self.tokens = list(prompt)
        """Prompt and delivered output; during an update also what has just come back."""
        self._block_size = block_size

    def extend_hashes(self, hashes: BlockHashes, count: int) -> None:
        """See `sim.core.request.Content`.

        Raises:
            ValueError: a block is asked for whose tokens are not known yet.
        """
        size = self._block_size
        if count * size > len(self.tokens):
            raise ValueError(f"{count} blocks of {size} asked for, {len(self.tokens)} tokens are known")
        while len(hashes) < count:
            start = len(hashes) * size
            hashes.append(run_start(hash((hashes[-1] if hashes else 0, *self.tokens[start : start + size]))))


class KnowingDrafter:
    """Knows plain decoding's answer and gets each draft right with a set probability, by a counter-based draw."""

    def __init__(self, answers: Sequence[Sequence[int]], acceptance_rate: float, vocab_size: int, seed: int) -> None:
        self._answers = answers
        self._rate = acceptance_rate
        self._vocab_size = vocab_size
        self._seed = seed

    def draft(self, request: int, first: int, count: int) -> list[int]:
        """Drafts for output positions first to first + count - 1 of a request."""
        answer = self._answers[request]
        drafts = []
        for output in range(first, first + count):
            right = answer[output] if 0 <= output < len(answer) else 0
            draw = _mix(_mix(_mix(self._seed) + request) + output)
            wrong = 1 + draw % (self._vocab_size - 1)
            drafts.append(right if (draw >> 11) * 2.0**-53 < self._rate else (right + wrong) % self._vocab_size)
        return drafts


def _mix(number: int) -> int:
    """64 bits to 64 bits: the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return number ^ (number >> 31)


@dataclass(frozen=True, slots=True)
class Launch:
    """A batch on its way to the device, with copies of what may change until it runs."""

    batch: Batch
    tables: list[list[int]]
    taken: list[int]
    """Blocks that changed hands for it: what they held is nobody's any more."""
    tokens: dict[int, list[int]]
    """By request index, for those admitted in it: all confirmed tokens."""


class Worker:
    """The device: runs batches in order on one paged cache."""

    def __init__(
        self,
        decoder: Decoder,
        num_blocks: int,
        block_size: int,
        drafter: KnowingDrafter,
        *,
        poison: bool = True,
        attention: Attention = paged_attention,
    ) -> None:
        """`poison`: what holds nothing right is NaN: blocks that change hands, rejected drafts, all after a reset."""
        shape = decoder.shape
        self.decoder = decoder
        self.cache = PagedCache(
            shape.num_layers,
            num_blocks,
            block_size,
            shape.num_key_value_heads,
            shape.head_dim,
            decoder.dtype,
            decoder.device,
            _NAN if poison else 0,
        )
        self._drafter = drafter
        self._poison = poison
        self._attention = attention
        self._positions = DevicePositions()
        self._tokens: dict[int, list[int]] = {}
        """By request index: prompt and everything sampled since admission; ahead of what the host knows."""
        self._prompts: dict[int, int] = {}

    def reset(self) -> None:
        """The prefix cache was reset (new weights, say): nothing that lies in memory is right any more."""
        if self._poison:
            self.cache.fill_all(_NAN)

    def run(self, launch: Launch) -> list[list[int]]:
        """Run a batch; returns the sampled tokens by frame and settles `batch.accepted`."""
        batch = launch.batch
        cache, device = self.cache, self.decoder.device
        if self._poison:
            cache.fill_blocks(launch.taken, _NAN)
        before = self._positions.before(batch)
        tokens: list[int] = []
        positions: list[int] = []
        requests: list[int] = []
        sampling_rows: list[int] = []
        drafted: list[list[int]] = []
        for number, (request, position, num_tokens, num_drafts, samples) in enumerate(
            zip(batch.requests, before, batch.tokens, batch.drafts, batch.samples, strict=True)
        ):
            index = request.index
            if index in launch.tokens:
                self._tokens[index] = list(launch.tokens[index])
                self._prompts[index] = request.num_prompt_tokens
            known = self._tokens[index]
            drafts = self._drafter.draft(index, len(known) - self._prompts[index], num_drafts)
            drafted.append(drafts)
            end = position + num_tokens
            # A position beyond the drafts exists only where something is wrong; its token is then 0.
            rows = [*known, *drafts][position:end]
            tokens += rows + [0] * (num_tokens - len(rows))
            positions += range(position, end)
            requests += [number] * num_tokens
            if samples:
                sampling_rows += range(len(tokens) - 1 - num_drafts, len(tokens))
        ragged = RaggedBatch.of(
            launch.tables, batch.tokens, [p + n for p, n in zip(before, batch.tokens, strict=True)], device
        )
        at = torch.tensor(positions, device=device)
        slots = paged_cache.slot_mapping(
            ragged.block_table, torch.tensor(requests, device=device), at, cache.block_size
        )

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache.write(layer, key, value, slots)
            return self._attention(query, cache.layers[layer], ragged, self.decoder.scale)

        hidden = self.decoder.forward(torch.tensor(tokens, device=device), at, attend)
        answers = self.decoder.logits(hidden[torch.tensor(sampling_rows, dtype=torch.int64, device=device)])
        return self._verify(batch, before, drafted, answers.argmax(-1).tolist(), slots)

    def _verify(
        self, batch: Batch, before: list[int], drafted: list[list[int]], answers: list[int], slots: Tensor
    ) -> list[list[int]]:
        """Keep the drafts that the model would have said itself, up to the first it would not, and one more token."""
        sampled: list[list[int]] = []
        first = 0
        for request, drafts, samples in zip(batch.requests, drafted, batch.samples, strict=True):
            if not samples:
                sampled.append([])
                continue
            said = answers[first : first + len(drafts) + 1]
            first += len(drafts) + 1
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == said[accepted]:
                accepted += 1
            sampled.append(said[: accepted + 1])
            self._tokens[request.index] += said[: accepted + 1]
        batch.settle([len(tokens) for tokens in sampled])
        self._positions.after(batch, before)
        if self._poison:
            rejected: list[int] = []
            last = 0
            for num_tokens, drafts, samples, accepted in zip(
                batch.tokens, drafted, batch.samples, batch.accepted, strict=True
            ):
                last += num_tokens
                if samples:
                    rejected += range(last - (len(drafts) - accepted), last)
            if rejected:
                self.cache.fill_slots(slots[torch.tensor(rejected, device=slots.device)], _NAN)
        return sampled


class _Loop:
    """The state of one scene."""

    def __init__(self, scene: Scene, worker: Worker, observers: Iterable[Any]) -> None:
        self.scene = scene
        self.worker = worker
        self.observers = list(observers)
        self.scheduler = Scheduler(scene.settings, scene.rules)
        self.depth = 2 if scene.settings.async_scheduling else 1
        self.requests: dict[int, Request] = {}
        self.contents: dict[int, TokenContent] = {}
        self.in_flight: deque[Launch] = deque()
        self.work: deque[Launch | None] = deque()
        """What the device has to do, in order; None is a reset."""
        self.turn = 0
        self.result = Decoded([[] for _ in scene.asks], [False] * len(scene.asks), [False] * len(scene.asks))

    def tell(self, what: str, *facts: Any) -> None:
        for observer in self.observers:
            handler = getattr(observer, what, None)
            if handler is not None:
                handler(self.turn, *facts)

    def take_in(self) -> None:
        """Events and arrivals of this turn."""
        for event in self.scene.events:
            if event.turn == self.turn:
                self.befall(event)
        for index, ask in enumerate(self.scene.asks):
            if ask.arrival_turn == self.turn:
                content = TokenContent(ask.prompt, self.scene.settings.block_size)
                request = Request(
                    f"r{index}",
                    index,
                    len(ask.prompt),
                    ask.max_tokens,
                    content,
                    arrival=ask.arrival_turn,
                    priority=ask.priority,
                )
                self.requests[index], self.contents[index] = request, content
                self.scheduler.add(request)
                self.tell("arrived", request)

    def befall(self, event: Event) -> None:
        if event.kind == "abort":
            interruption = self.scheduler.abort(f"r{event.request}")
            self.result.aborted[event.request] = self.result.aborted[event.request] or interruption.done
        else:
            interruption = self.scheduler.reset_prefix_cache(event.reset_running_requests)
            if interruption.done:
                self.result.num_resets += 1
                self.work.append(None)
        self.tell("interrupted", interruption)

    def schedule(self) -> tuple[bool, bool]:
        """One schedule; returns whether a batch was launched, and whether anything has changed at all."""
        batch = self.scheduler.schedule()
        self.tell("scheduled", batch)
        if batch.total_tokens <= 0:
            return False, bool(batch.preempted)
        admitted = batch.requests[batch.num_running_frames :]
        launch = Launch(
            batch,
            [list(request.block_table) for request in batch.requests],
            [block for kind, _, blocks in batch.block_operations if kind == TAKEN for block in blocks],
            {request.index: list(self.contents[request.index].tokens) for request in admitted},
        )
        self.in_flight.append(launch)
        self.work.append(launch)
        self.result.num_hit_tokens += batch.hits
        return True, True

    def run_device(self, wanted: Launch) -> list[list[int]]:
        """Let the device work until it has run this batch."""
        while True:
            launch = self.work.popleft()
            if launch is None:
                self.worker.reset()
                continue
            batch = launch.batch
            for request, epoch in zip(batch.requests, batch.epochs, strict=True):
                self.result.num_stale_frames += request.num_preemptions != epoch or request.status == FINISHED
            sampled = self.worker.run(launch)
            self.tell("step_started", batch, None, None)
            self.tell("step_ended", batch)
            self.result.num_steps += 1
            if launch is wanted:
                return sampled

    def update(self) -> None:
        """Take the oldest batch back."""
        launch = self.in_flight.popleft()
        batch = launch.batch
        sampled = self.run_device(launch)
        # Hashes of blocks that these tokens complete are asked for during the update; what is not delivered goes again.
        for request, tokens in zip(batch.requests, sampled, strict=True):
            self.contents[request.index].tokens += tokens
        returned = self.scheduler.update(batch)
        for request in batch.requests:
            del self.contents[request.index].tokens[request.num_tokens :]
        for request, tokens, delivered in zip(batch.requests, sampled, returned.delivered, strict=True):
            self.result.outputs[request.index] += tokens[:delivered]
        self.result.num_accepted_tokens += sum(batch.accepted)
        self.result.num_rejected_tokens += sum(batch.drafts) - sum(batch.accepted)
        for request in returned.finished:
            self.result.finished[request.index] = True
        self.tell("updated", returned)

    def run(self, max_turns: int) -> Decoded:
        last_turn = max(
            [ask.arrival_turn for ask in self.scene.asks] + [event.turn for event in self.scene.events], default=0
        )
        while self.turn < max_turns:
            self.take_in()
            if self.scheduler.requests or self.in_flight:
                launched, changed = self.schedule() if self.scheduler.has_requests() else (False, False)
                updated = bool(self.in_flight) and not (launched and len(self.in_flight) < self.depth)
                if updated:
                    self.update()
                if not changed and not updated and self.turn >= last_turn:
                    break
            elif self.turn >= last_turn:
                break
            self.turn += 1
        self.result.stalled = sorted(request.index for request in self.scheduler.requests.values())
        self.result.num_preemptions = self.scheduler.num_preemptions
        self.tell("closed")
        return self.result


def decode(
    decoder: Decoder,
    scene: Scene,
    *,
    answers: Sequence[Sequence[int]] | None = None,
    poison: bool = True,
    attention: Attention = paged_attention,
    observers: Iterable[Any] = (),
    max_turns: int = 2_000,
) -> Decoded:
    """Serve a scene by speculative decoding on the paged cache.

    Args:
        decoder: the model.
        scene: what is asked of it. A preemption, hit, reset or abort comes from the core, as in a simulation.
        answers: what plain decoding says, by request; worked out where it is not given. Only the drafter sees it.
        poison: NaN in every slot that holds nothing right.
        attention: as `reference_attention`.
        observers: told the core's records, with turns for times (see `sim.records.Observer`).
        max_turns: where to give up; what is unfinished then counts as stalled.

    Raises:
        EngineCrash: where the released engine that the rules follow would have crashed.
    """
    if answers is None:
        answers = [decoder.plain_decode(ask.prompt, ask.max_tokens) for ask in scene.asks]
    drafter = KnowingDrafter(answers, scene.acceptance_rate, decoder.shape.vocab_size, scene.seed)
    worker = Worker(
        decoder,
        scene.settings.num_gpu_blocks,
        scene.settings.block_size,
        drafter,
        poison=poison,
        attention=attention,
    )
    return _Loop(scene, worker, observers).run(max_turns)
