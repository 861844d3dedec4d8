"""Convolution and its two gradients. `ConvSpec` defines the shapes.

As nodes of a graph: `ConvFwd` and its siblings are the messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.operations.base import ALLOCATED, Array, Operation, Specs, T
from cudnn_actor.protocol.operations.example import Example
from cudnn_actor.protocol.operations.windows import taps
from cudnn_actor.protocol.types.checks import check_result
from cudnn_actor.protocol.types.conv import ConvSpec
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import LayoutName, TensorSpec

__all__ = [
    "Convolution",
    "ConvolutionBackwardData",
    "ConvolutionBackwardFilter",
    "ConvolutionForward",
    "check_dims",
    "split_groups",
    "type_of_sums",
]


_FLOATS = tuple(dtype for dtype in DType if dtype.is_floating)


def type_of_sums(dtype: DType) -> DType:
    """The type that products of this dtype are summed up in."""
    if not dtype.is_floating:
        return DType.INT32
    return DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32


class Convolution(Operation[T]):
    """The base of all three. Sums are float64 of float64, int32 of integers, and float32 of all others."""

    shape: ClassVar[tuple[str, str, str]]
    """The fields that have the input's, the filter's and the output's dims."""
    dtypes: ClassVar[tuple[DType, ...]] = _FLOATS
    """The dtypes that the operands can have. Both have the same."""
    conv: ConvSpec

    @property
    def of_shape(self) -> tuple[T, T, T]:
        """The operands with the input's, the filter's and the output's dims."""
        x, w, y = (getattr(self, name) for name in self.shape)
        return x, w, y

    def check(self, specs: Specs) -> None:
        self._check_dtypes(specs)
        check_dims(type(self), self.conv, specs)

    def compute(self, dtypes: tuple[DType, ...]) -> DType:
        return type_of_sums(dtypes[0])

    def _check_dtypes(self, specs: Specs) -> None:
        """Raise `InvalidRequest` unless both operands have one dtype that this convolution takes."""
        first, second = self.inputs
        dtype, other = specs[first].dtype, specs[second].dtype
        if dtype is not other:
            raise InvalidRequest(
                field=second,
                value=Words(other),
                problem=f"differs from the dtype of {first}, {dtype}",
                fix=f'use {second}.astype("{dtype}") or {first}.astype("{other}")',
            )
        if dtype not in self.dtypes:
            raise InvalidRequest(
                field=first,
                value=Words(dtype),
                problem=f"is not a dtype that {self.kind} takes",
                fix=f"convert both operands to one of {', '.join(self.dtypes)}",
            )

    # A convolution is linear in each operand: the gradients of each of the three are the other two.

    def _forward(self, g: Any, x: Any, w: Any) -> Any:
        return g.apply(ConvolutionForward(x=x, w=w, conv=self.conv))

    def _data(self, g: Any, dy: Any, w: Any, x: Any) -> Any:
        return g.apply(ConvolutionBackwardData(dy=dy, w=w, conv=self.conv), like={"dx": x})

    def _filter(self, g: Any, x: Any, dy: Any, w: Any) -> Any:
        return g.apply(ConvolutionBackwardFilter(x=x, dy=dy, conv=self.conv), like={"dw": w})

    def _like(self, dims: tuple[int, ...], operand: TensorSpec) -> TensorSpec:
        return TensorSpec.packed(dims, operand.dtype if operand.dtype.is_floating else DType.INT32)


