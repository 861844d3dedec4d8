"""Holds owned by the caller's arrays: a buffer's bytes are not reused while an array can reach them.

An array may be collected on any thread: on an event loop, on a thread of the user's, or by the cyclic
collector in the middle of any operation. Such a thread must not write the table. So the end of a hold does
one thing only: it appends the slot to a deque. That is atomic under the GIL and takes no lock, so it neither
waits nor makes another thread wait. The table's writer empties the deque before it looks for room. So the
bytes are found free by the next allocation that needs them, and never before the last array has gone.

Each element is taken out once, since there is one writer at a time. The slot then still belongs to the same
buffer, since a held slot is given to no other (`Slot.users`).
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

__all__ = ["BufferOwner"]

T = TypeVar("T")


class BufferOwner(Generic[T]):
    """One hold on memory: on a slot (`MemoryTable.lend`), or on a block of staging memory.

    It ends when this object is collected.

    Parameters
    ----------
    held
        The slot or block that is held. The caller holds it already.
    ended
        The deque to which `held` is appended at the end. Its writer empties it.
    """

    __slots__ = ("__weakref__", "_ended", "_held")

    def __init__(self, held: T, ended: deque[T]) -> None:
        self._held = held
        self._ended = ended

    def __del__(self) -> None:
        self._ended.append(self._held)
