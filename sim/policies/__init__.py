"""What differs between engines and versions: an axis a file, and presets as data.

A preset names a value on each axis and cites the version it follows. Imports only `sim.core`; must not know the engine
or observers.
"""
