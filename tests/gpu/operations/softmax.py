"""Softmax and its logarithm along any dim, and their gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.exact.evaluation import NumPy
from cudnn_actor.protocol.operations import Softmax, SoftmaxBackward, Specs

from .pointwise import SUBNORMAL
from .reduction import LONG, dims_of_lines
from .rows import FLOATS, Asked, Exact, Made, Row, walk_of

__all__ = ["EXACTNESS", "ROWS"]

EXACTNESS = """\
With L elements in a sum, w(n) = 4 √n, u the unit roundoff of the sums, d an element's distance from the
largest, p its share in the sum, and e = 2 w(L) + sum of p d + 12, a value may be off before it is rounded by
what follows. w(L) becomes L / 2, if that is more, where an input has few different values, whose roundings do
not cancel. A result below 2^-126, float32's least normal number, may be 0.

| | bound |
| --- | --- |
| Softmax: y | (e + d) u · y |
| of the logarithm | (e + d + 3 \\|y\\|) u |
| SoftmaxBackward: dx | u · \\|y\\| · ((w(L) + 4) · sum of \\|dy y\\| + 3 \\|dy\\|) |
| of the logarithm | u · (exp(y) · (w(L) + 6 + \\|y\\|) · sum of \\|dy\\| + \\|dy\\|) |
"""

LAST, FIRST, INNER = "along the last dim", "along the first dim", "along an inner dim"
FORMS = (LAST, FIRST, INNER, LONG)


def _forward(asked: Asked) -> Made:
    return Made({"x": dims_of_lines(asked)}, _attributes(asked))


def _backward(asked: Asked) -> Made:
    dims = dims_of_lines(asked)
    return Made({"dy": dims, "y": dims}, _attributes(asked))


def _attributes(asked: Asked) -> dict[str, Any]:
    rank, choose = asked.rank, asked.choose
    places = {LAST: rank - 1, FIRST: 0, INNER: rank // 2 - (rank == 2), LONG: rank - 1}
    axis = places.get(asked.form or "", int(choose.rng.integers(rank)))
    return {"axis": axis - rank * int(choose.chance(0.5)), "log": choose.chance(0.5)}


def _of_forward(operation: Softmax[str], values: Exact, specs: Specs) -> Exact:
    x = values["x"]
    y = operation.evaluate(NumPy(), values, specs)["y"]
    shares = np.exp(y) if operation.log else y
    distance = np.abs(x - x.max(axis=operation.axis, keepdims=True, initial=-np.inf))
    differences = np.where(shares > 0, shares * distance, 0).sum(axis=operation.axis, keepdims=True)
    error = 2 * walk_of(x, x.shape[operation.axis]) + differences + 12 + distance
    if operation.log:
        return {"y": error + 3 * np.abs(y)}
    return {"y": np.where(y > 0, error * y + SUBNORMAL, 0)}


def _of_backward(operation: SoftmaxBackward[str], values: Exact, specs: Specs) -> Exact:
    dy, y = np.abs(values["dy"]), values["y"]
    steps = walk_of(dy, dy.shape[operation.axis])
    if operation.log:
        total = dy.sum(axis=operation.axis, keepdims=True)
        return {"dx": np.exp(y) * (steps + 6 + np.abs(y)) * total + dy}
    total = (dy * np.abs(y)).sum(axis=operation.axis, keepdims=True)
    return {"dx": np.abs(y) * ((steps + 4) * total + 3 * dy)}


def _softmax_of(operation: Any, rng: np.random.Generator, values: Exact, specs: Specs) -> None:
    """The result that a forward pass gives, most of the time; any other numbers are valid too."""
    if rng.random() < 0.8:
        forward: Any = Softmax(x="x", axis=operation.axis, log=operation.log)
        values["y"] = forward.evaluate(NumPy(), {"x": values["y"]}, specs)["y"]


def _row(operation: Any, make: Any, bounds: Any, arrange: Any = None) -> Row:
    return Row(
        operation,
        FLOATS,
        ranks=(2, 4),
        forms=FORMS,
        make=make,
        bounds=bounds,
        arrange=arrange,
        sampled=False,
        specials=(math.nan, math.nan, math.inf, -math.inf) if arrange is None else (math.nan,),
        more_ranks=(1, 3, 6, 8),
    )


ROWS = (_row(Softmax, _forward, _of_forward), _row(SoftmaxBackward, _backward, _of_backward, _softmax_of))
