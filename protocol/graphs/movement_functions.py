"""The functions of a `GraphBuilder` that move, convert and repeat elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import EllipsisType
from typing import Any, Literal

import numpy as np

from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.graphs.expressions import Number, Tensor
from cudnn_actor.protocol.graphs.graph_recorder import Recorder
from cudnn_actor.protocol.operations import (
    BitCast,
    BorderPad,
    Pad,
    PadMode,
    Pointwise,
    PointwiseMode,
    Reduction,
    ReductionMode,
    Reshape,
    Slice,
    Transpose,
)
from cudnn_actor.protocol.types.checks import as_index, as_number, as_plain, is_whole, require_choice
from cudnn_actor.protocol.types.dtypes import DType, DTypeLike
from cudnn_actor.protocol.types.tensor import LayoutLike, TensorSpec, settled_strides, whole_numbers

__all__ = ["MovementFunctions"]

_Index = int | slice | EllipsisType | None


class MovementFunctions(Recorder):
    """Each function adds operations to the graph. Raises `InvalidRequest` if operands do not fit together."""

    def reshape(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """x with other dims; one of them may be -1. Raises `InvalidRequest`."""
        self._own("x", x)
        wanted = list(whole_numbers("dims", dims))
        if wanted.count(-1) > 1:
            raise InvalidRequest(
                field="dims", value=tuple(wanted), problem="leave more than one size open", fix="use one -1"
            )
        if -1 in wanted:
            others = -math.prod(wanted)
            if others > 0 and math.prod(x.dims) % others == 0:
                wanted[wanted.index(-1)] = math.prod(x.dims) // others
        return self._result(Reshape(x=x, dims=tuple(wanted)))

    def transpose(self, x: Tensor, axes: Sequence[int] | None = None) -> Tensor:
        """x with its axes in another order; None reverses them. Raises `InvalidRequest`."""
        self._own("x", x)
        given = range(x.rank)[::-1] if axes is None else whole_numbers("axes", axes)
        order = [axis + x.rank if axis < 0 else axis for axis in given]
        return self._result(Transpose(x=x, axes=tuple(order)))

    def slice(self, x: Tensor, index: Any) -> Tensor:
        """`x[index]`, where `index` has whole numbers, slices, `...` and None. Raises `InvalidRequest`."""
        self._own("x", x)
        given: list[_Index] = [_part(one) for one in (index if isinstance(index, tuple) else (index,))]
        used = sum(one is not None and one is not Ellipsis for one in given)
        if used > x.rank:
            raise _no_index(index, f"has {used} parts, but x has {x.rank} dims", "use fewer")
        if given.count(Ellipsis) > 1:
            raise _no_index(index, "has more than one ...", "use one")
        if Ellipsis not in given:
            given.append(Ellipsis)
        picked: list[range] = []
        dims: list[int] = []
        for one in given:
            if one is None:
                dims.append(1)
                continue
            for _ in range(x.rank - used if one is Ellipsis else 1):
                axis = len(picked)
                picked.append(_pick(one, axis, x.dims[axis]))
                if not isinstance(one, int):
                    dims.append(len(picked[-1]))
        made = x
        if picked != [range(size) for size in x.dims]:
            starts, steps = tuple(one.start for one in picked), tuple(one.step for one in picked)
            made = self._result(Slice(x=x, starts=starts, steps=steps, sizes=tuple(map(len, picked))))
        return made if tuple(dims) == made.dims else self.reshape(made, dims)

    def pad(
        self,
        x: Tensor,
        widths: int | Sequence[Sequence[int]],
        value: Number = 0,
        *,
        mode: PadMode | Literal["constant", "edge", "reflect", "symmetric", "wrap"] = "constant",
    ) -> Tensor:
        """x with a number, or elements of its own, around it: see `Pad`, and `BorderPad` for the other modes.

        `widths`: elements before and after each axis, or one number for all. Raises `InvalidRequest`.
        """
        self._own("x", x)
        require_choice("mode", mode, ("constant", *PadMode))
        widths, value = as_plain(widths), as_plain(value)
        try:
            pairs = np.broadcast_to(widths, (x.rank, 2)) if is_whole(widths) else np.asarray(widths)
        except (ValueError, TypeError):
            pairs = np.empty(0)
        if pairs.shape != (x.rank, 2) or pairs.dtype.kind not in "iu":
            raise InvalidRequest(
                field="widths",
                value=widths,
                problem=f"must be a whole number, or a pair of them for each of the {x.rank} axes of x",
                fix="give (before, after) for each axis",
            )
        if not x.dtype.is_floating and is_whole(value) and abs(value) > 1 << 53:
            raise InvalidRequest(
                field="value",
                value=value,
                problem="is beyond 2**53, and what is around integers has to be exact in float64",
                fix="concatenate x with g.full(dims, value, x.dtype)",
            )
        before, after = (tuple(map(int, each)) for each in pairs.T)
        of: dict[str, Any] = {"x": x, "before": before, "after": after}
        if mode == "constant":
            return self._result(Pad(**of, steps=(1,) * x.rank, value=value), before="widths", after="widths")
        if value != 0:
            raise InvalidRequest(
                field="value",
                value=value,
                problem=f"is given, but mode {mode} pads with elements of x",
                fix="leave it out",
            )
        return self._result(BorderPad(**of, mode=PadMode(mode)), before="widths", after="widths")

    def astype(self, x: Tensor, dtype: DTypeLike) -> Tensor:
        """x rounded to another dtype. Integers saturate, and NaN becomes 0."""
        self._own("x", x)
        return self._convert(x, dtype, kept=True)

    def to_layout(self, x: Tensor, layout: LayoutLike) -> Tensor:
        """x with another order in memory, and the same values; x itself if it has that order.

        Results that are computed from a tensor with channels last have them last as well.
        """
        self._own("x", x)
        spec = TensorSpec.packed(x.dims, x.dtype, layout)
        if settled_strides(x.dims, spec.strides) == settled_strides(x.dims, x._entry.spec.strides):
            return x
        made = self._convert(x, x.dtype, kept=False)
        self._tensors[made.number] = made._entry._replace(spec=spec)
        return made

    def wrap(self, x: Tensor, dtype: DTypeLike) -> Tensor:
        """Integers in another integer dtype, which keeps their lowest bits: they do not saturate."""
        self._own("x", x)
        spec = TensorSpec.packed(x.dims, dtype)
        for name, given in (("x", x.dtype), ("dtype", spec.dtype)):
            if given.numpy.kind not in "iu":
                raise InvalidRequest(
                    field=name, value=Words(given), problem="is no dtype of integers", fix="use g.astype"
                )
        wide = x if x.dtype is DType.UINT64 else self._convert(x, DType.INT64, kept=True)
        made = self._result(Pointwise(mode=PointwiseMode.BITWISE_OR, operands=(wide, wide)))
        spec = TensorSpec.packed(x.dims, spec.dtype, made._entry.spec.layout)
        self._tensors[made.number] = made._entry._replace(spec=spec, kept=True)
        return made

    def bit_cast(self, x: Tensor, dtype: DTypeLike) -> Tensor:
        """The bits of x, read as another dtype of the same size: see `BitCast`."""
        self._own("x", x)
        wanted = TensorSpec.packed((), dtype).dtype
        return x if wanted is x.dtype else self._result(BitCast(x=x, source=x.dtype, dtype=wanted))

    # Broadcasting.

    def full(self, dims: Sequence[int], value: Number, dtype: DTypeLike = DType.FLOAT32) -> Tensor:
        """A tensor with one value in all elements."""
        wanted = TensorSpec.packed(dims, dtype)
        if isinstance(value, bool) and wanted.dtype is DType.BOOL:
            value = int(value)
        if not wanted.dtype.holds(as_number("value", value, unsigned=True)):
            raise InvalidRequest(
                field="value",
                value=value,
                problem=f"is no number of {wanted.dtype}",
                fix="choose one that it holds, or another dtype",
            )
        made = self._constant("value", value, wanted.dims, wanted.dtype)
        return self._convert(made, wanted.dtype, kept=False)

    def broadcast_to(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """x repeated along its dims of 1, and along new leading dims. Raises `InvalidRequest`."""
        self._own("x", x)
        wanted = TensorSpec.packed(dims, x.dtype).dims
        if x.dims == wanted:
            return x
        missing = len(wanted) - x.rank
        if missing < 0 or any(size not in (1, to) for size, to in zip(x.dims, wanted[missing:], strict=True)):
            raise InvalidRequest(
                field="dims",
                value=wanted,
                problem=f"cannot be reached from dims {x.dims}",
                fix="keep the last dims of x, but for those of 1",
            )
        made = self.pointwise(PointwiseMode.MUL, x, self._constant("x", 1, wanted, x.dtype))
        return made if made.dtype is x.dtype else self._convert(made, x.dtype, kept=False)

    def sum_to(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """The reverse of `broadcast_to`: the sum over the dims that are 1 in `dims`, or missing in front."""
        self._own("x", x)
        wanted = TensorSpec.packed(dims, x.dtype).dims
        missing = x.rank - len(wanted)
        kept = (1,) * missing + wanted
        if missing < 0 or any(to not in (1, size) for to, size in zip(kept, x.dims, strict=True)):
            raise InvalidRequest(
                field="dims",
                value=wanted,
                problem=f"are not what dims {x.dims} can be broadcast from",
                fix="use 1 for the dims to sum over, or leave leading ones out",
            )
        axes = tuple(axis for axis, (to, size) in enumerate(zip(kept, x.dims, strict=True)) if to != size)
        made = x
        if axes:
            made = self._result(Reduction(x=x, mode=ReductionMode.SUM, axes=axes, keep_dims=True))
        return made if made.dims == wanted else self.reshape(made, wanted)


def _part(index: Any) -> _Index:
    """A part of an index, with Python's whole numbers for NumPy's. Raises `InvalidRequest`."""
    try:
        if isinstance(index, slice):
            ends = (index.start, index.stop, index.step)
            return slice(*(end if end is None else as_index(end) for end in ends))
        if index is None or index is Ellipsis:
            return index
        return as_index(index)
    except TypeError:
        pass
    given = isinstance(index, Tensor | list | np.ndarray)
    fix = "use g.take(x, indices, axis), or g.where for a mask" if given else "select elements with those"
    raise _no_index(index, "is not a whole number, a slice of them, ... or None", fix)


def _pick(index: _Index, axis: int, size: int) -> range:
    """The elements of an axis that a part of an index selects. Raises `InvalidRequest` if out of range."""
    if isinstance(index, int):
        if not size:
            raise _no_index(
                index, f"names an element of axis {axis}, which has none", "use a slice, as in x[:]"
            )
        if not -size <= index < size:
            raise _no_index(
                index,
                f"is out of range for axis {axis}, of size {size}",
                f"use one from {-size} to {size - 1}",
            )
        return range(index % size, index % size + 1)
    if isinstance(index, slice) and index.step == 0:
        raise _no_index(index, "has a step of 0", "use 1 for neighbours")
    return range(size)[index if isinstance(index, slice) else slice(None)]


def _no_index(index: object, problem: str, fix: str) -> InvalidRequest:
    return InvalidRequest(field="index", value=index, problem=problem, fix=fix)
