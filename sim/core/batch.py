"""A batch in the making: its frames and what is left of both budgets.

Knows how to take a frame out again, since preemption by priority may choose a victim that was scheduled already.
"""

from __future__ import annotations

from sim.core.request import Request
from sim.records import Batch, Frame


class BatchBuilder:
    """Frames join at the end; the budgets follow."""

    __slots__ = ("batch", "draft_slots", "input_budget", "spare", "token_budget")

    def __init__(
        self, batch: Batch, token_budget: int, input_budget: int, draft_slots: int, spare: list[Frame]
    ) -> None:
        """`spare`: frames that nobody needs any more; they are used first."""
        self.batch = batch
        self.token_budget = token_budget
        self.input_budget = input_budget
        self.draft_slots = draft_slots
        self.spare = spare

    def add(self, request: Request, num_tokens: int, num_drafts: int, num_computed_tokens: int) -> None:
        """Schedule a frame."""
        spare = self.spare
        frame = spare.pop() if spare else Frame(request)
        frame.request = request
        frame.num_tokens = num_tokens
        frame.num_drafts = num_drafts
        frame.num_computed_tokens = num_computed_tokens
        frame.epoch = request.epoch
        self.batch.frames.append(frame)
        self.token_budget -= num_tokens
        self.input_budget -= num_tokens + self.draft_slots

    def remove(self, victim: Request) -> bool:
        """Take the victim's frame out and give its budgets back; False if it has none."""
        frames = self.batch.frames
        for index, frame in enumerate(frames):
            if frame.request is victim:
                num_tokens = frame.num_tokens
                del frames[index]
                self.token_budget += num_tokens
                self.input_budget += num_tokens + self.draft_slots
                return True
        return False
