"""The fast path: dispatches a request that runs a plan, or a copy, or completes it, in one step each.

Nearly all requests take it. All others take the slow path, by the host's own methods: messages that free, or
allocate where no slot is ready (`memory.ready_slots`), large copies, requests that fail or wait, and all
requests after a crash or with a fault plan. Both paths have the same effect, so this module uses the
internals of the mailbox, the sender, the in-flight table, the memory table and the counters.

The main thread takes only this path, because a signal handler may raise an exception there
(`actors.interrupts`). Everything before a step changes only caches, and the next turn repeats it. After a
step, a request has left the mailbox and is in flight, or it is complete and its reply is in the outbox.
Another thread takes the slow path.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, MutableSequence, Sequence
from typing import Any

from cudnn_actor.actors import Envelope, Mailbox
from cudnn_actor.actors.interrupts import run_through
from cudnn_actor.broker.answer_times import MOST_WAITING
from cudnn_actor.broker.request_counts import NO_TALLY, NONE_MOVED
from cudnn_actor.isolation.process.parent.in_flight import (
    InFlightTable,
    RunStaging,
    WorkerRequest,
    claims_lock,
)
from cudnn_actor.isolation.process.parent.model_runs import Loan
from cudnn_actor.isolation.process.parent.sender import BULKY_BYTES, Sender
from cudnn_actor.isolation.process.parent.values import WITH_VALUES
from cudnn_actor.isolation.process.parent.worker_host import WorkerHost
from cudnn_actor.isolation.process.wire import Answer, Answers, Done, Given, Nearing, Request, encode_message
from cudnn_actor.isolation.staging import Block
from cudnn_actor.memory import Slot
from cudnn_actor.processes.channel import Channel
from cudnn_actor.protocol.errors import CudnnActorError, MalformedMessage
from cudnn_actor.protocol.messages.codec import decode_reply
from cudnn_actor.protocol.messages.messages import COMPUTE, Allocate, Download, Ping, RunModel, Upload

__all__ = ["FEW", "FILL", "Reply", "complete", "counting", "hand_over", "pass_over", "takes_long"]

Reply = tuple[Envelope, Any, BaseException | None]

_NOBODY = Slot(-1, 0)
"""Pads a request's slots to the fixed number that a step counts, because a step contains no loop."""
_NOBODY.live = True
_NO_LOAN = Loan([])
"""The loan of a request that lends nothing, because a step has no branches."""
_Memory = tuple[list[Any], MutableSequence[Block], tuple[RunStaging, ...], tuple[RunStaging, ...]]
_NO_MEMORY: _Memory = ([], [], (), ())
"""The result of `_memory_of` for a request without staging memory. The lists stay empty."""
FEW = 6
"""How many slots a step names."""
FILL = tuple((_NOBODY,) * (FEW - n) for n in range(FEW + 1))


def hand_over(mailbox: Mailbox, host: WorkerHost) -> bool:
    """Dispatch the waiting requests, in order, while the window has room. With the host held.

    Returns
    -------
    bool
        Whether the next message, if there is one, must take the slow path.
    """
    worker, table, sender = host.workers.serving, host.in_flight, host.sender
    if worker is None or takes_long(host):
        return True
    claims, in_flight, places, unsent = worker.claims, table.requests, table._places, sender._unsent
    late, memory, now = sender.copies.pending, host.state.memory, table.clock()
    while places:
        queue = mailbox._control or mailbox._ordinary
        if not queue:
            return False
        envelope = queue[0]
        request = _prepare(host, sender, envelope)
        if request is None:
            return True
        spare = [None] if request.staged is None and not request.blocks else _spare_of(host, request)
        taken, slots = -1 if request.blocks else 0, request.slots
        fresh, ready = (None, []) if request.ref is None else (slots[0], memory.ready(slots[0].spec))
        many = counting(slots, 1) if len(slots) > FEW else None
        a, b, c, d, e, f = (*slots, *FILL[len(slots)]) if many is None else FILL[0]
        number, place, claim = request.number, places[-1], envelope.claim
        entry = [Request(number, place, request.body)]
        request.sent_s = now
        if not in_flight:
            table.note_first(request)
        with mailbox._lock:
            queue = mailbox._control or mailbox._ordinary
            if not queue or queue[0] is not envelope:
                continue  # a control message has overtaken it; or the mailbox was closed, and has answered it
            if not claim:
                return True  # its deadline has passed, and its caller has been told
            # One step.
            del claim[0]
            request.place = place
            request.claims = claims
            envelope.elsewhere = request
            a.users += 1
            b.users += 1
            c.users += 1
            d.users += 1
            e.users += 1
            f.users += 1
            in_flight[number] = request
            table.handed += 1
            del places[-1]
            unsent += entry
            late += request.copies
            del spare[taken]
            del queue[0]
            if fresh is not None:
                memory._live[fresh.index] = fresh
                fresh.live = True
                memory.live_bytes += fresh.nbytes
                del ready[-1]
            if many is not None:
                run_through(many)
    return False


