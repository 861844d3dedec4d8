"""Whether a process of a service may keep a core busy while it waits for the other."""

from __future__ import annotations

import os

__all__ = ["may_keep_one_busy"]

_MANY = 4
"""With this many cores, one thread may keep one busy: the others are enough for the other process and for the
other threads of this one."""


def may_keep_one_busy() -> bool:
    """Whether this process has enough cores that a thread need not sleep while it waits."""
    return len(os.sched_getaffinity(0)) >= _MANY
