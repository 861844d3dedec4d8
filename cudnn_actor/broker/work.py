"""A request that must be run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from cudnn_actor.actors import Envelope
from cudnn_actor.broker.deployments import Deployed, ModelRun
from cudnn_actor.broker.footprints import Footprint, footprint
from cudnn_actor.broker.message_cache import CachedMessage
from cudnn_actor.memory import Slot
from cudnn_actor.protocol.messages.lowering import Lowered
from cudnn_actor.protocol.messages.messages import Compute
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.supervision import FaultRule

__all__ = ["Work"]


class Work(msgspec.Struct, eq=False):
    """A request that the broker has found valid and that its host runs.

    Attributes
    ----------
    envelope
        The message, with the address of the reply.
    number
        The request's number.
    request
        The message to run: the envelope's own, or the part of it that remains to be done.
    slots
        The buffers that the request uses. The host holds them from the time at which the work may run until
        it has ended.
    cached
        The cache entry of the message; None for a message that runs no plan.
    ref
        The buffer that an `Allocate` fills, which no caller has received yet; None for all other messages.
    fault
        The fault to inject; None for none.
    injects
        Whether the work only injects the fault. After that, the message is started again.
    suspect
        Whether the request was running at a crash.
    alone
        Whether no other request may run beside it: a suspect, or one whose inputs were running at a crash.
    run
        The run of a `RunModel`; None for all other messages.
    warmed
        Graphs of a model whose first runs are prepared, too, once their plans are ready.
    """

    envelope: Envelope
    number: int
    request: Any
    slots: Sequence[Slot] = ()
    cached: CachedMessage | None = None
    ref: BufferRef | None = None
    fault: FaultRule | None = None
    injects: bool = False
    suspect: bool = False
    alone: bool = False
    run: ModelRun | None = None
    warmed: tuple[Deployed, ...] = ()

    @property
    def started_ns(self) -> int:
        """When it began, on `time.perf_counter_ns`'s clock; 0 if it has not."""
        return self.envelope.started_ns

    @property
    def unwanted(self) -> bool:
        """Whether its caller has left. One that runs again after a crash is never unwanted."""
        return self.envelope.is_unawaited and not self.envelope.crashes

    @property
    def has_staging(self) -> bool:
        """Whether it has staging memory, which a worker reads or writes."""
        return False

    @property
    def message(self) -> Any:
        """The message as it was sent."""
        return self.envelope.message

    def footprint(self, lowered: Callable[[Compute], Lowered]) -> Footprint:
        """The buffers with lasting contents that it reads and writes. `lowered` finds a message's graph."""
        return footprint(self.message, lowered) if self.run is None else self.run.footprint
