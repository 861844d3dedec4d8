"""What pykka's `ask` gives a caller: a future that leaves no lock behind when its waiter is interrupted.

pykka's own takes a `threading.Condition` by `with`, which is code in Python: an exception of a signal's
handler may come between the taking and the `with`, and then whoever gives the reply waits for that lock for
ever, and with him everybody whom he serves. Here nobody waits for a lock that another thread holds.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from typing import Any

import pykka
from pykka import Timeout

__all__ = ["ReplyFuture"]


class ReplyFuture(pykka.ThreadingFuture[Any]):
    """A pykka future; see the module's docstring. Any thread may call any method."""

    def __init__(self) -> None:
        pykka.Future.__init__(self)  # without the condition
        self._outcome: tuple[Any, BaseException | None, Any] | None = None
        """Value, error and its traceback; None while there is none."""
        self._waiting: list[Any] = []
        """A lock of each thread that waits, released when there is an outcome."""
        self._asking_hook: Any = threading.RLock()
        """One thread at a time asks a hook: its answer is kept for the others."""

    def get(self, *, timeout: float | None = None) -> Any:
        """The reply; its error is raised. Blocks up to `timeout` seconds, then raises `pykka.Timeout`."""
        if self._get_hook is not None:
            with self._asking_hook:
                return pykka.Future.get(self, timeout=timeout)
        if self._outcome is None:
            self._wait(timeout)
        if self._outcome is None:  # a hook has come instead
            return self.get(timeout=timeout)
        value, error, trace = self._outcome
        if error is not None:
            raise error.with_traceback(trace)
        return value

    def _wait(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        wakeup = threading.Lock()
        wakeup.acquire(blocking=False)
        # Joins first, and looks second; whoever gives the outcome does so first, and tells those second.
        self._waiting.append(wakeup)
        while self._outcome is None and self._get_hook is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0.0:
                raise Timeout(f"{timeout} seconds")
            wakeup.acquire(timeout=-1 if left is None else min(left, threading.TIMEOUT_MAX))

    def set(self, value: Any = None) -> None:
        """Give the reply. Raises `queue.Full` when there is one."""
        self._give((value, None, None))

    def set_exception(self, exc_info: Any = None) -> None:
        """Give an error as `sys.exc_info()` has it; None for the one being handled. Raises `queue.Full`."""
        kind, error, trace = sys.exc_info() if exc_info is None else exc_info
        assert kind is not None
        self._give((None, kind() if error is None else error, trace))

    def set_get_hook(self, func: Any) -> None:
        """Have `get` answer with what `func` does. Raises `queue.Full` when there is a reply."""
        if self._outcome is not None:
            raise queue.Full
        self._get_hook = func
        self._tell_waiting()

    def _give(self, outcome: tuple[Any, BaseException | None, Any]) -> None:
        if self._outcome is not None or self._get_hook is not None:
            raise queue.Full
        self._outcome = outcome  # one step with the look, for `actors.interrupts`
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        for wakeup in tuple(self._waiting):
            wakeup.release()
