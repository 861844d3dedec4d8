"""The client's mailbox: it sends requests to the service's process, and delivers the answers.

The event loop that has connected owns the connection: it alone sends and reads, and changes the client's
memory. Other threads and loops put their messages into the mailbox and wake that loop. When nothing is in
flight, a message is sent at once; else the messages of one iteration of the loop are sent together.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
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
from cudnn_actor.attached.client.delivery import Delivery
from cudnn_actor.attached.client.held import HeldBuffers
from cudnn_actor.attached.client.kept_messages import KeptMessages
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
    DropSegment,
    Exported,
    ForgetGraph,
    ForgetMessages,
    KnowGraph,
    MapSegment,
    Near,
    Receipts,
    Request,
    Requests,
    Withdraw,
)
from cudnn_actor.broker.message_cache import CachedMessage
from cudnn_actor.broker.request_counts import RequestObserver
from cudnn_actor.broker.service_state import Export, Import
from cudnn_actor.isolation.known_graphs import SentGraphs, known_form
from cudnn_actor.isolation.staging import Staging
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import BadFrame
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.messages.messages import Allocate, LendStaging, View

__all__ = ["Link"]

log = Log("cudnn_actor.attached")

_MOST_GATHERED, _GATHERED_BYTES = 32, 64 << 10
"""Gathered messages are sent at once when there are this many, or when they have this many bytes."""
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
        self._unsent: list[Request | int] = []
        """Requests that are not in a frame yet, numbered from `_told` on. They are in `_sent` already."""
        self._unsent_bytes = 0
        self._act_at = 1
        """`ask_again` calls `_act` when so many requests are not in a frame."""
        self._graphs = SentGraphs(
            graphs,
            know=self._make_known,
            flush=self._flush,
            forget=lambda identity: self._forget_messages(ForgetGraph(identity)),
        )
        self._last = self._told = 0
        """The numbers of the last request, and of the last one that was put into a frame."""
        self._kept = KeptMessages()
        self._again = self._kept.again
        self._outcomes = Outcomes(self.staging, channel)
        self._asks_on = 0
        """The ident of the thread that calls those who wait for answers now, if nothing keeps `ask_again`
        from sending what they ask; else 0. Any thread may write 0."""
        self._waking = Waking(self._loop, before=self._begin_waking, after=self._end_waking)
        self._delivery = Delivery(
            self,
            self._sent,
            self._bridge,
            held=held,
            kept=self._kept,
            outcomes=self._outcomes,
            staging=self.staging,
            waking=self._waking,
            send=self._send,
        )
        self.on_refusal = self._delivery.tell_not_run
        self._scheduled = self._ended = False
        self._flushes = False
        """Whether a frame of requests, or one that moves a buffer, is being made or sent. Meanwhile, no other
        frame is sent."""
        self._gathered = 0
        self._awaiting = Awaiting(self._loop, channel.fileno(), self._readable)
        self._loop.add_reader(channel.fileno(), self._readable)

    def admit(self, envelope: Envelope, *, waits: bool = True) -> None:
        """Accept a message, and schedule its sending. See `Mailbox.admit`."""
        if envelope.bridge is not self._bridge:
            super().admit(envelope, waits=waits)
            self._asks_on = 0  # it must not be overtaken
            self.needs_thread = True  # the thread of this loop delivers the answers of other loops
            self.call(self.turn)
            return
        # The envelope's bridge is the owning loop's, so this is the owning loop's thread.
        if envelope.found is not None and len(self._sent) < self._window and self._takes_at_once():
            self._admit_here(envelope)
        else:
            super().admit(envelope, waits=waits)
            self._asks_on = 0  # it must not be overtaken
        self._gathered += 1
        if len(self._sent) == len(self._unsent) or self._gathered >= _MOST_GATHERED:  # the server is idle
            self.turn()
        elif not self._scheduled:
            self._schedule()

    def close(self, reason: str) -> None:
        """Refuse all further messages. See `Mailbox.close`."""
        super().close(reason)
        self._asks_on = 0

    @property
    def observer(self) -> RequestObserver | None:
        """Told of each request and its answer; None for nobody. On the owning loop, but of requests that are
        refused, on any thread. Any thread may replace it."""
        return self._delivery.observer

    @observer.setter
    def observer(self, observer: RequestObserver | None) -> None:
        self._delivery.observer = observer
        self._asks_on = 0

    def _takes_at_once(self) -> bool:
        """Whether a message that runs a plan can be made ready without going through the mailbox, if the
        window has room.

        It cannot if another message waits there, which it must not overtake. A message that another thread
        adds at this moment has no defined order to it. Only this loop can close the mailbox meanwhile. Nor
        can it with an observer, since the mailbox notes the time of admission.
        """
        return (
            not (self._ordinary or self._control or self._afterwards)
            and self._closed is None
            and self._delivery.observer is None
            and not self._flushes
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
        envelope.elsewhere = sent = Sent(self, envelope)
        envelope.claim.clear()
        self._put_by(sent, Request(body, None, 0, envelope.timeout_s), envelope.found)

    def call(self, what: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the owning loop soon, or not at all if the loop has closed. Any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(what, *arguments)

    def waiting_elsewhere(self) -> int:
        """0: requests that the service's process has do not count, as the window bounds them."""
        return 0

    def withdraw(self, sent: Sent, expired: bool) -> None:
        """Tell the service's process that nobody waits for a request. On the owning loop.

        `expired`: whether the request's timeout has passed, so that the server is to say whether it has
        started. If the request has been answered meanwhile, the answer has told the caller.
        """
        if self._sent.get(sent.number) is sent:
            self._withdraw(sent.number, expired)

    def _withdraw(self, number: int, expired: bool) -> None:
        if not self._ended:
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
        future: asyncio.Future[Any] = _Future(loop=self._loop)  # first: it may run a finalizer that sends
        sent = self._sent
        if (self._asks_on != _get_ident() and not self._asks_here()) or len(sent) >= self._window:
            return None
        try:
            number = self._again[id(message)]
            if number < 0:
                self._graphs.knows(message)  # it counts as used
                number = -self._again[id(message)]
        except KeyError:
            return None
        # One step, in which no finalizer and no signal handler runs.
        unsent = self._unsent
        last = self._last + 1
        sent[last] = future
        self._last = last
        try:
            unsent.append(number)
        except MemoryError:
            future.cancel()  # nobody gets it
            raise
        if len(unsent) >= self._act_at:
            self._act()
        return future

    def _asks_here(self) -> bool:
        """Whether `ask_again` may send on this thread, if the window has room."""
        return _running_loop() is self._loop and self._takes_at_once()

    def _act(self) -> None:
        """Send the requests that are ready if they are many, or if the server is idle. Else, see to it that
        they are sent soon."""
        if self._scheduled:
            self._flush()
        elif len(self._sent) == len(self._unsent):
            self.turn()
        else:
            self._schedule()

    def _schedule(self) -> None:
        self._scheduled, self._act_at = True, _MOST_GATHERED
        self._loop.call_soon(self.turn)

    def _begin_waking(self) -> None:
        """Let those who are called now ask. What they ask is sent once all were called, or if it is much."""
        self._scheduled, self._act_at = True, _MOST_GATHERED
        self._asks_on = _get_ident()
        if not self._takes_at_once():  # looked at last: another thread writes 0 after what it has changed
            self._asks_on = 0

    def _end_waking(self) -> None:
        self._asks_on = 0
        self.turn()

    def withdraw_if_cancelled(self) -> Callable[[asyncio.Future[Any]], object]:
        """See `Mailbox.withdraw_if_cancelled`."""
        self.if_cancelled = self._waking.if_cancelled = self._withdraw_cancelled
        return self.if_cancelled

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
                self._withdraw(number, False)
                return

    def turn(self) -> None:
        """Send the messages that wait, as many as the window has room for."""
        self._scheduled, self._act_at = False, 1
        self._gathered = 0
        if self._ended:
            return
        if self._flushes:  # a finalizer sends a message
            self._schedule()
            return
        if self._ordinary or self._control or self._afterwards:
            while (room := self._window - len(self._sent)) > 0 and (batch := self.take(room, 0.0)):
                self._prepare_all(batch)
        self._flush()

    def _prepare_all(self, batch: list[Envelope]) -> None:
        """Make requests ready to be sent. If one raises, those behind it wait in the mailbox again."""
        for count, envelope in enumerate(batch, 1):
            try:
                self._prepare(envelope)
            except BaseException:  # also of a signal handler
                self._asks_on = 0
                self.restore(batch[count:])
                self._schedule()  # it also sends those that are ready, or ends the connection
                raise

    def _flush(self) -> None:
        """Send the requests that are ready, in one frame.

        A finalizer that runs while a frame is made or sent may send messages. They are sent after it."""
        if self._last == self._told or self._ended or self._flushes:
            return
        self._flushes = True
        try:
            while self._last != self._told and not self._ended:
                self._send_unsent()
        finally:
            self._flushes = False
        if self.loops_may_stay_awake:
            self._awaiting.note_sent(len(self._sent))

    def _send_unsent(self) -> None:
        fresh: list[Request | int] = []
        frame: Requests | None = None
        # One step with the next assignment: more names at once would be a tuple, and making it may run a
        # finalizer, whose request would be counted and not sent.
        first, requests, last = self._told + 1, self._unsent, self._last
        try:
            self._unsent, self._unsent_bytes, self._told = fresh, 0, last
            if len(requests) == last - first + 1:
                self._send(frame := Requests(first, requests))
            else:  # there was no memory to note one
                self.end("this process could not send a request")
        except BaseException:  # also of a signal handler
            self._send_after_all(frame)
            raise

    def _send_after_all(self, frame: Requests | None) -> None:
        """Send requests whose sending was interrupted. If that fails, too, they get the end of the
        connection, so that nobody waits for ever."""
        try:
            if frame is not None:
                self._send(frame)
                return
        except BaseException:  # noqa: BLE001 - the caller raises the first one
            pass
        self.end("this process could not send a request")

    def _prepare(self, envelope: Envelope) -> None:
        """Make a request ready to be sent, or answer its message here."""
        message, runs_plan = envelope.message, envelope.found is not None
        if self._ended:  # a message of the same batch has ended it
            self._delivery.reply(envelope, None, ActorStopped(reason=self.closed or "closed"))
            return
        if not runs_plan and is_stop(message):
            self._delivery.reply(envelope, None, None)
            self.end("asked to stop")
            return
        sent = Sent(self, envelope)
        if envelope.is_unawaited or not envelope.hand_over(sent):
            self._delivery.reply(envelope, None, ActorStopped(reason="withdrawn"))
            return
        try:
            if isinstance(message, Export | Import):
                self._send_move(sent, envelope, message)
                return
            if not runs_plan and isinstance(message, LendStaging):
                lent = self.staging.lend(message.spec.dims, message.spec.dtype.numpy)
                self._delivery.reply(envelope, lent, None)
                return
            request, cached = self._request(sent, envelope, message), envelope.found
            observer = self._delivery.observer
            if observer is not None and (headers := observer.sent(envelope)) is not None:
                request = msgspec.structs.replace(request, headers=headers)
            self._put_by(sent, request, cached)
        except Exception as error:
            if sent.number and self._sent.get(sent.number) is sent:  # the connection has its answer
                raise
            self._outcomes.free(sent)
            self._delivery.reply(envelope, None, as_answer(error))  # whatever a message of the user's raises

    def _send_move(self, sent: Sent, envelope: Envelope, message: Export | Import) -> None:
        """Send a request that is a frame of its own, after all earlier requests. Raises `OSError`."""
        while self._last != self._told and not self._ended:  # a finalizer may send messages meanwhile
            self._flush()
        self._flushes = True
        try:
            sent.number = self._last = self._told = self._last + 1
            self._send(*move_frame(sent.number, message, envelope.timeout_s))
            self._sent[sent.number] = sent
        finally:
            self._flushes = False

    def _put_by(self, sent: Sent, request: Request, cached: CachedMessage | None) -> None:
        """Let a request that is ready wait for the next frame. It gets its number here.

        A finalizer may send messages meanwhile, as in `ask_again`, but not in the one step. `cached`: the
        record of a message that runs a plan; the message gets a number, too.
        """
        kept = self._kept
        nbytes = len(request.body)  # type: ignore[arg-type]  # not a number yet
        numbered: Request | None = request
        times = -1
        while cached is not None and times != kept.times:
            times = kept.times
            numbered = kept.request_by_number(request, cached)
            if numbered is None:
                self._forget_messages(ForgetMessages())
                if self._ended:
                    raise ActorStopped(reason=self.closed or "closed")
        assert numbered is not None
        # One step.
        unsent, last = self._unsent, self._last + 1
        self._sent[last] = sent
        sent.number = self._last = last
        unsent.append(numbered)
        if cached is not None:
            kept.note(numbered, cached, self._held.epoch, times)
        self._unsent_bytes += nbytes
        if self._unsent_bytes > _GATHERED_BYTES:
            self._flush()

    def _request(self, sent: Sent, envelope: Envelope, message: Any) -> Request:
        cached = envelope.found
        if cached is not None:  # the message runs a plan: it names buffers, and has no arrays
            if cached.body is None:
                cached.body = self._writing.without_arrays(known_form(message))
            if not self._graphs.knows(message):
                self._graphs.send(message.graph)
            return Request(cached.body, None, 0, envelope.timeout_s)
        digest = ""
        if isinstance(message, ShareWeights):
            digest, message = message.digest, Allocate(spec=message.spec, data=message.data)
        if isinstance(message, View):
            raise TypeError("View, whose answer is memory of the service's process")
        body = self._writing.write(sent, message)
        check_length(type(message).__name__, len(body))
        self._outcomes.make_room(sent, message)
        place, nbytes = (None, 0) if sent.room is None else (place_of(sent.room), sent.room.nbytes)
        return Request(body, place, nbytes, envelope.timeout_s, digest)

    def _forget_messages(self, frame: ForgetMessages | ForgetGraph) -> None:
        """Send a frame that takes the numbers of all messages back."""
        with self._kept.none_kept():
            while self._last != self._told and not self._ended:  # they name messages by their numbers
                self._flush()
            if not self._ended:
                self._send(frame)

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
            self._waking.wake_soon()
        except BaseException:  # of a signal handler, or for want of memory: the answers behind would be lost
            self.end("this process could not take an answer")
            self._waking.wake_soon()
            raise
        else:
            try:
                if self._waking:
                    self._waking.wake()
            except BaseException:  # perhaps of a signal handler, before anybody was called
                self._waking.wake_soon()
                raise
        finally:
            for bridge in bridges:
                bridge.wake()
        if self._channel.ended:
            self.end("the connection to the service's process has ended")
        elif self._ordinary or self._control:
            self.turn()

    def _take_frames(self, bridges: set[LoopBridge]) -> None:
        for frame in self._channel.receive():
            if type(frame) is Answers:
                self._delivery.take_answers(frame.answers, bridges)
                if self.loops_may_stay_awake:
                    self._awaiting.note_answered(len(self._sent))
            elif type(frame) is Receipts:
                self._delivery.take_receipts(frame, bridges)
                if self.loops_may_stay_awake:
                    self._awaiting.note_answered(len(self._sent))
            elif type(frame) is Exported:
                self._delivery.take_answer(frame, bridges)
            elif type(frame) is Near:
                if self.loops_may_stay_awake:
                    self._awaiting.await_answer()
            else:
                self._on_frame(frame)

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
        self._delivery.end(reason)
        self.staging.close()
        self._on_lost(reason)

    def forget_parent(self) -> None:
        """Refuse all requests in a forked child, because the connection is the parent's."""
        super().forget_parent()
        self._asks_on = 0
        self._sent.clear()
        self._ended = True
