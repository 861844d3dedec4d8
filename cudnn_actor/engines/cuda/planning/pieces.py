"""The pieces into which a graph is being cut: what rules may ask about them, and how they grow.

Rules see a `View`, which has no methods that change anything, and pieces, which are immutable records: a
piece that grows becomes another record with the same number. Only `partition` has `Pieces`, which can change.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import GraphTensor, Movement, Node, TensorRole
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["Anchored", "Draft", "Group", "Lines", "Pieces", "Stored", "View"]

_MOST_OPERATIONS, _MOST_TENSORS = 64, 24
"""The most of a piece: larger kernels take long to compile, and do not fit into the registers."""
_MOST_LOOKED_AT = 64
"""The most groups that are looked at, of those that read a tensor."""


class Stored(NamedTuple):
    """The place of a tensor: the memory of a tensor that is bound or between pieces, from this byte on."""

    root: int
    offset: int = 0


class Lines(NamedTuple):
    """The axes of the lines along which a group reduces or normalises, and the dtype of its sums.

    Or the number of the norm that has kernels of its own: it shares its lines with no other operation.
    """

    axes: tuple[int, ...] = ()
    compute: DType | None = None
    norm: int | None = None


class Draft(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A piece so far: its operations by their numbers in the graph, and the uids that they read.

    `number`: the piece's, in the order in which pieces begin. `place`: see `partition`.
    """

    number: int
    place: int
    operations: Mapping[int, Node] = {}
    reads: frozenset[int] = frozenset()


class Anchored(Draft, frozen=True, eq=False, kw_only=True):
    """A piece of an operation that is not pointwise, its anchor, and the operations behind it.

    `own`: whether its kernels are our own, which may have any number of results.
    """

    anchor: Node
    own: bool


class Group(Draft, frozen=True, eq=False, kw_only=True):
    """A group: operations that one kernel of our own computes, with results of `dims`, along `lines` if any.

    `gathers`: whether gathers, paddings or resamplings are part of it.
    """

    dims: tuple[int, ...]
    lines: Lines | None = None
    gathers: bool = False

    @property
    def norm(self) -> int | None:
        """The number of its norm with kernels of its own; None if it has none."""
        return None if self.lines is None else self.lines.norm

    @property
    def dims_per_line(self) -> tuple[int, ...] | None:
        """The dims of a result with one element for each line; None if it can have none."""
        if self.lines is None or self.lines.norm is not None:
            return None
        return tuple(1 if axis in self.lines.axes else size for axis, size in enumerate(self.dims))

    def allows(self, lines: Lines) -> bool:
        """Whether an operation along these lines may be part of it."""
        return not self.gathers and self.lines in (None, lines)


D = TypeVar("D", bound=Draft)


