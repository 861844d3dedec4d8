"""One end of the socket between a worker and its parent: frames and descriptors, in and out.

A stream socket of an unnamed pair, so that nobody else can connect, and frames of any size keep their order
with the descriptors that belong to them: the kernel delivers descriptors with the first byte that they were
sent with, never later and never earlier than what was sent before.

Why a socket and no ring in shared memory: with requests and answers in batches, the system call is a small
part of a batch, a ring is a few per cent faster at most, and it would need its own wake-ups and its own
protection against a peer that scribbles.

Not thread-safe: whoever uses an end sees to it that nobody else does.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from cudnn_actor.actors import forks
from cudnn_actor.workers.wire import LENGTH, LONGEST, BadFrame, encode

__all__ = ["Channel", "channel_pair"]

_CHUNK = 256 << 10
_BUFFER = 1 << 20
"""Asked of the kernel for each direction: a window of requests fits in."""
_MOST_DESCRIPTORS = 64
"""That may be waiting for their frames: more is no protocol of ours."""
_CUT_OFF = int(socket.MSG_CTRUNC)
_LOST = -1
"""In place of a descriptor that came, and that this process had no room for."""
_LATER = frozenset({errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS})
"""The kernel cannot send for now; the other side is there."""
_ANCILLARY = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair for a parent and its worker. Raises `OSError`."""
    pair = socket.socketpair()
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    return pair


class Channel:
    """Frames over one end of a pair. Never blocks.

    Parameters
    ----------
    connection
        The end, owned from here on.
    decoder
        Of what the other side sends.
    """

    def __init__(self, connection: socket.socket, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._decoder = decoder
        self._in = bytearray()
        self._needed = LENGTH.size
        """Bytes that `_in` must have before there is more to be made of it."""
        self._descriptors: deque[int] = deque()
        self._out: deque[tuple[bytes, Sequence[int]]] = deque()
        self._copies: set[int] = set()
        """Descriptors that wait with their frames, and are this object's own."""
        self._sent = 0
        self.ended = False
        """Whether the other side has gone, or this one has been closed: nothing more comes."""
        forks.watch(self)

    def forget_parent(self) -> None:
        """In a forked child: what is read or written here would be missing, or too much, in the parent.

        Closing lets go of this process's copies alone: the socket, and its place in the selectors of the
        parent's event loops, which have a copy of their own (`duplicate`), stay as they are.
        """
        self.close()

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._socket.fileno()

    def duplicate(self) -> int:
        """Another descriptor of the same socket, which the caller owns."""
        return os.dup(self._socket.fileno())

    # Out.

    def send(self, frame: Any, descriptors: Sequence[int] = ()) -> None:
        """Queue a frame and send what the socket takes. The descriptors stay the caller's.

        What the other side will never read is dropped. Raises `BadFrame` for a frame that is too long, and
        `OSError` when there is no descriptor to be had for one that has to wait: nothing of it has been sent.
        """
        self._out.append((encode(frame), descriptors))
        self.flush()
        if not descriptors or not self._out or self._out[-1][1] is not descriptors:
            return
        data, _ = self._out.pop()
        if len(self._out) or not self._sent:  # else they went with the part of it that has been sent
            descriptors = self._copied(descriptors)
        self._out.append((data, descriptors))

    def _copied(self, descriptors: Sequence[int]) -> Sequence[int]:
        """Duplicates for a frame that waits: the originals may be closed by then. Raises `OSError`."""
        copies: list[int] = []
        try:
            for descriptor in descriptors:
                copies.append(os.dup(descriptor))  # noqa: PERF401 - those that were made are to be closed
        except OSError:
            for copy in copies:
                os.close(copy)
            raise
        self._copies.update(copies)
        return copies

    def flush(self) -> bool:
        """Send what is queued, as far as the socket takes it; whether everything has gone."""
        while self._out and not self.ended:
            data, descriptors = self._out[0]
            try:
                self._sent += self._push(
                    memoryview(data)[self._sent :], descriptors if not self._sent else ()
                )
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno in _LATER:
                    return False
                break  # it has gone: that it has is learnt by reading, or by its exit
            self._drop(descriptors)
            if self._sent == len(data):
                self._out.popleft()
                self._sent = 0
        else:
            return True
        self._give_up_sending()
        return True

    def _drop(self, descriptors: Sequence[int]) -> None:
        for descriptor in self._copies.intersection(descriptors) if self._copies else ():
            self._copies.remove(descriptor)
            os.close(descriptor)

    def _give_up_sending(self) -> None:
        self._out.clear()
        self._sent = 0
        self._drop(tuple(self._copies))

    def _push(self, data: memoryview, descriptors: Sequence[int]) -> int:
        if not descriptors:
            return self._socket.send(data, socket.MSG_NOSIGNAL)
        rights = array.array("i", descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        return self._socket.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)

    @property
    def backed_up(self) -> bool:
        """Whether something waits for the socket to have room."""
        return bool(self._out)

    # In.

    def receive(self) -> list[Any]:
        """The frames that are there, decoded, after one look at the socket. Raises `BadFrame`."""
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(_CHUNK, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return []
        except OSError:
            data, ancillary, flags = b"", [], 0
        if ancillary or flags & _CUT_OFF:
            self._take_descriptors(ancillary, cut_off=bool(flags & _CUT_OFF))
        if not data:
            self.ended = True
            return []
        frames: list[Any] = []
        if self._in:  # the head of a frame has come before; mostly whole ones come
            self._in += data
            if len(self._in) < self._needed:  # looked at once, not at each piece of a long one
                return frames
            data, self._in = bytes(self._in), bytearray()
        self._in += self._cut(frames, data)
        return frames

    def _cut(self, frames: list[Any], data: bytes) -> memoryview:
        """Decode the whole frames at the head of `data`; what is left of it."""
        rest = memoryview(data)
        while len(rest) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(rest)
            if length > LONGEST:
                raise BadFrame(f"a frame of {length:,} bytes, where {LONGEST:,} is the most")
            end = LENGTH.size + length
            if len(rest) < end:
                self._needed = end
                return rest
            frames.append(self._decoded(rest[LENGTH.size : end]))
            rest = rest[end:]
        self._needed = LENGTH.size
        return rest

    def _decoded(self, body: memoryview) -> Any:
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise BadFrame(str(error)) from error

    def _take_descriptors(self, ancillary: Sequence[tuple[int, int, bytes]], *, cut_off: bool) -> None:
        """Keep what came for the frames that ask for it; `cut_off`: the kernel had no place for all of it."""
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                self._descriptors.extend(numbers)
        if cut_off:  # a frame of ours comes with one: it is that frame's place in the row
            self._descriptors.append(_LOST)
        if len(self._descriptors) > _MOST_DESCRIPTORS:
            raise BadFrame(f"{len(self._descriptors)} descriptors that no frame has asked for")

    def take_descriptor(self) -> int:
        """The next descriptor that came, which is the caller's.

        Raises `BadFrame` when there is none, and `OSError` when it came and this process had no room for it.
        """
        if not self._descriptors:
            raise BadFrame("a frame came without the descriptor that belongs to it")
        descriptor = self._descriptors.popleft()
        if descriptor == _LOST:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return descriptor

    def close(self) -> None:
        """Close the end, and every descriptor that nobody took. Idempotent."""
        self.ended = True
        self._give_up_sending()
        self._socket.close()
        while self._descriptors:
            with contextlib.suppress(OSError):
                os.close(self._descriptors.popleft())
