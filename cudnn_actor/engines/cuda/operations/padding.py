"""Padding on CUDA: one kernel that reads each element of the result from where it comes from.

A thread writes up to 16 bytes of a result whose elements lie side by side. Where
its elements are neighbours in x, too, it only copies them; elsewhere it maps each
of them, axis by axis. Elements are moved as bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.plans.kernels import C_TYPES, PACK, PREAMBLE, store
from cudnn_actor.protocol.operations import BorderPad, GraphTensor, Pad

__all__ = ["padding_kernel", "source"]

_THREADS, _MOST_BLOCKS, _VECTOR = 256, 1 << 16, 16
_SMALL = 1 << 31
"""Places below this fit into 32 bits."""


class _Axis(NamedTuple):
    """An axis of the result, or several without padding that are one.

    `size`, `step`: the result's. `of`, `from_step`: x's, in the result's order. `before`: elements before
    those of x. `gap`: the distance of two of them.
    """

    size: int
    step: int
    of: int
    from_step: int
    before: int = 0
    gap: int = 1

    @property
    def padded(self) -> bool:
        return self.size != self.of or self.gap != 1


class _Padding(NamedTuple):
    """What the kernel is made of: the axes, slowest first, and where the first of x's elements lies."""

    axes: tuple[_Axis, ...]
    start: int
    together: int
    wide: bool


