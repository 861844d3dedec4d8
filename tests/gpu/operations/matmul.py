"""Products of matrices, with batches of any rank that are broadcast in either operand."""

from __future__ import annotations

import numpy as np

from cudnn_actor.protocol import DType
from cudnn_actor.protocol.operations import MatMul, Specs

from .rows import FLOATS, Asked, Dims, Exact, Made, Row, Sizes, walk_of_products

__all__ = ["EXACTNESS", "ROWS"]

EXACTNESS = """\
With K products in each sum, w(n) = 4 √n, and u the unit roundoff of the sums, an element may be off by
w(K) u · (\\|a\\| @ \\|b\\|) before it is rounded. Products of integers are exact.
"""

PLAIN, TRANSPOSED, SHARED, UNEVEN = "plain", "transposed operands", "one b for all", "batches that differ"
WIDE, LONG = "wider result", "long sums"
FORMS = (PLAIN, TRANSPOSED, SHARED, UNEVEN, WIDE, LONG)
_WIDER = {DType.FLOAT16: DType.FLOAT32, DType.BFLOAT16: DType.FLOAT32}


def _product(asked: Asked) -> Made:
    choose = asked.choose
    m, n, k = _sizes(asked)
    of_a, of_b = _batches(asked)
    dtypes = {"y": _WIDER[asked.dtype]} if asked.dtype in _WIDER and asked.has(WIDE, 0.3) else {}
    orders = {}
    if asked.has(TRANSPOSED, 0.3):
        both = {"a": len(of_a), "b": len(of_b)}
        turned = both if asked.form else {name: both[name] for name in both if choose.chance(0.6)}
        orders = {name: (*range(rank), rank + 1, rank) for name, rank in turned.items()}
    return Made({"a": (*of_a, m, k), "b": (*of_b, k, n)}, {}, dtypes, orders)


def _batches(asked: Asked) -> tuple[Dims, Dims]:
    choose, rank = asked.choose, asked.rank - 2
    batch = choose.each(rank, 1, 4) if asked.sizes is not Sizes.ONE else (1,) * rank
    if asked.has(SHARED, 0.3):
        return batch, ()
    if not asked.has(UNEVEN, 0.4):
        return batch, batch
    # Some dims are 1, some are missing in b, and b may have more than a.
    first, second = (tuple(1 if choose.chance(0.4) else size for size in batch) for _ in range(2))
    more = choose.each(choose.one((0, 0, 1)), 1, 4) if rank < 5 else ()
    return first, choose.one(((*more, *second), second, second[1:]))


def _sizes(asked: Asked) -> tuple[int, int, int]:
    """M, N and K."""
    choose = asked.choose
    if asked.form is not None:
        m, n, k = choose.each(3, 5, 40)
        return m, n, int(choose.rng.integers(700, 1500)) if asked.form == LONG else k
    match asked.sizes:
        case Sizes.ONE:
            return 1, 1, 1
        case Sizes.TINY:
            m, n, k = choose.each(3, 1, 4)
        case Sizes.VECTOR:
            m, n, k = (8 * choose.size(20) for _ in range(3))
        case Sizes.LONG:
            m, n, k = choose.size(4), choose.size(4), choose.size(20_000)
        case _:
            m, n, k = (choose.size(200) for _ in range(3))
    return m, n, k


def _bounds(operation: MatMul[str], values: Exact, specs: Specs) -> Exact:
    """Of sums of any order. What is not finite has no error."""
    a, b = values["a"], values["b"]
    if a.dtype.kind != "f":
        return {}
    finite = (np.where(np.isfinite(operand), np.abs(operand), 0) for operand in (a, b))
    return {"y": walk_of_products(a.shape[-1], specs["y"].dtype) * np.matmul(*finite)}


ROWS = (
    Row(
        MatMul,
        (*FLOATS, DType.INT8, DType.UINT8),
        ranks=(2, 3, 4),
        forms=FORMS,
        make=_product,
        bounds=_bounds,
        specials=(np.nan, np.inf, -np.inf),
        more_ranks=(5, 8),
    ),
)
