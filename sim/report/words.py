"""What a report says in sentences: the question that a run or a sweep answers, and what stands out.

Knows scenarios as they are resolved, summaries and their units; must not know HTML or files. Names come from scenarios
as they are: whoever writes them into a page escapes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

Settings = Mapping[str, Any]
"""A scenario as the manifest has it."""


def run_question(scenario: Settings) -> str:
    """What a run asks, from its settings."""
    where = f"{_name(scenario['model'])} on {_name(scenario['hardware'])}"
    load = _load(scenario["workload"])
    speculation = scenario["engine"]["speculative_config"]
    if speculation is None:
        return f"Where does the KV cache of {where} go without speculative decoding, under {load}?"
    return (
        f"What does speculative decoding with {speculation['method']} and {drafts(speculation)} do to the KV cache of "
        f"{where}, under {load}?"
    )


def drafts(speculation: Settings) -> str:
    """How many drafts a frame gets, in words."""
    table = speculation.get("num_speculative_tokens_per_batch_size")
    return "K by batch size" if table else f"K = {speculation['num_speculative_tokens']}"


def sweep_question(axes: Sequence[str], num_points: int, num_seeds: int) -> str:
    """What a sweep asks, from its axes."""
    names = [axis.rpartition(".")[2] for axis in axes]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    seeds = "one seed" if num_seeds == 1 else f"{num_seeds} seeds"
    same = "with the same requests and draws at every point"
    return f"What changes with {listed}? {num_points:,} points, {seeds} each, {same}."


def main_settings(scenario: Settings) -> list[tuple[str, str]]:
    """The settings that a reader asks for first, as (what, value)."""
    engine = scenario["engine"]
    speculation = engine["speculative_config"]
    told = "none" if speculation is None else f"{speculation['method']}, {drafts(speculation)}"
    if speculation is not None and speculation.get("model"):
        told += f", {_name(speculation['model'])}"
    acceptance = scenario.get("acceptance")
    rows = [
        ("engine", str(engine["preset"])),
        ("model", _name(scenario["model"])),
        ("hardware", f"{_name(scenario['hardware'])}, tensor parallel {engine['tensor_parallel_size']}"),
        ("speculation", told),
    ]
    if speculation is not None and isinstance(acceptance, Mapping):
        rows.append(
            ("acceptance", ", ".join(f"{key} {value}" for key, value in acceptance.items() if value is not None))
        )
    rows += [
        ("workload", _load(scenario["workload"])),
        ("sequences, tokens a step", f"{engine['max_num_seqs']}, {engine['max_num_batched_tokens']}"),
        ("scheduling", "asynchronous" if engine["async_scheduling"] else "synchronous"),
        ("prefix caching", "on" if engine["enable_prefix_caching"] else "off"),
    ]
    limits = [f"{key} {value:g}" for key, value in scenario["slo"].items() if value is not None]
    rows.append(("limits (slo)", ", ".join(limits) or "none"))
    policies = [f"{key} {value}" for key, value in engine["policies"].items() if value is not None]
    if policies:
        rows.append(("policies", ", ".join(policies)))
    return rows


def flat_settings(value: Any, key: str = "") -> list[tuple[str, str]]:
    """All settings under their dotted keys, in the order of the scenario."""
    if isinstance(value, Mapping) and value:
        inner = [(f"{key}.{name}" if key else str(name), part) for name, part in value.items()]
        return [row for name, part in inner for row in flat_settings(part, name)]
    if value is None:
        return [(key, "null")]
    if isinstance(value, bool):
        return [(key, "true" if value else "false")]
    return [(key, str(value))]


def findings(summary: Mapping[str, Any]) -> list[str]:
    """What stands out in a run, a sentence each."""
    said = [_speed(summary), _latency(summary), _cache(summary)]
    if summary["num_drafts"]:
        said += [_speculation(summary), _room(summary)]
    return [sentence for sentence in said if sentence]


def number(value: float | None) -> str:
    """A figure for people: four digits, or whole if it has more."""
    if value is None:
        return "–"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _speed(summary: Mapping[str, Any]) -> str:
    text = (
        f"{summary['num_finished']:,} of {summary['num_requests']:,} requests finished in "
        f"{number(summary['duration_s'])} s of simulated time: {number(summary['output_throughput'])} tokens and "
        f"{number(summary['request_throughput'])} requests a second."
    )
    goodput = summary["request_goodput"]
    if goodput is not None:
        share = goodput / summary["request_throughput"] if summary["request_throughput"] else 0.0
        text += f" Within all limits: {number(goodput)} requests a second, {share:.1%} of those finished."
    return text


def _latency(summary: Mapping[str, Any]) -> str:
    ttft, tpot = summary["ttft_ms"], summary["tpot_ms"]
    if ttft["median"] is None:
        return ""
    half, most = _time(ttft["median"]), _time(ttft["p99"])
    text = f"Half of the requests had their first token after {half}, 99 percent after {most}"
    if tpot["mean"] is None:
        return f"{text}."
    return f"{text}; a token after the first took {_time(tpot['mean'])} on average."


def _cache(summary: Mapping[str, Any]) -> str:
    usage, preemptions = summary["kv_cache_usage_perc"], summary["num_preemptions"]
    text = f"{usage['mean'] or 0:.1%} of the pool's blocks were held on average, {usage['max'] or 0:.1%} at most. "
    if not preemptions:
        return text + "No request was preempted."
    share = summary["recomputed_tokens"] / summary["num_output_tokens"] if summary["num_output_tokens"] else 0.0
    return (
        f"{text}{preemptions:,} preemptions made {summary['recomputed_tokens']:,} tokens be computed again, "
        f"{share:.1%} as many as were delivered."
    )


def _speculation(summary: Mapping[str, Any]) -> str:
    accepted = summary["num_accepted_tokens"] / summary["num_draft_tokens"] if summary["num_draft_tokens"] else 0.0
    return (
        f"A verification gave {number(summary['mean_acceptance_length'])} tokens on average; {accepted:.1%} of "
        f"{summary['num_draft_tokens']:,} drafts were accepted."
    )


def _room(summary: Mapping[str, Any]) -> str:
    slots = summary["slot_seconds"]
    whole = sum(value for name, value in slots.items() if not name.startswith("placeholder_"))
    if not whole:
        return ""
    content = summary["content_slot_seconds"]
    return (
        f"Of the pool's room, over time, drafts in flight took {slots['placeholder'] / whole:.2%} "
        f"({slots['placeholder_rejected'] / whole:.2%} for drafts that were rejected) and lookahead "
        f"{slots['lookahead'] / whole:.2%}. Of what device memory holds, which is another account, "
        f"{content['garbage'] / whole:.2%} was garbage of rejected drafts."
    )


def _time(milliseconds: float) -> str:
    return f"{number(milliseconds / 1000)} s" if milliseconds >= 1000 else f"{number(milliseconds)} ms"


def _name(value: Any) -> str:
    """A model or a card, by name or by what it is made of."""
    if isinstance(value, Mapping):
        named = value.get("name") or value.get("path") or value.get("config")
        return _name(named) if named else "a model of its own" if "num_layers" in value else "hardware of its own"
    text = str(value)
    return PurePath(text).name if "/" in text and text.endswith((".json", ".yaml")) else text


def _load(workload: Settings) -> str:
    trace, synthetic = workload.get("trace"), workload.get("synthetic")
    if trace is not None:
        file = PurePath(str(trace.get("path") or "a trace")).name
        scale = trace.get("time_scale")
        return f"the requests of {file}" + (f" at {scale:g} times its pace" if scale not in (None, 1) else "")
    if synthetic is not None:
        arrivals = synthetic["arrivals"]
        count = synthetic.get("num_requests")
        requests = f"{count:,} requests" if count else "requests"
        process = str(arrivals["process"]).replace("_", " ")
        if arrivals.get("rate") is not None:
            return f"{requests} at {arrivals['rate']:g} a second ({process})"
        return f"{requests} ({process})"
    kind = next((name for name, value in workload.items() if value is not None), None)
    return "its workload" if kind is None else f"a workload from {kind}"
