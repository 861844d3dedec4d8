"""Checks of graphs that every engine makes first: graphs rejected here are never passed to its library."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from cudnn_actor.engines.base import no_progress
from cudnn_actor.protocol.errors import InvalidRequest, UnsupportedGraph
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.graphs.reproduction import token
from cudnn_actor.protocol.operations import (
    ConvolutionForward,
    Node,
    Pointwise,
    Recurrent,
    RecurrentBackwardData,
    RecurrentBackwardWeights,
    TensorRole,
)
from cudnn_actor.protocol.operations.reserves import lack_of_bytes
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["check_graph", "check_reserves", "tag_of", "unsupported_error"]

_LARGEST_PRODUCT = {DType.INT8: 128 * 128, DType.UINT8: 255 * 255}
_LARGEST_SUM = (1 << 31) - 1


def tag_of(engine: str, graph: OperationGraph, how: str = "") -> str:
    """A plan's tag: see `engines.base.Plan`. `how`: what runs, where the engine has several ways.

    A graph is called after the kind of its first operation that is not pointwise.
    """
    kinds = (operation.kind for operation in graph.operations if not isinstance(operation, Pointwise))
    named = f"{engine}/{next(kinds, Pointwise.kind)}/{graph.digest()[:8]}"
    return f"{named}/{how}" if how else named


def check_graph(
    graph: OperationGraph,
    engine: str,
    on_progress: Callable[[], None] = no_progress,
    *,
    refused: Mapping[type, str] = MappingProxyType({}),
) -> None:
    """Raise `UnsupportedGraph`, naming `engine`, unless the shapes and dtypes of all operations fit.

    `on_progress` is called after each operation. `refused`: operations that the engine does not run, and why.
    """
    specs = {tensor.uid: tensor.spec for tensor in graph.tensors}
    for number, operation in enumerate(graph.operations):
        try:
            _check(graph, operation, specs)
        except (_Unfit, InvalidRequest) as unfit:
            raise unsupported_error(graph, engine, str(unfit), (number,)) from unfit.__cause__
        if type(operation) in refused:
            raise unsupported_error(graph, engine, refused[type(operation)], (number,))
        on_progress()


def check_reserves(graph: OperationGraph, engine: str) -> None:
    """Raise `UnsupportedGraph`, naming `engine`, unless bytes have room for the numbers that they stand for.

    For an engine whose reserves are those numbers, and for a graph that `check_graph` accepts.
    """
    for number, operation in enumerate(graph.operations):
        if not isinstance(operation, Recurrent | RecurrentBackwardData | RecurrentBackwardWeights):
            continue
        given = {name: graph.tensor(uid).spec for name, uid in operation.named()}
        for name, kept in operation.kept_specs(given).items():
            if given[name].size < kept.nbytes:
                detail = lack_of_bytes(name, given[name].size, kept.nbytes)
                raise unsupported_error(graph, engine, detail, (number,))


def unsupported_error(
    graph: OperationGraph, engine: str, detail: str, operations: Sequence[int] = ()
) -> UnsupportedGraph:
    """The error for a graph that an engine does not run, with the token that reproduces it.

    `operations`: the numbers of those that it does not run; by default, all.
    """
    return UnsupportedGraph(
        engine=engine,
        digest=graph.digest(),
        detail=detail,
        reproduce=token(graph),
        operations=operations or range(len(graph.operations)),
    )


class _Unfit(Exception):
    """Raised when an operation cannot be run as given."""


def _check(graph: OperationGraph, operation: Node, known: Mapping[int, TensorSpec]) -> None:
    """`known`: the tensors' specs. Making one checks it, so each is made once."""
    operands = dict(operation.named())
    specs = {name: known[uid] for name, uid in operands.items()}
    operation.check(specs)
    if isinstance(operation, Pointwise):
        return
    if any(graph.tensor(uid).role in (TensorRole.SCALAR, TensorRole.CONSTANT) for uid in operands.values()):
        raise _Unfit(f"{operation.kind} of a number")
    if isinstance(operation, ConvolutionForward) and specs["w"].dtype in _LARGEST_PRODUCT:
        _check_sum(specs["w"])


def _check_sum(w: TensorSpec) -> None:
    """The sums of a convolution of bytes must fit into 32 bits."""
    longest = _LARGEST_SUM // _LARGEST_PRODUCT[w.dtype]
    length = math.prod(w.dims[1:])
    if length > longest:
        raise _Unfit(f"a sum of {length} products of {w.dtype} can overflow int32; {longest} of them cannot")
