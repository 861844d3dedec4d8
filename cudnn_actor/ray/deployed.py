"""A replica of Ray Serve: a service, its models, and the Open Inference Protocol over HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from cudnn_actor.protocol.errors import InvalidRequest, ServiceStopped
from cudnn_actor.service.spawning import spawn
from cudnn_actor.serving.http_face import make_app
from cudnn_actor.serving.server import ServerOptions, serve_with

__all__ = ["Deployed", "forwarding", "replica_of"]


class Deployed:
    """The object that runs in a replica's process. Serve awaits the constructor and `__del__`.

    Parameters
    ----------
    options
        The options: the models, how requests are put into batches, and the service.

    Raises
    ------
    StartFailed, CudnnActorError
        The service cannot be started, or a model cannot be loaded.
    """

    async def __init__(self, options: ServerOptions) -> None:  # type: ignore[misc]  # Serve awaits it
        self._ends = contextlib.AsyncExitStack()
        try:
            self._gpu = await spawn(**options.service)
            self._ends.push_async_callback(self._gpu.aclose)
            server = await self._ends.enter_async_context(serve_with(self._gpu, options))
        except BaseException:
            await self._ends.aclose()
            raise
        self._catalog = server.catalog
        self.http = make_app(server.host, None, most_body=options.most_body)

    async def infer(
        self, inputs: Mapping[str, Any], *, model: str | None = None, timeout: float | None = None
    ) -> dict[str, np.ndarray]:
        """Run a model on arrays by name, in a batch with other requests, and return the outputs by name.

        Parameters
        ----------
        inputs
            The arrays.
        model
            The model's name; None if there is only one.
        timeout
            Seconds for everything together.

        Raises
        ------
        InvalidRequest
            No name is given, and there is not exactly one model. For other causes, see `CudnnRef.run`.
        NotServed
            There is no such model, or it is not loaded.
        CudnnActorError
            See `CudnnRef.run`; and `MailboxFull`, if too many requests wait for a batch.
        """
        names = [each.name for each in self._catalog.entries]
        if model is None and len(names) != 1:
            raise InvalidRequest(
                field="model", value=None, problem=f"is one of {', '.join(names) or 'none'}", fix="name one"
            )
        _, served = self._catalog.find(names[0] if model is None else model)
        arrays = {name: np.asarray(each) for name, each in inputs.items()}
        return await served.run(arrays, timeout)

    def check_health(self) -> None:
        """Raise `ServiceStopped` if the service has ended. Serve then replaces the replica."""
        if not self._gpu.alive:
            raise ServiceStopped(reason="it has given up")

    async def __del__(self) -> None:
        await self._ends.aclose()


def replica_of(options: ServerOptions) -> type[Deployed]:
    """The class of replicas with these options, so that `bind()` needs no arguments."""

    class Replica(Deployed):
        """A replica that has its options already."""

        async def __init__(self) -> None:  # type: ignore[misc]  # as above
            await super().__init__(options)

    return Replica


def forwarding() -> Starlette:
    """An ASGI application that passes each request to the application of the replica in its process.

    Serve takes the application before there is a replica.
    """
    return Starlette(routes=[Mount("/", app=_forward)])


class _Connection:
    """A connection of Serve's proxy, which cancels the request itself if its client has gone."""

    lost = False
    on_lost: object = None


async def _forward(scope: Scope, receive: Receive, send: Send) -> None:
    from ray import serve  # noqa: PLC0415 - it is there in a replica, and slow to import elsewhere

    replica: Any = serve.get_replica_context().servable_object
    await replica.http({**scope, "state": {"connection": _Connection()}}, receive, send)
