"""Operations on the lines of a tensor, in terms of pointwise operations and reductions.

So described, an operation becomes part of a kernel that computes what stands
around it as well: see `kernels.line_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from cudnn_actor.engines.cuda.kernels.expressions import Constant, Value
from cudnn_actor.protocol.operations import (
    LayerNorm,
    Node,
    PointwiseMode,
    Reduction,
    ReductionMode,
    RMSNorm,
    Softmax,
    SoftmaxBackward,
)

__all__ = ["IN_LINES", "Computing", "InLines"]

_M, _R = PointwiseMode, ReductionMode
_ONE = Constant(1.0)


class Computing(Protocol):
    """Appends nodes to the body of a kernel over lines."""

    def apply(self, mode: PointwiseMode, *operands: Value) -> Value:
        """Append a pointwise function, and return its value, not rounded."""

    def reduce(self, mode: ReductionMode, operand: Value) -> Value:
        """Append a reduction along the lines, and return its value, not rounded."""


class InLines(NamedTuple):
    """How an operation is written as pointwise functions and reductions along lines.

    Parameters
    ----------
    axes
        The dims of x that are a line's, ascending, from the operation and x's rank.
    compute
        Adds the operation, from the values of its inputs by name; gives the values of all of its outputs.
    alone
        Whether it runs in this way with nothing around it, too.
    """

    axes: Callable[[Any, int], tuple[int, ...]]
    compute: Callable[[Any, Mapping[str, Value], Computing], Mapping[str, Value]]
    alone: bool = False


def _reduction(operation: Reduction[int], given: Mapping[str, Value], to: Computing) -> Mapping[str, Value]:
    return {"y": to.reduce(operation.mode, given["x"])}


def _softmax(operation: Softmax[int], given: Mapping[str, Value], to: Computing) -> Mapping[str, Value]:
    below = to.apply(_M.SUB, given["x"], to.reduce(_R.MAX, given["x"]))
    powers = to.apply(_M.EXP, below)
    total = to.reduce(_R.SUM, powers)
    if operation.log:
        return {"y": to.apply(_M.SUB, below, to.apply(_M.LOG, total))}
    return {"y": to.apply(_M.MUL, powers, to.apply(_M.DIV, _ONE, total))}


def _softmax_gradient(
    operation: SoftmaxBackward[int], given: Mapping[str, Value], to: Computing
) -> Mapping[str, Value]:
    dy, y = given["dy"], given["y"]
    if operation.log:
        return {"dx": to.apply(_M.SUB, dy, to.apply(_M.MUL, to.apply(_M.EXP, y), to.reduce(_R.SUM, dy)))}
    total = to.reduce(_R.SUM, to.apply(_M.MUL, dy, y))
    return {"dx": to.apply(_M.MUL, y, to.apply(_M.SUB, dy, total))}


def _inverse(square: Value, epsilon: float, to: Computing) -> Value:
    """1 / sqrt(mean + epsilon), the mean of this square along the line."""
    mean = to.apply(_M.ADD, to.reduce(_R.MEAN, square), Constant(epsilon))
    return to.apply(_M.DIV, _ONE, to.apply(_M.SQRT, mean))


def _layer_norm(operation: LayerNorm[int], given: Mapping[str, Value], to: Computing) -> Mapping[str, Value]:
    mean = to.reduce(_R.MEAN, given["x"])
    centred = to.apply(_M.SUB, given["x"], mean)
    inverse = _inverse(to.apply(_M.SQUARE, centred), operation.epsilon, to)
    y = to.apply(_M.MUL, centred, inverse)
    if "scale" in given:
        y = to.apply(_M.MUL, y, given["scale"])
    if "bias" in given:
        y = to.apply(_M.ADD, y, given["bias"])
    return {"y": y, "mean": mean, "inverse_deviation": inverse}


def _rms_norm(operation: RMSNorm[int], given: Mapping[str, Value], to: Computing) -> Mapping[str, Value]:
    inverse = _inverse(to.apply(_M.SQUARE, given["x"]), operation.epsilon, to)
    y = to.apply(_M.MUL, given["x"], inverse)
    if "scale" in given:
        y = to.apply(_M.MUL, y, given["scale"])
    return {"y": y, "inverse_rms": inverse}


def _last(operation: Any, rank: int) -> tuple[int, ...]:
    """The axes from the operation's axis to the last."""
    return tuple(range(operation.axis % rank, rank))


def _only(operation: Any, rank: int) -> tuple[int, ...]:
    """The operation's only axis."""
    return (operation.axis % rank,)


IN_LINES: Mapping[type[Node], InLines] = {
    Reduction: InLines(lambda operation, rank: operation.reduced(rank), _reduction),
    Softmax: InLines(_only, _softmax, alone=True),
    SoftmaxBackward: InLines(_only, _softmax_gradient, alone=True),
    LayerNorm: InLines(_last, _layer_norm),
    RMSNorm: InLines(_last, _rms_norm),
}
