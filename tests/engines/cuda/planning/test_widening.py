"""Which convolutions run with channels of zeros."""

from __future__ import annotations

import pytest

from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.widening import is_widened
from cudnn_actor.protocol import DType, Graph, GraphBuilder, Layout, Tensor

BFLOAT16, FLOAT16, FLOAT32 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32


def operands(
    g: GraphBuilder, channels: int, dtype: DType = BFLOAT16, layout: Layout = Layout.NHWC, groups: int = 1
) -> tuple[Tensor, Tensor]:
    w = g.input("w", (18, channels // groups, 3, 3), dtype, layout=layout)
    return g.input("x", (2, channels, 8, 8), dtype, layout=layout), w


def layer(channels: int, dtype: DType = BFLOAT16, layout: Layout = Layout.NHWC, groups: int = 1) -> Graph:
    g = GraphBuilder()
    x, w = operands(g, channels, dtype, layout, groups)
    return g.build(y=g.relu(g.conv(x, w, pad=1, groups=groups, bias=g.input("b", (18,), dtype))))


def alone(size: int) -> Graph:
    g = GraphBuilder()
    x = g.input("x", (2, 3, size, size), BFLOAT16, layout=Layout.NHWC)
    return g.build(y=g.conv(x, g.input("w", (8, 3, 3, 3), BFLOAT16, layout=Layout.NHWC)))


def gradients(channels: int) -> Graph:
    g = GraphBuilder()
    x = g.input("x", (2, channels, 224, 224), BFLOAT16, layout=Layout.NHWC)
    w = g.input("w", (18, channels, 3, 3), BFLOAT16, layout=Layout.NHWC)
    dx, dw = g.grad(g.relu(g.conv(x, w, pad=1)), (x, w))
    return g.build(dx=dx, dw=dw)


def widened(graph: Graph) -> set[bool]:
    """Whether its convolutions have channels of zeros."""
    parts = cut(graph.body)
    pieces = [graph.body] if parts is None else [piece.graph for piece in parts.pieces]
    return {is_widened(piece) for piece in pieces if any("conv" in each.kind for each in piece.operations)}


FEW = {
    "images": layer(3),
    "grey": layer(1),
    "seven": layer(7, FLOAT16),
    "large and alone": alone(224),
    "gradients": gradients(3),
}
OTHERS = {
    "channels enough": layer(8),
    "a wide type": layer(3, FLOAT32),
    "channels first": layer(3, layout=Layout.NCHW),
    "groups": layer(3, groups=3),
    "small and alone": alone(32),
    "gradients": gradients(9),
}


@pytest.mark.parametrize("name", FEW)
def test_a_convolution_of_few_channels_has_channels_of_zeros(name: str) -> None:
    assert widened(FEW[name]) == {True}


@pytest.mark.parametrize("name", OTHERS)
def test_others_have_not(name: str) -> None:
    assert widened(OTHERS[name]) == {False}
