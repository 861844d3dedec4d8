"""Layer norm and RMS norm on CUDA: cuDNN's, and kernels of our own, all on packed tensors.

Our kernels have a thread block for each row. Sums are float32 (float64 of
float64), over a row in two passes: first the mean, then the squares of what
differs from it. For the gradients of scale and bias, a block sums 32 columns.
https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Normalizations.html
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.operations.lines import COMBINING, combined
from cudnn_actor.engines.cuda.plans.frontend_graph import FrontendGraph, Refused
from cudnn_actor.engines.cuda.plans.kernels import C_TYPES, PREAMBLE, load, store
from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.operations import (
    GraphTensor,
    LayerNorm,
    LayerNormBackward,
    RMSNorm,
    RMSNormBackward,
)
from cudnn_actor.protocol.tensor import Layout

__all__ = ["lower_normalization", "normalization_kernels", "source"]

Norm = LayerNorm[int] | RMSNorm[int] | LayerNormBackward[int] | RMSNormBackward[int]

_THREADS, _MOST_BLOCKS = 256, 1 << 16
_COLUMNS_OF_A_BLOCK, _ROWS_OF_A_BLOCK = 32, 32


def lower_normalization(graph: FrontendGraph, operation: Norm) -> None:
    """Add a norm to a graph of cuDNN's frontend: rows as samples, their elements as channels.

    Raises `Refused`.
    """
    x = graph.spec(operation.x)
    if operation.scale is None or getattr(operation, "bias", operation.x) is None:
        raise Refused("cuDNN's norms need a scale, and layer norm a bias")
    first = operation.axis % len(x.dims)
    rows, length = math.prod(x.dims[:first]), math.prod(x.dims[first:])
    if length == 1 and isinstance(operation, LayerNorm):
        raise Refused("cuDNN's layer norm of rows of one element does not propagate NaN")
    shapes = {
        "elements": ([rows, length, 1, 1], [length, 1, 1, 1]),
        "weights": ([1, length, 1, 1], [length, 1, 1, 1]),
        "statistics": ([rows, 1, 1, 1], [1, 1, 1, 1]),
    }

    def shape(name: str) -> tuple[list[int], list[int]]:
        return shapes[_PARTS.get(name, "elements")]

    operands = _operands(operation)
    for uid in operands.values():
        if graph.spec(uid).spec.layout is not Layout.NCHW:
            raise Refused("cuDNN's norms need packed rows")
    inputs = {name: graph.tensor(uid, *shape(name)) for name, uid in operation.named(operation.inputs)}
    cudnn, pygraph = libraries().cudnn, graph.pygraph
    if isinstance(operation, LayerNorm | RMSNorm):
        kept = len(operation.writes) - 1
        if isinstance(operation, LayerNorm) and kept == 1:
            raise Refused("cuDNN's layer norm writes both statistics or none")
        phases = cudnn.norm_forward_phase
        call = pygraph.layernorm if isinstance(operation, LayerNorm) else pygraph.rmsnorm
        found = call(
            norm_forward_phase=phases.TRAINING if kept else phases.INFERENCE,
            input=inputs["x"],
            epsilon=pygraph.tensor_scalar(operation.epsilon, cudnn.scalar_type.RUNTIME_PARAM),
            **{name: inputs[name] for name in ("scale", "bias") if name in inputs},
        )
    elif isinstance(operation, LayerNormBackward):
        found = pygraph.layernorm_backward(
            grad=inputs["dy"],
            input=inputs["x"],
            scale=inputs["scale"],
            mean=inputs["mean"],
            inv_variance=inputs["inverse_deviation"],
        )
    else:
        found = pygraph.rmsnorm_backward(
            grad=inputs["dy"],
            input=inputs["x"],
            scale=inputs["scale"],
            inv_variance=inputs["inverse_rms"],
            has_dbias=False,
        )
    for name, output in zip(operation.outputs, found, strict=False):
        uid = getattr(operation, name)
        if uid is not None:
            graph.write(uid, output, *shape(name))


_PARTS = dict.fromkeys(("scale", "bias", "dscale", "dbias"), "weights")
_PARTS |= dict.fromkeys(("mean", "inverse_deviation", "inverse_rms"), "statistics")


def normalization_kernels(
    operation: Norm, tensors: Sequence[GraphTensor], handle: Any
) -> Callable[[Sequence[int]], None]:
    """The launch of a norm on packed tensors; see `operations.Launcher`."""
    del handle
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
    blocks = min(-(-length // _COLUMNS_OF_A_BLOCK), _MOST_BLOCKS)

    def launch(addresses: Sequence[int]) -> None:
        of_rows((min(rows, _MOST_BLOCKS),), (_THREADS,), (*addresses, rows, length, number))
        if sums is not None:
            sums((blocks,), (_COLUMNS_OF_A_BLOCK, _ROWS_OF_A_BLOCK), (*addresses, rows, length))

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
        stored = code.put("dscale", "j", "scaled") + code.put("dbias", "j", "plain")
        kernels.append(_COLUMNS.format(pointers=pointers, body=_column_sums(code), stored=stored))
    double = "double" if dtypes["x"] is DType.FLOAT64 else "float"
    return "\n".join([f"typedef {double} T;", PREAMBLE, _SUM, *kernels])


def _operands(operation: Norm) -> dict[str, int]:
    return dict(operation.named())


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


_SUM = f"""{combined("a + b", "0")}{COMBINING}
__device__ __forceinline__ T sum_of_warp(T value) {{ return over_warp(State{{value}}).value; }}
__device__ T sum_of_block(T value) {{ return over_block(State{{value}}).value; }}
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
    __shared__ T all_scaled[32][33], all_plain[32][33];
    const int column = threadIdx.x, of_rows = threadIdx.y;
    for (long long first = blockIdx.x * 32ll; first < length; first += gridDim.x * 32ll) {{
        long long j = first + column;
        T scaled = 0, plain = 0;
        if (j < length) for (long long row = of_rows; row < rows; row += 32) {{
            {body}
        }}
        __syncthreads();
        all_scaled[of_rows][column] = scaled; all_plain[of_rows][column] = plain;
        __syncthreads();
        scaled = sum_of_warp(all_scaled[column][of_rows]); plain = sum_of_warp(all_plain[column][of_rows]);
        j = first + of_rows;
        if (column == 0 && j < length) {{ {stored} }}
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
    return f"""const T slope = {code.get("dy", at)};
            plain += slope; scaled += slope * {_normal(code, at, "row")};"""


_BODIES: dict[type, Callable[[_Code], Any]] = {
    LayerNorm: _layer_norm,
    RMSNorm: _rms_norm,
    LayerNormBackward: _backward,
    RMSNormBackward: _backward,
}
