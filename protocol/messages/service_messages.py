"""Messages to the service itself: whether it answers, its counters, the end of earlier requests."""

from __future__ import annotations

from cudnn_actor.protocol.messages.any_message import AnyMessage
from cudnn_actor.protocol.messages.receipts import Statistics

__all__ = ["Drain", "GetStatistics", "Ping"]


class Ping(AnyMessage[int], tag=True):
    """Check that the service responds; answered by its generation."""

    control = True


class GetStatistics(AnyMessage[Statistics], tag=True):
    """Ask for counters; answered by `Statistics`."""

    control = True


class Drain(AnyMessage[None], tag=True):
    """Wait for everything sent before: answered by None once all of it has been answered."""
