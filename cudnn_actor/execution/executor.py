"""The executor: calls the engine, and keeps the enqueued work that has not finished, with its fences.

With a synchronous engine, work has finished when the call returns. With an asynchronous engine, all work of a
batch shares one fence, and its replies wait for the fence. Until it passes, the executor holds the buffers of
that work, so that a freed buffer's bytes go to no other buffer meanwhile.
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

from cudnn_actor.actors import DEFERRED, Crash
from cudnn_actor.actors.logs import Log
from cudnn_actor.engines.base import (
    Binding,
    ContextDead,
    Engine,
    EngineFailure,
    Fence,
    Plan,
    StickyError,
    blamed_operations,
)
from cudnn_actor.engines.support import tag_of
from cudnn_actor.execution.polling import EARLY_S
from cudnn_actor.memory import Arena, Buffers, Slot
from cudnn_actor.memory.exhaustion import ulimit_of
from cudnn_actor.protocol.errors import CudnnActorError, ExecutionFailed, OperationError, OutOfMemory
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.graphs.reproduction import token
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["LATER", "RECEIPT", "Enqueued", "Executor", "describe_error"]

log = Log("cudnn_actor")

RECEIPT: Final = object()
"""The reply of most work: a receipt, made when the work has finished."""
LATER: Final = DEFERRED
"""Returned in place of an answer that follows when the device has finished."""

_MOST_DURATIONS = 4096
_LONG_S = 200e-6
"""Work that takes the device longer gets a fence of its own, which costs the host a tenth of this."""

T = TypeVar("T")


class Enqueued(msgspec.Struct, Generic[T], frozen=True, eq=False):
    """A task that has been enqueued on the engine and has not finished.

    Its answer is `reply`, or the result of `late`. `late` is called once the fence has passed, even if no
    caller waits any more. An exception that it raises is the request's own error. `plan` is what runs. It is
    kept until then: the run may read arrays on the device that belong to the plan, and if the plan was
    dropped from the cache meanwhile, the next plan would get their memory.
    """

    task: T
    tag: str
    slots: Sequence[Slot]
    reply: Any = RECEIPT
    late: Callable[[], Any] | None = None
    plan: Plan | None = None


def describe_error(error: CudnnActorError, graph: OperationGraph) -> CudnnActorError:
    """An error of a graph's plan, for a request that runs this graph.

    The error names the lines of this graph, because the plan may have been built for an equal graph from
    other lines of the user's code. If a run has failed, the error has the token that reproduces the run.
    """
    if isinstance(error, ExecutionFailed) and not error.reproduce:
        facts = {name: getattr(error, name) for name in ("status", "detail", "plan", "operations")}
        error = ExecutionFailed(**facts, reproduce=token(graph))
    if isinstance(error, OperationError) and error.operations:
        error = error.at(error.operations, graph.where(error.operations))
    return error


class Executor(Generic[T]):
    """One incarnation's engine and the memory that it maps. Used by one thread.

    Parameters
    ----------
    engine
        An engine that is not opened yet.
    buffers
        The service's buffers.
    """

    def __init__(self, engine: Engine, buffers: Buffers) -> None:
        self.engine = engine
        self.synchronous = engine.synchronous
        self.progress_s = 0.0
        """When the device last made progress, in `time.monotonic()` seconds. Valid while work is fenced."""
        self.expected_s = 0.0
        """How long the wait for the oldest fence is expected to take, counted from `progress_s`; 0:
        unknown."""
        self._near_s = math.inf
        """When the oldest fence will be `EARLY_S` from its end, if it passes as expected; infinite if that is
        unknown, or `take_near_end` has returned True."""
        self._timed = ""
        """The tag of the work before the oldest fence, if that is one piece on an idle device; else empty."""
        self._durations: dict[str, float] = {}
        """Tags of such work → for how long it was last seen unfinished, in seconds. It is not the time until
        it was seen finished: a thread that has slept too long would then sleep as long again."""
        self._seen_s = 0.0
        """When the oldest fence was last seen not to have passed."""
        self._buffers = buffers
        self._unfenced: list[Enqueued[T]] = []
        self._fenced: deque[tuple[Fence, list[Enqueued[T]]]] = deque()
        self._passed: deque[Enqueued[T]] = deque()
        """Finished work that cannot be answered yet: the first piece has a `late` answer, the others follow
        it."""
        self._done: deque[Enqueued[T]] = deque()

    def open(self, arenas: Iterable[Arena]) -> None:
        """Open the engine and map these arenas, which earlier incarnations left."""
        self.engine.open()
        for arena in arenas:
            self.engine.map_arena(arena.number, arena.fd, arena.nbytes)

    # Calls into the engine.

    def build(self, graph: OperationGraph, workspace_limit: int | None) -> Plan:
        """Build a plan. Blocks. Raises `UnsupportedGraph`, `OutOfMemory`, `ExecutionFailed`, `Crash`."""
        tag = self.build_tag(graph)
        build = functools.partial(self.engine.build, graph, workspace_limit=workspace_limit)
        plan: Plan = self.call(tag, build)
        return plan

    def build_tag(self, graph: OperationGraph) -> str:
        """The tag for errors of a plan that is being built."""
        return tag_of(self.engine.name, graph, "build")

    def call(self, tag: str, call: Callable[..., Any], *args: Any) -> Any:
        """Call the engine. An exception becomes the request's own error or a crash.

        Raises `CudnnActorError` or `Crash`, and nothing else.
        """
        try:
            return call(*args)
        except CudnnActorError:
            raise
        except Exception as error:
            raise self.diagnose(error, tag) from error

    def execute(self, plan: Plan, buffers: Sequence[Binding], scalars: Sequence[float]) -> None:
        """Let the engine run a plan. Raises the same as `call`, and costs less."""
        try:
            self.engine.execute(plan, buffers, scalars)
        except CudnnActorError:
            raise
        except Exception as error:
            raise self.diagnose(error, plan.tag) from error

    def diagnose(self, error: BaseException, tag: str) -> CudnnActorError | Crash:
        """Interpret a failure of the engine: a crash if its context is dead, else the request's own error.

        An `OutOfMemory` does not say what the buffers take; `ServiceState.complete_error` adds that.
        """
        if isinstance(error, CudnnActorError | Crash):
            return error
        if isinstance(error, StickyError):
            return ContextDead(str(error))
        trouble = self.engine.probe()
        if trouble is not None:
            return ContextDead(f"{error} (probe: {trouble})")
        if isinstance(error, MemoryError):
            # NumPy gives the array's shape and dtype; other libraries do not say how much they asked for.
            size, dtype = math.prod(getattr(error, "shape", ())), getattr(error, "dtype", None)
            requested = 0 if dtype is None else size * dtype.itemsize
            return OutOfMemory(
                requested=requested,
                in_use=0,
                limit=None,
                operations=blamed_operations(error),
                ulimit=ulimit_of(error),
            )
        status, detail = type(error).__name__, str(error)
        if isinstance(error, EngineFailure):
            status, detail = error.status, error.detail
        else:
            log.error("engine.unexpected_error", plan=tag, exc_info=error)
        detail = ", ".join((detail, *getattr(error, "__notes__", ())))
        return ExecutionFailed(status=status, detail=detail, plan=tag, operations=blamed_operations(error))

    # Memory.

    def binding(self, slot: Slot) -> Binding:
        """The engine's handle on a buffer, cached for the life of the incarnation."""
        if slot.binding is None:
            slot.binding = self.bind(slot, slot.spec)
        return slot.binding

    def bind(self, slot: Slot, spec: TensorSpec) -> Binding:
        """The engine's handle on a buffer, seen with the dims of `spec`."""
        return self.engine.bind(slot.arena.number, slot.offset, spec)

    def create_arena(self, number: int, nbytes: int) -> int:
        """Let the engine make an arena. The caller owns its descriptor. Raises `OutOfMemory`, `Crash`."""
        try:
            return self.engine.create_arena(number, nbytes)
        except OutOfMemory:
            raise
        except MemoryError as error:
            raise OutOfMemory(requested=nbytes, in_use=0, limit=None, ulimit=ulimit_of(error)) from None
        except Exception as error:
            raise self.diagnose(error, "arena") from error

    def import_arena(self, number: int, nbytes: int, descriptor: int) -> None:
        """Let the engine map another service's arena for reading. Raises `CudnnActorError`, `Crash`."""
        self.call("import", self.engine.import_arena, number, descriptor, nbytes)

    def drop_arena(self, number: int) -> None:
        """Unmap an empty arena."""
        self.call("arena", self.engine.unmap_arena, number)

    # Unfinished work.

    def defer(self, work: Enqueued[T]) -> None:
        """Note enqueued work, and hold its buffers until it has finished."""
        self._buffers.hold_all(work.slots)
        self._unfenced.append(work)

    @property
    def busy(self) -> bool:
        """Whether any work has not finished, or has finished and awaits its late answer."""
        return bool(self._fenced or self._unfenced or self._passed)

    @property
    def is_alone(self) -> bool:
        """Whether all unfinished work is one piece that began on an idle device."""
        return bool(self._timed) and len(self._fenced) == 1 and not self._unfenced

    def take_near_end(self) -> bool:
        """Whether all unfinished work is one piece that is expected to end within `EARLY_S`. True once for
        each piece, and never for one that is shorter."""
        if not self.is_alone or time.monotonic() < self._near_s:
            return False
        self._near_s = math.inf
        return True

    def takes_long(self, tag: str) -> bool:
        """Whether the last work with this tag kept the device busy for so long that a fence of its own is
        worth it."""
        return self._durations.get(tag, 0.0) > _LONG_S

    def working_since(self) -> float | None:
        """Since when the device has made no progress, in `time.monotonic()` seconds; None without work.

        Work without a fence does not count: the actor is still enqueueing it.
        """
        return self.progress_s if self._fenced or self._passed else None

    def fence(self) -> None:
        """Put one fence behind all that was enqueued since the last fence."""
        if self._unfenced:
            self._note_fence(self.engine.fence(), self._unfenced)
            self._unfenced = []

    def fence_only(self, work: Enqueued[T]) -> None:
        """Put a fence behind work that was enqueued on an idle device, and note the work then: so the device
        reaches the fence sooner."""
        fence = self.engine.fence()
        self._buffers.hold_all(work.slots)
        self._note_fence(fence, [work])

    def _note_fence(self, fence: Fence, batch: list[Enqueued[T]]) -> None:
        if not self._fenced:
            self.progress_s = time.monotonic()
            self._timed = batch[0].tag if len(batch) == 1 else ""
            self.expected_s = self._durations.get(self._timed, 0.0)
            known = self.expected_s > EARLY_S
            self._near_s = self.progress_s + self.expected_s - EARLY_S if known else math.inf
        self._fenced.append((fence, batch))

    # Finished work. Each item is in exactly one container. The actor, or its crash handler, takes it out and
    # answers it. Answers are given in the order in which the work was enqueued. So at a crash, all answered
    # requests come before all that run again: no request runs again on an input that a later, already
    # answered request has overwritten.

    @property
    def only_work(self) -> Enqueued[T] | None:
        """The unfinished work, if that is one piece that began on an idle device, and whose answer is a
        receipt; else None."""
        if not self.is_alone or self._passed or self._done:
            return None
        work = self._fenced[0][1][0]
        return work if work.reply is RECEIPT and work.late is None else None

    def has_passed(self, answer: Callable[[], object] | None = None) -> bool:
        """Whether the oldest fence has passed. If so, its work goes to `take_done` and `first_late`. Never
        blocks.

        A passed fence must not be queried again, so it is removed in the same step. `answer`: answers
        `only_work`, before the notes that nobody waits for. That work goes nowhere then.
        """
        if not self._fenced:
            return False
        now = time.monotonic()
        if not self.engine.has_passed(self._fenced[0][0]):
            self._seen_s = now
            return False
        if answer is not None:
            answer()
        self._note_passed(now)
        if answer is not None:
            self._done.clear()
        return True

    def _note_passed(self, now: float) -> None:
        if self._timed:
            if len(self._durations) >= _MOST_DURATIONS:
                self._durations.clear()
            self._durations[self._timed] = max(self._seen_s - self.progress_s, 0.0)
        self._timed, self.expected_s, self.progress_s = "", 0.0, now
        _, batch = self._fenced.popleft()
        self._passed += batch
        self._advance()

    def _advance(self) -> None:
        """Move the finished work before the first `late` answer to `_done`, and release its buffers."""
        passed = self._passed
        while passed and passed[0].late is None:
            work = passed.popleft()
            self._buffers.release_all(work.slots)
            self._done.append(work)

    def take_done(self) -> Enqueued[T] | None:
        """Remove and return the next finished work, which the caller must answer; None if there is none."""
        return self._done.popleft() if self._done else None

    def first_late(self) -> Enqueued[T] | None:
        """Finished work whose `late` must be called next. It holds its buffers until `take_late`."""
        return self._passed[0] if self._passed else None

    def take_late(self) -> None:
        """Remove the first late work, which the caller must answer."""
        self._buffers.release_all(self._passed.popleft().slots)
        self._advance()

    # The end.

    @property
    def unfinished_count(self) -> int:
        """The length of `unfinished_work`. Any thread: `tuple` is one call of a C function, during which the
        executor's thread does not run, and the lists are measured one after another."""
        fenced = sum([len(batch) for _, batch in tuple(self._fenced)])
        return len(self._passed) + fenced + len(self._unfenced)

    def unfinished_work(self) -> list[Enqueued[T]]:
        """The work that has not finished, or has no answer yet, in order."""
        return [*self._passed, *(work for _, batch in self._fenced for work in batch), *self._unfenced]

    def forget(self) -> None:
        """Drop the unfinished work and release its buffers."""
        lost = self.unfinished_work()
        self._unfenced, self._fenced, self._passed = [], deque(), deque()
        for work in lost:
            self._buffers.release_all(work.slots)
