"""Boxes: parts of a tensor that are processed one by one, so that scratch memory stays small."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

from cudnn_actor.engines.cpu.scratch import Dims

__all__ = ["Box", "box_dims", "boxes", "count_boxes", "largest_tile", "whole"]

Box = tuple[slice, ...]
"""A box of a tensor: one slice per dim, with explicit start and stop."""


def whole(dims: Dims) -> Box:
    """The box that is all of a tensor."""
    return tuple(slice(0, dim) for dim in dims)


def box_dims(box: Box) -> Dims:
    """A box's extent in each dim."""
    return tuple(part.stop - part.start for part in box)


def boxes(dims: Dims, tile: Dims) -> Iterator[Box]:
    """Boxes of at most `tile` that cover `dims`, each element once; the first starts at the origin."""
    axes = (
        [slice(start, min(start + step, dim)) for start in range(0, dim, step)]
        for dim, step in zip(dims, tile, strict=True)
    )
    return itertools.product(*axes)


def count_boxes(dims: Dims, tile: Dims) -> int:
    """How many boxes `boxes` yields."""
    return math.prod(-(-dim // step) for dim, step in zip(dims, tile, strict=True))


def largest_tile(dims: Dims, cost: Callable[[Dims], int], budget: int) -> Dims:
    """The largest tile of `dims` that costs at most `budget`; if none does, the smallest possible tile.

    Images (axis 0) are split first, then the spatial dims from the first on. Channels (axis 1) stay
    together: every output needs all input channels of its group, so splitting them saves little.
    """
    tile = list(dims)
    for axis in (0, *range(2, len(dims))):
        tile[axis] = _largest_extent(tile, axis, cost, budget)
        if cost(tuple(tile)) <= budget:
            break
    return tuple(tile)


def _largest_extent(tile: list[int], axis: int, cost: Callable[[Dims], int], budget: int) -> int:
    """The largest extent of a tile's axis within the budget, by bisection: cost grows with the extent."""
    fits, too_much = 1, tile[axis] + 1
    while too_much - fits > 1:
        middle = (fits + too_much) // 2
        if cost((*tile[:axis], middle, *tile[axis + 1 :])) <= budget:
            fits = middle
        else:
            too_much = middle
    return fits
