"""Whether a process of a service may keep a core busy while it waits for the other."""

from __future__ import annotations

from pathlib import Path

from cudnn_actor.memory.container import GROUPS, OWN_GROUPS, processors

__all__ = ["may_keep_one_busy"]

_MANY = 4
"""With this many cores, one thread may keep a core busy: the other cores are enough for the other process and
the other threads of this one."""


def may_keep_one_busy(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> bool:
    """Whether this process has enough cores that a thread need not sleep while it waits.

    Reads some small files, so it is not to be called on an event loop.

    A container's quota counts: in one that may use two of 64 cores, a thread that stays awake would use up
    the time of all others, and the kernel would stop them.
    """
    return processors(groups, own) >= _MANY
