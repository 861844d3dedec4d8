"""The generation table: which bytes each slot has. The worker reads it, and only its parent writes it.

A worker checks every reference again when it enqueues a request, and looks up in the table which bytes the
reference means. The table is an anonymous file that both processes map, with one record for each slot, so a
look-up costs no message:

====================  =======================================================================================
header, 64 bytes      `epoch`: how many times a record has been vacated
record, 32 bytes      generation (0: the slot is free), arena, offset in bytes, size in bytes
====================  =======================================================================================

All fields are 64-bit words at their natural alignment. Each is written by one 8-byte store and read by one
8-byte load (`memoryview.cast("Q")` copies an item this way), so a field is never seen half-written.

A worker never uses the place of a different buffer, for this reason. `seat` writes the place first and the
generation last, `vacate` clears the generation first, and a generation is never used again. So on a processor
that keeps stores in order (x86), a reader that sees the same generation before and after it reads the place
has read that buffer's place. On other processors the socket gives the order. The parent writes the record
before it sends a reference through the socket. And the parent rewrites a record only when no request holds
its bytes, that is, after the last answer of a request that used them has come back through the socket.

A worker cannot write the table, even if the worker is corrupted. Once the parent has mapped the file, it
seals the file against writing (`F_SEAL_FUTURE_WRITE`, Linux 5.1), so that no descriptor of the file can be
mapped writable any more. An older kernel has no such seal. There the worker's descriptor is read-only. This
prevents accidental writes, but a process can still open the file again through /proc. The size is always
sealed: a truncated file would kill the parent with SIGBUS.
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

__all__ = ["SLOT_CAPACITY", "GenerationTable", "GenerationView"]

SLOT_CAPACITY: Final = 1 << 20
"""The most buffers that a service may have at once. The file is sparse, so slots that no buffer has used cost
nothing."""

_F_SEAL_FUTURE_WRITE = 0x0010  # in `fcntl` since Python 3.13
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

_ENDS = 0
_HEADER_WORDS, _RECORD_WORDS, _WORD_BYTES = 8, 4, 8
_NOBODY = (0, 0, 0, 0)


class GenerationTable:
    """The parent's side: the only writer. Used by one thread at a time; never blocks.

    It implements `memory.base.Mirror` (`seat` and `vacate`).

    Parameters
    ----------
    capacity
        The number of slots.

    Raises
    ------
    OSError
        The system has no memory or no descriptor for the table.
    """

    def __init__(self, capacity: int = SLOT_CAPACITY) -> None:
        self.capacity = capacity
        nbytes = (_HEADER_WORDS + _RECORD_WORDS * capacity) * _WORD_BYTES
        descriptor = os.memfd_create("cudnn-actor-generations", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, nbytes)
            self._map = mmap.mmap(descriptor, nbytes)
            self.fd = _seal(descriptor)
            """The descriptor that a worker maps, and through which it cannot write. Owned by the table."""
            # A service that is never started is never closed: its descriptor is closed with this object.
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
        """Close the table in a forked child, because only the parent may write it."""
        self.close()

    def seat(self, slot: int, generation: int, arena: int, offset: int, nbytes: int) -> None:
        """Record the place of a slot's new buffer. Its generation is not 0.

        Raises
        ------
        OutOfMemory
            The slot is past the capacity. Nothing has changed.
        """
        if slot >= self.capacity:
            raise OutOfMemory(requested=nbytes, in_use=self._seated_bytes, limit=None)
        words, record = self._words, _HEADER_WORDS + _RECORD_WORDS * slot
        words[record + 1] = arena
        words[record + 2] = offset
        words[record + 3] = nbytes
        words[record] = generation  # last: the place must be there first
        self._seated_bytes += nbytes

    def vacate(self, slot: int) -> None:
        """Record that the buffer of a slot has ended."""
        words, record = self._words, _HEADER_WORDS + _RECORD_WORDS * slot
        words[record] = 0
        words[_ENDS] += 1  # after the record: a reader that sees the new epoch also sees the cleared record
        self._seated_bytes -= words[record + 3]

    def close(self) -> None:
        """Unmap and close the table. A worker's mapping stays valid. Safe to call twice."""
        if self._open:
            self._open = False
            self._words.release()
            self._map.close()
            self._let_go()


class GenerationView:
    """A worker's side, which only reads. Any thread.

    Parameters
    ----------
    fd
        The table's descriptor. The caller keeps it, and may close it at once.

    Raises
    ------
    OSError, ValueError
        The file cannot be mapped.
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
        """How many buffers have ended. While it stays the same, earlier look-ups stay valid."""
        return self._words[_ENDS]

    def generation(self, slot: int) -> int:
        """The generation of the buffer in a slot; 0 where there is none."""
        return self._words[_HEADER_WORDS + _RECORD_WORDS * slot] if 0 <= slot < self._capacity else 0

    def at(self, slot: int) -> tuple[int, int, int, int]:
        """Generation, arena, offset and size (both in bytes) of the buffer in a slot; zeros for none.

        Also zeros for a record that changes during this call: no request that may run refers to it.
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
        """Unmap the table. Safe to call twice."""
        self._words.release()
        self._map.close()


def _seal(descriptor: int) -> int:
    """Seal the file, so that it can be read but not mapped writable or resized. Returns its descriptor."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FIXED_SIZE | _F_SEAL_FUTURE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return _reading_only(descriptor)
    return descriptor


def _reading_only(descriptor: int) -> int:
    """A read-only descriptor, for kernels without the seal. Closes the given descriptor."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FIXED_SIZE)
    reading = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    os.close(descriptor)
    return reading
