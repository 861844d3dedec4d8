"""What the CPU engine runs and what it does not: graphs are checked here, before anything is built."""

from __future__ import annotations

import math

from cudnn_actor.engines.cpu.activations import BINARY
from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.errors import InvalidRequest, UnsupportedGraph
from cudnn_actor.protocol.graph import OperationGraph
from cudnn_actor.protocol.operations import (
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
    GraphTensor,
    Pointwise,
    TensorRole,
)

__all__ = ["Convolution", "check_convolution", "check_pointwise"]

Convolution = ConvolutionForward | ConvolutionBackwardData | ConvolutionBackwardFilter

_LARGEST_PRODUCT = {DType.INT8: 128 * 128, DType.UINT8: 255 * 255}
_LARGEST_SUM = (1 << 31) - 1


def check_convolution(graph: OperationGraph, operation: Convolution) -> None:
    """Raise `UnsupportedGraph` unless shapes and dtypes are ones that the engine runs."""
    match operation:
        case ConvolutionForward(x=x, w=w, y=y):
            names = {"x": x, "w": w, "y": y}
        case ConvolutionBackwardData(dx=x, w=w, dy=y):
            names = {"dx": x, "w": w, "dy": y}
        case ConvolutionBackwardFilter(x=x, dw=w, dy=y):
            names = {"x": x, "dw": w, "dy": y}
    tensors = {name: graph.tensor(uid) for name, uid in names.items()}
    _check_dims(graph, operation, tensors)
    operands = [graph.tensor(uid) for uid in operation.inputs]
    if any(tensor.role is TensorRole.SCALAR for tensor in operands):
        raise _unsupported(graph, "a convolution of a scalar")
    if not all(_floating(tensor) for tensor in operands):
        _check_integers(graph, operation, operands)


def check_pointwise(graph: OperationGraph, operation: Pointwise) -> None:
    """Raise `UnsupportedGraph` unless the mode takes that many operands and each broadcasts to the result."""
    wanted = 2 if operation.mode in BINARY else 1
    if len(operation.operands) != wanted:
        raise _unsupported(graph, f"{operation.mode} of {len(operation.operands)} operands, not {wanted}")
    result = graph.tensor(operation.result).dims
    for uid in operation.operands:
        dims = graph.tensor(uid).dims
        if len(dims) != len(result) or any(d not in (1, r) for d, r in zip(dims, result, strict=True)):
            raise _unsupported(graph, f"{operation.mode} of dims {dims}, which do not broadcast to {result}")


def _check_dims(graph: OperationGraph, operation: Convolution, tensors: dict[str, GraphTensor]) -> None:
    x, w, y = tensors.values()
    try:
        wanted = operation.conv.output_dims(x.dims, w.dims)
    except InvalidRequest as error:
        raise _unsupported(graph, str(error)) from error
    if y.dims != wanted:
        (first, second, name) = tensors
        raise _unsupported(graph, f"{name} has dims {y.dims}, conv({first}, {second}) has {wanted}")


def _check_integers(graph: OperationGraph, operation: Convolution, operands: list[GraphTensor]) -> None:
    """Integers must be of 8 bits, alike, and few enough for their sum to fit into 32 bits."""
    dtype, other = (tensor.dtype for tensor in operands)
    if not isinstance(operation, ConvolutionForward):
        raise _unsupported(graph, f"integer convolutions run forward only, not backward on {dtype}")
    if dtype is not other or dtype not in _LARGEST_PRODUCT:
        raise _unsupported(
            graph, f"a convolution of {dtype} with {other}; integers are int8 or uint8, both alike"
        )
    longest = _LARGEST_SUM // _LARGEST_PRODUCT[dtype]
    length = math.prod(graph.tensor(operation.w).dims[1:])
    if length > longest:
        raise _unsupported(
            graph, f"a sum of {length} products of {dtype} can overflow int32; {longest} of them cannot"
        )


def _floating(tensor: GraphTensor) -> bool:
    # A tensor between operations is float64 whatever type the graph gives it.
    return tensor.dtype.is_floating or tensor.role is TensorRole.VIRTUAL


def _unsupported(graph: OperationGraph, detail: str) -> UnsupportedGraph:
    return UnsupportedGraph(engine="cpu", digest=graph.digest(), detail=detail)
