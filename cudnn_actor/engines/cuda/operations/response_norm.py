"""Local response normalisation on CUDA: kernels of our own.

Each element's window of channels is read anew, from caches. For the gradient,
what the windows of the channels around share is computed first, in the workspace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from cudnn_actor.engines.cuda.kernels.element_types import C_TYPES
from cudnn_actor.engines.cuda.kernels.kernel import function_of
from cudnn_actor.engines.cuda.kernels.lines import Lines, header, lines_of, rounded, value_of
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.operations.implementation import Launcher, implement
from cudnn_actor.protocol.operations import GraphTensor, LocalResponseNorm, LocalResponseNormBackward
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["response_kernels", "response_workspace", "sources"]

AnyResponse = LocalResponseNorm[int] | LocalResponseNormBackward[int]


def response_kernels(
    operation: AnyResponse, tensors: Sequence[GraphTensor], handle: Any
) -> Callable[[Sequence[int]], None]:
    """The launch of a normalisation or its gradient; see `operations.Launcher`."""
    del handle
    cupy = libraries().cupy
    lines = _lines(operation, tensors)
    names = ("forward",) if isinstance(operation, LocalResponseNorm) else ("share", "backward")
    kernels = [function_of(text, name) for name, text in zip(names, sources(operation, tensors), strict=True)]
    number = cupy.float64 if tensors[0].dtype is DType.FLOAT64 else cupy.float32
    scale = operation.alpha / operation.size
    numbers = map(number, (scale, operation.beta, operation.bias, 2 * scale * operation.beta))
    channels = tensors[0].dims[1]
    reach = (min(part, channels) for part in operation.reach)
    given = (*lines.numbers, *numbers, *reach)
    grid, block = lines.threads()

    def launch(addresses: Sequence[int]) -> None:
        for kernel in kernels:
            kernel(grid, block, (*addresses, *given))

    return launch


def response_workspace(operation: AnyResponse, tensors: Sequence[GraphTensor]) -> int:
    """Bytes for what windows share: a number for each element of x, for the gradient."""
    if isinstance(operation, LocalResponseNorm):
        return 0
    return math.prod(tensors[0].dims) * operation.compute((tensors[0].dtype,)).itemsize


def sources(operation: AnyResponse, tensors: Sequence[GraphTensor]) -> tuple[str, ...]:
    """The kernels in CUDA C++."""
    lines = _lines(operation, tensors)
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
        bodies = {"forward": f"{window} y[y_at] = {rounded(given['y'], y)};"}
    else:
        places["shared"] = len(names)
        pointers.append("T* shared")
        shared = f"{value('dy', 'dy_at')} * {value('x', 'x_at')} * pow(base, -beta - 1)"
        dx = f"{value('dy', 'dy_at')} * pow(base, -beta) - twice * {value('x', 'x_at')} * total"
        around = _AROUND.format(step=_step(lines, places["shared"]))
        bodies = {
            "share": f"{window} shared[shared_at] = {shared};",
            "backward": f"{window} {around} dx[dx_at] = {rounded(given['dx'], dx)};",
        }
    last = ", T scale, T beta, T bias, T twice, long long before, long long after"
    return tuple(
        header(lines, tensors[0].dtype)
        + lines.kernel(
            name,
            ", ".join(pointers),
            _EACH.format(base=lines.base(places), at=lines.at(places), body=body),
            last,
        )
        for name, body in bodies.items()
    )


def _lines(operation: AnyResponse, tensors: Sequence[GraphTensor]) -> Lines:
    dims = tensors[0].dims
    strides = [tensor.strides for tensor in tensors]
    if isinstance(operation, LocalResponseNormBackward):  # what is shared lies as dy does, without gaps
        order = sorted(range(len(dims)), key=lambda axis: -strides[0][axis])
        packed = TensorSpec.packed(tuple(dims[axis] for axis in order), DType.FLOAT32).strides
        strides.append(tuple(packed[order.index(axis)] for axis in range(len(dims))))
    return lines_of(dims, strides, (1,), [tensor.dtype for tensor in tensors], vectors=())


def _step(lines: Lines, place: int) -> str:
    """From channel to channel."""
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
    launchers={"kernel": Launcher(response_kernels, workspace=response_workspace)},
)
