"""Batch, instance and group norms, and sums over channels."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.engines.cpu.exact.evaluation import NumPy
from cudnn_actor.protocol import DType
from cudnn_actor.protocol.operations import (
    BatchNorm,
    BatchNormBackward,
    BatchNormTraining,
    GenStats,
    GroupNorm,
    GroupNormBackward,
    InstanceNorm,
    InstanceNormBackward,
    Specs,
)
from cudnn_actor.protocol.operations.base import Array

from .normalization import of_squares
from .rows import BARE, FLOATS, Asked, Dims, Exact, Made, Row, Sizes, walk, walk_of

__all__ = ["EXACTNESS", "ROWS", "dims_of_channels"]

EXACTNESS = """\
With L elements that have one mean, R elements of a channel, w(n) = 4 √n, u the unit roundoff of the sums, i
the inverse deviation, n the normalised element, s = dy · scale and m the momentum, a value may be off before
it is rounded by what follows. p and q are w(L), but L / 2 and L / 4 if that is more and x has few different
values: their sums, and those of their squares, round in one direction.

| | bound |
| --- | --- |
| mean | d = (p + 1) u · mean of \\|x\\| |
| inverse deviation | e · i, with e = (q / 2 + w(L) \\|mean\\| i / 2 + 6) u + (d i)² / 2 |
| y | i \\|scale\\| · (d + (\\|x - mean\\| + d) (e + 5 u)) + 2 u \\|bias\\| |
| y for inference | 10 u · \\|y - bias\\| + 2 u \\|bias\\| |
| new running mean | m d + 4 u · ((1 - m) \\|old\\| + m \\|mean\\|) |
| new running variance | 2 m e L / (L - 1) / i² + 4 u · ((1 - m) \\|old\\| + m · variance) |
| dx | (w(L) + 10) u · i · (\\|s\\| + mean of \\|s\\| + \\|n\\| · mean of \\|s n\\|) |
| dscale | (w(R) + 4) u · sum of \\|dy n\\| |
| dbias | w(R) u · sum of \\|dy\\| |
| sum, sum of squares | (w(R) + 1) u · sum of magnitudes; R / 2 for w(R) as above |
"""

EIGHTS, ODD, LONG = "channels in eights, weights as wide as sums", "any channels", "long"
FORMS = (EIGHTS, ODD, LONG, BARE)
_STATISTICS = ("mean", "inverse_deviation")
_WEIGHTS = ("scale", "bias", "dscale", "dbias", "running_mean", "running_variance")


def dims_of_channels(asked: Asked, channels: int | None = None) -> Dims:
    """Dims (N, C, ...): with few elements in a cell, unless it is long."""
    choose, rank = asked.choose, asked.rank
    if asked.form is None:
        return _any_dims(asked, channels)
    samples, *others = choose.each(rank - 1, 2, 6)
    eights = 1 if asked.form == LONG else int(choose.rng.integers(1, 4))
    channels = channels or 8 * eights + (asked.form == ODD)
    if asked.form == LONG and rank == 2:
        samples = int(choose.rng.integers(4200, 5000))
    elif asked.form == LONG:
        others[-1] = 9000 // (samples * math.prod(others[:-1]))
    return (samples, channels, *others)


def _any_dims(asked: Asked, channels: int | None) -> Dims:
    choose, rank = asked.choose, asked.rank
    match asked.sizes:
        case Sizes.ONE:
            return (1, channels or 1, *(1,) * (rank - 2))
        case Sizes.TINY:
            dims = choose.each(rank, 1, 4)
        case Sizes.VECTOR:
            dims = (choose.size(8), 8 * choose.size(16), *(choose.size(12) for _ in range(rank - 2)))
        case Sizes.LONG:
            dims = (*choose.each(rank - 1, 1, 4), choose.size(15_000))
        case _:
            dims = tuple(choose.size(40 if rank < 4 else 12) for _ in range(rank))
    return (dims[0], channels, *dims[2:]) if channels else dims


def _dtypes(asked: Asked) -> dict[str, DType]:
    wide = DType.FLOAT64 if asked.dtype is DType.FLOAT64 else DType.FLOAT32
    weights = {name: wide if asked.has(EIGHTS, 0.4) else asked.dtype for name in _WEIGHTS}
    return weights | dict.fromkeys(_STATISTICS, wide)


def _forward(asked: Asked) -> Made:
    return _made(asked, {"epsilon": _epsilon(asked)})


def _training(asked: Asked) -> Made:
    choose = asked.choose
    more = {"momentum": choose.one((0.1, 0.1, 0.0, 1.0, 0.37)), "unbiased": not choose.chance(0.3)}
    return _made(asked, {"epsilon": _epsilon(asked), **more})


def _inference(asked: Asked) -> Made:
    made = _made(asked, {"epsilon": _epsilon(asked)})
    weights = dict.fromkeys(("mean", "variance"), made.dtypes["scale"])
    return Made({**made.dims, "variance": made.dims["scale"]}, made.attributes, {**made.dtypes, **weights})


def _batch_backward(asked: Asked) -> Made:
    return _made(asked, {})


def _instance_backward(asked: Asked) -> Made:
    made = _made(asked, {})
    return Made({**made.dims, **dict.fromkeys(_STATISTICS, made.dims["x"][:2])}, {}, made.dtypes)


def _group_forward(asked: Asked) -> Made:
    groups, own = _groups(asked)
    return _made(asked, {"epsilon": _epsilon(asked), "groups": groups}, groups * own)


def _group_backward(asked: Asked) -> Made:
    groups, own = _groups(asked)
    made = _made(asked, {"groups": groups}, groups * own)
    kept = (made.dims["x"][0], groups)
    return Made({**made.dims, **dict.fromkeys(_STATISTICS, kept)}, made.attributes, made.dtypes)


def _groups(asked: Asked) -> tuple[int, int]:
    """How many groups, and their channels."""
    if asked.form is None:
        groups, own = (1, 1) if asked.sizes is Sizes.ONE else asked.choose.each(2, 1, 6)
        return groups, own
    return {EIGHTS: (2, 8), LONG: (2, 4)}.get(asked.form, (3, 3))


def _epsilon(asked: Asked) -> float:
    epsilon: float = asked.choose.one((1e-5, 1e-5, 1e-12, 1e-3, 0.5))
    return epsilon


def _made(asked: Asked, attributes: dict[str, Any], channels: int | None = None) -> Made:
    dims = dims_of_channels(asked, channels)
    vectors = dict.fromkeys((*_WEIGHTS, *_STATISTICS), dims[1:2])
    return Made({"dy": dims, "x": dims, **vectors}, attributes, _dtypes(asked))


# Each bound is of what float arithmetic does in any order.


class _Parts(NamedTuple):
    """Values as (N, groups, channels of a group, others)."""

    x: Array
    scale: Any
    bias: Any
    axes: tuple[int, ...]
    length: int


def _split_groups(operation: Any, x: Array) -> Array:
    """An array of the dims (N, C, ...) as (N, groups, channels of a group, others)."""
    groups = operation.groups_of(x.shape[1])
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, math.prod(x.shape[2:]))


def _parts(operation: Any, values: Exact) -> _Parts:
    x = _split_groups(operation, values["x"])
    scale, bias = (
        _split_groups(operation, values[name].reshape(1, -1, 1)) if name in values else other
        for name, other in (("scale", 1.0), ("bias", 0.0))
    )
    length = math.prod(x.shape[axis] for axis in operation.axes)
    return _Parts(x, np.abs(scale), np.abs(bias), operation.axes, length)


def _of_forward(operation: Any, values: Exact, specs: Specs) -> Exact:
    """The variance over a running mean: see `normalization`."""
    if not values["x"].size:  # nothing is rounded
        return {name: np.zeros(specs[name].dims) for name in operation.outputs if name in specs}
    x, scale, bias, axes, length = _parts(operation, values)
    u = 2.0**-53 if specs["y"].dtype is DType.FLOAT64 else 2.0**-24
    wanted = operation.evaluate(NumPy(), values, specs)
    mean, inverse = (wanted[name].reshape(-1, x.shape[1], 1, 1) for name in _STATISTICS)
    off = (walk_of(x, length) + 1) * np.abs(x).mean(axis=axes, keepdims=True)
    squared = np.minimum((u * off * inverse) ** 2 / 2 / u, 1 / u)
    of_inverse = of_squares(x, length) / 2 + walk(length) * np.abs(mean) * inverse / 2 + 6 + squared
    y = inverse * scale * (off + (np.abs(x - mean) + u * off) * (of_inverse + 5)) + 2 * bias
    statistics = wanted["mean"].shape
    found = {
        "y": y.reshape(values["x"].shape),
        "mean": off.reshape(statistics),
        "inverse_deviation": (of_inverse * inverse).reshape(statistics),
    }
    if isinstance(operation, BatchNormTraining):
        m, correction = operation.momentum, operation.correction(length)
        errors = {"mean": m * off, "variance": 2 * m * correction * of_inverse / inverse**2}
        for name, error in errors.items():
            if f"running_{name}" in values:
                size = m * np.abs(wanted[name]) + (1 - m) * np.abs(values[f"running_{name}"])
                found[f"new_running_{name}"] = error.reshape(-1) + 4 * correction * size
    return found


def _of_inference(operation: BatchNorm[str], values: Exact, specs: Specs) -> Exact:
    y = operation.evaluate(NumPy(), values, specs)["y"]
    bias = np.zeros(1) if "bias" not in values else values["bias"]
    bias = bias.reshape(-1, *[1] * (y.ndim - 2))
    return {"y": 10 * np.abs(y - bias) + 2 * np.abs(bias)}


def _of_backward(operation: Any, values: Exact, specs: Specs) -> Exact:
    x, scale, _, axes, length = _parts(operation, values)
    dy = np.abs(_split_groups(operation, values["dy"]))
    mean, inverse = (values[name].reshape(-1, x.shape[1], 1, 1) for name in _STATISTICS)
    normal = np.abs((x - mean) * inverse)
    slope = dy * scale
    along = normal * (slope * normal).mean(axis=axes, keepdims=True)
    magnitude = (slope + slope.mean(axis=axes, keepdims=True) + along) * np.abs(inverse)
    terms = x.shape[0] * x.shape[3]
    return {
        "dx": ((walk(length) + 10) * magnitude).reshape(values["x"].shape),
        "dscale": (walk(terms) + 4) * (dy * normal).sum(axis=(0, 3)).reshape(-1),
        "dbias": walk(terms) * dy.sum(axis=(0, 3)).reshape(-1),
    }


def _of_sums(operation: GenStats[str], values: Exact, specs: Specs) -> Exact:
    x = _split_groups(operation, values["x"])
    steps = walk_of(x, x.shape[0] * x.shape[3]) + 1
    sums = {"sum": np.abs(x), "sum_of_squares": x * x}
    return {name: steps * array.sum(axis=operation.axes) for name, array in sums.items()}


def _statistics_of_x(operation: Any, rng: np.random.Generator, values: Exact, specs: Specs) -> None:
    """The statistics that a forward pass gives, most of the time; any other numbers are valid too."""
    if rng.random() < 0.3:
        return
    forward: Any = BatchNormTraining(x="x")
    if isinstance(operation, InstanceNormBackward):
        forward = InstanceNorm(x="x")
    elif isinstance(operation, GroupNormBackward):
        forward = GroupNorm(x="x", groups=operation.groups)
    found = forward.evaluate(NumPy(), {"x": values["x"]}, specs)
    values.update({name: found[name] for name in _STATISTICS})


def _positive(operation: Any, rng: np.random.Generator, values: Exact, specs: Specs) -> None:
    values["variance"] = np.abs(values["variance"]) + 0.25


def _row(operation: Any, make: Any, bounds: Any, arrange: Any = None, **more: Any) -> Row:
    return Row(
        operation,
        FLOATS,
        ranks=(2, 4),
        forms=FORMS,
        make=make,
        bounds=bounds,
        arrange=arrange,
        specials=(math.nan,),
        more_ranks=(3, 5, 6, 8),
        varied=("dy",),
        **more,
    )


_RUNNING = tuple((f"new_running_{name}", f"running_{name}") for name in ("mean", "variance"))
ROWS = (
    _row(BatchNorm, _inference, _of_inference, _positive),
    _row(BatchNormTraining, _training, _of_forward, needs=_RUNNING),
    _row(BatchNormBackward, _batch_backward, _of_backward, _statistics_of_x),
    _row(InstanceNorm, _forward, _of_forward),
    _row(InstanceNormBackward, _instance_backward, _of_backward, _statistics_of_x),
    _row(GroupNorm, _group_forward, _of_forward),
    _row(GroupNormBackward, _group_backward, _of_backward, _statistics_of_x),
    _row(GenStats, _batch_backward, _of_sums)._replace(forms=(EIGHTS, ODD, LONG)),
)
