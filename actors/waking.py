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
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter, itemgetter, length_hint
from typing import Any

from cudnn_actor.actors.interrupts import run_through

__all__ = ["Waking"]

_Future = asyncio.Future
_done, _set_result, _remove = _Future.done, _Future.set_result, _Future.remove_done_callback
_callbacks_of, _first, _second = attrgetter("_callbacks"), itemgetter(0), itemgetter(1)
_run_in = contextvars.Context.run
_together, _again_and_again = itertools.chain.from_iterable, itertools.repeat
_Callback = Callable[[asyncio.Future[Any]], object]
_Waiting = tuple[_Callback, contextvars.Context]
_Woken = tuple[Iterator[object], Iterator[object]]
"""Those who wait. To go one step through the first iterator is to call one of them, which leaves the second.
A call of a C function that does nothing comes last."""
_LAST: _Waiting = id, contextvars.Context()


class Waking:
    """Sets the results of futures of one event loop, on that loop.

    Parameters
    ----------
    loop
        The event loop.
    if_cancelled
        A callback that futures may have for the case that they are cancelled. With a result, they lose it.
    before, after
        Functions that are called before those who wait are called, and once all of them were. If one of them
        raises, the others are called in another callback of the loop, with `before` and `after` once more.
    """

    __slots__ = ("_after", "_before", "_if_cancelled", "_loop", "_woken")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        if_cancelled: _Callback,
        *,
        before: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        self._loop, self._if_cancelled, self._before, self._after = loop, if_cancelled, before, after
        self._woken: deque[_Woken] = deque()
        """Those who wait for results that are set, batch by batch. Each leaves its iterator when it is
        called."""

    def __bool__(self) -> bool:
        """Whether `wake` has anybody to call."""
        return bool(self._woken)

    def set_results(self, futures: list[asyncio.Future[Any]], values: Iterable[Any]) -> None:
        """Set the results of different futures, except of those that are done. The next `wake` calls those
        who wait for them, in this order.

        If this raises, those whose results are set are called all the same, and the other futures still have
        those who wait for them. Raises `InvalidStateError` if a signal handler has cancelled one meanwhile,
        as asyncio's own does: then call this again. The loop calls those who wait for a single future, as it
        does with `set_result`. In asyncio's debug mode, it calls all of them, and reports the slow ones.
        """
        if any(map(_done, futures)):
            open_ones = [pair for pair in zip(futures, values, strict=True) if not pair[0].done()]
            futures, values = [future for future, _ in open_ones], [value for _, value in open_ones]
        if len(futures) == 1 or self._loop.get_debug():
            for future, value in zip(futures, values, strict=True):
                future.remove_done_callback(self._if_cancelled)
                future.set_result(value)
            return
        those_of: list[list[_Waiting] | None] = list(map(_callbacks_of, futures))
        owners, waiting = futures, list(_together(filter(None, those_of)))
        callbacks = list(map(_first, waiting))
        if not all(those_of) or len(waiting) != len(futures) or self._if_cancelled in callbacks:
            # Not each has one callback, that of the task that waits for it.
            run_through(map(_remove, futures, _again_and_again(self._if_cancelled)))
            those_of = list(map(_callbacks_of, futures))
            owners = [future for future, those in zip(futures, those_of, strict=True) for _ in those or ()]
            waiting = list(_together(filter(None, those_of)))
            callbacks = list(map(_first, waiting))
        woken = _calls_of(waiting, owners)
        both = itertools.chain(map(_remove, owners, callbacks), map(_set_result, futures, values))
        try:
            # One step: a future that is cancelled before it still has its callbacks, which the loop calls.
            run_through(both)
        except BaseException:
            self._put_back(waiting, owners)
            raise
        self._woken.append(woken)

    def _put_back(self, waiting: list[_Waiting], owners: list[asyncio.Future[Any]]) -> None:
        """Let the futures that have no result have their callbacks again, but for cancelled ones."""
        done_waiting, done = [], []
        for (callback, context), future in zip(waiting, owners, strict=True):
            if future.cancelled():
                continue
            if future.done():
                done_waiting.append((callback, context))
                done.append(future)
            else:
                future.remove_done_callback(callback)
                future.add_done_callback(callback, context=context)
        self._woken.append(_calls_of(done_waiting, done))

    def wake(self) -> None:
        """Call those who wait for results that are set, as the loop does: each in its context. Only in a
        callback of the loop, since tasks are called."""
        woken = self._woken
        try:
            self._before()
            while woken:
                _call(*woken[0])
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


def _call(calls: Iterator[object], left: Iterator[object]) -> None:
    """Call those who wait."""
    run_through(calls)
    if length_hint(
        left
    ):  # a callback has raised this, which no task does, and `run_through` took it for the end
        raise StopIteration("a callback has raised it")


def _calls_of(waiting: list[_Waiting], futures: list[asyncio.Future[Any]]) -> _Woken:
    """Those who wait for these futures, in the same order."""
    waiting = [*waiting, _LAST]
    left = iter([*futures, None])
    return map(_run_in, map(_second, waiting), map(_first, waiting), left), left
