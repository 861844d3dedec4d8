"""Cuts an operation graph into pieces, each of which becomes a plan of its own.

There are two kinds of pieces. One has an anchor, an operation that is not pointwise, and its epilogue, the
pointwise operations behind it. The other is a group: operations that one kernel of our own computes.
`fusion_rules` says which piece an operation becomes part of, and `layout_rules` which results are views or
are written where their reader wants them. Tensors between pieces are stored in their declared dtypes, so it
makes no difference to a result where a graph is cut.

A piece with an anchor has one result, unless the anchor has kernels of our own. A group has any number of
results. Its pointwise operations have results of the same dims, and so have its gathers, paddings and
resamplings to the nearest, which only a group without lines may have. Its reductions, norms and softmaxes
have operands of these dims and the same axes; then results may also have one element for each line. A norm
with kernels of its own is the only one in its group. Pointwise operations of smaller dims may be part of a
piece that broadcasts their result, if nothing else reads it.

A group grows until an operation outside reads one of its results, or overwrites a tensor that it reads. So
the readers of its results come behind all of its operations, and it runs in the place of its last one. Pieces
run in the order of their places: the place of an operation is its number in the graph, and the place of a
piece is its anchor's, or its last operation's. All tensors that a piece reads have earlier places.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from cudnn_actor.engines.cuda.operations.fused_norms import FUSED
from cudnn_actor.engines.cuda.planning.concatenated_reads import read_in_parts
from cudnn_actor.engines.cuda.planning.depthwise import is_depthwise
from cudnn_actor.engines.cuda.planning.empty_tensors import fill_empty
from cudnn_actor.engines.cuda.planning.fusing import is_lined, lines_of_operation
from cudnn_actor.engines.cuda.planning.fusion_rules import Candidate, fusion_of
from cudnn_actor.engines.cuda.planning.indexed_reads import is_indexed_read
from cudnn_actor.engines.cuda.planning.layout_rules import (
    form_in_result,
    form_over_statistic,
    form_within,
    runs_of,
    view_of_operand,
)
from cudnn_actor.engines.cuda.planning.pieces import Draft, Lines, Pieces, Stored
from cudnn_actor.engines.cuda.planning.recurrent_layers import Kept, together
from cudnn_actor.engines.cuda.planning.reshaped_products import reshape_products
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import (
    Concat,
    GraphTensor,
    Movement,
    Node,
    Pointwise,
    Recurrent,
    TensorRole,
)

__all__ = ["Cut", "Piece", "Stored", "cut"]


class Piece(NamedTuple):
    """A piece, and the tensor of the whole graph for each of its bound tensors, in its canonical order.

    `numbers`: the numbers of its operations in the whole graph.
    """

    graph: OperationGraph
    tensors: tuple[int, ...]
    numbers: tuple[int, ...]


class Cut(NamedTuple):
    """A graph's pieces in order, the place of each tensor that they use, and the tensors between pieces.

    `kept`: the pieces of recurrent layers, each with the piece of the gradients that can read its reserve.
    """

    pieces: tuple[Piece, ...]
    stored: dict[int, Stored]
    between: tuple[GraphTensor, ...]
    kept: tuple[Kept, ...] = ()


def cut(graph: OperationGraph, *, layers_apart: bool = False) -> Cut | None:
    """Cut a graph into pieces; None if it is a single one.

    `layers_apart`: whether recurrent layers one above the other are pieces of their own.

    There are no pieces for operations whose results have no elements: see `empty_tensors`. Products may have
    other dims than in the graph: see `reshaped_products`.
    """
    whole, numbers = graph, tuple(range(len(graph.operations)))
    for change in (fill_empty, reshape_products, read_in_parts):
        if (found := change(whole)) is not None:
            if found.graph is None:
                return _NOTHING
            whole, numbers = found.graph, tuple(numbers[number] for number in found.numbers)
    groups: tuple[range, ...] = ()
    kept: tuple[Kept, ...] = ()
    if (layers := together(whole, apart=layers_apart)) is not None:
        whole, numbers = layers.graph, tuple(numbers[number] for number in layers.numbers)
        groups, kept = layers.groups, layers.kept
    parts = _Partition(whole, groups).cut(kept)
    if whole is not graph:
        return _with_numbers(parts, numbers)
    return None if len(parts.pieces[0].graph.operations) == len(graph.operations) else parts


_NOTHING = Cut((), {}, ())


def _with_numbers(parts: Cut, numbers: Sequence[int]) -> Cut:
    """Pieces whose operations have these numbers in the whole graph."""
    pieces = (
        piece._replace(numbers=tuple(numbers[number] for number in piece.numbers)) for piece in parts.pieces
    )
    return parts._replace(pieces=tuple(pieces))


class _Partition:
    """Brings the operations of a graph into pieces, one after the other."""

    def __init__(self, graph: OperationGraph, groups: Sequence[range]) -> None:
        self._graph = graph
        self._groups = {group.start: group for group in groups}
        self._pieces = Pieces(graph)
        self._read_alike = _read_alike(graph)
        self._parts_only_joined = _parts_only_joined(graph, self._pieces)
        self._new_uids = itertools.count(1 + max(self._pieces.forms))

    def cut(self, kept: Sequence[Kept]) -> Cut:
        """The pieces. `kept`: groups, by the numbers of their first operations."""
        in_groups = {number for group in self._groups.values() for number in group}
        for number, operation in enumerate(self._graph.operations):
            if number in in_groups:
                if number in self._groups:
                    self._run_together(self._groups[number])
            elif not self._fuse(number, operation):
                for uid in operation.reads:
                    self._pieces.store(uid)
                if not (self._begin_with_read(number, operation) or self._arrange(number, operation)):
                    self._run_alone(number, operation)
        stored = self._pieces.stored
        roots = (self._pieces.forms[uid] for uid, place in stored.items() if place.root == uid)
        between = tuple(form for form in roots if self._graph.tensor(form.uid).role is TensorRole.VIRTUAL)
        in_order = self._pieces.in_order()
        places = {number: place for place, draft in enumerate(in_order) for number in draft.operations}
        pairs = (Kept(places[each.layers], places[each.gradients], each.y) for each in kept)
        return Cut(tuple(map(self._as_graph, in_order)), stored, between, tuple(pairs))

    # Pointwise operations, and those along lines.

    def _fuse(self, number: int, operation: Node) -> bool:
        """Add an operation to a piece, perhaps to a new one. Returns False if no rule applies to it."""
        if isinstance(operation, Pointwise) and self._update(operation):
            return True
        candidate = self._candidate(number, operation)
        if candidate is None:
            return False
        pieces = self._pieces
        into, merged = fusion_of(pieces, candidate)
        piece = pieces.begin_group(number, candidate.dims) if into is None else into
        for group in merged:
            piece = pieces.merge(group, piece)
        for uid in operation.reads:
            other = pieces.piece_of(uid)
            if other is None or other.number != piece.number:
                pieces.store(uid)
        pieces.add(piece, number, operation, candidate.lines)
        return True

    def _update(self, operation: Pointwise[int]) -> bool:
        """Make a norm write its new statistic over the old one, if that is all that an operation does.

        Returns whether it is.
        """
        form = form_over_statistic(self._pieces, operation)
        if form is not None:
            self._pieces.lay_into(form, Stored(operation.result))
        return form is not None

    def _candidate(self, number: int, operation: Node) -> Candidate | None:
        """The question for the rules of fusion; None for an operation that they do not apply to."""
        if isinstance(operation, Pointwise):
            return Candidate(operation, self._graph.tensor(operation.result).dims)
        dims = self._graph.tensor(operation.reads[0]).dims
        if is_lined(self._graph, operation):
            _, axes, compute = lines_of_operation(self._graph, operation) or ((), (), None)
            return Candidate(operation, dims, Lines(axes, compute))
        if type(operation) in FUSED and 0 not in dims:
            return Candidate(operation, dims, Lines(norm=number))
        return None

    # Recurrent layers.

    def _run_together(self, group: range) -> None:
        """Make a group of recurrent layers, or of their gradients, one piece.

        A reserve that no operation reads is not stored. It only says that the library keeps its own reserve.
        """
        operations, pieces = self._graph.operations[group.start : group.stop], self._pieces
        written = {uid for each in operations for uid in each.writes}
        for uid in dict.fromkeys(uid for each in operations for uid in each.reads):
            if uid not in written:
                pieces.store(uid)
        pieces.add_together(group.start, operations)
        for each in operations:
            if isinstance(each, Recurrent) and each.reserve is not None:
                pieces.leave_out(each.reserve)

    # Other operations, whose operands are stored.

    def _begin_with_read(self, number: int, operation: Node) -> bool:
        """Begin a group with a gather or the like, if a pointwise operation behind it can be part of it.

        Returns False if not, or if a result overwrites a tensor that it reads: the kernel would write to
        places that it has not read yet.
        """
        result, *others = operation.writes
        x, y = self._graph.tensor(operation.reads[0]), self._graph.tensor(result)
        if others or result not in self._read_alike or 0 in y.dims:
            return False
        if not self._pieces.overwritten.isdisjoint(operation.reads) or not is_indexed_read(operation, x, y):
            return False
        group = self._pieces.begin_group(number, y.dims, gathers=True)
        self._pieces.add(group, number, operation)
        return True

    def _run_alone(self, number: int, operation: Node) -> None:
        """Begin a piece with an operation that is not pointwise."""
        self._pieces.add_alone(number, operation, own=is_depthwise(operation, self._pieces.forms.__getitem__))

    def _arrange(self, number: int, operation: Node) -> bool:
        """Arrange a movement or a concatenation so that nothing, or less, is copied. Returns False if it
        needs a kernel."""
        match operation:
            case Concat():
                return self._concatenate(number, operation)
            case Movement():
                return self._write_in_result(operation) or self._view(number, operation)
            case _:
                return False

    def _write_in_result(self, operation: Movement[int]) -> bool:
        """Make the operand's piece write the result of a movement in place of the operand.

        Returns whether it does. If the result is not bound, this only lays the operand out as the reader of
        the result wants it, and returns False.
        """
        form = form_in_result(self._pieces, operation)
        if form is None:
            return False
        if self._graph.tensor(operation.y).role is not TensorRole.BOUND:
            self._pieces.forms[operation.x] = form
            return False
        self._pieces.add_joint(operation.y, self._pieces.place_of(operation.x))
        self._pieces.lay_into(form, Stored(operation.y))
        return True

    def _view(self, number: int, operation: Movement[int]) -> bool:
        """Make the result of a movement a view, or let the concatenation that reads it compute it.

        Returns whether either is possible.
        """
        seen = view_of_operand(self._pieces, operation)
        if seen is None or not (seen.everywhere or operation.y in self._parts_only_joined):
            return False
        if seen.everywhere:
            self._pieces.add_view(seen.form, operation.x, seen.stored)
        else:
            self._pieces.add_moved(number, operation)
        return True

    def _concatenate(self, number: int, operation: Concat[int]) -> bool:
        """Make the operands' pieces write to their parts of the result where they can, and copy the other
        operands."""
        pieces, runs = self._pieces, runs_of(self._pieces, operation)
        if runs is None:
            return False
        result, copies = pieces.forms[operation.y], any(not run.written for run in runs)
        last = max(map(pieces.place_of, operation.operands))
        pieces.add_joint(result.uid, number if copies else last)
        for run in runs:
            if not run.written:
                self._copy_into(number, operation, [uid for uid, _ in run.parts], run.parts[0][1])
                continue
            for uid, offset in run.parts:
                pieces.lay_into(form_within(pieces.forms[uid], result), Stored(result.uid, offset))
        return True

    def _copy_into(self, number: int, operation: Concat[int], operands: Sequence[int], offset: int) -> None:
        """Add a piece that copies neighbours among the operands to their part of the result."""
        uid, result = next(self._new_uids), self._pieces.forms[operation.y]
        copies: Concat[int] = Concat(operands=tuple(operands), axis=operation.axis, y=uid)
        specs = {name: self._pieces.forms[read].spec for name, read in copies.named(copies.inputs)}
        dims = copies.infer(specs)["y"].dims
        part = msgspec.structs.replace(result, uid=uid, dims=dims)
        self._pieces.lay_into(form_within(part, result), Stored(result.uid, offset))
        self._run_alone(number, copies)

    # The result.

    def _as_graph(self, draft: Draft) -> Piece:
        """A piece as a graph, in which stored tensors are bound, perhaps over an input of the piece."""
        numbers = tuple(sorted(draft.operations))
        operations = tuple(draft.operations[number] for number in numbers)
        tensors = []
        for uid in dict.fromkeys(uid for op in operations for uid in (*op.reads, *op.writes)):
            tensor = self._pieces.forms[uid]
            if uid in self._pieces.stored:
                before = tensor.overwrites if tensor.overwrites in draft.reads else None
                tensor = msgspec.structs.replace(tensor, role=TensorRole.BOUND, overwrites=before)
            tensors.append(tensor)
        piece = OperationGraph(tensors=tuple(tensors), operations=operations, numerics=self._graph.numerics)
        return Piece(piece, piece.bound, numbers)


def _read_alike(graph: OperationGraph) -> set[int]:
    """The uids that some pointwise operation with a result of the same dims reads."""
    return {
        uid
        for operation in graph.operations
        if isinstance(operation, Pointwise)
        for uid in operation.reads
        if graph.tensor(uid).dims == graph.tensor(operation.result).dims
    }


def _parts_only_joined(graph: OperationGraph, pieces: Pieces) -> set[int]:
    """The uids that one concatenation reads, and nothing else."""
    concatenations = (operation for operation in graph.operations if isinstance(operation, Concat))
    return {uid for each in concatenations for uid in each.reads if pieces.readers(uid) == 1}
