"""The straight path: a request that runs a plan goes to an idle worker in one step, and its answer comes back
in another.

It is for the event loop that owns the socket: for its own callers, and for requests of other processes
(`attached.server`). A message takes it if it came before, while nothing waits and nothing is in flight. So
there is nothing to gather, to order or to choose: the request does not go through the mailbox, and neither it
nor its answer costs a turn. The effect is that of the fast path (`fast_path`), whose argument about signal
handlers and other threads holds here, too: everything before a step changes only caches.

If anything does not fit, `send_alone` and `take_alone` return False, and the request or the answer takes the
other paths. So it does if a turn would find other work: memory to be freed, messages that may go on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from cudnn_actor.actors import Envelope, LoopBridge, Mailbox
from cudnn_actor.actors.interrupts import run_through
from cudnn_actor.broker.answer_times import MOST_WAITING
from cudnn_actor.isolation.process.parent.fast_path import (
    FEW,
    FILL,
    Reply,
    counting,
    pass_over,
    takes_long,
)
from cudnn_actor.isolation.process.parent.in_flight import WorkerRequest, claims_lock
from cudnn_actor.isolation.process.parent.sender import BULKY_BYTES
from cudnn_actor.isolation.process.parent.worker_host import WorkerHost
from cudnn_actor.isolation.process.wire import Answers, Done, Request
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import BadFrame

__all__ = ["HostMailbox", "deliver", "may_free_others", "only_answer", "send_alone", "straight", "take_alone"]

_FEWEST = 3
"""Nearly all requests have at most so many slots. Those of other requests are counted behind a branch: a jump
ahead is part of a step, unlike one back."""


class HostMailbox(Mailbox):
    """The part of the dispatcher that the straight path uses. `Dispatcher` says what each attribute is."""

    host: WorkerHost
    channel: Channel | None
    alone: int
    read_s: float
    short_of_memory: bool
    loops_may_stay_awake: bool
    wake_monitor: Callable[[], Any]
    _taken: bool
    _waiting: list[Any]
    _wants_turn: Any
    """A bool, which other threads and other functions change."""
    _wants_reading: bool
    _stop: Envelope | None
    _outbox: deque[Reply]
    _here: LoopBridge | None

    def turn(self, bridge: LoopBridge | None = None, *, read: bool = False) -> None:
        """Take a turn."""

    def condemn(self, why: str) -> None:
        """Stop using the present worker."""


MailboxT = TypeVar("MailboxT", bound=HostMailbox)


def straight(
    dispatcher: MailboxT, bridge: LoopBridge, go: Callable[[MailboxT, Any], bool], argument: Any
) -> bool:
    """Let a function below have the host, unless another thread has it or wants it. On the loop that owns the
    socket, whose bridge it is. Returns what the function returns.

    The host is taken and freed as in `Dispatcher.turn`. A turn that is wanted then is taken here.
    """
    mine = done = False
    try:
        # Testing and taking are one step.
        if dispatcher._taken or dispatcher._waiting or dispatcher._wants_turn:
            return False
        dispatcher._taken = mine = True
        dispatcher._here = bridge
        done = go(dispatcher, argument)
        # One step, like the handler below.
        dispatcher._taken = mine = False
        try:
            if dispatcher._waiting:
                dispatcher._waiting[0].release()
        except RuntimeError:  # the lock has been released already
            pass
        if dispatcher._wants_turn:
            dispatcher.turn(bridge)
    except BaseException:
        # One step: the host becomes free, and another thread finishes the work.
        if mine:
            dispatcher._taken = False
        dispatcher._wants_turn = dispatcher._wants_reading = True
        try:
            if dispatcher._waiting:
                dispatcher._waiting[0].release()
            else:
                dispatcher.wake_monitor()
        except RuntimeError:  # the lock has been released already
            pass
        raise
    return done


def send_alone(dispatcher: HostMailbox, envelope: Envelope) -> bool:
    """Dispatch a request that runs a plan, with the host held. Returns whether it was dispatched.

    No other thread knows the request yet. So its claim is there, and nobody can have withdrawn it.
    """
    host, channel = dispatcher.host, dispatcher.channel
    table, sender, worker, found = host.in_flight, host.sender, host.workers.serving, envelope.found
    body, bound, in_flight, places = found.body, found.bound, table.requests, table._places
    if (
        in_flight
        or channel is None
        or worker is None
        or body is None
        or len(body) > BULKY_BYTES
        or bound is None
        or bound.epoch != host.state.memory.epoch
        or takes_long(host)
        or dispatcher._stop is not None
        or host.staging.ended  # a turn frees these
        or host.models._leaving
        or not sender.graphs.knows(envelope.message)
        or (envelope.deadline is not None and envelope.expired)
    ):
        return False
    number, place, slots, sent_s = next(dispatcher._numbers), places[-1], bound.slots, table.clock()
    has_more, many = len(slots) > _FEWEST, counting(slots, 1) if len(slots) > FEW else None
    a, b, c, d, e, f = (*slots, *FILL[len(slots)]) if many is None else FILL[0]
    unsent, entry = sender._unsent, [Request(number, place, body)]
    request = WorkerRequest(
        envelope, number, envelope.message, slots, found, body=body, place=place, claims=worker.claims
    )
    request.sent_s = sent_s
    table.note_first(request)
    bridge, now_ns, claim = envelope.bridge, time.perf_counter_ns(), envelope.claim
    with dispatcher._lock:
        if dispatcher._closed is not None or dispatcher._control or dispatcher._ordinary:
            return False
        # One step.
        envelope.mailbox = dispatcher
        envelope.number = number
        envelope.admitted_ns = now_ns
        envelope.elsewhere = request
        del claim[0]
        bridge.awaited += 1  # type: ignore[union-attr]  # `Dispatcher.admit_alone` has compared it
        a.users += 1
        b.users += 1
        c.users += 1
        if has_more:
            d.users += 1
            e.users += 1
            f.users += 1
        in_flight[number] = request
        dispatcher.alone = number
        table.handed += 1
        del places[-1]
        unsent += entry
        if many is not None:
            run_through(many)
    try:
        sender.flush()
    except MemoryError:  # the request is in flight: the monitor sends it once there is memory
        dispatcher.short_of_memory = True
        dispatcher.wake_monitor()
    if channel.backed_up:
        dispatcher.wake_monitor()
    if dispatcher._afterwards:  # a finalizer has sent a message while this thread had the lock
        dispatcher._admit_afterwards()
    return True


def take_alone(dispatcher: HostMailbox, _: None) -> bool:
    """Read the socket, and complete the request that took the straight path. With the host held. Returns
    True.

    If anything else has come, or is to be done, a turn is wanted. `straight` takes it, or wakes the monitor
    if a signal handler raises an exception before that: once the socket has been read, the loop is not told
    again.
    """
    if not _complete(dispatcher):
        dispatcher._wants_turn = dispatcher._wants_reading = True
    return True


def _complete(dispatcher: HostMailbox) -> bool:
    host, channel, began_s = dispatcher.host, dispatcher.channel, time.monotonic()
    table, counters, outbox = host.in_flight, host.state.counters, dispatcher._outbox
    in_flight, places = table.requests, table._places
    request = in_flight.get(dispatcher.alone)
    if channel is None or request is None or len(in_flight) > 1 or outbox or may_free_others(dispatcher):
        return False
    envelope, slots, number = request.envelope, request.slots, request.number
    kind, waiting = counters._plain.get(type(envelope.message)), counters._times.kept[2]
    if (
        kind is None
        or len(waiting) >= MOST_WAITING
        or (done := answer_to(dispatcher, request, channel)) is None
    ):
        return False
    has_more, many = len(slots) > _FEWEST, counting(slots, -1) if len(slots) > FEW else None
    a, b, c, d, e, f = (*slots, *FILL[len(slots)]) if many is None else FILL[0]
    if not (a.live and b.live and c.live) or (has_more and not all(slot.live for slot in slots)):
        return False  # a freed buffer: releasing it may free its bytes
    if host.recent.kept:
        host.recent.note(request, envelope.found)
    receipt = request.receipt(host.state.generation, done.plan, done.started_ns, done.run_us)
    now_ns, place, frames = time.perf_counter_ns(), [request.place], channel.frames
    reply = ((envelope, receipt, None),)
    stamps = kind, envelope.admitted_ns, done.started_ns, now_ns, done.run_us
    table.note_finished(request)
    table.progress_s = table.clock()  # `note_progress`: no other request becomes the oldest
    with claims_lock:
        # One step.
        del in_flight[number]
        request.claims = None
        envelope.elsewhere = None
        places += place
        table._alone = False
        a.users -= 1
        b.users -= 1
        c.users -= 1
        if has_more:
            d.users -= 1
            e.users -= 1
            f.users -= 1
        counters.finished += 1
        waiting += stamps
        outbox += reply
        del frames[0]
        if many is not None:
            run_through(many)
    dispatcher.read_s = began_s
    deliver(dispatcher, envelope, receipt)
    return True


def may_free_others(dispatcher: HostMailbox) -> bool:
    """Whether anything may go on once the request in flight has ended: also a message that has waited for it,
    or whose turn asyncio has lost."""
    broker = dispatcher.host.broker
    return bool(
        dispatcher._ordinary
        or dispatcher._control
        or dispatcher._stop is not None
        or dispatcher.host.in_flight.again
        or broker._drains
        or broker.held
    )


def answer_to(dispatcher: HostMailbox, request: WorkerRequest, channel: Channel) -> Done | None:
    """Read the socket. The answer, if it is that of the request, and nothing else has come; it stays in the
    channel. What has come besides is left to a turn."""
    frames, table = channel.frames, dispatcher.host.in_flight
    try:
        if frames or not channel.fetch():
            return None
        if table.told and frames:  # the answer to an earlier upload
            pass_over(table, channel)
    except BadFrame as error:  # not each is raised again in a turn
        dispatcher.condemn(str(error))
        return None
    except MemoryError:
        return None
    return only_answer(request, channel)


def only_answer(request: WorkerRequest, channel: Channel) -> Done | None:
    """The answer to the request if nothing else has come; it stays in the channel."""
    frames = channel.frames
    if len(frames) != 1 or not channel.drained or type(frame := frames[0]) is not Answers:
        return None
    answers = frame.answers
    if len(answers) != 1 or type(answer := answers[0]) is not Done:
        return None
    return answer if answer.number == request.number and answer.place == request.place else None


def deliver(dispatcher: HostMailbox, envelope: Envelope, value: Any) -> None:
    """Deliver the only reply in the outbox, or let a turn do so."""
    bridge, future = envelope.bridge, envelope.future
    if bridge is None or bridge.posted or bridge is not dispatcher._here or future is None or future.done():
        dispatcher._wants_turn = True
        return
    if envelope.watch is not None:
        envelope.unwatch()
    future.set_result(value)
    outbox = dispatcher._outbox
    # One step.
    bridge.awaited -= 1
    del outbox[0]
