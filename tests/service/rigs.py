"""Services on engines that wait for the test: a gate before each run, or fences that it finishes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import cudnn_actor
from cudnn_actor import BufferRef, ConvFwd, ConvSpec, CudnnRef, LifecycleEvent, Spawning
from cudnn_actor.engines import EngineChoice
from cudnn_actor.engines.base import Engine, StickyError
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.service.options import make_options
from cudnn_actor.service.service import CudnnService
from cudnn_actor.supervision import ChildSpec

from .worker_rigs import GatedEngine

PATIENCE_S = 20.0
"""How long a test waits for what must happen: far longer than it takes, far shorter than its limit."""
SOON_S = 0.5
"""A `hang_after_s` of far more than a new worker needs for its first sign of life, on a busy machine too."""
ONE_BY_ONE = ConvSpec.symmetric(2)


class Gate:
    """A place where the actor's thread waits for the test, once the test has shut it."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._arrived = threading.Semaphore(0)
        self._caught = threading.Event()
        self._catching = False
        self.passed = 0

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()
        self._caught.set()

    def catch_one(self) -> None:
        """Let the next arrival wait until the gate is opened, and those behind it pass."""
        self.forget_arrivals()
        self._caught.clear()
        self._catching = True

    def let_the_caught_one_go(self) -> None:
        """Open for the one that was caught, and for nobody else."""
        self.forget_arrivals()
        self.shut()
        self._caught.set()

    def go_through(self) -> None:
        """The engine's side. Listens to nobody but the test: what waits here is truly lost to its service."""
        self._arrived.release()
        caught, self._catching = self._catching, False
        (self._caught if caught else self._open).wait()
        self.passed += 1

    def wait_for_arrival(self) -> None:
        """Until a run has reached the gate that no earlier call has seen. Blocks."""
        assert self._arrived.acquire(timeout=PATIENCE_S), "nothing reached the gate"

    def forget_arrivals(self) -> None:
        while self._arrived.acquire(blocking=False):
            pass

    @contextmanager
    def closed(self) -> Iterator[Gate]:
        """Shut from here on, and open again at the end, whatever happens in between."""
        self.forget_arrivals()
        self.shut()
        try:
            yield self
        finally:
            self.open()


class Doorman:
    """Has engines in workers go through a gate of this process. Its maker must call `close`."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind("")  # the kernel chooses a name
        self._door.listen()
        self.address = self._door.getsockname().decode("latin-1")
        self._threads = [threading.Thread(target=self._receive, name="doorman")]
        self._threads[0].start()

    def _receive(self) -> None:
        with contextlib.suppress(OSError):  # the end
            while True:
                visit, _ = self._door.accept()
                self._threads.append(threading.Thread(target=self._lead, args=(visit,), name="visit"))
                self._threads[-1].start()

    def _lead(self, visit: socket.socket) -> None:
        with visit:
            self._gate.go_through()

    def close(self) -> None:
        """Let everybody through, and no more."""
        self._gate.open()
        self._door.shutdown(socket.SHUT_RDWR)
        while self._threads:
            self._threads.pop(0).join(PATIENCE_S)
        self._door.close()


class MortalEngine(GatedEngine):
    """One whose memory dies with its context, as in thread isolation on CUDA."""

    outlives_context = False


class Device:
    """What the asynchronous engine works on: fences that finish when the test says, and a context to kill."""

    def __init__(self) -> None:
        self.fences: list[threading.Event] = []
        self.fenced = threading.Semaphore(0)
        self.fencing = Gate()
        self.dead = threading.Event()
        self.free_running = threading.Event()
        self.reads_block = False
        """Whether the staging memory is full, so that only `read` will do."""
        self.fetched = 0
        """Answers of `fetch` that have been called for."""
        self.fetch_fails_with: Exception | None = None

    def wait_for_fence(self) -> threading.Event:
        """The next fence that no earlier call has seen. Blocks."""
        assert self.fenced.acquire(timeout=PATIENCE_S), "nothing was fenced"
        return self.fences[-1]

    def run_freely(self) -> None:
        """Finish all work, also what is still to come."""
        self.free_running.set()

    def pause(self) -> None:
        """Finish only what the test finishes, from here on."""
        while self.fenced.acquire(blocking=False):
            pass
        self.free_running.clear()

    def fetching(self, fetch: Callable[[], np.ndarray]) -> Callable[[], np.ndarray]:
        """What the engine's `fetch` answers with."""

        def call() -> np.ndarray:
            self.fetched += 1
            if (failure := self.fetch_fails_with) is not None:
                self.fetch_fails_with = None
                raise failure
            return fetch()

        return call

    def die(self) -> None:
        """Kill the context: the next question about a fence is answered with a sticky error, once."""
        self.dead.set()


