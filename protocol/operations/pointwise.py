"""Functions of each element, of one or two tensors."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Any

from cudnn_actor.protocol.epilogue import Activation, Epilogue
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.operations.base import ALLOCATED, Array, Operation, Specs, T, require
from cudnn_actor.protocol.tensor import TensorSpec

__all__ = ["Pointwise", "PointwiseMode"]


class PointwiseMode(enum.StrEnum):
    """An elementwise function of one or two tensors; smaller operands are broadcast.

    The activations have the names and formulas of `Activation`.
    """

    ADD = "add"
    MUL = "mul"
    RELU = "relu"
    LEAKY_RELU = "leaky_relu"
    SIGMOID = "sigmoid"
    TANH = "tanh"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SWISH = "swish"
    ELU = "elu"
    SOFTPLUS = "softplus"


_BINARY = frozenset({PointwiseMode.ADD, PointwiseMode.MUL})
_EXACT = frozenset({*_BINARY, PointwiseMode.RELU})
"""Modes that give whole numbers for whole numbers."""


class Pointwise(Operation[T], frozen=True, kw_only=True, tag=True):
    """result = mode(operands), with the activation's `parameter` if it has one."""

    kind = "pointwise"
    inputs = ("operands",)
    outputs = ("result",)
    mode: PointwiseMode
    operands: tuple[T, ...]
    result: T = ALLOCATED
    parameter: float | None = None

    @property
    def effective_parameter(self) -> float | None:
        """The parameter in effect: the given one, the activation's default, or None.

        Raises `InvalidRequest` for one that the activation cannot have.
        """
        if self.mode in _BINARY:
            if self.parameter is not None:
                raise InvalidRequest(
                    field="parameter",
                    value=self.parameter,
                    problem=f"is given, but {self.mode} has no parameter",
                    fix="leave it out",
                )
            return None
        return Epilogue(activation=Activation(self.mode), parameter=self.parameter).effective_parameter

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        self.effective_parameter  # noqa: B018 - raises
        wanted = 2 if self.mode in _BINARY else 1
        given = list(specs.values())
        if len(given) != wanted:
            raise InvalidRequest(
                field="operands",
                value=len(given),
                problem=f"is not the number of operands of {self.mode}",
                fix=f"give it {wanted}",
            )
        rank = max(spec.rank for spec in given)
        dims = tuple(max(spec.dims[axis] for spec in given if spec.rank == rank) for axis in range(rank))
        for name, spec in specs.items():
            if spec.rank != rank or any(d not in (1, r) for d, r in zip(spec.dims, dims, strict=True)):
                raise InvalidRequest(
                    field=name,
                    value=spec.dims,
                    problem=f"does not broadcast to dims {dims}",
                    fix="give each dim the size 1 or that of the other operand",
                )
        return {"result": TensorSpec.packed(dims, self.compute(tuple(spec.dtype for spec in given)))}

    def check(self, specs: Specs) -> None:
        inputs = {name: specs[name] for name, _ in self.named(self.inputs)}
        require(specs, "result", self.infer(inputs)["result"].dims)  # of any dtype: it is rounded

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        operands = list(values.values())
        if self.mode not in _EXACT or any(value.dtype.kind == "f" for value in operands):
            operands = [value.astype(xp.float64, copy=False) for value in operands]
        result = _FORMULAS[self.mode](xp, self.effective_parameter, *operands)
        return {"result": xp.broadcast_to(result, specs["result"].dims)}


def _sigmoid(xp: Any, x: Array) -> Array:
    decay = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1, decay) / (1 + decay)


def _softplus(xp: Any, p: float, x: Array) -> Array:
    scaled = p * x
    return (xp.maximum(scaled, 0) + xp.log1p(xp.exp(-xp.abs(scaled)))) / p


_FORMULAS: dict[PointwiseMode, Any] = {
    PointwiseMode.ADD: lambda xp, p, a, b: a + b,  # noqa: ARG005
    PointwiseMode.MUL: lambda xp, p, a, b: a * b,  # noqa: ARG005
    PointwiseMode.RELU: lambda xp, p, x: xp.maximum(x, 0),  # noqa: ARG005
    PointwiseMode.LEAKY_RELU: lambda xp, p, x: xp.where(x > 0, x, p * x),
    PointwiseMode.SIGMOID: lambda xp, p, x: _sigmoid(xp, x),  # noqa: ARG005
    PointwiseMode.TANH: lambda xp, p, x: xp.tanh(x),  # noqa: ARG005
    PointwiseMode.GELU: lambda xp, p, x: x * xp.erfc(x * -math.sqrt(0.5)) / 2,  # noqa: ARG005
    PointwiseMode.GELU_TANH: lambda xp, p, x: (  # noqa: ARG005 - (1 + tanh(z)) / 2 is sigmoid(2 z)
        x * _sigmoid(xp, math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))
    ),
    PointwiseMode.SWISH: lambda xp, p, x: x * _sigmoid(xp, p * x),
    PointwiseMode.ELU: lambda xp, p, x: xp.where(x > 0, x, p * xp.expm1(xp.minimum(x, 0))),
    PointwiseMode.SOFTPLUS: _softplus,
}
