"""Operators that move elements and compute nothing, and operators whose results are only dims."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import numpy_helper

from cudnn_actor.onnx.folding import slices
from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operator_table import operator
from cudnn_actor.onnx.operators.casts import convert, dtype_of
from cudnn_actor.onnx.operators.sources import is_half_product
from cudnn_actor.onnx.values import Contradiction, Declined, Unfit, broadcast_dims
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder
from cudnn_actor.protocol.types.dtypes import DType

__all__: list[str] = []


@operator("Shape", since=1)
def shape(node: Node, _: GraphBuilder) -> Result:
    return np.array(node.dims(0)[node.attribute("start", 0) : node.attribute("end")], np.int64)


@operator("Size", since=1)
def size(node: Node, _: GraphBuilder) -> Result:
    return np.array(math.prod(node.dims(0)), np.int64)


@operator("ConstantOfShape", since=9)
def constant_of_shape(node: Node, g: GraphBuilder) -> Result:
    value = node.attribute("value")
    dims = node.ints(0)
    number, dtype = 0.0, DType.FLOAT32
    if value is not None:
        dtype = dtype_of(value.data_type)
        number = numpy_helper.to_array(value).reshape(-1)[0].item()
    if 0 in dims:
        return np.empty(dims, dtype.numpy)
    return g.full(dims, number, dtype)


@operator("Reshape", since=5)
def reshape(node: Node, g: GraphBuilder) -> Result:
    dims, wanted = node.dims(0), list(node.ints(1))
    if node.attribute("allowzero", 0) and 0 in wanted and -1 in wanted:
        raise node.wrong(f"has both a 0 and a -1 in the shape {tuple(wanted)}, where allowzero is set", 1)
    if not node.attribute("allowzero", 0):
        if any(each == 0 and axis >= len(dims) for axis, each in enumerate(wanted)):
            raise Declined(f"shape {wanted} has a 0 for a dim that {dims} does not have")
        wanted = [each or dims[axis] for axis, each in enumerate(wanted)]
    if -1 not in wanted and math.prod(wanted) != math.prod(dims) and node.value(1).fixed:
        raise Unfit(f"has the shape {tuple(wanted)} for the {math.prod(dims):,} elements of dims {dims}")
    return _reshape(node, g, wanted)


def _reshape(node: Node, g: GraphBuilder, wanted: Sequence[int]) -> Result:
    rest = math.prod(each for each in wanted if each != -1)
    if list(wanted).count(-1) == 1 and rest and node.value(0).size % rest == 0:
        wanted = [node.value(0).size // rest if each == -1 else each for each in wanted]
    return node.value(0) if tuple(wanted) == node.dims(0) else g.reshape(node.tensor(0), wanted)


@operator("Flatten", since=1)
def flatten(node: Node, g: GraphBuilder) -> Result:
    dims, axis = node.dims(0), node.axis()
    return _reshape(node, g, (math.prod(dims[:axis]), math.prod(dims[axis:])))


@operator("Squeeze", since=1)
def squeeze(node: Node, g: GraphBuilder) -> Result:
    dims = node.dims(0)
    given = node.axes()
    axes = set(given) if given is not None else {a for a, d in enumerate(dims) if d == 1}
    if any(dims[axis] != 1 for axis in axes):
        raise Declined(f"axes {given} of dims {dims} are not of size 1")
    return _reshape(node, g, [d for a, d in enumerate(dims) if a not in axes])


@operator("Unsqueeze", since=1)
def unsqueeze(node: Node, g: GraphBuilder) -> Result:
    dims = list(node.dims(0))
    axes = sorted(node.axes() or ())
    if len(set(axes)) < len(axes):
        raise Declined(f"axes {tuple(axes)} name one twice")
    for axis in axes:
        dims.insert(axis, 1)
    return _reshape(node, g, dims)


@operator("Transpose", since=1)
def transpose(node: Node, g: GraphBuilder) -> Result:
    x = node.tensor(0)
    if is_half_product(node.value(0)):  # rounded, as ONNX says: it is stored in the half type, not in float32
        x = g.astype(x, x.dtype)
    return g.transpose(x, node.attribute("perm"))


@operator("Slice", since=1)
def slice_(node: Node, g: GraphBuilder) -> Result:
    dims = node.dims(0)
    if node.version < 10:
        starts, ends = node.attribute("starts"), node.attribute("ends")
        steps = None
    else:
        starts, ends = node.ints(1), node.ints(2)
        steps = node.ints(4) if node.has(4) else None
    axes = node.axes()
    along = range(len(starts)) if axes is None else axes
    index = slices(dims, starts, ends, along, steps or [1] * len(starts))
    sizes = [len(range(dim)[each]) for dim, each in zip(dims, index, strict=True)]
    if 0 in sizes:
        return np.empty(sizes, node.value(0).dtype)
    return g.slice(node.tensor(0), index) if index else node.value(0)


@operator("Expand", since=8)
def expand(node: Node, g: GraphBuilder) -> Result:
    dims = broadcast_dims(node.dims(0), node.ints(1))
    if dims == node.dims(0):
        return node.value(0)
    if 0 in dims:
        return np.empty(dims, node.value(0).dtype)
    return g.broadcast_to(node.tensor(0), dims)


@operator("Concat", since=4)
def concat(node: Node, g: GraphBuilder) -> Result:
    values = [node.value(number) for number in range(len(node.inputs))]
    axis = node.axis()
    filled = [value.tensor for value in values if value.dims[axis]]
    if not filled:
        return values[0]
    return g.concatenate(filled, axis) if len(filled) > 1 else filled[0]


@operator("Split", since=2)
def split(node: Node, g: GraphBuilder) -> Result:
    axis = node.axis()
    dim, count = node.dims(0)[axis], len(node.proto.output)
    sizes = node.attribute("split") if node.version < 13 else node.ints(1) if node.has(1) else None
    if sizes is None:
        if (node.attribute("num_outputs", count) or count) != count:
            raise Declined(f"has {count} outputs, not {node.attribute('num_outputs')}")
        each = -(-dim // count)
        sizes = [min(each, max(0, dim - number * each)) for number in range(count)]
    if len(sizes) != count:
        raise Declined(f"has {count} outputs for {len(sizes)} parts")
    if sum(sizes) != dim:
        raise Declined(f"the parts {tuple(sizes)} are not the {dim} elements of axis {axis}")
    parts: list[Any] = []
    for end, part in zip(itertools.accumulate(sizes), sizes, strict=True):
        if not part:
            dims = (*node.dims(0)[:axis], 0, *node.dims(0)[axis + 1 :])
            parts.append(np.empty(dims, node.value(0).dtype))
        else:
            parts.append(g.slice(node.tensor(0), (*[slice(None)] * axis, slice(end - part, end))))
    return tuple(parts)


@operator("Pad", since=2)
def pad(node: Node, g: GraphBuilder) -> Result:
    rank, mode = node.rank(0), node.attribute("mode", "constant")
    value: Any = 0
    if node.version < 11:
        pads, value = node.attribute("pads"), node.attribute("value", 0.0)
    else:
        pads = node.ints(1)
        if node.has(2):
            value = node.constant(2).reshape(-1)[0].item()
            value = int(value) if isinstance(value, bool) else value
    given = node.axes()
    axes = range(rank) if given is None else given
    widths = [(0, 0)] * rank
    for place, axis in enumerate(axes):
        widths[axis] = (pads[place], pads[place + len(axes)])
    sizes = [b + d + a for d, (b, a) in zip(node.dims(0), widths, strict=True)]
    if min(sizes, default=0) < 0:
        raise node.wrong(f"pads dims {node.dims(0)} to {tuple(sizes)}", 1 if node.has(1) else None)
    if node.value(0).size == 0:
        return _padded_nothing(node, widths, value)
    x = node.tensor(0)
    crop = tuple(slice(max(0, -b), d - max(0, -a)) for d, (b, a) in zip(x.dims, widths, strict=True))
    x = g.slice(x, crop) if any(b < 0 or a < 0 for b, a in widths) else x
    around = [(max(0, b), max(0, a)) for b, a in widths]
    if mode != "constant" or (math.isfinite(value) and float(value) == value):
        return g.pad(x, around, value if mode == "constant" else 0, mode=mode)
    filled: Any = node.weight(np.array(value, x.dtype.numpy))  # a number that no attribute holds
    return g.where(g.pad(g.full(x.dims, 1, DType.BOOL), around), g.pad(x, around), filled)


def _padded_nothing(node: Node, widths: Sequence[tuple[int, int]], value: Any) -> Result:
    dims = [dim + before + after for dim, (before, after) in zip(node.dims(0), widths, strict=True)]
    if 0 in dims:
        return np.empty(dims, node.value(0).dtype)
    if node.attribute("mode", "constant") != "constant":
        raise Declined(f"pads dims {node.dims(0)} with elements, of which there are none")
    return node.g.broadcast_to(node.weight(np.array(value, node.value(0).dtype)), dims)


@operator("SpaceToDepth", "DepthToSpace", since=1)
def depth_and_space(node: Node, g: GraphBuilder) -> Result:
    of = g.space_to_depth if node.op == "SpaceToDepth" else g.depth_to_space
    return of(node.tensor(0), node.attribute("blocksize"), node.attribute("mode", "DCR"))


@operator("Tile", since=6)
def tile(node: Node, g: GraphBuilder) -> Result:
    repeats = node.ints(1)
    if len(repeats) != node.rank(0):
        raise Contradiction(f"has repeats {repeats} for dims {node.dims(0)}")
    if 0 in repeats:
        return np.empty([d * r for d, r in zip(node.dims(0), repeats, strict=True)], node.value(0).dtype)
    return g.tile(node.tensor(0), repeats)


@operator("CenterCropPad", since=18)
def center_crop_pad(node: Node, g: GraphBuilder) -> Result:
    """Cut an axis that is too long at both ends, and pad one that is too short with 0 at both ends."""
    dims, wanted, axes = node.dims(0), node.ints(1), node.axes()
    axes = tuple(range(len(dims))) if axes is None else axes
    if len(wanted) != len(axes):
        raise node.wrong(f"has {len(wanted)} sizes for {len(axes)} axes", 1)
    sizes = list(dims)
    for axis, size in zip(axes, wanted, strict=True):
        sizes[axis] = size
    if 0 in sizes:
        return np.empty(sizes, node.value(0).dtype)
    pairs = list(zip(dims, sizes, strict=True))
    cut = tuple(
        slice(max(0, (dim - size) // 2), max(0, (dim - size) // 2) + min(dim, size)) for dim, size in pairs
    )
    missing = [max(0, size - dim) for dim, size in pairs]
    x = g.slice(node.tensor(0), cut)
    return g.pad(x, [(each // 2, each - each // 2) for each in missing]) if any(missing) else x


@operator("Col2Im", since=18)
def col2im(node: Node, g: GraphBuilder) -> Result:
    """The reverse of cutting an image into blocks: each element is the sum of the block elements at its
    place."""
    x, image, block = node.tensor(0), node.ints(1), node.ints(2)
    wide, rank = _of_sums(x.dtype), len(image)
    pads = node.attribute("pads") or (0,) * (2 * rank)
    y = g.fold(
        x if wide is x.dtype else g.astype(x, wide),
        image,
        block,
        pad=tuple(zip(pads[:rank], pads[rank:], strict=True)),
        stride=node.attribute("strides") or 1,
        dilation=node.attribute("dilations") or 1,
    )
    return convert(g, y, x.dtype)


def _of_sums(dtype: DType) -> DType:
    """The dtype in which sums are rounded once, or wrap around at last."""
    if dtype.is_half:
        return DType.FLOAT32
    return dtype if dtype.is_floating or dtype in (DType.BOOL, DType.INT64, DType.UINT64) else DType.INT64
