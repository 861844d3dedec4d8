"""What the kernel says of another process."""

from __future__ import annotations

import time
from pathlib import Path

__all__ = ["LOOK_EVERY_S", "StoppedTime", "is_stopped"]

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
