"""The start of a thread, with a clear error where the system gives none."""

from __future__ import annotations

import threading

__all__ = ["NO_TASK", "ThreadRefused", "start_thread"]

NO_TASK = (
    "the user or the container may have no more processes and threads "
    "(ulimit -u, or the container's limit of pids), or memory is short"
)
"""Why the system gives no thread or process (EAGAIN), and which limits decide."""


class ThreadRefused(RuntimeError):
    """Raised when the system gives no thread."""


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. Raises `ThreadRefused`."""
    try:
        thread.start()
    except RuntimeError as error:
        raise ThreadRefused(f"{error}: {NO_TASK}") from error
