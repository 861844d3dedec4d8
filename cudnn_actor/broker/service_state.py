"""The state of a service that outlives an incarnation of its actor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from cudnn_actor.actors import Counters, Envelope, Mailbox
from cudnn_actor.actors.errors import ActorStopped
from cudnn_actor.broker.recovery import MOST_CRASHES
from cudnn_actor.engines.base import BuilderAccess
from cudnn_actor.memory import Memory, Slot
from cudnn_actor.plans.store import PlanStore
from cudnn_actor.protocol.buffers import BufferRef
from cudnn_actor.protocol.errors import QuarantinedRequest
from cudnn_actor.protocol.graph import OperationGraph
from cudnn_actor.protocol.limits import GraphLimits
from cudnn_actor.protocol.lowering import Lowered, Signature, lower, signature
from cudnn_actor.protocol.messages import Compute, Free, RunGraph, Warm
from cudnn_actor.protocol.named_graph import Graph
from cudnn_actor.protocol.receipts import PlanStatistics, Statistics
from cudnn_actor.protocol.reproduction import token
from cudnn_actor.supervision import FaultSource

__all__ = ["Bound", "CachedMessage", "Discard", "ServiceState"]

_MOST_SIGNATURES, _MOST_MESSAGES = 4096, 1024


class Discard(Free, frozen=True, kw_only=True, tag=True):
    """A `Free` by the service itself, of a buffer that nobody receives. It may have ended by then."""


class CachedMessage:
    """A message that has been sent, with what was computed for it, to be reused when it is sent again.

    Messages are immutable, so only the end of a buffer can make a cached piece wrong. Each piece that depends
    on buffers carries the epoch (`MemoryTable.epoch`: how many buffers have ended), and is valid while the
    table still has that epoch. The epoch is read before the piece is computed. So if a buffer ends in
    between, the piece carries an old epoch and is computed anew; it never carries a new epoch with old
    contents.
    """

    __slots__ = ("body", "bound", "lowered", "message", "noted")

    def __init__(self, message: Compute, lowered: Lowered) -> None:
        self.message = message
        self.lowered = lowered
        self.bound: Bound | None = None
        """Written by senders and by the live incarnation, on any thread. In the parent, all that are ever
        written have the same slots, of which each is the reference's as long as the reference is live."""
        self.body: bytes | None = None
        """The message as bytes, for a worker process."""
        self.noted = False
        """Whether its plan is on the list of plans with which another worker is warmed."""


class Bound(msgspec.Struct, eq=False):
    """The slots and scalars that a message runs on. Each slot keeps or drops the engine's binding itself."""

    epoch: int
    slots: Sequence[Slot]
    scalars: Sequence[float]
    has_bindings: bool = False
    """Whether each slot has its binding, which it then keeps while the epoch lasts. Written by the runner."""


class ServiceState:
    """Shared by a service's handle, its supervisor and the successive incarnations of its actor.

    Who writes what: The mailbox has its own lock. Only the one live incarnation writes memory, counters,
    quarantine and faults; the supervisor starts a successor only after the predecessor has handled its crash
    or stop, so there are never two writers. `lowered` and `cached` are caches of pure functions, which any
    thread fills: a race only computes the same result twice.

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
        self._lowered: dict[Signature, Lowered] = {}
        self._cached: dict[int, CachedMessage] = {}

    def lowered(self, message: Compute) -> Lowered:
        """The graph of a message, cached. Any thread. Raises `InvalidRequest`."""
        return self.cached(message).lowered

    def cached(self, message: Compute) -> CachedMessage:
        """The cache entry of a message. Any thread. Raises `InvalidRequest`."""
        known = self._cached.get(id(message))
        if known is None or known.message is not message:
            known = CachedMessage(message, self._lower(message))
            if len(self._cached) >= _MOST_MESSAGES:
                self._cached.clear()
            self._cached[id(message)] = known  # the entry keeps the message alive: no other gets its id
        return known

    @property
    def most_operations(self) -> int:
        """How many operations a graph may have."""
        return GraphLimits().operations if self._graph_limits is None else self._graph_limits.operations

    def check_graph(self, graph: Graph) -> None:
        """Raise `InvalidRequest` for a graph over the service's limits. Any thread."""
        if self._graph_limits is not None:
            graph.check(self._graph_limits)

    def _lower(self, message: Compute) -> Lowered:
        if type(message) is RunGraph and isinstance(message.graph, Graph):
            self.check_graph(message.graph)
        try:
            key = signature(message)
            known = self._lowered.get(key)
        except (AttributeError, TypeError):
            return lower(message)  # raises the error that names the wrong field
        if known is None:
            known = lower(message)
            if len(self._lowered) >= _MOST_SIGNATURES:
                self._lowered.clear()
            self._lowered[key] = known
        return known

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

    def statistics(self, plans: PlanStatistics) -> Statistics:
        """The service's counters at this moment, with the plan statistics of the live incarnation."""
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
        )

    def discard(self, result: object) -> None:
        """Free a buffer that nobody receives, unless a crash has ended it by then. Any thread."""
        if isinstance(result, BufferRef) and self.memory.is_live(result):
            try:
                self.mailbox.admit(Envelope(Discard(buffer=result)))
            except ActorStopped:
                return  # the service has stopped, and its memory goes with it


def _nothing(_: bool) -> None:
    pass
