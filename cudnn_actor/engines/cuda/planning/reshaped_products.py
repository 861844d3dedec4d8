"""Graphs in which products have the dims to which their rows are reshaped behind them.

Files of models multiply rows of all tokens, as (tokens, channels), and reshape the result to (batch, tokens,
channels) for the operations behind it. The results of a piece have the same dims, so no operation behind the
reshape would be part of the product's piece, and the product's sums would be stored. But a reshape of an
operand is a view. So here a product, and the pointwise operations before the reshape, get the dims behind it.
"""

from __future__ import annotations

import itertools
from collections import Counter

import msgspec

from cudnn_actor.engines.cuda.planning.changed_graphs import Changed, replace_operations
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import GraphTensor, MatMul, Node, Pointwise, Reshape, TensorRole
from cudnn_actor.protocol.types.tensor import packed_strides

__all__ = ["reshape_products"]


def reshape_products(graph: OperationGraph) -> Changed | None:
    """Returns the graph with reshaped products; None if no product is to be reshaped."""
    if not any(isinstance(operation, MatMul) for operation in graph.operations):
        return None
    return _Reshaping(graph).rewrite()


class _Reshaping:
    """Replaces the operations of one graph."""

    def __init__(self, graph: OperationGraph) -> None:
        self._graph = graph
        self._tensors = {tensor.uid: tensor for tensor in graph.tensors}
        self._new_uids = itertools.count(1 + max(self._tensors))
        self._overwritten = {tensor.overwrites for tensor in graph.tensors}
        self._readers = Counter(uid for each in graph.operations for uid in each.reads)
        self._computed = {
            uid for each in graph.operations if isinstance(each, Pointwise) for uid in each.reads
        }
        """The uids that pointwise operations read."""
        self._writers = {uid: number for number, each in enumerate(graph.operations) for uid in each.writes}
        self._instead: dict[int, list[Node]] = {}
        """The operations that take the place of one, by its number."""

    def rewrite(self) -> Changed | None:
        """See `reshape_products`."""
        for number, operation in enumerate(self._graph.operations):
            if isinstance(operation, Reshape) and operation.y in self._computed:
                chain = self._chain(operation)
                if chain:
                    self._rewrite(number, operation, chain)
        return replace_operations(self._graph, self._instead, self._tensors) if self._instead else None

    def _chain(self, reshape: Reshape[int]) -> list[int]:
        """The numbers of a product and the operations behind it, up to a reshape of its rows.

        Empty if there is no product, or if the reshape does more than divide rows.
        """
        x, y = (self._graph.tensor(uid) for uid in (reshape.x, reshape.y))
        rows = len(x.dims) == 2 < len(y.dims) and x.dims[-1] == y.dims[-1] and 0 not in x.dims
        if not rows or y.overwrites is not None or y.strides != packed_strides(y.dims):
            return []
        chain: list[int] = []
        uid: int | None = x.uid
        while uid is not None:
            number = self._writers.get(uid)
            if number is None or number in self._instead or not self._is_passed_on(uid):
                return []
            chain.append(number)
            operation = self._graph.operations[number]
            if isinstance(operation, MatMul):
                given = (self._graph.tensor(read) for read in operation.reads)
                return chain[::-1] if all(len(tensor.dims) == 2 for tensor in given) else []
            uid = self._within(operation, x.dims)
        return []

    def _is_passed_on(self, uid: int) -> bool:
        """Whether one operation reads a tensor, which is not bound."""
        return self._graph.tensor(uid).role is TensorRole.VIRTUAL and self._readers[uid] == 1

    def _within(self, operation: Node, dims: tuple[int, ...]) -> int | None:
        """The operand of a pointwise operation with which a chain goes on; None if there is none."""
        if not isinstance(operation, Pointwise):
            return None
        computed = [uid for uid in operation.operands if self._is_link(uid, dims)]
        others = [uid for uid in operation.operands if uid not in computed[:1]]
        return computed[0] if computed and all(map(self._is_view, others)) else None

    def _is_link(self, uid: int, dims: tuple[int, ...]) -> bool:
        """Whether a product or a pointwise operation computes a tensor of these dims for one reader."""
        writer = self._graph.operations[self._writers[uid]] if uid in self._writers else None
        tensor = self._graph.tensor(uid)
        return isinstance(writer, MatMul | Pointwise) and tensor.dims == dims and self._is_passed_on(uid)

    def _is_view(self, uid: int) -> bool:
        """Whether a tensor can be had with other dims of rows: a view of an input, or a constant."""
        tensor = self._graph.tensor(uid)
        if tensor.role is TensorRole.CONSTANT:
            return True
        if uid in self._writers:
            writer = self._graph.operations[self._writers[uid]]
            return isinstance(writer, Reshape) and self._is_view(writer.x)
        packed = tensor.strides == packed_strides(tensor.dims) and uid not in self._overwritten
        return tensor.role is TensorRole.BOUND and packed

    def _rewrite(self, at: int, reshape: Reshape[int], chain: list[int]) -> None:
        """Give the operations of a chain the dims behind a reshape, and leave out the reshape."""
        x, y = (self._graph.tensor(uid) for uid in (reshape.x, reshape.y))
        inside = {uid for number in chain for uid in self._graph.operations[number].writes}
        self._instead[at] = []
        for number in chain:
            operation = self._graph.operations[number]
            (result,) = operation.writes
            if isinstance(operation, MatMul):
                others = {operation.a: x.uid}  # the view has a uid of the graph's, since it may be stored
            else:
                outside = [uid for uid in operation.reads if uid not in inside]
                others = {uid: next(self._new_uids) for uid in dict.fromkeys(outside)}
            views = [self._view(uid, new, y.dims[:-1]) for uid, new in others.items()]
            others[result] = y.uid if result == x.uid else result
            if result != x.uid:
                self._tensors[result] = _with_dims(self._graph.tensor(result), y.dims)
            named = dict(operation.named())
            changed = operation.with_operands(lambda name: others.get(named[name], named[name]))  # noqa: B023
            self._instead[number] = [*filter(None, views), changed]

    def _view(self, uid: int, new: int, rows: tuple[int, ...]) -> Node | None:
        """The reshape of a tensor of rows, or of one that is broadcast to rows, to these dims of rows.

        None for a constant: it gets other dims.
        """
        tensor = self._graph.tensor(uid)
        first, last = tensor.dims
        seen = _with_dims(tensor, (*((1,) * len(rows) if first == 1 else rows), last))
        constant = tensor.role is TensorRole.CONSTANT
        role = tensor.role if constant else TensorRole.VIRTUAL
        self._tensors[new] = msgspec.structs.replace(seen, uid=new, role=role, overwrites=None)
        return None if constant else Reshape(x=uid, y=new, dims=seen.dims)


def _with_dims(tensor: GraphTensor, dims: tuple[int, ...]) -> GraphTensor:
    """A tensor with other dims, packed."""
    return msgspec.structs.replace(tensor, dims=dims, strides=packed_strides(dims))
