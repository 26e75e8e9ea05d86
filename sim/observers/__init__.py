"""Those who watch a run: the ledger, metrics, invariants and the recorder.

They are handed records and derive everything from them; they are told, they never ask. Import only `sim.records`; must
not know the scheduler or the engine.
"""
