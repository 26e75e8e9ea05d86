"""The story of one request, or of one step, in words, numbers, and block tables drawn slot by slot.

The run is made again (`sim.resimulate`) with somebody who watches. Knows records and the ledger's accounts; must not
know how a scheduler decides. One line of a drawing is a block, one letter a slot, in both accounts of `docs/ledger.md`.
Three drafts of five rejected, in the last of 64 blocks of 16, when their step has ended and when it is taken back:

       block  number  reserved          in memory
          63     871  ccccccccccippppp  vvvvvvvvvvvvvxxx
          63     871  cccccccccccccggg  vvvvvvvvvvvvvxxx
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sim.build import Simulation
from sim.observers.blocks import Blocks
from sim.records import EVICTED, FATES, FREED, HIT, TAKEN, Batch, BlockOperation, Interruption, Returned
from sim.resimulate import recorded_scenario, repeat

if TYPE_CHECKING:
    from sim.core.request import Request
    from sim.observers.ledger import Ledger

RESERVATION_LETTERS: Final = {
    "c": "committed",
    "i": "in flight",
    "p": "placeholder",
    "g": "garbage",
    "l": "lookahead",
    ".": "slack",
}
CONTENT_LETTERS: Final = {"v": "valid", "x": "garbage in memory", "-": "not written"}

FATE_MEANINGS: Final = {
    "stale_delivered": "the request was preempted while the step was under way; its tokens were delivered all the same",
    "stale_dropped": "the request was preempted while the step was under way; its tokens were thrown away",
    "unknown": "the request had finished or been aborted while the step was under way, so what it brought was ignored",
    "discarded": "rejected drafts were rolled back, and then the tokens thrown away since the request was preempted",
}
"""What became of a frame that did not come back to a request as it had left it (`sim.records.FATES`)."""

_MOST_FRAMES: Final = 40
"""Frames that a story lists; of more the first and the last."""
_MOST_DRAWN: Final = 4
"""Requests of a step whose block tables are drawn."""


class NothingToExplain(Exception):
    """The run has no such request or step; the message says what it has."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One owner's account at one moment. Slots and tokens; `blocks` in the order of the block table."""

    now: int
    what: str
    computed: int
    in_flight: int
    drafts: int
    written: int
    reserved: int
    valid: int
    content_written: int
    blocks: tuple[int, ...]
    marks: tuple[str, ...]
    """By block: `shared`, `cached`, or nothing."""
    block_size: int

    def reservations(self) -> str:
        """A letter of `RESERVATION_LETTERS` a slot."""
        certain = self.computed - self.in_flight
        return self._ends(
            ("c", certain),
            ("i", certain + self.in_flight - self.drafts),
            ("p", self.computed),
            ("g", self.written),
            ("l", self.reserved),
            (".", len(self.blocks) * self.block_size),
        )

    def content(self) -> str:
        """A letter of `CONTENT_LETTERS` a slot."""
        return self._ends(("v", self.valid), ("x", self.content_written), ("-", len(self.blocks) * self.block_size))

    def _ends(self, *runs: tuple[str, int]) -> str:
        text = ""
        whole = len(self.blocks) * self.block_size
        for letter, end in runs:
            text += letter * (min(end, whole) - len(text))
        return text

    def drawn(self) -> list[str]:
        """Lines, one a block; blocks that are full of confirmed tokens and alike are one line."""
        size = self.block_size
        reservations, content = self.reservations(), self.content()
        width = max(size, len("reserved"))
        lines = [f"  {'block':>6} {'number':>7}  {'reserved':<{width}}  in memory"]
        number = 0
        while number < len(self.blocks):
            last = number
            while last < len(self.blocks) and self._is_plain(reservations, content, last, self.marks[number]):
                last += 1
            if last - number > 2:
                numbers = f"{number} to {last - 1}"
                mark = self.marks[number]
                lines.append(f"  {numbers:>14}  {last - number} blocks committed and valid{', ' if mark else ''}{mark}")
                number = last
                continue
            slots = slice(number * size, number * size + size)
            line = f"  {number:>6} {self.blocks[number]:>7}  {reservations[slots]:<{width}}  {content[slots]:<{size}}"
            lines.append(f"{line}  {self.marks[number]}".rstrip())
            number += 1
        return lines

    def _is_plain(self, reservations: str, content: str, block: int, mark: str) -> bool:
        slots = slice(block * self.block_size, (block + 1) * self.block_size)
        full = self.block_size
        return reservations[slots] == "c" * full and content[slots] == "v" * full and self.marks[block] == mark


