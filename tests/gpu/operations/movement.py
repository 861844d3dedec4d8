"""Reshape, transpose, slice, pad and concat: the same elements in other places; and the same bits."""

from __future__ import annotations

import math
from typing import Any

from cudnn_actor.protocol import DType
from cudnn_actor.protocol.operations import (
    BitCast,
    BorderPad,
    Concat,
    Pad,
    PadMode,
    Reshape,
    Slice,
    Specs,
    Transpose,
)

from .rows import Asked, Exact, Made, Row, Sizes

__all__ = ["EXACTNESS", "ROWS"]

EXACTNESS = """\
Elements are moved as they are, bit for bit.
"""

MERGED, SPLIT, REVERSED, SPACED = "dims merged", "dims split", "in reverse", "with gaps"
FAR = "more than x has"
ANY, LAST = "along any dim", "along the last dim"
BITS = "any bits"


def _dims(asked: Asked) -> tuple[int, ...]:
    if asked.sizes is Sizes.LONG:
        return (*(asked.choose.size(3) for _ in range(asked.rank - 1)), asked.choose.size(90_000))
    return tuple(asked.choose.size(12 if asked.rank < 5 else 4) for _ in range(asked.rank))


def _reshape(asked: Asked) -> Made:
    dims = _dims(asked)
    if asked.has(SPLIT, 0.5):
        dims = (2 * dims[0], *dims[1:])
        return Made({"x": dims}, {"dims": (2, dims[0] // 2, *dims[1:])})
    merged = asked.choose.size(asked.rank) if asked.form is None else asked.rank // 2
    return Made({"x": dims}, {"dims": (math.prod(dims[: merged + 1]), *dims[merged + 1 :])})


def _transpose(asked: Asked) -> Made:
    order = range(asked.rank)[::-1] if asked.has(REVERSED, 0.3) else asked.choose.rng.permutation(asked.rank)
    return Made({"x": _dims(asked)}, {"axes": tuple(int(axis) for axis in order)})


def _slice(asked: Asked) -> Made:
    choose, dims = asked.choose, _dims(asked)
    starts, steps, sizes = [], [], []
    for dim in dims:
        step = choose.size(3) if asked.has(SPACED, 0.5) else 1
        size = choose.size(-(-dim // step))
        first = int(choose.rng.integers(dim - (size - 1) * step))
        reverse = asked.has(REVERSED, 0.3)
        starts.append(first + (size - 1) * step if reverse else first)
        steps.append(-step if reverse else step)
        sizes.append(size)
    return Made({"x": dims}, {"starts": tuple(starts), "steps": tuple(steps), "sizes": tuple(sizes)})


def _pad(asked: Asked) -> Made:
    choose, dims = asked.choose, _dims(asked)
    before, after = (tuple(choose.size(3) - 1 if choose.chance(0.5) else 0 for _ in dims) for _ in range(2))
    gaps = [choose.size(3) if asked.has(SPACED, 0.3) else 1 for _ in dims]
    steps = tuple(-gap if asked.has(REVERSED, 0.3) else gap for gap in gaps)
    value = float(choose.size(2) - 1)
    return Made({"x": dims}, {"before": before, "after": after, "steps": steps, "value": value})


def _border_pad(asked: Asked) -> Made:
    choose, dims = asked.choose, _dims(asked)
    most = 20 if asked.has(FAR, 0.1) else 3
    before, after = (tuple(choose.size(most) - 1 if choose.chance(0.5) else 0 for _ in dims) for _ in "ba")
    mode = next((mode for mode in PadMode if asked.form == mode), None) or choose.one(PadMode)
    return Made({"x": dims}, {"before": before, "after": after, "mode": mode})


def _concat(asked: Asked) -> Made:
    choose, dims = asked.choose, list(_dims(asked))
    axis = len(dims) - 1 if asked.has(LAST, 0.3) else int(choose.rng.integers(len(dims)))
    count = choose.one((1, 2, 2, 3, 9)) if asked.form is None else 3
    names = tuple(f"operands[{number}]" for number in range(count))
    sizes = [max(dims[axis] // count, 1), *(choose.size(9) for _ in names[1:])]
    made = {name: (*dims[:axis], size, *dims[axis + 1 :]) for name, size in zip(names, sizes, strict=True)}
    return Made(made, {"operands": names, "axis": axis - len(dims) if choose.chance(0.3) else axis})


def _bit_cast(asked: Asked) -> Made:
    size = asked.dtype.itemsize
    others = [d for d in DType if d.itemsize == size and d not in (asked.dtype, DType.BOOL)]
    return Made({"x": _dims(asked)}, {"source": asked.dtype, "dtype": asked.choose.one(others)})


def _exactly(_: Any, __: Exact, ___: Specs) -> Exact:
    return {}


def _row(operation: Any, make: Any, *forms: str) -> Row:
    return Row(
        operation,
        tuple(DType),
        ranks=(2, 4),
        forms=forms,
        make=make,
        bounds=_exactly,
        sampled=False,
        specials=(math.nan, math.inf, -math.inf),
        more_ranks=(1, 3, 6, 7),
    )


ROWS = (
    _row(Reshape, _reshape, MERGED, SPLIT),
    _row(Transpose, _transpose, REVERSED),
    _row(Slice, _slice, REVERSED, SPACED),
    _row(Pad, _pad, REVERSED, SPACED),
    _row(BorderPad, _border_pad, *PadMode, FAR),
    _row(Concat, _concat, ANY, LAST),
    _row(BitCast, _bit_cast, BITS),
)
