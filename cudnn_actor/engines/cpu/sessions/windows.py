"""Poolings and resampling, as ONNX nodes."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from cudnn_actor.engines.cpu.sessions.draft import Draft, refuse
from cudnn_actor.engines.cpu.sessions.onnx_format import Value
from cudnn_actor.protocol.operations import (
    AdaptiveWindow,
    AvgPool,
    MaxPool,
    Resample,
    ResampleMode,
    Window,
)
from cudnn_actor.protocol.operations.resampling import Taps
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["emit_avg_pool", "emit_max_pool", "emit_resample"]


def _windows(window: Window | AdaptiveWindow, dims: tuple[int, ...]) -> dict[str, Value]:
    """The attributes of a pooling of a tensor of these dims."""
    if isinstance(window, AdaptiveWindow):
        sizes = list(zip(dims[2:], window.output, strict=True))
        if any(size % count for size, count in sizes):
            refuse("windows of different sizes")
        size = tuple(size // count for size, count in sizes)
        return {"kernel_shape": size, "strides": size}
    pads = (*window.pre_padding, *window.post_padding)
    if any(pad >= size for pad, size in zip(pads, (*window.size, *window.size), strict=True)):
        refuse("windows that lie in the padding")
    return {
        "kernel_shape": window.size,
        "strides": window.stride,
        "dilations": window.dilation,
        "pads": pads,
    }


def emit_max_pool(draft: Draft, operation: MaxPool[int]) -> None:
    """Write a maximum over windows."""
    if operation.index is not None:
        refuse("the places of maxima")  # ONNX does not say where NaN is found
    x = draft.read_float(operation.x)
    attributes = _windows(operation.window, draft.dims(operation.x))
    found = draft.emit("MaxPool", x, **attributes)
    # ONNX Runtime finds a NaN only where no number is behind it in the window.
    some = draft.emit("MaxPool", draft.cast(draft.emit("IsNaN", x), DType.FLOAT32), **attributes)
    found = draft.emit("Where", draft.cast(some, DType.BOOL), draft.number(np.nan), found)
    draft.write(operation.y, found, rounded=True)


def emit_avg_pool(draft: Draft, operation: AvgPool[int]) -> None:
    """Write a mean over windows."""
    x = draft.read_float(operation.x)
    attributes = _windows(operation.window, draft.dims(operation.x))
    counted = int(operation.include_padding)
    draft.write_float(operation.y, draft.emit("AveragePool", x, count_include_pad=counted, **attributes))


_MOST_TAPS = 4
"""The taps of a cubic resampling without antialiasing."""


def emit_resample(draft: Draft, operation: Resample[int]) -> None:
    """Write a resampling: along one dim after the other, the neighbours times their weights.

    ONNX's `Resize` is computed in float32, in which places in a long dim have few digits behind the point.
    """
    along = operation.taps(draft.dims(operation.x))
    for taps in along.values():
        nothing = taps.outside.any() or not taps.weights.any(axis=1).all()
        if nothing or taps.places.shape[1] > _MOST_TAPS:
            refuse("resampling with values from outside, or of more than 4 neighbours")
    if operation.mode is ResampleMode.NEAREST:
        draft.write(operation.y, _nearest(draft, operation, along), rounded=True)
        return
    value = draft.read_float(operation.x)
    for axis, taps in along.items():
        value = _weighted_sums(draft, value, axis, taps, len(operation.sizes))
    draft.write_float(operation.y, value)


def _nearest(draft: Draft, operation: Resample[int], along: Mapping[int, Taps]) -> str:
    """A resampling to the nearest: it repeats single elements.

    Along axes where each element is repeated equally often, it is one `Resize`, which is fast. Along all
    others it is a `Gather`.
    """
    dims, value = draft.dims(operation.x), draft.read(operation.x)
    times = np.ones(len(dims), np.float32)
    for axis, taps in along.items():
        places = taps.places[:, 0]
        count = len(places) // dims[axis]
        if count > 1 and (places == np.arange(len(places)) // count).all():
            times[axis] = count
        else:
            value = draft.emit("Gather", value, draft.list_of(places), axis=axis)
    if (times == 1).all():
        return value
    if draft.type_of(operation.x) is not DType.FLOAT32:
        refuse(f"resampling of {draft.type_of(operation.x)}")
    how = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return draft.emit("Resize", value, "", draft.constant(times), mode="nearest", **how)


def _weighted_sums(draft: Draft, value: str, axis: int, taps: Taps, rank: int) -> str:
    """The weighted sums of neighbours along a dim."""
    places, weights = _without_zeros(taps)
    beside = [1] * rank
    beside[axis] = len(weights)
    parts = []
    for tap in range(weights.shape[1]):
        factor = draft.constant(weights[:, tap].astype(np.float32).reshape(beside))
        elements = draft.emit("Gather", value, draft.list_of(places[:, tap]), axis=axis)
        parts.append(draft.emit("Mul", elements, factor))
    return functools.reduce(functools.partial(draft.emit, "Add"), parts)


def _without_zeros(taps: Taps) -> tuple[np.ndarray, np.ndarray]:
    """Places and weights, none of which is 0, as infinity times 0 is NaN: the largest is shared instead."""
    places, weights = taps.places.copy(), taps.weights.copy()
    rows, best = np.arange(len(weights)), np.abs(weights).argmax(axis=1)
    unused = weights == 0
    shares = 1 + unused.sum(axis=1)
    largest = weights[rows, best] / shares
    weights[rows, best] = largest
    weights = np.where(unused, largest[:, None], weights)
    return np.where(unused, places[rows, best][:, None], places), weights
