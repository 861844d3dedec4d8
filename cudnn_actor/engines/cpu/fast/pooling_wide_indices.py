"""Max pooling with indices of elements of 64 bits: an element and its number are two whole numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.convolution_views import laid_out
from cudnn_actor.engines.cpu.fast.kernels import Call, Operands, Step, lanes_worth
from cudnn_actor.engines.cpu.fast.ordered_keys import bits_in_order, floats_of_bits
from cudnn_actor.engines.cpu.fast.pooling_blocks import Block
from cudnn_actor.engines.cpu.fast.pooling_joined import BlockArrays, JoinedPooling
from cudnn_actor.engines.cpu.fast.pooling_joins import FirstLargest
from cudnn_actor.engines.cpu.fast.pooling_windows import window_axes
from cudnn_actor.engines.cpu.scratch import Scratch
from cudnn_actor.protocol.operations import MaxPool, Specs

__all__ = ["WideIndexedPooling", "wide_max_pool"]

Array = npt.NDArray[Any]
_KEY = np.dtype(np.int64)
_SIGN = np.array(1 << 63, np.uint64)
"""Unsigned numbers with this bit changed are signed ones in the same order."""
_NS = 40
"""Nanoseconds of an element of x, about."""


def wide_max_pool(node: MaxPool[Any], specs: Specs) -> WideIndexedPooling | None:
    """The kernel for `MaxPool` with an index, of 64 bits; None where `scaled_norms` is None."""
    x, y = specs["x"].dims, specs["y"].dims
    pooling = JoinedPooling(x, y, window_axes(node.window, x, y), FirstLargest())
    return WideIndexedPooling(pooling) if pooling.is_long() and pooling.fits() else None


@dataclass(frozen=True, eq=False)
class WideIndexedPooling:
    """The largest element of each window, and its number in x."""

    pooling: JoinedPooling

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs."""
        del lanes
        return self.pooling.footprint()

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        x, y, index = operands["x"], results["y"], results["index"]
        image, row = math.prod(x.shape[2:]), math.prod(x.shape[3:])
        ahead = lanes[0].keep((*x.shape[:2], *[1] * (x.ndim - 2)), _KEY)
        """The number of the first element of each image."""
        ahead[...] = (np.arange(ahead.size) * image).reshape(ahead.shape)
        last = abs(x.strides[1]) < min(map(abs, x.strides[2:]))
        spatial = self.pooling.read_dims(self.pooling.extents(channels_last=last))[2:]
        numbers = lanes[0].keep(spatial, _KEY)
        numbers[...] = np.arange(numbers.size).reshape(spatial)

        def load(block: Block, read: slice, arrays: BlockArrays) -> Iterator[Call]:
            yield from _keys(x[block[0], block[1], read], arrays)
            yield partial(np.copyto, arrays.elements[1], numbers[: read.stop - read.start])

        def store(block: Block, read: slice, arrays: BlockArrays) -> Iterator[Call]:
            found, number = arrays.results
            yield from _elements(found, y[block], arrays)
            yield partial(np.add, number, ahead[block[:2]], number)
            yield partial(np.add, number, read.start * row, number)
            yield partial(np.copyto, index[block], number)

        lanes = lanes_worth(lanes, _NS * x.size)
        return self.pooling.bind(lanes, channels_last=last, load=load, store=store)


def _keys(x: Array, arrays: BlockArrays) -> Iterator[Call]:
    """Calls that store elements as whole numbers in the same order."""
    keys = arrays.elements[0]
    if x.dtype.kind == "f":
        memory = arrays.memory.fork()
        nans, below_0 = (laid_out(memory, x.shape, arrays.order, dtype) for dtype in (np.bool_, _KEY))
        yield from bits_in_order(x, keys.view(x.dtype), nans, below_0)
    elif x.dtype.kind == "u":
        yield partial(np.bitwise_xor, x, _SIGN, keys.view(x.dtype))
    else:
        yield partial(np.copyto, keys, x)


def _elements(keys: Array, y: Array, arrays: BlockArrays) -> Iterator[Call]:
    """Calls that store the elements of keys."""
    if y.dtype.kind == "f":
        yield from floats_of_bits(keys, laid_out(arrays.memory.fork(), y.shape, arrays.order, _KEY))
    elif y.dtype.kind == "u":
        yield partial(np.bitwise_xor, keys.view(y.dtype), _SIGN, keys.view(y.dtype))
    yield partial(np.copyto, y, keys.view(y.dtype))
