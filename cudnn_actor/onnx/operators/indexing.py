"""Elements at places that indices name."""

from __future__ import annotations

import math

import numpy as np

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operator_table import operator
from cudnn_actor.onnx.operators.casts import wrap
from cudnn_actor.onnx.operators.rows import along
from cudnn_actor.onnx.values import Declined, fitting
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.operations import GatherElements, ScatterReduction
from cudnn_actor.protocol.types.dtypes import DType

__all__: list[str] = []

_INDICES = ("int32", "int64")


def _indices(node: Node, g: GraphBuilder, number: int) -> Tensor:
    """Indices as int32 or int64."""
    indices = node.tensor(number)
    return indices if indices.dtype in _INDICES else g.astype(indices, "int64")


@operator("Gather", since=1)
def gather(node: Node, g: GraphBuilder) -> Result:
    axis = node.axis()
    value = node.value(1)
    if value.fixed and value.size == 1:  # a slice
        place = int(value.array.reshape(()))
        dim = node.dims(0)[axis]
        if not -dim <= place < dim:
            raise Declined(f"the index {place} is out of range for axis {axis} of dims {node.dims(0)}")
        part = g.slice(node.tensor(0), (*[slice(None)] * axis, slice(place % dim, place % dim + 1)))
        dims = node.dims(0)
        return g.reshape(part, (*dims[:axis], *value.dims, *dims[axis + 1 :]))
    return g.take(node.tensor(0), _indices(node, g, 1), axis)


@operator("GatherElements", since=11)
def gather_elements(node: Node, g: GraphBuilder) -> Result:
    # `take_along_axis` would broadcast the indices, as NumPy does.
    operation = GatherElements(x=node.tensor(0), indices=_indices(node, g, 1), axis=node.axis())
    with fitting("indices"):
        return g.apply(operation)


@operator("GatherND", since=11)
def gather_nd(node: Node, g: GraphBuilder) -> Result:
    with fitting("indices"):
        return g.gather_nd(node.tensor(0), _indices(node, g, 1), batch_dims=node.attribute("batch_dims", 0))


def _reduction(node: Node) -> ScatterReduction:
    return ScatterReduction(node.attribute("reduction", "none"))


def _summands(node: Node, g: GraphBuilder) -> tuple[Tensor, Tensor]:
    """The scattered updates, and the tensor onto which they are scattered: as int64 where sums and products
    of integers must wrap around."""
    x, updates, dtype = node.tensor(0), node.tensor(2), node.dtype(0)
    narrow = dtype not in (DType.BOOL, DType.INT64, DType.UINT64) and not dtype.is_floating
    if _reduction(node) not in (ScatterReduction.ADD, ScatterReduction.MUL) or not narrow:
        return x, updates
    return g.astype(x, DType.INT64), g.astype(updates, DType.INT64)


@operator("Scatter", since=9)
@operator("ScatterElements", since=11)
def scatter_elements(node: Node, g: GraphBuilder) -> Result:
    x, updates = _summands(node, g)
    with fitting("indices"):
        y = g.put_along_axis(x, _indices(node, g, 1), updates, node.axis(), reduction=_reduction(node))
    return wrap(g, y, node.dtype(0))


@operator("ScatterND", since=11)
def scatter_nd(node: Node, g: GraphBuilder) -> Result:
    indices = node.dims(1)
    node.require(2, *indices[:-1], *node.dims(0)[indices[-1] if indices else 0 :])
    x, updates = _summands(node, g)
    y = g.scatter_nd(x, _indices(node, g, 1), updates, reduction=_reduction(node))
    return wrap(g, y, node.dtype(0))


@operator("TensorScatter", since=24)
def tensor_scatter(node: Node, g: GraphBuilder) -> Result:
    """Overwrite a part of a cache along an axis. Each sample has its own begin."""
    x, updates, mode = node.tensor(0), node.tensor(1), node.attribute("mode")
    axis = node.axis()
    places = along(g, node.numbers(updates.dims[axis]), axis, x.rank)
    if node.has(2):
        places = g.add(along(g, _indices(node, g, 2), 0, x.rank), places)
        if mode == "circular":
            places = g.mod(places, x.dims[axis])
    return g.put_along_axis(x, g.broadcast_to(places, updates.dims), updates, axis)


@operator("MaxUnpool", since=9)
def max_unpool(node: Node, g: GraphBuilder) -> Result:
    x, size = node.tensor(0), node.attribute("kernel_shape")
    rank = len(size)
    strides, pads = node.attribute("strides") or (1,) * rank, node.attribute("pads") or (0,) * (2 * rank)
    spatial = [(x.dims[2 + n] - 1) * strides[n] - pads[n] - pads[rank + n] + size[n] for n in range(rank)]
    dims = (*x.dims[:2], *spatial)
    nothing = g.full((math.prod(dims),), 0.0, x.dtype)
    y = g.put(nothing, g.reshape(_indices(node, g, 1), (-1,)), g.reshape(x, (-1,)))
    y = g.reshape(y, dims)
    wanted = node.ints(2) if node.has(2) else dims
    more = [(0, want - dim) for want, dim in zip(wanted, dims, strict=True)]
    return y if wanted == dims else g.pad(y, more)


@operator("TopK", since=1)
def top_k(node: Node, g: GraphBuilder) -> Result:
    k = node.attribute("k") if node.version < 10 else node.count(1)
    largest, in_order = bool(node.attribute("largest", 1)), bool(node.attribute("sorted", 1))
    return tuple(g.top_k(node.tensor(0), k, node.axis(), largest=largest, in_order=in_order))


@operator("Compress", since=9)
def compress(node: Node, g: GraphBuilder) -> Result:
    """The condition decides how many elements there are."""
    dims, axes = node.dims(0), node.axes("axis")
    dims, axis = ((math.prod(dims),), 0) if axes is None else (dims, axes[0])
    node.reserve(node.value(1).size)
    places = np.flatnonzero(node.constant(1)[: dims[axis]])
    if not len(places):
        return np.empty((*dims[:axis], 0, *dims[axis + 1 :]), node.dtype(0).numpy)
    return g.take(g.reshape(node.tensor(0), dims), node.weight(places), axis)


@operator("ReverseSequence", since=10)
def reverse_sequence(node: Node, g: GraphBuilder) -> Result:
    x, lengths = node.tensor(0), node.tensor(1)
    time, batch = node.axis("time_axis"), node.axis("batch_axis")
    steps = along(g, node.numbers(x.dims[time]), time, x.rank)
    ends = along(g, lengths, batch, x.rank)
    places = g.where(g.less(steps, ends), g.subtract(g.subtract(ends, 1), steps), steps)
    return g.take_along_axis(x, g.astype(places, "int64"), time)


@operator("ArrayFeatureExtractor", domain="ai.onnx.ml")
def array_feature_extractor(node: Node, g: GraphBuilder) -> Result:
    x, indices = node.tensor(0), _indices(node, g, 1)
    found = g.take(x, g.reshape(indices, (-1,)), x.rank - 1)
    return g.reshape(found, (1, *found.dims)) if x.rank == 1 else found
