"""Products of groups of rows: each with the matrix of its expert, and the gradients of those matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudnn_actor.protocol import DType
from cudnn_actor.protocol.operations import GroupedMatMul, GroupedMatMulBackwardWeights, Specs

from .rows import FLOATS, Asked, Exact, Made, Row, Sizes, walk_of_products

__all__ = ["EXACTNESS", "ROWS"]

EXACTNESS = """\
As for products of matrices; the sums of a gradient have as many products as its expert has rows, M at most.
"""

PLAIN, TRANSPOSED, ALIGNED, ONE = "plain", "transposed operands", "multiples of eight", "one expert"
MANY, WIDE, LONG = "more experts than rows", "wider result", "long sums"
FORMS = (PLAIN, TRANSPOSED, ALIGNED, ONE, MANY, WIDE, LONG)
_WIDER = {DType.FLOAT16: DType.FLOAT32, DType.BFLOAT16: DType.FLOAT32}


def _forward(asked: Asked) -> Made:
    rows, inner, columns, experts = _sizes(asked, "inner")
    dims = {"tokens": (rows, inner), "weights": (experts, inner, columns), "offsets": (experts,)}
    return _made(asked, dims, "y", {"tokens": (1, 0), "weights": (0, 2, 1)})


def _backward(asked: Asked) -> Made:
    rows, inner, columns, experts = _sizes(asked, "rows")
    dims = {"tokens": (rows, inner), "dy": (rows, columns), "offsets": (experts,)}
    return _made(asked, dims, "dweights", {"tokens": (1, 0), "dy": (1, 0)})


def _made(asked: Asked, dims: dict[str, Any], result: str, turned: dict[str, Any]) -> Made:
    choose, dtypes = asked.choose, {"offsets": DType.INT32}
    if asked.dtype in _WIDER and asked.has(WIDE, 0.3):
        dtypes[result] = _WIDER[asked.dtype]
    some = asked.has(TRANSPOSED, 0.3)
    orders = {n: order for n, order in turned.items() if some and (asked.form or choose.chance(0.6))}
    return Made(dims, {}, dtypes, orders)


def _sizes(asked: Asked, long: str) -> tuple[int, int, int, int]:
    """M, K, N and E. `long`: which of the first two a sum is over."""
    choose = asked.choose
    if asked.form is not None:
        rows, inner, columns, experts = (*choose.each(3, 20, 60), int(choose.rng.integers(3, 6)))
        match asked.form:
            case "multiples of eight":
                rows, inner, columns = rows + 150, inner // 8 * 8, columns // 8 * 32
            case "one expert":
                experts = 1
            case "more experts than rows":
                rows, experts = 9, 14
            case "long sums":
                many = int(choose.rng.integers(700, 1500))
                rows, inner = (many, inner) if long == "rows" else (rows, many)
        return rows, inner, columns, experts
    experts = 1 if choose.chance(0.2) else choose.size(12)
    match asked.sizes:
        case Sizes.ONE:
            return 1, 1, 1, 1
        case Sizes.TINY:
            rows, inner, columns = choose.each(3, 1, 4)
        case Sizes.VECTOR:
            rows, inner, columns = choose.size(300), *(8 * choose.size(12) for _ in range(2))
        case Sizes.LONG:
            rows, inner, columns, many = choose.size(20), choose.size(20), choose.size(4), choose.size(6_000)
            rows, inner = (many, inner) if long == "rows" else (rows, many)
        case _:
            rows, inner, columns = choose.size(600), choose.size(100), choose.size(100)
    return rows, inner, columns, experts


def _forward_bound(operation: GroupedMatMul[str], values: Exact, specs: Specs) -> Exact:
    walked = walk_of_products(values["tokens"].shape[1], specs["y"].dtype)
    return {"y": walked * _of_magnitudes(operation, values, specs)}


def _backward_bound(operation: GroupedMatMulBackwardWeights[str], values: Exact, specs: Specs) -> Exact:
    walked = walk_of_products(values["tokens"].shape[0], specs["dweights"].dtype)
    return {"dweights": walked * _of_magnitudes(operation, values, specs)}


def _of_magnitudes(operation: Any, values: Exact, specs: Specs) -> Any:
    """The sums of magnitudes. What is not finite has no error."""
    finite = {
        name: np.where(np.isfinite(value), np.abs(value), 0) if name != "offsets" else value
        for name, value in values.items()
    }
    (sums,) = operation.evaluate(np, finite, specs).values()
    return sums


def _malformed(operation: Any, rng: np.random.Generator, values: Exact, specs: Specs) -> None:
    """Offsets in any order, below 0 or beyond the rows: those have a meaning too."""
    del operation
    offsets, rows = values["offsets"], specs["tokens"].dims[0]
    if rng.random() < 0.3:
        rng.shuffle(offsets)
        wrong = rng.random(offsets.shape) < 0.3
        offsets[wrong] = rng.choice([-(2**31), -1, rows + 1, 2**31 - 1], int(wrong.sum()))


_SPECIALS = (np.nan, np.inf, -np.inf)
ROWS = (
    Row(
        GroupedMatMul,
        FLOATS,
        ranks=(2,),
        forms=FORMS,
        make=_forward,
        bounds=_forward_bound,
        arrange=_malformed,
        specials=_SPECIALS,
    ),
    Row(
        GroupedMatMulBackwardWeights,
        FLOATS,
        ranks=(2,),
        forms=FORMS,
        make=_backward,
        bounds=_backward_bound,
        arrange=_malformed,
        specials=_SPECIALS,
    ),
)
