"""Max, average and Lp pooling over 1 to 3 spatial dims, and their gradients.

The definitions are ONNX's, of `MaxPool`, `AveragePool` and `LpPool` without
`ceil_mode`; adaptive windows are PyTorch's.
https://onnx.ai/onnx/operators/onnx__MaxPool.html
https://docs.pytorch.org/docs/stable/generated/torch.nn.AdaptiveAvgPool2d.html
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from cudnn_actor.protocol.operations.base import (
    ALLOCATED,
    Array,
    Operation,
    Specs,
    T,
    require,
    require_floating,
)
from cudnn_actor.protocol.operations.example import ROUNDED, Example
from cudnn_actor.protocol.types.checks import is_finite
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.errors import InvalidRequest
from cudnn_actor.protocol.types.records import Parameters
from cudnn_actor.protocol.types.spatial import check_spatial, check_spatial_dims, spread
from cudnn_actor.protocol.types.tensor import Layout, LayoutName, TensorSpec

__all__ = ["AdaptiveWindow", "AvgPool", "AvgPoolBackward", "LpPool", "LpPoolBackward"]
__all__ += ["MaxPool", "MaxPoolBackward", "Window"]

_MOST_PADDING = 1 << 16
"""The most padding before or after a spatial dim. It costs work, and no tensor has to be as large."""


class Window(Parameters, tag=True):
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

    example: ClassVar[str] = "Window.symmetric(2, size=2)"
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
        check_spatial("pad", padding, 0)
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
        _check_rank(x, self.spatial_dims)
        return (*x[:2], *(self._count(axis, size) for axis, size in enumerate(x[2:])))

    def _count(self, axis: int, size: int) -> int:
        extent = self.dilation[axis] * (self.size[axis] - 1) + 1
        padded = self.pre_padding[axis] + size + self.post_padding[axis]
        if extent > padded:
            raise InvalidRequest(
                field="window.size",
                value=self.size,
                problem=f"extends over {extent} elements in spatial dim {axis}, "
                f"but the padded input has {padded}",
                fix="pad more, dilate less, or use smaller windows",
            )
        count = 1 + (padded - extent) // self.stride[axis]
        for name in ("pre_padding", "post_padding"):
            if getattr(self, name)[axis] > _MOST_PADDING:
                raise InvalidRequest(
                    field=f"window.{name}",
                    value=getattr(self, name),
                    problem=f"has more than {_MOST_PADDING:,} elements in spatial dim {axis}",
                    fix="use less padding",
                )
        early = -(-self.pre_padding[axis] // self.stride[axis])  # the windows that start before the input
        for place in {*range(min(early, count)), count - 1}:
            start = place * self.stride[axis] - self.pre_padding[axis]
            first = -(min(start, 0) // self.dilation[axis])  # the first element that is not before the input
            if first >= self.size[axis] or start + first * self.dilation[axis] >= size:
                raise InvalidRequest(
                    field="window.pre_padding" if start < 0 else "window.post_padding",
                    value=self.pre_padding if start < 0 else self.post_padding,
                    problem=f"is so large that window {place} in spatial dim {axis} covers only padding",
                    fix="use less padding",
                )
        return count

    def seen(self, xp: Any, axis: int, x: Array, value: float, count: int) -> Iterator[Array]:
        """For each place in a window along one spatial dim: the elements there of all `count` windows.

        Padding has that value.
        """
        widths = [(0, 0)] * x.ndim
        widths[2 + axis] = (self.pre_padding[axis], self.post_padding[axis])
        padded = xp.pad(x, widths, constant_values=value)
        return (padded[places] for places in self._along(axis, count))

    def spread(self, xp: Any, y: Array, dims: Sequence[int]) -> Array:
        """For each element of an input of these dims, the sum of y over the windows that it is in."""
        for axis, size in enumerate(dims[2:]):
            count, reached, first = y.shape[2 + axis], [*y.shape], self.pre_padding[axis]
            reached[2 + axis] = first + size + self.post_padding[axis]
            total = xp.zeros(reached, y.dtype)
            for places in self._along(axis, count):
                total[places] += y
            y = total[(*[slice(None)] * (2 + axis), slice(first, first + size))]
        return y

    def collect(self, xp: Any, term: Callable[..., Array], of_x: _Arrays, of_y: _Arrays) -> Array:
        """For each element of the input, the sum of `term` over the windows that it is in.

        `term` takes values of the element, from `of_x`, and of the window, from `of_y`.
        """
        dims, places = of_x[0].shape, of_y[0].shape[2:]
        widths = ((0, 0), (0, 0), *zip(self.pre_padding, self.post_padding, strict=True))
        padded = [xp.pad(x, widths) for x in of_x]
        total = xp.zeros(padded[0].shape, of_y[0].dtype)
        for seen in self._taps(places):
            total[seen] += term(*(x[seen] for x in padded), *of_y)
        # What has been added to the padding is left out.
        parts = (slice(pre, pre + size) for pre, size in zip(self.pre_padding, dims[2:], strict=True))
        return total[(slice(None), slice(None), *parts)]

    def _taps(self, places: Sequence[int]) -> Iterator[tuple[slice, ...]]:
        """For each element of a window: where it lies in the padded input for all windows."""
        for tap in itertools.product(*map(range, self.size)):
            slices = (
                slice(t * d, t * d + (count - 1) * step + 1, step)
                for t, d, count, step in zip(tap, self.dilation, places, self.stride, strict=True)
            )
            yield (slice(None), slice(None), *slices)

    def _along(self, axis: int, count: int) -> Iterator[tuple[slice, ...]]:
        """For each place in a window along one spatial dim: where it lies in an input padded along it."""
        for tap in range(self.size[axis]):
            start = tap * self.dilation[axis]
            places = slice(start, start + (count - 1) * self.stride[axis] + 1, self.stride[axis])
            yield (*[slice(None)] * (2 + axis), places)


class AdaptiveWindow(Parameters, tag=True):
    """The windows of a pooling that has a result of given dims: they cover the input, without padding.

    Of `out` windows over `in` elements, number i has those from floor(i * in / out) to before
    ceil((i + 1) * in / out). So they may differ in size by 1, or overlap by 1; where there are more windows
    than elements, several have the same element.

    Parameters
    ----------
    output
        How many windows there are, one value per spatial dim (1 to 3 of them), at least 1.

    Raises
    ------
    InvalidRequest
        A value is out of its range.
    """

    example: ClassVar[str] = "AdaptiveWindow(output=(1, 1))"
    output: tuple[int, ...]

    def __post_init__(self) -> None:
        check_spatial("output", self.output, 1)

    @property
    def spatial_dims(self) -> int:
        """The number of spatial dims: 1, 2 or 3."""
        return len(self.output)

    def output_dims(self, x: Sequence[int]) -> tuple[int, ...]:
        """Dims of the result for an input of dims `x` (N, C, spatial). Raises `InvalidRequest`."""
        _check_rank(x, self.spatial_dims)
        if 0 in x[2:]:
            raise InvalidRequest(
                field="x",
                value=tuple(x),
                problem="has no elements that windows could cover",
                fix="make its spatial dims at least 1; the batch may be empty",
            )
        return (*x[:2], *self.output)

    def seen(self, xp: Any, axis: int, x: Array, value: float, count: int) -> Iterator[Array]:
        """For each place in a window along one spatial dim: the elements there of all windows.

        Those of shorter windows have that value there.
        """
        rank = x.ndim - 2
        for places, there in _members(count, x.shape[2 + axis]):
            found = xp.take(x, xp.asarray(places), axis=2 + axis)
            yield xp.where(_along_axis(xp, there, axis, rank), found, value)

    def spread(self, xp: Any, y: Array, dims: Sequence[int]) -> Array:
        """For each element of an input of these dims, the sum of y over the windows that it is in.

        The windows that an element is in are those that it would have if it were a window over windows.
        """
        return _sums(xp, AdaptiveWindow(output=tuple(dims[2:])), y, dims[2:])

    def collect(self, xp: Any, term: Callable[..., Array], of_x: _Arrays, of_y: _Arrays) -> Array:
        """For each element of the input, the sum of `term` over the windows that it is in: see `Window`."""
        dims, windows = of_x[0].shape, of_y[0].shape
        total = xp.zeros(dims, of_y[0].dtype)
        each = (_members(*sizes) for sizes in zip(dims[2:], windows[2:], strict=True))
        for members in itertools.product(*each):
            places, there = (
                [_along_axis(xp, of[which], axis, len(members)) for axis, of in enumerate(members)]
                for which in (0, 1)
            )
            at = (slice(None), slice(None), *places)
            total += xp.where(functools.reduce(operator.and_, there), term(*of_x, *(y[at] for y in of_y)), 0)
        return total


_Arrays = Sequence[Array]


def _check_rank(x: Sequence[int], spatial_dims: int) -> None:
    if len(x) != spatial_dims + 2:
        raise InvalidRequest(
            field="x",
            value=tuple(x),
            problem=f"has rank {len(x)}, but windows of {spatial_dims} spatial dims need {spatial_dims + 2}",
            fix="dims are N, C, spatial; give the window as many spatial dims",
        )


def _members(count: int, size: int) -> Iterator[tuple[list[int], list[bool]]]:
    """For each place in a window: the element there of each of `count` adaptive windows, and if there is one.

    `size`: how many elements they cover.
    """
    starts = [number * size // count for number in range(count)]
    ends = [-(-(number + 1) * size // count) for number in range(count)]
    for tap in range(max(end - start for start, end in zip(starts, ends, strict=True))):
        places = [start + tap for start in starts]
        there = [place < end for place, end in zip(places, ends, strict=True)]
        yield [min(place, size - 1) for place in places], there


def _along_axis(xp: Any, values: Sequence[int], axis: int, rank: int) -> Array:
    """Values as an array with dims of 1 beside the given one of the spatial dims."""
    return xp.asarray(values).reshape([-1 if other == axis else 1 for other in range(rank)])


class _Pooling(Operation[T]):
    window: Window | AdaptiveWindow

    def _pooled(self, x: TensorSpec, dtype: DType | None = None) -> TensorSpec:
        layout = Layout.NHWC if x.layout is Layout.NHWC else Layout.NCHW
        return TensorSpec.packed(self.window.output_dims(x.dims), dtype or x.dtype, layout)

    def _check_gradient(self, specs: Specs) -> None:
        """Check that dx has dy's dtype, and that dy is the gradient of what the windows of dx give."""
        require(specs, "dx", specs["dx"].dims, specs["dy"].dtype)
        require(specs, "dy", self.window.output_dims(specs["dx"].dims), gradient="dx")


