"""What stands behind handles: the one place where tests reach what users of a service or a model cannot see.

A handle hides its service, so that code that runs beside a service runs as an attached client, too. Tests of
crashes and leaks need what is behind it. They ask for it here, so its name stands in one place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest

from cudnn_actor.actors import Actor
from cudnn_actor.attached.client.delivery import Delivery
from cudnn_actor.attached.client.link import Link
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.launching import Launcher
from cudnn_actor.supervision.child import ChildSpec
from cudnn_actor.supervision.supervisor import Supervisor

__all__ = [
    "actors_of",
    "announced_segments",
    "answers_cannot_be_taken",
    "channel_of",
    "dispatching_of",
    "give_engine",
    "gpu_behind",
    "has_service",
    "host_is_awaited",
    "is_waking",
    "isolation_of",
    "kept_by",
    "launchers",
    "portal_of",
    "replication_of",
    "requests_cannot_be_noted",
    "sent_by",
    "service_behind",
    "sessions_of",
    "sizes_of_batches",
    "specs_of",
    "supervisor_of",
    "worker_source_of",
]


def service_behind(handle: Any) -> Any:
    """The service of a handle or of a spawning; of an attached client, what it has in place of a service."""
    return handle._service


def has_service(spawning: Any) -> bool:
    """Whether a spawning has made its service yet."""
    return spawning._made is not None


def supervisor_of(service: Any) -> Supervisor:
    """The supervisor of a service that has started."""
    supervisor: Supervisor | None = service._supervisor
    assert supervisor is not None
    return supervisor


def specs_of(supervisor: Supervisor) -> dict[str, ChildSpec]:
    """The specs that a supervisor starts and watches its children by. They may be replaced."""
    return supervisor._specs


def actors_of(supervisor: Supervisor) -> dict[str, Actor]:
    """The actors that a supervisor's children run as now."""
    return supervisor._actors


def sizes_of_batches(batched: Any) -> tuple[int, ...]:
    """The numbers of samples in the batches of a batched model."""
    sizes: tuple[int, ...] = batched._rules.sizes
    return sizes


def is_waking(batched: Any) -> bool:
    """Whether a batched model will look for a batch to start in a next turn of its loop."""
    waking: bool = batched._waking
    return waking


def dispatching_of(pool: Any) -> Any:
    """How a pool gives requests to its members (`cudnn_actor.pool.dispatching.Dispatching`)."""
    return pool._dispatching


def replication_of(pool: Any) -> Any:
    """What the members or replicas of a pool have copies of."""
    return pool._replication


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
    return tuple(Launcher.shared.values())


def isolation_of(service: Any) -> Any:
    """How a service's actor runs (`cudnn_actor.isolation.base.Isolation`)."""
    return service._isolation


def worker_source_of(service: Any) -> Any:
    """What launches a service's workers and has its standby, in process isolation."""
    return isolation_of(service).life.source


def give_engine(service: Any, engine: object) -> None:
    """Have a service that has not started use another engine in place of its own."""
    isolation_of(service).engine = engine


def answers_cannot_be_taken(patch: pytest.MonkeyPatch) -> None:
    """Have attached clients raise `MemoryError` where they take an answer to a message that is new."""

    def fail(*_: object) -> None:
        raise MemoryError

    patch.setattr(Delivery, "_take_enveloped", fail)


def requests_cannot_be_noted(client: Any) -> None:
    """Have an attached client raise `MemoryError` where it notes a request for its next frame."""

    class Full(list[Any]):
        def append(self, _: object) -> None:
            raise MemoryError

    service_behind(client).state.mailbox._unsent = Full()


def host_is_awaited(dispatcher: Any) -> bool:
    """Whether any thread waits for the worker host, which another thread has."""
    return bool(dispatcher._waiting)


def channel_of(link: Link) -> Channel:
    """The channel by which an attached client sends frames and gets answers."""
    return link._channel


def sent_by(link: Link | Delivery) -> Mapping[int, Any]:
    """What an attached client has sent and has no answer to, by the numbers of the requests."""
    return link._sent


def announced_segments(link: Link) -> Collection[object]:
    """The segments of shared memory that an attached client has told its server of, and still has."""
    return link._shared._numbers


def sessions_of(served: Any) -> Any:
    """The sessions of a server's clients (`cudnn_actor.attached.server.session.Session`)."""
    return served._sessions
