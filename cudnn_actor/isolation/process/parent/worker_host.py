"""The worker host: the broker's host in process isolation. It keeps the parent's state of its workers.

It encodes requests and dispatches them to the worker, and holds their buffers until the answers are there. It
announces arenas and staging memory to every worker, including a starting one and the standby. Host data is
copied once on this side, into or out of memory that both sides map:

=====================  ========================================================================
arenas are             values go
=====================  ========================================================================
device memory          through staging memory (`staging`), which the engine reads and writes
host memory            straight into the buffer, or out of it, if no unfinished request uses it;
                       else through staging memory, in their turn
=====================  ========================================================================

There is one caller at a time (`dispatcher.Dispatcher` makes sure of that). The host knows no threads, loops
or processes, and does no I/O itself, so its behaviour is a function of the calls made to it.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from cudnn_actor.actors import Envelope
from cudnn_actor.actors.diverting import LEVELS, Line, write_line
from cudnn_actor.actors.logs import Log
from cudnn_actor.broker import Broker
from cudnn_actor.broker.footprints import footprint
from cudnn_actor.broker.message_cache import CachedMessage, RecentPlan
from cudnn_actor.broker.service_state import Forget, ServiceState
from cudnn_actor.engines.cpu import transfer
from cudnn_actor.engines.cpu.arenas import Arenas, is_whole
from cudnn_actor.isolation.process.parent.checksums import Checksums
from cudnn_actor.isolation.process.parent.in_flight import Claims, InFlightTable, Violation, WorkerRequest
from cudnn_actor.isolation.process.staging import Block, Staging
from cudnn_actor.isolation.process.wire import (
    LONGEST_MESSAGE,
    Answer,
    Answers,
    ArenaMade,
    ArenaRefused,
    CreateArena,
    Done,
    Dropped,
    Dying,
    ForgetGraph,
    ForgetPlans,
    FromParent,
    FromWorker,
    Given,
    InjectFault,
    InternalDone,
    KnowGraph,
    Logged,
    MapArena,
    MapStage,
    ReadStaged,
    Refused,
    Request,
    Requests,
    Staged,
    UnmapArena,
    UnmapStage,
    WriteStaged,
    encode_message,
)
from cudnn_actor.memory import Slot
from cudnn_actor.memory.exhaustion import exhaustion
from cudnn_actor.protocol.graphs.explanation import Explanation
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.messages.codec import decode_reply
from cudnn_actor.protocol.messages.messages import (
    Allocate,
    Compute,
    Download,
    Explain,
    GetStatistics,
    Ping,
    RunGraph,
    Upload,
    Warm,
)
from cudnn_actor.protocol.messages.receipts import Receipt, Statistics
from cudnn_actor.protocol.types.errors import (
    CudnnActorError,
    InvalidRequest,
    MalformedMessage,
    OutcomeUnknown,
    OutOfMemory,
    Words,
)
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["BULKY_BYTES", "HEAVY_BYTES", "WINDOW", "PendingReclaim", "WorkerEnd", "WorkerHost"]

WINDOW = 256
"""Requests that a worker may have at once."""
BULKY_BYTES = 64 << 10
"""A longer message gets its own frame. So a frame has room for four whole windows of the others."""
HEAVY_BYTES = 256 << 10
"""A larger copy is not made on an event loop's thread. A copy of this size takes some 50 us."""

_MOST_GRAPHS = 256
"""Graphs that a worker keeps, as many as plans."""
_WITH_VALUES = frozenset({Upload, Allocate, Download})
_GIVEN: dict[type, type] = {Ping: int, Warm: int, GetStatistics: Statistics, Explain: Explanation}
"""The types of a worker's answers to these messages."""

log = Log("cudnn_actor")


class WorkerEnd(Protocol):
    """A worker as its host sees it."""

    @property
    def claims(self) -> Claims:
        """Says which requests have begun."""

    def send(self, frame: FromParent, descriptors: Sequence[int] = ()) -> None:
        """Send a frame. Never blocks. Frames for a worker that has ended are dropped.

        If a frame must wait, its descriptors are duplicated. Raises `OSError` if that fails; then nothing is
        sent.
        """

    def take_descriptor(self) -> int:
        """The descriptor that came with the frame just received. Raises `BadFrame`, `OSError`."""


