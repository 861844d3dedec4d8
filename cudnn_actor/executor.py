"""The engine at work: what it has enqueued and not yet finished, and the fences behind it.

With a synchronous engine nothing is ever unfinished, and a reply is given as
soon as the call returns. With an asynchronous one a batch shares one fence,
and its replies wait for it; until then the buffers that it uses are held, so
that freeing one does not hand its bytes to somebody else.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from cudnn_actor.actors import Crash, Envelope
from cudnn_actor.engines.base import Binding, Engine, EngineFailure, Fence, Plan, StickyError
from cudnn_actor.memory import MemoryTable, Slot
from cudnn_actor.protocol.buffers import BufferRef
from cudnn_actor.protocol.errors import ExecutionFailed, OutOfMemory
from cudnn_actor.protocol.graph import OperationGraph
from cudnn_actor.protocol.tensor import TensorSpec

__all__ = ["Executor", "Work"]

_IDLE_ARENAS = 1
"""Empty arenas kept for the next allocation; the others go back to the system."""


class Work(NamedTuple):
    """A request that the engine has enqueued and whose fence is still to come."""

    envelope: Envelope
    reply: Any
    slots: tuple[Slot, ...]


class Executor:
    """One incarnation's engine and the memory that it maps. One thread's own.

    Parameters
    ----------
    engine
        Not yet opened.
    memory
        The service's table.
    check_owner
        Raises where the calling thread has been given up meanwhile: called after whatever may have
        taken long, before anything shared is touched.
    """

    def __init__(self, engine: Engine, memory: MemoryTable, check_owner: Callable[[], None]) -> None:
        self.engine = engine
        self.synchronous = engine.synchronous
        self.progress_s = 0.0
        """When the device last got on, in `time.monotonic()` seconds; while work is fenced."""
        self._memory = memory
        self._check_owner = check_owner
        self._unfenced: list[Work] = []
        self._fenced: deque[tuple[Fence, list[Work]]] = deque()

    def open(self) -> None:
        """Open the engine and map the memory that earlier incarnations left."""
        self.engine.open()
        self._memory.forget_bindings()
        for arena in self._memory.arenas():
            self.engine.map_arena(arena.number, arena.fd, arena.nbytes)

    # Calls into the engine.

    def build(self, graph: OperationGraph, workspace_limit: int | None) -> Plan:
        """Build a plan. Blocks. Raises `UnsupportedGraph`, `OutOfMemory`, `ExecutionFailed`, `Crash`."""
        return self.call("build", self.engine.build, graph, workspace_limit=workspace_limit)  # type: ignore[no-any-return]

    def call(self, tag: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Make one call of the engine; what it raises becomes this request's error, or a crash."""
        try:
            result = call(*args, **options)
        except EngineFailure as failure:
            self._check_owner()
            raise self._diagnose(failure, tag) from failure
        self._check_owner()
        return result

    def _diagnose(self, failure: EngineFailure, tag: str) -> Exception:
        """A dead context is a crash; a healthy one makes it this request's own failure."""
        if isinstance(failure, StickyError):
            return Crash(str(failure))
        trouble = self.engine.probe()
        if trouble is not None:
            return Crash(f"{failure} (probe: {trouble})")
        return ExecutionFailed(status=failure.status, detail=failure.detail, plan=tag)

    # Memory.

    def binding(self, slot: Slot) -> Binding:
        """The engine's handle on a buffer, remembered for the incarnation's life."""
        if slot.binding is None:
            slot.binding = self.bind(slot, slot.spec)
        return slot.binding

    def bind(self, slot: Slot, spec: TensorSpec) -> Binding:
        """The engine's handle on a buffer, seen in other dims than its own."""
        return self.engine.bind(slot.arena.number, slot.offset, spec)

    def allocate(self, spec: TensorSpec) -> BufferRef:
        """A new buffer, in a new arena if need be. Raises `OutOfMemory`; nothing has changed then."""
        memory = self._memory
        if not memory.room_for(spec):
            number, nbytes = memory.next_arena(spec)
            self._drop(memory.arenas_to_drop(nbytes))
            memory.add_arena(number, nbytes, self._create_arena(number, nbytes))
        return memory.allocate(spec)

    def _create_arena(self, number: int, nbytes: int) -> int:
        fd = -1

        def create() -> None:
            nonlocal fd
            fd = self.engine.create_arena(number, nbytes)

        try:
            self.call("arena", create)
        except MemoryError:
            in_use = self._memory.arena_bytes
            raise OutOfMemory(requested=nbytes, in_use=in_use, limit=self._memory.limit) from None
        except Crash:
            if fd >= 0:
                os.close(fd)  # this thread was given up meanwhile: nobody will own it
            raise
        return fd

    def free(self, ref: BufferRef) -> None:
        """End a buffer, and give back what arenas that leaves empty, but for one."""
        self._memory.free(ref)
        idle = self._memory.idle_arenas()
        if len(idle) > _IDLE_ARENAS:
            self._drop(idle[_IDLE_ARENAS:])

    def _drop(self, arenas: Iterable[int]) -> None:
        for number in arenas:
            self.engine.unmap_arena(number)
            self._memory.drop_arena(number)

    # Unfinished work.

    def defer(self, work: Work) -> None:
        """Note work that is enqueued, and hold its buffers until it has finished."""
        for slot in work.slots:
            self._memory.hold(slot)
        self._unfenced.append(work)

    @property
    def busy(self) -> bool:
        """Whether any work has not finished."""
        return bool(self._unfenced or self._fenced)

    def fence(self) -> None:
        """Put one fence behind all that was enqueued since the last."""
        if self._unfenced:
            if not self._fenced:
                self.progress_s = time.monotonic()
            self._fenced.append((self.engine.fence(), self._unfenced))
            self._unfenced = []

    def finished(self) -> Iterator[Work]:
        """Work whose fence has passed, in order; it holds no buffers any more. Never blocks."""
        while self._fenced and self.engine.finished(self._fenced[0][0]):
            _, batch = self._fenced.popleft()
            self.progress_s = time.monotonic()
            for work in batch:
                self._release(work.slots)
                yield work

    def unfinished(self) -> list[Work]:
        """What is enqueued and has not finished, in order."""
        return [work for _, batch in self._fenced for work in batch] + self._unfenced

    def forget(self) -> list[Work]:
        """Give up on what has not finished: hold no buffers for it. Returns it."""
        lost = self.unfinished()
        self._unfenced, self._fenced = [], deque()
        for work in lost:
            self._release(work.slots)
        return lost

    def _release(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._memory.release(slot)
