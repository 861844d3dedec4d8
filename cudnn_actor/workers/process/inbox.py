"""What comes to a worker from its parent.

Its main thread reads the socket when it has nothing left to do, so a request costs no hop here either. It
waits for the socket and for an eventfd, by which other threads of the worker (the one that builds plans, the
one that logs) wake it. What is not a request is done on the spot, by whoever was registered for it.
"""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import BadFrame
from cudnn_actor.protocol.messages import COMPUTE
from cudnn_actor.workers.process.outbox import Outbox
from cudnn_actor.workers.process.task import InternalTask, WorkerTask
from cudnn_actor.workers.status import StatusPage
from cudnn_actor.workers.wire import MESSAGES, Internal, Request, Requests

__all__ = ["Inbox"]

_MOST_KNOWN = 1024
"""Messages that are remembered by their bytes."""


class Inbox:
    """Requests from the parent, in order. The main thread's own, but for `nudge`.

    Parameters
    ----------
    channel
        The worker's end.
    outbox
        Its log lines are sent before a wait.
    page
        Where it is noted what has begun.
    """

    def __init__(self, channel: Channel, outbox: Outbox, page: StatusPage) -> None:
        self.on_frame: dict[type, Callable[[Any], None]] = {Internal: self._put_internal}
        """What is done with frames that are no requests."""
        self._channel = channel
        self._outbox = outbox
        self._page = page
        self._tasks: deque[WorkerTask | InternalTask] = deque()
        self._urgent: deque[WorkerTask | InternalTask] = deque()
        self._known: dict[bytes, Any] = {}
        self._early: list[Any] = []
        self._wake_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._waited_for = (channel.fileno(), self._wake_event)

    def take(self, most: int, timeout: float | None = None) -> list[WorkerTask | InternalTask]:
        """The next requests in order, control messages first; waits up to `timeout` seconds for one.

        Raises `SystemExit` when the parent has gone, `BadFrame` for bytes that are none of its.
        """
        if not (self._tasks or self._urgent or self._early):
            self._wait(timeout)
        self._read()
        urgent, tasks = self._urgent, self._tasks
        batch = [urgent.popleft() for _ in range(min(most, len(urgent)))]
        batch.extend([tasks.popleft() for _ in range(min(most - len(batch), len(tasks)))])
        return batch

    def nudge(self) -> None:
        """Wake the main thread for a look around. Any thread."""
        os.eventfd_write(self._wake_event, 1)

    def put_back(self, frames: Iterable[Any]) -> None:
        """Take frames that were read before this was made, at the next `take`."""
        self._early.extend(frames)

    def _wait(self, timeout: float | None) -> None:
        if self._outbox.has_lines:
            self._outbox.send_lines()
        if timeout is not None and timeout <= 0.0:
            return
        # Not poll: its timeouts are whole milliseconds, and a device is asked every few microseconds.
        ready, _, _ = select.select(self._waited_for, (), (), timeout)
        if self._wake_event in ready:
            os.eventfd_read(self._wake_event)

    def _read(self) -> None:
        frames = self._channel.receive()
        if self._early:
            frames, self._early = [*self._early, *frames], []
        for frame in frames:
            if type(frame) is Requests:
                for request in frame.requests:
                    self._put(request)
            else:
                self.on_frame[type(frame)](frame)
        if self._channel.ended:
            raise SystemExit(0)  # nobody is left to work for

    def _put(self, request: Request) -> None:
        message = self._known.get(request.body)
        if message is None:
            message = self._decoded(request.body)
        task = WorkerTask(message, request.number, request.place, request.fault, self._page)
        (self._urgent if message.control else self._tasks).append(task)

    def _put_internal(self, frame: Internal) -> None:
        self._tasks.append(InternalTask(self._decoded(frame.body), frame.number))

    def _decoded(self, body: bytes) -> Any:
        try:
            message = MESSAGES.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise BadFrame(str(error)) from error
        if type(message) in COMPUTE:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[body] = message
        return message
