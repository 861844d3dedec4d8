"""What a service does with each message while its actor is in another process: the bookkeeping, and no I/O.

The desk is what owns a service's memory: the table of slots, the arenas' descriptors, the host memory for
transfers. It answers what needs no device (taking and freeing buffers, waiting for what was sent before) and
hands the rest to the worker, with the buffers held until the answer is there. So

- a `Free` takes effect in its turn: what was sent before it holds the bytes, and runs on them, also when it
  runs again after a crash; what is sent after it is refused here;
- when a worker dies, everything that must not be lost with it lies here: which requests it had, which of
  them had begun, which bytes they use.

Whoever calls the desk has it to himself (`dispatcher.Dispatcher` sees to that). It knows no threads, loops
or processes, so its behaviour is a function of the calls made to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any, Protocol

from cudnn_actor.actors import ActorStopped, Envelope
from cudnn_actor.actors.diverting import LEVELS, Line, write_line
from cudnn_actor.actors.logs import Log, speaking_for
from cudnn_actor.engines.cpu.arenas import Arenas
from cudnn_actor.exhaustion import exhaustion
from cudnn_actor.footprints import footprint, named_buffers
from cudnn_actor.protocol.codec import decode_reply
from cudnn_actor.protocol.errors import (
    CudnnActorError,
    DeadlineExceeded,
    ExecutionFailed,
    MalformedMessage,
    OutcomeUnknown,
    QuarantinedRequest,
    StaleBufferError,
    StaleReason,
)
from cudnn_actor.protocol.messages import COMPUTE, Compute, Download, GetStatistics, Ping, Warm
from cudnn_actor.protocol.receipts import Receipt, Statistics
from cudnn_actor.state import Seen, ServiceState
from cudnn_actor.supervision import FaultRule
from cudnn_actor.workers.checksums import Checksums
from cudnn_actor.workers.ledger import Claims, Flight, Ledger, Violation
from cudnn_actor.workers.staging import Staging
from cudnn_actor.workers.wire import (
    Answer,
    Answers,
    ArenaMade,
    ArenaRefused,
    Done,
    Dropped,
    Dying,
    FromParent,
    FromWorker,
    Given,
    InternalDone,
    Logged,
    MapArena,
    MapStage,
    Refused,
    Request,
    Requests,
    UnmapStage,
)

__all__ = ["BULKY_BYTES", "WINDOW", "Desk", "WorkerEnd"]

WINDOW = 256
"""Requests that a worker may have at once."""
BULKY_BYTES = 64 << 10
"""A longer message goes in a frame of its own: so whole windows of the others fit in one, four times over."""

log = Log("cudnn_actor")


class WorkerEnd(Protocol):
    """A worker as the desk sees it."""

    @property
    def claims(self) -> Claims:
        """Who says which requests have begun."""

    def send(self, frame: FromParent, descriptors: Sequence[int] = ()) -> None:
        """Tell it something. Never blocks; what it will never read is dropped.

        Raises `OSError` when there is no descriptor to be had for one that has to wait: it is told nothing.
        """

    def take_descriptor(self) -> int:
        """The descriptor that came with the frame just received. Raises `BadFrame`, `OSError`."""


class Desk:
    """The bookkeeping of one service in process isolation.

    Parameters
    ----------
    state
        The service's. Its memory and counters are written here alone.
    reply
        Called with an envelope, a value and an error: exactly once for each envelope that was taken up.
    host_arenas
        Whether arenas are host memory, which this process maps too.
    window
        Requests that a worker may have at once.
    """

    def __init__(
        self,
        state: ServiceState,
        reply: Callable[[Envelope, Any, BaseException | None], None],
        *,
        host_arenas: bool,
        window: int = WINDOW,
    ) -> None:
        self.state = state
        self.ledger = Ledger(window)
        self.staging = Staging(self._announce_segment, self._retire_segment)
        self.host: Arenas | None = Arenas() if host_arenas else None
        """The arenas, mapped here too; None where they are device memory."""
        self.worker: WorkerEnd | None = None
        self.starting: WorkerEnd | None = None
        """The one that is to serve next, from when it has been told what there is until it serves."""
        self.standby: WorkerEnd | None = None
        self.stopping = False
        """Whether nothing more is to be handed over: the worker has been asked to end."""
        self.last_word: Dying | None = None
        """What the present worker has said of its own end."""
        self.checksums: Checksums | None = None
        """Of what was uploaded; None where they are not wanted."""
        self.recent: dict[str, Compute] = {}
        """A request of each plan that has run lately, by its graph's digest; the latest last."""
        self.on_new_plan: Callable[[], None] = _nothing
        self.rule: FaultRule | None = None
        """What is to befall the message that is being taken up."""
        self._reply = reply
        self._requests: list[Request] = []
        self._sending: Requests | None = None
        """What is being sent; also of a sender who was interrupted in it."""
        self._drains: deque[Envelope] = deque()

    @property
    def memory(self) -> Any:
        """The service's table."""
        return self.state.memory

    # Workers.

    def attach(self, worker: WorkerEnd) -> None:
        """Serve with a worker that has every arena and segment mapped."""
        self.worker = worker
        self.starting = None
        self.last_word = None
        self.stopping = False

    def introduce(self, worker: WorkerEnd) -> None:
        """Give a worker that has just started every arena and segment there is."""
        for arena in self.memory.arenas():
            worker.send(MapArena(arena.number, arena.nbytes), (arena.fd,))
        for number, nbytes, descriptor in self.staging.segments():
            worker.send(MapStage(number, nbytes), (descriptor,))

    def _tell_all(self, frame: FromParent) -> None:
        for worker in (self.worker, self.starting, self.standby):
            if worker is not None:
                worker.send(frame)

    def _have_mapped(self, frame: FromParent, descriptor: int, undo: FromParent) -> None:
        """Have every worker map something, but for its maker; or none, where it raises `OSError`."""
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

    @property
    def has_foreign(self) -> bool:
        """Whether an answer may be waited for that no event loop fetches. Any thread.

        A pykka caller's is, and may be what only comes of other answers: the end of a `Drain`.
        """
        return self.ledger.foreign > 0 or bool(self._drains)

    @property
    def has_drains_due(self) -> bool:
        """Whether there is a `Drain` for which nothing is awaited any more."""
        return bool(self._drains) and not self.is_awaited(self._drains[0].number)

    # Handing over.

    @property
    def room(self) -> int:
        """How many new messages may be taken up."""
        return 0 if self.worker is None or self.stopping else self.ledger.room

    def hand(self, flight: Flight) -> None:
        """Have the worker run a request, and hold its buffers until it lands."""
        assert self.worker is not None
        envelope = flight.envelope
        if not envelope.hand_over(flight):
            self.expire(envelope)
            self._discharge(flight, end_ref=True)
            return
        if self.checksums is not None:
            self.checksums.note_writes(footprint(flight.message, self.state.lowered).writes)
        flight.fault = self.rule
        self.memory.hold_all(flight.slots)
        self._fly(flight)

    def _fly(self, flight: Flight) -> None:
        assert self.worker is not None
        place = self.ledger.hand_over(flight, self.worker.claims)
        bulky = len(flight.body) > BULKY_BYTES
        if bulky:
            self.flush()
        self._requests.append(Request(flight.number, place, flight.body, flight.fault))
        if bulky:
            self.flush()

    def hand_again(self) -> None:
        """Hand over what goes first after a crash, as far as it may go now."""
        while (
            self.worker is not None and not self.stopping and (flight := self.ledger.next_again()) is not None
        ):
            self._hand_again(flight)

    def _hand_again(self, flight: Flight) -> None:
        """Hand over one that a worker had when it died.

        One that had begun runs again whoever waits for it: what it was writing is half-written, and is made
        whole, or torn.
        """
        envelope = flight.envelope
        if not flight.suspect and (envelope.withdrawn or flight.gone):
            self.withdraw(envelope)
            self._release(flight, end_ref=True)
        elif not flight.suspect and envelope.expired:
            self.expire(envelope)
            self._release(flight, end_ref=True)
        elif (error := self._why_not_again(flight)) is not None:
            if flight.suspect:
                error = self._refused_again(flight, error)
            self._release(flight, end_ref=True)
            self.fail(envelope, error)
        elif not envelope.hand_over(flight):
            self.expire(envelope)
            self._release(flight, end_ref=True)
        else:
            if self.state.faults is not None and flight.suspect:  # it runs again, so it counts again
                flight.fault = self.state.faults.on_message(type(flight.message).__name__)
            self._fly(flight)

    def _tear_output(self, flight: Flight) -> None:
        """End what a request was writing that is not run again.

        A buffer that was freed behind it is brought back for that: what was sent before the free, and is
        still to read it, is to find it torn.
        """
        if flight.strikes:
            return
        written = set(footprint(flight.message, self.state.lowered).writes)
        for ref in named_buffers(flight.message).values():
            if ref.slot in written:
                self.memory.revive(ref)
                if self.memory.is_live(ref):
                    self.memory.tear(self.memory.resolve(ref))

    def _why_not_again(self, flight: Flight) -> CudnnActorError | None:
        """Why a request cannot be handed over again: what it reads is torn, or its plan is to blame."""
        if flight.strikes:  # its message has not been looked at yet
            return None
        for name, ref in named_buffers(flight.message).items():
            try:
                self.memory.resolve(ref, name)
            except StaleBufferError as error:
                # Freed behind it: the bytes are held for this very request, so it still runs on them.
                if error.reason is not StaleReason.FREED or not self.memory.is_withheld(ref):
                    return error
        if type(flight.message) in COMPUTE:
            return self.quarantined(flight.message, flight.number)
        return None

    def quarantined(self, message: Compute, number: int) -> QuarantinedRequest | None:
        """The error of a request whose plan is quarantined; None where it is not."""
        known = self.state.quarantined
        if not known:
            return None
        digest = self.state.lowered(message).graph.digest()
        if digest not in known:
            return None
        return QuarantinedRequest(request_id=number, digest=digest, cause=known[digest])

    def flush(self) -> None:
        """Send what has been handed over since the last time."""
        if self._requests and self.worker is not None:
            fresh: list[Request] = []
            frame = Requests(self._requests)
            # One step.
            self._sending = frame
            self._requests = fresh
            self.worker.send(frame)
            self._sending = None

    def finish_sending(self) -> None:
        """Go on where somebody was interrupted in `flush`. Before anything else is sent.

        The frame that a worker was sent last is not queued again.
        """
        if self._sending is not None and self.worker is not None:
            self.worker.send(self._sending)
            self._sending = None

    # Answers.

    def receive(self, frames: Sequence[FromWorker]) -> None:
        """Take what the worker has said. Raises `Violation`, `BadFrame`: then it is not to be served with."""
        for frame in frames:
            match frame:
                case Answers():
                    for answer in frame.answers:
                        self.land(answer)
                    self.note_landed()
                case ArenaMade() | ArenaRefused():
                    self.take_arena(frame)
                case InternalDone():
                    pass  # asked for when it was a standby
                case Logged():
                    self.write_log(frame)
                case Dying():
                    self.last_word = frame
                case other:
                    raise Violation(f"it said {type(other).__name__} where nobody had asked")

    def note_landed(self) -> None:
        """Answers have been taken."""
        self.ledger.note_progress()
        if self._drains:
            self.settle_drains()

    def land(self, answer: Answer) -> None:
        """Take one answer. Raises `Violation`."""
        # What it says is looked at first: if it is a lie, the flight is in the air, and judged with the rest.
        flight = self.ledger.find(answer.number, answer.place)
        seen = flight.seen
        if type(answer) is Done and seen is not None:
            self.ledger.land(flight)
            self.state.memory.release_all(flight.slots)
            if not seen.noted:
                self.note_plan(seen)
            self._succeed(flight.envelope, self.receipt(flight.envelope, answer))
            return
        news = self._news(flight, answer)
        self.ledger.land(flight)
        if flight.suspect and type(answer) is Refused:
            news = self._refused_again(flight, news)
        self.memory.release_all(flight.slots)
        self._land_other(flight, answer, news)

    def _refused_again(self, flight: Flight, error: CudnnActorError) -> CudnnActorError:
        """What a request ends in whose second run has made nothing whole of what its first had begun.

        `ExecutionFailed` says itself that its outputs hold no result, `QuarantinedRequest` that they are
        torn; no other error does.
        """
        writes = not flight.strikes and footprint(flight.message, self.state.lowered).writes
        if not writes or isinstance(error, ExecutionFailed):
            return error
        self._tear_output(flight)
        if isinstance(error, QuarantinedRequest):
            return error
        why = f"its second run was refused: {error}"
        return OutcomeUnknown(request_id=flight.number, cause="a worker that has died", why=why)

    def _news(self, flight: Flight, answer: Answer) -> Any:
        """What an answer brings: a decoded value, or error. Raises `Violation` for one that does not fit."""
        match answer:
            case Refused():
                return self._error(answer)
            case Given() if not flight.strikes:
                return self._given(answer, flight.envelope)
            case Done() if flight.strikes or type(flight.message) in _GIVEN:
                asked = "Strike" if flight.strikes else type(flight.message).__name__
                raise Violation(f"it answered {asked} with a receipt")
            case Dropped() if not flight.unwanted:
                raise Violation(f"it dropped request {answer.number}, which nobody had withdrawn")
        return None

    def receipt(self, envelope: Envelope, done: Done) -> Receipt:
        """What the caller of a request that has finished gets."""
        return Receipt(
            request_id=envelope.number,
            generation=self.state.generation,
            plan=done.plan,
            queue_us=(done.started_ns - envelope.admitted_ns) / 1e3,
            run_us=done.run_us,
        )

    def _land_other(self, flight: Flight, answer: Answer, news: Any) -> None:
        envelope = flight.envelope
        match answer:
            case Dropped():
                self._discharge(flight, end_ref=True)
                if envelope.withdrawn:
                    self.withdraw(envelope)
                else:
                    self.expire(envelope)
            case Refused():
                self._discharge(flight, end_ref=True)
                self.fail(envelope, news)
            case _ if flight.strikes:
                envelope.hand_back(begun=True)
                self.take_up(envelope, struck=True)
            case Done():
                try:
                    value = self._finished(flight, answer)
                except MemoryError as error:  # of this process: it has no room for what has come
                    requested = flight.message.src.spec.nbytes if type(flight.message) is Download else 0
                    in_use = self.memory.arena_bytes
                    self.fail(envelope, exhaustion(error, requested=requested, in_use=in_use) or error)
                else:
                    self._succeed(envelope, value)
            case Given():
                self._discharge(flight, end_ref=False)
                self._succeed(envelope, news)

    def _finished(self, flight: Flight, done: Done) -> Any:
        if self.checksums is not None and flight.sum is not None:
            self.checksums.keep(flight.slots[0], flight.sum)
        if flight.ref is not None:
            self._discharge(flight, end_ref=False)
            return flight.ref
        if type(flight.message) is Download and flight.block is not None:
            spec = flight.message.src.spec
            block, flight.block = flight.block, None
            return self.staging.result(block, spec.dims, spec.dtype.numpy)
        self._discharge(flight, end_ref=False)
        return self.receipt(flight.envelope, done)

    def _given(self, answer: Given, envelope: Envelope) -> Any:
        wanted = _GIVEN.get(type(envelope.message))
        try:
            value = decode_reply(answer.body)
        except MalformedMessage as error:
            raise Violation(f"its answer to request {answer.number} does not decode: {error}") from error
        if wanted is None or type(value) is not wanted:
            asked = type(envelope.message).__name__
            raise Violation(f"it answered {asked} with {type(value).__name__}")
        # Of a service's counters only the plans are the worker's; all else is counted here.
        return self.state.statistics(value.plans) if isinstance(value, Statistics) else value

    @staticmethod
    def _error(answer: Refused) -> CudnnActorError:
        try:
            return answer.error.to_error()
        except MalformedMessage as error:
            raise Violation(
                f"its answer to request {answer.number} is not an error of this package: {error}"
            ) from error

    def _discharge(self, flight: Flight, *, end_ref: bool) -> None:
        """Give back what a flight had beside its holds; `end_ref`: and the buffer that nobody receives."""
        if flight.block is not None:
            self.staging.give_back(flight.block)
            flight.block = None
        if end_ref and flight.ref is not None and self.memory.is_live(flight.ref):
            self.memory.free(flight.ref)

    def _release(self, flight: Flight, *, end_ref: bool) -> None:
        """The same, of a flight on the ground, which holds its buffers still."""
        self.memory.release_all(flight.slots)
        self._discharge(flight, end_ref=end_ref)

    def note_plan(self, seen: Seen) -> None:
        """Remember a message for workers that are to be warmed. May be interrupted, and made again."""
        digest = seen.lowered.graph.digest()
        new = self.recent.pop(digest, None) is None
        self.recent[digest] = seen.message
        if len(self.recent) > WINDOW:
            del self.recent[next(iter(self.recent))]
        seen.noted = True
        if new:
            self.on_new_plan()

    # Replies.

    def _succeed(self, envelope: Envelope, value: Any) -> None:
        self.state.counters.finished += 1
        self._reply(envelope, value, None)

    def fail(self, envelope: Envelope, error: BaseException) -> None:
        """Answer with an error; of a message that was told, in the log."""
        self.state.counters.failed += 1
        if not envelope.wants_reply:
            fields = {"actor": "CudnnActor", "message": repr(envelope.message), "error": repr(error)}
            self._write_in(envelope.context, lambda: log.error("actor.tell_failed", **fields))
        self._reply(envelope, None, error)

    def expire(self, envelope: Envelope) -> None:
        """Answer that time is up, and that it had not started."""
        self.state.counters.expired += 1
        started = envelope.started_ns > 0
        self._reply(envelope, None, DeadlineExceeded(timeout_s=envelope.timeout_s or 0.0, started=started))

    def withdraw(self, envelope: Envelope) -> None:
        """Drop a message that nobody waits for."""
        counters = self.state.counters
        counters.expired += envelope.timed_out
        counters.withdrawn += not envelope.timed_out
        self._reply(envelope, None, ActorStopped(reason="withdrawn"))  # for its loop's count

    # What the classes that know messages add.

    def take_up(self, envelope: Envelope, *, struck: bool = False) -> None:
        """Start a message: answer it, or hand it over. `struck`: its fault, if it had one, has been done."""
        raise NotImplementedError

    def take_arena(self, frame: ArenaMade | ArenaRefused) -> None:
        """Take what has come of a wish for an arena."""
        raise NotImplementedError

    def settle_drains(self) -> None:
        """Answer those who wait for all that was sent before them, where it has been answered."""
        while self._drains and not self.is_awaited(self._drains[0].number):
            self._succeed(self._drains.popleft(), None)

    def is_awaited(self, number: int) -> bool:
        """Whether anything is unanswered that was sent before this number."""
        return self.ledger.waits_for(number)

    def write_log(self, line: Logged) -> None:
        """Write a worker's line, in the context of the request that was in work. Raises `Violation`."""
        if "event" in line.fields or "self" in line.fields:
            raise Violation("a line of its log cannot be written: a field has a name that is taken")
        flight = self.ledger.flights.get(line.number)
        context = None if flight is None else flight.envelope.context
        said = Line(line.logger, LEVELS[line.level], line.event, line.fields)
        self._write_in(context, lambda: write_line(said))

    def _write_in(self, context: Context | None, write: Callable[[], None]) -> None:
        """Write a line of the service's, in the context of who has asked. On any thread that sends."""
        with speaking_for(self.state.name):
            if context is None:
                write()
            else:
                context.run(write)


_GIVEN: dict[type, type] = {Ping: int, Warm: int, GetStatistics: Statistics}
"""What a worker answers these with."""


def _nothing() -> None:
    pass
