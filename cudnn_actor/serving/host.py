"""The operations of the protocol over a service's models, for HTTP and gRPC alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

import cudnn_actor
from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.actors.threads import ThreadRefused
from cudnn_actor.protocol.errors import CudnnActorError, MailboxFull
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.serving.administration import Administration
from cudnn_actor.serving.failures import Busy, Draining, NotServed, Refused
from cudnn_actor.serving.limits import Limits
from cudnn_actor.serving.regions import SharedMemory
from cudnn_actor.serving.requests import Inference
from cudnn_actor.serving.statistics import ModelCounts
from cudnn_actor.serving.under_way import UnderWay

__all__ = ["EXTENSIONS", "LONG_LIST", "Admission", "Answering", "Host", "Models", "Named"]

T = TypeVar("T")
NAME = "cudnn-actor"
LONG_LIST = 32 << 10
"""A thread reads JSON of more bytes than this, and writes lists of more numbers than this."""
_MOST_ASIDE = 4
"""The most threads that read or write such JSON at a time."""
EXTENSIONS = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "statistics",
    "system_shared_memory",
)


class Answering(Protocol):
    """The version of a model that answers."""

    @property
    def version(self) -> str:
        """The version's name in the protocol."""

    @property
    def outputs(self) -> Sequence[str]:
        """The names of the model's outputs, in order."""

    @property
    def under_way(self) -> UnderWay:
        """The requests for which this version was chosen. The version is closed once there are none."""

    async def run(self, inputs: Mapping[str, np.ndarray], timeout_s: float | None) -> dict[str, np.ndarray]:
        """The outputs for these inputs. Raises as `CudnnRef.run`, and `MailboxFull` if too many wait."""

    def samples(self, inputs: Mapping[str, np.ndarray]) -> int:
        """How many samples a request has."""

    def metadata(self, name: str) -> dict[str, Any]:
        """The protocol's record of the model: its inputs and outputs."""

    def config(self, name: str) -> dict[str, Any]:
        """The model's configuration, in Triton's form."""


class Named(Protocol):
    """A model that the server knows by name."""

    @property
    def name(self) -> str:
        """The model's name."""

    @property
    def counts(self) -> ModelCounts:
        """The counts of the model's requests."""


class Models(Protocol):
    """The models by name, as this process knows them."""

    def find(self, name: str, version: str = "") -> tuple[Named, Answering]:
        """A model and the version that answers for it. Raises `NotServed`."""


