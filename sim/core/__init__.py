"""Mechanism: the request, the block pool, the prefix cache, the batch and the scheduler.

Counts blocks and tokens and decides who gets them, turn by turn. Imports only `sim.records`; must not know the clock,
YAML, pandas, SimPy, or a request's true output length when it is admitted.
"""
