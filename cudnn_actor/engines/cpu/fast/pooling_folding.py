"""Windows along a dim, each by itself: its elements are copied side by side, and halves of them are joined.

This way suits few windows, short windows, and windows that have few elements in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.kernels import Call
from cudnn_actor.engines.cpu.fast.memory_orders import scratch_in_order
from cudnn_actor.engines.cpu.fast.pooling_doubling import (
    along_dim,
    copies,
    doubling_calls,
    doubling_elements,
    pad_elements,
    padded_length,
)
from cudnn_actor.engines.cpu.fast.pooling_joins import Arrays, Join
from cudnn_actor.engines.cpu.fast.pooling_windows import Axis
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint

__all__ = ["folding_groups", "folding_pays", "folding_scratch", "most_folding_scratch", "reduce_by_folding"]

Array = npt.NDArray[Any]


def folding_pays(axis: Axis) -> bool:
    """Whether windows along a dim take less time by themselves than if they are doubled."""
    return folding_groups(axis) <= doubling_calls(axis) and axis.longest * axis.count <= doubling_elements(
        axis
    )


def folding_groups(axis: Axis) -> int:
    """How many groups of windows are folded one after the other."""
    return -(-axis.count // _together(axis))


def _together(axis: Axis) -> int:
    """How many windows are folded at a time: as many as have no more elements than the dim, at least one."""
    return 1 if axis.taps is None else max(1, axis.size // axis.longest)


def folding_scratch(axis: Axis, dim: int, x: Dims, join: Join) -> int:
    """Bytes that folding windows takes, in a part of x of these dims."""
    lengths = [axis.longest * _together(axis)]
    if _reaches_beyond(axis):
        lengths.append(padded_length(axis))
    return _scratch(lengths, dim, x, join)


def most_folding_scratch(axis: Axis, dim: int, x: Dims, join: Join) -> int:
    """Bytes that folding takes of any such windows in a part of at most these dims, with shorter ones."""
    return _scratch([max(axis.size, axis.longest), padded_length(axis)], dim, x, join)


def _scratch(lengths: Sequence[int], dim: int, x: Dims, join: Join) -> int:
    """Bytes of arrays that have these lengths along a dim; elements of the first are joined by halves."""
    dims = [(*x[:dim], length, *x[dim + 1 :]) for length in lengths]
    nbytes = sum(footprint(*dims, itemsize=dtype.itemsize) for dtype in join.dtypes)
    return nbytes + join.scratch((*x[:dim], lengths[0] // 2, *x[dim + 1 :]))


def _reaches_beyond(axis: Axis) -> bool:
    """Whether windows have padding."""
    return axis.taps is not None and (axis.taps.start != 0 or padded_length(axis) > axis.size)


def reduce_by_folding(
    axis: Axis, dim: int, x: Arrays, y: Arrays, *, join: Join, memory: Scratch
) -> Iterator[Call]:
    """Calls that reduce windows of x along a dim to elements of y."""
    if axis.taps is not None:
        if _reaches_beyond(axis):
            first = x[0]
            dims = (*first.shape[:dim], padded_length(axis), *first.shape[dim + 1 :])
            order = sorted(range(first.ndim), key=lambda axis: -abs(first.strides[axis]))
            whole = [scratch_in_order(memory, dims, order, dtype) for dtype in join.dtypes]
            yield from pad_elements(axis, dim, x, whole, join)
            x = whole
        windows = [_windows(array, axis, dim) for array in x]
    for start in range(0, axis.count, _together(axis)):
        group = slice(start, min(start + _together(axis), axis.count))
        if axis.taps is None:
            members = along_dim(x, dim, slice(axis.starts[start], axis.stops[start]))
            elements = [np.expand_dims(np.moveaxis(array, dim, 0), 1 + dim) for array in members]
        else:
            elements = along_dim(windows, 1 + dim, group)
        yield from _join_by_halves(elements, along_dim(y, dim, group), join, memory.fork())


def _windows(x: Array, axis: Axis, dim: int) -> Array:
    """A view of regular windows in padded elements: the first dim is that of a window's elements."""
    step = x.strides[dim]
    dims = (axis.longest, *x.shape[:dim], axis.count, *x.shape[dim + 1 :])
    strides = (step * axis.dilation, *x.strides[:dim], step * axis.stride, *x.strides[dim + 1 :])
    return np.lib.stride_tricks.as_strided(x, dims, strides, writeable=False)


def _join_by_halves(elements: Arrays, y: Arrays, join: Join, memory: Scratch) -> Iterator[Call]:
    """Calls that join arrays along their first dim, to arrays without it."""
    count, *dims = elements[0].shape
    if count == 1:
        yield from copies([array[0] for array in elements], y)
        return
    order = sorted(range(len(dims)), key=lambda axis: -abs(y[0].strides[axis]))
    whole = [0, *(1 + axis for axis in order)]
    parts = [scratch_in_order(memory, (count, *dims), whole, dtype) for dtype in join.dtypes]
    yield from copies(elements, parts)
    while count > 1:
        half = count // 2
        one, other = (along_dim(parts, 0, slice(start, start + half)) for start in (0, count - half))
        yield from join.calls(one, other, one if count > 2 else [array[None] for array in y], memory)
        count -= half
