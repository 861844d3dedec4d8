"""`CudnnRef`, the handle for async code that `spawn` returns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from typing import Any

import pykka

from cudnn_actor.actors import within
from cudnn_actor.models.inputs import named_once
from cudnn_actor.protocol.errors import CudnnActorError
from cudnn_actor.protocol.messages.messages import Drain
from cudnn_actor.protocol.types.checks import require_seconds
from cudnn_actor.service.computing import Computable, compute
from cudnn_actor.service.health import Health, HealthState
from cudnn_actor.service.metrics import Metrics
from cudnn_actor.service.requests import Requests
from cudnn_actor.service.scopes import Scope
from cudnn_actor.service.service import CudnnService
from cudnn_actor.supervision import FaultInjector, Fired, LifecycleEvent

__all__ = ["DRAIN_S", "CudnnRef"]

DRAIN_S = 10.0
"""Seconds that `CudnnRef.aclose` waits for earlier requests by default."""


class CudnnRef(Requests):
    """A service, for asyncio code. Any number of tasks and event loops may share one.

    Requests of one sender run in the order in which it sent them. Every request ends exactly once: with
    its answer or with a typed error (`protocol.errors`).

    Parameters
    ----------
    service
        A started service.
    """

    def __repr__(self) -> str:
        word, unused = self._service._state_word(), self._service.unused_gpu
        facts = [] if word == HealthState.READY else [word]
        facts += [] if unused is None else [unused]
        return f"<CudnnRef {self._state.name!r} on {self.device}{''.join(f': {fact}' for fact in facts)}>"

    def _repr_html_(self) -> str:
        return self._service._html(repr(self))

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:N"."""
        return self._service.device

    @property
    def worker_pid(self) -> int | None:
        """Process id of the serving worker; None in thread isolation, and while no worker serves."""
        return self._service.worker_pid

    @property
    def generation(self) -> int:
        """The number of the actor's current incarnation, counted from 1."""
        return self._state.generation

    @property
    def alive(self) -> bool:
        """Whether the service has not ended. Sends no message; any thread; never blocks."""
        return self._service.alive

    @property
    def ready(self) -> bool:
        """Whether an incarnation of the actor serves now. Sends no message; any thread; never blocks.

        False while the actor is being replaced; requests sent then wait for its successor.
        """
        return self._service.ready

    def health(self) -> Health:
        """The service's state, as far as this process knows. Sends no message; any thread; never blocks.

        Raises `ServiceStopped` in a forked child.
        """
        return self._service.health()

    def metrics(self) -> Metrics:
        """Counters, latencies and state, as far as this process knows. Sends no message; any thread.

        On CUDA, it waits for the driver for 5 ms at most, except on the thread of an event loop. Else it
        never blocks. `cudnn_actor.metrics.prometheus` publishes the metrics. Raises `ServiceStopped` in a
        forked child.
        """
        return self._service.metrics()

    @property
    def actor_ref(self) -> pykka.ActorRef[Any]:
        """A pykka reference to the actor, for any thread; it stays valid across restarts."""
        return self._service.actor_ref

    def events(self) -> AsyncGenerator[LifecycleEvent, None]:
        """All lifecycle events since the service's start, then each new one as it happens, until it stops.

        Raises `ServiceStopped` in a forked child.
        """
        self._state.mailbox.check_process()
        return self._service.events.follow()

    def scope(self) -> Scope:
        """A scope: it has the same methods for requests, and frees the buffers and models that they make.

        `async with gpu.scope() as scope:`, then `await scope.upload(array)` and the like. With
        `scope.keep(buffer)`, a buffer outlives it. See `Scope`. Sends no message.
        """
        return Scope(self)

    async def compute(
        self,
        what: Computable,
        arrays: Mapping[str, Any] | None = None,
        /,
        *,
        also: Sequence[str] = (),
        timeout: float | None = None,
        **named: Any,
    ) -> Any:
        """Arrays in, arrays out: the results of a graph, an operation or a convolution.

        Calls are `compute(graph, x=x, w=w)`, `compute(MaxPool, x=x, window=window)` or
        `compute(ConvFwd, x=x, w=w)`. All buffers that a call allocates are freed at its end, also if it fails
        or is cancelled. Upload arrays that are used again, such as weights, and give the `BufferRef` of each:
        these buffers stay.

        Parameters
        ----------
        what
            A graph, as `GraphBuilder.build` gives it; the class of an operation; or `ConvFwd`, `ConvBwdData`
            or `ConvBwdFilter`.
        arrays, named
            Arguments by name. For each input of the graph or operand of the operation: an array, as `upload`
            takes it, or a `BufferRef`. For an operation, also its other fields; for a convolution, also the
            other arguments of `conv_fwd` and its siblings. Arrays for a graph are cast to the dtypes of its
            inputs, within their kind. Arrays for an operation are not cast, and the results' dtypes follow
            from theirs. An output that is given as an array is copied, and the copy is overwritten, or added
            to. An argument whose name is `also` or `timeout` can only be given in `arrays`.
        also
            The operation's optional outputs that are wanted, too, as in `also=("index",)`.
        timeout
            Seconds for everything together, as in `ask`.

        Returns
        -------
        numpy.ndarray or tuple of them
            The output, dims in N, C, spatial order; a named tuple if there are several. A graph's outputs are
            followed by the inputs that it updates and that were given as arrays. An updated input that was
            given as a `BufferRef` is overwritten in its buffer.

        Raises
        ------
        InvalidRequest
            See `upload` and `apply`.
        TypeError
            The operation has no such field.
        CudnnActorError
            See `apply`.
        """
        with within(timeout) as deadline:
            async with self.scope() as scope:
                return await compute(scope, what, named_once(arrays, named), also, deadline)

    async def aclose(self, *, drain_s: float = DRAIN_S) -> None:
        """Wait up to `drain_s` seconds for earlier requests to finish, then stop. Idempotent.

        Requests that have not finished by then get `ServiceStopped`. If the wait is cancelled, the
        cancellation is raised once the service has stopped. Raises `InvalidRequest` if `drain_s` is not a
        number of seconds >= 0. In a forked child it returns at once, and the parent's service keeps running.
        """
        if self._service.forked:
            return
        require_seconds("drain_s", drain_s)
        try:
            with contextlib.suppress(CudnnActorError):  # however the drain ends, the service is stopped next
                await self.ask(Drain(), timeout=drain_s)
        except GeneratorExit:  # dropped with its event loop, so nothing can be awaited
            self._service.end("closed")
            raise
        except BaseException:
            await self._end()
            raise
        await self._end()

    async def _end(self) -> None:
        await _outlast(asyncio.wrap_future(self._service.end("closed")), self._service)

    @property
    def faults_fired(self) -> tuple[Fired, ...]:
        """The scripted faults that have fired so far, in order; for tests."""
        faults = self._state.faults
        return faults.fired if isinstance(faults, FaultInjector) else ()


async def _outlast(stopped: Awaitable[Any], service: CudnnService) -> None:
    """Wait for `stopped`, even when cancelled; then raise the cancellation.

    In a forked child `stopped` never completes, so a cancellation is raised at once.
    """
    waiting = asyncio.ensure_future(stopped)
    cancelled: asyncio.CancelledError | None = None
    while not waiting.done():
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError as error:
            cancelled = error
            if service.forked:
                break
    if cancelled is not None:
        raise cancelled
