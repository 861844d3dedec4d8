"""A request in a worker: an envelope whose reply goes back to the parent."""

from __future__ import annotations

import time
from typing import Any

from cudnn_actor.actors import Envelope
from cudnn_actor.workers.status import StatusPage
from cudnn_actor.workers.wire import Request

__all__ = ["Errand", "InternalErrand"]


class Errand(Envelope):
    """One request, its place in the window, and what a fault plan has for it.

    Parameters
    ----------
    message
        Decoded.
    outbox
        Where the answer is posted.
    request
        As it came.
    page
        Where it is noted that it has begun.
    """

    __slots__ = ("dropped", "fault", "page", "place")

    # What an envelope has that is the parent's alone: the same for all, so that making one is short.
    future = reply_to = timeout_s = deadline = context = discard = mailbox = elsewhere = None
    timed_out = False
    crashes = admitted_ns = 0

    def __init__(self, message: Any, outbox: Any, request: Request, page: StatusPage) -> None:
        self.message = message
        self.bridge = outbox
        self.number = request.number
        self.place = request.place
        self.fault = request.fault
        self.page = page
        self.started_ns = 0
        self.dropped = False
        """Whether it never ran, because its caller had gone."""

    @property
    def wants_reply(self) -> bool:
        """True: whether anybody waits is the parent's to know."""
        return True

    @property
    def withdrawn(self) -> bool:
        """False: that its caller has gone is found out when it begins."""
        return False

    @property
    def expired(self) -> bool:
        """False: deadlines are the parent's."""
        return False

    def begin(self) -> bool:
        """Start it, unless its caller has gone: see `StatusPage.begin`."""
        if not self.page.begin(self.place, self.number):
            self.dropped = True
            return False
        self.started_ns = time.perf_counter_ns()
        return True


class InternalErrand(Errand):
    """Work of the service's own: it begins without a word on the page, where each place is a request's.

    Parameters
    ----------
    message
        Decoded.
    replies
        Where it is said that it is done.
    number
        As it came. The errand's own number is the negative of it, which no request has.
    """

    __slots__ = ()

    def __init__(self, message: Any, replies: Any, number: int) -> None:
        self.message = message
        self.bridge = replies
        self.number = -number
        self.place = -1
        self.fault = None
        self.started_ns = 0
        self.dropped = False

    def begin(self) -> bool:
        """Start it: nobody withdraws it."""
        self.started_ns = time.perf_counter_ns()
        return True
