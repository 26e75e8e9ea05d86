"""Recorded conversations without times (ShareGPT): sessions for a process to start.

Knows: the lengths of what was said, and how a conversation repeats itself. Must not know: when it starts.

Each prompt repeats all that was said before, as in `conversations`. Held in memory: 8 bytes a turn, 8 a conversation.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

from workloads.lengths import Lengths
from workloads.sessions import Opening
from workloads.spec import RequestSpec, Segment, merge_segments, output_stream, prompt_stream
from workloads.streams import uniforms
from workloads.token_counts import token_counter
from workloads.trace_formats import sharegpt_turns
from workloads.trace_source import Progress, Source, TraceError

_PROGRESS_ROWS = 65_536


class ShareGPT:
    """The conversations of a ShareGPT file (see `Sessions`), in the file's order.

    max_conversations     read no more than these; None: all
    tokenizer             see `token_counter`; None: one token for four bytes
    think_ms              milliseconds from the end of an answer to the next turn, drawn by `seed`; None: none
    max_context_tokens    a conversation ends before the turn that would not fit, and one whose first turn does not fit
                          is left out and counted; None: no bound
    skip_bad_rows         leave out conversations that cannot be used, and count them

    `left_out` counts, by reason. Reads the file at construction. Raises TraceError, and ValueError for an unknown
    tokenizer and for max_conversations below 1.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        seed: int = 0,
        max_conversations: int | None = None,
        tokenizer: str | None = None,
        think_ms: Lengths | None = None,
        max_context_tokens: int | None = None,
        skip_bad_rows: bool = False,
        progress: Progress | None = None,
    ) -> None:
        if max_conversations is not None and max_conversations < 1:
            raise ValueError(f"max_conversations must be 1 or more, got {max_conversations}")
        self.path = Path(path)
        self.seed = seed
        self.think_ms = think_ms
        self._first_turn = array("q", [0])
        """Conversation c has the turns first_turn[c] to first_turn[c + 1] - 1, numbered through."""
        self._asked = array("i")
        self._answered = array("i")
        source = Source(self.path, skip_bad_rows)
        for turns in sharegpt_turns(source, token_counter(tokenizer)):
            context = 0
            fitting = 0
            for asked, answered in turns:
                context += asked + answered
                if max_context_tokens is not None and context > max_context_tokens:
                    break
                self._asked.append(asked)
                self._answered.append(answered)
                fitting += 1
            if not fitting:
                source.leave_out(f"conversations whose first turn passes {max_context_tokens} tokens")
                continue
            self._first_turn.append(len(self._asked))
            if progress is not None and self.num_sessions % _PROGRESS_ROWS == 0:
                progress(self.num_sessions, source.fraction())
            if self.num_sessions == max_conversations:
                break
        self.left_out = dict(source.left_out.most_common())
        if self.num_sessions == 0:
            listed = "; ".join(f"{reason}: {count}" for reason, count in self.left_out.items())
            raise TraceError(self.path, None, None, None, f"holds no conversation that can be used; left out: {listed}")

    @property
    def num_sessions(self) -> int:
        """Conversations."""
        return len(self._first_turn) - 1

    @property
    def num_requests(self) -> int:
        """Turns of all conversations."""
        return len(self._asked)

    def openings(self) -> Iterator[Opening]:
        """See `Sessions`."""
        for conversation in range(self.num_sessions):
            index = self._first_turn[conversation]
            asked = self._asked[index]
            prompt: tuple[Segment, ...] = ((prompt_stream(index), 0, asked),)
            yield Opening(index, prompt, asked, self._answered[index], conversation)

    def follow(self, spec: RequestSpec, finish_ns: int) -> RequestSpec | None:
        """The next turn after `spec`; None after the last. See `Sessions`."""
        index = spec.index + 1
        if index >= self._first_turn[spec.conversation + 1]:
            return None
        turn = spec.turn + 1
        asked = self._asked[index]
        think_ms = 0
        if self.think_ms is not None:
            think_ms = int(self.think_ms.at(uniforms(self.seed, "think", spec.conversation, turn, 1))[0])
        answer: Segment = (output_stream(spec.index), 0, spec.max_tokens)
        return RequestSpec(
            index=index,
            arrival_ns=finish_ns + think_ms * 1_000_000,
            prompt=merge_segments((*spec.prompt, answer, (prompt_stream(index), 0, asked))),
            num_prompt_tokens=spec.num_prompt_tokens + spec.max_tokens + asked,
            max_tokens=self._answered[index],
            priority=spec.priority,
            conversation=spec.conversation,
            turn=turn,
        )

    def turns(self) -> Iterator[list[tuple[int, int]]]:
        """For each conversation, the new tokens of the prompt and the tokens of the answer of each turn."""
        for conversation in range(self.num_sessions):
            of = slice(self._first_turn[conversation], self._first_turn[conversation + 1])
            yield list(zip(self._asked[of], self._answered[of], strict=True))

    def lengths(self) -> Iterator[tuple[int, int]]:
        """Tokens of prompt, history included, and of output of each turn, in order."""
        for conversation in range(self.num_sessions):
            context = 0
            for index in range(self._first_turn[conversation], self._first_turn[conversation + 1]):
                yield context + self._asked[index], self._answered[index]
                context += self._asked[index] + self._answered[index]
