"""Computes a large product of half types by products whose rows are vectors of 16 bytes.

Kernels for tensor cores move such vectors. Where rows have another length, as GPT-2's logits of 50,257
columns, cuBLASLt and cuDNN choose kernels that reach 12 and 20 % of what the device can do (H100). Rows that
begin at multiples of 16 bytes do not help, since both choose by the sizes. So here the product gets other
sizes:

- The columns of the result that fill whole vectors are one product, and the last 8 columns another one, if
  each column of b is contiguous. Else b is copied, with more columns.
- If the inner dim is no multiple of 8, both operands are copied, and padded with zeros.

Results of other sizes are then copied to the result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec

from cudnn_actor.engines.cuda.planning.changed_graphs import graph_of
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import (
    Concat,
    GraphTensor,
    MatMul,
    Node,
    Pad,
    Pointwise,
    Slice,
    TensorRole,
)
from cudnn_actor.protocol.types.tensor import packed_strides

__all__ = ["aligned_product"]

_VECTOR = 8
"""Elements of a half type in 16 bytes."""
_LEAST_WORK = 2 << 30
"""The least floating-point operations of a product. At a tenth of what the device can do, they take 20 us."""
_WORK_PER_BYTE = 150
"""The least floating-point operations of a product for each byte that is copied.

