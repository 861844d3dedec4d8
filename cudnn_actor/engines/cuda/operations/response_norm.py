"""Local response normalisation on CUDA: kernels of our own.

Each element's window of channels is read anew, from caches. For the gradient, a
first kernel computes the term that an element adds to each window that contains it,
in the workspace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cudnn_actor.engines.cuda.kernels.element_types import C_TYPES
from cudnn_actor.engines.cuda.kernels.kernel import Launch, arguments_of
from cudnn_actor.engines.cuda.kernels.lines import Lines, beginning, lines_of, stored_value, value_of
from cudnn_actor.engines.cuda.operations.implementation import implement, kernels
from cudnn_actor.protocol.operations import GraphTensor, LocalResponseNorm, LocalResponseNormBackward
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["response_launches", "response_workspace"]

AnyResponse = LocalResponseNorm[int] | LocalResponseNormBackward[int]


def response_launches(operation: AnyResponse, tensors: Sequence[GraphTensor]) -> list[Launch]:
    """The launches of a normalisation, or of its gradient."""
    lines = _lines(operation, tensors)
    number = np.float64 if tensors[0].dtype is DType.FLOAT64 else np.float32
    scale = operation.alpha / operation.size
    factors = (scale, operation.beta, operation.bias, 2 * scale * operation.beta)
    numbers = [number(factor) for factor in factors]
    channels = tensors[0].dims[1]
    reach = (min(part, channels) for part in operation.reach)
    count = len(tensors) + isinstance(operation, LocalResponseNormBackward)  # with the workspace
    arguments = arguments_of(count, *lines.numbers.values(), *numbers, *reach)
    texts = _sources(operation, tensors, lines)
    return [Launch(name, text, *lines.threads(), arguments) for name, text in texts.items()]


def response_workspace(operation: AnyResponse, tensors: Sequence[GraphTensor]) -> int:
    """Bytes of the workspace: for the gradient, a number for each element of x; else 0."""
    if isinstance(operation, LocalResponseNorm):
        return 0
    return math.prod(tensors[0].dims) * operation.compute((tensors[0].dtype,)).itemsize


def _sources(operation: AnyResponse, tensors: Sequence[GraphTensor], lines: Lines) -> dict[str, str]:
    """The kernels in CUDA C++, by their names."""
    names = [name for name, _ in operation.named()]
    given = dict(zip(names, tensors, strict=True))
    places = {name: number for number, name in enumerate(names)}
    pointers = [
        f"{'' if name in operation.outputs else 'const '}{C_TYPES[tensor.dtype]}* __restrict__ {name}"
        for name, tensor in given.items()
    ]

    def value(name: str, place: str) -> str:
        return value_of(given[name], f"{name}[{place}]")

    window = _WINDOW.format(x=value("x", f"x_base + c * {_step(lines, places['x'])}"))
    if isinstance(operation, LocalResponseNorm):
        y = f"{value('x', 'x_at')} * pow(base, -beta)"
        bodies = {"forward": f"{window} y[y_at] = {stored_value(given['y'], y)};"}
    else:
        places["shared"] = len(names)
        pointers.append("T* shared")
        shared = f"{value('dy', 'dy_at')} * {value('x', 'x_at')} * pow(base, -beta - 1)"
        dx = f"{value('dy', 'dy_at')} * pow(base, -beta) - twice * {value('x', 'x_at')} * total"
        around = _AROUND.format(step=_step(lines, places["shared"]))
        bodies = {
            "share": f"{window} shared[shared_at] = {shared};",
            "backward": f"{window} {around} dx[dx_at] = {stored_value(given['dx'], dx)};",
        }
    last = ", T scale, T beta, T bias, T twice, long long before, long long after"
    start = beginning(tensors[0].dtype, wide=lines.wide)
    return {
        name: start
        + lines.kernel(
            name,
            ", ".join(pointers),
            _EACH.format(base=lines.base(places), at=lines.at(places), body=body),
            last,
        )
        for name, body in bodies.items()
    }


def _lines(operation: AnyResponse, tensors: Sequence[GraphTensor]) -> Lines:
    dims = tensors[0].dims
    strides = [tensor.strides for tensor in tensors]
    if isinstance(operation, LocalResponseNormBackward):  # the workspace lies as dy does, without gaps
        order = sorted(range(len(dims)), key=lambda axis: -strides[0][axis])
        packed = TensorSpec.packed(tuple(dims[axis] for axis in order), DType.FLOAT32).strides
        strides.append(tuple(packed[order.index(axis)] for axis in range(len(dims))))
    return lines_of(dims, strides, (1,), [tensor.dtype for tensor in tensors], vectors=())


def _step(lines: Lines, place: int) -> str:
    """The C expression of the distance of neighbouring channels."""
    return f"(I)e0_step{place}" if lines.along else "0"


_EACH = """{base}
        for (I j = there ? lane : (I)length; j < (I)length; j += lanes) {{
            {at}
            {body}
        }}"""
_WINDOW = """T squares = 0;
            for (I c = max(j - (I)before, (I)0); c <= min(j + (I)after, (I)length - 1); ++c) {{
                const T near = {x};
                squares += near * near;
            }}
            const T base = bias + scale * squares;
           """
_AROUND = """T total = 0;
            for (I c = max(j - (I)after, (I)0); c <= min(j + (I)before, (I)length - 1); ++c)
                total += shared[shared_base + c * {step}];
           """


implement(
    LocalResponseNorm,
    LocalResponseNormBackward,
    launchers=kernels(response_launches, response_workspace),
)
