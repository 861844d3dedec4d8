"""One end of the socket pair between the owner of the service and a serving process, on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from cudnn_actor.actors.logs import Log
from cudnn_actor.processes.channel import Channel

__all__ = ["ControlLink"]

log = Log("cudnn_actor")


class ControlLink:
    """Frames to and from the other side, which is a process of the same program.

    Parameters
    ----------
    channel
        This end of the socket pair. This object owns it from now on.
    on_frame
        This is called with each frame. If it raises, this end is closed, as if the other side had gone: the
        frames after that one are lost, and somebody may wait for one of them.
    on_end
        This is called once, when the other side has gone.
    """

    def __init__(
        self,
        channel: Channel,
        on_frame: Callable[[Any], None],
        on_end: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._on_frame, self._on_end = on_frame, on_end
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._loop.add_reader(self._channel.fileno(), self._readable)

    def take_descriptor(self) -> int:
        """The descriptor that came with the frame that `on_frame` handles now. The caller owns it."""
        return self._channel.take_descriptor()

    def send(self, frame: Any, descriptors: Sequence[int] = ()) -> None:
        """Send a frame, now or when there is room. Nothing is sent if the other side has gone."""
        if self._open:
            self._channel.send(frame, descriptors)
            if self._channel.backed_up:
                self._loop.add_writer(self._channel.fileno(), self._writable)

    def _writable(self) -> None:
        if self._channel.flush():
            self._loop.remove_writer(self._channel.fileno())

    def _readable(self) -> None:
        channel = self._channel
        try:
            for frame in channel.receive():
                if self._is_open():  # a frame's handler may close this end
                    self._on_frame(frame)
            gone = channel.ended
        except Exception:  # the frame is bad, or cannot be handled here: the link is given up
            log.exception("serving.link_failed")
            gone = True
        if gone and self._is_open():
            self.close()
            self._on_end()

    def _is_open(self) -> bool:
        return self._open

    def read_rest(self) -> None:
        """Handle the frames that had arrived when the other side went, and close this end."""
        while self._is_open():
            self._readable()
            if self._channel.drained:
                break
        self.close()

    def close(self) -> None:
        """Close this end. Idempotent."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._channel.fileno())
            self._loop.remove_writer(self._channel.fileno())
            self._channel.close()
