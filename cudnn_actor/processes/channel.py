"""One end of a socket between two processes: sends and receives frames and descriptors.

The socket is a stream socket of an unnamed pair, so that no other process can connect. Frames of any size
keep their order with the descriptors that belong to them: the kernel delivers descriptors with the first byte
that they were sent with, never later, and never before earlier bytes.

Why a socket and not a ring in shared memory: with requests and answers in batches, the system call is a small
part of a batch. A ring is a few per cent faster at most, and it would need its own wake-ups and its own
protection against a peer that writes garbage.

Not thread-safe: callers must make sure that one thread at a time uses an end. A signal handler may raise an
exception in any of its methods (`actors.interrupts`). The next call then continues where that one stopped,
because each of these is one step: passing bytes to or from the kernel and recording them; making frames of
received bytes; removing a sent frame from the queue.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from itertools import starmap as _starmap
from typing import Any

import msgspec

from cudnn_actor.actors import forks
from cudnn_actor.actors.interrupts import is_of_a_handler, run_through
from cudnn_actor.processes.frames import LENGTH, LONGEST, BadFrame, encode

__all__ = ["LOST", "Channel", "channel_pair", "descriptors_in"]

_SHORT, _LONG = 16 << 10, 256 << 10
"""How many bytes are read at a time: the larger number only if the last read was full. Its memory takes 15 us
to get, the smaller one's 2 us."""
_HEAD = LENGTH.size
_length = LENGTH.unpack_from
_BUFFER = 1 << 20
"""The socket buffer's size for each direction. A window of requests fits into it."""
_MOST_DESCRIPTORS = 64
"""How many descriptors may wait for their frames. More break the protocol."""
_CUT_OFF = int(socket.MSG_CTRUNC)
LOST = -1
"""Stands for a descriptor that was sent, but for which this process had no room."""
_SHORT_S = 0.005
"""Seconds until the next try when the kernel has no memory to send. (poll reports room in any case.)"""
_LATER = frozenset({errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS})
"""Errors after which sending may succeed later. The other side still exists."""
_ANCILLARY = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
_NO_SIGNAL = int(socket.MSG_NOSIGNAL)
_LOOKS = {size: ((size, _ANCILLARY, int(socket.MSG_CMSG_CLOEXEC)),) for size in (_SHORT, _LONG)}


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
        The socket. This object owns it from now on.
    decoder
        The decoder of the other side's frames.
    longest
        The bytes of the longest frame that is accepted.
    """

    def __init__(
        self, connection: socket.socket, decoder: msgspec.msgpack.Decoder[Any], *, longest: int = LONGEST
    ) -> None:
        connection.setblocking(False)
        self._longest = longest
        self._socket = connection
        self._decoder = decoder
        self.frames: deque[Any] = deque()
        """Received frames. The user of the channel removes the leftmost once it has handled it."""
        self.taken = 0
        """How many parts of the leftmost frame have been handled, for a user who handles it in parts."""
        self._look, self._send = connection.recvmsg, connection.send
        self.read_size = _SHORT
        """How much is read next."""
        self._raw: list[tuple[bytes, Sequence[tuple[int, int, bytes]], int, Any]] = []
        """Bytes that the kernel has returned and that are not yet made into frames: one item, or none."""
        self._in = bytearray()
        self._needed = LENGTH.size
        """Bytes that `_in` must have before it is looked at again."""
        self._descriptors: deque[int] = deque()
        self._out: deque[tuple[bytes | bytearray, Sequence[int]]] = deque()
        self._copies: set[int] = set()
        """Duplicated descriptors, owned by this object, that wait with their frames."""
        self._queued: Any = None
        """The frame that was queued last."""
        self._sent: list[int] = []
        """For the frame at the head: the bytes that each call has passed to the kernel."""
        self._is_short = False
        """Whether the kernel had no memory to send at the last try."""
        self.ended = False
        """Whether the other side has gone, or this end is closed, so that no more data comes."""
        self.drained = False
        """Whether the last `fetch` has left nothing in the socket."""
        forks.watch(self)

    def forget_parent(self) -> None:
        """Close the channel in a forked child. Bytes that were read there would be missing in the parent, and
        the other side would take bytes that were written there for the parent's.

        This closes only this process's copies. The socket itself stays open, and so do the duplicates in the
        selectors of the parent's event loops.
        """
        self.close()

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._socket.fileno()

    # Out.

    def send(self, frame: Any, descriptors: Sequence[int] = ()) -> None:
        """Queue a frame and send what the socket accepts. The caller keeps the descriptors.

        If the other side has gone, the frame is dropped. If this frame is the one that was queued last, it is
        not queued again, so that an interrupted caller can repeat the call. Raises `BadFrame` for a frame
        that is too long. If the frame must wait, its descriptors are duplicated; raises `OSError` if that
        fails, and then nothing of the frame has been sent.
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
        if len(self._out) or not self._sent:  # else they were sent with the first part of the frame
            descriptors = self._copy(descriptors)
        self._out.append((data, descriptors))

    def send_encoded(self, data: bytes | bytearray) -> None:
        """Send a frame that `encode` has made, as `send` does. The caller must not change the bytes later."""
        entry = ((data, ()),)
        # One step.
        self._out += entry
        self._queued = None
        self.flush()

    def _copy(self, descriptors: Sequence[int]) -> Sequence[int]:
        """Duplicates for a waiting frame, because the caller may close the originals. Raises `OSError`."""
        copies: list[int] = []
        try:
            for descriptor in descriptors:
                copies.append(os.dup(descriptor))  # noqa: PERF401 - after an error, those made must be closed
        except OSError:
            for copy in copies:
                os.close(copy)
            raise
        self._copies.update(copies)
        return copies

    def flush(self) -> bool:
        """Send queued frames as far as the socket accepts them. Returns whether the queue is empty."""
        self._is_short = False
        out, sent = self._out, self._sent
        while out and not self.ended:
            data, descriptors = out[0]
            gone = sum(sent) if sent else 0
            try:
                if gone < len(data):
                    self._push(memoryview(data)[gone:] if gone else data, () if gone else descriptors)
                    if gone + sent[-1] < len(data):  # nearly never
                        continue
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno in _LATER:
                    self._is_short = True
                    return False
                if is_of_a_handler(error):
                    raise
                break  # the other side has gone; reading, or its exit, will show that
            if self._copies:
                self._drop(descriptors)
            # One step.
            del out[0]
            del sent[:]
        else:
            return True
        self._give_up_sending()
        return True

    def flush_only(self) -> bool:
        """Do what `flush` does, in fewer steps, if the queue has one frame, which has no descriptors, and
        nothing of it has been sent."""
        out, sent = self._out, self._sent
        data = out[0][0]
        try:
            self._push(data, ())
        except BlockingIOError:
            return self.flush()
        except OSError as error:
            if is_of_a_handler(error):
                raise
            return self.flush()  # which fails in the same way
        if sent[0] < len(data):
            return self.flush()
        # One step.
        del out[0]
        del sent[:]
        return True

    def send_all(self) -> None:
        """Send all queued frames, or drop them if the other side has gone. Blocks while there is no room."""
        room = select.poll()
        if self._out:
            room.register(self._socket, select.POLLOUT)
        while not self.flush():
            room.poll()
            if self._is_short:
                time.sleep(_SHORT_S)

    def _drop(self, descriptors: Sequence[int]) -> None:
        ours = self._copies.intersection(descriptors)
        closing = map(os.close, ours)
        # One step: its last line is the only call.
        self._copies -= ours
        run_through(closing)

    def _give_up_sending(self) -> None:
        self._out.clear()
        self._sent.clear()
        self._drop(tuple(self._copies))

    def _push(self, data: bytes | bytearray | memoryview, descriptors: Sequence[int]) -> None:
        if not descriptors:
            self._sent.extend(_starmap(self._send, ((data, _NO_SIGNAL),)))
            return
        rights = array.array("i", descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        arguments = ([data], ancillary, _NO_SIGNAL)
        self._sent.extend(_starmap(self._socket.sendmsg, (arguments,)))

    @property
    def backed_up(self) -> bool:
        """Whether frames wait for room in the socket."""
        return bool(self._out)

    # In.

    @property
    def is_partial(self) -> bool:
        """Whether a frame has arrived only in part."""
        return bool(self._in)

    @property
    def has_rest(self) -> bool:
        """Whether either is so: a frame has arrived only in part, or a descriptor was not taken."""
        return bool(self._in or self._descriptors)

    @property
    def unclaimed_count(self) -> int:
        """How many descriptors have arrived and were not taken."""
        return len(self._descriptors)

    def receive(self) -> list[Any]:
        """Read the socket once, and remove and return all received frames. Raises `BadFrame`."""
        self.fetch()
        frames = list(self.frames)
        self.frames.clear()
        return frames

    def fetch(self) -> bool:
        """Read the socket once, and add what has come to `frames`. Returns whether anything came.

        Never blocks. Raises `BadFrame`.
        """
        raw = self._raw
        if not raw:
            try:
                raw.extend(_starmap(self._look, _LOOKS[self.read_size]))
            except BlockingIOError:
                self.drained = True
                return False
            except OSError as error:
                if is_of_a_handler(error):
                    raise
                self.ended = True
                return False
        data, ancillary, flags, _ = raw[0]
        count = len(data)
        if (  # nearly always, one whole frame has come
            _HEAD <= count < _SHORT
            and not (ancillary or self._in or flags & _CUT_OFF)
            and count - _HEAD == _length(data)[0] <= self._longest
        ):
            self.drained = True
            frames = (self.decode(memoryview(data)[_HEAD:]),)
            # One step.
            self.frames += frames
            del raw[0]
            self.read_size = _SHORT
            return True
        is_full = count >= self.read_size
        self.drained = not is_full and not ancillary  # the kernel stops behind bytes with descriptors
        descriptors = descriptors_in(ancillary, flags) if ancillary or flags & _CUT_OFF else ()
        self._take_in(data, descriptors)
        # After that step: if it was interrupted, the next call compares with the same size.
        self.read_size = _LONG if is_full else _SHORT
        if descriptors and len(self._descriptors) > _MOST_DESCRIPTORS:
            raise BadFrame(f"{len(self._descriptors)} descriptors came that belong to no frame")
        return bool(data)

    def _take_in(self, data: bytes, descriptors: Sequence[int]) -> None:
        """Make frames of what the kernel has returned, and remove it from `_raw`, in one step."""
        if not data:
            self.ended = True
        elif self._in and len(self._in) + len(data) < self._needed:
            # The middle of a long frame: it is decoded once, when it is whole.
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
        """The complete frames at the head of `data`, the rest, and the bytes that the next frame needs."""
        frames: list[Any] = []
        rest = memoryview(data)
        while len(rest) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(rest)
            if length > self._longest:
                raise BadFrame(f"a frame of {length:,} bytes, and the limit is {self._longest:,}")
            end = LENGTH.size + length
            if len(rest) < end:
                return frames, rest, end
            frames.append(self.decode(rest[LENGTH.size : end]))
            rest = rest[end:]
        return frames, rest, LENGTH.size

    def decode(self, body: memoryview) -> Any:
        """The frame that these bytes encode. Raises `BadFrame`."""
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise BadFrame(str(error)) from error

    def take_descriptor(self) -> int:
        """Remove and return the next received descriptor. The caller owns it.

        Raises `BadFrame` if none has come, and `OSError` if this process had no room for it.
        """
        if not self._descriptors:
            raise BadFrame("a frame came without the descriptor that belongs to it")
        descriptor = self._descriptors.popleft()
        if descriptor == LOST:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return descriptor

    def close(self) -> None:
        """Close the socket, and every descriptor that was not taken. Idempotent."""
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
    """The descriptors that came with some bytes, in order. `LOST` if this process had no room for one."""
    found: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            found += numbers
    if flags & _CUT_OFF:  # this process had no room for at least one
        found.append(LOST)
    return found
