"""How far a result is from the CPU engine's, and how far it may be."""

from __future__ import annotations

import math

import numpy as np

from cudnn_actor.protocol import (
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
    DType,
    Operation,
    OperationGraph,
    Pointwise,
)

__all__ = ["allowed_error", "relative_error"]

_EPSILON = {
    DType.FLOAT64: 2.0**-52,
    DType.FLOAT32: 2.0**-23,
    DType.FLOAT16: 2.0**-10,
    DType.BFLOAT16: 2.0**-7,
}
_TF32 = 2.0**-10
_ROUNDED = 0.01
"""Of whole numbers that came from floats: some fall to the other side of a half."""


def relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    """|got - wanted| / |wanted| by Euclidean norm; infinite where a value is not a number in one only."""
    got, wanted = got.astype(np.float64), wanted.astype(np.float64)
    same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    with np.errstate(all="ignore"):
        error = float(np.linalg.norm(np.where(same, 0.0, got - wanted)))
        size = float(np.linalg.norm(np.where(np.isfinite(wanted), wanted, 0.0)))
    if math.isnan(error):
        return math.inf
    return error / size if size else error


def allowed_error(graph: OperationGraph) -> float:
    """A relative error, by norm, that rounding alone stays below.

    Sums of n products whose roundings are independent are off by sqrt(n) roundings of the compute type; the
    result is rounded once more, when it is stored. Four times that is allowed.
    """
    steps = [math.sqrt(_terms(graph, op)) * _product_epsilon(graph, op) for op in graph.operations]
    stored = max(_EPSILON.get(graph.tensor(op.output).dtype, 0.0) for op in graph.operations)
    if not graph.tensor(graph.in_order()[-1].output).dtype.is_floating:
        return _ROUNDED if any(isinstance(op, Pointwise) for op in graph.operations) else 0.0
    return 4 * (stored + sum(steps))


def _terms(graph: OperationGraph, operation: Operation) -> int:
    """How many products are summed up in one element of a result."""
    match operation:
        case ConvolutionForward(w=w):
            return math.prod(graph.tensor(w).dims[1:])
        case ConvolutionBackwardData(w=w, conv=conv):
            filters, _, *taps = graph.tensor(w).dims
            return max(filters // conv.groups, 1) * math.prod(taps)
        case ConvolutionBackwardFilter(dy=dy):
            samples, _, *places = graph.tensor(dy).dims
            return samples * math.prod(places)
    return 1


def _product_epsilon(graph: OperationGraph, operation: Operation) -> float:
    if operation.compute is DType.FLOAT32 and graph.numerics.tf32:
        return _TF32
    return _EPSILON.get(operation.compute, 0.0)
