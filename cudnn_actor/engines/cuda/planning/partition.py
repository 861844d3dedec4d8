"""Cuts an operation graph into pieces, each of which becomes a plan of its own.

A piece is one operation that is not pointwise with the pointwise operations
behind it, or a group. It has one result, but a depthwise convolution of our own
has any number of them. What lies between pieces is stored in its declared dtype,
so where a graph is cut changes no result. Results of reshapes, transposes and
slices are views of what is stored where that is possible. What is concatenated
is written to its part of the result where that is possible. A slice that only a
concatenation reads belongs to its piece if it is no view, since it begins at an odd
address or is in reverse: its elements are read where they are stored.

A group has any number of pointwise operations and results, all of the same dims.
A gather, a padding or a resampling to the nearest with a result of these dims
belongs to it, too, if a pointwise operation behind it reads that: the group then
has no reductions.
Reductions, norms and softmaxes of these dims belong to it too if all are along
the same axes; then results may also have one element for each line. A norm with
kernels of its own belongs to it if it is the only one. A tree of
pointwise operations of smaller dims, one of which the group reads, may be part of
it. Operations join a group as long as it is open: until an operation outside
reads one of its results, or overwrites what it reads. So all that reads its
results comes behind all of its operations, and it runs in the place of its last
one.

Pieces run in the order of their places: an operation's place is its number in
the graph, and a piece's that of its operation that is not pointwise, or of its
last operation. All that a piece reads has an earlier place.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from cudnn_actor.engines.cuda.operations.fused_norms import FUSED
from cudnn_actor.engines.cuda.planning.depthwise import is_depthwise
from cudnn_actor.engines.cuda.planning.empty_tensors import filled
from cudnn_actor.engines.cuda.planning.fusing import is_lined, lines_of_operation
from cudnn_actor.engines.cuda.planning.indexed_reads import is_indexed_read
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import (
    Attention,
    AttentionBackward,
    Concat,
    Convolution,
    GraphTensor,
    MatMul,
    Movement,
    Node,
    Pointwise,
    PointwiseMode,
    Reshape,
    TensorRole,
    Transpose,
)
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import packed_strides, settled_strides

__all__ = ["Cut", "Piece", "Stored", "cut"]

_LEAST_ALIGNMENT = 16
"""Bytes to which cuDNN wants addresses aligned."""
_MOST_OPERATIONS, _MOST_TENSORS = 64, 24
"""The most of a piece: larger kernels take long to compile, and do not fit into the registers."""
_MOST_LOOKED_AT = 64
"""Of the groups that read a tensor, how many are asked whether an operation that reads it may join them."""


class Stored(NamedTuple):
    """Where a tensor lies: in the memory of a tensor that is bound or between pieces, from this byte on."""

    root: int
    offset: int = 0


class Piece(NamedTuple):
    """A piece, and the tensor of the whole graph for each of its bound tensors, in its canonical order.

    `numbers`: those that its operations have in the whole graph.
    """

    graph: OperationGraph
    tensors: tuple[int, ...]
    numbers: tuple[int, ...]


class Cut(NamedTuple):
    """A graph's pieces in order, where each tensor lies that they use, and what is stored between them."""

    pieces: tuple[Piece, ...]
    stored: dict[int, Stored]
    between: tuple[GraphTensor, ...]


def cut(graph: OperationGraph) -> Cut | None:
    """The graph in pieces; None if it is a single piece.

    There are none for operations without elements in their results: see `empty_tensors`.
    """
    left = filled(graph)
    if left is not None:
        return _numbered(_Partition(left.graph).cut(), left.numbers) if left.graph else _NOTHING
    parts = _Partition(graph).cut()
    return None if len(parts.pieces[0].graph.operations) == len(graph.operations) else parts


_NOTHING = Cut((), {}, ())


def _numbered(parts: Cut, numbers: Sequence[int]) -> Cut:
    """Pieces whose operations have these numbers in the whole graph."""
    pieces = (
        piece._replace(numbers=tuple(numbers[number] for number in piece.numbers)) for piece in parts.pieces
    )
    return parts._replace(pieces=tuple(pieces))


