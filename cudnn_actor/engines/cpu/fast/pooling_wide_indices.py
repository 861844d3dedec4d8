"""Max pooling with indices of any elements: an element and its number are two whole numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.by_definition import definition_in_scratch
from cudnn_actor.engines.cpu.fast.kernels import Call, Kernel, Operands, Step
from cudnn_actor.engines.cpu.fast.memory_orders import is_channels_last, scratch_in_order
from cudnn_actor.engines.cpu.fast.ordered_keys import bits_in_order, floats_of_bits
from cudnn_actor.engines.cpu.fast.pooling_joined import BlockArrays, Parts
from cudnn_actor.engines.cpu.fast.pooling_joins import FirstLargest
from cudnn_actor.engines.cpu.fast.pooling_kernels import WindowKernel
from cudnn_actor.engines.cpu.fast.pooling_tiles import bounded_pooling
from cudnn_actor.engines.cpu.fast.pooling_windows import are_long, window_axes
from cudnn_actor.engines.cpu.scratch import Scratch
from cudnn_actor.protocol.operations import MaxPool, Specs

__all__ = ["WideIndexedPooling", "wide_max_pool"]

Array = npt.NDArray[Any]
_KEY = np.dtype(np.int64)
_SIGN = np.array(1 << 63, np.uint64)
"""Unsigned numbers with this bit changed are signed ones in the same order."""
_NS = 40
"""About how many nanoseconds an element of x takes."""


def wide_max_pool(node: MaxPool[Any], specs: Specs) -> Kernel:
    """The kernel for `MaxPool` with an index, of 64 bits."""
    x, y = specs["x"].dims, specs["y"].dims
    axes = window_axes(node.window, x, y)
    short = None if are_long(axes) else definition_in_scratch(node, specs)
    return short or WideIndexedPooling(bounded_pooling(x, y, axes, FirstLargest()))


@dataclass(frozen=True, eq=False)
class WideIndexedPooling(WindowKernel):
    """The largest element of each window, and its number in x."""

    element_ns = _NS

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        x, y, index = operands["x"], results["y"], results["index"]
        ahead = lanes[0].keep((*x.shape[:2], *[1] * (x.ndim - 2)), _KEY)
        """The number of the first element of each image."""
        ahead[...] = (np.arange(ahead.size) * math.prod(x.shape[2:])).reshape(ahead.shape)
        spatial = self.pooling.read_dims(channels_last=is_channels_last(x.strides))[2:]
        numbers = lanes[0].keep(spatial, _KEY)
        """The numbers of the elements of a part at the beginning of an image."""
        steps = [math.prod(x.shape[dim + 1 :]) for dim in range(2, x.ndim)]
        numbers[...] = sum(
            np.ix_(*(np.arange(size) * step for size, step in zip(spatial, steps, strict=True)))
        )

        def load(block: Parts, read: Parts, arrays: BlockArrays) -> Iterator[Call]:
            yield from _keys(x[(*block[:2], *read)], arrays)
            own = tuple(slice(part.stop - part.start) for part in read)
            begin = sum(part.start * step for part, step in zip(read, steps, strict=False))
            yield partial(np.add, numbers[own], begin, arrays.elements[1])

        def store(block: Parts, arrays: BlockArrays) -> Iterator[Call]:
            found, number = arrays.results
            yield from _elements(found, y[block], arrays)
            yield partial(np.add, number, ahead[block[:2]], number)
            yield partial(np.copyto, index[block], number)

        return self._steps(x, lanes, load, store)


def _keys(x: Array, arrays: BlockArrays) -> Iterator[Call]:
    """Calls that store elements as whole numbers in the same order."""
    keys = arrays.elements[0]
    if x.dtype.kind == "f":
        memory = arrays.memory.fork()
        nans, below_0 = (scratch_in_order(memory, x.shape, arrays.order, dtype) for dtype in (np.bool_, _KEY))
        wide = keys.view(np.float64)
        if x.dtype != wide.dtype:
            yield partial(np.copyto, wide, x)
            x = wide
        yield from bits_in_order(x, wide, nans, below_0)
    elif x.dtype == np.uint64:
        yield partial(np.bitwise_xor, x, _SIGN, keys.view(x.dtype))
    else:
        yield partial(np.copyto, keys, x)


def _elements(keys: Array, y: Array, arrays: BlockArrays) -> Iterator[Call]:
    """Calls that store the elements of keys."""
    if y.dtype.kind == "f":
        yield from floats_of_bits(keys, scratch_in_order(arrays.memory.fork(), y.shape, arrays.order, _KEY))
        keys = keys.view(np.float64)
    elif y.dtype == np.uint64:
        yield partial(np.bitwise_xor, keys.view(y.dtype), _SIGN, keys.view(y.dtype))
        keys = keys.view(y.dtype)
    yield partial(np.copyto, y, keys, "unsafe")  # which holds an element of y's dtype
