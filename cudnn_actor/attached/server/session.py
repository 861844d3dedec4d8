"""The session of one client: its connection, its requests, and their order.

Everything here runs on the event loop of the server, so nothing needs a lock. Requests wait in the fair share
until it is their turn. Then they are put into the service's mailbox, in the order in which their client has
sent them. So the service runs them in that order.

An exception that nobody foresaw fails one request, or ends the session. Either way, the request leaves the
fair share.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from cudnn_actor.actors import LoopBridge
from cudnn_actor.actors.awake import look_at
from cudnn_actor.actors.logs import Log
from cudnn_actor.attached.server.array_answers import ArrayAnswers
from cudnn_actor.attached.server.asked import Asked, Known
from cudnn_actor.attached.server.copies import Copies, other_digest
from cudnn_actor.attached.server.failures import failure_answer
from cudnn_actor.attached.server.granted import note_answer, note_failure
from cudnn_actor.attached.server.holdings import Holdings, references
from cudnn_actor.attached.server.moves import message_of, require_mover
from cudnn_actor.attached.server.patience import Patience
from cudnn_actor.attached.server.received import Received
from cudnn_actor.attached.server.segments import Segments
from cudnn_actor.attached.server.sending import Sending
from cudnn_actor.attached.server.server import Server
from cudnn_actor.attached.server.shared_weights import Digest
from cudnn_actor.attached.wire import (
    VERSION,
    Answer,
    Attach,
    Done,
    DropSegment,
    ExportBuffer,
    Exported,
    ForgetGraph,
    ForgetMessages,
    Given,
    ImportBuffer,
    KnowGraph,
    MapSegment,
    Refused,
    Request,
    Requests,
    Room,
    Withdraw,
    Withdrawn,
)
from cudnn_actor.broker.request_checks import check_message
from cudnn_actor.broker.service_state import Import
from cudnn_actor.memory import ExportedRange
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import BadFrame
from cudnn_actor.protocol.errors import (
    CudnnActorError,
    InvalidRequest,
    MailboxFull,
)
from cudnn_actor.protocol.messages.codec import encode_reply
from cudnn_actor.protocol.messages.messages import (
    Allocate,
    Drain,
    Free,
    LendStaging,
    UnloadModel,
)
from cudnn_actor.protocol.messages.model_messages import ModelRef
from cudnn_actor.protocol.messages.receipts import Receipt
from cudnn_actor.protocol.types.buffers import BufferRef

__all__ = ["Session"]

log = Log("cudnn_actor.attached")
_PLAIN = Request(b"")  # the other fields of a request that is only a message with a number


class Session:
    """The session of one client.

    Parameters
    ----------
    server
        The server of the session.
    channel
        The connection. This object owns it from now on.
    pid
        The process id of the client, for log lines.
    limit
        The bytes of buffers that the client may have; None for no limit.
    """

    def __init__(self, server: Server, channel: Channel, pid: int, limit: int | None) -> None:
        self._server, self.channel, self.pid = server, channel, pid
        self.name = ""
        self.open = True
        self.holdings = Holdings(server.state, server.shared, limit)
        self.asked: dict[int, Asked] = {}
        """The client's requests that have not been answered, by number, in order."""
        self._segments = Segments()
        state = server.state
        self.received = Received(server.reading, self._segments, state.memory.device, state.cache_limit)
        self.copies = Copies(server.copies)
        self._drains: deque[int] = deque()
        self._last = 0
        self._loop = asyncio.get_running_loop()
        self._bridge = LoopBridge.of_running_loop()
        self.tasks: set[asyncio.Task[None]] = set()
        self._arrays = ArrayAnswers(
            self._segments, answer=self._answer, end_request=self._end_request, in_task=self._in_task
        )
        self._patience = Patience()
        self._nearness = server.nearness
        self._handlers: dict[type, Any] = {
            Requests: self._take_requests,
            MapSegment: self._map,
            DropSegment: lambda frame: self._segments.drop(frame.number),
            KnowGraph: self.received.know_graph,
            ForgetGraph: self.received.forget_graph,
            ForgetMessages: self.received.forget_messages,
            Withdraw: self._withdraw,
            Room: lambda frame: self._arrays.take_room(frame, self.asked.get(frame.number)),
            ExportBuffer: self._take_move,
            ImportBuffer: self._take_move,
        }
        self._looks = look_at(channel.fileno())
        self._sending = Sending(channel, self._loop, readable=self._readable, fail=self._end_by_fault)
        self.send, self.tell = self._sending.send, self._sending.tell

    def __repr__(self) -> str:
        return f"<session of {self.name!r}, process {self.pid}>"

    # The connection.

    def _readable(self) -> None:
        channel, frames = self.channel, self.channel.frames
        try:
            came = channel.fetch() and bool(frames)
            while frames:
                if not self.open:
                    return
                frame = frames.popleft()
                if type(frame) is Requests and self.name:
                    self._take_requests(frame)
                else:
                    self._take(frame)
            if self._patience.waits_since is not None or channel.has_rest:
                self._patience.note_rest(channel, came=came, attached=bool(self.name))
        except BadFrame as error:
            self._refuse_frame(str(error))
        except OSError as error:  # there was no descriptor or no memory to map a segment
            self._refuse_frame(f"a segment could not be mapped: {error}")
        except Exception:  # noqa: BLE001 - it is logged
            self._end_by_fault()
        except BaseException:  # of a signal handler: nothing says how far the frame was taken
            self.end()
            raise
        if self.open and channel.ended:
            self.end()
        elif self.open and self._server.share.waits:
            self._server.pump()

    def look(self) -> bool:
        """Take the requests that have come. Returns whether any had. For a loop that stays awake."""
        if self._sending.paused or not self.open or not self._looks():
            return False
        self._readable()
        return True

    def check_patience(self, now_s: float) -> None:
        """End the session if its client has begun a frame long ago and not completed it."""
        if reason := self._patience.end_by(now_s):
            self._refuse_frame(reason)

    def _take(self, frame: Any) -> None:
        if type(frame) is Attach:
            self._introduce(frame)
        elif not self.name:
            raise BadFrame(f"{type(frame).__name__} came before Attach")
        else:
            self._handlers[type(frame)](frame)

    def _introduce(self, frame: Attach) -> None:
        if self.name:
            raise BadFrame("Attach came twice")
        if frame.version != VERSION:
            raise BadFrame(f"the client has version {frame.version} of the protocol, and this is {VERSION}")
        self.name = frame.name[:100] or "client"
        self._server.welcome(self)
        log.info("client.attached", client=self.name, pid=self.pid)

    def _refuse_frame(self, reason: str) -> None:
        log.warning("client.malformed", client=self.name, pid=self.pid, reason=reason)
        self.end()

    def _end_by_fault(self) -> None:
        """End the session because of an exception that nobody foresaw. It is logged."""
        log.exception("client.failed", client=self.name, pid=self.pid)
        self.end()

    def end(self) -> None:
        """Close the connection, withdraw requests that have not started, and free the client's buffers and
        models. Idempotent."""
        if not self.open:
            return
        self.open = False
        self._sending.stop()
        self.channel.close()
        self._server.share.leave(self)
        for asked in tuple(self.asked.values()):
            asked.withdraw()
            if asked.cost_us and not asked.is_in_work:
                self._charge(asked, None, has_run=False)
        held = len(self.holdings)
        self.holdings.end()
        self._segments.clear()
        self.received.clear()
        for task in self.tasks:
            task.cancel()
        self._server.forget(self)
        if self.name:
            log.info("client.detached", client=self.name, pid=self.pid, held=held)
        self._server.pump()

    # Frames to the client.

    def _answer(self, answer: Answer) -> None:
        """Send an answer: at once if no other request is open, else with the other answers of this iteration
        of the loop."""
        self._sending.answers.append(answer)
        if not self.asked:
            self._sending.flush()
            self._nearness.note_answered(self.look)
        else:
            self._sending.flush_soon()

    # Requests.

    def _take_requests(self, frame: Requests) -> None:
        self._nearness.note_came()
        if frame.first <= self._last:
            self._count_request(frame.first)
        kept = self.received.kept
        for number, request in enumerate(frame.requests, frame.first):
            if not self.open:  # an answer to one before could not be sent
                return
            self._last = number
            if type(request) is not int or request not in kept:
                self.received.note_number(request)
            try:
                self._put(number, request)
            except Exception as error:
                if not isinstance(error, CudnnActorError):
                    log.exception("request.failed", client=self.name, message=self.received.kind_of(request))
                if (asked := self.asked.get(number)) is None:
                    self._answer(failure_answer(number, error))
                else:
                    self.give_up(asked, error)

    def _count_request(self, number: int) -> None:
        if number <= self._last:
            raise BadFrame(f"request {number} came after {self._last}")
        self._last = number

    def _check_window(self) -> None:
        if len(self.asked) >= self._server.window:
            raise MailboxFull(capacity=self._server.window)

    def _put(self, number: int, request: Request | int) -> None:
        server = self._server
        if len(self.asked) >= server.window:
            self._check_window()
        known: Any = self.received.kept.get(request) if isinstance(request, int) else None
        if type(known) is not Known:
            known = self.received.message(request)
        if isinstance(request, int):
            request = _PLAIN
        asked = Asked(
            self, number, known, request.room, request.room_bytes, request.timeout_s, request.headers
        )
        if known.runs_plan and not request.share:  # nearly all: `_put_in_turn`, inlined
            self.asked[asked.number] = asked
            cost_us = known.cost_us or server.costs.estimate(known)
            if server.share.pass_through(self, cost_us):
                asked.cost_us = cost_us
                self._run_plan(asked, known)
            else:
                server.share.put(self, asked, cost_us)
            return
        message = known.message
        if server.lent.run_of(message) is not None:
            # It takes no turn. It waits for a batch with requests of other clients. Fair share would count
            # that wait as time of the device, and give the service one such request at a time.
            known.control = True
        if isinstance(message, LendStaging):
            raise InvalidRequest(
                field="message",
                value="LendStaging",
                problem="is answered by clients",
                fix="use connect",
            )
        if request.share and not isinstance(message, Allocate):
            raise other_digest(request.share)
        if request.share:
            asked.digest = request.share, message.spec
            if not self.copies.at_once(known):
                self.asked[number] = asked
                self._in_task(self._put_checked(asked, request.share))
                return
            self._note_copy(asked, self.copies.copy_and_check(known, request.share))
        self._put_in_turn(asked)

    def _take_move(self, frame: ExportBuffer | ImportBuffer) -> None:
        """Take a request to move a buffer. Only one client may send such requests: an arena also has buffers
        of others."""
        self._count_request(frame.number)
        try:
            message = message_of(frame, self.channel)
        except OSError as error:  # there was no room for the descriptor
            self._answer(failure_answer(frame.number, error))
            return
        imports = isinstance(message, Import)
        try:
            require_mover(self.pid, self._server.mover, message)
            self._check_window()
            if imports:
                self.holdings.begin_import()
        except CudnnActorError as error:
            self._answer(Refused(frame.number, error.to_record()))
            return
        known = Known(message, references(message))
        asked = Asked(self, frame.number, known, None, 0, frame.timeout_s)
        asked.imports = imports
        self._put_in_turn(asked)

    async def _put_checked(self, asked: Asked, share: str) -> None:
        """Put a request into the queue once there is room for a copy of its values, and a thread has checked
        their digest.

        Later requests may overtake it: none of them can name its buffer, which does not exist yet.
        """
        try:
            self._note_copy(asked, await self.copies.checked_in_turn(asked.known, share))
            if self.open:
                self._put_in_turn(asked)
        except Exception as error:  # noqa: BLE001 - no memory, no thread, another digest: the answer says it
            self.give_up(asked, error)
        if self.open:
            self._server.pump()

    def _note_copy(self, asked: Asked, known: Known) -> None:
        asked.known = known
        asked.copied = 0 if known.message.data is None else known.message.data.nbytes

    def _put_in_turn(self, asked: Asked) -> None:
        message = asked.known.message
        self.asked[asked.number] = asked
        if isinstance(message, Drain):
            self._drains.append(asked.number)
            self._answer_drains()
        elif asked.known.control:
            self.hand_over(asked)
        else:
            share = self._server.share
            cost_us = self._server.costs.estimate(asked.known)
            if share.pass_through(self, cost_us):
                asked.cost_us = cost_us
                self.hand_over(asked)
            else:
                share.put(self, asked, cost_us)

    def give_up(self, asked: Asked, error: Exception) -> None:
        """Answer a request with an error, unless the service has it or it is answered already."""
        if not asked.is_in_work:
            asked.deliver(None, error)

    def hand_over(self, asked: Asked) -> None:
        """Send the service a request whose turn it is, unless it was withdrawn."""
        if asked.withdrawn or asked.answered:
            asked.deliver(None, None)
            if asked.cost_us:  # it had its answer while it waited
                self._charge(asked, None, has_run=False)
            return
        known, state, holdings = asked.known, self._server.state, self.holdings
        if known.runs_plan:
            self._run_plan(asked, known)
            return
        message = known.message
        try:
            if known.control and (run := self._server.lent.run_of(message)) is not None:
                self._arrays.check_room(message)
                self._server.lent.begin(asked, run)
                return
            if (name := self._server.lent.name_of(message)) is not None:
                self._arrays.check_room(message)
                asked.sent_ns = time.perf_counter_ns()
                self._server.lent.start(asked, name, self._in_context(asked))
                return
            if known.checked != holdings.epoch:
                holdings.check(message, known.named)
                known.checked = holdings.epoch
            if self._answered_here(asked, message):
                return
            self._arrays.check_room(message)
            if isinstance(message, Allocate):
                holdings.reserve(message.spec.nbytes)
                asked.reserved = message.spec.nbytes
            self._send_checked(asked, check_message(state, message, {}))
        except Exception as error:  # noqa: BLE001 - the answer says it
            self._fail(asked, error)

    def _run_plan(self, asked: Asked, known: Known) -> None:
        """Send the service a request that runs a plan. Its bytes are checked once, until a buffer ends."""
        state, holdings = self._server.state, self.holdings
        try:
            if known.checked != holdings.epoch:
                holdings.check(known.message, known.named)
                known.checked = holdings.epoch
            found: Any = known.found()
            if found is None or (slots := found.bound) is None or slots.epoch != state.memory.epoch:
                found = check_message(state, known.message, {})
                known.found = weakref.ref(found)
            self._send_checked(asked, found)
        except Exception as error:  # noqa: BLE001 - the answer says it
            self._fail(asked, error)

    def _send_checked(self, asked: Asked, found: Any) -> None:
        asked.sent_ns = time.perf_counter_ns()
        asked.send(self._server.state, self._bridge, found)
        if self._server.share.has_one and asked.cost_us:
            self._nearness.note_sent_alone(asked.cost_us)

    def _fail(self, asked: Asked, error: Exception) -> None:
        if not isinstance(error, CudnnActorError):
            log.exception("request.failed", client=self.name, message=type(asked.known.message).__name__)
        self.give_up(asked, error)

    def _answered_here(self, asked: Asked, message: Any) -> bool:
        """Answer a request that needs nothing of the service. Returns False for any other request."""
        if isinstance(message, UnloadModel) and not self.holdings.has(message.model):
            asked.deliver(None, None)
            return True
        if asked.digest is not None and isinstance(message, Allocate):
            shared = self._server.shared.find(Digest(*asked.digest))
            if shared is None and message.data is not None:
                return False
            asked.deliver(shared, None)
            return True
        if isinstance(message, Free) and self.holdings.drop_shared(message.buffer):
            asked.digest = ("", message.buffer.spec)
            asked.deliver(None, None)
            return True
        return False

    def _withdraw(self, frame: Withdraw) -> None:
        asked = self.asked.get(frame.number)
        if asked is None:  # it was answered meanwhile
            return
        never = asked.withdraw()
        if frame.tells:
            self._answer(Withdrawn(asked.number, not never))

    # Answers.

    def answered(self, asked: Asked, value: Any, error: BaseException | None) -> None:
        """Take the answer of a request. See `Takes`."""
        if asked.known.runs_plan and type(value) is Receipt and self.open:  # nearly all
            self._end_run(asked, Done(asked.number, value))  # first: the client waits for it
            self._charge(asked, value, has_run=True)
        else:
            self._take_answer(asked, value, error)

    def answered_wrongly(self, asked: Asked, value: Any, problem: BaseException) -> None:
        """Answer a request with an error because `answered` has raised one. See `Takes`.

        The session ends instead if the answer may have been sent, or if it is something that the client would
        have to give back.
        """
        kind = type(asked.known.message).__name__
        log.error("request.failed", client=self.name, message=kind, exc_info=problem)
        if asked.cost_us:
            self._charge(asked, None, has_run=False)
        gives = isinstance(value, BufferRef | ModelRef | ExportedRange)
        if not self.open:
            self.asked.pop(asked.number, None)
        elif not gives and asked.number in self.asked:
            self._end_request(asked, failure_answer(asked.number, problem))
        else:
            if gives and asked.digest is None and not self.holdings.holds(value):
                self._server.state.discard(value)
            self.end()

    def _take_answer(self, asked: Asked, value: Any, error: BaseException | None) -> None:
        self._settle(asked, value, error)
        if asked.copied:
            self.copies.release(asked.copied)
            asked.copied = 0
        if not self.open:
            self.asked.pop(asked.number, None)
            return
        if error is None and (asked.sent_ns or not asked.withdrawn):
            value = note_answer(self._server, self.holdings, asked, value)
        else:
            note_failure(self.holdings, asked, error)
        if error is not None or (asked.withdrawn and value is None):
            self._end_request(asked, failure_answer(asked.number, error))
        elif isinstance(value, np.ndarray):
            self._arrays.give(asked, [(None, value)])
        elif isinstance(value, dict):
            self._arrays.give(asked, list(value.items()))
        elif isinstance(value, Receipt):
            self._end_request(asked, Done(asked.number, value))
        elif isinstance(value, ExportedRange):
            self._give_range(asked.number, value)
        else:
            self._end_request(asked, Given(asked.number, encode_reply(value)))

    def _settle(self, asked: Asked, value: Any, error: BaseException | None) -> None:
        """Tell fair share how long a request has taken. Free its result if the client has gone."""
        if asked.cost_us:
            self._charge(asked, value, has_run=bool(asked.sent_ns) and error is None)
        if not self.open:
            self._server.state.discard(value)

    def _charge(self, asked: Asked, value: Any, *, has_run: bool) -> None:
        server, share = self._server, self._server.share
        taken_us = 0.0
        try:
            if has_run:
                taken_us = server.costs.note(asked, value, time.perf_counter_ns())
        finally:
            share.finish(self, asked.cost_us, taken_us)
            asked.cost_us = 0.0
        if share.waits:
            server.pump_soon()

    def _give_range(self, number: int, found: ExportedRange) -> None:
        """Answer an `Export`. The channel duplicates the descriptor if the frame must wait."""
        self.asked.pop(number, None)
        try:
            self._sending.flush()
            self._sending.send(Exported(number, found.arena_bytes, found.offset), (found.descriptor,))
        except OSError as error:
            self._answer(failure_answer(number, error))
        finally:
            found.close()
        if self._drains:
            self._answer_drains()

    def _in_task(
        self, work: Coroutine[Any, Any, None], context: contextvars.Context | None = None
    ) -> asyncio.Task[None]:
        task = self._loop.create_task(work, context=context)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def _in_context(self, asked: Asked) -> Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]:
        """A function that runs a request's work in a task: in the context of the client's span, if spans are
        on."""
        if (observer := self._server.state.counters.observer) is None:
            return self._in_task
        return functools.partial(self._in_task, context=asked.context(observer))

    def _end_request(self, asked: Asked, answer: Answer) -> None:
        self.asked.pop(asked.number, None)
        self._answer(answer)
        if self._drains:
            self._answer_drains()

    def _end_run(self, asked: Asked, answer: Done) -> None:
        """Do what `_end_request` does, in fewer steps for the only open request."""
        del self.asked[asked.number]
        if self.asked or self._sending.answers:
            self._end_request(asked, answer)
        else:  # no drain waits: it would be open
            self._sending.send_answers([answer])
            self._nearness.note_answered(self.look)

    def _answer_drains(self) -> None:
        """Answer each drain before which no request is open. Numbers grow, so the first one in the dict is
        the least."""
        while self._drains and next(iter(self.asked)) == self._drains[0]:
            number = self._drains.popleft()
            del self.asked[number]
            self._answer(Given(number, encode_reply(None)))

    def _map(self, frame: MapSegment) -> None:
        self._segments.map(frame.number, frame.nbytes, self.channel.take_descriptor())
