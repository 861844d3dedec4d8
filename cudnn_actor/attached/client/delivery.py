"""Delivers the server's answers to those who wait for them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cudnn_actor.actors import ActorStopped, Envelope, LoopBridge
from cudnn_actor.actors.interrupts import run_through
from cudnn_actor.actors.logs import Log
from cudnn_actor.actors.waking import Waking
from cudnn_actor.attached.client.held import HeldBuffers
from cudnn_actor.attached.client.kept_messages import KeptMessages
from cudnn_actor.attached.client.outgoing import ShareWeights, place_of
from cudnn_actor.attached.client.sent import Outcomes, Sent
from cudnn_actor.attached.wire import Done, Dropped, NeedsRoom, Receipts, Room, Withdrawn
from cudnn_actor.broker.request_counts import RequestObserver
from cudnn_actor.broker.service_state import Import
from cudnn_actor.isolation.staging import Staging
from cudnn_actor.processes.frames import BadFrame
from cudnn_actor.protocol.errors import CudnnActorError, DeadlineExceeded, StaleBufferError
from cudnn_actor.protocol.messages.messages import Allocate, Free
from cudnn_actor.protocol.messages.receipts import Receipt

if TYPE_CHECKING:
    from cudnn_actor.attached.client.link import Link

__all__ = ["Delivery"]

log = Log("cudnn_actor.attached")

_Future = asyncio.Future


class Delivery:
    """Delivers answers. Used on the loop that owns the connection, unless a method says otherwise.

    Parameters
    ----------
    link
        The mailbox of the requests.
    sent
        The requests that have no answer yet, by number; of `ask_again`, only the futures. This removes those
        that get one.
    bridge
        The bridge of the loop.
    held, kept
        The buffers that the client has, and the messages that the server keeps.
    outcomes, staging
        What answers say, and the client's memory for their arrays.
    waking
        Gives receipts to requests of `ask_again`. Whoever has read the answers has it wake the callers.
    send
        A function that sends a frame.
    """

    def __init__(
        self,
        link: Link,
        sent: dict[int, Sent | asyncio.Future[Any]],
        bridge: LoopBridge,
        *,
        held: HeldBuffers,
        kept: KeptMessages,
        outcomes: Outcomes,
        staging: Staging,
        waking: Waking,
        send: Callable[[Room], None],
    ) -> None:
        self._link, self._sent, self._bridge, self._loop = link, sent, bridge, bridge.loop
        self._held, self._kept, self._outcomes, self._staging = held, kept, outcomes, staging
        self._waking, self._send = waking, send
        self._has_ended = False
        self.observer: RequestObserver | None = None
        """See `Link.observer`."""

    def take_answers(self, answers: list[Any], bridges: set[LoopBridge]) -> None:
        """Deliver the answers of a frame. `bridges` gets those of other loops whose callers have answers.
        Raises `BadFrame`."""
        plain: list[tuple[asyncio.Future[Any], Done]] = []
        try:
            for answer in answers:
                sent = self._sent.get(answer.number)
                if type(sent) is _Future and type(answer) is Done:
                    plain.append((sent, answer))
                else:
                    self._take_enveloped(sent, answer, bridges)
        finally:
            if plain:
                receipts = [answer.receipt for _, answer in plain]
                self._give([answer.number for _, answer in plain], [future for future, _ in plain], receipts)

    def take_receipts(self, frame: Receipts, bridges: set[LoopBridge]) -> None:
        """Deliver the answers of a frame, as `take_answers` does. Raises `BadFrame`."""
        requests: list[Any] = list(map(self._sent.get, frame.numbers))
        receipts = frame.receipts()
        if list(map(type, requests)).count(_Future) == len(requests):
            self._give(frame.numbers, requests, receipts)
        else:
            self.take_answers(list(map(Done, frame.numbers, receipts)), bridges)

    def _give(self, numbers: list[int], futures: list[Any], receipts: list[Receipt]) -> None:
        """Give receipts to requests of `ask_again`. If this fails, those without one are in `_sent` still."""
        if len(set(numbers)) != len(numbers):
            raise BadFrame("two answers to one request")
        self._waking.set_all_results(futures, receipts)
        run_through(map(self._sent.pop, numbers, itertools.repeat(None)))

    def _take_enveloped(self, sent: Any, answer: Any, bridges: set[LoopBridge]) -> None:
        envelope = None if type(sent) is not Sent else sent.envelope
        if (
            type(answer) is not Done
            or envelope is None
            or envelope.found is None
            or envelope.bridge is not self._bridge
            or (future := envelope.future) is None
            or future.done()
            or self.observer is not None
        ):
            self.take_answer(answer, bridges)
            return
        # Often, a plan has run, for a caller on this loop. Such a request has no memory to free.
        if envelope.watch is not None:
            envelope.unwatch()
        if envelope.timed_out:
            envelope.end_expired(True)
        receipt, set_result = answer.receipt, future.set_result
        # One step. If a signal handler raises before it, the request gets the end of the connection.
        del self._sent[answer.number]
        envelope.elsewhere = None
        self._bridge.awaited -= 1
        try:  # noqa: SIM105 - `suppress` has functions in Python, in which a signal handler may raise
            set_result(receipt)
        except asyncio.InvalidStateError:  # the timeout was told, or a signal handler has cancelled it
            pass

    def take_answer(self, answer: Any, bridges: set[LoopBridge]) -> None:
        """Deliver an answer, whatever it is. Raises `BadFrame`."""
        sent = self._sent.get(answer.number)
        if sent is None:
            raise BadFrame(f"an answer to request {answer.number}, which was not sent")
        if not isinstance(sent, Sent):
            self._sent[answer.number] = sent = self._with_envelope(answer.number, sent)
        envelope = sent.envelope
        if type(answer) is NeedsRoom:
            self._give_room(sent, answer.nbytes)
            return
        if type(answer) is Withdrawn:
            self._end_expired(envelope, answer.started)
            return
        envelope.elsewhere = None
        value, error = self._outcomes.of(sent, answer)
        if sent.is_answered:
            self._sent.pop(sent.number, None)
            return
        if envelope.timed_out:  # it was answered before the server knew of the timeout
            started = type(answer) is not Dropped and not isinstance(error, StaleBufferError)
            if isinstance(error, DeadlineExceeded):
                started = error.started
            self._end_expired(envelope, started)
        self._note(envelope.message, value, error)
        self.reply(envelope, value, error, bridges, sent.number)

    def _end_expired(self, envelope: Envelope, started: bool) -> None:
        """Tell a caller whose timeout has passed whether its message may have started."""
        future = envelope.future
        if future is None or not envelope.timed_out:
            raise BadFrame("word of a request whose caller waits")
        if (loop := future.get_loop()) is self._loop:
            envelope.end_expired(started)
        else:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(envelope.end_expired, started)

    def _give_room(self, sent: Sent, nbytes: int) -> None:
        if sent.room is not None:
            self._staging.give_back(sent.room)
            sent.room = None
        try:
            sent.room = self._staging.take(nbytes)
        except CudnnActorError as error:
            if not sent.is_answered:
                self.reply(sent.envelope, None, error)
                sent.is_answered = True  # last: if a signal handler raises, the end of the connection is told
            self._send(Room(sent.number, None, 0))
            return
        self._send(Room(sent.number, place_of(sent.room), sent.room.nbytes))

    def _note(self, message: Any, value: Any, error: Exception | None) -> None:
        """Note which buffers the client has after an answer, for its own checks."""
        if error is None and isinstance(message, Allocate | ShareWeights | Import) and value is not None:
            self._held.add(value)
        elif error is None and isinstance(message, Free):
            epoch = self._held.epoch
            self._held.end(message.buffer)
            if epoch != self._held.epoch:
                self._kept.check_all()

    def reply(
        self,
        envelope: Envelope,
        value: Any,
        error: Exception | None,
        bridges: set[LoopBridge] | None = None,
        number: int = 0,
    ) -> None:
        """Give a reply: at once to a caller on this loop. `bridges`: gets the bridge of another loop, which
        the caller wakes then; None to wake it here.

        `number`: that of the request, which leaves `_sent` once it has its reply. If a signal handler raises
        before, the request gets the end of the connection. If it has its reply already, that one counts.
        """
        if (observer := self.observer) is not None:
            observer.answered(envelope, value, error, 0, 0)
        bridge = envelope.bridge
        if bridge is self._bridge and asyncio._get_running_loop() is self._loop:
            if envelope.watch is not None:
                envelope.unwatch()
            envelope.deliver(value, error)
            # One step.
            bridge.awaited -= 1
            self._sent.pop(number, None)
        elif bridge is not None:
            if bridges is not None:
                bridges.add(bridge)
            entry = ((envelope, value, error),)
            # One step.
            bridge.posted += entry
            self._sent.pop(number, None)
            if bridges is None:
                bridge.wake()
        else:
            envelope.settle(value, error)
            self._sent.pop(number, None)
        # If the connection has ended, the server has freed its client's buffers.
        freed = self._has_ended and isinstance(envelope.message, Free)
        if error is not None and not envelope.wants_reply and not freed:
            log.warning("request.failed", message=type(envelope.message).__name__, error=str(error))

    def tell_not_run(self, envelope: Envelope, error: Exception) -> None:
        """See `Mailbox.on_refusal`."""
        if (observer := self.observer) is not None:
            observer.not_run(envelope, error)

    def end(self, reason: str) -> None:
        """Answer all requests with `ServiceStopped`, because the connection has ended."""
        self._has_ended = True
        left = dict(self._sent)
        self._sent.clear()
        for number, waiting in left.items():
            sent = waiting if isinstance(waiting, Sent) else self._with_envelope(number, waiting)
            sent.envelope.elsewhere = None
            if not sent.is_answered:
                self.reply(sent.envelope, None, ActorStopped(reason=reason, interrupted=True))

    def _with_envelope(self, number: int, future: asyncio.Future[Any]) -> Sent:
        """A request of `ask_again` as one with an envelope, for an answer that is no receipt."""
        sent = Sent(self._link, Envelope(None, future=future, bridge=self._bridge))
        sent.number = number
        self._bridge.awaited += 1
        return sent
