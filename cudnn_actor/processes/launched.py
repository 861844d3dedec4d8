"""A launched worker as its parent sees it: its signals, its exit, and how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable

from cudnn_actor.processes.lifeline import Lifeline
from cudnn_actor.processes.process_state import ending_of
from cudnn_actor.processes.waiting import wait_for

__all__ = ["Child"]

_NOWHERE = -1


def _nobody_reports(child: Child, deadline: float) -> None:
    pass


class Child:
    """A worker as its parent sees it. Any thread may call its methods; `close` must be the last call.

    `Launcher.launch` makes it, and the caller must close it. Closing it kills the worker.

    Parameters
    ----------
    pid, pidfd, lifeline
        The worker's process id, its pidfd and its lifeline. This object owns the last two.
    process
        The process, if this one has started it itself, and must reap it; else None.
    report
        Waits until `note_end` was called, or a deadline; called with this object and the deadline, in
        `time.monotonic()` seconds.
    on_close
        Called at each `close`, with the process if it is still to be reaped; else with None.
    """

    def __init__(
        self,
        *,
        pid: int,
        pidfd: int,
        lifeline: Lifeline,
        process: subprocess.Popen[bytes] | None = None,
        report: Callable[[Child, float], None] = _nobody_reports,
        on_close: Callable[[subprocess.Popen[bytes] | None], None],
    ) -> None:
        self.pid = pid
        """The worker's process id, for people and logs. It may be reused once the worker has exited."""
        self.pidfd = pidfd
        """Readable when the worker has exited. Owned by this object; -1 once it is closed."""
        self.lifeline = lifeline
        """Cutting it kills the worker."""
        self._report = report
        self._on_close = on_close
        self._process = process
        self.end: str | None = None
        """How it ended, as text, once that is known."""
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Child {self.pid}>"

    def signal(self, number: int) -> None:
        """Send a signal. No effect if the worker has ended or this is closed. Never raises.

        If the kernel refuses (this process has changed its user, or filters system calls), SIGKILL is sent by
        cutting the lifeline, which needs no permission, and other signals are dropped.
        """
        with self._lock:
            if self.pidfd == _NOWHERE:
                return
            try:
                signal.pidfd_send_signal(self.pidfd, number)
            except ProcessLookupError:
                pass
            except OSError:
                if number == signal.SIGKILL:
                    self.lifeline.cut()

    def wait(self, timeout_s: float | None) -> bool:
        """Whether the worker has exited. Blocks until it has, or for `timeout_s` seconds.

        Raises `ValueError` when this is closed.
        """
        return bool(wait_for((self.pidfd,), timeout_s))

    def how_it_ended(self, timeout_s: float) -> str:
        """How the worker ended, as text: "was killed by SIGKILL", "exited with status 3".

        Blocks for up to `timeout_s` seconds: for the exit, and for the server's report. Without a report, the
        text is "has ended"; for a worker that still runs, "has not ended". Raises `ValueError` if this is
        closed.
        """
        deadline = time.monotonic() + timeout_s
        if not self.wait(timeout_s):
            return "has not ended"
        self._report(self, deadline)
        return self.end or self._reap() or "has ended"

    def close(self) -> None:
        """Release the worker, which is killed if it still runs. Does not wait for its end. Idempotent."""
        self.lifeline.cut()
        self._reap()
        with self._lock:
            pidfd, self.pidfd = self.pidfd, _NOWHERE
            if pidfd != _NOWHERE:
                os.close(pidfd)
            process, self._process = self._process, None
        self._on_close(process if process is not None and process.returncode is None else None)

    def note_end(self, status: int) -> None:
        """Note how it ended: its exit status, as in `subprocess`."""
        self.end = ending_of(status)

    def _reap(self) -> str | None:
        """How the worker ended, if this process must reap it; else None. Never blocks.

        A worker that has outlived its server gets another parent: process 1, or a process that has asked to
        adopt orphans. In many containers, this process is process 1.
        """
        with self._lock, contextlib.suppress(OSError):
            if self.pidfd != _NOWHERE and (end := os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)):
                by_itself = end.si_code == os.CLD_EXITED
                self.end = ending_of(end.si_status if by_itself else -end.si_status)
                if self._process is not None:
                    self._process.returncode = 0  # so that nobody else waits for it; the text has its status
        return self.end

    def wait_and_reap(self, timeout_s: float) -> None:
        """Wait for its exit, for up to `timeout_s` seconds, even if another thread closes this meanwhile."""
        with self._lock:
            pidfd = _NOWHERE if self.pidfd == _NOWHERE else os.dup(self.pidfd)
        if pidfd != _NOWHERE:
            wait_for((pidfd,), timeout_s)
            os.close(pidfd)
        if self._process is not None:
            self._reap()

    def forget(self) -> None:
        """Replace the lock, which another thread may hold, and close the descriptors. Called in a fork of the
        process."""
        self._lock = threading.Lock()
        self.lifeline.forget()
        process, self._process = self._process, None
        if process is not None:
            process.returncode = 0  # it is not a child of this process
        pidfd, self.pidfd = self.pidfd, _NOWHERE
        if pidfd != _NOWHERE:
            os.close(pidfd)
