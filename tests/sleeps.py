"""Whether an event loop sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Sleeps", "watched_sleeps"]

_TURNS = 50


class Sleeps:
    """Whether the running loop sleeps, by the timeouts of its selector. Its clock stands still."""

    def __init__(self, loop: Any) -> None:
        self._awake_turns, self._time = 0, loop.time()
        self.awake, self.asleep = asyncio.Event(), asyncio.Event()
        self._select, loop.time = loop._selector.select, lambda: self._time

    def select(self, timeout: float | None = None) -> Any:
        """Stands in for the selector's."""
        self._awake_turns = self._awake_turns + 1 if timeout == 0 else 0
        if self._awake_turns == _TURNS:
            self.awake.set()
        elif timeout != 0 and self.awake.is_set() and not self.asleep.is_set():
            self.asleep.set()
            timeout = 0
        return self._select(timeout)

    async def until_asleep(self) -> None:
        """Wait until the loop sleeps. If it stays awake for a time, it does so for ever: its clock stands
        still."""
        self.awake.set()
        self.asleep.clear()
        await self.asleep.wait()

    async def until_time_passes(self) -> None:
        """Wait until the loop stays awake, and sleeps once the clock is a second ahead."""
        await self.awake.wait()
        self.pass_time()
        await self.asleep.wait()

    def pass_time(self) -> None:
        """Set the clock a second ahead."""
        self._time += 1.0


@contextmanager
def watched_sleeps() -> Iterator[Sleeps]:
    loop: Any = asyncio.get_running_loop()
    sleeps = Sleeps(loop)
    loop._selector.select = sleeps.select
    try:
        yield sleeps
    finally:
        del loop._selector.select, loop.time
