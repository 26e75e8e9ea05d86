"""Random scripted cases over every setting of the case format, and how a failing one is made smaller.

Knows the case format and what a vLLM scheduler accepts. Must not know traces, vLLM or the simulator.

One function draws a case from a ``random.Random``. Seeded, it gives a reproducible sequence; handed the generator that
hypothesis controls, it is a hypothesis strategy. A failing case of the first kind is made smaller by a strategy of its
own, whose simplest value is the emptiest case and whose usual value is the case as it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = ["Case", "case_strategy", "random_case", "reduction_strategy", "seeded_case"]

Case = dict[str, Any]
"""A scripted case as JSON gives it: ``format``, ``name``, ``engine``, ``requests``, ``events``."""

_METHODS = ("none", "ngram", "ngram_gpu", "eagle3", "eagle3", "draft_model")
_BLOCK_SIZES = (1, 2, 2, 3, 4, 4, 4, 5, 7, 8, 8, 16, 16, 32)
_UNTOUCHED = 1 << 20  # a draw as large as this leaves what it reduces as it is


def seeded_case(seed: int, index: int) -> Case:
    """Case number ``index`` of the sequence that ``seed`` starts; equal arguments give equal cases."""
    case = random_case(random.Random(f"{seed}:{index}"))
    case["name"] = f"random-{seed}-{index}"
    return case


def random_case(rng: random.Random) -> Case:
    """A case that every release from 0.24 on accepts.

    The bounds are vLLM's own: ``max_num_batched_tokens >= max_num_seqs``, ``long_prefill_token_threshold <=
    max_model_len``, prompts shorter than ``max_model_len``. A pool too small for a request is accepted, and left in
    some cases: the request then waits for good, which is a decision as well.
    """
    engine = _random_engine(rng)
    focus = rng.random()
    if focus < 0.15:
        _focus_on_padding(rng, engine)
    elif focus < 0.35:
        _focus_on_preemption(rng, engine)
    crowded = 0.15 <= focus < 0.35
    requests = _random_requests(rng, engine, 0.6 if focus < 0.15 else 0.2, crowded)
    if rng.random() < (0.5 if focus < 0.15 else 0.15):
        # Room for the longest prompt and hardly more: the model's length ends frames, padding and requests.
        longest = max(_num_prompt_tokens(request) for request in requests)
        engine["max_model_len"] = longest + 1 + rng.randint(0, engine["num_speculative_tokens"] + 3)
        threshold = engine["long_prefill_token_threshold"]
        engine["long_prefill_token_threshold"] = min(threshold, engine["max_model_len"])
    engine["num_gpu_blocks"] = _random_pool(rng, engine, requests, crowded)
    return {"format": 1, "name": "random", "engine": engine, "requests": requests,
            "events": _random_events(rng, requests)}  # fmt: skip


def _random_engine(rng: random.Random) -> dict[str, Any]:
    method = rng.choice(_METHODS)
    num_drafts = 0 if method == "none" else rng.randint(1, 9)
    max_num_seqs = rng.choice((1, 2, 2, 3, 4, 6, 8, 16, 24))
    budget = max_num_seqs + rng.choice((rng.randint(0, 4), rng.randint(0, 30), rng.randint(10, 100), 2000))
    max_model_len = rng.choice((rng.randint(6, 40), rng.randint(40, 120), rng.randint(100, 400), 4096))
    threshold = 0
    if rng.random() < 0.3:
        # At or below K it cuts into padded frames, which some releases refuse by an assertion.
        lowest = 1 if rng.random() < 0.1 else num_drafts + 1
        threshold = min(max_model_len, rng.randint(lowest, lowest + 30))
    engine: dict[str, Any] = {
        "async_scheduling": rng.random() < 0.7,
        "method": method,
        "num_speculative_tokens": num_drafts,
        "block_size": rng.choice(_BLOCK_SIZES) if rng.random() < 0.9 else rng.randint(1, 32),
        "num_gpu_blocks": 2,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": budget,
        "max_model_len": max_model_len,
        "enable_prefix_caching": rng.random() < 0.85,
        "watermark": 0.0 if rng.random() < 0.6 else rng.randint(1, 30) / 100,
        "policy": "priority" if rng.random() < 0.3 else "fcfs",
        "long_prefill_token_threshold": threshold,
    }
    if num_drafts and rng.random() < 0.2:
        engine["num_speculative_tokens_per_batch_size"] = _random_table(rng, num_drafts, max_num_seqs)
    return engine


def _focus_on_padding(rng: random.Random, engine: dict[str, Any]) -> None:
    """Where admissions are padded to 1 + K: drafters that drop no block, prompts that can be hit but for a token."""
    engine["method"] = rng.choice(("ngram", "ngram_gpu", "draft_model"))
    engine["num_speculative_tokens"] = rng.randint(1, 6)
    engine["block_size"] = rng.randint(1, 5)
    engine["enable_prefix_caching"] = True
    engine["long_prefill_token_threshold"] = 0
    engine["max_num_batched_tokens"] = engine["max_num_seqs"] + rng.randint(0, 40)
    if rng.random() < 0.8:
        engine.pop("num_speculative_tokens_per_batch_size", None)


def _focus_on_preemption(rng: random.Random, engine: dict[str, Any]) -> None:
    """Where victims were scheduled or passed by in the same step, and their budgets are missed or come back."""
    engine["policy"] = "priority"
    engine["max_num_seqs"] = rng.randint(2, 6)
    engine["max_num_batched_tokens"] = engine["max_num_seqs"] + rng.randint(0, 12)
    engine["max_model_len"] = rng.randint(20, 60)
    engine["block_size"] = rng.randint(1, 4)
    engine["watermark"] = 0.0
    engine["long_prefill_token_threshold"] = 0


def _random_table(rng: random.Random, num_drafts: int, max_num_seqs: int) -> list[list[int]]:
    """Rows from batch size 1 on, with gaps, with K that falls and rises, zero and more than configured included."""
    rows, first = [], 1
    for _ in range(rng.randint(1, 4)):
        last = first + rng.randint(0, max(1, max_num_seqs // 3))
        rows.append([first, last, rng.randint(0, num_drafts + 1)])
        first = last + 1 + (rng.randint(1, 3) if rng.random() < 0.4 else 0)
    return rows


def _random_requests(rng: random.Random, engine: dict[str, Any], repeats: float, crowded: bool) -> list[dict[str, Any]]:
    num_drafts, block_size = engine["num_speculative_tokens"], engine["block_size"]
    longest = engine["max_model_len"] - 1
    count = rng.randint(1, 6) if rng.random() < 0.6 else rng.randint(5, 25)
    typical = rng.choice((rng.randint(1, 8), rng.randint(4, 40), rng.randint(20, 120)))
    outputs = rng.choice((3, 12, 40))
    rush = rng.random()
    if crowded:
        count, typical, outputs, rush = rng.randint(3, 8), rng.randint(1, 12), 12, rng.uniform(0.7, 1.0)
    requests: list[dict[str, Any]] = []
    turn = 0
    for index in range(count):
        name = f"r{index}"
        if rng.random() > rush:
            turn += rng.randint(1, 6) if rng.random() < 0.95 else rng.randint(20, 80)
        length = min(longest, rng.randint(1, 2 * typical))
        request: dict[str, Any] = {
            "id": name,
            "arrival_turn": turn,
            "prompt": _random_prompt(rng, name, requests, length, longest, block_size, repeats),
            "max_tokens": rng.randint(1, 2 * outputs),
            "accepted": _random_accepted(rng, num_drafts),
        }
        if engine["policy"] == "priority" and rng.random() < 0.9:
            request["priority"] = rng.randint(0, 2)
        if rng.random() < 0.2:
            request["eos_at"] = rng.randint(0, outputs)
        requests.append(request)
    return requests


def _random_prompt(
    rng: random.Random,
    name: str,
    earlier: list[dict[str, Any]],
    length: int,
    longest: int,
    block_size: int,
    repeats: float,
) -> list[list[Any]]:
    """Fresh, or begun like others, or an earlier prompt again, or a conversation that goes on."""
    if earlier and rng.random() < repeats:
        # The same prompt, one token past whole blocks where it fits: all but one token can be hit.
        segments = [list(part) for part in rng.choice(earlier)["prompt"]]
        total = sum(count for _, count in segments)
        if rng.random() < 0.7 and (extra := (1 - total) % block_size):
            segments.append([f"p:{name}" if rng.random() < 0.5 else "shared0", extra])
    elif earlier and rng.random() < 0.25:
        before = rng.choice(earlier)
        segments = [list(part) for part in before["prompt"]]
        segments.append([f"o:{before['id']}", rng.randint(1, max(1, before["max_tokens"]))])
        segments.append([f"p:{name}", rng.randint(1, length)])
    elif rng.random() < 0.4:
        shared = rng.randint(1, length) if rng.random() < 0.5 else block_size * rng.randint(1, 4)
        segments = [[f"shared{rng.randint(0, 1)}", shared], [f"p:{name}", rng.randint(0, length)]]
    else:
        segments = [[f"p:{name}", length]]
    kept: list[list[Any]] = []
    room = longest
    for stream, count in segments:
        if (count := min(count, room)) > 0:
            kept.append([stream, count])
            room -= count
    return kept


def _random_accepted(rng: random.Random, num_drafts: int) -> list[int]:
    if rng.random() < 0.15:
        return [rng.choice((0, num_drafts))]
    return [rng.randint(0, num_drafts) for _ in range(rng.choice((1, 2, 3, 7, 13)))]


def _random_pool(rng: random.Random, engine: dict[str, Any], requests: list[dict[str, Any]], crowded: bool) -> int:
    block_size: int = engine["block_size"]
    num_drafts: int = engine["num_speculative_tokens"]
    blocks: list[int] = [
        -(-min(engine["max_model_len"], _num_prompt_tokens(r) + r["max_tokens"] + 3 * num_drafts + 2) // block_size)
        for r in requests
    ]
    largest = max(blocks)
    kind = rng.random()
    if crowded:
        return 1 + largest + rng.randint(0, max(2, largest))
    if kind < 0.1:
        return rng.randint(2, max(2, largest))  # too small for somebody
    if kind < 0.4:
        return 1 + largest + rng.randint(0, 2)
    if kind < 0.75:
        return 1 + largest + rng.randint(0, 3 * largest)
    return 1 + sum(blocks) + rng.randint(0, 20)


def _num_prompt_tokens(request: dict[str, Any]) -> int:
    return sum(count for _, count in request["prompt"])


def _random_events(rng: random.Random, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    end = max(r["arrival_turn"] for r in requests) + 30
    events: list[dict[str, Any]] = []
    if rng.random() < 0.4:
        for _ in range(rng.randint(1, 5)):
            name = "nobody" if rng.random() < 0.05 else rng.choice(requests)["id"]
            events.append({"turn": rng.randint(0, end), "type": "abort", "id": name})
    if rng.random() < 0.4:
        for _ in range(rng.randint(1, 4)):
            running = rng.random() < 0.75
            events.append(
                {"turn": rng.randint(0, end), "type": "reset_prefix_cache", "reset_running_requests": running}
            )
    events.sort(key=lambda event: int(event["turn"]))
    return events


def case_strategy() -> SearchStrategy[Case]:
    """Random cases as a hypothesis strategy; needs hypothesis."""
    from hypothesis import strategies as st

    return st.randoms(use_true_random=False).map(random_case)


def reduction_strategy(case: Case, *, numbers: bool) -> SearchStrategy[Case]:
    """Cases that are ``case`` with something taken away; needs hypothesis.

    Every draw says how much of one thing is left. Nearly all random draws are large and leave everything, so hypothesis
    starts at or near ``case``; it then shrinks the draws, and with them the case. Without ``numbers`` whole requests,
    events and settings go, with it all numbers get smaller: one after the other is much quicker than both at once.
    Requests keep their ids, and all bounds of ``random_case`` stand.
    """
    from hypothesis import strategies as st

    amounts = st.integers(0, _UNTOUCHED)

    @st.composite
    def reduced(draw: DrawFn) -> Case:
        def left(value: int, least: int) -> int:
            return min(value, least + draw(amounts)) if value > least else value

        if numbers:
            return _with_less(case, left)
        return _with_fewer(case, left, lambda: draw(amounts) > 0)

    return reduced()


def _with_fewer(case: Case, left: Callable[[int, int], int], keep: Callable[[], bool]) -> Case:
    """The case with fewer requests, events and settings."""
    engine = dict(case["engine"])
    requests = case["requests"][: left(len(case["requests"]), 1)]
    requests = requests[-left(len(requests), 1) :]
    requests = [request for request in requests if keep()] or requests[:1]
    events = [event for event in case.get("events", ()) if keep()]
    if "num_speculative_tokens_per_batch_size" in engine and not keep():
        del engine["num_speculative_tokens_per_batch_size"]
    for key, simplest in _SIMPLEST.items():
        if engine.get(key, simplest) != simplest and not keep():
            engine[key] = simplest
    kept = []
    for request in requests:
        optional = [key for key in ("eos_at", "priority") if key in request and not keep()]
        segments = [part for part in request["prompt"] if keep()] or request["prompt"][:1]
        kept.append({**{key: value for key, value in request.items() if key not in optional}, "prompt": segments})
    return {**case, "engine": engine, "requests": kept, "events": events}


def _with_less(case: Case, left: Callable[[int, int], int]) -> Case:
    """The case with smaller numbers; counts of blocks and the model's length come down last."""
    engine, requests = dict(case["engine"]), []
    for request in case["requests"]:
        smaller = dict(request)
        smaller["arrival_turn"] = left(request["arrival_turn"], 0)
        smaller["prompt"] = [[stream, left(count, 1)] for stream, count in request["prompt"]]
        smaller["max_tokens"] = left(request["max_tokens"], 1)
        most = left(max(request["accepted"]), 0)
        accepted = request["accepted"][: left(len(request["accepted"]), 1)]
        smaller["accepted"] = [min(most, count) for count in accepted]
        if "priority" in request:
            smaller["priority"] = left(request["priority"], 0)
        requests.append(smaller)
    events = [{**event, "turn": left(event["turn"], 0)} for event in case.get("events", ())]
    if engine["method"] != "none":
        engine["num_speculative_tokens"] = left(engine["num_speculative_tokens"], 1)
    engine["max_num_seqs"] = left(engine["max_num_seqs"], 1)
    engine["max_num_batched_tokens"] = left(engine["max_num_batched_tokens"], engine["max_num_seqs"])
    engine["num_gpu_blocks"] = left(engine["num_gpu_blocks"], 2)
    longest = max(_num_prompt_tokens(request) for request in requests)
    least = max(longest + 1, engine["long_prefill_token_threshold"])
    engine["max_model_len"] = left(engine["max_model_len"], least)
    return {**case, "engine": engine, "requests": requests, "events": events}


_SIMPLEST: dict[str, Any] = {
    "watermark": 0.0,
    "policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "enable_prefix_caching": False,
    "async_scheduling": False,
}