class _Along(NamedTuple):
    """The axes of a group's lines, and the type of their sums; or the norm that has kernels of its own."""

    axes: tuple[int, ...] = ()
    compute: DType | None = None
    norm: int | None = None


@dataclass(eq=False)
class _Draft:
    """A piece that is being put together. `place`: see the module. `reads`: what its operations read."""

    place: int
    operations: dict[int, Node] = field(default_factory=dict, kw_only=True)
    reads: set[int] = field(default_factory=set, kw_only=True)


@dataclass(eq=False)
class _Anchored(_Draft):
    """An operation that is not pointwise, and what is behind it.

    `own`: whether there are kernels of our own for it, with any number of results.
    """

    anchor: Node
    own: bool = False


@dataclass(eq=False)
class _Group(_Draft):
    """`dims`: of its results. `along`: its lines, if it has any. `gathers`: whether it has gathers."""

    dims: tuple[int, ...]
    along: _Along | None = None
    gathers: bool = False

    @property
    def norm(self) -> int | None:
        """The number of its norm, if that has kernels of its own."""
        return None if self.along is None else self.along.norm

    def allows(self, along: _Along | None) -> bool:
        """Whether an operation along these lines may belong to it. None: one that has no lines."""
        return along is None or (not self.gathers and self.along in (None, along))

    def holds(self, dims: tuple[int, ...]) -> bool:
        """Whether its results may have these dims."""
        if dims == self.dims or self.along is None or self.norm is not None:
            return dims == self.dims
        return dims == tuple(1 if axis in self.along.axes else size for axis, size in enumerate(self.dims))


class _OpenGroups:
    """The groups that may grow, and which of them read each tensor."""

    def __init__(self) -> None:
        self._begun: dict[_Draft, int] = {}
        self._reading: defaultdict[int, dict[_Group, None]] = defaultdict(dict)
        self._count = 0

    def __contains__(self, draft: object) -> bool:
        return draft in self._begun

    def begun(self, group: _Group) -> int:
        """Its number among the groups, in the order in which they began."""
        return self._begun[group]

    def reading(self, uid: int) -> Iterator[_Group]:
        """Those that read a tensor, the last one that began to read it first."""
        return reversed(self._reading[uid]) if uid in self._reading else iter(())

    def add(self, group: _Group) -> None:
        """Add a group that reads nothing yet."""
        self._begun[group] = self._count
        self._count += 1

    def note_reads(self, draft: _Draft, uids: Iterable[int]) -> None:
        """Note what a piece reads, if it is an open group."""
        if isinstance(draft, _Group) and draft in self._begun:
            for uid in uids:
                self._reading[uid][draft] = None

    def close(self, group: _Group) -> None:
        """Have a group grow no more; nothing happens if it does not already."""
        if self._begun.pop(group, None) is not None:
            for uid in group.reads:
                self._reading[uid].pop(group, None)


