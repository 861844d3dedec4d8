"""A worker's memory table. It owns no buffers, and looks up what it needs in the parent's generation table.

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
from typing import NoReturn, cast

from cudnn_actor.isolation.process.generations import GenerationView
from cudnn_actor.memory import Arena, BufferOwner, Slot
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.errors import InvalidRequest, StaleBufferError, StaleReason, Words
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["BorrowedTable"]

_EPOCH = 1 << 64
"""The worker's own changes count in steps of this size, above every value of the parent's 64-bit epoch."""


class _ArenaName:
    """A slot's arena in a worker: only its number, by which the engine finds the memory."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class BorrowedTable:
    """The buffers of a service as its worker sees them: a `memory.base.Memory`.

    Used by one thread; never blocks.

    Parameters
    ----------
    device
        The device in references: "cpu" or "cuda:N".
    view
        The parent's generation table. Its maker closes it, after the last use of this object.
    limit
        For error texts: the parent's limit on bytes of arenas; None for no limit.
    """

    def __init__(self, device: str, view: GenerationView, limit: int | None = None) -> None:
        self.device = device
        self.limit = limit
        self.live_buffers = 0
        """0, like `live_bytes`, because the worker owns no buffers."""
        self.live_bytes = 0
        self.mapped: dict[int, int] = {}
        """For error texts: the bytes of each arena that the engine has mapped, by number."""
        self._view = view
        self._epoch = 0
        self._slots: dict[int, Slot] = {}

    @property
    def epoch(self) -> int:
        """Changes whenever the parent notes the end of a buffer, and with every `forget_bindings`."""
        return self._epoch + self._view.epoch

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arenas that the engine has mapped."""
        return sum(self.mapped.values())

    # Buffers.

    def resolve(self, ref: BufferRef, field: str = "buffer") -> Slot:
        """The slot of a live reference; `field` is the message's name for it, for the error's text.

        Raises
        ------
        StaleBufferError
            The slot has another generation. The reason is FREED; the parent, which checks first, knows the
            exact reason.
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
        return self._seated(_checked(ref, field), field)

    def is_live(self, ref: BufferRef) -> bool:
        """Whether a reference's slot still has its generation."""
        return ref.generation != 0 and self._view.generation(ref.slot) == ref.generation

    def hold(self, slot: Slot) -> None:
        """Note a piece of unfinished work on a slot, which stays unchanged until its end."""
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
        """Drop every slot's binding, because the engine that made them has gone."""
        self._epoch += _EPOCH
        for slot in self._slots.values():
            slot.binding = None

    def tear(self, slot: Slot, reason: StaleReason = StaleReason.TORN) -> None:  # noqa: ARG002 - the parent's
        """Forget a slot. The parent notes that its buffer has ended, and why."""
        self._epoch += _EPOCH
        if self._slots.get(slot.index) is slot:
            del self._slots[slot.index]

    def lose_all(self) -> None:
        """Forget every slot. The parent notes that the buffers have ended."""
        self._epoch += _EPOCH
        self._slots.clear()

    def close(self) -> None:
        """Forget every slot. Does not close `view`. Safe to call twice."""
        self.lose_all()

    # A worker's table has no arenas of its own, no frees to undo, and no loans.

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

    # Operations that only the parent performs.

    def lend(self, slot: Slot) -> BufferOwner:
        """Raise `InvalidRequest`: an array over a buffer's bytes cannot leave the process."""
        raise InvalidRequest(
            field="message",
            value=Words("View"),
            problem=f"asks for an array over the bytes of buffer {slot.index}, which is in a worker process",
            fix='spawn with isolation="thread", or download the buffer',
        )

    def room_for(self, spec: TensorSpec) -> bool:  # noqa: ARG002 - whatever it is
        """Raise `InvalidRequest`, as all of these do."""
        _parents("allocate")

    def next_arena(self, spec: TensorSpec) -> tuple[int, int]:  # noqa: ARG002 - whatever it is
        """Raise `InvalidRequest`."""
        _parents("create an arena")

    def try_smaller(self, refused: int, spec: TensorSpec) -> bool:  # noqa: ARG002 - whatever it is
        """Raise `InvalidRequest`."""
        _parents("create an arena")

    def add_arena(self, number: int, nbytes: int, fd: int) -> None:  # noqa: ARG002 - whatever it is
        """Raise `InvalidRequest`. The caller keeps the descriptor."""
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
        """The slot of a reference, made anew if it had another generation. Raises as `resolve` does."""
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
        # The executor and the engine use only the arena's number.
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
        problem="is not possible in a worker: the parent process owns the memory",
        fix="send it to the service, which answers it without its worker",
    )
