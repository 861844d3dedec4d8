"""The body of an `async with`, which is cancelled when what it uses has failed."""

from __future__ import annotations

import asyncio

__all__ = ["Body"]


class Body:
    """The body of an `async with` that the running task enters now. Used on its event loop alone.

    A task keeps count of who has cancelled it, as for `asyncio.timeout`. So a cancellation by the task's own
    canceller is told from the one here, and goes on.
    """

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._cancelling = 0 if self._task is None else self._task.cancelling()
        self._cancelled = self._ended = False

    def cancel(self) -> None:
        """Cancel it, unless it has ended."""
        if self._task is not None and not self._ended and not self._cancelled:
            self._cancelled = self._task.cancel()

    def end(self) -> None:
        """Note that the task has left it."""
        self._ended = True

    def cancelled_alone(self) -> bool:
        """Whether `cancel` has cancelled it, and nobody else has. To be asked once, after `end`."""
        if not self._cancelled or self._task is None:
            return False
        return self._task.uncancel() <= self._cancelling
