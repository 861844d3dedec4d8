"""Services on engines that the test controls: their calls wait at a gate, or their fences for the test."""

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
from cudnn_actor import BufferRef, ConvFwd, ConvSpec, CudnnRef
from cudnn_actor.engines import EngineChoice, WorkerEngine
from cudnn_actor.engines.base import Engine, StickyError
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.options import make_options
from cudnn_actor.service import Spawning
from cudnn_actor.service.service import CudnnService
from cudnn_actor.supervision import ChildSpec, LifecycleEvent

from ..inside import give_engine
from ..patience import PATIENCE_S
from .worker_rigs import GatedEngine, LaggingEngine, PoisonedEngine

SOON_S = 0.5
"""How long a service waits, where a test shortens that, for a thread or process that does not end."""
LIMIT_S = 2.0
"""A short `hang_after_s` for work that is no hang: each step takes far less, also on a busy machine. What
hangs on purpose is noticed by `notice_hang`."""
BEYOND_S = 1.5 * LIMIT_S
"""How long such work takes in all."""
ONE_BY_ONE = ConvSpec.symmetric(2)


class Gate:
    """Stops an engine's thread: while the gate is shut, a thread that arrives there waits until it opens."""

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
        """Make only the next arrival wait, until `open` or `release_caught`. Later arrivals pass."""
        self.forget_arrivals()
        self._caught.clear()
        self._catching = True

    def release_caught(self) -> None:
        """Release the arrival that `catch_one` has stopped, and shut the gate for all others."""
        self.forget_arrivals()
        self.shut()
        self._caught.set()

    def go_through(self) -> None:
        """Called by the engine: wait if the gate is shut.

        Only the test can end this wait: for the service, the thread hangs and cannot be ended.
        """
        self._arrived.release()
        caught, self._catching = self._catching, False
        (self._caught if caught else self._open).wait()
        self.passed += 1

    def wait_for_arrival(self) -> None:
        """Block until a thread arrives, not counting arrivals that earlier calls have returned for."""
        assert self._arrived.acquire(timeout=PATIENCE_S), "nothing reached the gate"

    def forget_arrivals(self) -> None:
        while self._arrived.acquire(blocking=False):
            pass

    @contextmanager
    def closed(self) -> Iterator[Gate]:
        """Shut the gate for the `with` block, and open it at the end, even after an exception."""
        self.forget_arrivals()
        self.shut()
        try:
            yield self
        finally:
            self.open()


