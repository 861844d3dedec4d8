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

from cudnn_actor.memory.slot import Slot

__all__ = ["BufferOwner"]


class BufferOwner:
    """One hold on a slot; it ends when this object is collected. Made by `MemoryTable.lend`.

    Parameters
    ----------
    slot
        The slot; the caller holds it already.
    ended
        The slot is appended to it at the end; the table's writer empties it.
    """

    __slots__ = ("__weakref__", "_ended", "_slot")

    def __init__(self, slot: Slot, ended: deque[Slot]) -> None:
        self._slot = slot
        self._ended = ended

    def __del__(self) -> None:
        self._ended.append(self._slot)
