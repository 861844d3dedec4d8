"""The C++ of indices: their type, loops over numbered places, and where a place lies in memory.

A generated kernel numbers its places from 0 on, in the order of the result's memory.
Its threads, or its blocks, share the numbers in a loop whose stride is the grid. A
number is taken apart into an index along each axis, the fastest axis first. An offset
in a tensor is the sum of the indices times the strides. Indices and offsets are of the
type I, which has 32 bits unless a kernel's numbers need 64.

`kernels.walks` joins these for tensors whose sizes and strides are arguments of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["ALL_THREADS", "INDEXING", "PLACED", "THREAD", "block_loop", "division", "divisor", "index_type"]
__all__ += ["indexing", "is_wide", "number_of", "offset_of", "place_type", "split_all", "split_index"]
__all__ += ["thread_loop", "with_divisors"]

SMALL = 1 << 31
"""Numbers below this fit into 32 bits."""
THREAD, ALL_THREADS = "blockIdx.x * (long long)blockDim.x + threadIdx.x", "(long long)gridDim.x * blockDim.x"
"""The C expressions of a thread's number in the grid, and of the number of the grid's threads."""

INDEXING = f"""
// A loop over the numbers below `count`, which all threads of a launch share.
#define EACH(number, count) \\
    for (long long number = {THREAD}; number < count; \\
         number += {ALL_THREADS})
// n / size. Of 32 bits, and not below 0: by the host's `divisor`, a factor and, above it, a shift.
__device__ __forceinline__ int over(int n, long long, long long by) {{
    return (int)((unsigned long long)(unsigned)n * (unsigned)by >> (by >> 32));
}}
__device__ __forceinline__ long long over(long long n, long long size, long long) {{ return n / size; }}
"""
"""C++ for the beginning of a source in which there are such loops, or statements of `split_index`."""
PLACED = """
// An index below 0 counts from the end; one out of range counts as the nearest.
__device__ __forceinline__ long long placed(long long index, long long size) {
    if (index < 0) index += size;
    return index < 0 ? 0 : index < size ? index : size - 1;
}
"""


def is_wide(*largest: int, sums: bool = False) -> bool:
    """Whether a kernel's indices and offsets need 64 bits.

    `largest`: bounds of the kernel's indices and offsets. `sums`: whether the kernel adds two of them, too.
    """
    return max(largest) >= (SMALL // 2 if sums else SMALL)


def index_type(*, wide: bool) -> str:
    """The C type of indices and offsets. `wide`: whether they need 64 bits."""
    return "long long" if wide else "int"


def place_type(*, wide: bool) -> str:
    """The C type of a place's number in a loop whose stride is the grid.

    If 32 bits are enough for the places, an unsigned number does not overflow in the loop's last step.
    """
    return "long long" if wide else "unsigned"


def indexing(*, wide: bool) -> str:
    """C++ for the beginning of a source: `INDEXING`, and the type I of indices and offsets."""
    return f"{INDEXING}typedef {index_type(wide=wide)} I;\n"


def thread_loop(number: str, count: str) -> str:
    """The head of a C loop like `EACH` that keeps the grid's stride in a variable.

    It depends on the loop's body whether this or `EACH` takes fewer registers.
    """
    stride = f"{number}_stride"
    return (
        f"for (long long {stride} = {ALL_THREADS}, {number} = {THREAD}; {number} < {count}; "
        f"{number} += {stride})"
    )


def block_loop(number: str, count: str, each: str = "", own: str = "", axis: str = "x") -> str:
    """The head of a C loop over the numbers below `count`, which all blocks of a launch share.

    Parameters
    ----------
    number, count
        The name of the loop's number, and the C expression of the count.
    each
        The C expression of how many numbers a block takes at a time, of 64 bits; empty if it takes one.
    own
        The C expression of which of these numbers the thread takes; empty for the first.
    axis
        The axis of the grid whose blocks share the numbers: "x", "y" or "z".
    """
    block, step = (
        f"{word}.{axis} * {each}" if each else f"{word}.{axis}" for word in ("blockIdx", "gridDim")
    )
    start = f"{block} + {own}" if own else block
    return f"for (long long {number} = {start}; {number} < {count}; {number} += {step})"


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
    size = min(max(size, 1), 1 << 31)  # larger ones only divide numbers of 64 bits
    shift = 31 + (size - 1).bit_length()
    return -(-(1 << shift) // size) | shift << 32


def split_index(name: str, rest: str, size: str, times: int = 1) -> str:
    """C statements that take the index along the fastest axis from a number.

    They define `name` as `rest` modulo `size`, times `times`, and divide `rest` by `size`. The kernel must
    have the numbers that `with_divisors` gives for `size`.
    """
    modulo = f"{rest} - {name}_over * (I){size}"
    modulo = f"({modulo}) * {times}" if times > 1 else modulo
    return f"const I {name}_over = over({rest}, {size}, {size}_by), {name} = {modulo}; {rest} = {name}_over;"


def division(name: str, rest: str, size: str, times: int | str = 1, kind: str = "I") -> str:
    """C statements like those of `split_index`, but `size` may be any C expression.

    `kind`: the C type of the index.
    """
    modulo = f"{rest} % {size} * {times}" if times != 1 else f"{rest} % {size}"
    return f"const {kind} {name} = {modulo}; {rest} /= {size};"


def split_all(
    rest: str,
    axes: Sequence[tuple[str, str]],
    split: Callable[[str, str, str, int], str] = division,
    times: int = 1,
) -> str:
    """C statements that take a number apart into an index along each axis, the slowest one without a
    division.

    `axes`: the name of each index, and the C expression of the axis' size, the fastest axis first. `split`:
    returns the statements for one axis. `times`: how many elements an index along the fastest axis counts.
    """
    counts = [times, *[1] * (len(axes) - 1)]
    *fast, (slowest, _) = axes
    text = [split(name, rest, size, count) for (name, size), count in zip(fast, counts, strict=False)]
    last = f"{rest} * {counts[-1]}" if counts[-1] > 1 else rest
    return " ".join([*text, f"const I {slowest} = {last};"])


def number_of(indices: Iterable[str], sizes: Iterable[str | int]) -> str:
    """The C expression of a place's number, from its index along each axis, the slowest first.

    It undoes `split_all`. `sizes`: the C expressions of the axes' sizes, without the slowest one's.
    """
    number, *faster = indices
    for index, size in zip(faster, sizes, strict=True):
        number = f"({number}) * {size} + {index}" if " " in number else f"{number} * {size} + {index}"
    return number


def offset_of(indices: Iterable[str], steps: Iterable[str], start: str = "") -> str:
    """The C expression of an element's offset: the sum of its indices times the tensor's strides.

    `start`: the offset of the element whose indices are 0, if that is not 0.
    """
    terms = (f"{index} * {step}" for index, step in zip(indices, steps, strict=True))
    return " + ".join([start, *terms] if start else terms)
