"""Max and average pooling, one spatial dim after the other, by shifted views of the input.

Nothing is padded: what lies outside of the input is left out where views are cut. The first dim goes first:
rows are longer than columns, and fewer of them are left for the next dim.

NumPy takes about 80 ns for each run of elements that lie behind each other. Where runs are short, windows are
computed at all places of a block as if it were one run, and those that are wanted are copied; those that
reach over an end of a row are computed by themselves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.kernels import (
    MOST_SCRATCH,
    Call,
    Kernel,
    Operands,
    Step,
    carrier_dtype,
    deal,
    in_turn,
    lanes_worth,
)
from cudnn_actor.engines.cpu.fast.lines import joined_axes
from cudnn_actor.engines.cpu.fast.matrices import blas_takes
from cudnn_actor.engines.cpu.fast.memory_orders import is_channels_last, memory_order, scratch_in_order
from cudnn_actor.engines.cpu.fast.pooling_blocks import Block, blocks, extents_of_blocks, part_read, read_dims
from cudnn_actor.engines.cpu.fast.pooling_doubling import (
    doubling_calls,
    doubling_elements,
    doubling_scratch,
    is_long,
    reduce_by_doubling,
)
from cudnn_actor.engines.cpu.fast.pooling_element_joins import element_pooling
from cudnn_actor.engines.cpu.fast.pooling_joins import ElementJoin
from cudnn_actor.engines.cpu.fast.pooling_windows import LONG, Axis, counts_of, window_axes
from cudnn_actor.engines.cpu.scratch import Scratch, footprint
from cudnn_actor.protocol.operations import (
    AvgPool,
    MaxPool,
    Node,
    Specs,
)

__all__ = ["Pooling", "avg_pool", "least_of", "max_pool"]

Array = npt.NDArray[Any]
Dims = tuple[int, ...]
_NS = 1.8
"""About how many nanoseconds an element of x takes."""
_CALL_NS = 700
"""Nanoseconds of a call, about, beside its elements."""


def max_pool(node: Node, specs: Specs) -> Kernel | None:
    """The kernel for `MaxPool` without an index."""
    assert isinstance(node, MaxPool)
    x, y = specs["x"], specs["y"]
    if "index" in specs or 0 in x.dims or 0 in y.dims:
        return None
    dtype = carrier_dtype(x.dtype)
    axes = window_axes(node.window, x.dims, y.dims)
    return _with_little_scratch(Pooling(x.dims, y.dims, dtype, axes, np.maximum, least_of(dtype), None))


def avg_pool(node: Node, specs: Specs) -> Kernel | None:
    """The kernel for `AvgPool`."""
    assert isinstance(node, AvgPool)
    x, y = specs["x"], specs["y"]
    if 0 in x.dims or 0 in y.dims:
        return None
    dtype = carrier_dtype(x.dtype)
    axes = window_axes(node.window, x.dims, y.dims)
    counts = counts_of(node, axes, dtype)
    return _with_little_scratch(Pooling(x.dims, y.dims, dtype, axes, np.add, 0.0, counts))


def least_of(dtype: np.dtype[Any]) -> float | bool:
    """The least value of a dtype."""
    return False if dtype.kind == "b" else -math.inf if dtype.kind == "f" else int(np.iinfo(dtype.name).min)


def _with_little_scratch(kernel: Pooling) -> Kernel:
    if kernel.footprint(1) <= MOST_SCRATCH:
        return kernel
    return element_pooling(kernel.x, kernel.y, kernel.axes, kernel.join, kernel.counts)


@dataclass(frozen=True, eq=False)
class Pooling:
    """Reduces windows of x to elements of y. Sums are divided by counts, if there are some."""

    x: Dims
    y: Dims
    dtype: np.dtype[Any]
    axes: tuple[Axis, ...]
    ufunc: np.ufunc
    neutral: float | bool
    counts: Array | None

    @property
    def join(self) -> ElementJoin:
        """How two parts of windows are joined."""
        return ElementJoin(self.ufunc, self.dtype, self.neutral)

    @property
    def _whole(self) -> bool:
        """Whether each image is reduced to one element."""
        return all(axis.count == 1 and axis.dilation == 1 for axis in self.axes)

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs: for windows at all places, and for those that are wanted."""
        del lanes
        if self._whole:
            return 0
        return max(self._footprint(self.extents(channels_last=of)) for of in (False, True))

    def _footprint(self, extents: Dims) -> int:
        total, dims = 0, self.read_dims(extents)
        for number, axis in enumerate(self.axes):
            after = (
                *dims[: 2 + number],
                extents[2] if number == 0 else self.y[2 + number],
                *dims[3 + number :],
            )
            total += footprint(dims, after, itemsize=self.dtype.itemsize)
            if is_long(axis):
                total += doubling_scratch(axis, 2 + number, dims, after[2 + number], self.join)
            dims = after
        return total + footprint(self.x[:2], itemsize=self.dtype.itemsize)

    def read_dims(self, extents: Dims) -> Dims:
        """The most that a block of y of these extents is computed from, along each dim."""
        return read_dims(self.x, self.y, self.axes, extents)

    def extents(self, *, channels_last: bool) -> Dims:
        """How much of the batch, of the channels and of the first spatial dim of y a block has."""
        return extents_of_blocks(self.x, self.y, self.axes, channels_last=channels_last)

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        x, y = operands["x"], results["y"]
        channels_last = is_channels_last(x.strides)
        lanes = lanes_worth(lanes, _NS * math.prod(self.x))

        def call(block: Block, lane: int) -> Call:
            memory = lanes[lane].fork()
            return in_turn([*self._calls(x, y, block, memory, channels_last=channels_last)])

        return [deal(blocks(self.y, self.extents(channels_last=channels_last)), len(lanes), call)]

    def _calls(
        self, x: Array, y: Array, block: Block, memory: Scratch, *, channels_last: bool
    ) -> Iterator[Call]:
        """Calls that compute a block of y."""
        read, axes = self.read(block)
        target = y[block]
        yield from self.reduce_windows(
            x[block[0], block[1], read], target, axes, memory, channels_last=channels_last
        )
        if self.counts is not None:
            whole = self.counts.ndim == 0 or self.counts.shape[2] == 1
            yield partial(np.divide, target, self.counts if whole else self.counts[:, :, block[2]], target)

    def read(self, block: Block) -> tuple[slice, tuple[Axis, ...]]:
        """The part of x's first spatial dim that a block of y is computed from, and its windows in that."""
        return part_read(self.axes, block)

    def reduce_windows(
        self, place: Array, target: Array, axes: Sequence[Axis], memory: Scratch, *, channels_last: bool
    ) -> Iterator[Call]:
        """Calls that reduce the windows in a part of x, (batch, channels, spatial), without dividing sums."""
        if all(axis.count == 1 and axis.dilation == 1 for axis in axes):
            inside = tuple(slice(axis.starts[0], axis.stops[0]) for axis in axes)
            yield from self._of_images(place[(slice(None), slice(None), *inside)], target)
            return
        wanted = [number for number, axis in enumerate(axes) if not axis.same] or [0]
        order = memory_order(place.ndim, channels_last=channels_last)
        for number in wanted:
            dims = (*place.shape[: 2 + number], axes[number].count, *place.shape[3 + number :])
            last = number == wanted[-1]
            into = target if last else scratch_in_order(memory, dims, order, self.dtype)
            yield from self._along(axes[number], 2 + number, place, into, memory)
            place = into

    def _of_images(self, x: Array, y: Array) -> Iterator[Call]:
        """Reduce all spatial dims to one element: sums are products with ones where that is possible."""
        dims = tuple(range(2, x.ndim))
        flat = joined_axes(x, range(2, x.ndim)) if self.ufunc is np.add and x.dtype.kind == "f" else None
        if flat is None or not blas_takes(flat):
            yield partial(self.ufunc.reduce, x, axis=dims, out=y, keepdims=True)
            return
        yield partial(np.matmul, flat, _ones(flat.shape[2], self.dtype), y.reshape(y.shape[:2]))

    def _along(self, axis: Axis, dim: int, x: Array, y: Array, memory: Scratch) -> Iterator[Call]:
        """Reduce windows along a dim."""
        if is_long(axis) and _doubling_pays(axis, x.size // axis.size):
            yield from reduce_by_doubling(axis, dim, (x,), (y,), join=self.join, memory=memory.fork())
        elif axis.taps is None or len(axis.taps) > 2 * axis.count:
            yield from (self._of_window(axis, number, dim, x, y) for number in range(axis.count))
        elif _is_one_run(x) and _pays(axis, x.strides[dim] // x.itemsize):
            yield from self._as_one_run(axis, dim, x, y, memory)
        else:
            yield from self._in_slices(axis, axis.taps, dim, x, y)

    def _of_window(self, axis: Axis, number: int, dim: int, x: Array, y: Array) -> Call:
        """A call that reduces one window."""
        before = (slice(None),) * dim
        members = x[(*before, slice(axis.starts[number], axis.stops[number], axis.dilation))]
        one = y[(*before, slice(number, number + 1))]
        return partial(self.ufunc.reduce, members, axis=dim, out=one, keepdims=True)

    def _in_slices(self, axis: Axis, taps: Sequence[int], dim: int, x: Array, y: Array) -> Iterator[Call]:
        """Calls for each tap, each on all windows that have an element at the tap."""
        before = (slice(None),) * dim
        found = [(axis.inside(tap), tap) for tap in taps]
        found.sort(key=lambda of: len(of[0]) < axis.count)  # those that all windows have go first
        full = sum(len(windows) == axis.count for windows, _ in found)

        def elements_at(windows: range, tap: int) -> Array:
            first, last = tap + windows[0] * axis.stride, tap + windows[-1] * axis.stride
            part: Array = x[(*before, slice(first, last + 1, axis.stride))]
            return part

        begun = min(full, 2)
        if begun == 2:
            yield _call(self.ufunc, elements_at(*found[0]), elements_at(*found[1]), y)
        elif begun == 1:
            yield partial(np.copyto, y, elements_at(*found[0]))
        else:
            yield partial(np.copyto, y, np.array(self.neutral, self.dtype))
        for windows, tap in found[begun:]:
            if windows:
                part = y[(*before, slice(windows[0], windows[-1] + 1))]
                yield _call(self.ufunc, part, elements_at(windows, tap), part)

    def _as_one_run(self, axis: Axis, dim: int, x: Array, y: Array, memory: Scratch) -> Iterator[Call]:
        """Windows that begin at all elements of x, and then those that reach over an end."""
        assert axis.taps is not None
        step, before, taps = x.strides[dim] // x.itemsize, (slice(None),) * dim, axis.taps
        line, length = _as_line(x), x.size - (taps[-1] - taps[0]) * step
        inside = range(axis.inside(taps[0]).start, axis.inside(taps[-1]).stop)
        if length > 0 and inside:
            # Window `number` begins at taps[0] + number * stride.
            straight = axis.stride == 1 and x.strides == y.strides and x.shape == y.shape
            if straight:
                begin = -taps[0] * step
                places = _as_line(y)[begin : begin + length]
            else:
                windows = memory.take((x.size,), x.dtype)
                places = windows[:length]
            shifts = [(tap - taps[0]) * step for tap in taps]
            parts = [line[shift : shift + length] for shift in shifts]
            if len(parts) == 1:
                yield partial(np.copyto, places, parts[0])
            else:
                yield _call(self.ufunc, parts[0], parts[1], places)
            for part in parts[2:]:
                yield _call(self.ufunc, places, part, places)
            if not straight:
                first, last = (taps[0] + number * axis.stride for number in (inside[0], inside[-1]))
                found = np.ndarray(x.shape, x.dtype, windows, strides=x.strides)
                wanted = found[(*before, slice(first, last + 1, axis.stride))]
                yield partial(np.copyto, y[(*before, slice(inside[0], inside[-1] + 1))], wanted)
        else:
            inside = range(0)
        for number in (*range(inside.start), *range(inside.stop, axis.count)):
            if len(taps) > LONG:
                yield self._of_window(axis, number, dim, x, y)
            else:
                read, one = axis.part(number, number + 1)
                part = x[(*before, read)]
                edge = y[(*before, slice(number, number + 1))]
                assert one.taps is not None
                yield from self._in_slices(one, one.taps, dim, part, edge)


def _pays(axis: Axis, run: int) -> bool:
    """Whether windows at all places take fewer nanoseconds than one slice of `run` elements for each tap."""
    assert axis.taps is not None
    taps = len(axis.taps)
    in_slices = taps * (80 + run / 4)
    return (taps - 1) * axis.stride * run / 4 + 40 + run / 8 < in_slices


def _doubling_pays(axis: Axis, lines: int) -> bool:
    """Whether windows along `lines` lines take fewer nanoseconds by doubling."""
    apart = _CALL_NS * axis.calls(axis.count) + axis.longest * axis.count * lines / 4
    return _CALL_NS * doubling_calls(axis) + doubling_elements(axis) * lines / 4 < apart


def _call(ufunc: np.ufunc, a: Array, b: Array, out: Array) -> Call:
    return partial(ufunc, a, b, out=out)


def _is_one_run(x: Array) -> bool:
    """Whether the elements lie behind each other, in whatever order of the dims."""
    axes = sorted((axis for axis in range(x.ndim) if x.shape[axis] > 1), key=lambda axis: x.strides[axis])
    wanted = x.itemsize
    for axis in axes:
        if x.strides[axis] != wanted:
            return False
        wanted *= x.shape[axis]
    return True


def _as_line(x: Array) -> Array:
    """The elements of an array that is one run, as they lie in memory."""
    return np.lib.stride_tricks.as_strided(x, (x.size,), (x.itemsize,), writeable=x.flags.writeable)


@functools.lru_cache(maxsize=16)
def _ones(size: int, dtype: np.dtype[Any]) -> Array:
    ones = np.ones(size, dtype)
    ones.flags.writeable = False
    return ones
