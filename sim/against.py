"""A scenario against its twin: what a change costs or brings, seed by seed, and which part of speculation it is.

Twins have the same requests and the same draws: both are functions of the seed and the request, so that a pair differs
by the change alone. Differences are taken pair by pair, and their 95 percent intervals are Student's over the seeds.
Knows scenarios and summaries; must not know the engine or the terminal.

Against K = 0 the whole is taken apart by switching one part off at a time. With S the scenario, N its twin and a dash
for what is switched off (`SWITCHES`):

    part         (S - S_part) - (N - N_part)     the second bracket only where the switch means something without drafts
    all          (S - S_all) - (N - N_all)
    interaction  all - sum of the parts          what they do only together, or twice over
    speculation  S_all - N_all                   drafts verified and accepted, with none of the parts
    the whole    parts + interaction + speculation = S - N
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from sim import __version__, results
from sim.build import blocks_in, build, pool_bytes
from sim.observers.ledger import RESERVATION_CLASSES
from sim.outcome import Job
from sim.paired import CONFIDENCE, Interval, interval
from sim.policies.axes import rules_with, stale_names
from sim.policies.presets import PRESETS
from sim.scenario import (
    NEEDS_SPECULATION,
    Problem,
    Scenario,
    ScenarioError,
    drafter_kv,
    load_scenario,
    resolved_scenario,
)
from sim.workers import BackendGone, Inline, LocalWorkers, run_jobs

NO_SPECULATION: Final = "engine.speculative_config=null"
COMPARISON_TABLE: Final = "comparison.csv"

_CLASSES: Final = (
    "in_flight",
    "placeholder_accepted",
    "placeholder_rejected",
    "placeholder_discarded",
    "committed",
    "garbage",
    "lookahead",
    "slack",
    "cached",
    "free",
)
_LATENCIES: Final = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")

FIGURES: Final[dict[str, str]] = {
    "duration_s": "s",
    "kv_cache_usage_mean": "share of the pool",
    **{f"slot_seconds_{name}": "slot-seconds" for name in _CLASSES},
    **{f"share_{name}": "share of the pool" for name in _CLASSES},
    "byte_seconds_held": "byte-seconds",
    "content_slot_seconds_garbage": "slot-seconds",
    "drafter_byte_seconds": "byte-seconds",
    "num_preemptions": "preemptions",
    "recomputed_tokens": "tokens",
    "prefix_cache_hits": "tokens",
    "num_stale_tokens_dropped": "tokens",
    "num_ignored_tokens": "tokens",
    "request_throughput": "requests/s",
    "output_throughput": "tokens/s",
    **{f"{name}_{which}": "ms" for name in _LATENCIES for which in ("mean", "p99")},
}
"""What is compared, and its unit. `share_` is of all slot-seconds of its own pool, since twins' pools and durations may
differ; `byte_seconds_held` of all blocks that somebody holds; `drafter_byte_seconds` of a drafter's own pool."""


class AgainstFailed(Exception):
    """A comparison of which a run has no figures; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Part:
    """One row of the account: what it adds to each figure."""

    name: str
    switch: tuple[str, ...]
    """What turns it off, as overrides; empty for rows that are worked out from others."""
    note: str
    missing: str | None
    """Why it is not there in this scenario, so that it adds nothing; else None."""
    differences: dict[str, Interval]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A scenario and its twin over some seeds. `differences` are the scenario less its twin."""

    name: str
    id: str
    changes: tuple[str, ...]
    held_fixed: tuple[str, ...]
    seeds: tuple[int, ...]
    figures: dict[str, tuple[float, float]]
    """Mean over the seeds, of the scenario and of its twin."""
    differences: dict[str, Interval]
    parts: tuple[Part, ...]
    """Empty unless the twin is the scenario without speculation."""

    def as_json(self) -> dict[str, Any]:
        """The content of `comparison.json`."""
        return {
            "schema_version": results.SCHEMA_VERSION,
            "speckv": __version__,
            "name": self.name,
            "changes": list(self.changes),
            "held_fixed": list(self.held_fixed),
            "seeds": list(self.seeds),
            "confidence": CONFIDENCE,
            "figures": {
                name: {
                    "unit": FIGURES[name],
                    "scenario": self.figures[name][0],
                    "twin": self.figures[name][1],
                    "difference": _ends(difference),
                }
                for name, difference in self.differences.items()
            },
            "parts": [
                {
                    "name": part.name,
                    "switched_off_by": list(part.switch),
                    "note": part.note,
                    "missing": part.missing,
                    "differences": {name: _ends(difference) for name, difference in part.differences.items()},
                }
                for part in self.parts
            ],
        }

    def table(self) -> str:
        """The content of `comparison.csv`: a row a part and figure; the whole is called `whole`."""
        text = io.StringIO(newline="")
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(("part", "figure", "unit", "scenario", "twin", "difference", "low", "high", "num_seeds"))
        for name, whole in self.differences.items():
            rows.writerow(("whole", name, FIGURES[name], *self.figures[name], *_ends(whole).values(), len(self.seeds)))
        for part in self.parts:
            for name, found in part.differences.items():
                rows.writerow((part.name, name, FIGURES[name], None, None, *_ends(found).values(), len(self.seeds)))
        return text.getvalue()


