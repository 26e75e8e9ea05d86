"""The engine would have crashed here."""

from __future__ import annotations


class EngineCrash(Exception):
    """The released engine ends with a failed assertion at this point, so there is nothing to follow any further.

    Nothing of the decision that failed counts; the state is that of the engine when it fell.
    """
