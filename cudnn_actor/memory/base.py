"""What a service's actor needs of its memory, and who else is told where the buffers lie.

An actor that runs beside its service uses the service's own table (`MemoryTable`). One that runs in a worker
process has no table: it looks into a copy, kept for it in shared memory, of what it must know (a slot's
generation and place). `Memory` is what the two have in common; `Mirror` is how the table keeps the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cudnn_actor.memory.arena import Arena
from cudnn_actor.memory.lending import BufferOwner
from cudnn_actor.memory.slot import Slot
from cudnn_actor.protocol.buffers import BufferRef
from cudnn_actor.protocol.errors import StaleReason
from cudnn_actor.protocol.tensor import TensorSpec

__all__ = ["Memory", "Mirror"]


class Mirror(Protocol):
    """A copy of which slot has which bytes. Written by the table's writer; never blocks."""

    def seat(self, slot: int, generation: int, arena: int, offset: int, nbytes: int) -> None:
        """Note that a slot's new buffer has `nbytes` at `offset` bytes into an arena.

        Raises `OutOfMemory` when there is no room for the note; nothing has changed then.
        """

    def vacate(self, slot: int) -> None:
        """Note that a slot's bytes are its buffer's no more: once for every `seat`."""


class Memory(Protocol):
    """The buffers of a service, as its actor sees them. One thread writes at a time; never blocks.

    What each of them does, and raises, stands with `MemoryTable`. Where somebody else gives buffers out and
    takes them back, the methods that would do so raise `InvalidRequest`.
    """

    @property
    def device(self) -> str:
        """What references say: "cpu" or "cuda:N"."""

    @property
    def epoch(self) -> int:
        """Another number after every end of a buffer or of its bindings. Any thread may read it."""

    @property
    def live_buffers(self) -> int:
        """The number of buffers whose references resolve, for whoever owns them; else 0."""

    @property
    def live_bytes(self) -> int:
        """Their bytes, without rounding."""

    @property
    def arena_bytes(self) -> int:
        """Bytes of all arenas, for whoever owns them; else 0."""

    @property
    def limit(self) -> int | None:
        """Bytes of arenas that may not be passed; None for no limit."""

    # Arenas.

    def arenas(self) -> tuple[Arena, ...]:
        """Every arena that a new incarnation has to map by itself."""

    def idle_arenas(self) -> tuple[int, ...]:
        """Numbers of the arenas that may be dropped."""

    def arenas_to_drop(self, nbytes: int) -> tuple[int, ...]:
        """Numbers of the idle arenas that must be dropped before one of `nbytes` is added."""

    def room_for(self, spec: TensorSpec) -> bool:
        """Whether `allocate(spec)` would succeed without another arena."""

    def next_arena(self, spec: TensorSpec) -> tuple[int, int]:
        """The number and size in bytes of the arena to create so that `spec` fits. Raises `OutOfMemory`."""

    def add_arena(self, number: int, nbytes: int, fd: int) -> None:
        """Take over an arena that an engine created, and its descriptor."""

    def drop_arena(self, number: int) -> None:
        """Forget an idle arena."""

    # Buffers.

    def allocate(self, spec: TensorSpec) -> BufferRef:
        """A new buffer's reference. Raises `OutOfMemory`."""

    def resolve(self, ref: BufferRef, field: str = "buffer") -> Slot:
        """The slot of a live reference. Raises `StaleBufferError`, `InvalidRequest`."""

    def free(self, ref: BufferRef, field: str = "buffer") -> None:
        """End a buffer; its bytes are free when nothing holds it. Raises what `resolve` raises."""

    def revive(self, ref: BufferRef) -> bool:
        """Undo the free of a buffer whose bytes are still held; whether it could be."""

    def is_live(self, ref: BufferRef) -> bool:
        """Whether a reference that was given out here still resolves."""

    def is_withheld(self, ref: BufferRef) -> bool:
        """Whether a buffer has been ended here while its bytes are still held."""

    def hold(self, slot: Slot) -> None:
        """Note a piece of unfinished work on a slot."""

    def release(self, slot: Slot) -> None:
        """Note its end. Raises `ValueError` when there was none."""

    def hold_all(self, slots: Sequence[Slot]) -> None:
        """Note a piece of work on each of some slots."""

    def release_all(self, slots: Sequence[Slot]) -> None:
        """Note the end of what `hold_all` noted. Raises as `release` does."""

    def lend(self, slot: Slot) -> BufferOwner:
        """Hold a slot for as long as the answer lives."""

    def take_back(self) -> None:
        """Release what was lent to those that have gone."""

    def tear(self, slot: Slot, reason: StaleReason = StaleReason.TORN) -> None:
        """End a held buffer whose bytes are no longer to be trusted."""

    def lose_all(self) -> None:
        """End every live buffer: the context died and the memory with it."""

    def forget_bindings(self) -> None:
        """Drop every slot's binding: the incarnation whose handles they are is gone."""

    def close(self) -> None:
        """Let go of everything. Safe to call twice."""