class MaxPool(_Pooling[T], tag=True):
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
        Size, padding, stride and dilation, padding is never the largest; or the dims of the result.
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
            count = specs["y"].dims[2 + axis]
            seen = (window.seen(xp, axis, a, v, count) for a, v in ((best, 0), (index, -1)))
            best = index = None
            for value, place in zip(*seen, strict=True):
                if best is None:
                    best, index = value, place
                    continue
                better = (index < 0) | (value > best) | (xp.isnan(value) & ~xp.isnan(best))
                better &= place >= 0
                best, index = xp.where(better, value, best), xp.where(better, place, index)
        return {"y": best, "index": index}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        backward = MaxPoolBackward(dy=d["y"], index=g.output(self, "index"), window=self.window)
        return {"x": g.apply(backward, like={"dx": self.x})}


class MaxPoolBackward(_Pooling[T], tag=True):
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
        dims = specs["dx"].dims
        numbers = xp.arange(math.prod(dims), dtype=xp.int64).reshape(dims)

        def found(number: Array, dy: Array, index: Array) -> Array:
            return xp.where(number == index, dy, 0)

        return {"dx": self.window.collect(xp, found, [numbers], [values["dy"], values["index"]])}


class AvgPool(_Pooling[T], tag=True):
    """y = the mean of each window. Answered by a `Receipt`.

    Parameters
    ----------
    x
        Input, dims (N, C, spatial), of a floating-point dtype.
    y
        Result, dims `window.output_dims(x)`, of x's dtype.
    window
        Size, padding, stride and dilation; or the dims of the result.
    include_padding
        Whether padding counts as zeros. If not, the mean is that of the elements in the input. Adaptive
        windows have no padding.
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

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        backward = AvgPoolBackward(dy=d["y"], window=self.window, include_padding=self.include_padding)
        return {"x": g.apply(backward, like={"dx": self.x})}


class AvgPoolBackward(_Pooling[T], tag=True):
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
        counts = _counts(xp, self.window, dims, dy.shape[2:], include_padding=self.include_padding)
        return {"dx": self.window.spread(xp, dy / counts, dims)}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        forward = AvgPool(x=d["dx"], window=self.window, include_padding=self.include_padding)
        return {"dy": g.apply(forward)}


class _LpPooling(_Pooling[T]):
    p: float = 2.0

    def _check_p(self) -> None:
        if not is_finite(self.p) or self.p < 1:
            raise InvalidRequest(
                field="p", value=self.p, problem="must be a finite number ≥ 1", fix="use 2.0"
            )


class LpPool(_LpPooling[T], tag=True):
    """y = (sum of abs(x) ** p) ** (1 / p) over each window. Answered by a `Receipt`.

    No power overflows: they are computed of what the largest magnitude of a window is divided by.

    Parameters
    ----------
    x
        Input, dims (N, C, spatial), of a floating-point dtype. Padding counts as zeros.
    y
        Result, dims `window.output_dims(x)`, of x's dtype.
    window
        Size, padding, stride and dilation; or the dims of the result.
    p
        The exponent, a finite number ≥ 1.
    """

    kind = "lp_pool"
    inputs = ("x",)
    outputs = ("y",)
    x: T
    y: T = ALLOCATED

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        require_floating(specs, "x")
        self._check_p()
        return {"y": self._pooled(specs["x"])}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        window, most = self.window, xp.abs(values["x"])
        total = xp.ones_like(most)
        # One dim after the other: of each window, the largest, and the sum in terms of its power.
        for axis, count in enumerate(specs["y"].dims[2:]):
            before = window.seen(xp, axis, most, 0, count), window.seen(xp, axis, total, 0, count)
            largest = functools.reduce(xp.maximum, window.seen(xp, axis, most, 0, count))
            divisor = xp.where(largest == 0, 1, largest)
            total = sum(
                share * xp.where(one == largest, 1, one / divisor) ** self.p
                for one, share in zip(*before, strict=True)
            )
            most = largest
        return {"y": most * total ** (1 / self.p)}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        backward = LpPoolBackward(dy=d["y"], x=self.x, y=self.y, window=self.window, p=self.p)
        return {"x": g.apply(backward)}


class LpPoolBackward(_LpPooling[T], tag=True):
    """dx = for each element of x, the sum over its windows of dy * sign(x) * (abs(x) / y) ** (p - 1).

    A window whose y is 0 adds nothing.

    Parameters
    ----------
    dy
        Gradient of the result, of y's dims and dtype.
    x, y
        Input and result of the forward pass.
    dx
        Gradient of the input, of x's dims and dtype.
    window, p
        As in `LpPool`.
    """

    kind = "lp_pool_bwd"
    inputs = ("dy", "x", "y")
    outputs = ("dx",)
    dy: T
    x: T
    y: T
    dx: T = ALLOCATED

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        x = specs["x"]
        require_floating(specs, "x")
        self._check_p()
        for name in ("y", "dy"):
            require(specs, name, self.window.output_dims(x.dims), x.dtype)
        layout = Layout.NHWC if x.layout is Layout.NHWC else Layout.NCHW
        return {"dx": TensorSpec.packed(x.dims, x.dtype, layout)}

    def samples(self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Array]) -> dict[str, Array]:
        x = draw(specs["x"])
        forward = LpPool(x=0, y=1, window=self.window, p=self.p)
        return {"x": x, **forward.evaluate(xp, {"x": x}, {"y": specs["y"]})}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs

        def term(x: Array, dy: Array, y: Array) -> Array:
            share = (xp.abs(x) / xp.where(y == 0, 1, y)) ** (self.p - 1)
            return xp.where(y == 0, 0, dy * xp.sign(x) * share)

        return {"dx": self.window.collect(xp, term, [values["x"]], [values["dy"], values["y"]])}


def _counts(
    xp: Any,
    window: Window | AdaptiveWindow,
    x: Sequence[int],
    places: Sequence[int],
    *,
    include_padding: bool,
) -> Array:
    """How many elements each window has, with dims that broadcast to the result's."""
    if include_padding and isinstance(window, Window):
        return xp.asarray(float(math.prod(window.size)))
    return _sums(xp, window, xp.ones((1, 1, *x[2:])), places)