@dataclass(slots=True)
class Frame:
    """One request in one step."""

    step: int
    scheduled: int
    computed: int
    tokens: int
    drafts: int
    samples: bool
    admitted: bool
    hit: int
    ended: int | None = None
    updated: int | None = None
    accepted: int = 0
    rejected: int = 0
    delivered: int = 0
    trimmed: int = 0
    fate: str = ""
    garbage: int | None = None
    """Slots that it held when the step had ended, and that have nothing right in them; None without blocks."""
    moments: list[Snapshot] = field(default_factory=list)


@dataclass(slots=True)
class RequestStory:
    """What happened to one request."""

    id: str
    index: int
    num_prompt_tokens: int
    max_tokens: int
    arrived: int | None = None
    ended: int | None = None
    status: str = "unfinished"
    num_output_tokens: int = 0
    frames: list[Frame] = field(default_factory=list)
    events: list[tuple[int, str]] = field(default_factory=list)
    """(ns, in words), in order."""


class RequestWatcher:
    """Follows one request; told after the ledger."""

    def __init__(self, ledger: Ledger, index: int, step: int | None) -> None:
        self.ledger = ledger
        self.blocks = Blocks(ledger.num_blocks)
        self.index = index
        self.step = step
        """Draw this step's frame only, or all if None."""
        self.story: RequestStory | None = None
        self.open: dict[int, Frame] = {}
        """Frames in flight, by step."""

    @property
    def done(self) -> bool:
        return self.story is not None and self.story.ended is not None and not self.open

    def arrived(self, now: int, request: Request) -> None:
        if request.index == self.index:
            spec = getattr(request, "spec", None)
            at = now if spec is None else spec.arrival_ns
            self.story = RequestStory(request.id, request.index, request.num_prompt_tokens, request.max_tokens, at)
            self.story.events.append(
                (at, f"arrives: {request.num_prompt_tokens} tokens of prompt, {request.max_tokens} of output to come")
            )

    def scheduled(self, now: int, batch: Batch) -> None:
        self.blocks.follow(batch.block_operations)
        story = self.story
        if story is None:
            return
        for request in batch.preempted:
            if request.index == self.index:
                freed = _blocks(batch.block_operations, FREED, self.index)
                story.events.append((now, f"is preempted by schedule {batch.number}; its {freed} blocks are freed"))
        for number, request in enumerate(batch.requests):
            if request.index != self.index:
                continue
            admitted = number >= batch.num_running_frames
            frame = Frame(
                batch.number,
                now,
                batch.computed[number],
                batch.tokens[number],
                batch.drafts[number],
                batch.samples[number],
                admitted,
                batch.computed[number] if admitted else 0,
            )
            if admitted:
                again = batch.resumed[number - batch.num_running_frames]
                story.events.append(
                    (
                        now,
                        f"is admitted{' again' if again else ''} by schedule {batch.number}: {frame.hit} tokens found "
                        f"in the prefix cache, {_blocks(batch.block_operations, TAKEN, self.index)} blocks taken",
                    )
                )
            story.frames.append(frame)
            self.open[batch.number] = frame
            self._look(now, frame, request, f"scheduled in step {batch.number}")

    def step_ended(self, now: int, batch: Batch) -> None:
        frame = self.open.get(batch.number)
        if frame is None:
            return
        number, request = _place(batch, self.index)
        frame.ended = now
        frame.accepted = batch.accepted[number]
        account = self.ledger.accounts.get(self.index)
        if account is not None:
            frame.garbage = account.content_written - account.content_valid
        self._look(now, frame, request, f"step {batch.number} has ended")

    def updated(self, now: int, returned: Returned) -> None:
        self.blocks.follow(returned.block_operations)
        story = self.story
        batch = returned.batch
        frame = self.open.pop(batch.number, None)
        if story is None:
            return
        if frame is not None:
            number, request = _place(batch, self.index)
            frame.updated = now
            frame.rejected = returned.rejected[number]
            frame.delivered = returned.delivered[number]
            frame.trimmed = returned.trimmed[number]
            frame.fate = FATES[returned.fates[number]]
            story.num_output_tokens += frame.delivered
            self._look(now, frame, request, f"step {batch.number} has been taken back")
        for request in returned.finished:
            if request.index == self.index:
                self._end(now, "finished", f"is finished with {request.num_output_tokens} tokens of output")

    def interrupted(self, now: int, interruption: Interruption) -> None:
        self.blocks.follow(interruption.block_operations)
        for request in interruption.requests:
            if request.index != self.index or self.story is None:
                continue
            if interruption.kind == "abort":
                self._end(now, "aborted", "is aborted")
            else:
                self.story.events.append((now, "is preempted by a reset of the prefix cache"))

    def _end(self, now: int, status: str, words: str) -> None:
        assert self.story is not None
        self.story.status = status
        self.story.ended = now
        self.story.events.append((now, words))

    def _look(self, now: int, frame: Frame, request: Request, what: str) -> None:
        if self.step is None or self.step == frame.step:
            shot = snapshot(self.ledger, self.blocks, request, now, what)
            if shot is not None:
                frame.moments.append(shot)


