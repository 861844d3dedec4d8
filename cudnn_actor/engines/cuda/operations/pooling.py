"""Pooling on CUDA: libcudnn's, and a kernel of our own with a thread for each element of the result.

libcudnn's pooling has no dilation, no asymmetric padding and no flat index. It takes
less time for a maximum of a half type, channels last (42 instead of 75 us, H200), and more
for averages, float32, or channels first. The shapes are constants in our kernel's source,
by which the compiler divides faster. One or two spatial dims become three.
https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-ops-library.html
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused, spatial
from cudnn_actor.engines.cuda.kernels.axes import in_five, prepend_dims
from cudnn_actor.engines.cuda.kernels.element_types import C_TYPES, CONVERSIONS, load, store, value_type
from cudnn_actor.engines.cuda.kernels.index_code import (
    indexing,
    is_wide,
    number_of,
    offset_of,
    split_all,
    thread_loop,
)
from cudnn_actor.engines.cuda.kernels.kernel import Launch, Run, arguments_of, grid_over
from cudnn_actor.engines.cuda.kernels.reduction_code import ELEMENT_MAX
from cudnn_actor.engines.cuda.kernels.window_code import adaptive_loop, covered_place, covering_window
from cudnn_actor.engines.cuda.library.libcudnn import (
    factor,
    libcudnn,
    pooling_descriptor,
    tensor_descriptor,
)
from cudnn_actor.engines.cuda.operations.implementation import Launcher, implement, kernels
from cudnn_actor.protocol.operations import (
    AdaptiveWindow,
    AvgPool,
    AvgPoolBackward,
    GraphTensor,
    LpPool,
    LpPoolBackward,
    MaxPool,
    MaxPoolBackward,
)
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["library_pooling", "pooling_launches"]

LibraryPooling = MaxPool[int] | AvgPool[int] | AvgPoolBackward[int]
Pooling = LibraryPooling | MaxPoolBackward[int] | LpPool[int] | LpPoolBackward[int]

_RANK = 5
_VECTOR = 8
"""Elements of a half type that are read at once."""
_MAX, _AVERAGE_WITH_PADDING, _AVERAGE = 3, 1, 2
"""cudnnPoolingMode_t: the maximum is the deterministic one."""


def library_pooling(operation: LibraryPooling, tensors: Sequence[GraphTensor], handle: Any) -> Run:
    """The run of a pooling by libcudnn. Raises `Refused`, and `EngineFailure` if it does not take it."""
    window = operation.window
    if getattr(operation, "index", None) is not None:
        raise Refused("libcudnn's pooling has no flat index")
    if isinstance(window, AdaptiveWindow):
        raise Refused("libcudnn's pooling has no adaptive windows")
    if window.pre_padding != window.post_padding or max(window.dilation) > 1:
        raise Refused("libcudnn's pooling has no asymmetric padding and no dilation")
    rank = max(2, window.spatial_dims)
    fields = (window.size, 1), (window.pre_padding, 0), (window.stride, 1)
    size, padding, stride = (prepend_dims(values, rank, other) for values, other in fields)
    if isinstance(operation, MaxPool):
        mode = _MAX
    else:
        mode = _AVERAGE_WITH_PADDING if operation.include_padding else _AVERAGE
    pool = pooling_descriptor(mode, size, padding, stride)
    first, last = (tensor_descriptor(*spatial(tensor), tensor.dtype) for tensor in tensors)
    one, zero = (factor(value, tensors[0].dtype) for value in (1.0, 0.0))
    references = ctypes.byref(one), ctypes.byref(zero)
    library, cudnn_handle = libcudnn(), handle.backend_handle

    def forward(addresses: Sequence[int], _: Sequence[float]) -> None:
        x, y = addresses
        library.cudnnPoolingForward(
            cudnn_handle, pool.pointer, references[0], first.pointer, x, references[1], last.pointer, y
        )

    def backward(addresses: Sequence[int], _: Sequence[float]) -> None:
        dy, dx = addresses
        gradient = first.pointer, dy
        # An average's gradient depends on neither x nor y: dx and dy stand in their places.
        library.cudnnPoolingBackward(
            cudnn_handle,
            pool.pointer,
            references[0],
            *gradient,
            *gradient,
            last.pointer,
            dx,
            references[1],
            last.pointer,
            dx,
        )

    return forward if isinstance(operation, MaxPool | AvgPool) else backward


def pooling_launches(operation: Pooling, tensors: Sequence[GraphTensor]) -> list[Launch]:
    """The launch of a pooling. Each element of the first result has a thread.

    The source does not depend on the number of samples, if the samples' axis is the slowest in memory.
    """
    looped = tensors[len(operation.reads)]
    text, count = _source(operation, tensors, looped), math.prod(looped.dims)
    return [Launch("pooling", text, *grid_over(count), arguments_of(len(tensors), count))]


def _source(operation: Pooling, tensors: Sequence[GraphTensor], looped: GraphTensor) -> str:
    """The kernel in CUDA C++. `looped`: the first result, whose elements have a thread each."""
    read = len(operation.reads)
    arguments = ", ".join(
        f"{'const ' if number < read else ''}{C_TYPES[tensor.dtype]}* __restrict__ t{number}"
        for number, tensor in enumerate(tensors)
    )
    forward = isinstance(operation, MaxPool | AvgPool | LpPool)
    x, y = (tensors[0], tensors[1]) if forward else (tensors[-1], tensors[0])
    numbers = {f"x{axis}": size for axis, size in enumerate(in_five(x.dims, 1)) if axis}
    numbers |= {f"y{axis}": size for axis, size in enumerate(in_five(y.dims, 1)) if axis}
    numbers |= _window(operation)
    for number, tensor in enumerate(tensors):
        numbers |= {f"s{number}_{axis}": step for axis, step in enumerate(in_five(tensor.strides, 0))}
    dims, strides = in_five(looped.dims, 1), in_five(looped.strides, 0)
    counts = math.prod(x.dims), math.prod(dims)
    sizes = (tensor.spec.nbytes for tensor in tensors)
    largest = max(*counts, *sizes, *numbers.values(), *_products(operation, x, y))
    constants = "".join(f"constexpr I {name} = {value}; " for name, value in numbers.items())
    # Neighbouring threads take elements that are neighbours in memory.
    order = sorted(range(_RANK), key=lambda axis: (strides[axis], dims[axis] > 1 or not axis))
    indices = split_all("rest", [(f"i{axis}", str(dims[axis])) for axis in order])
    return f"""typedef {value_type(tensors[0].dtype)} T;
{indexing(wide=is_wide(largest, sums=True))}
{CONVERSIONS}
{_COUNT}
extern "C" __global__ void pooling({arguments}, const long long count) {{
    {constants}
    {thread_loop("i", "count")} {{
        I rest = (I)i;
        {indices}
        {_BODIES[type(operation)](operation, tensors)}
    }}
}}
"""


def _window(operation: Pooling) -> dict[str, int]:
    """The numbers of the window, by their names; adaptive windows have none."""
    window = operation.window
    if isinstance(window, AdaptiveWindow):
        return {}
    fields = {"size": window.size, "pre": window.pre_padding}
    fields |= {"stride": window.stride, "dilation": window.dilation}
    return {
        f"{name}{axis}": value
        for name, values in fields.items()
        for axis, value in enumerate(prepend_dims(values, 3, int(name != "pre")))
    }


def _products(operation: Pooling, x: GraphTensor, y: GraphTensor) -> tuple[int, ...]:
    """Bounds of the numbers that are computed besides offsets."""
    window = operation.window
    if isinstance(window, AdaptiveWindow):
        return tuple((n + 1) * (m + 1) for n, m in zip(x.dims[2:], y.dims[2:], strict=True))
    extents = (size * dilation for size, dilation in zip(window.size, window.dilation, strict=True))
    return math.prod(window.size), *extents


def _place(number: int, *at: str) -> str:
    return offset_of(at, (f"s{number}_{axis}" for axis in range(_RANK)))


_COUNT = """
// How many elements of a window lie in the input, in one dim.
__device__ __forceinline__ I inside(
    I place, I in, I size, I pre, I stride, I dilation) {
    const I start = place * stride - pre, last = min(size - 1, (in - 1 - start) / dilation);
    return last - (start < 0 ? (dilation - 1 - start) / dilation : 0) + 1;
}
// How many elements an adaptive window has.
__device__ __forceinline__ I covered(I place, I in, I out) {
    return ((place + 1) * in + out - 1) / out - place * in / out;
}
"""


def _loop_over_window(operation: Pooling, body: str) -> str:
    """Returns the C loop that runs `body` for each input element p of the window i."""
    return _spatial_loops(operation, covered_place, ("p", "x", "y"), body)


def _loop_over_windows_of(operation: Pooling, body: str) -> str:
    """Returns the C loop that runs `body` for each window q that contains the input element i."""
    return _spatial_loops(operation, covering_window, ("q", "y", "x"), body)


def _spatial_loops(
    operation: Pooling,
    statements: Callable[[str, str, str, int, str], str],
    letters: Sequence[str],
    body: str,
) -> str:
    """Returns C loops along the spatial dims, one in the other, that define an index in each of them.

    `statements`: `covered_place` or `covering_window`. `letters`: those of the index that is defined, of its
    dims, and of i's dims.
    """
    for n, (axis, tap) in reversed([*enumerate(zip(range(2, _RANK), "abc", strict=True))]):
        found, size, count = (f"{letter}{axis}" for letter in letters)
        if isinstance(operation.window, AdaptiveWindow):
            head, first = adaptive_loop(found, f"i{axis}", size, count), ""
        else:
            head = f"for (I {tap} = 0; {tap} < size{n}; ++{tap})"
            first = statements(found, f"i{axis}", tap, n, size)
        body = f"""
        {head} {{ {first} {body} }}"""
    return body


_I, _P, _Q = ([f"{letter}{axis}" for axis in range(2, _RANK)] for letter in "ipq")


def _number(place: Sequence[str]) -> str:
    """The C expression of the number of an input's element among all, by its place in each spatial dim."""
    return number_of(("i0", "i1", *place), (f"x{axis}" for axis in range(1, _RANK)))


