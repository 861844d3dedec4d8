"""The runner: enqueues work on an engine in order, sets fences, and reports the work that has finished.

It is the same in both isolations: the actor's thread has a runner, and so has a worker. The runner's host
receives the results and makes the receipts. The file is long because each kind of work has a method here.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from cudnn_actor.actors import Crash
from cudnn_actor.actors.logs import Log
from cudnn_actor.broker.execution_state import ExecutionState
from cudnn_actor.broker.message_cache import Bound, CachedMessage
from cudnn_actor.engines.base import Binding, ContextDead, Engine, EngineFailure, Plan, StickyError
from cudnn_actor.execution.arriving import Arriving, copy_of
from cudnn_actor.execution.deferred import DeferredWork
from cudnn_actor.execution.executor import LATER, RECEIPT, Enqueued, Executor, describe_error
from cudnn_actor.execution.expected_runs import ExpectedRuns, written_slots
from cudnn_actor.execution.injection import Injection
from cudnn_actor.execution.loops import Loops
from cudnn_actor.execution.model_runs import ModelPlaces, ModelRuns, Values, collect
from cudnn_actor.execution.planning import Outcome, Planner
from cudnn_actor.execution.polling import pause_s, sleep_exactly
from cudnn_actor.memory import Arena, BufferOwner, Slot
from cudnn_actor.plan_store.cache import PlanCache
from cudnn_actor.protocol.errors import (
    CudnnActorError,
    OperationError,
    OutOfMemory,
    QuarantinedRequest,
    UnsupportedGraph,
)
from cudnn_actor.protocol.graphs.explanation import Explanation
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.graphs.timing import PlanTimes
from cudnn_actor.protocol.messages.messages import Explain, Warm
from cudnn_actor.supervision import FaultRule

__all__ = ["Runner", "RunnerHost", "Task"]

_LONG_RUN_NS = 200_000
"""Before a synchronous plan that took longer than this last time, the earlier answers are delivered."""
_MOST_LONG_RUNS = 4096
_MOST_RUN_PLANS = 4096
_CAUGHT_UP_WITHIN_S = 1e-3
"""Seconds for which a slow step waits until the device has finished earlier work: see `_catch_up`."""
_MOST_LOOKS = 32
"""How often a fence is polled before a look for new messages, if nothing else runs on the device: a poll
takes 1 to 2 us, and a look for messages ten times as long."""
_STOPPING_POLL_S = 50e-6
"""Seconds between two looks at the fences while the runner stops."""

log = Log("cudnn_actor")


class Task(Protocol):
    """A request that a runner runs."""

    @property
    def number(self) -> int:
        """The request's number."""

    @property
    def fault(self) -> FaultRule | None:
        """The fault to inject; None for none."""

    @property
    def started_ns(self) -> int:
        """When it began, on `time.perf_counter_ns`'s clock."""

    @property
    def unwanted(self) -> bool:
        """Whether its caller has left: it was cancelled, or its timeout has passed."""


T = TypeVar("T", bound=Task)
T_contra = TypeVar("T_contra", bound=Task, contravariant=True)


class RunnerHost(Protocol[T_contra]):
    """The owner of a runner.

    Each task is answered exactly once: by the result or the error of the `Runner`'s method, or, if that
    returned `LATER`, by `answer` or `refuse`.
    """

    def receipt_for(self, task: T_contra, tag: str, now_ns: int) -> Any:
        """The receipt of a task that finished at `now_ns`. `tag` names its plan."""

    def answer(self, task: T_contra, value: Any) -> None:
        """Answer a task that returned `LATER`. Several answers may follow each other before `flush`."""

    def answer_ahead(self, task: T_contra, tag: str) -> Callable[[], object] | None:
        """A function that answers a task which returned `LATER`: its receipt has the time of the call.

        None if `answer` is to be called. Earlier answers go first.
        """

    def refuse(self, task: T_contra, error: Exception) -> None:
        """Fail a task that returned `LATER`."""

    def flush(self) -> None:
        """Deliver the answers so far, because the next step may take long."""

    def note_progress(self) -> None:
        """Note for the watchdog that the current task made progress."""


