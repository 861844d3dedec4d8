"""A worker's memory table: it owns nothing, and looks up in its parent's records what it must know.

The parent gives buffers out, takes them back and decides which references are stale, and why. A worker is
sent only requests that the parent has checked, and whose buffers it holds until they are answered. What
is left to the worker is the check at the moment of enqueueing, against records that only the parent can
write (`workers.generations`), and what its own engine needs: a slot object for each buffer, with the
engine's binding on it.

A slot object is made from the first reference that comes for a generation, and serves until another
generation sits there. One that unfinished work still holds is left to that work, and the newcomer gets
another: its place stays as it was, whatever the parent has written since.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, cast

from cudnn_actor.memory import Arena, BufferOwner, Slot
from cudnn_actor.protocol.buffers import BufferRef
from cudnn_actor.protocol.errors import InvalidRequest, StaleBufferError, StaleReason, Words
from cudnn_actor.protocol.tensor import TensorSpec
from cudnn_actor.workers.generations import GenerationView

__all__ = ["BorrowedTable"]

_EPOCH = 1 << 64
"""Ends that are the worker's own are counted above all that the parent's word can say."""


class _ArenaName:
    """What a worker's slot knows of its arena. The memory itself is the engine's, by this number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class BorrowedTable:
    """The buffers of a service as its worker sees them: a `memory.base.Memory`. One thread's; never blocks.

    Parameters
    ----------
    device
        "cpu" or "cuda:N": what references say.
    view
        The parent's records. Its maker closes it, after the table's last use.
    limit
        For the texts of errors: bytes of arenas that the parent may not pass; None for no limit.
    """

    def __init__(self, device: str, view: GenerationView, limit: int | None = None) -> None:
        self.device = device
        self.limit = limit
        self.live_buffers = 0
        """Nothing is owned here, so nothing is counted: this and the next two are 0."""
        self.live_bytes = 0
        self.arena_bytes = 0
        self._view = view
        self._epoch = 0
        self._slots: dict[int, Slot] = {}

    @property
    def epoch(self) -> int:
        """Another number after every end that the parent notes, and after every `forget_bindings`."""
        return self._epoch + self._view.epoch

    # Buffers.

    def resolve(self, ref: BufferRef, field: str = "buffer") -> Slot:
        """The slot of a live reference; `field` is the message's name for it, for the error's text.

        Raises
        ------
        StaleBufferError
            The generation does not sit there. FREED says so: the parent knows better, and says it first.
        InvalidRequest
            Spec or device are not the buffer's, or this is no reference.
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
        return self._seated(_checked(ref, field), field)

    def is_live(self, ref: BufferRef) -> bool:
        """Whether a reference's generation sits in its slot."""
        return ref.generation != 0 and self._view.generation(ref.slot) == ref.generation

    def hold(self, slot: Slot) -> None:
        """Note a piece of unfinished work on a slot: it stays as it is."""
        slot.users += 1

    def release(self, slot: Slot) -> None:
        """Note the end of a piece of work. Raises `ValueError` when there was none."""
        if slot.users <= 0:
            raise ValueError(f"{slot!r} is held by nobody")
        slot.users -= 1

    def hold_all(self, slots: Sequence[Slot]) -> None:
        """Note a piece of work on each of some slots."""
        for slot in slots:
            slot.users += 1

    def release_all(self, slots: Sequence[Slot]) -> None:
        """Note the end of what `hold_all` noted. Raises as `release` does."""
        for slot in slots:
            self.release(slot)

    def forget_bindings(self) -> None:
        """Drop every slot's binding: the engine whose handles they are is gone."""
        self._epoch += _EPOCH
        for slot in self._slots.values():
            slot.binding = None

    def tear(self, slot: Slot, reason: StaleReason = StaleReason.TORN) -> None:  # noqa: ARG002 - the parent's
        """Forget a slot. That its buffer has ended, and why, is noted by the parent."""
        self._epoch += _EPOCH
        if self._slots.get(slot.index) is slot:
            del self._slots[slot.index]

    def lose_all(self) -> None:
        """Forget every slot. That the buffers have ended is noted by the parent."""
        self._epoch += _EPOCH
        self._slots.clear()

    def close(self) -> None:
        """Forget every slot; the records are not this table's to close. Safe to call twice."""
        self.lose_all()

    # What there is nothing of: arenas of its own, frees to undo, loans.

    def arenas(self) -> tuple[Arena, ...]:
        """None: the parent has each arena mapped by a message."""
        return ()

    def idle_arenas(self) -> tuple[int, ...]:
        """None: the parent has them unmapped."""
        return ()

    def arenas_to_drop(self, nbytes: int) -> tuple[int, ...]:  # noqa: ARG002 - see above
        """None, likewise."""
        return ()

    def revive(self, ref: BufferRef) -> bool:  # noqa: ARG002 - nothing is freed here
        """Never: nothing is freed here."""
        return False

    def is_withheld(self, ref: BufferRef) -> bool:  # noqa: ARG002 - nothing is freed here
        """Never, likewise."""
        return False

    def take_back(self) -> None:
        """Nothing is lent here."""

    # What is the parent's to do.

    def lend(self, slot: Slot) -> BufferOwner:
        """Raise `InvalidRequest`: an array over a buffer's bytes cannot leave the process."""
        raise InvalidRequest(
            field="message",
            value=Words("View"),
            problem=f"asks for an array over the bytes of buffer {slot.index}, which a worker process has",
            fix='spawn with isolation="thread", or download the buffer',
        )

    def room_for(self, spec: TensorSpec) -> bool:  # noqa: ARG002 - whatever it is
        """Raise `InvalidRequest`, as all of these do."""
        _parents("allocate")

    def next_arena(self, spec: TensorSpec) -> tuple[int, int]:  # noqa: ARG002 - whatever it is
        """Raise `InvalidRequest`."""
        _parents("create an arena")

    def add_arena(self, number: int, nbytes: int, fd: int) -> None:  # noqa: ARG002 - whatever it is
        """Raise `InvalidRequest`; the descriptor is still the caller's."""
        _parents("add an arena")

    def drop_arena(self, number: int) -> None:  # noqa: ARG002 - whatever it is
        """Raise `InvalidRequest`."""
        _parents("drop an arena")

    def allocate(self, spec: TensorSpec) -> BufferRef:  # noqa: ARG002 - whatever it is
        """Raise `InvalidRequest`."""
        _parents("allocate")

    def free(self, ref: BufferRef, field: str = "buffer") -> None:  # noqa: ARG002 - whatever it is
        """Raise `InvalidRequest`."""
        _parents("free")

    # Off the hot path.

    def _seated(self, ref: BufferRef, field: str) -> Slot:
        """The slot of a reference, seated anew when it is another buffer's. Raises as `resolve` does."""
        generation, arena, offset, nbytes = self._view.at(ref.slot)
        if generation != ref.generation or not generation:
            inside = 0 <= ref.slot < self._view.capacity
            reason = StaleReason.FREED if inside else StaleReason.FOREIGN
            raise StaleBufferError(slot=ref.slot, generation=ref.generation, reason=reason, field=field)
        if ref.device != self.device:
            raise _forged(f"{field}.device", ref.device, ref.slot, self.device)
        if ref.spec.nbytes > nbytes:
            raise _forged(f"{field}.spec", str(ref.spec), ref.slot, f"of {nbytes:,} bytes")
        slot = self._slots.get(ref.slot)
        if slot is None or slot.generation != generation:
            slot = self._newcomer(slot, ref, arena, offset)
        elif slot.spec != ref.spec:
            raise _forged(f"{field}.spec", str(ref.spec), ref.slot, str(slot.spec))
        return slot

    def _newcomer(self, slot: Slot | None, ref: BufferRef, arena: int, offset: int) -> Slot:
        if slot is None or slot.users:
            slot = self._slots[ref.slot] = Slot(ref.slot, ref.generation)
        slot.generation = ref.generation
        # Of an arena, the executor and the engine use the number alone.
        slot.seat(ref.spec, cast(Arena, _ArenaName(arena)), offset)
        return slot


def _checked(ref: object, field: str) -> BufferRef:
    if isinstance(ref, BufferRef) and type(ref.slot) is int and type(ref.generation) is int:
        return ref
    raise InvalidRequest(
        field=field,
        value=ref,
        problem="is not a buffer reference",
        fix="upload arrays first: await gpu.upload(array)",
    )


def _forged(field: str, given: str, slot: int, own: str) -> InvalidRequest:
    return InvalidRequest(
        field=field,
        value=Words(given),
        problem=f"is not that of buffer {slot}, {own}",
        fix="pass references as the service gave them",
    )


def _parents(what: str) -> NoReturn:
    raise InvalidRequest(
        field="message",
        value=Words(what),
        problem="is not a worker's to do: the parent process owns the memory",
        fix="ask the service, which answers this without its worker",
    )
