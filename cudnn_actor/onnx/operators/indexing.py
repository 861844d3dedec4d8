"""Elements at places that indices name."""

from __future__ import annotations

import numpy as np

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.table import operator
from cudnn_actor.onnx.values import Declined
from cudnn_actor.protocol.graph_builder import GraphBuilder, Tensor

__all__: list[str] = []

_INDICES = ("int32", "int64")


def _indices(node: Node, g: GraphBuilder, number: int) -> Tensor:
    """Indices as int32 or int64."""
    indices = node.tensor(number)
    return indices if indices.dtype in _INDICES else g.astype(indices, "int64")


@operator("Gather", since=1)
def gather(node: Node, g: GraphBuilder) -> Result:
    axis = node.attribute("axis") % node.rank(0)
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
    return g.take_along_axis(node.tensor(0), _indices(node, g, 1), node.attribute("axis"))


@operator("GatherND", since=11)
def gather_nd(node: Node, g: GraphBuilder) -> Result:
    return g.gather_nd(node.tensor(0), _indices(node, g, 1), batch_dims=node.attribute("batch_dims", 0))


@operator("Compress", since=9)
def compress(node: Node, g: GraphBuilder) -> Result:
    """The condition decides how many elements there are."""
    axis = node.attribute("axis")
    x = node.tensor(0)
    if axis is None:
        x, axis = g.reshape(x, (-1,)), 0
    places = np.flatnonzero(node.constant(1))
    axis %= x.rank
    if not len(places):
        return np.empty((*x.dims[:axis], 0, *x.dims[axis + 1 :]), x.dtype.numpy)
    return g.take(x, node.weight(places), axis)


@operator("ReverseSequence", since=10)
def reverse_sequence(node: Node, g: GraphBuilder) -> Result:
    x, lengths = node.tensor(0), node.tensor(1)
    time, batch = node.attribute("time_axis"), node.attribute("batch_axis")

    def along(values: Tensor, axis: int) -> Tensor:
        return g.reshape(values, [-1 if n == axis else 1 for n in range(x.rank)])

    steps = along(node.weight(np.arange(x.dims[time])), time)
    ends = along(lengths, batch)
    places = g.where(g.less(steps, ends), g.subtract(g.subtract(ends, 1), steps), steps)
    return g.take_along_axis(x, g.astype(places, "int64"), time)


@operator("ArrayFeatureExtractor", domain="ai.onnx.ml")
def array_feature_extractor(node: Node, g: GraphBuilder) -> Result:
    x, indices = node.tensor(0), _indices(node, g, 1)
    found = g.take(x, g.reshape(indices, (-1,)), x.rank - 1)
    return g.reshape(found, (1, *found.dims)) if x.rank == 1 else found
