"""Tensors with other sizes: between elements, values are those of the nearest, or interpolated.

The definition is ONNX's, of `Resize` since version 19. Coordinates are computed in float64, by the formulas
of its reference implementation.
https://onnx.ai/onnx/operators/onnx__Resize.html
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.operations.base import (
    ALLOCATED,
    Array,
    Operation,
    Part,
    Region,
    Specs,
    T,
    is_all,
    require,
    require_floating,
)
from cudnn_actor.protocol.operations.example import ROUNDED, Example
from cudnn_actor.protocol.types.checks import is_finite, is_whole, require_member
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Coordinates", "NearestRounding", "Resample", "ResampleBackward", "ResampleMode"]

_MOST_TAPS = 1 << 16
"""The most elements along a dim that one of a result is made of."""
_MOST_TAPS_ALONG = 1 << 24
"""The most that all elements along a dim are made of, where these are more than its neighbours."""
_MOST_KEPT = 1 << 16
"""Elements along a dim whose taps are kept for the next time: those of 64 such dims take 200 MB at most."""


class ResampleMode(enum.StrEnum):
    """How values between elements are computed."""

    NEAREST = "nearest"
    """One of the two neighbours: see `NearestRounding`."""
    LINEAR = "linear"
    """A mean of the two neighbours, in which the nearer one has more weight. Floats only, and so is CUBIC."""
    CUBIC = "cubic"
    """Keys' cubic convolution of four neighbours."""


class Coordinates(enum.StrEnum):
    """The place along a dim of x of an element of y, in ONNX's words. For the place i in y, where `scale` is
    the ratio of sizes, or as it is given.
    """

    HALF_PIXEL = "half_pixel"
    """(i + 1/2) / scale - 1/2."""
    HALF_PIXEL_SYMMETRIC = "half_pixel_symmetric"
    """HALF_PIXEL, moved so that the middles agree if y's size is not the scale times x's."""
    PYTORCH_HALF_PIXEL = "pytorch_half_pixel"
    """HALF_PIXEL; -1/2 if x times the scale has one element."""
    ALIGN_CORNERS = "align_corners"
    """i times (x's size - 1) / (y's size - 1): the ends agree."""
    ASYMMETRIC = "asymmetric"
    """i / scale."""
    TF_HALF_PIXEL_FOR_NN = "tf_half_pixel_for_nn"
    """(i + 1/2) / scale."""
    TF_CROP_AND_RESIZE = "tf_crop_and_resize"
    """ALIGN_CORNERS of a part of x, `roi`. Places outside of x have the value `extrapolation`."""


class NearestRounding(enum.StrEnum):
    """The choice of the nearest of two neighbours."""

    ROUND_PREFER_FLOOR = "round_prefer_floor"
    """The nearer one; of two equally near ones, the first."""
    ROUND_PREFER_CEIL = "round_prefer_ceil"
    FLOOR = "floor"
    """The first."""
    CEIL = "ceil"


class Lists(NamedTuple):
    """The terms of each element's sum: places and weights, from the element's entry in `starts` to the next
    one's."""

    starts: np.ndarray
    places: np.ndarray
    weights: np.ndarray


class Taps(NamedTuple):
    """The taps of a result along one dim: the elements of the operand of which each element is a weighted
    sum.

    Parameters
    ----------
    places
        For each element of the result the places of those of the operand: int64, of dims (size, taps).
    weights
        Their weights: float64. Where a weight is 0, nothing is read.
    outside
        Which elements of the result have another value.
    """

    places: np.ndarray
    weights: np.ndarray
    outside: np.ndarray

    def square(self) -> Taps:
        """These taps with the squares of their weights."""
        return self._replace(weights=self.weights**2)

    def lists(self) -> Lists:
        """The taps as lists, one for each element of the result."""
        size, count = self.places.shape
        return Lists(np.arange(size + 1) * count, self.places.ravel(), self.weights.ravel())

    def transpose(self, size: int) -> Lists:
        """The elements of the result that each of the operand's `size` elements is part of."""
        used = (self.weights != 0) & ~self.outside[:, None]
        of, tap = np.nonzero(used)
        place, weight = self.places[of, tap], self.weights[of, tap]
        order = np.argsort(place, kind="stable")
        starts = np.searchsorted(place[order], np.arange(size + 1))
        return Lists(starts, of[order], weight[order])


