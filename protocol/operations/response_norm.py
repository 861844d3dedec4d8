"""Local response normalisation across channels, and its gradient.

The definition is ONNX's.
https://onnx.ai/onnx/operators/onnx__LRN.html
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.operations.base import (
    ALLOCATED,
    Array,
    Operation,
    Region,
    Specs,
    T,
    needed_along,
    require,
    require_floating,
)
from cudnn_actor.protocol.operations.example import ROUNDED, Example
from cudnn_actor.protocol.types.checks import is_finite, is_whole
from cudnn_actor.protocol.types.tensor import Layout, TensorSpec

__all__ = ["LocalResponseNorm", "LocalResponseNormBackward"]


class _Response(Operation[T]):
    size: int
    alpha: float = 1e-4
    beta: float = 0.75
    bias: float = 1.0

    @property
    def reach(self) -> tuple[int, int]:
        """How many channels before and after a channel are in its window."""
        return (self.size - 1) // 2, self.size // 2

    def _check_x(self, specs: Specs) -> TensorSpec:
        """Check x and the parameters; the spec of a result like x."""
        require_floating(specs, "x")
        x = specs["x"]
        if x.rank < 2:
            raise InvalidRequest(
                field="x", value=x.dims, problem="has no channels", fix="give it dims (N, C, ...)"
            )
        if not is_whole(self.size) or self.size < 1:
            raise InvalidRequest(
                field="size", value=self.size, problem="must be a whole number ≥ 1", fix="use 5"
            )
        for name in ("alpha", "beta", "bias"):
            value = getattr(self, name)
            if not is_finite(value):
                raise InvalidRequest(field=name, value=value, problem="must be finite", fix="use 1")
        return TensorSpec.packed(x.dims, x.dtype, Layout.NHWC if x.layout is Layout.NHWC else Layout.NCHW)

    def work(self, specs: Specs) -> int:
        return min(self.size, specs["x"].dims[1]) * specs["x"].size

    def needs(self, specs: Specs, wanted: Mapping[str, Region]) -> dict[str, Region] | None:
        return needed_along(specs, wanted, 1, self.inputs)

    def _windows(self, xp: Any, x: Array, before: int, after: int) -> Array:
        """The sum of each channel, `before` channels before it and `after` behind it."""
        channels = x.shape[1]
        total = xp.zeros_like(x)
        for apart in range(max(-before, 1 - channels), min(after, channels - 1) + 1):
            low, high = max(0, -apart), channels - max(0, apart)
            total[:, low:high] += x[:, low + apart : high + apart]
        return total

    def _base(self, xp: Any, x: Array) -> Array:
        before, after = self.reach
        return self.bias + self.alpha / self.size * self._windows(xp, x * x, before, after)


class LocalResponseNorm(_Response[T], tag=True):
    """y = x / (bias + alpha / size * the sum of squares in a window of channels) ** beta.

    Answered by a `Receipt`.

    Parameters
    ----------
    x
        Input, of a floating-point dtype, dims (N, C, ...).
    y
        Result, of x's dims and dtype.
    size
        How many channels the window of a channel has, which is in the middle, or one before it. Those that
        x does not have count as 0.
    alpha, beta, bias
        Numbers. The power's base must be positive everywhere.
    """

    kind = "lrn"
    inputs = ("x",)
    outputs = ("y",)
    x: T
    y: T = ALLOCATED

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        return {"y": self._check_x(specs)}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs
        return {"y": values["x"] * self._base(xp, values["x"]) ** -self.beta}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        same: Any = {name: getattr(self, name) for name in ("size", "alpha", "beta", "bias")}
        return {"x": g.apply(LocalResponseNormBackward(dy=d["y"], x=self.x, **same))}


class LocalResponseNormBackward(_Response[T], tag=True):
    """The gradient of `LocalResponseNorm`. Answered by a `Receipt`.

    Parameters
    ----------
    dy, dx
        Gradients of y and of x, of x's dims and dtype.
    x, size, alpha, beta, bias
        As in the forward pass.
    """

    kind = "lrn_bwd"
    inputs = ("dy", "x")
    outputs = ("dx",)
    dy: T
    x: T
    dx: T = ALLOCATED

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        dx = self._check_x(specs)
        require(specs, "dy", dx.dims, dx.dtype)
        return {"dx": dx}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs
        own, others = self._terms(xp, values, lambda terms: terms)
        return {"dx": own - others}

    def magnitudes(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs
        own, others = self._terms(xp, values, lambda terms: terms * terms)
        return {"dx": xp.sqrt(own + others)}

    def _terms(
        self, xp: Any, values: Mapping[str, Array], each: Callable[[Array], Array]
    ) -> tuple[Array, Array]:
        """The term that each element adds to its own gradient, and the sum of the terms of the elements
        around it.

        `each`: a function of each term, such that of a product is the product of those of its factors.
        """
        dy, x = values["dy"], values["x"]
        base = self._base(xp, x)
        after, before = self.reach  # a channel is in the windows of those around it
        shared = self._windows(xp, each(dy * x * base ** (-self.beta - 1)), before, after)
        return each(dy * base**-self.beta), each(2 * self.alpha * self.beta / self.size * x) * shared


def examples() -> tuple[Example, ...]:
    """A window of three channels."""
    operations = (
        LocalResponseNorm(x="x", y="y", size=3, alpha=0.5),
        LocalResponseNormBackward(dy="dy", x="x", dx="dx", size=3, alpha=0.5),
    )
    return (Example(dims={"x": (2, 6, 5, 4)}, operations=operations, tolerance=ROUNDED),)
