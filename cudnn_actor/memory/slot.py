"""An entry of the table: one slot, used by one buffer after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cudnn_actor.memory.arena import Arena
from cudnn_actor.protocol.errors import StaleReason
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["REMEMBERED_ENDS", "SharedHold", "Slot"]

REMEMBERED_ENDS = 32
"""How many generations of one slot are remembered as torn or lost; older ones are reported as freed."""


class Slot:
    """A slot of the table, used by one buffer after another.

    All of them share this object, so keep it only from `hold` to `release`: while `users` is not 0, spec
    and place do not change, even when the buffer has been freed.

    Attributes
    ----------
    index
        The slot's number: `BufferRef.slot`.
    generation
        The generation that a live reference must have. After a buffer ended: its own plus one.
    live
        Whether references of this generation have been issued and resolve.
    spec
        The buffer's shape in memory.
    arena, offset, nbytes
        The place of its bytes: an arena, the offset in it, and the size.
    users
        How many unfinished pieces of work read or write it, plus the caller's arrays that show its bytes.
    binding
        The engine's handle of the place, for one incarnation; None until it is needed.
    viewed
        Whether a caller has had a view of the buffer, through which it may be written at any time.
    """

    __slots__ = (
        "_ends",
        "arena",
        "binding",
        "generation",
        "index",
        "live",
        "nbytes",
        "offset",
        "spec",
        "users",
        "viewed",
    )

    arena: Arena
    offset: int
    nbytes: int
    spec: TensorSpec

    def __init__(self, index: int, generation: int) -> None:
        self.index = index
        self.generation = generation
        self.live = False
        self.users = 0
        self.binding: Any = None
        self.viewed = False
        self._ends: dict[int, StaleReason] | None = None

    def __repr__(self) -> str:
        state = "live" if self.live else "ended"
        return f"<slot {self.index}.{self.generation & 0xFFFFFFFF} {state}, {self.users} users>"

    def seat(self, spec: TensorSpec, arena: Arena, offset: int) -> None:
        """Use the slot for a buffer of `spec` at `offset` bytes into `arena`."""
        self.spec = spec
        self.arena = arena
        self.offset = offset
        self.nbytes = spec.nbytes
        self.binding = None
        self.viewed = False
        self.live = True

    def end(self, reason: StaleReason) -> None:
        """End the buffer's generation: its references are stale from here on, for `reason`.

        An end without a record counts as freed. Only the last 32 ends for other reasons are recorded, so a
        slot's memory is bounded however often it is used.
        """
        if reason is not StaleReason.FREED:
            if self._ends is None:
                self._ends = {}
            elif len(self._ends) == REMEMBERED_ENDS:
                del self._ends[next(iter(self._ends))]
            self._ends[self.generation] = reason
        # first: another thread then sees the old generation as ended, before `live` is False
        self.generation += 1
        self.live = False

    def revive(self) -> None:
        """Make the generation live again that a free has just ended. Its bytes were held all the time."""
        self.live = True
        self.generation -= 1

    def why_ended(self, generation: int) -> StaleReason:
        """Why an ended generation of this slot ended."""
        return (self._ends or {}).get(generation, StaleReason.FREED)


class SharedHold(Slot):
    """One hold on many slots, which is itself held like a slot: by each request that uses them all.

    A request of a model uses hundreds of slots. To count its use on this object instead takes one step.
    `MemoryTable.hold_together` makes it. `live` is True until it is ended; the slots are released once it has
    ended and no request holds it any more.
    """

    __slots__ = ("generations", "slots")

    def __init__(self, slots: Sequence[Slot]) -> None:
        super().__init__(-1, 0)
        self.slots = tuple(slots)
        self.generations = tuple(slot.generation for slot in slots)
        self.live = True

    def first_lost(self) -> int | None:
        """The number of the first slot whose buffer was torn or lost since; None for none.

        A buffer that was only freed still has its bytes, because they are held.
        """
        for number, (slot, generation) in enumerate(zip(self.slots, self.generations, strict=True)):
            if slot.generation != generation and slot.why_ended(generation) is not StaleReason.FREED:
                return number
        return None
