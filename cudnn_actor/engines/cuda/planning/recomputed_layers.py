"""Gradients of recurrent layers without the reserve of the forward pass.

That of cuDNN has no meaning outside of it: what lies between pieces is what the definition says, so that each
piece is checked by itself. The gradient by data computes the steps again, and a reserve that nothing reads
then is not computed at all.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cudnn_actor.engines.cuda.planning.empty_tensors import Filled
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import Recurrent, RecurrentBackwardData, TensorRole

__all__ = ["recomputed"]


def recomputed(graph: OperationGraph) -> Filled | None:
    """Returns the graph without reserves; None if no gradient reads one. All tensors keep their uids."""
    if not any(_reads_reserve(operation) for operation in graph.operations):
        return None
    operations: list[Any] = [
        msgspec.structs.replace(each, reserve=None) if _reads_reserve(each) else each
        for each in graph.operations
    ]
    read = {uid for operation in operations for uid in operation.reads}
    for number, each in enumerate(operations):
        unread = isinstance(each, Recurrent) and each.reserve is not None and each.reserve not in read
        if unread and graph.tensor(each.reserve).role is TensorRole.VIRTUAL:
            operations[number] = msgspec.structs.replace(each, reserve=None)
    touched = dict.fromkeys(uid for each in operations for uid in (*each.reads, *each.writes))
    body = OperationGraph(
        tensors=tuple(graph.tensor(uid) for uid in touched),
        operations=tuple(operations),
        numerics=graph.numerics,
    )
    return Filled(body, tuple(range(len(operations))))


def _reads_reserve(operation: Any) -> bool:
    return isinstance(operation, RecurrentBackwardData) and operation.reserve is not None
