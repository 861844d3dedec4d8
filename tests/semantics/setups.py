"""The setups that the columns of the page stand for, and sessions: services in a setup, with buffers.

A column about CUDA is tested in two setups. One needs a GPU. The other, which runs everywhere, replaces CUDA
by a CPU engine that behaves like CUDA in the respect that matters: on a thread, its memory is lost with its
context; in a worker, the parent does not map its memory.
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
    CudnnRef,
    CudnnService,
    Fault,
    FaultPlan,
    Receipt,
    ServiceStopped,
    StaleBufferError,
)
from cudnn_actor.engines import EngineChoice, WorkerEngine
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.errors import ContextLost
from cudnn_actor.options import make_options
from cudnn_actor.protocol.messages.messages import Message
from cudnn_actor.service import Spawning

from ..engines.devices import why_not
from ..inside import service_behind
from ..log_lines import line
from ..patience import PATIENCE_S
from ..service.noticed_hangs import notice_hang
from ..service.rigs import Trio, outcome, single

__all__ = ["COLUMNS", "CrashTooEarly", "Session", "Setup", "open_session", "session_of", "session_on"]

SPARE = 7.0


class VolatileCpuEngine(CpuEngine):
    """A CPU engine whose memory counts as lost when its context dies."""

    outlives_context = False


def _volatile() -> EngineChoice:
    return EngineChoice("cpu", VolatileCpuEngine, outlives_context=False)


def _unmapped() -> EngineChoice:
    worker = WorkerEngine("cudnn_actor.engines.cpu.engine:CpuEngine")
    return EngineChoice("cpu", CpuEngine, True, worker=worker, preload=("cudnn_actor.engines.cpu.engine",))


class Setup(NamedTuple):
    """An isolation and a device. With `replaces_cuda`, a CPU engine replaces the CUDA engine."""

    name: str
    isolation: str
    device: str
    replaces_cuda: bool = False

    @property
    def in_process(self) -> bool:
        return self.isolation == "process"

    @property
    def loses_memory(self) -> bool:
        """Whether the buffers' memory is lost with the context."""
        return not self.in_process and (self.replaces_cuda or self.device != "cpu")

    @property
    def crashes(self) -> tuple[Fault, ...]:
        """The faults that end an incarnation in this setup."""
        return (Fault.STICKY, Fault.KILL, Fault.HANG) if self.in_process else (Fault.STICKY, Fault.HANG)

    def require(self) -> None:
        """Skip the test if this machine does not have the device."""
        if (why := why_not("cpu" if self.device == "cpu" else "cuda")) is not None:
            pytest.skip(why)

    def service(self, **options: Any) -> CudnnService:
        """A service in this setup, not launched."""
        engine = None
        if self.replaces_cuda:
            engine = _unmapped() if self.in_process else _volatile()
        given = {"device": self.device, "isolation": self.isolation, "max_restarts": 9, **options}
        return CudnnService(make_options(given), engine=engine)


COLUMNS: dict[str, tuple[Setup, ...]] = {
    "thread, CPU": (Setup("thread, CPU", "thread", "cpu"),),
    "thread, CUDA": (
        Setup("thread, memory lost with its context", "thread", "cpu", replaces_cuda=True),
        Setup("thread, CUDA", "thread", "cuda:0"),
    ),
    "process, CPU": (Setup("process, CPU", "process", "cpu"),),
    "process, CUDA": (
        Setup("process, memory not mapped by the parent", "process", "cpu", replaces_cuda=True),
        Setup("process, CUDA", "process", "cuda:0"),
    ),
}
"""The setups that each column of the page stands for."""


class CrashTooEarly(Exception):
    """Raised by a scenario if the crash came before its last message was sent, as happens on a busy machine.

    Nothing is wrong then, but nothing was tested either: the scenario must be repeated.
    """


