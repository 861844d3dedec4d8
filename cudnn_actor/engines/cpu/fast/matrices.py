"""Products of matrices by BLAS, in blocks of rows and of columns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.kernels import Call, Step, deal
from cudnn_actor.engines.cpu.fast.lines import Box, Floats, boxes_of_elements, joined_axes
from cudnn_actor.engines.cpu.scratch import Scratch

__all__ = [
    "as_blas_takes_it",
    "blas_operand",
    "blas_takes",
    "copy_step",
    "of_samples",
    "product_steps",
    "result_for_blas",
]

_LEAST_WORK = 1 << 19
"""Products of a block: about 20 µs."""
_LEAST_SIZE = 128
"""Rows or columns of a block of a large matrix: BLAS copies the other operand for each block."""
_MOST = 16
"""Blocks of a matrix, and of a batch."""
_TILE = 16
"""Blocks begin at multiples of this, like BLAS's own blocks."""
_ENOUGH, _LEAST_DEPTH, _MOST_SUMS = 4, 512, 1 << 20
"""With fewer blocks than `_ENOUGH`, sums are cut, too: into parts of at least `_LEAST_DEPTH` products.

The results of all parts have at most `_MOST_SUMS` elements.
"""
_COPIED = 1 << 15
"""Elements that are copied at a time."""


class _Block(NamedTuple):
    a: Floats
    b: Floats
    y: Floats


def product_steps(a: Floats, b: Floats, y: Floats, lanes: Sequence[Scratch]) -> list[Step]:
    """Steps that compute y = a @ b, of arrays of one dtype, float32 or float64, and of as many dims.

    Dims of the batch may be 1 in a and in b. Operands that BLAS cannot take are copied first, to memory that
    is kept.
    """
    steps: list[Step] = []
    a, b = (blas_operand(each, steps, lanes) for each in (a, b))
    into, copies = result_for_blas(y, lanes)
    product = _of_one_matrix(_Block(a, b, into))
    depths = _depths(product)
    if len(depths) > 1:
        steps += _sum_products(product, depths, lanes)
    else:
        steps.append(deal(_blocks(*product), len(lanes), _product))
    return [*steps, *copies]


def blas_takes(array: Floats) -> bool:
    """Whether BLAS takes the matrices in the last two dims where they lie.

    Neighbours in a row, or in a column, must be neighbours in memory. The stride of a dim of size 1 may be
    anything, and that of the other dim then any above 0.
    """
    (rows, columns), (step, inner), unit = array.shape[-2:], array.strides[-2:], array.itemsize
    if rows == 1 or columns == 1:
        return bool((rows == 1 or step >= unit) and (columns == 1 or inner >= unit))
    return bool((inner == unit and step >= columns * unit) or (step == unit and inner >= rows * unit))


