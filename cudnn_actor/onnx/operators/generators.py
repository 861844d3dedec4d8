"""Tensors that are made from numbers and dims: ranges, triangles, one-hot codes."""

from __future__ import annotations

import math

import numpy as np

from cudnn_actor.onnx.nodes import MOST_NUMBERS, Node, Result
from cudnn_actor.onnx.operator_table import operator
from cudnn_actor.onnx.operators.casts import convert, wanted_dtype
from cudnn_actor.onnx.operators.rows import along
from cudnn_actor.onnx.values import Declined, Refused
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder
from cudnn_actor.protocol.types.dtypes import DType

__all__: list[str] = []


@operator("Range", since=11)
def range_(node: Node, g: GraphBuilder) -> Result:
    """A range, whose dims follow from its values. A short range is a constant, so that other nodes can read
    its elements at the import."""
    start, limit, delta = (node.constant(number).reshape(()) for number in range(3))
    if not delta:
        raise Declined("a range with steps of 0")
    if start.dtype.kind in "iu":
        count = max(0, -((int(start) - int(limit)) // int(delta)))
    else:
        count = max(0, math.ceil((float(limit) - float(start)) / float(delta)))
    if count > MOST_NUMBERS:
        numbers = (each.item() for each in (start, limit, delta))
        try:
            return g.arange(*numbers, dtype=node.dtype(0))
        except InvalidRequest as error:  # ONNX's function would be a loop
            raise Refused(f"a range of {count:,} numbers") from error
    steps = np.arange(count, dtype=np.float64 if start.dtype.kind not in "iu" else np.int64)
    return (steps * delta.astype(steps.dtype) + start.astype(steps.dtype)).astype(start.dtype)


@operator("EyeLike", since=9)
def eye_like(node: Node, g: GraphBuilder) -> Result:
    dtype = wanted_dtype(node, node.dtype(0))
    rows, columns = node.dims(0)
    if rows * columns > MOST_NUMBERS:
        return g.eye(rows, columns, node.attribute("k"), dtype=dtype)
    return np.eye(rows, columns, k=node.attribute("k"), dtype=dtype.numpy)


@operator("Trilu", since=14)
def trilu(node: Node, g: GraphBuilder) -> Result:
    x, k = node.tensor(0), int(node.constant(1).reshape(())) if node.has(1) else 0
    reach = max(x.dims[-2:])
    return (g.triu if node.attribute("upper") else g.tril)(x, min(max(k, -reach), reach))


@operator("OneHot", since=9)
def one_hot(node: Node, g: GraphBuilder) -> Result:
    depth, rank, axis = node.count(1), node.rank(0) + 1, node.axis()
    indices = convert(g, node.tensor(0), DType.INT64)
    places = g.where(g.less(indices, 0), g.add(indices, depth), indices)
    places = g.reshape(places, (*indices.dims[:axis], 1, *indices.dims[axis:]))
    numbers = along(g, node.numbers(depth), axis, rank)
    values = node.tensor(2)
    off, on = g.slice(values, 0), g.slice(values, 1)
    return g.where(g.equal(places, numbers), on, off)
