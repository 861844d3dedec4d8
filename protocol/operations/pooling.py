"""Max, average and Lp pooling over 1 to 3 spatial dims, and their gradients.

The definitions are ONNX's, of `MaxPool`, `AveragePool` and `LpPool` without
`ceil_mode`.
https://onnx.ai/onnx/operators/onnx__MaxPool.html
"""

from __future__ import annotations

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
    needed_of_leading,
    require,
    require_floating,
)
from cudnn_actor.protocol.operations.example import ROUNDED, Example
from cudnn_actor.protocol.operations.windows import AdaptiveWindow, Window, sums_in_windows
from cudnn_actor.protocol.types.checks import is_finite
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import Layout, LayoutName, TensorSpec

__all__ = ["AdaptiveWindow", "AvgPool", "AvgPoolBackward", "LpPool", "LpPoolBackward"]
__all__ += ["MaxPool", "MaxPoolBackward", "Window"]


class _Windows(NamedTuple):
    """Some windows, and the parts of x and of y, or of their gradients, that they connect."""

    window: Window | AdaptiveWindow
    x: Region
    y: Region


class _Pooling(Operation[T]):
    window: Window | AdaptiveWindow

    def _pooled_spec(self, x: TensorSpec, dtype: DType | None = None) -> TensorSpec:
        layout = Layout.NHWC if x.layout is Layout.NHWC else Layout.NCHW
        return TensorSpec.packed(self.window.output_dims(x.dims), dtype or x.dtype, layout)

    def needs(self, specs: Specs, wanted: Mapping[str, Region]) -> dict[str, Region] | None:
        if "index" in specs:  # which counts the places of all images
            return None
        return needed_of_leading(specs, wanted, 2, self.inputs)

    def part(self, specs: Specs, wanted: Mapping[str, Region]) -> Part | None:
        """Images and channels by themselves; of spatial dims, what some windows of one size reach over.

        With indices, the first spatial dim alone is cut: then they are those of the part and a number.
        """
        region, *others = wanted.values()
        gradient = "dx" in specs
        cut_dims = specs["dx" if gradient else "y"].dims
        if any(other != region for other in others):
            return None
        if "index" in specs and not all(map(is_all, cut_dims[3:], region[3:])):
            return None
        if all(map(is_all, cut_dims[2:], region[2:])):
            found = self._whole_images(specs, region)
        elif isinstance(self.window, AdaptiveWindow):
            return None
        else:
            found = self._some_windows(self.window, specs, region)
        inputs = {name: found.x if name == "x" else found.y for name, _ in self.named(self.inputs)}
        moved = {}
        if "index" in specs:
            ahead = _ahead(specs["dx" if gradient else "x"].dims, found.x)
            moved["index"] = -ahead if gradient else ahead
        operation = msgspec.structs.replace(self, window=found.window)
        return Part(operation, inputs, {"dx": found.x} if gradient else wanted, moved)

    def _whole_images(self, specs: Specs, region: Region) -> _Windows:
        x, y = (specs[name].dims for name in (("dx", "dy") if "dx" in specs else ("x", "y")))
        of_x, of_y = ((*region[:2], *(slice(0, size) for size in dims[2:])) for dims in (x, y))
        return _Windows(self.window, of_x, of_y)

    def _some_windows(self, window: Window, specs: Specs, region: Region) -> _Windows:
        """The windows from which a part of y is computed; or a part of dx, which is made larger."""
        gradient = "dx" in specs
        x, y = (specs[name].dims for name in (("dx", "dy") if gradient else ("x", "y")))
        places = window.reaching(region[2:], y[2:]) if gradient else region[2:]
        window, reach = window.at(x[2:], places)
        spatial = []
        for size, count, own, of_y, of_x in zip(x[2:], y[2:], region[2:], places, reach, strict=True):
            if is_all(count, of_y):
                spatial.append(slice(0, size))
            else:  # between windows, and behind the last one, elements of dx are in none
                spatial.append(slice(of_x.start, max(of_x.stop, own.stop)) if gradient else of_x)
        return _Windows(window, (*region[:2], *spatial), (*region[:2], *places))

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
        return {"y": self._pooled_spec(specs["x"]), "index": self._pooled_spec(specs["x"], DType.INT64)}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        best, window = values["x"], self.window
        if "index" not in specs:
            return {"y": _largest(xp, window, best, specs["y"].dims[2:])}
        index = xp.arange(math.prod(best.shape), dtype=xp.int64).reshape(best.shape)
        # One dim after the other, the last first: the first of equals along each dim is then the first in
        # row-major order.
        for axis in reversed(range(window.spatial_dims)):
            count = specs["y"].dims[2 + axis]
            seen = (window.elements_by_place(xp, axis, a, v, count) for a, v in ((best, 0), (index, -1)))
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


def _ahead(x: Sequence[int], part: Region) -> Array:
    """How much higher the numbers of elements are than they would be in a part of x by itself.

    For each image and channel. The part is cut along the first three dims alone.
    """
    image, channel, rows = part[:3]
    row = math.prod(x[3:])
    of_x = np.arange(image.start, image.stop)[:, None] * x[1] + np.arange(channel.start, channel.stop)
    own = np.arange(of_x.size).reshape(of_x.shape)
    found = (of_x * x[2] + rows.start - own * (rows.stop - rows.start)) * row
    return found.reshape(*found.shape, *[1] * (len(x) - 2))


def _largest(xp: Any, window: Window | AdaptiveWindow, x: Array, places: Sequence[int]) -> Array:
    """The largest element of each window, the first of equals; NaN is larger than any number."""
    least = -math.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
    for axis, count in reversed([*enumerate(places)]):
        best, *others = window.elements_by_place(xp, axis, x, least, count)
        for value in others:
            best = xp.where((value > best) | (value != value), value, best)  # noqa: PLR0124 - of NaN
        x = best
    return x


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

        def gradient_of(number: Array, dy: Array, index: Array) -> Array:
            return xp.where(number == index, dy, 0)

        return {"dx": self.window.collect(xp, gradient_of, [numbers], [values["dy"], values["index"]])}


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
        return {"y": self._pooled_spec(specs["x"])}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        x, places = values["x"], specs["y"].dims[2:]
        counts = _counts(xp, self.window, x.shape, places, include_padding=self.include_padding)
        return {"y": sums_in_windows(xp, self.window, x, places) / counts}

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
        return {"y": self._pooled_spec(specs["x"])}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        window, most = self.window, xp.abs(values["x"])
        total = xp.ones_like(most)
        # One dim after the other: of each window, the largest, and the sum in terms of its power.
        for axis, count in enumerate(specs["y"].dims[2:]):
            before = (
                window.elements_by_place(xp, axis, most, 0, count),
                window.elements_by_place(xp, axis, total, 0, count),
            )
            largest = functools.reduce(xp.maximum, window.elements_by_place(xp, axis, most, 0, count))
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
    return sums_in_windows(xp, window, xp.ones((1, 1, *x[2:])), places)


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