def as_blas_takes_it(array: Floats) -> Floats | None:
    """The matrices in the last two dims, where dims of size 1 have the strides that BLAS expects.

    None if BLAS takes only a copy.
    """
    if not blas_takes(array):
        return None
    *batch, step, inner = (stride // array.itemsize for stride in array.strides)
    rows, columns = array.shape[-2:]
    if rows == columns == 1:
        step = inner = 1
    elif rows == 1:
        step = columns if inner == 1 else 1
    elif columns == 1:
        inner = rows if step == 1 else 1
    strides = [stride * array.itemsize for stride in (*batch, step, inner)]
    return np.lib.stride_tricks.as_strided(array, array.shape, strides)


def copy_step(source: npt.NDArray[np.generic], target: npt.NDArray[np.generic], lanes: int) -> Step:
    """A step that copies an array to another of its dims, converted to its dtype."""

    def call(box: Box, lane: int) -> Call:
        del lane
        one, other = source[box], target[box]
        return lambda: np.copyto(other, one, casting="unsafe")

    return deal([*boxes_of_elements(source.shape, _COPIED)], lanes, call)


def blas_operand(array: Floats, steps: list[Step], lanes: Sequence[Scratch]) -> Floats:
    """Matrices that BLAS takes: these, or a copy, which a step that is appended makes in each run."""
    found = as_blas_takes_it(array)
    if found is None:
        found = lanes[0].keep(array.shape, array.dtype)
        steps.append(copy_step(array, found, len(lanes)))
    return found


def result_for_blas(y: Floats, lanes: Sequence[Scratch]) -> tuple[Floats, list[Step]]:
    """Matrices that BLAS can write to, and the steps that copy them to y, unless they lie there."""
    into = as_blas_takes_it(y)
    if into is not None:
        return into, []
    into = lanes[0].keep(y.shape, y.dtype)
    return into, [copy_step(into, y, len(lanes))]


def _product(block: _Block, lane: int) -> Call:
    del lane
    a, b, y = block
    return lambda: np.matmul(a, b, y)


def _of_one_matrix(product: _Block) -> _Block:
    """The same product with a batch's rows below each other, if all are multiplied by one matrix."""
    a, b, y = product
    if math.prod(b.shape[:-2]) > 1 or y.ndim == 2 or a.shape[:-1] != y.shape[:-1]:
        return product
    inner = range(y.ndim - 1)
    rows, results = (joined_axes(each, inner) for each in (a, y))
    if rows is None or results is None:
        return product
    found = [as_blas_takes_it(each) for each in (rows, results)]
    if found[0] is None or found[1] is None:
        return product
    return _Block(found[0], b.reshape(b.shape[-2:]), found[1])


def _depths(product: _Block) -> list[slice]:
    """Parts of the sums, if a single product has a small result and much to add up; else one."""
    a, b, y = product
    (rows, columns), depth = y.shape[-2:], a.shape[-1]
    whole = [slice(0, depth)]
    if math.prod(y.shape[:-2]) > 1:
        return whole
    # For one row, a block of columns would read a part of each row of b, which is slow.
    by_rows = rows == 1 and b.strides[-1] == b.itemsize
    count = min(rows * columns * depth // _LEAST_WORK, _MOST)
    if not by_rows and (count < _ENOUGH or len(_parts(rows, columns, count)) >= _ENOUGH):
        return whole
    least = _LEAST_SIZE if by_rows else _LEAST_DEPTH
    return _cuts(depth, _power(min(count, depth // least, _MOST_SUMS // (rows * columns))))


def _sum_products(product: _Block, depths: list[slice], lanes: Sequence[Scratch]) -> list[Step]:
    """Steps that compute a product as a sum of products."""
    a, b, y = (each.reshape(each.shape[-2:]) for each in product)
    sums = lanes[0].keep((len(depths), *y.shape), y.dtype)
    products = [_Block(a[:, part], b[part], sums[number]) for number, part in enumerate(depths)]

    def total(box: Box, lane: int) -> Call:
        del lane
        return partial(np.add.reduce, sums[:, *box], 0, out=y[box])

    count = len(lanes)
    return [deal(products, count, _product), deal([*boxes_of_elements(y.shape, _COPIED)], count, total)]


def _blocks(a: Floats, b: Floats, y: Floats) -> list[_Block]:
    *batch, rows, columns = y.shape
    work = rows * columns * a.shape[-1]
    count = math.prod(batch)
    samples = [*boxes_of_elements(batch, max(_LEAST_WORK // max(1, work), -(-count // _MOST)))]
    parts = _parts(rows, columns, min(work // _LEAST_WORK, _MOST // len(samples)))
    found = []
    for box in samples:
        of_a, of_b, of_y = (of_samples(each, box) for each in (a, b, y))
        found += [
            _Block(of_a[..., own_rows, :], of_b[..., own_columns], of_y[..., own_rows, own_columns])
            for own_rows, own_columns in parts
        ]
    return found


def of_samples(array: Floats, box: Box) -> Floats:
    """Some samples, without the dims with one of them. An array may have one for all of a dim."""
    parts = (
        (0 if size == 1 else part.start)
        if part.stop - part.start == 1
        else (slice(None) if size == 1 else part)
        for part, size in zip(box, array.shape, strict=False)
    )
    return array[tuple(parts)]


def _parts(rows: int, columns: int, most: int) -> list[tuple[slice, slice]]:
    """The rows and columns of each block, of `most` blocks at most. The larger dim is cut first."""
    first, second = (columns, rows) if columns >= rows else (rows, columns)
    of_first = _power(min(most, first // _LEAST_SIZE))
    of_second = _power(min(most // of_first, second // _LEAST_SIZE))
    one, other = _cuts(first, of_first), _cuts(second, of_second)
    return [(s, f) if columns >= rows else (f, s) for f, s in itertools.product(one, other)]


def _power(most: int) -> int:
    """The largest power of two up to that; at least 1."""
    return 1 << max(1, most).bit_length() - 1


def _cuts(size: int, count: int) -> list[slice]:
    bounds = [size * number // count // _TILE * _TILE for number in range(count)]
    return [slice(*pair) for pair in itertools.pairwise((*bounds, size))]
