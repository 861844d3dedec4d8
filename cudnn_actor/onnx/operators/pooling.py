"""Pools."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operator_table import operator
from cudnn_actor.onnx.operators.convolution import pads_of
from cudnn_actor.onnx.values import Declined
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.operations import AvgPool, LpPool, MaxPool, Window
from cudnn_actor.protocol.types.dtypes import DType

__all__: list[str] = []


def _window(node: Node) -> tuple[Window, tuple[int, ...]]:
    """The windows of a pool, and how far the last ones reach beyond the model's own padding."""
    dims, size = node.dims(0), node.attribute("kernel_shape")
    rank = len(size)
    if not 1 <= rank <= 3 or len(dims) != rank + 2:
        raise Declined(f"a pool with {rank} spatial dims of dims {dims}")
    strides = node.attribute("strides") or (1,) * rank
    dilations = node.attribute("dilations") or (1,) * rank
    before, after = pads_of(node, dims[2:], size, strides, dilations)
    over = [0] * rank
    if node.attribute("ceil_mode", 0):
        for axis, dim in enumerate(dims[2:]):
            padded = before[axis] + dim + after[axis]
            extent = dilations[axis] * (size[axis] - 1) + 1
            count = -(-(padded - extent) // strides[axis]) + 1
            if (count - 1) * strides[axis] >= dim + before[axis]:  # it would begin in the padding
                count -= 1
            over[axis] = max(0, (count - 1) * strides[axis] + extent - padded)
    window = Window(
        size=size,
        pre_padding=before,
        post_padding=tuple(a + o for a, o in zip(after, over, strict=True)),
        stride=strides,
        dilation=dilations,
    )
    return window, tuple(over)


@operator("MaxPool", since=1)
def max_pool(node: Node, g: GraphBuilder) -> Result:
    x, (window, _) = node.tensor(0), _window(node)
    if not node.wants(1):
        if _covers_padding(x, window):
            x, window = _pad(g, x, window, _least(x.dtype))
        return g.apply(MaxPool(x=x, window=window))
    y, index = g.apply(MaxPool(x=x, window=window), also=("index",))
    return y, _by_column(g, index, x) if node.attribute("storage_order", 0) else index


def _covers_padding(x: Tensor, window: Window) -> bool:
    """Whether a window has no element of x."""
    try:
        window.output_dims(x.dims)
    except InvalidRequest:
        return True
    return False


def _pad(g: GraphBuilder, x: Tensor, window: Window, value: float) -> tuple[Tensor, Window]:
    """x with that value as its padding, and windows over it without any."""
    widths = [(0, 0), (0, 0), *zip(window.pre_padding, window.post_padding, strict=True)]
    none = (0,) * window.spatial_dims
    return g.pad(x, widths, value), msgspec.structs.replace(window, pre_padding=none, post_padding=none)


def _least(dtype: DType) -> float:
    """The least finite number of a dtype."""
    if not dtype.is_floating:
        return int(np.iinfo(dtype.value).min)
    return float(np.nextafter(dtype.numpy.type(-np.inf), dtype.numpy.type(0)))


def _by_column(g: GraphBuilder, index: Tensor, x: Tensor) -> Tensor:
    """Positions counted along the first spatial dim first, from those counted along the last first."""
    size = math.prod(x.dims[2:])
    rest = g.mod(index, size)
    found, step = g.subtract(index, rest), 1
    below = size
    for dim in x.dims[2:]:
        below //= dim
        place = g.astype(g.floor(g.divide(g.astype(rest, "float64"), float(below))), "int64")
        found = g.add(found, g.multiply(place, step))
        rest = g.subtract(rest, g.multiply(place, below))
        step *= dim
    return found


@operator("AveragePool", since=1)
def average_pool(node: Node, g: GraphBuilder) -> Result:
    x, (window, over) = node.tensor(0), _window(node)
    if not node.attribute("count_include_pad", 0):
        return g.apply(AvgPool(x=x, window=window))
    if not any(over):
        if _covers_padding(x, window):
            x, window = _pad(g, x, window, 0.0)
        return g.apply(AvgPool(x=x, window=window, include_padding=True))
    # Elements beyond the model's own padding do not count.
    after = tuple(a - o for a, o in zip(window.post_padding, over, strict=True))
    padded = g.pad(x, [(0, 0), (0, 0), *zip(window.pre_padding, after, strict=True)])
    rest = msgspec.structs.replace(window, pre_padding=(0,) * len(over), post_padding=over)
    return g.apply(AvgPool(x=padded, window=rest))


@operator("LpPool", since=2)
def lp_pool(node: Node, g: GraphBuilder) -> Result:
    x, (window, _) = node.tensor(0), _window(node)
    if _covers_padding(x, window):
        x, window = _pad(g, x, window, 0.0)
    return g.apply(LpPool(x=x, window=window, p=float(node.attribute("p"))))


@operator("GlobalAveragePool", "GlobalMaxPool", since=1)
def global_pool(node: Node, g: GraphBuilder) -> Result:
    return (g.global_avg_pool if node.op == "GlobalAveragePool" else g.global_max_pool)(node.tensor(0))


@operator("GlobalLpPool", since=2)
def global_lp_pool(node: Node, g: GraphBuilder) -> Result:
    return g.global_lp_pool(node.tensor(0), float(node.attribute("p")))
