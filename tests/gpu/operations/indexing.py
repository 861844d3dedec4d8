"""Gathers: elements at places that indices name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cudnn_actor.protocol import DType
from cudnn_actor.protocol.operations import Gather, GatherElements, GatherND, Specs

from .rows import Asked, Exact, Made, Row, Sizes

__all__ = ["EXACTNESS", "ROWS"]

EXACTNESS = """\
Elements are moved as they are, bit for bit.
"""

DTYPES = (DType.FLOAT64, DType.FLOAT32, DType.BFLOAT16, DType.INT8, DType.INT64, DType.BOOL)
"""Some of each size: elements are moved as bits."""
PLAIN, BATCHED, INT32 = "plain", "with batch dims", "int32 indices"


def _dims(asked: Asked) -> tuple[int, ...]:
    choose = asked.choose
    match asked.sizes:
        case Sizes.ONE:
            return (1,) * asked.rank
        case Sizes.LONG:
            return (*(choose.size(3) for _ in range(asked.rank - 1)), 3_000 + choose.size(7_000))
        case Sizes.VECTOR:
            return tuple(8 * choose.size(2) if n >= asked.rank - 2 else 2 for n in range(asked.rank))
        case _:
            return tuple(choose.size(9 if asked.rank < 5 else 3) for _ in range(asked.rank))


def _made(asked: Asked, x: tuple[int, ...], indices: tuple[int, ...], **attributes: int) -> Made:
    index = DType.INT32 if asked.has(INT32, 0.4) else DType.INT64
    return Made({"x": x, "indices": indices}, attributes, {"indices": index})


def _batch(asked: Asked, most: int) -> int:
    """How many first dims are in common."""
    if asked.form is None:
        return int(asked.choose.rng.integers(most + 1)) if asked.choose.chance(0.4) else 0
    return min(1, most) if asked.form == BATCHED else 0


def _gather(asked: Asked) -> Made:
    choose, x = asked.choose, _dims(asked)
    axis = int(choose.rng.integers(asked.rank))
    batch = _batch(asked, axis)
    more = min(int(choose.rng.integers(3)), 8 - asked.rank + 1)
    indices = (*x[:batch], *(choose.size(15) for _ in range(more)))
    negative = choose.chance(0.5) and asked.form is None
    return _made(asked, x, indices, axis=axis - asked.rank * negative, batch_dims=batch)


def _elements(asked: Asked) -> Made:
    choose, x = asked.choose, _dims(asked)
    axis = int(choose.rng.integers(asked.rank))
    smaller = choose.chance(0.4)
    dims = (choose.size(size) if smaller else size for size in x)
    indices = tuple(choose.size(9) if n == axis else size for n, size in enumerate(dims))
    return _made(asked, x, indices, axis=axis)


def _lists(asked: Asked) -> Made:
    choose, x = asked.choose, _dims(asked)
    batch = _batch(asked, asked.rank - 1)
    count = 1 + int(choose.rng.integers(asked.rank - batch))
    indices = (*x[:batch], *(choose.size(20) for _ in range(int(choose.rng.integers(3)))), count)
    return _made(asked, x, indices, batch_dims=batch)


def arrange(operation: Any, rng: np.random.Generator, values: Exact, specs: Specs) -> None:
    """Indices that count from the end, and some that are out of range: those have a meaning too."""
    del operation, specs
    indices = values["indices"]
    size = int(indices.max(initial=0)) + 1
    values["indices"] = np.where(rng.random(indices.shape) < 0.4, -1 - indices, indices)
    if rng.random() < 0.4:
        wrong = rng.random(indices.shape) < 0.4
        values["indices"][wrong] = rng.choice(
            [-(1 << 31), -size - 1, size, size + 7, (1 << 31) - 1], int(wrong.sum())
        )


def _exactly(_: Any, __: Exact, ___: Specs) -> Exact:
    return {}


def _row(operation: Any, make: Any, *forms: str) -> Row:
    return Row(
        operation,
        DTYPES,
        ranks=(2, 4),
        forms=forms,
        make=make,
        bounds=_exactly,
        arrange=arrange,
        specials=(math.nan, math.inf, -math.inf),
        more_ranks=(1, 3, 6),
    )


ROWS = (
    _row(Gather, _gather, PLAIN, BATCHED, INT32),
    _row(GatherElements, _elements, PLAIN, INT32),
    _row(GatherND, _lists, PLAIN, BATCHED, INT32),
)
