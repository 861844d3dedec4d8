"""What the kernel says of another process."""

from __future__ import annotations

from pathlib import Path

__all__ = ["is_stopped"]


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by SIGSTOP or a debugger. False where there is no such process.

    The kernel's word for it is in `/proc/PID/stat`, behind the name: proc(5).
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in (b"T", b"t")
