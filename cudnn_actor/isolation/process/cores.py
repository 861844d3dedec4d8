"""Whether a process of a service may keep a core busy while it waits for the other."""

from __future__ import annotations

import os

__all__ = ["may_keep_one_busy"]

_MANY = 4
"""With so many cores, the other process, and the other threads of this one, still have theirs."""


def may_keep_one_busy() -> bool:
    """Whether this process may run on so many cores that its thread need not sleep while it waits."""
    return len(os.sched_getaffinity(0)) >= _MANY
