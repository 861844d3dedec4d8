"""Kernels that are compiled before a graph is built are those that its first plans and their checks need."""

from __future__ import annotations

import pytest

from cudnn_actor.engines.cuda.planning.ahead import launches_ahead
from cudnn_actor.engines.cuda.planning.compiler import WORKSPACE_BYTES
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.protocol import Graph, GraphBuilder, OperationGraph


def pieces(graph: Graph) -> list[OperationGraph]:
    parts = cut(graph.body)
    return [graph.body] if parts is None else [piece.graph for piece in parts.pieces]


def named(graph: Graph) -> list[str]:
    return [each.name for piece in pieces(graph) for each in launches_ahead(piece, WORKSPACE_BYTES)]


def test_a_depthwise_convolution_has_its_kernel_and_that_of_its_reference() -> None:
    g = GraphBuilder()
    x = g.input("x", (2, 32, 14, 14), "bfloat16", layout="NHWC")
    w = g.input("w", (32, 1, 3, 3), "bfloat16", layout="NHWC")
    assert named(g.build(y=g.relu(g.conv(x, w, pad=1, groups=32)))) == ["depthwise", "reference"]


def test_a_convolution_of_cudnns_has_that_of_its_reference() -> None:
    g = GraphBuilder()
    x = g.input("x", (2, 32, 14, 14), "bfloat16", layout="NHWC")
    w = g.input("w", (32, 32, 3, 3), "bfloat16", layout="NHWC")
    assert named(g.build(y=g.relu(g.conv(x, w, pad=1)))) == ["reference"]


@pytest.mark.parametrize("large", [False, True])
def test_functions_have_theirs_and_what_reads_large_tensors_for_the_check(large: bool) -> None:
    g = GraphBuilder()
    x = g.input("x", (4096 if large else 4, 4096), "bfloat16")
    found = named(g.build(y=g.sigmoid(x) * 3.0))
    assert found == ["elementwise"] * (3 if large else 1)
