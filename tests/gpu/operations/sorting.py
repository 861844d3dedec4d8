"""The largest or smallest elements along a dim, and sorting."""

from __future__ import annotations

import math

from cudnn_actor.protocol import DType
from cudnn_actor.protocol.operations import Specs, TopK

from .rows import BARE, FLOATS, Asked, Exact, Made, Row, Sizes

__all__ = ["EXACTNESS", "ROWS"]

EXACTNESS = """\
Elements are moved as they are, bit for bit; the order of equal ones is defined.
"""

FEW, ALL, SMALLEST, UNORDERED = "few", "all", "smallest", "by place"


def _made(asked: Asked) -> Made:
    choose, rank = asked.choose, asked.rank
    axis = int(choose.rng.integers(rank))
    most = 700 if asked.form else choose.one((40, 300, 3_000))
    dims = [choose.size(4) for _ in range(rank)]
    match asked.sizes:
        case Sizes.ONE:
            dims = [1] * rank
        case Sizes.LONG:
            dims = [1 if n < rank - 3 else size for n, size in enumerate(dims)]
            dims[axis] = 9_000 + choose.size(6_000)
        case Sizes.TINY:
            dims[axis] = choose.size(8)
        case _:
            dims[axis] = most // 2 + choose.size(most // 2)
    size = dims[axis]
    k = size if asked.has(ALL, 0.2) else choose.size(size)
    attributes = {
        "k": min(k, 20) if asked.form == FEW else k,
        "axis": axis - rank if choose.chance(0.5) else axis,
        "largest": not asked.has(SMALLEST, 0.5),
        "in_order": not asked.has(UNORDERED, 0.2),
    }
    return Made({"x": tuple(dims)}, attributes)


def _exactly(_: TopK[str], __: Exact, ___: Specs) -> Exact:
    return {}


ROWS = (
    Row(
        TopK,
        (*FLOATS, DType.INT8, DType.INT32, DType.INT64, DType.UINT8, DType.UINT64, DType.BOOL),
        ranks=(2, 4),
        forms=(FEW, ALL, SMALLEST, UNORDERED, BARE),
        make=_made,
        bounds=_exactly,
        sampled=False,
        specials=(math.nan, math.inf, -math.inf, -0.0, 0.0),
        more_ranks=(1, 3, 6),
    ),
)
