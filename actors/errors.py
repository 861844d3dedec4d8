"""Errors of actors: `ActorStopped`, which is also a pykka error, and `Crash`."""

from __future__ import annotations

from typing import ClassVar

import pykka

from cudnn_actor.protocol import errors

__all__ = ["ActorStopped", "Crash"]


class ServiceStopped(errors.ServiceStopped, pykka.ActorDeadError):
    """Raised when the actor ended before it started the message. It is a pykka `ActorDeadError` too.

    It has the name of its public base class, because tracebacks and log lines show the class's own name.
    """


ActorStopped = ServiceStopped
"""The name that our own code uses, to tell the class from its base."""


class Crash(Exception):
    """Raised by a handler to end its actor: the actor's own state is broken, not just one request.

    Any other exception is the answer to that one message, and the actor continues.
    """

    logged: ClassVar[bool] = False
    """Whether the code that raises it has logged it already. Then the actor's death is not logged again."""
