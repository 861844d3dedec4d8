"""The straight path of an upload: an array for a buffer, or for a new one whose slot is ready, goes to an
idle worker in one step.

It is for a request that an event loop's task sends and awaits, while nothing waits and nothing is in flight.
The request is sent first, and the array is copied behind it, part by part (`late_copies`). Then the device
has the values some 40 us later. If nothing else in the loop is ready, this thread waits for the answer right
here, for `_HERE_S` at most, and completes the request in another step: so the caller goes on without a turn
of the loop.

As on the other straight path (`straight_path`), everything before a step changes only caches and the piece
of staging memory that is to be filled. If anything does not fit, the request or its answer takes the other
paths. If a signal handler raises between the two steps, the monitor's turn goes on: it sends the request,
makes the copy, and completes the answer. If the worker ends before it has answered, the request is sent again
to the next one, as others are (`crash`): its values lie in staging memory still.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from cudnn_actor.actors import Envelope
from cudnn_actor.broker.answer_times import MOST_WAITING
from cudnn_actor.broker.request_checks import check_message
from cudnn_actor.broker.request_counts import Tally
from cudnn_actor.isolation.process.arrivals import LATE_BYTES, Arrival
from cudnn_actor.isolation.process.cores import PROMPT_S
from cudnn_actor.isolation.process.parent.fast_path import pass_over, takes_long
from cudnn_actor.isolation.process.parent.in_flight import WorkerRequest, claims_lock
from cudnn_actor.isolation.process.parent.owning_loop import OwningLoop
from cudnn_actor.isolation.process.parent.straight_path import (
    HostMailbox,
    may_free_others,
    straight,
)
from cudnn_actor.isolation.process.parent.worker_host import WorkerHost
from cudnn_actor.isolation.process.wire import Request, Requests
from cudnn_actor.isolation.staging import PIECE_BYTES
from cudnn_actor.memory import Slot
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import BadFrame, encode
from cudnn_actor.protocol.messages.messages import Allocate, Upload
from cudnn_actor.protocol.messages.receipts import Receipt
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["UploadMailbox", "send_upload"]

_UPLOADS = frozenset({Allocate, Upload})
_AWAKE_S = 150e-6
"""A worker that has done nothing for so long may be asleep."""

_HERE_S = 100e-6
"""The most seconds for which a thread waits for an answer without a turn of its loop. It has copied the array
for about as long."""


class UploadMailbox(HostMailbox):
    """The part of the dispatcher that sends uploads on the straight path. `Dispatcher` says what each
    attribute is."""

    checks: ClassVar[frozenset[type]] = _UPLOADS
    owner: OwningLoop | None
    _roused_s = 0.0
    """When the worker was last woken for an upload to come, in `time.monotonic()` seconds."""

    def admit_awaited(self, envelope: Envelope) -> None:
        """See `Mailbox.admit_awaited`. An upload may take the straight path, which only takes valid ones."""
        owner, kind = self.owner, type(envelope.message)
        if (
            kind in _UPLOADS
            and owner is not None
            and (bridge := owner.bridge) is envelope.bridge
            and not (bridge.posted or self._lock._is_owned())  # see `Dispatcher.admit_alone`
            and owner._channel is self.channel  # `OwningLoop.reads`: it is running
            and straight(self, bridge, send_upload, envelope)
        ):
            if self.loops_may_stay_awake and self.host.in_flight.requests:
                owner.await_answer()
            return
        if kind in _UPLOADS:
            check_message(self.host.state, envelope.message, {})
        self.admit(envelope)

    def expect_upload(self) -> None:
        """See `Mailbox.expect_upload`."""
        owner, now_s = self.owner, time.monotonic()
        if (
            self.loops_may_stay_awake
            and owner is not None
            and now_s - self.host.in_flight.progress_s > _AWAKE_S
            and not (self.is_roused or self._lock._is_owned())
            and owner.is_running_here()
            and owner.reads(self.channel)
        ):
            straight(self, owner.bridge, _rouse, now_s)

    @property
    def is_roused(self) -> bool:
        """Whether the worker was woken for an upload to come, and has not slept since."""
        return time.monotonic() - self._roused_s < PROMPT_S


def _rouse(dispatcher: UploadMailbox, now_s: float) -> bool:
    """Wake the worker, with the host held, if there is memory for that. Returns True."""
    sender = dispatcher.host.sender
    if sender.sending is None and not sender._unsent and not dispatcher.host.in_flight.requests:
        dispatcher._roused_s = now_s
        with contextlib.suppress(MemoryError):
            sender.rouse_worker()
    return True


def send_upload(dispatcher: UploadMailbox, envelope: Envelope) -> bool:
    """Dispatch an upload, copy its array, and perhaps await its answer. With the host held. Returns whether
    it was dispatched. No other thread knows its envelope yet."""
    host, channel = dispatcher.host, dispatcher.channel
    table, sender, worker, memory = host.in_flight, host.sender, host.workers.serving, host.state.memory
    in_flight, places, late, pieces = (
        table.requests,
        table._places,
        sender.copies.pending,
        host.staging.pieces,
    )
    message = envelope.message
    if (
        in_flight
        or channel is None
        or worker is None
        or not _is_idle(dispatcher, channel)
        or (envelope.deadline is not None and envelope.expired)
        or (target := _target_of(host, message)) is None
    ):
        return False
    slot, ref, ready = target
    number, place, block = next(dispatcher._numbers), places[-1], pieces[-1]
    bridge, claim, data = envelope.bridge, envelope.claim, message.data
    try:
        body, copy = host.values.prepared_late(block, ref, data, alone=True)
    except MemoryError:
        return False
    copies, frame = (copy,), ((encode(Requests([Request(number, place, body)])), ()),)
    request = WorkerRequest(
        envelope,
        number,
        message,
        (slot,),
        ref=None if ready is None else ref,
        body=body,
        blocks=(block,),
        copies=copies,
        place=place,
        claims=worker.claims,
        sent_s=table.clock(),
    )
    table.note_first(request)
    now_ns = time.perf_counter_ns()
    with dispatcher._lock:
        if dispatcher._closed is not None or dispatcher._control or dispatcher._ordinary or not claim:
            return False
        # One step. The frame is in the channel's queue: a turn sends it if this thread does not.
        envelope.mailbox = dispatcher
        envelope.number = number
        envelope.admitted_ns = now_ns
        envelope.elsewhere = request
        del claim[0]
        bridge.awaited += 1  # type: ignore[union-attr]  # `admit_awaited` has compared it
        slot.users += 1
        in_flight[number] = request
        table.handed += 1
        del places[-1]
        channel._out += frame
        late += copies
        del pieces[-1]
        if ready is not None:
            memory._live[slot.index] = slot
            slot.live = True
            memory.live_bytes += slot.nbytes
            del ready[-1]
    try:
        sent = channel.flush_only()
        copy.make()
        del late[0]
        if not sent:
            dispatcher.wake_monitor()
        elif dispatcher.loops_may_stay_awake and (owner := dispatcher.owner) is not None and owner.may_wait():
            _await_answer(dispatcher, request, channel, copy.arrival, owner.looks)
    except MemoryError:  # the request is in flight: the monitor goes on once there is memory
        dispatcher.short_of_memory = dispatcher._wants_reading = True
        dispatcher.wake_monitor()
    if dispatcher._afterwards:  # as in `send_alone`
        dispatcher._admit_afterwards()
    return True


def _is_idle(dispatcher: UploadMailbox, channel: Channel) -> bool:
    """Whether there is no other work for a turn, and a piece is there."""
    host, sender = dispatcher.host, dispatcher.host.sender
    return not (
        sender.copies.pending
        or not host.staging.pieces
        or takes_long(host)
        or dispatcher._stop is not None
        or host.staging.ended  # a turn frees these
        or host.models._leaving
        or sender._unsent
        or sender.sending is not None
        or channel._out
        or channel.ended
    )


def _target_of(host: WorkerHost, message: Any) -> tuple[Slot, BufferRef, list[Slot] | None] | None:
    """Where an upload goes: the slot, the buffer, and, if that is new, the list whose last element the slot
    is. None unless its array can be copied to a piece as it is, and its slot is there.

    An array of the buffer's dims and dtype needs no other check.
    """
    data, memory, ready = message.data, host.state.memory, None
    if type(message) is Upload:
        ref = message.dst
        if type(ref) is not BufferRef or ref.device != memory.device:
            return None
        slot = memory._live.get(ref.slot)
        if slot is None or slot.generation != ref.generation or slot.spec is not ref.spec:
            return None
    else:
        if type(message.spec) is not TensorSpec:
            return None
        ready = memory.ready(message.spec)
        if not ready:
            return None
        slot = ready[-1]
        ref = BufferRef(slot=slot.index, generation=slot.generation, spec=slot.spec, device=memory.device)
    spec = slot.spec
    if (
        host.values.arenas is None
        and type(data) is np.ndarray
        and data.shape == spec.dims
        and data.dtype == spec.dtype.numpy
        and LATE_BYTES < data.nbytes <= PIECE_BYTES
        and data.flags.c_contiguous  # see `may_be_late`
        and (data.base is None or host.staging.locate(data) is None)
    ):
        return slot, ref, ready
    return None


def _await_answer(
    dispatcher: HostMailbox,
    request: WorkerRequest,
    channel: Channel,
    arrival: Arrival,
    looks: Callable[[], object],
) -> None:
    """Wait until the worker answers where the values arrived, and complete the request; or let the loop read
    the answer.

    Whatever does not depend on the answer is done before it is there, while the device works. What the caller
    gets is also made once before, of numbers that mean nothing: so the code for that is in the processor's
    caches when the answer comes. The host has been held since the request was dispatched. So its buffer is
    live, and other threads have only added messages.
    """
    table, counters, clock = dispatcher.host.in_flight, dispatcher.host.state.counters, time.perf_counter
    counted = counters.of_upload(request.message, request.message.data.nbytes)
    if (
        counted is None
        or len(counters._times.kept[2]) >= MOST_WAITING
        or dispatcher._outbox
        or may_free_others(dispatcher)
    ):
        return
    try:
        if table.told and channel.fetch() and channel.frames:  # the answer to an earlier upload
            pass_over(table, channel)
    except BadFrame as error:  # not each is raised again in a turn
        dispatcher.condemn(str(error))
    _answer(request, arrival, dispatcher.host.state.generation)
    end_s, number, answered = clock() + _HERE_S, request.number, arrival.answer_words
    is_other: object = channel.frames or channel.ended or dispatcher.channel is not channel
    if table.told and not is_other:  # the loop reads this answer, behind the earlier one
        return
    while not is_other and answered[0] != number:
        is_other = looks() and answered[0] != number
        if clock() >= end_s:
            return
    if is_other or dispatcher._ordinary or dispatcher._control or counters.observer is not None:
        dispatcher._wants_turn = dispatcher._wants_reading = True
        return
    _complete(dispatcher, request, arrival, counted)


def _answer(
    request: WorkerRequest, arrival: Arrival, generation: int
) -> tuple[BufferRef | Receipt, int, int, int, float]:
    """What the caller gets, and the times of the stamps, as the worker says where the values arrived."""
    started_ns, took_ns = arrival.times()
    now_ns, run_us = time.perf_counter_ns(), took_ns / 1e3
    value = request.ref or request.receipt(generation, "upload", started_ns, run_us)
    return value, request.envelope.admitted_ns, started_ns, now_ns, run_us


def _complete(
    dispatcher: HostMailbox,
    request: WorkerRequest,
    arrival: Arrival,
    counted: tuple[int, Tally, tuple[int, int]],
) -> None:
    """Complete the request. Its answer also comes in a frame, which `pass_over` removes."""
    host, outbox, number = dispatcher.host, dispatcher._outbox, request.number
    table, counters, envelope, (slot,) = host.in_flight, host.state.counters, request.envelope, request.slots
    (kind, tally, moved) = counted
    value, *times = _answer(request, arrival, host.state.generation)
    stamps, reply = (kind, *times), ((envelope, value, None),)
    place, blocks, pieces, waiting = (
        [request.place],
        request.blocks,
        host.staging.pieces,
        counters._times.kept[2],
    )
    in_flight, places = table.requests, table._places
    bridge, future = envelope.bridge, envelope.future
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
        table.told = number
        slot.users -= 1
        counters.finished += 1
        waiting += stamps
        tally.bytes = moved
        outbox += reply
    if bridge is None or bridge.posted or future is None or future.done():
        dispatcher._wants_turn = True
        return
    future.set_result(value)  # `deliver`: on this loop, and nothing watches it
    # One step.
    bridge.awaited -= 1
    del outbox[0]
