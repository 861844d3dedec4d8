"""Softmax on CUDA: kernels of our own, and libcudnn's.

Ours read a line twice: for the sum of its exponentials and its largest element
at once, then for the result. Sums are float32 (float64 of float64). libcudnn's
accurate algorithm has no limit on the axis: the dims before and after it are
three at most once merged.
https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-ops-library.html
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from cudnn_actor.engines.cuda.library.libcudnn import factor, libcudnn, tensor_descriptor
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.operations.lines import (
    COMBINING,
    Lines,
    combined,
    compiled,
    header,
    lines_of,
    rounded,
    value_of,
)
from cudnn_actor.engines.cuda.operations.reduction import POWERS
from cudnn_actor.engines.cuda.plans.frontend_graph import Refused
from cudnn_actor.engines.cuda.plans.kernels import C_TYPES
from cudnn_actor.protocol.operations import GraphTensor, Softmax, SoftmaxBackward

__all__ = ["library_softmax", "softmax_kernel", "sources"]

AnySoftmax = Softmax[int] | SoftmaxBackward[int]

_ACCURATE, _LOG = 1, 2
"""cudnnSoftmaxAlgorithm_t."""
_BY_CHANNEL = 1
"""cudnnSoftmaxMode_t."""
_MOST_OTHERS = 3


def library_softmax(
    operation: AnySoftmax, tensors: Sequence[GraphTensor], handle: Any
) -> Callable[[Sequence[int]], None]:
    """The launch of a softmax by libcudnn. Raises `Refused`, and `EngineFailure` if it does not take it."""
    lines = _lines(operation, tensors)
    if len(lines.across) > _MOST_OTHERS:
        raise Refused("libcudnn's softmax has four dims")
    if not lines.total * lines.length:
        raise Refused("libcudnn's softmax needs elements")
    ones = [(1, (1,) * len(tensors))] * _MOST_OTHERS
    along = lines.along[0] if lines.along else ones[0]
    first, *rest = [*lines.across, *ones][:_MOST_OTHERS]
    axes = [first, along, *rest]
    descriptors = [
        tensor_descriptor([size for size, _ in axes], [steps[t] for _, steps in axes], tensor.dtype)
        for t, tensor in enumerate(tensors)
    ]
    one, zero = (factor(value, tensors[0].dtype) for value in (1.0, 0.0))
    references = ctypes.byref(one), ctypes.byref(zero)
    algorithm = _LOG if operation.log else _ACCURATE
    library, cudnn_handle = libcudnn(), handle.backend_handle

    def forward(addresses: Sequence[int]) -> None:
        x, y = addresses
        of_x, of_y = (descriptor.pointer for descriptor in descriptors)
        library.cudnnSoftmaxForward(
            cudnn_handle, algorithm, _BY_CHANNEL, references[0], of_x, x, references[1], of_y, y
        )

    def backward(addresses: Sequence[int]) -> None:
        dy, y, dx = addresses
        of_dy, of_y, of_dx = (descriptor.pointer for descriptor in descriptors)
        library.cudnnSoftmaxBackward(
            cudnn_handle, algorithm, _BY_CHANNEL, references[0], of_y, y, of_dy, dy, references[1], of_dx, dx
        )

    return forward if isinstance(operation, Softmax) else backward


def softmax_kernel(
    operation: AnySoftmax, tensors: Sequence[GraphTensor], handle: Any
) -> Callable[[Sequence[int]], None]:
    """The launch of a softmax or its gradient; see `operations.Launcher`."""
    del handle
    lines = _lines(operation, tensors)
    (text,) = sources(operation, tensors)
    kernel, launch_of = compiled(text, "softmax", libraries().cupy), lines.launch()

    def launch(addresses: Sequence[int]) -> None:
        if lines.total * lines.length:
            kernel(*launch_of, (*addresses, *lines.numbers))

    return launch


def sources(operation: AnySoftmax, tensors: Sequence[GraphTensor]) -> tuple[str, ...]:
    """The kernel in CUDA C++."""
    lines = _lines(operation, tensors)
    forward = isinstance(operation, Softmax)
    names = ("x", "y") if forward else ("dy", "y", "dx")
    given = dict(zip(names, tensors, strict=True))
    places = {name: number for number, name in enumerate(names)}
    dtype = tensors[0].dtype
    *read, written = names
    pack = f"Pack<{C_TYPES[dtype]}, {lines.vector}>"
    loads = " ".join(f"const {pack} of_{name} = *(const {pack}*)({name} + {name}_at);" for name in read)
    value = {name: value_of(given[name], f"of_{name}.of[v]") for name in read}
    if forward:
        take = value["x"]
        total = "const T top = state.top, total = state.total + (top - top);  // NaN if top is infinite"
        prepared = "const T scale = log(total);" if operation.log else "const T scale = 1 / total;"
        result = f"{value['x']} - top - scale" if operation.log else f"exp({value['x']} - top) * scale"
        state = POWERS
    else:
        take = value["dy"] if operation.log else f"{value['dy']} * {value['y']}"
        total, prepared = "const T total = state.value;", ""
        changed = f"exp({value['y']}) * total" if operation.log else "total"
        result = f"{value['dy']} - {changed}"
        if not operation.log:
            result = f"{value['y']} * ({result})"
        state = combined("sum(a, b)", "0")
    body = _BODY.format(
        base=lines.base(places),
        at=lines.at(places),
        vector=lines.vector,
        loads=loads,
        take=take,
        form=lines.form.value,
        total=total,
        prepared=prepared,
        pack=pack,
        result=rounded(given[written], f"({result})"),
        written=written,
    )
    pointers = ", ".join(f"{'' if name == written else 'const '}{C_TYPES[dtype]}* {name}" for name in names)
    return (header(lines, dtype) + state + COMBINING + lines.kernel("softmax", pointers, body),)


def _lines(operation: AnySoftmax, tensors: Sequence[GraphTensor]) -> Lines:
    dims = tensors[0].dims
    every = range(len(tensors))
    return lines_of(
        dims,
        [tensor.strides for tensor in tensors],
        (operation.axis % len(dims),),
        [tensor.dtype for tensor in tensors],
        vectors=every,
    )


_BODY = """{base}
        const I end = there ? (I)length / {vector} : 0;
        State state = State::none();
        for (I p = lane; p < end; p += lanes) {{
            const I j = p * {vector};
            {at}
            {loads}
            #pragma unroll
            for (int v = 0; v < {vector}; ++v) state.take({take}, j + v);
        }}
        state = over_{form}(state);
        {total}
        {prepared}
        for (I p = lane; p < end; p += lanes) {{
            const I j = p * {vector};
            {at}
            {loads}
            {pack} changed;
            #pragma unroll
            for (int v = 0; v < {vector}; ++v) changed.of[v] = {result};
            *({pack}*)({written} + {written}_at) = changed;
        }}"""