class GateServer:
    """Connects engines in workers to a gate of this process (`RemoteGate`). Its maker must call `close`."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("")  # the kernel chooses a name
        self._listener.listen()
        self.address = self._listener.getsockname().decode("latin-1")
        self._threads = [threading.Thread(target=self._accept, name="gate server")]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # `close` has shut the socket down
            while True:
                connection, _ = self._listener.accept()
                self._threads.append(
                    threading.Thread(target=self._serve, args=(connection,), name="gate connection")
                )
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:  # closing it lets the worker go on
            self._gate.go_through()

    def close(self) -> None:
        """Open the gate, release every worker, and accept no more connections."""
        self._gate.open()
        self._listener.shutdown(socket.SHUT_RDWR)
        while self._threads:
            self._threads.pop(0).join(PATIENCE_S)
        self._listener.close()


class VolatileEngine(GatedEngine):
    """A gated engine whose memory counts as lost when its context dies, as in thread isolation on CUDA."""

    outlives_context = False


class Device:
    """The device of an `AsynchronousEngine`. The test decides when its fences finish and its context dies."""

    def __init__(self) -> None:
        self.fences: list[threading.Event] = []
        self.fenced = threading.Semaphore(0)
        self.fencing = Gate()
        self.dead = threading.Event()
        self.free_running = threading.Event()
        self.reads_block = False
        """Whether the staging memory is full, so that `fetch` is impossible and `read` is used."""
        self.fetched = 0
        """How many results of `fetch` have been collected."""
        self.fetch_fails_with: Exception | None = None

    def wait_for_fence(self) -> threading.Event:
        """The next fence that no earlier call has returned. Blocks until the engine makes it."""
        assert self.fenced.acquire(timeout=PATIENCE_S), "the engine made no fence"
        return self.fences[-1]

    def run_freely(self) -> None:
        """Finish all work at once, from now on, including earlier work."""
        self.free_running.set()

    def pause(self) -> None:
        """From now on, work finishes only when the test sets its fence."""
        while self.fenced.acquire(blocking=False):
            pass
        self.free_running.clear()

    def fetching(self, fetch: Callable[[], np.ndarray]) -> Callable[[], np.ndarray]:
        """Wrap the function that `fetch` returns: count its calls, and make it fail if the test wants."""

        def call() -> np.ndarray:
            self.fetched += 1
            if (failure := self.fetch_fails_with) is not None:
                self.fetch_fails_with = None
                raise failure
            return fetch()

        return call

    def die(self) -> None:
        """Kill the context: the next query of a fence, and only that one, raises a sticky error."""
        self.dead.set()


class AsynchronousEngine(CpuEngine):
    """A CPU engine that reports its work as unfinished until the test sets the fence after it."""

    synchronous = False

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._passed: set[Any] = set()

    def fence(self) -> Any:
        self._device.fencing.go_through()
        fence = threading.Event()
        self._device.fences.append(fence)
        self._device.fenced.release()
        return fence

    def has_passed(self, fence: Any) -> bool:
        assert fence not in self._passed, "a fence that had passed was queried again"
        if self._device.dead.is_set():
            self._device.dead.clear()
            raise StickyError("DEAD", "the test killed the context")
        passed = bool(fence.is_set() or self._device.free_running.is_set())
        if passed:
            self._passed.add(fence)
        return passed

    def fetch(  # type: ignore[override]
        self, src: np.ndarray, into: np.ndarray | None = None
    ) -> Callable[[], np.ndarray] | None:
        fetched = None if self._device.reads_block else super().fetch(src, into)
        return fetched and self._device.fetching(fetched)


# In which isolation services run.

THREAD_ONLY = pytest.mark.parametrize("isolation", ["thread"], indirect=True)
"""Marks a test that holds on a thread only, in a module whose other tests hold in both isolations."""

Engines = Callable[[], Engine]
"""Makes engines in this process, and so for thread isolation."""

_current: dict[str, Any] = {"isolation": "thread"}
_gate_servers: dict[Gate, GateServer] = {}


@contextmanager
def isolated(isolation: str) -> Iterator[None]:
    """Make services use this isolation, "thread" or "process", during the `with` block."""
    _current["isolation"] = isolation
    try:
        yield
    finally:
        _current["isolation"] = "thread"
        while _gate_servers:
            _gate_servers.popitem()[1].close()


def in_process() -> bool:
    """Whether the services of the present test use process isolation."""
    return bool(_current["isolation"] == "process")


def isolation_option() -> dict[str, Any]:
    """The keyword argument for the isolation of the present test."""
    return dict(_current)


def spawn(**options: Any) -> Spawning:
    """`cudnn_actor.spawn`, in the isolation of the present test."""
    return cudnn_actor.spawn(**{**_current, **options})


def start(**options: Any) -> CudnnService:
    """`cudnn_actor.start`, in the isolation of the present test."""
    return cudnn_actor.start(**{**_current, **options})


def child_spec(id: str = "cudnn", **options: Any) -> tuple[ChildSpec, CudnnService]:
    """`cudnn_actor.child_spec`, in the isolation of the present test."""
    return cudnn_actor.child_spec(id, **{**_current, **options})


def service_on(engine: Engines, **options: Any) -> CudnnService:
    """A service on a thread, not launched, whose actor calls `engine` to make its engines."""
    return CudnnService(
        make_options({"device": "cpu", "isolation": "thread", **options}), engine=_choice(engine)
    )


def _choice(engine: Engines) -> EngineChoice:
    return EngineChoice("cpu", engine, engine().outlives_context)


def spawn_on(engine: Engines, **options: Any) -> Spawning:
    """`spawn` on a thread, with an engine that the test makes."""
    return Spawning(service_on(engine, **options))


def gated(gate: Gate, at: str = "execute") -> EngineChoice:
    """The CPU engine with a gate before the method `at`, for the isolation of the present test.

    In a worker, with a gate at `write` or `read`, its arenas are treated as device memory. Otherwise the
    parent would copy values itself, and the engine would not be called.
    """
    choice = _choice(lambda: GatedEngine(gate, at))
    if not in_process():
        return choice
    if gate not in _gate_servers:
        _gate_servers[gate] = GateServer(gate)
    server = _gate_servers[gate]
    return choice._replace(
        worker=WorkerEngine("tests.service.worker_rigs:gated_in_worker", (server.address, at)),
        preload=("cudnn_actor.engines.cpu.engine",),
        host_arenas=at not in ("write", "read"),
    )


def spawn_lagging(folder: Path, **options: Any) -> Spawning:
    """`spawn` on an engine that reports its work as unfinished: see `LaggingEngine`."""
    choice = _choice(lambda: LaggingEngine(str(folder)))
    if in_process():
        worker = WorkerEngine("tests.service.worker_rigs:LaggingEngine", (str(folder),))
        choice = choice._replace(worker=worker, preload=("cudnn_actor.engines.cpu.engine",), host_arenas=True)
    return Spawning(CudnnService(make_options({"device": "cpu", **_current, **options}), engine=choice))


def remove_gate(gate: Gate) -> None:
    """Open a gate for good, so that workers do not spend most of their time on connecting to it."""
    gate.open()
    if gate in _gate_servers:
        _gate_servers.pop(gate).close()


def gated_service(gate: Gate, at: str = "execute", **options: Any) -> CudnnService:
    """A service, not launched, on the engine of `gated`."""
    return CudnnService(make_options({"device": "cpu", **_current, **options}), engine=gated(gate, at))


def spawn_gated(gate: Gate, at: str = "execute", **options: Any) -> Spawning:
    """`spawn` on the engine of `gated`."""
    return Spawning(gated_service(gate, at, **options))


def spawn_poisoned(**options: Any) -> Spawning:
    """`spawn` on an engine for which the value `worker_rigs.POISON` is fatal."""
    choice = _choice(lambda: PoisonedEngine(in_worker=False))
    if in_process():
        choice = choice._replace(
            worker=WorkerEngine("tests.service.worker_rigs:PoisonedEngine", (True,)),
            preload=("cudnn_actor.engines.cpu.engine",),
            host_arenas=True,
        )
    return Spawning(CudnnService(make_options({"device": "cpu", **_current, **options}), engine=choice))


def spawn_mortal(calls: int, **options: Any) -> Spawning:
    """`spawn` in process isolation, on an engine that ends its worker after so many calls."""
    choice = _choice(CpuEngine)._replace(
        worker=WorkerEngine("tests.service.worker_rigs:MortalEngine", (calls,)),
        preload=("cudnn_actor.engines.cpu.engine",),
        host_arenas=True,
    )
    options = {"device": "cpu", "isolation": "process", **options}
    return Spawning(CudnnService(make_options(options), engine=choice))


def gated_child(gate: Gate, id: str = "cudnn", **options: Any) -> tuple[ChildSpec, CudnnService]:
    """`child_spec` on the engine of `gated`."""
    spec, service = child_spec(id, device="cpu", **options)
    give_engine(service, gated(gate))
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
        """A request that is not pure: y = x * w + y."""
        return self.product(beta=1.0)

    async def result(self) -> float:
        return float((await self._gpu.download(self.y)).item())


def single(value: float) -> np.ndarray:
    return np.full((1, 1, 1, 1), value, np.float32)


async def seen(gpu: CudnnRef, kind: type[LifecycleEvent], times: int = 1) -> LifecycleEvent:
    """Wait for the service's `times`-th event of a kind, and return it."""
    async with asyncio.timeout(PATIENCE_S):
        async for event in gpu.events():
            times -= isinstance(event, kind)
            if not times:
                return event
    raise AssertionError(f"the service stopped without {kind.__name__}")


def bare(event: LifecycleEvent) -> LifecycleEvent:
    """An event without its service and times, for comparisons."""
    return msgspec.structs.replace(event, service=None, at=0.0, monotonic=0.0)


async def in_thread(wait: Callable[[], Any]) -> Any:
    """Call a blocking function on another thread, so that the event loop keeps running."""
    return await asyncio.wait_for(asyncio.to_thread(wait), PATIENCE_S)


async def outcome(future: asyncio.Future[Any]) -> Any:
    """Wait for a request. Returns its answer, or its error."""
    return (await asyncio.wait_for(asyncio.gather(future, return_exceptions=True), PATIENCE_S))[0]


def mapped_arenas() -> set[str]:
    """The lines of /proc/self/maps that are arenas of this package."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in maps if "cudnn-actor-arena" in line}
