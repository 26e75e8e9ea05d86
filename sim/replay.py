"""The core stepped through a scripted case, without a clock: time is counted in turns.

The case and the trace are those of `docs/conformance.md`; the device is played here, from the case's lists of accepted
drafts. Knows the core and the presets; no SimPy.
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import Any

from sim.core.block_hashes import BlockHashes, run_start
from sim.core.request import FINISHED, Request
from sim.core.scheduler import Scheduler
from sim.core.settings import Rules, Settings
from sim.policies.drafters import DRAFTERS
from sim.records import Batch

END_TOKEN = 2


class ScriptedContent:
    """Tokens as the case's format defines them: token i of a stream is a checksum of its name and i."""

    __slots__ = ("_block_size", "_end", "_output_stream", "_prompt")

    def __init__(self, segments: list[tuple[str, int]], output_stream: str, end: int | None, block_size: int) -> None:
        self._prompt = [_token(stream, i) for stream, count in segments for i in range(count)]
        self._output_stream = output_stream
        self._end = end
        self._block_size = block_size

    def extend_hashes(self, hashes: BlockHashes, count: int) -> None:
        size = self._block_size
        for start in range(len(hashes) * size, count * size, size):
            tokens = [self._at(position) for position in range(start, start + size)]
            hashes.append(run_start(hash((hashes[-1] if hashes else 0, *tokens))))

    def _at(self, position: int) -> int:
        output = position - len(self._prompt)
        if output < 0:
            return self._prompt[position]
        if self._end is not None and output >= self._end:
            return END_TOKEN
        return _token(self._output_stream, output)


def _token(stream: str, index: int) -> int:
    return 100 + zlib.crc32(f"{stream}:{index}".encode()) % 31000


def build_scheduler(engine: dict[str, Any], rules: Rules) -> Scheduler:
    """A scheduler with the settings of a case."""
    num_speculative_tokens = engine.get("num_speculative_tokens", 0)
    drafter = DRAFTERS[engine["method"] if num_speculative_tokens else "none"]
    settings = Settings(
        num_gpu_blocks=engine["num_gpu_blocks"],
        block_size=engine["block_size"],
        max_num_seqs=engine["max_num_seqs"],
        max_num_batched_tokens=engine["max_num_batched_tokens"],
        max_model_len=engine["max_model_len"],
        enable_prefix_caching=engine["enable_prefix_caching"],
        watermark=engine.get("watermark", 0.0),
        priority=engine.get("policy", "fcfs") == "priority",
        long_prefill_token_threshold=engine.get("long_prefill_token_threshold", 0),
        async_scheduling=engine["async_scheduling"],
        num_speculative_tokens=num_speculative_tokens,
        num_speculative_tokens_per_batch_size=tuple(
            (first, last, length) for first, last, length in engine.get("num_speculative_tokens_per_batch_size") or ()
        ),
        num_lookahead_tokens=drafter.num_lookahead_tokens(num_speculative_tokens),
        draft_slots=drafter.draft_slots,
        drop_last_hit_block=drafter.drop_last_hit_block,
    )
    return Scheduler(settings, rules)


