"""Layer norm and RMS norm over the last dims of a tensor, and their gradients.

The definitions are ONNX's, of `LayerNormalization` and `RMSNormalization`.
https://onnx.ai/onnx/operators/onnx__LayerNormalization.html
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from cudnn_actor.protocol.errors import InvalidRequest
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
from cudnn_actor.protocol.types.checks import is_finite
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["LayerNorm", "LayerNormBackward", "RMSNorm", "RMSNormBackward"]


def check_epsilon(epsilon: float) -> None:
    """Raise `InvalidRequest` unless it is a finite number ≥ 0."""
    if not is_finite(epsilon) or epsilon < 0:
        raise InvalidRequest(
            field="epsilon", value=epsilon, problem="must be a finite number ≥ 0", fix="use 1e-5"
        )


def check_momentum(momentum: object) -> None:
    """Raise `InvalidRequest` unless a share of new statistics is a number from 0 to 1."""
    if not is_finite(momentum) or not 0 <= momentum <= 1:
        raise InvalidRequest(
            field="momentum", value=momentum, problem="must be a number from 0 to 1", fix="use 0.1"
        )


def given_gradients(g: Any, operation: Any, backward: Operation[Any]) -> dict[str, Any]:
    """The gradients of those inputs that a norm has, from the operation that computes them."""
    wanted = tuple(
        name for name in backward.outputs[1:] if getattr(operation, name.removeprefix("d")) is not None
    )
    made = g.apply(backward, also=wanted)
    return {"x": made.dx if wanted else made, **{name[1:]: getattr(made, name) for name in wanted}}


def through_statistics(g: Any, centred: Any, count: int, d_mean: Any, d_variance: Any) -> Any:
    """The gradient of x from those of a mean and a variance over `count` elements; one of them may be None.

    `centred`: x less its mean. All are tensors of a builder, `g`.
    """
    parts = [] if d_mean is None else [g.broadcast_to(d_mean, centred.dims)]
    if d_variance is not None:
        parts.append(centred * d_variance * 2.0)
    return sum(parts[1:], parts[0]) / count


def gradient_of_rows(
    slope: Array,
    normal: Array,
    inverse: Array,
    axes: tuple[int, ...],
    *,
    centred: bool = True,
    power: int = 1,
) -> Array:
    """The gradient of x; with a power of 2, the sum of the squares of its terms.

    Of one or two elements with one mean, the terms may all cancel: what is left is their rounding.

    Parameters
    ----------
    slope, normal, inverse
        dy * scale, the normalised elements, and the inverse deviations or RMSs.
    axes
        Along which the elements lie that have one mean.
    centred
        Whether they are normalised by their mean too.
    """
    count = (slope.size // inverse.size) ** (power - 1)
    slope, normal = slope**power, normal**power
    others = normal * (slope * normal).mean(axis=axes, keepdims=True)
    if centred:
        others = others + slope.mean(axis=axes, keepdims=True)
    return (slope + others / (-1 if power == 1 else count)) * inverse**power


def magnitude_of_mean(xp: Any, x: Array, axes: tuple[int, ...]) -> Array:
    """The result of `Operation.magnitudes` for the mean along these axes, which stay with one element."""
    return xp.sqrt((x * x).mean(axis=axes, keepdims=True) / math.prod(x.shape[axis] for axis in axes))


class Norm(Operation[T]):
    """The base of all norms: results like x, and weights of x's dtype or of the wide one."""

    def _statistics(self, x: TensorSpec) -> TensorSpec:
        """The spec of a number for each group of elements that are normalised together."""
        raise NotImplementedError

    def _weights(self, x: TensorSpec) -> TensorSpec:
        """The spec of a scale or a bias."""
        raise NotImplementedError

    def _like_x(self, x: TensorSpec) -> TensorSpec:
        return TensorSpec.packed(x.dims, x.dtype)

    def _check_x(self, specs: Specs) -> None:
        require_floating(specs, "x")

    def _check_weights(self, specs: Specs, *names: str) -> None:
        x = specs["x"]
        for name in names:
            if name in specs:
                require(specs, name, self._weights(x).dims, x.dtype, self.compute((x.dtype,)))