class ConvolutionForward(Convolution[T], tag=True):
    """y = x cross-correlated with w."""

    kind = "conv_fwd"
    inputs = ("x", "w")
    outputs = ("y",)
    shape = ("x", "w", "y")
    dtypes = (*_FLOATS, DType.INT8, DType.UINT8)
    x: T
    w: T
    y: T = ALLOCATED

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        self._check_dtypes(specs)
        return {"y": self._like(self.conv.output_dims(specs["x"].dims, specs["w"].dims), specs["x"])}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        return {"x": self._data(g, d["y"], self.w, self.x), "w": self._filter(g, self.x, d["y"], self.w)}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        x, w, y = values["x"], values["w"], specs["y"]
        groups = self.conv.groups
        padded = _pad(xp, self.conv, x)
        total = xp.zeros((y.dims[0], groups, y.dims[1] // groups, *y.dims[2:]), x.dtype)
        for tap, seen in taps(self.conv, w.shape[2:], y.dims[2:]):
            part = split_groups(padded[seen], groups)
            total += xp.einsum("ngc...,gkc->ngk...", part, _filters(w[(..., *tap)], groups))
        return {"y": total.reshape(y.dims)}


class ConvolutionBackwardData(Convolution[T], tag=True):
    """dx = the gradient with respect to the input."""

    kind = "conv_bwd_data"
    inputs = ("dy", "w")
    outputs = ("dx",)
    shape = ("dx", "w", "dy")
    dy: T
    w: T
    dx: T = ALLOCATED

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        self._check_dtypes(specs)
        return {"dx": self._like(self.conv.input_dims(specs["dy"].dims, specs["w"].dims), specs["dy"])}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        return {"dy": self._forward(g, d["dx"], self.w), "w": self._filter(g, d["dx"], self.dy, self.w)}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        dy, w, dx = values["dy"], values["w"], specs["dx"]
        groups = self.conv.groups
        padded = _pad(xp, self.conv, xp.zeros(dx.dims, dy.dtype))
        for tap, seen in taps(self.conv, w.shape[2:], dy.shape[2:]):
            part = xp.einsum("ngk...,gkc->ngc...", split_groups(dy, groups), _filters(w[(..., *tap)], groups))
            padded[seen] += part.reshape(padded[seen].shape)
        inside = (slice(b, b + d) for b, d in zip(self.conv.pre_padding, dx.dims[2:], strict=True))
        return {"dx": padded[(slice(None), slice(None), *inside)]}


class ConvolutionBackwardFilter(Convolution[T], tag=True):
    """dw = the gradient with respect to the filter. Its dims do not follow from the inputs'."""

    kind = "conv_bwd_filter"
    inputs = ("x", "dy")
    outputs = ("dw",)
    shape = ("x", "dw", "dy")
    x: T
    dy: T
    dw: T = ALLOCATED

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        self._check_dtypes(specs)
        return {}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        return {"x": self._data(g, self.dy, d["dw"], self.x), "dy": self._forward(g, self.x, d["dw"])}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        x, dy, dw = values["x"], values["dy"], specs["dw"]
        groups = self.conv.groups
        padded = _pad(xp, self.conv, x)
        result = xp.empty(dw.dims, x.dtype)
        for tap, seen in taps(self.conv, dw.dims[2:], dy.shape[2:]):
            a, b = (_flat(split_groups(array, groups)) for array in (padded[seen], dy))
            part = xp.einsum("ngcp,ngkp->gkc", a, b)
            result[(..., *tap)] = part.reshape(dw.dims[:2])
        return {"dw": result}


def check_dims(operation: type[Convolution[Any]], conv: ConvSpec, specs: Specs) -> None:
    """Raise `InvalidRequest` unless the output's dims are those of a convolution."""
    x, w, y = operation.shape
    wanted = conv.output_dims(specs[x].dims, specs[w].dims)
    gradient = "" if y in operation.outputs else operation.outputs[0]
    check_result(y, specs[y].dims, wanted, f"of conv({x}, {w})", gradient=gradient)


def _pad(xp: Any, conv: ConvSpec, x: Array) -> Array:
    return xp.pad(x, ((0, 0), (0, 0), *zip(conv.pre_padding, conv.post_padding, strict=True)))


def split_groups(values: Array, groups: int) -> Array:
    """An array of dims N, C, spatial with the dims (N, groups, channels of a group, spatial)."""
    return values.reshape(values.shape[0], groups, values.shape[1] // groups, *values.shape[2:])


def _flat(values: Array) -> Array:
    return values.reshape(*values.shape[:3], -1)


def _filters(w: Array, groups: int) -> Array:
    """(K, C / groups) as (groups, K / groups, C / groups)."""
    return w.reshape(groups, w.shape[0] // groups, w.shape[1])


def example(
    x: tuple[int, ...], w: tuple[int, ...], layout: LayoutName = "NCHW", **parameters: int
) -> Example:
    """A convolution of two spatial dims and its gradients, with the parameters of `ConvSpec.symmetric`."""
    conv = ConvSpec.symmetric(2, **parameters)
    operations = (
        ConvolutionForward(x="x", w="w", y="y", conv=conv),
        ConvolutionBackwardData(dy="dy", w="w", dx="dx", conv=conv),
        ConvolutionBackwardFilter(x="x", dy="dy", dw="dw", conv=conv),
    )
    return Example(dims={"x": x, "w": w}, operations=operations, layout=layout)


def examples() -> tuple[Example, ...]:
    """The last one writes much and computes little."""
    return (
        example((1, 2, 6, 6), (3, 2, 3, 3), pad=1),
        example((2, 3, 8, 8), (4, 3, 3, 3)),
        example((1, 4, 7, 7), (4, 2, 3, 3), pad=1, groups=2),
        example((2, 4, 9, 9), (2, 4, 3, 3), pad=1, stride=2),
        example((1, 3, 10, 10), (2, 3, 3, 3), dilation=2),
        example((4, 8, 5, 5), (8, 8, 1, 1)),
        example((1, 6, 12, 12), (6, 1, 3, 3), pad=1, groups=6),
        example((2, 8, 8, 8), (8, 8, 3, 3), "NHWC", pad=1),
        example((1, 8, 16, 16), (16, 8, 3, 3), pad=1),
        example((3, 4, 6, 8), (4, 4, 5, 3), "NHWC", pad=2),
        example((2, 1, 160, 160), (2, 1, 1, 1)),
    )