class Host:
    """The operations of the protocol. All of them run on one event loop.

    Parameters
    ----------
    gpu
        The service that runs the models.
    catalog
        The models.
    administration
        The object that answers all requests but inferences.
    regions
        The shared memory that clients have registered.
    limits
        How many inferences may be under way (a further one is refused with `MailboxFull`), and how many bytes
        their requests may have (a further request is refused with `Busy`).
    """

    def __init__(
        self,
        gpu: CudnnRef,
        catalog: Models,
        administration: Administration,
        regions: SharedMemory,
        limits: Limits,
    ) -> None:
        self._gpu = gpu
        self.catalog = catalog
        self.administration = administration
        self.regions = regions
        self.limits = limits
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
        """Whether inferences should be sent here: not while the server starts, restarts a worker or stops."""
        return self._gpu.ready and not self.draining and not self.starting

    @property
    def running(self) -> int:
        """How many inferences are under way."""
        return self._under_way.count

    @property
    def bytes(self) -> int:
        """How many bytes the requests under way in this process have."""
        return self.limits.bytes

    def model_ready(self, name: str, version: str = "") -> bool:
        """Whether a model answers."""
        try:
            self.catalog.find(name, version)
        except NotServed:
            return False
        return not self.draining

    # Requests that read.

    def metadata(self) -> dict[str, Any]:
        """The protocol's record of the server."""
        return {"name": NAME, "version": cudnn_actor.__version__, "extensions": list(EXTENSIONS)}

    def model_metadata(self, name: str, version: str = "") -> dict[str, Any]:
        """The inputs and outputs of a model. Raises `NotServed`."""
        entry, served = self.catalog.find(name, version)
        return served.metadata(entry.name)

    def model_config(self, name: str, version: str = "") -> dict[str, Any]:
        """The configuration of a model. Raises `NotServed`."""
        entry, served = self.catalog.find(name, version)
        return served.config(entry.name)

    # Requests that change something.

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Load a model again from its file. Raises `NotServed`, `Refused` for parameters, and as
        `CudnnRef.load`."""
        if parameters:
            raise Refused(
                problem=f"loading with {', '.join(sorted(parameters))[:200]} is off",
                fix="put the files into the server's repository",
            )
        self._require_open()
        await self.administration.load(name)

    # Inference.

    @contextmanager
    def admit(self) -> Iterator[Admission]:
        """Count one inference as under way. Raises `MailboxFull` and `Draining`."""
        self._require_open()
        if not self.limits.begin():
            raise MailboxFull(capacity=self.limits.most_running)
        admission = Admission(self.limits)
        with self._under_way.one():
            try:
                yield admission
            finally:
                admission.end()

    async def aside(self, work: Callable[[], T]) -> T:
        """Call `work`, which takes milliseconds, on a thread, and return its result. Raises as `work`.

        There are `_MOST_ASIDE` such threads, however many inferences are admitted. If the client goes, the
        work ends at its next step. If the system cannot start a thread, the work is done on the event loop.
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

        `decode` reads the request; `encode` gets the version, the request and the outputs. `listed`: the
        bytes of the request that are no raw tensors. Above `LONG_LIST`, the request is read on a thread;
        lists of more numbers are written on a thread. `headers` gives the request's headers, which may name
        the client's span. `left_s`: seconds until the client stops waiting; None for no end. Raises
        `CudnnActorError`.
        """
        inferred = self._infer(name, version, decode, encode, listed=listed, left_s=left_s)
        if (observer := self._gpu._service.state.counters.observer) is None:
            return await inferred
        return await asyncio.create_task(inferred, context=observer.received(headers()))

    async def _infer(
        self,
        name: str,
        version: str,
        decode: Callable[[], Inference],
        encode: Callable[[str, Inference, Mapping[str, np.ndarray]], T],
        *,
        listed: int,
        left_s: float | None,
    ) -> T:
        entry, served = self.catalog.find(name, version)
        with served.under_way.one():  # in the step in which it is chosen: later it may be replaced
            return await self._infer_with(entry, served, decode, encode, listed=listed, left_s=left_s)

    async def _infer_with(
        self,
        entry: Named,
        served: Answering,
        decode: Callable[[], Inference],
        encode: Callable[[str, Inference, Mapping[str, np.ndarray]], T],
        *,
        listed: int,
        left_s: float | None,
    ) -> T:
        begun = time.perf_counter_ns()
        try:
            inference = await self.aside(decode) if listed > LONG_LIST else decode()
            inference.outputs_to_send(served.outputs)  # before anything runs
            decoded = time.perf_counter_ns()
            limits = [each for each in (inference.timeout_s, left_s) if each is not None]
            results = await served.run(inference.inputs, min(limits, default=None))
            run = time.perf_counter_ns()
            written = partial(encode, served.version, inference, results)
            answer = await self.aside(written) if inference.count_listed(results) > LONG_LIST else written()
        except CudnnActorError:
            entry.counts.fail.add(time.perf_counter_ns() - begun)
            raise
        moments = begun, decoded, run, time.perf_counter_ns()
        entry.counts.note_answer(served.samples(inference.inputs), moments)
        return answer


class Admission:
    """One inference that is under way, and the bytes of its request that have arrived so far."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._nbytes = 0

    def take(self, nbytes: int) -> None:
        """Count bytes that have arrived. Raises `Busy` if all requests together have too many."""
        if not self._limits.take(nbytes):
            raise Busy(most=self._limits.most_bytes)
        self._nbytes += nbytes

    def end(self) -> None:
        """Stop counting this inference and its bytes."""
        self._limits.end(self._nbytes)
        self._nbytes = 0
