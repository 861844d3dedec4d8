"""Axes of tensors, and the arithmetic that finds an element along them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["DIVISION", "FEW", "PLACED", "SMALL", "Axis", "divisor", "merge_axes", "merge_dims", "split_index"]

SMALL, FEW = 1 << 31, 1 << 30
"""Numbers below the first fit into 32 bits; those below the other, and sums of two of them, do."""


Axis = tuple[int, tuple[int, ...]]
"""A dim's size, and the stride of each of several tensors in it."""


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


DIVISION = """
// n / size. Of 32 bits, and not below 0: by the host's `divisor`, a factor and, above it, a shift.
__device__ __forceinline__ int over(int n, long long, long long by) {
    return (int)((unsigned long long)(unsigned)n * (unsigned)by >> (by >> 32));
}
__device__ __forceinline__ long long over(long long n, long long size, long long) { return n / size; }
"""


PLACED = """
// An index below 0 counts from the end; one out of range counts as the nearest.
__device__ __forceinline__ long long placed(long long index, long long size) {
    if (index < 0) index += size;
    return index < 0 ? 0 : index < size ? index : size - 1;
}
"""


def divisor(size: int) -> int:
    """A factor and a shift by which `over` divides numbers from 0 to 2**31 by a size from 1 on.

    That is exact: T. Granlund, P. Montgomery, "Division by invariant integers using multiplication", PLDI
    1994, theorem 4.2.
    """
    size = min(max(size, 1), SMALL)  # larger ones only divide numbers of 64 bits
    shift = 31 + (size - 1).bit_length()
    return -(-(1 << shift) // size) | shift << 32


def split_index(name: str, rest: str, size: str, by: str, times: int = 1) -> str:
    """Statements that take the index along the fastest axis from a number, and leave the number of the rest.

    They define `name` as `times` as much as `rest` modulo `size`, and divide `rest` by `size`. `by` is the
    `divisor` of `size`.
    """
    modulo = f"{rest} - {name}_over * (I){size}"
    modulo = f"({modulo}) * {times}" if times > 1 else modulo
    return f"const I {name}_over = over({rest}, {size}, {by}), {name} = {modulo}; {rest} = {name}_over;"
