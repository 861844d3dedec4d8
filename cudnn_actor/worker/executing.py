"""An actor that runs an engine: what it enqueues, the fences behind it, and the answers when they pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from cudnn_actor.actors import DEFERRED, Actor, Crash, Envelope
from cudnn_actor.actors.logs import Log
from cudnn_actor.broker.state import ServiceState
from cudnn_actor.engines.base import Engine
from cudnn_actor.memory import Slot
from cudnn_actor.plans.cache import PlanCache
from cudnn_actor.protocol.receipts import Receipt
from cudnn_actor.worker.executor import RECEIPT, Executor, Work
from cudnn_actor.worker.injection import Injection
from cudnn_actor.worker.polling import pause_s

__all__ = ["ExecutingActor"]

log = Log("cudnn_actor")

_STOPPING_POLL_S = 50e-6
"""How often fences are looked at by an actor that only waits for their end."""


class ExecutingActor(Actor):
    """Owns an engine from its start to its end.

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
        self.counters = state.counters
        self.service = state.name
        self._generation = generation
        self._state = state
        self._memory = state.memory
        self._make_engine = engine
        self._executor: Executor | None = None
        self._plans = PlanCache()
        self._faults = Injection(state.faults, self.flush, self.abandoned)

    @property
    def _engine(self) -> Executor:
        assert self._executor is not None, "messages come only between on_start and on_stop"
        return self._executor

    def _open_engine(self) -> None:
        self._executor = Executor(self._make_engine(), self._memory)
        self._executor.open()

    def _close_engine(self) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            try:
                executor.engine.close()
            except Exception:  # of a dead context, say: there is nothing more to be done with it
                log.exception("engine.close_failed")

    def working_since(self) -> float | None:
        """Since when the message in work, or between messages the device, has not got on."""
        executor = self._executor
        if self.busy_since is not None or executor is None:
            return self.busy_since
        return executor.working_since()

    # Running.

    def _run_engine(
        self,
        tag: str,
        slots: Sequence[Slot],
        call: Callable[..., object],
        *args: Any,
        reply: Any = RECEIPT,
    ) -> Any:
        """Enqueue one operation; its reply at once, or later when the engine works asynchronously."""
        envelope, executor = self.current, self._engine
        assert envelope is not None
        if self._faults.scripted:
            self._faults.strike(tag)
        executor.call(tag, call, *args)
        if executor.synchronous:
            return self._receipt(envelope, tag) if reply is RECEIPT else reply
        executor.defer(Work(envelope, tag, slots, reply))
        return DEFERRED

    def _receipt(self, envelope: Envelope, tag: str) -> Receipt:
        """Proof that a request has just finished."""
        now_ns = time.perf_counter_ns()
        self._plans.note_run(tag, now_ns - envelope.started_ns)
        return self._finished_at(now_ns, envelope, tag)

    def _finished_at(self, now_ns: int, envelope: Envelope, tag: str) -> Receipt:
        started_ns = envelope.started_ns
        return Receipt(
            request_id=envelope.number,
            generation=self._generation,
            plan=tag,
            queue_us=(started_ns - envelope.admitted_ns) / 1e3,
            run_us=(now_ns - started_ns) / 1e3,
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
        if executor is None or not executor.busy:
            return None
        self._settle_finished(executor)
        since = executor.working_since()
        return None if since is None else pause_s(time.monotonic() - since)

    def _settle_finished(self, executor: Executor) -> None:
        while executor.passed():
            self._settle_done(executor)
            while (late := executor.first_late()) is not None:
                self._settle_late(executor, late)
                self._settle_done(executor)
        self.flush()

    def _settle_done(self, executor: Executor) -> None:
        now_ns = time.perf_counter_ns()
        while (work := executor.take_done()) is not None:
            plain = work.reply is RECEIPT
            value = self._finished_at(now_ns, work.envelope, work.tag) if plain else work.reply
            self.settle_together(work.envelope, value)

    def _settle_late(self, executor: Executor, work: Work) -> None:
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
            self.settle(work.envelope, value)
        else:
            self._answer_error(work.envelope, error)
        self.busy_since = None

    def _outlast_fences(self) -> None:
        executor = self._engine
        executor.fence()
        while executor.busy:
            self._settle_finished(executor)
            if self.abandoned.wait(_STOPPING_POLL_S):
                raise Crash("its device had not finished when it was given up")
