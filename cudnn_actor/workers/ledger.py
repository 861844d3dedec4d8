"""Which requests a worker has, and which the next one must be given first: a pure record.

A request that has been handed to a worker is a **flight**. It has a place in the window, and it holds its
buffers until it lands. When the worker dies its flights are grounded; those that are to run again are handed
again before anything else, with the places, holds and bytes that they had:

- first those that were running: they are **suspects**, for one of them may be what the worker died of. A
  suspect flies alone. If the next worker dies too, it is known whose fault it was, and nobody else is blamed;
- then those that had not begun, in their order, together.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from cudnn_actor.actors import Envelope, forks
from cudnn_actor.memory import Slot
from cudnn_actor.protocol.buffers import BufferRef
from cudnn_actor.state import Seen
from cudnn_actor.supervision import FaultRule
from cudnn_actor.workers.checksums import Sum
from cudnn_actor.workers.staging import Block
from cudnn_actor.workers.status import Finished

__all__ = ["Claims", "Flight", "Ledger", "Violation", "flights_lock"]


flights_lock: Any = threading.RLock()
"""Taken for a flight's place and claims. Re-entered by a finalizer that withdraws in the middle of a step."""


forks.call_in_child(flights_lock._at_fork_reinit)  # another thread may have held it


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


class Flight:
    """A request in a worker's hands.

    Attributes
    ----------
    envelope
        With the address of the reply.
    number
        The request's.
    body
        Its message as bytes.
    slots
        What it uses, held until it lands.
    seen
        What is known of its message; None for one that runs no plan.
    ref
        The buffer that it fills and nobody has received yet; None for all but an `Allocate`.
    block
        Where its host data lies; None for none.
    fault
        What is to befall it in the worker.
    strikes
        Whether it is sent for its fault alone: the parent answers the message itself, afterwards.
    sum
        Checksum of the values that it writes; None where it is not wanted.
    suspect
        Whether it was running when a worker died.
    unwanted
        Whether a worker has ever been asked not to start it: no other is one dropped.
    place, claims
        Where it flies; `claims` is None on the ground.
    gone
        Whether its caller has been promised that it never begins.
    """

    __slots__ = (
        "block",
        "body",
        "claims",
        "envelope",
        "fault",
        "gone",
        "number",
        "place",
        "ref",
        "seen",
        "slots",
        "strikes",
        "sum",
        "suspect",
        "unwanted",
    )

    def __init__(
        self,
        envelope: Envelope,
        body: bytes,
        slots: Sequence[Slot] = (),
        *,
        seen: Seen | None = None,
        ref: BufferRef | None = None,
        block: Block | None = None,
        strikes: bool = False,
    ) -> None:
        self.envelope = envelope
        self.number = envelope.number
        self.body = body
        self.slots = slots
        self.seen = seen
        self.ref = ref
        self.block = block
        self.fault: FaultRule | None = None
        self.strikes = strikes
        self.sum: Sum | None = None
        self.suspect = False
        self.unwanted = False
        self.place = -1
        self.claims: Claims | None = None
        self.gone = False

    @property
    def message(self) -> Any:
        """What is asked."""
        return self.envelope.message

    def withdraw(self) -> bool:
        """See `actors.envelope.Elsewhere`: the worker decides; when it has gone, nobody can.

        Under the lock that landing, grounding and handing over take too: else a place could be another's by
        the time that it is written to, or a promise lie on the page of a worker that has gone, and the next
        one not know of it. A suspect has begun already, and runs to its end.
        """
        with flights_lock:
            self.unwanted = True
            claims = None if self.suspect else self.claims
            if claims is not None and claims.withdraw(self.place, self.number):
                self.gone = True
            return self.gone


class Ledger:
    """The flights of one worker after another. One thread's at a time.

    Parameters
    ----------
    window
        How many may fly at once.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.flights: dict[int, Flight] = {}
        """In the air, by number, in the order in which they were handed over."""
        self.handed = 0
        """Flights of the present worker so far."""
        self.foreign = 0
        """Those in the air, or to be handed over again, whose answer no event loop waits for: a pykka caller
        does, or nobody. Those that wait behind others count: the answers of those others must be read."""
        self.progress_s = 0.0
        """When the first of those in the air was handed over, or one has landed since: `time.monotonic()`."""
        self._again: deque[Flight] = deque()
        self._alone = False
        self._places = list(range(window))

    @property
    def room(self) -> int:
        """How many new ones may be handed over: none while others go first."""
        return 0 if self._again or self._alone else len(self._places)

    @property
    def on_the_ground(self) -> int:
        """How many wait to be handed over again."""
        return len(self._again)

    def next_again(self) -> Flight | None:
        """The next of those that go first; None while it has to wait, and when there is none."""
        if not self._again or self._alone or not self._places:
            return None
        if self._again[0].suspect and self.flights:
            return None
        flight = self._again.popleft()
        self.foreign -= flight.envelope.bridge is None
        return flight

    def hand_over(self, flight: Flight, claims: Claims) -> int:
        """Give a flight a place in the window, which there must be."""
        if not self.flights:
            self.progress_s = time.monotonic()
        with flights_lock:
            flight.place = place = self._places.pop()
            flight.claims = claims
        self.flights[flight.number] = flight
        self.handed += 1
        self.foreign += flight.envelope.bridge is None
        self._alone = flight.suspect
        return place

    def find(self, number: int, place: int) -> Flight:
        """The flight that is said to have landed. Raises `Violation` when there is no such flight."""
        flight = self.flights.get(number)
        if flight is None or flight.place != place:
            raise Violation(f"it answered request {number} in place {place}, which it does not have")
        return flight

    def land(self, flight: Flight) -> None:
        """Take a flight out that has landed."""
        del self.flights[flight.number]
        with flights_lock:
            flight.claims = None
        self._places.append(flight.place)
        self.foreign -= flight.envelope.bridge is None
        self._alone = False

    def note_progress(self) -> None:
        """Something has landed."""
        self.progress_s = time.monotonic()

    def ground(self) -> list[Flight]:
        """Take every flight out of the air, in order: the worker has gone. What goes first stays."""
        grounded = list(self.flights.values())
        with flights_lock:
            for flight in grounded:
                flight.claims = None
        self.flights = {}
        self._places = list(range(self.window))
        self._alone = False
        self.handed = 0
        self.foreign = _foreign(self._again)
        return grounded

    def first(self, flights: Sequence[Flight]) -> None:
        """Have flights handed over again before all others."""
        self._again.extendleft(reversed(flights))
        self.foreign += _foreign(flights)

    def give_up(self) -> list[Flight]:
        """Take out those that were to go first: there will be no next worker."""
        flights = list(self._again)
        self._again.clear()
        self.foreign -= _foreign(flights)
        return flights

    def waits_for(self, number: int) -> bool:
        """Whether any flight is older than a number: in the air, or to be handed over again."""
        return any(flight < number for flight in self.flights) or any(
            flight.number < number for flight in self._again
        )


def _foreign(flights: Iterable[Flight]) -> int:
    return sum(flight.envelope.bridge is None for flight in flights)