def _writes(draft: _Draft, usual: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a piece can write a result with these strides, instead of the usual ones."""
    if isinstance(draft, _Group):
        return draft.norm is None
    rows = not strides or strides[-1] == usual[-1] == 1
    return rows and isinstance(draft, _Anchored) and isinstance(draft.anchor, _WRITE_ANYHOW)


class _Partition:
    def __init__(self, graph: OperationGraph) -> None:
        self._graph = graph
        self._readers: dict[int, int] = {}
        self._read_alike: set[int] = set()
        """What a pointwise operation with a result of the same dims reads."""
        for operation in graph.operations:
            for uid in set(operation.reads):
                self._readers[uid] = self._readers.get(uid, 0) + 1
            if isinstance(operation, Pointwise):
                dims = graph.tensor(operation.result).dims
                self._read_alike.update(uid for uid in operation.reads if graph.tensor(uid).dims == dims)
        self._drafts: dict[int, _Draft] = {}
        """Results → the piece that computes them; not for views."""
        self._places: dict[int, int] = {}
        """Views → the place of the piece that computes what they are views of."""
        self._forms: dict[int, GraphTensor] = {tensor.uid: tensor for tensor in graph.tensors}
        """Each tensor as it is stored."""
        self._concatenated = {
            uid
            for operation in graph.operations
            if isinstance(operation, Concat)
            for uid in operation.reads
            if self._readers[uid] == 1
        }
        """What nothing but one concatenation reads."""
        self._moved: dict[int, tuple[int, Movement[int]]] = {}
        """Movements, by their results, that are computed with the concatenation behind, and their places."""
        self._overwritten = {tensor.overwrites for tensor in graph.tensors} - {None}
        """Inputs whose memory a result overwrites: what is moved of them is copied, before that."""
        self._next = max(self._forms) + 1
        """The uid of the next tensor that is added."""
        self._viewed: set[int] = set()
        """Tensors that others are views of, or that lie where another one does: their form is settled."""
        self._stored: dict[int, Stored] = {uid: Stored(uid) for uid in graph.bound}
        self._pieces: dict[_Draft, None] = {}
        self._open = _OpenGroups()

    def cut(self) -> Cut:
        for place, operation in enumerate(self._graph.operations):
            along = self._lines(place, operation)
            if isinstance(operation, Pointwise) and self._updates(operation):
                continue
            if isinstance(operation, Pointwise) or along is not None:
                self._join(place, operation, along)
                continue
            for uid in operation.reads:
                self._store(uid)
            if self._is_read_fused(operation):
                group = _Group(place, self._graph.tensor(operation.writes[0]).dims, gathers=True)
                self._begin(group)
                self._add(group, place, operation)
            elif isinstance(operation, Concat):
                self._concatenate(place, operation)
            elif not (
                isinstance(operation, Movement)
                and (self._written_as(operation) or self._view(place, operation))
            ):
                self._alone(place, operation)
        ordered = sorted(self._pieces, key=lambda draft: draft.place)
        between = tuple(
            self._forms[uid]
            for uid, stored in self._stored.items()
            if stored.root == uid and self._graph.tensor(uid).role is TensorRole.VIRTUAL
        )
        return Cut(tuple(map(self._piece, ordered)), self._stored, between)

    def _alone(self, place: int, operation: Node) -> None:
        """Begin a piece with an operation that is not pointwise."""
        draft = _Anchored(place, operation, is_depthwise(operation, self._forms.__getitem__))
        self._begin(draft)
        for uid in dict.fromkeys(operation.reads):
            if uid in self._moved:
                self._add(draft, *self._moved[uid])
        self._add(draft, place, operation)

    def _is_read_fused(self, operation: Node) -> bool:
        """Whether a gather or the like is computed in one kernel with pointwise operations behind it.

        Not if something overwrites what it reads: the kernel would read it at other places than it writes.
        """
        result, *others = operation.writes
        if others or result not in self._read_alike or 0 in self._graph.tensor(result).dims:
            return False
        kept = self._overwritten.isdisjoint(operation.reads)
        x, y = self._graph.tensor(operation.reads[0]), self._graph.tensor(result)
        return kept and is_indexed_read(operation, x, y)

    def _begin(self, draft: _Draft) -> None:
        self._pieces[draft] = None
        if isinstance(draft, _Group):
            self._open.add(draft)

    def _add(self, draft: _Draft, place: int, operation: Node) -> None:
        """Add an operation to a piece. Groups that read what it overwrites stay before it."""
        draft.operations[place] = operation
        draft.reads.update(operation.reads)
        self._open.note_reads(draft, operation.reads)
        for written in operation.writes:
            overwritten = self._forms[written].overwrites
            for other in [] if overwritten is None else [*self._open.reading(overwritten)]:
                if other is not draft:
                    self._open.close(other)
        for uid in operation.writes:
            self._drafts[uid] = draft
            if uid not in self._readers:
                self._stored.setdefault(uid, Stored(uid))

    def _store(self, uid: int) -> None:
        """Have a value stored, since an operation outside of its piece reads it."""
        draft = self._drafts.get(uid)
        if draft is not None:
            self._stored.setdefault(uid, Stored(uid))
            if isinstance(draft, _Group):
                self._open.close(draft)

    def _lines(self, place: int, operation: Node) -> _Along | None:
        """The lines along which an operation of a group reduces or normalises; None if it is no such one."""
        if is_lined(self._graph, operation):
            _, axes, compute = lines_of_operation(self._graph, operation) or ((), (), None)
            return _Along(axes, compute)
        if type(operation) not in FUSED or 0 in self._graph.tensor(operation.reads[0]).dims:
            return None
        return _Along(norm=place)

    def _updates(self, operation: Pointwise[int]) -> bool:
        """Whether an operation only brings a norm's new statistic into the old one's place.

        Then have the norm write it there. Its kernels read each number before they write it.
        """
        result, (uid, *_) = self._graph.tensor(operation.result), operation.operands
        before, draft, form = result.overwrites, self._drafts.get(uid), self._forms[uid]
        if operation.mode is not PointwiseMode.IDENTITY or before is None:
            return False
        if not isinstance(draft, _Group) or draft.norm is None:
            return False
        named = dict(draft.operations[draft.norm].named())
        pair = {(named[f"new_{name}"], named[name]) for name in _RUNNING if f"new_{name}" in named}
        alone = self._readers[uid] == self._readers[before] == 1 and result.uid not in self._readers
        same = form.role is TensorRole.VIRTUAL and form.dtype is result.dtype
        if (uid, before) not in pair or not alone or not same:
            return False
        self._forms[uid] = msgspec.structs.replace(result, uid=uid, name=form.name)
        self._stored[uid] = Stored(result.uid)
        return True

    def _join(self, place: int, operation: Node, along: _Along | None) -> None:
        """Add an operation to the piece of its operand, or let it begin a group."""
        draft = self._host(operation) if isinstance(operation, Pointwise) else None
        draft = draft or self._group(place, operation, along)
        for uid in operation.reads:
            if self._drafts.get(uid) is not draft:
                self._store(uid)
        self._add(draft, place, operation)
        if isinstance(draft, _Group):
            draft.place, draft.along = place, draft.along or along

    def _host(self, operation: Pointwise[int]) -> _Draft | None:
        """The piece with an operation before it that can take it in: the last of those that can.

        What else the operation reads is part of the piece then if nothing else needs it.
        """
        result = self._graph.tensor(operation.result)
        drafts = {uid: self._drafts[uid] for uid in operation.reads if uid in self._drafts}
        inside = {
            uid: draft
            for uid, draft in drafts.items()
            if (isinstance(draft, _Anchored) and draft.own) or self._only_exit(uid, draft)
        }
        for uid in sorted(inside, key=lambda uid: -inside[uid].place):
            draft = inside[uid]
            if not isinstance(draft, _Anchored) or self._graph.tensor(uid).dims != result.dims:
                continue
            if not isinstance(draft.anchor, _WITH_EPILOGUE):
                continue
            if operation.mode in _SLOW_EPILOGUES and not draft.own:
                continue
            groups = {t: None for t in inside.values() if isinstance(t, _Group)}
            trees = [group for group in groups if group.along is None and not group.gathers]
            parts = [draft, *trees]
            computed = {other for part in parts for op in part.operations.values() for other in op.writes}
            read = {*operation.reads, *(other for tree in trees for other in tree.reads)} - computed
            if self._exceeds(operation, parts) or any(self._place_of(of) >= draft.place for of in read):
                continue
            if result.overwrites is not None and not self._reads_all(result.overwrites, operation, parts):
                continue
            for tree in trees:
                self._merge(tree, draft)
            return draft
        return None

    def _only_exit(self, uid: int, draft: _Draft) -> bool:
        """Whether a piece may grow, and a single operation outside will read one value of it: this one."""
        return (
            (isinstance(draft, _Anchored) or draft in self._open)
            and self._graph.tensor(uid).role is TensorRole.VIRTUAL
            and self._readers[uid] == 1
            and not self._results(draft.operations.values()) - {uid}
        )

    def _results(self, operations: Iterable[Node]) -> set[int]:
        """What operations of one piece compute that is bound, or that an operation outside may read."""
        inside: dict[int, int] = {}
        written: set[int] = set()
        for operation in operations:
            written.update(operation.writes)
            for uid in set(operation.reads):
                inside[uid] = inside.get(uid, 0) + 1
        return {
            uid for uid in written if uid in self._stored or inside.get(uid, 0) < self._readers.get(uid, 1)
        }

    def _exceeds(self, operation: Node, drafts: Iterable[_Draft]) -> bool:
        """Whether these pieces with an operation would be too large for one."""
        operations = [operation, *(op for draft in drafts for op in draft.operations.values())]
        computed = {uid for op in operations for uid in op.writes}
        given = {uid for op in operations for uid in op.reads} - computed
        tensors = sum(self._graph.tensor(uid).role is not TensorRole.CONSTANT for uid in given)
        tensors += len(self._results(operations))
        return len(operations) > _MOST_OPERATIONS or tensors > _MOST_TENSORS

    def _reads_all(self, uid: int, operation: Node, drafts: Sequence[_Draft]) -> bool:
        """Whether an operation and these pieces are all that reads a tensor."""
        operations = [operation, *(op for draft in drafts for op in draft.operations.values())]
        return sum(uid in op.reads for op in operations) == self._readers[uid]

    def _group(self, place: int, operation: Node, along: _Along | None) -> _Group:
        """The group that an operation joins: those of its operands as one, else one that reads the same."""
        dims = self._graph.tensor(operation.writes[0] if along is None else operation.reads[0]).dims
        read = {uid: self._drafts.get(uid) for uid in operation.reads}
        joined = [
            draft
            for uid, draft in read.items()
            if isinstance(draft, _Group) and draft in self._open and self._may_join(uid, draft, dims, along)
        ]
        lined = [draft for draft in joined if draft.along is not None]
        if lined:  # of those with other lines, the last
            last = max(lined, key=lambda draft: draft.place)
            lines, of = (last.along, last.dims) if along is None else (along, dims)
            joined = [
                draft for draft in joined if draft.allows(lines) and (draft.along is None or draft.dims == of)
            ]
        if not joined:
            joined = self._beside(operation, dims, along)
        joined = [*dict.fromkeys(joined)]
        if self._exceeds(operation, joined):
            joined = []
        host = next((draft for draft in joined if draft.along is not None and draft.holds(dims)), None)
        host = host or next((draft for draft in joined if draft.dims == dims), None)
        if host is None:
            host = _Group(place, dims)
            self._begin(host)
        for draft in joined:
            if draft is not host:
                self._merge(draft, host)
        return host

    def _beside(self, operation: Node, dims: tuple[int, ...], along: _Along | None) -> list[_Group]:
        """The last group, if there is one, that reads a value which the operation reads, of the same dims."""
        large = [uid for uid in dict.fromkeys(operation.reads) if self._graph.tensor(uid).dims == dims]
        groups = (
            group
            for uid in large
            for group in itertools.islice(self._open.reading(uid), _MOST_LOOKED_AT)
            if group.dims == dims and group.allows(along)
        )
        last = max(groups, key=self._open.begun, default=None)
        return [] if last is None else [last]

    def _may_join(self, uid: int, draft: _Group, dims: tuple[int, ...], along: _Along | None) -> bool:
        """Whether an operation of these dims may be computed with the group that computes its operand."""
        if along is not None and draft.dims != dims:
            return False  # a reduction of what is broadcast
        if not draft.allows(along):
            return False
        return draft.holds(dims) or (draft.along is None and self._only_exit(uid, draft))

    def _merge(self, draft: _Group, into: _Draft) -> None:
        into.operations |= draft.operations
        into.reads |= draft.reads
        self._open.note_reads(into, draft.reads)
        if isinstance(into, _Group):
            into.along = into.along or draft.along
            into.gathers |= draft.gathers
        for operation in draft.operations.values():
            self._drafts.update(dict.fromkeys(operation.writes, into))
        del self._pieces[draft]
        self._open.close(draft)

    def _place_of(self, uid: int) -> int:
        """The place of the piece that gives a value; -1 for one that is given."""
        draft = self._drafts.get(uid)
        return self._places.get(uid, -1) if draft is None else draft.place

    def _written_as(self, operation: Movement[int]) -> bool:
        """Whether the operand's piece can write the result in the operand's place; then have it do so.

        Of a transposed value that is not bound, the operand is only laid out as its reader wants it.
        """
        uid, result, form = operation.x, self._graph.tensor(operation.y), self._forms[operation.x]
        draft = self._drafts.get(uid)
        if draft is None or uid in self._viewed or self._stored[uid] != Stored(uid):
            return False
        bound = result.role is TensorRole.BOUND
        if (
            form.role is not TensorRole.VIRTUAL
            or result.dtype is not form.dtype
            or result.overwrites is not None
        ):
            return False
        if isinstance(operation, Transpose):
            steps = dict(zip(operation.axes, result.strides, strict=True))
            strides = tuple(steps[axis] for axis in range(len(form.dims)))
        elif isinstance(operation, Reshape) and bound and result.strides == packed_strides(result.dims):
            strides = packed_strides(form.dims)
        else:
            return False
        strides = settled_strides(form.dims, strides)
        if strides != settled_strides(form.dims, form.strides):
            # What others read as well, they may want as it is.
            attention = isinstance(draft, _Anchored) and isinstance(draft.anchor, Attention)
            if not _writes(draft, form.strides, strides) or (self._readers[uid] > 1 and not attention):
                return False
        self._forms[uid] = msgspec.structs.replace(form, strides=strides, alignment=result.alignment)
        if not bound:
            return False
        self._viewed.add(uid)
        self._stored[uid] = Stored(operation.y)
        self._places[operation.y] = draft.place
        return True

    def _concatenate(self, place: int, operation: Concat[int]) -> None:
        """Have the operands' pieces write to their parts of the result where they can; copy the others."""
        result, operands = self._forms[operation.y], operation.operands
        starts = operation.starts([self._forms[uid].dims for uid in operands])
        step = result.strides[operation.axis] * result.dtype.itemsize
        parts = [(uid, start * step) for uid, start in zip(operands, starts, strict=True)]
        times = Counter(operands)
        written = [
            times[uid] == 1 and self._may_be_written_into(uid, result, offset) for uid, offset in parts
        ]
        grouped = itertools.groupby(zip(written, parts, strict=True), lambda each: each[0])
        runs = [(into, [part for _, part in run]) for into, run in grouped]
        if not any(written) or any(run[0][1] % _LEAST_ALIGNMENT for _, run in runs):
            self._alone(place, operation)
            return
        self._stored.setdefault(result.uid, Stored(result.uid))
        self._viewed.add(result.uid)
        self._places[result.uid] = max(self._place_of(uid) for uid in operands)
        for into, run in runs:
            if into:
                for uid, offset in run:
                    self._lay_into(uid, result, offset)
            else:
                self._places[result.uid] = place
                self._copy_into(place, operation, [uid for uid, _ in run], run[0][1])

    def _may_be_written_into(self, uid: int, result: GraphTensor, offset: int) -> bool:
        """Whether the piece of an operand can write it to a part of a result."""
        draft, form = self._drafts.get(uid), self._forms[uid]
        if draft is None or uid in self._viewed or self._stored[uid] != Stored(uid):
            return False
        if form.role is not TensorRole.VIRTUAL or result.overwrites is not None or offset % _LEAST_ALIGNMENT:
            return False
        strides = settled_strides(form.dims, result.strides)
        if strides == settled_strides(form.dims, form.strides):
            return True
        return self._readers[uid] == 1 and _writes(draft, form.strides, strides)

    def _lay_into(self, uid: int, result: GraphTensor, offset: int) -> None:
        """Have a tensor lie in a part of another, which is stored."""
        form = self._forms[uid]
        strides = settled_strides(form.dims, result.strides)
        self._forms[uid] = msgspec.structs.replace(form, strides=strides, alignment=_LEAST_ALIGNMENT)
        self._viewed.add(uid)
        self._stored[uid] = Stored(result.uid, offset)

    def _copy_into(self, place: int, operation: Concat[int], operands: Sequence[int], offset: int) -> None:
        """Add a piece that copies neighbours among the operands to their part of the result."""
        uid, result = self._next, self._forms[operation.y]
        self._next += 1
        copies: Concat[int] = Concat(operands=tuple(operands), axis=operation.axis, y=uid)
        specs = {name: self._forms[read].spec for name, read in copies.named(copies.inputs)}
        dims = copies.infer(specs)["y"].dims
        self._forms[uid] = msgspec.structs.replace(result, uid=uid, dims=dims)
        self._lay_into(uid, result, offset)
        self._alone(place, copies)

    def _view(self, place: int, operation: Movement[int]) -> bool:
        """Whether a movement needs no kernel, for its result lies in its operand's memory; then note where.

        One that only a concatenation could read there becomes part of the concatenation's piece.
        """
        result, form = self._graph.tensor(operation.y), self._forms[operation.x]
        if result.role is not TensorRole.VIRTUAL or result.dtype is not form.dtype:
            return False
        placed = operation.view(form.dims, form.strides)
        if placed is None:
            return False
        root, offset = self._stored[operation.x]
        if root in self._overwritten:
            return False
        offset += placed.offset * form.dtype.itemsize
        if min(placed.strides, default=1) < 0 or offset % _LEAST_ALIGNMENT:
            if result.uid not in self._concatenated:
                return False
            self._viewed.add(operation.x)
            self._moved[result.uid] = place, operation
            self._places[result.uid] = self._place_of(operation.x)
            return True
        alignment = math.gcd(form.alignment, offset) if offset else form.alignment
        strides = settled_strides(result.dims, placed.strides)  # else a packed result would look strided
        self._forms[result.uid] = msgspec.structs.replace(
            result, strides=strides, alignment=max(alignment, _LEAST_ALIGNMENT)
        )
        self._viewed.add(operation.x)
        self._stored[result.uid] = Stored(root, offset)
        self._places[result.uid] = self._place_of(operation.x)
        return True

    def _piece(self, draft: _Draft) -> Piece:
        operations = tuple(draft.operations[place] for place in sorted(draft.operations))
        touched = dict.fromkeys(uid for op in operations for uid in (*op.reads, *op.writes))
        written = {uid for op in operations for uid in op.writes}
        tensors = []
        for uid in touched:
            tensor = self._forms[uid]
            if uid in self._stored:
                before = self._forms[uid].overwrites
                before = before if before in touched else None
                if before is not None and before in written:
                    before = None
                tensor = msgspec.structs.replace(tensor, role=TensorRole.BOUND, overwrites=before)
            tensors.append(tensor)
        piece = OperationGraph(tensors=tuple(tensors), operations=operations, numerics=self._graph.numerics)
        return Piece(piece, piece.bound, tuple(sorted(draft.operations)))


_WITH_EPILOGUE = (Convolution, MatMul)
"""Operations whose graphs of cuDNN's take pointwise operations behind them.

What stands before them has kernels of its own: with a scale and a relu before a convolution, plans of
cuDNN took as long as both kernels, or twice as long (9.19, H200, bfloat16, NHWC).
"""
_RUNNING = ("running_mean", "running_variance")
_WRITE_ANYHOW = (Attention, AttentionBackward, MatMul)
"""Operations that write rows of a result anywhere."""
_SLOW_EPILOGUES = frozenset({PointwiseMode.SIGMOID})
"""What takes longer in cuDNN's graph, behind a product or a convolution, than as a kernel behind it.

It took twice as long as both kernels. Of the others, erf and GELU took as long or a little longer, and all
others less (9.19, H200, bfloat16; `benchmarks.epilogues`).
"""