class View:
    """A view of a graph, its pieces and the places of its tensors, for the rules to ask."""

    forms: Mapping[int, GraphTensor]
    """Each tensor as it is stored."""
    stored: Mapping[int, Stored]
    """The place of each tensor that is stored."""

    def __init__(self, graph: OperationGraph) -> None:
        self.tensor = graph.tensor
        self.overwritten = {tensor.overwrites for tensor in graph.tensors} - {None}
        """The inputs that a result overwrites. A movement of one of them copies it before, and is no view."""
        self._readers = dict(Counter(uid for op in graph.operations for uid in set(op.reads)))
        self._numbers: dict[int, int] = {}
        """The number of the piece that computes a tensor, by uid; views have none."""
        self._pieces: dict[int, Draft] = {}
        self._open: set[int] = set()
        """The numbers of the groups that may grow."""
        self._reading: defaultdict[int, dict[int, None]] = defaultdict(dict)
        """The numbers of the open groups that read a tensor, by uid, in the order in which they began to."""
        self._settled: set[int] = set()
        """The tensors that must not move: they have views, or lie in the memory of another tensor."""
        self._places: dict[int, int] = {}
        """The place of the piece that computes a view's tensor, by the view's uid."""

    def readers(self, uid: int) -> int:
        """How many operations read a tensor."""
        return self._readers.get(uid, 0)

    def piece_of(self, uid: int) -> Draft | None:
        """The piece that computes a tensor; None for an input, and for a view."""
        number = self._numbers.get(uid)
        return None if number is None else self._pieces[number]

    def place_of(self, uid: int) -> int:
        """The place of the piece that computes a tensor, or the tensor of a view; -1 for an input."""
        piece = self.piece_of(uid)
        return self._places.get(uid, -1) if piece is None else piece.place

    def is_open(self, piece: Draft) -> bool:
        """Whether operations may still become part of a piece."""
        return piece.number in self._open or isinstance(piece, Anchored)

    def groups_reading(self, uid: int) -> list[Group]:
        """Up to 64 open groups that read a tensor. The one that was the last to begin with it comes first."""
        numbers = itertools.islice(reversed(self._reading.get(uid, {})), _MOST_LOOKED_AT)
        return [group for number in numbers if isinstance(group := self._pieces[number], Group)]

    def is_only_exit(self, uid: int, piece: Draft) -> bool:
        """Whether a piece is open and `uid` is its only value that is read outside it, by one operation."""
        return (
            self.is_open(piece)
            and self.tensor(uid).role is TensorRole.VIRTUAL
            and self._readers[uid] == 1
            and not self._results(piece.operations.values()) - {uid}
        )

    def exceeds(self, operation: Node, pieces: Iterable[Draft]) -> bool:
        """Whether these pieces and an operation, as one piece, would exceed 64 operations or 24 tensors."""
        operations = _all_operations(operation, pieces)
        if sum(len(op.reads) + len(op.writes) for op in operations) <= _MOST_TENSORS:  # true for most pieces
            return False
        computed = {uid for op in operations for uid in op.writes}
        inputs = {uid for op in operations for uid in op.reads} - computed
        tensors = sum(self.tensor(uid).role is not TensorRole.CONSTANT for uid in inputs)
        tensors += len(self._results(operations))
        return len(operations) > _MOST_OPERATIONS or tensors > _MOST_TENSORS

    def is_read_only_by(self, uid: int, operation: Node, pieces: Iterable[Draft]) -> bool:
        """Whether nothing reads a tensor but an operation and these pieces."""
        return sum(uid in op.reads for op in _all_operations(operation, pieces)) == self._readers[uid]

    def is_movable(self, uid: int) -> bool:
        """Whether a stored tensor may lie elsewhere: it is neither an input nor bound, and has no views."""
        stored = self.piece_of(uid) is not None and self.stored[uid] == Stored(uid)
        return stored and uid not in self._settled and self.forms[uid].role is TensorRole.VIRTUAL

    def _results(self, operations: Iterable[Node]) -> set[int]:
        """The results of operations of one piece that are stored, or may be read outside the piece."""
        inside: dict[int, int] = {}
        written: set[int] = set()
        for operation in operations:
            written.update(operation.writes)
            for uid in set(operation.reads):
                inside[uid] = inside.get(uid, 0) + 1
        of, stored = self._readers, self.stored
        return {uid for uid in written if uid in stored or inside.get(uid, 0) < of.get(uid, 1)}


def _all_operations(operation: Node, pieces: Iterable[Draft]) -> list[Node]:
    return [operation, *(op for piece in pieces for op in piece.operations.values())]


