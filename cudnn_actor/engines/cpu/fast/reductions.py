"""Reductions over any dims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.folding import Finish, Fold, Folding, Select
from cudnn_actor.engines.cpu.fast.kernels import Call, Kernel, Operands, Step, deal
from cudnn_actor.engines.cpu.fast.lines import Box, boxes_of_elements
from cudnn_actor.engines.cpu.fast.rounding import saturate
from cudnn_actor.engines.cpu.scratch import Scratch
from cudnn_actor.protocol.operations import Node, Reduction, ReductionMode
from cudnn_actor.protocol.operations.base import Specs
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["reduction"]

_Mode = ReductionMode
_Any = npt.NDArray[Any]
_BLOCK = 1 << 15
"""Elements that are stored together."""


def reduction(node: Node, specs: Specs) -> Kernel | None:
    """A kernel of `Reduction`; None without elements. Where no dim is reduced, each element is a line."""
    assert isinstance(node, Reduction)
    x, y = specs["x"], specs["y"]
    dims, axes, keep_dims = x.dims, node.reduced_dims(x.rank), node.keep_dims
    if not x.size:
        return None
    if not axes:
        dims, axes, keep_dims = (*dims, 1), (x.rank,), False
    wide = np.dtype(np.float32 if x.dtype.is_floating else np.int64)
    if x.dtype in (DType.FLOAT64, DType.UINT64):
        wide = x.dtype.numpy
    return _Reduction(node.mode, Folding(dims, axes, wide), keep_dims, y.dtype)


@dataclass(frozen=True)
class _Reduction:
    mode: ReductionMode
    folding: Folding
    keep_dims: bool
    dtype: DType
    """The dtype of y."""

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs."""
        del lanes
        return self.folding.footprint()

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        y, folding = results["y"], self.folding
        x = operands["x"] if operands["x"].ndim == len(folding.dims) else operands["x"][..., None]
        if not self.keep_dims:
            y = y[tuple(None if axis in folding.axes else slice(None) for axis in range(x.ndim))]
        narrow = _to_odd if folding.wide == np.float64 and self.dtype.is_half else _copy
        finish = _finish(self.mode, folding.length, narrow)
        if self.mode is not _Mode.LOG_SUM_EXP:
            return folding.steps(_FOLDS.get(self.mode, Fold()), x, y, lanes, finish)
        if y.dtype == folding.wide:
            return self._log_sum_exp(x, y, lanes, finish)
        # y does not hold the largest element, which is subtracted.
        wide = lanes[0].keep(y.shape, folding.wide)
        steps = self._log_sum_exp(x, wide, lanes, _finish(self.mode, folding.length, _copy))

        def store(box: Box, lane: int) -> Call:
            del lane
            at: Any = (*box, ...)  # without `...`, no dims would give a number
            return partial(narrow, wide[at], y[at])

        return [*steps, deal(boxes_of_elements(y.shape, _BLOCK), len(lanes), store)]

    def _log_sum_exp(self, x: _Any, y: _Any, lanes: Sequence[Scratch], finish: Finish) -> list[Step]:
        powers = Fold(change=partial(_powers, y))
        return [
            *self.folding.steps(Fold(np.maximum), x, y, lanes, _finite),
            *self.folding.steps(powers, x, y, lanes, finish),
        ]


def _magnitudes(part: _Any, into: _Any, select: Select) -> list[Call]:
    del select
    if part.dtype.kind != "i":
        return [partial(np.absolute, part, into)]
    # The least int64 has no magnitude: that of the next one is the largest.
    held = partial(np.maximum, part, -np.iinfo(part.dtype).max, out=into)
    return [held, partial(np.absolute, into, into)]


def _powers(largest: _Any, part: _Any, into: _Any, select: Select) -> list[Call]:
    apart = partial(np.subtract, part, select(largest), into, casting="same_kind")
    return [apart, partial(np.exp, into, into)]


_FOLDS = {
    _Mode.PRODUCT: Fold(np.multiply),
    _Mode.MIN: Fold(np.minimum),
    _Mode.MAX: Fold(np.maximum),
    _Mode.ABSOLUTE_MAX: Fold(np.maximum, change=_magnitudes),
    _Mode.L1: Fold(change=_magnitudes),
    _Mode.SUM_OF_SQUARES: Fold(squares=True),
    _Mode.L2: Fold(squares=True),
}
"""How lines are reduced in the modes that do not just add up elements."""


def _finish(mode: ReductionMode, length: int, narrow: Finish) -> Finish:
    """A function that stores the results of lines of `length` elements. `narrow`: stores floats."""

    def store(total: _Any, y: _Any) -> None:
        if total.dtype.kind != "f":
            saturate(total, y)
            return
        match mode:
            case _Mode.MEAN:
                np.divide(total, length, total)
            case _Mode.L2:
                np.sqrt(total, total)
            case _Mode.LOG_SUM:
                np.log(total, total)
            case _Mode.LOG_SUM_EXP:
                np.log(total, total)
                np.add(total, y, total, casting="same_kind")
        narrow(total, y)

    return store


def _copy(total: _Any, y: _Any) -> None:
    """Store floats, rounded to y's dtype."""
    np.copyto(y, total, casting="same_kind")


_BELOW_FLOAT32 = np.int64((1 << 29) - 1)
"""The bits of a float64 that float32 does not have."""


def _to_odd(total: _Any, y: _Any) -> None:
    """Store float64 as float32 that is rounded once more, to a half type, as if it were for the first time.

    What float32 does not hold is cut off, and the last bit is set if that was not 0: "rounding to odd", after
    which a second rounding to two digits less or more is right (Boldo and Melquiond, 2008). Numbers below
    2**-126, of which float32 has fewer digits, are rounded to nearest.
    """
    bits, spare = total.view(np.int64), y.view(np.int32)
    np.bitwise_and(bits, _BELOW_FLOAT32, out=spare, casting="same_kind")
    np.add(spare, np.int32(_BELOW_FLOAT32), out=spare)  # which carries, unless they were all 0
    np.bitwise_or(bits, spare, out=bits)
    np.bitwise_and(bits, ~_BELOW_FLOAT32, out=bits)
    _copy(total, y)


def _finite(total: _Any, y: _Any) -> None:
    """Store what is subtracted before powers are taken: 0 for infinity and NaN, which the sum then gives."""
    np.subtract(total, total, y)  # 0, or NaN
    np.add(total, y, total)
    np.fmax(total, 0, y)  # not NaN
    np.fmin(total, 0, total)
    np.add(y, total, y)
