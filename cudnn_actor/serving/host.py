"""What the server does, whichever way it is asked: the operations of the protocol over a service's models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np

import cudnn_actor
from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.actors.threads import ThreadRefused
from cudnn_actor.protocol.errors import CudnnActorError, MailboxFull
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.serving.catalog import Catalog
from cudnn_actor.serving.failures import Busy, Draining, NotServed, Refused
from cudnn_actor.serving.regions import SharedMemory
from cudnn_actor.serving.requests import Inference
from cudnn_actor.serving.under_way import UnderWay

__all__ = ["EXTENSIONS", "LONG_LIST", "Admission", "Host"]

T = TypeVar("T")
NAME = "cudnn-actor"
LONG_LIST = 32 << 10
"""Bytes of JSON, and numbers in an answer's lists, above which a thread reads and writes them."""
_MOST_ASIDE = 4
"""The most threads that read or write such JSON at a time."""
EXTENSIONS = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "statistics",
    "system_shared_memory",
)


class Host:
    """The operations of the protocol. All of it runs on one event loop.

    Parameters
    ----------
    gpu
        The service that runs the models.
    catalog
        The models.
    regions
        The shared memory that clients have registered.
    most_running
        How many inferences may be under way; further ones are refused with `MailboxFull`.
    most_bytes
        How many bytes the requests of all of them may have; further ones are refused with `Busy`.
    """

    def __init__(
        self, gpu: CudnnRef, catalog: Catalog, regions: SharedMemory, *, most_running: int, most_bytes: int
    ) -> None:
        self._gpu = gpu
        self.catalog = catalog
        self.regions = regions
        self._most_running = most_running
        self.most_bytes = most_bytes
        self.bytes = 0
        self._under_way = UnderWay()
        self._aside = asyncio.Semaphore(_MOST_ASIDE)
        self.draining = False
        self.starting = True

    # Health.

    @property
    def live(self) -> bool:
        """Whether the service has not ended."""
        return self._gpu.alive

    @property
    def ready(self) -> bool:
        """Whether to send inferences here: not while it starts, restarts a worker or stops."""
        return self._gpu.ready and not self.draining and not self.starting

    @property
    def running(self) -> int:
        """How many inferences are under way."""
        return self._under_way.count

    def model_ready(self, name: str, version: str = "") -> bool:
        """Whether a model answers."""
        try:
            self.catalog.served(name, version)
        except NotServed:
            return False
        return not self.draining

    # What there is.

    def metadata(self) -> dict[str, Any]:
        """What the protocol says of a server."""
        return {"name": NAME, "version": cudnn_actor.__version__, "extensions": list(EXTENSIONS)}

    def model_metadata(self, name: str, version: str = "") -> dict[str, Any]:
        """The inputs and outputs of a model. Raises `NotServed`."""
        entry, served = self.catalog.served(name, version)
        return served.metadata(entry.name)

    def model_config(self, name: str, version: str = "") -> dict[str, Any]:
        """The configuration of a model. Raises `NotServed`."""
        entry, served = self.catalog.served(name, version)
        return served.config(entry.name)

    def index(self, *, ready: bool = False) -> list[dict[str, str]]:
        """All models with their states; with `ready`, those that answer."""
        return [
            {
                "name": each.name,
                "version": each.origin.version if each.served is None else each.served.version,
                "state": each.state,
                "reason": each.reason,
            }
            for each in self.catalog.entries
            if each.served is not None or not ready
        ]

    def statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        """The counters of a model, or of all that answer. Raises `NotServed`."""
        chosen = [self.catalog.served(name, version)[0]] if name else self.catalog.entries
        return [
            {"name": each.name, "version": each.served.version, **each.counts.reported()}
            for each in chosen
            if each.served is not None
        ]

    # What changes it.

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Load a model anew. Raises `NotServed`, `Refused` for parameters, and as `CudnnRef.load`."""
        if parameters:
            raise Refused(
                problem=f"loading with {', '.join(sorted(parameters))[:200]} is off",
                fix="put the files into the server's repository",
            )
        self._require_open()
        await self.catalog.load(name)

    async def unload(self, name: str) -> None:
        """Serve a model no more. Raises `NotServed`."""
        await self.catalog.unload(name)

    # Inference.

    @contextmanager
    def admitted(self) -> Iterator[Admission]:
        """Count one inference as under way. Raises `MailboxFull` and `Draining`."""
        self._require_open()
        if self.running >= self._most_running:
            raise MailboxFull(capacity=self._most_running)
        admission = Admission(self)
        with self._under_way.one():
            try:
                yield admission
            finally:
                admission.end()

    async def aside(self, work: Callable[[], T]) -> T:
        """The result of work that takes milliseconds, on a thread. Raises as `work`.

        There are as many such threads as `_MOST_ASIDE`, whatever is admitted. A client that has gone leaves
        its work to end at its next step. Where the system gives no thread, it is done here.
        """
        async with self._aside:
            try:
                return await in_own_thread(work)
            except ThreadRefused:
                return work()

    async def idle(self) -> None:
        """Wait until no inference is under way."""
        await self._under_way.none()

    def _require_open(self) -> None:
        if self.draining:
            raise Draining

    async def infer(
        self,
        name: str,
        version: str,
        decode: Callable[[], Inference],
        encode: Callable[[str, Inference, Mapping[str, np.ndarray]], T],
        *,
        listed: int,
        headers: Callable[[], Mapping[str, str]],
        left_s: float | None = None,
    ) -> T:
        """Run a model for a request that was admitted, and return what `encode` makes of its outputs.

        `decode` reads the request, `encode` gets the version, the request and the outputs. `listed`: bytes of
        the request that are no raw tensors. If they are many, it is read on a thread, and so are many numbers
        written. `headers` gives those of the request, which may name the client's span. `left_s`: seconds
        until the client stops waiting; None for no end. Raises `CudnnActorError`.
        """
        inferred = self._inferred(name, version, decode, encode, listed=listed, left_s=left_s)
        if (observer := self._gpu._service.state.counters.observer) is None:
            return await inferred
        return await asyncio.create_task(inferred, context=observer.received(headers()))

    async def _inferred(
        self,
        name: str,
        version: str,
        decode: Callable[[], Inference],
        encode: Callable[[str, Inference, Mapping[str, np.ndarray]], T],
        *,
        listed: int,
        left_s: float | None,
    ) -> T:
        entry, served = self.catalog.served(name, version)
        begun = time.perf_counter_ns()
        try:
            inference = await self.aside(decode) if listed > LONG_LIST else decode()
            inference.wanted([each.name for each in served.model.outputs])  # before anything runs
            decoded = time.perf_counter_ns()
            limits = [each for each in (inference.timeout_s, left_s) if each is not None]
            results = await served.run(inference.inputs, min(limits, default=None))
            run = time.perf_counter_ns()
            written = partial(encode, served.version, inference, results)
            answer = await self.aside(written) if inference.listed(results) > LONG_LIST else written()
        except CudnnActorError:
            entry.counts.fail.add(time.perf_counter_ns() - begun)
            raise
        moments = begun, decoded, run, time.perf_counter_ns()
        entry.counts.succeeded(served.samples(inference.inputs), moments)
        return answer


class Admission:
    """One inference that is under way, and the bytes that its request has so far."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._nbytes = 0

    def take(self, nbytes: int) -> None:
        """Count bytes that have come. Raises `Busy` if all requests together have too many."""
        if self._host.bytes + nbytes > self._host.most_bytes:
            raise Busy(most=self._host.most_bytes)
        self._host.bytes += nbytes
        self._nbytes += nbytes

    def end(self) -> None:
        """Give them back."""
        self._host.bytes -= self._nbytes
        self._nbytes = 0
