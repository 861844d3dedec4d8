"""The functions of a `GraphBuilder` that compute elements from their indices."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.expressions import Number, Tensor
from cudnn_actor.protocol.graphs.movement_functions import MovementFunctions
from cudnn_actor.protocol.operations import Cumulative, PointwiseMode, ReductionMode
from cudnn_actor.protocol.operations.base import axis_of
from cudnn_actor.protocol.types.checks import as_number, as_plain, is_whole
from cudnn_actor.protocol.types.dtypes import DType, DTypeLike
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["RangeFunctions"]

_M = PointwiseMode


class RangeFunctions(MovementFunctions):
    """Each function adds operations to the graph, and raises `InvalidRequest` if arguments do not fit."""

    def arange(
        self, start: Number, stop: Number | None = None, step: Number = 1, *, dtype: DTypeLike | None = None
    ) -> Tensor:
        """`start + n * step` for n = 0, 1, 2 and so on, before `stop`. With one number, from 0 up to it.

        Integers are exact; floats are computed in float64 and rounded once. Without a dtype, the result is
        int64, or float32 if an argument is a float.
        """
        start, stop = (0, start) if stop is None else (start, stop)
        start, stop, step = as_number("start", start), as_number("stop", stop), as_number("step", step)
        whole = all(is_whole(number) for number in (start, stop, step))
        own = DType.INT64 if whole else DType.FLOAT32
        kind = TensorSpec.packed((0,), own if dtype is None else dtype).dtype
        for name, number in (("start", start), ("stop", stop), ("step", step)):
            if not math.isfinite(number):
                raise InvalidRequest(
                    field=name, value=number, problem="is not finite", fix="give a finite number"
                )
        if step == 0:
            raise InvalidRequest(
                field="step", value=step, problem="must not be 0", fix="use 1 for neighbours"
            )
        steps = -((start - stop) // step) if whole else (stop - start) / step
        count = math.ceil(min(max(steps, 0), 2.0**63))
        for number in (start, start + (count - 1) * step) if count else ():
            _check_holds("stop", kind, number)
        places = self._places(count, "stop", stop)
        if kind.is_floating:
            by = self._constant("step", float(step), (1,), DType.FLOAT64)
            return self.astype(places * by + self._constant("start", float(start), (1,), DType.FLOAT64), kind)
        return self.astype(places * step + start, kind)

    def eye(
        self, rows: int, columns: int | None = None, k: int = 0, *, dtype: DTypeLike = DType.FLOAT32
    ) -> Tensor:
        """A matrix with 1 on the diagonal k places above the main one, else 0."""
        k, rows, columns = map(as_plain, (k, rows, columns))
        _check_diagonal(k)
        wide = rows if columns is None else columns
        _check_count("rows", rows)
        _check_count("columns", wide)
        down, along = self._grid(rows, wide)
        return self._convert(along - down == k, dtype, kept=False)

    def tril(self, x: Tensor, k: int = 0) -> Tensor:
        """The matrices in the last two dims, with 0 above the diagonal k places above the main one."""
        return self._triangle(x, k, lower=True)

    def triu(self, x: Tensor, k: int = 0) -> Tensor:
        """The matrices in the last two dims, with 0 below the diagonal k places above the main one."""
        return self._triangle(x, k, lower=False)

    def one_hot(
        self,
        indices: Tensor,
        depth: int,
        axis: int = -1,
        *,
        on: Number = 1,
        off: Number = 0,
        dtype: DTypeLike = DType.FLOAT32,
    ) -> Tensor:
        """`on` at each index along a new dim of size `depth`, else `off`: as ONNX's OneHot.

        Negative indices count from the end. If an index is out of range, all its elements are `off`.
        """
        self._own("indices", indices)
        kind = TensorSpec.packed((0,), dtype).dtype
        axis = axis_of("axis", axis, indices.rank + 1, "the result")
        depth = as_plain(depth)
        _check_count("depth", depth)
        if indices.dtype.is_floating:
            indices = self.pointwise(_M.TRUNC, indices)
        given = self.astype(indices, DType.INT64) if indices.dtype is not DType.INT64 else indices
        given = self.reshape(given, (*indices.dims[:axis], 1, *indices.dims[axis:]))
        along = [depth if n == axis else 1 for n in range(given.rank)]
        places = self.reshape(self._places(depth, "depth", depth), along)
        hot = self.pointwise(_M.LOGICAL_OR, given == places, given == places - depth)
        wide = kind if kind.is_floating else DType.INT64
        chosen = []
        for name, number in (("on", on), ("off", off)):
            _check_holds(name, kind, as_number(name, number, unsigned=kind is DType.UINT64))
            chosen.append(self._constant(name, number, (1,) * given.rank, wide))
        return self._convert(self.pointwise(_M.SELECT, hot, *chosen), kind, kept=False)

    def _triangle(self, x: Tensor, k: int, *, lower: bool) -> Tensor:
        self._own("x", x)
        k = as_plain(k)
        _check_diagonal(k)
        if x.rank < 2:
            raise InvalidRequest(
                field="x", value=x.dims, problem="is no matrix", fix="give it two dims, or more in front"
            )
        down, along = self._grid(*x.dims[-2:])
        inside = along - down <= k if lower else along - down >= k
        made = self.pointwise(_M.SELECT, inside, x, 0)
        return made if made.dtype is x.dtype else self._convert(made, x.dtype, kept=False)

    def _grid(self, rows: int, columns: int) -> Sequence[Tensor]:
        """The number of each row, dims (rows, 1), and of each column, dims (1, columns)."""
        down = self._places(rows, "rows", rows)
        along = down if rows == columns else self._places(columns, "columns", columns)
        return self.reshape(down, (rows, 1)), self.reshape(along, (1, columns))

    def _places(self, count: int, field: str, value: object) -> Tensor:
        """`count` numbers from 0, int64. `field` and `value`: the caller's argument, for errors."""
        try:
            ones = self.full((count,), 1, DType.INT64)
        except InvalidRequest as error:
            raise InvalidRequest(field=field, value=value, problem=error.problem, fix=error.fix) from None
        return self._result(Cumulative(x=ones, mode=ReductionMode.SUM, axis=0, exclusive=True))


def _check_count(field: str, count: object) -> None:
    if not is_whole(count) or count < 0:
        raise InvalidRequest(
            field=field,
            value=count,
            problem="must be a whole number ≥ 0",
            fix=f"pass an int, as in {field}=3",
        )


def _check_diagonal(k: object) -> None:
    if not is_whole(k):
        raise InvalidRequest(
            field="k", value=k, problem="must be a whole number", fix="use 0 for the main diagonal"
        )
    as_number("k", k)


def _check_holds(field: str, dtype: DType, value: Number) -> None:
    if not dtype.holds(value):
        raise InvalidRequest(
            field=field, value=value, problem=f"is no number of {dtype}", fix="use a wider dtype"
        )
