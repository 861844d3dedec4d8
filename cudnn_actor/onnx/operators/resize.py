"""Resizing, and images read at places that a tensor holds.

https://onnx.ai/onnx/operators/onnx__Resize.html
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operator_table import operator
from cudnn_actor.onnx.operators.casts import convert
from cudnn_actor.onnx.values import Contradiction, Declined
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.graphs.spatial_functions import affine_map, affine_places
from cudnn_actor.protocol.operations import (
    Coordinates,
    GridPadding,
    NearestRounding,
    Resample,
    ResampleMode,
)
from cudnn_actor.protocol.types.dtypes import DType

__all__: list[str] = []

_MODES = {
    "bicubic": ResampleMode.CUBIC,
    "bilinear": ResampleMode.LINEAR,
    "cubic": ResampleMode.CUBIC,
    "linear": ResampleMode.LINEAR,
    "nearest": ResampleMode.NEAREST,
}


@operator("Resize", since=10)
def resize(node: Node, g: GraphBuilder) -> Result:
    rank = node.rank(0)
    axes = node.axes() or range(rank)
    numbers = (None, 1, None) if node.version == 10 else (1, 2, 3)
    given = [None if n is None else node.constant_or_none(n) for n in numbers]
    roi, scales, sizes = (None if each is None or not each.size else each for each in given)
    dims = [node.dims(0)[axis] for axis in axes]
    if sizes is not None:
        wanted = [int(size) for size in sizes]
        factors = [size / dim for size, dim in zip(wanted, dims, strict=True)]
        policy = node.attribute("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            one = min(factors) if policy == "not_larger" else max(factors)
            factors, wanted = [one] * len(axes), [int(one * dim + 0.5) for dim in dims]
    elif scales is not None:
        factors = [float(scale) for scale in scales]
        wanted = [int(factor * dim) for factor, dim in zip(factors, dims, strict=True)]
    else:
        raise Declined("has neither scales nor sizes")
    along = dict(zip(axes, zip(wanted, factors, strict=True), strict=True))
    if 0 in wanted:
        return _empty(node, along)
    bounds = None
    if roi is not None:
        bounds = [*[0.0] * rank, *[1.0] * rank]
        for number, axis in enumerate(axes):
            bounds[axis], bounds[rank + axis] = float(roi[number]), float(roi[len(axes) + number])
    x, options = node.tensor(0), _options(node, bounds)
    if node.version == 10 and options["mode"] is ResampleMode.NEAREST:
        # The second of two neighbours where a dim gets shorter, as in ONNX's example of that version.
        shorter = {axis: along.pop(axis) for axis, factor in enumerate(factors) if factor < 1}
        x = _resize(g, x, shorter, options | {"rounding": NearestRounding.CEIL}) if shorter else x
    return _resize(g, x, along, options)


def _empty(node: Node, along: dict[int, tuple[int, float]]) -> np.ndarray:
    """The result if scales reduce a dim to 0."""
    dims = [along.get(axis, (dim,))[0] for axis, dim in enumerate(node.dims(0))]
    if min(dims) < 0:
        raise Contradiction(f"resizes dims {node.dims(0)} to {tuple(dims)}")
    return np.empty(dims, node.value(0).dtype)


def _options(node: Node, roi: list[float] | None) -> dict[str, Any]:
    """The parameters of the `Resample` for a `Resize`."""
    mode = ResampleMode(node.attribute("mode"))
    if node.version < 11:
        return _older(mode)
    return {
        "mode": mode,
        "coordinates": Coordinates(node.attribute("coordinate_transformation_mode")),
        "rounding": NearestRounding(node.attribute("nearest_mode")),
        "cubic_coefficient": node.attribute("cubic_coeff_a"),
        "antialias": bool(node.attribute("antialias", 0)),
        "exclude_outside": bool(node.attribute("exclude_outside", 0)),
        "extrapolation": node.attribute("extrapolation_value", 0.0),
        "roi": None if roi is None else tuple(roi),
    }


def _older(mode: ResampleMode) -> dict[str, Any]:
    return {"mode": mode, "coordinates": Coordinates.ASYMMETRIC, "rounding": NearestRounding.FLOOR}


@operator("Upsample", since=7)
def upsample(node: Node, g: GraphBuilder) -> Result:
    given = node.attribute("scales") if node.version < 9 else node.constant(1)
    each = zip(node.dims(0), map(float, given), strict=True)
    along = {axis: (int(scale * dim), scale) for axis, (dim, scale) in enumerate(each)}
    if any(size == 0 for size, _ in along.values()):
        return _empty(node, along)
    return _resize(g, node.tensor(0), along, _older(ResampleMode(node.attribute("mode"))))


def _resize(
    g: GraphBuilder, x: Tensor, along: dict[int, tuple[int, float]], options: dict[str, Any]
) -> Tensor:
    """x with other sizes along some axes; to each belongs a factor."""
    sizes = tuple(along.get(axis, (dim,))[0] for axis, dim in enumerate(x.dims))
    scales = tuple(along.get(axis, (0, 1.0))[1] for axis in range(x.rank))
    whole = not x.dtype.is_floating and options["mode"] is not ResampleMode.NEAREST
    y = g._result(
        Resample(x=g.astype(x, DType.FLOAT32) if whole else x, sizes=sizes, scales=scales, **options)
    )
    return convert(g, g.round(y), x.dtype) if whole else y


@operator("GridSample", since=16)
def grid_sample(node: Node, g: GraphBuilder) -> Result:
    return g.grid_sample(
        node.tensor(0),
        node.tensor(1),
        mode=_MODES[node.attribute("mode")],
        padding=GridPadding(node.attribute("padding_mode")),
        align_corners=bool(node.attribute("align_corners")),
    )


@operator("AffineGrid", since=20)
def affine_grid(node: Node, g: GraphBuilder) -> Result:
    """A dim of size 1 is at 0 in either case, as PyTorch's is: ONNX's function divides by 0."""
    theta, (count, _, *sizes) = node.tensor(0), node.ints(1)
    theta = g.reshape(theta, (count, len(sizes), len(sizes) + 1))
    places = []
    for size in sizes:
        node.reserve(size)
        along = affine_places(np.arange(size), align_corners=bool(node.attribute("align_corners")))
        places.append(node.weight(along.astype(theta.dtype.numpy)))
    return affine_map(g, theta, places)
