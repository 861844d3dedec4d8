"""A worker's view of the service's buffers. It looks up what it needs in the parent's generation table.

The parent allocates and frees buffers, and decides which references are stale, and why. It sends only
requests that it has checked, and holds their buffers until they are answered. The worker only checks each
reference again when it enqueues the request, against records that only the parent can write
(`process.generations`). And it keeps what its own engine needs: a slot object for each buffer, with the
engine's binding.

A slot object is made from the first reference of a generation, and is used until the slot has another
generation. If unfinished work still holds it then, that work keeps it unchanged, and the new generation gets
a new slot object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from cudnn_actor.isolation.process.generations import GenerationView
from cudnn_actor.memory import Arena, Slot
from cudnn_actor.memory.memory_table import checked_reference
from cudnn_actor.protocol.errors import InvalidRequest, StaleBufferError, StaleReason, Words
from cudnn_actor.protocol.types.buffers import BufferRef

__all__ = ["BorrowedTable"]


class _ArenaName:
    """A slot's arena in a worker: only its number, by which the engine finds the memory."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class BorrowedTable:
    """The buffers of a service as its worker sees them: a `memory.Buffers`. Used by one thread; never blocks.

    Parameters
    ----------
    device
        The device in references: "cpu" or "cuda:N".
    view
        The parent's generation table. Its maker closes it, after the last use of this object.
    """

    def __init__(self, device: str, view: GenerationView) -> None:
        self.device = device
        self._view = view
        self._slots: dict[int, Slot] = {}

    @property
    def epoch(self) -> int:
        """Changes whenever the parent notes the end of a buffer."""
        return self._view.epoch

    def resolve(self, ref: BufferRef, field: str = "buffer") -> Slot:
        """The slot of a live reference; `field` is the message's name for it, for the error's text.

        Raises
        ------
        StaleBufferError
            The slot has another generation (FREED), or there is no such slot (FOREIGN). The parent, which
            checks first, knows the exact reason.
        InvalidRequest
            Spec or device differ from the buffer's, or this is not a reference.
        """
        try:
            slot = self._slots.get(ref.slot)
            if (
                slot is not None
                and slot.generation == ref.generation
                and self._view.generation(ref.slot) == ref.generation
                and (slot.spec is ref.spec or slot.spec == ref.spec)
                and self.device == ref.device
            ):
                return slot
        except (AttributeError, TypeError):
            pass
        return self._seat(checked_reference(ref, field), field)

    def hold_all(self, slots: Sequence[Slot]) -> None:
        """Count a piece of unfinished work on each of the slots, which stay unchanged until its end."""
        for slot in slots:
            slot.users += 1

    def release_all(self, slots: Sequence[Slot]) -> None:
        """Count the end of that work on each of the slots. Raises `ValueError` when there was none."""
        for slot in slots:
            if slot.users <= 0:
                raise ValueError(f"{slot!r} is held by nobody")
            slot.users -= 1

    # Off the hot path.

    def forget_arena(self, number: int) -> None:
        """Drop the engine's handles on an arena's buffers, which have all ended: they keep it mapped."""
        for slot in self._slots.values():
            if slot.arena.number == number:
                slot.binding = None

    def _seat(self, ref: BufferRef, field: str) -> Slot:
        """The slot of a reference. A new slot object is made if the slot had another generation. Raises as
        `resolve` does."""
        generation, arena, offset, nbytes = self._view.at(ref.slot)
        if generation != ref.generation or not generation:
            inside = 0 <= ref.slot < self._view.capacity
            reason = StaleReason.FREED if inside else StaleReason.FOREIGN
            raise StaleBufferError(slot=ref.slot, generation=ref.generation, reason=reason, field=field)
        if ref.device != self.device:
            raise _forgery_error(f"{field}.device", ref.device, ref.slot, self.device)
        if ref.spec.nbytes > nbytes:
            raise _forgery_error(f"{field}.spec", str(ref.spec), ref.slot, f"of {nbytes:,} bytes")
        slot = self._slots.get(ref.slot)
        if slot is None or slot.generation != generation:
            slot = self._newcomer(slot, ref, arena, offset)
        elif slot.spec != ref.spec:
            raise _forgery_error(f"{field}.spec", str(ref.spec), ref.slot, str(slot.spec))
        return slot

    def _newcomer(self, slot: Slot | None, ref: BufferRef, arena: int, offset: int) -> Slot:
        if slot is None or slot.users:
            slot = self._slots[ref.slot] = Slot(ref.slot, ref.generation)
        slot.generation = ref.generation
        # The executor and the engine use only the arena's number.
        slot.seat(ref.spec, cast(Arena, _ArenaName(arena)), offset)
        return slot


def _forgery_error(field: str, given: str, slot: int, own: str) -> InvalidRequest:
    return InvalidRequest(
        field=field,
        value=Words(given),
        problem=f"is not that of buffer {slot}, {own}",
        fix="pass references as the service gave them",
    )
