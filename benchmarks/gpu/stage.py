"""An engine without its actor: the same plans on the same kind of memory, called in a loop on this thread."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.gpu.setting import Setting, cupy
from cudnn_actor import BufferRef, TensorSpec
from cudnn_actor.engines import choose_engine
from cudnn_actor.engines.base import Builder, Engine, Plan
from cudnn_actor.engines.remote import BuilderHost
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.messages.lowering import lower
from cudnn_actor.protocol.messages.messages import Compute
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["Placed", "Stage", "random_values", "staged"]

Call = Callable[[], Any]
_GIVEN, _WRITTEN = 0, 1
_BLOCK = 1 << 22


class Placed(NamedTuple):
    """A message whose buffers lie on the stage."""

    message: Compute
    graph: OperationGraph
    buffers: tuple[Any, ...]


class Stage:
    """An open engine with two arenas: one of random numbers to read from, one to write to.

    Inputs are never written, so that no value grows from one convolution to the next.

    Parameters
    ----------
    engine
        Open, on this thread.
    nbytes
        Of each arena.
    """

    def __init__(self, engine: Engine, nbytes: int) -> None:
        self.engine = engine
        self._nbytes = nbytes
        self._fds = [engine.create_arena(arena, nbytes) for arena in (_GIVEN, _WRITTEN)]
        self._builders = BuilderHost()
        self._builder: Builder | None = None
        self._build_thread = ThreadPoolExecutor(1, "benchmark-builder")
        self.stream = getattr(engine, "stream", None)
        """The engine's stream; None where there is none, and a clock on the wall must do."""

    def close(self) -> None:
        """Give everything back."""
        if self._builder is not None:
            self._build_thread.submit(self._builder.close).result()
        self._build_thread.shutdown()
        self._builders.close()
        for arena, fd in enumerate(self._fds):
            self.engine.unmap_arena(arena)
            os.close(fd)
        self.engine.close()

    # Messages.

    def fill(self, dtype: str) -> None:
        """Make the given arena random numbers of a type, whatever shape they are then read in."""
        values = random_values(_BLOCK, dtype)
        for offset in range(0, self._nbytes - values.nbytes + 1, values.nbytes):
            self.engine.write(self.engine.bind(_GIVEN, offset, TensorSpec.like(values)), values)
        self.wait()

    def place(self, make: Callable[..., Compute], specs: dict[str, TensorSpec], written: str) -> Placed:
        """The message that `make` makes of three references by name, on this stage's memory."""
        offsets = {_GIVEN: 0, _WRITTEN: 0}
        places: dict[int, tuple[int, int]] = {}
        refs = {}
        for slot, (name, spec) in enumerate(specs.items()):
            arena = _WRITTEN if name == written else _GIVEN
            places[slot] = arena, offsets[arena]
            offsets[arena] += -(-spec.nbytes // 256) * 256
            refs[name] = BufferRef(slot=slot, generation=0, spec=spec, device=self.engine.device)
        if max(offsets.values()) > self._nbytes:
            raise MemoryError(f"{specs} need more than the stage's {self._nbytes:,} bytes")
        message = make(**refs)
        lowered = lower(message)
        bound = (getattr(message, name) for name in lowered.buffers)
        return Placed(
            message,
            lowered.graph,
            tuple(self.engine.bind(*places[ref.slot], ref.spec) for ref in bound),
        )

    # Plans.

    def plan(self, placed: Placed) -> tuple[Plan, float]:
        """The plan that a first use would take, and the seconds that it took to build."""
        began = time.perf_counter()
        plan = self.engine.build(placed.graph, workspace_limit=None)
        return plan, time.perf_counter() - began

    def tuned(self, placed: Placed) -> tuple[Plan, float] | None:
        """The fastest plan, and the seconds that it took to find; None where there is nothing to tune."""
        builder = self._open_builder()
        if builder is None:
            return None
        began = time.perf_counter()
        tune = partial(builder.tune, placed.graph, workspace_limit=None, progress=lambda *_: None)
        plan = self._build_thread.submit(tune).result()
        took_s = time.perf_counter() - began
        self.engine.prepare(plan)
        return plan, took_s

    def built_elsewhere(self, placed: Placed) -> None:
        """Have the engine's other process build a plan; it stays. Nothing where there is none."""
        builder = self._open_builder()
        if builder is not None:
            build = partial(builder.build, placed.graph, workspace_limit=None)
            plan = self._build_thread.submit(build).result()
            self._build_thread.submit(builder.export, plan).result()

    def _open_builder(self) -> Builder | None:
        if self._builder is None:
            self._builder = self.engine.builder(self._builders)
            if self._builder is not None:
                self._build_thread.submit(self._builder.open).result()
        return self._builder

    def call(self, plan: Plan, placed: Placed) -> Call:
        """Enqueues one run."""
        return partial(self.engine.execute, plan, placed.buffers, ())

    # Time.

    def wait(self) -> None:
        """Wait until the device has done everything. Blocks."""
        if not self.engine.synchronous:
            fence = self.engine.fence()
            while not self.engine.has_passed(fence):
                pass

    def microseconds(self, call: Call, count: int) -> float:
        """The microseconds of one of `count` calls, by the device's own events around them all. Blocks."""
        if self.stream is None:
            began = time.perf_counter()
            for _ in itertools.repeat(None, count):
                call()
            self.wait()
            return 1e6 * (time.perf_counter() - began) / count
        return between_events(self.stream, call, count)

    def captured(self, call: Call, count: int) -> Call | None:
        """`count` calls as one CUDA graph, which runs them without the host; None where there is no device.

        From then on the plan that is called is launched anew each time: a replay cannot be captured.
        """
        if self.stream is None:
            return None
        program = getattr(getattr(call, "args", [None])[0], "program", None)
        if program is not None:
            program.forget_replays()
            program._capturable = False
        return captured(self.stream, call, count)


def between_events(stream: Any, call: Call, count: int) -> float:
    """Microseconds of the device's for each of `count` calls that enqueue on a CuPy stream. Blocks."""
    cuda = cupy().cuda
    start, end = cuda.Event(), cuda.Event()
    start.record(stream)
    for _ in itertools.repeat(None, count):
        call()
    end.record(stream)
    end.synchronize()
    return 1e3 * float(cuda.get_elapsed_time(start, end)) / count


def captured(stream: Any, call: Call, count: int) -> Call:
    """`count` calls that enqueue on a CuPy stream as one CUDA graph: what launches it."""
    stream.begin_capture(cupy().cuda.runtime.streamCaptureModeThreadLocal)
    try:
        for _ in itertools.repeat(None, count):
            call()
    finally:
        graph = stream.end_capture()
    return partial(graph.launch, stream)


def random_values(size: int, dtype: str) -> np.ndarray:
    """Normal deviates: zeros run faster than what people compute with."""
    block = np.random.default_rng(0).standard_normal(min(size, _BLOCK), dtype="float32")
    return np.resize(block.astype(DType(dtype).numpy), size)


@contextmanager
def staged(setting: Setting, nbytes: int, dtype: str) -> Iterator[Stage]:
    """A stage on the device that is measured."""
    engine = choose_engine(setting.device).make()
    engine.open()
    stage = Stage(engine, nbytes)
    try:
        stage.fill(dtype)
        yield stage
    finally:
        stage.close()