def snapshot(ledger: Ledger, blocks: Blocks, request: Request, now: int, what: str) -> Snapshot | None:
    """The request's account at this moment; None while it holds no blocks."""
    account = ledger.accounts.get(request.index)
    if account is None:
        return None
    marks = tuple(
        "shared" if blocks.refs[block] > 1 else "cached" if blocks.hashed[block] else ""
        for block in request.block_table
    )
    return Snapshot(
        now,
        what,
        account.computed,
        account.in_flight,
        account.drafts,
        account.written,
        account.reserved,
        account.content_valid,
        account.content_written,
        tuple(request.block_table),
        marks,
        ledger.block_size,
    )


class StepWatcher:
    """Follows one step; told after the ledger."""

    def __init__(self, simulation: Simulation, step: int) -> None:
        self.ledger = simulation.ledger
        self.blocks = Blocks(self.ledger.num_blocks)
        self.scheduler = simulation.scheduler
        self.step = step
        self.last = -1
        """Number of the latest schedule that launched something."""
        self.batch: Batch | None = None
        self.columns: dict[str, list[Any]] = {}
        """Of its frames, as far as they are known: they are used again once it has been taken back."""
        self.times: dict[str, int] = {}
        self.cost: Any = None
        self.returned: Returned | None = None
        self.queues = (0, 0)
        self.reservations: tuple[int, ...] = ()
        self.content: tuple[int, ...] = ()
        self.moments: dict[int, list[Snapshot]] = {}

    @property
    def done(self) -> bool:
        return self.returned is not None or (self.batch is None and self.last > self.step)

    def scheduled(self, now: int, batch: Batch) -> None:
        self.blocks.follow(batch.block_operations)
        if batch.total_tokens > 0:
            self.last = batch.number
        if batch.number != self.step or batch.total_tokens <= 0:
            return
        self.batch = batch
        self._take_down("requests", "tokens", "drafts", "computed", "samples")
        self.times["scheduled"] = now
        self.queues = len(self.scheduler.running), len(self.scheduler.waiting)
        self.reservations = self.ledger.reservations()
        self._look(now, "scheduled")

    def step_started(self, now: int, batch: Batch, shape: object, cost: object) -> None:
        if batch is self.batch:
            self.times["started"] = now
            self.cost = cost
            self._take_down("accepted")

    def step_ended(self, now: int, batch: Batch) -> None:
        if batch is self.batch:
            self.times["ended"] = now
            self.content = self.ledger.content()
            self._look(now, "has ended")

    def updated(self, now: int, returned: Returned) -> None:
        self.blocks.follow(returned.block_operations)
        if returned.batch is self.batch:
            self.times["updated"] = now
            self.returned = returned
            self.columns["delivered"] = returned.delivered
            self.columns["fates"] = returned.fates

    def interrupted(self, now: int, interruption: Interruption) -> None:
        self.blocks.follow(interruption.block_operations)

    def _take_down(self, *names: str) -> None:
        for name in names:
            self.columns[name] = getattr(self.batch, name)

    def _look(self, now: int, what: str) -> None:
        assert self.batch is not None
        for request in self.batch.requests:
            shot = snapshot(self.ledger, self.blocks, request, now, f"step {self.step} {what}")
            if shot is not None:
                self.moments.setdefault(request.index, []).append(shot)


