"""The queue that connections to a service's builder process wait in.

It is a socket pair that lives as long as the service. Whoever wants plans built makes a pair of its own and
sends one end of it through the queue; the builder process of then takes it out. So a connection can be made
before there is a process, a process that dies leaves those that it has not taken to its successor, and nobody
needs to be told of either.
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
        Path of the file in which builder processes note what they try.
    """

    def __init__(self, end: socket.socket, journal: str) -> None:
        end.setblocking(False)
        self._end = end
        self.journal = journal
        forks.watch(self)

    def fileno(self) -> int:
        """The descriptor, for a worker to be given a copy of; -1 when closed."""
        return self._end.fileno()

    def connect(self) -> socket.socket:
        """A connection to the builder process, which may not have been started yet. Never blocks.

        Raises `OSError`: there is no descriptor to be had, the queue is full, or closed.
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
        """Close this copy of the end. Idempotent."""
        self._end.close()

    def forget_parent(self) -> None:
        """In a forked child: the service is the parent's."""
        self.close()


def take_connection(queue: socket.socket) -> socket.socket | None:
    """The next connection out of the receiving end, which does not block; None where none waits.

    Raises `EOFError` when nobody is left to make one. One for which this process has no descriptor is
    dropped: whoever made it sees its end.
    """
    while True:
        try:
            data, ancillary, flags, _ = queue.recvmsg(len(_CONNECTION), _ROOM, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        if not data:
            raise EOFError
        descriptors = [one for one in descriptors_in(ancillary, flags) if one != LOST]
        for descriptor in descriptors[1:]:  # of no sender of ours
            os.close(descriptor)
        if descriptors:
            with contextlib.suppress(OSError):
                return socket.socket(fileno=descriptors[0])
            os.close(descriptors[0])
