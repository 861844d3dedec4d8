"""Max pooling with indices: each element and its place are one whole number, and the largest is searched for.

The upper half of such a number is the element's value. The lower half is larger for earlier places, so that
of equal elements the first is found. Elements of 64 bits do not fit, nor large blocks: see `wide_max_pool`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast import pooling
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
from cudnn_actor.engines.cpu.fast.memory_orders import is_channels_last, memory_order, scratch_in_order
from cudnn_actor.engines.cpu.fast.ordered_keys import PLACE_BITS, floats_of_bits, keys_in_order
from cudnn_actor.engines.cpu.fast.pooling import Pooling, least_of
from cudnn_actor.engines.cpu.fast.pooling_blocks import Block, blocks
from cudnn_actor.engines.cpu.fast.pooling_wide_indices import wide_max_pool
from cudnn_actor.engines.cpu.fast.pooling_windows import window_axes
from cudnn_actor.engines.cpu.scratch import Scratch, footprint
from cudnn_actor.protocol.operations import MaxPool, Node, Specs

__all__ = ["IndexedPooling", "max_pool"]

Array = npt.NDArray[Any]
_KEY = np.dtype(np.int64)
_LAST = (1 << PLACE_BITS) - 1
"""The number of the first place; it is one less for each place behind it."""
_NS = 6
"""About how many nanoseconds an element of x takes."""


def max_pool(node: Node, specs: Specs) -> Kernel | None:
    """The kernel for `MaxPool`."""
    assert isinstance(node, MaxPool)
    if "index" not in specs:
        return pooling.max_pool(node, specs)
    x, y = specs["x"], specs["y"]
    dtype = carrier_dtype(x.dtype)
    if 0 in x.dims or 0 in y.dims:
        return None
    if dtype.itemsize > 4:
        return wide_max_pool(node, specs)
    if math.prod(x.dims[2:]) > _LAST:
        return wide_max_pool(node, specs)
    axes = window_axes(node.window, x.dims, y.dims)
    kernel = IndexedPooling(Pooling(x.dims, y.dims, _KEY, axes, np.maximum, least_of(_KEY), None), dtype)
    return kernel if kernel.footprint(1) <= MOST_SCRATCH else wide_max_pool(node, specs)


@dataclass(frozen=True, eq=False)
class IndexedPooling:
    """The largest element of each window, and its number in x. `pooling`: that of the keys."""

    pooling: Pooling
    dtype: np.dtype[Any]

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs: for keys, what they are made from, and the largest."""
        return max(self._footprint(last) for last in (False, True)) + self.pooling.footprint(lanes)

    def _footprint(self, channels_last: bool) -> int:
        extents = self.pooling.extents(channels_last=channels_last)
        read = self.pooling.read_dims(extents)
        found = (*extents, *self.pooling.y[3:])
        of_x = footprint(read, itemsize=_KEY.itemsize) + footprint(read, read, itemsize=self.dtype.itemsize)
        of_y = footprint(found, found, itemsize=_KEY.itemsize) + footprint(found, found, itemsize=4)
        return of_x + footprint(read, itemsize=1) + of_y

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        x, of_keys = operands["x"], self.pooling
        channels_last = is_channels_last(x.strides)
        extents = of_keys.extents(channels_last=channels_last)
        images = lanes[0].keep((*x.shape[:2], *[1] * (x.ndim - 2)), _KEY)
        """The number of the first element of each image."""
        images[...] = (np.arange(images.size) * math.prod(x.shape[2:])).reshape(images.shape)
        spatial = of_keys.read_dims(extents)[2:]
        places = lanes[0].keep(spatial, _KEY)
        places[...] = _LAST - np.arange(places.size).reshape(spatial)
        numbered = _Numbered(places, images, memory_order(x.ndim, channels_last=channels_last))
        lanes = lanes_worth(lanes, _NS * x.size)

        def call(block: Block, lane: int) -> Call:
            return in_turn([*self._calls(x, results, block, numbered, lanes[lane].fork())])

        return [deal(blocks(of_keys.y, extents), len(lanes), call)]

    def _calls(
        self, x: Array, results: Operands, block: Block, numbered: _Numbered, memory: Scratch
    ) -> Iterator[Call]:
        read, axes = self.pooling.read(block)
        part, order = x[block[0], block[1], read], numbered.order
        keys = scratch_in_order(memory, part.shape, order, _KEY)
        spare, nans = (scratch_in_order(memory, part.shape, order, dtype) for dtype in (self.dtype, np.bool_))
        # In the order of memory, in which the last dim has no gaps.
        yield from keys_in_order(*(array.transpose(order) for array in (part, spare, nans, keys)))
        yield partial(np.add, keys, numbered.places[: part.shape[2]], keys)
        y = results["y"][block]
        found = scratch_in_order(memory, y.shape, order, _KEY)
        last = order[-1] == 1
        yield from self.pooling.reduce_windows(keys, found, axes, memory.fork(), channels_last=last)
        yield from self._values(found, y, order, memory)
        # The lower halves, and from them places in the part: in x, they begin behind those before it.
        yield partial(np.bitwise_and, found, _LAST, out=found)
        ahead = numbered.images[block[:2]]
        yield partial(np.subtract, ahead, found, found)
        yield partial(np.add, found, _LAST + read.start * math.prod(x.shape[3:]), out=results["index"][block])

    def _values(self, found: Array, y: Array, order: Sequence[int], memory: Scratch) -> Iterator[Call]:
        """Calls that store in y the values in the upper halves of what was found."""
        upper, whole = (
            scratch_in_order(memory, y.shape, order, _KEY),
            scratch_in_order(memory, y.shape, order, np.int32),
        )
        yield partial(np.right_shift, found, PLACE_BITS, out=upper)
        if self.dtype.kind != "f":
            if self.dtype == np.uint32:
                yield partial(np.add, upper, 1 << 31, out=upper)
            yield partial(np.copyto, y, upper, "unsafe")
            return
        yield partial(np.copyto, whole, upper, "unsafe")
        yield from floats_of_bits(whole, scratch_in_order(memory, y.shape, order, np.int32))
        yield partial(np.copyto, y, whole.view(np.float32))


@dataclass(frozen=True, eq=False)
class _Numbered:
    """Places in the largest part, backwards, the first number of each image, and the order of memory."""

    places: Array
    images: Array
    order: tuple[int, ...]
