"""Holding the simulator against recorded traces and against a live vLLM.

Knows scripted cases, traces and how two traces are compared. Must not know how the simulator decides: the only
thing of it that is called is ``sim.replay.replay_case``.
"""
