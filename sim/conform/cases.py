"""Random scripted cases over every setting of the case format, and how a failing one is made smaller.

Knows the case format and what a vLLM scheduler accepts. Must not know traces, vLLM or the simulator.

One function draws a case from a ``random.Random``. Seeded, it gives a reproducible sequence; handed the generator that
hypothesis controls, it is a hypothesis strategy. A failing case of the first kind is made smaller by a strategy of its
own, whose simplest value is the emptiest case and whose usual value is the case as it is.
"""

from __future__ import annotations

import random
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
    requests = _random_requests(rng, engine)
    engine["num_gpu_blocks"] = _random_pool(rng, engine, requests)
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


def _random_table(rng: random.Random, num_drafts: int, max_num_seqs: int) -> list[list[int]]:
    """Rows from batch size 1 on, with gaps, with K that falls and rises, zero and more than configured included."""
    rows, first = [], 1
    for _ in range(rng.randint(1, 4)):
        last = first + rng.randint(0, max(1, max_num_seqs // 3))
        rows.append([first, last, rng.randint(0, num_drafts + 1)])
        first = last + 1 + (rng.randint(1, 3) if rng.random() < 0.4 else 0)
    return rows


def _random_requests(rng: random.Random, engine: dict[str, Any]) -> list[dict[str, Any]]:
    num_drafts, block_size = engine["num_speculative_tokens"], engine["block_size"]
    longest = engine["max_model_len"] - 1
    count = rng.randint(1, 6) if rng.random() < 0.6 else rng.randint(5, 25)
    typical = rng.choice((rng.randint(1, 8), rng.randint(4, 40), rng.randint(20, 120)))
    outputs = rng.choice((3, 12, 40))
    rush = rng.random()
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
            "prompt": _random_prompt(rng, name, requests, length, longest, block_size),
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
    rng: random.Random, name: str, earlier: list[dict[str, Any]], length: int, longest: int, block_size: int
) -> list[list[Any]]:
    """Fresh, or begun like others, or an earlier prompt again, or a conversation that goes on."""
    kind = rng.random()
    if earlier and kind < 0.2:
        # The same prompt, one token past whole blocks where it fits: all but one token can be hit.
        segments = [list(part) for part in rng.choice(earlier)["prompt"]]
        total = sum(count for _, count in segments)
        if rng.random() < 0.7 and (extra := (1 - total) % block_size):
            segments.append([f"p:{name}" if rng.random() < 0.5 else "shared0", extra])
    elif earlier and kind < 0.4:
        before = rng.choice(earlier)
        segments = [list(part) for part in before["prompt"]]
        segments.append([f"o:{before['id']}", rng.randint(1, max(1, before["max_tokens"]))])
        segments.append([f"p:{name}", rng.randint(1, length)])
    elif kind < 0.65:
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


def _random_pool(rng: random.Random, engine: dict[str, Any], requests: list[dict[str, Any]]) -> int:
    block_size: int = engine["block_size"]
    num_drafts: int = engine["num_speculative_tokens"]
    blocks: list[int] = [
        -(-min(engine["max_model_len"], _num_prompt_tokens(r) + r["max_tokens"] + 3 * num_drafts + 2) // block_size)
        for r in requests
    ]
    largest = max(blocks)
    kind = rng.random()
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


def reduction_strategy(case: Case) -> SearchStrategy[Case]:
    """Cases that are ``case`` with something taken away; needs hypothesis.

    Every draw is a number that says how much of one thing is left. Nearly all random draws are large and leave
    everything, so hypothesis starts at or near ``case``; it then shrinks the draws, and with them the case. Requests
    keep their ids, and all bounds of ``random_case`` stand.
    """
    from hypothesis import strategies as st

    @st.composite
    def reduced(draw: DrawFn) -> Case:
        def left(value: int, least: int) -> int:
            return min(value, least + draw(amounts)) if value > least else value

        def keep() -> bool:
            return draw(amounts) > 0

        engine = dict(case["engine"])
        requests = [dict(r) for r in case["requests"] if keep()] or [dict(case["requests"][0])]
        for request in requests:
            segments = [[stream, left(count, 0)] for stream, count in request["prompt"]]
            request["prompt"] = [part for part in segments if part[1]] or [[request["prompt"][0][0], 1]]
            request["arrival_turn"] = left(request["arrival_turn"], 0)
            request["max_tokens"] = left(request["max_tokens"], 1)
            most = left(max(request["accepted"]), 0)
            count = left(len(request["accepted"]), 1)
            request["accepted"] = [min(most, accepted) for accepted in request["accepted"][:count]]
            if "priority" in request:
                request["priority"] = left(request["priority"], 0)
            if "eos_at" in request and not keep():
                del request["eos_at"]
        events = [dict(event) for event in case["events"] if keep()] if case.get("events") else []
        for event in events:
            event["turn"] = left(event["turn"], 0)
        for key, simplest in _SIMPLEST.items():
            if engine.get(key, simplest) != simplest and not keep():
                engine[key] = simplest
        if "num_speculative_tokens_per_batch_size" in engine and not keep():
            del engine["num_speculative_tokens_per_batch_size"]
        if engine["method"] != "none":
            engine["num_speculative_tokens"] = left(engine["num_speculative_tokens"], 1)
        engine["max_num_seqs"] = left(engine["max_num_seqs"], 1)
        engine["max_num_batched_tokens"] = left(engine["max_num_batched_tokens"], engine["max_num_seqs"])
        engine["num_gpu_blocks"] = left(engine["num_gpu_blocks"], 2)
        return {**case, "engine": engine, "requests": requests, "events": events}

    amounts = st.integers(0, _UNTOUCHED)
    return reduced()


_SIMPLEST: dict[str, Any] = {
    "watermark": 0.0,
    "policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "enable_prefix_caching": False,
    "async_scheduling": False,
}
