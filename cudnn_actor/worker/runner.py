"""What runs on an engine: enqueued in order, fenced, and answered when the device has come by.

The same in both isolations: an actor's thread has one, and so has a worker. Its host takes what comes of the
work, and says what a proof of it looks like.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from cudnn_actor.actors import Crash
from cudnn_actor.actors.logs import Log
from cudnn_actor.broker.state import CachedMessage, ServiceState
from cudnn_actor.engines.base import Engine, Plan
from cudnn_actor.memory import Slot
from cudnn_actor.plans.cache import PlanCache
from cudnn_actor.protocol.errors import (
    CudnnActorError,
    ExecutionFailed,
    OutOfMemory,
    QuarantinedRequest,
    UnsupportedGraph,
)
from cudnn_actor.protocol.lowering import Lowered
from cudnn_actor.protocol.messages import Warm
from cudnn_actor.supervision import FaultRule
from cudnn_actor.worker.deferred import DeferredWork
from cudnn_actor.worker.executor import LATER, RECEIPT, Enqueued, Executor, reproducible
from cudnn_actor.worker.injection import Injection
from cudnn_actor.worker.planning import Outcome, Planner
from cudnn_actor.worker.polling import pause_s

__all__ = ["Runner", "RunnerHost", "Task"]

_LONG_RUN_NS = 200_000
"""A plan that took this long last time is worth a flush of the answers before it."""
_STOPPING_POLL_S = 50e-6
"""How often fences are looked at by one that only waits for their end."""

log = Log("cudnn_actor")


class Task(Protocol):
    """A request that is run."""

    @property
    def number(self) -> int:
        """The request's."""

    @property
    def fault(self) -> FaultRule | None:
        """What is to befall it; None for nothing."""

    @property
    def started_ns(self) -> int:
        """When it began, on `time.perf_counter_ns`'s clock."""


T = TypeVar("T", bound=Task)
T_contra = TypeVar("T_contra", bound=Task, contravariant=True)


class RunnerHost(Protocol[T_contra]):
    """Who has a runner. Each task's answer is given once: what `Runner`'s verbs return, or one of these."""

    def proof(self, task: T_contra, tag: str, now_ns: int) -> Any:
        """What the caller gets of a task that has finished now, under the tag of its plan."""

    def answer(self, task: T_contra, value: Any) -> None:
        """Give an answer that was to come `LATER`. One of several that are there at the same time."""

    def refuse(self, task: T_contra, error: Exception) -> None:
        """Give an error in its place."""

    def flush(self) -> None:
        """Deliver what was answered: what comes next may take long."""


