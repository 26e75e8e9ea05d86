"""Speckv: what speculative decoding does to a paged KV cache, simulated.

`load_scenario`, `simulate` and `sweep` are the entry points for a notebook or a script. They are looked up when first
asked for, so that importing `sim` loads no library. This file knows their homes and the version, and has the core
chosen (`sim/compiled.py`); it must not know anything that they do.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from sim import compiled as compiled  # first of all: it chooses the core

if TYPE_CHECKING:
    from sim.run import simulate
    from sim.scenario import load_scenario
    from sim.sweep import sweep

__all__ = ["__version__", "load_scenario", "simulate", "sweep"]

__version__ = "0.2.0.dev0"

_HOMES = {"load_scenario": "sim.scenario", "simulate": "sim.run", "sweep": "sim.sweep"}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sim' has no attribute {name!r}; it offers {', '.join(__all__)}")
    module = import_module(home)
    if home == f"{__name__}.{name}":  # Python has now bound the name to the module, which can be called.
        return module
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
