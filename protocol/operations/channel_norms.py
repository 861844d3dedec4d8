"""Norms of channels: batch, instance and group norm, their gradients, and sums over each channel.

A tensor has the dims (N, C, ...): samples, channels, and any others. The definitions are PyTorch's, which for
inference are ONNX's.
https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm2d.html
https://onnx.ai/onnx/operators/onnx__BatchNormalization.html
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.operations.base import ALLOCATED, Array, Operation, Specs, T
from cudnn_actor.protocol.operations.example import ROUNDED, Example
from cudnn_actor.protocol.operations.normalization import (
    Norm,
    NormBackward,
    check_epsilon,
    check_momentum,
    given_gradients,
    gradient_of_rows,
    magnitude_of_mean,
    through_statistics,
)
from cudnn_actor.protocol.types.checks import is_whole
from cudnn_actor.protocol.types.tensor import Layout, LayoutName, TensorSpec

__all__ = [
    "BatchNorm",
    "BatchNormBackward",
    "BatchNormTraining",
    "GenStats",
    "GroupNorm",
    "GroupNormBackward",
    "InstanceNorm",
    "InstanceNormBackward",
]


class ChannelNorm(Norm[T]):
    """The base of the norms of channels. It says which elements have a common mean and variance.

    Attributes
    ----------
    over_samples
        Whether a channel's elements of all samples have a common mean and variance.
    """

    over_samples: ClassVar[bool] = True

    def groups_of(self, channels: int) -> int:
        """How many groups there are, of neighbouring channels that belong together."""
        groups: int = getattr(self, "groups", channels)
        return groups

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes that are normalised together, of the dims (N, groups, channels of a group, others)."""
        return (0, 2, 3) if self.over_samples else (2, 3)

    def count(self, dims: tuple[int, ...]) -> int:
        """How many elements of x have one mean."""
        channels = dims[1] // max(1, self.groups_of(dims[1]))
        return channels * math.prod(dims[2:]) * (dims[0] if self.over_samples else 1)

    def _check_x(self, specs: Specs) -> None:
        super()._check_x(specs)
        dims = specs["x"].dims
        if len(dims) < 2:
            raise InvalidRequest(
                field="x", value=dims, problem="has no channels", fix="give it dims (N, C, ...)"
            )
        groups = getattr(self, "groups", 1)
        if not is_whole(groups) or groups < 1 or dims[1] % groups:
            raise InvalidRequest(
                field="groups",
                value=groups,
                problem=f"does not divide the {dims[1]} channels of x",
                fix="use a whole number ≥ 1 that does",
            )

    def _like_x(self, x: TensorSpec) -> TensorSpec:
        return TensorSpec.packed(x.dims, x.dtype, Layout.NHWC if x.layout is Layout.NHWC else Layout.NCHW)

    def _statistics(self, x: TensorSpec) -> TensorSpec:
        """The spec of a number for each mean."""
        groups = (self.groups_of(x.dims[1]),)
        dims = groups if self.over_samples else (x.dims[0], *groups)
        return TensorSpec.packed(dims, self.compute((x.dtype,)))

    def _weights(self, x: TensorSpec) -> TensorSpec:
        return TensorSpec.packed(x.dims[1:2], x.dtype)

    # Values, as arrays of the dims (N, groups, channels of a group, others).

    def _split_groups(self, x: Array) -> Array:
        samples, channels = x.shape[:2]
        groups = self.groups_of(channels)
        return x.reshape(samples, groups, channels // groups, math.prod(x.shape[2:]))

    def _of_channels(self, values: Mapping[str, Array], name: str, other: float) -> Any:
        """A number for each channel; `other` if the operand was left out."""
        if name not in values:
            return other
        return self._split_groups(values[name].reshape(1, -1, 1))

    # Tensors of a builder, for gradients.

    def _rows(self, x: Any) -> Any:
        """x with such dims that what `_beside` gives is broadcast to it."""
        if self.over_samples:
            return x
        return x.reshape((x.dims[0], self.groups_of(x.dims[1]), self.count(x.dims)))

    def _beside(self, statistic: Any, x: Any) -> Any:
        """A tensor of a number for each mean."""
        if self.over_samples:
            return statistic.reshape((1, *statistic.dims, *[1] * (x.rank - 2)))
        return statistic.reshape((*statistic.dims, 1))


class BatchNorm(ChannelNorm[T], tag=True):
    """y = (x - mean) / sqrt(variance + epsilon) * scale + bias: batch norm for inference.

    Answered by a `Receipt`.

    Parameters
    ----------
    x
        Input, of a floating-point dtype, dims (N, C, ...).
    mean, variance
        A number for each channel: dims (C,), of x's dtype or float32 (float64 where x is float64).
    scale, bias
        The same; None for 1 and for 0.
    y
        Result, of x's dims and dtype.
    epsilon
        A small number, ≥ 0.
    """

    kind = "batch_norm"
    inputs = ("x", "mean", "variance", "scale", "bias")
    outputs = ("y",)
    optional = frozenset({"scale", "bias"})
    x: T
    mean: T
    variance: T
    scale: T | None = None
    bias: T | None = None
    y: T = ALLOCATED
    epsilon: float = 1e-5

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        self._check_x(specs)
        check_epsilon(self.epsilon)
        self._check_weights(specs, "mean", "variance", "scale", "bias")
        return {"y": self._like_x(specs["x"])}

    def samples(self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Array]) -> dict[str, Array]:
        return {"variance": xp.abs(draw(specs["variance"])) + 1}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs
        mean, variance = (self._of_channels(values, name, 0.0) for name in ("mean", "variance"))
        normal = (self._split_groups(values["x"]) - mean) / xp.sqrt(variance + self.epsilon)
        y = normal * self._of_channels(values, "scale", 1.0) + self._of_channels(values, "bias", 0.0)
        return {"y": y.reshape(values["x"].shape)}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        given: Any = self
        x, scale = given.x, 1.0 if self.scale is None else given.scale
        axes = [axis for axis in range(x.rank) if axis != 1]
        dy = d["y"].astype(self.compute((x.dtype,)))
        inverse = g.rsqrt(given.variance + self.epsilon)
        total = g.sum(dy, axes)
        scaled = g.sum(dy * (x - self._beside(given.mean, x)), axes) * inverse
        slope = inverse * scale
        found = {
            "x": dy * self._beside(slope, x),
            "mean": -(total * slope),
            "variance": scaled * slope * inverse * -0.5,
        }
        weights = {"scale": scaled, "bias": total}
        return found | {name: of for name, of in weights.items() if getattr(self, name) is not None}