def _max(operation: MaxPool[int], tensors: Sequence[GraphTensor]) -> str:
    found = f"t0[{_place(0, 'i0', 'i1', *_P)}]"
    # Elements come in the order of their places, so the first of equal ones stays. The accumulator of
    # `accumulators.accumulator_of_place` compares places, too, which is not needed here.
    body = f"""const T value = (T){load(tensors[0].dtype, found)};
                    if (index < 0 || value > best || (value != value && best == best)) {{
                        best = value; element = {found}; index = {_number(_P)};
                    }}"""
    place = ("i0", "i1", *_I)
    written = f"t1[{_place(1, *place)}] = element;"
    if operation.index is not None:
        written += f" t2[{_place(2, *place)}] = index;"
    kept = f"T best = 0; {C_TYPES[tensors[0].dtype]} element = 0; I index = -1;"
    return f"{kept}{_loop_over_window(operation, body)}\n        {written}"


def _max_backward(operation: MaxPoolBackward[int], tensors: Sequence[GraphTensor]) -> str:
    place = ("i0", "i1", *_Q)
    value = load(tensors[0].dtype, f"t0[{_place(0, *place)}]")
    body = f"if (t1[{_place(1, *place)}] == number) sum += (T){value};"
    # `store` goes by way of double, which does not hold every int64.
    wide = tensors[2].dtype in (DType.INT64, DType.UINT64)
    stored = "sum" if wide else store(tensors[2].dtype, "sum")
    return (
        f"T sum = 0; const I number = {_number(_I)};{_loop_over_windows_of(operation, body)}\n"
        f"        t2[{_place(2, 'i0', 'i1', *_I)}] = {stored};"
    )


