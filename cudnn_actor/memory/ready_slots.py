"""Slots that have their place already, for the next buffers of shapes that come again and again.

To allocate takes many steps, and on the main thread a signal handler may raise an exception between any two
(`actors.interrupts`). So an event loop there leaves it to another thread, which takes longer than the rest of
an upload. A buffer in a ready slot begins in one step.

A shape is wanted once values were uploaded to a new buffer of it. When such a buffer is freed, a slot is made
ready in its place. Its generation is in the mirror, but no reference to it has been made, so nothing resolves
to it. Its bytes are given back when anything else needs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from cudnn_actor.memory.slot import Slot
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["MOST_READY", "READY_BYTES", "ReadySlots"]

READY_BYTES: Final = 1 << 20
"""The most bytes of a buffer for which a slot is made ready."""
MOST_READY: Final = 4
"""The most shapes that are wanted, and the most slots that are ready for one of them."""


class ReadySlots:
    """The slots, by the shapes for which they are ready. Used by one thread at a time."""

    def __init__(self) -> None:
        self._slots: dict[TensorSpec, list[Slot]] = {}
        """The shapes that are wanted, the latest last."""

    def __bool__(self) -> bool:
        return any(self._slots.values())

    @property
    def by_arena(self) -> Counter[int]:
        """How many slots are ready in each arena, by its number."""
        return Counter(slot.arena.number for each in self._slots.values() for slot in each)

    def of(self, spec: TensorSpec) -> list[Slot]:
        """The slots for a shape. Whoever begins a buffer takes the last one out."""
        return self._slots.get(spec, [])

    def wants(self, spec: TensorSpec) -> bool:
        """Whether another slot is to be made ready for a shape."""
        slots = self._slots.get(spec)
        return slots is not None and len(slots) < MOST_READY

    def want(self, spec: TensorSpec) -> Iterable[Slot]:
        """Want a shape from now on. Returns slots of another one, which is no longer wanted: vacate them."""
        if spec.nbytes > READY_BYTES:
            return ()
        self._slots[spec] = self._slots.pop(spec, [])
        return self._slots.pop(next(iter(self._slots))) if len(self._slots) > MOST_READY else ()

    def add(self, slot: Slot) -> None:
        """Add a slot of a shape that is wanted."""
        self._slots[slot.spec].append(slot)

    def take_all(self) -> list[Slot]:
        """Remove and return all slots: vacate them. Their shapes are wanted as before."""
        slots = [slot for each in self._slots.values() for slot in each]
        for each in self._slots.values():
            each.clear()
        return slots
