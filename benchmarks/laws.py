"""The laws of `docs/ledger.md` on random scenarios over all presets and policies, pools from starved to ample.

    python benchmarks/laws.py [--count 500] [--first 0] [--jobs 1]

Each number is a scenario of its own: a preset (in turn), some axes set otherwise, a drafter, a pool, requests, resets
and aborts, all drawn from the number. It runs with `--check` semantics: laws 1 to 6 are held at every record. Beside
them are held, where the draw allows: law 7 (acceptance 1 leaves no garbage, acceptance 0 gives one token a step, an
ample pool never preempts) and law 8 (each request that nobody aborts gets the tokens it asked for). Combinations that
the scenario refuses are drawn again and counted. Presets and axes with a known loss (`count_frames`) may lose tokens;
their losses are counted instead, and once something was preempted such a run may end early, as the engine that it
follows would.

Exits with 1 if a law does not hold; the overrides that show it are printed.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from sim.build import RequestNeverFits, Simulation, build
from sim.core.request import Request
from sim.observers.invariants import LawBroken
from sim.policies.axes import AXES
from sim.policies.presets import PRESETS
from sim.records import Batch, Interruption, Returned
from sim.scenario import Scenario, ScenarioError, load_scenario

POOLS: Final = ("starved", "tight", "roomy", "ample")
"""The smallest that the scenario takes; 2 blocks more; 1.5 times as many; room for all requests at once."""
METHODS: Final = ("none", "ngram", "ngram_gpu", "eagle3", "eagle3", "eagle", "mtp", "draft_model", "draft_model")
TREES: Final = ([2, 1], [1, 2], [3, 2, 1], [1, 1, 1])
MOST_STEPS: Final = 3000
"""More than any of these needs; where the loss of a preset lets a request run in circles the run ends there."""


@dataclass
class Drawn:
    """One scenario."""

    number: int
    preset: str
    pool: str
    axes: dict[str, str]
    overrides: list[str]
    num_gpu_blocks: int
    refused: list[str] = field(default_factory=list)
    """Reasons, of draws before this one."""

    @property
    def all_overrides(self) -> list[str]:
        """With its pool."""
        return [*self.overrides, f"engine.num_gpu_blocks={self.num_gpu_blocks}"]


@dataclass
class Found:
    """What a run came to."""

    drawn: Drawn
    broken: str | None = None
    ended: str = "end"
    losses: int = 0
    preemptions: int = 0
    steps: int = 0
    records: int = 0


def scenario_of(overrides: list[str]) -> Scenario:
    """The shipped scenario `minimal` with these overrides."""
    return load_scenario("minimal", overrides)


def draw(number: int) -> Drawn:
    """Scenario `number`; combinations that are refused are drawn again."""
    preset = tuple(PRESETS)[number % len(PRESETS)]
    refused: list[str] = []
    for attempt in range(200):
        rng = random.Random(f"laws {number} {attempt}")
        pool = rng.choice(POOLS)
        axes, overrides = _engine(rng, preset)
        overrides += _load(rng)
        try:
            smallest = _smallest_pool(overrides)
        except ScenarioError as error:
            refused.append(str(error))
            continue
        blocks = {
            "starved": smallest,
            "tight": smallest + 2,
            "roomy": smallest + smallest // 2 + 1,
            "ample": 12 * smallest,
        }[pool]
        return Drawn(number, preset, pool, axes, overrides, blocks, refused)
    raise RuntimeError(f"scenario {number}: 200 draws in a row were refused, the last for {refused[-1]}")


def _engine(rng: random.Random, preset: str) -> tuple[dict[str, str], list[str]]:
    """Drawn settings of the engine: the axes set otherwise, and the overrides."""
    method = rng.choice(METHODS)
    k = 0 if method == "none" else rng.choice([1, 2, 3, 5, 7])
    axes = {name: rng.choice(values) for name, values in AXES.items() if rng.random() < 0.35}
    policies: dict[str, Any] = dict(axes)
    if axes.get("undo") == "compact" and k:
        tree = rng.choice(TREES)
        policies["tree_widths"], k = tree, sum(tree)
    if rng.random() < 0.2:
        policies["lookahead"] = rng.choice(["true", "false"])
    if axes.get("drafter_kv", "").startswith("own") and rng.random() < 0.5:
        policies["drafter_pool_blocks"] = rng.choice([1, 4, 30])
    speculation = "null"
    if k:
        speculation = f"{{method: {method}, num_speculative_tokens: {k}"
        if method == "draft_model":
            speculation += ", model: llama-3.2-1b"
        if rng.random() < 0.15:
            speculation += f", num_speculative_tokens_per_batch_size: [[1, 2, {k}], [4, 5, 1]]"
        speculation += "}"
    size = rng.choice([1, 2, 4, 16])
    longest = rng.choice([90, 2000])
    overrides = [
        f"engine.preset={preset}",
        f"engine.speculative_config={speculation}",
        "engine.policies={" + ", ".join(f"{name}: {value}" for name, value in policies.items()) + "}",
        f"engine.block_size={size}",
        f"engine.max_model_len={longest}",
        f"engine.max_num_seqs={rng.choice([2, 8])}",
        f"engine.max_num_batched_tokens={rng.choice([32, 64, 500])}",
        f"engine.enable_prefix_caching={rng.choice(['true', 'true', 'false'])}",
        f"engine.watermark={rng.choice([0.0, 0.0, 0.1])}",
        f"engine.scheduling_policy={rng.choice(['fcfs', 'fcfs', 'priority'])}",
        f"engine.long_prefill_token_threshold={rng.choice([0, 0, 16])}",
        f"engine.async_scheduling={rng.choice(['null', 'null', 'false'])}",
        f"timing.schedule_ms={rng.choice([0, 0.3, 4])}",
        f"timing.update_ms={rng.choice([0, 0.2, 3])}",
        f"acceptance={{model: geometric, rate: {rng.choice([0.0, 0.5, 0.8, 1.0])}}}",
        f"limits.max_steps={MOST_STEPS}",
        f"seed={rng.randrange(1000)}",
    ]
    if axes.get("draft_length") != "best_by_cost" and rng.random() < 0.5:
        overrides.append("timing.fixed_step_ms=5")
    return axes, overrides


def _load(rng: random.Random) -> list[str]:
    """Drawn requests and events."""
    arrivals = rng.choice(["{process: all_at_once}", "{process: poisson, rate: 20}", "{process: poisson, rate: 100}"])
    shared = rng.choice(["", ", shared_prefix: {count: 2, tokens: 17, fraction: 0.7}"])
    talk = rng.choice(["", "", ", conversations: {turns: 2}"])
    count = rng.randint(2, 6) if talk else rng.randint(2, 9)
    priority = ", priority: {levels: [0, 1, 2]}"
    overrides = [
        f"workload={{synthetic: {{num_requests: {count}, arrivals: {arrivals}, prompt_tokens: {{distribution: uniform, "
        f"min: 1, max: {rng.choice([6, 25])}}}, output_tokens: {{distribution: uniform, min: 1, max: 20}}"
        f"{shared}{talk}{priority}}}}}"
    ]
    events = []
    for _ in range(rng.choice([0, 0, 1, 3])):
        events.append(
            f"{{type: reset_prefix_cache, reset_running_requests: {rng.choice(['true', 'true', 'false'])}, "
            f"at_s: {rng.randrange(1, 300) / 1000}}}"
        )
    for _ in range(rng.choice([0, 0, 2])):
        events.append(f"{{type: abort, request: {rng.randrange(count)}, at_s: {rng.randrange(1, 300) / 1000}}}")
    overrides.append(f"events=[{', '.join(events)}]")
    return overrides


def _smallest_pool(overrides: list[str]) -> int:
    """Blocks of the smallest pool in which the scenario is taken. Raises ScenarioError if none is."""
    low, high = 1, 400
    build(scenario_of([*overrides, f"engine.num_gpu_blocks={high}"]))
    while high - low > 1:
        middle = (low + high) // 2
        try:
            build(scenario_of([*overrides, f"engine.num_gpu_blocks={middle}"]))
            high = middle
        except ScenarioError:
            low = middle
    return high


class Watch:
    """What laws 7 and 8 ask: who got what, and what frames and content showed."""

    def __init__(self, simulation: Simulation) -> None:
        self._ledger = simulation.ledger
        self.asked: dict[int, Request] = {}
        self.delivered: Counter[int] = Counter()
        self.aborted: set[int] = set()
        self.most_garbage = 0
        self.frames: list[tuple[int, int]] = []
        """(drafts, sampled) of frames that sampled."""
        self.resets = 0

    def arrived(self, now: int, request: Request) -> None:
        self.asked[request.index] = request

    def scheduled(self, now: int, batch: Batch) -> None:
        self.most_garbage = max(self.most_garbage, self._ledger.content_garbage)

    def step_ended(self, now: int, batch: Batch) -> None:
        self.most_garbage = max(self.most_garbage, self._ledger.content_garbage)

    def updated(self, now: int, returned: Returned) -> None:
        for request, delivered in zip(returned.batch.requests, returned.delivered, strict=True):
            self.delivered[request.index] += delivered
        self.frames += [row for row in zip(returned.batch.drafts, returned.sampled, strict=True) if row[1]]

    def interrupted(self, now: int, interruption: Interruption) -> None:
        if interruption.kind == "abort":
            self.aborted.update(request.index for request in interruption.requests)
        else:
            self.resets += len(interruption.requests)


def run(number: int, attach: Callable[[Simulation], None] | None = None) -> Found:
    """Draw scenario `number`, run it under check, and hold the laws. `attach` may add observers before it runs."""
    drawn = draw(number)
    while True:
        try:
            return _run(drawn, attach)
        except RequestNeverFits:  # The second turn of a conversation, which is known only when it comes.
            drawn.num_gpu_blocks += 1 + drawn.num_gpu_blocks // 8


def _run(drawn: Drawn, attach: Callable[[Simulation], None] | None) -> Found:
    scenario = scenario_of(drawn.all_overrides)
    simulation = build(scenario, check=True)
    watch = Watch(simulation)
    simulation.add_observer(watch)
    if attach is not None:
        attach(simulation)
    found = Found(drawn)
    try:
        simulation.run()
    except LawBroken as broken:
        found.broken = str(broken)
    else:
        found.broken = next(_broken(scenario, drawn, simulation, watch), None)
    assert simulation.invariants is not None
    found.ended = simulation.stopped_by or "end"
    found.losses = simulation.invariants.num_losses
    found.records = simulation.invariants.num_records
    found.preemptions = simulation.scheduler.num_preemptions
    found.steps = simulation.num_steps
    return found


def _broken(scenario: Scenario, drawn: Drawn, simulation: Simulation, watch: Watch) -> Iterator[str]:
    """What does not hold of laws 7 and 8, and of how a run ends."""
    scheduler, invariants = simulation.scheduler, simulation.invariants
    assert invariants is not None
    preempted = scheduler.num_preemptions > 0
    if invariants.lossy and (preempted or simulation.stopped_by == "crash"):
        return  # What it loses has been counted.
    if simulation.stopped_by is not None:
        yield f"ended by {simulation.stopped_by}: {simulation.crash or simulation.stalled}"
        return
    if scheduler.requests or scheduler.pool.num_free != simulation.settings.num_gpu_blocks - 1:
        yield f"law 2: blocks are held at the end: {scheduler.pool.num_free} free"
    for index, request in watch.asked.items():
        most = min(request.max_tokens, simulation.settings.max_model_len - request.num_prompt_tokens)
        if index in watch.aborted:
            if watch.delivered[index] > most:
                yield f"law 8: aborted request {index} was given {watch.delivered[index]} of {most} tokens"
        elif watch.delivered[index] != most:
            yield f"law 8: request {index} was given {watch.delivered[index]} of {most} tokens"
    if drawn.pool == "ample" and scheduler.num_preemptions > watch.resets:
        yield f"law 7: {scheduler.num_preemptions} preemptions in an ample pool, {watch.resets} by resets"
    rate = getattr(scenario.acceptance, "rate", None)
    pool = simulation.drafter_pool
    all_drafted = pool is None or pool.num_refused == 0
    if rate == 1.0 and all_drafted and scenario.engine.policies.tree_widths is None:
        if watch.most_garbage:
            yield f"law 7: acceptance 1, and {watch.most_garbage} slots of garbage"
        if any(sampled != 1 + drafts for drafts, sampled in watch.frames):
            yield "law 7: acceptance 1, and a frame that was not accepted in full"
    if rate == 0.0 and any(sampled != 1 for _, sampled in watch.frames):
        yield "law 7: acceptance 0, and a step of more than a token"


def main() -> None:
    """Run them and say what held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    numbers = range(arguments.first, arguments.first + arguments.count)
    if arguments.jobs == 1:
        found = [run(number) for number in numbers]
    else:
        with ProcessPoolExecutor(arguments.jobs) as executor:
            found = list(executor.map(run, numbers, chunksize=10))
    broken = [each for each in found if each.broken]
    for each in broken:
        print(f"scenario {each.drawn.number} ({each.drawn.preset}, {each.drawn.pool}): {each.broken}")
        print(
            "  speckv run minimal --check " + " ".join(f"--set '{override}'" for override in each.drawn.all_overrides)
        )
    print(f"{len(found) - len(broken)} of {len(found)} hold; {sum(each.records for each in found):,} records looked at")
    print(f"{sum(each.steps for each in found):,} steps, {sum(each.preemptions for each in found):,} preemptions")
    print(f"refused and drawn again: {sum(len(each.drawn.refused) for each in found)}")
    print(f"{'preset':<16}{'runs':>6}{'preempting':>12}{'losses':>8}  ended by")
    for preset in PRESETS:
        rows = [each for each in found if each.drawn.preset == preset]
        ended = Counter(each.ended for each in rows)
        print(
            f"{preset:<16}{len(rows):>6}{sum(each.preemptions > 0 for each in rows):>12}"
            f"{sum(each.losses > 0 for each in rows):>8}  {', '.join(f'{why} {n}' for why, n in sorted(ended.items()))}"
        )
    print("pools: " + ", ".join(f"{name} {sum(each.drawn.pool == name for each in found)}" for name in POOLS))
    for axis, values in AXES.items():
        counts = Counter(each.drawn.axes.get(axis) for each in found)
        print(f"{axis}: " + ", ".join(f"{value} {counts[value]}" for value in values))
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
