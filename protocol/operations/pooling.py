"""Max and average pooling over 1 to 3 spatial dims, and their gradients.

The definitions are ONNX's, of `MaxPool` and `AveragePool` without `ceil_mode`.
https://onnx.ai/onnx/operators/onnx__MaxPool.html
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.operations.base import (
    ALLOCATED,
    Array,
    Operation,
    Specs,
    T,
    require,
    require_floating,
)
from cudnn_actor.protocol.spatial import check_spatial, check_spatial_dims, spread
from cudnn_actor.protocol.tensor import Layout, TensorSpec

__all__ = ["AvgPool", "AvgPoolBackward", "MaxPool", "MaxPoolBackward", "Window"]


_MOST_PADDING = 1 << 16
"""The most padding before or after a spatial dim. It costs work, and no tensor has to be as large."""


class Window(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True, gc=False
):
    """The windows of a pooling, with one value per spatial dim (1 to 3 of them).

    Parameters
    ----------
    size
        Elements that a window has, at least 1.
    pre_padding, post_padding
        Elements before and after the tensor that windows may reach, at least 0.
    stride, dilation
        Elements from one window to the next, and from one element of a window to the next, at least 1.

    Raises
    ------
    InvalidRequest
        A value is out of its range, or the fields' lengths differ.
    """

    size: tuple[int, ...]
    pre_padding: tuple[int, ...]
    post_padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]

    def __post_init__(self) -> None:
        check_spatial("size", self.size, 1)
        rank = len(self.size)
        for name, least in (("pre_padding", 0), ("post_padding", 0), ("stride", 1), ("dilation", 1)):
            check_spatial(name, getattr(self, name), least, rank)

    @classmethod
    def symmetric(
        cls,
        spatial_dims: int,
        size: int | Sequence[int],
        pad: int | Sequence[int] = 0,
        stride: int | Sequence[int] | None = None,
        dilation: int | Sequence[int] = 1,
    ) -> Window:
        """Windows with equal padding before and after. `stride`: None for that of windows side by side.

        A single number applies to every spatial dim.
        """
        check_spatial_dims(spatial_dims)
        padding = spread("pad", pad, spatial_dims)
        return cls(
            size=spread("size", size, spatial_dims),
            pre_padding=padding,
            post_padding=padding,
            stride=spread("stride", size if stride is None else stride, spatial_dims),
            dilation=spread("dilation", dilation, spatial_dims),
        )

    @property
    def spatial_dims(self) -> int:
        """The number of spatial dims: 1, 2 or 3."""
        return len(self.size)

    def output_dims(self, x: Sequence[int]) -> tuple[int, ...]:
        """Dims of the result for an input of dims `x` (N, C, spatial).

        Per spatial dim: 1 + (pre + in + post - (dilation * (size - 1) + 1)) // stride. Raises
        `InvalidRequest` if ranks do not match, or a window has no element of the input.
        """
        if len(x) != self.spatial_dims + 2:
            raise InvalidRequest(
                field="x",
                value=tuple(x),
                problem=f"has rank {len(x)}, but windows of {self.spatial_dims} spatial dims need "
                f"{self.spatial_dims + 2}",
                fix="dims are N, C, spatial; give the window as many spatial dims",
            )
        return (*x[:2], *(self._count(axis, size) for axis, size in enumerate(x[2:])))

    def _count(self, axis: int, size: int) -> int:
        extent = self.dilation[axis] * (self.size[axis] - 1) + 1
        padded = self.pre_padding[axis] + size + self.post_padding[axis]
        if extent > padded:
            raise InvalidRequest(
                field="window",
                value=Words(f"size {self.size[axis]}"),
                problem=f"extends over {extent} elements in spatial dim {axis}, "
                f"but the padded input has {padded}",
                fix="pad more, dilate less, or use smaller windows",
            )
        count = 1 + (padded - extent) // self.stride[axis]
        padding = max(self.pre_padding[axis], self.post_padding[axis])
        if padding > _MOST_PADDING:
            raise InvalidRequest(
                field="window",
                value=padding,
                problem=f"is the padding of spatial dim {axis}, and at most {_MOST_PADDING:,} is possible",
                fix="use less padding",
            )
        early = -(-self.pre_padding[axis] // self.stride[axis])  # the windows that start before the input
        for place in {*range(min(early, count)), count - 1}:
            start = place * self.stride[axis] - self.pre_padding[axis]
            first = -(min(start, 0) // self.dilation[axis])  # the first element that is not before the input
            if first >= self.size[axis] or start + first * self.dilation[axis] >= size:
                raise InvalidRequest(
                    field="window",
                    value=Words(f"padding {padding}"),
                    problem=f"window {place} in spatial dim {axis} covers only padding",
                    fix="use less padding",
                )
        return count

    def taps(self, places: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Each element of a window, and where it lies in the padded input for all windows."""
        for tap in itertools.product(*map(range, self.size)):
            slices = (
                slice(t * d, t * d + (count - 1) * step + 1, step)
                for t, d, count, step in zip(tap, self.dilation, places, self.stride, strict=True)
            )
            yield tap, (slice(None), slice(None), *slices)

    def along(self, axis: int, count: int) -> Iterator[tuple[slice, ...]]:
        """For each place in a window along one spatial dim: where it lies in an input padded along it."""
        for tap in range(self.size[axis]):
            start = tap * self.dilation[axis]
            places = slice(start, start + (count - 1) * self.stride[axis] + 1, self.stride[axis])
            yield (*[slice(None)] * (2 + axis), places)

    def padded_along(self, xp: Any, axis: int, x: Array, value: float) -> Array:
        """The input, padded with a value along one spatial dim."""
        widths = [(0, 0)] * x.ndim
        widths[2 + axis] = (self.pre_padding[axis], self.post_padding[axis])
        return xp.pad(x, widths, constant_values=value)

    def padded(self, xp: Any, x: Array, value: float) -> Array:
        """The input, padded with a value."""
        widths = zip(self.pre_padding, self.post_padding, strict=True)
        return xp.pad(x, ((0, 0), (0, 0), *widths), constant_values=value)

    def inside(self, dims: Sequence[int]) -> tuple[slice, ...]:
        """Where the input lies in the padded input."""
        parts = (slice(pre, pre + size) for pre, size in zip(self.pre_padding, dims[2:], strict=True))
        return (slice(None), slice(None), *parts)


