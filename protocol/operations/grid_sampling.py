"""Images read at places that a tensor holds.

The definition is ONNX's, of `GridSample` since version 20, and that of its reference implementation.
https://onnx.ai/onnx/operators/onnx__GridSample.html
At borders, cubic interpolation is as in PyTorch and ONNX Runtime: each of the four elements is the nearest
of the image. The reference implementation moves the place to the image first.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.operations.base import (
    ALLOCATED,
    Array,
    Operation,
    Region,
    Specs,
    T,
    require_elements,
    require_floating,
)
from cudnn_actor.protocol.operations.example import ROUNDED, Example
from cudnn_actor.protocol.operations.indexing import ScatterReduction
from cudnn_actor.protocol.operations.resampling import ResampleMode
from cudnn_actor.protocol.types.checks import require_member
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import Layout, TensorSpec

__all__ = ["GridPadding", "GridSample"]

CUBIC = -0.75
"""The coefficient of the cubic convolution."""
FARTHEST = 2.0**30
"""Places farther from the image count as being there."""


class GridPadding(enum.StrEnum):
    """The values outside of an image."""

    ZEROS = "zeros"
    BORDER = "border"
    """The nearest element of the image."""
    REFLECTION = "reflection"
    """The image, again and again, reflected at its borders."""


class _OfGraph:
    """A `GraphBuilder` with NumPy's names, for what is computed of a grid."""

    int64 = DType.INT64

    def __init__(self, g: Any) -> None:
        self._g = g
        self.rint = g.round

    def __getattr__(self, name: str) -> Any:
        return getattr(self._g, name)

    def ones_like(self, x: Any) -> Any:
        """Ones of x's dims and dtype."""
        return self._g.full(x.dims, 1.0, x.dtype)


