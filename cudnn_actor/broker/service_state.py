"""The state of a service that outlives an incarnation of its actor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from cudnn_actor.actors import Counters, Envelope, Mailbox
from cudnn_actor.actors.errors import ActorStopped
from cudnn_actor.broker.message_cache import CachedMessage, MessageCache
from cudnn_actor.broker.recovery import MOST_CRASHES
from cudnn_actor.engines.base import BuilderAccess
from cudnn_actor.memory import Memory
from cudnn_actor.plan_store.store import PlanStore
from cudnn_actor.protocol.graphs.limits import GraphLimits
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.graphs.reproduction import token
from cudnn_actor.protocol.messages.lowering import Lowered
from cudnn_actor.protocol.messages.messages import Compute, Free, Warm
from cudnn_actor.protocol.messages.receipts import CacheStatistics, PlanStatistics, Statistics
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.errors import QuarantinedRequest
from cudnn_actor.supervision import FaultSource

__all__ = ["CACHE_BYTES", "Discard", "Forget", "ServiceState"]

CACHE_BYTES = 128 << 20
"""The default of `cache_limit`."""


class Discard(Free, frozen=True, kw_only=True, tag=True):
    """A `Free` by the service itself, of a buffer that nobody receives. It may have ended by then."""


class Forget(msgspec.Struct, frozen=True, kw_only=True):
    """Drop graphs, which are not expected to come again, from the caches. Sent by the service itself.

    Parameters
    ----------
    identities
        Of the graphs.
    plans
        The digests of graphs whose plans are dropped.
    """

    identities: frozenset[str]
    plans: frozenset[str]

    control: ClassVar[bool] = True
    """It is taken in a full mailbox, and no fault counts it."""


class ServiceState:
    """Shared by a service's handle, its supervisor and the successive incarnations of its actor.

    Who writes what: The mailbox has its own lock. Only the one live incarnation writes memory, counters,
    quarantine and faults; the supervisor starts a successor only after the predecessor has handled its crash
    or stop, so there are never two writers. Any thread fills the cache of messages.

    Parameters
    ----------
    mailbox, memory
        The service's own.
    faults
        Scripted failures; None for none.
    workspace_limit
        Bytes of workspace that plans may use; None for the engine's own bound.
    plan_store
        Keeps plans on disk, for later processes; None for no store.
    autotune
        Whether warming a plan measures the library's candidates for it.
    cache_limit
        About the bytes of host memory for each cache: of messages, of graphs, and of plans.
    graph_limits
        How large graphs may be. None in a worker, whose parent has checked them.
    name
        The service's name in its log lines. None in a worker, whose parent adds the name.
    """

    def __init__(
        self,
        *,
        mailbox: Mailbox,
        memory: Memory,
        faults: FaultSource | None = None,
        workspace_limit: int | None = None,
        plan_store: PlanStore | None = None,
        autotune: bool = False,
        cache_limit: int = CACHE_BYTES,
        graph_limits: GraphLimits | None = None,
        name: str | None = None,
    ) -> None:
        self.mailbox = mailbox
        self.memory = memory
        self.faults = faults
        self.workspace_limit = workspace_limit
        self.plan_store = plan_store
        self.autotune = autotune
        self._graph_limits = graph_limits
        self.name = name
        self.builders: BuilderAccess | None = None
        """Connects to the service's builder process; None if plans are built in this process."""
        self.announce_build: Callable[[bool], None] = _nothing
        """Called on the build thread: with True when a build begins, with False when none is running."""
        self.counters = Counters()
        self.quarantined: dict[str, str] = {}
        """Digests of graphs that were running at two crashes → the crash's cause."""
        self.ended_by_build: dict[str, int] = {}
        """Digests of graphs → how many incarnations their builds have ended."""
        self.generation = 0
        """The number of the present incarnation: how many have become ready so far."""
        self.replayed = 0
        self.restarts = 0
        self.cache_limit = cache_limit
        self.messages = MessageCache(cache_limit, self.check_graph)

    def found(self, item: Any) -> CachedMessage:
        """The cache entry of an envelope's or a task's message, kept in it. Raises `InvalidRequest`."""
        cached: CachedMessage | None = item.found
        if cached is None:
            item.found = cached = self.messages.of(item.message)
        return cached

    def lowered(self, message: Compute) -> Lowered:
        """The graph of a message, cached. Any thread. Raises `InvalidRequest`."""
        return self.cached(message).lowered

    def cached(self, message: Compute) -> CachedMessage:
        """The cache entry of a message. Any thread. Raises `InvalidRequest`."""
        return self.messages.of(message)

    @property
    def most_operations(self) -> int:
        """How many operations a graph may have."""
        return GraphLimits().operations if self._graph_limits is None else self._graph_limits.operations

    def check_graph(self, graph: Graph) -> None:
        """Raise `InvalidRequest` for a graph over the service's limits. Any thread."""
        if self._graph_limits is not None:
            graph.check(self._graph_limits)

    def warmed(self, message: Warm) -> dict[str, OperationGraph]:
        """The graphs whose plans a `Warm` asks for, by digest. Raises `InvalidRequest`."""
        graphs = [self.lowered(request).graph for request in message.messages]
        graphs += [graph.body for graph in message.graphs]
        return {graph.digest(): graph for graph in graphs}

    def why_quarantined(self, graph: OperationGraph, number: int) -> QuarantinedRequest | None:
        """The error for a request whose graph is quarantined; None if it is not."""
        if not self.quarantined:
            return None
        digest = graph.digest()
        cause = self.quarantined.get(digest)
        if cause is None:
            return None
        return QuarantinedRequest(request_id=number, digest=digest, cause=cause, reproduce=token(graph))

    def blame_build(self, digest: str, cause: str) -> None:
        """Note which graph's build ended an incarnation. The second time, the graph is quarantined."""
        self.ended_by_build[digest] = self.ended_by_build.get(digest, 0) + 1
        if self.ended_by_build[digest] >= MOST_CRASHES:
            self.quarantined[digest] = cause

    def statistics(self, plans: PlanStatistics, worker_graphs: CacheStatistics | None = None) -> Statistics:
        """The service's counters at this moment, with the statistics of the live incarnation."""
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
        )

    def discard(self, result: object) -> None:
        """Free a buffer that nobody receives, unless a crash has ended it by then. Any thread."""
        if isinstance(result, BufferRef) and self.memory.is_live(result):
            try:
                self.mailbox.admit(Envelope(Discard(buffer=result)))
            except ActorStopped:
                return  # the service has stopped, and its memory goes with it

    def forget(self, identities: frozenset[str], plans: frozenset[str]) -> None:
        """Have graphs and plans dropped from the caches, in every process: see `Forget`. Any thread."""
        with contextlib.suppress(ActorStopped):  # the caches go with the service
            self.mailbox.admit(Envelope(Forget(identities=identities, plans=plans)))


def _nothing(_: bool) -> None:
    pass
