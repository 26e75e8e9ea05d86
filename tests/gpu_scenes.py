"""Random small scenes for the decoder: every preset, undo and reservation, sync and async, pools from starved to ample.

Knows scenes and the core's settings; must not know what a run of one should give.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import torch

from gpu_backend.decoder import Decoder, DecoderShape
from gpu_backend.run import Ask, Event, Scene
from sim.core.settings import Settings
from sim.policies.axes import RESERVATION, UNDO, rules_with
from sim.policies.drafters import DRAFTERS
from sim.policies.presets import PRESETS, TRAITS

SHAPES = (
    DecoderShape(),
    DecoderShape(num_attention_heads=2, hidden_size=24),
    DecoderShape(num_attention_heads=6, hidden_size=40, vocab_size=97),
)


@cache
def decoder(number: int) -> Decoder:
    """One of a few tiny models, in float64."""
    torch.set_num_threads(1)
    return Decoder(SHAPES[number % len(SHAPES)], seed=number)


@cache
def _answer(number: int, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    return tuple(decoder(number).plain_decode(prompt, num_tokens))


def plain(number: int, scene: Scene) -> list[tuple[int, ...]]:
    """What plain decoding says to every request of the scene."""
    return [_answer(number, ask.prompt, ask.max_tokens) for ask in scene.asks]


def random_scene(
    seed: int,
    presets: Sequence[str] = tuple(PRESETS),
    *,
    lossy_resets: bool = False,
    is_async: bool | None = None,
    priority: bool = False,
) -> tuple[int, Scene]:
    """A decoder's number and a scene for it; every request of the scene fits the pool on its own.

    Presets that count discarded output in frames lose tokens under async scheduling, at resets of running requests, and
    the article's at every preemption. They get neither, unless `lossy_resets` asks for the resets.
    """
    draw = random.Random(seed)
    number = draw.randrange(len(SHAPES))
    preset = draw.choice(list(presets))
    rules, traits = PRESETS[preset], TRAITS[preset]
    if is_async is None:
        is_async = traits.runs_async and preset != "article" and draw.random() < 0.65
    if draw.random() < 0.45:
        rules = rules_with(rules, undo=draw.choice(list(UNDO)), reservation=draw.choice(list(RESERVATION)))
    method = draw.choice([method for method, drafter in DRAFTERS.items() if drafter.runs_async or not is_async])
    k = 0 if method == "none" else draw.randint(1, 5)
    drafter = DRAFTERS[method if k else "none"]
    lookahead = drafter.num_lookahead_tokens(k) if traits.lookahead else 0
    draft_slots = drafter.draft_slots if traits.draft_slots else 0
    block_size = draw.randint(1, 8)
    max_num_seqs = draw.randint(1, 5)
    asks = _asks(draw, number, priority)
    longest = max(len(ask.prompt) + ask.max_tokens for ask in asks)
    ahead = 2 * (k + 1) + lookahead
    need = -(-(longest + ahead) // block_size)
    num_blocks = 1 + need + draw.choice((0, 0, 1, 2, need, 3 * need))
    budget = draw.randint(k + 3, 24) + draft_slots * max_num_seqs
    rows: tuple[tuple[int, int, int], ...] = ()
    if k and draw.random() < 0.25:
        rows = ((1, 1, k), (2, 2, draw.randint(0, k)), (3, max_num_seqs + 3, draw.randint(0, k)))
    drops = drafter.drop_last_hit_block
    settings = Settings(
        num_gpu_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_num_scheduled_tokens=None if rules.draft_slots_per_request else budget - draft_slots * max_num_seqs,
        max_model_len=longest + draw.choice((0, 1, 5, 100)),
        enable_prefix_caching=draw.random() < 0.85,
        # A watermark of more than the pool can ever have free would stall; one block never does.
        watermark=draw.choice((0.0, 0.0, 0.0, 1.01 / num_blocks)),
        priority=priority,
        long_prefill_token_threshold=draw.choice((0, 0, 0, k + 1, k + 3)),
        async_scheduling=is_async,
        num_speculative_tokens=k,
        num_speculative_tokens_per_batch_size=rows,
        num_lookahead_tokens=lookahead,
        draft_slots=draft_slots,
        drop_last_hit_block=drops and traits.last_hit == "drop_block",
        hit_margin_tokens=1 if drops and traits.last_hit == "drop_token" else 0,
    )
    resets_running = lossy_resets or not (is_async and rules.stale_output.frames_count)
    events = []
    for _ in range(draw.choice((0, 0, 1, 2, 3))):
        turn = draw.randint(2, 25)
        if draw.random() < 0.5 and not lossy_resets:
            events.append(Event(turn, "abort", draw.randrange(len(asks))))
        else:
            events.append(Event(turn, "reset_prefix_cache", 0, resets_running and draw.random() < 0.8))
    return number, Scene(settings, rules, asks, tuple(events), draw.choice((0.0, 0.3, 0.7, 0.9, 1.0)), seed)


def _asks(draw: random.Random, number: int, priority: bool) -> tuple[Ask, ...]:
    """Prompts of their own, with a shared beginning, or with an earlier request's prompt and answer in front."""
    vocab_size = SHAPES[number].vocab_size
    shared = tuple(draw.randrange(vocab_size) for _ in range(12))
    asks: list[Ask] = []
    turn = 0
    for _ in range(draw.randint(2, 6)):
        kind = draw.random()
        own = tuple(draw.randrange(vocab_size) for _ in range(draw.randint(1, 8)))
        if kind < 0.3:
            prompt = own
        elif kind < 0.65 or not asks:
            prompt = shared if draw.random() < 0.3 else (*shared[: draw.randint(1, 12)], *own)
        else:
            earlier = draw.choice(asks)
            prompt = (*earlier.prompt, *_answer(number, earlier.prompt, earlier.max_tokens), *own)[:30]
        asks.append(Ask(prompt, draw.randint(1, 14), turn, draw.randrange(3) if priority else 0))
        turn += draw.choice((0, 0, 1, 4, 12))
    return tuple(asks)