class _Resampling(Operation[T]):
    sizes: tuple[int, ...]
    scales: tuple[float, ...] | None = None
    mode: ResampleMode = ResampleMode.NEAREST
    coordinates: Coordinates = Coordinates.HALF_PIXEL
    rounding: NearestRounding = NearestRounding.ROUND_PREFER_FLOOR
    cubic_coefficient: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    roi: tuple[float, ...] | None = None
    extrapolation: float = 0.0

    def taps(self, x: tuple[int, ...]) -> dict[int, Taps]:
        """The taps of y's elements along each dim of x that is not the same in y."""
        return {axis: self.taps_along(x, axis) for axis in self.resized_dims(x)}

    def resized_dims(self, x: tuple[int, ...]) -> list[int]:
        """The dims of x that are not the same in y."""
        found = []
        for axis, (size, wanted) in enumerate(zip(x, self.sizes, strict=True)):
            scale, roi = self._scale(x, axis), self._roi(x, axis)
            whole = math.isclose(roi[0], 0.0) and math.isclose(roi[1], 1.0)
            if not (math.isclose(scale, 1.0) and size == wanted and whole):
                found.append(axis)
        return found

    def work(self, specs: Specs) -> int:
        return 4 * len(self.sizes) * super().work(specs)

    def part(self, specs: Specs, wanted: Mapping[str, Region]) -> Part | None:
        """Any part along the dims that stay as they are."""
        (region,) = wanted.values()
        gradient = "dx" in specs
        x, result = (specs[name].dims for name in (("dx", "dx") if gradient else ("x", "y")))
        resized, read, sizes = self.resized_dims(x), [*region], [*self.sizes]
        for axis, of in enumerate(region):
            if axis not in resized:
                sizes[axis] = of.stop - of.start
            elif is_all(result[axis], of):
                read[axis] = slice(None)
            else:
                return None
        operation = msgspec.structs.replace(self, sizes=tuple(sizes))
        return Part(operation, dict.fromkeys(self.inputs, tuple(read)), wanted)

    def taps_along(self, x: tuple[int, ...], axis: int, elements: np.ndarray | None = None) -> Taps:
        """The taps of elements of y along a dim. `elements`: their numbers; None for all.

        Along all of them, the first and the last place never decrease, or never increase.
        """
        size, wanted = x[axis], self.sizes[axis]
        rest = (self.rounding, self.cubic_coefficient, self.exclude_outside, self.antialias)
        along = _Along(size, wanted, self._scale(x, axis), self._roi(x, axis))
        given = (self.mode, self.coordinates, *rest)
        if elements is None and wanted <= _MOST_KEPT:
            return _kept_taps(along, given)
        return _taps(along, given, np.arange(wanted) if elements is None else elements)

    def _scale(self, x: tuple[int, ...], axis: int) -> float:
        if self.scales is not None:
            return float(self.scales[axis])
        return self.sizes[axis] / x[axis] if x[axis] else 1.0

    def _roi(self, x: tuple[int, ...], axis: int) -> tuple[float, float]:
        return (0.0, 1.0) if self.roi is None else (self.roi[axis], self.roi[axis + len(x)])

    def _check_parameters(self, x: TensorSpec) -> None:
        for name, kind in (
            ("mode", ResampleMode),
            ("coordinates", Coordinates),
            ("rounding", NearestRounding),
        ):
            require_member(name, getattr(self, name), kind)
        per_dim: tuple[tuple[str, int, Callable[[Any], bool], str], ...] = (
            ("sizes", x.rank, lambda size: is_whole(size) and size >= 0, "whole number ≥ 0"),
            ("scales", x.rank, lambda scale: is_finite(scale) and scale > 0, "number > 0"),
            ("roi", 2 * x.rank, is_finite, "finite number"),
        )
        for name, count, fits, what in per_dim:
            values = getattr(self, name)
            if values is not None and (len(values) != count or not all(map(fits, values))):
                raise InvalidRequest(
                    field=name,
                    value=values,
                    problem=f"must have a {what} for each of the {x.rank} dims of x"
                    + (": where it starts, and then where it ends" if name == "roi" else ""),
                    fix=f"give {count} of them",
                )
        if any(wanted and not size for size, wanted in zip(x.dims, self.sizes, strict=True)):
            raise InvalidRequest(
                field="sizes",
                value=self.sizes,
                problem=f"has elements along a dim of x, of dims {x.dims}, that has none",
                fix="make that size 0, or that dim at least 1",
            )
        for name in ("cubic_coefficient", "extrapolation"):
            if not is_finite(value := getattr(self, name)):
                raise InvalidRequest(field=name, value=value, problem="must be finite", fix="use 0.0")
        if self.antialias and self.mode is ResampleMode.NEAREST:
            raise InvalidRequest(
                field="antialias", value=True, problem="needs values between elements", fix="use LINEAR"
            )
        if self.antialias:
            self._check_neighbours(x.dims)

    def _check_neighbours(self, x: tuple[int, ...]) -> None:
        for axis in self.resized_dims(x):
            scale, wanted = self._scale(x, axis), self.sizes[axis]
            each = 4 / scale if wanted and scale < 1 else 4
            if each > _MOST_TAPS or (each > 4 and each * wanted > _MOST_TAPS_ALONG):
                name, given = ("sizes", self.sizes) if self.scales is None else ("scales", self.scales)
                raise InvalidRequest(
                    field=name,
                    value=given,
                    problem=f"makes elements along dim {axis} of too many of x's {x[axis]:,}",
                    fix="make it smaller in several steps, or without antialias",
                )

    def _like(self, other: type[Any], **operands: Any) -> Any:
        """Another operation with these parameters."""
        names = (n for n in _Resampling.__struct_fields__ if n != "numerics")
        return other(**operands, **{name: getattr(self, name) for name in names})


