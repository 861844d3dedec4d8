"""Softmax, norms, reductions, running sums, and the largest elements along a dim, as ONNX nodes."""

from __future__ import annotations

import math

import numpy as np

from cudnn_actor.engines.cpu.sessions.draft import Draft, refuse
from cudnn_actor.protocol.operations import (
    ArgReduction,
    BatchNorm,
    Cumulative,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    Reduction,
    ReductionMode,
    RMSNorm,
    Softmax,
    TopK,
)
from cudnn_actor.protocol.types.dtypes import DType

__all__ = [
    "emit_arg_reduction",
    "emit_batch_norm",
    "emit_cumulative",
    "emit_layer_norm",
    "emit_norm_of_groups",
    "emit_reduction",
    "emit_rms_norm",
    "emit_softmax",
    "emit_top_k",
]

_REDUCTIONS = {
    ReductionMode.SUM: "ReduceSum",
    ReductionMode.PRODUCT: "ReduceProd",
    ReductionMode.MIN: "ReduceMin",
    ReductionMode.MAX: "ReduceMax",
    ReductionMode.ABSOLUTE_MAX: "ReduceMax",
    ReductionMode.L1: "ReduceL1",
    ReductionMode.SUM_OF_SQUARES: "ReduceSumSquare",
    ReductionMode.L2: "ReduceL2",
    ReductionMode.MEAN: "ReduceMean",
    ReductionMode.LOG_SUM: "ReduceLogSum",
    ReductionMode.LOG_SUM_EXP: "ReduceLogSumExp",
}
_OF_INTEGERS = frozenset({ReductionMode.SUM, ReductionMode.MIN, ReductionMode.MAX})


def emit_softmax(draft: Draft, operation: Softmax[int]) -> None:
    """Write a softmax or its logarithm."""
    x = draft.read_float(operation.x)
    operator = "LogSoftmax" if operation.log else "Softmax"
    draft.write_float(operation.y, draft.emit(operator, x, axis=operation.axis))


def emit_reduction(draft: Draft, operation: Reduction[int]) -> None:
    """Write a reduction."""
    dims, given = draft.dims(operation.x), draft.type_of(operation.x)
    axes = operation.reduced_dims(len(dims))
    mode, x = operation.mode, draft.read(operation.x)
    if not axes:
        refuse("a reduction of no dims")
    if given is not DType.FLOAT32:
        # ONNX Runtime sums int64 up in float64.
        wide = given in (DType.FLOAT64, DType.UINT64) or (given is DType.INT64 and not mode.selects)
        if wide or mode not in _OF_INTEGERS:
            refuse(f"{mode} of {given}")
        x = x if given is DType.INT64 else draft.cast(x, DType.INT64)
    if mode is ReductionMode.ABSOLUTE_MAX:
        x = draft.emit("Abs", x)
    listed, keep = draft.list_of(axes), int(operation.keep_dims)
    found = draft.emit(_REDUCTIONS[mode], x, listed, keepdims=keep)
    if given is DType.FLOAT32 and mode.selects:  # ONNX Runtime may find a number where there is a NaN
        nan = draft.cast(draft.emit("IsNaN", x), DType.FLOAT32)
        some = draft.cast(draft.emit("ReduceMax", nan, listed, keepdims=keep), DType.BOOL)
        found = draft.emit("Where", some, draft.number(math.nan), found)
    if given is DType.FLOAT32:
        draft.write_float(operation.y, found)
    else:
        draft.write_integers(operation.y, found)


def emit_arg_reduction(draft: Draft, operation: ArgReduction[int]) -> None:
    """Write the place of the largest or smallest element."""
    given = draft.type_of(operation.x)
    if given not in (DType.FLOAT32, DType.INT32, DType.INT64):
        refuse(f"{operation.title} of {given}")
    operator = "ArgMax" if operation.mode is ReductionMode.MAX else "ArgMin"
    x = draft.read(operation.x)
    keep = int(operation.keep_dims)
    found = draft.emit(operator, x, axis=operation.axis, keepdims=keep)
    if given is DType.FLOAT32:
        found = _nan_first(draft, operation, x, found)
    draft.write(operation.y, found)


def _nan_first(draft: Draft, operation: ArgReduction[int], x: str, found: str) -> str:
    """The place of the first NaN, if there is one."""
    keep = int(operation.keep_dims)
    nan = draft.cast(draft.emit("IsNaN", x), DType.INT32)
    first = draft.emit("ArgMax", nan, axis=operation.axis, keepdims=keep)
    axes = draft.list_of([operation.axis])
    some = draft.cast(draft.emit("ReduceMax", nan, axes, keepdims=keep), DType.BOOL)
    return draft.emit("Where", some, first, found)


def emit_cumulative(draft: Draft, operation: Cumulative[int]) -> None:
    """Write running sums."""
    given = draft.type_of(operation.x)
    if operation.mode is not ReductionMode.SUM or given in (DType.FLOAT64, DType.UINT64):
        refuse(f"{operation.kind} {operation.mode} of {given}")
    x = draft.read(operation.x)
    if given is not DType.FLOAT32:
        x = x if given is DType.INT64 else draft.cast(x, DType.INT64)
    axis = draft.number(operation.axis, DType.INT64)
    found = draft.emit("CumSum", x, axis, exclusive=int(operation.exclusive), reverse=int(operation.reverse))
    if given is DType.FLOAT32:
        draft.write_float(operation.y, found)
    else:
        draft.write_integers(operation.y, found)