A copy reads and writes a byte in 0.7 ps, at 2.8 TB/s. At 12 % instead of 60 % of 990 TFLOP/s, 106
operations take 0.7 ps longer.
"""


def aligned_product(graph: OperationGraph, *, every: bool = False) -> OperationGraph | None:
    """The graph by products of whole vectors, with the same bound tensors.

    None if it is no product, or one whose rows are whole vectors already. Unless `every`, None, too, if the
    copies are expected to take longer than they save.
    """
    operation = graph.operations[0] if graph.operations else None
    if not isinstance(operation, MatMul) or len(graph.results) != 1:
        return None
    found = _Aligning(graph, operation)
    return found.rewrite() if found.is_possible and (every or found.pays) else None


class _Aligning:
    """Replaces the operations of one graph: a product, and pointwise operations behind it."""

    def __init__(self, graph: OperationGraph, operation: MatMul[int]) -> None:
        self._graph = graph
        self._operation = operation
        self._a, self._b, self._y = map(graph.tensor, (operation.a, operation.b, operation.y))
        self._result = graph.tensor(graph.results[0])
        self._inner, self._columns = self._a.dims[-1], self._y.dims[-1]
        self._tensors = {
            tensor.uid: tensor for tensor in graph.tensors if tensor.role is not TensorRole.VIRTUAL
        }
        self._new_uids = itertools.count(1 + max(tensor.uid for tensor in graph.tensors))
        self._operations: list[Node] = []

    @property
    def is_possible(self) -> bool:
        """Whether rows are no whole vectors, and the operations behind can be computed for some columns."""
        functions = self._graph.operations[1:]
        computed = self._graph.written
        read = {uid for each in functions for uid in each.reads} - computed
        return (
            self._a.dtype.is_half
            and self._a is not self._b
            and min(self._inner, self._columns) >= _VECTOR
            and bool(self._inner % _VECTOR or self._columns % _VECTOR)
            and 0 not in self._y.dims
            and all(isinstance(each, Pointwise) for each in functions)
            and all(self._graph.tensor(uid).dims == self._y.dims for uid in computed)
            and (not self._columns % _VECTOR or all(map(self._is_same_for_rows, read)))
            and self._has_rows_in_order
            and all(tensor.overwrites is None for tensor in self._graph.tensors)
        )

    def _is_same_for_rows(self, uid: int) -> bool:
        tensor = self._graph.tensor(uid)
        return len(tensor.dims) == len(self._y.dims) and math.prod(tensor.dims[:-1]) == 1

    @property
    def pays(self) -> bool:
        """Whether the product gains more than the copies take."""
        copied = [self._result] if self._columns % _VECTOR else []
        if self._inner % _VECTOR:
            copied += [self._a, self._b]
        elif copied and not self._has_columns_in_order:
            copied += [self._b]
        nbytes = sum(math.prod(tensor.dims) * tensor.dtype.itemsize for tensor in copied)
        return 2 * math.prod(self._y.dims) * self._inner >= max(_LEAST_WORK, _WORK_PER_BYTE * nbytes)

    @property
    def _has_rows_in_order(self) -> bool:
        """Whether a, or a copy of it with a longer inner dim, has rows or columns of whole vectors."""
        if self._inner % _VECTOR:
            return self._a.strides[-1] == 1 or not self._a.dims[-2] % _VECTOR
        steps = {step for size, step in zip(self._a.dims, self._a.strides, strict=True) if size > 1}
        return not any(step % _VECTOR for step in steps - {1})

    @property
    def _has_columns_in_order(self) -> bool:
        """Whether parts of b's columns are matrices of whole vectors."""
        *others, row, column = self._b.strides
        whole = not any(step % _VECTOR for step in (*others, column)) and not self._b.alignment % 16
        return row == 1 and whole and self._columns >= 2 * _VECTOR

    def rewrite(self) -> OperationGraph:
        """See `aligned_product`."""
        inner, columns = self._inner % _VECTOR, self._columns % _VECTOR
        in_parts = columns and not inner and self._has_columns_in_order
        if inner:
            self._a = self._pad(self._a, (-1,))
        if inner or (columns and not in_parts):
            self._b = self._pad(self._b, (-2, -1))
        if not columns:
            self._compute(self._b, 0, self._columns, self._result)
        elif in_parts:
            self._compute_in_parts(self._columns - columns, self._columns - _VECTOR)
        else:
            wide = self._compute(self._b, 0, self._b.dims[-1])
            self._slice(wide, 0, self._columns, self._result)
        return graph_of(self._operations, self._tensors, self._graph.numerics)

    def _compute_in_parts(self, most: int, last: int) -> None:
        """Add the operations that compute the first columns, and a whole vector of the last ones."""
        first, behind = (
            self._compute(self._part(self._b, start, size), start, size)
            for start, size in ((0, most), (last, _VECTOR))
        )
        rest = self._part(behind, most - last, self._columns - most)
        operands, axis = (first.uid, rest.uid), len(self._y.dims) - 1
        self._tensors[self._result.uid] = self._result
        self._operations.append(Concat(operands=operands, axis=axis, y=self._result.uid))

    def _compute(
        self, b: GraphTensor, start: int, size: int, result: GraphTensor | None = None
    ) -> GraphTensor:
        """Add the operations that compute `size` columns from `start` on, from these columns of b.

        Returns the result. Operations that make their operands come before all of them, so that they can be
        one piece.
        """
        seen = {self._operation.a: self._a, self._operation.b: b}
        touched = (uid for each in self._graph.operations for uid in (*each.reads, *each.writes))
        for uid in dict.fromkeys(touched):
            if uid not in seen:
                seen[uid] = self._columns_of(self._graph.tensor(uid), start, size)
        if result is not None:
            seen[self._result.uid] = result
        for operation in self._graph.operations:
            named = dict(operation.named())
            self._operations.append(operation.with_operands(lambda name: seen[named[name]].uid))  # noqa: B023
        return seen[self._result.uid]

    def _columns_of(self, tensor: GraphTensor, start: int, size: int) -> GraphTensor:
        """`size` columns of a tensor that is computed or read behind the product, from `start` on."""
        if tensor.uid in self._graph.written:
            return self._new(tensor, (*tensor.dims[:-1], size))
        if tensor.dims[-1] == 1 or size == self._columns:
            return tensor
        if tensor.role is not TensorRole.BOUND:
            dims = (*tensor.dims[:-1], size)
            changed = msgspec.structs.replace(tensor, dims=dims, strides=packed_strides(dims))
            return self._put(changed, tensor.role)
        return self._pad(tensor, (-1,)) if size > self._columns else self._part(tensor, start, size)

    def _pad(self, tensor: GraphTensor, axes: Sequence[int]) -> GraphTensor:
        """A copy of a tensor, in the same order in memory, with zeros behind it up to whole vectors."""
        after = [0] * len(tensor.dims)
        for axis in axes:
            after[axis] = -tensor.dims[axis] % _VECTOR
        dims = tuple(map(int.__add__, tensor.dims, after))
        copy = self._new(tensor, dims)
        if tensor.strides[-1] != 1 == tensor.strides[-2]:
            *others, rows, columns = dims
            strides = packed_strides((*others, columns, rows))
            copy = msgspec.structs.replace(copy, strides=(*strides[:-2], 1, strides[-2]))
            self._tensors[copy.uid] = copy
        none = (0,) * len(dims)
        pad = Pad(x=tensor.uid, y=copy.uid, before=none, after=tuple(after), steps=(1,) * len(dims))
        self._operations.append(pad)
        return copy

    def _part(self, tensor: GraphTensor, start: int, size: int) -> GraphTensor:
        """Some columns of a tensor."""
        part = self._new(tensor, (*tensor.dims[:-1], size))
        self._slice(tensor, start, size, part)
        return part

    def _slice(self, tensor: GraphTensor, start: int, size: int, to: GraphTensor) -> None:
        rank, sizes = len(tensor.dims), (*tensor.dims[:-1], size)
        starts = (*(0,) * (rank - 1), start)
        self._tensors[to.uid] = to
        self._operations.append(Slice(x=tensor.uid, y=to.uid, starts=starts, steps=(1,) * rank, sizes=sizes))

    def _new(self, tensor: GraphTensor, dims: Sequence[int]) -> GraphTensor:
        """Add a tensor between operations, with these dims."""
        dims = tuple(dims)
        form = msgspec.structs.replace(tensor, dims=dims, strides=packed_strides(dims), overwrites=None)
        return self._put(form, TensorRole.VIRTUAL)

    def _put(self, tensor: GraphTensor, role: TensorRole) -> GraphTensor:
        tensor = msgspec.structs.replace(tensor, uid=next(self._new_uids), role=role)
        self._tensors[tensor.uid] = tensor
        return tensor
