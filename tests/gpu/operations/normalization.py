"""Layer norms and RMS norms, over the last dims of tensors of any rank."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.exact.evaluation import NumPy
from cudnn_actor.protocol import DType
from cudnn_actor.protocol.operations import (
    LayerNorm,
    LayerNormBackward,
    RMSNorm,
    RMSNormBackward,
    Specs,
)
from cudnn_actor.protocol.operations.base import Array

from .rows import BARE, FLOATS, Asked, Dims, Exact, Made, Row, Sizes, Values, walk, walk_of

__all__ = ["EXACTNESS", "ROWS", "of_squares"]

EXACTNESS = """\
With L elements in a row, R rows, w(n) = 4 √n, u the unit roundoff of the sums, i the inverse deviation (or
inverse RMS), n the normalised element and s = dy · scale, a value may be off before it is rounded by what
follows. p and q are w(L), but L / 2 and L / 4 if that is more and x has few different values: their sums, and
those of their squares, round in one direction.

| | bound |
| --- | --- |
| mean | d = (p + 1) u · mean of \\|x\\| |
| inverse deviation | e · i, with e = (q / 2 + w(L) \\|mean\\| i / 2 + 6) u + (d i)² / 2 |
| LayerNorm: y | i \\|scale\\| · (d + (\\|x - mean\\| + d) (e + 5 u)) + 2 u \\|bias\\| |
| inverse RMS | (q / 2 + 6) u · i |
| RMSNorm: y | (q / 2 + 9) u · \\|y\\| |
| dx | (w(L) + 10) u · i · (\\|s\\| + mean of \\|s\\| + \\|n\\| · mean of \\|s n\\|) |
| dscale | (w(R) + 4) u · sum of \\|dy n\\| |
| dbias | w(R) u · sum of \\|dy\\| |
"""

LAST, SEVERAL, EVERY = "last dim", "last two dims", "every dim"
LONG, WEIGHTS = "long rows", "weights as wide as sums"
FORMS = (LAST, SEVERAL, EVERY, LONG, WEIGHTS, BARE)
_STATISTICS = ("mean", "inverse_deviation", "inverse_rms")
_WEIGHTS = ("scale", "bias", "dscale", "dbias")


def _forward(asked: Asked) -> Made:
    dims, first = _rows(asked)
    row = dims[first:]
    epsilon = asked.choose.one((1e-5, 1e-5, 1e-12, 1e-3, 0.5))
    if asked.form is None and asked.values is Values.NORMAL and math.prod(row) > 3:
        epsilon = asked.choose.one((epsilon, 0.0))  # no two such values are equal, so no variance is 0
    attributes = {"axis": _axis(asked, first), "epsilon": epsilon}
    return Made({"x": dims, "scale": row, "bias": row}, attributes, _dtypes(asked))


def _backward(asked: Asked) -> Made:
    dims, first = _rows(asked)
    statistics = (*dims[:first], *[1] * (len(dims) - first))
    given = {"dy": dims, "x": dims, "scale": dims[first:], **dict.fromkeys(_STATISTICS, statistics)}
    return Made(given, {"axis": _axis(asked, first)}, _dtypes(asked))


def _axis(asked: Asked, first: int) -> int:
    """The first normalised dim, counted from either end."""
    return first - int(asked.choose.one((0, asked.rank)))


def _dtypes(asked: Asked) -> dict[str, DType]:
    wide = DType.FLOAT64 if asked.dtype is DType.FLOAT64 else DType.FLOAT32
    weights = {name: wide if asked.has(WEIGHTS, 0.4) else asked.dtype for name in _WEIGHTS}
    return weights | dict.fromkeys(_STATISTICS, wide)


def _rows(asked: Asked) -> tuple[Dims, int]:
    """Dims of x, and the first of those that are normalised."""
    choose, rank = asked.choose, asked.rank
    first = {LAST: rank - 1, SEVERAL: rank - 2, EVERY: 0}.get(asked.form or "", rank - 1)
    if asked.form is None:
        first = choose.one((rank - 1, rank - 1, int(choose.rng.integers(rank))))
    return (_any_dims(asked, first) if asked.form is None else _cell_dims(asked)), first


def _cell_dims(asked: Asked) -> Dims:
    if asked.form == LONG:
        return (*asked.choose.each(asked.rank - 1, 1, 4), *asked.choose.each(1, 1025, 4097))
    return (*asked.choose.each(asked.rank - 1, 2, 8), *asked.choose.each(1, 9, 98))


def _any_dims(asked: Asked, first: int) -> Dims:
    choose, rank = asked.choose, asked.rank
    match asked.sizes:
        case Sizes.ONE:
            return (1,) * rank
        case Sizes.TINY:
            return choose.each(rank, 1, 4)
        case Sizes.VECTOR:
            return (*(choose.size(12) for _ in range(rank - 1)), 8 * choose.size(256))
        case Sizes.LONG:
            return (*(choose.size(3) for _ in range(rank - 1)), choose.size(40_000))
        case _:
            largest = 300 if rank < 4 else 20
            return tuple(choose.size(largest if axis >= first else 40) for axis in range(rank))


# Each bound is of what float arithmetic does in any order: c is what differs from the mean, L a row's length.


def _layer_norm(operation: LayerNorm[str], values: Exact, specs: Specs) -> Exact:
    """The variance in two passes, or in one over a running mean; not from the mean of squares.

    In two passes, the mean is off by d = (walk_of(x, L) + 1) u mean|x|, which adds d² to the variance and
    d to every c; the variance's own roundings count for half in the inverse deviation. In one pass over a
    running mean, they are larger by the mean in terms of the deviation (T. F. Chan, G. H. Golub, R. J.
    LeVeque, "Algorithms for computing the sample variance", The American Statistician 37 (1983)).
    """
    x, u = values["x"], _unit(operation, specs)
    axes, length = _axes(operation, x)
    wanted = operation.evaluate(NumPy(), values, specs)
    inverse = wanted["inverse_deviation"]
    off = (walk_of(x, length) + 1) * _mean(np.abs(x), axes)
    squared = np.minimum((u * off * inverse) ** 2 / 2 / u, 1 / u)
    running = walk(length) * np.abs(wanted["mean"]) * inverse / 2
    of_inverse = of_squares(x, length) / 2 + running + 6 + squared
    centred = np.abs(x - wanted["mean"])
    scale, bias = np.abs(values.get("scale", 1.0)), np.abs(values.get("bias", 0.0))
    y = inverse * scale * (off + (centred + u * off) * (of_inverse + 5)) + 2 * bias
    return {"y": y, "mean": off, "inverse_deviation": of_inverse * inverse}


def _rms_norm(operation: RMSNorm[str], values: Exact, specs: Specs) -> Exact:
    """The mean of squares is of one sign, so its error is relative, and half as large in the inverse."""
    _, length = _axes(operation, values["x"])
    wanted = operation.evaluate(NumPy(), values, specs)
    of_inverse = of_squares(values["x"], length) / 2 + 6
    return {
        "y": (of_inverse + 3) * np.abs(wanted["y"]),
        "inverse_rms": of_inverse * wanted["inverse_rms"],
    }


def of_squares(x: Array, length: int) -> float:
    """The error of a sum of squares; more where few of them differ, which round in one direction.

    Half types have few numbers around 30, and there are 8 whole ones from -3 to 4.
    """
    few = x.size > 64 * np.unique(x).size
    return max(walk(length), length / 4 if few else 0.0)


def _layer_norm_backward(operation: LayerNormBackward[str], values: Exact, specs: Specs) -> Exact:
    normal = np.abs((values["x"] - values["mean"]) * values["inverse_deviation"])
    return _gradients(operation, values, normal, values["inverse_deviation"], centred=1.0)


def _rms_norm_backward(operation: RMSNormBackward[str], values: Exact, specs: Specs) -> Exact:
    normal = np.abs(values["x"] * values["inverse_rms"])
    return _gradients(operation, values, normal, values["inverse_rms"], centred=0.0)


def _gradients(operation: Any, values: Exact, normal: Array, inverse: Array, centred: float) -> Exact:
    """Sums over rows and over columns; the magnitudes are the formula's with every sign a plus."""
    axes, length = _axes(operation, values["x"])
    dy = np.abs(values["dy"])
    slope = dy * np.abs(values.get("scale", 1.0))
    along = normal * _mean(slope * normal, axes)
    magnitude = (slope + centred * _mean(slope, axes) + along) * np.abs(inverse)
    columns = tuple(range(axes[0]))
    rows = math.prod(dy.shape[: axes[0]])
    return {
        "dx": (walk(length) + 10) * magnitude,
        "dscale": (walk(rows) + 4) * (dy * normal).sum(axis=columns),
        "dbias": walk(rows) * dy.sum(axis=columns),
    }


