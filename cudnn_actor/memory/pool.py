"""All arenas of a service, and the limit on their bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from cudnn_actor.memory.arena import ARENA_STEP, Arena
from cudnn_actor.memory.free_list import round_up
from cudnn_actor.protocol.errors import OutOfMemory, ServiceStopped

__all__ = ["ArenaPool"]

_SHRINK = 4
"""The divisor of the next arena's size when the system has refused one."""


class ArenaPool:
    """Arenas by number; decides which to add and to drop to stay within the limit.

    Parameters
    ----------
    arena_bytes
        The usual size of an arena, in bytes, rounded up to 2 MiB.
    limit
        At most this many bytes of arenas; None for no limit.
    """

    def __init__(self, *, arena_bytes: int, limit: int | None) -> None:
        self.limit = limit
        self.nbytes = 0
        """Bytes of all arenas."""
        self.beside = 0
        """Bytes of other memory that count towards the limit."""
        self._full = self._usual = round_up(arena_bytes, ARENA_STEP)
        self._arenas: dict[int, Arena] = {}
        self._imported: dict[int, Arena] = {}
        """Arenas of other services, which are only read: no place of them is given away, and they count
        towards no limit."""
        self._next_number = 0
        self._closed = False

    def all(self) -> tuple[Arena, ...]:
        """Every arena, by number."""
        return tuple(self._arenas.values())

    def idle(self) -> tuple[Arena, ...]:
        """The arenas that hold no bytes of any buffer."""
        return tuple(arena for arena in self.all() if arena.idle)

    def to_drop(self, nbytes: int) -> tuple[Arena, ...]:
        """Idle arenas to drop before one of `nbytes` is added, the largest first, so that few are dropped."""
        chosen: list[Arena] = []
        excess = 0 if self.limit is None else self.beside + self.nbytes + nbytes - self.limit
        for arena in sorted(self.idle(), key=lambda arena: -arena.nbytes):
            if excess <= 0:
                break
            chosen.append(arena)
            excess -= arena.nbytes
        return tuple(chosen)

    def room_for(self, nbytes: int) -> bool:
        """Whether some hole has `nbytes`, or one byte for none."""
        return any(arena.free.largest >= max(nbytes, 1) for arena in self.all())

    def next(self, nbytes: int) -> tuple[int, int]:
        """Number and size in bytes of an arena to create for a buffer of `nbytes`. Raises `OutOfMemory`."""
        needed = round_up(max(nbytes, 1), ARENA_STEP)
        if self.limit is None:
            return self._next_number, max(needed, self._usual)
        # Prefer a smaller arena beside the idle ones to one of full size in their place.
        untouched = self.limit - self.beside - self.nbytes
        room = untouched if needed <= untouched else self.limit - self._in_use()
        if needed > room:
            raise self._out_of_memory(nbytes)
        room = room // ARENA_STEP * ARENA_STEP
        return self._next_number, max(needed, min(self._usual, room))

    def check_beside(self, nbytes: int) -> None:
        """Raise `OutOfMemory` unless `nbytes` more of other memory fit beside the arenas that are in use."""
        if self.limit is not None and nbytes > self.limit - self._in_use():
            raise OutOfMemory(
                requested=nbytes,
                in_use=self.taken_bytes + self.beside,
                arena_bytes=self.nbytes,
                limit=self.limit,
                largest=max(0, self.limit - self._in_use()),
            )

    def shrink(self, refused: int, nbytes: int) -> bool:
        """Make the next arenas smaller, since the system has refused one of `refused` bytes.

        Returns whether a smaller one could hold a buffer of `nbytes`, so that it is worth another try.
        """
        self._usual = max(ARENA_STEP, round_up(refused // _SHRINK, ARENA_STEP))
        return refused > round_up(max(nbytes, 1), ARENA_STEP)

    def add(self, number: int, nbytes: int, fd: int) -> None:
        """Take ownership of an arena and its descriptor; when this raises, the caller keeps the
        descriptor.

        Another thread may close the pool meanwhile. It notes that first, and empties the pool second; here
        the arena is added first, and the note is looked at second. So the arena is not left in a closed pool,
        and of the two that would take it out, one gets it.
        """
        if number < self._next_number:
            raise ValueError(f"arena number {number} was used before; use the number from next_arena")
        self._arenas[number] = Arena(number, nbytes, fd)
        if self._closed and self._arenas.pop(number, None) is not None:
            raise ServiceStopped(reason="its memory has been closed")
        self._next_number = number + 1
        self.nbytes += nbytes
        self._usual = min(self._full, 2 * self._usual)  # there may be more room again

    @property
    def next_number(self) -> int:
        """The number that the next arena gets."""
        return self._next_number

    def add_import(self, number: int, nbytes: int) -> Arena:
        """Note an arena of another service, which the engine has mapped. Raises `ValueError`."""
        if number < self._next_number:
            raise ValueError(f"arena number {number} was used before")
        self._next_number = number + 1
        self._imported[number] = arena = Arena(number, nbytes, None)
        return arena

    def idle_imports(self) -> tuple[int, ...]:
        """The numbers of imported arenas that hold no bytes of any buffer."""
        return tuple(number for number, arena in self._imported.items() if arena.idle)

    def drop_imports(self, numbers: Iterable[int]) -> None:
        """Forget imported arenas."""
        for number in numbers:
            del self._imported[number]

    def take_imports(self) -> frozenset[int]:
        """Forget all imported arenas, and return their numbers: the engine that has mapped them has ended."""
        numbers = frozenset(self._imported)
        self._imported.clear()
        return numbers

    def drop(self, number: int) -> None:
        """Close an idle arena and forget it. Raises `KeyError`, or `ValueError` when it is in use."""
        arena = self._arenas[number]
        if not arena.idle:
            raise ValueError(f"{arena!r} is in use")
        del self._arenas[number]
        self.nbytes -= arena.nbytes
        arena.close()

    def place(self, nbytes: int) -> tuple[Arena, int]:
        """Take `nbytes` in some arena: (arena, offset). Raises `OutOfMemory` when none has room."""
        # The oldest arena with room, so that younger ones become empty and can be dropped.
        for arena in self.all():
            offset = arena.free.allocate(nbytes)
            if offset is not None:
                return arena, offset
        raise self._out_of_memory(nbytes)

    def close(self) -> None:
        """Close every descriptor. Safe to call twice, and while another thread adds an arena."""
        self._closed = True
        self.nbytes = 0
        with contextlib.suppress(KeyError):
            while True:
                self._arenas.popitem()[1].close()

    def _in_use(self) -> int:
        """Bytes of the arenas that are not idle, and of what counts beside them."""
        return self.beside + self.nbytes - sum(arena.nbytes for arena in self.idle())

    @property
    def taken_bytes(self) -> int:
        """Bytes that buffers take in the arenas."""
        return sum(arena.nbytes - arena.free.free_bytes for arena in self.all())

    def _out_of_memory(self, nbytes: int) -> OutOfMemory:
        most = largest = None
        if self.limit is not None:
            most = self.limit // ARENA_STEP * ARENA_STEP
            beside = (self.limit - self._in_use()) // ARENA_STEP * ARENA_STEP
            largest = max(beside, *(arena.free.largest for arena in self.all()), 0)
        return OutOfMemory(
            requested=nbytes,
            in_use=self.taken_bytes + self.beside,
            arena_bytes=self.nbytes,
            limit=self.limit,
            most=most,
            largest=largest,
        )
