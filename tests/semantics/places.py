"""Where a service of a column of the page has its actor, and what the page's words for its state are.

A column that is about CUDA is brought about twice: on a GPU where there is one, and everywhere on an engine
of the CPU that has what matters there. On a thread that is memory which dies with its context; in a worker,
memory which the parent does not map.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from structlog.typing import EventDict

from cudnn_actor import (
    BufferRef,
    ContextLost,
    CudnnRef,
    CudnnService,
    Fault,
    Receipt,
    ServiceStopped,
    Spawning,
    StaleBufferError,
)
from cudnn_actor.engines import EngineChoice
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.protocol.messages import Message
from cudnn_actor.service.options import make_options

from ..engines.devices import why_not
from ..log_lines import line
from ..service.rigs import PATIENCE_S, Trio, outcome, single

__all__ = ["COLUMNS", "Place", "TooLate", "World", "furnished", "living_on", "world"]

BYSTANDER = 7.0


class MortalCpuEngine(CpuEngine):
    """One whose memory dies with its context."""

    outlives_context = False


def _mortal() -> EngineChoice:
    return EngineChoice("cpu", MortalCpuEngine, outlives_context=False)


def _distant() -> EngineChoice:
    worker = ("cudnn_actor.engines.cpu:CpuEngine", ())
    return EngineChoice("cpu", CpuEngine, True, worker=worker, preload=("cudnn_actor.engines.cpu",))


class Place(NamedTuple):
    """Where an actor lives, and on what."""

    name: str
    isolation: str
    device: str
    stands_in: bool = False

    @property
    def in_process(self) -> bool:
        return self.isolation == "process"

    @property
    def mortal(self) -> bool:
        """Whether the buffers' memory dies with the context."""
        return not self.in_process and (self.stands_in or self.device != "cpu")

    @property
    def crashes(self) -> tuple[Fault, ...]:
        """The faults that end an incarnation here."""
        return (Fault.STICKY, Fault.KILL, Fault.HANG) if self.in_process else (Fault.STICKY, Fault.HANG)

    @property
    def hang_after_s(self) -> float:
        """Longer than anything takes that does not hang."""
        return 0.5 if self.device == "cpu" else 5.0

    def require(self) -> None:
        """Skip the test where there is no such place."""
        if (why := why_not("cpu" if self.device == "cpu" else "cuda")) is not None:
            pytest.skip(why)

    def service(self, **options: Any) -> CudnnService:
        """A service here, not launched."""
        engine = None
        if self.stands_in:
            engine = _distant() if self.in_process else _mortal()
        given = {"device": self.device, "isolation": self.isolation, "max_restarts": 9, **options}
        return CudnnService(make_options(given), engine=engine)


COLUMNS: dict[str, tuple[Place, ...]] = {
    "thread, CPU": (Place("thread, CPU", "thread", "cpu"),),
    "thread, CUDA": (
        Place("thread, memory that dies", "thread", "cpu", stands_in=True),
        Place("thread, CUDA", "thread", "cuda:0"),
    ),
    "process, CPU": (Place("process, CPU", "process", "cpu"),),
    "process, CUDA": (
        Place("process, memory apart", "process", "cpu", stands_in=True),
        Place("process, CUDA", "process", "cuda:0"),
    ),
}
"""The places that each column of the page stands for."""


class TooLate(Exception):
    """Raised by a scenario that the crash was ahead of: on a busy machine it came before the last message.

    Nothing is wrong then, and nothing is shown: the scenario is to be brought about again.
    """


class World:
    """A service with a `Trio` (x = 3, w = 2, y = 1), and a bystander of 7 that nobody writes."""

    def __init__(self, gpu: CudnnRef, trio: Trio, bystander: BufferRef, logs: Sequence[EventDict]) -> None:
        self.gpu, self.trio, self.bystander = gpu, trio, bystander
        self._logs = logs
        self._generation = gpu.generation

    async def value(self, ref: BufferRef) -> float:
        return float((await self.gpu.download(ref)).item())

    async def line(self, event: str) -> EventDict:
        """The first log line of a name, once it has been written."""
        return await line(self._logs, event)

    def send(self, *messages: Message) -> list[asyncio.Future[Any]]:
        """Have messages admitted, all before the first can have brought about a crash. Raises `TooLate`.

        An actor on a thread of this process gets no turn meanwhile. A worker does, and may have died.
        """
        interval = sys.getswitchinterval()
        sys.setswitchinterval(PATIENCE_S)
        try:
            return [self.gpu.submit(message) for message in messages]
        except (ServiceStopped, StaleBufferError) as early:
            raise TooLate from early
        finally:
            sys.setswitchinterval(interval)

    # The page's words.

    async def left(self) -> str:
        """What there is after a failure: all, buffers, or nothing."""
        try:
            statistics = await self.gpu.statistics()
            assert await self.value(self.bystander) == BYSTANDER
        except (ContextLost, ServiceStopped):
            await self.why_stale(self.bystander)
            return "nothing"
        plans = statistics.plans.size
        if statistics.generation == self._generation:
            assert plans >= 1
            return "all"
        assert plans == 0
        return "buffers"

    async def goes_on(self) -> str:
        """What the service does after a failure: it goes on, restarts or stops."""
        left = await self.left()
        return {"all": "goes on", "buffers": "restarts", "nothing": "stops"}[left]

    async def state(self, ref: BufferRef, holds: float) -> str:
        """What has become of a buffer: kept, with what it is to hold, or why it is stale."""
        try:
            assert await self.value(ref) == holds
        except StaleBufferError as error:
            return str(error.reason)
        except (ContextLost, ServiceStopped):
            return await self.why_stale(ref)
        return "kept"

    async def why_stale(self, ref: BufferRef) -> str:
        """Why a reference is stale, of a service that ends and can be asked no more."""
        await asyncio.wait_for(asyncio.wrap_future(self.gpu._service.stopped), PATIENCE_S)
        with pytest.raises(StaleBufferError) as caught:
            self.gpu._state.memory.resolve(ref)
        return str(caught.value.reason)

    async def end(self, future: asyncio.Future[Any]) -> str:
        """What a request has ended in: an error's name, or how it came to its answer."""
        answer = await outcome(future)
        if isinstance(answer, BaseException):
            return f"`{type(answer).__name__}`"
        assert isinstance(answer, Receipt)
        if answer.generation == self._generation:
            return "its answer"
        interrupted = [entry["request"] for entry in self._logs if entry["event"] == "request.interrupted"]
        return "runs again" if answer.request_id in interrupted else "runs"


@asynccontextmanager
async def world(place: Place, logs: Sequence[EventDict], **options: Any) -> AsyncIterator[World]:
    """A world here, whose one plan has been built. Its service is closed at the end."""
    async with living_on(place.service(**options), logs) as here:
        yield here


@asynccontextmanager
async def living_on(service: CudnnService, logs: Sequence[EventDict]) -> AsyncIterator[World]:
    """The same, on a service that was not launched."""
    gpu = await Spawning(service)
    try:
        yield await furnished(gpu, logs)
    finally:
        await gpu.aclose()


async def furnished(gpu: CudnnRef, logs: Sequence[EventDict]) -> World:
    """A world on a service that runs."""
    trio = await Trio.on(gpu)
    here = World(gpu, trio, await gpu.upload(single(BYSTANDER)), logs)
    await gpu.warm([trio.product()])
    return here