class Pieces(View):
    """The view with the methods by which `partition` changes it."""

    forms: dict[int, GraphTensor]
    stored: dict[int, Stored]

    def __init__(self, graph: OperationGraph) -> None:
        super().__init__(graph)
        self.forms = {tensor.uid: tensor for tensor in graph.tensors}
        self.stored = {uid: Stored(uid) for uid in graph.bound}
        self._begun = itertools.count()
        self._moved: dict[int, tuple[int, Movement[int]]] = {}
        """The movements that the concatenation behind them computes, with their numbers, by their results."""

    def in_order(self) -> list[Draft]:
        """The pieces in the order in which they run."""
        return sorted(self._pieces.values(), key=lambda piece: piece.place)

    def begin_group(self, place: int, dims: tuple[int, ...], *, gathers: bool = False) -> Group:
        """Begin a group without operations."""
        group = Group(number=next(self._begun), place=place, dims=dims, gathers=gathers)
        self._open.add(group.number)
        return self._keep(group)

    def add_alone(self, number: int, operation: Node, *, own: bool) -> None:
        """Add a piece with an operation that is not pointwise, and the movements that it computes as well."""
        moved = dict(self._moved[uid] for uid in operation.reads if uid in self._moved)
        self._add_anchored(number, {**moved, number: operation}, own=own)

    def add_together(self, number: int, operations: Sequence[Node]) -> None:
        """Add a piece with operations that follow each other, by the number of the first one, its anchor."""
        self._add_anchored(number, dict(enumerate(operations, number)), own=False)

    def _add_anchored(self, number: int, operations: Mapping[int, Node], *, own: bool) -> None:
        """Add a piece in the place of its anchor, which has this number among its operations."""
        piece = Anchored(
            number=next(self._begun),
            place=number,
            operations=operations,
            reads=frozenset().union(*(each.reads for each in operations.values())),
            anchor=operations[number],
            own=own,
        )
        self._keep(piece)
        for each in operations.values():
            self._note_writes(piece, each)

    def add(self, piece: D, number: int, operation: Node, lines: Lines | None = None) -> D:
        """Add an operation to a piece, and its lines to a group that has none."""
        piece = self._grow(piece, {number: operation}, operation.reads)
        if isinstance(piece, Group):
            piece = self._keep(msgspec.structs.replace(piece, place=number, lines=piece.lines or lines))
        self._note_writes(piece, operation)
        return piece

    def merge(self, piece: Group, into: D) -> D:
        """Add the operations of a group to another piece, which is returned."""
        self._close(piece.number)
        del self._pieces[piece.number]
        for operation in piece.operations.values():
            self._numbers.update(dict.fromkeys(operation.writes, into.number))
        into = self._grow(into, piece.operations, piece.reads)
        if isinstance(into, Group):
            gathers = into.gathers or piece.gathers
            changed = msgspec.structs.replace(into, lines=into.lines or piece.lines, gathers=gathers)
            into = self._keep(changed)
        return into

    def store(self, uid: int) -> None:
        """Store a value, since an operation outside of its piece reads it."""
        piece = self.piece_of(uid)
        if piece is not None:
            self.stored.setdefault(uid, Stored(uid))
            self._close(piece.number)

    def leave_out(self, uid: int) -> None:
        """Do not store a result that is not bound and that no operation reads."""
        if uid not in self._readers and self.forms[uid].role is TensorRole.VIRTUAL:
            self.stored.pop(uid, None)

    def lay_into(self, form: GraphTensor, stored: Stored) -> None:
        """Make a piece store its result in this form, in the memory of another tensor."""
        self.forms[form.uid], self.stored[form.uid] = form, stored
        self._settled.add(form.uid)

    def add_view(self, form: GraphTensor, of: int, stored: Stored) -> None:
        """Make a tensor a view: this part of the memory of another one."""
        self.forms[form.uid], self.stored[form.uid] = form, stored
        self._settled.add(of)
        self._places[form.uid] = self.place_of(of)

    def add_moved(self, number: int, operation: Movement[int]) -> None:
        """Let the concatenation that reads a movement's result compute it."""
        self._moved[operation.y] = number, operation
        self._settled.add(operation.x)
        self._places[operation.y] = self.place_of(operation.x)

    def add_joint(self, uid: int, place: int) -> None:
        """Store a tensor of which several pieces write parts. `place`: the place of the last such piece."""
        self.stored.setdefault(uid, Stored(uid))
        self._settled.add(uid)
        self._places[uid] = place

    def _grow(self, piece: D, operations: Mapping[int, Node], reads: Iterable[int]) -> D:
        if piece.number in self._open:
            for uid in reads:
                self._reading[uid][piece.number] = None
        both = {**piece.operations, **operations}
        return self._keep(msgspec.structs.replace(piece, operations=both, reads=piece.reads.union(reads)))

    def _keep(self, piece: D) -> D:
        self._pieces[piece.number] = piece
        return piece

    def _note_writes(self, piece: Draft, operation: Node) -> None:
        """Note that a piece computes an operation's results, and store those that nothing reads.

        Other groups that read a tensor which a result overwrites must run before, so they grow no more.
        """
        for uid in operation.writes:
            self._numbers[uid] = piece.number
            if uid not in self._readers:
                self.stored.setdefault(uid, Stored(uid))
            overwritten = self.forms[uid].overwrites
            if overwritten is not None:
                for other in {*self._reading.get(overwritten, ())} - {piece.number}:
                    self._close(other)

    def _close(self, number: int) -> None:
        """Close a group, so that it grows no more. Nothing happens if it is closed."""
        if number in self._open:
            self._open.remove(number)
            for uid in self._pieces[number].reads:
                self._reading[uid].pop(number, None)
