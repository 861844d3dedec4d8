"""A process that calls functions for the tests: a crash of the library ends it, and fails one test."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

__all__ = ["CallFailed", "Child", "ChildDied"]

R = TypeVar("R")


class CallFailed(Exception):
    """Raised when a function raised in the child. The text is its traceback."""


class ChildDied(Exception):
    """Raised when the child ended during a call: by a signal, if the exit code is negative."""


class Child:
    """One process, started again after it has ended. Not thread-safe. Close it after use."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, function: Callable[..., R], *arguments: object) -> R:
        """A function's result. The function is a module's; it, its arguments and result are pickled.

        Raises `CallFailed`, `ChildDied`.
        """
        if self._connection.closed:
            self._start()
        try:
            self._connection.send((function, arguments))
            good, result = self._connection.recv()
        except EOFError:
            raise ChildDied(f"{function.__name__} ended its process: exit code {self.close()}") from None
        except BaseException:  # such as a timeout: the answer may still come, and must answer no other call
            self.close()
            raise
        if not good:
            raise CallFailed(result)
        answer: R = result
        return answer

    def close(self) -> int | None:
        """End the process; returns its exit code. Safe to call twice."""
        if self._connection.closed:
            return None
        self._connection.close()
        self._process.join(1.0)  # it ends by itself when it sees the connection's end
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        code = self._process.exitcode
        self._process.close()
        return code


def _serve(connection: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer: tuple[bool, Any] = True, function(*arguments)
        except Exception:  # noqa: BLE001 - the caller gets it as text
            answer = False, traceback.format_exc()
        connection.send(answer)


def _end_with_parent() -> None:
    """A long call does not see the end of its connection, and would go on for nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
