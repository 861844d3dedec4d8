"""A buffer's seat in the table."""

from __future__ import annotations

from typing import Any

from cudnn_actor.memory.arena import Arena
from cudnn_actor.protocol.errors import StaleReason
from cudnn_actor.protocol.tensor import TensorSpec

__all__ = ["REMEMBERED_ENDS", "Slot"]

REMEMBERED_ENDS = 32
"""Generations of one slot that are remembered as torn or lost; older ones are reported as freed."""


class Slot:
    """A seat in the table, taken by one buffer after another.

    The object is the same for all of them, so it may be kept only from `hold` to `release`: while
    `users` is not 0, spec and place stay as they are, also when the buffer has been freed.

    Attributes
    ----------
    index
        The seat's number: `BufferRef.slot`.
    generation
        What a reference must say to be live; of an ended buffer, one more than its own.
    live
        Whether references of this generation have been given out and resolve.
    spec
        The buffer's shape in memory.
    arena, offset, nbytes
        The place of its bytes: an arena, and the bytes from its start.
    users
        How many unfinished pieces of work read or write it, and arrays outside that show its bytes.
    binding
        The engine's handle on the place, for one incarnation; None when it has not been asked for.
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
        self._ends: dict[int, StaleReason] | None = None

    def __repr__(self) -> str:
        state = "live" if self.live else "ended"
        return f"<slot {self.index}.{self.generation & 0xFFFFFFFF} {state}, {self.users} users>"

    def seat(self, spec: TensorSpec, arena: Arena, offset: int) -> None:
        """Give the seat to a buffer of `spec` at `offset` bytes into `arena`."""
        self.spec = spec
        self.arena = arena
        self.offset = offset
        self.nbytes = spec.nbytes
        self.binding = None
        self.live = True

    def end(self, reason: StaleReason) -> None:
        """End the buffer's generation: its references are stale from here on, for `reason`.

        Freed is what ends are taken for when nothing is written down, so a record exists only of the last
        32 that were not, and a seat costs the same memory however often it is used.
        """
        if reason is not StaleReason.FREED:
            if self._ends is None:
                self._ends = {}
            elif len(self._ends) == REMEMBERED_ENDS:
                del self._ends[next(iter(self._ends))]
            self._ends[self.generation] = reason
        self.generation += 1  # first: to a look from another thread it is past before it is not live
        self.live = False

    def revive(self) -> None:
        """Make the generation live again that a free has just ended; its bytes were held all the time."""
        self.live = True
        self.generation -= 1

    def why_ended(self, generation: int) -> StaleReason:
        """Why an ended generation of this seat ended."""
        return (self._ends or {}).get(generation, StaleReason.FREED)
