"""The interfaces of a service's memory, as its actor uses it and as its table publishes it.

An actor in the service's own process uses the service's table (`MemoryTable`). An actor in a worker process
has no table: it reads a copy in shared memory of what it needs (each slot's generation and place). `Memory`
is the common interface of the two; through `Mirror` the table writes the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cudnn_actor.memory.arena import Arena
from cudnn_actor.memory.lending import BufferOwner
from cudnn_actor.memory.slot import Slot
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.errors import StaleReason
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Memory", "Mirror"]


class Mirror(Protocol):
    """A copy of which slot has which bytes. Written by the thread that writes the table; never blocks."""

    def seat(self, slot: int, generation: int, arena: int, offset: int, nbytes: int) -> None:
        """Record that a slot's new buffer has `nbytes` at `offset` bytes into an arena.

        Raises `OutOfMemory` when there is no room for the record; nothing has changed then.
        """

    def vacate(self, slot: int) -> None:
        """Record that a slot's bytes no longer belong to its buffer. Called once for every `seat`."""


class Memory(Protocol):
    """The buffers of a service, as its actor sees them. One thread writes at a time; never blocks.

    `MemoryTable` documents what the methods do and raise. Where another process allocates and frees buffers,
    the methods that would do so raise `InvalidRequest`.
    """

    @property
    def device(self) -> str:
        """The device that references name: "cpu" or "cuda:N"."""

    @property
    def epoch(self) -> int:
        """A number that changes whenever a buffer or its bindings end. Any thread may read it."""

    @property
    def live_buffers(self) -> int:
        """The number of buffers whose references resolve; 0 if the buffers are managed elsewhere."""

    @property
    def live_bytes(self) -> int:
        """The bytes of those buffers, without rounding."""

    @property
    def arena_bytes(self) -> int:
        """Bytes of all arenas; 0 if the arenas are managed elsewhere."""

    @property
    def limit(self) -> int | None:
        """The limit on the bytes of all arenas; None for no limit."""

    # Arenas.

    def arenas(self) -> tuple[Arena, ...]:
        """Every arena that a new incarnation must map itself."""

    def idle_arenas(self) -> tuple[int, ...]:
        """Numbers of the arenas that may be dropped."""

    def arenas_to_drop(self, nbytes: int) -> tuple[int, ...]:
        """Numbers of the idle arenas that must be dropped before one of `nbytes` is added."""

    def room_for(self, spec: TensorSpec) -> bool:
        """Whether `allocate(spec)` would succeed without another arena."""

    def next_arena(self, spec: TensorSpec) -> tuple[int, int]:
        """The number and size in bytes of the arena to create so that `spec` fits. Raises `OutOfMemory`."""

    def try_smaller(self, refused: int, spec: TensorSpec) -> bool:
        """Whether `next_arena` now gives a smaller arena for `spec`: the system has refused one of `refused`
        bytes."""

    def add_arena(self, number: int, nbytes: int, fd: int) -> None:
        """Take ownership of an arena that an engine created, and of its descriptor."""

    def drop_arena(self, number: int) -> None:
        """Forget an idle arena."""

    # Buffers.

    def allocate(self, spec: TensorSpec) -> BufferRef:
        """Allocate a buffer and return its reference. Raises `OutOfMemory`."""

    def resolve(self, ref: BufferRef, field: str = "buffer") -> Slot:
        """The slot of a live reference. Raises `StaleBufferError`, `InvalidRequest`."""

    def free(self, ref: BufferRef, field: str = "buffer") -> None:
        """End a buffer; its bytes become free once nothing holds it. Raises what `resolve` raises."""

    def revive(self, ref: BufferRef) -> bool:
        """Undo the free of a buffer whose bytes are still held. Returns whether that was possible."""

    def is_live(self, ref: BufferRef) -> bool:
        """Whether a reference that this memory issued still resolves."""

    def is_withheld(self, ref: BufferRef) -> bool:
        """Whether a buffer has ended while its bytes are still held."""

    def hold(self, slot: Slot) -> None:
        """Count a piece of unfinished work on a slot."""

    def release(self, slot: Slot) -> None:
        """Count the end of a piece of work. Raises `ValueError` when there was none."""

    def hold_all(self, slots: Sequence[Slot]) -> None:
        """Call `hold` for each of the slots."""

    def release_all(self, slots: Sequence[Slot]) -> None:
        """Call `release` for each of the slots. Raises as `release` does."""

    def lend(self, slot: Slot) -> BufferOwner:
        """Hold a slot for as long as the returned object lives."""

    def take_back(self) -> None:
        """Release the slots whose `BufferOwner` has been collected."""

    def tear(self, slot: Slot, reason: StaleReason = StaleReason.TORN) -> None:
        """End a held buffer whose contents are no longer reliable."""

    def lose_all(self) -> None:
        """End every live buffer: the context died and the memory with it."""

    def forget_bindings(self) -> None:
        """Drop every slot's binding: the incarnation that they belong to has ended."""

    def close(self) -> None:
        """Release everything. Safe to call twice."""
