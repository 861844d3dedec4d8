"""A request of a `BatchedModel`, and a batch of such requests, while they are under way."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence

import msgspec
import numpy as np

__all__ = ["Batch", "Request"]


class Request(msgspec.Struct, eq=False, weakref=False):
    """A request that was accepted. Its answer reaches the caller by its future alone."""

    future: asyncio.Future[dict[str, np.ndarray]]
    inputs: dict[str, np.ndarray]
    group: Hashable
    samples: int
    since_ns: int
    timeout_s: float | None = None
    timer: asyncio.TimerHandle | None = None
    batch: Batch | None = None
    """The request's batch, while the batch runs and somebody waits for the answer; else None."""


class Batch:
    """A batch that runs: its task, and how many of its requests somebody still waits for.

    Parameters
    ----------
    requests
        The requests that the batch runs.
    taken
        How many requests were taken for the batch, including those that were withdrawn, or whose `timeout`
        passed, before it began.
    """

    def __init__(self, requests: Sequence[Request], taken: int) -> None:
        self.requests = requests
        self.taken = taken
        self.awaited = len(requests)
        self.task: asyncio.Task[None] | None = None
        self._begun = self._cancelled = False

    def begin(self) -> None:
        """Begin the batch's task. Raises `CancelledError` if the batch was cancelled before."""
        self._begun = True
        if self._cancelled:
            raise asyncio.CancelledError

    def cancel(self) -> None:
        """Cancel the batch's task. If the task has not begun yet, `begin` ends it: a task that is cancelled
        before it begins runs no line, so nobody would note its end."""
        if not self._begun:
            self._cancelled = True
        elif self.task is not None:
            self.task.cancel()