class _Replay:
    """The state of one replay. A turn is one call of `turn`."""

    def __init__(self, case: dict[str, Any], rules: Rules) -> None:
        self.rules = rules
        self.engine = case["engine"]
        self.scheduler = build_scheduler(self.engine, rules)
        self.depth = self.engine.get("batches_in_flight") or (2 if self.engine["async_scheduling"] else 1)
        self.script = {request["id"]: request for request in case["requests"]}
        self.verified = dict.fromkeys(self.script, 0)
        self.arrivals = deque(sorted(case["requests"], key=lambda request: request["arrival_turn"]))
        self.events = deque(sorted(case.get("events") or [], key=lambda event: event["turn"]))
        self.requests: dict[str, Request] = {}
        self.in_flight: deque[Batch] = deque()
        self.reset_preempted: list[str] = []

    def apply_events(self, turn: int) -> list[dict[str, Any]]:
        applied = []
        while self.events and self.events[0]["turn"] <= turn:
            event = self.events.popleft()
            if event["type"] == "abort":
                self.scheduler.abort(event["id"])
                applied.append(event)
                continue
            interruption = self.scheduler.reset_prefix_cache(event["reset_running_requests"])
            self.reset_preempted += [request.id for request in interruption.requests]
            applied.append({**event, "done": interruption.done})
        return applied

    def add_arrivals(self, turn: int) -> None:
        while self.arrivals and self.arrivals[0]["arrival_turn"] <= turn:
            spec = self.arrivals.popleft()
            segments = [(stream, count) for stream, count in spec["prompt"]]
            end = spec.get("eos_at")
            request = Request(
                spec["id"],
                len(self.requests),
                sum(count for _, count in segments),
                spec["max_tokens"],
                ScriptedContent(segments, f"o:{spec['id']}", end, self.engine["block_size"]),
                arrival=spec["arrival_turn"],
                priority=spec.get("priority", 0),
                num_output_limit=None if end is None else end + 1,
            )
            request.hashes(request.num_prompt_tokens // self.engine["block_size"])
            self.requests[request.id] = request
            self.scheduler.add(request)

    def free_blocks(self) -> int:
        return self.scheduler.pool.num_free

    def running_state(self) -> dict[str, list[Any]]:
        return {
            request.id: [
                request.num_computed_tokens,
                request.num_tokens,
                request.num_output_placeholders,
                list(request.block_table),
            ]
            for request in self.scheduler.running
        }

    def schedule(self, row: dict[str, Any]) -> bool:
        """One schedule into the row; returns whether a batch was launched."""
        batch = self.scheduler.schedule()
        ids = [request.id for request in batch.requests]
        row["scheduled"] = {
            id: [num_tokens, num_drafts]
            for id, num_tokens, num_drafts in zip(ids, batch.tokens, batch.drafts, strict=True)
        }
        preempted = [request.id for request in batch.preempted]
        if self.rules.reports_reset_preemptions:
            preempted += self.reset_preempted
        self.reset_preempted = []
        row["preempted"] = sorted(set(preempted))
        first = batch.num_running_frames
        admissions = list(zip(ids[first:], batch.computed[first:], batch.resumed, strict=True))
        row["admitted"] = {id: hit for id, hit, resumed in admissions if not resumed}
        row["resumed"] = {id: hit for id, hit, resumed in admissions if resumed}
        row["after_schedule"] = self.running_state()
        row["free_blocks"] = self.free_blocks()
        if batch.total_tokens <= 0:
            return False
        self.in_flight.append(batch)
        return True

    def update(self, row: dict[str, Any]) -> None:
        """Take the oldest batch back, into the row."""
        batch = self.in_flight.popleft()
        sampled = []
        for request, num_drafts, samples in zip(batch.requests, batch.drafts, batch.samples, strict=True):
            accepted = 0
            if samples and num_drafts:
                listed = self.script[request.id]["accepted"]
                accepted = min(listed[self.verified[request.id] % len(listed)], num_drafts)
                self.verified[request.id] += 1
            sampled.append(accepted + 1 if samples else 0)
        batch.settle(sampled)
        returned = self.scheduler.update(batch)
        ids = [request.id for request in batch.requests]
        finished = {request.id for request in returned.finished}
        row["returned"] = {
            id: delivered if id in finished else num_sampled
            for id, num_sampled, delivered in zip(ids, sampled, returned.delivered, strict=True)
        }
        row["delivered"] = dict(zip(ids, returned.delivered, strict=True))
        row["finished"] = sorted(finished)
        self.scheduler.recycle(batch)
        row["after_update"] = self.running_state()
        row["free_blocks_after_update"] = self.free_blocks()

    def run(self, max_turns: int) -> dict[str, Any]:
        turns: list[dict[str, Any]] = []
        scheduler = self.scheduler
        for turn in range(max_turns):
            applied = self.apply_events(turn)
            self.add_arrivals(turn)
            due_later = bool(self.arrivals or self.events)
            if not scheduler.requests and not self.in_flight:
                if applied:
                    turns.append({"turn": turn, "events": applied, "free_blocks": self.free_blocks()})
                if not due_later:
                    break
                continue
            row: dict[str, Any] = {"turn": turn}
            if applied:
                row["events"] = applied
            launched = scheduler.has_requests() and self.schedule(row)
            if self.in_flight and not (launched and len(self.in_flight) < self.depth):
                self.update(row)
            row["waiting"] = [request.id for request in scheduler.waiting]
            turns.append(row)
            idle = not launched and not self.in_flight and "returned" not in row
            if idle and not due_later and scheduler.requests:
                break
        summary: dict[str, Any] = {
            "num_output_tokens": {id: request.num_output_tokens for id, request in self.requests.items()},
            "num_preemptions": {id: request.num_preemptions for id, request in self.requests.items()},
        }
        stalled = [id for id, request in self.requests.items() if request.status != FINISHED]
        if stalled:
            summary["stalled"] = stalled
        return {"turns": turns, "summary": summary}


def replay_case(case: dict[str, Any], rules: Rules, max_turns: int = 200_000) -> dict[str, Any]:
    """The trace that an engine with these rules gives on a case."""
    return _Replay(case, rules).run(max_turns)
