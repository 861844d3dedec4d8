"""Arrays cut into blocks of a few thousand elements, along the axes that are outermost in memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

__all__ = ["BLOCK_ELEMENTS", "FEW_CHANNELS", "block_elements", "merged_axes", "pieces"]

Dims = tuple[int, ...]

BLOCK_ELEMENTS = 16384
"""Elements of a block: 64 KiB of float32. For a shorter block, NumPy takes longer to begin than to
compute."""
_LARGE, _LARGER = 1 << 24, 1 << 28
"""Tensors of more elements have blocks of twice `BLOCK_ELEMENTS`, and of eight times as many, since each
block takes a call."""
_LINE = 16
"""Elements of a cache line. Rows are cut at multiples of that."""
FEW_CHANNELS = _LINE
"""Channels that lie side by side are not cut into fewer, if there is room."""


def block_elements(dims: Dims) -> int:
    """The most elements of a block of a tensor. It does not depend on how many lanes there are."""
    size = math.prod(dims)
    return min(size, BLOCK_ELEMENTS * (1 if size <= _LARGE else 2 if size <= _LARGER else 8))


def merged_axes(
    dims: Dims, arrays: Sequence[npt.NDArray[Any]], leading: int = 0
) -> tuple[Dims, list[npt.NDArray[Any]]]:
    """Views of the same elements with as few axes as possible, in the order that a leading array has in
    memory.

    Parameters
    ----------
    dims
        The dims that the arrays are broadcast to.
    arrays
        Arrays of these dims, of which any may be 1.
    leading
        The number of the array that decides about the order of the axes: the slowest first.

    Returns
    -------
    tuple
        The dims of the merged axes, at least one, and views of the arrays, of these dims. An array has
        strides of 0 where it was broadcast.
    """
    views = [np.broadcast_to(array, dims) for array in arrays]
    strides = [view.strides for view in views]
    axes = [axis for axis, dim in enumerate(dims) if dim != 1]
    axes.sort(key=lambda axis: -abs(strides[leading][axis]))
    sizes: list[int] = []
    steps: list[tuple[int, ...]] = []
    for axis in axes:
        step = tuple(of[axis] for of in strides)
        if sizes and all(before == dims[axis] * own for before, own in zip(steps[-1], step, strict=True)):
            sizes[-1] *= dims[axis]
            steps[-1] = step
        else:
            sizes.append(dims[axis])
            steps.append(step)
    if not sizes:
        sizes, steps = [1], [tuple(array.itemsize for array in arrays)]
    own_steps = list(zip(*steps, strict=True)) if arrays else []
    merged_views = [
        as_strided(array, sizes, own, writeable=array.flags.writeable)
        for array, own in zip(arrays, own_steps, strict=True)
    ]
    return tuple(sizes), merged_views


def pieces(dims: Dims, most: int) -> Iterator[tuple[int | slice, ...]]:
    """Indices that cut a tensor into parts of at most `most` elements, in C order. The first part is the
    largest.

    Outer axes are indexed, so that parts have fewer dims, and one is cut into slices of about the same size;
    inner ones are left whole. The parts of the innermost axis start at multiples of 16. Where a part has to
    have all dims, use `lines.boxes_of_elements`.
    """
    inner, axis = 1, len(dims) - 1
    while axis > 0 and inner * dims[axis] <= most:
        inner *= dims[axis]
        axis -= 1
    size = dims[axis]
    count = -(-size // max(1, most // inner))
    step = -(-size // count)
    if inner == 1:
        step = min(-(-step // _LINE) * _LINE, max(most, 1))
    cuts = [slice(start, min(start + step, size)) for start in range(0, size, step)]
    for outer in itertools.product(*map(range, dims[:axis])):
        for cut in cuts:
            yield (*outer, cut)
