"""A request in a worker."""

from __future__ import annotations

import time
from typing import Any

from cudnn_actor.supervision import FaultRule
from cudnn_actor.workers.status import StatusPage

__all__ = ["InternalTask", "WorkerTask"]


class WorkerTask:
    """One request, its place in the window, and what a fault plan has for it.

    Parameters
    ----------
    message
        Decoded.
    number, place, fault
        As they came.
    page
        Where it is noted that it has begun.
    """

    __slots__ = ("fault", "message", "number", "page", "place", "started_ns")

    def __init__(
        self, message: Any, number: int, place: int, fault: FaultRule | None, page: StatusPage
    ) -> None:
        self.message = message
        self.number = number
        self.place = place
        self.fault = fault
        self.page = page
        self.started_ns = 0
        """When it began, on `time.perf_counter_ns`'s clock; 0 where it has not."""

    def begin(self) -> bool:
        """Start it, unless its caller has gone: see `StatusPage.begin`."""
        if not self.page.begin(self.place, self.number):
            return False
        self.started_ns = time.perf_counter_ns()
        return True


class InternalTask:
    """Work of the service's own: it begins without a word on the page, where each place is a request's.

    Parameters
    ----------
    message
        Decoded.
    number
        As it came, which is what its end is told under.
    """

    fault = None

    __slots__ = ("message", "number", "started_ns")

    def __init__(self, message: Any, number: int) -> None:
        self.message = message
        self.number = number
        self.started_ns = 0

    def begin(self) -> bool:
        """Start it: nobody withdraws it."""
        self.started_ns = time.perf_counter_ns()
        return True
