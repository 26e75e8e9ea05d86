"""The paged KV cache on a real device, in torch: attention, rollback, shadow execution and calibration.

Needs the extra `gpu`; importing the package itself does not load torch. Imports torch and `sim.core`; nothing below
`sim.build` imports it.
"""
