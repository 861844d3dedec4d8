"""Lines of a tensor: the elements along some of its dims, with fixed places along the others.

Blocks of lines stay in the cache. A block is a box of the dims that are fixed, with whole lines; its bounds
follow from dims and strides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

from cudnn_actor.engines.cpu.boxes import Box
from cudnn_actor.engines.cpu.scratch import Dims

__all__ = [
    "Box",
    "Floats",
    "Part",
    "beside",
    "blocks_of_lines",
    "boxes_of_elements",
    "joined_axes",
    "lines",
    "most_lines",
    "one_each",
    "parts_of_lines",
]

Floats = npt.NDArray[Any]
"""An array of float32 or float64."""

_BLOCK_BYTES = 128 << 10
"""Bytes of a block of one array: together with the result's block, half of a small L2 cache."""
_LEAST = 8192
"""Elements of a block: with fewer, the calls cost more than what they compute."""
_FEW, _MANY = 4, 8
"""The least number of blocks. A larger number of blocks is a multiple of the second number."""


def most_lines(dims: Sequence[int], axes: Sequence[int], itemsize: int) -> int:
    """The most lines of one block."""
    length = math.prod(dims[axis] for axis in axes)
    return max(1, _elements(math.prod(dims), itemsize) // length)


def _elements(total: int, itemsize: int) -> int:
    """About how many elements a block has."""
    least = -(-total * itemsize // _BLOCK_BYTES)
    count = _FEW if least <= _FEW else -(-least // _MANY) * _MANY
    return max(_LEAST, -(-total // count))


class Part(NamedTuple):
    """Lines of several arrays.

    Parameters
    ----------
    arrays
        The arrays, with the dims of lines last. They are matrices, if all of them can be seen so without a
        copy.
    numbers
        Arrays with a number for each line. They have the same dims, but 1 along lines.
    axes
        The dims along lines: dim 1 of matrices.
    """

    arrays: list[Floats]
    numbers: list[Floats]
    axes: tuple[int, ...]


def parts_of_lines(
    axes: Sequence[int], arrays: Sequence[Floats], numbers: Sequence[Floats] = ()
) -> Iterator[Part]:
    """Blocks of lines along `axes`, of arrays of the same dims, in the order of the first one's memory.

    `numbers`: arrays of these dims, with 1 along `axes`.
    """
    whole = lines(axes, arrays, numbers)
    if whole.axes == (1,):
        for box in boxes_of_elements(
            whole.arrays[0].shape[:1], most_lines(arrays[0].shape, axes, arrays[0].itemsize)
        ):
            yield Part([each[box] for each in whole.arrays], [each[box] for each in whole.numbers], (1,))
        return
    for box in blocks_of_lines(arrays[0], axes):
        yield lines(axes, [each[box] for each in arrays], [beside(each, box) for each in numbers])


def blocks_of_lines(like: Floats, axes: Sequence[int]) -> Iterator[Box]:
    """The boxes of an array of these dims and strides, with whole lines along `axes`."""
    kept = sorted(
        (axis for axis in range(like.ndim) if axis not in axes), key=lambda axis: -abs(like.strides[axis])
    )
    whole = [slice(None)] * like.ndim
    for box in boxes_of_elements(
        [like.shape[axis] for axis in kept], most_lines(like.shape, axes, like.itemsize)
    ):
        for axis, part in zip(kept, box, strict=True):
            whole[axis] = part
        yield tuple(whole)


def boxes_of_elements(dims: Sequence[int], most: int) -> Iterator[Box]:
    """Boxes that cover these dims, with at most `most` elements each, or one. The last dims are not cut."""
    place, inner = len(dims), 1
    while place and inner * dims[place - 1] <= most:
        place -= 1
        inner *= dims[place]
    whole = tuple(slice(0, size) for size in dims[place:])
    if not place:
        yield whole
        return
    *outer, size = dims[:place]
    count = -(-size // max(1, most // inner))
    bounds = [size * number // count for number in range(count + 1)]
    cut = [slice(*pair) for pair in itertools.pairwise(bounds)]
    for first in itertools.product(*([slice(at, at + 1) for at in range(each)] for each in outer)):
        for part in cut:
            yield (*first, part, *whole)


def lines(axes: Sequence[int], arrays: Sequence[Floats], numbers: Sequence[Floats] = ()) -> Part:
    """The lines along `axes` of arrays of the same dims. `numbers`: as in `parts_of_lines`."""
    rank = arrays[0].ndim
    kept = tuple(axis for axis in range(rank) if axis not in axes)
    turned, beside_these = ([each.transpose((*kept, *axes)) for each in group] for group in (arrays, numbers))
    cut, dims = len(kept), turned[0].shape
    if all(_is_one(each, 0, cut) and _is_one(each, cut, rank) for each in (*turned, *beside_these)):
        count = math.prod(dims[:cut])
        flat = [each.reshape(count, math.prod(dims[cut:])) for each in turned]
        return Part(flat, [each.reshape(count, 1) for each in beside_these], (1,))
    return Part(turned, beside_these, tuple(range(cut, rank)))


def joined_axes(array: Floats, axes: range) -> Floats | None:
    """A view of the array in which the neighbouring dims `axes` are one dim; None if that needs a copy."""
    if not _is_one(array, axes.start, axes.stop):
        return None
    return array.reshape(*array.shape[: axes.start], -1, *array.shape[axes.stop :])


def _is_one(array: Floats, start: int, end: int) -> bool:
    """Whether these dims can be seen as one, without a copy."""
    pairs = zip(array.shape[start:end], array.strides[start:end], strict=True)
    apart = [(size, step) for size, step in pairs if size > 1]
    return all(step == size * inner for (_, step), (size, inner) in itertools.pairwise(apart))


def beside(array: Floats, box: Box) -> Floats:
    """The part of an array that belongs to a block. Along dims of size 1, all blocks have the same part."""
    pairs = zip(box, array.shape, strict=True)
    return array[tuple(part if size > 1 else slice(0, 1) for part, size in pairs)]


def one_each(array: Floats, axes: tuple[int, ...]) -> Dims:
    """The dims of an array with one number for each line of `array`: 1 along the lines."""
    return tuple(1 if axis in axes else size for axis, size in enumerate(array.shape))
