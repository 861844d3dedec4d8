"""Cuts an operation graph into pieces, each of which becomes a plan of its own.

A piece is one operation that is not pointwise with the pointwise operations
behind it, or a tree of pointwise operations alone. A value stays inside a piece
only if a single pointwise operation reads it. What lies between pieces is stored
in its declared dtype, so where a graph is cut changes no result. Results of
reshapes, transposes and slices are views of what is stored where that is
possible.

Pieces run in the order of their places: an operation's place is its number in
the graph, and a piece's that of its first operation that is not pointwise, or of
its last operation. All that a piece reads has an earlier place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from cudnn_actor.protocol.graph import OperationGraph
from cudnn_actor.protocol.operations import (
    Convolution,
    GraphTensor,
    MatMul,
    Movement,
    Node,
    Pointwise,
    TensorRole,
)

__all__ = ["Cut", "Piece", "Stored", "cut"]

_LEAST_ALIGNMENT = 16
"""Bytes to which cuDNN wants addresses aligned."""


class Stored(NamedTuple):
    """Where a tensor lies: in the memory of a tensor that is bound or between pieces, from this byte on."""

    root: int
    offset: int = 0


class Piece(NamedTuple):
    """A piece, and the tensor of the whole graph for each of its bound tensors, in its canonical order."""

    graph: OperationGraph
    tensors: tuple[int, ...]


class Cut(NamedTuple):
    """A graph's pieces in order, where each tensor lies that they use, and what is stored between them."""

    pieces: tuple[Piece, ...]
    stored: dict[int, Stored]
    between: tuple[GraphTensor, ...]


def cut(graph: OperationGraph) -> Cut | None:
    """The graph in pieces; None if it is a single piece."""
    parts = _Partition(graph).cut()
    return None if len(parts.pieces[0].graph.operations) == len(graph.operations) else parts


@dataclass(eq=False)
class _Draft:
    """A piece that is being put together: its place, the operation that is not pointwise, and all of them."""

    place: int
    anchor: Node | None
    operations: dict[int, Node] = field(default_factory=dict)