class Runner(Generic[T]):
    """Owns an engine from its start to its end. One thread's.

    Parameters
    ----------
    state
        The service's.
    make
        Makes the engine.
    host
        See `RunnerHost`.
    abandoned
        Set when the host is given up: ends a scripted hang, and the wait for a device.
    nudge
        Wakes the host when a build has come to something. Any thread.
    """

    def __init__(
        self,
        state: ServiceState,
        make: Callable[[], Engine],
        host: RunnerHost[T],
        *,
        abandoned: threading.Event,
        nudge: Callable[[], None],
    ) -> None:
        self.plans = PlanCache()
        self.busy_since: float | None = None
        """Since when a step that is no task's has not got on; None between such."""
        self._state = state
        self._memory = state.memory
        self._make = make
        self._host = host
        self._abandoned = abandoned
        self._nudge = nudge
        self.faults = Injection(host.flush, abandoned)
        """Before a task is run, its host sets the `rule`."""
        self._executor: Executor[T] | None = None
        self._planner: Planner | None = None
        self.deferred: DeferredWork | None = None
        """Where requests wait for their plans, which its host asks before it starts one; None where plans are
        built on the spot."""

    # Life.

    def open(self) -> None:
        """Open the engine, map the memory that there is, and start the build thread."""
        executor: Executor[T] = Executor(self._make(), self._memory)
        self._executor = executor
        executor.open()
        self._planner = Planner(executor, self.plans, self._state, self._nudge)
        if self._planner.builds_elsewhere:
            self.deferred = DeferredWork(self._state, self._planner)

    def close(self, *, wait: bool) -> None:
        """End the build thread, and close the engine; `wait` a moment for the build in work."""
        self.abandon_builds(wait=wait)
        executor, self._executor = self._executor, None
        if executor is not None:
            try:
                executor.engine.close()
            except Exception:  # of a dead context, say: there is nothing more to be done with it
                log.exception("engine.close_failed")

    def abandon_builds(self, *, wait: bool = False) -> None:
        """End the build thread alone."""
        if self._planner is not None:
            self._planner.close(wait=wait)

    @property
    def is_open(self) -> bool:
        """Whether the engine has been opened, and not closed."""
        return self._executor is not None

    @property
    def executor(self) -> Executor[T]:
        """The open engine, and its memory."""
        assert self._executor is not None, "requests come only between `open` and `close`"
        return self._executor

    def outlast(self) -> None:
        """Wait until all has finished, and answer it. Raises `Crash` where the host is given up meanwhile."""
        executor = self.executor
        executor.fence()
        while executor.busy:
            self._settle_passed(executor)
            if self._abandoned.wait(_STOPPING_POLL_S):
                raise Crash("its device had not finished when it was given up")

    # For the watchdog, on its thread.

    def working_since(self) -> float | None:
        """Since when the device, a step in between or the build thread has not got on; the oldest."""
        executor, planner = self._executor, self._planner
        mine = self.busy_since
        if mine is None and executor is not None:
            mine = executor.working_since()
        built = None if planner is None else planner.working_since()
        if mine is None or built is None:
            return mine if built is None else built
        return min(mine, built)

    def builds_since(self) -> float | None:
        """Since when the build thread has not got on; None while it builds nothing."""
        return None if self._planner is None else self._planner.working_since()

    @property
    def digest_in_work(self) -> str | None:
        """The graph that the build thread has in work."""
        return None if self._planner is None else self._planner.digest_in_work

    # What waits for a plan.

    def take_deferred(self) -> list[Any]:
        """Take out what was deferred, in order: it has not started."""
        return [] if self.deferred is None else self.deferred.clear()

    def next_resumed(self) -> Any:
        """The next item that can start; None where there is none."""
        return None if self.deferred is None else self.deferred.take()

    @property
    def may_resume(self) -> bool:
        """Whether anything that was deferred can start now."""
        return self.deferred is not None and self.deferred.may_resume

    def collect_builds(self) -> None:
        """Take in what the build thread has come to. Raises `Crash`."""
        if self._planner is not None and self._planner.has_results:
            self.busy_since = time.monotonic()  # taking their workspace may wait for the device
            self._planner.collect()
            self.busy_since = None

    # Fences.

    def fence(self) -> None:
        """Put one fence behind all that was enqueued."""
        if self._executor is not None and self._executor.busy:
            self.busy_since = time.monotonic()  # for the watchdog: this too may hang
            self._executor.fence()
            self.busy_since = None

    def settle(self) -> float | None:
        """Answer what the device has finished; seconds until the next look, None while it has no work."""
        executor = self._executor
        if executor is None or not executor.busy:
            return None
        self._settle_passed(executor)
        since = executor.working_since()
        return None if since is None else pause_s(time.monotonic() - since)

    def settle_done(self) -> None:
        """Answer what has been seen to be finished, and is not answered."""
        if self._executor is not None:
            self._settle_done(self._executor)

    def _settle_passed(self, executor: Executor[T]) -> None:
        while executor.passed():
            self._settle_done(executor)
            while (late := executor.first_late()) is not None:
                self._settle_late(executor, late)
                self._settle_done(executor)
        self._host.flush()

    def _settle_done(self, executor: Executor[T]) -> None:
        now_ns = time.perf_counter_ns()
        host = self._host
        while (work := executor.take_done()) is not None:
            task = work.task
            host.answer(task, host.proof(task, work.tag, now_ns) if work.reply is RECEIPT else work.reply)

    def _settle_late(self, executor: Executor[T], work: Enqueued[T]) -> None:
        """Call for an answer. Until it is there the work is the executor's, and a crash finds it there."""
        assert work.late is not None
        self.busy_since = time.monotonic()
        value, error = None, None
        try:
            value = executor.call(work.tag, work.late)
        except Crash:
            raise
        except Exception as failure:  # noqa: BLE001 - the answer to this one request
            error = failure
        executor.take_late()
        if error is None:
            self._host.answer(work.task, value)
        else:
            self._host.refuse(work.task, error)
        self.busy_since = None

    # Running. Each returns an answer, or `LATER`; raises the error that is one, or `Crash`.

    def compute(self, task: T, cached: CachedMessage, key: object) -> Any:
        """Run a plan on what the message is bound to. `key` is what was asked whether it is deferred."""
        bound, executor, deferred = cached.bound, self._executor, self.deferred
        assert bound is not None, "whoever checks a message binds it"
        assert executor is not None
        plan = self._plan(cached.lowered, None if deferred is None else deferred.found_for(key))
        if executor.synchronous and self.plans.last_run_ns(plan.tag) > _LONG_RUN_NS:
            self._host.flush()
        binding = executor.binding
        buffers = [slot.binding if slot.binding is not None else binding(slot) for slot in bound.slots]
        for place, spec in cached.lowered.views:
            buffers[place] = executor.bind(bound.slots[place], spec)
        execute = executor.engine.execute
        try:
            return self._enqueue(task, plan.tag, bound.slots, execute, plan, buffers, bound.scalars)
        except ExecutionFailed as error:
            raise reproducible(error, cached.lowered.graph) from error

    def _plan(self, lowered: Lowered, known: Outcome | None) -> Plan:
        if self.faults.rule is not None:
            self.faults.reject(self.executor.engine.name, lowered)
        if known is None:
            assert self._planner is not None
            return self._planner.here(lowered.graph)
        if isinstance(known, CudnnActorError):
            raise known.again()
        return known

    def write(self, task: T, slot: Slot, data: Any, reply: Any = RECEIPT) -> Any:
        """Write host values, or those of a device array, to a buffer."""
        place = self.executor.binding(slot)
        return self._enqueue(task, "upload", [slot], self.executor.engine.write, place, data, reply=reply)

    def read(self, task: T, slot: Slot, into: Any = None) -> Any:
        """A buffer's values, in `into` where that is given: now, or when all before it has run."""
        self.faults.inject("download")
        executor, place = self.executor, self.executor.binding(slot)
        if not executor.synchronous:
            late = executor.call("download", executor.engine.fetch, place, into)
            if late is not None:
                executor.defer(Enqueued(task, "download", [slot], late=late))
                return LATER
        self._host.flush()  # this takes as long as all that was enqueued before it
        executor.fence()
        try:
            array = executor.call("download", executor.engine.read, place, into)
        except OutOfMemory as error:  # of the array: only here is it known how large that was to be
            in_use = self._memory.arena_bytes
            raise OutOfMemory(requested=slot.spec.nbytes, in_use=in_use, limit=None) from error
        self._settle_passed(executor)  # all of it: what has written the buffer is answered before
        return array

    def view(self, task: T, slot: Slot) -> Any:
        """The buffer's own memory, as an array."""
        executor = self.executor
        place = executor.binding(slot)
        owner = self._memory.lend(slot)
        array = executor.call("view", executor.engine.view, place, owner)
        if not executor.busy:
            return array
        executor.defer(Enqueued(task, "view", [slot], array))
        return LATER

    def copy(self, task: T, src: Slot, dst: Slot) -> Any:
        """Copy a buffer's values to another."""
        places = self.executor.binding(src), self.executor.binding(dst)
        return self._enqueue(task, "copy", [src, dst], self.executor.engine.copy, *places)

    def fill(self, task: T, slot: Slot, value: float) -> Any:
        """Set every element of a buffer."""
        place = self.executor.binding(slot)
        return self._enqueue(task, "fill", [slot], self.executor.engine.fill, place, value)

    def warm(self, message: Warm, key: object, on_build: Callable[[], None]) -> int:
        """How many plans were built, of requests that run none yet. `on_build` is called before each."""
        wanted = {}
        for request in message.messages:
            lowered = self._state.lowered(request)
            wanted[lowered.graph.digest()] = lowered
        outcomes = {} if self.deferred is None else self.deferred.warmed_for(key)
        self.faults.inject("warm")
        built = 0
        for digest, lowered in wanted.items():
            known = outcomes.get(digest)
            if known is not None or digest not in self.plans:
                on_build()
                with contextlib.suppress(UnsupportedGraph, OutOfMemory, QuarantinedRequest):
                    self._plan(lowered, known)
                    built += 1
        return built

    def _enqueue(
        self,
        task: T,
        tag: str,
        slots: Sequence[Slot],
        call: Callable[..., object],
        *args: Any,
        reply: Any = RECEIPT,
    ) -> Any:
        executor = self._executor
        assert executor is not None
        if self.faults.rule is not None:
            self.faults.inject(tag)
        executor.call(tag, call, *args)
        if not executor.synchronous:
            executor.defer(Enqueued(task, tag, slots, reply))
            return LATER
        if reply is not RECEIPT:
            return reply
        now_ns = time.perf_counter_ns()
        self.plans.note_run(tag, now_ns - task.started_ns)
        return self._host.proof(task, tag, now_ns)
