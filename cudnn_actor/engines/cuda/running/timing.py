"""Times a plan and its pieces on the device.

The whole run is captured once as a CUDA graph with an event behind each piece, and replayed: so the times are
those of the device, and no piece waits for its launch. An event takes time, too, 2.7 us on an H100, and keeps
kernels from overlapping. So the run is also captured without events in between, and the difference is
subtracted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.engines.base import no_progress
from cudnn_actor.engines.cpu.exact.evaluation import round_into
from cudnn_actor.engines.cuda.library.failures import check
from cudnn_actor.engines.cuda.library.libraries import ON_DEVICE, TO_DEVICE, libraries
from cudnn_actor.engines.cuda.running.program import Program
from cudnn_actor.engines.timing import medians, without_overhead
from cudnn_actor.protocol.errors import OutOfMemory
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.graphs.timing import DeviceSpeed, PlanTimes
from cudnn_actor.protocol.operations import GraphTensor

__all__ = ["Once", "operands", "replay_of", "speed_of", "time_run"]


_CLOCK_KHZ = 13
"""`cudaDevAttrClockRate`: the highest clock."""
_DRAWN = 1 << 20
"""The numbers that are drawn; memory is filled with repetitions of them."""
_COPIED_BYTES, _LEAST_COPIED = 256 << 20, 4 << 20
"""The bytes that are copied to measure the speed of copies: several times the second-level cache if there is
room, and the least."""
_PER_CLOCK = {
    (8, 0): {"float16": 2048, "bfloat16": 2048, "tf32": 1024, "float64": 128, "float32": 128, "int8": 4096},
    (9, 0): {"float16": 4096, "bfloat16": 4096, "tf32": 2048, "float64": 256, "float32": 256, "int8": 8192},
    (10, 0): {"float16": 8192, "bfloat16": 8192, "tf32": 4096, "float32": 256, "int8": 16384},
}
"""A multiprocessor's operations in a clock, by compute capability: from NVIDIA's white papers of A100, H100,
B200."""


class Once(NamedTuple):
    """A program that runs once before the timed one: the other half of a divided plan.

    `nbytes`: the bytes of each buffer that it writes, which both programs take behind the graph's buffers.
    """

    program: Program
    nbytes: Sequence[int]


def time_run(
    program: Program,
    graph: OperationGraph,
    workspace: int,
    device: DeviceSpeed,
    on_progress: Callable[[], None],
    *,
    once: Once | None = None,
) -> PlanTimes:
    """Time a program on buffers with random numbers: see `engines.base.Engine.measure`. `once` is not timed.

    `workspace` is the address of the plan's workspace. Raises `OutOfMemory`, and whatever the libraries
    raise.
    """
    pool = libraries().cupy.cuda.MemoryPool()
    held: dict[int, Any] = {}
    try:
        with program.stream:
            pointers = operands(graph, pool, held)
            scalars = [1.0] * len(graph.scalars)
            if once is not None:
                held |= {-1 - number: _memory(pool, nbytes) for number, nbytes in enumerate(once.nbytes)}
                pointers += [int(held[-1 - number].ptr) for number in range(len(once.nbytes))]
                once.program.launch(pointers, scalars, workspace, no_progress)
            pieces = replay_of(program, pointers, scalars, workspace, pieces=True)
            whole = replay_of(program, pointers, scalars, workspace, pieces=False)

            def run() -> Sequence[float]:
                on_progress()
                return (*whole(), *pieces())

            run_us, *pieces_us = medians(run)
    finally:
        program.stream.synchronize()  # enqueued work must not write to memory that is given back
        held.clear()
        pool.free_all_blocks()
    return PlanTimes(run_us=run_us, pieces_us=without_overhead(run_us, pieces_us), device=device)


def operands(graph: OperationGraph, pool: Any, held: dict[int, Any]) -> list[int]:
    """Addresses of new memory for a graph's buffers, in order. Adds the memory to `held`, by uid."""
    for uid in graph.bound:
        tensor = graph.tensor(uid)
        if tensor.overwrites in held:
            held[uid] = held[tensor.overwrites]
            continue
        held[uid] = _memory(pool, tensor.spec.nbytes)
        _fill(int(held[uid].ptr), tensor)
    return [int(held[uid].ptr) for uid in graph.bound]


def _memory(pool: Any, nbytes: int) -> Any:
    """New memory. Raises `OutOfMemory`."""
    try:
        return pool.malloc(max(nbytes, 1))
    except MemoryError:
        raise OutOfMemory(requested=nbytes, in_use=0, limit=None) from None