class _Pooling(Operation[T], frozen=True, kw_only=True):
    window: Window

    def _pooled(self, x: TensorSpec, dtype: DType | None = None) -> TensorSpec:
        layout = Layout.NHWC if x.layout is Layout.NHWC else Layout.NCHW
        return TensorSpec.packed(self.window.output_dims(x.dims), dtype or x.dtype, layout)

    def _check_gradient(self, specs: Specs) -> None:
        """Check that dx has dy's dtype, and that dy is the gradient of what the windows of dx give."""
        require(specs, "dx", specs["dx"].dims, specs["dy"].dtype)
        require(specs, "dy", self.window.output_dims(specs["dx"].dims), gradient="dx")


class MaxPool(_Pooling[T], frozen=True, kw_only=True, tag=True):
    """y = the largest element of each window. Answered by a `Receipt`.

    Parameters
    ----------
    x
        Input, dims (N, C, spatial), of any dtype.
    y
        Result, dims `window.output_dims(x)`, of x's dtype. NaN is larger than any number.
    index
        Where each result was found, or None: int64, of y's dims. The position in x in row-major order,
        counted over the whole tensor, whatever its layout. Of equal elements, the first of the window.
    window
        Size, padding, stride and dilation. Padding is never the largest.
    """

    kind = "max_pool"
    inputs = ("x",)
    outputs = ("y", "index")
    optional = frozenset({"index"})
    x: T
    y: T = ALLOCATED
    index: T | None = None

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        return {"y": self._pooled(specs["x"]), "index": self._pooled(specs["x"], DType.INT64)}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        best, window = values["x"], self.window
        index = xp.arange(math.prod(best.shape), dtype=xp.int64).reshape(best.shape)
        # One dim after the other, the last first: the first of equals along each dim is then the first in
        # row-major order.
        for axis in reversed(range(window.spatial_dims)):
            numbers, padded = (window.padded_along(xp, axis, a, v) for a, v in ((index, -1), (best, 0)))
            best = index = None
            for seen in window.along(axis, specs["y"].dims[2 + axis]):
                value, place = padded[seen], numbers[seen]
                if best is None:
                    best, index = value, place
                    continue
                better = (index < 0) | (value > best) | (xp.isnan(value) & ~xp.isnan(best))
                better &= place >= 0
                best, index = xp.where(better, value, best), xp.where(better, place, index)
        return {"y": best, "index": index}


