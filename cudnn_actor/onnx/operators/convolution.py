"""Convolutions, and their transposes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operator_table import operator
from cudnn_actor.onnx.values import Declined, Unfit
from cudnn_actor.protocol.graphs.convolution_functions import transpose_convolution
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.operations import ConvolutionForward
from cudnn_actor.protocol.types.conv import ConvSpec
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import Layout

__all__ = ["conv_spec", "pads_of", "with_bias"]


def pads_of(
    node: Node,
    sizes: Sequence[int],
    taps: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The padding before and after each spatial dim, from `auto_pad` or `pads`."""
    mode, rank = node.attribute("auto_pad", "NOTSET"), len(sizes)
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        totals = [
            max(0, (-(-size // stride) - 1) * stride + dilation * (tap - 1) + 1 - size)
            for size, tap, stride, dilation in zip(sizes, taps, strides, dilations, strict=True)
        ]
        less, more = tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals)
        return (less, more) if mode == "SAME_UPPER" else (more, less)
    pads = node.attribute("pads") if mode == "NOTSET" else None
    pads = pads or (0,) * (2 * rank)
    if len(pads) != 2 * rank:
        raise Declined(f"pads {pads} are not two for each of {rank} spatial dims")
    return pads[:rank], pads[rank:]


def _steps(node: Node, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The strides and dilations of a convolution with `rank` spatial dims."""
    if not 1 <= rank <= 3:
        raise Declined(f"a convolution with {rank} spatial dims")
    return node.attribute("strides") or (1,) * rank, node.attribute("dilations") or (1,) * rank


def conv_spec(node: Node, x: Sequence[int], w: Sequence[int]) -> ConvSpec:
    """The parameters of a convolution of x, dims (N, C, spatial), with w."""
    strides, dilations = _steps(node, len(w) - 2)
    shape = node.attribute("kernel_shape")
    if shape and tuple(shape) != tuple(w[2:]):
        raise Declined(f"kernel_shape {shape} is not that of the filter, {tuple(w[2:])}")
    before, after = pads_of(node, x[2:], w[2:], strides, dilations)
    return ConvSpec(
        pre_padding=before,
        post_padding=after,
        stride=strides,
        dilation=dilations,
        groups=node.attribute("group", 1),
    )


def with_bias(g: GraphBuilder, y: Tensor, bias: Tensor | None) -> Tensor:
    """y plus one number for each channel."""
    return y if bias is None else g.add(y, g.reshape(bias, (1, *bias.dims, *(1 for _ in y.dims[2:]))))


def _layout(node: Node) -> Layout | None:
    """The layout in which a convolution runs; None for its operands' layout.

    Operands of half types need their channels last, so that the convolution can be fused with later
    operations. The results of these follow: see `protocol.graphs.layouts`.
    """
    return (
        Layout.NHWC
        if node.dtype(0).is_half and node.rank(0) == node.rank(1) and 3 <= node.rank(0) <= 5
        else None
    )


def _check_channels(node: Node, *, transposed: bool = False) -> None:
    """Raise `Unfit` unless filters and bias are for the channels of the input."""
    (_, channels, *sizes), filters, groups = node.dims(0), node.dims(1), node.attribute("group", 1)
    if transposed:
        node.require(1, channels, None, *(None for _ in sizes))
        node.require(2, filters[1] * groups)
    elif channels % groups:
        raise Unfit(f"has {channels} channels, which are no {groups} groups")
    else:
        node.require(1, None, channels // groups, *(None for _ in sizes))
        node.require(2, filters[0])


@operator("Conv", since=1)
def conv(node: Node, g: GraphBuilder) -> Result:
    _check_channels(node)
    x, w = (node.tensor(number, _layout(node)) for number in range(2))
    y: Tensor = g.apply(ConvolutionForward(x=x, w=w, conv=conv_spec(node, x.dims, w.dims)))
    return with_bias(g, y, node.tensor_or_none(2))


@operator("ConvTranspose", since=1)
def conv_transpose(node: Node, g: GraphBuilder) -> Result:
    _check_channels(node, transposed=True)
    x, w = (node.tensor(number, _layout(node)) for number in range(2))
    rank = w.rank - 2
    strides, dilations = _steps(node, rank)
    extra = node.attribute("output_padding") or (0,) * rank
    groups = node.attribute("group", 1)
    along = list(zip(x.dims[2:], w.dims[2:], strides, dilations, strict=True))
    full = [(size - 1) * stride + dilation * (tap - 1) + 1 for size, tap, stride, dilation in along]
    wanted = node.attribute("output_shape")
    mode = node.attribute("auto_pad", "NOTSET")
    if wanted or mode.startswith("SAME"):
        sizes = wanted[-rank:] if wanted else [size * stride for size, _, stride, _ in along]
        totals = [f + e - size for f, e, size in zip(full, extra, sizes, strict=True)]
        if wanted:  # elements beyond the full size are added at the end
            totals = [max(0, total) for total in totals]
        less, more = [t // 2 for t in totals], [t - t // 2 for t in totals]
        before, after = (less, more) if mode == "SAME_UPPER" else (more, less)
    else:
        ones = [1] * rank
        before, after = map(list, pads_of(node, ones, ones, ones, ones))
        sizes = [f + e - b - a for f, e, b, a in zip(full, extra, before, after, strict=True)]
    extra = [size - f + b + a for size, f, b, a in zip(sizes, full, before, after, strict=True)]
    spec = ConvSpec.spread(rank, 0, strides, dilations, groups)
    y = transpose_convolution(g, x, w, spec, before=before, after=after, extra=extra)
    return with_bias(g, y, node.tensor_or_none(2))


@operator("DeformConv", since=19)
def deform_conv(node: Node, g: GraphBuilder) -> Result:
    """Columns that are read between elements, at places that an input moves; and a product of matrices."""
    x, w, offset = node.tensor(0), node.tensor(1), node.tensor(2)
    spec, (images, channels, *sizes), taps = conv_spec(node, x.dims, w.dims), x.dims, w.dims[2:]
    spatial = spec.output_dims(x.dims, w.dims)[2:]
    rank, count, shared = len(taps), math.prod(taps), node.attribute("offset_group")
    rows = (count * spatial[0], *spatial[1:])  # of all taps, as one image
    node.reserve(rank, *taps, *spatial)
    base, scale = _places(spec, sizes, taps, spatial)
    moved = g.reshape(offset, (images * shared, count, rank, *spatial))
    moved = g.transpose(moved, (0, 1, *range(3, 3 + rank), 2))[..., ::-1]
    if x.dtype is not DType.FLOAT64:
        moved, base, scale = g.astype(moved, DType.FLOAT32), base.astype("f4"), scale.astype("f4")
    grid = g.add(g.multiply(moved, node.weight(scale)), node.weight(base))
    grid = g.reshape(grid, (images * shared, *rows, rank))
    columns = g.grid_sample(g.reshape(x, (images * shared, channels // shared, *sizes)), grid)
    if node.has(4):
        columns = g.multiply(columns, g.reshape(node.tensor(4), (images * shared, 1, *rows)))
    length = channels // spec.groups * count
    columns = g.reshape(columns, (images, spec.groups, length, math.prod(spatial)))
    filters = g.reshape(w, (1, spec.groups, w.dims[0] // spec.groups, length))
    y = g.reshape(g.matmul(filters, columns), (images, w.dims[0], *spatial))
    return with_bias(g, y, node.tensor_or_none(3))


def _places(
    spec: ConvSpec, sizes: Sequence[int], taps: Sequence[int], spatial: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """The place of each tap for each result, as `GridSample` counts, and the length of a step there.

    Dims (taps, spatial of the result, rank): along the last spatial dim first.
    """
    rank = len(taps)
    tap = np.indices(taps).reshape(rank, -1, *[1] * rank)
    result = np.indices(spatial)[:, None]
    dilation, stride, before = (
        np.reshape(each, (rank, *[1] * (rank + 1))) for each in (spec.dilation, spec.stride, spec.pre_padding)
    )
    places = np.moveaxis(tap * dilation + result * stride - before, 0, -1)[..., ::-1]
    scale = 2 / np.array(sizes[::-1])
    return (places + 0.5) * scale - 1, scale
