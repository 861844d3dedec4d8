"""Locks of event loops: one task of a loop at a time does some work, and the tasks after it find the work
done."""

from __future__ import annotations

import asyncio

from cudnn_actor.actors.event_loop import running_loop, tolerating_closed

__all__ = ["LoopLocks"]


class LoopLocks:
    """A lock for each event loop that is in use. Tasks of different loops do not wait for each other.

    A lock that was waited for keeps its loop alive. So the locks of closed loops are forgotten when a new
    loop asks for one. Each change of the dict is one step, so several loops may ask at the same time.
    """

    def __init__(self) -> None:
        self._of: dict[asyncio.AbstractEventLoop, _LoopLock] = {}

    def of_running_loop(self) -> _LoopLock:
        """The running loop's lock: `async with` it."""
        loop = running_loop()
        if loop not in self._of:
            for other in tuple(self._of):
                if other.is_closed():
                    self._of.pop(other, None)
        return self._of.setdefault(loop, _LoopLock(loop))


class _LoopLock:
    """A lock whose holder may be dropped with its event loop, after that has closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> None:
        await self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        with tolerating_closed(self._loop):  # `release` wakes the next task
            self._lock.release()
