"""A forkserver as its launcher sees it: its process, and this side of the socket to it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Callable, Mapping, Sequence

from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import BadFrame
from cudnn_actor.processes.launch_messages import (
    FROM_SERVER,
    Discard,
    Exited,
    FromServer,
    Launch,
    Launched,
    PreloadFailed,
    Ready,
    Refused,
)
from cudnn_actor.processes.launched import Child
from cudnn_actor.processes.process_state import ending_of, is_stopped
from cudnn_actor.processes.server_process import ExecutedServer, ForkedServer
from cudnn_actor.processes.waiting import wait_for

__all__ = ["SERVER_LOOK_S", "UNTIL_ENDED_S", "ServerLink", "ServerLost", "StartLost", "refuse_if"]

UNTIL_ENDED_S = 5.0
"""How long a server may take to end its workers, and then the kernel to end the server."""
SERVER_LOOK_S = 0.05
"""Seconds between two checks whether an awaited server is stopped."""
_LOOKS = 200
"""After this many checks without an answer, a server that has finished its imports counts as hung. Checks are
counted instead of seconds, because this process may have been stopped itself meanwhile."""


class ServerLost(OSError):
    """Raised when a launch has failed because of its server, so that another server may succeed."""


class StartLost(ServerLost):
    """Raised when that server was killed before it had finished its imports."""


class ServerLink:
    """The server process and this side of its socket.

    Used under the launcher's lock, except `hang_up` and `pid`.

    Parameters
    ----------
    process
        The process, owned by this object from now on.
    connection
        This end of its socket, owned by this object from now on.
    children
        The children, by the number of their launch. They are told how they ended.
    watch
        The epoll that shows its end, from `watch_end` until the end has been handled.
    ready
        Whether its imports are done.
    """

    def __init__(
        self,
        process: ExecutedServer | ForkedServer,
        connection: socket.socket,
        children: Mapping[int, Child],
        watch: select.epoll,
        *,
        ready: bool = False,
    ) -> None:
        self._process = process
        self._children = children
        self._watch = watch
        self.unwanted = False
        """Whether its launcher is being closed, so that it is not replaced. Any thread."""
        self.ready = ready
        """Whether its imports are done, according to the messages read so far."""
        self.gone = False
        """Whether no more messages will come from it."""
        self._last_word = ""
        self._awaited = 0
        """Number of the running launch; 0 for none."""
        self._ended = False
        self.pid = process.pid
        self._socket = connection
        self._channel = Channel(connection, FROM_SERVER)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(process.pidfd, select.POLLIN)

    def watch_end(self) -> None:
        """Register its end in `watch`. Called when it becomes the server that launches."""
        self._watch.register(self._process.pidfd, select.EPOLLIN)

    def launch(
        self, number: int, main: str, fds: Sequence[int], unwanted: Callable[[], bool]
    ) -> tuple[int, int]:
        """Process id and pidfd of a new worker. Blocks. Raises `OSError`."""
        for fd in fds:
            os.fstat(fd)  # raises here for an invalid descriptor; sending it would look like the server's end
        self._awaited = number
        try:
            self._channel.send(Launch(number, main, len(fds)), fds)
            while not self.gone:
                match self._next_message(unwanted):
                    case Launched(launched, pid), [pidfd] if launched == number:
                        return pid, pidfd
                    case Launched(launched), [] if launched == number:
                        self._channel.send(Discard(number))
                        raise OSError("there is no room for another descriptor")
                    case Refused(refused, why), _ if refused == number:
                        raise OSError(why)
        finally:
            self._awaited = 0
        raise self.loss(self.end())

    def loss(self, end: str) -> OSError:
        """The error for a launch that has failed because this server has ended, as `end` says."""
        if self.unwanted:
            return OSError(end)
        if self.ready:
            return ServerLost(end)
        killed = (self._process.status() or 0) < 0 and not self._last_word
        return StartLost(end) if killed else OSError(end)

    def _next_message(self, unwanted: Callable[[], bool]) -> tuple[FromServer, list[int]] | None:
        """The next message; None, and `gone`, at the end. Blocks. Kills a server that is stopped or hangs."""
        in_vain = 0
        while (received := self.receive(SERVER_LOOK_S)) is None and not self.gone:
            refuse_if(unwanted)
            in_vain += self.ready
            if in_vain > _LOOKS or is_stopped(self.pid):
                # Not `hang_up`: a server that continues after that would end its workers, which still serve.
                self._kill()
                self.gone = True
        return received

    def has_gone(self) -> bool:
        """Whether it has ended and all of its messages have been handled. Never blocks."""
        while not self.gone and self.receive(0.0) is not None:
            pass
        return self.gone

    def receive(self, timeout_s: float | None) -> tuple[FromServer, list[int]] | None:
        """The next message; if it is a notice, it has been handled. None if none comes in time, or `gone`.

        Blocks. The end of the process counts like the end of the socket, because a process that a preloaded
        module has started may keep the socket open. Earlier messages are read first.
        """
        ended = False
        while (received := self._read()) is None and not self.gone:
            if ended:
                self.gone = True
                break
            events = self._poll.poll(None if timeout_s is None else 1000 * timeout_s)
            if not events:
                break
            ended = any(fd == self._process.pidfd for fd, _ in events)
        if received is not None:
            self._note(*received)
        return received

    def hang_up(self) -> None:
        """Shut the socket down: the server sees its end, and a thread that waits here wakes. Any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> str:
        """End it and its workers. Returns how or why it ended. Blocks. Idempotent."""
        self.hang_up()
        self.has_gone()  # handles its earlier messages
        if not self._ended:
            self._ended = True
            self._how = self._wait_for_end()
            self._release()
        return self._last_word or self._how

    def _wait_for_end(self) -> str:
        # A server that is still importing does not read its socket, and has no workers to end.
        grace_s = UNTIL_ENDED_S if self.ready and not is_stopped(self.pid) else 0.0
        ended = wait_for((self._process.pidfd,), grace_s)
        if not ended:
            self._kill()
            ended = wait_for((self._process.pidfd,), 0.0)
        how = f"the forkserver {ending_of(self._process.status()) if ended else 'cannot be killed'}"
        return how if self.ready else how + self._process.origin()

    def forget(self) -> None:
        """In a fork of its parent: drop it, because it is not a child of this process."""
        self._ended = self.gone = True
        self._channel.close()
        self._process.forget()

    def _release(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # it is not watched, or `watch` is closed
            self._watch.unregister(self._process.pidfd)
        self._channel.close()
        self._process.close()

    def _kill(self) -> None:
        self._process.kill()
        wait_for((self._process.pidfd,), UNTIL_ENDED_S)

    def _read(self) -> tuple[FromServer, list[int]] | None:
        """A message that has come already; None if there is none. Sets `gone` at the end of the socket."""
        channel = self._channel
        channel.flush()
        try:
            while not channel.frames:
                if not channel.fetch():
                    self.gone = self.gone or channel.ended
                    return None
        except BadFrame:  # not from our forkserver
            self.gone = True
            return None
        record: FromServer = channel.frames.popleft()
        descriptors: list[int] = []
        if isinstance(record, Launched):
            with contextlib.suppress(OSError, BadFrame):
                descriptors.append(channel.take_descriptor())
        return record, descriptors

    def _note(self, record: FromServer, descriptors: Sequence[int]) -> None:
        match record:
            case Launched(number) if number != self._awaited:  # that launch has failed on this side
                self._channel.send(Discard(number))
                for fd in descriptors:
                    os.close(fd)
            case Ready():
                self.ready = True
            case PreloadFailed(why):
                self._last_word = why
            case Exited(number, status, by):
                child, ended = self._children.get(number), status if by is None else -by
                if child is not None and ended is not None:
                    child.note_end(ended)


def refuse_if(unwanted: Callable[[], bool]) -> None:
    """Raise `OSError` if `unwanted` returns True."""
    if unwanted():
        raise OSError("the process is not wanted any more")
