"""What stands behind handles: the one place where tests reach what users of a service or a model cannot see.

A handle hides its service, so that code that runs beside a service runs as an attached client, too. Tests of
crashes and leaks need what is behind it. They ask for it here, so its name stands in one place.
"""

from __future__ import annotations

from typing import Any

import pytest

from cudnn_actor.attached.client.delivery import Delivery
from cudnn_actor.processes.launching import Launcher

__all__ = [
    "answers_cannot_be_taken",
    "give_engine",
    "gpu_behind",
    "isolation_of",
    "kept_by",
    "launchers",
    "portal_of",
    "service_behind",
    "sessions_of",
    "worker_source_of",
]


def service_behind(handle: Any) -> Any:
    """The service of a handle or of a spawning; of an attached client, what it has in place of a service."""
    return handle._service


def gpu_behind(model: Any) -> Any:
    """The handle with which a model was loaded, or that a blocking handle stands on."""
    return model._gpu


def kept_by(model: Any) -> Any:
    """What a model keeps: its graphs with their weights (`cudnn_actor.models.keeping.Keeping`)."""
    return model._keeping


def portal_of(handle: Any) -> Any:
    """The event loop's thread behind a blocking handle (`cudnn_actor.blocking.portal.Portal`)."""
    return handle._portal


def launchers() -> tuple[Launcher, ...]:
    """The launchers that this process has, one for each set of modules."""
    return tuple(Launcher._shared.values())


def isolation_of(service: Any) -> Any:
    """How a service's actor runs (`cudnn_actor.isolation.base.Isolation`)."""
    return service._isolation


def worker_source_of(service: Any) -> Any:
    """What launches a service's workers and has its standby, in process isolation."""
    return isolation_of(service)._life.source


def give_engine(service: Any, engine: object) -> None:
    """Have a service that has not started use another engine in place of its own."""
    isolation_of(service)._engine = engine


def answers_cannot_be_taken(patch: pytest.MonkeyPatch) -> None:
    """Have attached clients raise `MemoryError` where they take an answer to a message that is new."""

    def fail(*_: object) -> None:
        raise MemoryError

    patch.setattr(Delivery, "_take_enveloped", fail)


def sessions_of(served: Any) -> Any:
    """The sessions of a server's clients (`cudnn_actor.attached.server.session.Session`)."""
    return served._sessions
