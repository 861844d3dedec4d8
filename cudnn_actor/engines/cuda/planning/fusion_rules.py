"""Chooses the piece that an operation becomes part of, if it is pointwise, or reduces or normalises along
lines.

`RULES` are asked in turn, and the first that has an answer decides. Two of them have rules of their own: a
pointwise operation becomes an epilogue if all of `EPILOGUE_RULES` allow it, and part of the group that
computes an operand if one of `GROUP_RULES` does. So a new fusion is another function in one of the three,
with an example in `tests/engines/cuda/planning/test_fusion_rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from cudnn_actor.engines.cuda.planning.pieces import Anchored, Draft, Group, Lines, View
from cudnn_actor.protocol.operations import Convolution, MatMul, Node, Pointwise, PointwiseMode

__all__ = ["EPILOGUE_RULES", "GROUP_RULES", "RULES", "SLOW_EPILOGUES", "Candidate", "fusion_of"]

_WITH_EPILOGUE = (Convolution, MatMul)
"""Operations with which cuDNN's graphs take pointwise operations behind them.

Pointwise operations before them have kernels of their own: with a scale and a relu before a convolution,
plans of cuDNN took as long as both kernels, or twice as long (9.19, H200, bfloat16, NHWC).
"""
SLOW_EPILOGUES = frozenset({PointwiseMode.SIGMOID})
"""The modes that take longer in cuDNN's graph, behind a product or a convolution, than in a kernel behind it.

The sigmoid took twice as long as both kernels, erf and GELU as long or a little longer, and all other modes
less (9.19, H200, bfloat16; `benchmarks.epilogues`).
"""


class Candidate(NamedTuple):
    """An operation that is to become part of a piece; `lines` are None for a pointwise one.

    `dims`: the dims of its result, or of the tensor that it reduces along lines.
    """

    operation: Node
    dims: tuple[int, ...]
    lines: Lines | None = None


class Fusion(NamedTuple):
    """The piece that an operation becomes part of, and groups that become part of that piece, too.

    `into`: None if a new group begins.
    """

    into: Draft | None = None
    merged: Sequence[Group] = ()


Rule = Callable[[View, Candidate], Fusion | None]


def fusion_of(view: View, candidate: Candidate) -> Fusion:
    """The piece or group that an operation becomes part of; by default, a new group."""
    answers = (rule(view, candidate) for rule in RULES)
    return next((fusion for fusion in answers if fusion is not None), Fusion())


# Epilogues: pointwise operations behind a product or a convolution.


@dataclass(frozen=True)
class Epilogue:
    """A pointwise operation that reads an operand from an anchor's piece, of which it may become part."""

    view: View
    operation: Pointwise[int]
    operand: int
    piece: Anchored

    @cached_property
    def trees(self) -> Sequence[Group]:
        """The groups without lines that compute only other operands: they become part of the piece, too."""
        pieces = ((uid, self.view.piece_of(uid)) for uid in self.operation.reads)
        groups = {
            group.number: group
            for uid, group in pieces
            if isinstance(group, Group) and group.lines is None and not group.gathers
            if self.view.is_only_exit(uid, group)
        }
        return [*groups.values()]

    @property
    def parts(self) -> tuple[Draft, ...]:
        """The piece and `trees`."""
        return (self.piece, *self.trees)


def anchor_takes_epilogues(epilogue: Epilogue) -> bool:
    """The anchor is a product or a convolution."""
    return isinstance(epilogue.piece.anchor, _WITH_EPILOGUE)


def result_has_the_dims_of_the_operand(epilogue: Epilogue) -> bool:
    """The result has the dims of the operand that the piece computes."""
    tensor = epilogue.view.tensor
    return tensor(epilogue.operation.result).dims == tensor(epilogue.operand).dims


def function_is_fast_in_cudnn(epilogue: Epilogue) -> bool:
    """The function is faster in cuDNN's graph than behind it, or the piece has a kernel of our own."""
    return epilogue.piece.own or epilogue.operation.mode not in SLOW_EPILOGUES


def operand_is_read_by_nothing_else(epilogue: Epilogue) -> bool:
    """The operand is the piece's only result, or the piece's kernel is our own, which may have several."""
    return epilogue.piece.own or epilogue.view.is_only_exit(epilogue.operand, epilogue.piece)


def piece_stays_small(epilogue: Epilogue) -> bool:
    """With the operation, the piece has at most 64 operations and 24 tensors."""
    return not epilogue.view.exceeds(epilogue.operation, epilogue.parts)


def other_operands_are_computed_before(epilogue: Epilogue) -> bool:
    """All other operands of the operation and of the trees are computed before the piece."""
    computed = {uid for part in epilogue.parts for op in part.operations.values() for uid in op.writes}
    read = {*epilogue.operation.reads, *(uid for tree in epilogue.trees for uid in tree.reads)}
    return all(epilogue.view.place_of(uid) < epilogue.piece.place for uid in read - computed)


