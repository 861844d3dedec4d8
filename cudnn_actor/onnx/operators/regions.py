"""Regions of images, each read at evenly spaced places: rows of a table of elements, with weights.

https://onnx.ai/onnx/operators/onnx__RoiAlign.html
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operator_table import operator
from cudnn_actor.onnx.values import Declined
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.types.dtypes import DType

__all__: list[str] = []


class _Samples(NamedTuple):
    """The places at which regions are read along one spatial dim. Dims are (regions, parts * most), or (1,
    ...).

    `taps`: places, int64, and their weights. `parts`: how many parts a region has. `most`: the most samples
    of a part. `counts`: how many samples the parts of each region have. `there`: which samples are among
    these.
    """

    taps: list[tuple[Tensor, Tensor]]
    parts: int
    most: int
    counts: np.ndarray
    there: np.ndarray


@operator("RoiAlign", since=10)
def roi_align(node: Node, g: GraphBuilder) -> Result:
    x = node.tensor(0)
    images, channels, height, width = x.dims
    wide = DType.FLOAT64 if x.dtype is DType.FLOAT64 else DType.FLOAT32
    rois = g.astype(node.tensor(1), wide)
    rows, columns = _samples(node, g, rois, 1, height), _samples(node, g, rois, 0, width)
    regions = node.dims(1)[0]
    table = g.reshape(g.transpose(x, (0, 2, 3, 1)), (images * height * width, channels))
    first = g.reshape(g.multiply(g.astype(node.tensor(2), DType.INT64), height), (regions, 1, 1))
    found: list[Tensor] = []
    for (row, by), (column, along) in itertools.product(rows.taps, columns.taps):
        places = g.add(g.multiply(g.add(first, row[:, :, None]), width), column[:, None, :])
        weights = g.multiply(by[:, :, None, None], along[:, None, :, None])
        found.append(g.multiply(g.astype(g.take(table, places, 0), wide), weights))
    mean = node.attribute("mode") == "avg"
    # The other mode is the largest product of an element and its weight, in ONNX's reference implementation.
    total = functools.reduce(g.add if mean else g.maximum, found)
    node.reserve(*rows.there.shape, columns.there.shape[1], itemsize=1)
    there = (rows.there[:, :, None] & columns.there[:, None, :])[..., None]
    if not there.all():
        total = g.where(node.weight(there), total, 0.0 if mean else -np.inf)
    total = g.reshape(total, (regions, rows.parts, rows.most, columns.parts, columns.most, channels))
    y = g.sum(total, (2, 4)) if mean else g.max(total, (2, 4))
    if mean:
        counts = (rows.counts * columns.counts).reshape(-1, 1, 1, 1)
        y = g.divide(y, node.weight(counts.astype(wide.numpy)))
    return node.cast(g.transpose(y, (0, 3, 1, 2)), x.dtype)


def _samples(node: Node, g: GraphBuilder, rois: Tensor, axis: int, size: int) -> _Samples:
    """`axis`: 0 along rows of images, 1 along columns."""
    scale, ratio = node.attribute("spatial_scale"), node.attribute("sampling_ratio")
    centred = node.version >= 16 and node.attribute("coordinate_transformation_mode") == "half_pixel"
    parts, wide = node.attribute("output_height" if axis else "output_width"), rois.dtype
    start, end = (g.subtract(g.multiply(rois[:, n : n + 1], scale), 0.5 * centred) for n in (axis, axis + 2))
    length = g.subtract(end, start)
    step = g.divide(length if centred else g.maximum(length, 1.0), float(parts))
    counts = np.array([ratio])
    if ratio <= 0:  # as many samples as a part has elements; the regions' values decide how many
        known = node.constant(1).astype(wide.numpy) * wide.numpy.type(scale)
        lengths = known[:, axis + 2] - known[:, axis]
        samples = np.ceil((lengths if centred else np.maximum(lengths, 1)) / parts)
        if not np.isfinite(samples).all():
            raise Declined("has a region without an end")
        counts = samples.astype(np.int64)
    some = np.maximum(counts, 1)
    most = int(some.max())
    node.reserve(len(some), parts, most)
    numbers = np.arange(parts * most)

    def weight(array: Any) -> Tensor:
        return node.weight(np.asarray(array, wide.numpy))

    within = g.divide(g.multiply(step, weight(numbers % most + 0.5)), weight(some[:, None]))
    place = g.add(g.add(start, g.multiply(step, weight(numbers // most))), within)
    inside = g.logical_and(g.greater_equal(place, -1.0), g.less_equal(place, float(size)))
    inside = g.logical_and(inside, node.weight(counts[:, None] > 0))  # a region without any is 0
    place = g.minimum(g.maximum(place, 0.0), size - 1.0)
    low = g.floor(place)
    beyond = g.subtract(place, low)
    taps = [(low, g.subtract(1.0, beyond)), (g.minimum(g.add(low, 1.0), size - 1.0), beyond)]
    used = [(g.astype(at, DType.INT64), g.where(inside, by, 0.0)) for at, by in taps]
    return _Samples(used, parts, most, some, numbers % most < some[:, None])
