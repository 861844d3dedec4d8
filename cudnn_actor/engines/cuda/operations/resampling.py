"""Resampling on CUDA: a kernel of our own, with a thread for each element of the result.

What an element is made of along each dim comes from lists, which the host computes
once. The gradient has the transposed lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.operations.indexing import Walk, launcher
from cudnn_actor.engines.cuda.operations.lines import beginning, compiled, value_of
from cudnn_actor.engines.cuda.operations.lines import rounded as stored
from cudnn_actor.engines.cuda.plans.kernels import C_TYPES
from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.operations import GraphTensor, Resample, ResampleBackward, ResampleMode
from cudnn_actor.protocol.operations.resampling import Lists

__all__ = ["resample_kernel", "resample_source"]

Resampling = Resample[int] | ResampleBackward[int]
_FEW = 1 << 30
"""Numbers below this, and sums of two of them, fit into 32 bits."""


def resample_kernel(
    operation: Resampling, tensors: Sequence[GraphTensor], handle: Any
) -> Callable[[Sequence[int]], None]:
    """The launch of a resampling; see `operations.Launcher`."""
    del handle
    cupy = libraries().cupy
    x, _ = tensors
    lists, walk = _lists(operation, tensors), _walk(operation, tensors)
    floats = np.float64 if x.dtype is DType.FLOAT64 else np.float32
    kernel = compiled(resample_source(operation, tensors), "resample", cupy, "--fmad=false")
    arguments: list[Any] = []
    for axis, of in lists.items():
        # Negative ones are outside.
        places = np.where(of.places < 0, -1, of.places * x.strides[axis])
        arguments += [cupy.asarray(each.astype(np.int64)) for each in (of.starts, places)]
        arguments.append(cupy.asarray(of.weights.astype(floats)))
    cupy.cuda.get_current_stream().synchronize()  # other streams read them, too
    value = floats(getattr(operation, "extrapolation", 0.0))
    return launcher(kernel, walk.total, (*arguments, value, *walk.numbers))


def _lists(operation: Resampling, tensors: Sequence[GraphTensor]) -> dict[int, Lists]:
    """For each dim that changes. The places of elements outside are negative."""
    if isinstance(operation, Resample):
        taps = operation.taps(tensors[0].dims)
        inside = {
            n: of._replace(places=np.where(of.outside[:, None], -1, of.places)) for n, of in taps.items()
        }
        return {axis: of.lists() for axis, of in inside.items()}
    dims = tensors[1].dims
    return {axis: of.transposed(dims[axis]) for axis, of in operation.taps(dims).items()}


def _walk(operation: Resampling, tensors: Sequence[GraphTensor]) -> Walk:
    """Over the result: where it is, and x but for the dims that change, and the coordinates along those."""
    x, y = tensors
    changed = [*_lists(operation, tensors)]
    own = [0 if axis in changed else step for axis, step in enumerate(x.strides)]
    places = {
        f"n{number}": [int(axis == of) for axis in range(len(y.dims))] for number, of in enumerate(changed)
    }
    return Walk.over("t", y.dims, y=y.strides, x=own, **places)


def resample_source(operation: Resampling, tensors: Sequence[GraphTensor]) -> str:
    """The kernel in CUDA C++."""
    x, y = tensors
    lists, walk = _lists(operation, tensors), _walk(operation, tensors)
    count, forward = len(lists), isinstance(operation, Resample)
    span = sum((size - 1) * step for size, step in zip(x.dims, x.strides, strict=True))
    wide = max(walk.span, span, *(len(of.places) for of in lists.values())) >= _FEW
    tables = "".join(
        f"const long long* __restrict__ starts{n}, const long long* __restrict__ places{n}, "
        f"const T* __restrict__ weights{n}, "
        for n in range(count)
    )
    first = [f"places{n}[starts{n}[n{n}_at]]" for n in range(count)]
    outside = " || ".join(f"{place} < 0" for place in first) if forward and count else "false"
    if forward and operation.mode is ResampleMode.NEAREST:
        at = " + ".join(["x_at", *(f"(I){place}" for place in first)])
        body = f"if ({outside}) y[y_at] = {stored(y, 'extrapolation')}; else y[y_at] = x[{at}];"
    else:
        weight, at = (f"weight{count - 1} * ", f"at{count - 1}") if count else ("", "x_at")
        inner = f"sum += {weight}{value_of(x, f'x[{at}]')};"
        for n in reversed(range(count)):
            before, start = (f"weight{n - 1} * ", f"at{n - 1}") if n else ("", "x_at")
            inner = f"""for (long long k{n} = starts{n}[n{n}_at]; k{n} < starts{n}[n{n}_at + 1]; ++k{n}) {{
                if (weights{n}[k{n}] == 0) continue;
                const T weight{n} = {before}weights{n}[k{n}];
                const I at{n} = {start} + (I)places{n}[k{n}];
                {inner}
            }}"""
        body = f"""T sum = 0;
        if ({outside}) sum = extrapolation;
        else {{ {inner} }}
        y[y_at] = {stored(y, "sum")};"""
    element = C_TYPES[x.dtype]
    number = DType.FLOAT64 if x.dtype is DType.FLOAT64 else DType.FLOAT32
    return f"""{beginning(number, wide=wide)}
extern "C" __global__ void resample(
    const {element}* __restrict__ x, {element}* __restrict__ y, {tables}T extrapolation, {walk.parameters}) {{
    {walk.loop(body)}
}}
"""