def emit_top_k(draft: Draft, operation: TopK[int]) -> None:
    """Write the largest or smallest elements."""
    given = draft.type_of(operation.x)
    if given not in (DType.INT32, DType.INT64):
        refuse(f"top_k of {given}")  # ONNX does not say where NaN comes
    values, indices = draft.emit_several(
        2,
        "TopK",
        draft.read(operation.x),
        draft.list_of([operation.k]),
        axis=operation.axis,
        largest=int(operation.largest),
        sorted=1,
    )
    if not operation.in_order:
        refuse("top_k in the order of places")
    draft.write(operation.values, values)
    if operation.indices is not None:
        draft.write(operation.indices, indices)


# Norms.


def emit_layer_norm(draft: Draft, operation: LayerNorm[int]) -> None:
    """Write a layer norm."""
    axis = operation.axis % len(draft.dims(operation.x))
    x = draft.read_float(operation.x)
    axes = draft.list_of(range(axis, len(draft.dims(operation.x))))
    mean = draft.emit("ReduceMean", x, axes)
    centred = draft.emit("Sub", x, mean)
    deviation = _root_of_mean_square(draft, centred, axes, operation.epsilon)
    found = draft.emit("Div", centred, deviation)
    if operation.scale is not None:
        found = draft.emit("Mul", found, draft.read_float(operation.scale))
    if operation.bias is not None:
        found = draft.emit("Add", found, draft.read_float(operation.bias))
    draft.write_float(operation.y, found)
    if operation.mean is not None:
        draft.write_float(operation.mean, mean)
    if operation.inverse_deviation is not None:
        draft.write_float(operation.inverse_deviation, draft.emit("Reciprocal", deviation))


def emit_rms_norm(draft: Draft, operation: RMSNorm[int]) -> None:
    """Write a norm by the root of the mean of squares."""
    dims = draft.dims(operation.x)
    x, axes = draft.read_float(operation.x), draft.list_of(range(operation.axis % len(dims), len(dims)))
    root = _root_of_mean_square(draft, x, axes, operation.epsilon)
    found = draft.emit("Div", x, root)
    if operation.scale is not None:
        found = draft.emit("Mul", found, draft.read_float(operation.scale))
    draft.write_float(operation.y, found)
    if operation.inverse_rms is not None:
        draft.write_float(operation.inverse_rms, draft.emit("Reciprocal", root))


def _root_of_mean_square(draft: Draft, x: str, axes: str, epsilon: float) -> str:
    """The root of the mean of x's squares along axes, plus a small number."""
    squares = draft.emit("ReduceMean", draft.emit("Mul", x, x), axes)
    return draft.emit("Sqrt", draft.emit("Add", squares, draft.number(epsilon)))


def emit_batch_norm(draft: Draft, operation: BatchNorm[int]) -> None:
    """Write a batch norm with given statistics.

    Behind a convolution as ONNX's, which becomes a part of it: the mean is not taken off before the scale is
    applied, so the result may be off by a rounding of x. The convolution's sum is off by that, too.
    """
    dims = draft.dims(operation.x)
    x, mean, variance = (draft.read_float(uid) for uid in (operation.x, operation.mean, operation.variance))
    if draft.is_convolved(operation.x):
        scale, bias = (
            draft.constant(np.full(dims[1], other, np.float32)) if uid is None else draft.read_float(uid)
            for uid, other in ((operation.scale, 1), (operation.bias, 0))
        )
        given = (x, scale, bias, mean, variance)
        draft.write_float(operation.y, draft.emit("BatchNormalization", *given, epsilon=operation.epsilon))
        return
    deviation = draft.emit("Sqrt", draft.emit("Add", variance, draft.number(operation.epsilon)))
    found = draft.emit("Sub", x, _beside(draft, mean, dims))
    found = draft.emit("Div", found, _beside(draft, deviation, dims))
    draft.write_float(operation.y, _scale(draft, found, operation.scale, operation.bias, dims))


def emit_norm_of_groups(draft: Draft, operation: InstanceNorm[int] | GroupNorm[int]) -> None:
    """Write an instance norm or a group norm: of (N, groups, elements), and then the channels' scale."""
    for name in ("mean", "inverse_deviation"):
        if getattr(operation, name) is not None:
            refuse(f"{operation.kind} with {name}")
    dims = draft.dims(operation.x)
    groups = operation.groups_of(dims[1])
    x = draft.read_float(operation.x)
    parted = draft.emit("Reshape", x, draft.list_of((dims[0], groups, math.prod(dims[1:]) // groups)))
    ones, zeros = (draft.constant(np.full(groups, value, np.float32)) for value in (1, 0))
    normal = draft.emit("InstanceNormalization", parted, ones, zeros, epsilon=operation.epsilon)
    found = draft.emit("Reshape", normal, draft.list_of(dims))
    draft.write_float(operation.y, _scale(draft, found, operation.scale, operation.bias, dims))


def _scale(draft: Draft, value: str, scale: int | None, bias: int | None, dims: tuple[int, ...]) -> str:
    """A value times a number for each channel, plus another."""
    for operator, uid in (("Mul", scale), ("Add", bias)):
        if uid is not None:
            value = draft.emit(operator, value, _beside(draft, draft.read_float(uid), dims))
    return value


def _beside(draft: Draft, value: str, dims: tuple[int, ...]) -> str:
    """A number for each channel of a tensor of these dims, to be broadcast to it."""
    return draft.emit("Reshape", value, draft.list_of((dims[1], *[1] * (len(dims) - 2))))
