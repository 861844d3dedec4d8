"""The in-flight table: the requests that a worker has, and those that the next worker gets first. No I/O.

A request that was dispatched to a worker is in flight. It has a place in the window, and it holds its buffers
until its answer is there. When the worker dies, all requests in flight are taken back. Those that must run
again are dispatched before all others, with the same holds and the same encoded bytes:

- First the requests that were running. These are **suspects**, because one of them may have killed the
  worker. A suspect runs alone. If the next worker dies too, that suspect is the cause, and no other request
  is blamed.
- Then the requests that had not begun, in order, together.

A new request that must run alone, because its inputs were running at a crash, waits with them.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from cudnn_actor.actors import forks
from cudnn_actor.broker import Work
from cudnn_actor.isolation.process.arrivals import Arrival
from cudnn_actor.isolation.process.parent.checksums import Sum
from cudnn_actor.isolation.process.parent.late_copies import LateCopy
from cudnn_actor.isolation.process.status import Finished
from cudnn_actor.isolation.process.wire import Staged
from cudnn_actor.isolation.staging import Block
from cudnn_actor.protocol.messages.receipts import Receipt

__all__ = ["WINDOW", "Claims", "InFlightTable", "Oldest", "Violation", "WorkerRequest", "claims_lock"]

WINDOW = 256
"""Requests that a worker may have at once."""

claims_lock: Any = threading.RLock()
"""Guards each request's place and claims. Reentrant, because a finalizer that withdraws a request may run
while this thread holds it."""


forks.call_in_child(claims_lock._at_fork_reinit)  # another thread may have held it


class Violation(Exception):
    """Raised when a worker breaks the protocol. Its text says how."""


class Claims(Protocol):
    """Decides whether a request has begun: the status page that a worker shares with its parent."""

    def withdraw(self, place: int, number: int) -> bool:
        """Withdraw the request in this place. Returns whether it is certain that it never begins."""

    def has_begun(self, place: int, number: int) -> bool:
        """Whether the request has begun. False is certain only of a worker that has ended."""

    def finished_record(self, place: int, number: int) -> Finished | None:
        """The record of a finished request that an ended worker has noted; None if the request had not
        finished."""


class RunStaging(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Staging memory for the inputs and the outputs of one run of a model's graph.

    Parameters
    ----------
    given, returned
        The blocks with the inputs and with the outputs; None if there are none.
    inputs, outputs
        Arrays in these blocks, by the indices of their buffers among the plan's.
    arrivals
        The words of the inputs that may be copied late, by the indices of their buffers among the plan's.
    write, read
        The places of the inputs and of the outputs, as the worker is told them.
    offsets
        The offsets of the outputs in their block.
    body
        The message of a run whose inputs are all on the host, and whose outputs all go there.
    """

    given: Block | None
    returned: Block | None
    inputs: Mapping[int, np.ndarray]
    outputs: Mapping[int, np.ndarray]
    arrivals: Mapping[int, Arrival]
    write: Mapping[int, Staged]
    read: Mapping[int, Staged]
    offsets: Mapping[int, int]
    body: bytes

    @property
    def blocks(self) -> list[Block]:
        """Both blocks."""
        return [block for block in (self.given, self.returned) if block is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def output_bytes(self) -> int:
        """Bytes of the outputs."""
        return 0 if self.returned is None else self.returned.nbytes


class WorkerRequest(Work, eq=False):
    """Work in the form that a worker receives.

    Attributes
    ----------
    body
        The request as bytes.
    blocks
        The blocks with its host data.
    staged
        The staging memory of a model's run; None for none.
    copies
        The copies of its values that are made after it is sent: see `late_copies`.
    sum
        Checksum of the values that it writes; None if no checksum is kept.
    unwanted
        Whether a worker was ever asked not to start it. A worker may drop only such requests.
    place, claims
        Its place in the window, and the status page of its worker; `claims` is None if it is not in flight.
    gone
        Whether its caller has been promised that it never begins.
    sent_s
        When it was dispatched to its present worker, in `time.monotonic()` seconds.
    forgotten
        Whether its plan was dropped from all caches while it was in flight.
    """

    body: bytes = b""
    blocks: tuple[Block, ...] = ()
    staged: RunStaging | None = None
    copies: tuple[LateCopy, ...] = ()
    sum: Sum | None = None
    unwanted: bool = False
    place: int = -1
    claims: Claims | None = None
    gone: bool = False
    sent_s: float = 0.0
    forgotten: bool = False

    def withdraw(self) -> bool:
        """See `actors.envelope.Elsewhere`. The status page decides; once the worker has ended, nothing can.

        This holds the lock that dispatching, completing and taking back also hold. Without it, the place
        could belong to another request by the time it is written, or a promise could be noted on the page of
        an ended worker, where the next worker does not see it. A suspect has begun already, and runs to its
        end.
        """
        with claims_lock:
            self.unwanted = True
            claims = None if self.suspect else self.claims
            if claims is not None and claims.withdraw(self.place, self.number):
                self.gone = True
            return self.gone

    @property
    def held_blocks(self) -> list[Block]:
        """All its staging memory."""
        return [*self.blocks, *(() if self.staged is None else self.staged.blocks)]

    @property
    def has_staging(self) -> bool:
        """Whether it has staging memory."""
        return bool(self.held_blocks)

    @property
    def sent_ns(self) -> int:
        """`sent_s` on the clock of `time.perf_counter_ns`, which on Linux is the same; not before it was
        admitted."""
        return max(self.envelope.admitted_ns, int(self.sent_s * 1e9))

    def receipt(self, generation: int, plan: str, started_ns: int, run_us: float) -> Receipt:
        """The receipt for the caller of a request that has finished. `started_ns` is as in `Done`."""
        envelope = self.envelope
        return Receipt(
            request_id=envelope.number,
            generation=generation,
            plan=plan,
            queue_us=(started_ns - envelope.admitted_ns) / 1e3,
            run_us=run_us,
        )


class Oldest(NamedTuple):
    """The request in flight that was dispatched first, when that was, and since when it has been the first.

    This record keeps no request alive after its answer.
    """

    number: int
    place: int
    sent_s: float
    since_s: float


_oldest = functools.partial(tuple.__new__, Oldest)
"""Makes an `Oldest` of a tuple, in fewer steps than its own `__new__`."""


class InFlightTable:
    """The requests in flight, for successive workers. Used by one thread at a time.

    The watchdog reads `requests`, `oldest`, `answered_s` and `progress_s` on its own thread. Each is replaced
    in one step. `oldest` is replaced before the first request comes in. So while there are requests, it names
    one of them or, until the frame of its answer has been handled, the one before.

    Parameters
    ----------
    window
        How many may be in flight at once.
    clock
        Returns seconds.
    """

    def __init__(self, window: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.window = window
        self.clock = clock
        self.requests: dict[int, WorkerRequest] = {}
        """The requests in flight, by number, in the order of dispatch."""
        self.handed = 0
        """How many requests have been dispatched to the present worker so far."""
        self.progress_s = 0.0
        """When the first of those in flight was dispatched, or when one last ended: `time.monotonic()`."""
        self.oldest: Oldest | None = None
        """The request that has waited longest for its answer, while there are requests."""
        self.answered_s = 0.0
        """When the latest request was dispatched that the present worker has finished."""
        self.told = 0
        """The number of the request whose answer was taken from where its values arrived, while the frame
        with that answer has not been removed; 0 for none."""
        self.nearing = False
        """Whether the worker has said that one will end soon, and the loop that reads has not seen it."""
        self.again: deque[WorkerRequest] = deque()
        """The requests that wait to be dispatched again, and go first."""
        self._alone = False
        self._places = list(range(window))

    @property
    def room(self) -> int:
        """How many new requests may be dispatched: none while taken-back requests go first."""
        return 0 if self.again or self._alone else len(self._places)

    @property
    def waiting_again(self) -> int:
        """How many requests wait to be dispatched again."""
        return len(self.again)

    def next_again(self) -> WorkerRequest | None:
        """Remove and return the next request to dispatch again; None if there is none or it must wait."""
        if not self.again or self._alone or not self._places:
            return None
        if self.again[0].alone and self.requests:
            return None
        return self.again.popleft()

    def hand_over(self, request: WorkerRequest, claims: Claims) -> int:
        """Give a request a place in the window, which must have room."""
        request.sent_s = self.clock()
        if not self.requests:
            self.note_first(request)
        with claims_lock:
            request.place = place = self._places.pop()
            request.claims = claims
        self.requests[request.number] = request
        self.handed += 1
        self._alone = request.alone
        return place

    def find(self, number: int, place: int) -> WorkerRequest:
        """The request that an answer names. Raises `Violation` if it is not in flight in this place."""
        request = self.requests.get(number)
        if request is None or request.place != place:
            raise Violation(f"it answered request {number} in place {place}, which it does not have")
        return request

    def complete(self, request: WorkerRequest) -> None:
        """Remove a request that has ended.

        Its envelope forgets it: together they would keep the reply alive until the collector looks for
        cycles, and with it memory that was lent.
        """
        del self.requests[request.number]
        request.envelope.elsewhere = None
        with claims_lock:
            request.claims = None
        self._places.append(request.place)
        self._alone = False

    def note_first(self, request: WorkerRequest) -> None:
        """Note that a request is about to get the next place, while none is in flight. May be repeated."""
        self.progress_s = now = request.sent_s
        self.oldest = _oldest((request.number, self._places[-1], now, now))

    def note_finished(self, request: WorkerRequest) -> None:
        """Note that the worker has finished a request in its turn. May be repeated."""
        self.answered_s = max(self.answered_s, request.sent_s)

    def note_progress(self) -> None:
        """Note that a request has ended now."""
        self.progress_s = now = self.clock()
        if not self.requests:
            return
        first = next(iter(self.requests.values()))
        named, oldest = (first.number, first.place, first.sent_s), self.oldest
        if oldest is None or oldest[:3] != named:
            self.oldest = Oldest(*named, now)

    def forget_plans(self, digests: Collection[str]) -> None:
        """Note that the plans of these graphs are dropped from all caches.

        A `Forget` begins only while no request waits to be dispatched again, so all are in flight here.
        """
        for request in self.requests.values():
            if request.cached is not None and request.cached.lowered.graph.digest() in digests:
                request.forgotten = True

    def forget_all_plans(self) -> None:
        """Note that the plans of the requests in flight are dropped."""
        for request in self.requests.values():
            request.forgotten = True

    def take_back(self) -> list[WorkerRequest]:
        """Remove and return all requests in flight, in order, after the worker's end.

        Requests that wait to be dispatched again stay.
        """
        requests = list(self.requests.values())
        with claims_lock:
            for request in requests:
                request.claims = None
        self.requests = {}
        self._places = list(range(self.window))
        self._alone = False
        self.handed = self.told = 0
        self.answered_s = 0.0
        return requests

    def first(self, requests: Sequence[WorkerRequest]) -> None:
        """Let requests be dispatched again, before all others."""
        self.again.extendleft(reversed(requests))

    def last(self, request: WorkerRequest) -> None:
        """Let a new request be dispatched after all others that wait here, and before any newer one."""
        self.again.append(request)

    def give_up(self) -> list[WorkerRequest]:
        """Remove and return the requests that wait to be dispatched again, because no worker may follow."""
        requests = list(self.again)
        self.again.clear()
        return requests

    def waits_for(self, number: int) -> bool:
        """Whether any request with a lower number is in flight or waits to be dispatched again."""
        return any(other < number for other in self.requests) or any(
            request.number < number for request in self.again
        )
