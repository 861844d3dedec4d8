"""The actor of thread isolation: one thread with the broker, the engine, its stream and the plan cache.

Messages come in batches and are started in order. The broker answers messages that need only bookkeeping. It
checks every other message just before it is enqueued, against the memory table that only this thread writes.
So a `Free` takes effect before any request that was sent after it is checked. The runner does the rest.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cudnn_actor.actors import DEFERRED, Actor, Crash, Envelope
from cudnn_actor.actors.logs import Log
from cudnn_actor.broker import Broker, Work
from cudnn_actor.broker.deployments import Deployed
from cudnn_actor.broker.progress import Progress
from cudnn_actor.broker.service_state import Forget, ServiceState
from cudnn_actor.engines.base import Engine
from cudnn_actor.execution.injection import fail_start
from cudnn_actor.execution.model_runs import ModelPlaces
from cudnn_actor.execution.planning import BuildCrash
from cudnn_actor.execution.runner import Runner
from cudnn_actor.isolation.staging import Staging
from cudnn_actor.memory import Slot
from cudnn_actor.protocol.errors import (
    ContextLost,
    CudnnActorError,
    OutcomeUnknown,
    ServiceStopped,
)
from cudnn_actor.protocol.messages.messages import (
    Allocate,
    ClearPlans,
    Copy,
    Download,
    Explain,
    Fill,
    Free,
    GetStatistics,
    Ping,
    RunModel,
    Upload,
    View,
    Warm,
    WriteWeights,
)
from cudnn_actor.protocol.messages.operands import operands
from cudnn_actor.protocol.messages.receipts import PlanCounts, Receipt, Statistics
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["CudnnActor"]

log = Log("cudnn_actor")


class CudnnActor(Actor):
    """Owns an engine and answers a service's messages. Started by its supervisor, once per incarnation.

    It is the host of its broker and of its runner.

    Parameters
    ----------
    state
        The state that outlives this incarnation.
    engine
        A function that makes the engine. It is called on the actor's thread.
    generation
        Which incarnation this is, counted from 1.
    """

    has_views = True

    def __init__(self, state: ServiceState, engine: Callable[[], Engine], generation: int = 1) -> None:
        super().__init__(mailbox=state.mailbox)
        self.counters = state.counters
        self.service = state.name
        self._state = state
        self._generation = generation
        self._broker: Broker[Work] = Broker(state, self._post, self, Work)
        self._runner: Runner[Work] = Runner(
            state,
            engine,
            self,
            abandoned=self.abandoned,
            nudge=state.mailbox.nudge,
            note_deferred=self._note_deferred,
        )
        self._faults = self._runner.faults
        self._staging: Staging | None = None
        """Memory that was lent to callers; None before the first."""
        self._work: Work | None = None
        """The work that is running, or ran last in this batch."""
        self._crashed = False
        self._in_runner = 0
        """How many messages the runner has deferred."""
        self._handlers: dict[type, Callable[[Work], Any]] = {
            Allocate: lambda work: self._runner.write(work, work.slots[0], work.request.data, work.ref),
            Upload: lambda work: self._runner.write(work, work.slots[0], work.request.data),
            Download: lambda work: self._runner.read(work, work.slots[0]),
            WriteWeights: lambda work: self._runner.write_all(work, work.slots, work.request.values),
            View: lambda work: self._runner.view(work, work.slots[0], state.memory.lend(work.slots[0])),
            Copy: lambda work: self._runner.copy(work, *work.slots),
            Fill: lambda work: self._runner.fill(work, work.slots[0], work.request.value),
            Warm: self._warm,
            ClearPlans: lambda _: self._runner.clear_plans(),
            Explain: lambda work: self._runner.explain(work.request, work.envelope),
            Ping: lambda _: self._generation,
            GetStatistics: self._count,
        }

    # Life.

    def on_start(self) -> None:
        """Open the engine, map the memory that earlier incarnations left, and start the build thread."""
        faults = self._state.faults
        if faults is not None and faults.on_start() is not None:
            fail_start()
        memory = self._state.memory
        memory.forget_bindings()
        self._runner.open(memory.arenas())
        self._state.generation = self._generation

    def on_stop(self) -> None:
        """Finish what is enqueued and close the engine. Deferred messages go back to the mailbox."""
        if self._build_hangs():
            self._state.blame_build(self._runner.digest_in_work, "its build did not end")
        self._runner.outlast()
        self._broker.settle_drains()
        self.flush()
        self._runner.close(wait=not self.abandoned.is_set())
        self._close_staging()

    def on_crash(self, error: BaseException, current: Envelope | None, waiting: list[Envelope]) -> None:
        """Answer every request that was running, or let it run again; leave the others to the successor.

        All are left in order. There is no successor in two cases. If the memory died with the context,
        everything pending fails with `ContextLost`. If the thread does not end, the service stops.
        """
        runner, mailbox = self._runner, self._state.mailbox
        if self.lost:
            self._answer_for_lost_thread(_cause(error), current, waiting)
            return
        self._crashed = True
        cause = _cause(error)
        if isinstance(error, BuildCrash):
            self._state.blame_build(error.digest, cause)
        elif self._build_hangs():
            self._state.blame_build(runner.digest_in_work, cause)
        survives = not runner.is_open or runner.executor.engine.outlives_context
        runner.settle_done()
        running = self._running(current)
        again, _ = self._broker.handle_crash(running, cause, may_still_write=False, memory_survives=survives)
        freed = self._revive(again)
        for work in again:
            self._broker.end_unreceived(work)
        if runner.is_open:
            runner.executor.forget()
        begun = [one for one in self._broker.take_waiting() if one is not current]
        mailbox.restore(sorted([*begun, *waiting], key=lambda envelope: envelope.number))
        mailbox.restore([Envelope(Free(buffer=ref)) for ref in freed])
        mailbox.restore([work.envelope for work in again])
        if not survives:
            self._lose_all(cause)
        self.flush()
        runner.close(wait=False)
        self._close_staging()

    def _running(self, current: Envelope | None) -> list[Work]:
        """The requests that have begun, in order: those on the device, and the one being handled."""
        runner = self._runner
        running = [one.task for one in runner.executor.unfinished_work()] if runner.is_open else []
        if current is not None and all(current is not work.envelope for work in running):
            work = self._work
            if work is None or work.envelope is not current:
                work = Work(current, current.number, current.message)
            running.append(work)
        return running

    def _revive(self, again: Sequence[Work]) -> list[BufferRef]:
        """Undo the frees of buffers that these requests use. They are freed once these have run again."""
        memory = self._state.memory
        used = {ref.slot: ref for work in again for ref in operands(work.message).values()}
        return [ref for ref in used.values() if memory.revive(ref) and memory.is_live(ref)]

    def _lose_all(self, cause: str) -> None:
        mailbox = self._state.mailbox
        self._state.memory.lose_all()
        lost = ContextLost(status="context lost", detail=cause)
        for envelope in mailbox.take(len(mailbox), 0.0):
            self.settle(envelope, None, lost)

    def _answer_for_lost_thread(self, cause: str, current: Envelope | None, waiting: list[Envelope]) -> None:
        """Fail the requests that may still be writing. The others are answered when the service ends.

        Runs on the supervisor's thread. The memory table and the engine still belong to the lost thread, so
        this leaves them untouched.
        """
        ended: list[Envelope] = []
        for work in self._running(current):
            if work.footprint(self._state.lower).writes:
                why = "its thread has not ended and may still write"
                error = OutcomeUnknown(request_id=work.number, cause=cause, why=why)
                self.settle(work.envelope, None, error)
            else:
                ended.append(work.envelope)
        waiting_here = [one for one in self._broker.take_waiting() if one is not current]
        self._state.mailbox.restore([*ended, *waiting_here, *waiting])
        self._runner.abandon_builds()

    def on_late_end(self) -> None:
        """Close the engine."""
        self._runner.close(wait=False)
        self._close_staging()

    def working_since(self) -> float | None:
        """Since when the current message, the device or a build thread has made no progress: the earliest."""
        mine, runs = self.busy_since, self._runner.working_since()
        if mine is None or runs is None:
            return runs if mine is None else mine
        return min(mine, runs)

    def progress(self) -> Progress:
        """The progress of its work. Any thread; never blocks."""
        since = self.working_since()
        return Progress(working=since is not None, last_s=self.last_turn_s if since is None else since)

    @property
    def in_flight(self) -> int:
        """The messages that have begun and are not answered. Any thread.

        The number may be half a turn old: only the lengths of lists are read.
        """
        runs = self._runner.executor.unfinished_count if self._runner.is_open else 0
        return runs + (self.current is not None)

    @property
    def plans(self) -> PlanCounts:
        """Counts of its plan cache. Any thread."""
        return self._runner.plans.counts if self._runner.is_open else PlanCounts()

    def _build_hangs(self) -> bool:
        """Whether this actor was given up because the build thread made no progress."""
        since = self._runner.builds_since()
        return self.abandoned.is_set() and since is not None and since == self.working_since()

    # Turns.

    def defers(self, envelope: Envelope) -> Callable[[], None] | None:
        """A function that defers a message which must wait: for runs that read a buffer that it writes, for a
        plan, or for another message. None if it need not wait."""
        if self._broker.held.must_wait(envelope):
            return functools.partial(self._hold_back, envelope)
        deferred = self._runner.deferred  # in one call: this is asked of each message
        return None if deferred is None else deferred.defers(envelope)

    def take_deferred(self) -> list[Envelope]:
        """Remove and return the deferred messages, in order. None of them has started."""
        deferred = [*self._runner.take_deferred(), *self._broker.held.take()]
        return sorted(deferred, key=lambda envelope: envelope.number)

    def _hold_back(self, envelope: Envelope) -> None:
        self._broker.held.add(envelope)
        self._note_deferred(self._in_runner)

    def _next_resumed(self) -> Envelope | None:
        """The next message that has waited for its plan, and need not be held back."""
        envelope: Envelope | None
        while (envelope := self._runner.next_resumed()) is not None and self._broker.held.must_wait(envelope):
            self._hold_back(envelope)
        return envelope

    def on_batch_end(self) -> None:
        """Put one fence behind all that the batch enqueued."""
        self._work = None  # keep nothing of a batch after its turn
        if not self._runner.is_prompt:
            self._runner.fence()
        if self._staging is not None and self._staging.has_ended:
            self._take_back(self._staging)

    def poll(self) -> float | None:
        """Collect builds, start the requests that waited for them, and check the device's fences."""
        runner, pause = self._runner, None
        if not runner.is_prompt:
            runner.collect_builds()
            if runner.may_resume:
                for _ in range(self.batch_limit):
                    if not self.resume(self._next_resumed):
                        break
                self.on_batch_end()
                self.flush()
            pause = runner.settle()
        if self._broker.has_due:
            self._broker.settle_waiting()
            self._note_deferred(self._in_runner)
            self.flush()
        return 0.0 if not runner.is_prompt and runner.may_resume else pause

    # Messages.

    def on_receive(self, message: Any) -> Any:
        """Answer the current message. Raises the error for its caller."""
        envelope = self.current
        assert envelope is not None, "a message is handled in its turn"
        broker, injected = self._broker, False
        work: Work | None = None
        try:
            while True:
                work = self._work = broker.take_up(envelope, injected=injected)
                if work is None:
                    if not broker.arenas.take_waiting():
                        return DEFERRED  # the broker has answered it
                else:
                    self._faults.rule = work.fault
                    if not work.injects:
                        break
                    self._faults.inject(type(message).__name__.lower())
                injected = True  # start it again: its fault has been injected, or its arena has been made
            if work.run is not None:
                return self._run_model(work, envelope)
            if work.cached is not None:
                return self._runner.compute(work, work.cached, envelope)
            return self._handlers[type(work.request)](work)
        except Crash:
            raise  # `on_crash` judges it
        except Exception as error:
            told = self._error_of(envelope, work, error)
            if told is error:
                raise
            raise told from error

    def _count(self, _work: Work) -> Statistics:
        plans, engine = self._runner.plans.statistics(), self._runner.executor.engine
        return self._state.statistics(plans, engine.cudnn_version, engine.converted_bytes)

    def _warm(self, work: Work) -> int:
        built = self._runner.warm(work.request, work.envelope)
        for deployed in work.warmed:
            if deployed.ended:  # while the plans were built
                continue
            deployed.bind(self._state.memory)
            assert deployed.cached.bound is not None
            with contextlib.suppress(CudnnActorError):  # its first run raises it
                self._runner.expect(deployed.cached, deployed.cached.bound, deployed.copied_places)
        return built

    def _run_model(self, work: Work, envelope: Envelope) -> Any:
        run, memory = work.run, self._state.memory
        assert run is not None
        message: RunModel = work.request
        deployed = run.deployed
        assert deployed is not None
        deployed.bind(memory)
        sources: Sequence[tuple[int, Slot | np.ndarray]] = deployed.arrays_of(message, run.drawn)
        if run.buffers:
            sources = [*sources, *((place, memory.resolve(ref)) for place, ref in run.copy_in)]
        named = deployed.outputs
        targets: Sequence[tuple[int, Slot | np.ndarray | None]] = deployed.results
        if run.into:
            named = run.returned_outputs
            given = ((place, memory.resolve(ref, "into")) for place, ref in run.copy_out)
            targets = [*((place, None) for place in named.values()), *given]

        def answer(arrays: list[np.ndarray]) -> dict[str, np.ndarray]:
            return deployed.finish(dict(zip(named, arrays, strict=True)))

        assert run.cached.bound is not None
        places = ModelPlaces(
            bound=run.cached.bound,
            sources=sources,
            targets=targets,
            slots=work.slots,
            on_host=not (run.buffers or run.into),
        )
        return self._runner.run_model(work, run.cached, envelope, places=places, answer=answer)

    def _error_of(self, envelope: Envelope, work: Work | None, error: Exception) -> Exception:
        """The error for the caller of a message that could not be started, or whose work has failed."""
        if work is None:
            work = Work(envelope, envelope.number, envelope.message)
        else:
            error = self._state.complete_error(error, envelope.message)
        self._broker.end_unreceived(work)
        if envelope.crashes and isinstance(error, CudnnActorError):
            return self._broker.interrupted.error_of_second_run(work, error)
        return error

    # As the host of the broker.

    def waits_for(self, number: int) -> bool:
        """Whether any work with a lower number than this one is unfinished."""
        if not self._runner.is_open:
            return False
        return any(one.task.number < number for one in self._runner.executor.unfinished_work())

    def create_arena(self, number: int, nbytes: int) -> None:
        """Let the engine make an arena, now. Raises `Crash`."""
        broker = self._broker
        try:
            descriptor = self._runner.executor.create_arena(number, nbytes)
        except CudnnActorError as error:
            if self.lost:
                raise Crash("came back after it had been given up") from error
            broker.arenas.note_refused(error)
            return
        if self.lost:
            os.close(descriptor)
            raise Crash("came back after it had been given up")
        try:
            broker.arenas.note_made(descriptor)
        except ServiceStopped:  # it has been given up since
            os.close(descriptor)
            raise

    def import_arena(self, number: int, nbytes: int, descriptor: int) -> None:
        """Let the engine map another service's arena, now. Raises `Crash`."""
        try:
            self._runner.executor.import_arena(number, nbytes, descriptor)
        except CudnnActorError as error:
            if self.lost:
                raise Crash("came back after it had been given up") from error
            self._broker.arenas.note_refused(error)
            return
        if self.lost:
            raise Crash("came back after it had been given up")
        self._broker.arenas.note_imported()

    def drop_import(self, number: int) -> None:
        """Let the engine unmap an imported arena, as it unmaps an arena of its own."""
        self.drop_arena(number)

    def forget(self, message: Forget) -> None:
        """Drop plans. Graphs are kept by the service's own cache alone."""
        self._runner.forget_plans(message.plans)

    def clear_plans(self) -> None:
        """Do nothing: there is one engine, whose runner is asked next."""

    @property
    def lent_bytes(self) -> int:
        """Bytes of the staging arrays that callers have."""
        return 0 if self._staging is None else self._staging.lent_bytes

    def lend(self, spec: TensorSpec) -> np.ndarray:
        """An array in memory that the engine reads directly, for a caller."""
        if self._staging is None:
            self._staging = Staging(self._pin, self._unpin)
        return self._staging.lend(spec.dims, spec.dtype.numpy)

    @staticmethod
    def _take_back(staging: Staging) -> None:
        """Free lent memory whose arrays have been collected. Blocks if that unpins a segment."""
        try:
            staging.take_back()
        except CudnnActorError as error:  # the segment stays, and is tried again with the next one
            log.warning("staging.not_unpinned", error=str(error))

    def _close_staging(self) -> None:
        """Forget the memory that was lent; callers' arrays keep their memory. The engine has unpinned it."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()

    def _pin(self, segment: int, _nbytes: int, _descriptor: int) -> None:
        assert self._staging is not None
        executor = self._runner.executor
        executor.call("staging", executor.engine.pin, self._staging.memory(segment))

    def _unpin(self, segment: int) -> None:
        assert self._staging is not None
        executor = self._runner.executor
        executor.call("staging", executor.engine.unpin, self._staging.memory(segment))

    def forget_deployed(self, deployed: Deployed) -> None:
        """Do nothing: only the plan of a model's graph is kept, which other graphs may share."""

    def drop_arena(self, number: int) -> None:
        """Let the engine unmap an arena. After a crash, closing the engine unmaps all arenas."""
        if not self._crashed:
            self._runner.executor.drop_arena(number)

    # As the host of the runner.

    def _note_deferred(self, count: int) -> None:
        self._in_runner = count
        self._state.mailbox.deferred = count + len(self._broker.held)

    def note_progress(self) -> None:
        """Note for the watchdog that the current message made progress."""
        self.busy_since = time.monotonic()

    def answer_ahead(self, task: Work, tag: str) -> None:
        """See `RunnerHost.answer_ahead`: no answer is ahead here."""

    def receipt_for(self, task: Work, tag: str, now_ns: int) -> Receipt:
        """The receipt of a finished request."""
        envelope = task.envelope
        started_ns = envelope.started_ns
        return Receipt(
            request_id=envelope.number,
            generation=self._generation,
            plan=tag,
            queue_us=(started_ns - envelope.admitted_ns) / 1e3,
            run_us=(now_ns - started_ns) / 1e3,
        )

    def answer(self, task: Work, value: Any) -> None:
        """Answer a request."""
        self.settle_together(task.envelope, value)

    def refuse(self, task: Work, error: Exception) -> None:
        """Fail a request."""
        self._answer_error(task.envelope, self._state.complete_error(error, task.request))


def _cause(error: BaseException) -> str:
    """Why the actor ended, as text. If it was given up, the reason that was given then."""
    return error.reason if isinstance(error, ServiceStopped) else str(error) or repr(error)
