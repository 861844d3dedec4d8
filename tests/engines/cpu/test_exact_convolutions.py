"""Convolutions of the exact CPU engine whose filters, strides or dilations are large."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu.exact.compiler import compile_plan
from cudnn_actor.engines.cpu.scratch import aligned_bytes
from cudnn_actor.protocol import ConvSpec, DType, OperationGraph, TensorSpec
from cudnn_actor.protocol.operations import (
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
)
from cudnn_actor.protocol.operations.base import tensor_of

from ...in_one_test import cases_in_one_test
from ..problems import Problem, normal

PROBLEMS = {
    "filter as large as the image": Problem(
        (2, 6, 19, 20), (4, 3, 19, 20), ConvSpec.symmetric(2, 9, (1, 2), groups=2)
    ),
    "filter larger than the image": Problem((1, 2, 9), (3, 2, 40), ConvSpec.symmetric(1, 38, 2, dilation=2)),
    "taps far apart": Problem(
        (2, 4, 60, 9), (6, 2, 5, 3), ConvSpec.symmetric(2, (90, 1), dilation=(40, 1), groups=2)
    ),
    "large stride": Problem((1, 3, 1000), (4, 3, 3), ConvSpec.symmetric(1, 5, 90)),
}
HUGE = {
    "filter": Problem((1, 1, 1 << 20), (1, 1, 1 << 20), ConvSpec.symmetric(1, 1 << 19)),
    "stride": Problem((1, 2, 1 << 26), (2, 2, 3), ConvSpec.symmetric(1, 0, 1 << 23)),
    "dilation": Problem((1, 4, 1 << 12), (4, 4, 3), ConvSpec.symmetric(1, 1 << 30, dilation=1 << 30)),
}
OPERATIONS = ("y", "dx", "dw")


def _operation(result: str, conv: ConvSpec) -> Any:
    numbered: Any = {
        "y": ConvolutionForward(x=0, w=1, y=2, conv=conv),
        "dx": ConvolutionBackwardData(dx=0, w=1, dy=2, conv=conv),
        "dw": ConvolutionBackwardFilter(x=0, dw=1, dy=2, conv=conv),
    }
    return numbered[result]


def _graph(problem: Problem, result: str) -> OperationGraph:
    specs = (TensorSpec.packed(dims, DType.FLOAT32) for dims in (problem.x, problem.w, problem.y))
    tensors = tuple(tensor_of(uid, spec) for uid, spec in enumerate(specs))
    return OperationGraph(tensors=tensors, operations=(_operation(result, problem.conv),))


@cases_in_one_test
@pytest.mark.pairwise
@pytest.mark.parametrize("result", OPERATIONS)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
@pytest.mark.parametrize("limited", [False, True])
def test_what_is_large_makes_no_difference_to_results(problem: Problem, result: str, limited: bool) -> None:
    graph = _graph(problem, result)
    plan = compile_plan(graph, None)
    if limited:
        plan = compile_plan(graph, plan.workspace - 1)
    arrays = [normal(tensor.dims, DType.FLOAT32, 5) for tensor in graph.tensors]
    operation = graph.operations[0]
    exact = {name: arrays[uid].astype(np.float64) for name, uid in operation.named()}
    specs = {name: graph.tensor(uid).spec for name, uid in operation.named()}
    wanted = operation.evaluate(np, exact, specs)[result]
    buffers = [arrays[uid] for uid in graph.bound]
    plan.bind(aligned_bytes(plan.workspace)).run(buffers, [])
    (written,) = operation.writes
    np.testing.assert_allclose(arrays[written], wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("result", OPERATIONS)
@pytest.mark.parametrize("problem", HUGE.values(), ids=HUGE.keys())
def test_workspace_is_bounded_whatever_is_large(problem: Problem, result: str) -> None:
    elements = sum(map(math.prod, (problem.x, problem.w, problem.y)))
    assert compile_plan(_graph(problem, result), None).workspace <= (32 << 20) + 16 * elements
