"""The administration of the server: requests that ask about it and its models, or change them. That is all of
the protocol but inference.

These requests are few. Where several processes serve, the process that owns the service answers all of them.
"""

from __future__ import annotations

from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from cudnn_actor.serving.catalog import Catalog
from cudnn_actor.serving.regions import Region, SharedMemory

__all__ = ["Administration", "OwnAdministration", "region_record"]


class Administration(Protocol):
    """The requests of the module's docstring, as methods. They return records of the protocol."""

    async def index(self, *, ready: bool) -> list[dict[str, str]]:
        """All models with their states; with `ready`, those that answer."""

    async def statistics(self, name: str, version: str) -> list[dict[str, Any]]:
        """The counters of a model, or, for "", of all models that answer. Raises `NotServed`."""

    async def load(self, name: str) -> None:
        """Load a model again from its file. Raises `NotServed`, and as `CudnnRef.load`."""

    async def unload(self, name: str) -> None:
        """Stop serving a model. Raises `NotServed`."""

    async def regions(self, name: str) -> list[dict[str, Any]]:
        """A region of shared memory, or, for "", all regions. Raises `Refused` if it is not registered."""

    async def register(self, name: str, key: str, offset: int, nbytes: int) -> None:
        """Open a region. Raises `Refused`, and `NotOffered` if this server takes no regions."""

    async def unregister(self, name: str) -> None:
        """Forget a region, or, for "", all regions."""

    async def metrics(self) -> bytes:
        """The metrics as Prometheus's text."""


class OwnAdministration:
    """The administration in the process that owns the service. It runs on one event loop.

    Parameters
    ----------
    catalog
        The models.
    memory
        The regions.
    registry
        The Prometheus registry that has the metrics.
    """

    def __init__(self, catalog: Catalog, memory: SharedMemory, registry: CollectorRegistry) -> None:
        self._catalog, self._memory, self._registry = catalog, memory, registry

    async def index(self, *, ready: bool) -> list[dict[str, str]]:
        """All models with their states; with `ready`, those that answer."""
        return [
            {
                "name": each.name,
                "version": each.origin.version if each.served is None else each.served.version,
                "state": each.state,
                "reason": each.reason,
            }
            for each in self._catalog.entries
            if each.served is not None or not ready
        ]

    async def statistics(self, name: str, version: str) -> list[dict[str, Any]]:
        """The counters of a model, or, for "", of all models that answer."""
        chosen = [self._catalog.find(name, version)[0]] if name else self._catalog.entries
        return [
            {"name": each.name, "version": each.served.version, **each.counts.report()}
            for each in chosen
            if each.served is not None
        ]

    async def load(self, name: str) -> None:
        """Load a model again from its file."""
        await self._catalog.load(name)

    async def unload(self, name: str) -> None:
        """Stop serving a model."""
        await self._catalog.unload(name)

    async def regions(self, name: str) -> list[dict[str, Any]]:
        """A region of shared memory, or, for "", all regions."""
        return [region_record(each) for each in self._memory.status(name)]

    async def register(self, name: str, key: str, offset: int, nbytes: int) -> None:
        """Open a region."""
        self._memory.register(name, key, offset, nbytes)

    async def unregister(self, name: str) -> None:
        """Forget a region, or, for "", all regions."""
        self._memory.unregister(name)

    async def metrics(self) -> bytes:
        """The metrics as Prometheus's text."""
        return generate_latest(self._registry)


def region_record(region: Region) -> dict[str, Any]:
    """The protocol's record of a region."""
    return {
        "name": region.name,
        "key": region.key,
        "offset": region.offset,
        "byte_size": region.nbytes,
    }
