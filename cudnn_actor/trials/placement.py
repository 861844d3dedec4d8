"""Places the threads of a measurement on cores.

Two threads on one core switch by a context switch. On two cores one must wake
the other, which takes five times as long in a virtual machine. So every figure
for one request at a time is measured for both.
"""

from __future__ import annotations

import contextlib
import os
import threading

__all__ = ["PLACEMENTS", "cores", "last_cores", "place"]

PLACEMENTS = ("one core", "two cores", "free")
"""All threads on one core; the loop's thread on one and the others on another; placed by the system."""

_TASKS = "/proc/self/task"
_PROCESSOR = 36
"""Index of the last core among the fields that follow the name in `/proc/PID/stat`."""


def cores() -> tuple[int, ...]:
    """The cores that this process was allowed to use when this module was imported."""
    return _CORES


def place(placement: str) -> None:
    """Place the existing threads; threads created later start on the loop's core."""
    loop, others = {
        "one core": ({_CORES[0]}, {_CORES[0]}),
        "two cores": ({_CORES[0]}, {_CORES[-1]}),
        "free": (set(_CORES), set(_CORES)),
    }[placement]
    mine = threading.get_native_id()
    for task in map(int, os.listdir(_TASKS)):
        with contextlib.suppress(ProcessLookupError):  # it has ended in the meantime
            os.sched_setaffinity(task, loop if task == mine else others)


def last_cores(thread: int | None) -> tuple[int, int] | None:
    """The cores that this thread and another (given by native id) ran on last; None if unknown."""
    try:
        return _last_core(threading.get_native_id()), _last_core(thread or 0)
    except OSError:
        return None


def _last_core(task: int) -> int:
    with open(f"{_TASKS}/{task}/stat", encoding="ascii", errors="replace") as file:
        return int(file.read().rpartition(")")[2].split()[_PROCESSOR])


_CORES = tuple(sorted(os.sched_getaffinity(0)))
