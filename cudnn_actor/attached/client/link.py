"""The client's mailbox: it sends requests to the service's process, and delivers the answers.

The event loop that has connected owns the connection: it alone sends and reads, and changes the client's
memory. Other threads and loops put their messages into the mailbox and wake that loop. When nothing is in
flight, a message is sent at once; else the messages of one iteration of the loop are sent together.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from cudnn_actor.actors import ActorStopped, Envelope, LoopBridge, Mailbox
from cudnn_actor.actors.asking import cancel
from cudnn_actor.actors.logs import Log
from cudnn_actor.actors.pykka_seam import is_stop
from cudnn_actor.actors.waking import Waking
from cudnn_actor.attached.client.announced_segments import AnnouncedSegments
from cudnn_actor.attached.client.awaiting import Awaiting
from cudnn_actor.attached.client.held import HeldBuffers
from cudnn_actor.attached.client.outgoing import (
    ShareWeights,
    Writing,
    as_answer,
    check_length,
    move_frame,
    place_of,
)
from cudnn_actor.attached.client.sent import Outcomes, Sent
from cudnn_actor.attached.wire import (
    Answers,
    Done,
    Dropped,
    DropSegment,
    Exported,
    ForgetGraph,
    KnowGraph,
    MapSegment,
    Near,
    NeedsRoom,
    Request,
    Requests,
    Room,
    Withdraw,
    Withdrawn,
)
from cudnn_actor.broker.message_cache import CachedMessage
from cudnn_actor.broker.request_counts import RequestObserver
from cudnn_actor.broker.service_state import Export, Import
from cudnn_actor.isolation.known_graphs import GRAPH_RUNS, SentGraphs, known_form
from cudnn_actor.isolation.staging import Staging
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import BadFrame
from cudnn_actor.protocol.errors import (
    CudnnActorError,
    DeadlineExceeded,
    StaleBufferError,
)
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.messages.messages import Allocate, Free, LendStaging, View

__all__ = ["Link"]

log = Log("cudnn_actor.attached")

_MOST_GATHERED, _GATHERED_BYTES = 32, 64 << 10
"""Gathered messages are sent at once when there are this many, or when they have this many bytes."""
_MOST_AGAIN = 1024
"""How many messages may be noted for `ask_again`, as many as the cache of messages has."""
_Future = asyncio.Future
_get_ident, _running_loop = threading.get_ident, asyncio._get_running_loop


class Link(Mailbox):
    """The mailbox of an attached process: see the module's docstring.

    Parameters
    ----------
    channel
        The connection. This object owns it from now on. The server's first frame has been read.
    held
        The buffers that the client has.
    window
        How many requests may be in flight.
    graphs
        The bytes, approximately, that this client's graphs may take in the server.
    on_frame
        This is called with each frame of the server that is no answer.
    on_lost
        This is called once, with the reason, when the connection has ended.
    """

    starts_elsewhere: ClassVar[bool] = True
    asks_again: ClassVar[bool] = True

    def __init__(
        self,
        channel: Channel,
        held: HeldBuffers,
        *,
        window: int,
        graphs: int,
        on_frame: Callable[[Any], None],
        on_lost: Callable[[str], None],
    ) -> None:
        super().__init__(window)
        self.needs_thread = False
        self._channel, self._window, self._held = channel, window, held
        self._on_frame, self._on_lost = on_frame, on_lost
        self._bridge = LoopBridge.of_running_loop()
        self._loop = self._bridge.loop
        self.staging = Staging(self._announce, self._retire)
        """The client's memory for arrays that are being sent or received."""
        self._shared = AnnouncedSegments(self._announce, lambda number: self.call(self._drop_shared, number))
        self._writing = Writing(self.staging, self._shared)
        self._sent: dict[int, Sent | asyncio.Future[Any]] = {}
        """The requests that have no answer yet, by number; of `ask_again`, only the futures."""
        self._unsent: list[Request] = []
        """Requests that are not in a frame yet. They are in `_sent` already."""
        self._unsent_bytes = 0
        self._graphs = SentGraphs(
            graphs,
            know=self._make_known,
            flush=self._flush,
            forget=lambda identity: self._send(ForgetGraph(identity)),
        )
        self._last = 0
        self._again: dict[int, weakref.ref[CachedMessage]] = {}
        """The records of messages that were sent, and may be sent by `ask_again`, by the messages' ids."""
        self._outcomes = Outcomes(self.staging, channel)
        self.observer: RequestObserver | None = None
        """Told of each request and its answer; None for nobody. On the owning loop, but of requests that are
        refused, on any thread. Any thread may replace it."""
        self.on_refusal = self._tell_not_run
        self._if_cancelled = self._withdraw_cancelled
        self._waking = Waking(self._loop, self._if_cancelled, self.turn)
        self._scheduled = self._ended = False
        self._gathered = 0
        self._awaiting = Awaiting(self._loop, channel.fileno(), self._readable)
        self._loop.add_reader(channel.fileno(), self._readable)

    def admit(self, envelope: Envelope, *, waits: bool = True) -> None:
        """Accept a message, and schedule its sending. See `Mailbox.admit`."""
        if envelope.bridge is not self._bridge:
            super().admit(envelope, waits=waits)
            self.needs_thread = True  # the thread of this loop delivers the answers of other loops
            self.call(self.turn)
            return
        # The envelope's bridge is the owning loop's, so this is the owning loop's thread.
        if envelope.found is not None and self._takes_at_once():
            self._admit_here(envelope)
        else:
            super().admit(envelope, waits=waits)
        self._gathered += 1
        if len(self._sent) == len(self._unsent) or self._gathered >= _MOST_GATHERED:  # the server is idle
            self.turn()
        elif not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.turn)

    def _takes_at_once(self) -> bool:
        """Whether a message that runs a plan can be made ready without going through the mailbox.

        It cannot if another message waits there, which it must not overtake. A message that another thread
        adds at this moment has no defined order to it. Only this loop can close the mailbox meanwhile. Nor
        can it with an observer, since the mailbox notes the time of admission.
        """
        return (
            not (self._ordinary or self._control or self._afterwards)
            and len(self._sent) < self._window
            and self._closed is None
            and self.observer is None
        )

    def _admit_here(self, envelope: Envelope) -> None:
        """Do what `Mailbox.admit` would do for such a message, and make it ready. The next `turn` sends
        it."""
        envelope.mailbox = self
        envelope.number = next(self._numbers)
        self._bridge.awaited += 1
        body: bytes | None = envelope.found.body
        if body is None or not self._graphs.knows(envelope.message):
            self._prepare(envelope)
            return
        # Nearly always, the same message was sent before. This runs on the loop of the caller, and no other
        # code has the envelope yet. So it has not been withdrawn, and no other code can take its claim.
        self._last = number = self._last + 1
        sent = Sent(self, number, envelope)
        envelope.elsewhere = sent
        envelope.claim.clear()
        self._note_again(envelope.found)
        self._put_by(sent, Request(number, body, None, 0, envelope.timeout_s))

    def call(self, what: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the owning loop soon, or not at all if the loop has closed. Any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(what, *arguments)

    def waiting_elsewhere(self) -> int:
        """0: requests that the service's process has do not count, as the window bounds them."""
        return 0

    def withdraw(self, number: int, expired: bool) -> None:
        """Tell the service's process that nobody waits for a request. On the owning loop.

        `expired`: whether the request's timeout has passed, so that the server is to say whether it has
        started. If the request has been answered meanwhile, the answer has told the caller.
        """
        if number in self._sent and not self._ended:
            self._flush()  # the request goes first
            self._send(Withdraw(number, expired))

    def forget_graphs(self, identities: frozenset[str]) -> None:
        """Let the server drop graphs that this client has sent. On the owning loop."""
        if not self._ended:
            self._graphs.forget(identities)

    def ask_again(self, message: Any) -> asyncio.Future[Any] | None:
        """See `Mailbox.ask_again`. Messages keep their order, whichever way they are sent.

        This does what `check_message`, `asking.ask` and `admit` do for such a message: nothing of it may have
        changed, and it may overtake no other. Any thread.
        """
        known = self._again.get(id(message))  # a record keeps its message, so no other has its id
        sent = self._sent
        if (
            known is None
            or (cached := known()) is None
            or (self._waking.thread != _get_ident() and _running_loop() is not self._loop)
            or cached.bound.epoch != self._held.epoch  # type: ignore[union-attr]  # it was sent
            or self._ordinary
            or self._control
            or self._afterwards
            or self._closed is not None
            or self.observer is not None
            or len(sent) >= self._window
            or (type(message) in GRAPH_RUNS and not self._graphs.knows(message))
        ):
            return None
        body: Any = cached.body
        future: asyncio.Future[Any] = _Future(loop=self._loop)  # this may run a finalizer that sends
        number, nbytes = self._last + 1, self._unsent_bytes + len(body)
        request = Request(number, body)
        if self._last >= number:  # a finalizer has sent a message here
            return None
        # One step.
        unsent, self._last = self._unsent, number
        sent[number] = future
        self._unsent_bytes = nbytes
        unsent.append(request)
        if len(unsent) >= _MOST_GATHERED or nbytes > _GATHERED_BYTES:
            self._flush()
        elif not self._scheduled:
            self._schedule()
        return future

    def _schedule(self) -> None:
        """Have the messages that wait sent: at once if the server is idle."""
        if len(self._sent) == len(self._unsent):
            self.turn()
        else:
            self._scheduled = True
            self._loop.call_soon(self.turn)

    def submit_again(self, message: Any) -> asyncio.Future[Any] | None:
        """See `Mailbox.submit_again`. Any thread."""
        future = self.ask_again(message)
        if future is not None:
            future.add_done_callback(self._if_cancelled)
        return future

    def _withdraw_cancelled(self, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            self._withdraw_again(future)

    def stop_waiting(self, future: asyncio.Future[Any]) -> None:
        """See `Mailbox.stop_waiting`. Any thread."""
        if cancel(future):
            self.call(self._withdraw_again, future)

    def _withdraw_again(self, future: asyncio.Future[Any]) -> None:
        for number, sent in self._sent.items():
            if sent is future:
                self.withdraw(number, False)
                return

    def _note_again(self, cached: CachedMessage) -> None:
        """Note that a message was sent, so that `ask_again` may send it from now on."""
        if len(self._again) >= _MOST_AGAIN:
            self._again.clear()
        self._again[id(cached.message)] = weakref.ref(cached)

    def _with_envelope(self, number: int, future: asyncio.Future[Any]) -> Sent:
        """A request of `ask_again` as one with an envelope, for an answer that is no receipt."""
        self._sent[number] = sent = Sent(self, number, Envelope(None, future=future, bridge=self._bridge))
        self._bridge.awaited += 1
        return sent

    def turn(self) -> None:
        """Send the messages that wait, as many as the window has room for."""
        self._scheduled = False
        self._gathered = 0
        if self._ended:
            return
        if self._ordinary or self._control or self._afterwards:
            while (room := self._window - len(self._sent)) > 0 and (batch := self.take(room, 0.0)):
                for envelope in batch:
                    self._prepare(envelope)
        self._flush()

    def _flush(self) -> None:
        """Send the requests that are ready, in one frame."""
        if self._unsent and not self._ended:
            fresh: list[Request] = []  # this may run a finalizer that sends a message
            requests, self._unsent, self._unsent_bytes = self._unsent, fresh, 0
            self._send(Requests(requests))
            if self.loops_may_stay_awake:
                self._awaiting.note_sent(len(self._sent))

    def _prepare(self, envelope: Envelope) -> None:
        """Make a request ready to be sent, or answer its message here."""
        message, runs_plan = envelope.message, envelope.found is not None
        if self._ended:  # a message of the same batch has ended it
            self._reply(envelope, None, ActorStopped(reason=self.closed or "closed"))
            return
        if not runs_plan and is_stop(message):
            self._reply(envelope, None, None)
            self.end("asked to stop")
            return
        self._last = number = self._last + 1
        sent = Sent(self, number, envelope)
        if envelope.is_unawaited or not envelope.hand_over(sent):
            self._reply(envelope, None, ActorStopped(reason="withdrawn"))
            return
        try:
            if isinstance(message, Export | Import):
                self._send_move(sent, envelope, message)
                return
            if not runs_plan and isinstance(message, LendStaging):
                lent = self.staging.lend(message.spec.dims, message.spec.dtype.numpy)
                self._reply(envelope, lent, None)
                return
            request = self._request(sent, envelope, message)
        except Exception as error:  # noqa: BLE001 - whatever a message of the user's raises is its answer
            self._outcomes.free(sent)
            self._reply(envelope, None, as_answer(error))
            return
        if (observer := self.observer) is not None and (headers := observer.sent(envelope)) is not None:
            request = msgspec.structs.replace(request, headers=headers)
        self._put_by(sent, request)

    def _send_move(self, sent: Sent, envelope: Envelope, message: Export | Import) -> None:
        """Send a request that is a frame of its own, after all earlier requests. Raises `OSError`."""
        self._flush()
        if sent.number != self._last:  # as in `_put_by`
            self._last = sent.number = self._last + 1
        self._send(*move_frame(sent.number, message, envelope.timeout_s))
        self._sent[sent.number] = sent

    def _put_by(self, sent: Sent, request: Request) -> None:
        """Let a request that is ready wait for the next frame. Numbers grow, whatever was sent meanwhile."""
        if sent.number != self._last:  # a finalizer has sent a message since the request got its number
            self._last = sent.number = self._last + 1
            request = msgspec.structs.replace(request, number=sent.number)
        self._sent[sent.number] = sent
        self._unsent.append(request)
        self._unsent_bytes += len(request.body)
        if self._unsent_bytes > _GATHERED_BYTES:
            self._flush()

    def _request(self, sent: Sent, envelope: Envelope, message: Any) -> Request:
        cached = envelope.found
        if cached is not None:  # the message runs a plan: it names buffers, and has no arrays
            if cached.body is None:
                cached.body = self._writing.without_arrays(known_form(message))
            if not self._graphs.knows(message):
                self._graphs.send(message.graph)
            self._note_again(cached)
            return Request(sent.number, cached.body, None, 0, envelope.timeout_s)
        digest = ""
        if isinstance(message, ShareWeights):
            digest, message = message.digest, Allocate(spec=message.spec, data=message.data)
        if isinstance(message, View):
            raise TypeError("View, whose answer is memory of the service's process")
        body = self._writing.write(sent, message)
        check_length(type(message).__name__, len(body))
        self._outcomes.make_room(sent, message)
        place, nbytes = (None, 0) if sent.room is None else (place_of(sent.room), sent.room.nbytes)
        return Request(sent.number, body, place, nbytes, envelope.timeout_s, digest)

    def _make_known(self, graph: Graph) -> None:
        check_length("graph", len(graph.encoded))
        self._send(KnowGraph(graph.identity, graph.encoded))

    def _drop_shared(self, number: int) -> None:
        if not self._ended:
            self._flush()  # requests whose arrays lie there must be sent first
            self._retire(number)

    def _announce(self, number: int, nbytes: int, descriptor: int) -> None:
        self._send(MapSegment(number, nbytes), (descriptor,))

    def _retire(self, number: int) -> None:
        self._send(DropSegment(number))

    def _send(self, frame: Any, descriptors: tuple[int, ...] = ()) -> None:
        self._channel.send(frame, descriptors)
        if self._channel.backed_up:
            self._loop.add_writer(self._channel.fileno(), self._writable)

    def _writable(self) -> None:
        if self._channel.flush():
            self._loop.remove_writer(self._channel.fileno())

    def _readable(self) -> None:
        bridges: set[LoopBridge] = set()
        try:
            self._take_frames(bridges)
        except BadFrame as error:
            self.end(f"the service's process has sent no valid frame: {error}")
        except Exception:  # for want of memory, for example: the answers behind it would be lost
            self.end("this process could not take an answer")
            raise
        finally:
            for bridge in bridges:
                bridge.wake()
        if self._channel.ended:
            self.end("the connection to the service's process has ended")
        elif len(self):
            self.turn()

    def _take_frames(self, bridges: set[LoopBridge]) -> None:
        for frame in self._channel.receive():
            if type(frame) is Answers:
                self._take_answers(frame.answers, bridges)
                if self.loops_may_stay_awake:
                    self._awaiting.note_answered(len(self._sent))
            elif type(frame) is Exported:
                self._take_answer(frame, bridges)
            elif type(frame) is Near:
                if self.loops_may_stay_awake:
                    self._awaiting.await_answer()
            else:
                self._on_frame(frame)

    def _take_answers(self, answers: list[Any], bridges: set[LoopBridge]) -> None:
        sent_requests = self._sent
        again: list[tuple[asyncio.Future[Any], Any]] = []
        try:
            for answer in answers:
                sent = sent_requests.get(answer.number)
                if type(sent) is _Future and type(answer) is Done:
                    again.append((sent, answer.receipt))
                    del sent_requests[answer.number]
                else:
                    self._take_enveloped(sent, answer, bridges)
        finally:
            if len(again) > 1:
                self._waking.set_results(again)
                self._scheduled = True  # those who wait run before `turn`, and it sends what they ask next
            elif again:
                self._waking.set_result(*again[0])

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
            self._take_answer(answer, bridges)
            return
        # Often, a plan has run, for a caller on this loop. Such a request has no memory to free.
        del self._sent[answer.number]
        envelope.elsewhere = None
        self._bridge.awaited -= 1
        if envelope.watch is not None:
            envelope.unwatch()
        if envelope.timed_out:
            envelope.end_expired(True)
        else:
            future.set_result(answer.receipt)

    def _take_answer(self, answer: Any, bridges: set[LoopBridge]) -> None:
        sent = self._sent.get(answer.number)
        if sent is None:
            raise BadFrame(f"an answer to request {answer.number}, which was not sent")
        if not isinstance(sent, Sent):
            sent = self._with_envelope(answer.number, sent)
        envelope = sent.envelope
        if type(answer) is NeedsRoom:
            self._give_room(sent, answer.nbytes)
            return
        if type(answer) is Withdrawn:
            self._end_expired(envelope, answer.started)
            return
        del self._sent[answer.number]
        envelope.elsewhere = None
        value, error = self._outcomes.of(sent, answer)
        if envelope.timed_out:  # it was answered before the server knew of the timeout
            started = type(answer) is not Dropped and not isinstance(error, StaleBufferError)
            if isinstance(error, DeadlineExceeded):
                started = error.started
            self._end_expired(envelope, started)
        self._note(envelope.message, value, error)
        self._reply(envelope, value, error, bridges)

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
            self.staging.give_back(sent.room)
            sent.room = None
        try:
            sent.room = self.staging.take(nbytes)
        except CudnnActorError as error:
            self._reply(sent.envelope, None, error)
            self._send(Room(sent.number, None, 0))
            return
        self._send(Room(sent.number, place_of(sent.room), sent.room.nbytes))

    def _note(self, message: Any, value: Any, error: Exception | None) -> None:
        """Note which buffers the client has after an answer, for its own checks."""
        if error is None and isinstance(message, Allocate | ShareWeights | Import) and value is not None:
            self._held.add(value)
        elif error is None and isinstance(message, Free):
            self._held.end(message.buffer)

    def _reply(
        self,
        envelope: Envelope,
        value: Any,
        error: Exception | None,
        bridges: set[LoopBridge] | None = None,
    ) -> None:
        """Give a reply: at once to a caller on this loop."""
        if (observer := self.observer) is not None:
            observer.answered(envelope, value, error, 0, 0)
        bridge = envelope.bridge
        if bridge is self._bridge and asyncio._get_running_loop() is self._loop:
            bridge.awaited -= 1
            if envelope.watch is not None:
                envelope.unwatch()
            envelope.deliver(value, error)
        elif (waker := envelope.settle(value, error)) is not None:
            if bridges is None:
                waker.wake()
            else:
                bridges.add(waker)
        freed = self._ended and isinstance(envelope.message, Free)  # the server frees its clients' buffers
        if error is not None and not envelope.wants_reply and not freed:
            log.warning("request.failed", message=type(envelope.message).__name__, error=str(error))

    def _tell_not_run(self, envelope: Envelope, error: Exception) -> None:
        """See `Mailbox.on_refusal`."""
        if (observer := self.observer) is not None:
            observer.not_run(envelope, error)

    def end(self, reason: str) -> None:
        """Close the connection: all requests get `ServiceStopped`. On the owning loop. Idempotent."""
        if self._ended:
            return
        self._ended = True
        self._awaiting.end()
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        self._channel.close()
        self.close(reason)
        left, self._sent = self._sent, {}
        for number, waiting in left.items():
            sent = waiting if isinstance(waiting, Sent) else self._with_envelope(number, waiting)
            sent.envelope.elsewhere = None
            self._reply(sent.envelope, None, ActorStopped(reason=reason, interrupted=True))
        self.staging.close()
        self._on_lost(reason)

    def forget_parent(self) -> None:
        """Refuse all requests in a forked child, because the connection is the parent's."""
        super().forget_parent()
        self._sent.clear()
        self._ended = True