class AsynchronousEngine(CpuEngine):
    """Says that its work is done only when the test finishes the fence behind it."""

    synchronous = False

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._void: set[Any] = set()

    def fence(self) -> Any:
        self._device.fencing.go_through()
        fence = threading.Event()
        self._device.fences.append(fence)
        self._device.fenced.release()
        return fence

    def finished(self, fence: Any) -> bool:
        assert fence not in self._void, "asked again about a fence that had passed"
        if self._device.dead.is_set():
            self._device.dead.clear()
            raise StickyError("DEAD", "the test killed the context")
        passed = bool(fence.is_set() or self._device.free_running.is_set())
        if passed:
            self._void.add(fence)
        return passed

    def fetch(  # type: ignore[override]
        self, src: np.ndarray, into: np.ndarray | None = None
    ) -> Callable[[], np.ndarray] | None:
        fetched = None if self._device.reads_block else super().fetch(src, into)
        return fetched and self._device.fetching(fetched)


# Where services have their actor.

THREAD_ONLY = pytest.mark.parametrize("isolation", ["thread"], indirect=True)
"""On a test of a module for both: what it needs is made in its own process, or is promised there alone."""

Engines = Callable[[], Engine]
"""Makes engines of the test's own: in this process, so in thread isolation."""

_NOW: dict[str, Any] = {"isolation": "thread"}
_DOORMEN: dict[Gate, Doorman] = {}


@contextmanager
def isolated(isolation: str) -> Iterator[None]:
    """Have services that are made here from now on live on a thread, or in a process, until the end."""
    _NOW["isolation"] = isolation
    try:
        yield
    finally:
        _NOW["isolation"] = "thread"
        while _DOORMEN:
            _DOORMEN.popitem()[1].close()


def in_process() -> bool:
    """Whether services of the present test have their actor in a worker process."""
    return bool(_NOW["isolation"] == "process")


def here() -> dict[str, Any]:
    """The option that says so."""
    return dict(_NOW)


def spawn(**options: Any) -> Spawning:
    """`cudnn_actor.spawn`, in the isolation of the present test."""
    return cudnn_actor.spawn(**{**_NOW, **options})


def start(**options: Any) -> CudnnService:
    """`cudnn_actor.start`, likewise."""
    return cudnn_actor.start(**{**_NOW, **options})


def child_spec(id: str = "cudnn", **options: Any) -> tuple[ChildSpec, CudnnService]:
    """`cudnn_actor.child_spec`, likewise."""
    return cudnn_actor.child_spec(id, **{**_NOW, **options})


def service_on(engine: Engines, **options: Any) -> CudnnService:
    """A service, not launched, whose actor makes its engines with `engine`, in this process."""
    return CudnnService(
        make_options({"device": "cpu", "isolation": "thread", **options}), engine=_choice(engine)
    )


def _choice(engine: Engines) -> EngineChoice:
    return EngineChoice("cpu", engine, engine().outlives_context)


def spawn_on(engine: Engines, **options: Any) -> Spawning:
    """`spawn` with an engine of the test's, in this process."""
    return Spawning(service_on(engine, **options))


