"""What ends a worker with the process that it works for: a pipe that only that process can write to.

Nobody ever writes. The worker has the reading end, and has asked the kernel to send it SIGKILL when anything
happens there; what happens there is that the last writing end is closed, which the kernel does when its owner
dies. No code of the worker runs for it: one that is idle, stopped, or in a library that holds the
interpreter's lock, is killed like any other.

Who has a writing end: the process that launches, one for each worker, and nobody else. It is close-on-exec;
forks that Python makes close it (`launching`); the forkserver is never given one, so its workers cannot have
inherited one. A copy that another fork keeps (of a C library, or made while a worker is being launched) holds
the kill up for as long as that fork lives; for this the worker also watches its parent's pidfd.

A pipe, not the worker's socket: that has an event for every frame, and copies of its end are about.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import threading

__all__ = ["Lifeline", "bind", "tie"]

_NOWHERE = -1


class Lifeline:
    """A pipe for one worker. Any thread. Its maker must call `cut`. Raises `OSError`."""

    def __init__(self) -> None:
        self.theirs, self._ours = os.pipe2(os.O_CLOEXEC)
        self._lock = threading.Lock()

    def hand_over(self) -> None:
        """Close the worker's end here: it has its own, or there is no worker. Idempotent."""
        with self._lock:
            theirs, self.theirs = self.theirs, _NOWHERE
            if theirs != _NOWHERE:
                os.close(theirs)

    def cut(self) -> None:
        """Have the kernel kill the worker, now. Never blocks. Idempotent."""
        self.hand_over()
        with self._lock:
            ours, self._ours = self._ours, _NOWHERE
            if ours != _NOWHERE:
                os.close(ours)

    def forget(self) -> None:
        """In a fork of its maker: close this process's copies. The worker does not notice."""
        self._lock = threading.Lock()
        self.cut()


def bind(fd: int, pid: int) -> None:
    """Have the kernel kill a process when the other end of a lifeline goes. Raises `OSError`.

    Whom it signals is noted with the open file, which this process shares with the worker that it has forked.
    So its parent can do this for a worker that does not get to it: one that is stopped at once, say.
    """
    fcntl.fcntl(fd, fcntl.F_SETOWN, pid)
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)


def tie(fd: int) -> None:
    """Tie this process's life to the other end of a lifeline. Ends this process if that has gone already.

    The descriptor must stay open, and its open file be nobody else's lifeline: see `bind`.
    """
    bind(fd, os.getpid())
    # Only what happens from here on is signalled, so an end that came before is looked for now.
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if poll.poll(0):
        os._exit(1)
