"""Reductions, places of extremes, and running sums."""

from __future__ import annotations

import functools
import math
from typing import Any

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operator_table import operator
from cudnn_actor.onnx.operators.casts import convert
from cudnn_actor.onnx.operators.rows import of_rows
from cudnn_actor.onnx.values import Refused
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.graphs.integer_division import divide_towards_zero
from cudnn_actor.protocol.operations import ReductionMode
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["reduce_in_dtype"]

_R = ReductionMode
_MODES = {
    "ReduceSum": _R.SUM,
    "ReduceProd": _R.PRODUCT,
    "ReduceMax": _R.MAX,
    "ReduceMin": _R.MIN,
    "ReduceMean": _R.MEAN,
    "ReduceL1": _R.L1,
    "ReduceL2": _R.L2,
    "ReduceSumSquare": _R.SUM_OF_SQUARES,
    "ReduceLogSum": _R.LOG_SUM,
    "ReduceLogSumExp": _R.LOG_SUM_EXP,
}


def reduce_in_dtype(g: GraphBuilder, mode: ReductionMode, x: Tensor, axes: Any, *, keepdims: bool) -> Tensor:
    """A reduction that has x's dtype, as ONNX's have."""
    if x.dtype.is_floating:
        return g.reduce(mode, x, axes, keepdims=keepdims)
    if mode is _R.MEAN:
        total = g.sum(x, axes, keepdims=keepdims)
        count = math.prod(x.dims) // max(1, math.prod(total.dims))
        return convert(g, divide_towards_zero(g, total, count, total.dtype), x.dtype)
    if not mode.is_exact:
        return convert(g, g.reduce(mode, g.astype(x, DType.FLOAT64), axes, keepdims=keepdims), x.dtype)
    return convert(g, g.reduce(mode, x, axes, keepdims=keepdims), x.dtype)


@operator(*_MODES, since=1)
def reduce(node: Node, g: GraphBuilder) -> Result:
    if node.op.startswith("ReduceLog") and not node.dtype(0).is_floating and not node.value(0).size:
        raise Refused("takes the logarithm of a sum of nothing, which is no integer")
    keepdims = bool(node.attribute("keepdims"))
    axes = node.axes() or (() if node.attribute("noop_with_empty_axes", 0) else None)
    return reduce_in_dtype(g, _MODES[node.op], node.tensor(0), axes, keepdims=keepdims)


@operator("ArgMax", "ArgMin", since=1)
def arg_reduce(node: Node, g: GraphBuilder) -> Result:
    x, axis = node.tensor(0), node.axis()
    keepdims = bool(node.attribute("keepdims"))
    of = g.argmax if node.op == "ArgMax" else g.argmin
    if not node.attribute("select_last_index", 0):
        return of(x, axis, keepdims=keepdims)
    backwards = g.slice(x, (*[slice(None)] * axis, slice(None, None, -1)))
    return g.subtract(x.dims[axis] - 1, of(backwards, axis, keepdims=keepdims))


@operator("CumSum", since=11)
@operator("CumProd", since=26)
def cumulative(node: Node, g: GraphBuilder) -> Result:
    x, axis = node.tensor(0), node.axis()
    of = g.cumsum if node.op == "CumSum" else g.cumprod
    y = of(x, axis, exclusive=bool(node.attribute("exclusive")), reverse=bool(node.attribute("reverse")))
    return convert(g, y, x.dtype)


@operator("Hardmax", since=1)
def hardmax(node: Node, g: GraphBuilder) -> Result:
    x, axis, of = node.tensor(0), node.axis(), functools.partial(_largest, g)
    return of(x, axis) if node.version >= 13 else of_rows(g, of, x, axis)


def _largest(g: GraphBuilder, x: Tensor, axis: int) -> Tensor:
    """1 at the first of the largest elements along an axis, else 0."""
    largest = g.equal(x, g.max(x, axis, keepdims=True))
    first = g.equal(g.cumsum(largest, axis), 1)
    return convert(g, g.logical_and(largest, first), x.dtype)
