"""Resizing: along one axis after the other, each result is a weighted sum of a few elements.

Which elements and which weights follows from dims, and is computed when the model is imported.
https://onnx.ai/onnx/operators/onnx__Resize.html
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operators.casts import converted
from cudnn_actor.onnx.table import operator
from cudnn_actor.onnx.values import Declined
from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.graph_builder import GraphBuilder, Tensor

__all__: list[str] = []


@dataclass(frozen=True)
class _Way:
    """How coordinates are mapped, and what is made of the elements around them."""

    mode: str = "nearest"
    coordinates: str = "asymmetric"
    nearest: str = "floor"
    cubic: float = -0.75
    antialias: bool = False
    exclude_outside: bool = False
    extrapolation: float = 0.0

    @classmethod
    def of(cls, node: Node) -> _Way:
        """That of a `Resize`."""
        if node.version < 11:
            return cls(mode=node.attribute("mode"))
        return cls(
            mode=node.attribute("mode"),
            coordinates=node.attribute("coordinate_transformation_mode"),
            nearest=node.attribute("nearest_mode"),
            cubic=node.attribute("cubic_coeff_a"),
            antialias=bool(node.attribute("antialias", 0)),
            exclude_outside=bool(node.attribute("exclude_outside", 0)),
            extrapolation=node.attribute("extrapolation_value", 0.0),
        )

    def places(self, size: int, count: int, scale: float, roi: tuple[float, float]) -> np.ndarray:
        """For each of `count` results along an axis of that size: its coordinate."""
        y, wide = np.arange(count, dtype=np.float64), scale * size
        match self.coordinates:
            case "align_corners":
                return np.zeros(count) if wide == 1 else y * (size - 1) / (wide - 1)
            case "asymmetric":
                return y / scale
            case "tf_crop_and_resize":
                start, end = roi
                reach = (end - start) * (size - 1)
                return start * (size - 1) + (
                    np.full(count, reach / 2) if wide == 1 else y * reach / (wide - 1)
                )
            case "pytorch_half_pixel" if wide == 1:
                return np.full(count, -0.5)
            case "half_pixel" | "pytorch_half_pixel":
                return (y + 0.5) / scale - 0.5
            case "half_pixel_symmetric":
                return size / 2 * (1 - count / wide) + (y + 0.5) / scale - 0.5
        raise Declined(f"the coordinates {self.coordinates}")

    def taps(self, size: int, places: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
        """For each coordinate, the elements around it, dims (count, taps), and their weights."""
        below = np.floor(places)
        share = np.where(places == below, 1.0, places - below)  # the element on the left is preferred
        first = np.where(places == below, below - 1, below).astype(np.int64)
        if self.mode == "nearest":
            upper = {
                "round_prefer_floor": share > 0.5,
                "round_prefer_ceil": share >= 0.5,
                "floor": np.zeros(len(share), bool),
                "ceil": np.ones(len(share), bool),
            }[self.nearest] | (share == 1)
            index = first + upper
            return np.clip(index, 0, size - 1)[:, None], np.ones((len(index), 1))
        reach = 1 if self.mode == "linear" else 2
        least = min(scale, 1.0) if self.antialias else 1.0
        start = math.floor(-reach / least) + 1
        steps = np.arange(start, 2 - start)
        weights = self._kernel(reach)((steps - share[:, None]) * least)
        if least < 1:
            weights /= weights.sum(1, keepdims=True)
        index = first[:, None] + steps
        if self.exclude_outside:
            weights = np.where((index < 0) | (index >= size), 0.0, weights)
            total = weights.sum(1, keepdims=True)
            weights /= np.where(total == 0, 1, total)
        return np.clip(index, 0, size - 1), weights

    def _kernel(self, reach: int) -> Callable[[np.ndarray], np.ndarray]:
        """The weight of an element at a distance."""
        if reach == 1:
            return lambda x: np.clip(1 - np.abs(x), 0, 1)
        a = self.cubic

        def cubic(x: np.ndarray) -> np.ndarray:
            x = np.abs(x)
            inner = ((a + 2) * x - (a + 3)) * x * x + 1
            outer = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
            return np.where(x <= 1, inner, np.where(x < 2, outer, 0.0))

        return cubic


@operator("Resize", since=10)
def resize(node: Node, g: GraphBuilder) -> Result:
    rank = node.rank(0)
    axes = [axis % rank for axis in node.attribute("axes") or range(rank)]
    numbers = (None, 1, None) if node.version == 10 else (1, 2, 3)
    given = [None if n is None else node.constant_or_none(n) for n in numbers]
    roi, scales, sizes = (None if each is None or not each.size else each for each in given)
    dims = [node.dims(0)[axis] for axis in axes]
    if sizes is not None:
        wanted = [int(size) for size in sizes]
        factors = _kept(node, [size / dim for size, dim in zip(wanted, dims, strict=True)])
        if factors[1]:
            wanted = [int(factor * dim + 0.5) for factor, dim in zip(factors[0], dims, strict=True)]
        along = list(zip(axes, wanted, factors[0], strict=True))
    elif scales is not None:
        each = [float(scale) for scale in scales]
        along = [(a, int(s * d), s) for a, d, s in zip(axes, dims, each, strict=True)]
    else:
        raise Declined("has neither scales nor sizes")
    bounds = dict.fromkeys(axes, (0.0, 1.0))
    if roi is not None:
        half = len(axes)
        bounds = {axis: (float(roi[n]), float(roi[half + n])) for n, axis in enumerate(axes)}
    return _resized(node, g, _Way.of(node), along, bounds)


def _kept(node: Node, factors: list[float]) -> tuple[list[float], bool]:
    """The factors, and whether sizes follow from them: all equal where the aspect ratio is kept."""
    policy = node.attribute("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return factors, False
    one = min(factors) if policy == "not_larger" else max(factors)
    return [one] * len(factors), True


@operator("Upsample", since=7)
def upsample(node: Node, g: GraphBuilder) -> Result:
    scales = node.attribute("scales") if node.version < 9 else node.constant(1)
    dims = node.dims(0)
    along = [
        (n, int(scale * dim), float(scale)) for n, (scale, dim) in enumerate(zip(scales, dims, strict=True))
    ]
    return _resized(node, g, _Way(mode=node.attribute("mode")), along, {})


def _resized(
    node: Node,
    g: GraphBuilder,
    way: _Way,
    along: list[tuple[int, int, float]],
    bounds: dict[int, tuple[float, float]],
) -> Result:
    """The input resized along each axis to so many elements, by such a factor."""
    x, dtype = node.tensor(0), node.dtype(0)
    if 0 in (count for _, count, _ in along):
        raise Declined("has no results")
    if way.mode != "nearest" and dtype not in (DType.FLOAT32, DType.FLOAT64):
        x = g.astype(x, DType.FLOAT32)
    for axis, count, scale in along:
        size, roi = x.dims[axis], bounds.get(axis, (0.0, 1.0))
        if count == size and math.isclose(scale, 1.0) and roi == (0.0, 1.0):
            continue
        places = way.places(size, count, scale, roi)
        index, weights = way.taps(size, places, scale)
        outside = (places < 0) | (places > size - 1) if way.coordinates == "tf_crop_and_resize" else None
        x = _axis(node, g, x, axis, (index, weights))
        if outside is not None and outside.any():
            mask = node.weight(outside.reshape([-1 if n == axis else 1 for n in range(x.rank)]))
            x = g.where(mask, way.extrapolation, x)
    if x is node.tensor(0):
        return node.value(0)
    return (
        x
        if x.dtype is dtype
        else converted(g, g.round(x), dtype)
        if not dtype.is_floating
        else g.astype(x, dtype)
    )


def _axis(node: Node, g: GraphBuilder, x: Tensor, axis: int, taps: tuple[np.ndarray, np.ndarray]) -> Tensor:
    """Weighted sums of elements along an axis."""
    index, weights = taps
    total: Tensor | None = None
    for tap in range(index.shape[1]):
        if not weights[:, tap].any():
            continue
        part = g.take(x, node.weight(np.ascontiguousarray(index[:, tap])), axis)
        if not (weights[:, tap] == 1).all():
            shape = [-1 if n == axis else 1 for n in range(x.rank)]
            part = g.multiply(part, node.weight(weights[:, tap].reshape(shape).astype(x.dtype.numpy)))
        total = part if total is None else g.add(total, part)
    assert total is not None
    return total
