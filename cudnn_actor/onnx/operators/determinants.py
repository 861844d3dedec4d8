"""Determinants of small matrices, by elimination: one step for each row.

https://onnx.ai/onnx/operators/onnx__Det.html
"""

from __future__ import annotations

import math

import numpy as np

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operator_table import operator
from cudnn_actor.onnx.values import Declined
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder
from cudnn_actor.protocol.types.dtypes import DType

__all__: list[str] = []

_LARGEST = 64
"""The most rows of a matrix: each row adds operations to the graph."""


@operator("Det", since=11)
def det(node: Node, g: GraphBuilder) -> Result:
    x = node.tensor(0)
    *batch, size, columns = x.dims
    if size != columns or size > _LARGEST:
        raise Declined(f"a determinant of dims {x.dims}")
    wide = x if x.dtype is DType.FLOAT64 else g.astype(x, DType.FLOAT32)
    rest = g.reshape(wide, (math.prod(batch), size, size))
    found = g.full((math.prod(batch), 1, 1), 1.0, wide.dtype)
    for left in range(size, 1, -1):
        # The row with the largest first element changes places with the first row.
        place = g.argmax(g.abs(rest[:, :, :1]), 1, keepdims=True)
        pivot_row = g.take_along_axis(rest, g.broadcast_to(place, (rest.dims[0], 1, left)), 1)
        here = g.equal(node.weight(np.arange(1, left).reshape(1, -1, 1)), place)
        others = g.where(here, rest[:, :1], rest[:, 1:])
        pivot = pivot_row[:, :, :1]
        found = g.multiply(found, g.where(g.equal(place, 0), pivot, -pivot))
        factors = g.where(g.equal(pivot, 0.0), 0.0, g.divide(others[:, :, :1], pivot))
        rest = g.subtract(others[:, :, 1:], g.multiply(factors, pivot_row[:, :, 1:]))
    return node.cast(g.reshape(g.multiply(found, rest), batch), x.dtype)
