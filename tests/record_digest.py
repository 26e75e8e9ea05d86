"""A digest of everything that an engine tells, and a small command that prints it for a few shipped scenarios.

python -m tests.record_digest [--check]
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from typing import Any

from sim.build import build
from sim.core.request import Request
from sim.models.timing import StepCost, StepShape
from sim.records import Batch, Interruption, Returned
from sim.scenario import load_scenario

SHORT = ("workload.synthetic.output_tokens={distribution: uniform, min: 5, max: 90}", "engine.num_gpu_blocks=200")
SCENARIOS = {
    "quickstart": (
        *SHORT,
        "workload.synthetic.num_requests=30",
        "workload.synthetic.prompt_tokens.max=500",
        "engine.num_gpu_blocks=70",
    ),
    "resets-and-aborts": (
        *SHORT,
        "workload.synthetic.num_requests=20",
        "workload.synthetic.prompt_tokens.max=500",
        "events.0.every_s=0.4",
        "events.1.rate_per_s=2",
    ),
    "closed-loop": (*SHORT, "workload.synthetic.num_requests=6", "workload.synthetic.shared_prefix.tokens=100"),
    "dynamic-k": (*SHORT, "workload.synthetic.num_requests=20"),
    "ngram": (*SHORT, "workload.synthetic.num_requests=20"),
}


class RecordDigest:
    """An observer that hashes all records, columns and block operations in order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.num_records = 0

    def _add(self, what: str, now: int, *values: Any) -> None:
        self.num_records += 1
        self._hash.update(repr((what, now, *values)).encode())

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def arrived(self, now: int, request: Request) -> None:
        self._add("arrived", now, request.id, request.arrival, request.num_prompt_tokens, request.max_tokens)

    def scheduled(self, now: int, batch: Batch) -> None:
        columns = batch.tokens, batch.drafts, batch.computed, batch.samples, batch.epochs, batch.resumed
        preempted = _ids(batch.preempted)
        self._add("scheduled", now, batch.number, _ids(batch.requests), *columns, preempted, batch.block_operations)

    def step_started(self, now: int, batch: Batch, shape: StepShape, cost: StepCost) -> None:
        self._add("started", now, repr(shape), tuple(cost))

    def step_ended(self, now: int, batch: Batch) -> None:
        self._add("ended", now, batch.accepted)

    def updated(self, now: int, returned: Returned) -> None:
        columns = returned.sampled, returned.delivered, returned.trimmed, returned.rejected, returned.fates
        self._add("updated", now, *columns, _ids(returned.finished), returned.block_operations)

    def interrupted(self, now: int, interruption: Interruption) -> None:
        requests = _ids(interruption.requests)
        self._add(interruption.kind, now, requests, interruption.done, interruption.block_operations)

    def closed(self, now: int) -> None:
        self._add("closed", now)


def _ids(requests: Iterable[Request]) -> list[str]:
    return [request.id for request in requests]


def digest(name: str, *, check: bool, overrides: tuple[str, ...] = ()) -> tuple[str, str, int]:
    """Of a shipped scenario made small: its records, its slot-seconds (as text) and how many records there were."""
    simulation = build(load_scenario(name, (*SCENARIOS[name], *overrides)), check=check)
    records = RecordDigest()
    simulation.add_observer(records)
    simulation.run()
    assert simulation.stopped_by is None
    totals = repr((simulation.ledger.slot_seconds(), simulation.ledger.content_slot_seconds()))
    return records.hexdigest(), totals, records.num_records


if __name__ == "__main__":
    for scenario in SCENARIOS:
        print(scenario, *digest(scenario, check="--check" in sys.argv)[:2])