def _count_of_window(operation: AvgPool[int] | AvgPoolBackward[int], places: Sequence[str]) -> str:
    """The C expression of the number of elements that a window counts.

    `places`: the window's place in each spatial dim.
    """
    axes = range(2, _RANK)
    if isinstance(operation.window, AdaptiveWindow):
        counts = [f"covered({place}, x{axis}, y{axis})" for axis, place in zip(axes, places, strict=True)]
    elif operation.include_padding:
        counts = ["size0", "size1", "size2"]
    else:
        counts = [
            f"inside({place}, x{axis}, size{n}, pre{n}, stride{n}, dilation{n})"
            for n, (axis, place) in enumerate(zip(axes, places, strict=True))
        ]
    return f"({' * '.join(counts)})"


def _average(operation: AvgPool[int], tensors: Sequence[GraphTensor]) -> str:
    value = load(tensors[0].dtype, f"t0[{_place(0, 'i0', 'i1', *_P)}]")
    return (
        f"T sum = 0;{_loop_over_window(operation, f'sum += (T){value};')}\n"
        f"        t1[{_place(1, 'i0', 'i1', *_I)}] = "
        f"{store(tensors[1].dtype, f'sum / (T){_count_of_window(operation, _I)}')};"
    )


def _average_backward(operation: AvgPoolBackward[int], tensors: Sequence[GraphTensor]) -> str:
    value = load(tensors[0].dtype, f"t0[{_place(0, 'i0', 'i1', *_Q)}]")
    body = f"sum += (T){value} / (T){_count_of_window(operation, _Q)};"
    return (
        f"T sum = 0;{_loop_over_windows_of(operation, body)}\n"
        f"        t1[{_place(1, 'i0', 'i1', *_I)}] = {store(tensors[1].dtype, 'sum')};"
    )


