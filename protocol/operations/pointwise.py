"""Functions of each element, of one to three tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.operations.base import ALLOCATED, Array, Operation, Region, Specs, T, require
from cudnn_actor.protocol.operations.example import Example
from cudnn_actor.protocol.operations.functions import FUNCTIONS, TRUTH, PointwiseMode
from cudnn_actor.protocol.operations.gradients import gradients
from cudnn_actor.protocol.types.checks import is_finite
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Pointwise", "PointwiseMode"]

_FIELDS = ("parameter", "lower", "upper")
_INTEGERS = tuple(dtype for dtype in DType if not dtype.is_floating)
_POSITIVE = frozenset({PointwiseMode.SOFTPLUS, PointwiseMode.CELU})
"""Modes whose parameter must be > 0."""


class Pointwise(Operation[T], tag=True):
    """result = mode(operands), of each element. Answered by a `Receipt`.

    Functions of floats are computed in float32, or in float64 if an operand is. Arithmetic of integers alone,
    where it gives integers, is exact, modulo 2**64: in int64, or in uint64 if an operand is, but for a
    condition. The result is rounded to its dtype, once: to nearest, ties to even; of integers it saturates,
    and NaN becomes 0. Bitwise functions keep the lowest bits instead.

    Parameters
    ----------
    mode
        The function.
    operands
        As many as the mode takes, of equal rank. Dims of 1 are broadcast.
    result
        Of any dtype. If it is left out, it has the type that is computed in, or is uint8 of truth values.
    parameter
        p in the formula of a mode that has one; None for its default.
    lower, upper
        Bounds, of those modes that have them: `clip` and `relu`.
    """

    kind = "pointwise"
    inputs = ("operands",)
    outputs = ("result",)
    takes_empty = True
    mode: PointwiseMode
    operands: tuple[T, ...]
    result: T = ALLOCATED
    parameter: float | None = None
    lower: float | None = None
    upper: float | None = None

    @property
    def title(self) -> str:
        """The mode."""
        return str(self.mode)

    @property
    def effective_parameters(self) -> dict[str, float]:
        """The parameters in effect, in the order of the mode's row: those given, and defaults.

        Raises `InvalidRequest` for one that the mode cannot have.
        """
        found = dict(FUNCTIONS[self.mode].parameters)
        if self.parameter is self.lower is self.upper is None:
            return found
        for name in _FIELDS:
            value = getattr(self, name)
            if value is None:
                continue
            if name not in found:
                raise InvalidRequest(
                    field=name,
                    value=value,
                    problem=f"is given, but {self.mode} has no {name}",
                    fix="leave it out",
                )
            positive = name == "parameter" and self.mode in _POSITIVE
            if not is_finite(value) or (positive and value <= 0):
                raise InvalidRequest(
                    field=name,
                    value=value,
                    problem=f"must be a finite number{' > 0' if positive else ''}",
                    fix="leave it out for the default",
                )
            found[name] = float(value) + 0.0  # -0.0 becomes 0.0: equal operations mean the same
        if found.get("lower", 0.0) > found.get("upper", 0.0):
            raise InvalidRequest(
                field="lower",
                value=found["lower"],
                problem=f"is above the upper bound, {found['upper']}",
                fix="give a lower bound that is not above the upper one",
            )
        return found

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        self.effective_parameters  # noqa: B018 - raises
        function, given = FUNCTIONS[self.mode], list(specs.values())
        if len(given) != function.arity:
            raise InvalidRequest(
                field="operands",
                value=len(given),
                problem=f"is not the number of operands of {self.mode}",
                fix=f"give it {function.arity}",
            )
        rank = max(spec.rank for spec in given)
        sizes = zip(*(spec.dims for spec in given if spec.rank == rank), strict=True)
        dims = tuple(0 if 0 in size else max(size) for size in sizes)
        for name, spec in specs.items():
            if spec.rank != rank or any(d not in (1, r) for d, r in zip(spec.dims, dims, strict=True)):
                raise InvalidRequest(
                    field=name,
                    value=spec.dims,
                    problem=f"does not broadcast to dims {dims}",
                    fix="give each dim the size 1 or that of the other operand",
                )
            if function.bits:
                require(specs, name, spec.dims, *_INTEGERS)
        dtype = TRUTH if function.truth else self.compute(tuple(spec.dtype for spec in given))
        return {"result": TensorSpec.packed(dims, dtype)}

    def check(self, specs: Specs) -> None:
        inputs = {name: specs[name] for name, _ in self.named(self.inputs)}
        require(specs, "result", self.infer(inputs)["result"].dims)  # of any dtype: it is rounded

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        found = gradients(self, self.operands, self.result, d["result"], g.pointwise)
        operands: dict[str, Any] = dict(self.named(self.inputs))
        named = zip(operands, found, strict=True)
        return {name: g.sum_to(dx, operands[name].dims) for name, dx in named if dx is not None}

    def needs(self, specs: Specs, wanted: Mapping[str, Region]) -> dict[str, Region]:
        (region,) = wanted.values()
        return {
            name: tuple(
                slice(None) if size == 1 else part
                for size, part in zip(specs[name].dims, region, strict=True)
            )
            for name, _ in self.named(self.inputs)
        }

    def compute(self, dtypes: tuple[DType, ...]) -> DType:
        function, integers = FUNCTIONS[self.mode], not any(dtype.is_floating for dtype in dtypes)
        if function.exact(tuple(self.effective_parameters.values()), integers=integers):
            return DType.UINT64 if DType.UINT64 in function.deciding_operands(dtypes) else DType.INT64
        return super().compute(dtypes)

    @property
    def samples_of_each(self) -> bool:
        return True

    def samples(self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Array]) -> dict[str, Array]:
        samples = zip(self.named(self.inputs), FUNCTIONS[self.mode].samples, strict=False)
        found = {name: of(xp, draw(specs[name])) for (name, _), of in samples if of is not None}
        parameters = self.effective_parameters
        bounds = [parameters[n] for n in ("lower", "upper") if math.isfinite(parameters.get(n, math.inf))]
        if bounds:  # values on both sides of each
            x, reach = draw(specs["operands[0]"]), bounds[-1] - bounds[0]
            found["operands[0]"] = bounds[0] + (reach * (x + 1) / 4 if reach else x)
        return found

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        function, spec = FUNCTIONS[self.mode], specs["result"]
        if self.mode is PointwiseMode.IDENTITY:
            (x,) = values.values()
            return {"result": xp.broadcast_to(x, spec.dims)}
        result = function(xp, list(values.values()), tuple(self.effective_parameters.values()))
        if function.bits and not spec.dtype.is_floating:
            result = result & 1 if spec.dtype is DType.BOOL else result.astype(spec.dtype.numpy)
        return {"result": xp.broadcast_to(result, spec.dims)}


def examples() -> tuple[Example, ...]:
    """A sum with broadcasting; a comparison and a choice by it."""
    add = Pointwise(mode=PointwiseMode.ADD, operands=("x", "other"), result="result")
    greater = Pointwise(mode=PointwiseMode.GT, operands=("x", "other"), result="greater")
    select = Pointwise(mode=PointwiseMode.SELECT, operands=("greater", "x", "other"), result="chosen")
    return (
        Example(dims={"x": (2, 3, 5, 7), "other": (1, 3, 1, 1)}, operations=(add,)),
        Example(dims={"x": (3, 4, 6), "other": (3, 1, 6)}, operations=(greater, select)),
    )
