"""Axis: how many drafts the next frames get, where it is neither fixed nor a table of batch sizes.

Told what each returned batch accepted; asked once a step. Both kinds look back over some hundred frames.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.records import FRESH, STALE_DELIVERED, Batch, Returned

_DECAY = 0.995
"""Weight of a frame against the one after it."""
_PRIOR = 8.0
"""Frames that the rate starts out with."""


class MeasuredRates:
    """Conditional acceptance rates by position, from what came back; older frames count less.

    A position that was never reached has the rate of the one before it. The start is `rate` at every position.
    """

    def __init__(self, num_positions: int, rate: float = 0.6) -> None:
        self._tried = [_PRIOR * rate**position for position in range(num_positions)]
        self._passed = [_PRIOR * rate ** (position + 1) for position in range(num_positions)]

    def observe(self, returned: Returned) -> None:
        """Count the verified frames of a batch."""
        tried, passed = self._tried, self._passed
        for num_drafts, sampled, fate in zip(returned.batch.drafts, returned.sampled, returned.fates, strict=True):
            if num_drafts == 0 or sampled == 0 or fate not in (FRESH, STALE_DELIVERED):
                continue
            accepted = sampled - 1
            for position in range(min(num_drafts, accepted + 1)):
                tried[position] = tried[position] * _DECAY + 1.0
                passed[position] = passed[position] * _DECAY + (1.0 if position < accepted else 0.0)

    def expected_tokens(self, num_drafts: int) -> float:
        """Tokens of a step with so many drafts, the bonus token with them."""
        total = alive = 1.0
        for position in range(num_drafts):
            alive *= self._passed[position] / self._tried[position]
            total += alive
        return total

    def unconditional(self, position: int) -> float:
        """How often the draft at this position is accepted, of all steps."""
        return self.expected_tokens(position + 1) - self.expected_tokens(position)


class Adaptive:
    """The most drafts whose last one is still accepted in at least `floor` of the steps, but at least one."""

    def __init__(self, num_speculative_tokens: int, floor: float = 0.3) -> None:
        self._rates = MeasuredRates(num_speculative_tokens)
        self._most = num_speculative_tokens
        self._floor = floor

    def length(self, batch: Batch) -> int:
        """K for the next frames."""
        length = 1
        while length < self._most and self._rates.unconditional(length) >= self._floor:
            length += 1
        return length

    def observe(self, returned: Returned) -> None:
        """What the drafts of a batch came to."""
        self._rates.observe(returned)


class BestByCost:
    """The K from 0 to the configured one for which the step-cost model says most tokens a second, for this batch.

    `step_ns(batch, K)`: what the next step costs if each request of this batch gets K drafts.
    """

    def __init__(self, num_speculative_tokens: int, step_ns: Callable[[Batch, int], int]) -> None:
        self._rates = MeasuredRates(num_speculative_tokens)
        self._most = num_speculative_tokens
        self._step_ns = step_ns

    def length(self, batch: Batch) -> int:
        """K for the next frames."""
        best, best_rate = 0, 0.0
        for length in range(self._most + 1):
            rate = self._rates.expected_tokens(length) / self._step_ns(batch, length)
            if rate > best_rate:
                best, best_rate = length, rate
        return best

    def observe(self, returned: Returned) -> None:
        """What the drafts of a batch came to."""
        self._rates.observe(returned)
