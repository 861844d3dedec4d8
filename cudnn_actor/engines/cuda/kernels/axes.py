"""Axes of tensors: their sizes and strides, and which of them are one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Axis", "extent", "in_five", "merge_axes", "merge_dims"]

Axis = tuple[int, tuple[int, ...]]
"""A dim's size, and the stride of each of several tensors in it."""


def in_five(values: Sequence[int], other: int) -> list[int]:
    """Dims or strides of a tensor with three spatial ones; those that it does not have are `other`."""
    return [*values[:2], *[other] * (5 - len(values)), *values[2:]]


def extent(sizes: Iterable[int], steps: Iterable[int]) -> int:
    """The distance of an axes' first element and its last one in memory, in elements.

    `steps`: the stride along each axis; one below 0 counts as the same above it. An empty axis counts as 0.
    """
    return sum((size - 1) * abs(step) for size, step in zip(sizes, steps, strict=True) if size)


def merge_dims(dims: Sequence[int], strides: Sequence[Sequence[int]]) -> list[Axis]:
    """The axes that dims of more than one element come to: each one's size, and its stride in every tensor.

    They are sorted by the first tensor's strides, the slowest first; axes that lie one behind the other in
    all tensors become one.
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
