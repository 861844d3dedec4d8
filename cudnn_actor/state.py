"""What outlives an incarnation of the actor: the service's memory of itself."""

from __future__ import annotations

import contextlib

from cudnn_actor.actors import Counters, Envelope, Mailbox
from cudnn_actor.actors.errors import ActorStopped
from cudnn_actor.memory import MemoryTable
from cudnn_actor.plan_store import PlanStore
from cudnn_actor.protocol.buffers import BufferRef
from cudnn_actor.protocol.lowering import Lowered, Signature, lower, signature
from cudnn_actor.protocol.messages import Compute, Free
from cudnn_actor.protocol.validation import check_scalars
from cudnn_actor.supervision import FaultInjector

__all__ = ["ServiceState"]

_MOST_SIGNATURES = 4096


class ServiceState:
    """Shared between a service's handle, its supervisor and one incarnation of its actor after another.

    Who writes what: the mailbox guards itself. Memory, counters, quarantine and faults are written by
    the one live incarnation alone; the supervisor starts a successor only after its predecessor's last
    act, so there are never two writers. `lowered` is a cache of a pure function, filled by anyone: the
    worst that a race costs is the same answer computed twice.

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
    """

    def __init__(
        self,
        *,
        mailbox: Mailbox,
        memory: MemoryTable,
        faults: FaultInjector | None = None,
        workspace_limit: int | None = None,
        plan_store: PlanStore | None = None,
        autotune: bool = False,
    ) -> None:
        self.mailbox = mailbox
        self.memory = memory
        self.faults = faults
        self.workspace_limit = workspace_limit
        self.plan_store = plan_store
        self.autotune = autotune
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

    def lowered(self, message: Compute) -> Lowered:
        """The graph of a message, remembered. Any thread. Raises `InvalidRequest`."""
        check_scalars(message)
        key: Signature = ()
        known: Lowered | None = None
        with contextlib.suppress(AttributeError, TypeError):  # `lower` says what is wrong with a field
            key = signature(message)
            known = self._lowered.get(key)
        if known is None:
            known = lower(message)
            if len(self._lowered) >= _MOST_SIGNATURES:
                self._lowered.clear()
            self._lowered[key] = known
        return known

    def discard(self, result: object) -> None:
        """Free a buffer that was allocated for a caller who has gone. Any thread."""
        if isinstance(result, BufferRef):
            try:
                self.mailbox.admit(Envelope(Free(buffer=result)))
            except ActorStopped:
                return  # and with the service goes its memory
