"""The actor: one thread that owns the engine, its stream and the plan cache.

Messages come in batches and run in order. Each is validated again here, at
the moment it is enqueued, against the memory table that only this thread
writes: a `Free` that was sent first is done first, so no request can pass it.
"""

from __future__ import annotations

import contextlib
import numbers
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import structlog

from cudnn_actor.actors import DEFERRED, Actor, Crash, Envelope
from cudnn_actor.engines.base import Engine, EngineFailure, Fence, Plan, StickyError
from cudnn_actor.memory import Slot
from cudnn_actor.plans import PlanCache
from cudnn_actor.protocol.buffers import BufferRef
from cudnn_actor.protocol.errors import (
    ContextLost,
    CudnnActorError,
    ExecutionFailed,
    InvalidRequest,
    OutcomeUnknown,
    OutOfMemory,
    QuarantinedRequest,
    StaleReason,
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
from cudnn_actor.recovery import Verdict, judge
from cudnn_actor.state import ServiceState
from cudnn_actor.supervision import Fault, FaultRule

__all__ = ["CudnnActor"]

_POLL_S = 20e-6
"""How often an asynchronous engine's fences are looked at."""
_IDLE_ARENAS = 1
"""Empty arenas kept for the next allocation; the others go back to the system."""
_LONG_RUN_NS = 200_000
"""A plan that took this long last time is worth a flush of the replies before it."""

log = structlog.get_logger("cudnn_actor")


class _Work(NamedTuple):
    """A request that the engine has enqueued and whose fence is still to come."""

    envelope: Envelope
    reply: Any
    slots: tuple[Slot, ...]


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
        self._engine: Engine | None = None
        self._synchronous = True
        self._plans = PlanCache()
        self._last_run_ns: dict[str, int] = {}
        self._fault: FaultRule | None = None
        self._filling: BufferRef | None = None
        self._progress_s = 0.0
        self._unfenced: list[_Work] = []
        self._fenced: deque[tuple[Fence, list[_Work]]] = deque()
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
            Ping: lambda _: self._state.generation,
            GetStatistics: lambda _: self._statistics(),
            Warm: self._warm,
            Drain: self._drain,
        }

    # Life.

    def on_start(self) -> None:
        """Open the engine and map the memory that earlier incarnations left."""
        faults = self._state.faults
        if faults is not None and faults.on_start() is not None:
            raise Crash("injected crash in start")
        self._engine = engine = self._make_engine()
        engine.open()
        self._synchronous = engine.synchronous
        self._memory.forget_bindings()
        for arena in self._memory.arenas():
            engine.map_arena(arena.number, arena.fd, arena.nbytes)
        self._state.generation = self._generation

    def on_stop(self) -> None:
        """Finish what is enqueued and close the engine."""
        try:
            self._outlast_fences()
        except Exception as error:
            self.on_crash(error, None, [])
            raise
        self.flush()
        self._close_engine()

    def on_crash(self, error: BaseException, current: Envelope | None, waiting: list[Envelope]) -> None:
        """Judge every request that was running, and leave the others, in order, to the successor.

        Where the memory died with the context there is none: whoever waits gets `ContextLost`.
        """
        cause, engine = str(error) or repr(error), self._engine
        outlives = engine is None or engine.outlives_context
        self._state.mailbox.restore(waiting)
        running = [work.envelope for work in self._unfinished()]
        if current is not None and all(current is not envelope for envelope in running):
            running.append(current)
        again = [e for e in running if self._judge(e, cause, outlives_context=outlives)]
        self._state.mailbox.restore(again)
        self._give_up_buffers()
        if not outlives:
            self._memory.lose_all()
            for envelope in self._state.mailbox.take(len(self._state.mailbox), 0.0):
                self.settle(envelope, None, ContextLost(status="context lost", detail=cause))
        self.flush()
        if not self.abandoned_alive:
            self._close_engine()

    def _give_up_buffers(self) -> None:
        """Let go of what unfinished work holds, and of buffers whose references nobody has received."""
        for work in self._unfinished():
            self._release(work.slots)
            if isinstance(work.reply, BufferRef):
                self._tear(work.reply)
        if self._filling is not None:
            self._tear(self._filling)

    def _judge(self, envelope: Envelope, cause: str, *, outlives_context: bool) -> bool:
        """Whether a request that was running is to run again; if not, it has been answered."""
        envelope.crashes += 1
        output, pure, digest = self._effects(envelope.message)
        verdict = judge(
            pure=pure,
            crashes=envelope.crashes,
            outlives_context=outlives_context,
            may_still_write=self.abandoned_alive and output is not None,
        )
        log.warning("request.interrupted", request=envelope.number, verdict=verdict.value, cause=cause)
        if verdict is Verdict.RUN_AGAIN:
            self._state.replayed += 1
            return True
        if output is not None:
            self._tear(output)
        self.settle(envelope, None, self._crash_error(verdict, envelope.number, digest, cause))
        return False

    def _crash_error(self, verdict: Verdict, number: int, digest: str, cause: str) -> CudnnActorError:
        if verdict is Verdict.QUARANTINE:
            self._state.quarantined[digest] = cause  # where it is no plan's digest, nothing asks for it
            return QuarantinedRequest(request_id=number, digest=digest, cause=cause)
        if verdict is Verdict.CONTEXT_LOST:
            return ContextLost(status="context lost", detail=cause)
        return OutcomeUnknown(request_id=number, cause=cause)

    def _effects(self, message: Any) -> tuple[BufferRef | None, bool, str]:
        """The buffer that a message writes, whether it is pure, and the digest that stands for it."""
        kind = type(message)
        if kind in (ConvFwd, ConvBwdData, ConvBwdFilter):
            lowered = self._state.lowered(message)
            return getattr(message, lowered.output), lowered.pure, lowered.graph.digest()
        return getattr(message, "dst", None), True, kind.__name__.lower()

    def _tear(self, ref: BufferRef) -> None:
        try:
            slot = self._memory.resolve(ref)
        except CudnnActorError:
            return  # freed in the meantime: nobody can read it
        if self.abandoned_alive:
            self._memory.hold(slot)  # for good: the lost thread may still write there
        self._memory.tear(slot, StaleReason.TORN)

    @property
    def abandoned_alive(self) -> bool:
        """Whether this actor's thread was given up while it was still running."""
        return self.disowned and threading.current_thread() is not self.thread

    def _close_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _leave_if_disowned(self) -> None:
        """End a lost thread that has come back: its engine is all that it may touch."""
        if self.disowned:
            self._close_engine()
            raise Crash("came back after it had been given up")

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
        if self._state.faults is not None and not message.control:
            self._fault = self._state.faults.on_message(type(message).__name__)
        return handler(message)

    def _compute(self, message: Compute) -> Any:
        lowered = self._state.lowered(message)
        slots = [self._memory.resolve(getattr(message, name), name) for name in lowered.buffers]
        if slots.count(slots[-1]) != lowered.output_uses:
            raise _overlap(lowered, slots)
        plan = self._plan(lowered)
        buffers = [self._binding(slot) for slot in slots]
        if lowered.views:
            for place, spec in lowered.views:
                buffers[place] = self._bind(slots[place], spec)
        scalars = [float(getattr(message, name)) for name in lowered.scalars]
        if self._last_run_ns.get(plan.tag, 0) > _LONG_RUN_NS:
            self.flush()
        return self._run_engine(plan.tag, slots, self._open_engine.execute, plan, buffers, scalars)

    def _plan(self, lowered: Lowered) -> Plan:
        digest = lowered.graph.digest()
        if self._state.quarantined and digest in self._state.quarantined:
            assert self.current is not None
            cause = self._state.quarantined[digest]
            raise QuarantinedRequest(request_id=self.current.number, digest=digest, cause=cause)
        if self._fault is not None and self._fault.fault is Fault.REJECT_BUILD:
            self._fault = None
            raise UnsupportedGraph(
                engine=self._open_engine.name, digest=digest, detail="injected: rejected at build"
            )
        return self._plans.get(digest, lambda: self._build(lowered))

    def _build(self, lowered: Lowered) -> Plan:
        try:
            plan = self._open_engine.build(lowered.graph, workspace_limit=self._state.workspace_limit)
        except EngineFailure as failure:
            raise self._diagnose(failure, "build") from failure
        self._leave_if_disowned()
        return plan

    def _allocate(self, message: Allocate) -> Any:
        _require("spec", message.spec, TensorSpec)
        assert self.current is not None
        if not self.current.wants_reply:
            raise InvalidRequest(
                field="message", value="Allocate", problem="is told, so nobody gets the buffer", fix="ask it"
            )
        if message.data is None:
            self._run_faults("allocate")
            return self._reserve(message.spec)
        self._filling = ref = self._reserve(message.spec)
        try:
            return self._write("data", ref, message.data, reply=ref)
        except BaseException:
            if not self.disowned:
                self._memory.free(ref)
            raise
        finally:
            self._filling = None

    def _reserve(self, spec: TensorSpec) -> BufferRef:
        memory = self._memory
        if not memory.room_for(spec):
            number, nbytes = memory.next_arena(spec)
            self._drop(memory.arenas_to_drop(nbytes))
            try:
                fd = self._open_engine.create_arena(number, nbytes)
            except MemoryError:
                raise OutOfMemory(requested=nbytes, in_use=memory.arena_bytes, limit=None) from None
            if self.disowned:
                os.close(fd)
            self._leave_if_disowned()
            memory.add_arena(number, nbytes, fd)
        return memory.allocate(spec)

    def _drop(self, arenas: Iterable[int]) -> None:
        for number in arenas:
            self._open_engine.unmap_arena(number)
            self._memory.drop_arena(number)

    def _upload(self, message: Upload) -> Any:
        return self._write("dst", message.dst, message.data)

    def _write(self, field: str, ref: BufferRef, data: Any, reply: BufferRef | None = None) -> Any:
        slot = self._slot(field, ref)
        _require("data", data, np.ndarray)
        place = self._binding(slot)
        return self._run_engine("upload", [slot], self._open_engine.write, place, data, reply=reply)

    def _download(self, message: Download) -> Any:
        slot = self._slot("src", message.src)
        self.flush()
        self._run_faults("download")
        return self._guarded("download", self._open_engine.read, self._binding(slot))

    def _copy(self, message: Copy) -> Any:
        src, dst = self._slot("src", message.src), self._slot("dst", message.dst)
        _check_copy(message, src, dst)
        places = self._binding(src), self._binding(dst)
        return self._run_engine("copy", [src, dst], self._open_engine.copy, *places)

    def _fill(self, message: Fill) -> Any:
        slot = self._slot("dst", message.dst)
        _require("value", message.value, numbers.Real)
        _check_fits_float(message.value)
        place = self._binding(slot)
        return self._run_engine("fill", [slot], self._open_engine.fill, place, message.value)

    def _free(self, message: Free) -> None:
        self._run_faults("free")
        self._memory.free(message.buffer)
        idle = self._memory.idle_arenas()
        if len(idle) > _IDLE_ARENAS:
            self._drop(idle[_IDLE_ARENAS:])

    def _warm(self, message: Warm) -> int:
        wanted = self._state.lowered_all(message)
        if self._fault is not None and self._fault.fault is not Fault.REJECT_BUILD:
            self._run_faults("warm")
        built = 0
        for lowered in wanted:
            if lowered.graph.digest() not in self._plans:
                with contextlib.suppress(UnsupportedGraph, OutOfMemory, QuarantinedRequest):
                    self._plan(lowered)
                    built += 1
        return built

    def _drain(self, _: Drain) -> Any:
        assert self.current is not None
        self._run_faults("drain")
        if not self._unfenced and not self._fenced:
            return None
        self._unfenced.append(_Work(self.current, None, ()))
        return DEFERRED

    def _statistics(self) -> Statistics:
        state, counters, memory = self._state, self.counters, self._memory
        return Statistics(
            generation=state.generation,
            queued=len(state.mailbox),
            finished=counters.finished,
            failed=counters.failed,
            withdrawn=counters.withdrawn + state.mailbox.withdrawn,
            expired=counters.expired,
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
    def _open_engine(self) -> Engine:
        assert self._engine is not None, "messages come only between on_start and on_stop"
        return self._engine

    def _slot(self, field: str, ref: BufferRef) -> Slot:
        return self._memory.resolve(ref, field)

    def _binding(self, slot: Slot) -> Any:
        if slot.binding is None:
            slot.binding = self._bind(slot, slot.spec)
        return slot.binding

    def _bind(self, slot: Slot, spec: TensorSpec) -> Any:
        return self._open_engine.bind(slot.arena.number, slot.offset, spec)

    def _run_engine(
        self,
        tag: str,
        slots: Sequence[Slot],
        call: Callable[..., object],
        *args: Any,
        reply: BufferRef | None = None,
    ) -> Any:
        """Enqueue one operation; its reply at once, or later when the engine works asynchronously."""
        envelope = self.current
        assert envelope is not None
        if self._fault is not None:
            self._run_faults(tag)
        self._guarded(tag, call, *args)
        ran_ns = time.perf_counter_ns() - envelope.started_ns
        self._last_run_ns[tag] = ran_ns
        answer = reply or Receipt(
            request_id=envelope.number,
            generation=self._generation,
            plan=tag,
            queue_us=(envelope.started_ns - envelope.admitted_ns) / 1e3,
            run_us=ran_ns / 1e3,
        )
        if self._synchronous:
            return answer
        for slot in slots:
            self._memory.hold(slot)
        self._unfenced.append(_Work(envelope, answer, tuple(slots)))
        return DEFERRED

    def _guarded(self, tag: str, call: Callable[..., Any], *args: Any) -> Any:
        try:
            result = call(*args)
        except EngineFailure as failure:
            self._leave_if_disowned()
            raise self._diagnose(failure, tag) from failure
        self._leave_if_disowned()
        return result

    def _diagnose(self, failure: EngineFailure, tag: str) -> Exception:
        """A dead context is a crash; a healthy one makes it this request's own failure."""
        if isinstance(failure, StickyError):
            return Crash(str(failure))
        trouble = self._open_engine.probe()
        if trouble is not None:
            return Crash(f"{failure} (probe: {trouble})")
        return ExecutionFailed(status=failure.status, detail=failure.detail, plan=tag)

    def _run_faults(self, tag: str) -> None:
        """Do what the fault plan says of this message, at the place where the engine would have done it."""
        rule, self._fault = self._fault, None
        if rule is None:
            return
        log.info("fault.injected", fault=rule.fault.value, plan=tag)
        match rule.fault:
            case Fault.FAIL_EXECUTION:
                raise ExecutionFailed(status="INJECTED", detail="scripted by the fault plan", plan=tag)
            case Fault.OUT_OF_MEMORY:
                raise OutOfMemory(requested=0, in_use=self._memory.arena_bytes, limit=None)
            case Fault.STICKY:
                raise Crash("INJECTED_STICKY_ERROR: scripted by the fault plan")
            case Fault.HANG:
                self.flush()
                self.abandoned.wait()
                raise Crash("injected hang, ended by the watchdog")
            case Fault.SLOW:
                self.flush()
                self.abandoned.wait(rule.seconds)
            case _:  # REJECT_BUILD has been dealt with, the others belong to a process's life
                pass

    # Fences, for engines that work asynchronously.

    def on_batch_end(self) -> None:
        """Put one fence behind all that the batch enqueued."""
        self._fence()

    def poll(self) -> float | None:
        """Answer what the device has finished; ask to be called again while it works."""
        self._settle_finished()
        # A device that does not get on is a hang like any other: the watchdog reads this between messages.
        self.busy_since = self._progress_s if self._fenced else None
        return _POLL_S if self._fenced else None

    def _fence(self) -> None:
        if self._unfenced:
            if not self._fenced:
                self._progress_s = time.monotonic()
            self._fenced.append((self._open_engine.fence(), self._unfenced))
            self._unfenced = []

    def _outlast_fences(self) -> None:
        self._fence()
        while self._fenced:
            self._settle_finished()
            if self._fenced and self.abandoned.wait(_POLL_S):
                raise Crash("its device had not finished when it was given up")

    def _settle_finished(self) -> None:
        while self._fenced and self._open_engine.finished(self._fenced[0][0]):
            _, finished = self._fenced.popleft()
            self._progress_s = time.monotonic()
            for work in finished:
                self._release(work.slots)
                self.settle(work.envelope, work.reply)
            self.flush()

    def _unfinished(self) -> list[_Work]:
        return [work for _, batch in self._fenced for work in batch] + self._unfenced

    def _release(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._memory.release(slot)


def _require(field: str, value: object, kind: type) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidRequest(
            field=field,
            value=value,
            problem=f"is {type(value).__name__} where a {kind.__name__} belongs",
            fix="upload arrays first: await gpu.upload(array)"
            if kind is BufferRef
            else f"pass a {kind.__name__}",
        )


def _check_fits_float(value: float) -> None:
    try:
        float(value)
    except OverflowError:
        raise InvalidRequest(
            field="value", value=value, problem="is past the largest float", fix="use a smaller number"
        ) from None


def _overlap(lowered: Lowered, slots: list[Slot]) -> InvalidRequest:
    output = slots[-1]
    inputs = zip(lowered.buffers, slots, strict=True)
    shared = next(name for name, slot in inputs if slot is output and name != lowered.output)
    return InvalidRequest(
        field=lowered.output,
        value=f"buffer {output.index}",
        problem=f"is also {shared}, and no convolution can work in place",
        fix=f"give {lowered.output} a buffer of its own (accumulating with beta is allowed)",
    )


def _check_copy(message: Copy, src: Slot, dst: Slot) -> None:
    if src is dst:
        raise InvalidRequest(
            field="dst", value=str(message.dst), problem="is also src", fix="copy to another buffer"
        )
    if src.spec.dims != dst.spec.dims or src.spec.dtype is not dst.spec.dtype:
        raise InvalidRequest(
            field="dst",
            value=str(dst.spec),
            problem=f"has other dims or another dtype than src, {src.spec}",
            fix="allocate one with the dims and dtype of src; only the layout may differ",
        )
