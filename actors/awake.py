"""Keeps an event loop awake for a short while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Awake"]


class Awake:
    """Keeps an event loop awake while something is near. On the loop's thread.

    A sleeping thread takes 20 to 60 us to be woken up, and its core is slower for a while. A loop that has a
    callback to run polls its descriptors and does not sleep, so a callback that does nothing keeps it awake.
    Other callbacks have their turns in between, and other threads the lock.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._until_s = 0.0
        self._goes_on: Callable[[], bool] = bool

    @property
    def stays(self) -> bool:
        """Whether the loop stays awake now. If its callback was lost, also until the time is over."""
        return self._loop.time() < self._until_s

    def stay(self, seconds: float, goes_on: Callable[[], bool]) -> None:
        """Stay awake for so many seconds at most, as long as `goes_on` returns True.

        This replaces what an earlier call has asked for.
        """
        now_s = self._loop.time()
        sleeps, self._until_s, self._goes_on = now_s >= self._until_s, now_s + seconds, goes_on
        if sleeps:
            self._look()

    def _look(self) -> None:
        if self._goes_on() and self._loop.time() < self._until_s:
            self._loop.call_soon(self._look)
        else:
            self._until_s, self._goes_on = 0.0, bool
