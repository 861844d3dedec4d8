"""Reshapes of inputs on the CPU engine: those that only add or remove dims of size 1 cost nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor import Graph, GraphBuilder, spawn
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.engines.cpu.exact.compiler import compile_plan
from cudnn_actor.protocol import Tensor
from cudnn_actor.protocol.operations import Pointwise

RNG = np.random.default_rng(5)
X, W, B = (RNG.standard_normal(dims).astype(np.float32) for dims in ((2, 3, 9, 9), (4, 3, 3, 3), (4,)))


def biased(bias: tuple[int, ...], way: str) -> Graph:
    g = GraphBuilder()
    x, w, b = g.input("x", X.shape), g.input("w", W.shape), g.input("b", bias)
    y = g.conv(x, w, bias=b) if way == "bias=" else g.conv(x, w) + b
    return g.build(y=g.relu(y))


async def found(graph: Graph, **given: Any) -> tuple[np.ndarray, Any]:
    async with spawn(device="cpu", exact=True) as gpu:
        refs: dict[str, Any] = {name: await gpu.upload(array) for name, array in given.items()}
        result = await gpu.download(await gpu.apply(graph, **refs))
        return result, await gpu.explain(graph)


@pytest.mark.parametrize(("bias", "way"), [((4,), "bias="), ((4, 1, 1), "+"), ((1, 4, 1, 1), "+")])
async def test_a_bias_of_any_spelling_is_added_tile_by_tile_to_the_same_bits(
    bias: tuple[int, ...], way: str
) -> None:
    wanted, _ = await found(biased((1, 4, 1, 1), "+"), x=X, w=W, b=B.reshape(1, 4, 1, 1))
    got, explained = await found(biased(bias, way), x=X, w=W, b=B.reshape(bias))
    np.testing.assert_array_equal(got, wanted)
    assert [piece.steps for piece in explained.pieces] == [("NumPy, tile by tile",)]
    assert len(explained.views) == (len(bias) < 4)
    inside = [number for piece in explained.pieces for number in piece.operations]
    assert len(inside) + len(explained.views) == 3 + (len(bias) < 4)


def other(change: str) -> Graph:
    g = GraphBuilder()
    x, w = g.input("x", X.shape), g.input("w", W.shape)
    match change:
        case "other dims":  # the elements lie otherwise
            return g.build(y=g.relu(g.conv(g.reshape(g.input("z", (2, 3, 81)), X.shape), w)))
        case "a result":
            return g.build(y=g.relu(g.reshape(g.conv(x, w), (2, 4, 1, 7, 7))))
        case _:
            b = g.input("b", (4,))
            later: Tensor = g.conv(x, w, bias=b)
            return g.build(y=g.relu(later), updates={"b": b + b})


@pytest.mark.parametrize("change", ["other dims", "a result"])
def test_a_reshape_that_is_no_view_is_computed(change: str) -> None:
    assert compile_plan(other(change).body, None).explain(other(change).body).views == ()


def test_a_reshape_of_an_input_that_is_overwritten_is_computed() -> None:
    body = other("overwritten").body
    convolve, reshape, add, relu, double, store = body.operations
    assert isinstance(double, Pointwise)
    (inside,), (stored,) = double.writes, store.writes
    early = msgspec.structs.replace(  # the input is overwritten before the reshape's result is read
        body,
        tensors=tuple(each for each in body.tensors if each.uid != inside),
        operations=(convolve, reshape, msgspec.structs.replace(double, result=stored), add, relu),
    )
    plan = compile_plan(early, None)
    assert plan.explain(early).views == ()


async def test_an_input_that_is_overwritten_is_read_as_it_was() -> None:
    graph = other("overwritten")
    async with spawn(device="cpu", exact=True) as gpu:
        b = await gpu.upload(B)
        y = await gpu.apply(graph, x=await gpu.upload(X), w=await gpu.upload(W), b=b)
        got, after = await gpu.download(y), await gpu.download(b)
    wanted, _ = await found(biased((4,), "bias="), x=X, w=W, b=B)
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(after, B * 2)


def test_a_part_of_what_lies_in_reverse_is_read_where_it_lies() -> None:
    g = GraphBuilder()
    last = g.flip(g.input("x", (4,)), 0)[3:]
    graph = g.build(y=g.relu(last)).body
    engine = CpuEngine()
    plan = engine.build(graph, workspace_limit=None)
    x, y = np.arange(1, 5, dtype=np.float32), np.empty(1, np.float32)
    engine.execute(plan, [x, y], ())
    assert y == [1]
    assert len(plan.explain(graph).views) == 2
