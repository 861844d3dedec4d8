"""Sets the results of a batch of futures, and calls those who wait for them within one callback of the loop.

A future that gets its result asks its loop for a callback for each task that waits for it. In asyncio, each
of these takes half a microsecond and more: an object, and six calls in Python. Here, the callback of the loop
that has read the results calls those who wait for them, after it has set all results. C functions that run
through lists do most of the work.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter, itemgetter, length_hint
from typing import Any

from cudnn_actor.actors.interrupts import run_through

__all__ = ["Waking"]

_Future = asyncio.Future
_done, _set_result, _remove = _Future.done, _Future.set_result, _Future.remove_done_callback
_callbacks_of, _first, _second = attrgetter("_callbacks"), itemgetter(0), itemgetter(1)
_run = contextvars.Context.run
_together, _again_and_again = itertools.chain.from_iterable, itertools.repeat
_Callback = Callable[[asyncio.Future[Any]], object]
_Waiting = tuple[_Callback, contextvars.Context]
_Woken = tuple[Iterator[object], Iterator[asyncio.Future[Any]]]
"""An iterator that calls those who wait, one at each step; and another one, which it reads, over the futures
of those who were not called yet."""


class Waking:
    """Sets the results of futures of one event loop, on that loop.

    Parameters
    ----------
    loop
        The event loop.
    before, after
        Functions that are called before those who wait are called, and once all of them were. If one of them
        raises, the others are called in another callback of the loop, with `before` and `after` once more.
    """

    __slots__ = ("_after", "_before", "_loop", "_woken", "if_cancelled")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        before: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        self._loop, self._before, self._after = loop, before, after
        self.if_cancelled: _Callback | None = None
        """A callback that futures may have for the case that they are cancelled; None for none. With a
        result, they lose it."""
        self._woken: deque[_Woken] = deque()
        """Those who wait for results that are set, batch by batch. Each leaves the iterators just before it
        is called."""

    def __bool__(self) -> bool:
        """Whether `wake` has anybody to call."""
        return bool(self._woken)

    def set_results(self, futures: list[asyncio.Future[Any]], values: Iterable[Any]) -> None:
        """Set the results of different futures, except of those that are done. The next `wake` calls those
        who wait for them, in this order.

        If this raises, those whose results are set are called all the same, and the other futures still have
        those who wait for them. Raises `InvalidStateError` if a signal handler has cancelled one meanwhile,
        as asyncio's own does: see `set_all_results`. The loop calls those who wait for a single future, as it
        does with `set_result`. In asyncio's debug mode, it calls all of them, and reports the slow ones.
        """
        if any(map(_done, futures)):
            open_ones = [pair for pair in zip(futures, values, strict=True) if not pair[0].done()]
            futures, values = [future for future, _ in open_ones], [value for _, value in open_ones]
        if_cancelled = self.if_cancelled
        if if_cancelled is not None:
            run_through(map(_remove, futures, _again_and_again(if_cancelled)))
        if len(futures) == 1 or self._loop.get_debug():
            for future, value in zip(futures, values, strict=True):
                future.set_result(value)
            return
        those_of: list[list[_Waiting] | None] = list(map(_callbacks_of, futures))
        owners, waiting = futures, list(_together(filter(None, those_of)))
        if not all(those_of) or len(waiting) != len(futures):
            # Not each has one callback, that of the task that waits for it.
            owners = [future for future, those in zip(futures, those_of, strict=True) for _ in those or ()]
        callbacks = list(map(_first, waiting))
        woken = _calls(waiting, owners)
        both = itertools.chain(map(_remove, owners, callbacks), map(_set_result, futures, values))
        try:
            # One step: a future that is cancelled before it still has its callbacks, which the loop calls.
            run_through(both)
        except BaseException:
            self._put_back(waiting, owners)
            raise
        self._woken.append(woken)

    def set_all_results(self, futures: list[asyncio.Future[Any]], values: Sequence[Any]) -> None:
        """As `set_results`. A future that a signal handler cancels meanwhile gets no result, and the others
        get theirs."""
        while True:
            try:
                self.set_results(futures, values)
            except asyncio.InvalidStateError:  # one is done now, and is left out the next time
                continue
            return

    def _put_back(self, waiting: list[_Waiting], owners: list[asyncio.Future[Any]]) -> None:
        """Let the futures that have no result have their callbacks again, but for cancelled ones."""
        called, woken = [], []
        for (callback, context), future in zip(waiting, owners, strict=True):
            if future.cancelled():
                continue
            if future.done():
                called.append((callback, context))
                woken.append(future)
            else:
                future.remove_done_callback(callback)
                future.add_done_callback(callback, context=context)
        self._woken.append(_calls(called, woken))

    def wake(self) -> None:
        """Call those who wait for results that are set, as the loop does: each in its context. Only in a
        callback of the loop, since tasks are called."""
        woken = self._woken
        try:
            self._before()
            while woken:
                _call_all(*woken[0])
                woken.popleft()
        except BaseException:  # the loop reports it, and goes on with the others
            self._loop.call_soon(self.wake)
            raise
        finally:
            self._after()

    def wake_soon(self) -> None:
        """Have the loop call `wake` if there is anybody to call, for a caller that is about to raise."""
        if self._woken:
            self._loop.call_soon(self.wake)


def _calls(waiting: list[_Waiting], owners: list[asyncio.Future[Any]]) -> _Woken:
    """The iterators that call those who wait, each in its context with its future: see `_Woken`."""
    left = iter(owners)
    calls: Iterator[object] = map(_run, map(_second, waiting), map(_first, waiting), left)
    return calls, left


def _call_all(calls: Iterator[object], left: Iterator[asyncio.Future[Any]]) -> None:
    """Call those who wait, until one raises an exception."""
    count = length_hint(left)
    if len(list(calls)) < count:
        raise StopIteration  # as one of them has, which has ended the iteration