class MaxPoolBackward(_Pooling[T], frozen=True, kw_only=True, tag=True):
    """dx = for each element of x, the sum of dy over the windows whose largest element it was.

    Parameters
    ----------
    dy
        Gradient of the result, dims `window.output_dims(dx)`.
    index
        As `MaxPool` wrote it. An index that is not in its window is ignored.
    dx
        Gradient of the input, dims (N, C, spatial), of dy's dtype.
    window
        As in `MaxPool`.
    """

    kind = "max_pool_bwd"
    inputs = ("dy", "index")
    outputs = ("dx",)
    dy: T
    index: T
    dx: T = ALLOCATED

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        del specs
        return {}

    def check(self, specs: Specs) -> None:
        self._check_gradient(specs)
        require(specs, "index", specs["dy"].dims, DType.INT64)

    def samples(self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Array]) -> dict[str, Array]:
        pool = MaxPool(x=0, y=1, index=2, window=self.window)  # indices that a forward pass gives
        found = pool.evaluate(xp, {"x": draw(specs["dx"])}, {"y": specs["dy"], "index": specs["index"]})
        return {"index": found["index"]}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        dy, index, dims = values["dy"], values["index"], specs["dx"].dims
        number = xp.arange(math.prod(dims), dtype=xp.int64).reshape(dims)
        numbers = self.window.padded(xp, number, -1)
        total = xp.zeros(numbers.shape, dy.dtype)
        for _, seen in self.window.taps(dy.shape[2:]):
            total[seen] += xp.where(numbers[seen] == index, dy, 0)
        return {"dx": total[self.window.inside(dims)]}


class AvgPool(_Pooling[T], frozen=True, kw_only=True, tag=True):
    """y = the mean of each window. Answered by a `Receipt`.

    Parameters
    ----------
    x
        Input, dims (N, C, spatial), of a floating-point dtype.
    y
        Result, dims `window.output_dims(x)`, of x's dtype.
    window
        Size, padding, stride and dilation.
    include_padding
        Whether padding counts as zeros. If not, the mean is that of the elements in the input.
    """

    kind = "avg_pool"
    inputs = ("x",)
    outputs = ("y",)
    x: T
    y: T = ALLOCATED
    include_padding: bool = False

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        require_floating(specs, "x")
        return {"y": self._pooled(specs["x"])}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        x, places = values["x"], specs["y"].dims[2:]
        counts = _counts(xp, self.window, x.shape, places, include_padding=self.include_padding)
        return {"y": _sums(xp, self.window, x, places) / counts}


class AvgPoolBackward(_Pooling[T], frozen=True, kw_only=True, tag=True):
    """dx = for each element of x, the sum of dy over the windows that it is in, divided by their counts.

    Parameters
    ----------
    dy
        Gradient of the result, dims `window.output_dims(dx)`, of a floating-point dtype.
    dx
        Gradient of the input, dims (N, C, spatial), of dy's dtype.
    window, include_padding
        As in `AvgPool`.
    """

    kind = "avg_pool_bwd"
    inputs = ("dy",)
    outputs = ("dx",)
    dy: T
    dx: T = ALLOCATED
    include_padding: bool = False

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        require_floating(specs, "dy")
        return {}

    def check(self, specs: Specs) -> None:
        require_floating(specs, "dy")
        self._check_gradient(specs)

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        dy, dims = values["dy"], specs["dx"].dims
        share = dy / _counts(xp, self.window, dims, dy.shape[2:], include_padding=self.include_padding)
        for axis, size in enumerate(dims[2:]):
            count, reached = dy.shape[2 + axis], [*share.shape]
            reached[2 + axis] = self.window.pre_padding[axis] + size + self.window.post_padding[axis]
            total = xp.zeros(reached, share.dtype)
            for seen in self.window.along(axis, count):
                total[seen] += share
            first = self.window.pre_padding[axis]
            share = total[(*[slice(None)] * (2 + axis), slice(first, first + size))]
        return {"dx": share}


def _counts(
    xp: Any, window: Window, x: Sequence[int], places: Sequence[int], *, include_padding: bool
) -> Array:
    """How many elements each window has, with dims that broadcast to the result's."""
    if include_padding:
        return xp.asarray(float(math.prod(window.size)))
    return _sums(xp, window, xp.ones((1, 1, *x[2:])), places)


def _sums(xp: Any, window: Window, x: Array, places: Sequence[int]) -> Array:
    """The sum of each window, one dim after the other."""
    for axis, count in enumerate(places):
        padded = window.padded_along(xp, axis, x, 0)
        x = sum(padded[seen] for seen in window.along(axis, count))
    return x
