"""Limits with known answers: queueing formulas, Little's law, and tokens a step under independent acceptance.

The seeds are fixed, so a band is either hit for good or missed for good; each is as wide as chance alone may need.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from sim.build import Simulation, build
from sim.core.request import Request
from sim.records import Batch, Interruption, Returned
from sim.scenario import load_scenario

Make = Callable[..., Simulation]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A simulation of these lines of YAML and overrides."""

    def simulation(text: str, *overrides: str, check: bool = False) -> Simulation:
        file = tmp_path / "case.yaml"
        file.write_text(text, encoding="utf-8")
        return build(load_scenario(file, overrides), check=check)

    return simulation


class Times:
    """First schedule and finish of each request, in ns, by index."""

    def __init__(self, simulation: Simulation) -> None:
        self.arrival: dict[int, int] = {}
        self.taken_in: dict[int, int] = {}
        self.first_schedule: dict[int, int] = {}
        self.finish: dict[int, int] = {}
        simulation.add_observer(self)

    def arrived(self, now: int, request: Request) -> None:
        self.arrival[request.index] = request.arrival
        self.taken_in[request.index] = now

    def scheduled(self, now: int, batch: Batch) -> None:
        for request in batch.requests:
            self.first_schedule.setdefault(request.index, now)

    def updated(self, now: int, returned: Returned) -> None:
        for request in returned.finished:
            self.finish[request.index] = now

    def interrupted(self, now: int, interruption: Interruption) -> None:
        if interruption.kind == "abort":
            for request in interruption.requests:
                self.finish[request.index] = now

    def waits_ms(self) -> list[float]:
        return [(self.first_schedule[index] - self.arrival[index]) / 1e6 for index in sorted(self.arrival)]


QUEUE = """
engine:
  num_gpu_blocks: 100
  max_num_seqs: 1
  max_model_len: 64
  max_num_batched_tokens: 64
  async_scheduling: false
timing: {fixed_step_ms: 10, schedule_ms: 0, update_ms: 0}
workload:
  synthetic:
    num_requests: 8000
    arrivals: {process: poisson, rate: 60}
    prompt_tokens: 8
    output_tokens: 1
"""
"""One request a step, each step 10 ms: a queue with one server and constant service."""


@pytest.mark.parametrize("rate", [30, 60, 80])
def test_m_d_1_waiting_times(make: Make, rate: int) -> None:
    """Pollaczek and Khinchine: the mean wait in M/D/1 is rho D / (2 (1 - rho)): 2.14, 7.5 and 20 ms at rho 0.3, 0.6,
    0.8.

    Batch means: 20 batches of 400 requests, the first left out; the 99% interval by Student holds the formula's
    value. The share of those who do not wait is 1 - rho (Poisson arrivals see time averages)."""
    simulation = make(QUEUE, f"workload.synthetic.arrivals.rate={rate}", f"seed={rate}")
    times = Times(simulation)
    simulation.run()
    waits = np.array(times.waits_ms())
    assert waits.size == 8000
    assert waits.min() == 0
    rho = rate * 0.010
    for values, expected in ((waits, rho * 10 / (2 * (1 - rho))), (waits == 0, 1 - rho)):
        means = values.reshape(20, 400)[1:].mean(axis=1)
        half = stats.t.ppf(0.995, means.size - 1) * means.std(ddof=1) / math.sqrt(means.size)
        assert abs(means.mean() - expected) < half
        assert half < 0.35 * expected  # a band that says something


def test_d_d_1_nobody_waits(make: Make) -> None:
    """Arrivals every 20 ms, service 10 ms."""
    simulation = make(
        QUEUE, "workload.synthetic.arrivals={process: constant, rate: 50}", "workload.synthetic.num_requests=200"
    )
    times = Times(simulation)
    simulation.run()
    assert set(times.waits_ms()) == {0.0}
    assert {times.finish[index] - times.arrival[index] for index in times.finish} == {10_000_000}


def test_all_at_once_wait_their_turn(make: Make) -> None:
    simulation = make(QUEUE, "workload.synthetic.arrivals={process: all_at_once}", "workload.synthetic.num_requests=50")
    times = Times(simulation)
    simulation.run()
    assert times.waits_ms() == [10.0 * index for index in range(50)]


SERVER = """
engine:
  num_gpu_blocks: 200
  max_num_seqs: 32
  max_model_len: 1024
  max_num_batched_tokens: 512
  speculative_config: {method: eagle3, num_speculative_tokens: 5}
workload:
  synthetic:
    num_requests: 150
    arrivals: {process: poisson, rate: 15}
    prompt_tokens: {distribution: uniform, min: 10, max: 300}
    output_tokens: {distribution: uniform, min: 10, max: 200}
events:
  - {type: reset_prefix_cache, every_s: 2, reset_running_requests: true}
  - {type: abort, rate_per_s: 1}
"""


