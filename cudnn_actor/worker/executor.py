"""The engine at work: what it has enqueued and not yet finished, and the fences behind it.

With a synchronous engine nothing is ever unfinished, and a reply is given as
soon as the call returns. With an asynchronous one a batch shares one fence,
and its replies wait for it; until then the buffers that it uses are held, so
that freeing one does not hand its bytes to somebody else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

from cudnn_actor.actors import DEFERRED, Crash
from cudnn_actor.actors.logs import Log
from cudnn_actor.engines.base import Binding, ContextDead, Engine, EngineFailure, Fence, Plan, StickyError
from cudnn_actor.engines.support import kind_of
from cudnn_actor.memory import Memory, Slot
from cudnn_actor.protocol.errors import CudnnActorError, ExecutionFailed, OutOfMemory
from cudnn_actor.protocol.graph import OperationGraph
from cudnn_actor.protocol.reproduction import token
from cudnn_actor.protocol.tensor import TensorSpec

__all__ = ["LATER", "RECEIPT", "Enqueued", "Executor", "reproducible"]

log = Log("cudnn_actor")

RECEIPT: Final = object()
"""The reply of most work: a receipt for its tag, made when it has finished."""
LATER: Final = DEFERRED
"""In place of an answer: it comes when the device has come by."""

T = TypeVar("T")


class Enqueued(NamedTuple, Generic[T]):
    """A task that the engine has enqueued and whose fence is still to come.

    Its answer is `reply`; or what `late` gives, which is called once the fence has passed, also when nobody
    waits for it any more: what it raises is the request's own error.
    """

    task: T
    tag: str
    slots: Sequence[Slot]
    reply: Any = RECEIPT
    late: Callable[[], Any] | None = None


def reproducible(error: CudnnActorError, graph: OperationGraph) -> CudnnActorError:
    """An error of a plan's, with what it takes to see it again: the token of the plan's graph."""
    if not isinstance(error, ExecutionFailed) or error.reproduce:
        return error
    return ExecutionFailed(status=error.status, detail=error.detail, plan=error.plan, reproduce=token(graph))


class Executor(Generic[T]):
    """One incarnation's engine and the memory that it maps. One thread's own.

    Parameters
    ----------
    engine
        Not yet opened.
    memory
        The service's table. This thread is its one writer.
    """

    def __init__(self, engine: Engine, memory: Memory) -> None:
        self.engine = engine
        self.synchronous = engine.synchronous
        self.progress_s = 0.0
        """When the device last got on, in `time.monotonic()` seconds; while work is fenced."""
        self._memory = memory
        self._unfenced: list[Enqueued[T]] = []
        self._fenced: deque[tuple[Fence, list[Enqueued[T]]]] = deque()
        self._passed: deque[Enqueued[T]] = deque()
        """Finished work that is not to be answered yet: the first is late, and all others wait for it."""
        self._done: deque[Enqueued[T]] = deque()

    def open(self) -> None:
        """Open the engine and map the memory that earlier incarnations left."""
        self.engine.open()
        self._memory.forget_bindings()
        for arena in self._memory.arenas():
            self.engine.map_arena(arena.number, arena.fd, arena.nbytes)

    # Calls into the engine.

    def build(self, graph: OperationGraph, workspace_limit: int | None) -> Plan:
        """Build a plan. Blocks. Raises `UnsupportedGraph`, `OutOfMemory`, `ExecutionFailed`, `Crash`."""
        try:
            plan: Plan = self.call(
                self.building(graph), self.engine.build, graph, workspace_limit=workspace_limit
            )
        except ExecutionFailed as error:
            raise reproducible(error, graph) from error
        return plan

    def building(self, graph: OperationGraph) -> str:
        """The tag of a plan that is being built."""
        return f"{self.engine.name}/{kind_of(graph)}/{graph.digest()[:8]}/build"

    def call(self, tag: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Make one call of the engine; what it raises becomes this request's error, or a crash.

        Raises `CudnnActorError` or `Crash`, and nothing else.
        """
        try:
            return call(*args, **options)
        except CudnnActorError:
            raise
        except Exception as error:
            raise self.diagnose(error, tag) from error

    def diagnose(self, error: BaseException, tag: str) -> CudnnActorError | Crash:
        """What a failure of the engine means: a crash in a dead context, else a request's own error."""
        if isinstance(error, CudnnActorError | Crash):
            return error
        if isinstance(error, StickyError):
            return ContextDead(str(error))
        trouble = self.engine.probe()
        if trouble is not None:
            return ContextDead(f"{error} (probe: {trouble})")
        if isinstance(error, MemoryError):
            return OutOfMemory(requested=0, in_use=self._memory.arena_bytes, limit=self._memory.limit)
        if isinstance(error, EngineFailure):
            return ExecutionFailed(status=error.status, detail=error.detail, plan=tag)
        log.error("engine.unexpected_error", plan=tag, exc_info=error)
        return ExecutionFailed(status=type(error).__name__, detail=str(error), plan=tag)

    # Memory.

    def binding(self, slot: Slot) -> Binding:
        """The engine's handle on a buffer, remembered for the incarnation's life."""
        if slot.binding is None:
            slot.binding = self.bind(slot, slot.spec)
        return slot.binding

    def bind(self, slot: Slot, spec: TensorSpec) -> Binding:
        """The engine's handle on a buffer, seen in other dims than its own."""
        return self.engine.bind(slot.arena.number, slot.offset, spec)

    def create_arena(self, number: int, nbytes: int) -> int:
        """Have the engine take memory; its descriptor is the caller's. Raises `OutOfMemory`, `Crash`."""
        try:
            return self.engine.create_arena(number, nbytes)
        except MemoryError:
            limit = self._memory.limit
            raise OutOfMemory(requested=nbytes, in_use=self._memory.arena_bytes, limit=limit) from None
        except Exception as error:
            raise self.diagnose(error, "arena") from error

    def drop_arena(self, number: int) -> None:
        """Unmap an arena in which nothing lies."""
        self.call("arena", self.engine.unmap_arena, number)

    # Unfinished work.

    def defer(self, work: Enqueued[T]) -> None:
        """Note work that is enqueued, and hold its buffers until it has finished."""
        self._memory.hold_all(work.slots)
        self._unfenced.append(work)

    @property
    def busy(self) -> bool:
        """Whether any work has not finished, or has and is not answered."""
        return bool(self._fenced or self._unfenced or self._passed)

    def working_since(self) -> float | None:
        """Since when the device has not got on, in `time.monotonic()` seconds; None when it has no work.

        What is not fenced yet is the actor's to get on with: `progress_s` says nothing of it.
        """
        return self.progress_s if self._fenced or self._passed else None

    def fence(self) -> None:
        """Put one fence behind all that was enqueued since the last."""
        if self._unfenced:
            fence = self.engine.fence()
            if not self._fenced:
                self.progress_s = time.monotonic()
            self._fenced.append((fence, self._unfenced))
            self._unfenced = []

    # Finished work. Each piece is in one place, and answered by whoever takes it out, the actor or its last
    # act. Answers are given in the order in which the work was enqueued. So what has been answered at a crash
    # came before all that runs again: nothing runs again on an input that a later request, which has been
    # answered, has written since.

    def passed(self) -> bool:
        """Whether the oldest fence has passed: then its work is done, or late. Never blocks.

        The fence is void then, so it goes in the same step.
        """
        if not self._fenced or not self.engine.finished(self._fenced[0][0]):
            return False
        self.progress_s = time.monotonic()
        _, batch = self._fenced.popleft()
        self._passed += batch
        self._advance()
        return True

    def _advance(self) -> None:
        """Let everything be answered that comes before the next late work."""
        passed = self._passed
        while passed and passed[0].late is None:
            work = passed.popleft()
            self._release(work.slots)
            self._done.append(work)

    def take_done(self) -> Enqueued[T] | None:
        """Work that has finished, in order, which the caller must answer; None when there is none left."""
        return self._done.popleft() if self._done else None

    def first_late(self) -> Enqueued[T] | None:
        """Finished work whose answer is to be called for. It holds its buffers until `take_late`."""
        return self._passed[0] if self._passed else None

    def take_late(self) -> None:
        """Take out the first late work, which the caller must answer."""
        self._release(self._passed.popleft().slots)
        self._advance()

    # The end.

    def unfinished(self) -> list[Enqueued[T]]:
        """What has not finished, or has no answer, in order."""
        return [*self._passed, *(work for _, batch in self._fenced for work in batch), *self._unfenced]

    def forget(self) -> list[Enqueued[T]]:
        """Give up on what is unfinished: hold no buffers for it. Returns it, in order."""
        lost = self.unfinished()
        self._unfenced, self._fenced, self._passed = [], deque(), deque()
        for work in lost:
            self._release(work.slots)
        return lost

    def _release(self, slots: Sequence[Slot]) -> None:
        self._memory.release_all(slots)