@dataclass(eq=False, repr=False)
class Runner(Generic[T]):
    """Owns an engine from its start to its end. Used by one thread.

    Parameters
    ----------
    state
        The state that running requests needs.
    make
        A function that makes the engine.
    host
        See `RunnerHost`.
    abandoned
        An event that is set when the host is given up. It ends a scripted hang, and the wait for a device.
    nudge
        A function that wakes the host when a build has a result. It may be called on any thread.
    note_deferred
        This is called with the number of deferred requests whenever it changes.
    """

    state: ExecutionState
    make: Callable[[], Engine]
    host: RunnerHost[T]
    _: KW_ONLY
    abandoned: threading.Event
    nudge: Callable[[], None]
    note_deferred: Callable[[int], None] = lambda _: None

    def __post_init__(self) -> None:
        self.plans = PlanCache(self.state.plan_capacity, self.state.cache_limit)
        self.awake_s = 0.0
        """Seconds: work that is expected to take the device no longer than this is awaited without a pause,
        and so are values that arrive, for this long. It is not 0 if the host's thread would be slower after a
        sleep, and has a core and an interpreter's lock of its own."""
        self.busy_since: float | None = None
        """When the current step that belongs to no task began; None between such steps."""
        self.faults = Injection(self.host.flush, self.abandoned)
        """The host sets its `rule` before it runs a task."""
        self._executor: Executor[T] | None = None
        self._models: ModelRuns | None = None
        self._expected: ExpectedRuns | None = None
        self._loops: Loops | None = None
        self._planner: Planner | None = None
        self._long_runs: set[str] = set()
        """Tags whose last run, on a synchronous engine, took longer than `_LONG_RUN_NS`."""
        self._run_plans: set[str] = set()
        """Tags of plans that have run here. The first run of one loads its kernels."""
        self.is_prompt = False
        """Whether the engine has run all that it was called for, and builds on this thread: then nothing is
        ever enqueued, deferred or collected, and there is nothing to do between requests."""
        self.deferred: DeferredWork | None = None
        """Requests that wait for plans. The host asks it before it starts a request. None if the runner's own
        thread builds plans when they are needed."""

    # Life.

    def open(self, arenas: Iterable[Arena] = ()) -> None:
        """Open the engine, map these arenas, and start the build threads, if the engine has builders."""
        executor: Executor[T] = Executor(self.make(), self.state.memory)
        self._executor = executor
        self._expected = expected = ExpectedRuns(executor, self._catch_up)
        self._models = ModelRuns(executor, expected, self.host.flush, self._await_part)
        self._loops = Loops(executor, self._note_turn, self._wait_amid)
        executor.engine.on_progress = self.host.note_progress
        executor.open(arenas)
        if not executor.synchronous:
            sleep_exactly()
        self._planner = Planner(executor, self.plans, self.state, self.nudge)
        self.is_prompt = executor.synchronous and not self._planner.builds_elsewhere
        if self._planner.builds_elsewhere:
            self.deferred = DeferredWork(self.state, self._planner, self.note_deferred)

    def close(self, *, wait: bool) -> None:
        """End the build threads, and close the engine. `wait`: give the running build a moment to finish."""
        self.abandon_builds(wait=wait)
        executor, self._executor, self._models, self._expected = self._executor, None, None, None
        self._loops = None
        if executor is not None:
            try:
                executor.engine.close()
            except Exception:  # its context may be dead; nothing more can be done with it
                log.exception("engine.close_failed")

    def abandon_builds(self, *, wait: bool = False) -> None:
        """End the build threads only."""
        if self._planner is not None:
            self._planner.close(wait=wait)

    @property
    def is_open(self) -> bool:
        """Whether the engine has been opened and not yet closed."""
        return self._executor is not None

    @property
    def executor(self) -> Executor[T]:
        """The executor of the open engine."""
        assert self._executor is not None, "requests come only between `open` and `close`"
        return self._executor

    def outlast(self) -> None:
        """Wait for all work, and answer it. Raises `Crash` if the host is given up meanwhile."""
        executor = self.executor
        executor.fence()
        while executor.busy:
            self._settle_passed(executor)
            if self.abandoned.wait(_STOPPING_POLL_S):
                raise Crash("its device had not finished when it was given up")

    # For the watchdog, on its thread.

    def working_since(self) -> float | None:
        """Since when the device, the current step or a build thread has made no progress: the earliest of
        these times, in `time.monotonic()` seconds; None if all are idle."""
        executor, planner = self._executor, self._planner
        mine = self.busy_since
        if mine is None and executor is not None:
            mine = executor.working_since()
        built = None if planner is None else planner.working_since()
        if mine is None or built is None:
            return mine if built is None else built
        return min(mine, built)

    def builds_since(self) -> float | None:
        """Since when a build thread has made no progress; None while none builds."""
        return None if self._planner is None else self._planner.working_since()

    @property
    def digest_in_work(self) -> str | None:
        """The digest of the graph whose plan is being built, or else restored; None for none."""
        return None if self._planner is None else self._planner.digest_in_work

    # Deferred requests.

    def defers(self, item: Any) -> Callable[[], None] | None:
        """The call that defers an item which must wait: see `DeferredWork.defers`."""
        return None if self.deferred is None else self.deferred.defers(item)

    def take_deferred(self) -> list[Any]:
        """Remove and return the deferred items, in order. None of them has started."""
        return [] if self.deferred is None else self.deferred.clear()

    def next_resumed(self) -> Any:
        """Remove and return the next deferred item that can start; None if there is none."""
        return None if self.deferred is None else self.deferred.take()

    @property
    def may_resume(self) -> bool:
        """Whether any deferred item can start now."""
        return self.deferred is not None and self.deferred.may_resume

    def forget_plans(self, digests: Iterable[str]) -> None:
        """Drop plans whose graphs are not expected to come again, and abandon their tuning."""
        for digest in digests:
            if self._planner is None:
                self.plans.drop(digest)
            else:
                self._planner.forget(digest)

    def clear_plans(self) -> int:
        """Drop all plans and refusals. Returns how many there were."""
        known = self.plans.digests
        self.forget_plans(known)
        return len(known)

    def collect_builds(self) -> None:
        """Take the results of the build threads. Raises `Crash`."""
        if self._planner is not None and self._planner.has_results:
            self.busy_since = time.monotonic()  # allocating their workspace may wait for the device
            self._planner.collect()
            self.busy_since = None

    # Fences.

    def fence(self) -> None:
        """Put one fence behind all that was enqueued."""
        if self._executor is not None and self._executor.busy:
            self.busy_since = time.monotonic()  # for the watchdog: setting a fence may hang too
            self._executor.fence()
            self.busy_since = None

    def settle(self) -> float | None:
        """Answer the work that the device has finished. Returns the seconds until the next look; None without
        work."""
        executor = self._executor
        if executor is None or not executor.busy:
            return None
        answer = self._answer_ahead(executor)
        if executor.has_passed(answer):
            self._settle_work(executor)
            self._settle_passed(executor)
        else:
            self.host.flush()
        since = executor.working_since()
        if since is None:
            return None
        pause = pause_s(time.monotonic() - since, executor.expected_s, self.awake_s)
        if pause or not executor.is_alone:
            return pause
        for _ in range(_MOST_LOOKS):
            if executor.has_passed(answer):
                self._settle_work(executor)
                self._settle_passed(executor)
                return None if executor.working_since() is None else 0.0
        return 0.0

    def _answer_ahead(self, executor: Executor[T]) -> Callable[[], object] | None:
        """The function that answers the only unfinished work. None if there is more or none, or if the host
        has no such function."""
        work = executor.only_work
        return None if work is None else self.host.answer_ahead(work.task, work.tag)

    def _catch_up(self) -> None:
        """Answer the work that was enqueued before a slow step, such as the first run of a plan in this
        incarnation.

        After a crash a batch has many slow steps. If another crash comes meanwhile, the requests before the
        step have been answered, so they need not run again. Raises `Crash`.
        """
        executor = self.executor
        self._settle_amid(executor)
        until_s = time.monotonic() + _CAUGHT_UP_WITHIN_S
        while executor.busy and time.monotonic() < until_s:
            self._settle_amid(executor)

    def _settle_amid(self, executor: Executor[T]) -> None:
        """Set a fence after the enqueued work, and answer the work that has finished.

        This is called in the middle of a request. If the context has died, that is not this request's error,
        so this raises `ContextDead`.
        """
        try:
            executor.fence()
            self._settle_passed(executor)
        except StickyError as error:
            raise ContextDead(str(error)) from error

    def settle_done(self) -> None:
        """Answer work that is known to have finished and has not been answered."""
        if self._executor is not None:
            self._settle_done(self._executor)

    def _settle_passed(self, executor: Executor[T]) -> None:
        while executor.has_passed():
            self._settle_work(executor)
        self.host.flush()

    def _settle_work(self, executor: Executor[T]) -> None:
        """Answer the work before a fence that has just passed."""
        self._settle_done(executor)
        while (late := executor.first_late()) is not None:
            self._settle_late(executor, late)
            self._settle_done(executor)

    def _settle_done(self, executor: Executor[T]) -> None:
        now_ns = time.perf_counter_ns()
        host = self.host
        while (work := executor.take_done()) is not None:
            task = work.task
            reply = host.receipt_for(task, work.tag, now_ns) if work.reply is RECEIPT else work.reply
            host.answer(task, reply)

    def _settle_late(self, executor: Executor[T], work: Enqueued[T]) -> None:
        """Make an answer that is computed after the fence. Until it is there, the executor keeps the work, so
        that a crash finds it."""
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
            self.host.answer(work.task, value)
        else:
            self.host.refuse(work.task, error)
        self.busy_since = None

    # Running. Each method returns the answer or `LATER`. It raises the request's own error, or `Crash`.

    def compute(self, task: T, cached: CachedMessage, key: object) -> Any:
        """Run a plan on the message's buffers. `key` is the item that was passed to `DeferredWork.defers`."""
        bound, executor, deferred = cached.bound, self._executor, self.deferred
        assert bound is not None, "a checked message is bound"
        assert executor is not None
        graph = cached.lowered.graph
        try:
            plan = self._plan(graph, None if deferred is None else deferred.found_for(key))
            if self._long_runs and plan.tag in self._long_runs:
                self.host.flush()
            if plan.tag not in self._run_plans:
                self._begin_plan(plan.tag)
            slots = bound.slots
            if cached.lowered.loop is not None:
                return self._loop(task, cached, slots, plan)
            if not bound.has_bindings:
                for slot in slots:
                    executor.binding(slot)
                bound.has_bindings = True
            buffers = [slot.binding for slot in slots]
            for place, spec in cached.lowered.views:
                buffers[place] = executor.bind(slots[place], spec)
            if self.faults.rule is not None:
                self.faults.inject(plan.tag)
            if self._expected is not None and self._expected.has_constants:
                self._expected.note_writes(written_slots(cached, slots))
            executor.execute(plan, buffers, bound.scalars)
            return self._answer_or_defer(task, plan.tag, slots, plan=plan)
        except OperationError as error:
            raise describe_error(error, graph) from error

    def _loop(self, task: T, cached: CachedMessage, slots: Sequence[Slot], plan: Plan) -> Any:
        """Run a plan as the body of a loop. A loop takes long, so earlier work is answered first."""
        executor, loops, tag = self.executor, self._loops, f"{plan.tag}/loop"
        assert loops is not None, "they come and go with the executor"
        self._catch_up()
        self.host.flush()
        if self.faults.rule is not None:
            self.faults.inject(tag)
        self._note_writes(written_slots(cached, slots))
        try:
            executor.call(tag, loops.run, plan, cached.lowered, slots, lambda: task.unwanted)
        except CudnnActorError as error:
            if isinstance(error, OperationError):
                error = describe_error(error, cached.lowered.graph)
            return self._fail(task, tag, slots, error, (), enqueued=plan)
        return self._answer_or_defer(task, tag, slots, plan=plan)

    def _note_turn(self) -> None:
        """Note that a turn of a loop has finished. If the host has been given up, the loop ends there.

        Work that was enqueued before the loop is answered as soon as it has finished. Otherwise it would
        count as hung if the loop takes longer than the limit.
        """
        self.host.note_progress()
        if self.executor.busy:
            self._settle_passed(self.executor)
        if self.abandoned.is_set():
            raise Crash("it was given up in the middle of a loop")

    def _wait_amid(self, waited_s: float) -> None:
        """Wait for a moment in the middle of a request, and answer the work that was enqueued before it."""
        self._settle_passed(self.executor)
        if self.abandoned.wait(pause_s(waited_s)):
            raise Crash("its device had not finished a loop when it was given up")

    def _begin_plan(self, tag: str) -> None:
        self._catch_up()
        if len(self._run_plans) >= _MOST_RUN_PLANS:
            self._run_plans.clear()
        self._run_plans.add(tag)

    def run_model(
        self,
        task: T,
        cached: CachedMessage,
        key: object,
        places: ModelPlaces,
        answer: Callable[[list[np.ndarray]], Any] | None = None,
    ) -> Any:
        """Copy a model's inputs to their places, run its graph there, and copy the outputs from there.

        Parameters
        ----------
        task
            The request.
        cached
            The `RunGraph` to which the run is equivalent.
        key
            The item that was passed to `DeferredWork.defers`.
        places
            The sources and targets of the copies.
        answer
            A function that makes the answer from the arrays among the targets; None for a receipt.
        """
        executor, models, expected = self._executor, self._models, self._expected
        assert executor is not None
        assert models is not None, "it comes and goes with the executor"
        assert expected is not None, "likewise"
        deferred = self.deferred
        graph, slots = cached.lowered.graph, places.slots
        enqueued: Plan | None = None
        read: list[Values] = []
        arrays: list[np.ndarray] | None = None
        tag = ""
        try:
            plan = self._plan(graph, None if deferred is None else deferred.found_for(key))
            tag = plan.tag
            if self._long_runs and tag in self._long_runs:
                self.host.flush()
            if self.faults.rule is not None:
                self.faults.inject(tag)
            prepared = models.prepare(cached, plan, places) if places.repeats else None
            enqueued = plan
            if not places.on_host and places.harmless != expected.changes:
                changes = expected.changes
                written = [target for _, target in places.targets if isinstance(target, Slot)]
                if not expected.note_writes(written):
                    places.harmless = changes
            if prepared is None:
                arrays = models.enqueue(cached, plan, places, read)
            else:
                executor.call(tag, prepared.enqueue)
        except OperationError as error:
            return self._fail(task, tag, slots, describe_error(error, graph), read, enqueued=enqueued)
        except CudnnActorError as error:
            return self._fail(task, tag, slots, error, read, enqueued=enqueued)
        is_receipt = answer is None and not read
        if executor.synchronous:
            now_ns = time.perf_counter_ns()
            self._note_length(tag, now_ns - task.started_ns)
            if arrays is not None and answer is not None:
                return answer(arrays)
            if is_receipt:
                return self.host.receipt_for(task, tag, now_ns)
            return self._answer(task, tag, read, answer)
        late = None if is_receipt else functools.partial(self._answer, task, tag, read, answer)
        executor.defer(Enqueued(task, tag, slots, late=late, plan=plan))
        if executor.takes_long(tag):
            self.fence()  # its caller may send the next run while the device computes the one behind this
        return LATER

    def _answer(
        self,
        task: T,
        tag: str,
        read: Sequence[Values],
        answer: Callable[[list[np.ndarray]], Any] | None,
    ) -> Any:
        arrays = collect(read)
        return self.host.receipt_for(task, tag, time.perf_counter_ns()) if answer is None else answer(arrays)

    def _fail(
        self,
        task: T,
        tag: str,
        slots: Sequence[Slot],
        error: CudnnActorError,
        read: Sequence[Values],
        *,
        enqueued: Plan | None,
    ) -> Any:
        """Fail a request. If the engine may still run `enqueued` for it, the request fails when that has
        ended. Until then it holds its buffers, its caller's memory, and the engine's memory for the outputs
        in `read`."""
        executor = self.executor
        if executor.synchronous or enqueued is None:
            raise error
        late = functools.partial(collect, read, error)
        executor.defer(Enqueued(task, tag, slots, late=late, plan=enqueued))
        return LATER

    def explain(self, message: Explain, key: object) -> Explanation:
        """The explanation of a graph's plan; if the message asks for it, with the time of each piece, and
        with the candidates for it.

        Raises the same as `compute` if there is no plan. Blocks while it measures.
        """
        graph = message.graph
        outcomes = {} if self.deferred is None else self.deferred.warmed_for(key)
        self.faults.inject("explain")
        try:
            plan = self._plan(graph, outcomes.get(graph.digest()))
            times = self._measure(plan, graph, message.weights) if message.measure else None
        except OperationError as error:
            raise describe_error(error, graph) from error
        explanation = plan.explain(graph)
        if message.candidates:
            explanation = self._with_candidates(plan, explanation, graph)
        return explanation if times is None else explanation.with_times(graph, times)

    def _measure(self, plan: Plan, graph: OperationGraph, weights: Sequence[int]) -> PlanTimes:
        self.host.flush()  # answers that are ready need not wait
        measure = self.executor.engine.measure
        times: PlanTimes = self.executor.call(plan.tag, measure, plan, graph, weights)
        return times

    def _with_candidates(self, plan: Plan, explanation: Explanation, graph: OperationGraph) -> Explanation:
        self.host.flush()  # as above
        engine = self.executor.engine
        found: Explanation = self.executor.call(
            plan.tag, engine.with_candidates, plan, explanation, graph, self.state.workspace_limit
        )
        return found

    def _plan(self, graph: OperationGraph, known: Outcome | None) -> Plan:
        if self.faults.rule is not None:
            self.faults.reject(self.executor.engine.name, graph)
        if known is None:
            known = self.plans.find(graph.digest())
        if known is None:
            assert self._planner is not None
            self._catch_up()
            return self._planner.get_or_build(graph)
        if isinstance(known, CudnnActorError):
            raise known.again()
        return known

    def write(self, task: T, slot: Slot, data: Any, reply: Any = RECEIPT) -> Any:
        """Write the values of a host array or a device array to a buffer. The host array may still arrive."""
        place = self.executor.binding(slot)
        self._note_writes([slot])
        if isinstance(data, Arriving):
            return self._write_arriving(task, slot, place, data)
        return self._enqueue(task, "upload", [slot], self.executor.engine.write, place, data, reply=reply)

    def _write_arriving(self, task: T, slot: Slot, place: Binding, data: Arriving) -> Any:
        executor, tag = self.executor, "upload"
        if self.faults.rule is not None:
            self.faults.inject(tag)
        answer = None if executor.busy else self.host.answer_ahead(task, tag)  # while the array arrives
        copy = copy_of(executor, tag, data, place, self._await_part)
        try:
            if copy is not None:
                executor.call(tag, copy)
            else:
                for number, _, _ in data.parts:
                    executor.call(tag, self._await_part, data, number)
                executor.call(tag, executor.engine.write, place, data.array)
        except CudnnActorError as error:
            if executor.synchronous:
                raise
            # The device may still read the parts before: they are held until it does not.
            executor.defer(Enqueued(task, tag, [slot], late=functools.partial(collect, (), error)))
            return LATER
        if answer is None or not self.awake_s or executor.busy:
            return self._answer_or_defer(task, tag, [slot])
        self._answer_soon(Enqueued(task, tag, [slot]), answer)
        return LATER

    def _answer_soon(self, work: Enqueued[T], answer: Callable[[], object]) -> None:
        """Set a fence behind the only work, whose answer is made, and look for its end a few times at once.

        Its caller waits, and the device takes less time than this thread for a look for other requests.
        """
        executor = self.executor
        try:
            executor.fence_only(work)
            for _ in range(_MOST_LOOKS):
                if executor.has_passed(answer):
                    self._settle_work(executor)
                    self._settle_passed(executor)
                    return
        except StickyError as error:  # as in `_settle_amid`
            raise ContextDead(str(error)) from error
        except EngineFailure as error:  # of the look: it is no answer to the request, which may be answered
            raise Crash(f"it could not look whether its device has finished: {error}") from error

    def _await_part(self, arriving: Arriving, number: int) -> None:
        """Wait until a part of an array has arrived. Work that was enqueued before is answered meanwhile.

        The wait counts as progress: the process that fills the array is watched elsewhere.
        """
        if arriving.is_there(number):
            return
        self.executor.fence()
        begin_s = time.monotonic()
        while not arriving.is_there(number):
            self.host.note_progress()
            waited_s = time.monotonic() - begin_s - self.awake_s
            self._wait_amid(waited_s)
            if waited_s < 0.0 and any(map(arriving.is_there, itertools.repeat(number, _MOST_LOOKS))):
                return

    def write_all(self, task: T, slots: Sequence[Slot], values: Sequence[np.ndarray]) -> Any:
        """Write the values of host arrays to buffers, all or none: they fit, as was checked before.

        If the engine fails in between, this raises `Crash`: the successor writes all of them.
        """
        self.faults.inject("write")
        executor = self.executor
        places = [executor.binding(slot) for slot in slots]
        self._note_writes(slots)
        for number, (place, array) in enumerate(zip(places, values, strict=True)):
            try:
                executor.call("write", executor.engine.write, place, array)
            except CudnnActorError as error:
                if not number:
                    raise
                raise Crash(f"it could not write all weights: {error}") from error
        return self._answer_or_defer(task, "write", slots)

    def read(self, task: T, slot: Slot, into: Any = None) -> Any:
        """A buffer's values, in `into` if given; or `LATER`, if they are read after all earlier work."""
        self.faults.inject("download")
        executor, place = self.executor, self.executor.binding(slot)
        if not executor.synchronous:
            late = executor.call("download", executor.engine.fetch, place, into)
            if late is not None:
                executor.defer(Enqueued(task, "download", [slot], late=late))
                return LATER
        self.host.flush()  # the next call waits for all that was enqueued before it
        executor.fence()
        try:
            array = executor.call("download", executor.engine.read, place, into)
        except OutOfMemory as error:  # for the array; the engine does not say how large it would have been
            requested, ulimit = slot.spec.nbytes, error.ulimit
            raise OutOfMemory(requested=requested, in_use=0, limit=None, ulimit=ulimit) from error
        self._settle_amid(executor)  # first answer all earlier work, including what wrote the buffer
        return array

    def view(self, task: T, slot: Slot, owner: BufferOwner[Slot]) -> Any:
        """The buffer's own memory, as an array that keeps `owner` alive."""
        executor = self.executor
        place = executor.binding(slot)
        if self._expected is not None:
            self._expected.note_view(slot)
        array = executor.call("view", executor.engine.view, place, owner)
        if not executor.busy:
            return array
        executor.defer(Enqueued(task, "view", [slot], array))
        return LATER

    def copy(self, task: T, src: Slot, dst: Slot) -> Any:
        """Copy a buffer's values to another."""
        places = self.executor.binding(src), self.executor.binding(dst)
        self._note_writes([dst])
        return self._enqueue(task, "copy", [src, dst], self.executor.engine.copy, *places)

    def fill(self, task: T, slot: Slot, value: float) -> Any:
        """Set every element of a buffer."""
        place = self.executor.binding(slot)
        self._note_writes([slot])
        return self._enqueue(task, "fill", [slot], self.executor.engine.fill, place, value)

    def _note_writes(self, slots: Iterable[Slot]) -> None:
        """Note that these buffers are written next: see `expected_runs`."""
        if self._expected is not None:
            self._expected.note_writes(slots)

    def warm(self, message: Warm, key: object) -> int:
        """Build the plans that are missing, and load their kernels. Returns how many."""
        wanted = self.state.graphs_to_warm(message)
        outcomes = {} if self.deferred is None else self.deferred.warmed_for(key)
        self.faults.inject("warm")
        built = 0
        for digest, graph in wanted.items():
            known = outcomes.get(digest)
            # With a build thread, a plan that is missing here was ready before, and was evicted or given back
            # meanwhile.
            if known is not None or (self.deferred is None and digest not in self.plans):
                self.host.note_progress()  # each build is progress
                with contextlib.suppress(UnsupportedGraph, OutOfMemory, QuarantinedRequest):
                    plan = self._plan(graph, known)
                    built += 1
                    self.host.note_progress()
                    self.executor.call(plan.tag, self.executor.engine.load, plan)
        return built

    def expect(self, cached: CachedMessage, bound: Bound, copied: Collection[int]) -> None:
        """Let the engine prepare a model's graph, so that its first run need not wait for that, if its plan
        is ready.

        Only a synchronous engine prepares it before the first run. Raises `CudnnActorError` if it cannot.

        Parameters
        ----------
        cached
            The `RunGraph` to which each run is equivalent.
        bound
            The slots on which it runs.
        copied
            The indices of the buffers to which each run's inputs are copied first.
        """
        plan = self.plans.peek(cached.lowered.graph.digest())
        if self._expected is None or plan is None or isinstance(plan, CudnnActorError):
            return
        if self.executor.synchronous:
            self._expected.of(cached, bound, plan, [(place, None) for place in copied])

    def _enqueue(
        self,
        task: T,
        tag: str,
        slots: Sequence[Slot],
        call: Callable[..., object],
        *args: Any,
        reply: Any = RECEIPT,
    ) -> Any:
        if self.faults.rule is not None:
            self.faults.inject(tag)
        self.executor.call(tag, call, *args)
        return self._answer_or_defer(task, tag, slots, reply)

    def _answer_or_defer(
        self, task: T, tag: str, slots: Sequence[Slot], reply: Any = RECEIPT, plan: Plan | None = None
    ) -> Any:
        """The answer to work that the engine was called for: now if it has run, else `LATER`."""
        executor = self._executor
        assert executor is not None
        if not executor.synchronous:
            executor.defer(Enqueued(task, tag, slots, reply, plan=plan))
            return LATER
        if reply is not RECEIPT:
            return reply
        now_ns = time.perf_counter_ns()
        self._note_length(tag, now_ns - task.started_ns)
        return self.host.receipt_for(task, tag, now_ns)

    def _note_length(self, tag: str, took_ns: int) -> None:
        """Note whether a run on a synchronous engine took long."""
        if took_ns > _LONG_RUN_NS:
            if tag in self._long_runs:
                return
            if len(self._long_runs) >= _MOST_LONG_RUNS:
                self._long_runs.clear()  # most belong to evicted plans; the others are soon known again
            self._long_runs.add(tag)
        elif self._long_runs:
            self._long_runs.discard(tag)
