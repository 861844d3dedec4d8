"""What each engine may refuse as `UnsupportedGraph`, as data.

The contract tests, the support matrix, the fuzzer and `docs/support.md` all read this table: what is not in
it must run, and run right. Whatever is in it may be refused, but never be wrong either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from cudnn_actor.protocol import DType
from cudnn_actor.protocol.graph import OperationGraph
from cudnn_actor.protocol.operations import ConvolutionForward, Node, Pointwise

Rule = Callable[[OperationGraph, Node], bool]


class Refusal(NamedTuple):
    """Graphs that an engine may refuse: those with a convolution that `applies` holds for."""

    engine: str
    what: str
    applies: Rule


def _dtypes(graph: OperationGraph, operation: Node) -> set[DType]:
    return {graph.tensor(uid).dtype for uid in operation.reads}


def _integer_gradient(graph: OperationGraph, operation: Node) -> bool:
    backward = not isinstance(operation, ConvolutionForward)
    return backward and not all(dtype.is_floating for dtype in _dtypes(graph, operation))


def _wide_integers(graph: OperationGraph, operation: Node) -> bool:
    return DType.INT32 in _dtypes(graph, operation)


REFUSALS = (
    Refusal("cpu", "gradients of integers", _integer_gradient),
    Refusal("cpu", "int32 operands", _wide_integers),
    Refusal("cuda", "gradients of integers", _integer_gradient),
    Refusal("cuda", "int32 operands", _wide_integers),
)


def may_refuse(engine: str, graph: OperationGraph) -> str | None:
    """What in a graph an engine may refuse; None for a graph that it must run."""
    return next(_reasons(engine, graph), None)


def _reasons(engine: str, graph: OperationGraph) -> Iterator[str]:
    for operation in graph.operations:
        if not isinstance(operation, Pointwise):
            for refusal in REFUSALS:
                if refusal.engine == engine and refusal.applies(graph, operation):
                    yield refusal.what
