"""The short way of a request that runs a plan, and of its answer: each in one step.

Nearly all requests go it. Whatever is not plain goes the long way, by the desk's own methods: what allocates
or frees, what fails, what waits, what a crash or a fault plan has to do with. The two ways do the same, so
this module knows the mailbox, the desk and the ledger from inside.

The main thread goes this way only, since a signal's handler may raise there (`actors.interrupts`). What comes
before a step changes nothing that counts, and is made again by whoever comes next; after a step, a request
has left the mailbox and is in the air, or has landed and its reply is in the outbox. The long way is left to
another thread.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from cudnn_actor.actors import Envelope, Mailbox
from cudnn_actor.memory import Slot
from cudnn_actor.protocol.codec import decode_reply
from cudnn_actor.protocol.errors import CudnnActorError, MalformedMessage
from cudnn_actor.protocol.messages import COMPUTE, Ping
from cudnn_actor.workers.channel import Channel
from cudnn_actor.workers.cudnn_desk import CudnnDesk
from cudnn_actor.workers.desk import BULKY_BYTES
from cudnn_actor.workers.ledger import Flight, flights_lock
from cudnn_actor.workers.wire import Answer, Answers, Done, Given, Request, encode_message

__all__ = ["Reply", "hand_over", "land"]

Reply = tuple[Envelope, Any, BaseException | None]

_NOBODY = Slot(-1, 0)
"""Fills up a request's slots to as many as a step counts: there is no loop in one."""
_NOBODY.live = True
_MOST_SLOTS = 6
_FILL = tuple((_NOBODY,) * (_MOST_SLOTS - n) for n in range(_MOST_SLOTS + 1))


def hand_over(mailbox: Mailbox, desk: CudnnDesk) -> bool:
    """Hand over what waits, in order, while the window has room. With the desk held.

    Returns
    -------
    bool
        Whether the next one has to go the long way, if there is one.
    """
    worker, ledger = desk.worker, desk.ledger
    if worker is None or _takes_long(desk):
        return True
    claims, flights, places, requests = worker.claims, ledger.flights, ledger._places, desk._requests
    while places:
        queue = mailbox._control or mailbox._ordinary
        if not queue:
            return False
        envelope = queue[0]
        flight = _prepared(desk, envelope)
        if flight is None:
            return True
        a, b, c, d, e, f = (*flight.slots, *_FILL[len(flight.slots)])
        number, place, claim, foreign = flight.number, places[-1], envelope.claim, envelope.bridge is None
        request = [Request(number, place, flight.body)]
        if not flights:
            ledger.progress_s = time.monotonic()
        with mailbox._lock:
            queue = mailbox._control or mailbox._ordinary
            if not queue or queue[0] is not envelope:
                continue  # another has overtaken it; or the mailbox was closed, and has answered it
            if not claim:
                return True  # its time was up
            # One step.
            del claim[0]
            flight.place = place
            flight.claims = claims
            envelope.elsewhere = flight
            a.users += 1
            b.users += 1
            c.users += 1
            d.users += 1
            e.users += 1
            f.users += 1
            flights[number] = flight
            ledger.handed += 1
            ledger.foreign += foreign
            del places[-1]
            requests += request
            del queue[0]
    return False


def _takes_long(desk: CudnnDesk) -> bool:
    """Whether there is at the moment no short way for anybody."""
    ledger, state = desk.ledger, desk.state
    return bool(
        ledger._again
        or ledger._alone
        or desk.stopping
        or desk._roomless
        or state.quarantined
        or state.faults is not None
        or desk.checksums is not None
    )


def _prepared(desk: CudnnDesk, envelope: Envelope) -> Flight | None:
    """A request ready to be handed over; None for one that takes long. Changes nothing but caches."""
    message, future = envelope.message, envelope.future
    if envelope.started_ns or (future is not None and future.done()):
        return None
    if envelope.deadline is not None and envelope.expired:
        return None
    try:
        if type(message) in COMPUTE:
            flight = desk.prepared(envelope, message)
        elif type(message) is Ping:
            flight = Flight(envelope, encode_message(message))
        else:
            return None
    except (CudnnActorError, TypeError, MemoryError):  # of which the long way makes an answer
        return None
    return None if len(flight.body) > BULKY_BYTES or len(flight.slots) > _MOST_SLOTS else flight


def land(channel: Channel, desk: CudnnDesk, outbox: deque[Reply]) -> bool:
    """Take the answers that have come, in order. With the desk held.

    Returns
    -------
    bool
        Whether the next one, or the next frame, has to go the long way.
    """
    ledger, frames, counters = desk.ledger, channel.frames, desk.state.counters
    flights, places = ledger.flights, ledger._places
    while frames:
        if type(frames[0]) is not Answers:
            return True
        answers = frames[0].answers
        while channel.taken < len(answers):
            answer = answers[channel.taken]
            number = answer.number
            flight = flights.get(number)
            if flight is None or flight.place != answer.place:
                return True
            value = _value(desk, flight, answer)
            if value is None or len(flight.slots) > _MOST_SLOTS:
                return True
            a, b, c, d, e, f = (*flight.slots, *_FILL[len(flight.slots)])
            if not (a.live and b.live and c.live and d.live and e.live and f.live):
                return True  # its bytes may be free with this
            place, foreign = [flight.place], flight.envelope.bridge is None
            reply = ((flight.envelope, value, None),)
            with flights_lock:
                # One step.
                del flights[number]
                flight.claims = None
                places += place
                ledger.foreign -= foreign
                ledger._alone = False
                a.users -= 1
                b.users -= 1
                c.users -= 1
                d.users -= 1
                e.users -= 1
                f.users -= 1
                counters.finished += 1
                outbox += reply
                channel.taken += 1
        ledger.note_progress()
        # One step.
        channel.taken = 0
        del frames[0]
    return False


def _value(desk: CudnnDesk, flight: Flight, answer: Answer) -> Any:
    """What an answer brings; None for one that takes long."""
    seen = flight.seen
    if type(answer) is Done and seen is not None:
        if not seen.noted:
            desk.note_plan(seen)
        return desk.receipt(flight.envelope, answer)
    if type(answer) is Given and type(flight.message) is Ping and not flight.strikes:
        try:
            value = decode_reply(answer.body)
        except MalformedMessage:
            return None
        return value if type(value) is int else None
    return None
