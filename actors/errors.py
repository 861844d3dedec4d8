"""The one error that is both ours and pykka's."""

from __future__ import annotations

import pykka

from cudnn_actor.protocol.errors import ServiceStopped

__all__ = ["ActorStopped", "Crash"]


class ActorStopped(ServiceStopped, pykka.ActorDeadError):
    """Raised when the actor ended before it took the message up; pykka code knows it as ActorDeadError."""


class Crash(Exception):
    """Raised by a handler to end its actor: what the actor stands on is broken, not just one request.

    Any other exception is the answer to that one message, and the actor goes on.
    """
