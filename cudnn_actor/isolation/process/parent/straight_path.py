"""The straight path: a request that runs a plan goes to an idle worker in one step, and so does its answer back.

It is for a loop that gets requests of other processes one at a time (`attached.server`). Nothing waits and
nothing is in flight, so there is nothing to gather, to order or to choose. The request does not go through the
mailbox, and no turn is taken for it. The effect is that of the fast path (`fast_path`), whose argument about
signal handlers and other threads holds here, too: everything before a step changes only caches.

What does not fit takes the other paths: both functions then return False, and have changed only caches. So does
everything that a turn would find to do (`_has_work`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cudnn_actor.actors import Envelope, LoopBridge
from cudnn_actor.broker.answer_times import MOST_WAITING
from cudnn_actor.isolation.process.parent.fast_path import FEW, FILL, counting, run_through, takes_long
from cudnn_actor.isolation.process.parent.in_flight import WorkerRequest, claims_lock
from cudnn_actor.isolation.process.parent.sender import BULKY_BYTES
from cudnn_actor.isolation.process.wire import Answers, Done, Request
from cudnn_actor.processes.frames import BadFrame

if TYPE_CHECKING:
    from cudnn_actor.isolation.process.parent.dispatcher import Dispatcher

__all__ = ["send_alone", "straight", "take_alone"]

_FEWEST = 3
"""Nearly all requests have no more slots: the others' are counted behind a branch. A jump ahead is part of a
step, unlike one back."""


def straight(
    dispatcher: Dispatcher, bridge: LoopBridge, go: Callable[[Dispatcher, Any], bool], argument: Any
) -> bool:
    """Let a function below have the host, unless another thread has it or wants it. On the loop that owns the
    socket, whose bridge it is. Returns what the function returns.

    The host is taken and freed as in `Dispatcher.turn`. A turn that is wanted meanwhile is taken at the end.
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
    if dispatcher._wants_turn:
        dispatcher.turn(bridge)
    return done


def send_alone(dispatcher: Dispatcher, envelope: Envelope) -> bool:
    """Dispatch a request that runs a plan, which no other thread knows yet. With the host held.

    So its claim is there, and nobody can have withdrawn it. Returns whether it was dispatched.
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
    except MemoryError:  # the request is in flight: the monitor sends it when there is memory
        dispatcher.short_of_memory = True
        dispatcher.wake_monitor()
    if channel.backed_up:
        dispatcher.wake_monitor()
    return True


def take_alone(dispatcher: Dispatcher, _: None) -> bool:
    """Read the socket, and complete the request that `send_alone` has dispatched. With the host held.

    Returns whether that was done, and was all there is to do.
    """
    host, channel = dispatcher.host, dispatcher.channel
    broker = host.broker
    table, counters, outbox = host.in_flight, host.state.counters, dispatcher._outbox
    in_flight, waiting = table.requests, counters._times.kept[2]
    request = in_flight.get(dispatcher.alone)
    if request is None or len(in_flight) > 1 or channel is None or channel.frames or outbox:
        return False
    if table._again or dispatcher._stop is not None or broker._drains or broker.held:
        return False  # something may go on once the request has ended
    envelope, cached, slots, number = request.envelope, request.cached, request.slots, request.number
    kind, future, bridge = counters._plain.get(type(envelope.message)), envelope.future, envelope.bridge
    if kind is None or len(waiting) >= MOST_WAITING or cached is None or future is None or bridge is None:
        return False
    began_s = time.monotonic()
    try:
        channel.fetch()
    except (BadFrame, MemoryError):  # a turn meets it again
        return False
    frames = channel.frames
    if len(frames) != 1 or not channel.drained or type(frame := frames[0]) is not Answers:
        return False
    answer = frame.answers[0] if len(frame.answers) == 1 else None
    if type(answer) is not Done or answer.number != number or answer.place != request.place:
        return False
    has_more, many = len(slots) > _FEWEST, counting(slots, -1) if len(slots) > FEW else None
    a, b, c, d, e, f = (*slots, *FILL[len(slots)]) if many is None else FILL[0]
    if not (a.live and b.live and c.live) or (has_more and not all(slot.live for slot in slots)):
        return False  # a freed buffer: releasing it may free its bytes
    if host.recent.kept:
        host.recent.note(request, cached)
    receipt = request.receipt(host.state.generation, answer.plan, answer.started_ns, answer.run_us)
    now_ns, place, reply = time.perf_counter_ns(), [request.place], ((envelope, receipt, None),)
    stamps = kind, envelope.admitted_ns, answer.started_ns, now_ns, answer.run_us
    table.note_finished(request)
    table.progress_s = table.clock()  # `note_progress`, where no other request becomes the oldest
    with claims_lock:
        # One step.
        del in_flight[number]
        request.claims = None
        envelope.elsewhere = None
        table._places += place
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
    if bridge.posted or bridge is not dispatcher._here or future.done():
        dispatcher._wants_turn = True  # it delivers what is in the outbox
        return True
    if envelope.watch is not None:
        envelope.unwatch()
    future.set_result(receipt)
    # One step.
    bridge.awaited -= 1
    del outbox[0]
    return True
