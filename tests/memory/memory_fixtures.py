"""Tables over real memfds, and the check that every descriptor is closed exactly once."""

from __future__ import annotations

import os

from cudnn_actor.memory import MemoryTable
from cudnn_actor.protocol import BufferRef, TensorSpec

MIB = 1 << 20
NONCE = 0xC0DA


def spec_of(nbytes: int) -> TensorSpec:
    """A spec of exactly `nbytes` bytes."""
    return TensorSpec.packed((nbytes,), "int8")


class Descriptors:
    """Real memfds, told apart from others that reuse their numbers by device and inode."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[int, int]] = {}

    def make(self, nbytes: int) -> int:
        fd = os.memfd_create("arena")
        os.ftruncate(fd, nbytes)
        self._made[fd] = self._identity(fd)
        return fd

    def open_count(self) -> int:
        """How many of the memfds made here are open still."""
        return sum(self.is_open(fd) for fd in self._made)

    def is_open(self, fd: int) -> bool:
        try:
            return self._identity(fd) == self._made[fd]
        except OSError:
            return False

    @staticmethod
    def _identity(fd: int) -> tuple[int, int]:
        stat = os.fstat(fd)
        return stat.st_dev, stat.st_ino


class Grown:
    """A table that grows as a service would make it: drop what must go, create, add, allocate."""

    def __init__(self, *, limit: int | None = None, arena_bytes: int = 2 * MIB) -> None:
        self.table = MemoryTable("cpu", nonce=NONCE, arena_bytes=arena_bytes, limit=limit)
        self.descriptors = Descriptors()

    def allocate(self, nbytes: int) -> BufferRef:
        spec = spec_of(nbytes)
        if not self.table.room_for(spec):
            number, size = self.table.next_arena(spec)
            for idle in self.table.arenas_to_drop(size):
                self.table.drop_arena(idle)
            self.table.add_arena(number, size, self.descriptors.make(size))
        return self.table.allocate(spec)