class PendingReclaim:
    """Memory that a dying process may still write. It is held until the process has certainly ended."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.blocks: list[Block] = []

    def __bool__(self) -> bool:
        return bool(self.slots or self.blocks)


class WorkerHost:
    """A service in process isolation: its broker, and the state of its workers.

    Parameters
    ----------
    state
        The service's state. Only this object and its broker write its memory table and counters.
    reply
        Called with an envelope, a value and an error: exactly once for each envelope that was started.
    host_arenas
        Whether arenas are host memory, which this process maps too.
    window
        Requests that a worker may have at once.
    """

    has_views = False

    def __init__(
        self,
        state: ServiceState,
        reply: Callable[[Envelope, Any, BaseException | None], None],
        *,
        host_arenas: bool,
        window: int = WINDOW,
    ) -> None:
        self.state = state
        self.broker: Broker[WorkerRequest] = Broker(state, reply, self, WorkerRequest)
        self.in_flight = InFlightTable(window)
        self.staging = Staging(self._announce_segment, self._retire_segment)
        self.arenas: Arenas | None = Arenas() if host_arenas else None
        """The arenas, mapped here too; None where they are device memory."""
        self.worker: WorkerEnd | None = None
        self.starting: WorkerEnd | None = None
        """The worker that serves next: set before it is told of the memory, until it serves."""
        self.standby: WorkerEnd | None = None
        self.stopping = False
        """Whether the worker has been asked to end, so that nothing more is dispatched."""
        self.last_word: Dying | None = None
        """The present worker's `Dying` frame; None if it has sent none."""
        self.checksums: Checksums | None = None
        """Checksums of uploads; None if none are kept."""
        self.keeps_recent = False
        """Whether the plans that have run lately are noted: there is a standby, which is warmed with them."""
        self.recent: dict[str, RecentPlan] = {}
        """These plans, by their graphs' digests."""
        self.on_new_plan: Callable[[], None] = _nothing
        self.arena_asked_s = 0.0
        """When the worker was last asked to make an arena, in `time.monotonic()` seconds."""
        self._unsent: list[Request] = []
        self._graphs: OrderedDict[str, int] = OrderedDict()
        """Identities of the graphs that the worker keeps → their bytes, the least recently used first."""
        self._sending: Requests | None = None
        """The frame that is being sent. It stays set if the sender is interrupted."""

    @property
    def memory(self) -> Any:
        """The service's memory table."""
        return self.state.memory

    # Workers.

    def attach(self, worker: WorkerEnd) -> None:
        """Use a worker, which has every arena and segment mapped, from now on."""
        self.worker = worker
        self._graphs.clear()
        self.starting = None
        self.last_word = None
        self.stopping = False

    def introduce(self, worker: WorkerEnd) -> None:
        """Send a new worker every arena and segment."""
        for arena in self.memory.arenas():
            worker.send(MapArena(arena.number, arena.nbytes), (arena.fd,))
        for number, nbytes, descriptor in self.staging.segments():
            worker.send(MapStage(number, nbytes), (descriptor,))

    def _tell_all(self, frame: FromParent) -> None:
        for worker in (self.worker, self.starting, self.standby):
            if worker is not None:
                worker.send(frame)

    def _have_mapped(self, frame: FromParent, descriptor: int, undo: FromParent) -> None:
        """Have every worker map an arena or segment, except the arena's maker. If this raises `OSError`, none
        has it mapped."""
        told: list[WorkerEnd] = []
        makes = self.worker if isinstance(frame, MapArena) else None
        for worker in (self.worker, self.starting, self.standby):
            if worker is None or worker is makes:
                continue
            try:
                worker.send(frame, (descriptor,))
            except OSError:
                for other in told:
                    other.send(undo)
                raise
            told.append(worker)

    def _announce_segment(self, number: int, nbytes: int, descriptor: int) -> None:
        self._have_mapped(MapStage(number, nbytes), descriptor, UnmapStage(number))

    def _retire_segment(self, number: int) -> None:
        self._tell_all(UnmapStage(number))

    # What the dispatcher asks.

    @property
    def room(self) -> int:
        """How many new messages may be started. Each message that waits for an arena will need a place."""
        if self.worker is None or self.stopping:
            return 0
        return max(0, self.in_flight.room - len(self.broker.awaiting_arena))

    def is_heavy(self, message: Any) -> bool:
        """Whether starting a message copies so much that an event loop leaves it to the monitor's thread."""
        if type(message) not in _WITH_VALUES:
            return False
        match message:
            case Upload(data=data) | Allocate(data=data):
                return getattr(data, "nbytes", 0) > HEAVY_BYTES
            case Download(src=src):
                spec = getattr(src, "spec", None)
                return (
                    self.arenas is not None and isinstance(spec, TensorSpec) and _nbytes(spec) > HEAVY_BYTES
                )
        return False

    # Dispatching.

    def take_up(self, envelope: Envelope, *, injected: bool = False) -> None:
        """Start a message: answer it, or dispatch it. `injected`: its fault has been injected already."""
        work = None
        try:
            work = self.broker.start(envelope, injected=injected)
            if work is not None:
                self._run(work)
        except Exception as error:  # noqa: BLE001 - the answer to this one message
            if work is not None:
                self.broker.end_unreceived(work)
            self.broker.refuse(envelope, error)

    def _run(self, request: WorkerRequest) -> None:
        kind = type(request.message)
        if request.injects:
            request.body = encode_message(InjectFault(tag=kind.__name__.lower()))
            self.hand(request)
        elif kind is Download:
            self._read(request)
        elif kind in _WITH_VALUES:
            self._write(request)
        else:
            self._encode(request)
            self.hand(request)

    def prepared(self, envelope: Envelope, message: Compute) -> WorkerRequest:
        """A request that runs a plan, ready to be dispatched. Raises what is wrong with it."""
        request = self.broker.prepared(envelope, message)
        self._encode(request)
        return request

    def _encode(self, request: WorkerRequest) -> None:
        cached = request.cached
        if cached is not None:
            if cached.body is None:
                if type(request.request) is RunGraph:
                    graph = request.request.graph
                    self._check_length(len(graph.encoded), len(graph.body.operations))
                cached.body = encode_message(request.request)
            request.body = cached.body
            return
        request.body = body = encode_message(request.request)
        if type(request.request) is Explain:
            self._check_length(len(body), len(request.request.graph.operations))
        elif len(body) > LONGEST_MESSAGE:
            raise InvalidRequest(
                field="messages",
                value=Words(f"{len(request.request.messages) + len(request.request.graphs):,} requests"),
                problem=f"take {len(body):,} bytes, and a worker accepts at most {LONGEST_MESSAGE:,}",
                fix="warm fewer requests at a time",
            )

    @staticmethod
    def _check_length(nbytes: int, operations: int) -> None:
        if nbytes > LONGEST_MESSAGE:
            raise InvalidRequest(
                field="graph",
                value=Words(f"{operations:,} operations"),
                problem=f"takes {nbytes:,} bytes, and a worker accepts at most {LONGEST_MESSAGE:,}",
                fix="cut it into several graphs",
            )

    def knows(self, message: Any) -> bool:
        """Whether the worker has the graph of a message, if it is a `RunGraph`: then it counts as used."""
        if type(message) is not RunGraph:
            return True
        identity = message.graph.identity
        if identity not in self._graphs:
            return False
        self._graphs.move_to_end(identity)
        return True

    def _make_known(self, graph: Graph) -> None:
        """Send the worker a graph, and have it forget the least recently used if they are too many."""
        assert self.worker is not None
        self.worker.send(KnowGraph(graph.identity, graph.encoded))
        self._graphs[graph.identity] = graph.footprint
        while len(self._graphs) > 1 and (
            len(self._graphs) > _MOST_GRAPHS or sum(self._graphs.values()) > self.state.cache_limit
        ):
            self._have_forgotten(next(iter(self._graphs)))

    def _have_forgotten(self, identity: str) -> None:
        assert self.worker is not None
        self.flush()  # requests that name it go first
        del self._graphs[identity]
        self.worker.send(ForgetGraph(identity))

    def forget(self, message: Forget) -> None:
        """Have every worker drop graphs and plans."""
        for identity in message.identities.intersection(self._graphs):
            self._have_forgotten(identity)
        for digest in message.plans.intersection(self.recent):
            self._forget_recent(digest)
        # A `Forget` begins only while no request waits to run again, so all are in flight here.
        for request in self.in_flight.requests.values():
            if request.cached is not None and request.cached.lowered.graph.digest() in message.plans:
                request.forgotten = True
        if message.plans:
            self._tell_all(ForgetPlans(sorted(message.plans)))

    def hand(self, request: WorkerRequest) -> None:
        """Dispatch a request to the worker, and hold its buffers until it is complete."""
        assert self.worker is not None
        envelope = request.envelope
        if not envelope.hand_over(request):
            self.broker.expire(envelope)
            self._discharge(request, end_ref=True)
            return
        if self.checksums is not None:
            self.checksums.note_writes(footprint(request.message, self.state.lowered).writes)
        self.memory.hold_all(request.slots)
        self._send(request)

    def _send(self, request: WorkerRequest) -> None:
        assert self.worker is not None
        if not self.knows(request.request):
            self._make_known(request.request.graph)
        place = self.in_flight.hand_over(request, self.worker.claims)
        bulky = len(request.body) > BULKY_BYTES
        if bulky:
            self.flush()
        self._unsent.append(Request(request.number, place, request.body, request.fault))
        if bulky:
            self.flush()

    def hand_again(self) -> None:
        """Dispatch the requests that go first after a crash, as far as they may go now."""
        while (
            self.worker is not None
            and not self.stopping
            and (request := self.in_flight.next_again()) is not None
        ):
            self._hand_again(request)

    def _hand_again(self, request: WorkerRequest) -> None:
        """Dispatch a request that a worker had when it died.

        A request that had begun runs again even if no caller waits any more: its output may be half-written,
        so it must be completed or marked as torn.
        """
        envelope, broker = request.envelope, self.broker
        if not request.suspect and (envelope.withdrawn or request.gone):
            broker.withdraw(envelope)
            self._release(request, end_ref=True)
        elif not request.suspect and envelope.expired:
            broker.expire(envelope)
            self._release(request, end_ref=True)
        elif (error := broker.why_not_again(request)) is not None:
            if request.suspect:
                error = broker.refused_again(request, error)
            self._release(request, end_ref=True)
            broker.fail(envelope, error)
        elif not envelope.hand_over(request):
            broker.expire(envelope)
            self._release(request, end_ref=True)
        else:
            if self.state.faults is not None and request.suspect:  # it runs again, so it counts as a message
                request.fault = self.state.faults.on_message(type(request.message).__name__)
            self._send(request)

    def flush(self) -> None:
        """Send the requests that were dispatched since the last call."""
        if self._unsent and self.worker is not None:
            fresh: list[Request] = []
            frame = Requests(self._unsent)
            # One step.
            self._sending = frame
            self._unsent = fresh
            self.worker.send(frame)
            self._sending = None

    def finish_sending(self) -> None:
        """Complete a `flush` that was interrupted. Must be called before anything else is sent.

        If the frame is the last one that was passed to the worker's `send`, it is not queued again.
        """
        if self._sending is not None and self.worker is not None:
            self.worker.send(self._sending)
            self._sending = None

    # Values.

    def _write(self, request: WorkerRequest) -> None:
        """Write an array to a buffer: in this process, or in the worker through staging memory."""
        (slot,) = request.slots
        data, envelope, broker = request.message.data, request.envelope, self.broker
        if not self._goes_here(request):
            self._write_staged(request, slot, data)
        elif request.ref is not None:
            self._write_here(slot, data)  # no caller has the buffer yet
            if broker.begins(envelope):
                broker.succeed(envelope, request.ref)
            else:
                broker.end_unreceived(request)
        elif broker.begins(envelope):
            self._write_here(slot, data)
            broker.succeed(envelope, self._done_here(envelope, "upload"))

    def _goes_here(self, request: WorkerRequest) -> bool:
        """Whether values are copied straight into the buffer, or out of it, in this process.

        Not if the request has a fault, which is injected in the worker, in the request's turn.
        """
        return self.arenas is not None and not request.slots[0].users and request.fault is None

    def _write_here(self, slot: Slot, data: Any) -> None:
        assert isinstance(data, np.ndarray)  # host memory takes no device arrays
        values = self._bytes_of(slot)
        if self.checksums is not None:
            self.checksums.note_writes([slot.index])
        transfer.write(values, data)
        if self.checksums is not None:
            self.checksums.keep(slot, self.checksums.of(slot, values))

    def _write_staged(self, request: WorkerRequest, slot: Slot, data: Any) -> None:
        spec = slot.spec
        transfer.check_values(spec.dims, spec.dtype.numpy, data)
        block = self.staging.take(_nbytes(spec))
        values = self.staging.array(block, spec.dims, spec.dtype.numpy)
        try:
            transfer.store(values, data)
        except BaseException:
            self.staging.give_back(block)
            raise
        ref = request.message.dst if request.ref is None else request.ref
        request.body = encode_message(WriteStaged(dst=ref, values=Staged(block.segment, block.offset)))
        request.block = block
        self.hand(request)
        if self.checksums is not None:
            request.sum = self.checksums.of(slot, values)

    def _read(self, request: WorkerRequest) -> None:
        (slot,) = request.slots
        envelope = request.envelope
        if self._goes_here(request):
            if self.broker.begins(envelope):
                self.broker.succeed(envelope, transfer.read(self._bytes_of(slot)))
            return
        request.block = block = self.staging.take(_nbytes(slot.spec))
        values = Staged(block.segment, block.offset)
        request.body = encode_message(ReadStaged(src=request.message.src, values=values))
        self.hand(request)

    def _bytes_of(self, slot: Slot) -> np.ndarray:
        assert self.arenas is not None
        return self.arenas.bind(slot.arena.number, slot.offset, slot.spec)

    def _done_here(self, envelope: Envelope, plan: str) -> Receipt:
        run_us = (time.perf_counter_ns() - envelope.started_ns) / 1e3
        return self.receipt(envelope, Done(envelope.number, -1, plan, envelope.started_ns, run_us))

    # Arenas.

    def waits_for(self, number: int) -> bool:
        """See `broker.Host`."""
        return self.in_flight.waits_for(number)

    def create_arena(self, number: int, nbytes: int) -> None:
        """See `broker.Host`. Asks the worker."""
        assert self.worker is not None
        self.arena_asked_s = time.monotonic()
        self.worker.send(CreateArena(number, nbytes))

    def drop_arena(self, number: int) -> None:
        """See `broker.Host`."""
        self._tell_all(UnmapArena(number))
        if self.arenas is not None:
            self.arenas.unmap(number)

    def take_arena(self, frame: ArenaMade | ArenaRefused) -> None:
        """Handle the worker's answer to `CreateArena`, and start the allocations that waited for it."""
        wanted = self.broker.arena
        if wanted is None or frame.number != wanted[0]:
            raise Violation(f"it named arena {frame.number}, which it was not asked to make")
        if isinstance(frame, ArenaRefused):
            self.broker.arena_refused(self._refusal(frame))
        else:
            self._own_arena(*wanted)
        waiting = self.broker.take_awaiting()
        for envelope in waiting:
            self.take_up(envelope, injected=True)
        if waiting:
            self.broker.settle_drains()

    def _own_arena(self, number: int, nbytes: int) -> None:
        """Take over an arena. If this process has no room for it, the first waiting allocation fails."""
        assert self.worker is not None
        try:
            descriptor = self.worker.take_descriptor()
        except OSError as error:
            self._refuse_arena(number, nbytes, error)
            return
        try:
            self._map_arena(number, nbytes, descriptor)
        except OSError as error:
            os.close(descriptor)
            self._refuse_arena(number, nbytes, error)
        except BaseException:
            os.close(descriptor)
            raise
        else:
            self.broker.arena_made(descriptor)

    def _map_arena(self, number: int, nbytes: int, descriptor: int) -> None:
        """Map a worker's arena in this process, if it is host memory, and in the other workers.

        Raises `OSError`, `Violation`. Then it is mapped in none of these.
        """
        if self.arenas is not None:
            if not is_whole(descriptor, nbytes):
                raise Violation(f"its arena {number} is not sealed memory of {nbytes:,} bytes")
            try:
                self.arenas.map(number, descriptor, nbytes)
            except ValueError as error:
                raise Violation(f"its arena {number} cannot be mapped: {error}") from error
        try:
            self._have_mapped(MapArena(number, nbytes), descriptor, UnmapArena(number))
        except OSError:
            if self.arenas is not None:
                self.arenas.unmap(number)
            raise

    def _refuse_arena(self, number: int, nbytes: int, error: OSError) -> None:
        """Give up an arena that the worker has made, because this process has no room for it.

        Raises `Violation` if the error is not a lack of room, because then the worker is to blame.
        """
        refusal = exhaustion(error, requested=nbytes, in_use=self.memory.live_bytes)
        if refusal is None:
            raise Violation(f"its arena {number} cannot be mapped: {error}") from error
        assert self.worker is not None
        self.worker.send(UnmapArena(number))
        self.broker.arena_refused(refusal)

    @staticmethod
    def _refusal(frame: ArenaRefused) -> CudnnActorError:
        try:
            error = frame.error.to_error()
        except MalformedMessage as odd:
            raise Violation(
                f"its answer about arena {frame.number} is not an error of this package: {odd}"
            ) from odd
        return error

    # Answers.

    def receive(self, frames: Sequence[FromWorker]) -> None:
        """Handle frames from the worker. Raises `Violation`, `BadFrame`: then the worker must be replaced."""
        for frame in frames:
            match frame:
                case Answers():
                    for answer in frame.answers:
                        self.complete(answer)
                    self.note_completed()
                case ArenaMade() | ArenaRefused():
                    self.take_arena(frame)
                case InternalDone():
                    pass  # for a request that it got as a standby
                case Logged():
                    self.write_log(frame)
                case Dying():
                    self.last_word = frame
                case other:
                    raise Violation(f"it sent {type(other).__name__}, which was not asked for")

    def note_completed(self) -> None:
        """Note that a frame of answers has been handled."""
        self.in_flight.note_progress()
        if self.broker.has_drains:
            self.broker.settle_drains()

    def complete(self, answer: Answer) -> None:
        """Handle one answer. Raises `Violation`."""
        # Check the answer first: if it does not fit, the request is still in flight and judged with the rest.
        request = self.in_flight.find(answer.number, answer.place)
        cached = request.cached
        if type(answer) is Done:
            self.in_flight.note_finished(request)
        if type(answer) is Done and cached is not None:
            self.in_flight.complete(request)
            self.state.memory.release_all(request.slots)
            if self.keeps_recent:
                self.note_use(request, cached)
            self.broker.succeed(request.envelope, self.receipt(request.envelope, answer))
            return
        value = self._value(request, answer)
        self.in_flight.complete(request)
        if request.suspect and type(answer) is Refused:
            value = self.broker.refused_again(request, value)
        self.memory.release_all(request.slots)
        self._complete_other(request, answer, value)

    def _value(self, request: WorkerRequest, answer: Answer) -> Any:
        """The decoded value or error of an answer. Raises `Violation` for an answer that does not fit."""
        match answer:
            case Refused():
                return self._error(answer)
            case Given() if not request.injects:
                return self._given(answer, request.envelope)
            case Done() if request.injects or type(request.message) in _GIVEN:
                asked = "InjectFault" if request.injects else type(request.message).__name__
                raise Violation(f"it answered {asked} with a receipt")
            case Dropped() if not request.unwanted:
                raise Violation(f"it dropped request {answer.number}, which was not withdrawn")
        return None

    def receipt(self, envelope: Envelope, done: Done) -> Receipt:
        """The receipt for the caller of a finished request."""
        return Receipt(
            request_id=envelope.number,
            generation=self.state.generation,
            plan=done.plan,
            queue_us=(done.started_ns - envelope.admitted_ns) / 1e3,
            run_us=done.run_us,
        )

    def _complete_other(self, request: WorkerRequest, answer: Answer, value: Any) -> None:
        envelope, broker = request.envelope, self.broker
        match answer:
            case Dropped():
                self._discharge(request, end_ref=True)
                if envelope.withdrawn:
                    broker.withdraw(envelope)
                else:
                    broker.expire(envelope)
            case Refused():
                self._discharge(request, end_ref=True)
                broker.fail(envelope, value)
            case _ if request.injects:
                envelope.hand_back(begun=True)
                self.take_up(envelope, injected=True)
            case Done():
                try:
                    value = self._finished(request, answer)
                except MemoryError as error:  # this process has no room for the result
                    broker.refuse(envelope, error)
                else:
                    broker.succeed(envelope, value)
            case Given():
                self._discharge(request, end_ref=False)
                broker.succeed(envelope, value)

    def _finished(self, request: WorkerRequest, done: Done) -> Any:
        if self.checksums is not None and request.sum is not None:
            self.checksums.keep(request.slots[0], request.sum)
        if request.ref is not None:
            self._discharge(request, end_ref=False)
            return request.ref
        if type(request.message) is Download and request.block is not None:
            spec = request.message.src.spec
            block, request.block = request.block, None
            return self.staging.result(block, spec.dims, spec.dtype.numpy)
        self._discharge(request, end_ref=False)
        return self.receipt(request.envelope, done)

    def _given(self, answer: Given, envelope: Envelope) -> Any:
        wanted = _GIVEN.get(type(envelope.message))
        try:
            value = decode_reply(answer.body)
        except MalformedMessage as error:
            raise Violation(f"its answer to request {answer.number} does not decode: {error}") from error
        if wanted is None or type(value) is not wanted:
            asked = type(envelope.message).__name__
            raise Violation(f"it answered {asked} with {type(value).__name__}")
        # Of the service's counters, the worker keeps those of its caches; this process counts the rest.
        return self.state.statistics(value.plans, value.graphs) if isinstance(value, Statistics) else value

    def _error(self, answer: Refused) -> CudnnActorError:
        try:
            error = answer.error.to_error()
        except MalformedMessage as odd:
            raise Violation(
                f"its answer to request {answer.number} is not an error of this package: {odd}"
            ) from odd
        if isinstance(error, OutOfMemory):  # the worker does not know what the buffers take
            return error.beside(in_use=self.memory.live_bytes, arena_bytes=self.memory.arena_bytes)
        return error

    def _discharge(self, request: WorkerRequest, *, end_ref: bool) -> None:
        """Give back a request's block. `end_ref`: also free the buffer that no caller will receive."""
        if request.block is not None:
            self.staging.give_back(request.block)
            request.block = None
        if end_ref:
            self.broker.end_unreceived(request)

    def _release(self, request: WorkerRequest, *, end_ref: bool) -> None:
        """The same for a request that is not in flight. Also releases the buffers that it still holds."""
        self.memory.release_all(request.slots)
        self._discharge(request, end_ref=end_ref)

    def note_use(self, request: WorkerRequest, cached: CachedMessage) -> None:
        """Note that a request has run a plan, for the warming of other workers. May be interrupted and
        repeated."""
        plan = cached.recent
        if plan is not None and plan.kept:
            plan.last = request.number
            return
        if request.forgotten:
            return
        digest = cached.lowered.graph.digest()
        plan = self.recent.get(digest)
        new = plan is None
        if plan is None:
            plan = RecentPlan(cached.message, cached.nbytes)
        plan.last = request.number
        self.recent[digest] = cached.recent = plan
        if new:
            self._drop_old()
            self.on_new_plan()

    def _drop_old(self) -> None:
        """Drop the recent plans that were used the longest ago, until the others are within the bounds."""
        oldest = sorted(self.recent, key=lambda digest: self.recent[digest].last)[:-1]
        nbytes = sum(plan.nbytes for plan in self.recent.values())
        for digest in oldest:
            if len(self.recent) <= WINDOW and nbytes <= self.state.cache_limit:
                return
            nbytes -= self.recent[digest].nbytes
            self._forget_recent(digest)

    def _forget_recent(self, digest: str) -> None:
        self.recent.pop(digest).kept = False

    def write_log(self, line: Logged) -> None:
        """Write a worker's log line, in the context of the request that was running. Raises `Violation`."""
        if "event" in line.fields or "self" in line.fields:
            raise Violation("it sent a log line with a reserved field name (event or self)")
        request = self.in_flight.requests.get(line.number)
        context = None if request is None else request.envelope.context
        said = Line(line.logger, LEVELS[line.level], line.event, line.fields)
        self.broker.write_in(context, lambda: write_line(said))

    # The end of a worker.

    def crash(self, cause: str, *, may_still_write: bool) -> PendingReclaim:
        """Judge every request that the worker had. Those that may run again are dispatched first.

        Returns the memory of lost requests, to which the process may still write. Pass it to `reclaim` once
        the process has certainly ended.

        Parameters
        ----------
        cause
            What happened, as text for people.
        may_still_write
            Whether the process could not be ended.
        """
        begun, others = self._take_back()
        again, lost = self.broker.crashed(begun, cause, may_still_write=may_still_write)
        if may_still_write:
            for request in [each for each in again if each.block is not None]:
                why = "its process may still use its place in staging memory"
                again.remove(request)
                lost.append(request)
                self.broker.lose(request, OutcomeUnknown(request_id=request.number, cause=cause, why=why))
        pending = PendingReclaim()
        for request in lost:
            pending.slots.extend(request.slots)
            if request.block is not None:
                pending.blocks.append(request.block)
        self.in_flight.first([*again, *others])
        # Drains, too: an allocation that waits for an arena must be answered before a drain sent after it.
        self._restore(self.broker.take_waiting())
        return pending

    def _take_back(self) -> tuple[list[WorkerRequest], list[WorkerRequest]]:
        """Take back all requests in flight: those that the worker had begun, and the others."""
        unsaid = set() if self.worker is None else self._complete_finished(self.worker.claims)
        worker, self.worker = self.worker, None
        self.last_word = None  # it must not be attributed to the next worker
        self._unsent.clear()
        self._sending = None
        begun: list[WorkerRequest] = []
        others: list[WorkerRequest] = []
        for request in self.in_flight.take_back():
            # A withdrawn request that the worker skipped is marked as begun, too. `gone` excludes it here.
            began = (
                worker is not None
                and not request.gone
                and worker.claims.has_begun(request.place, request.number)
            )
            request.envelope.hand_back(begun=began)
            # These cannot have killed the worker: they had finished, or are control messages. They run again.
            harmless = request.number in unsaid or request.message.control
            (begun if began and not harmless else others).append(request)
        return begun, others

    def _complete_finished(self, claims: Claims) -> set[int]:
        """Answer requests that the worker had finished and not answered, so that they do not run again.

        This is needed for two more reasons. A later request of the same worker may have overwritten their
        input, so that they could not run again. And they did not kill the worker. Returns the numbers of
        finished requests whose answers are lost with the worker (a `Warm`'s, for example): these run again.
        """
        unsaid = set()
        for request in tuple(self.in_flight.requests.values()):
            found = claims.finished(request.place, request.number)
            if found is None or request.gone:
                continue
            if not found.started_ns:
                unsaid.add(request.number)
                continue
            try:
                self.complete(Done(request.number, request.place, *found))
            except Violation as lie:  # the page is wrong: the request is judged with those that have begun
                log.warning("worker.broke_the_protocol", why=str(lie))
        return unsaid

    def reclaim(self, pending: PendingReclaim) -> None:
        """Release the memory of a process that has certainly ended."""
        self.memory.release_all(pending.slots)
        for block in pending.blocks:
            self.staging.give_back(block)
        pending.slots.clear()
        pending.blocks.clear()

    def retire(self) -> None:
        """After `crash`, give all unfinished requests back to the mailbox, because no worker may follow.

        If a request that had begun does not run again, its `ServiceStopped` says that it had begun.
        """
        left = self.in_flight.give_up()
        for request in left:
            self._release(request, end_ref=True)
        self._restore([*(request.envelope for request in left), *self.broker.take_waiting()])

    def _restore(self, envelopes: Sequence[Envelope]) -> None:
        self.state.mailbox.restore(sorted(envelopes, key=lambda envelope: envelope.number))

    def close(self) -> None:
        """Free the staging memory, and unmap the arenas. Idempotent."""
        self.staging.close()
        self.recent.clear()
        if self.arenas is not None:
            self.arenas.clear()


def _nbytes(spec: TensorSpec) -> int:
    """Bytes of the values, without gaps between them."""
    return spec.size * spec.dtype.itemsize


def _nothing() -> None:
    pass
