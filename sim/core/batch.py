"""A batch in the making: its frames and what is left of both budgets.

Knows how to take a frame out again, since preemption by priority may choose a victim that was scheduled already.
"""

from __future__ import annotations

from sim.core.request import Request
from sim.records import Batch


class BatchBuilder:
    """Frames join at the end; the budgets follow."""

    __slots__ = ("batch", "draft_slots", "input_budget", "token_budget")

    def __init__(self, batch: Batch, token_budget: int, input_budget: int, draft_slots: int) -> None:
        self.batch = batch
        self.token_budget = token_budget
        self.input_budget = input_budget
        self.draft_slots = draft_slots

    def add(self, request: Request, num_tokens: int, num_drafts: int, num_computed_tokens: int) -> None:
        """Schedule a frame."""
        batch = self.batch
        batch.requests.append(request)
        batch.tokens.append(num_tokens)
        batch.drafts.append(num_drafts)
        batch.computed.append(num_computed_tokens)
        batch.epochs.append(request.num_preemptions)
        self.token_budget -= num_tokens
        self.input_budget -= num_tokens + self.draft_slots

    def remove(self, victim: Request) -> bool:
        """Take the victim's frame out and give its budgets back; False if it has none."""
        batch = self.batch
        if victim not in batch.requests:
            return False
        index = batch.requests.index(victim)
        num_tokens = batch.tokens[index]
        for column in (batch.requests, batch.tokens, batch.drafts, batch.computed, batch.epochs):
            del column[index]
        self.token_budget += num_tokens
        self.input_budget += num_tokens + self.draft_slots
        return True
