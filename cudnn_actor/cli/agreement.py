"""The difference between a result and the CPU engine's, and the difference that is allowed."""

from __future__ import annotations

import math

import numpy as np

from cudnn_actor.protocol import (
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
    DType,
    Node,
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
"""The allowed error of whole numbers rounded from floats: a value near a half may round the other way."""


def relative_error(got: np.ndarray, wanted: np.ndarray, uncertainty: np.ndarray | float = 0.0) -> float:
    """|got - wanted| / |wanted| in the Euclidean norm; infinite if a value is NaN in only one of them.

    `uncertainty`: this much of each element's error is ignored, since operations may magnify roundings.
    """
    got, wanted = got.astype(np.float64), wanted.astype(np.float64)
    same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    with np.errstate(all="ignore"):
        apart = np.maximum(np.abs(got - wanted) - uncertainty, 0.0)
        error = float(np.linalg.norm(np.where(same | np.isinf(uncertainty), 0.0, apart)))
        size = float(np.linalg.norm(np.where(np.isfinite(wanted), wanted, 0.0)))
    if math.isnan(error):
        return math.inf
    return error / size if size else error


def allowed_error(graph: OperationGraph, result: int) -> float:
    """A bound on the relative error of a result, in the norm, that rounding alone causes. `result`: its uid.

    A sum of n products with independent roundings is off by sqrt(n) roundings of the compute type. The
    result is rounded once more when it is stored. Four times that is allowed, or more: `Operation.slack_of`.
    """
    if not graph.tensor(result).dtype.is_floating:
        return _ROUNDED if any(isinstance(op, Pointwise) for op in graph.operations) else 0.0
    steps = [math.sqrt(_terms(graph, op)) * _product_epsilon(graph, op) for op in graph.operations]
    stored = max(_EPSILON.get(graph.tensor(uid).dtype, 0.0) for uid in graph.written)
    slack = max(op.slack_of(graph.tensor(result).dtype) for op in graph.operations)
    return 4 * slack * (stored + sum(steps))


def _terms(graph: OperationGraph, operation: Node) -> int:
    """How many numbers are summed in one element of a result, at most."""
    match operation:
        case ConvolutionForward(w=w):
            return math.prod(graph.tensor(w).dims[1:])
        case ConvolutionBackwardData(w=w, conv=conv):
            filters, _, *taps = graph.tensor(w).dims
            return max(filters // conv.groups, 1) * math.prod(taps)
        case ConvolutionBackwardFilter(dy=dy):
            samples, _, *places = graph.tensor(dy).dims
            return samples * math.prod(places)
        case Pointwise():
            return 1
    return max(math.prod(graph.tensor(uid).dims) for uid in operation.reads)


def _product_epsilon(graph: OperationGraph, operation: Node) -> float:
    compute = graph.compute(operation)
    if compute is DType.FLOAT32 and graph.numerics.tf32:
        return _TF32
    return _EPSILON.get(compute, 0.0)
