"""The actor: one thread that owns the engine, its stream and the plan cache.

Messages come in batches and run in order. Each is validated again here, at
the moment it is enqueued, against the memory table that only this thread
writes: a `Free` that was sent first is done first, so no request can pass it.
"""

from __future__ import annotations

import contextlib
import numbers
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cudnn_actor.actors import DEFERRED, Actor, Crash, Envelope
from cudnn_actor.actors.logs import Log
from cudnn_actor.engines.base import Engine, Plan
from cudnn_actor.executor import Executor, Work
from cudnn_actor.injection import Injection
from cudnn_actor.interruption import Interruption
from cudnn_actor.memory import Slot
from cudnn_actor.plans import PlanCache
from cudnn_actor.protocol.buffers import BufferRef
from cudnn_actor.protocol.errors import (
    InvalidRequest,
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
    Warm,
)
from cudnn_actor.protocol.receipts import Receipt, Statistics
from cudnn_actor.protocol.tensor import TensorSpec
from cudnn_actor.request_checks import (
    check_copy,
    check_fits_float,
    check_no_overlap,
    check_warm,
    require_type,
)
from cudnn_actor.state import ServiceState

__all__ = ["CudnnActor"]

log = Log("cudnn_actor")

_POLL_S = 20e-6
"""How often an asynchronous engine's fences are looked at."""
_LONG_RUN_NS = 200_000
"""A plan that took this long last time is worth a flush of the replies before it."""


