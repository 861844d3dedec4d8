"""Blocks of networks that run without the barriers before cuDNN's kernels.

`engines/cuda/running/barriers.py` says what the barriers are for.
"""

from __future__ import annotations

from unittest import mock

import numpy as np

from cudnn_actor.engines.cuda.checking.self_check import SelfCheck
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.running import program
from cudnn_actor.engines.cuda.running.barriers import waits
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.program import Program
from cudnn_actor.protocol import DType, TensorSpec

from ..blocks import Block, bottleneck, transformer
from ..recording import Row

__all__ = ["BLOCKS", "without_barriers"]

_REPEATS = 300
"""Runs of a block, one behind another."""

BLOCKS: dict[str, Block] = {
    f"{name}, {dtype.value}": make
    for dtype in (DType.BFLOAT16, DType.FLOAT32)
    for name, make in (
        ("bottleneck of one image, 56", bottleneck(batch=1, dtype=dtype, inference=True)),
        (
            "bottleneck of one image, 14",
            bottleneck(batch=1, channels=1024, width=256, size=14, dtype=dtype, inference=True),
        ),
        ("transformer, 1 x 128", transformer(batch=1, length=128, dtype=dtype)),
    )
}


def without_barriers(name: str) -> Row:
    """How many runs of a block differ without barriers, each on other values than the one before."""
    block = BLOCKS[name]
    graph = block.forward
    builder = CudaBuilder(0)
    builder.open()
    context = builder.context
    plan = builder.build(graph.body, workspace_limit=None)
    check = SelfCheck(graph.body, context)
    waiting = Program(plan, context.handle, context.stream)
    with mock.patch.object(program, "waits", lambda steps: [False] * len(steps)):
        hurrying = Program(plan, context.handle, context.stream)
    row: Row = {"problem": name, "plan": plan.tag, "barriers": sum(waits(plan.recipe.steps))}
    wanted = _results(block, waiting, check, plan)
    again = _results(block, waiting, check, plan)
    got = _results(block, hurrying, check, plan)
    different = [int((one != other).any(axis=1).sum()) for one, other in ((wanted, again), (wanted, got))]
    return row | {
        "runs": _REPEATS,
        "different_with": different[0],
        "different_without": different[1],
        "fault": None,
    }


def _results(block: Block, runner: Program, check: SelfCheck, plan: CudaPlan) -> np.ndarray:
    """The bytes of the output of each run, none of which is waited for."""
    cupy, runtime = libraries().cupy, libraries().runtime
    graph, values = block.forward, block.values(seed=1)
    stream = check.context.stream
    pointers = dict(zip(graph.body.bound, check.pointers, strict=True))
    ports = {port.name: port for port in (*graph.inputs, *graph.outputs)}
    places = {name: pointers[port.uid] for name, port in ports.items() if port.uid is not None}
    workspace = check.room_for(plan)
    rng = np.random.default_rng(1)
    key = tuple(check.pointers)
    on_device = runtime.memcpyDeviceToDevice
    with stream:
        for port in graph.inputs:
            raw = _memory_of(values[port.name], port.spec)
            runtime.memcpy(places[port.name], raw.ctypes.data, raw.nbytes, runtime.memcpyHostToDevice)
        x, y = ports["x"], ports["y"]
        xs = [cupy.asarray(_memory_of(rng.standard_normal(x.spec.dims), x.spec)) for _ in range(8)]
        ys = cupy.zeros((_REPEATS, y.spec.nbytes), cupy.uint8)
        stream.synchronize()
        for number in range(_REPEATS):
            source = xs[number % len(xs)]
            runtime.memcpyAsync(places["x"], source.data.ptr, source.nbytes, on_device, stream.ptr)
            replay = runner.replays.get(key)
            if replay is None:
                runner.run(key, check.pointers, check.scalars, workspace.pointer)
            else:
                replay.launch(behind=0)
            row = ys[number]
            runtime.memcpyAsync(row.data.ptr, places["y"], row.nbytes, on_device, stream.ptr)
        stream.synchronize()
    result: np.ndarray = cupy.asnumpy(ys)
    return result


def _memory_of(values: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """The bytes of values in the order of their dims. Layouts are passed over: any values will do here."""
    return values.astype(spec.dtype.numpy).reshape(-1).view(np.uint8)
