"""Gathers and scatters: elements at places that indices name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from cudnn_actor.protocol import DType
from cudnn_actor.protocol.operations import (
    Gather,
    GatherElements,
    GatherND,
    Scatter,
    ScatterElements,
    ScatterND,
    ScatterReduction,
    Specs,
)

from .rows import Asked, Exact, Made, Row, Sizes

__all__ = ["EXACTNESS", "ROWS"]

EXACTNESS = """\
Elements are moved as they are, bit for bit. Of a scatter with a reduction, the smallest, the largest and all
results of integers are exact. A sum of n updates and an element of x may be off by (4 √(n + 1) + n / 2) · u
times the sum of magnitudes, a product by (n + 1) u · \\|y\\|.
"""

DTYPES = (DType.FLOAT64, DType.FLOAT32, DType.BFLOAT16, DType.INT8, DType.INT64, DType.BOOL)
"""Some of each size: elements are moved as bits."""
PLAIN, BATCHED, INT32 = "plain", "with batch dims", "int32 indices"
SUMS, PRODUCTS, SMALLEST = "sums", "products", "smallest"
_REDUCED = {
    SUMS: ScatterReduction.ADD,
    PRODUCTS: ScatterReduction.MUL,
    SMALLEST: ScatterReduction.MIN,
}
_FEW_FACTORS = 12


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


def _written(gathered: Callable[[Asked], Made], places: Any) -> Callable[[Asked], Made]:
    """The problem of a scatter, from that of a gather."""

    def make(asked: Asked) -> Made:
        made = gathered(asked)
        reduction = _REDUCED.get(asked.form or "", ScatterReduction.NONE)
        if asked.form is None:
            reduction = asked.choose.one(ScatterReduction)
        indices = made.dims["indices"]
        if reduction is ScatterReduction.MUL:  # of more, products leave the range of float32 on the way
            while math.prod(indices) > _FEW_FACTORS:
                made = gathered(asked)
                indices = made.dims["indices"]
        operation = places(x=0, indices=0, updates=0, **made.attributes)
        updates = operation.places(made.dims["x"], indices).dims
        attributes = {**made.attributes, "reduction": reduction}
        return Made({**made.dims, "updates": updates}, attributes, made.dtypes)

    return make


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


def _of_terms(operation: Any, values: Exact, specs: Specs) -> Exact:
    """The bound of sums and products."""
    reduction = operation.reduction
    if values["x"].dtype.kind != "f" or reduction not in (ScatterReduction.ADD, ScatterReduction.MUL):
        return {}
    sums = msgspec.structs.replace(operation, reduction=ScatterReduction.ADD)
    ones = {"x": np.zeros_like(values["x"]), "updates": np.ones_like(values["updates"])}
    (count,) = sums.evaluate(np, {**values, **ones}, specs).values()
    if reduction is ScatterReduction.MUL:
        (products,) = operation.evaluate(np, values, specs).values()
        return {"y": (count + 1) * np.abs(products)}
    finite = {n: np.where(np.isfinite(values[n]), np.abs(values[n]), 0) for n in ("x", "updates")}
    (magnitudes,) = sums.evaluate(np, {**values, **finite}, specs).values()
    return {"y": (4 * np.sqrt(count + 1) + count / 2) * (count > 0) * magnitudes}


def _writing(operation: Any, make: Callable[[Asked], Made], *forms: str) -> Row:
    row = _row(operation, _written(make, operation), *forms, SUMS, PRODUCTS, SMALLEST)
    return row._replace(bounds=_of_terms, varied=("x",))


ROWS = (
    _row(Gather, _gather, PLAIN, BATCHED, INT32),
    _row(GatherElements, _elements, PLAIN, INT32),
    _row(GatherND, _lists, PLAIN, BATCHED, INT32),
    _writing(Scatter, _gather, BATCHED),
    _writing(ScatterElements, _elements, INT32),
    _writing(ScatterND, _lists, PLAIN),
)
