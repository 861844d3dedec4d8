"""Wakes all tasks that wait for a batch of answers by one callback of their event loop.

A future that gets its result asks its loop for a callback for each task that waits for it. In asyncio, each
of these takes half a microsecond and more: an object, and six calls in Python. Here, the loop is asked once
for a batch.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["Waking"]

_get_ident = threading.get_ident
_Callback = Callable[[asyncio.Future[Any]], object]


class Waking:
    """Sets the results of futures of one event loop, on that loop.

    Parameters
    ----------
    loop
        The event loop.
    if_cancelled
        A callback that futures may have for the case that they are cancelled. With a result, they lose it.
    then
        A function that is called after the tasks of a batch have run.
    """

    __slots__ = ("_if_cancelled", "_loop", "_then", "thread")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, if_cancelled: _Callback, then: Callable[[], None]
    ) -> None:
        self._loop, self._if_cancelled, self._then = loop, if_cancelled, then
        self.thread = 0
        """The ident of the thread that runs woken tasks now, within a callback of the loop; 0 for none."""

    def set_result(self, future: asyncio.Future[Any], value: Any) -> None:
        """Set the result of a future, unless it is done. The loop wakes each task that waits for it."""
        if not future.done():
            future.remove_done_callback(self._if_cancelled)
            future.set_result(value)

    def set_results(self, results: Iterable[tuple[asyncio.Future[Any], Any]]) -> None:
        """Set these results, except of futures that are done. The tasks run soon, in this order, and `then`
        after them.

        In asyncio's debug mode, the loop wakes each task as `set_result` says, and reports the slow ones.
        """
        if self._loop.get_debug():
            for future, value in results:
                self.set_result(future, value)
            self._loop.call_soon(self._then)
            return
        woken: list[tuple[Callable[..., Any], _Callback, asyncio.Future[Any]]] = []
        self._loop.call_soon(self._wake, iter(woken))  # first: if this fails below, those before are woken
        if_cancelled = self._if_cancelled
        for future, value in results:
            if future.done():
                continue
            callbacks: list[tuple[_Callback, contextvars.Context]] | None = future._callbacks
            for callback, context in callbacks or ():
                future.remove_done_callback(callback)
                if callback is not if_cancelled:
                    woken.append((context.run, callback, future))
            future.set_result(value)

    def _wake(self, woken: Iterator[tuple[Callable[..., Any], _Callback, asyncio.Future[Any]]]) -> None:
        """Do what the loop does for each callback: call it in its context."""
        self.thread = _get_ident()
        try:
            for run, callback, future in woken:
                run(callback, future)
        except BaseException:  # the loop reports it, and goes on with the others
            self._loop.call_soon(self._wake, woken)
            raise
        finally:
            self.thread = 0
        self._then()
