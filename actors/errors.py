"""The one error that is both ours and pykka's."""

from __future__ import annotations

from typing import ClassVar

import pykka

from cudnn_actor.protocol import errors

__all__ = ["ActorStopped", "Crash"]


class ServiceStopped(errors.ServiceStopped, pykka.ActorDeadError):
    """Raised when the actor ended before it took the message up; pykka code knows it as ActorDeadError.

    It has its public base's name because tracebacks and log lines show the name of the class itself.
    """


ActorStopped = ServiceStopped
"""What our own code calls it, to tell it from its base."""


class Crash(Exception):
    """Raised by a handler to end its actor: what the actor stands on is broken, not just one request.

    Any other exception is the answer to that one message, and the actor goes on.
    """

    logged: ClassVar[bool] = False
    """Whether whoever raises it has written what there is to say: then the actor's death is no news."""
