"""The body of a kernel for pointwise operations of a graph: expressions of the tensors that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.kernels.expressions import (
    Constant,
    Earlier,
    Expression,
    Leaf,
    Scalar,
    Selection,
    Table,
    Tabled,
    Value,
    expression,
)
from cudnn_actor.engines.cuda.planning.indexed_reads import read_of
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import GraphTensor, Node, Pointwise, PointwiseMode, TensorRole
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["Body", "broadcast"]

Steps = tuple[int, ...]


class Body:
    """The body of a kernel: expressions that compute some operations of a graph, one after the other.

    Parameters
    ----------
    graph
        The graph.
    operations
        The operations that the kernel computes.
    dims
        The dims of the places that it goes over.
    form
        Returns a tensor as it is stored, by uid.
    first
        The number of the first leaf.
    """

    def __init__(
        self,
        graph: OperationGraph,
        operations: Sequence[Node],
        dims: tuple[int, ...],
        *,
        form: Callable[[int], GraphTensor] | None = None,
        first: int = 0,
    ) -> None:
        self._graph, self._dims, self._first = graph, dims, first
        self._form = form or graph.tensor
        self._read = {uid for operation in operations for uid in operation.reads}
        self._written = {uid for operation in operations for uid in operation.writes}
        self._values: dict[int, Value] = {}
        self.nodes: list[Any] = []
        self._tables: dict[Table, Tabled] = {}
        self._leaves: dict[tuple[Any, ...], Leaf] = {}

    @property
    def leaves(self) -> list[tuple[GraphTensor, Steps]]:
        """The tensors that the kernel reads, and their strides over all dims."""
        return [(tensor, steps) for tensor, steps, *_ in self._leaves]

    @property
    def tables(self) -> list[Table]:
        """The tables that it reads."""
        return [*self._tables]

    def put(self, node: Any) -> Earlier:
        """Append a node, and return its value."""
        self.nodes.append(node)
        return Earlier(len(self.nodes) - 1)

    def add(self, operation: Pointwise[int]) -> None:
        """Append a pointwise operation."""
        operands = tuple(map(self.value, operation.operands))
        dtype, used = self._graph.tensor(operation.result).dtype, operation.result in self._read
        node = expression(operation, operands, self._graph.compute(operation), dtype, used=used)
        self._values[operation.result] = self.put(node)

    def read(self, operation: Node) -> None:
        """Add a gather, pad or nearest resize: each result element is one element of x.

        Raises `Refused` if x is computed by this kernel itself.
        """
        if not self._written.isdisjoint(operation.reads):
            raise Refused("what the kernel computes is read at other places")
        x, *given = map(self._form, operation.reads)
        (result,) = operation.writes
        read = read_of(operation, x, self._graph.tensor(result).dims, *given)
        selects: list[Selection] = []
        for n, (axis, known) in enumerate(read.axes.items()):
            indices: Leaf | Tabled
            if known is None:
                steps, component = read.of_indices
                indices = self.leaf(given[0], steps, n * component)
            else:
                along = int(len(known) > 1)  # else the result has one element there, and may be broadcast
                table = Table(known, tuple(along * (other == axis) for other in range(len(self._dims))))
                indices = self._tables.setdefault(table, Tabled(len(self._tables)))
            selects.append(Selection(indices, x.dims[axis], x.strides[axis]))
        self._values[result] = self.leaf(x, read.steps, selects=tuple(selects), filling=read.filling)

    def define(self, uid: int, value: Value, compute: DType) -> None:
        """Set the value of a tensor, computed in that type. It is rounded if the kernel reads it."""
        dtype = self._graph.tensor(uid).dtype
        if uid in self._read and dtype is not compute:
            value = self.put(Expression(PointwiseMode.IDENTITY, (value,), (), compute, dtype))
        self._values[uid] = value

    def value(self, uid: int, steps: Steps | None = None) -> Value:
        """The expression for an operand.

        `steps`: strides to use instead of the broadcast ones, if it is loaded from memory.
        """
        if uid in self._values:
            return self._values[uid]
        tensor = self._graph.tensor(uid)
        if tensor.role is TensorRole.SCALAR:
            return Scalar(self._graph.scalars.index(uid))
        if tensor.value is not None:
            return Constant(tensor.value)
        if uid in self._written:
            raise Refused("what the kernel computes is read otherwise than an element at a time")
        form = self._form(uid)
        return self.leaf(form, broadcast(form, self._dims) if steps is None else steps)

    def leaf(
        self,
        tensor: GraphTensor,
        steps: Steps,
        offset: int = 0,
        selects: tuple[Selection, ...] = (),
        filling: float | int | None = None,
    ) -> Leaf:
        """The leaf for a tensor, the same one for equal parameters: see `Leaf`."""
        steps = tuple(0 if size == 1 else step for size, step in zip(self._dims, steps, strict=True))
        leaf = Leaf(self._first + len(self._leaves), tensor.dtype, offset, selects, filling)
        return self._leaves.setdefault((tensor, steps, offset, selects, repr(filling)), leaf)

    def of(self, uids: Iterable[int]) -> list[Value]:
        """The expressions of tensors that have been computed, by uid."""
        return [self._values[uid] for uid in uids]


def broadcast(tensor: GraphTensor, dims: tuple[int, ...]) -> Steps:
    """A tensor's strides over `dims`: 0 where it has one element. Raises `Refused` for another rank."""
    if len(tensor.dims) != len(dims):
        raise Refused("its tensors have different ranks")
    return tuple(0 if own == 1 else step for own, step in zip(tensor.dims, tensor.strides, strict=True))
