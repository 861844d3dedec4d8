"""Our kernels for depthwise convolutions: each choice computes its graph, and the same bits each time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from cudnn_actor.engines.cuda import CudaEngine
from cudnn_actor.engines.cuda.checking.self_check import BuildContext, SelfCheck
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.planning.depthwise import compile_depthwise, ways_of_depthwise
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.running.program import Program
from cudnn_actor.protocol import DType, OperationGraph

from ..engines.depthwise_graphs import DEPTHWISE, ONLY_COMPILED, alone, data, of_filter

GRAPHS = DEPTHWISE | {name: graph for name, graph in ONLY_COMPILED.items() if "wide" not in name}


def piece_of(name: str) -> OperationGraph:
    body = GRAPHS[name].body
    parts = cut(body)
    return body if parts is None else parts.pieces[0].graph


@pytest.fixture(scope="module")
def context() -> Iterator[BuildContext]:
    engine = CudaEngine()
    engine.open()
    yield BuildContext(engine.handle, engine.stream)
    engine.close()


@pytest.mark.parametrize("name", GRAPHS)
def test_each_choice_passes_its_self_check(context: BuildContext, name: str) -> None:
    graph = piece_of(name)
    check = SelfCheck(graph, context)
    try:
        for choice in range(ways_of_depthwise(graph)):
            plan = compile_depthwise(graph, None, choice)
            assert check.fault(plan) is None, plan.tag
    finally:
        check.close()


@pytest.mark.parametrize("make", [alone, data, of_filter])
def test_results_are_the_same_bits_each_time(context: BuildContext, make: object) -> None:
    graph = make("7x7", 64, DType.FLOAT32).body  # type: ignore[operator]
    parts = cut(graph)
    piece = graph if parts is None else parts.pieces[0].graph
    plan = compile_depthwise(piece, None)
    cupy = libraries().cupy
    with context.stream:
        tensors = [piece.tensor(uid) for uid in piece.bound]
        numbers = np.random.default_rng(0)
        buffers = [cupy.asarray(numbers.normal(size=tensor.spec.size).astype("f4")) for tensor in tensors]
        workspace = cupy.empty(max(plan.workspace, 1), cupy.uint8)
        program = Program(plan, context.handle, context.stream)
        found = []
        for _ in range(3):
            addresses = [buffer.data.ptr for buffer in buffers]
            program.run((), addresses, (), workspace.data.ptr)
            result = piece.bound.index(piece.results[0])
            found.append(cupy.asnumpy(buffers[result]))
    assert all(np.array_equal(found[0], other) for other in found[1:])
