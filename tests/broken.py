"""Other readings of the rules: the simulator with one rule changed, for tests that must notice.

A reading is a piece of the core's source and what it would be under the other reading. It is applied by compiling the
changed source of the function in its module, so a reading whose source is no longer there fails loudly. The core must
be the plain one: tests that use this are marked `plain_core`.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """``function`` is ``module:qualified.name``; its source holds ``ours`` once, the other reading has ``other``.

    ``says`` is the other reading in words; ``presets`` are the presets under which the case tells the two apart.
    """

    function: str
    ours: str
    other: str
    says: str
    presets: tuple[str, ...] = ("vllm-0.32",)
    batches_in_flight: int | None = None
    """Of the case, where two do not reach the rule."""


@contextmanager
def applied(reading: Reading) -> Iterator[None]:
    """The simulator under the other reading, while the context lasts."""
    module_name, qualified = reading.function.split(":")
    module = importlib.import_module(module_name)
    *path, name = qualified.split(".")
    owner = module
    for part in path:
        owner = getattr(owner, part)
    original = inspect.getattr_static(owner, name)
    source = textwrap.dedent(inspect.getsource(getattr(original, "fget", None) or original))
    count = source.count(reading.ours)
    assert count == 1, f"{reading.function} holds {reading.ours!r} {count} times"
    changed = source.replace(reading.ours, reading.other)
    code = compile("from __future__ import annotations\n" + changed, f"<{reading.says}>", "exec")
    found: dict[str, object] = {}
    exec(code, vars(module), found)
    replacement = found[name]
    presets = importlib.import_module("sim.policies.presets").PRESETS
    # Policies that are plain functions stand in the presets as they were imported.
    swapped: dict[str, object] = {}
    if not path and inspect.isfunction(original):
        import dataclasses

        for preset, rules in presets.items():
            for field in dataclasses.fields(rules):
                if getattr(rules, field.name) is original:
                    swapped[preset] = rules
                    rules = dataclasses.replace(rules, **{field.name: replacement})
            if preset in swapped:
                presets[preset] = rules
    users = [
        other
        for other in ("sim.core.scheduler", "sim.replay")
        if not path and getattr(importlib.import_module(other), name, None) is original
    ]
    setattr(owner, name, replacement)
    for user in users:
        setattr(importlib.import_module(user), name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
        for user in users:
            setattr(importlib.import_module(user), name, original)
        presets.update(swapped)


_WAITING = "sim.core.scheduler:Scheduler._schedule_waiting"
_ADMIT = "sim.core.kv_cache:KVCache.admit"
_PAD = "sim.policies.padding:beside_running_or_hit"

READINGS = {
    "padding-under-a-table": Reading(
        _WAITING, "and fixed and not prefill_scheduled", "and not prefill_scheduled", "padded under dynamic K too"
    ),
    "padding-beside-a-chunk": Reading(
        _WAITING, "and fixed and not prefill_scheduled", "and fixed", "padded beside a running prefill chunk too"
    ),
    "padding-needs-a-running-frame": Reading(
        _PAD, "if not running_frames and hit == 0:", "if not running_frames:", "padded only beside a running frame"
    ),
    "padding-needs-a-hit": Reading(
        _PAD, "if not running_frames and hit == 0:", "if hit == 0:", "padded only after a hit"
    ),
    "padding-without-either": Reading(
        _PAD, "if not running_frames and hit == 0:", "if False:", "padded with neither a running frame nor a hit"
    ),
    "padding-counts-admissions": Reading(
        _WAITING, "batch.num_running_frames > 0", "len(batch.requests) > 0",
        "a request admitted in this step counts as a running frame",
    ),
    "padding-model-length": Reading(
        _PAD, "hit + padded + 1 > max_model_len", "hit + padded > max_model_len", "no room for the sampled token asked"
    ),
    "padding-model-length-stops": Reading(
        _PAD, "max_model_len:\n        return 1", "max_model_len:\n        return 0",
        "no room under the model's length ends admission",
    ),
    "padding-over-budget": Reading(
        _PAD, "return 0 if padded > budget", "return 1 if padded > budget", "too small a budget: admitted unpadded"
    ),
    "padding-0.28-model-length": Reading(
        "sim.policies.padding:beside_running", "hit + padded > max_model_len", "hit + padded + 1 > max_model_len",
        "room for the sampled token asked", ("vllm-0.26", "vllm-0.28"),
    ),
    "padding-0.28-stops": Reading(
        "sim.policies.padding:beside_running",
        "return 0 if padded > budget or hit + padded > max_model_len else padded",
        "return 1 if hit + padded > max_model_len else 0 if padded > budget else padded",
        "no room under the model's length: admitted unpadded", ("vllm-0.26", "vllm-0.28"),
    ),
    "padding-0.28-beside-running": Reading(
        "sim.policies.padding:beside_running", "if not running_frames:", "if not running_frames and hit == 0:",
        "padded after a hit too", ("vllm-0.26", "vllm-0.28"),
    ),
    "watermark-when-alone": Reading(
        _ADMIT, "self.watermark_blocks if somebody_runs else 0", "self.watermark_blocks", "held to when nobody runs"
    ),
    "watermark-counts-scheduled": Reading(
        _WAITING, "len(self.running) > 0\n", "len(batch.requests) > 0\n",
        "somebody runs only if something is scheduled in this step",
    ),
    "watermark-counts-earlier": Reading(
        _WAITING, "len(self.running) > 0\n", "len(self.running) > len(batch.resumed)\n",
        "those admitted in this step do not run yet",
    ),
    "watermark-not-in-whole-prompt": Reading(
        _ADMIT, "if need + watermark > pool.num_free", "if need > pool.num_free", "not in the whole-prompt check"
    ),
    "watermark-not-in-slots": Reading(
        _ADMIT, "if new + idle + watermark > pool", "if new + idle > pool", "in the whole-prompt check only"
    ),
    "watermark-for-running": Reading(
        "sim.core.kv_cache:KVCache.extend", "if need > self.pool.num_free",
        "if need + self.watermark_blocks > self.pool.num_free", "running requests are held to it",
    ),
    "idle-hits-in-whole-prompt": Reading(
        _ADMIT, "need = max((whole + block_size - 1) // block_size - held, 0) + idle",
        "need = max((whole + block_size - 1) // block_size - held, 0)",
        "hit blocks that nobody holds are not counted in the whole-prompt check",
    ),
    "ties-by-arrival-order": Reading(
        "sim.core.queues:PriorityQueue.add", "request.arrival, request.id, request",
        "request.arrival, request.index, request", "ties in the waiting queue by order of arrival",
    ),
    "ties-by-number": Reading(
        "sim.core.queues:PriorityQueue.add", "request.arrival, request.id, request",
        "request.arrival, (len(request.id), request.id), request", "ties in the waiting queue by the number in the id",
    ),
    "victim-ties": Reading(
        "sim.core.scheduler:Scheduler._victim", "max(self.running, key",
        "max(reversed(self.running), key", "of equal victims the last in the list",
    ),
    "token-budget-comes-back": Reading(
        "sim.core.batch:BatchBuilder.remove", "self.token_budget += num_tokens\n", "pass\n",
        "a victim's token budget is gone",
    ),
    "input-budget-comes-back": Reading(
        "sim.core.batch:BatchBuilder.remove", "self.input_budget += num_tokens + self.draft_slots\n", "pass\n",
        "a victim's input budget is gone",
    ),
    "draft-slots-come-back": Reading(
        "sim.core.batch:BatchBuilder.remove", "num_tokens + self.draft_slots", "num_tokens",
        "a victim's draft slots are gone",
    ),
    "table-gap-keeps-previous": Reading(
        "sim.core.draft_length:draft_length_table", "for size in range(first, max_num_seqs + 1):",
        "for size in range(first, min(last, max_num_seqs) + 1):", "in a gap of the table K is that of the first row",
    ),
    "table-gap-configured": Reading(
        "sim.core.draft_length:draft_length_table", "    return table",
        "    return [\n"
        "        k if any(first <= size <= last for first, last, _ in rows) else num_speculative_tokens\n"
        "        for size, k in enumerate(table)\n"
        "    ]", "in a gap of the table and behind it K is the configured one",
    ),
    "stale-rejections": Reading(
        "sim.policies.stale_output:DiscardedInFrames.returned",
        "DISCARDED if self.rolls_back_first else STALE_DROPPED", "DISCARDED",
        "a discarded frame's rejections are rolled back", ("vllm-0.26",),
    ),
    "stale-rejections-0.24": Reading(
        "sim.policies.stale_output:DiscardedInFrames.returned",
        "DISCARDED if self.rolls_back_first else STALE_DROPPED", "STALE_DROPPED",
        "a discarded frame's rejections are not rolled back", ("vllm-0.24",),
    ),
    "skipped-victim": Reading(
        "sim.core.scheduler:Scheduler._make_room", "(scheduled or self._rules.skipped_victim_moves_index)", "scheduled",
        "a skipped victim in front does not move the index",
    ),
    "stale-waiter-passed-over": Reading(
        _WAITING, "if self._rules.stale_output.must_wait(request):", "if False:",
        "a request whose stale output is still to be delivered is admitted", batches_in_flight=3,
    ),
    "dropped-output-stays-dropped": Reading(
        "sim.policies.stale_output:DrainedInTokens.preempted",
        "drops or (request.drop_stale_output and request.num_stale_output_tokens > 0)", "drops",
        "a second preemption has what a reset had dropped delivered", batches_in_flight=3,
    ),
}  # fmt: skip
"""The readings of the rules that the handed-out traces do not tell apart, by the name of the case that does."""

_RUNNING = "sim.core.scheduler:Scheduler._schedule_running"
_UPDATE = "sim.core.scheduler:Scheduler.update"
_LOOKUP = "sim.core.kv_cache:KVCache.lookup"

BROKEN = {
    "skips-too-late": Reading(_RUNNING, "computed + 2 - placeholders", "computed + 1 - placeholders", "skip rule"),
    "chunks-not-capped": Reading(_RUNNING, "if num_tokens > most:", "if False:", "long prefill, running"),
    "no-lookahead": Reading(_RUNNING, "= settings.num_lookahead_tokens", "= 0", "lookahead slots"),
    "model-length": Reading(_RUNNING, "settings.max_model_len - 1", "settings.max_model_len", "the model's length"),
    "zero-tokens-stop": Reading(
        _RUNNING, "continue\n            cached_end", "break\n            cached_end", "nothing to do: skipped"
    ),
    "admits-after-preemption": Reading(
        "sim.core.scheduler:Scheduler.schedule", "if not batch.preempted:", "if True:", "no admission after preemption"
    ),
    "threshold-alone": Reading(
        "sim.core.scheduler:Scheduler.schedule", "<= 1:", "<= 0:", "a request that is alone has no threshold"
    ),
    "drafts-of-running": Reading(
        "sim.core.scheduler:Scheduler._advance", "[len(batch.frames)]", "[len(self.running)]", "K by batch size"
    ),
    "no-rollback": Reading(_UPDATE, "computed -= rejected\n", "pass\n", "rejections roll back"),
    "hashes-too-much": Reading(
        _UPDATE, "certain = computed - placeholders", "certain = request.num_tokens",
        "what is hashed when a batch returns",
    ),
    "trims-nothing-at-the-length": Reading(
        "sim.core.scheduler:Scheduler.add", "min(request.end_tokens, self._settings.max_model_len)",
        "request.end_tokens", "the model's length ends a request"
    ),
    "preempted-to-the-tail": Reading(
        "sim.core.scheduler:Scheduler._preempt", "self.waiting.put_back(request)", "self.waiting.add(request)",
        "the preempted go to the head",
    ),
    "first-in-is-the-victim": Reading(
        "sim.core.scheduler:Scheduler.reset_prefix_cache", "self.running.pop()", "self.running.pop(0)",
        "a reset preempts the last first",
    ),
    "eagle-keeps-the-last-block": Reading(_LOOKUP, "hit.pop()", "pass", "EAGLE drops the last hit block"),
    "hits-the-whole-prompt": Reading(
        _LOOKUP, "request.num_tokens - 1 -", "request.num_tokens -", "a hit leaves a token to compute"
    ),
    "whole-prompt-not-checked": Reading(
        _ADMIT, "if need + watermark > pool.num_free", "if False", "whole-prompt check"
    ),
    "hashed-to-the-head": Reading(
        "sim.policies.freeing:hashless_first", "pool.append(hashed)", "pool.append(hashed[::-1])",
        "hashed blocks are freed in walk order",
    ),
    "hashless-to-the-tail": Reading(
        "sim.policies.freeing:hashless_first", "pool.prepend(", "pool.append(", "hashless blocks go to the head"
    ),
    "frees-forwards": Reading("sim.core.kv_cache:KVCache.free", "walk.reverse()", "pass", "the table is walked back"),
    "stale-output-delivered": Reading(
        "sim.policies.stale_output:DrainedInTokens.returned", "STALE_DROPPED if request.drop_stale_output else", "",
        "output in flight at a reset is dropped",
    ),
    "last-duplicate": Reading(
        "sim.core.prefix_cache:PrefixCache._evict_duplicate", "others.pop(0)", "others.pop()",
        "the first duplicate is found",
    ),
}  # fmt: skip
"""Rules broken on purpose: the recorded cases or a few random ones must find each. ``says`` names the rule."""
