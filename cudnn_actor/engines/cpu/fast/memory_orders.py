"""The orders in which the axes of arrays lie in memory: packed, or with channels last."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.lines import Floats
from cudnn_actor.engines.cpu.scratch import Dims, Scratch

__all__ = ["is_channels_last", "memory_order", "scratch_in_order"]


def is_channels_last(strides: Sequence[int]) -> bool:
    """Whether the channels of images, (N, C, spatial), lie side by side."""
    return len(strides) > 2 and abs(strides[1]) < min(map(abs, strides[2:]))


def memory_order(rank: int, *, channels_last: bool) -> tuple[int, ...]:
    """The axes of images, (N, C, spatial), in the order in which they lie in memory, the slowest first."""
    return (0, *range(2, rank), 1) if channels_last else tuple(range(rank))


def scratch_in_order(memory: Scratch, dims: Dims, order: Sequence[int], dtype: npt.DTypeLike) -> Floats:
    """Scratch memory for an array of these dims. `order`: its axes in memory, the slowest first."""
    return memory.take(tuple([dims[axis] for axis in order]), dtype).transpose(_places(tuple(order)))


@functools.cache
def _places(order: tuple[int, ...]) -> tuple[int, ...]:
    """The place of each axis in an order."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))
