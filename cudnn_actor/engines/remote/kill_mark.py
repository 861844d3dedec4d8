"""Marks a builder process as killed on purpose, in its output file, so that no graph is blamed for its death.

A process may be killed because it is stopped, or because it does not answer one of its clients. The other
clients see only that it has ended. So a killer whose reason is not its own request writes a line first.
"""

from __future__ import annotations

import contextlib
import os

__all__ = ["is_marked_killed", "mark_killed"]

_MARK = b"\n[this process was killed for no fault of what it builds]\n"
_LOOKED_AT = 8 << 10


def mark_killed(output: int) -> None:
    """Write the line to the file that the process prints to."""
    with contextlib.suppress(OSError):  # no room for the line: the graph is then blamed, once
        os.pwrite(output, _MARK, os.fstat(output).st_size)


def is_marked_killed(output: int) -> bool:
    """Whether the line is in the last 8 KiB of the file."""
    end = os.fstat(output).st_size
    return _MARK in os.pread(output, _LOOKED_AT, max(0, end - _LOOKED_AT))
