"""cuDNN without the service: what the frontend's users write, and what can be had below it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from benchmarks.gpu.problems import Problem
from benchmarks.gpu.setting import cudnn, cupy
from benchmarks.gpu.stage import Call, captured, random_values

__all__ = ["Loops", "frontend_loops"]

_DTYPES = {"bfloat16": "BFLOAT16", "float32": "FLOAT"}


class Loops(NamedTuple):
    """Three ways to enqueue the same plan on the same buffers, and how to wait for them."""

    public: Call
    """`graph.execute` with a dict of addresses."""
    lowered: Call
    """The compiled graph that the frontend's holds, with an array of addresses made once."""
    replayed: Call
    """A captured CUDA graph of one convolution, launched by CuPy."""
    wait: Call
    keeps: Any
    """What must live for as long as they may be called."""


@contextmanager
def frontend_loops(problem: Problem, ordinal: int) -> Iterator[Loops]:
    """The loops for a forward convolution."""
    cuda, library = cupy().cuda, cudnn()
    with cuda.Device(ordinal):
        stream = cuda.Stream(non_blocking=True)
        handle = library.create_handle()
        library.set_stream(handle=handle, stream=stream.ptr)
        try:
            loops = _loops(problem, handle, stream)  # here, too: who calls them may not keep what they use
            yield loops
        finally:
            stream.synchronize()
            library.destroy_handle(handle)


def _loops(problem: Problem, handle: Any, stream: Any) -> Loops:
    graph = _graph(problem, handle)
    arrays = [_on_device(spec.size, problem.dtype) for spec in (problem.x, problem.w, problem.y)]
    workspace = cupy().empty(max(graph.get_workspace_size(), 1), "uint8")
    cupy().cuda.runtime.deviceSynchronize()  # the arrays were filled on another stream
    addresses = {uid: array.data.ptr for uid, array in enumerate(arrays, start=1)}
    public = partial(graph.execute, addresses, workspace.data.ptr, handle=handle)
    public()
    order = graph._variant_pack_uids()
    pointers = (ctypes.c_void_p * len(order))(*(addresses[uid] for uid in order))
    return Loops(
        public=public,
        lowered=_lowered(graph, pointers, workspace, handle),
        replayed=captured(stream, public, 1),
        wait=stream.synchronize,
        keeps=(arrays, workspace, pointers),
    )


def _graph(problem: Problem, handle: Any) -> Any:
    library, conv = cudnn(), problem.conv
    dtype, single = getattr(library.data_type, _DTYPES[problem.dtype]), library.data_type.FLOAT
    graph = library.pygraph(
        io_data_type=dtype, intermediate_data_type=single, compute_data_type=single, handle=handle
    )
    x, w = (
        graph.tensor(dim=list(spec.dims), stride=list(spec.strides), data_type=dtype, uid=uid)
        for uid, spec in ((1, problem.x), (2, problem.w))
    )
    y = graph.conv_fprop(image=x, weight=w, padding=[conv.pad] * 2, stride=[conv.stride] * 2, dilation=[1, 1])
    y.set_output(True).set_data_type(dtype).set_uid(3)
    y.set_dim(list(problem.y.dims)).set_stride(list(problem.y.strides))
    graph.build([library.heur_mode.A, library.heur_mode.FALLBACK])
    return graph


def _lowered(graph: Any, pointers: ctypes.Array[ctypes.c_void_p], workspace: Any, handle: Any) -> Call:
    plan = graph._materialize_backend_plan(graph._plan_index).cpp_index
    return partial(
        graph._lowered_graph._execute_with_raw_ptrs,
        ctypes.addressof(pointers),
        len(pointers),
        workspace.data.ptr,
        handle.backend_handle,
        -1 if plan is None else plan,
    )


def _on_device(size: int, dtype: str) -> Any:
    values = random_values(size, dtype)
    return cupy().asarray(values.view(f"uint{8 * values.itemsize}"))
