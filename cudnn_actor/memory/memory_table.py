"""The table of buffers: which bytes each one has, and which references are live.

A reference holds no address. It names a slot and a generation of it, and the table has the slot's arena and
offset. Each buffer of a slot has a generation of its own. By this, a reference to an earlier buffer is
recognised as stale.

The table lives on the service's side and outlives the actor's incarnations. It moves no bytes and maps no
memory: it allocates places in arenas that an engine has created. One thread writes at a time; nothing here
blocks. An array that a caller has of a buffer's memory holds the buffer's slot, and may be collected on any
thread. That thread only records it (`lending`); `take_back` then releases the slot.
"""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Callable, Sequence

from cudnn_actor.actors import forks
from cudnn_actor.memory.arena import Arena
from cudnn_actor.memory.base import Mirror
from cudnn_actor.memory.lending import BufferOwner
from cudnn_actor.memory.pool import ArenaPool
from cudnn_actor.memory.ready_slots import ReadySlots
from cudnn_actor.memory.slot import SharedHold, Slot
from cudnn_actor.protocol.errors import (
    InvalidRequest,
    OutOfMemory,
    StaleBufferError,
    StaleReason,
    Words,
)
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.checks import require_awaited
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["MemoryTable", "checked_reference"]

_COUNTS = 1 << 32
"""Generations of one slot; the bits above them are the service's nonce."""

_LOOKS = 3
"""Attempts to read a slot before a reference counts as foreign. An attempt reads two fields, and another
thread may end the slot, or undo that, in between."""
_epochs = itertools.count(1)


