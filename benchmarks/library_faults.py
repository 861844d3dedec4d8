"""Which faults of cuDNN, that the CUDA engine avoids, the installed version has.

    python -m benchmarks.library_faults --out benchmarks/results

Needs a GPU. For each erratum (`engines/cuda/plans/errata.py`) there are problems for which it excludes
engines. Of each one candidate is built all the same. It runs on the self-check's values, products and
convolutions alone on normal values too, and is timed beside the plan that a service uses. An illegal address
ends the CUDA context, so each candidate has a process of its own.

Then blocks of networks run without the barriers that stand before cuDNN's kernels
(`engines/cuda/plans/barriers.py`), and the runs whose results differ from those with barriers are counted.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from rich.table import Table

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.plans import program
from cudnn_actor.engines.cuda.plans.barriers import waits
from cudnn_actor.engines.cuda.plans.candidates import candidates, names_of
from cudnn_actor.engines.cuda.plans.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.plans.errata import erratum
from cudnn_actor.engines.cuda.plans.frontend_graph import Refused
from cudnn_actor.engines.cuda.plans.plan import CudaPlan
from cudnn_actor.engines.cuda.plans.program import Program
from cudnn_actor.engines.cuda.plans.self_check import BuildContext, SelfCheck
from cudnn_actor.engines.cuda.plans.steps import finish, given_sources, graph_step
from cudnn_actor.engines.cuda.plans.tuning import time_plan
from cudnn_actor.protocol import (
    Activation,
    BufferRef,
    ConvSpec,
    DType,
    Epilogue,
    LayerNormBackward,
    Layout,
    MatMul,
    OperationGraph,
    TensorSpec,
)
from cudnn_actor.protocol.lowering import lower
from cudnn_actor.protocol.operations import Convolution
from tests.gpu.bounds import UNIT, error_over_bound
from tests.gpu.cases import Case, Kind, arrays
from tests.gpu.oracle import truth

from .blocks import Block, bottleneck, transformer
from .gpu.setting import gpu_versions
from .operations import best, graph_of
from .recording import Row, keep

__all__ = ["PROBLEMS", "excluded"]

_HALF = (DType.BFLOAT16, DType.FLOAT16)
_RUNS = 20
_REPEATS = 300
"""Runs of a block, one behind another."""
_AT_ONCE = 8
_CHILD_S = 150
_EVERY_VERSION = 0
"""Older than any version that an erratum is fixed in."""


def _product(m: int, k: int, n: int, dtype: DType, gap: int = 0) -> OperationGraph:
    """Of two matrices, whose rows are `gap` elements further apart than they are long."""

    def matrix(rows: int, columns: int) -> BufferRef:
        spec = TensorSpec.strided((rows, columns), (columns + gap, 1), dtype)
        return BufferRef(slot=0, generation=0, spec=spec, device="none")

    return lower(MatMul(a=matrix(m, k), b=matrix(k, n), y=matrix(m, n))).graph


def _convolution(
    kind: Kind,
    dtype: DType,
    x: tuple[int, ...],
    w: tuple[int, ...],
    *,
    layout: Layout = Layout.NHWC,
    groups: int = 1,
    pad: int = 1,
    odd: str = "",
    **extras: Any,
) -> Case:
    """Of the tensors named in `odd`, rows are an element further apart."""
    conv = ConvSpec.symmetric(2, pad=pad, groups=groups)
    dims = {"x": x, "w": w, "y": conv.output_dims(x, w)}
    specs: dict[str, Any] = {name: TensorSpec.packed(of, dtype, layout) for name, of in dims.items()}
    for name in odd:
        _, c, h, width = dims[name]
        row = width * c + 1
        specs[name] = TensorSpec.strided(dims[name], (h * row, 1, row, c), dtype)
    return Case(kind=kind, conv=conv, **specs, **extras)


def _everything(dtype: DType, channels: int) -> dict[str, Any]:
    bias = TensorSpec.packed((channels,), dtype)
    return {"alpha": 1.5, "beta": 0.5, "bias": bias, "epilogue": Epilogue(activation=Activation.RELU)}


def _two_channels() -> Case:
    """Pixels lie ten elements apart, and rows 251."""
    x, w = (2, 2, 25, 25), (8, 2, 3, 3)
    spec = TensorSpec.strided(x, (251 * 25, 1, 251, 10), DType.BFLOAT16)
    conv = ConvSpec.symmetric(2, pad=1)
    others: dict[str, Any] = {
        name: TensorSpec.packed(dims, DType.BFLOAT16, Layout.NHWC)
        for name, dims in (("w", w), ("y", conv.output_dims(x, w)))
    }
    return Case(kind=Kind.FORWARD, conv=conv, x=spec, **others)


def _layer_norm_backward() -> OperationGraph:
    x, weights, kept = (
        TensorSpec.packed(dims, dtype)
        for dims, dtype in (
            ((100_352, 96), DType.BFLOAT16),
            ((96,), DType.BFLOAT16),
            ((100_352, 1), DType.FLOAT32),
        )
    )
    names = {"dy": x, "x": x, "mean": kept, "inverse_deviation": kept, "scale": weights}
    return graph_of(LayerNormBackward, names | {"dx": x, "dscale": weights, "dbias": weights})


def _float32_and_relu() -> Case:
    return _convolution(
        Kind.FORWARD,
        DType.FLOAT32,
        (32, 64, 56, 56),
        (64, 64, 3, 3),
        alpha=2.0,
        epilogue=Epilogue(activation=Activation.RELU),
    )


_PROBLEMS: dict[str, Case | OperationGraph] = {
    **{
        f"gradient of {name}": _convolution(
            Kind.BACKWARD_FILTER, dtype, x, w, layout=layout, groups=w[0], pad=0
        )
        for name, dtype, x, w, layout in (
            ("2x1 depthwise filters, float16", DType.FLOAT16, (6, 16, 16, 18), (16, 1, 2, 1), Layout.NHWC),
            ("1x1 depthwise filters, float16", DType.FLOAT16, (8, 32, 15, 11), (32, 1, 1, 1), Layout.NCHW),
            ("4x2 depthwise filters, bfloat16", DType.BFLOAT16, (8, 2, 14, 6), (2, 1, 4, 2), Layout.NHWC),
            ("5x5 depthwise filters, float16", DType.FLOAT16, (3, 18, 17, 24), (18, 1, 5, 5), Layout.NHWC),
        )
    },
    "5x5 filters in 3 groups, float16": _convolution(
        Kind.FORWARD, DType.FLOAT16, (4, 24, 18, 22), (24, 8, 5, 5), layout=Layout.NCHW, groups=3, pad=2
    ),
    **{f"product with gaps, {dtype.value}": _product(256, 512, 128, dtype, gap=8) for dtype in _HALF},
    "long product, bfloat16": _product(31, 1418, 24, DType.BFLOAT16),
    "long product, float16": _product(15, 1113, 29, DType.FLOAT16),
    "grouped, alpha, beta, bias and relu, float32": _convolution(
        Kind.FORWARD,
        DType.FLOAT32,
        (4, 8, 14, 14),
        (8, 4, 3, 3),
        layout=Layout.NCHW,
        groups=2,
        **_everything(DType.FLOAT32, 8),
    ),
    "5 groups of 4 channels, bias and relu, bfloat16": _convolution(
        Kind.FORWARD,
        DType.BFLOAT16,
        (4, 20, 14, 14),
        (20, 4, 3, 3),
        groups=5,
        **_everything(DType.BFLOAT16, 20),
    ),
    "gradient of a filter of 4, alpha and beta, float16": _convolution(
        Kind.BACKWARD_FILTER, DType.FLOAT16, (4, 4, 14, 14), (4, 4, 3, 3), alpha=1.5, beta=0.5
    ),
    **{
        f"odd strides of {odd}, bias and relu, {dtype.value}": _convolution(
            Kind.FORWARD, dtype, (4, 16, 14, 14), (16, 16, 3, 3), odd=odd, **_everything(dtype, 16)
        )
        for dtype in _HALF
        for odd in "wy"
    },
    "two channels, pixels ten elements apart, bfloat16": _two_channels(),
    "layer norm backward, 100,352 rows of 96, bfloat16": _layer_norm_backward(),
    "3x3, 64 channels, a number and relu, float32": _float32_and_relu(),
}

PROBLEMS = {name: of.graph() if isinstance(of, Case) else of for name, of in _PROBLEMS.items()}


def excluded(graph: OperationGraph, names: list[str]) -> list[int]:
    """Of each engine that errata exclude, of whatever version, the first candidate with these names."""
    found: dict[str, int] = {}
    for number, name in enumerate(names):
        if erratum(graph, name, _EVERY_VERSION) is not None:
            found.setdefault(name.split("_")[0], number)
    return list(found.values())


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    parser.add_argument("--only", default="", help="problems in whose name this regular expression is found")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        name, number = given.one
        print(json.dumps(_block(name) if name in BLOCKS else _candidate(name, int(number))), flush=True)
        return
    keep(_rows(given.only), _sheet, given.out, "library-faults", versions=gpu_versions())


def _rows(only: str) -> Iterator[Row]:
    tasks: list[tuple[str, int]] = []
    builder = CudaBuilder(0)
    builder.open()
    for name, graph in PROBLEMS.items():
        if re.search(only, name):
            try:
                names = names_of(candidates(graph, builder.context.handle, None))
            except Refused as refused:
                yield {"problem": name, "plan": "", "fault": f"refused: {refused}"}
                continue
            found = excluded(graph, names)
            tasks += [(name, number) for number in found]
            if not found:
                yield {"problem": name, "plan": "", "fault": "no candidate that an erratum excludes"}
    builder.close()
    tasks += [(name, 0) for name in BLOCKS if re.search(only, name)]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        yield from threads.map(lambda task: _apart(*task), tasks)


def _apart(name: str, number: int) -> Row:
    """A row that a process of its own has found, or how it ended."""
    command = [sys.executable, "-m", "benchmarks.library_faults", "--one", name, str(number)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_CHILD_S, check=False)
    except subprocess.TimeoutExpired:
        return {"problem": name, "plan": f"candidate {number}", "fault": f"not done in {_CHILD_S} s"}
    lines = ran.stdout.strip().splitlines()
    if ran.returncode == 0 and lines:
        row: Row = json.loads(lines[-1])
        return row
    said = (ran.stderr.strip().splitlines() or [""])[-1]
    return {"problem": name, "plan": f"candidate {number}", "fault": f"exit status {ran.returncode}: {said}"}


def _candidate(name: str, number: int) -> Row:
    """What one candidate computes, and how long it takes."""
    graph = PROBLEMS[name]
    builder = CudaBuilder(0)
    builder.open()
    context = builder.context
    lowered = candidates(graph, context.handle, None)
    row: Row = {"problem": name, "plan": names_of(lowered)[number], "fault": None}
    cudnn = libraries().cudnn
    try:
        lowered.build_plan_at_index(number)
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError) as error:
        return row | {"fault": f"not built: {str(error).splitlines()[0][:150]}"}
    plan = finish(graph, [graph_step(graph, lowered, given_sources(graph))], [lowered], 0, None)
    chosen = builder.build(graph, workspace_limit=None)
    check = SelfCheck(graph, context)
    row |= {"service": chosen.tag, "service_us": best(lambda: time_plan(check, chosen, _RUNS))}
    try:
        row["fault"] = check.fault(plan)
        if row["fault"] is None:
            row["us"] = best(lambda: time_plan(check, plan, _RUNS))
        problem = _PROBLEMS[name]
        if isinstance(graph.operations[0], MatMul) or (isinstance(problem, Case) and problem.plain):
            row |= {"off": _off(problem, plan, context), "service_off": _off(problem, chosen, context)}
    except EngineFailure as failure:  # a dead context, in which nothing more can be done
        row["fault"] = f"{type(failure).__name__}: {failure}"
    return row


def _off(problem: Case | OperationGraph, plan: CudaPlan, context: BuildContext) -> float:
    """The error for normal values, over that of one rounding of a sum in float32: see `tests.gpu.bounds`.

    Of a product, of the element that is worst; of a convolution, of all elements together.
    """
    if isinstance(problem, Case):
        given = arrays(problem)
        graph = problem.graph()
        operation = graph.operations[0]
        assert isinstance(operation, Convolution), "it is a convolution alone"
        uids = dict(zip("xwy", operation.of_shape, strict=True))
        got = _ran(graph, {uids[name]: values for name, values in given.items()}, plan, context)
        return round(error_over_bound(problem, got, truth(problem)), 3)
    (product,) = problem.operations
    assert isinstance(product, MatMul), "it is a product alone"
    rng = np.random.default_rng(0)
    values = {
        uid: rng.standard_normal(problem.tensor(uid).dims).astype(problem.tensor(uid).dtype.numpy)
        for uid in (product.a, product.b)
    }
    got = _ran(problem, values, plan, context).astype(np.float64)
    a, b = (values[uid].astype(np.float64) for uid in (product.a, product.b))
    walk = 4 * math.sqrt(a.shape[1]) * UNIT[DType.FLOAT32]
    unit = UNIT[problem.tensor(problem.results[0]).dtype]
    allowed = unit * np.abs(a @ b) + walk * (np.abs(a) @ np.abs(b))
    return round(float((np.abs(got - a @ b) / allowed).max()), 3)


def _ran(
    graph: OperationGraph, given: Mapping[int, np.ndarray], plan: CudaPlan, context: BuildContext
) -> np.ndarray:
    """What a plan makes of these operands; the graph's only result."""
    cupy, memory = libraries().cupy, {}
    with context.stream:
        for uid in graph.bound:
            spec = graph.tensor(uid).spec
            raw = np.zeros(spec.nbytes // spec.dtype.itemsize, spec.dtype.numpy)
            if uid in given:
                _view(raw, spec)[...] = given[uid]
            memory[uid] = cupy.asarray(raw.view(np.uint8))
        workspace = cupy.zeros(max(1, plan.workspace), cupy.uint8)
        pointers = [memory[uid].data.ptr for uid in graph.bound]
        Program(plan, context.handle, context.stream).run((), pointers, (), workspace.data.ptr)
        context.stream.synchronize()
        (uid,) = graph.results
        spec = graph.tensor(uid).spec
        return np.ascontiguousarray(_view(cupy.asnumpy(memory[uid]).view(spec.dtype.numpy), spec))


def _view(values: np.ndarray, spec: TensorSpec) -> np.ndarray:
    strides = [stride * values.itemsize for stride in spec.strides]
    return np.lib.stride_tricks.as_strided(values, spec.dims, strides)


def _block(name: str) -> Row:
    """How many runs of a block differ without barriers, each on other values than the one before."""
    graph = BLOCKS[name].forward
    builder = CudaBuilder(0)
    builder.open()
    context = builder.context
    plan = builder.build(graph.body, workspace_limit=None)
    check = SelfCheck(graph.body, context)
    waiting = Program(plan, context.handle, context.stream)
    with mock.patch.object(program, "waits", lambda steps: [False] * len(steps)):
        hurrying = Program(plan, context.handle, context.stream)
    row: Row = {"problem": name, "plan": plan.tag, "barriers": sum(waits(plan.recipe.steps))}
    wanted = _results(graph, waiting, check, plan)
    again = _results(graph, waiting, check, plan)
    got = _results(graph, hurrying, check, plan)
    different = [int((one != other).any(axis=1).sum()) for one, other in ((wanted, again), (wanted, got))]
    return row | {
        "runs": _REPEATS,
        "different_with": different[0],
        "different_without": different[1],
        "fault": None,
    }


def _results(graph: Any, runner: Program, check: SelfCheck, plan: CudaPlan) -> np.ndarray:
    """The bytes of the output of each run, none of which is waited for."""
    cupy = libraries().cupy
    stream = check.context.stream
    places = dict(zip(graph.body.bound, check.pointers, strict=True))
    ports = {port.name: port for port in (*graph.inputs, *graph.outputs)}
    workspace = check.room_for(plan)
    rng = np.random.default_rng(1)
    key = tuple(check.pointers)
    with stream:
        for port in graph.inputs:
            fan = np.prod(port.spec.dims[1:]) if len(port.spec.dims) == 4 else port.spec.dims[0]
            scale = 1.0 if port.name == "x" or len(port.spec.dims) == 1 else float(fan) ** -0.5
            _put(places[port.uid], port.spec, rng.standard_normal(port.spec.dims) * scale)
        x, y = ports["x"], ports["y"]
        xs = [
            cupy.asarray(
                (rng.standard_normal(x.spec.dims)).astype(x.spec.dtype.numpy).reshape(-1).view(np.uint8)
            )
            for _ in range(8)
        ]
        ys = cupy.zeros((_REPEATS, y.spec.nbytes), cupy.uint8)
        stream.synchronize()
        for number in range(_REPEATS):
            source = xs[number % len(xs)]
            cupy.cuda.runtime.memcpyAsync(places[x.uid], source.data.ptr, source.nbytes, 3, stream.ptr)
            replay = runner.replays.get(key)
            if replay is None:
                runner.run(key, check.pointers, check.scalars, workspace.pointer)
            else:
                replay.launch(behind=0)
            row = ys[number]
            cupy.cuda.runtime.memcpyAsync(row.data.ptr, places[y.uid], row.nbytes, 3, stream.ptr)
        stream.synchronize()
    result: np.ndarray = cupy.asnumpy(ys)
    return result


def _put(address: int, spec: TensorSpec, values: np.ndarray) -> None:
    cupy = libraries().cupy
    raw = values.astype(spec.dtype.numpy).reshape(-1).view(np.uint8)
    cupy.cuda.runtime.memcpy(address, raw.ctypes.data, raw.nbytes, 1)


def _sheet(found: list[Row]) -> Table:
    table = Table("problem", "plan", "fault", "error, beside the service's", "µs, beside the service's")
    for row in found:
        errors = f"{row['off']}, {row['service_off']}" if "off" in row else ""
        times = f"{row['us']}, {row['service_us']}" if "us" in row else ""
        if "runs" in row:
            without, with_ = row["different_without"], row["different_with"]
            errors = f"of {row['runs']} runs {without} differ, with barriers {with_}"
        table.add_row(row["problem"], row["plan"], str(row["fault"] or ""), errors, times)
    return table


if __name__ == "__main__":
    main()
