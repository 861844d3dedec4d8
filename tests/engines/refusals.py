"""What each engine may refuse as `UnsupportedGraph`, as data.

The contract tests, the support matrix, the fuzzer and `docs/support.md` all read this table: what is not in
it must run, and run right. Whatever is in it may be refused, but never be wrong either. An operation without
an entry here has none of its problems refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from cudnn_actor.engines.cuda.operations import PARTLY
from cudnn_actor.protocol import DType
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import (
    Convolution,
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    Node,
)

Operations = tuple[type[Any], ...]
Rule = Callable[[OperationGraph, Node], bool]


class Refusal(NamedTuple):
    """Graphs that an engine may refuse.

    Parameters
    ----------
    engine
        Its name.
    what
        For people.
    operations, applies
        Those graphs that have an operation of these classes for which the rule holds.
    """

    engine: str
    what: str
    operations: Operations
    applies: Rule


def _dtypes(graph: OperationGraph, operation: Node) -> set[DType]:
    return {graph.tensor(uid).dtype for uid in operation.reads}


def _integers(graph: OperationGraph, operation: Node) -> bool:
    return not all(dtype.is_floating for dtype in _dtypes(graph, operation))


def _wide_integers(graph: OperationGraph, operation: Node) -> bool:
    return bool({DType.INT32, DType.INT64} & _dtypes(graph, operation))


def _keeps(graph: OperationGraph, operation: Any) -> bool:
    kept = (getattr(operation, name, None) for name in ("reserve", "slopes"))
    return any(uid in graph.bound and len(graph.tensor(uid).dims) > 1 for uid in kept if uid is not None)


_GRADIENTS: Operations = (ConvolutionBackwardData, ConvolutionBackwardFilter)
REFUSALS = tuple(
    refusal
    for engine in ("cpu", "cuda", "float32")
    for refusal in (
        Refusal(engine, "gradients of convolutions of integers", _GRADIENTS, _integers),
        Refusal(engine, "convolutions of int32 or int64", (Convolution,), _wide_integers),
    )
)
_KEPT = "what recurrent layers keep for their gradients as numbers, outside of a plan"
REFUSALS += (Refusal("cuda", _KEPT, tuple(PARTLY), _keeps),)


def may_refuse(engine: str, graph: OperationGraph) -> str | None:
    """What in a graph an engine may refuse; None for a graph that it must run."""
    return next(_reasons(engine, graph), None)


def refuses_some(engine: str, operation: type[Any]) -> bool:
    """Whether an engine may refuse any graph for an operation of this class. If not, none need be made."""
    return any(refusal.engine == engine and issubclass(operation, refusal.operations) for refusal in REFUSALS)


def _reasons(engine: str, graph: OperationGraph) -> Iterator[str]:
    for operation in graph.operations:
        for refusal in REFUSALS:
            concerned = refusal.engine == engine and isinstance(operation, refusal.operations)
            if concerned and refusal.applies(graph, operation):
                yield refusal.what