class CudnnActor(Actor):
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
        super().__init__(mailbox=state.mailbox)
        self._generation = generation
        self.counters = state.counters
        self._state = state
        self._memory = state.memory
        self._make_engine = engine
        self._executor: Executor | None = None
        self._plans = PlanCache()
        self._faults = Injection(state.faults, self.flush, self.abandoned)
        self._filling: BufferRef | None = None
        self._handlers: dict[type, Callable[[Any], Any]] = {
            ConvFwd: self._compute,
            ConvBwdData: self._compute,
            ConvBwdFilter: self._compute,
            Allocate: self._allocate,
            Upload: self._upload,
            Download: self._download,
            Copy: self._copy,
            Fill: self._fill,
            Free: self._free,
            Ping: lambda _: self._generation,
            GetStatistics: lambda _: self._statistics(),
            Warm: self._warm,
            Drain: self._drain,
        }

    # Life.

    def on_start(self) -> None:
        """Open the engine and map the memory that earlier incarnations left."""
        self._faults.start()
        self._executor = Executor(self._make_engine(), self._memory, self.lease)
        self._executor.open()
        self._state.generation = self._generation

    def on_stop(self) -> None:
        """Finish what is enqueued and close the engine."""
        self._outlast_fences()
        self.flush()
        self._close_engine()

    def on_crash(self, error: BaseException, current: Envelope | None, waiting: list[Envelope]) -> None:
        """Judge every request that was running, and leave the others, in order, to the successor.

        Where the memory died with the context there is none: whoever waits gets `ContextLost`.
        """
        executor, mailbox = self._executor, self._state.mailbox
        outlives = executor is None or executor.engine.outlives_context
        interruption = Interruption(
            self._state, _cause(error), outlives_context=outlives, thread_lost=self.thread_lost
        )
        lost = [] if executor is None else executor.forget()
        running = [work.envelope for work in lost]
        if current is not None and all(current is not envelope for envelope in running):
            running.append(current)
        mailbox.restore(waiting)
        mailbox.restore([envelope for envelope in running if self._runs_again(envelope, interruption)])
        self._tear_unclaimed(lost, interruption)
        if not outlives:
            self._memory.lose_all()
            for envelope in mailbox.take(len(mailbox), 0.0):
                self.settle(envelope, None, interruption.context_lost())
        self.flush()
        if not self.thread_lost:
            self._close_engine()

    def _runs_again(self, envelope: Envelope, interruption: Interruption) -> bool:
        error = interruption.judge(envelope)
        if error is not None:
            self.settle(envelope, None, error)
        return error is None

    def _tear_unclaimed(self, lost: Sequence[Work], interruption: Interruption) -> None:
        """End the buffers that were being allocated: nobody has received their references."""
        for work in lost:
            if isinstance(work.reply, BufferRef):
                interruption.tear(work.reply)
        filling = self._filling
        if filling is not None:
            interruption.tear(filling)

    @property
    def thread_lost(self) -> bool:
        """Whether this actor was given up while its thread was still running."""
        return self.disowned and threading.current_thread() is not self.thread

    def _close_engine(self) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            try:
                executor.engine.close()
            except Exception:  # of a dead context, say: there is nothing more to be done with it
                log.exception("engine.close_failed")

    def on_lost(self) -> None:
        """Close the engine of a thread that was given up and came back: it is all that it may touch."""
        self._close_engine()

    # Messages.

    def on_receive(self, message: Any) -> Any:
        """Answer one message. Raises what the caller is to get."""
        handler = self._handlers.get(type(message))
        if handler is None:
            raise InvalidRequest(
                field="message",
                value=type(message).__name__,
                problem="is no message of this service",
                fix="send one of cudnn_actor.protocol.messages",
            )
        self._faults.meet(message)
        return handler(message)

    def _compute(self, message: Compute) -> Any:
        lowered = self._state.lowered(message)
        slots = [self._memory.resolve(getattr(message, name), name) for name in lowered.buffers]
        check_no_overlap(lowered, slots)
        plan = self._plan(lowered)
        executor = self._engine
        buffers = [executor.binding(slot) for slot in slots]
        for place, spec in lowered.views:
            buffers[place] = executor.bind(slots[place], spec)
        scalars = [float(getattr(message, name)) for name in lowered.scalars]
        if self._plans.last_run_ns(plan.tag) > _LONG_RUN_NS:
            self.flush()
        return self._run_engine(plan.tag, slots, executor.engine.execute, plan, buffers, scalars)

    def _plan(self, lowered: Lowered) -> Plan:
        digest = lowered.graph.digest()
        if self._state.quarantined and digest in self._state.quarantined:
            assert self.current is not None
            cause = self._state.quarantined[digest]
            raise QuarantinedRequest(request_id=self.current.number, digest=digest, cause=cause)
        self._faults.reject(self._engine.engine.name, digest)
        return self._plans.get(digest, lambda: self._engine.build(lowered.graph, self._state.workspace_limit))

    def _allocate(self, message: Allocate) -> Any:
        require_type("spec", message.spec, TensorSpec)
        assert self.current is not None
        if not self.current.wants_reply:
            raise InvalidRequest(
                field="message", value="Allocate", problem="is told, so nobody gets the buffer", fix="ask it"
            )
        if message.data is None:
            self._faults.strike("allocate")
            return self._engine.allocate(message.spec)
        self._filling = ref = self._engine.allocate(message.spec)
        try:
            answer = self._write("data", ref, message.data, reply=ref)
        except Crash:
            raise  # the last act ends the buffer
        except Exception:
            self._engine.free(ref)
            self._filling = None
            raise
        self._filling = None
        return answer

    def _upload(self, message: Upload) -> Any:
        return self._write("dst", message.dst, message.data)

    def _write(self, field: str, ref: BufferRef, data: Any, reply: BufferRef | None = None) -> Any:
        slot = self._memory.resolve(ref, field)
        require_type("data", data, np.ndarray)
        place = self._engine.binding(slot)
        return self._run_engine("upload", [slot], self._engine.engine.write, place, data, reply=reply)

    def _download(self, message: Download) -> Any:
        slot = self._memory.resolve(message.src, "src")
        self.flush()
        self._faults.strike("download")
        return self._engine.call("download", self._engine.engine.read, self._engine.binding(slot))

    def _copy(self, message: Copy) -> Any:
        src, dst = self._memory.resolve(message.src, "src"), self._memory.resolve(message.dst, "dst")
        check_copy(message, src, dst)
        places = self._engine.binding(src), self._engine.binding(dst)
        return self._run_engine("copy", [src, dst], self._engine.engine.copy, *places)

    def _fill(self, message: Fill) -> Any:
        slot = self._memory.resolve(message.dst, "dst")
        require_type("value", message.value, numbers.Real)
        check_fits_float(message.value)
        place = self._engine.binding(slot)
        return self._run_engine("fill", [slot], self._engine.engine.fill, place, message.value)

    def _free(self, message: Free) -> None:
        self._faults.strike("free")
        self._engine.free(message.buffer)

    def _warm(self, message: Warm) -> int:
        check_warm(message)
        wanted = [self._state.lowered(request) for request in message.messages]
        self._faults.strike("warm")
        built = 0
        for lowered in wanted:
            if lowered.graph.digest() not in self._plans:
                self.busy_since = time.monotonic()  # each build is progress
                with contextlib.suppress(UnsupportedGraph, OutOfMemory, QuarantinedRequest):
                    self._plan(lowered)
                    built += 1
        return built

    def _drain(self, _: Drain) -> Any:
        assert self.current is not None
        self._faults.strike("drain")
        if not self._engine.busy:
            return None
        self._engine.defer(Work(self.current, "drain", ()))
        return DEFERRED

    def _statistics(self) -> Statistics:
        state, counters, memory = self._state, self.counters, self._memory
        return Statistics(
            generation=state.generation,
            queued=len(state.mailbox),
            finished=counters.finished,
            failed=counters.failed,
            withdrawn=counters.withdrawn + state.mailbox.withdrawn,
            expired=counters.expired + state.mailbox.expired,
            replayed=state.replayed,
            restarts=state.restarts,
            live_buffers=memory.live_buffers,
            live_bytes=memory.live_bytes,
            arena_bytes=memory.arena_bytes,
            plans=self._plans.statistics(),
            dropped_replies=state.mailbox.dropped,
        )

    # The engine.

    @property
    def _engine(self) -> Executor:
        assert self._executor is not None, "messages come only between on_start and on_stop"
        return self._executor

    def _run_engine(
        self,
        tag: str,
        slots: Sequence[Slot],
        call: Callable[..., object],
        *args: Any,
        reply: BufferRef | None = None,
    ) -> Any:
        """Enqueue one operation; its reply at once, or later when the engine works asynchronously."""
        envelope, executor = self.current, self._engine
        assert envelope is not None
        self._faults.strike(tag)
        executor.call(tag, call, *args)
        if executor.synchronous:
            return reply or self._receipt(envelope, tag)
        executor.defer(Work(envelope, tag, slots, reply))
        return DEFERRED

    def _receipt(self, envelope: Envelope, tag: str) -> Receipt:
        """Proof that a request has just finished."""
        ran_ns = time.perf_counter_ns() - envelope.started_ns
        self._plans.note_run(tag, ran_ns)
        return Receipt(
            request_id=envelope.number,
            generation=self._generation,
            plan=tag,
            queue_us=(envelope.started_ns - envelope.admitted_ns) / 1e3,
            run_us=ran_ns / 1e3,
        )

    # Fences, for engines that work asynchronously.

    def on_batch_end(self) -> None:
        """Put one fence behind all that the batch enqueued."""
        if self._executor is not None and self._executor.busy:
            self.busy_since = time.monotonic()  # for the watchdog: this too may hang
            self._executor.fence()
            self.busy_since = None

    def poll(self) -> float | None:
        """Answer what the device has finished; ask to be called again while it works."""
        executor = self._executor
        if executor is None or executor.synchronous:
            return None
        if executor.busy:
            self.busy_since = executor.progress_s
        self._settle_finished(executor)
        # A device that does not get on is a hang like any other: the watchdog reads this between messages.
        self.busy_since = executor.progress_s if executor.busy else None
        return _POLL_S if executor.busy else None

    def _settle_finished(self, executor: Executor) -> None:
        for work in executor.finished():
            is_drain = type(work.envelope.message) is Drain
            self.settle(
                work.envelope, None if is_drain else work.reply or self._receipt(work.envelope, work.tag)
            )
        self.flush()

    def _outlast_fences(self) -> None:
        executor = self._engine
        executor.fence()
        while executor.busy:
            self._settle_finished(executor)
            if self.abandoned.wait(_POLL_S):
                raise Crash("its device had not finished when it was given up")


def _cause(error: BaseException) -> str:
    """What ended the actor, for people: in the words of whoever gave it up, where somebody did."""
    return error.reason if isinstance(error, ServiceStopped) else str(error) or repr(error)
