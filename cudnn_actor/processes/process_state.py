"""What the kernel says of another process, and is told of this one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["LOOK_EVERY_S", "StoppedTime", "call_this_process", "is_stopped", "own_pidfd"]

LOOK_EVERY_S = 0.25
"""So often whoever waits for a process looks whether it is stopped."""


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by SIGSTOP or a debugger. False where there is no such process.

    The kernel's word for it is in `/proc/PID/stat`, behind the name: proc(5).
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in (b"T", b"t")


@contextlib.contextmanager
def own_pidfd() -> Iterator[int]:
    """A pidfd of this process: who is given it takes no other process for its parent. Raises `OSError`."""
    pidfd = os.pidfd_open(os.getpid())
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def call_this_process(name: str) -> None:
    """Give this process a name, of 15 bytes at most, for `ps -o comm`. On its main thread."""
    Path("/proc/self/comm").write_text(name)


class StoppedTime:
    """For how long a process has been stopped, for one who waits for it and looks now and then.

    Time in which nobody looked does not count: whoever waits may have been stopped, too, with the machine.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._looked_at = time.monotonic()
        self._seen_s = 0.0

    def look(self) -> float:
        """Look, and answer in seconds; 0 for a process that runs. Reads a file, at most every 0.1 s or so."""
        now = time.monotonic()
        passed_s = now - self._looked_at
        if passed_s >= LOOK_EVERY_S / 2:
            self._looked_at = now
            self._seen_s = self._seen_s + min(passed_s, 2 * LOOK_EVERY_S) if is_stopped(self._pid) else 0.0
        return self._seen_s
