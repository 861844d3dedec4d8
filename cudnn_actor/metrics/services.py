"""The services whose metrics a face publishes."""

from __future__ import annotations

from typing import Protocol

from cudnn_actor.protocol.errors import InvalidRequest, ServiceStopped
from cudnn_actor.service.metrics import Metrics

__all__ = ["HasMetrics", "Services"]


class HasMetrics(Protocol):
    """A service, or a handle of one: `CudnnRef`, `CudnnService`, `cudnn_actor.blocking.BlockingRef`."""

    def metrics(self) -> Metrics:
        """The service's metrics. Any thread; never blocks."""


class Services:
    """Any number of services, each with a name of its own. Any thread may use it.

    The label `service` has a service's name, so no two may have the same: `spawn(name=...)`. A service that
    has ended keeps its last numbers until it is removed. In a forked child, the services of its parent are
    skipped.

    Parameters
    ----------
    services
        Services, or handles of them.

    Raises
    ------
    InvalidRequest
        Two services have the same name.
    """

    def __init__(self, *services: HasMetrics) -> None:
        self._services: dict[str, HasMetrics] = {}
        for service in services:
            self.add(service)

    def add(self, service: HasMetrics) -> None:
        """Publish the metrics of one more service.

        Raises `InvalidRequest` if another has the same name, and `ServiceStopped` in a forked child.
        """
        name = service.metrics().service
        # This is one call of a C function. So if two threads add services of one name, one of them finds the
        # other's.
        if self._services.setdefault(name, service) is not service:
            raise InvalidRequest(
                field="service",
                value=name,
                problem="is the name of another service here",
                fix='spawn one of them with another name: spawn(name="...")',
            )

    def remove(self, service: HasMetrics) -> None:
        """Stop publishing the metrics of a service. Nothing happens if it was not added."""
        for name, each in tuple(self._services.items()):
            if each is service:
                self._services.pop(name, None)

    def _read(self) -> list[Metrics]:
        """The metrics of all services at this moment, each read once."""
        found: list[Metrics] = []
        for service in tuple(self._services.values()):
            try:
                found.append(service.metrics())
            except ServiceStopped:  # a forked child
                continue
        return found