class GridSample(Operation[T], tag=True):
    """y = x at the places that a grid holds. Answered by a `Receipt`.

    Places are computed in float32, or in float64 if x is of that, by the same formula on every engine.

    Parameters
    ----------
    x
        Input, floating, dims (N, C, spatial), with 1 to 3 spatial dims.
    grid
        For each place of y the one in x, floating: dims (N, spatial of y, number of spatial dims). Along the
        last spatial dim of x first. -1 is the beginning of x and 1 its end. NaN is far before it.
    y
        Result, of x's dtype, dims (N, C, spatial of y).
    mode
        What lies between elements: see `ResampleMode`. Of two nearest elements, that with the even place.
    padding
        What lies outside of x.
    align_corners
        Whether -1 and 1 are the middles of the first and the last element, and not their outer borders.
    """

    kind = "grid_sample"
    inputs = ("x", "grid")
    outputs = ("y",)
    x: T
    grid: T
    y: T = ALLOCATED
    mode: ResampleMode = ResampleMode.LINEAR
    padding: GridPadding = GridPadding.ZEROS
    align_corners: bool = False

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        x, grid = specs["x"], specs["grid"]
        require_floating(specs, "x")
        require_floating(specs, "grid")
        require_member("mode", self.mode, ResampleMode)
        require_member("padding", self.padding, GridPadding)
        spatial = x.rank - 2
        if not 1 <= spatial <= 3:
            raise InvalidRequest(
                field="x",
                value=x.dims,
                problem="has no 1 to 3 spatial dims",
                fix="give it dims N, C, spatial",
            )
        if grid.rank != x.rank or grid.dims[0] != x.dims[0] or grid.dims[-1] != spatial:
            raise InvalidRequest(
                field="grid",
                value=grid.dims,
                problem=f"does not fit x, of dims {x.dims}",
                fix=f"give it dims {x.dims[0]}, {spatial} spatial ones, and {spatial}",
            )
        require_elements(specs, "x", range(2, x.rank), "elements to read")
        layout = Layout.NHWC if x.layout is Layout.NHWC else Layout.NCHW
        return {"y": TensorSpec.packed((*x.dims[:2], *grid.dims[1:-1]), x.dtype, layout)}

    def samples(self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Array]) -> dict[str, Array]:
        """Places all over the image and around it, in sixteenths, which all types hold."""
        grid = specs["grid"]
        numbers = xp.arange(math.prod(grid.dims), dtype=xp.float64).reshape(grid.dims)
        return {"grid": (numbers * 7 % 43 - 21) / 16 + draw(grid) * 0}

    @property
    def reach(self) -> tuple[int, int]:
        """The first neighbour along a dim, from the one before a place, and how many there are."""
        return {ResampleMode.NEAREST: (0, 1), ResampleMode.LINEAR: (0, 2)}.get(self.mode, (-1, 4))

    def limits(self, size: int) -> tuple[float, float]:
        """The borders of an image along a dim of this size."""
        return (0.0, size - 1.0) if self.align_corners else (-0.5, size - 0.5)

    def work(self, specs: Specs) -> int:
        return specs["x"].size + int(8 * self.reach[1] ** (specs["x"].rank - 2)) * specs["y"].size

    def needs(self, specs: Specs, wanted: Mapping[str, Region]) -> dict[str, Region]:
        images, channels, *places = wanted["y"]
        every = slice(None)
        return {
            "x": (images, channels, *[every] * (specs["x"].rank - 2)),
            "grid": (images, *places, every),
        }

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        x = values["x"]
        grid = values["grid"].astype(xp.float64 if specs["y"].dtype is DType.FLOAT64 else xp.float32)
        spatial = x.ndim - 2
        taps = [
            [*self._taps(xp, grid[..., spatial - 1 - axis], x.shape[2 + axis], x.dtype)]
            for axis in range(spatial)
        ]
        sample = xp.arange(x.shape[0]).reshape(-1, *[1] * spatial)
        images, total = xp.moveaxis(x, 1, -1), None
        for chosen in itertools.product(*taps):
            found = images[(sample, *(place for place, _ in chosen))]
            for _, weight in chosen:
                found = xp.where(weight[..., None] == 0, 0.0, found * weight[..., None])
            total = found if total is None else total + found
        return {"y": xp.moveaxis(total, -1, 1)}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        """x's is added up where x was read. The grid's is that of the weights: 0 of the nearest element."""
        x: Any = self.x
        given: Any = self.grid
        (images, channels, *sizes), spatial = x.dims, x.rank - 2
        wide = self.compute((x.dtype,))
        grid = g.astype(given, wide)
        count = math.prod(given.dims[1:-1])
        dy = g.moveaxis(d["y"].astype(wide).reshape(images, channels, count), 1, 2)[:, :, None]
        along = [
            [*zip(*self._taps(_OfGraph(g), grid[..., spatial - 1 - axis], size, wide), strict=True)]
            for axis, size in enumerate(sizes)
        ]
        # From here on, dims are (images, places of y, taps along each dim, channels).
        taps = [len(of) for _, of in along]
        weights = [g.stack(of, -1).reshape(images, count, len(of)) for _, of in along]

        def beside(values: Any, axis: int) -> Any:
            """The values of each tap along a dim, with dims of 1 for the other dims' taps."""
            return values.reshape(images, count, *(taps[n] if n == axis else 1 for n in range(spatial)))

        # x as a table with a row for each element of each image: which rows are read.
        rows = g.arange(0, images).reshape(images, *[1] * (1 + spatial))
        for axis, (places, _) in enumerate(along):
            rows = rows * sizes[axis] + beside(g.stack(places, -1), axis)
        rows = rows.reshape(images * count, math.prod(taps))
        spread = [beside(weight, axis) for axis, weight in enumerate(weights)]
        parts = dy * math.prod(spread[1:], start=spread[0]).reshape(images, count, math.prod(taps), 1)
        total = g.full((images * math.prod(sizes), channels), 0.0, wide)
        dx = g.put(total, rows, parts.reshape(*rows.dims, channels), reduction=ScatterReduction.ADD)
        table = g.moveaxis(x, 1, -1).reshape(images * math.prod(sizes), channels)
        read = g.take(table, rows, 0).reshape(*parts.dims)
        of_weights = g.sum(read * dy, -1).reshape(images, count, *taps)
        upstream = []
        for axis in range(spatial):
            others = [each for n, each in enumerate(spread) if n != axis]
            axes = tuple(2 + n for n in range(spatial) if n != axis)
            upstream.append(g.sum(math.prod(others, start=of_weights), axes) if axes else of_weights)
        return {
            "x": g.moveaxis(dx.reshape(images, *sizes, channels), -1, 1),
            "grid": g.grad(weights, grid, upstream),
        }

    def _taps(self, xp: Any, grid: Array, size: int, dtype: Any) -> Iterator[tuple[Array, Array]]:
        """The places along one dim that each element is made of, and their weights, of this dtype."""
        place = self._places(xp, grid, size)
        before = xp.floor(place)
        ratio = (place - before).astype(dtype)
        first, count = self.reach
        for number, weight in zip(range(first, first + count), self._weights(xp, ratio), strict=True):
            at = before + number
            inside = (at >= 0) & (at < size)
            if self.padding is GridPadding.REFLECTION:
                at = self._reflect(xp, at, size)
            at = xp.clip(at, 0, size - 1).astype(xp.int64)
            yield at, xp.where(inside, weight, 0.0) if self.padding is GridPadding.ZEROS else weight

    def _places(self, xp: Any, grid: Array, size: int) -> Array:
        """The places of a grid's numbers along a dim; whole numbers for the nearest."""
        corners = self.align_corners
        place = (grid + 1) / 2 * (size - 1) if corners else ((grid + 1) * size - 1) / 2
        place = xp.where(place >= -FARTHEST, xp.minimum(place, FARTHEST), -FARTHEST).astype(grid.dtype)
        if self.mode is ResampleMode.NEAREST:
            place = xp.rint(place)
        return self._reflect(xp, place, size) if self.padding is GridPadding.REFLECTION else place

    def _reflect(self, xp: Any, place: Array, size: int) -> Array:
        """Places within the borders."""
        low, high = self.limits(size)
        width = high - low
        if not width:
            return place * 0
        beyond = xp.where(place < low, low - place, place - high)
        times = xp.trunc(beyond / width)
        rest = beyond - times * width
        from_low = (place < low) == (times % 2 == 0)
        found = xp.where(from_low, low + rest, high - rest)
        return xp.where((place < low) | (place > high), found, place).astype(place.dtype)

    def _weights(self, xp: Any, ratio: Array) -> list[Array]:
        if self.mode is ResampleMode.NEAREST:
            return [xp.ones_like(ratio)]
        if self.mode is ResampleMode.LINEAR:
            return [1 - ratio, ratio]

        def near(apart: Array) -> Array:
            return ((CUBIC + 2) * apart - (CUBIC + 3)) * apart * apart + 1

        def far(apart: Array) -> Array:
            return ((CUBIC * apart - 5 * CUBIC) * apart + 8 * CUBIC) * apart - 4 * CUBIC

        return [far(ratio + 1), near(ratio), near(1 - ratio), far(2 - ratio)]


def examples() -> tuple[Example, ...]:
    """An image, read between its elements."""
    operations = (GridSample(x="x", grid="grid", y="y"),)
    dims = {"x": (2, 3, 6, 7), "grid": (2, 5, 4, 2)}
    return (Example(dims=dims, operations=operations, tolerance=ROUNDED),)