class NormBackward(Norm[T]):
    """The gradients of a norm. Its inputs are dy, x, the statistics and the scale."""

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        x = specs["x"]
        self._check_x(specs)
        require(specs, "dy", x.dims, x.dtype)
        wanted = self._statistics(x)
        for name in self.inputs[2:-1]:
            require(specs, name, wanted.dims, wanted.dtype)
        self._check_weights(specs, "scale")
        return {"dx": self._like_x(x), **dict.fromkeys(self.outputs[1:], self._weights(x))}

    def check(self, specs: Specs) -> None:
        self.infer(specs)
        require(specs, "dx", specs["x"].dims, specs["x"].dtype)
        self._check_weights(specs, *self.outputs[1:])


class _RowNorm(Norm[T]):
    """The base of norms of rows.

    Parameters
    ----------
    axis
        The first of the dims that are normalised together; all after it are too. Negative: from the end.
    """

    axis: int = -1

    def _first(self, x: TensorSpec) -> int:
        return axis_of("axis", self.axis, x.rank)

    def _statistics(self, x: TensorSpec) -> TensorSpec:
        """The spec of a number for each row: x's dims, with 1 for those that are normalised."""
        first = self._first(x)
        dims = (*x.dims[:first], *[1] * (x.rank - first))
        return TensorSpec.packed(dims, self.compute((x.dtype,)))

    def _weights(self, x: TensorSpec) -> TensorSpec:
        """The spec of a number for each element of a row."""
        return TensorSpec.packed(x.dims[self._first(x) :], x.dtype)

    def _check_x(self, specs: Specs) -> None:
        super()._check_x(specs)
        self._first(specs["x"])

    def reduced_dims(self, rank: int) -> tuple[int, ...]:
        """The dims that are normalised together, as `Reduction.reduced_dims`."""
        return tuple(range(axis_of("axis", self.axis, rank), rank))


class _ForwardNorm(_RowNorm[T]):
    epsilon: float = 1e-5

    def needs(self, specs: Specs, wanted: Mapping[str, Region]) -> dict[str, Region] | None:
        return needed_of_lines(specs, wanted, self.reduced_dims(specs["x"].rank), ("x",))

    def _check_x(self, specs: Specs) -> None:
        super()._check_x(specs)
        check_epsilon(self.epsilon)

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        x = specs["x"]
        self._check_x(specs)
        self._check_weights(specs, "scale", "bias")
        return {"y": self._like_x(x), **dict.fromkeys(self.outputs[1:], self._statistics(x))}

    def samples(self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Array]) -> dict[str, Array]:
        del xp
        spec = specs["x"]
        x = self._far(draw(spec))
        # Without an epsilon, a row of zeros has no result, and a row of equal values has no layer norm.
        x.reshape(-1, math.prod(spec.dims[self._first(spec) :]))[:, 0] = self._far(10.0)
        return {"x": x}

    def _far(self, x: Any) -> Any:
        """Values as far from 0 as a check needs."""
        return x

    def _gradient(self, g: Any, d: Mapping[str, Any], inverse: str, backward: Any) -> dict[str, Any]:
        """`inverse`: the statistic beside the mean; `backward`: the class that computes the gradients."""
        x: Any = self.x  # type: ignore[attr-defined]
        scale: Any = self.scale  # type: ignore[attr-defined]
        kept = {name: g.output(self, name) for name in self.outputs[1:]}
        found: dict[str, Any] = {}
        if "y" in d:
            back = backward(dy=d["y"], x=x, scale=scale, axis=self.axis, **kept)
            found = given_gradients(g, self, back)
        of_inverse = d.get(inverse)
        if of_inverse is not None or "mean" in d:
            d_variance = None if of_inverse is None else of_inverse * kept[inverse] ** 3 * -0.5
            count = math.prod(x.dims[self.axis % x.rank :])
            centred = x - kept["mean"] if "mean" in kept else x
            more = through_statistics(g, centred, count, d.get("mean"), d_variance)
            found["x"] = found["x"] + more if found else more
        return found


