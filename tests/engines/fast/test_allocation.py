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
from cudnn_actor.engines.cpu.fast.kernels import carried
from cudnn_actor.engines.cpu.fast.lanes import Lanes
from cudnn_actor.engines.cpu.fast.plan import FastPlan, FastProgram
from cudnn_actor.engines.cpu.scratch import aligned_bytes
from cudnn_actor.protocol import OperationGraph
from cudnn_actor.protocol.operations import (
    OPERATIONS,
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
)

from ...gpu.families import CONVOLUTION, FAMILIES
from ...gpu.operations import ROWS
from ...gpu.operations.cases import OperationCase, arrays
from .kernel_runs import peak_of_second

CONVOLUTIONS = (ConvolutionForward, ConvolutionBackwardData, ConvolutionBackwardFilter)
FAMILY_OF = {row.operation: row.family for row in ROWS}
DRAWN, RUN = 8, 2
"""Of so many problems, the largest are run."""
MOST_BYTES = 16 << 10
"""What a run may have in Python's objects: arguments, iterators, and calls that are made in the run.

NumPy's buffers for conversions are not in it: see `small_buffers`. Nor are tensors with gaps: where NumPy
does not see that such an array has no element twice, it writes a block to a copy first.
"""
EINSUM_ELEMENTS = 2 * 8192
"""The most that buffers of `numpy.einsum` have together, of whatever arrays. Nothing changes their size."""


def most_bytes(graph: OperationGraph) -> int:
    """What a run of a graph may have. Convolutions with groups may be computed by `numpy.einsum`."""
    operation = graph.operations[0]
    if not isinstance(operation, CONVOLUTIONS) or operation.conv.groups == 1:
        return MOST_BYTES
    widest = max(carried(graph.tensor(uid).dtype).itemsize for uid in graph.bound)
    return MOST_BYTES + EINSUM_ELEMENTS * widest


def problems(operation: type, seed: int) -> Iterator[tuple[Any, OperationGraph, FastPlan]]:
    """Problems of an operation, of tensors without gaps, that the fast engine computes: large ones."""
    family = FAMILY_OF.get(operation, CONVOLUTION)
    drawn: list[tuple[int, Any, OperationGraph]] = []
    for number in itertools.count():
        case = FAMILIES[family].draw(seed, number)
        graph = case.graph()
        specs = [graph.tensor(uid).spec for uid in graph.bound]
        has_gaps = any(spec.nbytes != spec.size * spec.dtype.itemsize for spec in specs)
        if type(graph.operations[0]) is operation and not has_gaps:
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
        memory = np.zeros(tensor.spec.size, tensor.dtype.numpy)
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
