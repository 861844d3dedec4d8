"""The largest or smallest elements of rows: each is sorted with its place, as one number of 64 bits.

Such numbers are all different. So any way of sorting them is stable, and they are sorted where they lie.
Elements of 64 bits are sorted twice: by their lower halves, and in that order by their upper halves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.kernels import (
    Call,
    Operands,
    Step,
    carrier_dtype,
    deal,
    in_turn,
    lanes_worth,
)
from cudnn_actor.engines.cpu.fast.lines import boxes_of_elements
from cudnn_actor.engines.cpu.fast.ordered_keys import PLACE_BITS, bits_in_order, keys_in_order
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint
from cudnn_actor.protocol.operations import Node, Specs, TopK

__all__ = ["Sorting", "top_k"]

Array = npt.NDArray[Any]
_BLOCK_ELEMENTS = 1 << 15
"""Elements of x that are sorted together, if a row is not longer."""
_MOST_SCRATCH = 64 << 20
"""Bytes for each lane. What needs more has memory of its own, of which there is one for all rows."""
_NS = 20
"""About how many nanoseconds an element of x takes."""


def top_k(node: Node, specs: Specs) -> Sorting | None:
    """The kernel for `TopK`; None for rows of 2**31 elements."""
    assert isinstance(node, TopK)
    x = specs["x"]
    dtype = carrier_dtype(x.dtype)
    axis = node.axis % x.rank
    if x.dims[axis] >= 1 << (PLACE_BITS - 1):
        return None
    return Sorting(x.dims, dtype, axis, node.k, node.largest, node.in_order)


@dataclass(frozen=True, eq=False)
class Sorting:
    """`k` elements of each row of x, of these dims, along an axis, and their places."""

    x: Dims
    dtype: np.dtype[Any]
    axis: int
    k: int
    largest: bool
    in_order: bool

    @property
    def _chunk(self) -> int:
        """How many elements of a row are sorted at a time, beside the best of those before."""
        size = self.x[self.axis]
        return (
            size
            if self.is_wide or size <= _BLOCK_ELEMENTS or 2 * self.k >= size
            else max(_BLOCK_ELEMENTS, self.k)
        )

    @property
    def is_wide(self) -> bool:
        """Whether an element and its place are more than a number of 64 bits."""
        return self.dtype.itemsize > 4

    @property
    def _rows(self) -> int:
        return max(1, _BLOCK_ELEMENTS // self.x[self.axis])

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs: for elements with their places, and the places in x."""
        del lanes
        return self.place_bytes if self.place_bytes <= _MOST_SCRATCH else 0

    @functools.cached_property
    def place_bytes(self) -> int:
        """Bytes for the rows that are sorted together."""
        rows, size = min(self._rows, math.prod(self.x) // self.x[self.axis]), self.x[self.axis]
        chunk = self._chunk
        keys = footprint((rows, chunk if chunk == size else self.k + chunk))
        elements = 2 * footprint((rows, chunk), itemsize=self.dtype.itemsize)
        nans = footprint((rows, chunk), itemsize=1)
        wanted = 2 * footprint((rows, self.k)) + footprint((rows, self.k), itemsize=self.dtype.itemsize)
        halves = 2 * footprint((rows, chunk)) if self.is_wide else 0
        return keys + elements + nans + wanted + halves

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        x, values = (np.moveaxis(of, self.axis, -1) for of in (operands["x"], results["values"]))
        places = np.moveaxis(results["indices"], self.axis, -1) if "indices" in results else None
        lanes, keeper = lanes_worth(lanes, _NS * x.size), lanes[0]
        if self.place_bytes > _MOST_SCRATCH:
            lanes = [Scratch(keeper.keep((self.place_bytes,), np.uint8))]
        numbers = keeper.keep((self._chunk,), np.int64)
        numbers[...] = np.arange(self._chunk)

        @functools.cache
        def starts(rows: Dims) -> Array:
            found = keeper.keep((*rows, 1), np.int64)
            found[...] = (np.arange(math.prod(rows)) * x.shape[-1]).reshape(found.shape)
            return found

        def call(box: tuple[slice, ...], lane: int) -> Call:
            at: Any = (*box, ...)
            block = _Block(
                self, x[at], values[at], None if places is None else places[at], lanes[lane].fork()
            )
            return in_turn([*block.calls(numbers, starts)])

        return [deal(boxes_of_elements(x.shape[:-1], self._rows), len(lanes), call)]


class _Block:
    """Some rows: of x, of the values, and of the places if they are wanted; all with rows last."""

    def __init__(self, of: Sorting, x: Array, values: Array, places: Array | None, memory: Scratch) -> None:
        self._of, self._x, self._values, self._places = of, x, values, places
        self._memory = memory
        self._rows = x.shape[:-1]

    def calls(self, numbers: Array, starts: Callable[[Dims], Array]) -> Iterator[Call]:
        """Calls that sort the rows. `numbers`: from 0 on. `starts`: returns where each row begins in a block
        of these dims."""
        of, memory, size, chunk = self._of, self._memory, self._x.shape[-1], len(numbers)
        k = of.k
        keys = memory.take((*self._rows, size if chunk == size else k + chunk), np.int64)
        elements = memory.take((*self._rows, chunk), of.dtype)
        spare, nans = memory.take(elements.shape, of.dtype), memory.take(elements.shape, np.bool_)
        if of.is_wide:
            yield partial(np.copyto, elements, self._x)
            yield from self._in_two_halves((elements, spare, nans, keys), numbers, starts(self._rows))
        for start in () if of.is_wide else range(0, size, chunk):
            stop = min(start + chunk, size)
            best = k if start else 0
            seen = keys[..., best : best + stop - start]
            part = (..., slice(0, stop - start))
            yield partial(np.copyto, elements[part], self._x[..., start:stop])
            yield from keys_in_order(elements[part], spare[part], nans[part], seen)
            if of.largest:
                yield partial(np.bitwise_xor, seen, np.array(-1 << PLACE_BITS), seen)
            yield partial(np.add, seen, numbers[: stop - start], seen)
            if start:
                yield partial(np.add, seen, np.array(start), seen)
            candidates = keys[..., : best + stop - start]
            if k < candidates.shape[-1]:
                yield partial(candidates.partition, k - 1)
        wanted = memory.take((*self._rows, k), np.int64)
        if of.in_order and not of.is_wide:
            yield keys[..., :k].sort
        yield partial(np.bitwise_and, keys[..., :k], np.array((1 << PLACE_BITS) - 1), wanted)
        if not of.in_order:
            yield wanted.sort
        if self._places is not None:
            yield partial(np.copyto, self._places, wanted)
        if chunk == size:
            yield partial(np.add, wanted, starts(self._rows), wanted)
            yield from self._take(elements.reshape(-1), wanted)
        else:  # of one row, in which places are multiplied by how far elements lie apart
            step = self._x.strides[-1] // self._x.itemsize
            yield partial(np.multiply, wanted, step, out=wanted)
            line = np.lib.stride_tricks.as_strided(self._x, ((size - 1) * step + 1,), (self._x.itemsize,))
            yield from self._take(line, wanted)

    def _take(self, x: Array, places: Array) -> Iterator[Call]:
        """Calls that take the elements in these places."""
        if self._values.flags.c_contiguous:
            yield partial(x.take, places, None, self._values, "clip")
            return
        found = self._memory.take(places.shape, x.dtype)
        yield partial(x.take, places, None, found, "clip")
        yield partial(np.copyto, self._values, found)

    def _in_two_halves(
        self, arrays: tuple[Array, Array, Array, Array], numbers: Array, starts: Array
    ) -> Iterator[Call]:
        """Sort wide elements: their places in the order that is wanted, in the last array.

        `arrays`: x, one like it, one of bool, and one of int64.
        """
        x, spare, nans, keys = arrays
        half, low = np.array(PLACE_BITS), np.array((1 << PLACE_BITS) - 1)
        first, at, second = spare.view(np.int64), *(self._memory.take(keys.shape, np.int64) for _ in range(2))
        yield from self._wide_keys(x, spare, nans, keys)
        yield partial(np.left_shift, keys, half, first)
        yield partial(np.add, first, numbers, first)
        yield first.view(np.uint64).sort
        yield partial(np.bitwise_and, first, low, first)
        # In the order of lower halves: upper halves, each with its place in that order.
        yield partial(np.add, first, starts, at)
        yield partial(keys.reshape(-1).take, at, None, second, "clip")
        yield partial(np.bitwise_and, second, np.invert(low), second)
        yield partial(np.add, second, numbers, second)
        yield second.sort
        yield partial(np.bitwise_and, second, low, second)
        yield partial(np.add, second, starts, second)
        yield partial(first.reshape(-1).take, second, None, keys, "clip")

    def _wide_keys(self, x: Array, spare: Array, nans: Array, keys: Array) -> Iterator[Call]:
        """Calls that make keys: numbers of int64, in the order in which elements are wanted."""
        if x.dtype.kind == "f":
            yield from bits_in_order(x, spare, nans, keys)
            yield partial(np.copyto, keys, spare.view(np.int64))
        else:
            yield partial(np.copyto, keys, x, "unsafe")
        if x.dtype.kind == "u":
            yield partial(np.bitwise_xor, keys, np.array(np.iinfo(np.int64).min), keys)
        if self._of.largest:
            yield partial(np.invert, keys, keys)
