"""Conversations: sessions of several turns, in which each prompt repeats everything said before.

Knows: segments, lengths and draws. Must not know: when a conversation starts, or what becomes of its requests.

Draws are numbered by conversation and turn, and requests by the turns of the conversations before, so neither depends
on the order in which anything finishes. Worked example, two conversations of 2 and 1 turns, with 10 new tokens and 4
answered a turn:

    conversation 0   request 0   (1, 0, 10)                          turn 0
                     request 1   (1, 0, 10) (0, 0, 4) (5, 0, 10)     turn 1
    conversation 1   request 2   (9, 0, 10)                          turn 0
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from workloads.lengths import Lengths
from workloads.prompts import SharedPrefixes
from workloads.sessions import CHUNK, Opening, opening_prompt
from workloads.spec import RequestSpec, Segment, merge_segments, output_stream, prompt_stream
from workloads.streams import uniforms


@dataclass(frozen=True)
class Conversations:
    """`num_conversations` conversations (see `Sessions`).

    turns                 how many turns each would have
    user_lengths          new tokens of the user, a turn
    first_lengths         the same for the first turn, where that differs (an agent's task, before its tools' results)
    output_lengths        tokens of the answer, a turn
    shared                prefixes that whole conversations begin with; a conversation picks by its own number
    think_ms              milliseconds from the end of an answer to the next turn; None: none
    max_context_tokens    a conversation ends before the turn whose prompt and answer would not fit; None: no bound
    num_requests          counted at construction, one pass over all draws

    Raises ValueError for fewer than one conversation, and where a first turn does not fit `max_context_tokens`.
    """

    seed: int
    num_conversations: int
    turns: Lengths
    user_lengths: Lengths
    output_lengths: Lengths
    shared: SharedPrefixes | None = None
    think_ms: Lengths | None = None
    max_context_tokens: int | None = None
    first_lengths: Lengths | None = None
    num_requests: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if self.num_conversations < 1:
            raise ValueError(f"num_conversations must be 1 or more, got {self.num_conversations}")
        total = sum(int(self._turns(first, self._prefixes(first)).sum()) for first in self._chunks())
        object.__setattr__(self, "num_requests", total)

    @property
    def num_sessions(self) -> int:
        """One session a conversation."""
        return self.num_conversations

    def openings(self) -> Iterator[Opening]:
        """See `Sessions`."""
        index = 0
        for first in self._chunks():
            numbers = self._numbers(first)
            prefixes = self._prefixes(first)
            turns = self._turns(first, prefixes).tolist()
            user = self._draw("prompt", self._user_lengths(0), numbers, 0).tolist()
            output = self._draw("output", self.output_lengths, numbers, 0).tolist()
            for at, conversation in enumerate(numbers.tolist()):
                prompt, num_prompt_tokens = opening_prompt(prefixes[at], index, user[at])
                yield Opening(index, prompt, num_prompt_tokens, output[at], conversation)
                index += turns[at]

    def follow(self, spec: RequestSpec, finish_ns: int) -> RequestSpec | None:
        """The next turn after `spec`, `think_ms` later; None after the last. See `Sessions`."""
        turn = spec.turn + 1
        if turn >= self._one("turns", self.turns, spec.conversation, 0):
            return None
        user = self._one("prompt", self.user_lengths, spec.conversation, turn)
        max_tokens = self._one("output", self.output_lengths, spec.conversation, turn)
        num_prompt_tokens = spec.num_prompt_tokens + spec.max_tokens + user
        if self.max_context_tokens is not None and num_prompt_tokens + max_tokens > self.max_context_tokens:
            return None
        think_ms = 0 if self.think_ms is None else self._one("think", self.think_ms, spec.conversation, turn)
        index = spec.index + 1
        answer: Segment = (output_stream(spec.index), 0, spec.max_tokens)
        return RequestSpec(
            index=index,
            arrival_ns=finish_ns + think_ms * 1_000_000,
            prompt=merge_segments((*spec.prompt, answer, (prompt_stream(index), 0, user))),
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            priority=spec.priority,
            conversation=spec.conversation,
            turn=turn,
        )

    def _user_lengths(self, turn: int) -> Lengths:
        return self.first_lengths if turn == 0 and self.first_lengths is not None else self.user_lengths

    def _chunks(self) -> range:
        return range(0, self.num_conversations, CHUNK)

    def _numbers(self, first: int) -> NDArray[np.int64]:
        return np.arange(first, min(first + CHUNK, self.num_conversations), dtype=np.int64)

    def _draw(self, purpose: str, lengths: Lengths, numbers: NDArray[np.int64], turn: int) -> NDArray[np.int64]:
        return lengths.at(uniforms(self.seed, purpose, numbers, turn, 1))

    def _one(self, purpose: str, lengths: Lengths, conversation: int, turn: int) -> int:
        return int(lengths.at(uniforms(self.seed, purpose, conversation, turn, 1))[0])

    def _prefixes(self, first: int) -> list[Segment | None]:
        count = len(self._numbers(first))
        return [None] * count if self.shared is None else self.shared.segments(self.seed, first, count)

    def _turns(self, first: int, prefixes: list[Segment | None]) -> NDArray[np.int64]:
        """How many turns the conversations of a chunk really have, shape (chunk,)."""
        numbers = self._numbers(first)
        wanted = self._draw("turns", self.turns, numbers, 0)
        if self.max_context_tokens is None:
            return wanted
        turns = np.zeros_like(wanted)
        context = np.array([0 if prefix is None else prefix[2] for prefix in prefixes], dtype=np.int64)
        going = np.arange(len(numbers))
        turn = 0
        while len(going):
            context[going] += self._draw("prompt", self._user_lengths(turn), numbers[going], turn)
            context[going] += self._draw("output", self.output_lengths, numbers[going], turn)
            fits = context[going] <= self.max_context_tokens
            if turn == 0 and not fits.all():
                worst = int(np.argmax(context))
                raise ValueError(
                    f"the first turn of conversation {first + worst} needs {int(context[worst])} tokens of context and "
                    f"max_context_tokens is {self.max_context_tokens}: give the lengths a maximum that fits"
                )
            going = going[fits]
            turns[going] += 1
            turn += 1
            going = going[wanted[going] > turn]
        return turns
