"""Reductions over any dims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.folding import Finish, Fold, Folding, Select
from cudnn_actor.engines.cpu.fast.kernels import Call, Kernel, Operands, Step
from cudnn_actor.engines.cpu.fast.rounding import saturate
from cudnn_actor.engines.cpu.scratch import Scratch
from cudnn_actor.protocol.operations import Node, Reduction, ReductionMode
from cudnn_actor.protocol.operations.base import Specs
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["reduction"]

_Mode = ReductionMode
_Any = npt.NDArray[Any]


def reduction(node: Node, specs: Specs) -> Kernel | None:
    """A kernel of `Reduction`.

    None without elements, where no dim is reduced, and for float64 that is stored in another dtype and would
    be rounded twice, by way of float32, or whose largest element that dtype does not hold.
    """
    assert isinstance(node, Reduction)
    x, y = specs["x"], specs["y"]
    axes = node.reduced(x.rank)
    narrows = x.dtype is DType.FLOAT64 and (y.dtype.itemsize < 4 or node.mode is _Mode.LOG_SUM_EXP)
    if not x.size or not axes or (narrows and y.dtype is not DType.FLOAT64):
        return None
    wide = np.dtype(np.float32 if x.dtype.is_floating else np.int64)
    if x.dtype in (DType.FLOAT64, DType.UINT64):
        wide = x.dtype.numpy
    return _Reduction(node.mode, Folding(x.dims, axes, wide), node.keep_dims)


@dataclass(frozen=True)
class _Reduction:
    mode: ReductionMode
    folding: Folding
    keep_dims: bool

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs."""
        del lanes
        return self.folding.footprint()

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        x, y, folding = operands["x"], results["y"], self.folding
        if not self.keep_dims:
            y = y[tuple(None if axis in folding.axes else slice(None) for axis in range(x.ndim))]
        finish = _finish(self.mode, folding.length)
        if self.mode is _Mode.LOG_SUM_EXP:
            powers = Fold(change=partial(_powers, y))
            return [
                *folding.steps(Fold(np.maximum), x, y, lanes, _finite),
                *folding.steps(powers, x, y, lanes, finish),
            ]
        return folding.steps(_FOLDS.get(self.mode, Fold()), x, y, lanes, finish)


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


def _finish(mode: ReductionMode, length: int) -> Finish:
    """What stores the results of lines of so many elements."""

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
        np.copyto(y, total, casting="same_kind")

    return store


def _finite(total: _Any, y: _Any) -> None:
    """Store what is subtracted before powers are taken: 0 for infinity and NaN, which the sum then gives."""
    np.subtract(total, total, y)  # 0, or NaN
    np.add(total, y, total)
    np.fmax(total, 0, y)  # not NaN
    np.fmin(total, 0, total)
    np.add(y, total, y)