def apply_taps(xp: Any, x: Array, taps: Mapping[int, Taps], extrapolation: float = 0.0) -> Array:
    """Sums along each of these dims, one after the other."""
    outside = None
    for axis, one in taps.items():
        along = [1] * x.ndim
        along[axis] = -1
        total = None
        for places, weights in zip(one.places.T, one.weights.T, strict=True):
            part = xp.take(x, xp.asarray(places), axis=axis)
            if (weights != 1).any():
                weight = _of_dtype(xp, weights, x).reshape(along)
                part = xp.where(weight == 0, 0.0, part * weight)
            total = part if total is None else total + part
        x = total
        if one.outside.any():
            mask = xp.asarray(one.outside).reshape(along)
            outside = mask if outside is None else outside | mask
    if outside is None:
        return x
    value = extrapolation if x.dtype.kind == "f" else round(extrapolation)
    return xp.where(outside, xp.asarray(value, dtype=x.dtype), x)


def _of_dtype(xp: Any, weights: np.ndarray, x: Array) -> Array:
    """Weights in float32 for values of that, so that these stay what they are."""
    return xp.asarray(weights, dtype=xp.float32 if x.dtype == xp.float32 else xp.float64)


def spread(xp: Any, dy: Array, taps: Mapping[int, Taps], dims: Sequence[int]) -> Array:
    """The reverse of `apply_taps`: for each element of an operand of these dims, its weighted sums."""
    for axis, one in taps.items():
        along = [1] * dy.ndim
        along[axis] = -1
        reached = [*dy.shape]
        reached[axis] = dims[axis]
        total = xp.zeros(reached, dy.dtype)
        for places, weights in zip(one.places.T, one.weights.T, strict=True):
            weight = _of_dtype(xp, np.where(one.outside, 0.0, weights), dy).reshape(along)
            part = xp.where(weight == 0, 0.0, dy * weight)
            xp.add.at(total, (*[slice(None)] * axis, xp.asarray(places)), part)
        dy = total
    return dy


