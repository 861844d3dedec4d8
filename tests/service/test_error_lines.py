"""Errors name the operation and the user's line, also from a worker process."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from cudnn_actor import (
    ConvSpec,
    CudnnActorError,
    ExecutionFailed,
    Graph,
    GraphBuilder,
    OutOfMemory,
    UnsupportedGraph,
    spawn,
)
from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.protocol import Tensor

from .rigs import spawn_on
from .workshops import BuildingEngine, Workshop

isolations = pytest.mark.parametrize("isolation", ["thread", "process"])


def line() -> str:
    """The caller's line, as a label has it."""
    frame = inspect.stack()[1]
    return f"test_error_lines.py:{frame.lineno}"


def of_bytes() -> tuple[Graph, str]:
    """A convolution whose sums may overflow, which no engine runs, behind an operation that it does run."""
    g = GraphBuilder()
    x, w = g.input("x", (1, 131_072, 1, 1), "int8"), g.input("w", (4, 131_072, 1, 1), "int8")
    x = g.maximum(x, 1)
    y, where = g.conv(x, w), line()
    return g.build(y=y), f"conv_fwd at {where}: "


def the_same_elsewhere() -> tuple[Graph, str]:
    g = GraphBuilder()
    x, w = g.input("x", (1, 131_072, 1, 1), "int8"), g.input("w", (4, 131_072, 1, 1), "int8")
    x = g.maximum(x, 1)
    y, where = g.conv(x, w), line()
    return g.build(y=y), f"conv_fwd at {where}: "


def far_too_large() -> tuple[Graph, str]:
    """A product of 2**44 elements: more than the CPU engine, which holds whole tensors, can allocate."""
    g = GraphBuilder()
    x, w = g.input("x", (1 << 22, 1), "int8"), g.input("w", (1, 1 << 22), "int8")
    y, where = x * w, line()
    return g.build(y=y.sum(axis=0)[:3]), f"mul at {where}: "


def too_large_by_a_constant() -> tuple[Graph, str]:
    """The same with a constant of all elements, which takes no memory itself."""
    g = GraphBuilder()
    q = g.exp(g.input("q", (1, 1)))
    y, where = g.broadcast_to(q, (1 << 22, 1 << 22)), line()
    return g.build(y=g.softmax(y, 0).sum()), f"mul at {where}: "


async def error_of(gpu: Any, graph: Graph) -> CudnnActorError:
    buffers = {port.name: await gpu.empty(port.spec.dims, dtype=port.spec.dtype) for port in graph.inputs}
    with pytest.raises(CudnnActorError) as caught:
        await gpu.apply(graph, buffers)
    return caught.value


@isolations
@pytest.mark.parametrize(
    ("make", "kind"),
    [(of_bytes, UnsupportedGraph), (far_too_large, OutOfMemory), (too_large_by_a_constant, OutOfMemory)],
)
async def test_an_error_names_the_operation_and_the_line(
    make: Callable[[], tuple[Graph, str]], kind: type[CudnnActorError], isolation: Any
) -> None:
    graph, where = make()
    async with spawn(device="cpu", isolation=isolation) as gpu:
        error = await error_of(gpu, graph)
        assert type(error) is kind
        assert f": {where}" in str(error)  # and no other operation
        assert where in str(await error_of(gpu, graph))  # from the cache too
        if isinstance(error, OutOfMemory):
            found = await gpu.statistics()
            assert (error.requested, error.arena_bytes) == (1 << 47, found.arena_bytes)
            assert 0 < error.in_use <= error.arena_bytes


@isolations
async def test_each_of_two_equal_graphs_has_its_own_line(isolation: Any) -> None:
    async with spawn(device="cpu", isolation=isolation) as gpu:
        (one, first), (other, second) = of_bytes(), the_same_elsewhere()
        assert one.digest() == other.digest()
        assert first != second
        for graph, where in ((one, first), (other, second), (one, first)):
            assert where in str(await error_of(gpu, graph))


async def test_a_failure_of_the_library_names_them_too() -> None:
    workshop = Workshop()
    workshop.failures = [EngineFailure("SOME_STATUS", "it says", (1, 2))]
    g = GraphBuilder()
    x = g.input("x", (3,))
    y, first = g.exp(g.abs(x)), line()
    z, second = g.softmax(y), line()
    async with spawn_on(lambda: BuildingEngine(workshop)) as gpu:
        error = await error_of(gpu, g.build(z=z))
    assert isinstance(error, ExecutionFailed)
    assert f"SOME_STATUS: exp at {first}, softmax at {second}: it says" in str(error)
    assert error.operations == (1, 2)
    assert error.reproduce


async def test_a_message_of_one_operation_has_no_line_to_name() -> None:
    async with spawn(device="cpu") as gpu:
        dy, w = await gpu.empty((1, 4, 3, 3), dtype="int8"), await gpu.empty((4, 4, 3, 3), dtype="int8")
        with pytest.raises(
            UnsupportedGraph, match=r"cannot run graph \w+: dy=int8: is not a dtype that conv_bwd_data takes"
        ) as caught:
            await gpu.conv_bwd_data(dy, w, conv=ConvSpec.symmetric(2))
        assert caught.value.where == ""


def test_a_chain_of_operations_is_named_by_its_first() -> None:
    g = GraphBuilder()
    x: Tensor = g.input("x", (3,))
    for _ in range(9):
        x = g.exp(x)
        x = g.tanh(x)
    body = g.build(y=x).body
    told = body.where(range(18))
    assert told.count(" at ") == 2  # each line once
    assert body.where([]) == ""
    g = GraphBuilder()
    y = g.exp(g.input("x", (3,)))
    y = g.log(y)
    y = g.sin(y)
    y = g.cos(y)
    y = g.tan(y)
    assert g.build(y=y).body.where(range(5)).endswith(" and 1 more")
