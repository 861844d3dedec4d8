"""The order of cuDNN's candidates: its fallbacks, which take longest to ask for, are the last."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cudnn_actor.engines.cuda.plans.partition import cut
from cudnn_actor.protocol import Graph, GraphBuilder, OperationGraph

from .building import ranked, tried
from .child import Child


def piece_of(graph: Graph) -> OperationGraph:
    """The only piece of a graph: what is built as one plan."""
    parts = cut(graph.body)
    if parts is None:
        return graph.body
    (piece,) = parts.pieces
    return piece.graph


def scaled() -> OperationGraph:
    """A convolution with a scale, a bias and an activation."""
    g = GraphBuilder()
    x = g.input("x", (8, 64, 14, 14), "bfloat16", layout="NHWC")
    w = g.input("w", (32, 64, 3, 3), "bfloat16", layout="NHWC")
    scale, bias = (g.input(name, (32,), "bfloat16")[:, None, None] for name in ("scale", "bias"))
    return piece_of(g.build(y=g.relu(g.conv(x, w, pad=1) * scale + bias)))


def biased() -> OperationGraph:
    """A convolution with a bias and an activation, for which cuDNN has engines that compile nothing."""
    g = GraphBuilder()
    x = g.input("x", (8, 64, 14, 14), "bfloat16", layout="NHWC")
    w = g.input("w", (32, 64, 3, 3), "bfloat16", layout="NHWC")
    return piece_of(g.build(y=g.relu(g.conv(x, w, pad=1, bias=g.input("b", (32,), "bfloat16")))))


def product() -> OperationGraph:
    """A product of matrices with a bias and an activation."""
    g = GraphBuilder()
    x, w = g.input("x", (128, 64), "bfloat16"), g.input("w", (64, 96), "bfloat16")
    return piece_of(g.build(y=g.relu(x @ w + g.input("bias", (96,), "bfloat16"))))


@pytest.mark.parametrize("make", [scaled, biased, product])
def test_fallbacks_come_after_all_other_candidates(child: Child, make: Callable[[], OperationGraph]) -> None:
    without, both = child.call(ranked, make())
    assert without
    assert both[: len(without)] == without
    assert len(both) > len(without)


def test_each_candidate_is_tried_once_and_in_order(child: Child) -> None:
    _, both = child.call(ranked, product())
    assert child.call(tried, product()) == both
