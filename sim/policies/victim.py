"""Axis: whom to preempt when blocks are lacking. With scheduling policy `priority` the priority decides instead."""

from __future__ import annotations

from sim.core.request import Request


def last_admitted(running: list[Request]) -> Request:
    """The last of the running list (vLLM; SGLang 0.5.6 retracts from the back)."""
    return running[-1]


def fewest_outputs(running: list[Request]) -> Request:
    """Fewest outputs first, the longest prompt among equals, then the last of the list (SGLang 0.5.23)."""
    best = running[0]
    for request in running:
        if (request.num_output_tokens, -request.num_prompt_tokens) <= (best.num_output_tokens, -best.num_prompt_tokens):
            best = request
    return best
