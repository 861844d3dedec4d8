"""What the actor needs of a device library: one protocol for every engine.

An engine belongs to one thread: the actor opens it, uses it and closes it on
its own. It knows graphs, memory and fences; it knows nothing of messages,
requests, slots or supervision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from cudnn_actor.protocol.graph import OperationGraph
from cudnn_actor.protocol.tensor import TensorSpec

__all__ = ["Binding", "Engine", "EngineFailure", "Fence", "Plan", "StickyError"]

Binding = Any
"""An engine's own handle on a buffer's place: an array view, a device pointer."""

Fence = Any
"""An engine's own mark in its stream of work: an event."""


class EngineFailure(Exception):
    """Raised when the device library reports a failure of one call; whether the context lives, `probe` tells.

    Carries `status` (the library's own name for it) and `detail`.
    """

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status
        self.detail = detail


class StickyError(EngineFailure):
    """Raised when the failure is known to have killed the device context: nothing more can run in it."""


class Plan(Protocol):
    """A graph made ready to run; immutable, and bound to the engine that built it."""

    @property
    def tag(self) -> str:
        """Engine, operation and the head of the graph's digest: `cpu/conv_fwd/1f2e3d4c`."""

    @property
    def workspace(self) -> int:
        """Bytes of scratch memory that a run needs."""


class Engine(Protocol):
    """A device library behind one interface. Not thread-safe: one thread opens, uses and closes it."""

    @property
    def name(self) -> str:
        """ "cpu" or "cuda"."""

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:N"."""

    @property
    def outlives_context(self) -> bool:
        """Whether a new engine in this same process can take over after a sticky error."""

    @property
    def synchronous(self) -> bool:
        """Whether work is done when the call that asks for it returns; then no fence is ever asked for."""

    def open(self) -> None:
        """Take handle, stream and workspace on the calling thread. Raises `EngineFailure`. Blocks."""

    def close(self) -> None:
        """Give everything back. Safe to call twice, and after a sticky error."""

    def create_arena(self, arena: int, nbytes: int) -> int:
        """Take `nbytes` of device memory as arena number `arena` and map it.

        Returns a file descriptor that the caller owns: the memory lives as long as a descriptor or a
        mapping does. Raises `MemoryError` when the machine has no room.
        """

    def map_arena(self, arena: int, fd: int, nbytes: int) -> None:
        """Map an arena that an earlier engine created. The descriptor stays the caller's."""

    def unmap_arena(self, arena: int) -> None:
        """Forget an arena; its bindings are void from here on."""

    def bind(self, arena: int, offset: int, spec: TensorSpec) -> Binding:
        """The engine's handle on a place `offset` bytes into an arena, valid until the arena is unmapped."""

    def build(self, graph: OperationGraph, *, workspace_limit: int | None) -> Plan:
        """Make a graph ready to run. Blocks for as long as the library takes.

        Raises `UnsupportedGraph` when no plan can do it, `OutOfMemory` when every plan that can needs
        more than `workspace_limit` bytes of workspace, `EngineFailure` when the library fails.
        """

    def execute(self, plan: Plan, buffers: Sequence[Binding], scalars: Sequence[float]) -> None:
        """Enqueue a run. `buffers` and `scalars` follow `graph.bound` and `graph.scalars`.

        Raises `EngineFailure` when the library refuses, `StickyError` when the context has died.
        """

    def write(self, dst: Binding, array: np.ndarray) -> None:
        """Enqueue a copy of host values of the same dims into a buffer; `array` is read before it returns."""

    def read(self, src: Binding) -> np.ndarray:
        """A buffer's values as a new C-contiguous array, once all work enqueued before is done. Blocks."""

    def copy(self, src: Binding, dst: Binding) -> None:
        """Enqueue a copy between buffers of the same dims and dtype."""

    def fill(self, dst: Binding, value: float) -> None:
        """Enqueue setting every element to `value`."""

    def fence(self) -> Fence:
        """A mark behind all work enqueued so far."""

    def finished(self, fence: Fence) -> bool:
        """Whether the work before a fence is done. Never blocks. Raises `StickyError`."""

    def probe(self) -> str | None:
        """None when the context is healthy, else what is wrong with it. Blocks for a moment."""
