"""The straight path of an upload: an array for a buffer, or for a new one whose slot is ready, goes to an
idle worker in one step.

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

import contextlib
import time
from collections.abc import Callable
from typing import Any

from cudnn_actor.actors import Envelope
from cudnn_actor.broker.answer_times import MOST_WAITING
from cudnn_actor.broker.request_counts import Tally
from cudnn_actor.isolation.process.cores import PROMPT_S
from cudnn_actor.isolation.process.parent.fast_path import takes_long
from cudnn_actor.isolation.process.parent.in_flight import WorkerRequest, claims_lock
from cudnn_actor.isolation.process.parent.late_copies import may_be_late
from cudnn_actor.isolation.process.parent.owning_loop import OwningLoop
from cudnn_actor.isolation.process.parent.straight_path import (
    HostMailbox,
    deliver,
    may_free_others,
    only_answer,
    straight,
)
from cudnn_actor.isolation.process.parent.worker_host import WorkerHost
from cudnn_actor.isolation.process.wire import Request
from cudnn_actor.isolation.staging import PIECE_BYTES
from cudnn_actor.memory import Slot
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import BadFrame
from cudnn_actor.protocol.messages.messages import Allocate, Upload
from cudnn_actor.protocol.types.buffers import BufferRef

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

    owner: OwningLoop | None
    _roused_s = 0.0
    """When the worker was last woken for an upload to come, in `time.monotonic()` seconds."""

    def admit_awaited(self, envelope: Envelope) -> None:
        """See `Mailbox.admit_awaited`. An upload may take the straight path."""
        owner = self.owner
        if (
            type(envelope.message) in _UPLOADS
            and owner is not None
            and (bridge := owner.bridge) is envelope.bridge
            and not (bridge.posted or self._lock._is_owned())  # see `Dispatcher.admit_alone`
            and owner.reads(self.channel)
            and straight(self, bridge, send_upload, envelope)
        ):
            if self.loops_may_stay_awake and self.host.in_flight.requests:
                owner.await_answer()
            return
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


_Target = tuple[Slot, BufferRef, Slot | None, list[Slot]]
"""Where an upload goes: the slot and the buffer; the slot once more if the buffer is new, else None; and the
list from which a new buffer's slot is taken, as its last element."""


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
    host, owner = dispatcher.host, dispatcher.owner
    table, sender, worker, memory = host.in_flight, host.sender, host.workers.serving, host.state.memory
    in_flight, places, late, pieces = (
        table.requests,
        table._places,
        sender.copies.pending,
        host.staging.pieces,
    )
    if (
        worker is None
        or not _is_idle(dispatcher)
        or (envelope.deadline is not None and envelope.expired)
        or (target := _target_of(host, envelope.message)) is None
    ):
        return False
    slot, ref, fresh, ready = target
    number, place, block = next(dispatcher._numbers), places[-1], pieces[-1]
    message, bridge, claim = envelope.message, envelope.bridge, envelope.claim
    try:
        body, copies = host.values.prepared_late(block, ref, message.data, alone=True)
    except MemoryError:
        return False
    unsent, entry = sender._unsent, [Request(number, place, body)]
    request = WorkerRequest(
        envelope,
        number,
        message,
        (slot,),
        ref=None if fresh is None else ref,
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
        if dispatcher._closed is not None or dispatcher._control or dispatcher._ordinary or not claim:
            return False
        # One step.
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
        unsent += entry
        late += copies
        del pieces[-1]
        if fresh is not None:
            memory._live[fresh.index] = fresh
            fresh.live = True
            memory.live_bytes += fresh.nbytes
            del ready[-1]
    try:
        sender.flush()
        sender.copies.make_light()
        if sender.workers.serving is not worker or dispatcher.channel is None or dispatcher.channel.backed_up:
            dispatcher.wake_monitor()
        elif dispatcher.loops_may_stay_awake and owner is not None and owner.may_wait():
            _await_answer(dispatcher, request, dispatcher.channel, owner.looks)
    except MemoryError:  # the request is in flight: the monitor goes on once there is memory
        dispatcher.short_of_memory = dispatcher._wants_reading = True
        dispatcher.wake_monitor()
    if dispatcher._afterwards:  # as in `send_alone`
        dispatcher._admit_afterwards()
    return True


def _is_idle(dispatcher: UploadMailbox) -> bool:
    """Whether nothing is in flight, and there is no other work for a turn."""
    host = dispatcher.host
    return not (
        host.in_flight.requests
        or host.sender.copies.pending
        or not host.staging.pieces
        or dispatcher.channel is None
        or takes_long(host)
        or dispatcher._stop is not None
        or host.staging.ended  # a turn frees these
        or host.models._leaving
    )


def _target_of(host: WorkerHost, message: Any) -> _Target | None:
    """Where an upload goes; None unless its array can be copied to a piece as it is, and its slot is there.

    An array of the buffer's dims and dtype needs no other check.
    """
    data, values, memory = message.data, host.values, host.state.memory
    if values.arenas is not None or not may_be_late(data) or data.nbytes > PIECE_BYTES:
        return None
    ready: list[Slot] = []
    if type(message) is Upload:
        ref, fresh = message.dst, None
        slot = memory._live.get(ref.slot)
        if slot is None or slot.generation != ref.generation or slot.spec is not ref.spec:
            return None
    else:
        ready = memory.ready(message.spec)
        if not ready:
            return None
        fresh = slot = ready[-1]
        ref = BufferRef(slot=slot.index, generation=slot.generation, spec=slot.spec, device=memory.device)
    spec = slot.spec
    if data.shape != spec.dims or data.dtype != spec.dtype.numpy:
        return None
    if data.base is not None and host.staging.locate(data) is not None:
        return None
    return slot, ref, fresh, ready


def _await_answer(
    dispatcher: HostMailbox, request: WorkerRequest, channel: Channel, looks: Callable[[], object]
) -> None:
    """Wait for the answer, and complete the request; or let the loop read it.

    Whatever does not depend on the answer is done before it is there, while the device works. The socket is
    also read once before: so the code that reads it is in the processor's caches when the answer comes.
    """
    counters, clock = dispatcher.host.state.counters, time.perf_counter
    counted = counters.of_upload(request.message, request.message.data.nbytes)
    if counted is None or len(counters._times.kept[2]) >= MOST_WAITING or may_free_others(dispatcher):
        return
    end_s = clock() + _HERE_S
    try:
        if not channel.fetch():
            while not looks():
                if clock() >= end_s:
                    return
            channel.fetch()
        done = _complete(dispatcher, request, channel, counted)
    except BadFrame as error:  # not each is raised again in a turn
        dispatcher.condemn(str(error))
        done = False
    if not done:
        dispatcher._wants_turn = dispatcher._wants_reading = True


def _complete(
    dispatcher: HostMailbox,
    request: WorkerRequest,
    channel: Channel,
    counted: tuple[int, Tally, tuple[int, int]],
) -> bool:
    """Complete the request, once the socket has been read. Returns False if a turn has to."""
    host, began_s, outbox = dispatcher.host, time.monotonic(), dispatcher._outbox
    table, counters, envelope, (slot,) = host.in_flight, host.state.counters, request.envelope, request.slots
    if outbox or may_free_others(dispatcher) or counters.observer is not None:
        return False
    done = only_answer(request, channel)
    if done is None or not slot.live:  # releasing a freed buffer may free its bytes
        return False
    kind, tally, moved = counted
    value = host.values.result_of_upload(request, done)
    now_ns, reply, number = time.perf_counter_ns(), ((envelope, value, None),), request.number
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
    deliver(dispatcher, envelope, value)
    return True
