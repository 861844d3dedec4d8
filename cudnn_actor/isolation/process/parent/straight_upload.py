"""The straight path of an upload: an array for a buffer that exists goes to an idle worker in one step.

It is for a request that an event loop's task sends and awaits, while nothing waits and nothing is in flight.
The request is sent first, and the array is copied behind it, part by part (`late_copies`). Then the device
has the values some 30 us later. If nothing else in the loop is ready, this thread waits for the answer right
here, for `_HERE_S` at most, and completes the request in another step: so the caller goes on without a turn
of the loop.

As on the other straight path (`straight_path`), everything before a step changes only caches and the piece
of staging memory that is to be filled. If anything does not fit, the request or its answer takes the other
paths. If a signal handler raises between the two steps, the monitor's turn goes on: it sends the request,
makes the copy, and completes the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from cudnn_actor.actors import Envelope
from cudnn_actor.broker.answer_times import MOST_WAITING
from cudnn_actor.broker.request_counts import Tally
from cudnn_actor.isolation.process.parent.fast_path import takes_long
from cudnn_actor.isolation.process.parent.in_flight import WorkerRequest, claims_lock
from cudnn_actor.isolation.process.parent.late_copies import may_be_late
from cudnn_actor.isolation.process.parent.straight_path import (
    HostMailbox,
    answer_to,
    deliver,
    may_free_others,
)
from cudnn_actor.isolation.process.parent.worker_host import WorkerHost
from cudnn_actor.isolation.process.wire import Request
from cudnn_actor.isolation.staging import PIECE_BYTES
from cudnn_actor.memory import Slot

__all__ = ["AskedUpload", "send_upload"]

_HERE_S = 100e-6
"""The most seconds for which a thread waits for an answer without a turn of its loop. It has copied the array
for about as long."""


class AskedUpload(NamedTuple):
    """An upload to be sent.

    Attributes
    ----------
    envelope
        The message. No other thread knows it yet.
    looks
        Whether the socket can be read.
    may_wait
        Whether this thread may wait for the answer without a turn of the loop. It is asked once.
    """

    envelope: Envelope
    looks: Callable[[], object]
    may_wait: Callable[[], bool]


def send_upload(dispatcher: HostMailbox, asked: AskedUpload) -> bool:
    """Dispatch an upload, copy its array, and perhaps await its answer. With the host held. Returns whether
    it was dispatched."""
    host, channel, envelope = dispatcher.host, dispatcher.channel, asked.envelope
    table, sender, worker = host.in_flight, host.sender, host.workers.serving
    in_flight, places, late, pieces = (
        table.requests,
        table._places,
        sender.copies.pending,
        host.staging.pieces,
    )
    if (
        in_flight
        or late
        or not pieces
        or channel is None
        or worker is None
        or takes_long(host)
        or dispatcher._stop is not None
        or host.staging.ended  # a turn frees these
        or host.models._leaving
        or (envelope.deadline is not None and envelope.expired)
        or (slot := _slot_of(host, envelope.message)) is None
    ):
        return False
    number, place, block = next(dispatcher._numbers), places[-1], pieces[-1]
    message, bridge, claim = envelope.message, envelope.bridge, envelope.claim
    try:
        body, copies = host.values.prepared_late(block, message.dst, message.data, alone=True)
    except MemoryError:
        return False
    unsent, entry = sender._unsent, [Request(number, place, body)]
    request = WorkerRequest(
        envelope,
        number,
        message,
        (slot,),
        body=body,
        blocks=(block,),
        copies=copies,
        place=place,
        claims=worker.claims,
    )
    request.sent_s = table.clock()
    table.note_first(request)
    now_ns = time.perf_counter_ns()
    with dispatcher._lock:
        if dispatcher._closed is not None or dispatcher._control or dispatcher._ordinary:
            return False
        # One step.
        envelope.mailbox = dispatcher
        envelope.number = number
        envelope.admitted_ns = now_ns
        envelope.elsewhere = request
        del claim[0]
        bridge.awaited += 1  # type: ignore[union-attr]  # `Dispatcher.admit` has compared it
        slot.users += 1
        in_flight[number] = request
        table.handed += 1
        del places[-1]
        unsent += entry
        late += copies
        del pieces[-1]
    try:
        sender.flush()
        sender.copies.make_light()
        if channel.backed_up:
            dispatcher.wake_monitor()
        elif dispatcher.loops_may_stay_awake and asked.may_wait():
            _await_answer(dispatcher, request, asked.looks)
    except MemoryError:  # the request is in flight: the monitor goes on once there is memory
        dispatcher.short_of_memory = dispatcher._wants_reading = True
        dispatcher.wake_monitor()
    return True


def _slot_of(host: WorkerHost, message: Any) -> Slot | None:
    """The slot that an upload overwrites; None if it is not one that can be copied to a piece as it is.

    An array of the buffer's dims and dtype needs no other check.
    """
    data, ref, values = message.data, message.dst, host.values
    if values.arenas is not None or not may_be_late(data) or data.nbytes > PIECE_BYTES:
        return None
    slot = host.state.memory._live.get(ref.slot)
    if slot is None or slot.generation != ref.generation or slot.spec is not ref.spec:
        return None
    spec = slot.spec
    if data.shape != spec.dims or data.dtype != spec.dtype.numpy or host.staging.locate(data) is not None:
        return None
    return slot


def _await_answer(dispatcher: HostMailbox, request: WorkerRequest, looks: Callable[[], object]) -> None:
    """Wait for the answer, and complete the request; or let the loop read it.

    Whatever does not depend on the answer is done before it is there, while the device works.
    """
    counters, clock = dispatcher.host.state.counters, time.perf_counter
    counted = counters.of_upload(request.message)
    if counted is None or len(counters._times.kept[2]) >= MOST_WAITING or may_free_others(dispatcher):
        return
    end_s = clock() + _HERE_S
    while not looks():
        if clock() >= end_s:
            return
    if not _complete(dispatcher, request, *counted):
        dispatcher._wants_turn = dispatcher._wants_reading = True


def _complete(
    dispatcher: HostMailbox, request: WorkerRequest, kind: int, tally: Tally, moved: tuple[int, int]
) -> bool:
    """Read the socket, and complete the request. Returns False if a turn has to."""
    host, channel, began_s, outbox = dispatcher.host, dispatcher.channel, time.monotonic(), dispatcher._outbox
    table, counters, envelope, (slot,) = host.in_flight, host.state.counters, request.envelope, request.slots
    if channel is None or outbox or may_free_others(dispatcher) or counters.observer is not None:
        return False
    done = answer_to(dispatcher, request, channel)
    if done is None or not slot.live:  # releasing a freed buffer may free its bytes
        return False
    receipt = request.receipt(host.state.generation, done.plan, done.started_ns, done.run_us)
    now_ns, reply, number = time.perf_counter_ns(), ((envelope, receipt, None),), request.number
    stamps, waiting = (
        (kind, envelope.admitted_ns, done.started_ns, now_ns, done.run_us),
        counters._times.kept[2],
    )
    place, blocks, pieces, frames = [request.place], request.blocks, host.staging.pieces, channel.frames
    in_flight, places = table.requests, table._places
    table.note_finished(request)
    table.progress_s = table.clock()  # `note_progress`: no other request becomes the oldest
    with claims_lock:
        # One step.
        del in_flight[number]
        request.claims = None
        envelope.elsewhere = None
        places += place
        pieces += blocks
        table._alone = False
        slot.users -= 1
        counters.finished += 1
        waiting += stamps
        tally.bytes = moved
        outbox += reply
        del frames[0]
    dispatcher.read_s = began_s
    deliver(dispatcher, envelope, receipt)
    return True