class _Normalizing(ChannelNorm[T]):
    """The norms that compute the statistics."""

    inputs: ClassVar[tuple[str, ...]] = ("x", "scale", "bias")
    outputs: ClassVar[tuple[str, ...]] = ("y", "mean", "inverse_deviation")
    optional = frozenset({"scale", "bias", "mean", "inverse_deviation"})
    nothing: ClassVar[Mapping[str, float | str]] = MappingProxyType(
        {"mean": math.nan, "inverse_deviation": math.nan}
    )
    x: T
    scale: T | None = None
    bias: T | None = None
    y: T = ALLOCATED
    mean: T | None = None
    inverse_deviation: T | None = None
    epsilon: float = 1e-5

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        self._check_x(specs)
        check_epsilon(self.epsilon)
        self._check_weights(specs, "scale", "bias")
        statistics = self._statistics(specs["x"])
        return {"y": self._like_x(specs["x"]), "mean": statistics, "inverse_deviation": statistics}

    def samples(self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Array]) -> dict[str, Array]:
        del xp
        # Far from 0, the variance from the mean of squares loses its digits. Of equal values it is 0.
        x = 0.4 * draw(specs["x"]) + 137
        parted = self._split_groups(x)
        parted[(0 if self.over_samples else slice(None), slice(None), 0, 0)] = 141
        return {"x": parted.reshape(x.shape)}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs
        x, axes = self._split_groups(values["x"]), self.axes
        mean = x.mean(axis=axes, keepdims=True)
        centred = x - mean
        variance = (centred * centred).mean(axis=axes, keepdims=True)
        inverse = 1 / xp.sqrt(variance + self.epsilon)
        y = centred * inverse * self._of_channels(values, "scale", 1.0)
        y = y + self._of_channels(values, "bias", 0.0)
        of_groups = (-1,) if self.over_samples else x.shape[:2]
        statistics = {"mean": mean, "inverse_deviation": inverse, "variance": variance}
        found = {name: array.reshape(of_groups) for name, array in statistics.items()}
        return {"y": y.reshape(values["x"].shape), **found}

    def magnitudes(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs
        x = self._split_groups(values["x"])
        mean = magnitude_of_mean(xp, x, self.axes).reshape(-1 if self.over_samples else x.shape[:2])
        return {"mean": mean, "new_running_mean": mean}

    def uncentred_sizes(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        x = self._split_groups(values["x"])
        inverse = self.evaluate(xp, values, specs)["inverse_deviation"].reshape(-1, x.shape[1], 1, 1)
        y = abs(x * inverse * self._of_channels(values, "scale", 1.0))
        return {"y": y.reshape(values["x"].shape)}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        x: Any = self.x
        mean, inverse = (g.output(self, name) for name in ("mean", "inverse_deviation"))
        found: dict[str, Any] = {}
        if "y" in d:
            back = self._backward(dy=d["y"], x=x, mean=mean, inverse_deviation=inverse, scale=self.scale)
            found = given_gradients(g, self, back)
        d_mean, d_variance = self._of_statistics(d, inverse)
        if d_mean is not None or d_variance is not None:
            rows = self._rows(x)
            beside = [None if of is None else self._beside(of, x) for of in (d_mean, d_variance)]
            centred = rows - self._beside(mean, x)
            more = through_statistics(g, centred, self.count(x.dims), *beside).reshape(x.dims)
            found["x"] = found["x"] + more if found else more
        return found

    def _backward(self, **operands: Any) -> Operation[Any]:
        raise NotImplementedError

    def _of_statistics(self, d: Mapping[str, Any], inverse: Any) -> tuple[Any, Any]:
        """The gradients of the mean and of the variance, where they are results themselves; None for 0."""
        of_inverse = d.get("inverse_deviation")
        return d.get("mean"), None if of_inverse is None else of_inverse * inverse**3 * -0.5


class BatchNormTraining(_Normalizing[T], tag=True):
    """Batch norm with the statistics of x itself, and new running ones. Answered by a `Receipt`.

    y = (x - mean) * inverse_deviation * scale + bias, with the mean and the variance of each channel's
    elements in all samples.

    Parameters
    ----------
    x, scale, bias, y, epsilon
        As in `BatchNorm`.
    running_mean, running_variance
        The old running statistics: dims (C,), of x's dtype or float32 (float64 where x is float64).
    mean, inverse_deviation
        For the backward pass: dims (C,), float32 (float64 where x is float64). The inverse deviation is
        1 / sqrt(variance + epsilon), of the variance that divides by the number of elements.
    new_running_mean, new_running_variance
        (1 - momentum) * the old one + momentum * that of x, of the old one's dtype. In a graph, `updates`
        writes them back to the old ones' buffers.
    momentum
        From 0 to 1; ONNX's is 1 - this one.
    unbiased
        Whether the variance that new_running_variance has a part of divides by one element less, as
        PyTorch's and cuDNN's does, and ONNX's does not.
    """

    kind = "batch_norm_training"
    nothing = MappingProxyType(
        {
            **_Normalizing.nothing,
            "new_running_mean": "running_mean",  # as in PyTorch
            "new_running_variance": "running_variance",
        }
    )
    inputs = ("x", "scale", "bias", "running_mean", "running_variance")
    outputs = ("y", "mean", "inverse_deviation", "new_running_mean", "new_running_variance")
    optional = frozenset({*inputs, *outputs} - {"x", "y"})
    running_mean: T | None = None
    running_variance: T | None = None
    new_running_mean: T | None = None
    new_running_variance: T | None = None
    momentum: float = 0.1
    unbiased: bool = True

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        found = super().infer(specs)
        check_momentum(self.momentum)
        for name in ("running_mean", "running_variance"):
            self._check_weights(specs, name)
            if name in specs:
                found[f"new_{name}"] = TensorSpec.packed(specs[name].dims, specs[name].dtype)
        return found

    def check(self, specs: Specs) -> None:
        super().check(specs)
        for name in ("running_mean", "running_variance"):
            if f"new_{name}" in specs and name not in specs:
                raise InvalidRequest(
                    field=f"new_{name}",
                    value=specs[f"new_{name}"].dims,
                    problem=f"needs {name}",
                    fix="give the old one, or leave the new one out",
                )

    def correction(self, count: int) -> float:
        """The factor of the variance of `count` elements in the running variance."""
        return count / max(1, count - 1) if self.unbiased else 1.0

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        found = super().evaluate(xp, values, specs)
        x = values["x"]
        of_x = {
            "running_mean": found["mean"],
            "running_variance": found["variance"] * self.correction(self.count(x.shape)),
        }
        for name, new in of_x.items():
            if name in values:
                found[f"new_{name}"] = (1 - self.momentum) * values[name] + self.momentum * new
        return found

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        found = super().gradient(g, d)
        for name in ("running_mean", "running_variance"):
            if f"new_{name}" in d:
                found[name] = d[f"new_{name}"] * (1 - self.momentum)
        return found

    def _backward(self, **operands: Any) -> Operation[Any]:
        return BatchNormBackward(**operands)

    def _of_statistics(self, d: Mapping[str, Any], inverse: Any) -> tuple[Any, Any]:
        found = [*super()._of_statistics(d, inverse)]
        x: Any = self.x
        factors = (self.momentum, self.momentum * self.correction(self.count(x.dims)))
        for place, name in enumerate(("new_running_mean", "new_running_variance")):
            if name in d:
                more = d[name] * factors[place]
                found[place] = more if found[place] is None else found[place] + more
        return found[0], found[1]


class InstanceNorm(_Normalizing[T], tag=True):
    """Batch norm of each sample by itself. Answered by a `Receipt`.

    Parameters
    ----------
    x, scale, bias, y, epsilon
        As in `BatchNorm`.
    mean, inverse_deviation
        As in `BatchNormTraining`, dims (N, C).
    """

    kind = "instance_norm"
    over_samples = False

    def _backward(self, **operands: Any) -> Operation[Any]:
        return InstanceNormBackward(**operands)


class GroupNorm(_Normalizing[T], tag=True):
    """Instance norm of neighbouring channels together. Answered by a `Receipt`.

    Parameters
    ----------
    x, scale, bias, y, epsilon
        As in `BatchNorm`: a scale and a bias for each channel.
    mean, inverse_deviation
        As in `BatchNormTraining`, dims (N, groups).
    groups
        How many groups of as many channels.
    """

    kind = "group_norm"
    over_samples = False
    groups: int

    def _backward(self, **operands: Any) -> Operation[Any]:
        return GroupNormBackward(**operands, groups=self.groups)


class _Gradients(NormBackward[T], ChannelNorm[T]):
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

    def _rows_of(self, values: Mapping[str, Array]) -> tuple[Array, Array, Array, tuple[int, ...]]:
        """The arguments of `gradient_of_rows`."""
        dy, x = (self._split_groups(values[name]) for name in ("dy", "x"))
        mean, inverse = (values[name].reshape(-1, x.shape[1], 1, 1) for name in ("mean", "inverse_deviation"))
        return dy * self._of_channels(values, "scale", 1.0), (x - mean) * inverse, inverse, self.axes

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del xp, specs
        rows, dy = self._rows_of(values), self._split_groups(values["dy"])
        sums = {"dscale": dy * rows[1], "dbias": dy}
        return {
            "dx": gradient_of_rows(*rows).reshape(values["x"].shape),
            **{name: array.sum(axis=(0, 3)).reshape(-1) for name, array in sums.items()},
        }

    def magnitudes(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs
        squares = gradient_of_rows(*self._rows_of(values), power=2)
        return {"dx": xp.sqrt(squares).reshape(values["x"].shape)}


class BatchNormBackward(_Gradients[T], tag=True):
    """The gradients of `BatchNormTraining` with respect to x, scale and bias. Answered by a `Receipt`.

    Parameters
    ----------
    dy
        Gradient of y, of x's dims and dtype.
    x, scale, mean, inverse_deviation
        As in the forward pass; scale may be left out.
    dx
        Of x's dims and dtype.
    dscale, dbias
        A number for each channel: dims (C,), of x's dtype or float32 (float64 where x is float64).
    """

    kind = "batch_norm_bwd"


class InstanceNormBackward(_Gradients[T], tag=True):
    """The gradients of `InstanceNorm`. The fields are `BatchNormBackward`'s. Answered by a `Receipt`."""

    kind = "instance_norm_bwd"
    over_samples = False


class GroupNormBackward(_Gradients[T], tag=True):
    """The gradients of `GroupNorm`. The fields are `BatchNormBackward`'s. Answered by a `Receipt`.

    Parameters
    ----------
    groups
        As in the forward pass.
    """

    kind = "group_norm_bwd"
    over_samples = False
    groups: int


class GenStats(ChannelNorm[T], tag=True):
    """The sum and the sum of squares of each channel's elements, in all samples. Answered by a `Receipt`.

    Parameters
    ----------
    x
        Input, of a floating-point dtype, dims (N, C, ...).
    sum, sum_of_squares
        Dims (C,), float32 (float64 where x is float64).
    """

    kind = "gen_stats"
    inputs = ("x",)
    outputs = ("sum", "sum_of_squares")
    x: T
    sum: T = ALLOCATED
    sum_of_squares: T = ALLOCATED

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        self._check_x(specs)
        return dict.fromkeys(self.outputs, self._statistics(specs["x"]))

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del xp, specs
        x = self._split_groups(values["x"])
        sums = {"sum": x, "sum_of_squares": x * x}
        return {name: array.sum(axis=self.axes) for name, array in sums.items()}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        x: Any = self.x
        found = [g.broadcast_to(self._beside(d["sum"], x), x.dims)] if "sum" in d else []
        if "sum_of_squares" in d:
            found.append(self._beside(d["sum_of_squares"], x) * x * 2.0)
        return {"x": sum(found[1:], found[0])}


def _example(x: tuple[int, ...], groups: int, layout: LayoutName = "NCHW") -> Example:
    """Batch, instance and group norm, each with statistics of its own, and sums over channels."""
    weights: dict[str, Any] = {"x": "x", "scale": "scale"}
    running: dict[str, Any] = {"running_mean": "mean", "running_variance": "variance"}
    new: dict[str, Any] = {f"new_{name}": f"new_{name}" for name in running}
    of_batch, of_instances, of_groups = (
        dict[str, Any]({"mean": f"mean_of_{name}", "inverse_deviation": f"inverse_of_{name}"})
        for name in ("batch", "instances", "groups")
    )
    sums: dict[str, Any] = {"dy": "dy", "dx": "dx", "dscale": "dscale", "dbias": "dbias"}
    operations = (
        BatchNorm(**weights, bias="bias", mean="mean", variance="variance", y="y"),
        BatchNormTraining(**weights, bias="bias", y="y", **running, **new, **of_batch),
        BatchNormBackward(**weights, **sums, **of_batch),
        InstanceNorm(**weights, bias="bias", y="y", **of_instances),
        InstanceNormBackward(**weights, **sums, **of_instances),
        GroupNorm(**weights, bias="bias", y="y", **of_groups, groups=groups),
        GroupNormBackward(**weights, **sums, **of_groups, groups=groups),
        GenStats(x="x", sum="sum", sum_of_squares="sum_of_squares"),
    )
    dims = {"x": x} | dict.fromkeys(("scale", "bias", "mean", "variance"), x[1:2])
    return Example(dims=dims, operations=operations, layout=layout, tolerance=ROUNDED)


def examples() -> tuple[Example, ...]:
    """Examples in both layouts."""
    return _example((2, 8, 5, 4), 2), _example((3, 16, 6, 6), 4, "NHWC")