class Population:
    """The integral over time of how many requests the scheduler has, in request-ns."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.last = 0
        self.number = 0
        self.area = 0
        simulation.add_observer(self)

    def _look(self, now: int, *facts: Any) -> None:
        self.area += self.number * (now - self.last)
        self.last = now
        scheduler = self.simulation.scheduler
        self.number = len(scheduler.running) + len(scheduler.waiting)

    arrived = scheduled = step_started = step_ended = updated = interrupted = closed = _look


@pytest.mark.parametrize("is_async", ["true", "false"])
def test_little_s_law(make: Make, is_async: str) -> None:
    """L = lambda W, over a run that begins and ends empty, is an identity of integers: the integral of the
    scheduler's own running and waiting lists is the sum of what each request spent there; with preemptions, resets
    and aborts."""
    simulation = make(SERVER, f"engine.async_scheduling={is_async}", check=True)
    times, population = Times(simulation), Population(simulation)
    simulation.run()
    assert simulation.stopped_by is None
    assert len(times.finish) == 150
    assert simulation.scheduler.num_preemptions > 10
    assert population.area == sum(times.finish[index] - times.taken_in[index] for index in times.finish)
    assert population.number == 0


STEPS = """
engine:
  num_gpu_blocks: 4000
  max_num_seqs: 64
  max_model_len: 1024
  max_num_batched_tokens: 2048
  speculative_config: {method: eagle3, num_speculative_tokens: 5}
acceptance: {model: geometric, rate: 0.8}
timing: {fixed_step_ms: 10, schedule_ms: 0, update_ms: 0}
workload:
  synthetic:
    num_requests: 64
    arrivals: {process: all_at_once}
    prompt_tokens: 20
    output_tokens: 300
"""


class Verifications:
    """Tokens that each verified frame yielded, and what was rejected in frames that did not end their request."""

    def __init__(self, simulation: Simulation) -> None:
        self.tokens: list[int] = []
        self.rejected_and_kept = 0
        self.num_kept = 0
        simulation.add_observer(self)

    def updated(self, now: int, returned: Returned) -> None:
        ended = {request.index for request in returned.finished}
        batch = returned.batch
        for request, drafts, sampled, rejected in zip(
            batch.requests, batch.drafts, returned.sampled, returned.rejected, strict=True
        ):
            if drafts:
                self.tokens.append(sampled)
                if request.index not in ended:
                    self.num_kept += 1
                    self.rejected_and_kept += rejected


def moments(rate: float, k: int) -> tuple[float, float]:
    """Mean and standard deviation of the tokens a step: 1 + the run of drafts accepted, cut at k."""
    chances = [rate**i * (1 - rate) for i in range(k)] + [rate**k]
    mean = sum((1 + i) * chance for i, chance in enumerate(chances))
    square = sum((1 + i) ** 2 * chance for i, chance in enumerate(chances))
    return mean, math.sqrt(square - mean**2)


@pytest.mark.parametrize("is_async", ["true", "false"])
@pytest.mark.parametrize(("rate", "k"), [(0.8, 5), (0.5, 3), (0.65, 7), (0.9, 1)])
def test_tokens_a_step(make: Make, rate: float, k: int, is_async: str) -> None:
    """(1 - a^(K + 1)) / (1 - a) for independent acceptance a; 3.69 for a = 0.8 and K = 5. Within 3.3 standard
    errors."""
    simulation = make(
        STEPS,
        f"engine.speculative_config.num_speculative_tokens={k}",
        f"acceptance.rate={rate}",
        f"engine.async_scheduling={is_async}",
    )
    seen = Verifications(simulation)
    simulation.run()
    mean, deviation = moments(rate, k)
    assert mean == pytest.approx((1 - rate ** (k + 1)) / (1 - rate))
    error = deviation / math.sqrt(len(seen.tokens))
    assert abs(np.mean(seen.tokens) - mean) < 3.3 * error
    assert error < 0.03


def test_garbage_rows_a_step(make: Make) -> None:
    """a = 0.8, K = 5: 6 - 3.69 = 2.31 rows of garbage lie in memory for each request and step, until the next step
    ends.

    Sync, with no host time, so what a step leaves is there for exactly the 10 ms of the next; the last step of a
    request leaves nothing, since its blocks are freed."""
    simulation = make(STEPS, "engine.async_scheduling=false")
    seen = Verifications(simulation)
    simulation.run()
    garbage_steps = simulation.ledger.content_slot_seconds()["garbage"] / 0.010
    assert garbage_steps == pytest.approx(seen.rejected_and_kept)
    mean, deviation = moments(0.8, 5)
    assert abs(garbage_steps / seen.num_kept - (6 - mean)) < 3.3 * deviation / math.sqrt(seen.num_kept)
    assert round(6 - mean, 2) == 2.31


@pytest.mark.parametrize(
    ("overrides", "tokens", "num_steps"),
    [
        # 300 tokens: the prefill's and 299 more.
        (["engine.speculative_config=null", "acceptance=null"], set(), 300),
        (["acceptance.rate=0"], {1}, 300),
        (["acceptance.rate=1"], {6}, 1 + 50),  # 299 = 49 x 6 + 5
    ],
    ids=["no-speculation", "acceptance-0", "acceptance-1"],
)
def test_no_speculation_no_acceptance_and_all(
    make: Make, overrides: list[str], tokens: set[int], num_steps: int
) -> None:
    """Exact: steps of 10 ms, 64 requests side by side."""
    simulation = make(STEPS, "engine.async_scheduling=false", *overrides, check=True)
    seen = Verifications(simulation)
    simulation.run()
    assert set(seen.tokens) == tokens
    assert simulation.num_steps == num_steps
    assert simulation.now == num_steps * 10_000_000
    assert simulation.scheduler.num_preemptions == 0
