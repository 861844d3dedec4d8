"""Pooling by kernels of our own: a thread for each element of the result.

cuDNN's pooling has no dilation, no asymmetric padding and no flat index. The
source depends only on the operation's class and the element types; shapes,
strides and windows are arguments. One or two spatial dims become three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.plans.kernels import C_TYPES, PREAMBLE, load, store
from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.operations import (
    AvgPool,
    AvgPoolBackward,
    GraphTensor,
    MaxPool,
    MaxPoolBackward,
    Window,
)

__all__ = ["pooling", "source"]

Pooling = MaxPool[int] | MaxPoolBackward[int] | AvgPool[int] | AvgPoolBackward[int]

_THREADS, _MOST_BLOCKS = 256, 1 << 16
_RANK = 5


def pooling(operation: Pooling, tensors: Sequence[GraphTensor]) -> Callable[[Sequence[int]], None]:
    """The launch of a pooling on tensors of these specs; see `operations.Launch`."""
    cupy = libraries().cupy
    kernel = cupy.RawKernel(source(operation, tensors), "pooling", options=("--std=c++17",))
    kernel.compile()
    forward = isinstance(operation, MaxPool | AvgPool)
    x, y = (tensors[0], tensors[1]) if forward else (tensors[-1], tensors[0])
    count = math.prod((y if forward else x).dims)
    numbers = [count, *_dims(x.dims), *_dims(y.dims), *_window(operation.window)]
    numbers += [stride for tensor in tensors for stride in _dims(tensor.strides, 0)]
    grid = (min(-(-count // _THREADS), _MOST_BLOCKS),)

    def launch(addresses: Sequence[int]) -> None:
        kernel(grid, (_THREADS,), (*addresses, *numbers))

    return launch


def source(operation: Pooling, tensors: Sequence[GraphTensor]) -> str:
    """The kernel in CUDA C++. The last operand, or two if there is an index, are written."""
    read = len(operation.reads)
    pointers = [
        f"{'const ' if number < read else ''}{C_TYPES[tensor.dtype]}* t{number}"
        for number, tensor in enumerate(tensors)
    ]
    names = ["count", *(f"{tensor}{axis}" for tensor in "xy" for axis in range(_RANK))]
    names += [f"{name}{axis}" for name in ("size", "pre", "stride", "dilation") for axis in range(3)]
    names += [f"s{number}_{axis}" for number in range(len(tensors)) for axis in range(_RANK)]
    arguments = ", ".join([*pointers, *(f"long long {name}" for name in names)])
    forward = isinstance(operation, MaxPool | AvgPool)
    looped = "y" if forward else "x"
    decode = " ".join(
        f"const long long i{axis} = rest % {looped}{axis}; rest /= {looped}{axis};"
        for axis in range(_RANK - 1, 0, -1)
    )
    return f"""typedef {_accumulator(tensors[0].dtype)} T;
{PREAMBLE}
{_COUNT}
extern "C" __global__ void pooling({arguments}) {{
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += step) {{
        long long rest = i;
        {decode}
        const long long i0 = rest;
        {_BODIES[type(operation)](operation, tensors)}
    }}
}}
"""


def _dims(values: Sequence[int], other: int = 1) -> list[int]:
    return [*values[:2], *[other] * (_RANK - len(values)), *values[2:]]


def _window(window: Window) -> list[int]:
    fields = ((window.size, 1), (window.pre_padding, 0), (window.stride, 1), (window.dilation, 1))
    return [number for values, other in fields for number in (*[other] * (3 - len(values)), *values)]


def _accumulator(dtype: DType) -> str:
    if not dtype.is_floating:
        return "long long"
    return "double" if dtype is DType.FLOAT64 else "float"


def _place(number: int, *at: str) -> str:
    return " + ".join(f"{index} * s{number}_{axis}" for axis, index in enumerate(at))


_COUNT = """
// How many elements of a window lie in the input, in one dim.
__device__ __forceinline__ long long inside(
    long long place, long long in, long long size, long long pre, long long stride, long long dilation) {
    long long n = 0;
    for (long long t = 0; t < size; ++t) {
        const long long p = place * stride - pre + t * dilation;
        n += p >= 0 && p < in;
    }
    return n;
}
"""
_SEEN = """
        for (long long a = 0; a < size0; ++a) {{
            const long long p2 = i2 * stride0 - pre0 + a * dilation0;
            if (p2 < 0 || p2 >= x2) continue;
            for (long long b = 0; b < size1; ++b) {{
                const long long p3 = i3 * stride1 - pre1 + b * dilation1;
                if (p3 < 0 || p3 >= x3) continue;
                for (long long c = 0; c < size2; ++c) {{
                    const long long p4 = i4 * stride2 - pre2 + c * dilation2;
                    if (p4 < 0 || p4 >= x4) continue;
                    {body}
                }}
            }}
        }}"""
"""Runs `body` for each element p of the input in the window i."""
_SEEING = """
        for (long long a = 0; a < size0; ++a) {{
            long long q2 = i2 + pre0 - a * dilation0;
            if (q2 < 0 || q2 % stride0 || (q2 /= stride0) >= y2) continue;
            for (long long b = 0; b < size1; ++b) {{
                long long q3 = i3 + pre1 - b * dilation1;
                if (q3 < 0 || q3 % stride1 || (q3 /= stride1) >= y3) continue;
                for (long long c = 0; c < size2; ++c) {{
                    long long q4 = i4 + pre2 - c * dilation2;
                    if (q4 < 0 || q4 % stride2 || (q4 /= stride2) >= y4) continue;
                    {body}
                }}
            }}
        }}"""
"""Runs `body` for each window q that has the element i of the input."""
_NUMBER = "(((i0 * x1 + i1) * x2 + {}) * x3 + {}) * x4 + {}"
_I, _P, _Q = ([f"{letter}{axis}" for axis in range(2, _RANK)] for letter in "ipq")


def _max(operation: MaxPool[int], tensors: Sequence[GraphTensor]) -> str:
    found = f"t0[{_place(0, 'i0', 'i1', *_P)}]"
    body = f"""const T value = (T){load(tensors[0].dtype, found)};
                    if (index < 0 || value > best || (value != value && best == best)) {{
                        best = value; element = {found}; index = {_NUMBER.format(*_P)};
                    }}"""
    place = ("i0", "i1", *_I)
    written = f"t1[{_place(1, *place)}] = element;"
    if operation.index is not None:
        written += f" t2[{_place(2, *place)}] = index;"
    kept = f"T best = 0; {C_TYPES[tensors[0].dtype]} element = 0; long long index = -1;"
    return f"{kept}{_SEEN.format(body=body)}\n        {written}"


def _max_backward(_: MaxPoolBackward[int], tensors: Sequence[GraphTensor]) -> str:
    place = ("i0", "i1", *_Q)
    value = load(tensors[0].dtype, f"t0[{_place(0, *place)}]")
    body = f"if (t1[{_place(1, *place)}] == number) sum += (T){value};"
    # `store` goes by way of double, which does not hold every int64.
    stored = "sum" if tensors[2].dtype is DType.INT64 else store(tensors[2].dtype, "sum")
    return (
        f"T sum = 0; const long long number = {_NUMBER.format(*_I)};{_SEEING.format(body=body)}\n"
        f"        t2[{_place(2, 'i0', 'i1', *_I)}] = {stored};"
    )


def _counted(include_padding: bool, places: Sequence[str]) -> str:
    """The C expression of a window's count; `places`: its place in each spatial dim."""
    if include_padding:
        return "(size0 * size1 * size2)"
    counts = [
        f"inside({place}, x{axis + 2}, size{axis}, pre{axis}, stride{axis}, dilation{axis})"
        for axis, place in enumerate(places)
    ]
    return f"({' * '.join(counts)})"


