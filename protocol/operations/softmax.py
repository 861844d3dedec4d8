"""Softmax and its logarithm along one dim, and their gradients.

The definitions are ONNX's, of `Softmax` and `LogSoftmax` since version 13.
https://onnx.ai/onnx/operators/onnx__Softmax.html
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cudnn_actor.protocol.operations.base import (
    ALLOCATED,
    Array,
    Operation,
    Region,
    Specs,
    T,
    axis_of,
    needed_of_lines,
    require,
    require_floating,
)
from cudnn_actor.protocol.operations.example import ROUNDED, Example
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Softmax", "SoftmaxBackward"]

_FAR, _FARTHER = 120.0, 960.0
"""Exponentials of numbers from here on overflow, in float32 and in float64."""


class Softmax(Operation[T], tag=True):
    """y = exp(x) / sum of exp(x), along a dim; or its logarithm. Answered by a `Receipt`.

    No exponential overflows, however large x is. Where all of x along the dim is -infinity, or an element is
    infinity or NaN, the result is NaN for all of them, as in PyTorch.

    Parameters
    ----------
    x
        Input, of a floating-point dtype and any rank.
    y
        Result, of x's dims and dtype.
    axis
        The dim that is summed along; negative: from the end.
    log
        Whether y is the logarithm of the softmax, computed without it.
    """

    kind = "softmax"
    inputs = ("x",)
    outputs = ("y",)
    takes_empty = True
    x: T
    y: T = ALLOCATED
    axis: int = -1
    log: bool = False

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        x = specs["x"]
        require_floating(specs, "x")
        axis_of("axis", self.axis, x.rank)
        return {"y": TensorSpec.packed(x.dims, x.dtype)}

    def reduced_dims(self, rank: int) -> tuple[int, ...]:
        """The axis that is summed along, from 0, as `Reduction.reduced_dims`."""
        return (axis_of("axis", self.axis, rank),)

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        return {"x": g.apply(SoftmaxBackward(dy=d["y"], y=self.y, axis=self.axis, log=self.log))}

    def samples(self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Array]) -> dict[str, Array]:
        del xp
        x = specs["x"]
        return {"x": draw(x) + (_FARTHER if x.dtype is DType.FLOAT64 else _FAR)}

    def needs(self, specs: Specs, wanted: Mapping[str, Region]) -> dict[str, Region] | None:
        return needed_of_lines(specs, wanted, self.reduced_dims(specs["x"].rank), ("x",))

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        x = values["x"]
        if not x.size:
            return {"y": xp.zeros(specs["y"].dims)}
        below = x - x.max(axis=self.axis, keepdims=True)
        powers = xp.exp(below)
        total = powers.sum(axis=self.axis, keepdims=True)
        return {"y": below - xp.log(total) if self.log else powers / total}


class SoftmaxBackward(Operation[T], tag=True):
    """The gradient of `Softmax` with respect to x. Answered by a `Receipt`.

    dx = y * (dy - sum of dy * y); of the logarithm, dx = dy - exp(y) * sum of dy.

    Parameters
    ----------
    dy
        Gradient of y, of a floating-point dtype and any rank.
    y
        As the forward pass wrote it, of dy's dims and dtype.
    dx
        Gradient of x, of dy's dims and dtype.
    axis, log
        As in the forward pass.
    """

    kind = "softmax_bwd"
    inputs = ("dy", "y")
    outputs = ("dx",)
    takes_empty = True
    dy: T
    y: T
    dx: T = ALLOCATED
    axis: int = -1
    log: bool = False

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        dy = specs["dy"]
        require_floating(specs, "dy")
        axis_of("axis", self.axis, dy.rank)
        require(specs, "y", dy.dims, dy.dtype)
        return {"dx": TensorSpec.packed(dy.dims, dy.dtype)}

    def reduced_dims(self, rank: int) -> tuple[int, ...]:
        """The axis that is summed along, from 0, as `Reduction.reduced_dims`."""
        return (axis_of("axis", self.axis, rank),)

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        dy: Any = self.dy
        y, e = self.y, d["dx"]

        def total(x: Any) -> Any:
            return g.sum(x, self.axis, keepdims=True)

        if self.log:
            powers = g.exp(y)
            return {"dy": e - total(e * powers), "y": -(e * powers * total(dy))}
        return {
            "dy": g.apply(SoftmaxBackward(dy=e, y=y, axis=self.axis)),
            "y": e * (dy - total(dy * y)) - dy * total(e * y),
        }

    def samples(self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Array]) -> dict[str, Array]:
        forward = Softmax(x=0, y=1, axis=self.axis, log=self.log)
        return forward.evaluate(xp, {"x": draw(specs["y"])}, {"y": specs["y"]})

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs
        dy, y = values["dy"], values["y"]
        if self.log:
            return {"dx": dy - xp.exp(y) * dy.sum(axis=self.axis, keepdims=True)}
        return {"dx": y * (dy - (dy * y).sum(axis=self.axis, keepdims=True))}


def _example(x: tuple[int, ...], axis: int, *, log: bool) -> Example:
    operations = (
        Softmax(x="x", y="y", axis=axis, log=log),
        SoftmaxBackward(dy="dy", y="y", dx="dx", axis=axis, log=log),
    )
    return Example(dims={"x": x}, operations=operations, tolerance=ROUNDED)


def examples() -> tuple[Example, ...]:
    """Along the last dim, and the logarithm along another."""
    return _example((8, 3, 50), -1, log=False), _example((2, 9, 6, 5), 1, log=True)
