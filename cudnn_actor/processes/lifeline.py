"""The lifeline: a pipe that ends a worker together with the process that it works for.

Nothing is ever written to it. The worker has the reading end, and has asked the kernel to send it SIGKILL at
any event there. The only event is the closing of the last writing end, and the kernel closes it when its
owner dies. This needs no code of the worker: a worker that is idle, stopped, or in a library that holds the
interpreter's lock is killed like any other.

Only the launching process has writing ends, one for each worker. They are close-on-exec, and forks that
Python makes close them (`launching`). The forkserver never gets one, so its workers cannot inherit one. If
another fork keeps a copy (a fork by a C library, or one made during a launch), the kill is delayed until that
fork ends. For this case, the worker also watches its parent's pidfd.

It is a pipe and not the worker's socket, because the socket has an event for every frame, and copies of its
end exist.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import threading
from collections.abc import Iterator

__all__ = ["Lifeline", "bind", "lifeline_for_launch", "tie"]

_NOWHERE = -1


class Lifeline:
    """A pipe for one worker. Any thread. Its maker must call `cut`. Raises `OSError`."""

    def __init__(self) -> None:
        self.theirs, self._ours = os.pipe2(os.O_CLOEXEC)
        self._lock = threading.Lock()

    def hand_over(self) -> None:
        """Close this process's copy of the worker's end, after the launch or its failure. Idempotent."""
        with self._lock:
            theirs, self.theirs = self.theirs, _NOWHERE
            if theirs != _NOWHERE:
                os.close(theirs)

    def cut(self) -> None:
        """Let the kernel kill the worker now. Never blocks. Idempotent."""
        self.hand_over()
        with self._lock:
            ours, self._ours = self._ours, _NOWHERE
            if ours != _NOWHERE:
                os.close(ours)

    def forget(self) -> None:
        """In a fork of its maker, close this process's copies. The worker does not notice."""
        self._lock = threading.Lock()
        self.cut()


@contextlib.contextmanager
def lifeline_for_launch() -> Iterator[Lifeline]:
    """A lifeline for the process that the body launches. It is cut if the body raises. Raises `OSError`."""
    lifeline = Lifeline()
    try:
        yield lifeline
    except BaseException:
        lifeline.cut()
        raise
    finally:
        lifeline.hand_over()


def bind(fd: int, pid: int) -> None:
    """Let the kernel kill a process when the other end of a lifeline is closed. Raises `OSError`.

    The kernel stores the process to signal with the open file, which this process shares with the worker that
    it has forked. So the forking process can call this for a worker that does not get so far, because it is
    stopped at once, for example.
    """
    fcntl.fcntl(fd, fcntl.F_SETOWN, pid)
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)


def tie(fd: int) -> None:
    """Tie this process's life to the other end of a lifeline. If that is closed already, ends this process.

    The descriptor must stay open. No other process may use its open file as a lifeline (see `bind`).
    """
    bind(fd, os.getpid())
    # The kernel signals only events from now on, so check for an earlier one.
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if poll.poll(0):
        os._exit(1)