def padding_kernel(
    operation: Pad[int] | BorderPad[int], tensors: Sequence[GraphTensor], handle: Any
) -> Callable[[Sequence[int]], None]:
    """The launch of a padding; see `operations.Launcher`."""
    del handle
    cupy = libraries().cupy
    kernel = cupy.RawModule(code=source(operation, tensors), options=("--std=c++17",)).get_function("pad")
    found, y = _padding(operation, tensors), tensors[1]
    count = math.prod(y.dims)
    value = float(operation.value) if isinstance(operation, Pad) else 0.0
    arguments = [cupy.float64(value), count, found.start]
    arguments += [number for axis in found.axes for number in axis]
    grid = (min(-(-count // (_THREADS * found.together)), _MOST_BLOCKS),)

    def launch(addresses: Sequence[int]) -> None:
        if count:
            kernel(grid, (_THREADS,), (*addresses, *arguments))

    return launch


def source(operation: Pad[int] | BorderPad[int], tensors: Sequence[GraphTensor]) -> str:
    """The kernel in CUDA C++. It depends on the mode, the dtype, the axes that are padded, and the layout."""
    found = _padding(operation, tensors)
    dtype = tensors[0].dtype
    names = _Axis._fields
    last = len(found.axes) - 1
    ranks = range(len(found.axes))
    parameters = "".join(f", const long long {name}{n}" for n in ranks for name in names)
    places = [f"I i{n} = rest % (I)size{n}; rest /= (I)size{n};" for n in reversed(ranks[1:])]
    mode = "constant" if isinstance(operation, Pad) else str(operation.mode)

    def mapped(n: int) -> str:
        if not found.axes[n].padded:
            return f"i{n}"
        return f"{mode}(i{n} - (I)before{n}, (I)of{n}, (I)gap{n})"

    row = [
        f"{{ const I m = {mapped(n)}; inside &= m >= 0; base += m * (I)from_step{n}; }}" for n in ranks[:-1]
    ]
    carries = ""
    for n in ranks[:-1]:
        carries = f"++i{n};" if not n else f"if (++i{n} == (I)size{n}) {{ i{n} = 0; {carries} }}"
    axis = found.axes[last]
    return f"""{PREAMBLE}{PACK}{_MAPS}
typedef {"long long" if found.wide else "int"} I;
typedef {C_TYPES[dtype]} T;
typedef Pack<T, {found.together}> P;
extern "C" __global__ void pad(
    const T* x, T* y, const double value, const long long count, const long long start{parameters}
) {{
    const T filling = (T){store(dtype, "value")};
    const long long threads = (long long)gridDim.x * blockDim.x;
    for (
        long long first = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * {found.together};
        first < count; first += threads * {found.together}
    ) {{
        I rest = (I)first;
        {" ".join(places)}
        I i0 = rest;
        bool inside;
        I base;
        const auto find = [&] {{
            inside = true;
            base = (I)start;
            {" ".join(row)}
        }};
        find();
        P pack;
        const I from = i{last} - (I)before{last};
        if ({found.together} > 1 && {str(axis.gap == 1 and axis.from_step == 1).lower()} && inside
            && from >= 0 && from + {found.together} <= (I)of{last}) {{
            const T* source = x + base + from;
            if ((unsigned long long)source % sizeof(P) == 0) pack = *(const P*)source;
            else for (int v = 0; v < {found.together}; ++v) pack.of[v] = source[v];
        }} else for (int v = 0; v < {found.together}; ++v) {{
            if (first + v == count) break;
            const I m = {mapped(last)};
            pack.of[v] = inside && m >= 0 ? x[base + m * (I)from_step{last}] : filling;
            if ({found.together} > 1 && ++i{last} == (I)size{last}) {{ i{last} = 0; {carries} find(); }}
        }}
        {_stored(found)}
    }}
}}
"""


def _stored(found: _Padding) -> str:
    """The statements that write what a thread has."""
    if found.together == 1:
        place = " + ".join(f"i{n} * (I)step{n}" for n in range(len(found.axes)))
        return f"y[{place}] = pack.of[0];"
    together = found.together
    rest = f"for (int v = 0; v < {together} && first + v < count; ++v) y[first + v] = pack.of[v];"
    return f"if (first + {together} <= count) *(P*)(y + first) = pack; else {rest}"


def _padding(operation: Pad[int] | BorderPad[int], tensors: Sequence[GraphTensor]) -> _Padding:
    """The axes in the order of the result's memory; those without padding are one where they can be."""
    x, y = tensors
    steps = operation.steps if isinstance(operation, Pad) else (1,) * len(x.dims)
    axes: list[_Axis] = []
    start = 0
    for n in sorted(range(len(x.dims)), key=lambda n: -y.strides[n]):
        if y.dims[n] == 1 == x.dims[n]:
            continue
        reverse = steps[n] < 0 < x.dims[n]
        start += (x.dims[n] - 1) * x.strides[n] if reverse else 0
        step = -x.strides[n] if reverse else x.strides[n]
        axis = _Axis(y.dims[n], y.strides[n], x.dims[n], step, operation.before[n], abs(steps[n]))
        outer = axes[-1] if axes else axis
        joined = outer.step == axis.size * axis.step and outer.from_step == axis.size * axis.from_step
        if axes and joined and not outer.padded and not axis.padded:
            size = outer.size * axis.size
            axes[-1] = axis._replace(size=size, of=size)
        else:
            axes.append(axis)
    axes = axes or [_Axis(1, 1, 1, 1)]
    packed = axes[-1].step == 1 and all(
        outer.step == axis.size * axis.step for outer, axis in itertools.pairwise(axes)
    )
    together = _VECTOR // y.dtype.itemsize if packed and y.alignment % _VECTOR == 0 else 1
    spans = sum((axis.of - 1) * abs(axis.from_step) for axis in axes), sum(a.size * a.step for a in axes)
    wide = max(math.prod(y.dims) + _VECTOR, *spans) >= _SMALL
    return _Padding(tuple(axes), start, min(together, 8), wide)


_MAPS = """
// Where an element comes from, by its place after the first of x's; -1 for one that is filled in.
template <class I> __device__ __forceinline__ I constant(I i, I n, I gap) {
    if (gap == 1) return i < n ? (i < 0 ? -1 : i) : -1;
    return i < 0 || i % gap || i / gap >= n ? -1 : i / gap;
}
template <class I> __device__ __forceinline__ I wrap(I i, I n, I) {
    if (0 <= i && i < n) return i;
    i %= n;
    return i < 0 ? i + n : i;
}
template <class I> __device__ __forceinline__ I edge(I i, I n, I) { return i < 0 ? 0 : i < n ? i : n - 1; }
template <class I> __device__ __forceinline__ I symmetric(I i, I n, I) {
    if (0 <= i && i < n) return i;
    i = wrap<I>(i, 2 * n, 1);
    return i < n ? i : 2 * n - 1 - i;
}
template <class I> __device__ __forceinline__ I reflect(I i, I n, I) {
    if (0 <= i && i < n) return i;
    if (n == 1) return 0;
    i = wrap<I>(i, 2 * n - 2, 1);
    return i < n ? i : 2 * n - 2 - i;
}
"""