def _ends(found: Interval) -> dict[str, float | None]:
    return {"mean": found.mean, "low": found.low, "high": found.high}


class _Facts(NamedTuple):
    """What a switch asks of a scenario."""

    scenario: Scenario
    num_lookahead_tokens: int
    hits_lose: bool
    """The drafter drops part of a hit."""


@dataclass(frozen=True, slots=True)
class Switch:
    """A part of what speculation costs, and how a scenario looks without it."""

    name: str
    off: tuple[str, ...]
    note: str
    missing: Callable[[_Facts], str | None]
    """Why a scenario does not have it, or None if it does."""
    in_twin: bool = False
    """The switch means something without speculation as well."""
    beside: str | None = None
    """Switched off beside this one, and counted from there."""


def _no_placeholders(facts: _Facts) -> str | None:
    return None if facts.scenario.engine.async_scheduling else "scheduling is synchronous: nothing is taken for granted"


def _no_discard(facts: _Facts) -> str | None:
    scenario = facts.scenario
    policies = scenario.engine.policies
    rules = rules_with(PRESETS[scenario.engine.preset], stale_when=policies.stale_when, stale_how=policies.stale_how)
    when, how = stale_names(rules)
    if how == "deliver":
        return "stale output is delivered"
    resets = any(event.type == "reset_prefix_cache" and event.reset_running_requests for event in scenario.events)
    return None if when == "any_preemption" or resets else "output is discarded after resets only, and there are none"


def _no_garbage(facts: _Facts) -> str | None:
    policies = facts.scenario.engine.policies
    undo = rules_with(PRESETS[facts.scenario.engine.preset], undo=policies.undo).undo
    if undo.frees:
        return "rejected blocks are freed at once"
    if undo.compacts:
        return "a token tree's rejections can only be compacted"
    return "worst_case reserves for good" if policies.reservation == "worst_case" else None


def _no_lookahead(facts: _Facts) -> str | None:
    return None if facts.num_lookahead_tokens else "no slots are reserved ahead"


def _no_drafter_kv(facts: _Facts) -> str | None:
    kind = drafter_kv(facts.scenario)
    return None if kind.in_target_blocks or kind.own_pool else "the drafter has no KV in any pool"


def _no_dropped_block(facts: _Facts) -> str | None:
    return None if facts.hits_lose else "a hit is a hit"


def _no_drafting_time(facts: _Facts) -> str | None:
    speculation = facts.scenario.engine.speculative_config
    if facts.scenario.timing.fixed_step_ms is not None:
        return "every step takes the same time"
    return "n-grams take no time" if speculation is None or speculation.method.startswith("ngram") else None


