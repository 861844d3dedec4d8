"""Operations on the lines of a tensor, in terms of pointwise operations and reductions.

So described, an operation becomes part of a kernel that computes the operations
around it, too: see `kernels.line_kernels`. The description is a trace of the
operation's definition, `Operation.evaluate`: it runs on values that record the
functions that are applied to them, instead of on arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

from cudnn_actor.engines.cuda.kernels.expressions import Constant, Value
from cudnn_actor.protocol.operations import (
    FUNCTIONS,
    LayerNorm,
    Node,
    PointwiseMode,
    Reduction,
    ReductionMode,
    RMSNorm,
    Softmax,
    SoftmaxBackward,
)

__all__ = ["ALONE", "IN_LINES", "Computing", "compute_in_lines"]

_M, _R = PointwiseMode, ReductionMode


class Computing(Protocol):
    """Appends nodes to the body of a kernel over lines."""

    def apply(self, mode: PointwiseMode, *operands: Value) -> Value:
        """Append a pointwise function, and return its value, not rounded."""

    def reduce(self, mode: ReductionMode, operand: Value) -> Value:
        """Append a reduction along the lines, and return its value, not rounded."""


def compute_in_lines(
    operation: Node, given: Mapping[str, Value], rank: int, to: Computing
) -> Mapping[str, Value]:
    """Append an operation of `IN_LINES` to a kernel's body. Returns the values of its outputs, by name.

    `given`: the values of its inputs, by name. `rank`: x's.
    """
    if isinstance(operation, Reduction):  # its definition is a mode, as is a kernel's reduction
        return {"y": to.reduce(operation.mode, given["x"])}
    assert isinstance(operation, IN_LINES)
    lines = _Lines(to, rank, operation.reduced_dims(rank))
    traced: Any = {name: _Traced(value, lines) for name, value in given.items()}
    found: Mapping[str, Any] = operation.evaluate(_FUNCTIONS, traced, {})
    return {name: each.value for name, each in found.items()}


class _Lines(NamedTuple):
    """The body that a trace appends to, the rank of its tensors, and the axes of a line."""

    to: Computing
    rank: int
    axes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Traced:
    """A value of a kernel over lines, in the place of an array in a definition.

    `alike`: whether all elements of a line have the same value.
    """

    value: Value
    lines: _Lines
    alike: bool = False

    size = 1  # tensors without elements have no kernels

    @property
    def ndim(self) -> int:
        return self.lines.rank

    def of(self, mode: PointwiseMode, *operands: _Traced | float) -> _Traced:
        """The value of a function of values and numbers."""
        alike = all(not isinstance(each, _Traced) or each.alike for each in operands)
        values = (each.value if isinstance(each, _Traced) else Constant(float(each)) for each in operands)
        return _Traced(self.lines.to.apply(mode, *values), self.lines, alike)

    def _reduce(self, mode: ReductionMode, axis: int | tuple[int, ...], *, keepdims: bool) -> _Traced:
        axes = (axis,) if isinstance(axis, int) else axis
        assert keepdims, "a line's number stays beside its elements"
        assert tuple(each % self.ndim for each in axes) == self.lines.axes, "it is no reduction along lines"
        return _Traced(self.lines.to.reduce(mode, self.value), self.lines, alike=True)

    def max(self, axis: int | tuple[int, ...], *, keepdims: bool) -> _Traced:
        return self._reduce(_R.MAX, axis, keepdims=keepdims)

    def sum(self, axis: int | tuple[int, ...], *, keepdims: bool) -> _Traced:
        return self._reduce(_R.SUM, axis, keepdims=keepdims)

    def mean(self, axis: int | tuple[int, ...], *, keepdims: bool) -> _Traced:
        return self._reduce(_R.MEAN, axis, keepdims=keepdims)

    def __add__(self, other: _Traced | float) -> _Traced:
        # Definitions add 0 for a bias that is left out, and multiply by 1 for a scale.
        return self if other == 0 else self.of(_M.ADD, self, other)

    def __sub__(self, other: _Traced | float) -> _Traced:
        return self.of(_M.SUB, self, other)

    def __mul__(self, other: _Traced | float) -> _Traced:
        if other is self:
            return self.of(_M.SQUARE, self)
        return self if other == 1 else self.of(_M.MUL, self, other)

    def __truediv__(self, other: _Traced) -> _Traced:
        if other.alike and not self.alike:  # one division for a line, in place of one for each element
            return self * (1 / other)
        return self.of(_M.DIV, self, other)

    def __rtruediv__(self, other: float) -> _Traced:
        return self.of(_M.DIV, other, self)


def _trace(mode: PointwiseMode) -> Callable[[_Traced], _Traced]:
    return lambda x: x.of(mode, x)


_FUNCTIONS = SimpleNamespace(
    **{
        function.formula: _trace(mode)
        for mode, function in FUNCTIONS.items()
        if isinstance(function.formula, str) and function.arity == 1
    }
)
"""NumPy's functions of one operand, on traced values."""


IN_LINES = (Reduction, Softmax, SoftmaxBackward, LayerNorm, RMSNorm)
"""The operations along lines, whose dims `reduced` gives. A further one needs a definition that uses nothing
but what `_Traced` has."""
ALONE = (Softmax, SoftmaxBackward)
"""The operations that run in this way even with nothing around them."""
