"""One end of a socket between two processes: frames and descriptors, in and out.

A stream socket of an unnamed pair, so that nobody else can connect, and frames of any size keep their order
with the descriptors that belong to them: the kernel delivers descriptors with the first byte that they were
sent with, never later and never earlier than what was sent before.

Why a socket and no ring in shared memory: with requests and answers in batches, the system call is a small
part of a batch, a ring is a few per cent faster at most, and it would need its own wake-ups and its own
protection against a peer that scribbles.

Not thread-safe: whoever uses an end sees to it that nobody else does. He may be interrupted by an exception
that a signal's handler raises (`actors.interrupts`), and then whoever comes next goes on: what the kernel has
taken or given is written down in the call that it was taken or given in; bytes become frames, and a queued
frame leaves, in one step.
"""

from __future__ import annotations

import array
import contextlib
import errno
import itertools
import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from cudnn_actor.actors import forks
from cudnn_actor.actors.interrupts import is_of_a_handler
from cudnn_actor.processes.frames import LENGTH, LONGEST, BadFrame, encode

__all__ = ["LOST", "Channel", "channel_pair", "descriptors_in"]

_CHUNK = 256 << 10
_BUFFER = 1 << 20
"""Asked of the kernel for each direction: a window of requests fits in."""
_MOST_DESCRIPTORS = 64
"""That may be waiting for their frames: more is no protocol of ours."""
_CUT_OFF = int(socket.MSG_CTRUNC)
LOST = -1
"""In place of a descriptor that came, and that this process had no room for."""
_SHORT_S = 0.005
"""Before another try where the kernel has no memory to send with: a poll says that there is room even so."""
_LATER = frozenset({errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS})
"""The kernel cannot send for now; the other side is there."""
_ANCILLARY = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
_run_through = deque[None](maxlen=0).extend
_LOOK = ((_CHUNK, _ANCILLARY, socket.MSG_CMSG_CLOEXEC),)


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair. Raises `OSError`."""
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
        self.frames: deque[Any] = deque()
        """What has come and was not taken: whoever has dealt with the left one takes it out."""
        self.taken = 0
        """How many parts of that one have been dealt with; for whoever does so in parts."""
        self._look = connection.recvmsg
        self._raw: list[tuple[bytes, Sequence[tuple[int, int, bytes]], int, Any]] = []
        """What the kernel gave and is no frames yet: one piece, or none."""
        self._in = bytearray()
        self._needed = LENGTH.size
        """Bytes that `_in` must have before there is more to be made of it."""
        self._descriptors: deque[int] = deque()
        self._out: deque[tuple[bytes, Sequence[int]]] = deque()
        self._copies: set[int] = set()
        """Descriptors that wait with their frames, and are this object's own."""
        self._queued: Any = None
        """The frame that was queued last."""
        self._sent: list[int] = []
        """Bytes of the frame at the head that the kernel has taken, each time."""
        self._is_short = False
        """Whether the kernel had no memory to send with, the last time."""
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

    # Out.

    def send(self, frame: Any, descriptors: Sequence[int] = ()) -> None:
        """Queue a frame and send what the socket takes. The descriptors stay the caller's.

        What the other side will never read is dropped. The frame that was queued last is not queued again:
        whoever was interrupted in sending it sends it once more. Raises `BadFrame` for a frame that is too
        long, and `OSError` when there is no descriptor to be had for one that has to wait: nothing of it has
        been sent.
        """
        if frame is not self._queued:
            entry = ((encode(frame), descriptors),)
            # One step.
            self._out += entry
            self._queued = frame
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
        self._is_short = False
        while self._out and not self.ended:
            data, descriptors = self._out[0]
            gone = sum(self._sent) if self._sent else 0
            try:
                if gone < len(data):
                    self._push(memoryview(data)[gone:] if gone else data, () if gone else descriptors)
                    continue
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno in _LATER:
                    self._is_short = True
                    return False
                if is_of_a_handler(error):
                    raise
                break  # it has gone: that it has is learnt by reading, or by its exit
            self._drop(descriptors)
            # One step.
            del self._out[0]
            del self._sent[:]
        else:
            return True
        self._give_up_sending()
        return True

    def send_all(self) -> None:
        """Send what is queued. Blocks while the socket has no room; nothing is sent to one who has gone."""
        room = select.poll()
        if self._out:
            room.register(self._socket, select.POLLOUT)
        while not self.flush():
            room.poll()
            if self._is_short:
                time.sleep(_SHORT_S)

    def _drop(self, descriptors: Sequence[int]) -> None:
        if not self._copies:
            return
        ours = self._copies.intersection(descriptors)
        closing = map(os.close, ours)
        # One step: its last line is the only call.
        self._copies -= ours
        _run_through(closing)

    def _give_up_sending(self) -> None:
        self._out.clear()
        self._sent.clear()
        self._drop(tuple(self._copies))

    def _push(self, data: bytes | memoryview, descriptors: Sequence[int]) -> None:
        if not descriptors:
            self._sent.extend(itertools.starmap(self._socket.send, ((data, socket.MSG_NOSIGNAL),)))
            return
        rights = array.array("i", descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        arguments = ([data], ancillary, socket.MSG_NOSIGNAL)
        self._sent.extend(itertools.starmap(self._socket.sendmsg, (arguments,)))

    @property
    def backed_up(self) -> bool:
        """Whether something waits for the socket to have room."""
        return bool(self._out)

    # In.

    def receive(self) -> list[Any]:
        """The frames that are there, decoded, after one look at the socket. Raises `BadFrame`."""
        self.fetch()
        frames = list(self.frames)
        self.frames.clear()
        return frames

    def fetch(self) -> bool:
        """Add to `frames` what is there, after one look at the socket; whether it was anything. Never blocks.

        Raises `BadFrame`.
        """
        raw = self._raw
        if not raw:
            try:
                raw.extend(itertools.starmap(self._look, _LOOK))
            except BlockingIOError:
                return False
            except OSError as error:
                if is_of_a_handler(error):
                    raise
                self.ended = True
                return False
        data, ancillary, flags, _ = raw[0]
        descriptors = descriptors_in(ancillary, flags) if ancillary or flags & _CUT_OFF else ()
        self._take_in(data, descriptors)
        if descriptors and len(self._descriptors) > _MOST_DESCRIPTORS:
            raise BadFrame(f"{len(self._descriptors)} descriptors that no frame has asked for")
        return bool(data)

    def _take_in(self, data: bytes, descriptors: Sequence[int]) -> None:
        """Make frames of what the kernel gave, in one step, which leaves nothing of it in `_raw`."""
        if not data:
            self.ended = True
        elif self._in and len(self._in) + len(data) < self._needed:
            # The middle of a long frame, which is looked at once, not at each piece.
            self._in += data
            self._descriptors += descriptors
            del self._raw[0]
            return
        whole = bytes(self._in) + data if self._in else data
        frames, rest, needed = self._cut(whole)
        kept = bytearray(rest)
        # One step.
        self._in = kept
        self._needed = needed
        self._descriptors += descriptors
        self.frames += frames
        del self._raw[0]

    def _cut(self, data: bytes) -> tuple[list[Any], memoryview, int]:
        """The whole frames at the head of `data`, what is left of it, and the bytes that the next needs."""
        frames: list[Any] = []
        rest = memoryview(data)
        while len(rest) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(rest)
            if length > LONGEST:
                raise BadFrame(f"a frame of {length:,} bytes, where {LONGEST:,} is the most")
            end = LENGTH.size + length
            if len(rest) < end:
                return frames, rest, end
            frames.append(self._decoded(rest[LENGTH.size : end]))
            rest = rest[end:]
        return frames, rest, LENGTH.size

    def _decoded(self, body: memoryview) -> Any:
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise BadFrame(str(error)) from error

    def take_descriptor(self) -> int:
        """The next descriptor that came, which is the caller's.

        Raises `BadFrame` when there is none, and `OSError` when it came and this process had no room for it.
        """
        if not self._descriptors:
            raise BadFrame("a frame came without the descriptor that belongs to it")
        descriptor = self._descriptors.popleft()
        if descriptor == LOST:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return descriptor

    def close(self) -> None:
        """Close the end, and every descriptor that nobody took. Idempotent."""
        self.ended = True
        self._give_up_sending()
        self._socket.close()
        for _, ancillary, flags, _ in self._raw:
            self._descriptors += descriptors_in(ancillary, flags)
        self._raw.clear()
        while self._descriptors:
            with contextlib.suppress(OSError):
                os.close(self._descriptors.popleft())


def descriptors_in(ancillary: Sequence[tuple[int, int, bytes]], flags: int) -> list[int]:
    """The descriptors that came with some bytes, in order; `LOST` for what this process had no room for."""
    found: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            found += numbers
    if flags & _CUT_OFF:  # there was no room for one: this stands in its place
        found.append(LOST)
    return found
