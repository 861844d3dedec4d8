"""The queue of connections that a service's builder process has yet to accept.

It is a socket pair that exists as long as the service. A client makes a socket pair of its own and sends one
end through the queue; the current builder process receives it. So a client can connect before a process has
started, and when a process dies, its successor accepts the connections that are left. Clients need not know.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket

from cudnn_actor.actors import forks
from cudnn_actor.processes.channel import LOST, channel_pair, descriptors_in

__all__ = ["BuilderQueue", "take_connection"]

_CONNECTION = b"c"
_ROOM = socket.CMSG_SPACE(array.array("i").itemsize)


class BuilderQueue:
    """The sending end; `engines.base.BuilderAccess`. Any thread.

    Parameters
    ----------
    end
        The socket, owned from here on.
    journal
        Path of the file in which builder processes record the plans that they check.
    """

    def __init__(self, end: socket.socket, journal: str) -> None:
        end.setblocking(False)
        self._end = end
        self.journal = journal
        forks.watch(self)

    def fileno(self) -> int:
        """The descriptor, of which a worker gets a copy; -1 if closed."""
        return self._end.fileno()

    def connect(self) -> socket.socket:
        """A connection to the builder process, which may not have been started yet. Never blocks.

        Raises `OSError` if no descriptor is left, or the queue is full or closed.
        """
        ours, theirs = channel_pair()
        with theirs:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno()]))
            try:
                self._end.sendmsg([_CONNECTION], [rights], socket.MSG_NOSIGNAL)
            except BaseException:
                ours.close()
                raise
        return ours

    def close(self) -> None:
        """Close this copy of the sending end. Idempotent."""
        self._end.close()

    def forget_parent(self) -> None:
        """Close the copy of a forked child, because the service belongs to the parent."""
        self.close()


def take_connection(queue: socket.socket) -> socket.socket | None:
    """The next connection from the receiving end, which does not block; None if there is none.

    Raises `EOFError` when no sender is left. If this process has no descriptor left for a connection, the
    connection is dropped, and its client sees that it is closed.
    """
    while True:
        try:
            data, ancillary, flags, _ = queue.recvmsg(len(_CONNECTION), _ROOM, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        if not data:
            raise EOFError
        descriptors = [one for one in descriptors_in(ancillary, flags) if one != LOST]
        for descriptor in descriptors[1:]:  # our clients send only one
            os.close(descriptor)
        if descriptors:
            with contextlib.suppress(OSError):
                return socket.socket(fileno=descriptors[0])
            os.close(descriptors[0])