def _sums(xp: Any, window: Window | AdaptiveWindow, x: Array, places: Sequence[int]) -> Array:
    """The sum of each window, one dim after the other."""
    for axis, count in enumerate(places):
        x = sum(window.seen(xp, axis, x, 0, count))
    return x


def _max_pools(x: tuple[int, ...], window: Window, layout: LayoutName = "NCHW") -> Example:
    operations = (
        MaxPool(x="x", y="y", index="index", window=window),
        MaxPoolBackward(dy="dy", index="index", dx="dx", window=window),
    )
    return Example(dims={"x": x}, operations=operations, layout=layout)


def _avg_pools(
    x: tuple[int, ...], window: Window | AdaptiveWindow, *, include_padding: bool = False
) -> Example:
    operations = (
        AvgPool(x="x", y="y", window=window, include_padding=include_padding),
        AvgPoolBackward(dy="dy", dx="dx", window=window, include_padding=include_padding),
    )
    return Example(dims={"x": x}, operations=operations, tolerance=ROUNDED)


def _lp_pools(x: tuple[int, ...], window: Window, p: float) -> Example:
    operations = (
        LpPool(x="x", y="y", window=window, p=p),
        LpPoolBackward(dy="dy", x="x", y="y", dx="dx", window=window, p=p),
    )
    return Example(dims={"x": x}, operations=operations, tolerance=ROUNDED)


def examples() -> tuple[Example, ...]:
    """The third one writes much and computes little."""
    return (
        _max_pools((2, 3, 8, 8), Window.symmetric(2, size=3, pad=1, stride=2)),
        _max_pools((1, 4, 9, 6), Window.symmetric(2, size=2, stride=1), "NHWC"),
        _max_pools((2, 1, 160, 160), Window.symmetric(2, size=1)),
        _avg_pools((2, 3, 8, 8), Window.symmetric(2, size=3, pad=1, stride=2)),
        _avg_pools((1, 2, 12), Window.symmetric(1, size=4, pad=2), include_padding=True),
        _avg_pools((2, 3, 7, 5), AdaptiveWindow(output=(3, 4))),
        _lp_pools((2, 2, 9, 7), Window.symmetric(2, size=3, pad=1, stride=2), 3.0),
    )
