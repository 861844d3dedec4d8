"""A run of the fast engine allocates no arrays: every operation, in problems of the fuzzer."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu.fast.compiler import compile_fast
from cudnn_actor.engines.cpu.fast.kernels import carrier_dtype
from cudnn_actor.engines.cpu.fast.lanes import Lanes
from cudnn_actor.engines.cpu.fast.plan import FastPlan, FastProgram
from cudnn_actor.engines.cpu.scratch import aligned_bytes
from cudnn_actor.protocol import DType, OperationGraph, TensorSpec
from cudnn_actor.protocol.operations import (
    OPERATIONS,
    ArgReduction,
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
    GroupNorm,
    ReductionMode,
    Softmax,
    SoftmaxBackward,
)

from ....gpu.families import CONVOLUTION, FAMILIES
from ....gpu.operations import ROWS
from ....gpu.operations.cases import OperationCase, arrays
from ....gpu.operations.rows import Values
from .kernel_runs import peak_of_second

CONVOLUTIONS = (ConvolutionForward, ConvolutionBackwardData, ConvolutionBackwardFilter)
FAMILY_OF = {row.operation: row.family for row in ROWS}
DRAWN, RUN = 8, 2
"""Of so many problems, the largest are run."""
MOST_BYTES = 16 << 10
"""What a run may have in Python's objects: arguments, iterators, and calls that are made in the run.

NumPy's buffers for conversions are not in it: see `small_buffers`.
"""
EINSUM_ELEMENTS = 2 * 8192
"""The most that buffers of `numpy.einsum` have together, of whatever arrays. Nothing changes their size."""


def most_bytes(graph: OperationGraph) -> int:
    """What a run of a graph may have. Convolutions with groups may be computed by `numpy.einsum`."""
    operation = graph.operations[0]
    if not isinstance(operation, CONVOLUTIONS) or operation.conv.groups == 1:
        return MOST_BYTES
    widest = max(carrier_dtype(graph.tensor(uid).dtype).itemsize for uid in graph.bound)
    return MOST_BYTES + EINSUM_ELEMENTS * widest


def problems(operation: type, seed: int) -> Iterator[tuple[Any, OperationGraph, FastPlan]]:
    """Problems of an operation that the fast engine computes: large ones."""
    family = CONVOLUTION if operation in CONVOLUTIONS else FAMILY_OF[operation]
    drawn: list[tuple[int, Any, OperationGraph]] = []
    for number in itertools.count():
        case = FAMILIES[family].draw(seed, number)
        if isinstance(case, OperationCase) and type(case.operation) is not operation:
            continue
        graph = case.graph()
        specs = [graph.tensor(uid).spec for uid in graph.bound]
        if type(graph.operations[0]) is operation:
            drawn.append((max(spec.nbytes for spec in specs), case, graph))
        if len(drawn) == DRAWN:
            for _, of_largest, graph in sorted(drawn, key=lambda one: -one[0])[:RUN]:
                if (plan := compile_fast(graph, 1)) is not None:
                    yield of_largest, graph, plan
            drawn.clear()


def program(case: Any, graph: OperationGraph, plan: FastPlan) -> FastProgram:
    """The plan, bound to buffers that have the problem's values; of convolutions, zeros."""
    given = arrays(case) if isinstance(case, OperationCase) else {}
    buffers = []
    for uid in graph.bound:
        tensor = graph.tensor(uid)
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.dims, tensor.strides, strict=True))
        memory = np.zeros(span if tensor.spec.size else 0, tensor.dtype.numpy)
        strides = [stride * memory.itemsize for stride in tensor.strides]
        buffer: np.ndarray = np.ndarray(tensor.dims, memory.dtype, memory, 0, strides)
        if tensor.name in given:
            buffer[...] = given[tensor.name]
        buffers.append(buffer)
    return plan.bind(buffers, aligned_bytes(plan.workspace))


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_a_run_allocates_no_arrays(operation: type) -> None:
    seed, lanes = secrets.randbelow(1 << 32), Lanes(1)
    for case, graph, plan in itertools.islice(problems(operation, seed), RUN):
        bound, scalars = program(case, graph, plan), [1.0] * len(graph.scalars)
        assert peak_of_second(partial(bound.run, scalars, lanes)) < most_bytes(graph), f"seed {seed}: {case}"


Dims = tuple[int, ...]
LARGEST: Any = ArgReduction(x="x", y="y", axis=0, mode=ReductionMode.MAX, keep_dims=True)
SPREAD: dict[str, tuple[Any, dict[str, tuple[Dims, Dims]]]] = {
    "softmax": (
        SoftmaxBackward(dy="dy", y="y", dx="dx", axis=1),
        {"dy": ((11, 7, 30, 18), ()), "y": ((11, 7, 30, 18), ()), "dx": ((11, 7, 30, 18), (1, 12, 90, 2800))},
    ),
    "norm in groups": (
        GroupNorm(x="x", y="y", groups=4),
        {"x": ((28, 20, 13), ()), "y": ((28, 20, 13), (21, 1, 588))},
    ),
    "largest of rows that lie apart": (LARGEST, {"x": ((246, 217), (1, 247)), "y": ((1, 217), ())}),
    "largest of long columns": (LARGEST, {"x": ((600_000, 2), ()), "y": ((1, 2), ())}),
    "part of an image": (
        Softmax(x="x", y="y", axis=1),
        {"x": ((5, 8, 30, 18), ()), "y": ((5, 8, 30, 18), (12_800, 1280, 40, 1))},
    ),
}
"""Operations, and dims and strides of their operands; packed ones where there are none."""


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("name", SPREAD)
def test_gaps_between_elements_make_no_difference(name: str) -> None:
    operation, operands = SPREAD[name]
    specs = {}
    for operand, (dims, strides) in operands.items():
        dtype = DType.INT64 if operation is LARGEST and operand == "y" else DType.FLOAT64
        packed = TensorSpec.packed(dims, dtype)
        specs[operand] = TensorSpec.strided(dims, strides, dtype) if strides else packed
    row = next(row for row in ROWS if row.operation is type(operation))
    case = OperationCase(
        row=row, operation=operation, specs=specs, values=Values.NORMAL, special=False, seed=(38,)
    )
    graph = case.graph()
    plan = compile_fast(graph, 1)
    assert plan is not None
    bound, scalars = program(case, graph, plan), [1.0] * len(graph.scalars)
    assert peak_of_second(partial(bound.run, scalars, Lanes(1))) < MOST_BYTES
    assert bool(plan.places) == (name in {"softmax", "norm in groups"})
