"""Wrong uses of a service with graphs: each is an error that names the argument and what to do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from cudnn_actor import Graph, GraphBuilder, InvalidRequest, RunGraph
from cudnn_actor.operations import MaxPool, Window

from .rigs import spawn

WINDOW = Window.symmetric(2, 2)


def sums() -> tuple[GraphBuilder, Graph]:
    g = GraphBuilder()
    x, v = g.input("x", (2, 3)), g.input("v", (3,))
    return g, g.build(y=x + v, z=(x * 2.0).sum())


class Wrong(NamedTuple):
    """A wrong use of a service, a builder, its graph, and the buffers x and v; and its error's text."""

    use: Callable[[Any, Any, Any, Any, Any], Awaitable[object]]
    text: str


WRONG = [
    Wrong(
        lambda gpu, g, graph, x, v: gpu.explain(g), "what=GraphBuilder: has no plan that could be built; bui"
    ),
    Wrong(
        lambda gpu, g, graph, x, v: gpu.explain("a.json"), "what=str: has no plan .*; read the graph: Graph.f"
    ),
    Wrong(lambda gpu, g, graph, x, v: gpu.explain([graph]), "what=list: has no plan"),
    Wrong(lambda gpu, g, graph, x, v: graph.explain("cpu"), "gpu='cpu': is no service"),
    Wrong(lambda gpu, g, graph, x, v: gpu.warm(g), "messages=GraphBuilder: has no plan .*; build the graph"),
    Wrong(lambda gpu, g, graph, x, v: gpu.warm([graph, None]), "messages=NoneType: has no plan"),
    Wrong(
        lambda gpu, g, graph, x, v: gpu.apply(g), "operation=GraphBuilder: is not an op.*; build the graph"
    ),
    Wrong(lambda gpu, g, graph, x, v: gpu.apply(MaxPool), "operation=MaxPool: is not an operation"),
    Wrong(
        lambda gpu, g, graph, x, v: gpu.apply(RunGraph(graph=graph, buffers=())),
        "operation=RunGraph: .*; sen",
    ),
    Wrong(
        lambda gpu, g, graph, x, v: gpu.apply(graph, x=x), "v=None: is an input of the graph and has no buf"
    ),
    Wrong(lambda gpu, g, graph, x, v: gpu.apply(graph, x), "buffers=<buffer .*>: is not a mapping of names"),
    Wrong(lambda gpu, g, graph, x, v: gpu.apply(graph, [x, v]), r"buffers=\[.* is not a mapping"),
    Wrong(lambda gpu, g, graph, x, v: gpu.apply(graph, {"x": x}, x=x, v=v), "x=<buffer .*>: is given twice"),
    Wrong(
        lambda gpu, g, graph, x, v: gpu.apply(graph, x=x, v=v, w=v), "w=<buffer .*>: is no input or output"
    ),
    Wrong(
        lambda gpu, g, graph, x, v: gpu.apply(graph, x=x, v=v, vv=v),
        "vv=<.*or output .*mean .v.. use x, v, y",
    ),
    Wrong(
        lambda gpu, g, graph, x, v: gpu.apply(graph, x=x, v=np.ones(3)),
        r"v=ndarray of .* \(3,\): is no buffer",
    ),
    Wrong(
        lambda gpu, g, graph, x, v: gpu.apply(graph, x=v, v=x),
        r"x=float32\[3\] .* give it a buffer of float32",
    ),
    Wrong(
        lambda gpu, g, graph, x, v: gpu.apply(graph, x=x, v=v, also=("y",)),
        r"also=\('y',\): is for operations",
    ),
    Wrong(
        lambda gpu, g, graph, x, v: gpu.apply(MaxPool(x=x, window=WINDOW), {"x": x}),
        "buffers=.* is for graphs",
    ),
    Wrong(
        lambda gpu, g, graph, x, v: gpu.apply(MaxPool(x=x, window=WINDOW), also="index"),
        "also='index': is not",
    ),
    Wrong(lambda gpu, g, graph, x, v: gpu.ask(graph), "message=Graph: .*; run the graph that"),
    Wrong(
        lambda gpu, g, graph, x, v: gpu.ask(RunGraph(graph=graph, buffers=(x,))),
        "buffers=1 buffers: are not one f",
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.text.partition(":")[0])
async def test_a_wrong_use_names_the_argument(wrong: Wrong) -> None:
    async with spawn(device="cpu") as gpu:
        x, v = await gpu.upload(np.ones((2, 3), np.float32)), await gpu.upload(np.ones(3, np.float32))
        with pytest.raises(InvalidRequest, match=f"^{wrong.text}"):
            await wrong.use(gpu, *sums(), x, v)
        await gpu.drain()
        assert (await gpu.statistics()).live_buffers == 2


async def test_what_was_not_awaited_is_named() -> None:
    _, graph = sums()
    async with spawn(device="cpu") as gpu:
        v = await gpu.upload(np.ones(3, np.float32))
        upload, explaining = gpu.upload(np.ones((2, 3), np.float32)), gpu.explain(graph)
        with pytest.raises(InvalidRequest, match=r"^x=coroutine: was never awaited; write x = await"):
            await gpu.apply(graph, x=upload, v=v)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match=r"^explanation=coroutine: was never awaited"):
            graph.to_svg(explaining)  # type: ignore[arg-type]
        upload.close()
        explaining.close()


async def test_a_picture_takes_only_an_explanation_of_its_graph() -> None:
    _, graph = sums()
    g = GraphBuilder()
    other = g.build(y=g.input("x", (3,)) + 1.0)
    async with spawn(device="cpu") as gpu:
        about = await gpu.explain(graph)
    for draw in (other.to_svg, other.to_dot):
        with pytest.raises(InvalidRequest, match=r"^explanation=cpu/.*: is about another graph"):
            draw(about)
        with pytest.raises(InvalidRequest, match=r"^explanation='graph.svg': is of type str where an Expl"):
            draw("graph.svg")  # type: ignore[arg-type]
    assert "NumPy" in sums()[1].to_svg(about), "one of an equal graph of other lines is its own"
