"""`CudnnActor` in a worker: the same actor, whose memory and callers are in another process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from cudnn_actor.actors import DEFERRED, Envelope
from cudnn_actor.broker.state import ServiceState
from cudnn_actor.engines.base import ContextDead, Engine
from cudnn_actor.supervision import Fault, FaultRule
from cudnn_actor.worker.actor import CudnnActor
from cudnn_actor.worker.executor import RECEIPT, Executor
from cudnn_actor.worker.planning import BuildCrash
from cudnn_actor.workers.process.errand import Errand
from cudnn_actor.workers.process.outbox import Outbox
from cudnn_actor.workers.process.stages import Stages
from cudnn_actor.workers.wire import Done, Dying, ReadStaged, Strike, WriteStaged

__all__ = ["DeliveredFaults", "WorkerActor"]


class DeliveredFaults:
    """What is to befall requests, as the parent's fault plan has it: it counts there, over all workers."""

    def __init__(self, *, start_fails: bool) -> None:
        self.next: FaultRule | None = None
        """What befalls the request that is being taken up."""
        self._start_fails = start_fails

    def on_start(self) -> Fault | None:
        """Whether this start fails; None if not."""
        return Fault.CRASH_IN_START if self._start_fails else None

    def on_message(self, _type_name: str) -> FaultRule | None:
        """What befalls this message; once."""
        rule, self.next = self.next, None
        return rule


class WorkerActor(CudnnActor):
    """Answers requests of a parent. Its last act is to say why it ends: to judge is the parent's.

    Parameters
    ----------
    state, engine, generation
        As of `CudnnActor`.
    stages
        The host memory that values come and go in.
    outbox
        The way to the parent.
    """

    def __init__(
        self,
        state: ServiceState,
        engine: Callable[[], Engine],
        generation: int,
        stages: Stages,
        outbox: Outbox,
    ) -> None:
        super().__init__(state, engine, generation)
        self._stages = stages
        self._outbox = outbox
        self._handlers[WriteStaged] = self._write_staged
        self._handlers[ReadStaged] = self._read_staged
        self._handlers[Strike] = self._strike

    @property
    def engine(self) -> Engine:
        """The engine, open."""
        return self._engine.engine

    def create_arena(self, number: int, nbytes: int) -> int:
        """Take and map memory; its descriptor, which is the caller's. Raises `CudnnActorError`, `Crash`."""
        return self._engine.create_arena(number, nbytes)

    def on_start(self) -> None:
        """Start as `CudnnActor` does."""
        super().on_start()
        self._outbox.notes = self._engine.synchronous

    def flush(self) -> None:
        """Send what there is, log lines too: what comes next may take long, or be the end."""
        super().flush()
        self._outbox.send_lines()

    def promote(self, generation: int) -> None:
        """Serve as this incarnation."""
        self._generation = self._state.generation = generation

    def _take_up(self, envelope: Envelope, *, resumed: bool = False) -> None:
        """Start a request, as `Actor` does, without a look at what is the parent's: callers and deadlines."""
        self.current = envelope
        self._in_hand.append(envelope)
        if not resumed and (defer := self.defers(envelope)) is not None:
            self._claim(envelope, DEFERRED)
            defer()
        elif envelope.begin():
            self._run(envelope)
        else:
            self._claim(envelope, DEFERRED)
            self._expire(envelope)
        self.current = None

    def _handle(self, envelope: Envelope) -> Any:
        """Run one request, which comes off the wire: it has a handler, is not pykka's, and has no context."""
        message = envelope.message
        faults: Any = self._state.faults
        if faults is None:
            return self._handlers[type(message)](message)
        assert isinstance(envelope, Errand)
        faults.next = envelope.fault
        return self.on_receive(message)

    def _settle_done(self, executor: Executor) -> None:
        """Answer what the device has finished, as `ExecutingActor` does, with fewer steps for each."""
        now_ns, finished = time.perf_counter_ns(), 0
        outbox = self._outbox
        while (work := executor.take_done()) is not None:
            if work.reply is RECEIPT:
                outbox.add(self._finished_at(now_ns, work.envelope, work.tag))
                finished += 1
            else:
                self.settle_together(work.envelope, work.reply)
        if finished:
            self.counters.finished += finished
            self._to_wake.add(outbox)  # type: ignore[arg-type]  # which is a bridge to this actor

    def _write_staged(self, message: WriteStaged) -> Any:
        slot = self._memory.resolve(message.dst, "dst")
        return self._write("dst", message.dst, self._stages.array(message.values, slot.spec))

    def _read_staged(self, message: ReadStaged) -> Any:
        slot = self._memory.resolve(message.src, "src")
        return self._read(slot, self._stages.array(message.values, slot.spec))

    def _strike(self, message: Strike) -> None:
        self._faults.strike(message.tag)

    def _finished_at(self, now_ns: int, envelope: Envelope, tag: str) -> Any:
        """In place of a receipt, what the parent makes one of."""
        assert isinstance(envelope, Errand)
        started_ns = envelope.started_ns
        return Done(envelope.number, envelope.place, tag, started_ns, (now_ns - started_ns) / 1e3)

    def on_crash(self, error: BaseException, current: Envelope | None, waiting: list[Envelope]) -> None:  # noqa: ARG002
        """Send the answers that are there, then say what happened. The process ends behind it."""
        if self._executor is not None:
            self._settle_done(self._executor)
        self.flush()
        digest = error.digest if isinstance(error, BuildCrash) else self._digest_in_work
        self._outbox.say(Dying(str(error) or repr(error), isinstance(error, ContextDead), digest))
