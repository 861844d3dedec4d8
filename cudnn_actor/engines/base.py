"""What the actor needs of a device library: one protocol for every engine.

An engine belongs to one thread: the actor opens it, uses it and closes it on
its own. It knows graphs, memory and fences; it knows nothing of messages,
requests, slots or supervision.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from cudnn_actor.actors import Crash
from cudnn_actor.protocol.graph import OperationGraph
from cudnn_actor.protocol.tensor import TensorSpec

__all__ = [
    "Binding",
    "Builder",
    "BuilderAccess",
    "ContextDead",
    "Engine",
    "EngineFailure",
    "Fence",
    "Plan",
    "StickyError",
]

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


class ContextDead(Crash):
    """Raised to end an actor whose device context has died: nothing of it runs, or writes, any more."""


class Plan(Protocol):
    """A graph made ready to run; immutable, and bound to the engine that built it."""

    @property
    def tag(self) -> str:
        """Engine, operation, the head of the graph's digest, and where there is a choice the library's own
        name for what runs: `cpu/conv_fwd/1f2e3d4c`, `cuda/conv_fwd/1f2e3d4c/eng42_k2=1`."""

    @property
    def workspace(self) -> int:
        """Bytes of scratch memory that a run needs."""

    @property
    def tried(self) -> bool:
        """Whether it is known to compute what its graph says; one that is not is used, and not kept."""


class BuilderAccess(Protocol):
    """The way to a service's builder process. Any thread."""

    @property
    def journal(self) -> str:
        """Path of the file in which builder processes of this service note what they try."""

    def connect(self) -> socket.socket:
        """A connection to the process, which may not have been started yet. Never blocks.

        Raises `OSError`.
        """


class Builder(Protocol):
    """Makes plans for one engine, on a second thread: it opens, uses and closes the builder alone.

    Nothing here waits for the engine's own thread or holds it up, but for the interpreter's lock.
    """

    @property
    def fingerprint(self) -> str:
        """What exported plans are tied to: library version and kind of device. Known once opened."""

    def open(self) -> None:
        """Take a library handle of the builder's own. Raises `EngineFailure`. Blocks."""

    def expect_builds(self) -> None:
        """Begin to get ready for builds, before `open`, where that takes long. Does not wait for it."""

    def close(self) -> None:
        """Give it back. Safe to call twice, and after a sticky error."""

    def build(self, graph: OperationGraph, *, workspace_limit: int | None) -> Plan:
        """As `Engine.build`, but for the workspace: the engine's `prepare` takes it."""

    def tune(
        self,
        graph: OperationGraph,
        *,
        workspace_limit: int | None,
        progress: Callable[[int, int, str], None],
    ) -> Plan:
        """The fastest plan of all that the library offers, measured. Blocks for seconds.

        `progress(done, of, what)` is called before each candidate is tried. Raises as `build`.
        """

    def export(self, plan: Plan) -> bytes | None:
        """A plan as bytes for `restore`, in another process too; None for one that cannot be kept."""

    def interrupt(self) -> None:
        """Give up: what is being built fails, where that can be, and so does every later build. Any thread.

        Does not block. Closing is still the owner's.
        """

    def restore(self, graph: OperationGraph, data: bytes) -> Plan:
        """The plan that `export` made the bytes of. Raises `EngineFailure` when they are no such plan."""


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

    def builder(self, access: BuilderAccess | None) -> Builder | None:
        """A new builder, not open yet, for a second thread; None where `build` takes no time worth it.

        Where its builds would hold up every thread, it builds in the process that `access` leads to.
        """

    def build(self, graph: OperationGraph, *, workspace_limit: int | None) -> Plan:
        """Make a graph ready to run, its workspace included. Blocks for as long as the library takes.

        Raises `UnsupportedGraph` when no plan can do it, `OutOfMemory` when every plan that can needs
        more than `workspace_limit` bytes of workspace, `EngineFailure` when the library fails.
        """

    def prepare(self, plan: Plan) -> None:
        """Take the workspace of a plan that a builder made. Blocks until work has finished when it must grow.

        Raises `OutOfMemory` when the device has no room for it: a plan with less may do.
        """

    def execute(self, plan: Plan, buffers: Sequence[Binding], scalars: Sequence[float]) -> None:
        """Enqueue a run. `buffers` and `scalars` follow `graph.bound` and `graph.scalars`.

        Raises `EngineFailure` when the library refuses, `StickyError` when the context has died.
        """

    def write(self, dst: Binding, array: Any) -> None:
        """Enqueue a copy of values of the same dims into a buffer.

        A host array is read before it returns, for which it may wait for room in the staging memory; but not
        always one in memory that `pin` was given. Where such an array is C-contiguous and of the buffer's
        dtype, the device may read it when the copy runs: it **must not change, and its memory must stay
        mapped, until a later fence has passed**; when this raises, it is not read any more. An array on the
        device, as `EngineChoice.adopt` made it, is read when the copy runs.
        """

    def read(self, src: Binding, into: np.ndarray | None = None) -> np.ndarray:
        """A buffer's values as a C-contiguous array, once all work enqueued before is done. Blocks.

        A new array, or `into`: writable, C-contiguous, of the buffer's dims and dtype, perhaps in memory that
        another process reads. Values are written there once; in memory that `pin` was given, by the device
        itself where it can. Raises `EngineFailure` for another kind of array, and whatever is raised,
        nothing is written to `into` any more.
        """

    def fetch(self, src: Binding, into: np.ndarray | None = None) -> Callable[[], np.ndarray] | None:
        """Enqueue what `read` does, without waiting: call the answer once, when a later fence has passed.

        None where only `read` will do: the buffer is larger than the staging memory that is free. `into` is
        as in `read`. It may be written at any time between this call and that of the answer, and its memory
        must stay mapped until a later fence has passed; if the answer is never called for, nothing is
        written behind that fence.
        """

    def pin(self, memory: memoryview) -> None:
        """Let the device read and write host memory on its own: arrays in it need no staging memory.

        `memory` is all of a mapping, 64 MiB say; arrays that are given to `write` and as `into` may lie in it
        from here on. It stays the caller's, who unpins it before unmapping it. Where the system refuses, a
        line in the log says so, and arrays in it are copied as any others: nothing else changes. Blocks for
        as long as taking its pages takes. Raises `StickyError`.
        """

    def unpin(self, memory: memoryview) -> None:
        """Undo `pin`, once all work enqueued before is done. Blocks. Does nothing for memory not pinned.

        Closing the engine unpins all.
        """

    def view(self, src: Binding, owner: object) -> Any:
        """The buffer itself as an array of the device's own array library; it keeps `owner` alive.

        Whoever holds it must have let go of it before the arena is unmapped or the engine closed.
        """

    def copy(self, src: Binding, dst: Binding) -> None:
        """Enqueue a copy between buffers of the same dims and dtype."""

    def fill(self, dst: Binding, value: float) -> None:
        """Enqueue setting every element to `value`."""

    def fence(self) -> Fence:
        """A mark behind all work enqueued so far."""

    def finished(self, fence: Fence) -> bool:
        """Whether the work before a fence is done; once it has said so, the fence is void.

        Never blocks. Raises `StickyError`.
        """

    def probe(self) -> str | None:
        """None when the context is healthy, else what is wrong with it. Blocks for a moment."""
