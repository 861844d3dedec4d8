"""Axes of tensors, and the arithmetic that finds an element along them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

__all__ = ["FEW", "INDEXING", "PLACED", "SMALL", "Axis", "divisor", "index_type", "indexing"]
__all__ += ["merge_axes", "merge_dims", "split_index", "with_divisors"]

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


INDEXING = """
// A loop over the numbers below `count`, which all threads of a launch share.
#define EACH(number, count) \\
    for (long long number = blockIdx.x * (long long)blockDim.x + threadIdx.x; number < count; \\
         number += (long long)gridDim.x * blockDim.x)
// n / size. Of 32 bits, and not below 0: by the host's `divisor`, a factor and, above it, a shift.
__device__ __forceinline__ int over(int n, long long, long long by) {
    return (int)((unsigned long long)(unsigned)n * (unsigned)by >> (by >> 32));
}
__device__ __forceinline__ long long over(long long n, long long size, long long) { return n / size; }
"""
"""C++ for the beginning of a source in which there are such loops, or statements of `split_index`."""


PLACED = """
// An index below 0 counts from the end; one out of range counts as the nearest.
__device__ __forceinline__ long long placed(long long index, long long size) {
    if (index < 0) index += size;
    return index < 0 ? 0 : index < size ? index : size - 1;
}
"""


def with_divisors(sizes: Mapping[str, int]) -> dict[str, int]:
    """The numbers that `split_index` needs for these sizes: each size by its name, and its `divisor`."""
    found: dict[str, int] = {}
    for name, size in sizes.items():
        found |= {name: size, f"{name}_by": divisor(size)}
    return found


def divisor(size: int) -> int:
    """A factor and a shift by which `over` divides numbers from 0 to 2**31 by a size from 1 on.

    That is exact: T. Granlund, P. Montgomery, "Division by invariant integers using multiplication", PLDI
    1994, theorem 4.2.
    """
    size = min(max(size, 1), SMALL)  # larger ones only divide numbers of 64 bits
    shift = 31 + (size - 1).bit_length()
    return -(-(1 << shift) // size) | shift << 32


def index_type(*, wide: bool) -> str:
    """The C type of indices and offsets. `wide`: whether they need 64 bits."""
    return "long long" if wide else "int"


def indexing(*, wide: bool) -> str:
    """C++ for the beginning of a source: `INDEXING`, and the type I of indices and offsets."""
    return f"{INDEXING}typedef {index_type(wide=wide)} I;\n"


def split_index(name: str, rest: str, size: str, times: int = 1) -> str:
    """Statements that take the index along the fastest axis from a number, and leave the number of the rest.

    They define `name` as `times` as much as `rest` modulo `size`, and divide `rest` by `size`. The kernel's
    numbers have `size` from `with_divisors`.
    """
    modulo = f"{rest} - {name}_over * (I){size}"
    modulo = f"({modulo}) * {times}" if times > 1 else modulo
    return f"const I {name}_over = over({rest}, {size}, {size}_by), {name} = {modulo}; {rest} = {name}_over;"
