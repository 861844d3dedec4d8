"""The pauses between polls of fences."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

__all__ = ["AT_ONCE_S", "EARLY_S", "LONGEST_PAUSE_S", "pause_s", "sleep_exactly"]

_PR_SET_TIMERSLACK = 29

AT_ONCE_S = 100e-6
"""Polling does not pause for this long after a fence was set, or after the one before it passed: a small
kernel takes 5 to 50 us, and the shortest sleep of a thread on Linux is some 60 us."""
LONGEST_PAUSE_S = 1e-3
_FRACTION = 8


EARLY_S = 150e-6
"""Polling stops pausing this long before a fence is expected to pass: a sleep ends up to 100 us late."""


def pause_s(waited_s: float, expected_s: float = 0.0, awake_s: float = 0.0) -> float:
    """Seconds until the next look at a fence that has been waited for `waited_s` seconds.

    `expected_s`: how long it is expected to be waited for in all; 0 if that is unknown. Until shortly before
    then, there is no look; around then, no pause. If that is at most `awake_s`, there is no pause until then.

    Otherwise the pause is a fraction of the time waited, so an answer is late by that fraction at most. A
    message ends the pause. The pause also lets the event loop's thread run, which polling without a pause
    does only by chance, since it holds the interpreter's lock.
    """
    if waited_s < expected_s + AT_ONCE_S and expected_s > EARLY_S:
        return 0.0 if expected_s <= awake_s else max(expected_s - EARLY_S - waited_s, 0.0)
    return 0.0 if waited_s < AT_ONCE_S else min(waited_s / _FRACTION, LONGEST_PAUSE_S)


def sleep_exactly() -> None:
    """Let Linux delay the ends of the calling thread's sleeps by at most 1 us.

    It may delay them by 50 us, to wake up less often, unless a thread asks for less (prctl(2),
    PR_SET_TIMERSLACK). Where that is refused, nothing changes.
    """
    _libc().prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1000), 0, 0, 0)


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None)