def gated(gate: Gate, at: str = "execute") -> EngineChoice:
    """The CPU engine with a gate before some call, in this process or for workers.

    In a worker its arenas pass for device memory where the gate is at the engine's own copies: what goes
    into a host engine's is copied by the parent.
    """
    choice = _choice(lambda: GatedEngine(gate, at))
    if not in_process():
        return choice
    if gate not in _DOORMEN:
        _DOORMEN[gate] = Doorman(gate)
    doorman = _DOORMEN[gate]
    return choice._replace(
        worker=("tests.service.worker_rigs:gated_in_worker", (doorman.address, at)),
        preload=("cudnn_actor.engines.cpu",),
        host_arenas=at not in ("write", "read"),
    )


def take_away(gate: Gate) -> None:
    """Open a gate for good: a worker that came by before each small run would do little else."""
    gate.open()
    if gate in _DOORMEN:
        _DOORMEN.pop(gate).close()


def gated_service(gate: Gate, at: str = "execute", **options: Any) -> CudnnService:
    """A service, not launched, with such a gate."""
    return CudnnService(make_options({"device": "cpu", **_NOW, **options}), engine=gated(gate, at))


def spawn_gated(gate: Gate, at: str = "execute", **options: Any) -> Spawning:
    """`spawn` with a gate before each run, or before other calls."""
    return Spawning(gated_service(gate, at, **options))


def gated_child(gate: Gate, id: str = "cudnn", **options: Any) -> tuple[ChildSpec, CudnnService]:
    """`child_spec` with such a gate."""
    spec, service = child_spec(id, device="cpu", **options)
    service._isolation._engine = gated(gate)  # type: ignore[attr-defined]  # which both kinds have
    return spec, service


class Trio:
    """Three 1x1 buffers and the smallest convolution of them: y = x * w."""

    def __init__(self, gpu: CudnnRef, x: BufferRef, w: BufferRef, y: BufferRef) -> None:
        self._gpu = gpu
        self.x, self.w, self.y = x, w, y

    @classmethod
    async def on(cls, gpu: CudnnRef, x: float = 3.0, w: float = 2.0, y: float = 1.0) -> Trio:
        return cls(gpu, *[await gpu.upload(single(value)) for value in (x, w, y)])

    def product(self, **fields: Any) -> ConvFwd:
        return ConvFwd(**{"x": self.x, "w": self.w, "y": self.y, "conv": ONE_BY_ONE, **fields})

    def sum(self) -> ConvFwd:
        """Not pure: y = x * w + y."""
        return self.product(beta=1.0)

    async def result(self) -> float:
        return float((await self._gpu.download(self.y)).item())


def single(value: float) -> np.ndarray:
    return np.full((1, 1, 1, 1), value, np.float32)


async def seen(gpu: CudnnRef, kind: type[LifecycleEvent], times: int = 1) -> LifecycleEvent:
    """The service's `times`-th event of a kind, once it has happened."""
    async with asyncio.timeout(PATIENCE_S):
        async for event in gpu.events():
            times -= isinstance(event, kind)
            if not times:
                return event
    raise AssertionError(f"the service stopped without {kind.__name__}")


def bare(event: LifecycleEvent) -> LifecycleEvent:
    """An event without what tells whose it is and when it happened."""
    return msgspec.structs.replace(event, service=None, at=0.0, monotonic=0.0)


async def in_thread(wait: Callable[[], Any]) -> Any:
    """Wait on a thread of its own for what the event loop must not be kept from bringing about."""
    return await asyncio.wait_for(asyncio.to_thread(wait), PATIENCE_S)


async def outcome(future: asyncio.Future[Any]) -> Any:
    """What a request ended in, its error as a value."""
    return (await asyncio.wait_for(asyncio.gather(future, return_exceptions=True), PATIENCE_S))[0]


def mapped_arenas() -> set[str]:
    """The lines of /proc/self/maps about arenas of ours."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in maps if "cudnn-actor-arena" in line}
