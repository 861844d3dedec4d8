"""A request that is to be run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cudnn_actor.actors import Envelope
from cudnn_actor.broker.state import CachedMessage
from cudnn_actor.memory import Slot
from cudnn_actor.protocol.buffers import BufferRef
from cudnn_actor.supervision import FaultRule

__all__ = ["Work"]


class Work:
    """A request that the broker has found valid, and that its host is to run.

    Attributes
    ----------
    envelope
        With the address of the reply.
    number
        The request's.
    request
        What is to be run: the envelope's message, or what is left of it.
    slots
        The buffers that it uses. The host holds them from when the work may run until it has ended.
    cached
        What is known of its message; None for one that runs no plan.
    ref
        The buffer that it fills and nobody has received yet; None for all but an `Allocate`.
    fault
        What is to befall it; None for nothing.
    injects
        Whether it is run for its fault alone, and its message taken up again behind it.
    suspect
        Whether it was running at a crash.
    """

    # Of most requests these stay as they are.
    fault: FaultRule | None = None
    injects = False
    suspect = False

    cached: CachedMessage | None = None
    ref: BufferRef | None = None

    def __init__(self, envelope: Envelope, request: Any, slots: Sequence[Slot] = ()) -> None:
        self.envelope = envelope
        self.number = envelope.number
        self.request = request
        self.slots = slots

    @property
    def started_ns(self) -> int:
        """When it began, on `time.perf_counter_ns`'s clock; 0 where it has not."""
        return self.envelope.started_ns

    @property
    def message(self) -> Any:
        """What was asked."""
        return self.envelope.message
