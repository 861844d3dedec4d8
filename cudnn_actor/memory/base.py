"""The interfaces of a service's memory: the part that running a request needs, and its copy for workers.

In thread isolation, requests run on the service's own table (`MemoryTable`). A worker process has no table:
it reads a copy in shared memory of what it needs (each slot's generation and place). `Buffers` is the common
interface of the two; through `Mirror` the table writes the copy. Only the service's process allocates and
frees buffers, on the table itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cudnn_actor.memory.slot import Slot
from cudnn_actor.protocol.types.buffers import BufferRef

__all__ = ["Buffers", "Mirror"]


class Mirror(Protocol):
    """A copy of the table's record of which slot has which bytes. The thread that writes the table writes it;
    never blocks."""

    def seat(self, slot: int, generation: int, arena: int, offset: int, nbytes: int) -> None:
        """Record that a slot's new buffer has `nbytes` at `offset` bytes into an arena.

        Raises `OutOfMemory` when there is no room for the record; nothing has changed then.
        """

    def vacate(self, slot: int) -> None:
        """Record that a slot's bytes no longer belong to its buffer. Called once for every `seat`."""


class Buffers(Protocol):
    """The buffers of a service, as the requests that run see them. One thread writes at a time; never blocks.

    `MemoryTable` documents what the methods do and raise.
    """

    @property
    def device(self) -> str:
        """The device that references name: "cpu" or "cuda:N"."""

    @property
    def epoch(self) -> int:
        """A number that changes whenever a buffer or its bindings end. Any thread may read it."""

    def resolve(self, ref: BufferRef, field: str = "buffer") -> Slot:
        """The slot of a live reference. Raises `StaleBufferError`, `InvalidRequest`."""

    def hold_all(self, slots: Sequence[Slot]) -> None:
        """Count a piece of unfinished work on each of the slots."""

    def release_all(self, slots: Sequence[Slot]) -> None:
        """Count the end of that work on each of the slots. Raises `ValueError` when there was none."""
