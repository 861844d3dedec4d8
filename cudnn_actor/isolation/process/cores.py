"""Whether a process of a service may keep a core busy while it waits for the other, and for how long."""

from __future__ import annotations

from pathlib import Path

from cudnn_actor.memory.container import GROUPS, OWN_GROUPS, processors

__all__ = ["ANSWER_S", "PROMPT_S", "may_keep_one_busy"]

ANSWER_S = 250e-6
"""The most seconds for which an event loop stays awake for an answer that is near. The worker says so some
100 us before the answer."""
PROMPT_S = 500e-6
"""Seconds for which a worker (`Inbox`) and the loop of an attached server (`nearness`) look for the next
request. A caller that sends it as soon as it has the last answer takes less, also if it copies 1 MiB for it
first. By this number, the parent of a worker knows for how long it is awake (`straight_upload`). Runs that
take no longer on the device are also awaited without sleep (`Runner.awake_s`)."""

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
