"""Checks of graphs that every engine makes first: graphs rejected here are never passed to its library."""

from __future__ import annotations

import math

from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.errors import InvalidRequest, UnsupportedGraph
from cudnn_actor.protocol.graph import OperationGraph
from cudnn_actor.protocol.operations import (
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
    GraphTensor,
    Pointwise,
    PointwiseMode,
    TensorRole,
)
from cudnn_actor.protocol.reproduction import token

__all__ = ["KINDS", "Convolution", "check_graph", "kind_of", "unsupported"]

Convolution = ConvolutionForward | ConvolutionBackwardData | ConvolutionBackwardFilter

KINDS: dict[type, str] = {
    ConvolutionForward: "conv_fwd",
    ConvolutionBackwardData: "conv_bwd_data",
    ConvolutionBackwardFilter: "conv_bwd_filter",
}
"""The operations' names in plan tags."""
_BINARY = frozenset({PointwiseMode.ADD, PointwiseMode.MUL})
_LARGEST_PRODUCT = {DType.INT8: 128 * 128, DType.UINT8: 255 * 255}
_LARGEST_SUM = (1 << 31) - 1


def kind_of(graph: OperationGraph) -> str:
    """A graph's name in plan tags: the kind of its first convolution."""
    kinds = (KINDS[type(op)] for op in graph.in_order() if not isinstance(op, Pointwise))
    return next(kinds, "graph")


def check_graph(graph: OperationGraph, engine: str) -> None:
    """Raise `UnsupportedGraph`, naming `engine`, unless the shapes and dtypes of all operations fit."""
    try:
        for operation in graph.in_order():
            if isinstance(operation, Pointwise):
                _check_pointwise(graph, operation)
            else:
                _check_convolution(graph, operation)
    except _Unfit as unfit:
        raise unsupported(graph, engine, str(unfit)) from unfit.__cause__


def unsupported(graph: OperationGraph, engine: str, detail: str) -> UnsupportedGraph:
    """The error for a graph that an engine does not run, with the token that reproduces it."""
    return UnsupportedGraph(engine=engine, digest=graph.digest(), detail=detail, reproduce=token(graph))


class _Unfit(Exception):
    """Raised when an operation cannot be run as given."""


def _check_convolution(graph: OperationGraph, operation: Convolution) -> None:
    match operation:
        case ConvolutionForward(x=x, w=w, y=y):
            names = {"x": x, "w": w, "y": y}
        case ConvolutionBackwardData(dx=x, w=w, dy=y):
            names = {"dx": x, "w": w, "dy": y}
        case ConvolutionBackwardFilter(x=x, dw=w, dy=y):
            names = {"x": x, "dw": w, "dy": y}
    tensors = {name: graph.tensor(uid) for name, uid in names.items()}
    _check_dims(operation, tensors)
    operands = [graph.tensor(uid) for uid in operation.inputs]
    if any(tensor.role is TensorRole.SCALAR for tensor in operands):
        raise _Unfit("a convolution of a scalar")
    if not all(_floating(tensor) for tensor in operands):
        _check_integers(graph, operation, operands)


def _check_pointwise(graph: OperationGraph, operation: Pointwise) -> None:
    """The number of operands must be the mode's, and each must broadcast to the result."""
    wanted = 2 if operation.mode in _BINARY else 1
    if len(operation.operands) != wanted:
        raise _Unfit(f"{operation.mode} of {len(operation.operands)} operands, not {wanted}")
    result = graph.tensor(operation.result).dims
    for uid in operation.operands:
        dims = graph.tensor(uid).dims
        if len(dims) != len(result) or any(d not in (1, r) for d, r in zip(dims, result, strict=True)):
            raise _Unfit(f"{operation.mode} of dims {dims}, which do not broadcast to {result}")


def _check_dims(operation: Convolution, tensors: dict[str, GraphTensor]) -> None:
    x, w, y = tensors.values()
    try:
        wanted = operation.conv.output_dims(x.dims, w.dims)
    except InvalidRequest as error:
        raise _Unfit(str(error)) from error
    if y.dims != wanted:
        (first, second, name) = tensors
        raise _Unfit(f"{name} has dims {y.dims}, conv({first}, {second}) has {wanted}")


def _check_integers(graph: OperationGraph, operation: Convolution, operands: list[GraphTensor]) -> None:
    """Integer operands must be 8-bit and of one dtype, and their sum must fit into 32 bits."""
    dtype, other = (tensor.dtype for tensor in operands)
    if not isinstance(operation, ConvolutionForward):
        raise _Unfit(f"integer convolutions run forward only, not backward on {dtype}")
    if dtype is not other or dtype not in _LARGEST_PRODUCT:
        raise _Unfit(f"a convolution of {dtype} with {other}; integers must be both int8 or both uint8")
    longest = _LARGEST_SUM // _LARGEST_PRODUCT[dtype]
    length = math.prod(graph.tensor(operation.w).dims[1:])
    if length > longest:
        raise _Unfit(f"a sum of {length} products of {dtype} can overflow int32; {longest} of them cannot")


def _floating(tensor: GraphTensor) -> bool:
    # A tensor between operations counts as floating-point, whatever type the graph gives it.
    return tensor.dtype.is_floating or tensor.role is TensorRole.VIRTUAL
