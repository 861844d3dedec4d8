"""Graphs in which pointwise operations read the parts of a concatenation where these lie.

Rotary embedding swaps the two halves of the features and negates one of them. That is a concatenation which
only the pointwise operations behind it read, and their kernel can pad what it reads. So here a concatenation
becomes the sum of its parts, each padded with -0, which changes no number that it is added to.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from cudnn_actor.engines.cuda.planning.changed_graphs import Changed, replace_operations
from cudnn_actor.engines.cuda.planning.indexed_reads import is_indexed_read
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import (
    Concat,
    GraphTensor,
    Node,
    Pad,
    Pointwise,
    PointwiseMode,
    TensorRole,
)
from cudnn_actor.protocol.types.tensor import packed_strides

__all__ = ["read_in_parts"]

_MOST_PARTS = 3
"""The most parts of a concatenation that is read in parts: a kernel reads each part for each element."""


def read_in_parts(graph: OperationGraph) -> Changed | None:
    """Returns a graph whose concatenations are read in parts; None if none of them is to be."""
    if not any(isinstance(operation, Concat) for operation in graph.operations):
        return None
    return _Reading(graph).rewrite()


class _Reading:
    """Replaces the concatenations of one graph."""

    def __init__(self, graph: OperationGraph) -> None:
        self._graph = graph
        self._tensors = {tensor.uid: tensor for tensor in graph.tensors}
        self._new_uids = itertools.count(1 + max(self._tensors))
        self._readers: dict[int, list[Node]] = {}
        for operation in graph.operations:
            for uid in operation.reads:
                self._readers.setdefault(uid, []).append(operation)
        self._overwritten = {tensor.overwrites for tensor in graph.tensors}
        self._writers = {uid: number for number, each in enumerate(graph.operations) for uid in each.writes}

    def rewrite(self) -> Changed | None:
        """See `read_in_parts`."""
        instead: dict[int, list[Node]] = {}
        for number, operation in enumerate(self._graph.operations):
            if isinstance(operation, Concat) and self._is_read_by_functions(operation):
                negated = {uid: self._negation(uid) for uid in operation.operands}
                if self._may_be_padded(operation, negated):
                    instead[number] = self._sum(operation, negated)
                    instead |= {at: [] for at in negated.values() if at is not None}
        return replace_operations(self._graph, instead, self._tensors) if instead else None

    def _is_read_by_functions(self, operation: Concat[int]) -> bool:
        """Whether only pointwise operations of the same dims read a concatenation."""
        y, readers = self._tensors[operation.y], self._readers.get(operation.y, ())
        return (
            y.role is TensorRole.VIRTUAL
            and y.dtype.is_floating
            and 0 not in y.dims
            and 1 < len(operation.operands) <= _MOST_PARTS
            and max(Counter(operation.operands).values()) == 1
            and bool(readers)
            and all(
                isinstance(each, Pointwise) and self._tensors[each.result].dims == y.dims for each in readers
            )
        )

    def _negation(self, uid: int) -> int | None:
        """The number of the operation that negates a part for this concatenation alone; None if none does."""
        number = self._writers.get(uid)
        if (
            number is None
            or len(self._readers[uid]) != 1
            or self._tensors[uid].role is not TensorRole.VIRTUAL
        ):
            return None
        operation = self._graph.operations[number]
        return number if isinstance(operation, Pointwise) and operation.mode is PointwiseMode.NEG else None

    def _source(self, uid: int, negation: int | None) -> GraphTensor:
        """The tensor that is padded in place of a part: the part itself, or the one that is negated."""
        return self._tensors[uid if negation is None else self._graph.operations[negation].reads[0]]

    def _may_be_padded(self, operation: Concat[int], negated: dict[int, int | None]) -> bool:
        """Whether an elementwise kernel can pad each part as it reads it, and no part is overwritten."""
        y = self._tensors[operation.y]
        parts = [self._source(uid, negated[uid]) for uid in operation.operands]
        pads = (self._pad(part, y, operation.axis, start) for part, start in self._starts(parts, operation))
        return all(
            part.dtype is y.dtype
            and part.dims == self._tensors[uid].dims
            and part.uid not in self._overwritten
            and is_indexed_read(pad, part, y)
            for part, pad, uid in zip(parts, pads, operation.operands, strict=True)
        )

    def _starts(self, parts: Sequence[GraphTensor], operation: Concat[int]) -> list[tuple[GraphTensor, int]]:
        starts = operation.starts([part.dims for part in parts])
        return [*zip(parts, starts, strict=True)]

    def _pad(self, part: GraphTensor, y: GraphTensor, axis: int, start: int, value: float = -0.0) -> Pad[int]:
        """The padding that makes a part as large as the whole. `axis` may be below 0, from the last on."""
        before = tuple(start if at == axis % len(y.dims) else 0 for at in range(len(y.dims)))
        after = tuple(
            whole - size - first for whole, size, first in zip(y.dims, part.dims, before, strict=True)
        )
        return Pad(x=part.uid, y=y.uid, before=before, after=after, steps=(1,) * len(before), value=value)

    def _sum(self, operation: Concat[int], negated: dict[int, int | None]) -> list[Node]:
        """The operations in place of a concatenation."""
        y, found, summands = self._tensors[operation.y], list[Node](), list[GraphTensor]()
        parts = [self._source(uid, negated[uid]) for uid in operation.operands]
        for (part, start), uid in zip(self._starts(parts, operation), operation.operands, strict=True):
            at = negated[uid]
            padded = self._new(y)
            pad = self._pad(part, y, operation.axis, start, math.copysign(0.0, 1 if at is not None else -1))
            found.append(msgspec.structs.replace(pad, y=padded.uid))
            if at is not None:
                negation, result = self._graph.operations[at], self._new(y)
                named = {"operands[0]": padded.uid, "result": result.uid}
                found.append(negation.with_operands(named.__getitem__))
                padded = result
            summands.append(padded)
        total = summands[0]
        for number, summand in enumerate(summands[1:], start=2):
            result = y if number == len(summands) else self._new(y)
            found.append(
                Pointwise(mode=PointwiseMode.ADD, operands=(total.uid, summand.uid), result=result.uid)
            )
            total = result
        return found

    def _new(self, y: GraphTensor) -> GraphTensor:
        """Add a tensor with the dims of y."""
        made = msgspec.structs.replace(y, uid=next(self._new_uids), strides=packed_strides(y.dims))
        self._tensors[made.uid] = made
        return made