def counting(slots: Sequence[Slot], change: int) -> Iterator[None]:
    """An iterator that changes the `users` of many slots, for a request with more slots than a step names.

    The step's last line exhausts it in a single call. The call stays in C and creates no objects, so that
    nothing comes between two slots.
    """
    users: dict[Slot, int] = {}
    for slot in slots:
        users[slot] = users.get(slot, slot.users) + change
    return map(setattr, tuple(users), itertools.repeat("users"), tuple(users.values()))


def takes_long(host: WorkerHost) -> bool:
    """Whether no request can take the fast path at the moment."""
    table, state = host.in_flight, host.state
    return bool(
        table.again
        or table._alone
        or host.workers.stopping
        or host.broker.arenas.waiting
        or host.broker.held.messages
        or state.quarantined
        or state.faults is not None
        or host.checksums is not None
    )


def _spare_of(host: WorkerHost, request: WorkerRequest) -> list[Any]:
    """The list from which a request takes its staging memory. A copy takes the last piece of its list, a
    model's run the first one of its own, because other threads may append to that. A request without staging
    memory gets an unused list."""
    run = request.run
    if request.blocks:
        return host.staging.pieces
    if run is None or run.deployed is None or request.staged is None:
        return [None]
    return host.models.pieces_of(run.deployed).spare


def _prepare(host: WorkerHost, sender: Sender, envelope: Envelope) -> WorkerRequest | None:
    """A request ready to be dispatched; None for one that needs the slow path. Changes only caches."""
    message, future = envelope.message, envelope.future
    if (
        envelope.started_ns
        or (future is not None and future.done())
        or (envelope.deadline is not None and envelope.expired)
    ):
        return None
    request: WorkerRequest | None
    try:
        if type(message) is RunModel:
            light = not message.arrays or not host.values.is_heavy(message)
            request = host.models.prepare(envelope) if light else None
        elif type(message) in COMPUTE:
            request = sender.prepare(envelope, message) if sender.graphs.knows(message) else None
        elif type(message) is Ping:
            request = WorkerRequest(envelope, envelope.number, message)
            request.body = encode_message(message)
        elif type(message) is Upload or type(message) is Allocate:
            request = host.values.prepared_upload(envelope)
        elif type(message) is Download:
            request = host.values.prepared_download(envelope)
        else:
            return None
    except (CudnnActorError, TypeError, MemoryError):  # the slow path raises and answers it
        return None
    return None if request is None or len(request.body) > BULKY_BYTES else request


