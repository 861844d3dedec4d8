"""Lines of a tensor: its elements along some dims, where the others are fixed.

Blocks of lines stay in the cache. A block is a box of the dims that are fixed, with whole lines; its bounds
follow from dims and strides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.kernels import Call, Step, dealt
from cudnn_actor.engines.cpu.scratch import Dims, Scratch

__all__ = [
    "Box",
    "Floats",
    "beside",
    "blocks_of_lines",
    "boxes",
    "deal",
    "dots_into",
    "in_turn",
    "is_matrix",
    "lines",
    "merged",
    "most_lines",
    "one_each",
    "reduced_into",
    "squares_into",
    "sums_into",
]

Box = tuple[slice, ...]
Floats = npt.NDArray[Any]
"""An array of float32 or float64."""
T = TypeVar("T")

_BLOCK_BYTES = 128 << 10
"""Of one array's block: with the result's block, half of a small L2 cache."""
_LEAST = 8192
"""Elements of a block: with fewer, the calls cost more than what they compute."""
_SHORT = 16
"""Lines of up to so many elements are reduced side by side."""
_LONG, _PARTS = 1024, (64, 128, 32, 16)
"""Lines from so many elements on are added up in parts of one of these sizes."""
_FEW, _MANY = 4, 8
"""How many blocks there are at least, and what their number is a multiple of where there are more."""


def most_lines(dims: Sequence[int], axes: Sequence[int], itemsize: int) -> int:
    """The most lines of one block."""
    length = math.prod(dims[axis] for axis in axes)
    return max(1, _elements(math.prod(dims), itemsize) // length)


def _elements(total: int, itemsize: int) -> int:
    """About how many elements a block has."""
    least = -(-total * itemsize // _BLOCK_BYTES)
    count = _FEW if least <= _FEW else -(-least // _MANY) * _MANY
    return max(_LEAST, -(-total // count))


def blocks_of_lines(like: Floats, axes: Sequence[int]) -> Iterator[Box]:
    """The boxes of an array of these dims and strides, with whole lines along `axes`."""
    kept = sorted(
        (axis for axis in range(like.ndim) if axis not in axes), key=lambda axis: -abs(like.strides[axis])
    )
    whole = [slice(None)] * like.ndim
    for box in boxes([like.shape[axis] for axis in kept], most_lines(like.shape, axes, like.itemsize)):
        for axis, part in zip(kept, box, strict=True):
            whole[axis] = part
        yield tuple(whole)


def boxes(dims: Sequence[int], most: int) -> Iterator[Box]:
    """Boxes that cover these dims, of at most so many elements, or of one: whole in the last dims."""
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


def lines(axes: Sequence[int], *arrays: Floats) -> tuple[list[Floats], tuple[int, ...]]:
    """Arrays of the same dims with the dims of lines last, and which these are; matrices, if all can be."""
    rank = arrays[0].ndim
    kept = tuple(axis for axis in range(rank) if axis not in axes)
    turned = [array.transpose((*kept, *axes)) for array in arrays]
    cut = len(kept)
    if all(_is_one(array, 0, cut) and _is_one(array, cut, rank) for array in turned):
        dims = turned[0].shape
        flat = (math.prod(dims[:cut]), math.prod(dims[cut:]))
        return [array.reshape(flat) for array in turned], (1,)
    return turned, tuple(range(cut, rank))


def merged(array: Floats, axes: range) -> Floats | None:
    """The array with neighbouring dims as one; None if that takes a copy."""
    if not _is_one(array, axes.start, axes.stop):
        return None
    return array.reshape(*array.shape[: axes.start], -1, *array.shape[axes.stop :])


def _is_one(array: Floats, start: int, end: int) -> bool:
    """Whether these dims can be seen as one, without a copy."""
    pairs = zip(array.shape[start:end], array.strides[start:end], strict=True)
    apart = [(size, step) for size, step in pairs if size > 1]
    return all(step == size * inner for (_, step), (size, inner) in itertools.pairwise(apart))


def is_matrix(array: Floats) -> bool:
    """Whether BLAS takes it as it is: with neighbouring elements in its rows."""
    return (
        array.ndim == 2
        and array.strides[1] == array.itemsize
        and array.strides[0] % array.itemsize == 0
        and (array.strides[0] >= array.shape[1] * array.itemsize)
    )


def reduced_into(ufunc: np.ufunc, array: Floats, axes: tuple[int, ...], out: Floats) -> Call:
    """A call that reduces the lines of an array. `out`: its dims with 1 for those of lines."""
    if axes == (1,) and array.ndim == 2 and array.shape[1] <= _SHORT < array.shape[0]:
        columns = [array[:, place : place + 1] for place in range(array.shape[1])]
        return partial(_fold, ufunc, columns, out)
    return partial(ufunc.reduce, array, axes, out=out, keepdims=True)


def _fold(ufunc: np.ufunc, columns: Sequence[Floats], out: Floats) -> None:
    """Reduce short lines: NumPy takes longer for the beginning of each."""
    np.copyto(out, columns[0])
    for column in columns[1:]:
        ufunc(out, column, out=out)


def sums_into(array: Floats, axes: tuple[int, ...], out: Floats) -> Call:
    """A call that adds up the lines of an array, as `reduced_into`; long ones in parts, which loses less."""
    if axes != (1,) or array.dtype.kind != "f" or not is_matrix(array) or array.shape[1] == 1:
        return reduced_into(np.add, array, axes, out)
    count, length = array.shape
    if length < _LONG:
        return partial(np.matmul, array, np.ones((length, 1), array.dtype), out)
    size = next((size for size in _PARTS if not length % size), 1)
    parts = merged(array.reshape(count, length // size, size), range(2)) if size > 1 else None
    if parts is None:
        return reduced_into(np.add, array, axes, out)  # which adds up in pairs
    sums = np.empty((count, length // size), array.dtype)
    return in_turn([sums_into(parts, (1,), sums.reshape(-1, 1)), sums_into(sums, (1,), out)])


def squares_into(array: Floats, axes: tuple[int, ...], out: Floats, scratch: Scratch) -> Call:
    """A call that adds up the squares of lines, as `sums_into`. It may take scratch of `array`'s dims."""
    return dots_into(array, array, axes, out, scratch)