class Session:
    """A service with a `Trio` (x = 3, w = 2, y = 1) and a spare buffer of 7.

    It describes the service's state in the words of the page.
    """

    def __init__(self, gpu: CudnnRef, trio: Trio, spare: BufferRef, logs: Sequence[EventDict]) -> None:
        self.gpu, self.trio, self.spare = gpu, trio, spare
        self._logs = logs
        self._generation = gpu.generation

    async def value(self, ref: BufferRef) -> float:
        return float((await self.gpu.download(ref)).item())

    async def line(self, event: str) -> EventDict:
        """Wait for the first log line with this name, and return it."""
        return await line(self._logs, event)

    def send(self, *messages: Message) -> list[asyncio.Future[Any]]:
        """Send messages, all before the first one can cause a crash. Raises `CrashTooEarly`.

        An actor on a thread of this process cannot run meanwhile. A worker can, and may have died.
        """
        interval = sys.getswitchinterval()
        sys.setswitchinterval(PATIENCE_S)
        try:
            return [self.gpu.submit(message) for message in messages]
        except (ServiceStopped, StaleBufferError) as early:
            raise CrashTooEarly from early
        finally:
            sys.setswitchinterval(interval)

    # The words that the page uses.

    async def survivors(self) -> str:
        """What has survived a failure: "all", "buffers" or "nothing"."""
        try:
            statistics = await self.gpu.statistics()
            assert await self.value(self.spare) == SPARE
        except (ContextLost, ServiceStopped):
            await self.why_stale(self.spare)
            return "nothing"
        plans = statistics.plans.size
        if statistics.generation == self._generation:
            assert plans >= 1
            return "all"
        assert plans == 0
        return "buffers"

    async def reaction(self) -> str:
        """What the service does after a failure: "goes on", "restarts" or "stops"."""
        survivors = await self.survivors()
        return {"all": "goes on", "buffers": "restarts", "nothing": "stops"}[survivors]

    async def state(self, ref: BufferRef, expected: float) -> str:
        """What has become of a buffer: "kept", with the expected value, or the reason why it is stale."""
        try:
            assert await self.value(ref) == expected
        except StaleBufferError as error:
            return str(error.reason)
        except (ContextLost, ServiceStopped):
            return await self.why_stale(ref)
        return "kept"

    async def why_stale(self, ref: BufferRef) -> str:
        """Why a reference is stale, if the service ends and so does not answer requests any more."""
        await asyncio.wait_for(asyncio.wrap_future(service_behind(self.gpu).stopped), PATIENCE_S)
        with pytest.raises(StaleBufferError) as caught:
            service_behind(self.gpu).state.memory.resolve(ref)
        return str(caught.value.reason)

    async def result_of(self, future: asyncio.Future[Any]) -> str:
        """What a request ended in: the name of its error, "its answer", "runs" or "runs again"."""
        answer = await outcome(future)
        if isinstance(answer, BaseException):
            return f"`{type(answer).__name__}`"
        assert isinstance(answer, Receipt)
        if answer.generation == self._generation:
            return "its answer"
        interrupted = [entry["request"] for entry in self._logs if entry["event"] == "request.interrupted"]
        return "runs again" if answer.request_id in interrupted else "runs"


@asynccontextmanager
async def open_session(setup: Setup, logs: Sequence[EventDict], **options: Any) -> AsyncIterator[Session]:
    """A session in this setup, with its one plan built. Its service is closed at the end.

    The watchdog notices a hang that `faults` injects soon, and takes nothing else for one.
    """
    service = await asyncio.to_thread(setup.service, **options)  # the driver and files are looked at
    async with session_on(service, logs) as session:
        noticing = asyncio.create_task(_notice_injected_hang(session, options.get("faults")))
        try:
            yield session
        finally:
            noticing.cancel()
            await asyncio.wait([noticing])
        if not noticing.cancelled():
            noticing.result()


async def _notice_injected_hang(session: Session, faults: FaultPlan | None) -> None:
    """Wait until a hang has been injected, and have the watchdog notice it."""
    if faults is not None and any(rule.fault is Fault.HANG for rule in faults.rules):
        await session.line("fault.injected")
        notice_hang(session.gpu)


@asynccontextmanager
async def session_on(service: CudnnService, logs: Sequence[EventDict]) -> AsyncIterator[Session]:
    """The same, on a service that was not launched yet."""
    gpu = await Spawning(service)
    try:
        yield await session_of(gpu, logs)
    finally:
        await gpu.aclose()


async def session_of(gpu: CudnnRef, logs: Sequence[EventDict]) -> Session:
    """The same, on a service that runs and is closed by the caller."""
    trio = await Trio.on(gpu)
    session = Session(gpu, trio, await gpu.upload(single(SPARE)), logs)
    await gpu.warm([trio.product()])
    return session
