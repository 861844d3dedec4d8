"""The actor: one thread that owns the engine, its stream and the plan cache.

Messages come in batches and run in order. Each is validated again here, at
the moment it is enqueued, against the memory table that only this thread
writes: a `Free` that was sent first is done first, so no request can pass it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from cudnn_actor.actors import DEFERRED, Envelope
from cudnn_actor.broker.checks import check_no_overlap, check_warm, not_a_message
from cudnn_actor.broker.footprints import footprint
from cudnn_actor.broker.interruption import Interruption
from cudnn_actor.broker.progress import Progress
from cudnn_actor.broker.state import Bound, ServiceState
from cudnn_actor.engines.base import Engine, Plan
from cudnn_actor.protocol.buffers import BufferRef
from cudnn_actor.protocol.errors import (
    CudnnActorError,
    ExecutionFailed,
    OutcomeUnknown,
    OutOfMemory,
    QuarantinedRequest,
    ServiceStopped,
    UnsupportedGraph,
)
from cudnn_actor.protocol.lowering import Lowered
from cudnn_actor.protocol.messages import (
    Allocate,
    Compute,
    ConvBwdData,
    ConvBwdFilter,
    ConvFwd,
    Copy,
    Download,
    Drain,
    Fill,
    Free,
    GetStatistics,
    Ping,
    Upload,
    View,
    Warm,
)
from cudnn_actor.worker.deferred import DeferredWork
from cudnn_actor.worker.executor import Work, reproducible
from cudnn_actor.worker.memory_messages import MemoryActor
from cudnn_actor.worker.planning import BuildCrash, Outcome, Planner

__all__ = ["CudnnActor"]

_LONG_RUN_NS = 200_000
"""A plan that took this long last time is worth a flush of the replies before it."""


class CudnnActor(MemoryActor):
    """Owns an engine and answers a service's messages. Started by its supervisor, once per incarnation.

    Parameters
    ----------
    state
        What outlives this incarnation.
    engine
        Makes the engine; called on the actor's thread.
    generation
        Which incarnation this is, counted from 1.
    """

    def __init__(self, state: ServiceState, engine: Callable[[], Engine], generation: int = 1) -> None:
        super().__init__(state, engine, generation)
        self._planner: Planner | None = None
        self._deferred: DeferredWork | None = None
        """Where messages wait that are deferred; None where plans are built on the spot."""
        self._handlers: dict[type, Callable[[Any], Any]] = {
            ConvFwd: self._compute,
            ConvBwdData: self._compute,
            ConvBwdFilter: self._compute,
            Allocate: self._allocate,
            Upload: self._upload,
            Download: self._download,
            View: self._view,
            Copy: self._copy,
            Fill: self._fill,
            Free: self._free,
            Ping: lambda _: self._generation,
            GetStatistics: lambda _: state.statistics(self._plans.statistics()),
            Warm: self._warm,
            Drain: self._drain,
        }

    # Life.

    def on_start(self) -> None:
        """Open the engine, map the memory that earlier incarnations left, and start the build thread."""
        self._faults.start()
        self._open_engine()
        self._planner = Planner(self._engine, self._plans, self._state, self.mailbox.nudge)
        if self._planner.builds_elsewhere:
            self._deferred = DeferredWork(self._state, self._planner)
        self._state.generation = self._generation

    def on_stop(self) -> None:
        """Finish what is enqueued and close the engine. What was deferred is handed back."""
        if self._build_hangs():
            self._blame_build(self._digest_in_work, "its build did not end")
        self._outlast_fences()
        self.flush()
        self._close(wait=not self.abandoned.is_set())

    def on_crash(self, error: BaseException, current: Envelope | None, waiting: list[Envelope]) -> None:
        """Judge every request that was running, and leave the others, in order, to the successor.

        Where the memory died with the context there is none: whoever waits gets `ContextLost`. Nor is there
        one while the thread does not end: the service stops.
        """
        if self.lost:
            self._answer_for_lost_thread(_cause(error), current, waiting)
            return
        executor, mailbox = self._executor, self._state.mailbox
        outlives = executor is None or executor.engine.outlives_context
        interruption = Interruption(
            self._state, _cause(error), outlives_context=outlives, may_still_write=False
        )
        if isinstance(error, BuildCrash):
            self._blame_build(error.digest, _cause(error))
        elif self._build_hangs():
            self._blame_build(self._digest_in_work, _cause(error))
        freed: list[BufferRef] = []
        lost: list[Work] = []
        if executor is not None:
            self._settle_done(executor)
            freed = executor.revive_freed() if outlives else []
            lost = executor.forget()
        running = [work.envelope for work in lost]
        if current is not None and all(current is not envelope for envelope in running):
            running.append(current)
        again = self._judge(running, interruption)
        self._tear_unclaimed(lost, interruption)
        mailbox.restore(waiting)
        mailbox.restore([Envelope(Free(buffer=ref)) for ref in freed if self._memory.is_live(ref)])
        mailbox.restore(again)
        if not outlives:
            self._memory.lose_all()
            for envelope in mailbox.take(len(mailbox), 0.0):
                self.settle(envelope, None, interruption.context_lost())
        self.flush()
        self._close(wait=False)

    def _answer_for_lost_thread(self, cause: str, current: Envelope | None, waiting: list[Envelope]) -> None:
        """Answer what may still be writing, and leave the others to the service's end.

        On the supervisor's thread. The memory table and the engine are the lost thread's: they stay as they
        are.
        """
        running = [] if self._executor is None else [work.envelope for work in self._executor.unfinished()]
        if current is not None and all(current is not envelope for envelope in running):
            running.append(current)
        ended: list[Envelope] = []
        for envelope in running:
            if footprint(envelope.message, self._state.lowered).writes:
                why = "its thread has not ended and may still write"
                error = OutcomeUnknown(request_id=envelope.number, cause=cause, why=why)
                self.settle(envelope, None, error)
            else:
                ended.append(envelope)
        self._state.mailbox.restore([*ended, *waiting])
        if self._planner is not None:
            self._planner.close(wait=False)

    def _judge(self, running: list[Envelope], interruption: Interruption) -> list[Envelope]:
        """Answer those that cannot run again; returns the others, in order."""
        again = []
        for envelope, error in interruption.judge_all(running):
            if error is None:
                again.append(envelope)
            else:
                self.settle(envelope, None, error)
        return again

    def _tear_unclaimed(self, lost: Sequence[Work], interruption: Interruption) -> None:
        """End the buffers that were being allocated: nobody has received their references."""
        for work in lost:
            if isinstance(work.reply, BufferRef):
                interruption.tear(work.reply)
        filling = self._filling
        if filling is not None:
            interruption.tear(filling)

    def _close(self, *, wait: bool) -> None:
        if self._planner is not None:
            self._planner.close(wait=wait)
        self._close_engine()

    def on_late_end(self) -> None:
        """Close the engine."""
        self._close(wait=False)

    def working_since(self) -> float | None:
        """Since when the message in work, the device or the build thread has not got on; the oldest."""
        mine, planner = super().working_since(), self._planner
        built = None if planner is None else planner.working_since()
        return min((since for since in (mine, built) if since is not None), default=None)

    def progress(self) -> Progress:
        """How its work gets on. Any thread; never blocks."""
        since = self.working_since()
        return Progress(working=since is not None, last_s=self.last_turn_s if since is None else since)

    def _build_hangs(self) -> bool:
        """Whether it is for the build thread that this actor was given up."""
        since = None if self._planner is None else self._planner.working_since()
        return self.abandoned.is_set() and since is not None and since == self.working_since()

    @property
    def _digest_in_work(self) -> str | None:
        return None if self._planner is None else self._planner.digest_in_work

    def _blame_build(self, digest: str | None, cause: str) -> None:
        """Note which graph's build ended this incarnation: the second time it is quarantined."""
        if digest is not None:
            self._state.blame_build(digest, cause)

    # Messages that wait for something else than their turn.

    def defers(self, envelope: Envelope) -> Callable[[], None] | None:
        """Whether a message must wait for a plan, or behind one that does."""
        return None if self._deferred is None else self._deferred.defers(envelope)

    def take_deferred(self) -> list[Envelope]:
        """What was deferred, in order: it has not started."""
        return [] if self._deferred is None else self._deferred.clear()

    def poll(self) -> float | None:
        """Look after builds, those who wait for them, and the device."""
        deferred = self._deferred
        if deferred is not None:
            self._look_after(deferred)
        pause = super().poll()
        return 0.0 if deferred is not None and deferred.may_resume else pause

    def _look_after(self, deferred: DeferredWork) -> None:
        assert self._planner is not None
        if self._planner.has_results:
            self.busy_since = time.monotonic()  # taking their workspace may wait for the device
            self._planner.collect()
            self.busy_since = None
        if deferred.may_resume:
            for _ in range(self.batch_limit):
                if not self.resume(deferred.take):
                    break
            self.on_batch_end()
            self.flush()

    # Messages.

    def on_receive(self, message: Any) -> Any:
        """Answer one message. Raises what the caller is to get."""
        handler = self._handlers.get(type(message))
        if handler is None:
            raise not_a_message(message)
        if self._faults.scripted:
            self._faults.meet(message)
        return handler(message)

    def _compute(self, message: Compute) -> Any:
        seen = self._state.seen(message)
        bound = seen.bound
        if bound is None or bound.ends != self._memory.ends:
            bound = seen.bound = self._bind(message, seen.lowered)
        plan = self._plan(seen.lowered, self._found())
        executor = self._engine
        if executor.synchronous and self._plans.last_run_ns(plan.tag) > _LONG_RUN_NS:
            self.flush()
        buffers = [slot.binding for slot in bound.slots]  # `_bind` saw to it, and none has ended since
        for place, spec in seen.lowered.views:
            buffers[place] = executor.bind(bound.slots[place], spec)
        execute = executor.engine.execute
        try:
            return self._run_engine(plan.tag, bound.slots, execute, plan, buffers, bound.scalars)
        except ExecutionFailed as error:
            raise reproducible(error, seen.lowered.graph) from error

    def _bind(self, message: Compute, lowered: Lowered) -> Bound:
        """What a message runs on. Raises `StaleBufferError`, `InvalidRequest`."""
        ends = self._memory.ends
        slots = [self._memory.resolve(getattr(message, name), name) for name in lowered.buffers]
        check_no_overlap(lowered, slots)
        for slot in slots:
            self._engine.binding(slot)
        return Bound(ends, slots, [float(getattr(message, name)) for name in lowered.scalars])

    def _found(self) -> Outcome | None:
        """The request's plan, where it was looked up before it started."""
        assert self.current is not None
        return None if self._deferred is None else self._deferred.found_for(self.current)

    def _plan(self, lowered: Lowered, known: Outcome | None = None) -> Plan:
        assert self.current is not None
        if (error := self._state.why_quarantined(lowered, self.current.number)) is not None:
            raise error
        if self._faults.scripted:
            self._faults.reject(self._engine.engine.name, lowered)
        if known is None:
            assert self._planner is not None
            return self._planner.here(lowered.graph)
        if isinstance(known, CudnnActorError):
            raise known.again()
        return known

    def _warm(self, message: Warm) -> int:
        check_warm(message)
        graphs = [self._state.lowered(request) for request in message.messages]
        wanted = {lowered.graph.digest(): lowered for lowered in graphs}
        assert self.current is not None
        outcomes = {} if self._deferred is None else self._deferred.warmed_for(self.current)
        self._faults.strike("warm")
        built = 0
        for digest, lowered in wanted.items():
            known = outcomes.get(digest)
            if known is not None or digest not in self._plans:
                self.busy_since = time.monotonic()  # each build is progress
                with contextlib.suppress(UnsupportedGraph, OutOfMemory, QuarantinedRequest):
                    self._plan(lowered, known)
                    built += 1
        return built

    def _drain(self, _: Drain) -> Any:
        assert self.current is not None
        self._faults.strike("drain")
        if not self._engine.busy:
            return None
        # Late, so that it is answered behind all whose answers are late.
        self._engine.defer(Work(self.current, "drain", (), late=lambda: None))
        return DEFERRED


def _cause(error: BaseException) -> str:
    """What ended the actor, for people: in the words of whoever gave it up, where somebody did."""
    return error.reason if isinstance(error, ServiceStopped) else str(error) or repr(error)
