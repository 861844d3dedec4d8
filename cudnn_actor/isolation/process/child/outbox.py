"""The outbox: a worker's answers, log lines and other frames to its parent, sent in batches.

Only the worker's main thread gives answers. Log lines come from any thread.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from cudnn_actor.isolation.process.child.task import WorkerTask
from cudnn_actor.isolation.process.status import StatusPage
from cudnn_actor.isolation.process.wire import (
    LONGEST_MESSAGE,
    Answer,
    Answers,
    Counted,
    Done,
    Dropped,
    FromWorker,
    Given,
    InjectFault,
    InternalDone,
    Logged,
    Refused,
)
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import encode
from cudnn_actor.protocol.errors import CudnnActorError, ExecutionFailed, InvalidRequest, Words
from cudnn_actor.protocol.messages.codec import encode_reply

__all__ = ["Outbox"]

_MOST_BYTES = 1 << 20
"""The most bytes of values in a frame with several values. Receipts are not counted: they are short, and a
frame has at most one for each place."""

_NUMBER = struct.Struct(">d")
"""A floating-point number in a frame."""


class Outbox:
    """Collects answers and sends them to the parent.

    Parameters
    ----------
    channel
        The worker's end of the socket.
    page
        The status page, where finished requests are marked.
    """

    def __init__(self, channel: Channel, page: StatusPage) -> None:
        self._channel = channel
        self._finish, self._finish_otherwise, self._forget = page.finish, page.finish_otherwise, page.forget
        self.notes = True
        """Whether the page says which requests have finished. False for an engine that runs several requests
        at once: at a crash, some of them could be finished while earlier ones are not. With such an engine
        only an answer counts, and answers are given in the order of the work."""
        self._answers: list[Answer] = []
        self._nbytes = 0
        """The bytes of the values among the answers."""
        self._lines: deque[Logged] = deque()

    # Answers. Before an answer is sent, the page says that the request has finished (see `notes`), so that
    # after a crash in between the request counts as finished, not as begun.

    def note_done(self, answer: Done) -> None:
        """Queue the answer of a request that has run."""
        if self.notes:
            self._finish(answer.place, answer.number, answer.plan, answer.started_ns, answer.run_us)
        self._answers.append(answer)

    def done_ahead(self, task: WorkerTask, plan: str) -> Callable[[], object]:
        """A function that sends the answer of a request that has run until it is called.

        The frame is made now, while the device works. It ends with the time of the run, a number of eight
        bytes. If values arrive for the request, it is also answered where they do, first.
        """
        started_ns, number, answer = task.started_ns, task.number, task.answer
        frame = bytearray(encode(Answers([Done(task.number, task.place, plan, started_ns, 0.0)])))
        place = len(frame) - _NUMBER.size

        def send() -> None:
            took_ns = time.perf_counter_ns() - started_ns
            if self._answers or self._lines:
                self.flush()
            if answer is not None:
                answer(number, started_ns, took_ns)
            _NUMBER.pack_into(frame, place, took_ns / 1e3)
            self._channel.send_encoded(frame)
            if self._channel.backed_up:
                self._channel.send_all()

        return send

    def give(self, task: WorkerTask, value: Any) -> None:
        """Queue the answer of a request that has a value."""
        number, place, message = task.number, task.place, task.message
        if isinstance(value, np.ndarray):  # a download, which lies in staging memory already
            self.note_done(Done(number, place, "download", task.started_ns, 0.0))
            return
        body = encode_reply(value)
        if len(body) > LONGEST_MESSAGE:
            self.refuse(task, _too_long(message, len(body)))
            return
        if self._nbytes + len(body) > _MOST_BYTES:
            self.flush()
        if type(message) is InjectFault:
            self._forget(place)
        elif not message.control:  # a control message is simply sent again after a crash
            self._finish_otherwise(place, number)
        self._answers.append(Given(number, place, body))
        self._nbytes += len(body)

    def give_counts(self, answer: Counted) -> None:
        """Queue the statistics of the caches. No mark is needed: after a crash the message is sent again."""
        self._answers.append(answer)

    def note_dropped(self, task: WorkerTask) -> None:
        """Queue the answer that a request never ran, because it was withdrawn."""
        self._answers.append(Dropped(task.number, task.place))

    def refuse(self, task: WorkerTask, error: Exception) -> None:
        """Send an error at once, because the page has no room for it."""
        self._answers.append(Refused(task.number, task.place, _encodable_error(error).to_record()))
        self.flush()

    def internal_done(self, number: int, error: Exception | None) -> None:
        """Send that work of the service itself is done, after all answers so far."""
        self.flush()
        self.say(InternalDone(number, None if error is None else _encodable_error(error).to_record()))

    def flush(self) -> None:
        """Send all queued answers and lines. Waits for room in the socket if the parent does not read."""
        self.send_lines()
        if self._answers:
            answers, self._answers, self._nbytes = self._answers, [], 0
            self.say(Answers(answers))

    def say(self, frame: FromWorker, descriptors: tuple[int, ...] = ()) -> None:
        """Send a frame. Waits for room in the socket."""
        self._channel.send(frame, descriptors)
        self._channel.send_all()

    def log(self, line: Logged) -> None:
        """Queue a line. Any thread: appending is one step under the GIL."""
        self._lines.append(line)

    @property
    def has_lines(self) -> bool:
        """Whether lines wait to be sent."""
        return bool(self._lines)

    def send_lines(self) -> None:
        """Send the lines that were logged, in order."""
        while self._lines:
            self.say(self._lines.popleft())


def _too_long(message: Any, nbytes: int) -> InvalidRequest:
    return InvalidRequest(
        field="message",
        value=Words(type(message).__name__),
        problem=f"has an answer of {nbytes:,} bytes, and a worker sends at most {LONGEST_MESSAGE:,}",
        fix="ask about a smaller graph",
    )


def _encodable_error(error: BaseException) -> CudnnActorError:
    """An error that can be encoded. Another exception becomes an `ExecutionFailed` with its type's name."""
    if isinstance(error, CudnnActorError):
        return error
    return ExecutionFailed(status=type(error).__name__, detail=str(error), plan="worker")
