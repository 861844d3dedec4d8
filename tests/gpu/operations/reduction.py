"""Reductions over any dims, places of the largest and smallest, running sums and products."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from cudnn_actor.engines.cpu.exact.evaluation import NumPy
from cudnn_actor.protocol import DType
from cudnn_actor.protocol.operations import ArgReduction, Cumulative, Reduction, ReductionMode, Specs
from cudnn_actor.protocol.operations.base import Array

from .rows import FLOATS, Asked, Dims, Exact, Made, Row, Sizes, walk_of

__all__ = ["EXACTNESS", "LONG", "ROWS", "dims_of_lines"]

EXACTNESS = """\
The smallest, the largest, their places, the largest magnitude and all results of integers are exact. With L
elements in a group, or in a running sum up to its end, w(n) = 4 √n, u the unit roundoff of the sums, m the
largest element and p an element's share in the sum of exponentials, a value may be off before it is rounded
by what follows. w(L) becomes L / 2, if that is more, where x has few different values, whose roundings do not
cancel.

| | bound |
| --- | --- |
| sum, L1 | w(L) u · sum of \\|x\\| |
| mean | (w(L) + 2) u · mean of \\|x\\| |
| product | L u · \\|y\\| |
| sum of squares | (w(L) + 1) u · y |
| L2 | (w(L) / 2 + 3) u · y |
| log-sum | (w(L) + 2) u + 2 u · \\|y\\| |
| log-sum-exp | (2 w(L) + sum of p \\|x - m\\| + 8) u + 2 u · \\|y - m\\| + u · \\|y\\| |
"""

INTEGERS = tuple(dtype for dtype in DType if not dtype.is_floating)
_Mode = ReductionMode
LAST, FIRST, INNER, ALL, LONG = "last dims", "first dims", "inner dims", "all dims", "long"
ALONG_LAST, ALONG_FIRST, BACKWARDS = "along the last dim", "along the first dim", "exclusive and in reverse"
_FACTORS = 64
"""A product has at most so many factors other than 1 and -1."""


def _reduce(asked: Asked) -> Made:
    choose, rank = asked.choose, asked.rank
    modes = [mode for mode in _Mode if asked.dtype.is_floating or mode.is_exact]
    if choose.chance(0.3):  # more of those in which a kernel may lose NaN
        modes = [mode for mode in modes if mode.selects]
    more = int(rank > 2 and choose.chance(0.5))
    some = [axis - rank * int(choose.chance(0.5)) for axis in range(rank) if choose.chance(0.5)]
    axes = {
        None: choose.one((None, tuple(some))),
        LAST: tuple(range(-1 - more, 0)),
        FIRST: tuple(range(1 + more)),
        INNER: tuple(range(1, max(2, rank - 1))),
        ALL: None,
        LONG: (rank - 1,),
    }[asked.form]
    attributes = {"mode": choose.one(modes), "axes": axes, "keep_dims": choose.chance(0.5)}
    return Made({"x": dims_of_lines(asked)}, attributes, _result(asked))


def _place(asked: Asked) -> Made:
    modes = (_Mode.MAX, _Mode.MIN)
    attributes = {
        "mode": asked.choose.one(modes),
        "axis": _axis(asked),
        "keep_dims": asked.choose.chance(0.5),
    }
    return Made({"x": dims_of_lines(asked)}, attributes)


def _scan(asked: Asked) -> Made:
    attributes = {
        "mode": asked.choose.one((_Mode.SUM, _Mode.PRODUCT)),
        "axis": _axis(asked),
        "exclusive": asked.has(BACKWARDS, 0.5),
        "reverse": asked.has(BACKWARDS, 0.5),
    }
    return Made({"x": dims_of_lines(asked)}, attributes, _result(asked))


def _result(asked: Asked) -> dict[str, DType]:
    """The dtype that the result has without being told, most of the time; or another of its kind."""
    if asked.choose.chance(0.6):
        return {}
    return {"y": asked.choose.one(FLOATS if asked.dtype.is_floating else INTEGERS)}


def _axis(asked: Asked) -> int:
    rank = asked.rank
    first = {ALONG_LAST: rank - 1, ALONG_FIRST: 0}.get(asked.form or "", int(asked.choose.rng.integers(rank)))
    return first - rank * int(asked.choose.chance(0.5))


def dims_of_lines(asked: Asked) -> Dims:
    """Dims of which one may be long, the last one in a cell."""
    choose, rank = asked.choose, asked.rank
    if asked.form is not None:
        last = choose.each(1, *((4097, 9001) if asked.form == LONG else (9, 70)))
        return (*choose.each(rank - 1, 1, 3 if asked.form == LONG else 8), *last)
    if not rank:
        return ()
    dims = list(_any_dims(asked))
    if asked.sizes is Sizes.LONG:
        dims[int(choose.rng.integers(rank))] = choose.size(40_000)
    return tuple(dims)


def _any_dims(asked: Asked) -> Dims:
    choose, rank = asked.choose, asked.rank
    match asked.sizes:
        case Sizes.ONE:
            return (1,) * rank
        case Sizes.TINY | Sizes.LONG:
            return choose.each(rank, 1, 4)
        case Sizes.VECTOR:
            return (*(choose.size(12) for _ in range(rank - 1)), 16 * choose.size(128))
        case _:
            return tuple(choose.size(300 if rank < 4 else 30) for _ in range(rank))


def _arrange(operation: Any, rng: np.random.Generator, values: Exact, specs: Specs) -> None:
    """Values of which there is a logarithm, or a product that neither overflows nor vanishes."""
    x = values["x"]
    if x.dtype.kind != "f":
        return
    if operation.mode is _Mode.LOG_SUM:
        values["x"] = np.abs(x) + 0.25
    elif operation.mode is _Mode.PRODUCT:
        few = rng.random(x.shape) < _FACTORS / max(1, x.size)
        factors = np.sign(x + 0.1) * np.exp2(np.where(few, np.clip(x, -1, 1) / 4, 0))
        values["x"] = np.where(np.isfinite(x), factors, x)


def _bounds(operation: Reduction[str], values: Exact, specs: Specs) -> Exact:
    mode, x = operation.mode, values["x"]
    if mode.selects or x.dtype.kind != "f":
        return {}
    length = math.prod(x.shape[axis] for axis in operation.reduced_dims(x.ndim))
    steps = walk_of(x, length)
    y = np.abs(_of(operation, _Mode.SUM if mode is _Mode.LOG_SUM else mode, x, specs))
    match mode:
        case _Mode.SUM | _Mode.L1:
            bound = steps * _of(operation, _Mode.L1, x, specs)
        case _Mode.MEAN:
            bound = (steps + 2) * _of(operation, _Mode.MEAN, np.abs(x), specs)
        case _Mode.PRODUCT:
            bound = length * y
        case _Mode.SUM_OF_SQUARES:
            bound = (steps + 1) * y
        case _Mode.L2:
            bound = (steps / 2 + 3) * y
        case _Mode.LOG_SUM:
            bound = steps + 2 + 2 * np.abs(np.log(y))
        case _:
            bound = _of_powers(operation, x, steps, specs)
    return {"y": bound}


def _of_powers(operation: Reduction[str], x: Array, steps: float, specs: Specs) -> Array:
    """A difference d is rounded once, or in parts that add up to it, and so changes its power by u |d|."""
    axes = operation.reduced_dims(x.ndim)
    y = _of(operation, _Mode.LOG_SUM_EXP, x, specs)
    top = x.max(axis=axes, keepdims=True) if x.size else x
    shares = np.exp(x - top)
    differences = np.where(shares > 0, shares * np.abs(x - top), 0).sum(axis=axes) / shares.sum(axis=axes)
    top = top.reshape(y.shape)
    return 2 * steps + differences.reshape(y.shape) + 8 + 2 * np.abs(y - top) + np.abs(y)


def _of(operation: Reduction[str], mode: ReductionMode, x: Array, specs: Specs) -> Array:
    return msgspec.structs.replace(operation, mode=mode).evaluate(NumPy(), {"x": x}, specs)["y"]


def _scan_bounds(operation: Cumulative[str], values: Exact, specs: Specs) -> Exact:
    """Of each running sum or product, by how many elements there are in it."""
    x = values["x"]
    if x.dtype.kind != "f":
        return {}
    length = x.shape[operation.axis]
    sums = operation.mode is _Mode.SUM
    magnitude = operation.evaluate(NumPy(), {"x": np.abs(x)}, specs)["y"]
    return {"y": (walk_of(x, length) if sums else length) * magnitude}


def _row(operation: Any, make: Any, forms: tuple[str, ...], bounds: Any, ranks: Dims = (3,)) -> Row:
    return Row(
        operation,
        (*FLOATS, DType.INT8, DType.INT32, DType.INT64, DType.UINT64, DType.BOOL),
        ranks=ranks,
        forms=forms,
        make=make,
        bounds=bounds,
        arrange=_arrange,
        sampled=False,
        specials=(math.nan, math.nan, math.inf, -math.inf),
        more_ranks=(0, 1, 3, 5, 8) if operation is Reduction else (1, 2, 6),
    )


ROWS = (
    _row(Reduction, _reduce, (LAST, FIRST, INNER, ALL, LONG), _bounds, ranks=(2, 4)),
    _row(ArgReduction, _place, (ALONG_LAST, ALONG_FIRST, LONG), lambda *_: {}),
    _row(Cumulative, _scan, (ALONG_LAST, ALONG_FIRST, BACKWARDS, LONG), _scan_bounds),
)
