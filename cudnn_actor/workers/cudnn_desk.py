"""The desk of a whole service: every message of the protocol, and what becomes of them at a crash."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cudnn_actor.actors import Envelope
from cudnn_actor.actors.logs import Log
from cudnn_actor.exhaustion import exhaustion
from cudnn_actor.interruption import Interruption
from cudnn_actor.memory import Slot
from cudnn_actor.protocol.errors import InvalidRequest, OutcomeUnknown, Words
from cudnn_actor.protocol.messages import (
    Allocate,
    Compute,
    ConvBwdData,
    ConvBwdFilter,
    ConvFwd,
    Copy,
    Download,
    Drain,
    Fill,
    Free,
    GetStatistics,
    Ping,
    Upload,
    View,
    Warm,
)
from cudnn_actor.protocol.tensor import TensorSpec
from cudnn_actor.recovery import MOST_CRASHES
from cudnn_actor.request_checks import check_no_overlap, check_warm, not_a_message
from cudnn_actor.state import Bound, ServiceState
from cudnn_actor.supervision import Fault
from cudnn_actor.workers.desk import WINDOW
from cudnn_actor.workers.ledger import Claims, Flight, Violation
from cudnn_actor.workers.memory_desk import MemoryDesk
from cudnn_actor.workers.staging import Block
from cudnn_actor.workers.wire import LONGEST_MESSAGE, Done, Strike, encode_message

__all__ = ["CudnnDesk", "Limbo"]

log = Log("cudnn_actor")

_TAGS: dict[type, str] = {Allocate: "allocate", Free: "free", Drain: "drain", View: "view"}
"""Messages that a worker may never see, so that a fault of theirs is sent on its own; with its tag."""


class Limbo:
    """What a dying process may still write: held until it has gone for certain."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.blocks: list[Block] = []

    def __bool__(self) -> bool:
        return bool(self.slots or self.blocks)


