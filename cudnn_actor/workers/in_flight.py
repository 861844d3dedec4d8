"""The requests that a worker has, and those that the next one must be given first: a pure record.

A request that has been handed to a worker is in flight. It has a place in the window, and it holds its
buffers until its answer is there. When the worker dies all that is in flight comes back; what is to run again
is handed over before anything else, with the holds and bytes that it had:

- first what was running: these are **suspects**, for one of them may be what the worker died of. A suspect
  goes alone. If the next worker dies too, it is known whose fault it was, and nobody else is blamed;
- then what had not begun, in its order, together.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from cudnn_actor.actors import forks
from cudnn_actor.broker import Work
from cudnn_actor.workers.checksums import Sum
from cudnn_actor.workers.staging import Block
from cudnn_actor.workers.status import Finished

__all__ = ["Claims", "InFlightTable", "Violation", "WorkerRequest", "claims_lock"]


claims_lock: Any = threading.RLock()
"""Taken for a request's place and claims. Re-entered by a finalizer that withdraws amid a step."""


forks.call_in_child(claims_lock._at_fork_reinit)  # another thread may have held it


class Violation(Exception):
    """Raised when a worker says what no honest one would say; its text is what it said."""


class Claims(Protocol):
    """Who decides whether a request has begun: the page that a worker shares with its parent."""

    def withdraw(self, place: int, number: int) -> bool:
        """Whether the request in this place certainly never begins from here on."""

    def has_begun(self, place: int, number: int) -> bool:
        """Whether it has begun; asked of a worker that has gone."""

    def finished(self, place: int, number: int) -> Finished | None:
        """What such a worker has noted of it, if it had finished it and perhaps not said so; else None."""


class WorkerRequest(Work):
    """Work as a worker is given it.

    Attributes
    ----------
    body
        The request as bytes.
    block
        Where its host data lies; None for none.
    sum
        Checksum of the values that it writes; None where it is not wanted.
    unwanted
        Whether a worker has ever been asked not to start it: no other is one dropped.
    place, claims
        Where it is in flight; `claims` is None while it is not.
    gone
        Whether its caller has been promised that it never begins.
    """

    body = b""
    block: Block | None = None
    sum: Sum | None = None
    unwanted = False
    place = -1
    claims: Claims | None = None
    gone = False

    def withdraw(self) -> bool:
        """See `actors.envelope.Elsewhere`: the worker decides; when it has gone, nobody can.

        Under the lock that handing over, completing and taking back take too: else a place could be another's
        by the time that it is written to, or a promise lie on the page of a worker that has gone, and the
        next one not know of it. A suspect has begun already, and runs to its end.
        """
        with claims_lock:
            self.unwanted = True
            claims = None if self.suspect else self.claims
            if claims is not None and claims.withdraw(self.place, self.number):
                self.gone = True
            return self.gone


class InFlightTable:
    """What one worker after another has in flight. One thread's at a time.

    Parameters
    ----------
    window
        How many may be in flight at once.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.requests: dict[int, WorkerRequest] = {}
        """In flight, by number, in the order in which they were handed over."""
        self.handed = 0
        """How many the present worker has been handed so far."""
        self.progress_s = 0.0
        """When the first of those in flight was handed over, or one has ended since: `time.monotonic()`."""
        self._again: deque[WorkerRequest] = deque()
        self._alone = False
        self._places = list(range(window))

    @property
    def room(self) -> int:
        """How many new ones may be handed over: none while others go first."""
        return 0 if self._again or self._alone else len(self._places)

    @property
    def waiting_again(self) -> int:
        """How many wait to be handed over again."""
        return len(self._again)

    def next_again(self) -> WorkerRequest | None:
        """The next of those that go first; None while it has to wait, and when there is none."""
        if not self._again or self._alone or not self._places:
            return None
        if self._again[0].suspect and self.requests:
            return None
        return self._again.popleft()

    def hand_over(self, request: WorkerRequest, claims: Claims) -> int:
        """Give a request a place in the window, which there must be."""
        if not self.requests:
            self.progress_s = time.monotonic()
        with claims_lock:
            request.place = place = self._places.pop()
            request.claims = claims
        self.requests[request.number] = request
        self.handed += 1
        self._alone = request.suspect
        return place

    def find(self, number: int, place: int) -> WorkerRequest:
        """The request that is said to have ended. Raises `Violation` when there is no such one."""
        request = self.requests.get(number)
        if request is None or request.place != place:
            raise Violation(f"it answered request {number} in place {place}, which it does not have")
        return request

    def complete(self, request: WorkerRequest) -> None:
        """Take a request out that has ended."""
        del self.requests[request.number]
        with claims_lock:
            request.claims = None
        self._places.append(request.place)
        self._alone = False

    def note_progress(self) -> None:
        """Something has ended."""
        self.progress_s = time.monotonic()

    def take_back(self) -> list[WorkerRequest]:
        """Take out all that is in flight, in order: the worker has gone. What goes first stays."""
        requests = list(self.requests.values())
        with claims_lock:
            for request in requests:
                request.claims = None
        self.requests = {}
        self._places = list(range(self.window))
        self._alone = False
        self.handed = 0
        return requests

    def first(self, requests: Sequence[WorkerRequest]) -> None:
        """Have requests handed over again before all others."""
        self._again.extendleft(reversed(requests))

    def give_up(self) -> list[WorkerRequest]:
        """Take out those that were to go first: there will be no next worker."""
        requests = list(self._again)
        self._again.clear()
        return requests

    def waits_for(self, number: int) -> bool:
        """Whether any request is older than a number: in flight, or to be handed over again."""
        return any(other < number for other in self.requests) or any(
            request.number < number for request in self._again
        )
