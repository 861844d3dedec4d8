"""A chain of pointwise operations, while a graph is compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from cudnn_actor.engines.cpu.fast.kernels import carrier_dtype
from cudnn_actor.engines.cpu.fast.pointwise import chain
from cudnn_actor.engines.cpu.fast.units import Unit, kernel_unit
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import Movement, Node, Pointwise, TensorRole

__all__ = ["OpenChain"]

_LONGEST = 64
"""Operations of a chain: a longer one needs more of the cache."""


class OpenChain:
    """Operations of a graph that are computed element by element, together. It may take more of them.

    Parameters
    ----------
    graph
        The graph.
    readers
        The numbers of the operations that read each tensor.
    """

    def __init__(self, graph: OperationGraph, readers: Mapping[int, Set[int]]) -> None:
        self._graph, self._readers = graph, readers
        self.numbers: list[int] = []
        """The numbers of the operations, in order."""
        self.results: dict[int, int] = {}
        """The number of the operation by the uid of its result."""

    def add(self, number: int) -> None:
        """Add an operation that joins, and has a kernel of this kind."""
        self.numbers.append(number)
        self.results.update((uid, number) for uid in self._graph.operations[number].writes)

    def joins(self, operation: Node, roots: Mapping[int, int]) -> bool:
        """Whether an operation can be computed element by element with these, or changes nothing for them.

        It cannot if it sees a result of one of them in another shape; nor can what follows a result of other
        dims. `roots`: the tensor in which the values of each view lie.
        """
        if not self.numbers:
            return True
        if any(roots.get(uid) in self.results for uid in operation.reads):
            return False
        if isinstance(operation, Movement):
            return operation.x not in self.results
        dims = self._graph.tensor(next(iter(self.results))).dims
        return (
            isinstance(operation, Pointwise)
            and self._graph.tensor(operation.result).dims == dims
            and len(self.numbers) < _LONGEST
        )

    def stored_results(self) -> list[int]:
        """The results that are written to memory, in order."""
        own = set(self.numbers)
        kept = [
            uid
            for uid in self.results
            if self._graph.tensor(uid).role is TensorRole.BOUND or not self._readers[uid] <= own
        ]
        return kept or [*self.results][-1:]  # what nothing reads is computed all the same

    def may_overwrite(self, uid: int, into: int) -> bool:
        """Whether an operand may lie in the memory of the result `into`.

        Not if a later operation reads it, or one of another piece; nor if that result overwrites an input:
        what computes the operand may read it.
        """
        readers, tensor, result = self._readers[uid], self._graph.tensor(uid), self._graph.tensor(into)
        return (
            bool(readers)
            and readers <= set(self.numbers)
            and max(readers) <= self.results[into]
            and tensor.role is TensorRole.VIRTUAL
            and result.overwrites is None
            and tensor.dims == result.dims
            and carrier_dtype(tensor.dtype) == carrier_dtype(result.dtype)
        )

    def unit(self, kept: Sequence[int], overwritten: Mapping[int, int], lanes: int) -> Unit:
        """The unit that computes all of them.

        `overwritten`: by the uid of an operand, the result in whose memory it lies.
        """
        graph = self._graph
        nodes: list[Any] = [graph.operations[number] for number in self.numbers]
        tensors = {uid: graph.tensor(uid) for node in nodes for uid in (*node.reads, *node.writes)}
        kernel = chain(nodes, tensors, set(kept), graph.constants, overwritten.keys())
        assert kernel is not None, "each of them has a kernel"
        given = dict.fromkeys(uid for node in nodes for uid in node.reads if uid not in self.results)
        operands = {uid: overwritten.get(uid, uid) for uid in given if uid not in graph.constants}
        return kernel_unit(kernel, operands, {uid: uid for uid in kept}, lanes)