def explain(
    folder: Path,
    *,
    request: str | None = None,
    step: int | None = None,
    everything: bool = False,
    watch: Callable[[int], None] | None = None,
) -> str:
    """The story as text: of a request by id (`r7`) or number, of a step by number, or of a request in that step.

    `everything`: every step of a request with many, and block tables of all requests of a step.

    Raises:
        ResultsError: `folder` is no folder of results.
        CannotRepeat: the run cannot be made again as it was.
        NothingToExplain: it has no such request or step.
    """
    scenario, _ = recorded_scenario(folder)
    if request is None:
        if step is None:
            raise NothingToExplain("nothing to explain: name a request, a step, or both")
        return _of_step(folder, scenario, step, everything, watch)
    index = _index(request)
    found: list[RequestWatcher] = []

    def observe(simulation: Simulation) -> RequestWatcher:
        if simulation.num_requests is not None and index >= simulation.num_requests:
            raise NothingToExplain(
                f"{folder}: there is no request {request}; there are r0 to r{simulation.num_requests - 1}"
            )
        found.append(RequestWatcher(simulation.ledger, index, step))
        return found[0]

    repeat(scenario, observe, lambda: found[0].done, watch)
    story = found[0].story
    if story is None:
        raise NothingToExplain(f"{folder}: request {request} never arrived in this run")
    if step is not None and not any(frame.step == step for frame in story.frames):
        steps = [frame.step for frame in story.frames]
        took_part = f"it took part in steps {steps[0]} to {steps[-1]}, {len(steps)} of them" if steps else "it had none"
        raise NothingToExplain(f"{folder}: request {request} was not in step {step}; {took_part}")
    return "\n".join(tell_request(story, step, everything=everything)) + "\n"


def _index(request: str) -> int:
    text = request.removeprefix("r")
    if not text.isascii() or not text.isdigit():
        raise NothingToExplain(f"request {request}: no such name; requests are called r0, r1, r2 and so on")
    return int(text)


def _of_step(folder: Path, scenario: Any, step: int, everything: bool, watch: Callable[[int], None] | None) -> str:
    found: list[StepWatcher] = []

    def observe(simulation: Simulation) -> StepWatcher:
        found.append(StepWatcher(simulation, step))
        return found[0]

    repeat(scenario, observe, lambda: found[0].done, watch)
    watcher = found[0]
    if watcher.batch is None:
        if watcher.last < step:
            raise NothingToExplain(f"{folder}: there is no step {step}; the last one is {watcher.last}")
        raise NothingToExplain(f"{folder}: schedule {step} launched nothing, so there is no step {step}")
    return "\n".join(tell_step(watcher, everything=everything)) + "\n"


def tell_request(story: RequestStory, step: int | None = None, *, everything: bool = False) -> list[str]:
    """Lines: what happened, its frames (all of many with `everything`), and its block table around one of them.

    That is the frame of `step`, or else the one with most rejected drafts, or the last. Of a story with a `step`, in
    which the request must have been, only that step's part is told unless `everything` is asked for.
    """
    if step is not None and not everything:
        return _tell_frame(story, next(frame for frame in story.frames if frame.step == step))
    lines = [f"Request {story.id}: {story.status}", ""]
    for now, words in story.events:
        lines.append(f"  {_seconds(now)}  {words}")
    frames = story.frames
    if not frames:
        return [*lines, "", "It was never scheduled."]
    drafted, rejected = sum(f.drafts for f in frames), sum(f.rejected for f in frames)
    lost = sum(1 + f.drafts - f.rejected for f in frames if f.fate in ("stale_dropped", "discarded") and f.samples)
    lines += [
        "",
        f"It was in {len(frames)} steps and computed {sum(f.tokens for f in frames)} tokens for "
        f"{story.num_output_tokens} of output: {drafted} drafts, of which {rejected} were rejected and "
        f"{lost} tokens thrown away as stale.",
        "",
    ]
    most = len(frames) if everything else _MOST_FRAMES
    lines += _frame_table(frames, most)
    chosen = next((f for f in frames if f.step == step), None) if step is not None else None
    why = ""
    if chosen is None:
        chosen = max(frames, key=lambda f: (f.rejected, f.step))
        why = ", the one with most rejected drafts" if chosen.rejected else ", the last one"
    lines += ["", f"Its block table in step {chosen.step}{why}:"]
    for moment in chosen.moments:
        lines += ["", *_moment(moment)]
    half = most // 2
    shown = frames if len(frames) <= most else [*frames[:half], *frames[-half:]]
    return [*lines, "", *_legend(frame.fate for frame in shown)]


