"""A builder process that is forked ahead: from a worker, before that has touched its device.

A forked process finds every module imported, which a new one needs a second for; and after the device has
been initialised nothing can be forked any more that is to use it. So a worker forks one at its very start. It
waits at its socket, and opens the device when it is told to, as one does that was started anew; until then it
costs no device memory, and of the host's only the pages that it changes. The first builder process of the
worker is this one; those behind it are started anew.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from typing import NoReturn

from cudnn_actor.engines.remote.serving import Channel, follow_parent, serve

__all__ = ["Spare", "discard", "prefork", "take"]

_UNTIL_KILLED_S = 5.0

_spare: Spare | None = None


class Spare:
    """A forked process, with what `subprocess.Popen` has that a builder's parent uses. One thread's.

    Parameters
    ----------
    pid
        Of a child of this process that nobody else waits for.
    connection
        This end of its socket pair.
    output
        What it prints, a pipe's reading end.
    """

    def __init__(self, pid: int, connection: socket.socket, output: int) -> None:
        self.pid = pid
        self.socket = connection
        self.stdout = io.FileIO(output)
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, a signal as a negative number. Blocks. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            if timeout is not None and not select.select([self._pidfd], (), (), timeout)[0]:
                raise subprocess.TimeoutExpired("a forked builder process", timeout)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._pidfd)
        return self.returncode

    def kill(self) -> None:
        """End it now, if it has not been waited for."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)  # still its own number: it has not been reaped


def prefork() -> None:
    """Fork one. For a process with a single thread that has not initialised its device.

    The thread must live as long as the process: to the kernel it is the child's parent. Where no process is
    to be had there is none, and builders are started anew.
    """
    global _spare  # noqa: PLW0603 - one for the process
    with contextlib.suppress(OSError):
        _spare = _forked()


def take() -> Spare | None:
    """The one that was forked, which is the caller's then; None where there is none."""
    global _spare
    spare, _spare = _spare, None
    return spare


def discard() -> None:
    """End the one that nobody took. Blocks for its exit."""
    spare = take()
    if spare is None:
        return
    spare.socket.close()
    spare.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        spare.wait(_UNTIL_KILLED_S)
    spare.stdout.close()


def _forked() -> Spare:
    parent = os.getpid()
    ours, theirs = socket.socketpair()
    with theirs:
        output, print_to = os.pipe()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of native threads of some module
                pid = os.fork()
        except OSError:
            ours.close()
            os.close(output)
            raise
        else:
            if pid == 0:
                _live(theirs, print_to, parent)
        finally:
            os.close(print_to)
    return Spare(pid, ours, output)


def _live(connection: socket.socket, print_to: int, parent: int) -> NoReturn:
    """Serve as a builder process, and end without anything that a Python process does at its end."""
    status = 1
    try:
        follow_parent()
        if os.getppid() != parent:
            os._exit(1)
        os.setpgid(0, 0)
        _keep_only(connection.fileno(), print_to)
        faulthandler.enable()
        serve(Channel(connection))
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    except BaseException:  # noqa: BLE001 - nothing may run on in the parent's frames; it reads what was printed
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _keep_only(connection: int, print_to: int) -> None:
    """Print to the pipe, read from nowhere, and hold no other descriptor of the parent's."""
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(print_to, 1)
    os.dup2(print_to, 2)
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, connection}:
        with contextlib.suppress(OSError):  # the one that listed them
            os.close(fd)
