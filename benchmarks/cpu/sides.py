"""Who computes a case: this package's services, ONNX Runtime, PyTorch. All are called from one process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort

from cudnn_actor import CudnnRef, RunGraph, spawn
from cudnn_actor.messages import RunModel
from cudnn_actor.trials.bench.cpu_time import process_cpu_s

from .cases import Case, torch

__all__ = ["SERVICES", "SIDES", "Side", "Unavailable", "opened"]


class Unavailable(Exception):
    """A side that does not compute this case, or that this installation does not have."""


class Side(NamedTuple):
    """A side that is ready to compute a case.

    Parameters
    ----------
    run
        Computes it once.
    result
        Its outputs, in the file's order.
    cpu_s
        CPU seconds of the processes that take part.
    plan
        The tag of the plan that this package runs.
    takes_several
        Whether it takes requests while it computes others. If not, a call returns when it has computed.
    """

    run: Callable[[], Awaitable[object]]
    result: Callable[[], Awaitable[list[np.ndarray]]]
    cpu_s: Callable[[], float] = time.process_time
    plan: str | None = None
    takes_several: bool = True


SERVICES: Mapping[str, Mapping[str, Any]] = {
    "thread": {"isolation": "thread", "onnx_runtime": False},
    "buffers": {"isolation": "thread", "onnx_runtime": False},
    "process": {"isolation": "process", "onnx_runtime": False},
    "extra": {"isolation": "thread"},
    "extra-buffers": {"isolation": "thread"},
    "exact": {"isolation": "thread", "exact": True},
}
"""This package's sides: the options of `spawn`."""
SIDES = (*SERVICES, "onnxruntime", "torch")


@contextlib.asynccontextmanager
async def opened(name: str, case: Case, threads: int) -> AsyncIterator[Side]:
    """A side for a case. Raises `Unavailable`."""
    if name == "onnxruntime":
        yield _in_onnxruntime(case, threads)
    elif name == "torch":
        yield _in_torch(case, threads)
    else:
        async with spawn(device="cpu", hang_after_s=600.0, threads=threads, **SERVICES[name]) as gpu:
            pid = gpu.worker_pid
            make = _on_buffers if name.endswith("buffers") else _on_arrays
            side = await (make if isinstance(case.what, bytes) else _on_graph)(gpu, case)
            if pid is not None:
                side = side._replace(cpu_s=lambda: time.process_time() + process_cpu_s(pid))
            yield side


async def _on_arrays(gpu: CudnnRef, case: Case) -> Side:
    model = await gpu.load(case.what)
    names = [each.name for each in model.outputs]

    async def run() -> dict[str, Any]:
        return await gpu.run(model, case.inputs)

    async def result() -> list[np.ndarray]:
        found = await run()
        return [np.asarray(found[name]) for name in names]

    return Side(run, result, plan=(await model.explain(case.inputs)).plan)


async def _on_buffers(gpu: CudnnRef, case: Case) -> Side:
    model = await gpu.load(case.what)
    names = [each.name for each in model.outputs]
    given: dict[str, Any] = dict(case.inputs)
    for name, array in case.inputs.items():
        if array.dtype.kind == "f":  # others may decide over shapes, which buffers cannot
            given[name] = await gpu.upload(array)
    outputs = await gpu.run(model, given, keep=names)
    message = RunModel.of(model.ref, given, outputs)

    async def result() -> list[np.ndarray]:
        await gpu.ask(message)
        return [await gpu.download(outputs[each.name]) for each in model.outputs]

    plan = (await model.explain(case.inputs)).plan
    return Side(lambda: gpu.ask(message), result, plan=plan)


async def _on_graph(gpu: CudnnRef, case: Case) -> Side:
    assert not isinstance(case.what, bytes)
    given = {name: await gpu.upload(array) for name, array in case.inputs.items()}
    made = {port.name: await gpu.empty(port.spec.dims, dtype=port.spec.dtype) for port in case.what.outputs}
    message = RunGraph.bind(case.what, {**given, **made})

    async def result() -> list[np.ndarray]:
        await gpu.ask(message)
        return [await gpu.download(each) for each in made.values()]

    plan = (await gpu.explain(case.what)).plan
    return Side(lambda: gpu.ask(message), result, plan=plan)


def _at_once(call: Callable[[], Any], arrays: Callable[[Any], list[np.ndarray]]) -> Side:
    async def run() -> object:
        return call()

    async def result() -> list[np.ndarray]:
        return arrays(call())

    return Side(run, result, takes_several=False)


def _in_onnxruntime(case: Case, threads: int) -> Side:
    if not isinstance(case.what, bytes):
        raise Unavailable("it has no gradients")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = ort.InferenceSession(case.what, options, providers=["CPUExecutionProvider"])
    return _at_once(lambda: session.run(None, case.inputs), list)


def _in_torch(case: Case, threads: int) -> Side:
    lib = torch()
    if lib is None or case.torch is None:
        raise Unavailable("there is no PyTorch, or it does not have this network")
    compute = case.torch
    lib.set_num_threads(threads)
    given = [lib.from_numpy(array) for array in case.inputs.values()]

    def call() -> Any:
        with lib.inference_mode():
            return compute(*given)

    return _at_once(call, lambda found: [found.numpy()])
