"""The broker: the one place that decides how each message of the protocol is handled.

The broker itself answers messages that need only bookkeeping: allocating and freeing buffers, and waiting for
earlier messages. It checks every other message and returns it to its host as `Work`. The host runs the work,
on its own engine or in a worker, and reports the result. This has two consequences:

- A `Free` takes effect in its turn. Requests sent before it hold the bytes and run on them, also when they
  run again after a crash. Requests sent after it are refused.
- At a crash, the broker and the host together hold all that must not be lost: which requests had begun, which
  had not, and which bytes they use.

Each kind of message has a handler here, of a few lines. Three parts have files of their own: arenas that are
waited for (`arena_requests`), messages that wait for a write of weights (`held_back`), and requests that were
running at a crash (`interrupted`).

The broker knows no threads, event loops, processes or engines, so its behaviour is a function of the calls
made to it. The host makes sure that there is one caller at a time.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any, Generic, TypeVar

from cudnn_actor.actors import ActorStopped, Envelope
from cudnn_actor.actors.logs import Log, speaking_for
from cudnn_actor.broker.arena_requests import ArenaRequests
from cudnn_actor.broker.deployments import Deployed
from cudnn_actor.broker.held_back import HeldBack
from cudnn_actor.broker.host import Host
from cudnn_actor.broker.interrupted import InterruptedRequests
from cudnn_actor.broker.request_checks import (
    bind_message,
    check_allocate,
    check_explain,
    check_unload,
    require_asker,
    slots_of,
)
from cudnn_actor.broker.service_state import Discard, Export, Forget, Import, ServiceState
from cudnn_actor.broker.work import Work
from cudnn_actor.memory import ExportedRange, MemoryTable
from cudnn_actor.memory.exhaustion import exhaustion
from cudnn_actor.protocol.errors import (
    CudnnActorError,
    DeadlineExceeded,
    InvalidRequest,
    OutOfMemory,
    Words,
)
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.messages.message_checks import check_warm, not_a_message
from cudnn_actor.protocol.messages.messages import (
    COMPUTE,
    Allocate,
    ClearPlans,
    Compute,
    Copy,
    DeployModel,
    Download,
    Drain,
    Explain,
    Fill,
    Free,
    GetStatistics,
    LendStaging,
    Ping,
    RunModel,
    UnloadModel,
    Upload,
    View,
    Warm,
    WarmModel,
    WriteWeights,
)
from cudnn_actor.protocol.messages.model_messages import ModelRef
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.checks import require_type
from cudnn_actor.protocol.types.tensor import TensorSpec, packed_nbytes
from cudnn_actor.supervision import Fault

__all__ = ["Broker"]

W = TypeVar("W", bound=Work)

_BOOKKEEPING = frozenset(
    {Allocate, Free, Discard, Drain, View, DeployModel, UnloadModel, LendStaging, Export, Import}
)
"""Messages that may never reach the engine. A fault for one of them is therefore run as separate work."""

log = Log("cudnn_actor")


class Broker(Generic[W]):
    """The bookkeeping of a service, from its start to its end.

    Parameters
    ----------
    state
        The service's state. Only the broker writes its memory table, counters and quarantine.
    reply
        This is called with an envelope, a value and an error, exactly once for each envelope that was
        started.
    host
        The host, which runs the work.
    work
        The class of the work objects.
    """

    def __init__(
        self,
        state: ServiceState,
        reply: Callable[[Envelope, Any, BaseException | None], None],
        host: Host,
        work: type[W],
    ) -> None:
        self.state = state
        self.memory: MemoryTable = state.memory
        """The service's memory table."""
        self.arenas = ArenaRequests(state.memory, host, self)
        """Messages that wait for an arena."""
        self._reply = reply
        self._host = host
        self._work = work
        self._drains: deque[Envelope] = deque()
        self.held = HeldBack(state)
        """Messages that wait for a write of weights, which waits for runs."""
        self.interrupted: InterruptedRequests[W] = InterruptedRequests(state, self)
        """The verdicts on requests that were running at a crash."""
        self._handlers: dict[type, Callable[[Envelope, Any], W | None]] = {
            **dict.fromkeys(COMPUTE, self.prepare),
            Allocate: self._allocate,
            **dict.fromkeys((Upload, Download, Copy, Fill), self._on_slots),
            View: self._view,
            Export: self._export,
            Import: self._import,
            LendStaging: self._lend,
            Free: self._free,
            Discard: self._discard,
            Forget: self._forget,
            Ping: self._question,
            GetStatistics: self._question,
            Warm: self._warm,
            ClearPlans: self._clear_plans,
            Explain: self._explain,
            Drain: self._drain,
            DeployModel: self._deploy_model,
            WarmModel: self._warm_model,
            RunModel: self._run_model,
            UnloadModel: self._unload_model,
            WriteWeights: self._write_weights,
        }

    # Starting.

    def start(self, envelope: Envelope, *, injected: bool = False) -> W | None:
        """Start a message: answer it, or return the work for the host to run.

        Parameters
        ----------
        envelope
            The message.
        injected
            Whether the message was started before, and its fault, if it had one, was injected then.

        Raises
        ------
        CudnnActorError, TypeError, OSError, MemoryError
            The message is not valid, or there is no memory or no descriptor for it. It has not begun; the
            caller must `refuse` it.
        """
        if envelope.future is not None and envelope.is_unawaited:
            self.withdraw(envelope)
            return None
        if envelope.deadline is not None and envelope.expired and not injected:
            self.expire(envelope)
            return None
        if not injected and self.held.must_wait(envelope):
            self.held.add(envelope)
            return None
        return self.take_up(envelope, injected=injected)

    def take_up(self, envelope: Envelope, *, injected: bool = False) -> W | None:
        """Start a message as `start` does, if its caller is known to be waiting, and it need not be held
        back."""
        message = envelope.message
        handler = self._handlers.get(type(message))
        if handler is None:
            raise not_a_message(message)
        faults = self.state.faults
        if faults is None or injected or message.control:
            return handler(envelope, message)
        rule = faults.on_message(type(message).__name__)
        if rule is None:
            return handler(envelope, message)
        if type(message) in _BOOKKEEPING and rule.fault is not Fault.REJECT_BUILD:
            work: W | None = self._work(envelope, envelope.number, message)
            assert work is not None
            work.injects = True
        else:
            work = handler(envelope, message)
        if work is not None:
            work.fault = rule
        return work

    def prepare(self, envelope: Envelope, message: Compute) -> W:
        """The work for a request that runs a plan. Changes only caches. Raises an error if the request is not
        valid."""
        cached = self.state.cached_message(envelope)
        if self.state.quarantined:
            self._refuse_quarantined(cached.lowered.graph, envelope.number)
        slots = bind_message(cached, self.memory).slots
        return self._work(envelope, envelope.number, message, slots, cached)

    def _refuse_quarantined(self, graph: OperationGraph, number: int) -> None:
        if (error := self.state.why_quarantined(graph, number)) is not None:
            raise error

    def _question(self, envelope: Envelope, message: Ping | GetStatistics) -> W:
        return self._work(envelope, envelope.number, message)

    def _warm(self, envelope: Envelope, message: Warm) -> W:
        check_warm(message)
        known = self.state.quarantined
        messages = tuple(r for r in message.messages if self.state.lower(r).graph.digest() not in known)
        graphs = tuple(graph for graph in message.graphs if graph.body.digest() not in known)
        warm = Warm(messages=messages, graphs=graphs, tune=message.tune, soon=message.soon)
        return self._work(envelope, envelope.number, warm)

    def _clear_plans(self, envelope: Envelope, message: ClearPlans) -> W:
        self._host.clear_plans()
        return self._work(envelope, envelope.number, message)

    def _explain(self, envelope: Envelope, message: Explain) -> W:
        check_explain(message)
        require_asker(envelope, "explanation")
        self._refuse_quarantined(message.graph, envelope.number)
        return self._work(envelope, envelope.number, message)

    def _on_slots(self, envelope: Envelope, message: Upload | Download | Copy | Fill) -> W:
        return self._work(envelope, envelope.number, message, slots_of(self.memory, message))

    def _view(self, envelope: Envelope, message: View) -> W:
        slots = slots_of(self.memory, message)
        if not self._host.has_views:
            raise InvalidRequest(
                field="message",
                value=Words("View"),
                problem="asks for memory that belongs to another process",
                fix='download the buffer, or spawn with isolation="thread"',
            )
        require_asker(envelope, "array")
        return self._work(envelope, envelope.number, message, slots)

    # Models.

    def _deploy_model(self, envelope: Envelope, message: DeployModel) -> None:
        require_asker(envelope, "model")
        for each in message.graphs:
            self.state.check_graph(each.graph)
        ref = self.state.models.deploy(message.graphs)
        self.state.counters.name_model(ref.number, message.name)
        if self.begins(envelope):
            self.succeed(envelope, ref)
        else:
            self._remove_model(ref, None)

    def _warm_model(self, envelope: Envelope, message: WarmModel) -> W:
        for each in message.graphs:
            self.state.check_graph(each.graph)
        self.forget_ended(self.state.models.add(message.model, message.graphs))
        graphs = tuple(each.graph for each in message.graphs)
        warm = Warm(graphs=graphs, tune=message.tune, soon=message.soon)
        work = self._warm(envelope, warm)
        work.warmed = self.state.models.graphs_of(message.model, message.graphs)
        return work

    def _run_model(self, envelope: Envelope, message: RunModel) -> W:
        if envelope.future is None:  # an asyncio caller waits for each message that has one
            require_asker(envelope, "results")
        models, run = self.state.models, self.state.model_run(envelope)
        assert run.deployed is not None
        if self.state.quarantined:
            self._refuse_quarantined(run.cached.lowered.graph, envelope.number)
        models.check_whole(run.deployed)
        if run.deployed.of.draws is not None:
            models.draw(run, message.model)
        work = self._work(envelope, envelope.number, message, models.slots(run))
        work.run = run
        work.alone = message.crashes > 0
        return work

    def _write_weights(self, envelope: Envelope, message: WriteWeights) -> W:
        return self._work(envelope, envelope.number, message, self.state.models.written_by(message))

    def _unload_model(self, envelope: Envelope, message: UnloadModel) -> None:
        check_unload(message)
        if self.begins(envelope):
            self._remove_model(message.model, message.graphs)
            self.succeed(envelope, None)

    def _remove_model(self, ref: ModelRef, graphs: tuple[str, ...] | None) -> None:
        self.forget_ended(self.state.models.remove(ref, graphs))
        if graphs is None:
            self.state.counters.forget_model(ref.number)

    def forget_ended(self, graphs: Sequence[Deployed]) -> None:
        """Let the host drop its data on models' graphs that have ended."""
        for deployed in graphs:
            self._host.forget_deployed(deployed)

    # Buffers.

    def _allocate(self, envelope: Envelope, message: Allocate) -> W | None:
        check_allocate(self.memory, message)
        require_asker(envelope, "buffer")
        if self.arenas.waiting or not self.memory.room_for(message.spec):
            self.arenas.wait(envelope, message.spec)
        elif message.data is not None:
            ref = self.memory.allocate(message.spec)
            work = self._work(envelope, envelope.number, message, (self.memory.resolve(ref),))
            work.ref = ref
            return work
        elif self.begins(envelope):
            self.succeed(envelope, self.memory.allocate(message.spec))
        return None

    def _lend(self, envelope: Envelope, message: LendStaging) -> None:
        require_type("spec", message.spec, TensorSpec)
        require_asker(envelope, "memory")
        nbytes = packed_nbytes(message.spec)
        self.memory.check_staging(nbytes, self._host.lent_bytes)
        if self.memory.device == "cpu":
            self.arenas.drop_idle(nbytes)
        try:
            array = self._host.lend(message.spec)  # first: it may raise, and then nothing has begun
        except OutOfMemory as error:
            in_use = self.memory.live_bytes + self._host.lent_bytes
            raise error.beside(in_use=in_use, arena_bytes=self.memory.arena_bytes) from error
        if self.begins(envelope):
            self.succeed(envelope, array)

    def _free(self, envelope: Envelope, message: Free) -> None:
        self.memory.resolve(message.buffer)
        if self.begins(envelope):
            self.end_buffer(message.buffer)
            self.succeed(envelope, None)

    def _discard(self, envelope: Envelope, message: Discard) -> None:
        if self.memory.is_live(message.buffer):
            self._free(envelope, message)
        elif self.begins(envelope):
            self.succeed(envelope, None)

    def _forget(self, envelope: Envelope, message: Forget) -> None:
        if self.begins(envelope):
            self.state.messages.forget(message.identities)
            self._host.forget(message)
            self._reply(envelope, None, None)  # it counts as no request

    def _export(self, envelope: Envelope, message: Export) -> None:
        (slot,) = slots_of(self.memory, message)
        require_asker(envelope, "place")
        if not self.begins(envelope):
            return
        if slot.users:  # it waits for all earlier messages, some of which use the buffer
            self._drains.append(envelope)
            self.settle_drains()
        else:
            self._settle(envelope)

    def _exported_range(self, ref: BufferRef) -> ExportedRange:
        """The place of a live buffer's bytes. Raises `StaleBufferError`, `OSError`."""
        slot = self.memory.resolve(ref)
        return ExportedRange(os.dup(slot.arena.fd), slot.arena.nbytes, slot.offset)

    def end_buffer(self, ref: BufferRef) -> None:
        """Free a buffer. If several arenas are then empty, one is kept, and the others are released.

        A slot may be made ready for the next buffer of its shape.
        """
        self.memory.free(ref)
        self.arenas.drop_spare()
        self.memory.make_ready(ref.spec)

    def _import(self, envelope: Envelope, message: Import) -> None:
        require_asker(envelope, "buffer")
        self.arenas.start_import(envelope, message)

    # Waiting for earlier messages.

    def _drain(self, envelope: Envelope, _message: Drain) -> None:
        if self.begins(envelope):
            self._drains.append(envelope)
            self.settle_drains()

    @property
    def has_drains_due(self) -> bool:
        """Whether the first unanswered `Drain` can be answered now."""
        return bool(self._drains) and not self.is_awaited(self._drains[0].number)

    def settle_drains(self) -> None:
        """Answer each `Drain`, and each `Export` that waits, for which all earlier messages have been
        answered."""
        while self._drains and not self.is_awaited(self._drains[0].number):
            self._settle(self._drains.popleft())

    def _settle(self, envelope: Envelope) -> None:
        """Answer a `Drain` or an `Export` for which nothing is awaited."""
        if type(envelope.message) is not Export:
            self.succeed(envelope, None)
            return
        try:
            self.succeed(envelope, self._exported_range(envelope.message.buffer))
        except (CudnnActorError, OSError) as error:
            self.refuse(envelope, error)

    def is_awaited(self, number: int) -> bool:
        """Whether any message with a lower number than this one is unanswered."""
        return self._host.waits_for(number) or self.arenas.is_awaited(number)

    @property
    def has_due(self) -> bool:
        """Whether any message that waits for earlier ones can go on now, or another service's memory is no
        longer read: call `settle_waiting`."""
        if self.memory.has_idle_imports:
            return True
        return bool(self._drains or self.held.messages) and (self.has_drains_due or self.held.are_due)

    def settle_waiting(self) -> None:
        """Answer each `Drain` that can be answered; if a write can begin, return the held-back messages to
        the mailbox; and let imported arenas be unmapped that no copy reads.

        Call it after requests have been answered.
        """
        if self.memory.has_idle_imports:
            self.arenas.drop_imports()
        if self.held.are_due:
            self.state.mailbox.restore(self.held.take())
        self.settle_drains()

    def take_waiting(self) -> list[Envelope]:
        """Remove and return all messages that wait in the broker: for an arena, as a `Drain`, or held
        back."""
        drains = list(self._drains)
        self._drains.clear()
        return [*self.arenas.take_waiting(), *drains, *self.held.take()]

    # Answers.

    def begins(self, envelope: Envelope) -> bool:
        """Begin a message that is answered at once. False if its caller was already told that it expired."""
        if envelope.begin():
            return True
        self.expire(envelope)
        return False

    def succeed(self, envelope: Envelope, value: Any, run_us: float = -1.0) -> None:
        """Answer with a value. `run_us`: as of `RequestCounters.count`."""
        self.state.counters.count(envelope, value, None, time.perf_counter_ns(), run_us)
        self._reply(envelope, value, None)

    def fail(self, envelope: Envelope, error: BaseException) -> None:
        """Answer with an error. If nobody waits for a reply, log the error as well."""
        self.state.counters.count(envelope, None, error, time.perf_counter_ns())
        if not envelope.wants_reply:
            fields = {"actor": "CudnnActor", "message": repr(envelope.message), "error": repr(error)}
            self.write_in(envelope.context, lambda: log.error("actor.tell_failed", **fields))
        self._reply(envelope, None, error)

    def refuse(self, envelope: Envelope, error: Exception) -> None:
        """Fail a message that could not be started or run.

        If the system had no memory or no descriptor left, the error names the limit.
        """
        message = envelope.message
        spec = getattr(getattr(message, "src", None), "spec", None) or getattr(message, "spec", None)
        requested = spec.nbytes if isinstance(spec, TensorSpec) else 0
        in_use, arenas = self.memory.live_bytes, self.memory.arena_bytes
        typed = exhaustion(error, requested=requested, in_use=in_use, arena_bytes=arenas)
        self.fail(envelope, typed or error)

    def expire(self, envelope: Envelope) -> None:
        """Answer with `DeadlineExceeded`, which says whether the message had started."""
        started = envelope.started_ns > 0
        self._end_without_run(
            envelope, DeadlineExceeded(timeout_s=envelope.timeout_s or 0.0, started=started)
        )

    def withdraw(self, envelope: Envelope) -> None:
        """Drop a message that nobody waits for any more."""
        self._end_without_run(envelope, ActorStopped(reason="withdrawn"))  # its loop counts its replies

    def _end_without_run(self, envelope: Envelope, error: Exception) -> None:
        self.state.counters.count_not_run(envelope, error)
        self._reply(envelope, None, error)

    def end_unreceived(self, work: Work) -> None:
        """Free the buffer that a request was to fill, because no caller receives it now."""
        if work.ref is not None and self.memory.is_live(work.ref):
            self.end_buffer(work.ref)

    def write_in(self, context: Context | None, write: Callable[[], None]) -> None:
        """Write a log line of the service, in the context of the caller. May run on any sender's thread."""
        with speaking_for(self.state.name):
            if context is None:
                write()
            else:
                context.run(write)

    # A crash.

    def handle_crash(
        self, begun: Sequence[W], cause: str, *, may_still_write: bool, memory_survives: bool = True
    ) -> tuple[list[W], list[W]]:
        """Answer the requests that had begun at a crash, except those that must run again.

        Parameters
        ----------
        begun
            These requests, in order.
        cause
            What happened, as text for people.
        may_still_write
            Whether the thread or process that ran them could not be ended.
        memory_survives
            Whether the buffers' memory outlives the crash. If it does not, no request runs again.

        Returns
        -------
        tuple
            The requests that must run again, before all others; and those that are lost. Lost requests have
            been answered, and their outputs are torn. The caller releases their buffers once nothing can
            write there any more.
        """
        self.memory.lose_imports()
        self.arenas.count_crash(begun, cause)
        return self.interrupted.settle(
            begun, cause, may_still_write=may_still_write, memory_survives=memory_survives
        )
