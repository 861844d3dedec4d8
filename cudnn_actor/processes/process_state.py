"""The state and identity of processes: whether one is stopped, how one ended, this one's pidfd and name."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cudnn_actor.actors.threads import NO_TASK

__all__ = [
    "LOOK_EVERY_S",
    "ProcessName",
    "SilentTime",
    "call_this_process",
    "ending_of",
    "is_stopped",
    "own_pidfd",
    "reason_of",
    "resident_bytes",
]

_PAGE = os.sysconf("SC_PAGE_SIZE")
LOOK_EVERY_S = 0.25
"""Seconds between two checks whether an awaited process is stopped."""


class _Stat(NamedTuple):
    """What is read of `/proc/PID/stat`, see proc(5): the id, the state, and when it began, in ticks."""

    pid: int
    state: bytes
    began: int


def _read_stat(process: int | str) -> _Stat:
    """The line of the process that /proc has under this name. Raises `OSError`."""
    descriptor = os.open(f"/proc/{process}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        line = os.pread(descriptor, 4096, 0)  # waits for no disk
    finally:
        os.close(descriptor)
    pid, behind_name = line.partition(b" ")[0], line.rpartition(b")")[2].split()  # a name may have any bytes
    return _Stat(int(pid), behind_name[0], int(behind_name[19]))


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by SIGSTOP or a debugger. False if there is no such process."""
    try:
        return _read_stat(pid).state in (b"T", b"t")
    except (OSError, ValueError, IndexError):
        return False


@dataclass(frozen=True)
class ProcessName:
    """A process of this machine. Later ones of the same id have other names.

    Parameters
    ----------
    pid
        Its id.
    began
        When it began, in the kernel's ticks.
    """

    pid: int
    began: int

    @classmethod
    def own(cls) -> ProcessName:
        """The calling process, with its id as other processes find it in /proc. Raises `OSError`."""
        return cls.of("self")

    @classmethod
    def of(cls, process: int | str) -> ProcessName:
        """The process that /proc has under this name. Raises `OSError`."""
        stat = _read_stat(process)
        return cls(stat.pid, stat.began)

    def has_ended(self) -> bool:
        """Whether the process is known to have ended."""
        try:
            return self.of(self.pid) != self
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:  # it cannot be found out now
            return False


@contextlib.contextmanager
def own_pidfd() -> Iterator[int]:
    """A pidfd of this process, for a child to watch: unlike an id, it is never reused. Raises `OSError`."""
    pidfd = os.pidfd_open(os.getpid())
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def call_this_process(name: str) -> None:
    """Set this process's name, of at most 15 bytes, for `ps -o comm`. Call on its main thread.

    Where `/proc` is read-only, as in some containers, it keeps the name that it has.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def reason_of(error: Exception) -> str:
    """Why no process was started, as text; with the limits that decide, if there may be no more."""
    return f"{error}: {NO_TASK}" if getattr(error, "errno", None) == errno.EAGAIN else str(error)


def ending_of(status: int | None) -> str:
    """An exit status, as in `subprocess`, as text."""
    if status is None:
        return "has ended"
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-status}"


class SilentTime:
    """Measures for how long an awaited process does nothing. The waiting process calls `look` now and then.

    Long gaps between two looks do not count, because the waiting process may have been stopped, too.

    Parameters
    ----------
    is_silent
        Returns whether the awaited process does nothing at the moment.
    """

    def __init__(self, is_silent: Callable[[], bool]) -> None:
        self._is_silent = is_silent
        self._looked_at = time.monotonic()
        self._seen_s = 0.0

    def look(self) -> float:
        """The seconds so far; 0 for a process that works. Asks at most every 0.1 s or so."""
        now = time.monotonic()
        passed_s = now - self._looked_at
        if passed_s >= LOOK_EVERY_S / 2:
            self._looked_at = now
            self._seen_s = self._seen_s + min(passed_s, 2 * LOOK_EVERY_S) if self._is_silent() else 0.0
        return self._seen_s


def resident_bytes() -> int:
    """Bytes of host memory that this process has: proc(5), `statm`. 0 where there is no such file."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0