class LayerNorm(_ForwardNorm[T], tag=True):
    """y = (x - mean) * inverse_deviation * scale + bias, over each row. Answered by a `Receipt`.

    A row is what remains of x when the dims before `axis` are fixed.

    Parameters
    ----------
    x
        Input, of a floating-point dtype and any rank.
    scale, bias
        A number for each element of a row: dims `x.dims[axis:]`, of x's dtype or float32 (float64 where x
        is float64). None for 1 and for 0.
    y
        Result, of x's dims and dtype.
    mean, inverse_deviation
        For the backward pass: float32 (float64 where x is float64), of x's dims with 1 for those from
        `axis` on. The inverse deviation is 1 / sqrt(variance + epsilon), of the variance that divides by the
        number of elements.
    axis
        The first of the dims that are normalised.
    epsilon
        A small number, ≥ 0.
    """

    kind = "layer_norm"
    nothing = MappingProxyType({"mean": math.nan, "inverse_deviation": math.nan})
    inputs = ("x", "scale", "bias")
    outputs = ("y", "mean", "inverse_deviation")
    optional = frozenset({"scale", "bias", "mean", "inverse_deviation"})
    x: T
    scale: T | None = None
    bias: T | None = None
    y: T = ALLOCATED
    mean: T | None = None
    inverse_deviation: T | None = None

    def _far(self, x: Any) -> Any:
        return 0.4 * x + 137  # the variance in one pass, from the mean of squares, loses its digits there

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs
        x = values["x"]
        axes = self.reduced_dims(x.ndim)
        mean = x.mean(axis=axes, keepdims=True)
        centred = x - mean
        inverse = 1 / xp.sqrt((centred * centred).mean(axis=axes, keepdims=True) + self.epsilon)
        y = centred * inverse * values.get("scale", 1.0) + values.get("bias", 0.0)
        return {"y": y, "mean": mean, "inverse_deviation": inverse}

    def magnitudes(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs
        return {"mean": magnitude_of_mean(xp, values["x"], self.reduced_dims(values["x"].ndim))}

    def uncentred_sizes(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        inverse = self.evaluate(xp, values, specs)["inverse_deviation"]
        return {"y": abs(values["x"] * inverse * values.get("scale", 1.0))}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        return self._gradient(g, d, "inverse_deviation", LayerNormBackward)


class _BackwardNorm(NormBackward[T], _RowNorm[T]):
    def _rows(self, values: Mapping[str, Array]) -> tuple[Array, Array, Array, tuple[int, ...]]:
        """The arguments of `gradient_of_rows`."""
        inverse = values["inverse_deviation" if "mean" in values else "inverse_rms"]
        normal = (values["x"] - values.get("mean", 0.0)) * inverse
        return values["dy"] * values.get("scale", 1.0), normal, inverse, self.reduced_dims(normal.ndim)

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del xp, specs
        dy, (slope, normal, inverse, axes) = values["dy"], self._rows(values)
        dx = gradient_of_rows(slope, normal, inverse, axes, centred="mean" in values)
        over = tuple(range(axes[0]))
        found = {"dx": dx, "dscale": (dy * normal).sum(axis=over), "dbias": dy.sum(axis=over)}
        return {name: array for name, array in found.items() if name in self.outputs}

    def magnitudes(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs
        return {"dx": xp.sqrt(gradient_of_rows(*self._rows(values), centred="mean" in values, power=2))}


class LayerNormBackward(_BackwardNorm[T], tag=True):
    """The gradients of `LayerNorm` with respect to x, scale and bias. Answered by a `Receipt`.

    Parameters
    ----------
    dy
        Gradient of y, of x's dims and dtype.
    x, scale, mean, inverse_deviation
        As in the forward pass; scale may be left out.
    dx
        Of x's dims and dtype.
    dscale, dbias
        Sums over all rows: dims `x.dims[axis:]`, of x's dtype or float32 (float64 where x is float64).
    axis
        As in the forward pass.
    """

    kind = "layer_norm_bwd"
    inputs = ("dy", "x", "mean", "inverse_deviation", "scale")
    outputs = ("dx", "dscale", "dbias")
    optional = frozenset({"scale", "dscale", "dbias"})
    dy: T
    x: T
    mean: T
    inverse_deviation: T
    scale: T | None = None
    dx: T = ALLOCATED
    dscale: T | None = None
    dbias: T | None = None


class RMSNorm(_ForwardNorm[T], tag=True):
    """y = x * inverse_rms * scale, over each row. Answered by a `Receipt`.

    Parameters
    ----------
    x, scale, y, axis, epsilon
        As in `LayerNorm`.
    inverse_rms
        For the backward pass: 1 / sqrt(mean of squares + epsilon), with the dims and dtype of `LayerNorm`'s
        statistics.
    """

    kind = "rms_norm"
    nothing = MappingProxyType({"inverse_rms": math.nan})
    inputs = ("x", "scale")
    outputs = ("y", "inverse_rms")
    optional = frozenset({"scale", "inverse_rms"})
    x: T
    scale: T | None = None
    y: T = ALLOCATED
    inverse_rms: T | None = None

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs
        x = values["x"]
        inverse = 1 / xp.sqrt((x * x).mean(axis=self.reduced_dims(x.ndim), keepdims=True) + self.epsilon)
        return {"y": x * inverse * values.get("scale", 1.0), "inverse_rms": inverse}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        return self._gradient(g, d, "inverse_rms", RMSNormBackward)


class RMSNormBackward(_BackwardNorm[T], tag=True):
    """The gradients of `RMSNorm` with respect to x and scale. Answered by a `Receipt`.

    The fields are `LayerNormBackward`'s, with `inverse_rms` for the statistics.
    """

    kind = "rms_norm_bwd"
    inputs = ("dy", "x", "inverse_rms", "scale")
    outputs = ("dx", "dscale")
    optional = frozenset({"scale", "dscale"})
    dy: T
    x: T
    inverse_rms: T
    scale: T | None = None
    dx: T = ALLOCATED
    dscale: T | None = None


def _layer_norms(x: tuple[int, ...], axis: int) -> Example:
    statistics: dict[str, Any] = {"mean": "mean", "inverse_deviation": "inverse_deviation", "axis": axis}
    operations = (
        LayerNorm(x="x", scale="scale", bias="bias", y="y", **statistics),
        LayerNormBackward(
            dy="dy", x="x", scale="scale", dx="dx", dscale="dscale", dbias="dbias", **statistics
        ),
    )
    dims = {"x": x, "scale": x[axis:], "bias": x[axis:]}
    return Example(dims=dims, operations=operations, tolerance=ROUNDED)


def _rms_norms(x: tuple[int, ...], axis: int) -> Example:
    statistics: dict[str, Any] = {"inverse_rms": "inverse_rms", "axis": axis}
    operations = (
        RMSNorm(x="x", scale="scale", y="y", **statistics),
        RMSNormBackward(dy="dy", x="x", scale="scale", dx="dx", dscale="dscale", **statistics),
    )
    return Example(dims={"x": x, "scale": x[axis:]}, operations=operations, tolerance=ROUNDED)


def examples() -> tuple[Example, ...]:
    """Norms of one dim and of several."""
    return (
        _layer_norms((4, 3, 40), -1),
        _layer_norms((2, 5, 4, 6), 2),
        _layer_norms((64, 128), 1),
        _rms_norms((4, 3, 40), -1),
        _rms_norms((3, 2, 4, 6), 1),
    )