class _Partition:
    def __init__(self, graph: OperationGraph) -> None:
        self._graph = graph
        self._readers: dict[int, int] = {}
        for operation in graph.operations:
            for uid in operation.reads:
                self._readers[uid] = self._readers.get(uid, 0) + 1
        self._pending: dict[int, _Draft] = {}
        """Values that a single pointwise operation will read → their piece."""
        self._places: dict[int, int] = {}
        """Stored values → the place of their piece."""
        self._forms: dict[int, GraphTensor] = {tensor.uid: tensor for tensor in graph.tensors}
        """Each tensor as it is stored."""
        self._stored: dict[int, Stored] = {uid: Stored(uid) for uid in graph.bound}
        self._pieces: list[_Draft] = []

    def cut(self) -> Cut:
        for place, operation in enumerate(self._graph.operations):
            if isinstance(operation, Pointwise):
                self._join(place, operation)
                continue
            for uid in operation.reads:
                self._store(uid)
            if not (isinstance(operation, Movement) and self._view(operation)):
                self._begin(place, operation, anchor=operation)
        ordered = sorted(self._pieces, key=lambda draft: draft.place)
        between = tuple(
            self._forms[uid]
            for uid, stored in self._stored.items()
            if stored.root == uid and self._graph.tensor(uid).role is TensorRole.VIRTUAL
        )
        return Cut(tuple(map(self._piece, ordered)), self._stored, between)

    def _begin(self, place: int, operation: Node, anchor: Node | None) -> _Draft:
        draft = _Draft(place, anchor)
        self._pieces.append(draft)
        self._add(draft, place, operation)
        return draft

    def _add(self, draft: _Draft, place: int, operation: Node) -> None:
        """Add an operation to a piece, and say which of its results may stay inside."""
        draft.operations[place] = operation
        for uid in operation.writes:
            tensor = self._graph.tensor(uid)
            if tensor.role is TensorRole.VIRTUAL and self._readers.get(uid, 0) == 1:
                self._pending[uid] = draft
            else:
                self._keep(uid, draft)

    def _keep(self, uid: int, draft: _Draft) -> None:
        """Have a piece write a value to memory."""
        self._stored.setdefault(uid, Stored(uid))
        self._places[uid] = draft.place

    def _store(self, uid: int) -> None:
        """Have a value stored that might have stayed inside its piece."""
        draft = self._pending.pop(uid, None)
        if draft is not None:
            self._keep(uid, draft)

    def _join(self, place: int, operation: Pointwise[int]) -> None:
        """Add a pointwise operation to the piece of its operand, or let it begin a piece."""
        pending = {uid: self._pending[uid] for uid in operation.reads if uid in self._pending}
        anchored = [uid for uid, draft in pending.items() if draft.anchor is not None]
        host = self._host(operation, pending, anchored)
        for uid in anchored:
            if host is None or pending[uid] is not host:
                self._store(uid)
        merged = {id(draft): draft for uid, draft in pending.items() if uid in self._pending}
        for uid in pending:
            self._pending.pop(uid, None)
        if host is None:
            host = _Draft(place, None)
            self._pieces.append(host)
        for draft in merged.values():
            if draft is not host:
                host.operations |= draft.operations
                self._pieces.remove(draft)
        if host.anchor is None:
            host.place = place
        self._add(host, place, operation)

    def _host(
        self, operation: Pointwise[int], pending: dict[int, _Draft], anchored: Sequence[int]
    ) -> _Draft | None:
        """The piece with an operation before it that can take it in: the last of those that can."""
        result = self._graph.tensor(operation.result)
        for uid in sorted(anchored, key=lambda uid: -pending[uid].place):
            draft = pending[uid]
            if not isinstance(draft.anchor, _WITH_EPILOGUE) or self._graph.tensor(uid).dims != result.dims:
                continue
            trees = [
                tree for other, tree in pending.items() if other in operation.reads and tree.anchor is None
            ]
            read = [other for tree in trees for op in tree.operations.values() for other in op.reads]
            read += [other for other in operation.reads if other != uid]
            inside = {other for tree in trees for op in tree.operations.values() for other in op.writes}
            if any(self._place_of(other) >= draft.place for other in read if other not in inside):
                continue
            read += [other for op in draft.operations.values() for other in op.reads]
            before = result.overwrites
            if before is None or read.count(before) == self._readers[before]:
                return draft
        return None

    def _place_of(self, uid: int) -> int:
        """The place of the piece that gives a value; -1 for one that is given, or inside a piece."""
        draft = self._pending.get(uid)
        return self._places.get(uid, -1) if draft is None else draft.place

    def _view(self, operation: Movement[int]) -> bool:
        """Whether a result lies in its operand's memory; then say where."""
        result, form = self._graph.tensor(operation.y), self._forms[operation.x]
        if result.role is not TensorRole.VIRTUAL or result.dtype is not form.dtype:
            return False
        placed = operation.view(form.dims, form.strides)
        if placed is None or min(placed.strides, default=1) < 0:
            return False
        root, offset = self._stored[operation.x]
        offset += placed.offset * form.dtype.itemsize
        if offset % _LEAST_ALIGNMENT:
            return False
        alignment = math.gcd(form.alignment, offset) if offset else form.alignment
        self._forms[result.uid] = msgspec.structs.replace(
            result, strides=placed.strides, alignment=max(alignment, _LEAST_ALIGNMENT)
        )
        self._stored[result.uid] = Stored(root, offset)
        self._places[result.uid] = self._places.get(operation.x, -1)
        return True

    def _piece(self, draft: _Draft) -> Piece:
        operations = tuple(draft.operations[place] for place in sorted(draft.operations))
        touched = dict.fromkeys(uid for op in operations for uid in (*op.reads, *op.writes))
        written = {uid for op in operations for uid in op.writes}
        tensors = []
        for uid in touched:
            tensor = self._graph.tensor(uid)
            if uid in self._stored:
                before = tensor.overwrites if tensor.overwrites in touched else None
                if before is not None and before in written:
                    before = None
                tensor = msgspec.structs.replace(self._forms[uid], role=TensorRole.BOUND, overwrites=before)
            tensors.append(tensor)
        piece = OperationGraph(tensors=tuple(tensors), operations=operations, numerics=self._graph.numerics)
        return Piece(piece, piece.bound)


_WITH_EPILOGUE = (Convolution, MatMul)
"""Operations whose graphs of cuDNN's take pointwise operations behind them."""
