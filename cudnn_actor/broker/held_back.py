"""Messages that are held back because weights are to be overwritten that a run still reads.

A `WriteWeights` waits until all runs that read one of its weights have been answered. After its answer, a run
is never repeated, so no run ever reads weights of a later write. Meanwhile a later message waits, too, if it
is of the same model, or uses a buffer of a message that waits, or is a `Drain`. All other messages go on.

A held-back message has not begun: its caller may cancel it, and a stop or a crash returns it. When a write
may begin, all held-back messages return to the head of the mailbox, in order, and are checked again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cudnn_actor.actors import Envelope
from cudnn_actor.broker.footprints import NOTHING, Footprint, footprint
from cudnn_actor.broker.service_state import ServiceState
from cudnn_actor.protocol.errors import CudnnActorError
from cudnn_actor.protocol.messages.messages import Drain, RunModel, WriteWeights
from cudnn_actor.protocol.messages.operands import operands

__all__ = ["HeldBack"]


class _Held(msgspec.Struct, eq=False):
    """A message that waits, the model that it is of, and the buffers that it reads and writes."""

    envelope: Envelope
    model: Any
    reads: frozenset[int]
    writes: frozenset[int]


class HeldBack:
    """The messages of a service that are held back, in the order in which they came.

    Parameters
    ----------
    state
        The service's state.
    """

    def __init__(self, state: ServiceState) -> None:
        self._state = state
        self.messages: list[_Held] = []
        """Empty if none is held back, which is asked for each request."""

    def __len__(self) -> int:
        return len(self.messages)

    def must_wait(self, envelope: Envelope) -> bool:
        """Whether a message may not begin now. Then pass it to `add`."""
        message = envelope.message
        if type(message) is WriteWeights and self._is_read(message):
            return True
        return bool(self.messages) and self._is_behind(envelope)

    def add(self, envelope: Envelope) -> None:
        """Hold a message back, which is answered or returned by `take` later."""
        reads, writes = self._footprint(envelope)
        model = getattr(envelope.message, "model", None)
        self.messages.append(_Held(envelope, model, frozenset(reads), frozenset(writes)))

    @property
    def are_due(self) -> bool:
        """Whether any write can begin now."""
        messages = (held.envelope.message for held in self.messages)
        return any(type(message) is WriteWeights and not self._is_read(message) for message in messages)

    def take(self) -> list[Envelope]:
        """Remove and return all messages, in order. None has begun."""
        held, self.messages = self.messages, []
        return sorted((each.envelope for each in held), key=lambda envelope: envelope.number)

    def _is_read(self, message: WriteWeights) -> bool:
        """Whether a run has not been answered that reads one of these weights."""
        return self._state.models.are_read({ref.slot for ref in operands(message).values()})

    def _is_behind(self, envelope: Envelope) -> bool:
        """Whether a message must not overtake one that is held back. Those with lower numbers came later only
        because they waited elsewhere, for their plans, so they go first."""
        number, model = envelope.number, getattr(envelope.message, "model", None)
        reads, writes = map(frozenset, self._footprint(envelope))
        return any(
            type(envelope.message) is Drain
            or (model is not None and held.model == model)
            or not held.writes.isdisjoint(reads | writes)
            or not held.reads.isdisjoint(writes)
            for held in self.messages
            if held.envelope.number < number
        )

    def _footprint(self, envelope: Envelope) -> Footprint:
        """The footprint of a message; an empty one if the message will be refused when it begins."""
        message = envelope.message
        try:
            if type(message) is RunModel:
                return self._state.model_run(envelope).hazards
            return footprint(message, self._state.lower)
        except (CudnnActorError, TypeError, ValueError, AttributeError):
            return NOTHING