class Resample(_Resampling[T], tag=True):
    """y = x with other sizes. Answered by a `Receipt`.

    Parameters
    ----------
    x
        Input, of any rank; of any dtype for the nearest element, else floating.
    y
        Result, of these sizes and of x's dtype.
    sizes
        Of y: one for each dim.
    scales
        Of each dim: how much larger y is than x, which decides the places; None for the ratio of the sizes.
    mode
        What lies between elements.
    coordinates
        Which place in x an element of y is.
    rounding
        Of the nearest element: which of two.
    cubic_coefficient
        Keys' a.
    exclude_outside
        Whether neighbours outside of x have a weight of 0, and the others more, so that they sum up to 1. If
        not, those outside have the value of the nearest in x. Not for the nearest element.
    antialias
        Whether a smaller result is made of more neighbours, in proportion to the scale.
    roi
        For TF_CROP_AND_RESIZE: where the part of x starts along each dim, and then where it ends, as
        fractions of the distance from the first to the last element. None for all of x.
    extrapolation
        The value at places outside of x, for the same.
    """

    kind = "resample"
    inputs = ("x",)
    outputs = ("y",)
    x: T
    y: T = ALLOCATED

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        x = specs["x"]
        self._check_parameters(x)
        if self.mode is not ResampleMode.NEAREST:
            require_floating(specs, "x")
        return {"y": TensorSpec.packed(self.sizes, x.dtype)}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs
        x = values["x"]
        return {"y": apply_taps(xp, x, self.taps(x.shape), self.extrapolation)}

    def magnitudes(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs
        x = values["x"]
        squares = {axis: taps.square() for axis, taps in self.taps(x.shape).items()}
        return {"y": xp.sqrt(apply_taps(xp, x * x, squares))}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        return {"x": g.apply(self._like(ResampleBackward, dy=d["y"]), like={"dx": self.x})}


class ResampleBackward(_Resampling[T], tag=True):
    """The gradient of `Resample` with respect to x. Answered by a `Receipt`.

    Parameters
    ----------
    dy
        Gradient of y, floating, of the dims `sizes`.
    dx
        Gradient of x, of x's dims and dy's dtype.
    sizes, scales, mode, coordinates, rounding, cubic_coefficient, exclude_outside, antialias, roi
        As in the forward pass.
    extrapolation
        Makes no difference.
    """

    kind = "resample_bwd"
    inputs = ("dy",)
    outputs = ("dx",)
    dy: T
    dx: T = ALLOCATED

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        require_floating(specs, "dy")
        return {}

    def check(self, specs: Specs) -> None:
        require_floating(specs, "dy")
        require(specs, "dx", specs["dx"].dims, specs["dy"].dtype)
        self._check_parameters(specs["dx"])
        require(specs, "dy", self.sizes)

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        dims = specs["dx"].dims
        return {"dx": spread(xp, values["dy"], self.taps(dims), dims)}

    def magnitudes(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        dims = specs["dx"].dims
        squares = {axis: taps.square() for axis, taps in self.taps(dims).items()}
        return {"dx": xp.sqrt(spread(xp, values["dy"] ** 2, squares, dims))}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        forward = self._like(Resample, x=d["dx"])
        return {"dy": g.apply(msgspec.structs.replace(forward, extrapolation=0.0))}


class _Along(NamedTuple):
    """A dim: its sizes in x and in y, its scale, and the part of x."""

    size: int
    wanted: int
    scale: float
    roi: tuple[float, float]


@functools.lru_cache(maxsize=64)
def _kept_taps(along: _Along, given: tuple[Any, ...]) -> Taps:
    return _taps(along, given, np.arange(along.wanted))


def _taps(along: _Along, given: tuple[Any, ...], elements: np.ndarray) -> Taps:
    """The taps of some elements along a dim, by the formulas of ONNX's reference."""
    mode, coordinates, rounding, cubic, exclude_outside, antialias = given
    size, scale = along.size, along.scale
    numbers = elements.astype(np.float64)
    places = _coordinates(coordinates, along, numbers)
    outside = np.zeros(numbers.shape, bool)
    if coordinates is Coordinates.TF_CROP_AND_RESIZE:
        outside = (places < 0) | (places > size - 1)
    floor = np.floor(places)
    ratio = np.where(places == floor, 1.0, places - floor)  # in (0, 1]: a whole place is the second neighbour
    if mode is ResampleMode.NEAREST:
        second = {
            NearestRounding.ROUND_PREFER_FLOOR: ratio > 0.5,
            NearestRounding.ROUND_PREFER_CEIL: ratio >= 0.5,
            NearestRounding.FLOOR: ratio == 1,
            NearestRounding.CEIL: ratio > 0,
        }[rounding]
        nearest = np.ceil(places) - 1 + second
        found = np.clip(nearest.astype(np.int64), 0, size - 1)[:, None]
        return Taps(found, np.ones(found.shape), outside)
    weights = _weights(mode, ratio, min(scale, 1.0) if antialias else None, cubic)
    first = np.ceil(places).astype(np.int64) - weights.shape[1] // 2
    neighbours = first[:, None] + np.arange(weights.shape[1])
    if exclude_outside:
        weights = np.where((neighbours < 0) | (neighbours >= size), 0.0, weights)
        total = weights.sum(axis=1, keepdims=True)
        weights = weights / np.where(total == 0, 1.0, total)
    return Taps(np.clip(neighbours, 0, size - 1), weights, outside)


def _coordinates(coordinates: Coordinates, along: _Along, numbers: np.ndarray) -> np.ndarray:
    """The place in x of each of these elements of y."""
    size, wanted, scale, roi = along
    length = scale * size
    match coordinates:
        case Coordinates.ALIGN_CORNERS:
            return numbers * 0 if length == 1 else numbers * (size - 1) / (length - 1)
        case Coordinates.ASYMMETRIC:
            return numbers / scale
        case Coordinates.TF_HALF_PIXEL_FOR_NN:
            return (numbers + 0.5) / scale
        case Coordinates.TF_CROP_AND_RESIZE:
            start, end = roi
            if length == 1:
                found = numbers * 0 + (end - start) * (size - 1) / 2
            else:
                found = numbers * (end - start) * (size - 1) / (length - 1)
            return found + start * (size - 1)
        case Coordinates.PYTORCH_HALF_PIXEL if length == 1:
            return numbers * 0 - 0.5
    found = (numbers + 0.5) / scale - 0.5
    if coordinates is Coordinates.HALF_PIXEL_SYMMETRIC:
        found = size / 2 * (1 - wanted / length) + (numbers + 0.5) / scale - 0.5
    return found


def _weights(mode: ResampleMode, ratio: np.ndarray, scale: float | None, cubic: float) -> np.ndarray:
    """The weights of each place's neighbours, as many before as behind. `scale`: None for no antialiasing."""
    ratio = ratio[:, None]
    reach = 1 if mode is ResampleMode.LINEAR else 2
    before = reach - 1 if scale is None else -(math.floor(-reach / scale) + 1)
    apart = np.abs(np.arange(-before, before + 2) - ratio) * (1.0 if scale is None else scale)
    if mode is ResampleMode.LINEAR:
        weights = np.clip(1 - apart, 0, 1)
    else:
        inner = ((cubic + 2) * apart - (cubic + 3)) * apart * apart + 1
        outer = ((cubic * apart - 5 * cubic) * apart + 8 * cubic) * apart - 4 * cubic
        weights = np.where(apart <= 1, inner, np.where(apart < 2, outer, 0.0))
    found: np.ndarray = weights if scale is None else weights / weights.sum(axis=1, keepdims=True)
    return found


def examples() -> tuple[Example, ...]:
    """Examples of resampling to larger and smaller sizes."""
    sizes = (2, 3, 9, 5)
    operations = (
        Resample(x="x", y="y", sizes=sizes, mode=ResampleMode.LINEAR),
        Resample(x="x", y="nearest", sizes=sizes),
        ResampleBackward(dy="dy", dx="dx", sizes=sizes, mode=ResampleMode.LINEAR),
    )
    return (Example(dims={"x": (2, 3, 6, 7)}, operations=operations, tolerance=ROUNDED),)
