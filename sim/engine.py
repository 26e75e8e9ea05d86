"""The clock: SimPy processes for arrivals, outside events, the step loop and the device.

The only file that knows SimPy. It knows the scheduler and the device by what they are asked for, and tells observers;
it reads no files and decides nothing that a scheduler decides. Time is integer nanoseconds.

One iteration of the step loop is one turn of vLLM's engine core: take in what has arrived, schedule, launch; while
fewer batches are in flight than the pipeline's depth, go on at once; else wait for the oldest and update from it.
With a depth of one the scheduler's own time lies between two steps; with two it overlaps the step in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any

import simpy

from sim.core.crash import EngineCrash
from sim.core.request import Content, Request
from sim.core.scheduler import Scheduler
from sim.device import Device, SimulatedRequest
from sim.records import Batch
from workloads.spec import RequestSpec, Workload

_FRUITLESS_PREEMPTIONS = 10_000
"""Preemptions in a row between which nothing is delivered, after which the engine counts as running in circles. Presets
with a known loss get there: a request whose placeholders have drifted may preempt itself for ever."""
_STEPS_A_TICK = 200
_BARREN_EVENTS = 100
"""Recurring events after which requests that still cannot be scheduled count as stalled for good."""

Process = Generator[simpy.Event, Any, None]


def _passes(env: simpy.Environment, delay: int) -> bool:
    """Let time pass without an event, where nothing happens until then; False where something does, and one is needed.

    Half of a step's events are the scheduler's own time, and hardly ever does anything fall into it.
    """
    then = env.now + delay
    if env.peek() <= then:
        return False
    env._now = then
    return True


class RequestNeverFits(Exception):
    """A request that arrived can never be served by this engine."""


@dataclass(frozen=True, slots=True)
class OutsideEvent:
    """An abort or a reset of the prefix cache, and when."""

    kind: str
    """`abort` or `reset_prefix_cache`."""
    times: Callable[[], Iterable[int]]
    """Times in ns, rising; endless for a rate."""
    reset_running_requests: bool = False
    choose: Callable[[int, list[Request]], Request | None] | None = None
    """Whom to abort: told how many times it was asked before and the unfinished requests in order of arrival."""
    recurring: bool = False
    """It does not keep the run alive by itself."""


class Engine:
    """One engine over one workload. `run` may be called once."""

    def __init__(
        self,
        scheduler: Scheduler,
        device: Device,
        workload: Workload,
        content: Callable[[RequestSpec], Content],
        *,
        async_scheduling: bool,
        schedule_ns: int,
        update_ns: int,
        events: Iterable[OutsideEvent] = (),
        max_request_tokens: int,
        max_prompt_tokens: int,
        refuse_too_long: bool = False,
        max_time_ns: int | None = None,
        max_steps: int | None = None,
    ) -> None:
        """`max_request_tokens`: most slots that one request may come to need, else it can never end.

        `refuse_too_long`: turn such requests away and count them, instead of giving up.
        """
        self.num_refused = 0
        self._refuse_too_long = refuse_too_long
        self.scheduler = scheduler
        self.device = device
        self.num_steps = 0
        self.num_request_steps = 0
        self.stalled: list[Request] = []
        self.stopped_by: str | None = None
        self.crash: str | None = None
        self._env = simpy.Environment()
        self._workload = workload
        self._content = content
        self._depth = 2 if async_scheduling else 1
        self._schedule_ns = schedule_ns
        self._update_ns = update_ns
        self._events = list(events)
        self._max_request_tokens = max_request_tokens
        self._max_prompt_tokens = max_prompt_tokens
        self._max_time_ns = max_time_ns
        self._max_steps = max_steps
        self._observers: list[Any] = []
        self._arrived_handlers: list[Any] = []
        self._inbox: deque[SimulatedRequest | tuple[OutsideEvent, int]] = deque()
        self._wake: simpy.Event | None = None
        self._work: simpy.Event | None = None
        self._queue: deque[tuple[Batch, simpy.Event]] = deque()
        self._next_tick = 0
        """Steps after which `tick` is called again."""
        self._preemptions_then = 0
        """Preemptions when something was last delivered."""
        self._expected = 0
        """Processes that may still bring something in."""

    @property
    def now(self) -> int:
        """Simulated time in ns."""
        return int(self._env.now)

    def add_observer(self, observer: Any) -> None:
        """Tell this observer from now on; those added first are told first."""
        self._observers.append(observer)

    def run(self, tick: Callable[[int], bool] | None = None) -> None:
        """Run to the end, or until `tick`, called every 200 steps or so with the time, says False.

        Raises:
            RequestNeverFits: a request arrived that can never be served; what was recorded until then stands.
        """
        env = self._env
        self._expected = 1 + sum(not event.recurring for event in self._events)
        env.process(self._arrivals())
        for event in self._events:
            env.process(self._outside(event))
        env.process(self._device_loop())
        try:
            env.run(until=env.process(self._step_loop(tick)))
        except EngineCrash as crash:
            self.stopped_by = "crash"
            self.crash = str(crash)
            self._tell("crashed", self.now)
        self._tell("closed", self.now)

    def _tell(self, what: str, *facts: Any) -> None:
        for observer in self._observers:
            handler = getattr(observer, what, None)
            if handler is not None:
                handler(*facts)

    def _handlers(self, what: str) -> list[Any]:
        found = (getattr(observer, what, None) for observer in self._observers)
        return [handler for handler in found if handler is not None]

    # What comes in

    def _arrivals(self) -> Process:
        env = self._env
        for spec in self._workload.arrivals():
            if spec.arrival_ns > env.now:
                yield env.timeout(spec.arrival_ns - env.now)
            self._receive(spec)
        self._expected -= 1
        self._rouse()

    def _later(self, spec: RequestSpec) -> Process:
        yield self._env.timeout(max(spec.arrival_ns - self.now, 0))
        self._expected -= 1
        self._receive(spec)

    def _receive(self, spec: RequestSpec) -> None:
        if self._refuse_too_long and (
            spec.num_prompt_tokens > self._max_prompt_tokens
            or spec.num_prompt_tokens + spec.max_tokens > self._max_request_tokens
        ):
            self.num_refused += 1
            self._set_off(spec)
            self._rouse()
            return
        if spec.num_prompt_tokens > self._max_prompt_tokens:
            raise RequestNeverFits(
                f"request {spec.index}: a prompt of {spec.num_prompt_tokens} tokens; the engine takes at most "
                f"{self._max_prompt_tokens} (max_model_len - 1, and what fits the pool)"
            )
        if spec.num_prompt_tokens + spec.max_tokens > self._max_request_tokens:
            raise RequestNeverFits(
                f"request {spec.index}: {spec.num_prompt_tokens} prompt and {spec.max_tokens} output tokens; the pool "
                f"holds at most {self._max_request_tokens} of one request beside its drafts"
            )
        self._inbox.append(SimulatedRequest(spec, self._content(spec)))
        self._rouse()

    def _outside(self, event: OutsideEvent) -> Process:
        env = self._env
        for asked, time in enumerate(event.times()):
            if time > env.now:
                yield env.timeout(time - env.now)
            self._inbox.append((event, asked))
            self._rouse()
        if not event.recurring:
            self._expected -= 1
            self._rouse()

    def _rouse(self) -> None:
        if self._wake is not None:
            self._wake.succeed()
            self._wake = None

    def _take_in(self) -> None:
        """Hand the scheduler what came in since the last time."""
        inbox = self._inbox
        scheduler = self.scheduler
        now = self.now
        while inbox:
            entry = inbox.popleft()
            if isinstance(entry, SimulatedRequest):
                scheduler.add(entry)
                for handler in self._arrived_handlers:
                    handler(now, entry)
                continue
            event, asked = entry
            if event.kind == "abort":
                assert event.choose is not None
                chosen = event.choose(asked, list(scheduler.requests.values()))
                if chosen is not None:
                    self._tell("interrupted", self.now, scheduler.abort(chosen.id))
                    self._follow_up(chosen)
            else:
                self._tell("interrupted", self.now, scheduler.reset_prefix_cache(event.reset_running_requests))

    def _follow_up(self, request: Request) -> None:
        """What the end of a request sets off."""
        assert isinstance(request, SimulatedRequest)
        self._set_off(request.spec)

    def _set_off(self, ended: RequestSpec) -> None:
        for spec in self._workload.after(ended, self.now):
            self._expected += 1
            self._env.process(self._later(spec))

    # The step loop and the device

    def _step_loop(self, tick: Callable[[int], bool] | None) -> Process:
        env = self._env
        scheduler = self.scheduler
        in_flight: deque[tuple[Batch, simpy.Event]] = deque()
        self._arrived_handlers = self._handlers("arrived")
        scheduled_handlers = self._handlers("scheduled")
        updated_handlers = self._handlers("updated")
        recurring = any(event.recurring for event in self._events)
        barren = 0
        while True:
            if self._inbox:
                self._take_in()
            if not in_flight and not scheduler.requests:
                if self._expected == 0 and not self._inbox:
                    return
                yield from self._sleep()
                continue
            if self._out_of_limits(tick):
                return
            launched = preempted = False
            if scheduler.has_requests():
                if self._schedule_ns and not _passes(env, self._schedule_ns):
                    yield env.timeout(self._schedule_ns)
                batch = scheduler.schedule()
                preempted = bool(batch.preempted)
                now = env.now
                for handler in scheduled_handlers:
                    handler(now, batch)
                if batch.total_tokens > 0:
                    launched = True
                    self.num_request_steps += len(batch.frames)
                    done = env.event()
                    in_flight.append((batch, done))
                    self._queue.append((batch, done))
                    if self._work is not None:
                        self._work.succeed()
                        self._work = None
            if launched and len(in_flight) < self._depth:
                continue
            if launched:
                barren = 0
            if not in_flight:
                if preempted:
                    continue  # A request has made room, if only by leaving itself; the next schedule can go on.
                if scheduler.requests and not self._inbox:
                    barren += 1
                    if self._expected == 0 and (not recurring or barren > _BARREN_EVENTS):
                        self.stalled = list(scheduler.requests.values())
                        self.stopped_by = "stalled"
                        return
                    yield from self._sleep()
                continue
            batch, done = in_flight.popleft()
            if not done.processed:
                yield done
            if self._update_ns and not _passes(env, self._update_ns):
                yield env.timeout(self._update_ns)
            returned = scheduler.update(batch)
            now = env.now
            for handler in updated_handlers:
                handler(now, returned)
            scheduler.recycle(batch)
            for request in returned.finished:
                self._follow_up(request)
            if returned.num_delivered_tokens:
                self._preemptions_then = scheduler.num_preemptions
            elif scheduler.num_preemptions - self._preemptions_then >= _FRUITLESS_PREEMPTIONS:
                self.stalled = list(scheduler.requests.values())
                self.stopped_by = "livelock"
                return

    def _sleep(self) -> Process:
        self._wake = self._env.event()
        yield self._wake

    def _out_of_limits(self, tick: Callable[[int], bool] | None) -> bool:
        if self._max_time_ns is not None and self.now >= self._max_time_ns:
            self.stopped_by = "max_time_s"
        elif self._max_steps is not None and self.num_steps >= self._max_steps:
            self.stopped_by = "max_steps"
        elif tick is not None and self.num_steps >= self._next_tick:
            self._next_tick = self.num_steps + _STEPS_A_TICK
            if not tick(self.now):
                self.stopped_by = "interrupt"
        return self.stopped_by is not None

    def _device_loop(self) -> Process:
        env = self._env
        queue = self._queue
        launch = self.device.launch
        started_handlers = self._handlers("step_started")
        ended_handlers = self._handlers("step_ended")
        while True:
            if not queue:
                self._work = env.event()
                yield self._work
            batch, done = queue.popleft()
            now = self.now
            shape, cost = launch(batch, now)
            for handler in started_handlers:
                handler(now, batch, shape, cost)
            yield env.timeout(cost.total)
            self.num_steps += 1
            now = self.now
            for handler in ended_handlers:
                handler(now, batch)
            done.succeed()