def complete(channel: Channel, host: WorkerHost, outbox: deque[Reply]) -> bool:
    """Complete the requests whose answers have come, in order. With the host held.

    Returns
    -------
    bool
        Whether the next answer, or the next frame, must take the slow path.
    """
    table, frames, counters, copies = host.in_flight, channel.frames, host.state.counters, host.sender.copies
    in_flight, places, times = table.requests, table._places, counters._times
    while frames:
        if type(frames[0]) is not Answers:
            return True
        answers, finished, now_ns = frames[0].answers, None, time.perf_counter_ns()
        while channel.taken < len(answers):
            answer = answers[channel.taken]
            request = in_flight.get(answer.number)
            if request is None or request.place != answer.place:
                return True
            value, loan = _value(host, request, answer)
            if value is None or (request.copies and copies.has_any(request.copies)):
                return True  # perhaps it has failed before its copies were made
            slots, place, blocks = request.slots, [request.place], request.blocks
            many = counting(slots, -1) if len(slots) > FEW else None
            a, b, c, d, e, f = (*slots, *FILL[len(slots)]) if many is None else FILL[0]
            if not (a.live and b.live and c.live and d.live and e.live and f.live) or (
                many is not None and not all(slot.live for slot in slots)
            ):
                return True  # a freed buffer: releasing it may free its bytes
            finished = request if type(answer) is Done else finished
            spare, home, staged, lent = (
                _NO_MEMORY if request.staged is None and not blocks else _memory_of(host, request, loan)
            )
            number, envelope, reply = answer.number, request.envelope, ((request.envelope, value, None),)
            kind, waiting = counters._plain.get(type(envelope.message)), times.kept[2]
            started_ns, run_us = (
                (answer.started_ns, answer.run_us) if type(answer) is Done else (request.sent_ns, -1.0)
            )
            # What `measure` returns for nearly all answers, without a call of it.
            waiting, stamps, tally, moved = (
                counters.measure(envelope, value, started_ns, now_ns, run_us)
                if kind is None or len(waiting) >= MOST_WAITING
                else (waiting, (kind, envelope.admitted_ns, started_ns, now_ns, run_us), NO_TALLY, NONE_MOVED)
            )
            with claims_lock:
                # One step.
                del in_flight[number]
                request.claims = None
                envelope.elsewhere = None
                places += place
                spare += staged
                loan.pieces = lent
                request.staged = None
                home += blocks
                table._alone = False
                a.users -= 1
                b.users -= 1
                c.users -= 1
                d.users -= 1
                e.users -= 1
                f.users -= 1
                counters.finished += 1
                waiting += stamps
                tally.bytes = moved
                outbox += reply
                channel.taken += 1
                if many is not None:
                    run_through(many)
        if finished is not None:
            table.note_finished(finished)
        table.note_progress()
        # One step.
        channel.taken = 0
        del frames[0]
    return False


def pass_over(table: InFlightTable, channel: Channel) -> bool:
    """Handle the first frame if it only says that a request will end soon, or is the answer of
    `InFlightTable.told`, which comes in a frame of its own. Returns whether it did."""
    frame = channel.frames[0]
    if type(frame) is Nearing:
        # One step.
        table.nearing = True
        del channel.frames[0]
        return True
    if not table.told or type(frame) is not Answers or channel.taken or len(frame.answers) != 1:
        return False
    answer = frame.answers[0]
    if type(answer) is not Done or answer.number != table.told:
        return False
    # One step.
    table.told = 0
    del channel.frames[0]
    return True


def _memory_of(host: WorkerHost, request: WorkerRequest, loan: Loan) -> _Memory:
    """The two lists to which a request's staging memory goes in its last step, and the pieces for the next
    run and for the loan."""
    staged = () if request.staged is None else (request.staged,)
    spare, home = _spare_of(host, request), host.staging.home_of(request.blocks)
    return (spare, home, staged, ()) if loan is _NO_LOAN else (spare, home, (), staged)


def _value(host: WorkerHost, request: WorkerRequest, answer: Answer) -> tuple[Any, Loan]:
    """The reply for an answer, None if it needs the slow path; and the loan of the staging memory in which
    the reply lies."""
    cached = request.cached
    if type(answer) is Done and request.run is not None:
        return _results(host, request)
    if type(answer) is Done and cached is not None:
        if host.recent.kept:
            host.recent.note(request, cached)
        receipt = request.receipt(host.state.generation, answer.plan, answer.started_ns, answer.run_us)
        return receipt, _NO_LOAN
    if type(answer) is Done and type(request.message) in WITH_VALUES and not request.injects:
        return host.values.result_of_copy(request, answer), _NO_LOAN
    if type(answer) is Given and type(request.message) is Ping and not request.injects:
        try:
            value = decode_reply(answer.body)
        except MalformedMessage:
            return None, _NO_LOAN
        return (value if type(value) is int else None), _NO_LOAN
    return None, _NO_LOAN


def _results(host: WorkerHost, request: WorkerRequest) -> tuple[Any, Loan]:
    """The outputs of a run. None if many bytes have to be copied, or if the run's staging memory is not kept
    or its graph has ended, which the slow path then frees. Also None if there is no memory for the outputs:
    the slow path then refuses only this run, while the fast path would try it for ever."""
    run, models = request.run, host.models
    assert run is not None
    assert run.deployed is not None
    if request.staged is None:
        if run.deployed.ended:
            return None, _NO_LOAN
    elif models.is_heavy(request) or not models.has_room(run.deployed):
        return None, _NO_LOAN
    if host.recent.kept:
        host.recent.note(request, run.cached)
    try:
        if request.staged is None:
            return run.deployed.finish({}), _NO_LOAN
        outputs, loan = models.results(request)
    except MemoryError:
        return None, _NO_LOAN
    return outputs, _NO_LOAN if loan is None else loan
