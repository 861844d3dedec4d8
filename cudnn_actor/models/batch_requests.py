"""A request of a `BatchedModel`, and a batch of such requests, while they are under way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Batch", "Given", "Request"]


class Given(NamedTuple):
    """The inputs of a request, once they are checked."""

    inputs: dict[str, np.ndarray]
    group: Hashable
    samples: int


class Request:
    """A request that was accepted. Its answer reaches the caller by its future alone."""

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
