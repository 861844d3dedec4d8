"""Division rounded towards 0, and division rounded down."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from cudnn_actor.protocol.graphs.expressions import Tensor
from cudnn_actor.protocol.types.dtypes import DType

if TYPE_CHECKING:
    from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder

__all__ = ["divide_down", "divide_towards_zero"]

_WIDE = (DType.INT64, DType.UINT64)


def divide_towards_zero(g: GraphBuilder, a: Any, b: Any, dtype: DType) -> Tensor:
    """a / b of integers, rounded towards 0, in this dtype."""

    def divide(whole: Any, dtype: DType) -> Tensor:
        pair = (g.astype(x, DType.FLOAT64) if isinstance(x, Tensor) else float(x) for x in (whole, b))
        return g.astype(g.trunc(g.divide(*pair)), dtype)

    whole = g.subtract(a, g.fmod(a, b))
    if dtype not in _WIDE:
        return g.wrap(divide(whole, DType.INT64), dtype)
    first = divide(whole, dtype)  # float64 does not hold every int64: it may be a little off, up or down
    left = g.subtract(whole, g.multiply(first, b))
    left = left if left.dtype is DType.INT64 else g.wrap(left, DType.INT64)
    more = divide(left, DType.INT64)
    return g.add(first, more if dtype is DType.INT64 else g.wrap(more, dtype))


def divide_down(g: GraphBuilder, a: Any, b: Any) -> Tensor:
    """a / b rounded down, in the dtype of a % b."""
    left = g.mod(a, b)
    if left.dtype.is_floating:
        return _of_floats(g, a, b, left)
    # `divide_towards_zero` rounds towards 0. That is not down if the signs differ and there is a remainder.
    quotient = divide_towards_zero(g, a, b, left.dtype)
    if left.dtype.numpy.kind == "u":
        return quotient
    below = g.logical_and(g.not_equal(left, 0), g.less(g.bitwise_xor(a, b), 0))
    return g.subtract(quotient, below)


def _of_floats(g: GraphBuilder, a: Any, b: Any, left: Tensor) -> Tensor:
    """`divide_down` of floats, as NumPy computes it, also where b is 0 or infinite. `left`: a % b."""
    whole = g.round(g.divide(g.subtract(a, left), b))
    if not isinstance(b, Tensor):
        if b not in (0, math.inf, -math.inf):
            return whole
        b = g.full((), b, left.dtype)
    ratio = g.divide(a, b)
    of_infinite = g.subtract(
        g.multiply(ratio, 0), g.less(g.multiply(a, b), 0)
    )  # 0 or -1; NaN of two infinite
    return g.where(g.isinf(b), of_infinite, g.where(g.equal(b, 0), ratio, whole))
