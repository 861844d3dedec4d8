"""Layer norm and RMS norm by kernels of our own, on packed tensors: a thread block for each row.

Sums are float32 (float64 of float64), over a row in two passes: first the mean,
then the squares of what differs from it. Gradients of scale and bias have a
thread for each element of a row, which sums over all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.plans.kernels import C_TYPES, PREAMBLE, load, store
from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.operations import (
    GraphTensor,
    LayerNorm,
    LayerNormBackward,
    RMSNorm,
    RMSNormBackward,
)

__all__ = ["normalization", "source"]

Norm = LayerNorm[int] | RMSNorm[int] | LayerNormBackward[int] | RMSNormBackward[int]

_THREADS, _MOST_BLOCKS = 256, 1 << 16


def normalization(operation: Norm, tensors: Sequence[GraphTensor]) -> Callable[[Sequence[int]], None]:
    """The launch of a norm on packed tensors; see `operations.Launch`."""
    cupy = libraries().cupy
    given = {name: tensors[number] for name, number in _operands(operation).items()}
    x = given["x"]
    first = operation.axis % len(x.dims)
    rows, length = math.prod(x.dims[:first]), math.prod(x.dims[first:])
    module = cupy.RawModule(code=source(operation, tensors), options=("--std=c++17",))
    of_rows = module.get_function("rows")
    epsilon = getattr(operation, "epsilon", 0.0)
    number = (cupy.float64 if x.dtype is DType.FLOAT64 else cupy.float32)(epsilon)
    sums = module.get_function("columns") if {"dscale", "dbias"} & set(given) else None

    def launch(addresses: Sequence[int]) -> None:
        of_rows((min(rows, _MOST_BLOCKS),), (_THREADS,), (*addresses, rows, length, number))
        if sums is not None:
            sums((min(-(-length // _THREADS), _MOST_BLOCKS),), (_THREADS,), (*addresses, rows, length))

    return launch


def source(operation: Norm, tensors: Sequence[GraphTensor]) -> str:
    """The kernels in CUDA C++."""
    operands = _operands(operation)
    dtypes = {name: tensors[number].dtype for name, number in operands.items()}
    written = {name for name, _ in operation.named(operation.outputs)}
    pointers = ", ".join(
        f"{'' if name in written else 'const '}{C_TYPES[dtype]}* {name}" for name, dtype in dtypes.items()
    )
    code = _Code(dtypes)
    kernels = [_ROWS.format(pointers=pointers, body=_BODIES[type(operation)](code))]
    if {"dscale", "dbias"} & written:
        kernels.append(_COLUMNS.format(pointers=pointers, body=_column_sums(code)))
    double = "double" if dtypes["x"] is DType.FLOAT64 else "float"
    return "\n".join([f"typedef {double} T;", PREAMBLE, _SUM, *kernels])


def _operands(operation: Norm) -> dict[str, int]:
    return dict(operation.named((*operation.inputs, *operation.outputs)))


class _Code:
    """C expressions that read and write the operands there are."""

    def __init__(self, dtypes: dict[str, DType]) -> None:
        self._dtypes = dtypes

    def has(self, name: str) -> bool:
        return name in self._dtypes

    def get(self, name: str, place: str, other: str = "") -> str:
        """The value of an operand's element; `other` if the operand was left out."""
        if name not in self._dtypes:
            return other
        return f"(T)({load(self._dtypes[name], f'{name}[{place}]')})"

    def put(self, name: str, place: str, value: str) -> str:
        """The statement that stores an element; nothing if the operand was left out."""
        if name not in self._dtypes:
            return ""
        return f"{name}[{place}] = {store(self._dtypes[name], value)};"


_SUM = """
__device__ T sum_of_block(T value) {
    __shared__ T sums[256];
    __syncthreads();
    sums[threadIdx.x] = value;
    __syncthreads();
    for (int half = blockDim.x / 2; half; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    return sums[0];
}
"""
_ROWS = """
extern "C" __global__ void rows({pointers}, long long rows, long long length, T epsilon) {{
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {{
        const long long start = row * length;
        {body}
    }}
}}
"""
_COLUMNS = """
extern "C" __global__ void columns({pointers}, long long rows, long long length) {{
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long j = blockIdx.x * (long long)blockDim.x + threadIdx.x; j < length; j += step) {{
        {body}
    }}
}}
"""
_EACH = "for (long long j = threadIdx.x; j < length; j += blockDim.x)"


def _layer_norm(code: _Code) -> str:
    x, at = code.get("x", "start + j"), "start + j"
    value = f"({x} - mean_) * inverse * {code.get('scale', 'j', '1')} + {code.get('bias', 'j', '0')}"
    kept = code.put("mean", "row", "mean_") + code.put("inverse_deviation", "row", "inverse")
    return f"""T part = 0;
        {_EACH} part += {x};
        const T mean_ = sum_of_block(part) / length;
        part = 0;
        {_EACH} {{ const T apart = {x} - mean_; part += apart * apart; }}
        const T inverse = 1 / sqrt(sum_of_block(part) / length + epsilon);
        {_EACH} {{ {code.put("y", at, value)} }}
        if (threadIdx.x == 0) {{ {kept} }}"""


def _rms_norm(code: _Code) -> str:
    x = code.get("x", "start + j")
    value = f"{x} * inverse * {code.get('scale', 'j', '1')}"
    return f"""T part = 0;
        {_EACH} {{ const T value = {x}; part += value * value; }}
        const T inverse = 1 / sqrt(sum_of_block(part) / length + epsilon);
        {_EACH} {{ {code.put("y", "start + j", value)} }}
        if (threadIdx.x == 0) {{ {code.put("inverse_rms", "row", "inverse")} }}"""


def _normal(code: _Code, at: str, row: str) -> str:
    """The C expression of a normalised element."""
    if code.has("mean"):
        mean, inverse = code.get("mean", row), code.get("inverse_deviation", row)
        return f"(({code.get('x', at)} - {mean}) * {inverse})"
    return f"({code.get('x', at)} * {code.get('inverse_rms', row)})"


def _backward(code: _Code) -> str:
    at = "start + j"
    slope = f"{code.get('dy', at)} * {code.get('scale', 'j', '1')}"
    inverse = code.get("inverse_deviation" if code.has("mean") else "inverse_rms", "row")
    mean = "sum_of_block(part) / length" if code.has("mean") else "0"
    value = f"(slope - mean_ - {_normal(code, at, 'row')} * along) * {inverse}"
    return f"""T part = 0, product = 0;
        {_EACH} {{ const T slope = {slope}; part += slope; product += slope * {_normal(code, at, "row")}; }}
        const T mean_ = {mean}, along = sum_of_block(product) / length;
        {_EACH} {{ const T slope = {slope}; {code.put("dx", at, value)} }}"""


def _column_sums(code: _Code) -> str:
    at = "row * length + j"
    return f"""T scaled = 0, plain = 0;
        for (long long row = 0; row < rows; ++row) {{
            const T slope = {code.get("dy", at)};
            plain += slope; scaled += slope * {_normal(code, at, "row")};
        }}
        {code.put("dscale", "j", "scaled")} {code.put("dbias", "j", "plain")}"""


_BODIES: dict[type, Callable[[_Code], Any]] = {
    LayerNorm: _layer_norm,
    RMSNorm: _rms_norm,
    LayerNormBackward: _backward,
    RMSNormBackward: _backward,
}
