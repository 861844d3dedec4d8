"""Blocks of the result of a pooling, and what each is computed from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from cudnn_actor.engines.cpu.fast.blocks import BLOCK_ELEMENTS, FEW_CHANNELS
from cudnn_actor.engines.cpu.fast.pooling_windows import Axis
from cudnn_actor.engines.cpu.scratch import Dims

__all__ = ["Block", "blocks", "extents_of_blocks", "part_read", "read_dims"]

Block = tuple[slice, slice, slice]
"""A block of y: a part of the batch, of the channels, and of the first spatial dim."""
_MOST_ELEMENTS = 1 << 17
"""Elements of a row with `FEW_CHANNELS` channels. With longer rows, blocks have fewer channels."""


def read_dims(x: Dims, y: Dims, axes: Sequence[Axis], extents: Dims) -> Dims:
    """The most that a block of y of these extents is computed from, along each dim of x."""
    batch, channels, rows = extents
    reaches = (axes[0].reach(first, first + rows) for first in range(0, y[2], rows))
    return (batch, channels, max(end - begin for begin, end in reaches), *x[3:])


def part_read(axes: Sequence[Axis], block: Block) -> tuple[slice, tuple[Axis, ...]]:
    """The part of x's first spatial dim that a block of y is computed from, and its windows in that."""
    read, first = axes[0].part(block[2].start, block[2].stop)
    return read, (first, *axes[1:])


def extents_of_blocks(x: Dims, y: Dims, axes: Sequence[Axis], *, channels_last: bool) -> Dims:
    """How much of the batch, of the channels and of the first spatial dim of y a block has."""
    image = math.prod(x[2:])
    step = axes[0].stride if axes[0].taps else -(-x[2] // y[2])
    row = image if y[2] == 1 else image // x[2] * step  # elements of x for a row of y
    batch = max(1, BLOCK_ELEMENTS // (image * x[1]))
    if channels_last:
        few = min(x[1], max(min(FEW_CHANNELS, _MOST_ELEMENTS // row), BLOCK_ELEMENTS // row, 1))
        channels = x[1] if row * x[1] <= 4 * BLOCK_ELEMENTS else few
        rows = y[2] if image * channels <= BLOCK_ELEMENTS else max(1, BLOCK_ELEMENTS // (row * channels))
    else:
        channels = min(x[1], max(1, BLOCK_ELEMENTS // image))
        rows = y[2] if image <= BLOCK_ELEMENTS else max(1, BLOCK_ELEMENTS // row)
    return (min(batch, x[0]), channels, min(rows, y[2]))


def blocks(y: Dims, extents: Dims) -> Iterator[Block]:
    """The blocks of y, of these extents."""
    cuts = (
        [slice(start, min(start + extent, size)) for start in range(0, size, extent)]
        for size, extent in zip(y[:3], extents, strict=True)
    )
    yield from itertools.product(*cuts)
