"""The worker's answers: each one is checked, and completes the request that it names.

An answer that does not fit is a `Violation`: the worker is replaced. So every check comes before the first
change. Then the request is still in flight, and is taken over at the crash with all the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cudnn_actor.actors import Envelope
from cudnn_actor.broker import Broker
from cudnn_actor.isolation.process.parent.in_flight import InFlightTable, Violation, WorkerRequest
from cudnn_actor.isolation.process.parent.model_runs import ModelRuns
from cudnn_actor.isolation.process.parent.recent_plans import RecentPlans
from cudnn_actor.isolation.process.parent.sender import Sender
from cudnn_actor.isolation.process.parent.values import Values
from cudnn_actor.isolation.process.wire import Answer, Counted, Done, Dropped, Given, Refused
from cudnn_actor.protocol.errors import MalformedMessage
from cudnn_actor.protocol.graphs.explanation import Explanation
from cudnn_actor.protocol.messages.codec import decode_reply
from cudnn_actor.protocol.messages.messages import (
    ClearPlans,
    Explain,
    GetStatistics,
    Ping,
    RunModel,
    Warm,
    WarmModel,
)

__all__ = ["AnswerTaker"]

_REPLY_TYPES: dict[type, type] = {Ping: int, Warm: int, WarmModel: int, ClearPlans: int, Explain: Explanation}
"""The types of a worker's answers to these messages."""
_WITHOUT_RECEIPT = frozenset({*_REPLY_TYPES, GetStatistics})


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class AnswerTaker:
    """Completes requests. Used with the host held.

    The fast path completes most requests itself, with the same effect (`fast_path`).

    Parameters
    ----------
    broker, in_flight, sender, values, models, recent
        The host's own objects.
    start_again
        This is called with an envelope whose fault has been injected, to start its message.
    """

    broker: Broker[WorkerRequest]
    in_flight: InFlightTable
    sender: Sender
    values: Values
    models: ModelRuns
    recent: RecentPlans
    start_again: Callable[[Envelope], None]

    def complete(self, answer: Answer) -> None:
        """Complete the request that an answer names. Raises `Violation`."""
        request = self.in_flight.find(answer.number, answer.place)
        cached, memory = request.cached, self.broker.memory
        if type(answer) is Done:
            self.in_flight.note_finished(request)
        if type(answer) is Done and cached is not None:
            self.in_flight.complete(request)
            memory.release_all(request.slots)
            if self.recent.kept:
                self.recent.note(request, cached)
            generation = self.broker.state.generation
            receipt = request.receipt(generation, answer.plan, answer.started_ns, answer.run_us)
            request.envelope.started_ns = answer.started_ns  # where a crash has not set it, nothing has
            self.broker.succeed(request.envelope, receipt, answer.run_us)
            return
        value = self._decode(request, answer)
        self.in_flight.complete(request)
        if request.suspect and type(answer) is Refused:
            value = self.broker.interrupted.error_of_second_run(request, value)
        memory.release_all(request.slots)
        self._settle(request, answer, value)

    def note_completed(self) -> None:
        """Note that a frame of answers has been handled."""
        self.in_flight.note_progress()
        if self.broker.has_due:
            self.broker.settle_waiting()

    def _settle(self, request: WorkerRequest, answer: Answer, value: Any) -> None:
        """Tell the caller of a request that has left the in-flight table, or start its message."""
        envelope, broker, sender = request.envelope, self.broker, self.sender
        match answer:
            case Dropped():
                sender.discharge(request, end_ref=True)
                if envelope.is_unawaited:
                    broker.withdraw(envelope)
                else:
                    broker.expire(envelope)
            case Refused():
                sender.discharge(request, end_ref=True)
                broker.fail(envelope, value)
            case _ if request.injects:
                envelope.hand_back(begun=True)
                self.start_again(envelope)
            case Done():
                try:
                    value = self._result(request, answer)
                except MemoryError as error:  # this process has no room for the result
                    broker.refuse(envelope, error)
                else:
                    envelope.started_ns = answer.started_ns
                    broker.succeed(envelope, value, answer.run_us)
            case Given() | Counted():
                sender.discharge(request, end_ref=False)
                envelope.started_ns = request.sent_ns
                broker.succeed(envelope, value)

    def _result(self, request: WorkerRequest, done: Done) -> Any:
        if type(request.message) is not RunModel:
            return self.values.result(request, done)
        assert request.run is not None
        if self.recent.kept:
            self.recent.note(request, request.run.cached)
        try:
            outputs, loan = self.models.results(request)
            if loan is not None:
                assert request.staged is not None
                loan.pieces, request.staged = (request.staged,), None
            return outputs
        finally:
            self.sender.discharge(request, end_ref=False)

    def _decode(self, request: WorkerRequest, answer: Answer) -> Any:
        """The decoded value or error of an answer. Raises `Violation` for an answer that does not fit."""
        match answer:
            case Refused():
                return self._error(answer, request)
            case Given() if not request.injects:
                return self._reply(answer, request)
            case Counted() if type(request.message) is GetStatistics:
                return self.broker.state.statistics(
                    answer.plans, answer.cudnn_version, answer.converted_bytes, answer.graphs
                )
            case Counted():
                raise Violation(f"it answered {_request_name(request)} with statistics")
            case Done() if request.injects or type(request.message) in _WITHOUT_RECEIPT:
                raise Violation(f"it answered {_request_name(request)} with a receipt")
            case Dropped() if not request.unwanted:
                raise Violation(f"it dropped request {answer.number}, which was not withdrawn")
        return None

    def _reply(self, answer: Given, request: WorkerRequest) -> Any:
        wanted = _REPLY_TYPES.get(type(request.message))
        try:
            value = decode_reply(answer.body)
        except MalformedMessage as error:
            raise Violation(f"its answer to request {answer.number} does not decode: {error}") from error
        if wanted is None or type(value) is not wanted:
            raise Violation(f"it answered {_request_name(request)} with {type(value).__name__}")
        return value

    def _error(self, answer: Refused, request: WorkerRequest) -> Exception:
        try:
            error = answer.error.to_error()
        except MalformedMessage as malformed:
            raise Violation(
                f"its answer to request {answer.number} is not an error of this package: {malformed}"
            ) from malformed
        return self.broker.state.complete_error(error, request.message)


def _request_name(request: WorkerRequest) -> str:
    return "InjectFault" if request.injects else type(request.message).__name__
