"""What outlives an incarnation of the actor: the service's memory of itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cudnn_actor.actors import Counters, Envelope, Mailbox
from cudnn_actor.actors.errors import ActorStopped
from cudnn_actor.broker.recovery import MOST_CRASHES
from cudnn_actor.engines.base import BuilderAccess
from cudnn_actor.memory import Memory, Slot
from cudnn_actor.plans.store import PlanStore
from cudnn_actor.protocol.buffers import BufferRef
from cudnn_actor.protocol.errors import QuarantinedRequest
from cudnn_actor.protocol.lowering import Lowered, Signature, lower, signature
from cudnn_actor.protocol.messages import Compute, Free
from cudnn_actor.protocol.receipts import PlanStatistics, Statistics
from cudnn_actor.protocol.validation import check_scalars
from cudnn_actor.supervision import FaultSource

__all__ = ["Bound", "CachedMessage", "ServiceState"]

_MOST_SIGNATURES, _MOST_MESSAGES = 4096, 1024


class CachedMessage:
    """A message that has been sent, with what need not be found out again when it is sent again as it is.

    Messages do not change, so only the end of a buffer can make it wrong: each piece carries the number of
    ends (`MemoryTable.epoch`) that had been counted before it was found, and holds while that is the number.
    An end in between leaves an old number, never a new one with old knowledge.
    """

    __slots__ = ("body", "bound", "live_at", "lowered", "message", "noted")

    def __init__(self, message: Compute, lowered: Lowered) -> None:
        self.message = message
        self.lowered = lowered
        self.live_at = -1
        """At which number of ends its references were live. A sender's, on any thread."""
        self.bound: Bound | None = None
        """The live incarnation's."""
        self.body: bytes | None = None
        """The message as bytes, for a worker process."""
        self.noted = False
        """Whether its plan is known to those that warm another worker."""


class Bound(NamedTuple):
    """What a message runs on: its slots and scalars. The engine's bindings are the slots' to keep or drop."""

    epoch: int
    slots: Sequence[Slot]
    scalars: Sequence[float]


class ServiceState:
    """Shared between a service's handle, its supervisor and one incarnation of its actor after another.

    Who writes what: the mailbox guards itself. Memory, counters, quarantine and faults are written by
    the one live incarnation alone; the supervisor starts a successor only after its predecessor's last
    act, so there are never two writers. `lowered` and `cached` are caches of pure functions, filled by any
    thread: the worst that a race costs is the same answer computed twice.

    Parameters
    ----------
    mailbox, memory
        The service's own.
    faults
        Scripted failures; None for none.
    workspace_limit
        Bytes of workspace that plans may use; None for the engine's own bound.
    plan_store
        Where plans are kept between processes; None for nowhere.
    autotune
        Whether warming a plan measures the library's candidates for it.
    name
        What the service's log lines say that they are of; None in a worker, whose parent says it.
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
        name: str | None = None,
    ) -> None:
        self.mailbox = mailbox
        self.memory = memory
        self.faults = faults
        self.workspace_limit = workspace_limit
        self.plan_store = plan_store
        self.autotune = autotune
        self.name = name
        self.builders: BuilderAccess | None = None
        """The way to the service's builder process; None where plans are built in this one."""
        self.announce_build: Callable[[bool], None] = _nothing
        """Told on the build thread when a build begins, and when none is in work."""
        self.counters = Counters()
        self.quarantined: dict[str, str] = {}
        """Digests of graphs that were running at two crashes → the crash's cause."""
        self.ended_by_build: dict[str, int] = {}
        """Digests of graphs → the incarnations that their builds have ended."""
        self.generation = 0
        """Incarnations that have become ready; the present one's number."""
        self.replayed = 0
        self.restarts = 0
        self._lowered: dict[Signature, Lowered] = {}
        self._cached: dict[int, CachedMessage] = {}

    def lowered(self, message: Compute) -> Lowered:
        """The graph of a message, remembered. Any thread. Raises `InvalidRequest`."""
        return self.cached(message).lowered

    def cached(self, message: Compute) -> CachedMessage:
        """What is known of a message, which may come again and again. Any thread. Raises `InvalidRequest`."""
        known = self._cached.get(id(message))
        if known is None or known.message is not message:
            known = CachedMessage(message, self._lower(message))
            if len(self._cached) >= _MOST_MESSAGES:
                self._cached.clear()
            self._cached[id(message)] = known  # which keeps the message, so that no other gets its id
        return known

    def _lower(self, message: Compute) -> Lowered:
        check_scalars(message)
        try:
            key = signature(message)
            known = self._lowered.get(key)
        except (AttributeError, TypeError):
            return lower(message)  # which says what is wrong with a field
        if known is None:
            known = lower(message)
            if len(self._lowered) >= _MOST_SIGNATURES:
                self._lowered.clear()
            self._lowered[key] = known
        return known

    def why_quarantined(self, lowered: Lowered, number: int) -> QuarantinedRequest | None:
        """The error of a request whose plan is quarantined; None where it is not."""
        if not self.quarantined:
            return None
        digest = lowered.graph.digest()
        cause = self.quarantined.get(digest)
        if cause is None:
            return None
        return QuarantinedRequest(request_id=number, digest=digest, cause=cause)

    def blame_build(self, digest: str, cause: str) -> None:
        """Note which graph's build ended an incarnation: the second time it is quarantined."""
        self.ended_by_build[digest] = self.ended_by_build.get(digest, 0) + 1
        if self.ended_by_build[digest] >= MOST_CRASHES:
            self.quarantined[digest] = cause

    def statistics(self, plans: PlanStatistics) -> Statistics:
        """The service's counters at this moment, and those of its plans, which the live incarnation keeps."""
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
        """Free a buffer that was allocated for a caller who has gone. Any thread."""
        if isinstance(result, BufferRef):
            try:
                self.mailbox.admit(Envelope(Free(buffer=result)))
            except ActorStopped:
                return  # and with the service goes its memory


def _nothing(_: bool) -> None:
    pass
