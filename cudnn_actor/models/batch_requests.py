"""A request of a `BatchedModel`, and a batch of them, while they are under way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Batch", "Given", "Request"]


class Given(NamedTuple):
    """What a request was given, once checked."""

    inputs: dict[str, np.ndarray]
    group: Hashable
    samples: int


class Request:
    """A request that was accepted. Its future is the only address of its answer."""

    __slots__ = ("batch", "future", "group", "inputs", "samples", "since_ns", "timeout_s", "timer")

    def __init__(
        self, given: Given, future: asyncio.Future[dict[str, np.ndarray]], timeout_s: float | None
    ) -> None:
        self.inputs, self.group, self.samples = given
        self.future = future
        self.timeout_s = timeout_s
        self.since_ns = time.perf_counter_ns()
        self.timer: asyncio.TimerHandle | None = None
        self.batch: Batch | None = None
        """The batch that it is in, while that runs and somebody waits for the answer."""


class Batch:
    """A batch that runs: how many of its requests are still waited for, and the task that runs it.

    Parameters
    ----------
    requests
        The requests that it runs.
    taken
        How many requests were taken for it, with the ones that were answered before it began.
    """

    def __init__(self, requests: Sequence[Request], taken: int) -> None:
        self.requests = requests
        self.taken = taken
        self.awaited = len(requests)
        self.task: asyncio.Task[None] | None = None
        self._begun = self._cancelled = False

    def begin(self) -> None:
        """Begin its task. Raises `CancelledError` if it was cancelled before."""
        self._begun = True
        if self._cancelled:
            raise asyncio.CancelledError

    def cancel(self) -> None:
        """Cancel its task. One that has not begun ends when it does: a task that is cancelled before runs no
        line, so nobody would note its end."""
        if not self._begun:
            self._cancelled = True
        elif self.task is not None:
            self.task.cancel()
