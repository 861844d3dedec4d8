"""Which bytes each slot has, in memory that a worker reads and only its parent writes.

A worker checks every reference once more at the moment it enqueues a request, and finds out there which bytes
it means. The answers are records in an anonymous file that both have mapped, one for each slot, so asking
costs no message:

====================  =======================================================================================
header, 64 bytes      `epoch`: how often any record has been vacated
record, 32 bytes      generation (0: nobody's), arena, offset in bytes, size in bytes
====================  =======================================================================================

All are 64-bit words at their natural alignment. Each is written by one 8-byte store and read by one 8-byte
load (`memoryview.cast("Q")` copies an item so), and so is never seen half-written.

Why a worker never takes another buffer's place for its own. `seat` writes the place first and the
generation last, `vacate` takes the generation away first, and a generation never comes back, so on a
processor that keeps stores in order (x86) whoever reads the same generation before and after the place has
read that buffer's place. On one that does not, the order comes from elsewhere: a reference reaches the worker
through a socket, in which it was sent after its record had been written, and a record is written anew only
when no request holds its bytes, that is, when the last answer to one that used them has come back likewise.

Why a worker cannot write here, even when it has gone mad: the file is sealed against writing
(`F_SEAL_FUTURE_WRITE`, Linux 5.1) once the parent has mapped it, so no descriptor of it maps writable any
more, the worker's or another. An older kernel knows no such seal; there the descriptor that is handed out is
open for reading only, which keeps errors out, though not somebody who opens the file anew through /proc.
The size is sealed in any case: the file cannot be cut off under the parent's feet, which would be a SIGBUS.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from typing import Final

from cudnn_actor.actors import forks
from cudnn_actor.protocol.errors import OutOfMemory

__all__ = ["CAPACITY", "GenerationTable", "GenerationView"]

CAPACITY: Final = 1 << 20
"""Slots; the file is sparse, so those that no buffer has ever sat in cost nothing."""

_F_SEAL_FUTURE_WRITE = 0x0010  # in `fcntl` since Python 3.13
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

_ENDS = 0
_HEADER_WORDS, _RECORD_WORDS, _WORD_BYTES = 8, 4, 8
_NOBODY = (0, 0, 0, 0)


class GenerationTable:
    """The parent's side: the only writer. One thread at a time; never blocks.

    Its `seat` and `vacate` are those of `memory.base.Mirror`.

    Parameters
    ----------
    capacity
        How many slots it has room for.

    Raises
    ------
    OSError
        The machine has no memory or no descriptor for it.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        nbytes = (_HEADER_WORDS + _RECORD_WORDS * capacity) * _WORD_BYTES
        descriptor = os.memfd_create("cudnn-actor-generations", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, nbytes)
            self._map = mmap.mmap(descriptor, nbytes)
            self.fd = _sealed(descriptor)
            """What a worker maps: it cannot write by it. Owned by the table."""
            # A service that is never started is never closed: then the descriptor goes with the table.
            self._let_go = weakref.finalize(self, os.close, self.fd)
            self._let_go.atexit = False
        except BaseException:
            os.close(descriptor)
            raise
        self._words = memoryview(self._map).cast("Q")
        self._seated_bytes = 0
        self._open = True
        forks.watch(self)

    def forget_parent(self) -> None:
        """In a forked child: the parent is the one writer."""
        self.close()

    def seat(self, slot: int, generation: int, arena: int, offset: int, nbytes: int) -> None:
        """Note that a slot's new buffer, of a generation other than 0, has this place.

        Raises
        ------
        OutOfMemory
            The slot is past the capacity; nothing has changed.
        """
        if slot >= self.capacity:
            raise OutOfMemory(requested=nbytes, in_use=self._seated_bytes, limit=None)
        words, record = self._words, _HEADER_WORDS + _RECORD_WORDS * slot
        words[record + 1] = arena
        words[record + 2] = offset
        words[record + 3] = nbytes
        words[record] = generation  # last: what it stands for is there
        self._seated_bytes += nbytes

    def vacate(self, slot: int) -> None:
        """Note that a slot's bytes are its buffer's no more."""
        words, record = self._words, _HEADER_WORDS + _RECORD_WORDS * slot
        words[record] = 0
        words[_ENDS] += 1  # after the end itself: whoever reads the new number finds it ended
        self._seated_bytes -= words[record + 3]

    def close(self) -> None:
        """Unmap and close it; a worker's mapping stays as it is. Safe to call twice."""
        if self._open:
            self._open = False
            self._words.release()
            self._map.close()
            self._let_go()


class GenerationView:
    """A worker's side: reads, and cannot write. Any thread.

    Parameters
    ----------
    fd
        The table's, mapped here. It stays the caller's, who may close it at once.

    Raises
    ------
    OSError, ValueError
        It cannot be mapped.
    """

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        self._words = memoryview(self._map).cast("Q")
        self._capacity = (len(self._words) - _HEADER_WORDS) // _RECORD_WORDS

    @property
    def capacity(self) -> int:
        """How many slots there are."""
        return self._capacity

    @property
    def epoch(self) -> int:
        """How many buffers have ended: while it is the same, whatever was found still is so."""
        return self._words[_ENDS]

    def generation(self, slot: int) -> int:
        """The generation of the buffer in a slot; 0 where there is none."""
        return self._words[_HEADER_WORDS + _RECORD_WORDS * slot] if 0 <= slot < self._capacity else 0

    def at(self, slot: int) -> tuple[int, int, int, int]:
        """Generation, arena, offset and size (both in bytes) of the buffer in a slot; zeros for none.

        Also zeros for one that comes or goes at this very moment: no request that may run names it.
        """
        if not 0 <= slot < self._capacity:
            return _NOBODY
        words, record = self._words, _HEADER_WORDS + _RECORD_WORDS * slot
        generation = words[record]
        arena, offset, nbytes = words[record + 1], words[record + 2], words[record + 3]
        if not generation or words[record] != generation:
            return _NOBODY
        return generation, arena, offset, nbytes

    def close(self) -> None:
        """Unmap it. Safe to call twice."""
        self._words.release()
        self._map.close()


def _sealed(descriptor: int) -> int:
    """A descriptor of the same file by which it can be read, and never mapped writable or resized."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FIXED_SIZE | _F_SEAL_FUTURE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return _reading_only(descriptor)
    return descriptor


def _reading_only(descriptor: int) -> int:
    """What takes the seal's place where the kernel does not know it. Closes what it replaces."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FIXED_SIZE)
    reading = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    os.close(descriptor)
    return reading
