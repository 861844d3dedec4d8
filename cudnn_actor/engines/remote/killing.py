"""Who has killed a builder process, written where it prints: so that no graph is blamed for such a death.

A process may be killed because it is stopped, or because it does not answer one of those that it works for.
The others see only its end. Whoever kills it for anything but their own request writes a line first.
"""

from __future__ import annotations

import contextlib
import os

__all__ = ["is_marked_killed", "mark_killed"]

_MARK = b"\n[this process was killed for no fault of what it builds]\n"
_LOOKED_AT = 8 << 10


def mark_killed(output: int) -> None:
    """Write the line to the file that the process prints to."""
    with contextlib.suppress(OSError):  # no room: then the graph gets the blame once
        os.pwrite(output, _MARK, os.fstat(output).st_size)


def is_marked_killed(output: int) -> bool:
    """Whether the line is among the last that the file has."""
    end = os.fstat(output).st_size
    return _MARK in os.pread(output, _LOOKED_AT, max(0, end - _LOOKED_AT))
