"""Local response normalisation across channels, and its gradient."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.exact.evaluation import NumPy
from cudnn_actor.protocol.operations import LocalResponseNorm, LocalResponseNormBackward, Specs
from cudnn_actor.protocol.operations.base import Array

from .channel_norms import dims_of_channels
from .rows import FLOATS, Asked, Exact, Made, Row

__all__ = ["EXACTNESS", "ROWS"]

EXACTNESS = """\
With W channels in a window, u the unit roundoff of the sums, b the base of the power,
a = 2 · alpha · beta / size, t = dy x b ** (-beta - 1), k = beta (W + 6 + \\|log b\\|) + 14 and
l = k + 2 W + 8 + \\|log b\\|, a value may be off before it is rounded by what follows.

| | bound |
| --- | --- |
| y | k u · \\|y\\| |
| dx | k u · \\|dy\\| b ** -beta + a u \\|x\\| · sum of l \\|t\\| over the window |
"""

FEW, EVEN, ALL = "three channels", "four channels", "more channels than there are"
FORMS = (FEW, EVEN, ALL)


def _make(asked: Asked) -> Made:
    choose = asked.choose
    dims = dims_of_channels(asked)
    size = {FEW: 3, EVEN: 4, ALL: 40}.get(asked.form or "", choose.size(12))
    attributes = {
        "size": size,
        "alpha": choose.one((1e-4, 0.3, 1.0)),
        "beta": choose.one((0.75, 0.5, 1.0)),
        "bias": choose.one((1.0, 2.0, 0.5)),
    }
    return Made({"x": dims, "dy": dims}, attributes)


def _sums_in_windows(x: Array, before: int, after: int) -> Array:
    """The sum of each channel, `before` channels before it and `after` behind it."""
    channels = x.shape[1]
    sums = [x[:, max(0, n - before) : n + after + 1].sum(axis=1) for n in range(channels)]
    return np.stack(sums, axis=1) if sums else x


def _powers(operation: Any, values: Exact) -> tuple[Any, Any, int]:
    """The base of the power, the error of a power in terms of u, and the channels of a window."""
    x = values["x"]
    window = min(operation.size, x.shape[1])
    base = operation.bias + operation.alpha / operation.size * _sums_in_windows(x * x, *operation.reach)
    return base, operation.beta * (window + 6 + np.abs(np.log(base))) + 14, window


def _of_forward(operation: LocalResponseNorm[str], values: Exact, specs: Specs) -> Exact:
    _, error, _ = _powers(operation, values)
    return {"y": error * np.abs(operation.evaluate(NumPy(), values, specs)["y"])}


def _of_backward(operation: LocalResponseNormBackward[str], values: Exact, specs: Specs) -> Exact:
    base, error, window = _powers(operation, values)
    dy, x = np.abs(values["dy"]), np.abs(values["x"])
    shares = (error + 2 * window + 8 + np.abs(np.log(base))) * dy * x * base ** (-operation.beta - 1)
    after, before = operation.reach
    shared = _sums_in_windows(shares, before, after)
    factor = 2 * operation.alpha * operation.beta / operation.size
    return {"dx": error * dy * base**-operation.beta + factor * x * shared}


def _row(operation: Any, bounds: Any) -> Row:
    return Row(
        operation,
        FLOATS,
        ranks=(2, 4),
        forms=FORMS,
        make=_make,
        bounds=bounds,
        specials=(math.nan,),
        more_ranks=(3, 5, 6),
    )


ROWS = (_row(LocalResponseNorm, _of_forward), _row(LocalResponseNormBackward, _of_backward))
