"""The process of a forkserver, as its parent sees it: started by exec, or forked by its predecessor."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Sequence
from typing import Final

from cudnn_actor.processes.interpreter import OTHER_VERSION, VERSION, find_python, start_module
from cudnn_actor.processes.lifeline import Lifeline

__all__ = ["SERVER", "ExecutedServer", "ForkedServer"]

SERVER: Final = "cudnn_actor.processes.forkserver"
"""The module that a server runs."""
_NOWHERE = -1


class ExecutedServer:
    """A server's process, started by exec. Raises `OSError`, `InvalidRequest`."""

    def __init__(self, executable: str | None, theirs: socket.socket, preload: Sequence[str]) -> None:
        arguments = (SERVER, str(theirs.fileno()), str(os.getpid()), *preload)
        self._python = find_python(executable)
        descriptors = (theirs.fileno(),)
        self._process, self.pidfd = start_module(*arguments, descriptors=descriptors, executable=executable)
        self.pid = self._process.pid

    def kill(self) -> None:
        """Kill it. Never blocks. No effect if it has ended."""
        with contextlib.suppress(PermissionError):  # this process has changed its user
            self._process.kill()

    def status(self) -> int | None:
        """The exit status, as in `subprocess`; None while it runs, or if it is unknown."""
        return self._process.poll()

    def origin(self) -> str:
        """Text about what ran it, after text about how it ended."""
        wrong = (
            f", which is not Python {VERSION}, as this process is" if self.status() == OTHER_VERSION else ""
        )
        return f", run by {self._python}{wrong}"

    def forget(self) -> None:
        """In a fork of its parent: drop it, because it is not a child of this process."""
        self._process.returncode = 0
        self.close()

    def close(self) -> None:
        """Close the pidfd. Idempotent."""
        pidfd, self.pidfd = self.pidfd, _NOWHERE
        if pidfd != _NOWHERE:
            os.close(pidfd)


class ForkedServer:
    """A server's process that another server has forked as its successor."""

    def __init__(self, pid: int, pidfd: int, lifeline: Lifeline) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self._lifeline = lifeline

    def kill(self) -> None:
        """Kill it. Never blocks. No effect if it has ended."""
        if self.pidfd != _NOWHERE:
            with contextlib.suppress(OSError):  # it has ended, or the kernel refuses: the lifeline does it
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        self._lifeline.cut()

    def status(self) -> int | None:
        """The exit status if this process has had to adopt it (see `launched.Child`); else None."""
        with contextlib.suppress(OSError):
            if end := os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG):
                return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        return None

    def origin(self) -> str:
        """No text: it runs what its predecessor ran."""
        return ""

    def forget(self) -> None:
        """In a fork of its parent."""
        self._lifeline.forget()
        self.close()

    def close(self) -> None:
        """Release it. It is killed if it still runs. Idempotent."""
        self._lifeline.cut()
        pidfd, self.pidfd = self.pidfd, _NOWHERE
        if pidfd != _NOWHERE:
            os.close(pidfd)