class CudnnDesk(MemoryDesk):
    """Takes up every message of a service. Parameters as of `Desk`."""

    def __init__(
        self,
        state: ServiceState,
        reply: Callable[[Envelope, Any, BaseException | None], None],
        *,
        host_arenas: bool,
        window: int = WINDOW,
    ) -> None:
        super().__init__(state, reply, host_arenas=host_arenas, window=window)
        self._handlers: dict[type, Callable[[Envelope, Any], None]] = {
            ConvFwd: self._compute,
            ConvBwdData: self._compute,
            ConvBwdFilter: self._compute,
            Allocate: self._allocate,
            Upload: self._upload,
            Download: self._download,
            View: self._view,
            Copy: self._copy,
            Fill: self._fill,
            Free: self._free,
            Ping: self._forward,
            GetStatistics: self._forward,
            Warm: self._warm,
            Drain: self._drain,
        }

    def take_up(self, envelope: Envelope, *, struck: bool = False) -> None:
        """Start a message: answer it, or hand it over. `struck`: its fault, if it had one, has been done."""
        if envelope.future is not None and envelope.withdrawn:
            self.withdraw(envelope)
            return
        if envelope.deadline is not None and envelope.expired and not struck:
            self.expire(envelope)
            return
        message = envelope.message
        try:
            handler = self._handlers.get(type(message))
            if handler is None:
                self.fail(envelope, not_a_message(message))
                return
            if self.state.faults is None or struck or not self._strikes(envelope, message):
                handler(envelope, message)
        except Exception as error:  # noqa: BLE001 - the answer to this one message
            self.fail(envelope, self._typed(error, message))
        if self.rule is not None:
            self.rule = None

    def _typed(self, error: Exception, message: Any) -> Exception:
        """An error in taking up a message; one that names the limit, where it is the system's refusal."""
        spec = getattr(getattr(message, "src", None), "spec", None) or getattr(message, "spec", None)
        requested = spec.nbytes if isinstance(spec, TensorSpec) else 0
        return exhaustion(error, requested=requested, in_use=self.memory.arena_bytes) or error

    def _strikes(self, envelope: Envelope, message: Any) -> bool:
        """Look up what is to befall a message; whether it is sent for that alone, for now."""
        assert self.state.faults is not None
        if message.control:
            return False
        kind = type(message)
        self.rule = rule = self.state.faults.on_message(kind.__name__)
        tag = _TAGS.get(kind)
        if rule is None or rule.fault is Fault.REJECT_BUILD or tag is None:
            return False
        self.hand(Flight(envelope, encode_message(Strike(tag=tag)), strikes=True))
        return True

    # Requests that run a plan.

    def _compute(self, envelope: Envelope, message: Compute) -> None:
        if self.state.quarantined and (error := self.quarantined(message, envelope.number)) is not None:
            self.state.seen(message)  # what is wrong with the message itself comes first
            raise error
        self.hand(self.prepared(envelope, message))

    def prepared(self, envelope: Envelope, message: Compute) -> Flight:
        """A request as it is handed over, and not handed over yet. Raises what is wrong with it."""
        seen = self.state.seen(message)
        bound = seen.bound
        if bound is None or bound.ends != self.memory.ends:
            ends = self.memory.ends
            slots = [self.memory.resolve(getattr(message, name), name) for name in seen.lowered.buffers]
            check_no_overlap(seen.lowered, slots)
            bound = seen.bound = Bound(ends, slots, ())
        if seen.body is None:
            seen.body = encode_message(message)
        return Flight(envelope, seen.body, bound.slots, seen=seen)

    def _forward(self, envelope: Envelope, message: Ping | GetStatistics) -> None:
        self.hand(Flight(envelope, encode_message(message)))

    def _warm(self, envelope: Envelope, message: Warm) -> None:
        check_warm(message)
        known = self.state.quarantined
        wanted = tuple(
            request for request in message.messages if self.state.lowered(request).graph.digest() not in known
        )
        body = encode_message(Warm(messages=wanted))
        if len(body) > LONGEST_MESSAGE:
            raise InvalidRequest(
                field="messages",
                value=Words(f"{len(wanted):,} requests"),
                problem=f"are {len(body):,} bytes, where {LONGEST_MESSAGE:,} is the most that a worker takes",
                fix="warm some at a time",
            )
        self.hand(Flight(envelope, body))

    def _drain(self, envelope: Envelope, _message: Drain) -> None:
        if self._begins(envelope):
            self._drains.append(envelope)
            self.settle_drains()

    # The end of a worker.

    def crash(self, cause: str, *, may_still_write: bool) -> Limbo:
        """Judge every request that the worker had; those that may run again are handed over first.

        What it may still have been writing to, and nobody needs any more, is in the answer: for
        `leave_limbo`, once the process has gone for certain.

        Parameters
        ----------
        cause
            For people: what happened.
        may_still_write
            Whether the process could not be ended.
        """
        begun, others = self._ground()
        limbo = Limbo()
        again = self._judge(begun, cause, limbo, may_still_write=may_still_write)
        self.ledger.first([*again, *others])
        # A drain, too: what waits for an arena and was sent before it is to be answered before it.
        self._restore(self._waiting())
        return limbo

    def _ground(self) -> tuple[list[Flight], list[Flight]]:
        """Take everything out of the worker's hands: what it had begun, and the rest."""
        lost = set() if self.worker is None else self._land_finished(self.worker.claims)
        worker, self.worker = self.worker, None
        self.last_word = None  # whoever starts next is not to be taken for the one that said it
        self._requests.clear()
        self._sending = None
        begun: list[Flight] = []
        others: list[Flight] = []
        for flight in self.ledger.ground():
            # One whose caller has been promised that it never begins counts as begun, too, where it was left.
            began = (
                worker is not None
                and not flight.gone
                and worker.claims.has_begun(flight.place, flight.number)
            )
            flight.envelope.hand_back(begun=began)
            # What is asked again cannot be what the worker died of: it had finished, or is only a question.
            harmless = flight.number in lost or flight.message.control
            (begun if began and not harmless else others).append(flight)
        return begun, others

    def _land_finished(self, claims: Claims) -> set[int]:
        """Answer what the worker had finished and had not said: it has been done, and is not done again.

        Not only for its callers' sake. What it read may have been written since, by a later request of the
        same worker, so it could not be run again; and it is not what the worker died of. The numbers of those
        whose answer has gone with the worker (of a `Warm`, say) come back: they are asked again.
        """
        lost = set()
        for flight in tuple(self.ledger.flights.values()):
            found = claims.finished(flight.place, flight.number)
            if found is None or flight.gone:
                continue
            if not found.started_ns:
                lost.add(flight.number)
                continue
            try:
                self.land(Done(flight.number, flight.place, *found))
            except Violation as lie:  # no worker of ours: it is judged with those that have begun
                log.warning("worker.broke_the_protocol", why=str(lie))
        return lost

    def _waiting(self) -> list[Envelope]:
        """Take out those that wait here: for an arena, or for what was sent before them."""
        drains = list(self._drains)
        self._drains.clear()
        return [*self.ground_roomless(), *drains]

    def _judge(
        self, begun: Sequence[Flight], cause: str, limbo: Limbo, *, may_still_write: bool
    ) -> list[Flight]:
        flights = {flight.number: flight for flight in begun}
        interruption = Interruption(self.state, cause, outlives_context=True, may_still_write=may_still_write)
        again = []
        for envelope, verdict in interruption.judge_all([flight.envelope for flight in begun]):
            flight, error = flights[envelope.number], verdict
            if error is None and may_still_write and flight.block is not None:
                why = "its process may still use its place in staging memory"
                error = OutcomeUnknown(request_id=flight.number, cause=cause, why=why)
            if error is None:
                flight.suspect = True
                again.append(flight)
            else:
                self._tear_output(flight)
                self._lose(flight, limbo)
                self.fail(envelope, error)
        return again

    def _lose(self, flight: Flight, limbo: Limbo) -> None:
        """Give up a flight: what it had stays out of use while the dying process may write there."""
        if flight.ref is not None and self.memory.is_live(flight.ref):
            self.memory.free(flight.ref)
        limbo.slots.extend(flight.slots)
        if flight.block is not None:
            limbo.blocks.append(flight.block)

    def leave_limbo(self, limbo: Limbo) -> None:
        """Take back what a process that has gone for certain had."""
        self.memory.release_all(limbo.slots)
        for block in limbo.blocks:
            self.staging.give_back(block)
        limbo.slots.clear()
        limbo.blocks.clear()

    def blame_build(self, digest: str, cause: str) -> None:
        """Note which graph's build ended a worker: the second time it is quarantined."""
        ended = self.state.ended_by_build
        ended[digest] = ended.get(digest, 0) + 1
        if ended[digest] >= MOST_CRASHES:
            self.state.quarantined[digest] = cause

    def retire(self) -> None:
        """Give everything that is unfinished back to the mailbox, after `crash`: perhaps no worker follows.

        What is to run again, and does not, says so when it is answered with `ServiceStopped`.
        """
        grounded = self.ledger.give_up()
        for flight in grounded:
            self._release(flight, end_ref=True)
        self._restore([*(flight.envelope for flight in grounded), *self._waiting()])

    def _restore(self, envelopes: Sequence[Envelope]) -> None:
        self.state.mailbox.restore(sorted(envelopes, key=lambda envelope: envelope.number))

    def close(self) -> None:
        """Give up the memory for transfers. Idempotent."""
        self.staging.close()
        if self.host is not None:
            self.host.clear()
