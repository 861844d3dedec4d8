"""The processes of a service, found from outside: which there are, and the role of each.

Every process that the command starts, and every process that those start or fork, inherits a mark in its
environment. `/proc/PID/environ` shows it, whatever the process's parent is by now.
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cudnn_actor.engines.remote.serving import NAME as BUILDER
from cudnn_actor.isolation.process.child.main import NAME as WORKER
from cudnn_actor.processes.forkserver import NAME as LAUNCHER

__all__ = ["Found", "Role", "end_all", "find", "mark_processes", "send_signal"]

_MARK = "CUDNN_ACTOR_CHAOS_RUN"


class Role(enum.StrEnum):
    """The role of a process of a service."""

    WORKER = "worker"
    FORKSERVER = "forkserver"
    BUILDER = "builder"
    OTHER = "other"


_ROLES = {WORKER: Role.WORKER, LAUNCHER: Role.FORKSERVER, BUILDER: Role.BUILDER}
"""The role by the process's name."""


class Found(NamedTuple):
    """A process: its id, its role, its state in the kernel ("R", "S", "T": stopped), its CPU time.

    `ticks` is the CPU time that it has used, in the kernel's unit.
    """

    pid: int
    role: Role
    state: str = "R"
    ticks: int = 0


@contextlib.contextmanager
def mark_processes() -> Iterator[None]:
    """Mark the processes that are started from here on, so that `find` finds them."""
    before = os.environ.get(_MARK)
    os.environ[_MARK] = uuid.uuid4().hex
    try:
        yield
    finally:
        del os.environ[_MARK]
        if before is not None:
            os.environ[_MARK] = before


def find() -> list[Found]:
    """Every process with this run's mark that has not ended."""
    found = [_look_at(int(name)) for name in os.listdir("/proc") if name.isdecimal()]
    return [each for each in found if each is not None]


def _look_at(pid: int) -> Found | None:
    mark = f"{_MARK}={os.environ.get(_MARK, '-')}".encode()
    place = Path(f"/proc/{pid}")
    try:
        if mark not in (place / "environ").read_bytes().split(b"\0"):
            return None
        name = (place / "comm").read_text().strip()
        stat = (place / "stat").read_bytes().rpartition(b")")[2].split()  # from the third field on: proc(5)
    except (OSError, ValueError):  # it has ended, or belongs to another user
        return None
    state, ticks = stat[0].decode(), int(stat[11]) + int(stat[12])
    return None if state in ("Z", "X") else Found(pid, _ROLES.get(name, Role.OTHER), state, ticks)


def send_signal(found: Found, number: signal.Signals) -> bool:
    """Send a signal. Returns whether the process still existed, and was still the one that was found."""
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(found.pid)
        try:
            now = _look_at(found.pid)  # the descriptor names one process; check that it is the one meant
            if now is not None and now.role is found.role:
                signal.pidfd_send_signal(process, number)
                return True
        finally:
            os.close(process)
    return False


def end_all() -> list[Found]:
    """Kill every process with this run's mark. Returns those that existed."""
    left = find()
    for each in left:
        send_signal(each, signal.SIGKILL)
    return left
