"""A count of requests under way, and a wait until none is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["UnderWay"]


class UnderWay:
    """A count that a task can wait for to become 0. All methods run on one event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._none = asyncio.Event()
        self._none.set()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count one within the block."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Count one more."""
        self.count += 1
        self._none.clear()

    def end(self) -> None:
        """Count one less."""
        self.count -= 1
        if not self.count:
            self._none.set()

    async def none(self) -> None:
        """Wait until none is under way."""
        await self._none.wait()
