"""How often a device is asked whether it has finished."""

from __future__ import annotations

__all__ = ["AT_ONCE_S", "LONGEST_PAUSE_S", "pause_s"]

AT_ONCE_S = 100e-6
"""So long after a fence was set, or the one before it passed, the next look comes at once: a small kernel
takes 5 to 50 us, and the shortest sleep that Linux gives a thread is some 60 us."""
LONGEST_PAUSE_S = 1e-3
_FRACTION = 8


def pause_s(waited_s: float) -> float:
    """Seconds until the next look at a fence that has been waited for so long: what is late by a fraction.

    None of it is slept away when there is something else to do: a message ends the pause. It also lets
    the event loop's thread have the interpreter, which looking without a pause does only by chance.
    """
    return 0.0 if waited_s < AT_ONCE_S else min(waited_s / _FRACTION, LONGEST_PAUSE_S)
