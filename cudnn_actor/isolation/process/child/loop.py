"""A worker's main loop: it takes requests from the parent, runs them, and answers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np

from cudnn_actor.actors import Crash
from cudnn_actor.broker.execution_state import ExecutionState
from cudnn_actor.broker.message_cache import Bound
from cudnn_actor.broker.request_checks import bind_message
from cudnn_actor.engines.base import ContextDead, Engine
from cudnn_actor.execution.arriving import Arriving
from cudnn_actor.execution.executor import LATER
from cudnn_actor.execution.injection import fail_start
from cudnn_actor.execution.model_runs import ModelPlaces, Source
from cudnn_actor.execution.planning import BuildCrash
from cudnn_actor.execution.runner import Runner
from cudnn_actor.isolation.process.child.inbox import Inbox
from cudnn_actor.isolation.process.child.outbox import Outbox
from cudnn_actor.isolation.process.child.stages import Stages
from cudnn_actor.isolation.process.child.task import InternalTask, PlacedRun, WorkerTask
from cudnn_actor.isolation.process.cores import PROMPT_S, may_keep_one_busy
from cudnn_actor.isolation.process.wire import (
    Counted,
    Done,
    Dying,
    InjectFault,
    Nearing,
    ReadStaged,
    RunPlaced,
    WriteAllStaged,
    WriteStaged,
)
from cudnn_actor.memory import Slot
from cudnn_actor.protocol.errors import CudnnActorError
from cudnn_actor.protocol.messages.messages import (
    COMPUTE,
    ClearPlans,
    Copy,
    Explain,
    Fill,
    GetStatistics,
    Ping,
    Warm,
)
from cudnn_actor.protocol.messages.receipts import PlanCounts

__all__ = ["WorkerLoop"]

_BATCH = 64
"""Requests taken at a time."""
_NEARING = Nearing()

Task = WorkerTask | InternalTask


class WorkerLoop:
    """Runs requests of a parent and answers them. When it ends, it tells the parent why. The parent decides
    the outcome of the unanswered requests.

    It is the host of its runner. Other threads may call only `working_since`, `builds_since` and
    `number_in_work`.

    Parameters
    ----------
    state
        The state that running requests needs.
    make
        A function that makes the engine.
    inbox, outbox
        The objects that receive frames from the parent, and send frames to it.
    stages
        Staging memory for values.
    fails
        Whether the start must fail, as a fault plan asks.
    """

    def __init__(
        self,
        state: ExecutionState,
        make: Callable[[], Engine],
        inbox: Inbox,
        outbox: Outbox,
        stages: Stages,
        *,
        fails: bool,
    ) -> None:
        self.current: Task | None = None
        """The current request; None between requests."""
        self._state = state
        self._inbox = inbox
        self._outbox = outbox
        self._stages = stages
        self._fails = fails
        self._busy_since: float | None = None
        self._stopping = False
        self._ahead: tuple[tuple[int, int], Callable[[], object]] | None = None
        """The latest result of `answer_ahead`, with the number of its task and when that began. The task
        itself would keep what it runs."""
        self._runner: Runner[Task] = Runner(state, make, self, abandoned=threading.Event(), nudge=inbox.nudge)
        self._handlers: dict[type, Callable[[Any], Any]] = {
            **dict.fromkeys(COMPUTE, self._compute),
            RunPlaced: self._run_model,
            WriteStaged: self._write,
            WriteAllStaged: self._write_all,
            ReadStaged: self._read,
            Copy: lambda task: self._runner.copy(
                task, self._resolve(task.message.src, "src"), self._resolve(task.message.dst, "dst")
            ),
            Fill: lambda task: self._runner.fill(
                task, self._resolve(task.message.dst, "dst"), task.message.value
            ),
            Warm: self._warm,
            ClearPlans: lambda _: self._runner.clear_plans(),
            Explain: lambda task: self._runner.explain(task.message, task),
            InjectFault: lambda task: self._runner.faults.inject(task.message.tag),
            Ping: lambda _: state.generation,
            GetStatistics: self._count,
        }

    @property
    def engine(self) -> Engine:
        """The open engine."""
        return self._runner.executor.engine

    def create_arena(self, number: int, nbytes: int) -> int:
        """Make an arena. The caller owns its descriptor. Raises `CudnnActorError`, `Crash`."""
        return self._runner.executor.create_arena(number, nbytes)

    def import_arena(self, number: int, nbytes: int, descriptor: int) -> None:
        """Map another service's arena for reading. Raises `CudnnActorError`, `Crash`."""
        self._runner.executor.import_arena(number, nbytes, descriptor)

    def plan_counts(self) -> PlanCounts:
        """Counts of the plan cache. Any thread."""
        return self._runner.plans.counts

    def forget_plans(self, digests: Iterable[str]) -> None:
        """Drop the plans of these graphs. A request that needs one has it built again."""
        self._runner.forget_plans(digests)

    def stop(self) -> None:
        """End after the current request."""
        self._stopping = True

    def working_since(self) -> float | None:
        """Since when the current request, the device or a build thread has made no progress. Any thread."""
        mine, runs = self._busy_since, self._runner.working_since()
        if mine is None or runs is None:
            return runs if mine is None else mine
        return min(mine, runs)

    def builds_since(self) -> float | None:
        """Since when a build thread has made no progress; None while none builds. Any thread."""
        return self._runner.builds_since()

    def number_in_work(self) -> int:
        """The number of the current request; 0 for none. Any thread."""
        task = self.current
        return task.number if isinstance(task, WorkerTask) else 0

    def run(self, on_ready: Callable[[], None]) -> None:
        """Open the engine, call `on_ready`, and serve until the parent asks for the end.

        Any other reason to end is sent to the parent, and not raised.
        """
        runner = self._runner
        try:
            if self._fails:
                fail_start()
            runner.open()
            self._outbox.notes = self.engine.synchronous
            self._inbox.looks = not self.engine.synchronous and may_keep_one_busy()
            runner.awake_s = PROMPT_S if self._inbox.looks else 0.0
            on_ready()
            while not self._stopping:
                self._turn(self._poll())
            runner.outlast()
            self.flush()
            runner.close(wait=True)
        except BaseException as error:  # noqa: BLE001 - also SystemExit, when the parent has gone
            self._die(error)

    def _turn(self, wait: float | None) -> None:
        batch = self._inbox.take(_BATCH, wait)
        runner = self._runner
        if batch:
            deferred = runner.deferred
            while batch and not self._stopping:
                task = batch.popleft()
                if deferred is not None and (defer := deferred.defers(task)) is not None:
                    defer()
                else:
                    self._start(task)
            runner.fence()
        self.flush()

    def _poll(self) -> float | None:
        """Collect builds, start the requests that waited for them, and check the device's fences."""
        runner = self._runner
        runner.collect_builds()
        if runner.may_resume:
            for _ in range(_BATCH):
                if self._stopping or (task := runner.next_resumed()) is None:
                    break
                self._start(task)
            runner.fence()
            self.flush()
        if self._inbox.looks and runner.executor.take_near_end():
            self._outbox.say(_NEARING)  # while the device works, so it delays nothing
        pause = runner.settle()
        return 0.0 if runner.may_resume else pause

    def _start(self, task: Task) -> None:
        if not task.begin():
            assert isinstance(task, WorkerTask), "the service's own work is never withdrawn"
            self._outbox.note_dropped(task)
            return
        self.current = task
        self._busy_since = time.monotonic()
        self._runner.faults.rule = task.fault
        try:
            value = self._handlers.get(type(task.message), _refuse)(task)
        except Crash:
            raise
        except Exception as error:  # noqa: BLE001 - the answer to this one request
            self.refuse(task, error)
        else:
            if value is not LATER:
                self.answer(task, value)
        self.current = self._busy_since = None

    def _die(self, error: BaseException) -> None:
        """Send the answers so far, then the cause of the end. The process ends after this."""
        runner = self._runner
        digest = error.digest if isinstance(error, BuildCrash) else runner.digest_in_work
        runner.settle_done()
        self.flush()
        self._outbox.say(Dying(str(error) or repr(error), isinstance(error, ContextDead), digest))

    # Requests.

    def _resolve(self, ref: Any, field: str) -> Slot:
        return self._state.memory.resolve(ref, field)

    def _compute(self, task: Task) -> Any:
        cached = self._state.cached_message(task)
        bind_message(cached, self._state.memory)
        return self._runner.compute(task, cached, task)

    def _warm(self, task: Task) -> int:
        built = self._runner.warm(task.message, task)
        for run in self._inbox.runs_of({graph.body.digest() for graph in task.message.graphs}):
            with contextlib.suppress(CudnnActorError):  # its first run raises it
                self._runner.expect(run.cached, bind_message(run.cached, self._state.memory), run.copied)
        return built

    def _run_model(self, task: WorkerTask) -> Any:
        run, memory = task.found, self._state.memory
        assert type(run) is PlacedRun
        known, places = run.cached.bound, run.places
        if known is None or known.epoch != memory.epoch:
            known = bind_message(run.cached, memory)
        if places is None or places.bound is not known:
            places = run.places = self._places_of(run.message, known)
        return self._runner.run_model(task, run.cached, task, places=places)

    def _places_of(self, message: RunPlaced, known: Bound) -> ModelPlaces:
        sources: list[tuple[int, Source]] = [
            (place, self._stages.values(staged, known.slots[place].spec)) for place, staged in message.write
        ]
        sources += [(place, self._resolve(ref, "buffers")) for place, ref in message.copy_in]
        targets: list[tuple[int, Slot | np.ndarray | None]] = [
            (place, self._stages.array(staged, known.slots[place].spec)) for place, staged in message.read
        ]
        targets += [(place, self._resolve(ref, "into")) for place, ref in message.copy_out]
        # The parent holds the graph's own buffers as long as it sends requests that name the graph.
        slots = [slot for _, slot in (*sources, *targets) if isinstance(slot, Slot)]
        return ModelPlaces(bound=known, sources=sources, targets=targets, slots=slots, repeats=True)

    def _write(self, task: Task) -> Any:
        message: WriteStaged = task.message
        slot = self._resolve(message.dst, "dst")
        values = self._stages.values(message.values, slot.spec)
        if type(values) is Arriving and type(task) is WorkerTask:
            task.answer = values.answer
        return self._runner.write(task, slot, values)

    def _write_all(self, task: Task) -> Any:
        message: WriteAllStaged = task.message
        slots = [self._resolve(ref, "buffers") for ref in message.buffers]
        pairs = zip(message.values, slots, strict=True)
        return self._runner.write_all(task, slots, [self._stages.array(at, slot.spec) for at, slot in pairs])

    def _read(self, task: Task) -> Any:
        message: ReadStaged = task.message
        slot = self._resolve(message.src, "src")
        return self._runner.read(task, slot, self._stages.array(message.values, slot.spec))

    def _count(self, task: WorkerTask) -> Counted:
        plans, graphs = self._runner.plans.statistics(), self._state.messages.statistics()
        engine = self.engine
        return Counted(task.number, task.place, plans, graphs, engine.cudnn_version, engine.converted_bytes)

    # As the host of the runner.

    def receipt_for(self, task: Task, tag: str, now_ns: int) -> Any:
        """The facts from which the parent makes a receipt; None for the service's own work."""
        if isinstance(task, InternalTask):
            return None
        started_ns = task.started_ns
        return Done(task.number, task.place, tag, started_ns, (now_ns - started_ns) / 1e3)

    def answer_ahead(self, task: Task, tag: str) -> Callable[[], object] | None:
        """See `RunnerHost.answer_ahead`."""
        if isinstance(task, InternalTask) or self._outbox.notes:
            return None
        key = task.number, task.started_ns
        if self._ahead is None or self._ahead[0] != key:
            self._ahead = key, self._outbox.done_ahead(task, tag)
        return self._ahead[1]

    def answer(self, task: Task, value: Any) -> None:
        """Queue an answer."""
        if isinstance(task, InternalTask):
            self._outbox.internal_done(task.number, None)
        elif type(value) is Done:
            self._outbox.note_done(value)
        elif type(value) is Counted:
            self._outbox.give_counts(value)
        else:
            self._outbox.give(task, value)

    def refuse(self, task: Task, error: Exception) -> None:
        """Send an error."""
        if isinstance(task, InternalTask):
            self._outbox.internal_done(task.number, error)
        else:
            self._outbox.refuse(task, error)

    def note_progress(self) -> None:
        """Note for the watchdog that the current request made progress."""
        self._busy_since = time.monotonic()

    def flush(self) -> None:
        """Send the queued answers and log lines, because the next step may take long or end the process."""
        self._outbox.flush()


def _refuse(task: Task) -> NoReturn:
    """Raise the error that replaces a message which could not be decoded, or cannot be run."""
    raise task.message
