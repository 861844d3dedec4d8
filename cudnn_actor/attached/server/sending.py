"""Sends frames to one client. While the client does not read, its own frames are not read either."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from cudnn_actor.attached.server.failures import each_encoded
from cudnn_actor.attached.wire import Answer, Answers, Done, Receipts
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import encode

__all__ = ["Sending", "frame_of"]

_ONLY_DONE = {Done}


class Sending:
    """Sends frames to one client. Used on the server's loop only.

    Parameters
    ----------
    channel
        The connection.
    loop
        The server's event loop.
    readable
        This reads the client's frames. The loop calls it while frames are read.
    fail
        This ends the session, in the handler of an exception that nobody foresaw.
    """

    def __init__(
        self,
        channel: Channel,
        loop: asyncio.AbstractEventLoop,
        *,
        readable: Callable[[], None],
        fail: Callable[[], None],
    ) -> None:
        self._channel, self._loop, self._readable, self._fail = channel, loop, readable, fail
        self.paused = False
        """Whether the client's frames are not read, because frames to the client wait for room."""
        self.answers: list[Answer] = []
        """Answers that are not in a frame yet."""
        self._flushes_soon = False
        loop.add_reader(channel.fileno(), readable)

    def stop(self) -> None:
        """Watch the connection no more, and send nothing more: it is about to be closed."""
        self.answers.clear()
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())

    def send(self, frame: Any, descriptors: tuple[int, ...] = ()) -> None:
        """Send a frame. Raises `OSError` if descriptors must wait, and none is left to duplicate them."""
        self._channel.send(frame, descriptors)
        if self._channel.backed_up:
            self._pause()

    def tell(self, frame: Any) -> None:
        """Send a frame that is no answer. If that fails, the session ends, and nothing is raised."""
        try:
            self.send(frame)
        except Exception:  # noqa: BLE001 - `fail` logs it
            self._fail()

    def flush_soon(self) -> None:
        """Send the waiting answers, and those that come in this iteration of the loop, at its end."""
        if not self._flushes_soon:
            self._flushes_soon = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send the waiting answers. Nothing is raised."""
        self._flushes_soon = False
        if self.answers:
            answers, self.answers = self.answers, []
            self.send_answers(answers)

    def send_answers(self, answers: list[Answer]) -> None:
        """Send answers. If they cannot be encoded together, each is sent alone.

        So a lack of memory, or an answer that cannot be encoded, fails one request. If not even that can be
        sent, the session ends. Nothing is raised.
        """
        channel = self._channel
        try:
            try:
                data = encode(frame_of(answers))
            except Exception:  # noqa: BLE001 - a lack of memory, a frame that is too long: each alone
                for data in each_encoded(answers):
                    channel.send_encoded(data)
            else:
                channel.send_encoded(data)
        except Exception:  # noqa: BLE001 - `fail` logs it
            self._fail()
        else:
            if channel.backed_up:
                self._pause()

    def _pause(self) -> None:
        if not self.paused:
            self.paused = True
            self._loop.remove_reader(self._channel.fileno())
            self._loop.add_writer(self._channel.fileno(), self._writable)

    def _writable(self) -> None:
        try:
            flushed = self._channel.flush()
        except Exception:  # noqa: BLE001 - `fail` logs it
            self._fail()
            return
        if flushed:
            self._loop.remove_writer(self._channel.fileno())
            self.paused = False
            self._loop.add_reader(self._channel.fileno(), self._readable)


def frame_of(answers: list[Any]) -> Answers | Receipts:
    """The shortest frame of some answers."""
    if len(answers) > 1 and set(map(type, answers)) == _ONLY_DONE and (frame := Receipts.of(answers)):
        return frame
    return Answers(answers)
