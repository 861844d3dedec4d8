"""Graphs as large as the limits allow: each is built, planned and run, and nothing is taken for a hang."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from cudnn_actor import Graph, GraphBuilder
from cudnn_actor.protocol import Tensor
from cudnn_actor.service import GraphLimits

from .rigs import spawn

pytestmark = pytest.mark.usefixtures("isolation")


COUNT = GraphLimits().operations


@functools.cache
def largest_graph() -> Graph:
    """It adds 1 as often as the limits allow."""
    g = GraphBuilder()
    y: Tensor = g.input("x", (4,))
    for _ in range(COUNT):
        y = y + 1.0
    return g.build(y=y)


async def test_the_largest_graph_that_the_limits_allow_runs() -> None:
    graph = largest_graph()
    async with spawn(device="cpu", hang_after_s=10.0) as gpu:
        x = await gpu.upload(np.zeros(4, np.float32))
        np.testing.assert_array_equal(await gpu.download(await gpu.apply(graph, x=x)), COUNT)
        assert gpu.generation == 1


@functools.cache
def graph_of_thousands() -> Graph:
    """It adds 1 to each of 1000 inputs, `x0` and so on, and sums the results."""
    g = GraphBuilder()
    inputs = [g.input(f"x{number}", (4,)) for number in range(1000)]
    outputs: dict[str, Tensor] = {f"y{number}": x + 1.0 for number, x in enumerate(inputs)}
    return g.build(outputs, sum=g.stack([*outputs.values()]).sum())


async def test_a_graph_may_have_thousands_of_inputs_and_outputs() -> None:
    graph = graph_of_thousands()
    async with spawn(device="cpu", hang_after_s=10.0) as gpu:
        refs = {f"x{n}": await gpu.upload(np.full(4, n, np.float32)) for n in range(1000)}
        *made, total = await gpu.apply(graph, refs)
        np.testing.assert_array_equal(await gpu.download(made[-1]), 1000)
        np.testing.assert_array_equal(await gpu.download(total), 4 * 1000 * 1001 / 2)
        assert gpu.generation == 1