def _power(value: str, exponent: float) -> str:
    """The C expression of a power."""
    simple = {0.0: "(T)1", 1.0: value, 2.0: f"{value} * {value}"}
    return simple.get(exponent, f"pow({value}, (T){exponent!r})")


def _norm(operation: LpPool[int], tensors: Sequence[GraphTensor]) -> str:
    p = float(operation.p)
    element = load(tensors[0].dtype, f"t0[{_place(0, 'i0', 'i1', *_P)}]")
    value = f"const T value = fabs((T){element});"
    most = f"{value} most = {ELEMENT_MAX.of('most', 'value')};"
    # An element that equals the largest one counts as 1, also if it is 0 or infinite.
    share = f"{value} const T part = value / most; sum += value == most ? (T)1 : {_power('part', p)};"
    root = {1.0: "sum", 2.0: "sqrt(sum)"}.get(p, f"pow(sum, (T)1 / (T){p!r})")
    return (
        f"T most = 0, sum = 0;{_loop_over_window(operation, most)}{_loop_over_window(operation, share)}\n"
        f"        t1[{_place(1, 'i0', 'i1', *_I)}] = {store(tensors[1].dtype, f'most * {root}')};"
    )


def _norm_backward(operation: LpPoolBackward[int], tensors: Sequence[GraphTensor]) -> str:
    own, place = ("i0", "i1", *_I), ("i0", "i1", *_Q)
    dy, x, y = (
        load(tensor.dtype, f"t{number}[{_place(number, *at)}]")
        for number, (tensor, at) in enumerate(zip(tensors, (place, own, place), strict=False))
    )
    share = _power("part", operation.p - 1.0)
    body = f"""const T norm = {y}, part = size / norm;
                    if (norm != 0) sum += (T){dy} * sign * {share};"""
    loop = _loop_over_windows_of(operation, body)
    return (
        f"T sum = 0; const T value = {x}, size = fabs(value);\n"
        f"        const T sign = value > 0 ? 1 : value < 0 ? -1 : value;{loop}\n"
        f"        t3[{_place(3, *own)}] = {store(tensors[3].dtype, 'sum')};"
    )


_BODIES: dict[type, Callable[[Any, Sequence[GraphTensor]], str]] = {
    MaxPool: _max,
    MaxPoolBackward: _max_backward,
    AvgPool: _average,
    AvgPoolBackward: _average_backward,
    LpPool: _norm,
    LpPoolBackward: _norm_backward,
}


def _is_of_vectors(operation: LibraryPooling, tensors: Sequence[GraphTensor]) -> bool:
    """Whether it is a max pooling of a half type, channels last, whose channels are whole vectors."""
    whole = (tensor.dims[1] % _VECTOR == 0 and tensor.strides[1] == 1 for tensor in tensors)
    return isinstance(operation, MaxPool) and tensors[0].dtype.is_half and all(whole)


_KERNEL, _LIBRARY = kernels(pooling_launches), {"library": Launcher(library_pooling, first=_is_of_vectors)}
implement(MaxPool, AvgPool, launchers={**_KERNEL, **_LIBRARY})
implement(AvgPoolBackward, launchers={**_LIBRARY, **_KERNEL})
implement(MaxPoolBackward, LpPool, LpPoolBackward, launchers=_KERNEL)