def dots_into(a: Floats, b: Floats, axes: tuple[int, ...], out: Floats, scratch: Scratch) -> Call:
    """A call that adds up the products of two arrays' lines, as `squares_into`."""
    if axes == (1,) and is_matrix(a) and is_matrix(b) and a.dtype.kind == "f":
        return partial(np.matmul, a[:, None, :], b[:, :, None], out[:, :, None])
    products = scratch.take(a.shape, a.dtype)
    return in_turn([partial(np.multiply, a, b, products), sums_into(products, axes, out)])


def beside(array: Floats, box: Box) -> Floats:
    """The part of an array that belongs to a block; its dims may be 1, for one number for all."""
    pairs = zip(box, array.shape, strict=True)
    return array[tuple(part if size > 1 else slice(0, 1) for part, size in pairs)]


def one_each(array: Floats, axes: tuple[int, ...]) -> Dims:
    """The dims of a number for each line: those of an array, with 1 along the lines."""
    return tuple(1 if axis in axes else size for axis, size in enumerate(array.shape))


def in_turn(calls: Sequence[Call]) -> Call:
    """One call that makes several, one after the other."""
    made = tuple(calls)
    if len(made) == 1:
        return made[0]

    def run() -> None:
        for call in made:
            call()

    return run


def deal(blocks: Sequence[T], count: int, bind: Callable[[T, int], Call]) -> Step:
    """A step of a call for each block, which `bind` makes for it and the number of its lane."""
    calls: list[list[Call]] = [[] for _ in range(count)]
    for number, block in enumerate(blocks):
        calls[number % count].append(bind(block, number % count))
    return dealt(calls)