def _tell_frame(story: RequestStory, frame: Frame) -> list[str]:
    """Lines: one step's part of a story, and where in the story it stands."""
    frames = story.frames
    lines = [
        f"Request {story.id} in step {frame.step}",
        "",
        f"It was in {len(frames)} steps, {frames[0].step} to {frames[-1].step}, and is {story.status}; --request "
        f"{story.id} alone tells all of it.",
        "",
    ]
    until = frame.updated
    meanwhile = [(now, words) for now, words in story.events if frame.scheduled <= now]
    lines += [f"  {_seconds(now)}  {words}" for now, words in meanwhile if until is None or now <= until]
    lines += [*([""] if lines[-1] else []), *_frame_table([frame], 1), "", f"Its block table in step {frame.step}:"]
    for moment in frame.moments:
        lines += ["", *_moment(moment)]
    return [*lines, "", *_legend([frame.fate])]


def _frame_table(frames: list[Frame], most: int) -> list[str]:
    """A line a frame; of more than `most` the first and the last."""
    shown: list[Frame | None] = list(frames)
    if len(frames) > most:
        half = most // 2
        shown = [*frames[:half], None, *frames[-half:]]
    lines = [
        "    step      scheduled  computed before  tokens  drafts  rejected  delivered  garbage  what",
    ]
    for frame in shown:
        if frame is None:
            lines.append(f"     ...  {len(frames) - most} more; --all lists them")
            continue
        kind = "decode" if frame.samples and frame.tokens == 1 + frame.drafts else "prefill"
        if kind == "prefill" and not frame.samples:
            kind = "a chunk of prefill"
        garbage = "-" if frame.garbage is None else str(frame.garbage)
        fate = "" if frame.fate in ("fresh", "") else f", {frame.fate.replace('_', ' ')}"
        back = "" if frame.updated is not None else ", not taken back"
        lines.append(
            f"  {frame.step:>6}  {_seconds(frame.scheduled)}  {frame.computed:>15}  {frame.tokens:>6}  "
            f"{frame.drafts:>6}  {frame.rejected:>8}  {frame.delivered:>9}  {garbage:>7}  {kind}{fate}{back}"
        )
    return lines