def overwritten_input_is_read_by_no_other_piece(epilogue: Epilogue) -> bool:
    """If the result is stored over an input, then no other piece reads that input."""
    before = epilogue.view.tensor(epilogue.operation.result).overwrites
    view, operation = epilogue.view, epilogue.operation
    return before is None or view.is_read_only_by(before, operation, epilogue.parts)


EPILOGUE_RULES: tuple[Callable[[Epilogue], bool], ...] = (
    anchor_takes_epilogues,
    result_has_the_dims_of_the_operand,
    function_is_fast_in_cudnn,
    operand_is_read_by_nothing_else,
    piece_stays_small,
    other_operands_are_computed_before,
    overwritten_input_is_read_by_no_other_piece,
)
"""The rules that must all hold; the cheap ones come first."""


def epilogue(view: View, candidate: Candidate) -> Fusion | None:
    """The latest piece with an anchor that takes a pointwise operation, and the trees that it needs."""
    operation = candidate.operation
    if not isinstance(operation, Pointwise):
        return None
    pieces = {uid: view.piece_of(uid) for uid in operation.reads}
    anchored = [(uid, piece) for uid, piece in pieces.items() if isinstance(piece, Anchored)]
    for uid, piece in sorted(anchored, key=lambda each: -each[1].place):
        each = Epilogue(view, operation, uid, piece)
        if all(rule(each) for rule in EPILOGUE_RULES):
            return Fusion(piece, each.trees)
    return None


# Groups.


class Link(NamedTuple):
    """An operation, and the open group that computes one of its operands."""

    view: View
    candidate: Candidate
    operand: int
    group: Group


def elementwise(link: Link) -> bool:
    """A pointwise operation whose result has the group's dims."""
    return link.candidate.lines is None and link.candidate.dims == link.group.dims


def one_for_each_line(link: Link) -> bool:
    """A pointwise operation whose result has one element for each of the group's lines."""
    return link.candidate.lines is None and link.candidate.dims == link.group.dims_per_line


def of_a_broadcast_tree(link: Link) -> bool:
    """A pointwise operation of other dims, if it alone reads the one result of a group without lines."""
    without_lines = link.candidate.lines is None and link.group.lines is None
    return without_lines and link.view.is_only_exit(link.operand, link.group)


def along_the_same_lines(link: Link) -> bool:
    """A reduction or a norm of the group's dims, along its lines, or the first of the group."""
    lines, dims = link.candidate.lines, link.candidate.dims
    return lines is not None and dims == link.group.dims and link.group.allows(lines)


GROUP_RULES: tuple[Callable[[Link], bool], ...] = (
    elementwise,
    one_for_each_line,
    of_a_broadcast_tree,
    along_the_same_lines,
)
"""Any of them lets an operation become part of the open group that computes an operand."""


def groups_of_the_operands(view: View, candidate: Candidate) -> Fusion | None:
    """The groups that compute operands, as one."""
    groups = {}
    for uid in candidate.operation.reads:
        group = view.piece_of(uid)
        if isinstance(group, Group) and view.is_open(group):
            link = Link(view, candidate, uid, group)
            if any(rule(link) for rule in GROUP_RULES):
                groups[group.number] = group
    return _join_groups(view, candidate, _of_common_lines(candidate, [*groups.values()]))


def group_that_reads_the_same(view: View, candidate: Candidate) -> Fusion | None:
    """The group that began last of those that read an operand of the operation; all have the same dims."""
    groups = (
        group
        for uid in dict.fromkeys(candidate.operation.reads)
        if view.tensor(uid).dims == candidate.dims
        for group in view.groups_reading(uid)
        if group.dims == candidate.dims and (candidate.lines is None or group.allows(candidate.lines))
    )
    last = max(groups, key=lambda group: group.number, default=None)
    return _join_groups(view, candidate, [] if last is None else [last])


def _of_common_lines(candidate: Candidate, groups: Sequence[Group]) -> Sequence[Group]:
    """The groups that can become one: those without lines, and those with the lines of the latest group."""
    lined = [group for group in groups if group.lines is not None]
    if not lined:
        return groups
    last = max(lined, key=lambda group: group.place)
    lines, dims = (last.lines, last.dims) if candidate.lines is None else (candidate.lines, candidate.dims)
    assert lines is not None
    return [group for group in groups if group.allows(lines) and (group.lines is None or group.dims == dims)]


def _join_groups(view: View, candidate: Candidate, groups: Sequence[Group]) -> Fusion | None:
    """The fusion of an operation with groups; None without groups. If it is too large, a group begins."""
    if not groups:
        return None
    if view.exceeds(candidate.operation, groups):
        return Fusion()
    dims = candidate.dims
    lined = (
        group for group in groups if group.lines is not None and dims in (group.dims, group.dims_per_line)
    )
    into = next(lined, None) or next((group for group in groups if group.dims == dims), None)
    return Fusion(into, [group for group in groups if group is not into])


RULES: tuple[Rule, ...] = (epilogue, groups_of_the_operands, group_that_reads_the_same)
"""The first that has an answer decides."""
