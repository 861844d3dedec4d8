"""The functions of a `GraphBuilder` that move, convert and repeat elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import EllipsisType
from typing import Any, Literal

from cudnn_actor.protocol.checks import is_whole
from cudnn_actor.protocol.dtypes import DType, DTypeLike
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.expressions import Number, Tensor
from cudnn_actor.protocol.graph_recorder import Recorder
from cudnn_actor.protocol.operations import (
    BorderPad,
    Concat,
    Pad,
    PadMode,
    PointwiseMode,
    Reduction,
    ReductionMode,
    Reshape,
    Slice,
    Transpose,
)
from cudnn_actor.protocol.tensor import TensorSpec

__all__ = ["MovementFunctions"]

_Index = int | slice | EllipsisType | None


class MovementFunctions(Recorder):
    """Each adds operations to the graph, and raises `InvalidRequest` if its operands do not fit together."""

    def reshape(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """x with other dims; one of them may be -1. Raises `InvalidRequest`."""
        wanted = [int(dim) for dim in dims]
        if wanted.count(-1) == 1:
            others = -math.prod(wanted)
            if others > 0 and math.prod(x.dims) % others == 0:
                wanted[wanted.index(-1)] = math.prod(x.dims) // others
        return self._result(Reshape(x=x, dims=tuple(wanted)))

    def transpose(self, x: Tensor, axes: Sequence[int] | None = None) -> Tensor:
        """x with its axes in another order; None reverses them. Raises `InvalidRequest`."""
        order = range(x.rank)[::-1] if axes is None else [a + x.rank if a < 0 else a for a in axes]
        return self._result(Transpose(x=x, axes=tuple(order)))

    def slice(self, x: Tensor, index: Any) -> Tensor:
        """`x[index]`, of whole numbers, slices, `...` and None. Raises `InvalidRequest`."""
        given: list[_Index] = list(index) if isinstance(index, tuple) else [index]
        for one in given:
            if not (one is None or one is Ellipsis or isinstance(one, slice) or is_whole(one)):
                raise InvalidRequest(
                    field="index",
                    value=one,
                    problem="is not a whole number, a slice, ... or None",
                    fix="select elements with those",
                )
        used = sum(one is not None and one is not Ellipsis for one in given)
        if used > x.rank:
            raise InvalidRequest(
                field="index",
                value=used,
                problem=f"has more parts than x has dims: {x.rank}",
                fix="use fewer",
            )
        if given.count(Ellipsis) > 1:
            raise InvalidRequest(field="index", value=index, problem="has more than one ...", fix="use one")
        if Ellipsis not in given:
            given.append(Ellipsis)
        starts, steps, sizes, dims = [], [], [], []
        axis = 0
        for one in given:
            if one is None:
                dims.append(1)
                continue
            for _ in range(x.rank - used if one is Ellipsis else 1):
                size = x.dims[axis]
                if isinstance(one, int):
                    if not -size <= one < size:
                        raise InvalidRequest(
                            field="index",
                            value=one,
                            problem=f"is out of range for axis {axis}, of size {size}",
                            fix=f"use one from {-size} to {size - 1}",
                        )
                    picked = range(one % size, one % size + 1)
                else:
                    picked = range(size)[slice(None) if one is Ellipsis else one]
                    dims.append(len(picked))
                starts.append(picked.start)
                steps.append(picked.step)
                sizes.append(len(picked))
                axis += 1
        made = x
        if any(
            start or step != 1 or size != dim
            for start, step, size, dim in zip(starts, steps, sizes, x.dims, strict=True)
        ):
            made = self._result(Slice(x=x, starts=tuple(starts), steps=tuple(steps), sizes=tuple(sizes)))
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

        `widths`: before and after each axis, or one width for all. Negative ones take elements away, before
        anything is added. Raises `InvalidRequest`.
        """
        self._own("x", x)
        each = [(widths, widths)] * x.rank if isinstance(widths, int) else [tuple(pair) for pair in widths]
        if any(len(pair) != 2 for pair in each):
            raise InvalidRequest(
                field="widths",
                value=widths,
                problem="are not pairs",
                fix="give (before, after) for each axis",
            )
        if len(each) == x.rank and min((width for pair in each for width in pair), default=0) < 0:
            ends = zip(x.dims, each, strict=True)
            kept = (slice(max(-b, 0), max(size - max(-a, 0), 0)) for size, (b, a) in ends)
            x = self.slice(x, tuple(kept))
            each = [(max(before, 0), max(after, 0)) for before, after in each]
        before, after = tuple(pair[0] for pair in each), tuple(pair[1] for pair in each)
        if mode == "constant":
            steps = (1,) * x.rank
            return self._result(Pad(x=x, before=before, after=after, steps=steps, value=float(value)))
        if mode not in list(PadMode):
            raise InvalidRequest(
                field="mode", value=mode, problem="is no mode", fix=f"use constant, {', '.join(PadMode)}"
            )
        return self._result(BorderPad(x=x, before=before, after=after, mode=PadMode(mode)))

    def astype(self, x: Tensor, dtype: DTypeLike) -> Tensor:
        """x rounded to another type: integers saturate, and NaN becomes 0."""
        return self._converted(x, dtype, kept=True)

    # Broadcasting.

    def full(self, dims: Sequence[int], value: Number, dtype: DTypeLike = DType.FLOAT32) -> Tensor:
        """A tensor of one value."""
        wanted = TensorSpec.packed(dims, dtype)
        return self._converted(self._constant(value, wanted.dims, wanted.dtype), wanted.dtype, kept=False)

    def broadcast_to(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """x repeated along its dims of 1, and along new leading dims. Raises `InvalidRequest`."""
        self._own("x", x)
        wanted = tuple(dims)
        if x.dims == wanted:
            return x
        if x.dtype is DType.UINT64 and len(wanted) >= x.rank:  # no function is computed of that
            made = self._copied_to(x, wanted)
        else:
            made = self.pointwise(PointwiseMode.MUL, x, self._constant(1, wanted, x.dtype))
        if made.dims != wanted:
            raise InvalidRequest(
                field="dims",
                value=wanted,
                problem=f"cannot be reached from dims {x.dims}",
                fix="keep the last dims of x, but for those of 1",
            )
        return made if made.dtype is x.dtype else self._converted(made, x.dtype, kept=False)

    def _copied_to(self, x: Tensor, dims: tuple[int, ...]) -> Tensor:
        """As `broadcast_to`, without any arithmetic. What does not fit stays as it is."""
        made = self.reshape(x, (1,) * (len(dims) - x.rank) + x.dims) if len(dims) > x.rank else x
        for axis, (size, wanted) in enumerate(zip(made.dims, dims, strict=True)):
            if size != 1 or wanted == 1:
                continue
            double = made
            parts: list[Tensor] = []
            for digit in reversed(f"{wanted:b}"):  # as many copies as the number has binary digits
                parts += [double] if digit == "1" else []
                double = self._result(Concat(operands=(double, double), axis=axis))
            parts = parts or [self.slice(made, (*(slice(None),) * axis, slice(0)))]
            made = self._result(Concat(operands=tuple(parts), axis=axis))
        return made

    def sum_to(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """The reverse of `broadcast_to`: the sum over the dims that are 1 in `dims`, or missing in front."""
        self._own("x", x)
        wanted = tuple(dims)
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