def tell_step(watcher: StepWatcher, *, everything: bool = False) -> list[str]:
    """Lines: what a step was, what came of each frame, and block tables of those that lost most, or of all."""
    batch = watcher.batch
    assert batch is not None
    times, columns = watcher.times, watcher.columns
    requests, tokens, drafts = columns["requests"], columns["tokens"], columns["drafts"]
    accepted = columns.get("accepted") or [None] * len(requests)
    lines = [f"Step {watcher.step}", ""]
    words = {
        "scheduled": f"scheduled: {batch.total_tokens} tokens in {len(requests)} requests, {sum(drafts)} "
        f"of them drafts; {watcher.queues[0]} running, {watcher.queues[1]} waiting",
        "started": "the device begins it",
        "ended": "the device has ended it",
        "updated": "taken back",
    }
    lines += [f"  {_seconds(times[name])}  {text}" for name, text in words.items() if name in times]
    if batch.preempted:
        lines.append(f"  preempted by its schedule: {', '.join(request.id for request in batch.preempted)}")
    taken, freed = (_blocks(batch.block_operations, kind) for kind in (TAKEN, FREED))
    hit, evicted = (_blocks(batch.block_operations, kind) for kind in (HIT, EVICTED))
    lines.append(f"  blocks: {taken} taken, {hit} found in the prefix cache, {evicted} evicted from it, {freed} freed")
    names = ("in flight", "placeholder", "committed", "garbage", "lookahead", "slack", "cached", "free")
    lines.append(f"  slots after the schedule: {_named(names, watcher.reservations)}")
    if watcher.content:
        lines.append(
            f"  slots in memory when it has ended: {_named(('valid', 'garbage', 'not written'), watcher.content[:3])}"
        )
    if watcher.cost is not None:
        parts = watcher.cost._asdict() if hasattr(watcher.cost, "_asdict") else {}
        spent = [f"{name.replace('_', ' ')} {value / 1e6:.3f}" for name, value in parts.items() if value]
        lines.append(f"  time on the device, ms: {', '.join(spent)}; {watcher.cost.total / 1e6:.3f} in all")
    lines += ["", "  request  computed before  tokens  drafts  accepted  delivered  what"]
    returned = watcher.returned
    for number, request in enumerate(requests):
        delivered = fate = ""
        if returned is not None:
            delivered = str(columns["delivered"][number])
            fate = FATES[columns["fates"][number]].replace("_", " ")
        kind = "decode" if columns["samples"][number] and tokens[number] == 1 + drafts[number] else "prefill"
        if number >= batch.num_running_frames:
            kind += ", resumed" if batch.resumed[number - batch.num_running_frames] else ", admitted"
        if fate not in ("", "fresh"):
            kind += f", {fate}"
        lines.append(
            f"  {request.id:>7}  {columns['computed'][number]:>15}  {tokens[number]:>6}  {drafts[number]:>6}  "
            f"{'' if accepted[number] is None else accepted[number]:>8}  {delivered:>9}  {kind}"
        )
    order = sorted(
        range(len(requests)),
        key=lambda number: (accepted[number] or 0) - drafts[number],
    )
    most = len(order) if everything else _MOST_DRAWN
    for number in order[:most]:
        request = requests[number]
        lines += ["", f"Block table of {request.id}:"]
        for moment in watcher.moments.get(request.index, []):
            lines += ["", *_moment(moment)]
    if len(requests) > most:
        lines += ["", f"{len(requests) - most} more requests; --request ID draws one of them, --all draws all."]
    return [*lines, "", *_legend(() if returned is None else (FATES[fate] for fate in columns["fates"]))]


def _moment(moment: Snapshot) -> list[str]:
    certain = moment.computed - moment.in_flight
    head = (
        f"{_seconds(moment.now)}  {moment.what}: num_computed_tokens now {moment.computed}, certain {certain}, "
        f"{moment.valid} right in memory, {moment.content_written - moment.valid} garbage, {len(moment.blocks)} blocks"
    )
    return [head, *moment.drawn()]


def _legend(fates: Iterable[str]) -> list[str]:
    """What the letters mean, and the fates among `fates`."""

    def words(letters: dict[str, str]) -> str:
        return ", ".join(f"{letter} {meaning}" for letter, meaning in letters.items())

    seen = set(fates)
    told = [f"{fate.replace('_', ' ')}: {meaning}" for fate, meaning in FATE_MEANINGS.items() if fate in seen]
    return [
        "computed before: num_computed_tokens before the step's schedule, which adds its tokens; over a block table "
        "stands what it is then",
        f"reserved: {words(RESERVATION_LETTERS)}",
        f"in memory: {words(CONTENT_LETTERS)}",
        *told,
    ]


def _place(batch: Batch, index: int) -> tuple[int, Request]:
    return next((number, request) for number, request in enumerate(batch.requests) if request.index == index)


def _blocks(operations: Iterable[BlockOperation], kind: int, owner: int | None = None) -> int:
    return sum(len(blocks) for k, o, blocks in operations if k == kind and owner in (None, o))


def _named(names: Iterable[str], values: Iterable[int]) -> str:
    return ", ".join(f"{value:,} {name}" for name, value in zip(names, values, strict=True) if value) or "none"


def _seconds(now: int) -> str:
    return f"{now / 1e9:12.6f} s"