SWITCHES: Final = (
    Switch(
        "placeholders",
        ("engine.async_scheduling=false", "timing.schedule_ms=0", "timing.update_ms=0"),
        "slots taken for granted a step early; without it scheduling is synchronous, and host time 0, so that its gain "
        "in time is not counted against it",
        _no_placeholders,
        in_twin=True,
    ),
    Switch(
        "garbage",
        ("engine.policies.undo=rewind",),
        "blocks that only rejected drafts hold; without it they are freed as the sequence's end moves back",
        _no_garbage,
    ),
    Switch(
        "discard",
        ("engine.policies.stale_how=deliver",),
        "output in flight at a preemption that is thrown away; without it all is delivered",
        _no_discard,
        in_twin=True,
    ),
    Switch(
        "overhang",
        ("engine.policies.undo=free_rejected",),
        "whole blocks reserved beyond what is computed, between frames; counted from where garbage is off",
        _no_garbage,
        beside="garbage",
    ),
    Switch(
        "drafter_kv",
        ("engine.policies.drafter_kv=none", "engine.policies.drafter_pool_blocks=null"),
        "the drafter's keys and values; without them the same bytes hold more blocks of the target's",
        _no_drafter_kv,
    ),
    Switch(
        "lookahead",
        ("engine.policies.lookahead=false",),
        "K slots reserved ahead of each frame for what the drafter writes",
        _no_lookahead,
    ),
    Switch(
        "dropped_block",
        ("engine.policies.last_hit=drop_nothing",),
        "the end of each prefix hit that is computed again for its hidden states",
        _no_dropped_block,
    ),
    Switch(
        "drafting_time",
        ("timing.draft_step_us=0", "timing.draft_round_us=0"),
        "the drafter's own forwards",
        _no_drafting_time,
    ),
)
"""The first three are the article's overheads (its section 6.1). Later ones override earlier ones."""