class MemoryTable:
    """Arenas, the buffers in them, and the generations that distinguish live references from stale ones.

    Parameters
    ----------
    device
        "cpu" or "cuda:N": the device that references name.
    nonce
        1 to 2**32 - 1, the upper half of every generation; random unless given.
    arena_bytes
        The usual size of an arena, in bytes; larger buffers get one of their own size.
    limit
        At most this many bytes of arenas, in steps of 2 MiB; None for no limit.
    mirror
        Records every buffer's place: when the buffer gets it, and when the bytes stop being the buffer's.
        That is when the last work that may use them ends, or at once if they are torn or lost. None for no
        mirror.

    Raises
    ------
    InvalidRequest
        A number is out of its range.
    """

    def __init__(
        self,
        device: str,
        *,
        nonce: int | None = None,
        arena_bytes: int = 64 << 20,
        limit: int | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        nonce = secrets.randbelow(_COUNTS - 1) + 1 if nonce is None else nonce
        _check_range("nonce", nonce, 1, _COUNTS - 1)
        _check_range("arena_bytes", arena_bytes, 1, 1 << 48)
        _check_range("memory_limit", 0 if limit is None else limit, 0, 1 << 63)
        self.device = device
        self.live_bytes = 0
        """Bytes of the live buffers, without rounding."""
        self.epoch = next(_epochs)
        """Changes whenever a buffer or its bindings end, and differs between tables. While it is unchanged,
        every reference that resolved still resolves to the same slot. Any thread may read it."""
        self.staging_limit: int | None = None
        """Bytes of host memory that staging arrays may take altogether; None for no limit."""
        self.losses = 0
        """How many buffers have been torn or lost so far."""
        self.has_idle_imports = False
        """Whether an imported arena may have become idle since `take_idle_imports`."""
        self._pool = ArenaPool(arena_bytes=arena_bytes, limit=limit)
        self._first = nonce << 32 | 1
        self._slots: list[Slot] = []
        self._vacant: list[int] = []
        self._live: dict[int, Slot] = {}
        self._let_go: deque[Slot] = deque()
        self._ready = ReadySlots()
        self._mirror = mirror
        forks.watch(self)

    def forget_parent(self) -> None:
        """Close the copies of the descriptors in a forked child: they would keep device memory allocated.

        The bookkeeping does not change: nothing is freed, and the mirror, which the parent writes, is not
        written.
        """
        self._mirror = None
        self._pool.close()

    @property
    def live_buffers(self) -> int:
        """The number of buffers whose references resolve."""
        return len(self._live)

    def live(self) -> tuple[BufferRef, ...]:
        """References to all buffers that resolve, in the order in which they were allocated. Any thread."""
        return tuple(
            BufferRef(slot=slot.index, generation=slot.generation, spec=slot.spec, device=self.device)
            for slot in tuple(self._live.values())
        )

    # Arenas

    @property
    def arena_bytes(self) -> int:
        """Bytes of all arenas."""
        return self._pool.nbytes

    @property
    def limit(self) -> int | None:
        """Bytes of arenas that may not be passed; None for no limit. Can be set."""
        return self._pool.limit

    @limit.setter
    def limit(self, limit: int | None) -> None:
        self._pool.limit = limit

    def check_staging(self, nbytes: int, lent: int) -> None:
        """Raise `OutOfMemory` unless a staging array of `nbytes` fits beside those of `lent` bytes.

        On the CPU they count towards the limit of the arenas, too: drop `arenas_to_drop(nbytes)`.
        """
        self.count_staging(lent)
        self.take_back()
        self.give_up_ready()
        self._pool.check_beside(nbytes if self.device == "cpu" else 0)
        most = self.staging_limit
        if most is not None and nbytes > most - lent:
            raise OutOfMemory(
                requested=nbytes, in_use=lent, limit=None, most=most, largest=max(0, most - lent)
            )

    def count_staging(self, lent: int) -> None:
        """Let staging arrays of `lent` bytes count towards the limit, if they are in the arenas' memory."""
        self._pool.beside = lent if self.device == "cpu" else 0

    def arenas(self) -> tuple[Arena, ...]:
        """Every arena, in the order of their numbers. A new incarnation maps them again."""
        return self._pool.all()

    def idle_arenas(self) -> tuple[int, ...]:
        """Numbers of the arenas that hold no bytes of any buffer, and so may be dropped.

        An arena with nothing but ready slots is among them, except where no other arena is empty: then it is
        kept, and its slots with it.
        """
        self.take_back()
        if self._ready and self._ready_keep_arenas():
            self.give_up_ready()
        return tuple(arena.number for arena in self._pool.idle())

    def arenas_to_drop(self, nbytes: int) -> tuple[int, ...]:
        """Numbers of the idle arenas that must be dropped before one of `nbytes` is added; often none."""
        return tuple(arena.number for arena in self._pool.to_drop(nbytes))

    def room_for(self, spec: TensorSpec) -> bool:
        """Whether `allocate(spec)` would succeed without another arena."""
        self.take_back()
        if self._ready and not self._pool.room_for(spec.nbytes):
            self.give_up_ready()
        return self._pool.room_for(spec.nbytes)

    def next_arena(self, spec: TensorSpec) -> tuple[int, int]:
        """The number and size in bytes of the arena to create so that `spec` fits.

        The usual size, or the buffer's own if that is larger; less if the limit leaves less. Nothing has
        changed yet: drop `arenas_to_drop(nbytes)`, create the arena, then call `add_arena`.

        Raises
        ------
        OutOfMemory
            The limit would be exceeded even if every idle arena were dropped; nothing has changed.
        """
        self.take_back()
        self.give_up_ready()
        return self._pool.next(spec.nbytes)

    def try_smaller(self, refused: int, spec: TensorSpec) -> bool:
        """Whether a smaller arena than the one of `refused` bytes, which the system did not give, can hold
        `spec`. `next_arena` gives smaller ones from now on, and larger ones again with each that is given."""
        return self._pool.shrink(refused, spec.nbytes)

    def add_arena(self, number: int, nbytes: int, fd: int) -> None:
        """Take over an arena that an engine created, and its descriptor.

        When this raises, the caller keeps the descriptor: `ServiceStopped` after `close`, `ValueError`
        for a number that was used before or a size that is not a positive multiple of 256.
        """
        self._pool.add(number, nbytes, fd)

    def drop_arena(self, number: int) -> None:
        """Close an idle arena's descriptor and forget it.

        Raises `KeyError` when there is no such arena, `ValueError` when a buffer has bytes in it.
        """
        self._pool.drop(number)

    # Arenas of other services

    @property
    def next_number(self) -> int:
        """The number that the next arena gets."""
        return self._pool.next_number

    def seat_import(self, number: int, nbytes: int, offset: int, spec: TensorSpec) -> BufferRef:
        """Add a buffer of another service, in an arena that the engine has just mapped for reading. Returns
        its reference.

        The buffer ends as any other does, and with the engine: see `lose_imports`. Raises `OutOfMemory` if
        the mirror has no room; the arena is idle then.
        """
        arena = self._pool.add_import(number, nbytes)

        def take() -> tuple[Arena, int]:
            arena.free.take(offset, spec.nbytes)
            return arena, offset

        return self._seat_in(take, spec)

    def take_idle_imports(self) -> tuple[int, ...]:
        """Forget the imported arenas whose buffer has ended, and return their numbers: unmap them."""
        self.has_idle_imports = False
        numbers = self._pool.idle_imports()
        self._pool.drop_imports(numbers)
        return numbers

    def lose_imports(self) -> None:
        """End every imported buffer, because the engine that had mapped it has ended. Nothing is unmapped.

        They are not mapped again: an arena that cannot be read any more would end each engine that tries. So
        those that were freed under a copy are lost, too: the copy must not run again on bytes held for it.
        """
        numbers = self._pool.take_imports()
        for slot in tuple(self._slots) if numbers else ():
            if not (slot.live or slot.users) or slot.arena.number not in numbers:
                continue
            if not slot.live and _was_freed(slot):
                self._revive(slot)
            self.tear(slot, StaleReason.CONTEXT_LOST)

    def close(self) -> None:
        """Free every buffer, even held ones, and close every descriptor. Safe to call twice."""
        for slot in tuple(self._live.values()):
            self._end(slot, StaleReason.FREED)
        self.give_up_ready()
        self.forget_bindings()  # else the bindings of held buffers would keep their arenas mapped
        self._leave_mirror()
        self._pool.take_imports()
        self.has_idle_imports = False  # nobody is left who could unmap one
        self._pool.close()

    # Buffers

    def allocate(self, spec: TensorSpec) -> BufferRef:
        """Allocate a buffer and return its reference. The bytes are 256-byte aligned and not initialised.

        Raises
        ------
        OutOfMemory
            No arena has room: add one (`next_arena`), then allocate again. Or the mirror has no room. Nothing
            has changed.
        """
        self.room_for(spec)  # which gives up ready slots if there is none
        return self._seat_in(lambda: self._pool.place(spec.nbytes), spec)

    def _seat_in(self, take: Callable[[], tuple[Arena, int]], spec: TensorSpec) -> BufferRef:
        """Seat a buffer in the place that `take` takes, which it may do twice. Raises `OutOfMemory`."""
        try:
            return self._seat(spec, *take())
        except OutOfMemory:
            if not self._ready:
                raise
            self.give_up_ready()  # they have records in the mirror, too
        return self._seat(spec, *take())

    def _seat(self, spec: TensorSpec, arena: Arena, offset: int) -> BufferRef:
        slot = self._vacant_slot()
        slot.seat(spec, arena, offset)
        self._mirror_seat(slot)
        self._live[slot.index] = slot
        self.live_bytes += slot.nbytes
        return BufferRef(slot=slot.index, generation=slot.generation, spec=spec, device=self.device)

    # Slots that are ready for buffers: see `ready_slots`.

    def want_ready(self, spec: TensorSpec) -> None:
        """Have slots ready for buffers of a shape that comes again, unless they are large."""
        for slot in self._ready.want(spec):
            self._give_up(slot)

    def make_ready(self, spec: TensorSpec) -> None:
        """Make a slot ready, if that is wanted for this shape, and there is room without another arena."""
        if not self._ready.wants(spec) or not self._pool.room_for(spec.nbytes):
            return
        arena, offset = self._pool.place(spec.nbytes)
        slot = self._vacant_slot()
        slot.seat(spec, arena, offset)
        slot.live = False
        try:
            self._mirror_seat(slot)
        except OutOfMemory:
            return  # it is vacant again
        self._ready.add(slot)

    def ready(self, spec: TensorSpec) -> list[Slot]:
        """The slots that are ready for buffers of a shape. A buffer begins in the last: whoever takes it out
        also adds it to `_live`, makes it live, and counts its bytes."""
        return self._ready.of(spec)

    def give_up_ready(self) -> None:
        """Give the bytes of all slots that are ready back."""
        for slot in self._ready.take_all():
            self._give_up(slot)

    def _ready_keep_arenas(self) -> bool:
        """Whether ready slots are all that several arenas have, or one beside others that have nothing."""
        ready = self._ready.by_arena
        empty = [arena.number for arena in self._pool.all() if arena.free.places == ready[arena.number]]
        return len(empty) > 1 and any(ready[number] for number in empty)

    def _give_up(self, slot: Slot) -> None:
        slot.end(StaleReason.FREED)  # the mirror had its generation, so no other buffer may
        self._vacate(slot)

    def resolve(self, ref: BufferRef, field: str = "buffer") -> Slot:
        """The slot of a live reference; `field` is its name in the message, for the error's text.

        Raises
        ------
        StaleBufferError
            The buffer was freed, torn or lost with its context, or belongs to another service.
        InvalidRequest
            The generation is live, but spec or device are not the buffer's; or this is not a reference.
        """
        try:
            slot = self._live.get(ref.slot)
            if (
                slot is not None
                and slot.generation == ref.generation
                and (slot.spec is ref.spec or slot.spec == ref.spec)
                and self.device == ref.device
            ):
                return slot
        except (AttributeError, TypeError):
            pass
        return self._looked_up(ref, field)

    def free(self, ref: BufferRef, field: str = "buffer") -> None:
        """End a buffer: it is stale at once; its bytes become free when no unfinished work holds it.

        Raises what `resolve` raises: freeing twice is an error like any use of a freed buffer.
        """
        self._end(self.resolve(ref, field), StaleReason.FREED)

    def revive(self, ref: BufferRef) -> bool:
        """Undo the free of a buffer whose bytes are still held, because the work that holds them runs again.

        Returns whether that was possible: not if nothing holds the bytes, or if the buffer ended in another
        way.
        """
        slot = self._slots[ref.slot]
        if not self.is_withheld(ref) or slot.why_ended(ref.generation) is not StaleReason.FREED:
            return False
        self._revive(slot)
        return True

    def _revive(self, slot: Slot) -> None:
        self._live[slot.index] = slot  # first: any thread that sees the slot as live also finds it there
        slot.revive()
        self.live_bytes += slot.nbytes

    def is_live(self, ref: BufferRef) -> bool:
        """Whether a reference still resolves that this table has issued, or that of an earlier life."""
        if ref.slot >= len(self._slots):
            return False
        slot = self._slots[ref.slot]
        return slot.live and slot.generation == ref.generation

    def is_withheld(self, ref: BufferRef) -> bool:
        """Whether a buffer has ended and its bytes are still held."""
        slot = self._slots[ref.slot]
        return not slot.live and slot.generation == ref.generation + 1 and slot.users > 0

    def hold(self, slot: Slot) -> None:
        """Count one more piece of unfinished work that uses a slot, which `resolve` has just returned."""
        slot.users += 1

    def release(self, slot: Slot) -> None:
        """Count one piece of work less. Raises `ValueError` if there was none."""
        if slot.users <= 0:
            raise ValueError(f"{slot!r} is not held")
        slot.users -= 1
        if not slot.users and not slot.live:
            self._vacate(slot)

    def hold_all(self, slots: Sequence[Slot]) -> None:
        """Call `hold` for each of the slots: one call, since every request needs it."""
        for slot in slots:
            slot.users += 1

    def release_all(self, slots: Sequence[Slot]) -> None:
        """Call `release` for each of the slots. Raises as `release` does."""
        for slot in slots:
            if slot.users > 1 or (slot.users == 1 and slot.live):
                slot.users -= 1
            else:
                self.release(slot)

    def hold_together(self, slots: Sequence[Slot]) -> SharedHold:
        """Hold slots, which `resolve` has just returned, until the returned object is ended and released."""
        self.hold_all(slots)
        return SharedHold(slots)

    def end_hold(self, hold: SharedHold) -> None:
        """End a shared hold: its slots are released when nothing holds it any more. Idempotent."""
        if hold.live:
            hold.live = False
            if not hold.users:
                self._vacate(hold)

    def lend(self, slot: Slot) -> BufferOwner[Slot]:
        """Hold a slot that `resolve` has just returned until the returned object is collected, on any thread.

        The hold outlives the incarnation that took it: it is not part of that incarnation's work.
        """
        self.hold(slot)
        return BufferOwner(slot, self._let_go)

    def take_back(self) -> None:
        """Release the slots whose `BufferOwner` has been collected. Every search for room does this first."""
        while self._let_go:
            self.release(self._let_go.popleft())

    def tear(self, slot: Slot, reason: StaleReason = StaleReason.TORN) -> None:
        """End a held buffer whose contents are no longer reliable. One that has ended already is not changed.

        Its bytes become free when nothing holds them. Raises `ValueError` for reasons other than TORN and
        CONTEXT_LOST.
        """
        if reason not in (StaleReason.TORN, StaleReason.CONTEXT_LOST):
            raise ValueError(f"reason={reason} must be TORN or CONTEXT_LOST")
        if slot.live:
            self._end(slot, reason)

    def lose_all(self) -> None:
        """End every live buffer: the context died and the memory with it."""
        self.give_up_ready()
        for slot in tuple(self._live.values()):
            self._end(slot, StaleReason.CONTEXT_LOST)

    def forget_bindings(self) -> None:
        """Drop every slot's binding: the incarnation that they belong to has ended."""
        self.epoch = next(_epochs)
        for slot in self._slots:
            slot.binding = None

    def _vacant_slot(self) -> Slot:
        if self._vacant:
            return self._slots[self._vacant.pop()]
        slot = Slot(len(self._slots), self._first)
        self._slots.append(slot)
        return slot

    def _end(self, slot: Slot, reason: StaleReason) -> None:
        slot.end(reason)  # first: a sender's thread that finds it gone from `_live` can then read why
        self.losses += reason is not StaleReason.FREED
        del self._live[slot.index]
        self.live_bytes -= slot.nbytes
        self.epoch = next(_epochs)  # after the end: a thread that reads the new number sees the end
        if self._mirror is not None and reason is not StaleReason.FREED:
            self._mirror.vacate(slot.index)
        if not slot.users:
            self._vacate(slot)

    def _vacate(self, slot: Slot) -> None:
        if isinstance(slot, SharedHold):
            self.release_all(slot.slots)
            return
        if self._mirror is not None and _was_freed(slot):
            self._mirror.vacate(slot.index)
        slot.binding = None
        slot.arena.free.release(slot.offset)
        self.has_idle_imports |= slot.arena.imported
        # No generation may be used twice, so a slot that has used up its generations is not used again.
        if slot.generation < self._first - 1 + _COUNTS:
            self._vacant.append(slot.index)

    def _mirror_seat(self, slot: Slot) -> None:
        if self._mirror is None:
            return
        try:
            self._mirror.seat(slot.index, slot.generation, slot.arena.number, slot.offset, slot.nbytes)
        except OutOfMemory:
            slot.live = False  # its reference has not been returned to anyone
            slot.arena.free.release(slot.offset)
            self._vacant.append(slot.index)
            raise

    def _leave_mirror(self) -> None:
        """Stop using the mirror, after vacating its records of freed buffers that are still held."""
        mirror, self._mirror = self._mirror, None
        if mirror is not None:
            for slot in self._slots:
                if slot.users and _was_freed(slot):
                    mirror.vacate(slot.index)

    def _looked_up(self, ref: object, field: str) -> Slot:
        """The slow path of `resolve`, when the fast one found nothing: return the slot, or raise.

        It looks again, since another thread may have changed the table meanwhile: the second look decides.
        """
        ref = checked_reference(ref, field)
        if not 0 <= ref.slot < len(self._slots):
            raise _stale(ref, StaleReason.FOREIGN, field)
        slot = self._slots[ref.slot]
        for _ in range(_LOOKS):
            generation = slot.generation
            if self._first <= ref.generation < generation:
                raise _stale(ref, slot.why_ended(ref.generation), field)
            if generation == ref.generation and slot.live:
                if (ref.spec, ref.device) != (slot.spec, self.device):
                    raise _forgery_error(ref, slot, field, self.device)
                return slot  # its free has been undone since the fast path
        # This slot never issued it: the nonce is another service's, or the generation is still to come.
        raise _stale(ref, StaleReason.FOREIGN, field)


def _was_freed(slot: Slot) -> bool:
    """Whether the slot's last buffer ended by a free. If so, `_end` has left its record in the mirror."""
    return not slot.live and slot.why_ended(slot.generation - 1) is StaleReason.FREED


def checked_reference(ref: object, field: str) -> BufferRef:
    """A reference whose numbers are numbers. Raises `InvalidRequest` for anything else."""
    if isinstance(ref, BufferRef) and type(ref.slot) is int and type(ref.generation) is int:
        return ref
    require_awaited(field, ref)
    raise InvalidRequest(
        field=field,
        value=ref,
        problem="is not a buffer reference",
        fix="upload arrays first: await gpu.upload(array)",
    )


def _stale(ref: BufferRef, reason: StaleReason, field: str) -> StaleBufferError:
    return StaleBufferError(slot=ref.slot, generation=ref.generation, reason=reason, field=field)


def _forgery_error(ref: BufferRef, slot: Slot, field: str, device: str) -> InvalidRequest:
    changed, given, own = (
        ("device", ref.device, device) if ref.spec == slot.spec else ("spec", str(ref.spec), str(slot.spec))
    )
    return InvalidRequest(
        field=f"{field}.{changed}",
        value=Words(given),
        problem=f"is not the {changed} of buffer {ref.slot}, {own}",
        fix="pass the reference unchanged, as the service returned it",
    )


def _check_range(field: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidRequest(
            field=field,
            value=value,
            problem=f"must be a whole number from {least} to {most}",
            fix="use a number in that range, or leave it out",
        )
