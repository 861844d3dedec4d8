"""Rules that lay results of pieces into the memory of other tensors, so that they need no copy.

A rule returns a tensor's form in that memory, and perhaps its place there; None if a copy is needed. Whether
a value has its channels last is not decided here, but when a graph is built: `protocol.graphs.layouts`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from cudnn_actor.engines.cuda.planning.pieces import Anchored, Draft, Group, Stored, View
from cudnn_actor.protocol.operations import (
    Attention,
    AttentionBackward,
    Concat,
    GraphTensor,
    MatMul,
    Movement,
    Pointwise,
    PointwiseMode,
    Reshape,
    TensorRole,
    Transpose,
)
from cudnn_actor.protocol.types.tensor import packed_strides, settled_strides

__all__ = [
    "form_in_result",
    "form_over_statistic",
    "form_within",
    "runs_of",
    "view_of_operand",
]

_LEAST_ALIGNMENT = 16
"""Bytes to which cuDNN wants addresses aligned."""
_RUNNING = ("running_mean", "running_variance")
_WRITE_ROWS_ANYWHERE = (Attention, AttentionBackward, MatMul)
"""Operations that write the rows of a result at any places at which vectors of 16 bytes can be written."""


# A result of a norm.


def form_over_statistic(view: View, operation: Pointwise[int]) -> GraphTensor | None:
    """The form of a norm's new statistic over the old one, if the operation only stores it there.

    Then the norm writes it there itself: its kernels read each number before they write it.
    """
    uid, result = operation.operands[0], view.tensor(operation.result)
    if operation.mode is not PointwiseMode.IDENTITY or result.overwrites is None:
        return None
    piece, form = view.piece_of(uid), view.forms[uid]
    if not isinstance(piece, Group) or piece.norm is None:
        return None
    named = dict(piece.operations[piece.norm].named())
    pairs = {(named[f"new_{name}"], named[name]) for name in _RUNNING if f"new_{name}" in named}
    if (uid, result.overwrites) not in pairs or form.role is not TensorRole.VIRTUAL:
        return None
    readers = view.readers(uid), view.readers(result.overwrites), view.readers(result.uid)
    if readers != (1, 1, 0) or form.dtype is not result.dtype:
        return None
    return msgspec.structs.replace(result, uid=uid, name=form.name)


# Transposes and reshapes.


def form_in_result(view: View, operation: Movement[int]) -> GraphTensor | None:
    """The form of a movement's operand with which it lies in memory as the movement's result does."""
    form, result = view.forms[operation.x], view.tensor(operation.y)
    wanted = _strides_in_result(operation, form, result)
    if wanted is None or result.dtype is not form.dtype or result.overwrites is not None:
        return None
    strides = settled_strides(form.dims, wanted)
    piece = view.piece_of(operation.x)
    if piece is None or not view.is_movable(operation.x) or not _can_write(piece, form, strides):
        return None
    # Other operations that read the operand may want it as it is.
    attention = isinstance(piece, Anchored) and isinstance(piece.anchor, Attention)
    if not (attention or view.readers(operation.x) == 1 or _has_strides(form, strides)):
        return None
    return msgspec.structs.replace(form, strides=strides, alignment=result.alignment)


def _strides_in_result(
    operation: Movement[int], form: GraphTensor, result: GraphTensor
) -> tuple[int, ...] | None:
    """The strides with which an operand lies in memory as the result does; None if there are none."""
    if isinstance(operation, Transpose):
        steps = dict(zip(operation.axes, result.strides, strict=True))
        return tuple(steps[axis] for axis in range(len(form.dims)))
    packed = result.role is TensorRole.BOUND and result.strides == packed_strides(result.dims)
    return packed_strides(form.dims) if packed and isinstance(operation, Reshape) else None


def _can_write(piece: Draft, form: GraphTensor, strides: tuple[int, ...]) -> bool:
    """Whether a piece can write its result, now of this form, with other strides."""
    if _has_strides(form, strides):
        return True
    if isinstance(piece, Group):
        return piece.norm is None
    rows = not strides or strides[-1] == form.strides[-1] == 1
    if not rows or not isinstance(piece, Anchored) or not isinstance(piece.anchor, _WRITE_ROWS_ANYWHERE):
        return False
    return _has_vectors(form, strides) or not _has_vectors(form, form.strides)


def _has_vectors(form: GraphTensor, strides: tuple[int, ...]) -> bool:
    """Whether rows with these strides begin at places where kernels for tensor cores can write them."""
    others = [step for size, step in zip(form.dims[:-1], strides[:-1], strict=True) if size > 1]
    return not any(step * form.dtype.itemsize % _LEAST_ALIGNMENT for step in others)


def _has_strides(form: GraphTensor, strides: tuple[int, ...]) -> bool:
    return strides == settled_strides(form.dims, form.strides)


# Views.


class Seen(NamedTuple):
    """The result of a movement as a part of the operand's memory.

    `everywhere`: whether every operation can read it there, and not only a concatenation.
    """

    form: GraphTensor
    stored: Stored
    everywhere: bool


def view_of_operand(view: View, operation: Movement[int]) -> Seen | None:
    """The form and the place of a movement's result in the operand's memory; None if it needs a copy."""
    result, form = view.tensor(operation.y), view.forms[operation.x]
    if result.role is not TensorRole.VIRTUAL or result.dtype is not form.dtype:
        return None
    placed = operation.view(form.dims, form.strides)
    if placed is None:
        return None
    root, offset = view.stored[operation.x]
    if root in view.overwritten:
        return None
    offset += placed.offset * form.dtype.itemsize
    alignment = math.gcd(form.alignment, offset) if offset else form.alignment
    strides = settled_strides(result.dims, placed.strides)  # else a packed result would look strided
    seen = msgspec.structs.replace(result, strides=strides, alignment=max(alignment, _LEAST_ALIGNMENT))
    everywhere = min(placed.strides, default=1) >= 0 and offset % _LEAST_ALIGNMENT == 0
    return Seen(seen, Stored(root, offset), everywhere)


# Concatenations.


class Run(NamedTuple):
    """Neighbouring operands of a concatenation, and the byte of the result at which each begins.

    `written`: whether the operands' pieces write them there; if not, one kernel copies all of the run.
    """

    written: bool
    parts: Sequence[tuple[int, int]]


def runs_of(view: View, operation: Concat[int]) -> list[Run] | None:
    """The operands as runs; None if one kernel had better copy all of them."""
    result, operands = view.forms[operation.y], operation.operands
    starts = operation.starts([view.forms[uid].dims for uid in operands])
    step = result.strides[operation.axis] * result.dtype.itemsize
    parts = [(uid, start * step) for uid, start in zip(operands, starts, strict=True)]
    times = Counter(operands)

    def is_written(part: tuple[int, int]) -> bool:
        return times[part[0]] == 1 and _may_be_written_into(view, result, *part)

    runs = [Run(written, [*run]) for written, run in itertools.groupby(parts, is_written)]
    aligned = all(run.parts[0][1] % _LEAST_ALIGNMENT == 0 for run in runs)
    return runs if aligned and any(run.written for run in runs) else None


def form_within(form: GraphTensor, result: GraphTensor) -> GraphTensor:
    """A tensor as it is stored in a part of a result."""
    strides = settled_strides(form.dims, result.strides)
    return msgspec.structs.replace(form, strides=strides, alignment=_LEAST_ALIGNMENT)


def _may_be_written_into(view: View, result: GraphTensor, uid: int, offset: int) -> bool:
    """Whether the piece of an operand can write it to a part of a result."""
    piece, form = view.piece_of(uid), view.forms[uid]
    if piece is None or not view.is_movable(uid) or result.overwrites is not None:
        return False
    strides = settled_strides(form.dims, result.strides)
    alone = view.readers(uid) == 1 or _has_strides(form, strides)
    return alone and _can_write(piece, form, strides) and not offset % _LEAST_ALIGNMENT
