"""Assembles the `Graph` of what a builder recorded: what the outputs need, with the dtypes they need."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.expressions import Tensor
from cudnn_actor.protocol.graphs.named_graph import Graph, Port
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import (
    FUNCTIONS,
    GraphTensor,
    Movement,
    Node,
    Pointwise,
    PointwiseMode,
    Reshape,
    TensorRole,
)
from cudnn_actor.protocol.operations.base import tensor_of
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

if TYPE_CHECKING:
    from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder

__all__ = ["GraphAssembly"]


class GraphAssembly:
    """One call of `GraphBuilder.build`."""

    def __init__(
        self, builder: GraphBuilder, outputs: Mapping[str, Tensor], updates: Mapping[str, Tensor]
    ) -> None:
        self._label = builder._label
        self._made = builder._tensors
        self._inputs = builder._inputs
        self._numerics = builder._numerics
        self._outputs = {name: tensor.number for name, tensor in outputs.items()}
        self._updates = {name: tensor.number for name, tensor in updates.items()}
        self._operations = self._needed_operations(builder._operations)
        self._read = {uid for operation in self._operations for uid in operation.reads}
        self._declared: dict[int, DType] = {}
        """The dtypes of the tensors, as far as they are known."""
        self._bound: dict[int, str] = {}
        """Results that are outputs or updates → the name."""
        self._extra: dict[int, GraphTensor] = {}
        """Their tensors, by uid."""

    def graph(self) -> Graph:
        """The graph."""
        for name, number in {**self._outputs, **self._updates}.items():
            self._bind(name, number)
        self._declare()
        uids = dict.fromkeys(uid for op in self._operations for uid in (*op.reads, *op.writes))
        tensors = tuple(self._extra.get(uid) or self._tensor(uid) for uid in uids)
        body = OperationGraph(tensors=tensors, operations=tuple(self._operations), numerics=self._numerics)
        known = {tensor.uid: tensor for tensor in tensors}
        inputs = tuple(
            Port(name=name, spec=self._made[number].spec, uid=number if number in known else None)
            for name, number in self._inputs.items()
        )
        of_name = {name: uid for uid, name in self._bound.items()}
        outputs = tuple(
            Port(name=name, spec=known[of_name[name]].spec, uid=of_name[name]) for name in self._outputs
        )
        return Graph(body=body, inputs=inputs, outputs=outputs)

    def _needed_operations(self, operations: Sequence[Node]) -> list[Node]:
        """The operations that the outputs depend on, in order.

        Their optional outputs are left out if nothing reads them.
        """
        wanted = {*self._outputs.values(), *self._updates.values()}
        kept: list[Node] = []
        for operation in reversed(_without_chains(operations)):
            if not wanted.isdisjoint(operation.writes):
                unread = {
                    name: None
                    for name, uid in operation.named(operation.outputs)
                    if uid not in wanted and name in operation.optional
                }
                kept.append(msgspec.structs.replace(operation, **unread) if unread else operation)
                wanted.update(operation.reads)
        return kept[::-1]

    def _bind(self, name: str, number: int) -> None:
        """Bind an output to a buffer: the tensor itself, or a copy of an input or another output."""
        made = self._made[number]
        before = self._inputs.get(name)
        spec = made.spec if before is None else self._made[before].spec
        # An update is a copy behind all operations: they read what its buffer held before.
        if made.role is TensorRole.VIRTUAL and number not in self._bound and before is None:
            uid, label = number, made.label
        else:
            uid = len(self._made) + len(self._extra)
            copy = Pointwise(mode=PointwiseMode.IDENTITY, operands=(number,), result=uid)
            label = self._label(copy)
            self._operations.append(copy)
            self._read.add(number)
        self._bound[uid] = name
        if before is not None and before not in self._read:  # else it is no input of the graph
            raise InvalidRequest(
                field="updates",
                value=name,
                problem="is an input that nothing in the graph reads",
                fix="leave it out, and make the value an output",
            )
        self._extra[uid] = tensor_of(uid, spec, overwrites=before, name=label)

    def _tensor(self, uid: int) -> GraphTensor:
        made, dtype = self._made[uid], self._declared[uid]
        return tensor_of(uid, made.spec, dtype=dtype, role=made.role, value=made.value, name=made.label)

    def _declare(self) -> None:
        """Find each tensor's dtype: a virtual one's own where it is stored, else the one that is computed in.

        A tensor is stored if an operation reads it that is not pointwise, or takes integers only, or it is
        moved and then stored.
        """
        stored = set(self._bound)
        for operation in reversed(self._operations):
            match operation:
                case Pointwise(mode=mode):
                    stores = FUNCTIONS[mode].bits
                case Movement(y=y):
                    stores = y in stored
                case _:
                    stores = True
            if stores:
                stored.update(operation.reads)
        declared = self._declared
        for operation in self._operations:
            for uid in operation.reads:
                declared.setdefault(uid, self._made[uid].spec.dtype)
            dtypes = tuple(declared[uid] for uid in operation.reads)
            for name, uid in operation.named(operation.outputs):
                if uid >= len(self._made):  # a copy that `_bind` added
                    continue
                made, computed = self._made[uid], operation.compute(dtypes)
                wide = isinstance(operation, Movement) or not (uid in stored or made.kept)
                other = wide and computed is not made.spec.dtype
                fits = other and self._may_be(operation, name, computed)
                declared[uid] = computed if fits else made.spec.dtype

    def _may_be(self, operation: Node, name: str, dtype: DType) -> bool:
        """Whether a result of an operation may have a dtype."""
        specs = {n: self._made[uid].spec for n, uid in operation.named() if uid < len(self._made)}
        inputs = {
            n: _with_dtype(specs[n], self._declared[uid]) for n, uid in operation.named(operation.inputs)
        }
        try:
            operation.check(specs | inputs | {name: _with_dtype(specs[name], dtype)})
        except InvalidRequest:
            return False
        return True


@functools.lru_cache(1 << 10)
def _with_dtype(spec: TensorSpec, dtype: DType) -> TensorSpec:
    """The spec with another dtype. Making one checks it, and a network's tensors have few different ones."""
    return msgspec.structs.replace(spec, dtype=dtype)


def _without_chains(operations: Sequence[Node]) -> list[Node]:
    """The operations, with each reshape of a reshape as one of what that reshaped."""
    reshaped: dict[int | None, int | None] = {}
    found: list[Node] = []
    for operation in operations:
        if isinstance(operation, Reshape):
            x = reshaped.get(operation.x, operation.x)
            reshaped[operation.y] = x
            found.append(msgspec.structs.replace(operation, x=x))
        else:
            found.append(operation)
    return found