def _average(operation: AvgPool[int], tensors: Sequence[GraphTensor]) -> str:
    value = load(tensors[0].dtype, f"t0[{_place(0, 'i0', 'i1', *_P)}]")
    mean = f"sum / (T){_counted(operation.include_padding, _I)}"
    return (
        f"T sum = 0;{_SEEN.format(body=f'sum += (T){value};')}\n"
        f"        t1[{_place(1, 'i0', 'i1', *_I)}] = {store(tensors[1].dtype, mean)};"
    )


def _average_backward(operation: AvgPoolBackward[int], tensors: Sequence[GraphTensor]) -> str:
    value = load(tensors[0].dtype, f"t0[{_place(0, 'i0', 'i1', *_Q)}]")
    body = f"sum += (T){value} / (T){_counted(operation.include_padding, _Q)};"
    return (
        f"T sum = 0;{_SEEING.format(body=body)}\n"
        f"        t1[{_place(1, 'i0', 'i1', *_I)}] = {store(tensors[1].dtype, 'sum')};"
    )


_BODIES: dict[type, Callable[[Any, Sequence[GraphTensor]], str]] = {
    MaxPool: _max,
    MaxPoolBackward: _max_backward,
    AvgPool: _average,
    AvgPoolBackward: _average_backward,
}
