"""The state of a service that outlives an incarnation of its actor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from cudnn_actor.actors import Envelope, Mailbox
from cudnn_actor.actors.errors import ActorStopped
from cudnn_actor.broker.deployments import Deployments, ModelRun
from cudnn_actor.broker.execution_state import ExecutionState
from cudnn_actor.broker.recovery import QUARANTINED_AT
from cudnn_actor.broker.request_counts import RequestCounters
from cudnn_actor.memory import ExportedRange, MemoryTable
from cudnn_actor.protocol.errors import ExecutionFailed, OutOfMemory, QuarantinedRequest
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.graphs.reproduction import token
from cudnn_actor.protocol.messages.any_message import AnyMessage
from cudnn_actor.protocol.messages.messages import Free, UnloadModel
from cudnn_actor.protocol.messages.model_messages import ModelRef, RunModel
from cudnn_actor.protocol.messages.receipts import CacheStatistics, PlanStatistics, Statistics
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.tensor import TensorSpec
from cudnn_actor.supervision import ExitKind, FaultSource

__all__ = ["Discard", "Export", "Forget", "Import", "ServiceState", "quarantine_error"]


class Discard(Free, frozen=True, kw_only=True, tag=True):
    """A `Free` that the service itself sends, for a buffer that nobody receives. The buffer may have ended by
    then."""


class Export(AnyMessage[ExportedRange], frozen=True, kw_only=True, tag=True):
    """A request for the place of a buffer's bytes, so that another service can copy them. The server of a
    socket sends it.

    The answer is an `ExportedRange`, once all earlier work on the buffer is done.
    """

    buffer: BufferRef


class Import(AnyMessage[BufferRef], frozen=True, kw_only=True, tag=True, eq=False):
    """A request to map a buffer of another service for reading. The server of a socket sends it.

    The answer is a `BufferRef`, which may be the source of a `Copy`, and be freed. It ends with the engine
    that has mapped it. If the device cannot read that memory, the error is `ExecutionFailed`.

    Parameters
    ----------
    memory
        The place of the buffer's bytes.
    spec
        The buffer's dims, strides and dtype.
    """

    memory: ExportedRange
    spec: TensorSpec


class Forget(msgspec.Struct, frozen=True, kw_only=True):
    """A message by which the service itself drops graphs from the caches that are not expected to come again.

    Parameters
    ----------
    identities
        The identities of the graphs.
    plans
        The digests of graphs whose plans are dropped.
    """

    identities: frozenset[str]
    plans: frozenset[str]

    control: ClassVar[bool] = True
    """The message is accepted by a full mailbox, and faults do not count it."""


@dataclass(kw_only=True, eq=False, repr=False)
class ServiceState(ExecutionState):
    """The state that a service's handle, its supervisor and the successive incarnations of its actor share.

    Writers: the mailbox has its own lock. Only the one live incarnation writes memory, counters,
    quarantine and faults; the supervisor starts a successor only after the predecessor has handled its crash
    or stop, so there are never two writers. Any thread fills the cache of messages.

    Parameters
    ----------
    mailbox, memory
        The service's mailbox and memory table.
    faults
        Scripted failures; None for none.
    name
        The service's name in its log lines.
    workspace_limit, plan_store, autotune, cache_limit, plan_capacity, graph_limits
        See `ExecutionState`.
    """

    mailbox: Mailbox
    memory: MemoryTable
    faults: FaultSource | None = None
    name: str | None = None
    counters: RequestCounters = field(default_factory=RequestCounters, init=False)
    ended_by_build: dict[str, int] = field(default_factory=dict, init=False)
    """Digests of graphs → how many incarnations their builds have ended."""
    replayed: int = field(default=0, init=False)
    restarts_by_cause: dict[str, int] = field(
        default_factory=lambda: {kind.value: 0 for kind in ExitKind}, init=False
    )
    """`ExitKind` → restarts for such a cause. Written on the supervisor's thread; no key is added."""
    give_back: Callable[[BufferRef], bool] | None = field(default=None, init=False)
    """A function that takes back a buffer that other processes use, too. It returns False for any other
    buffer. None if no buffers are shared."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mailbox.on_refusal = self.counters.tell_not_run
        self.models = Deployments(self.memory, self.messages.once)
        """The models. Only the live incarnation writes them."""

    def model_run(self, item: Any) -> ModelRun:
        """The run of an envelope with a `RunModel`, which is kept in the envelope.

        Raises `NotDeployed`, `InvalidRequest`.
        """
        run = item.found
        if type(run) is not ModelRun or run.deployed is None or run.deployed.ended:
            item.found = run = self.models.run_of(item.message)
        return run

    @property
    def restarts(self) -> int:
        """How often the supervisor has replaced the actor. Any thread."""
        return sum(self.restarts_by_cause.values())

    def why_quarantined(self, graph: OperationGraph, number: int) -> QuarantinedRequest | None:
        """The error for a request whose graph is quarantined; None if it is not."""
        if not self.quarantined:
            return None
        digest = graph.digest()
        cause = self.quarantined.get(digest)
        if cause is None:
            return None
        return quarantine_error(graph, number, cause)

    def blame_build(self, digest: str | None, cause: str) -> None:
        """Note which graph's build ended an incarnation. The second time, the graph is quarantined.

        `digest`: None if no build did, or it is not known which.
        """
        if digest is None:
            return
        self.ended_by_build[digest] = self.ended_by_build.get(digest, 0) + 1
        if self.ended_by_build[digest] >= QUARANTINED_AT:
            self.quarantined[digest] = cause

    def complete_error(self, error: Exception, message: object) -> Exception:
        """The error of a request's run, with facts that the runner does not know.

        An `OutOfMemory` gets the bytes of the service's buffers; an `ExecutionFailed`, whether it was a run
        of a model. Any other error is returned as it is.
        """
        if isinstance(error, OutOfMemory):
            return error.beside(in_use=self.memory.live_bytes, arena_bytes=self.memory.arena_bytes)
        if isinstance(error, ExecutionFailed) and type(message) is RunModel:
            return error.of_run()
        return error

    def statistics(
        self,
        plans: PlanStatistics,
        cudnn_version: str | None,
        converted_bytes: int,
        worker_graphs: CacheStatistics | None = None,
    ) -> Statistics:
        """The service's counters at this moment, with the counts of the live incarnation."""
        counters, mailbox, memory = self.counters, self.mailbox, self.memory
        return Statistics(
            generation=self.generation,
            queued=mailbox.waiting,
            finished=counters.finished,
            failed=counters.failed,
            withdrawn=counters.withdrawn + mailbox.withdrawn,
            expired=counters.expired + mailbox.expired,
            replayed=self.replayed,
            restarts=self.restarts,
            live_buffers=memory.live_buffers,
            live_bytes=memory.live_bytes,
            arena_bytes=memory.arena_bytes,
            plans=plans,
            dropped_replies=mailbox.dropped,
            graphs=self.messages.statistics(),
            worker_graphs=worker_graphs,
            cudnn_version=cudnn_version,
            converted_bytes=converted_bytes,
        )

    def discard(self, result: object) -> None:
        """Free a buffer that nobody receives, unless a crash has ended it by then, or unload a model.

        A buffer that other processes use, too, stays until the last of them has given it back. Any thread.
        """
        if isinstance(result, ModelRef):
            self.unload(result, None)
        give_back = self.give_back  # another thread may set it to None
        if isinstance(result, BufferRef) and give_back is not None and give_back(result):
            return
        if isinstance(result, BufferRef) and self.memory.is_live(result):
            try:
                self.mailbox.admit(Envelope(Discard(buffer=result)))
            except ActorStopped:
                return  # the service has stopped, and its memory goes with it

    def unload(self, model: ModelRef, graphs: tuple[str, ...] | None) -> None:
        """Ask to forget graphs of a model, or all of them, without waiting: see `UnloadModel`. Any thread."""
        with contextlib.suppress(ActorStopped):  # the models go with the service
            self.mailbox.admit(Envelope(UnloadModel(model=model, graphs=graphs)))

    def forget(self, identities: frozenset[str], plans: frozenset[str]) -> None:
        """Ask to drop graphs and plans from the caches, in every process: see `Forget`. Any thread."""
        with contextlib.suppress(ActorStopped):  # the caches go with the service
            self.mailbox.admit(Envelope(Forget(identities=identities, plans=plans)))


def quarantine_error(graph: OperationGraph, number: int, cause: str) -> QuarantinedRequest:
    """The error for a request that is quarantined, or whose graph is."""
    return QuarantinedRequest(request_id=number, digest=graph.digest(), cause=cause, reproduce=token(graph))
