"""The future that pykka's `ask` returns here: it leaves no lock held when its waiter is interrupted.

pykka's own future takes a `threading.Condition` by `with`, which runs Python code. A signal handler may raise
between the acquisition and the `with` block, and then the lock stays held. The thread that gives the reply
would wait for that lock for ever, and so would all its other callers. In this future no thread waits for a
lock that another thread holds.
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
        """Value, error and the error's traceback; None while there is no reply."""
        self._waiting: list[Any] = []
        """One lock for each waiting thread, released when there is an outcome."""
        self._asking_hook: Any = threading.RLock()
        """Held while a thread calls the hook: the hook's answer is kept for the others."""

    def get(self, *, timeout: float | None = None) -> Any:
        """Return the reply, or raise its error. Blocks up to `timeout` seconds, then raises
        `pykka.Timeout`."""
        if self._get_hook is not None:
            with self._asking_hook:
                return pykka.Future.get(self, timeout=timeout)
        if self._outcome is None:
            self._wait(timeout)
        if self._outcome is None:  # a hook was set instead
            return self.get(timeout=timeout)
        value, error, trace = self._outcome
        if error is not None:
            raise error.with_traceback(trace)
        return value

    def _wait(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        wakeup = threading.Lock()
        wakeup.acquire(blocking=False)
        # The waiter registers first and checks second; the giver sets the outcome first and notifies second.
        # So the waiter either sees the outcome or is notified.
        self._waiting.append(wakeup)
        while self._outcome is None and self._get_hook is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0.0:
                raise Timeout(f"{timeout} seconds")
            wakeup.acquire(timeout=-1 if left is None else min(left, threading.TIMEOUT_MAX))

    def set(self, value: Any = None) -> None:
        """Give the reply. Raises `queue.Full` if there is one already."""
        self._give((value, None, None))

    def set_exception(self, exc_info: Any = None) -> None:
        """Give an error, as a `sys.exc_info()` tuple; None for the one being handled. Raises `queue.Full`."""
        kind, error, trace = sys.exc_info() if exc_info is None else exc_info
        assert kind is not None
        self._give((None, kind() if error is None else error, trace))

    def set_get_hook(self, func: Any) -> None:
        """Make `get` return the result of `func`. Raises `queue.Full` if there is a reply already."""
        if self._outcome is not None:
            raise queue.Full
        self._get_hook = func
        self._tell_waiting()

    def _give(self, outcome: tuple[Any, BaseException | None, Any]) -> None:
        if self._outcome is not None or self._get_hook is not None:
            raise queue.Full
        self._outcome = outcome  # one step with the check above, see `actors.interrupts`
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        for wakeup in tuple(self._waiting):
            wakeup.release()
