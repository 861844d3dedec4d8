"""Graphs without the operations on tensors that have no elements.

Kernels and libraries take tensors with elements. This file replaces the other operations, of all kinds. An
operation whose results have no elements is left out. If an operand has none, each result is a number, or
equal to an input: a fill or a copy takes the operation's place. Operations that take any number of elements,
such as concatenations and reductions, stay as they are if their results have elements.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from cudnn_actor.engines.cuda.planning.changed_graphs import Changed, graph_of
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import GraphTensor, Node, Pointwise, PointwiseMode, TensorRole
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import packed_strides

__all__ = ["fill_empty"]


def fill_empty(graph: OperationGraph) -> Changed | None:
    """Returns the graph without operations on tensors that have no elements; None if it has none of them.

    All tensors keep their uids.
    """
    if all(0 not in tensor.dims for tensor in graph.tensors):
        return None
    return _Filling(graph).rewrite()


class _Filling:
    """Replaces the operations of one graph."""

    def __init__(self, graph: OperationGraph) -> None:
        self._graph = graph
        self._wanted = {tensor.uid for tensor in graph.tensors if 0 not in tensor.dims}
        """The tensors that are needed: all that have elements, and all that a remaining operation reads."""
        self._next = 1 + max(tensor.uid for tensor in graph.tensors)
        self._tensors = {tensor.uid: tensor for tensor in graph.tensors}

    def rewrite(self) -> Changed | None:
        """See `fill_empty`."""
        kept: list[tuple[int, Node]] = []
        for number in reversed(range(len(self._graph.operations))):
            instead = [(number, operation) for operation in self._instead_of(number)]
            self._wanted.update(uid for _, operation in instead for uid in operation.reads)
            kept += instead
        numbers = tuple(number for number, _ in reversed(kept))
        operations = tuple(operation for _, operation in reversed(kept))
        if operations == self._graph.operations:
            return None
        if not operations:
            return Changed(None, ())
        return Changed(self._graph_of(operations), numbers)

    def _graph_of(self, operations: tuple[Node, ...]) -> OperationGraph:
        """The graph of these operations. A result no longer overwrites an input that none of them reads."""
        touched = {uid for op in operations for uid in (*op.reads, *op.writes)}
        tensors = {
            uid: tensor
            if tensor.overwrites is None or tensor.overwrites in touched
            else msgspec.structs.replace(tensor, overwrites=None)
            for uid, tensor in self._tensors.items()
        }
        return graph_of(operations, tensors, self._graph.numerics)

    def _instead_of(self, number: int) -> Iterator[Node]:
        """Yields the operations that compute the needed results of an operation."""
        operation = self._graph.operations[number]
        wanted = {name: uid for name, uid in operation.named(operation.outputs) if uid in self._wanted}
        found = self._graph.without_elements(operation)
        if found is None:
            if wanted:
                yield operation
            return
        operands = dict(operation.named())
        for name, uid in wanted.items():
            value = found[name]
            source = operands[value] if isinstance(value, str) else self._constant(uid, value)
            yield Pointwise(mode=PointwiseMode.IDENTITY, operands=(source,), result=uid)

    def _constant(self, uid: int, value: float) -> int:
        """The uid of a new constant with the dims of a tensor."""
        dims, dtype = self._graph.tensor(uid).dims, self._graph.tensor(uid).dtype
        constant = GraphTensor(
            uid=self._next,
            dims=dims,
            strides=packed_strides(dims),
            dtype=DType.FLOAT32 if dtype.is_half else dtype,
            role=TensorRole.CONSTANT,
            value=value if dtype.is_floating else int(value),
            name=str(value),
        )
        self._tensors[constant.uid] = constant
        self._next += 1
        return constant.uid
