"""Axes of tensors: their sizes and strides, and which neighbouring axes can be taken as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cudnn_actor.engines.cuda.kernels.element_types import ACCESS_BYTES

__all__ = ["Axis", "extent", "in_five", "largest_pack", "merge_axes", "merge_dims", "prepend_dims"]

Axis = tuple[int, tuple[int, ...]]
"""A dim's size, and the stride of each of several tensors in it."""


def in_five(values: Sequence[int], other: int) -> list[int]:
    """A tensor's dims or strides with three spatial ones: `other` stands for those that it does not have."""
    return [*values[:2], *prepend_dims(values[2:], 3, other)]


def prepend_dims(values: Sequence[int], rank: int, other: int) -> list[int]:
    """Numbers of spatial dims as those of `rank` dims: `other` stands for each of the dims before them."""
    return [*[other] * (rank - len(values)), *values]


def largest_pack(
    size: int, steps: Iterable[int], alignment: int, itemsize: int, most: int = ACCESS_BYTES
) -> int:
    """The most neighbours along an axis of `size` elements that a thread can access at once, a power of two.

    They have up to `most` bytes, and fill the axis. `steps`: the distances of places at which the axis
    begins. `alignment`: the first place's, in bytes. 1 is always possible.
    """
    steps, count = [*steps], 2
    while count * itemsize <= most and alignment % (count * itemsize) == 0:
        if any(number % count for number in (size, *steps)):
            break
        count *= 2
    return count // 2


def extent(sizes: Iterable[int], steps: Iterable[int]) -> int:
    """The distance in memory, in elements, of the first and the last element of some axes.

    `steps`: the stride along each axis, whose sign does not matter. An axis without elements counts as 0.
    """
    return sum((size - 1) * abs(step) for size, step in zip(sizes, steps, strict=True) if size)


def merge_dims(dims: Sequence[int], strides: Sequence[Sequence[int]]) -> list[Axis]:
    """The axes of the dims of more than one element, as few as possible.

    They are sorted by the first tensor's strides, the slowest first. Axes that lie one behind the other in
    all tensors become one. `strides`: each tensor's.
    """
    order = sorted(range(len(dims)), key=lambda axis: -strides[0][axis])
    return merge_axes((dims[axis], tuple(of[axis] for of in strides)) for axis in order)


def merge_axes(axes: Iterable[Axis]) -> list[Axis]:
    """The axes, slowest first, without those of size 1, and with neighbours as one where possible."""
    merged: list[Axis] = []
    for size, steps in axes:
        if size == 1:
            continue
        if merged and all(outer == size * inner for outer, inner in zip(merged[-1][1], steps, strict=True)):
            merged[-1] = (merged[-1][0] * size, steps)
        else:
            merged.append((size, steps))
    return merged
