"""Holds that arrays outside own: a buffer's bytes stay its own for as long as somebody can reach them.

Why a hold that ends on a thread that may not write the table is still written by the one that may: an
array dies wherever its last reference goes, on an event loop, on a stranger's thread, or in the cyclic
collector in the midst of any step of anybody's. So its end does one thing only: it appends the slot to a
deque, which is a single step under the GIL, takes no lock and so can neither wait nor be waited for. The
table's writer takes the deque's elements out before it looks for room, so bytes are found free by the
next allocation that needs them and at no moment before their last reader has gone.

Each element is taken once (there is one writer at a time), and the slot is still the same buffer's then:
a held slot is given to no other (`Slot.users`).
"""

from __future__ import annotations

from collections import deque

from cudnn_actor.memory.slot import Slot

__all__ = ["BufferOwner"]


class BufferOwner:
    """One hold on a slot, ended by this object's own end. Made by `MemoryTable.lend`.

    Parameters
    ----------
    slot
        Held already.
    ended
        Where the slot is noted at the end; read by the table's writer.
    """

    __slots__ = ("__weakref__", "_ended", "_slot")

    def __init__(self, slot: Slot, ended: deque[Slot]) -> None:
        self._slot = slot
        self._ended = ended

    def __del__(self) -> None:
        self._ended.append(self._slot)