def against(
    scenario: Scenario | str | Path,
    changes: Sequence[str] = (NO_SPECULATION,),
    seeds: int = 5,
    *,
    overrides: Sequence[str] = (),
    jobs: int = 1,
    watch: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare a scenario with the one that `changes` make of it, over `seeds` seeds from the scenario's own on.

    `changes` are overrides such as `"engine.watermark=0.02"`; `K=3` stands for that many drafts and `K=0` for no
    speculation. `overrides` hold for both. What the changes do not name is held fixed, a pool's bytes before its
    blocks: `Comparison.held_fixed` says it. `jobs` runs are made at a time; `watch` is told (runs done, runs in all).

    Raises:
        ScenarioError: the scenario or its twin cannot be run.
        ValueError: `seeds` or `jobs` is below 1.
        AgainstFailed: a run broke off, or its requests could never end.
    """
    if seeds < 1 or jobs < 1:
        raise ValueError(f"seeds and jobs must be at least 1, got {seeds} and {jobs}")
    if not isinstance(scenario, Scenario):
        scenario = load_scenario(scenario, overrides)
    elif overrides:
        raise TypeError("overrides belong to load_scenario where the scenario is loaded already")
    variants = _Variants(scenario, _spelled_out(changes))
    plans = variants.plans()
    first = variants.base.seed
    numbers = tuple(range(first, first + seeds))
    tasks: dict[str, tuple[str, Scenario]] = {}
    for name, plan in plans.items():
        for seed in numbers:
            seeded = variants.seeded(plan, seed)
            tasks.setdefault(seeded.digest(), (name, seeded))
    found = dict(zip(tasks, _measured(list(tasks.values()), jobs, watch), strict=True))
    series = {name: [found[variants.seeded(plan, seed).digest()] for seed in numbers] for name, plan in plans.items()}
    names = [name for name in FIGURES if all(row[name] is not None for rows in series.values() for row in rows)]

    def values(which: str, name: str) -> list[float]:
        return [float(row[name]) for row in series[which]]  # type: ignore[arg-type]

    def minus(one: list[float], other: list[float]) -> list[float]:
        return [x - y for x, y in zip(one, other, strict=True)]

    whole = {name: minus(values("scenario", name), values("twin", name)) for name in names}
    return Comparison(
        name=variants.base.name or "scenario",
        id=_id(variants.base, variants.changes),
        changes=variants.changes,
        held_fixed=variants.held_fixed(),
        seeds=numbers,
        figures={name: (sum(values("scenario", name)) / seeds, sum(values("twin", name)) / seeds) for name in names},
        differences={name: interval(pairs) for name, pairs in whole.items()},
        parts=_parts(variants, names, whole, values, minus) if variants.without_speculation else (),
    )


def _parts(
    variants: _Variants,
    names: list[str],
    whole: dict[str, list[float]],
    values: Callable[[str, str], list[float]],
    minus: Callable[[list[float], list[float]], list[float]],
) -> tuple[Part, ...]:
    """The parts, what they do together, and what is left of speculation without any of them."""
    nothing = [0.0] * len(next(iter(whole.values()), []))
    parts = []
    sums = {name: list(nothing) for name in names}
    for switch in SWITCHES:
        missing = variants.missing[switch.name]
        differences = {}
        for name in names:
            pairs = nothing
            if missing is None:
                pairs = minus(values(switch.beside or "scenario", name), values(switch.name, name))
                if switch.in_twin:
                    pairs = minus(pairs, minus(values("twin", name), values(f"twin {switch.name}", name)))
            sums[name] = [x + y for x, y in zip(sums[name], pairs, strict=True)]
            differences[name] = interval(pairs)
        parts.append(Part(switch.name, switch.off, switch.note, missing, differences))
    together, bare = {}, {}
    for name in names:
        left = minus(values("all", name), values("twin all", name))
        bare[name] = interval(left)
        together[name] = interval(minus(minus(whole[name], left), sums[name]))
    parts.append(Part("interaction", (), "all switched off at once, less the parts one by one", None, together))
    parts.append(Part("speculation", (), "drafts verified and accepted, with all parts switched off", None, bare))
    return tuple(parts)


def figures(summary: Mapping[str, int | float | None]) -> dict[str, float | None]:
    """A flat summary's figures by `FIGURES`; None for what there is none of."""
    slots = {name: float(summary[f"slot_seconds_{name}"] or 0) for name in RESERVATION_CLASSES}
    pool = sum(slots.values())
    slot_bytes = float(summary["block_bytes"] or 0) / float(summary["block_size"] or 1)
    found: dict[str, float | None] = {
        "kv_cache_usage_mean": summary["kv_cache_usage_perc_mean"],
        "byte_seconds_held": (pool - slots["cached"] - slots["free"]) * slot_bytes,
        "drafter_byte_seconds": summary.get("drafter_pool_byte_seconds", 0.0),
    }
    for name in _CLASSES:
        found[f"share_{name}"] = float(summary[f"slot_seconds_{name}"] or 0) / pool if pool else 0.0
    return {name: found[name] if name in found else summary[name] for name in FIGURES}


def _measured(
    scenarios: list[tuple[str, Scenario]], jobs: int, watch: Callable[[int, int], None] | None
) -> list[dict[str, float | None]]:
    """Figures of each scenario, in order; with what it is in the comparison."""
    found: dict[int, dict[str, float | None]] = {}
    backend = Inline() if jobs == 1 else LocalWorkers(min(jobs, len(scenarios)))
    todo = (Job(number, scenario) for number, (_, scenario) in enumerate(scenarios))
    try:
        for job, outcome in run_jobs(backend, todo):
            reason = outcome.error
            if outcome.stopped_by in ("stalled", "livelock"):
                reason = f"requests can never end here: {outcome.stopped_by}"
            if reason is not None:
                raise AgainstFailed(f"{_called(scenarios[job.number][0])}, seed {job.scenario.seed}: {reason}")
            found[job.number] = figures(outcome.figures)
            if watch is not None:
                watch(len(found), len(scenarios))
    except BackendGone as error:
        raise AgainstFailed(str(error)) from error
    finally:
        backend.close()
    return [found[number] for number in range(len(scenarios))]


def _called(plan: str) -> str:
    """How a message calls one of `_Variants.plans`."""
    if plan in ("scenario", "twin"):
        return f"the {plan}"
    whose, part = ("the twin", plan.removeprefix("twin ")) if plan.startswith("twin ") else ("the scenario", plan)
    return f"{whose} with {'all parts' if part == 'all' else part} switched off"


def _spelled_out(changes: Sequence[str]) -> tuple[str, ...]:
    spelled = []
    for change in changes:
        key, _, value = change.partition("=")
        if key.strip() != "K":
            spelled.append(change)
        elif value.strip() == "0":
            spelled.append(NO_SPECULATION)
        else:
            spelled.append(f"engine.speculative_config.num_speculative_tokens={value.strip()}")
    return tuple(spelled)


class _Variants:
    """The scenarios of one comparison."""

    def __init__(self, base: Scenario, changes: tuple[str, ...]) -> None:
        if not changes:
            raise ScenarioError([Problem("there is nothing to compare with", "--against", allowed="KEY=VALUE")])
        if self._named("seed", changes):
            raise ScenarioError(
                [Problem("twins have the same seed", "--against", "seed", "--seeds N, or --set seed=N")]
            )
        self.base = base
        self.changes = changes
        self._kv_bytes = None if self._named("engine.num_gpu_blocks", changes) else pool_bytes(base)
        twin = self.made(self._twin_overrides())
        if twin.digest() == base.digest():
            raise ScenarioError(
                [
                    Problem(
                        "changes nothing", "--against", ", ".join(changes), "something that the scenario does not say"
                    )
                ]
            )
        self.without_speculation = changes == (NO_SPECULATION,) and base.engine.speculative_config is not None
        self.missing: dict[str, str | None] = {}
        self._lookahead = "null"
        if self.without_speculation:
            settings = build(base).settings
            hits_lose = settings.enable_prefix_caching and (
                settings.drop_last_hit_block or settings.hit_margin_tokens > 0
            )
            facts = _Facts(base, settings.num_lookahead_tokens, hits_lose)
            self.missing = {switch.name: switch.missing(facts) for switch in SWITCHES}
            self._lookahead = "true" if settings.num_lookahead_tokens else "false"

    @staticmethod
    def _named(key: str, changes: tuple[str, ...]) -> bool:
        return any(change.partition("=")[0].strip() == key for change in changes)

    def _twin_overrides(self) -> list[str]:
        policies = self.base.engine.policies
        extra = []
        if NO_SPECULATION in self.changes:
            extra = [f"engine.policies.{key}=null" for key in NEEDS_SPECULATION if getattr(policies, key) is not None]
        return [*self.changes, *extra]

    def made(self, overrides: Sequence[str]) -> Scenario:
        """The base with these overrides, and with as many blocks as go into the base's bytes."""
        resolved = self.base.resolved()
        variant = resolved_scenario(resolved, self.base.file, overrides)
        if self._kv_bytes is None:
            return variant
        blocks = blocks_in(variant, self._kv_bytes)
        if blocks == variant.engine.num_gpu_blocks:
            return variant
        return resolved_scenario(resolved, self.base.file, [*overrides, f"engine.num_gpu_blocks={blocks}"])

    def seeded(self, plan: Scenario, seed: int) -> Scenario:
        """The same with another seed."""
        return plan if plan.seed == seed else resolved_scenario(plan.resolved(), plan.file, [f"seed={seed}"])

    def plans(self) -> dict[str, Scenario]:
        """The scenario, its twin, and both with parts switched off, by what they are called in `_parts`."""
        twin = self._twin_overrides()
        plans = {"scenario": self.base, "twin": self.made(twin)}
        if not self.without_speculation:
            return plans
        there = [switch for switch in SWITCHES if self.missing[switch.name] is None]
        everything: list[str] = []
        everything_in_twin: list[str] = []
        for switch in there:
            off = list(switch.off)
            everything += off
            if (
                switch.name == "drafter_kv"
            ):  # Without KV in the blocks nothing is reserved ahead: ask for it, to hold it.
                off.append(f"engine.policies.lookahead={self._lookahead}")
            plans[switch.name] = self.made(off)
            if switch.in_twin:
                everything_in_twin += off
                plans[f"twin {switch.name}"] = self.made([*twin, *off])
        plans["all"] = self.made(everything)
        plans["twin all"] = self.made([*twin, *everything_in_twin])
        return plans

    def held_fixed(self) -> tuple[str, ...]:
        """What a pair has in common, in words."""
        common = ["requests and draws, by seed", "every key of the scenario that the changes do not name, as resolved"]
        if self._kv_bytes is not None:
            blocks = self.made(self._twin_overrides()).engine.num_gpu_blocks
            common.append(
                f"bytes of KV, {self._kv_bytes:,} on a rank: {self.base.engine.num_gpu_blocks} blocks, and {blocks} "
                "in the twin"
            )
        elif self._named("engine.num_gpu_blocks", self.changes):
            common.append("not the bytes of KV: the changes set the blocks")
        else:
            common.append("the card and gpu_memory_utilization: a drafter's weights leave less room for KV")
        return tuple(common)


def _id(base: Scenario, changes: tuple[str, ...]) -> str:
    """The folder's name: the run's, and what it was held against where that is not K = 0."""
    folder = results.run_folder(Path(), base.name or "scenario", base.digest(), base.seed).name
    if changes == (NO_SPECULATION,):
        return f"{folder}-against"
    return f"{folder}-against-{hashlib.sha256(json.dumps(changes).encode()).hexdigest()[:6]}"


def write(comparison: Comparison, out: Path) -> Path:
    """Write both files into `out/<name>/<id>-against/` and return the folder. Raises OSError."""
    folder = out / comparison.name / comparison.id
    folder.mkdir(parents=True, exist_ok=True)
    results.write_json(folder / results.COMPARISON, comparison.as_json())
    (folder / COMPARISON_TABLE).write_text(comparison.table(), encoding="utf-8", newline="")
    return folder