def _unit(operation: LayerNorm[str], specs: Specs) -> float:
    return 2.0**-53 if specs["y"].dtype is DType.FLOAT64 else 2.0**-24


def _axes(operation: Any, x: Array) -> tuple[tuple[int, ...], int]:
    """The normalised dims, and the elements of a row."""
    axes = tuple(range(operation.axis % x.ndim, x.ndim))
    return axes, math.prod(x.shape[axis] for axis in axes)


def _mean(values: Array, axes: tuple[int, ...]) -> Array:
    return values.mean(axis=axes, keepdims=True)


def _statistics_of_x(operation: Any, rng: np.random.Generator, values: Exact, specs: Specs) -> None:
    """The statistics that a forward pass gives, most of the time; any other numbers are valid too."""
    if rng.random() < 0.3:
        return
    kind = LayerNorm if isinstance(operation, LayerNormBackward) else RMSNorm
    forward: Any = kind(x="x", axis=operation.axis, epsilon=1e-3)
    found = forward.evaluate(NumPy(), {"x": values["x"]}, specs)
    values.update({name: found[name] for name in _STATISTICS if name in values})


def _row(operation: Any, make: Any, bounds: Any, arrange: Any = None) -> Row:
    return Row(
        operation,
        FLOATS,
        ranks=(2, 3, 4),
        forms=FORMS,
        make=make,
        bounds=bounds,
        arrange=arrange,
        specials=(math.nan,),
        more_ranks=(1, 5, 6, 8),
        varied=("dy",),
    )


ROWS = (
    _row(LayerNorm, _forward, _layer_norm),
    _row(LayerNormBackward, _backward, _layer_norm_backward, _statistics_of_x),
    _row(RMSNorm, _forward, _rms_norm),
    _row(RMSNormBackward, _backward, _rms_norm_backward, _statistics_of_x),
)