def _fill(address: int, tensor: GraphTensor) -> None:
    """Fill a tensor's memory, also its gaps: floats are normally distributed, integers are 0."""
    runtime, stream = libraries().runtime, libraries().cupy.cuda.get_current_stream().ptr
    nbytes = tensor.spec.nbytes
    if not tensor.dtype.is_floating:
        runtime.memsetAsync(address, 0, nbytes, stream)
        return
    count = min(_DRAWN, nbytes // tensor.dtype.itemsize)
    drawn = np.empty(count, tensor.dtype.numpy)
    round_into(np.random.default_rng(0).standard_normal(count), tensor.dtype, drawn)
    runtime.memcpy(address, drawn.ctypes.data, drawn.nbytes, TO_DEVICE)
    filled = drawn.nbytes
    while filled < nbytes:
        part = min(filled, nbytes - filled)
        runtime.memcpyAsync(address + filled, address, part, ON_DEVICE, stream)
        filled += part


def replay_of(
    program: Program, pointers: Sequence[int], scalars: Sequence[float], workspace: int, *, pieces: bool
) -> Callable[[], Sequence[float]]:
    """A function that runs the program once, waits, and returns microseconds: of each piece, or the run."""
    cupy, stream = libraries().cupy, program.stream
    events = [cupy.cuda.Event() for _ in range(1 + (len(program.recipe.parts) if pieces else 1))]

    def enqueue(record: Callable[[Any], object]) -> None:
        behind = iter(events)
        record(next(behind))
        program.launch(
            pointers, scalars, workspace, (lambda: record(next(behind))) if pieces else no_progress
        )
        if not pieces:
            record(next(behind))

    graph = _capture(stream, enqueue)

    def run() -> Sequence[float]:
        if graph is None:
            enqueue(lambda event: event.record(stream))
        else:
            graph.launch(stream)
        stream.synchronize()
        return [cupy.cuda.get_elapsed_time(*pair) * 1e3 for pair in itertools.pairwise(events)]

    return run


def _capture(stream: Any, enqueue: Callable[[Callable[[Any], object]], None]) -> Any:
    """The CUDA graph of all that `enqueue` enqueues, with its events; None if that cannot be captured."""
    driver = libraries().driver
    external = int(driver.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL)

    def record(event: Any) -> None:
        """Record an event by a node of the graph. A plain record would only order the captured work."""
        check(driver.cuEventRecordWithFlags(event.ptr, stream.ptr, external))

    try:
        stream.begin_capture(libraries().runtime.streamCaptureModeThreadLocal)
        try:
            enqueue(record)
        finally:
            graph = stream.end_capture()
    except Exception:  # noqa: BLE001 - a plan may do anything that a capture forbids
        return None
    return graph


def speed_of(ordinal: int, stream: Any) -> DeviceSpeed:
    """The speed of a device. Blocks while it copies, for some milliseconds."""
    runtime = libraries().runtime
    properties = runtime.getDeviceProperties(ordinal)
    per_clock = _PER_CLOCK.get((properties["major"], properties["minor"]), {})
    clocks = properties["multiProcessorCount"] * 1e3 * runtime.deviceGetAttribute(_CLOCK_KHZ, ordinal)
    return DeviceSpeed(
        copy_bytes_per_s=_copy_speed(stream),
        flops_per_s={kind: count * clocks for kind, count in per_clock.items()},
    )


def _copy_speed(stream: Any) -> float:
    """Bytes that a copy on the device reads and writes in a second."""
    cupy, runtime = libraries().cupy, libraries().runtime
    pool, nbytes = cupy.cuda.MemoryPool(), _COPIED_BYTES
    with stream:
        while True:
            try:
                memory = pool.malloc(2 * nbytes)
                break
            except MemoryError:
                if nbytes <= _LEAST_COPIED:
                    raise OutOfMemory(requested=2 * nbytes, in_use=0, limit=None) from None
                nbytes //= 2
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()

        def copy() -> tuple[float]:
            begin.record(stream)
            runtime.memcpyAsync(int(memory.ptr) + nbytes, int(memory.ptr), nbytes, ON_DEVICE, stream.ptr)
            end.record(stream)
            end.synchronize()
            return (cupy.cuda.get_elapsed_time(begin, end) / 1e3,)

        runtime.memsetAsync(int(memory.ptr), 1, 2 * nbytes, stream.ptr)
        (took_s,) = medians(copy)
    return 2 * nbytes / float(took_s)
