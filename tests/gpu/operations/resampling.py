"""Tensors with other sizes: the nearest element, or what lies between."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from cudnn_actor.protocol import DType
from cudnn_actor.protocol.operations import (
    Coordinates,
    NearestRounding,
    Resample,
    ResampleBackward,
    ResampleMode,
    Specs,
)
from cudnn_actor.protocol.operations.resampling import Taps, apply_taps, spread

from .rows import FLOATS, Asked, Exact, Made, Row, Sizes, walk

__all__ = ["EXACTNESS", "ROWS"]

EXACTNESS = """\
The nearest element is moved as it is, bit for bit. Else, with A dims that change and N elements of which one
of the result is made, a value may be off before it is rounded by (4 √N + 3 A) · u times the sum of the
elements' magnitudes times those of their weights. So may a gradient.
"""

NEAREST, LINEAR, CUBIC, ANTIALIASED, PART = "nearest", "linear", "cubic", "with antialiasing", "part"
FORMS = (NEAREST, LINEAR, CUBIC, ANTIALIASED, PART)
_MODES = {NEAREST: ResampleMode.NEAREST, LINEAR: ResampleMode.LINEAR, CUBIC: ResampleMode.CUBIC}


def _sizes(asked: Asked) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of x and of y."""
    choose, rank = asked.choose, asked.rank
    match asked.sizes:
        case Sizes.ONE:
            return (1,) * rank, (1,) * rank
        case Sizes.LONG:
            x = (*(1 for _ in range(rank - 1)), 3_000 + choose.size(8_000))
            return x, (*(choose.size(2) for _ in range(rank - 1)), 9_000 + choose.size(3_000))
        case _:
            most = {1: 60, 2: 40, 3: 14}.get(rank, 7)
            x, y = (tuple(choose.size(most) for _ in range(rank)) for _ in range(2))
    same = [choose.chance(0.3) for _ in range(rank)]
    return x, tuple(size if kept else other for size, other, kept in zip(x, y, same, strict=True))


def _attributes(asked: Asked, sizes: tuple[int, ...]) -> dict[str, Any]:
    choose, rank = asked.choose, asked.rank
    mode = _MODES.get(asked.form or "", choose.one((ResampleMode.LINEAR, ResampleMode.CUBIC)))
    if not asked.dtype.is_floating or (asked.form is None and choose.chance(0.3)):
        mode = ResampleMode.NEAREST
    between = mode is not ResampleMode.NEAREST
    part = asked.has(PART, 0.15)
    others = [one for one in Coordinates if one is not Coordinates.TF_CROP_AND_RESIZE]
    found: dict[str, Any] = {
        "sizes": sizes,
        "mode": mode,
        "coordinates": Coordinates.TF_CROP_AND_RESIZE if part else choose.one(others),
        "rounding": choose.one(NearestRounding),
        "cubic_coefficient": choose.one((-0.75, -0.5)),
        "exclude_outside": choose.chance(0.3),
        "antialias": between and asked.has(ANTIALIASED, 0.4),
    }
    if part:
        starts, ends = ((choose.one((-0.25, 0.0, 0.3)) for _ in range(rank)), [0.7, 1.25] * rank)
        found |= {"roi": (*starts, *ends[:rank]), "extrapolation": choose.one((-2.5, 0.0, 3.0))}
    if asked.form is None and choose.chance(0.3):
        found["scales"] = tuple(choose.one((0.3, 0.5, 1.0, 1.7, 3.0)) for _ in range(rank))
    return found


def _forward(asked: Asked) -> Made:
    x, sizes = _sizes(asked)
    return Made({"x": x}, _attributes(asked, sizes))


def _backward(asked: Asked) -> Made:
    x, sizes = _sizes(asked)
    return Made({"dy": sizes, "dx": x}, _attributes(asked, sizes))


def _magnitudes(x: Any, taps: Mapping[int, Taps]) -> tuple[Any, dict[int, Taps]]:
    """Of elements, and of weights."""
    weights = {axis: of._replace(weights=np.abs(of.weights)) for axis, of in taps.items()}
    return np.where(np.isfinite(x), np.abs(x), 0), weights


def _factor(counts: list[int]) -> float:
    return walk(math.prod(counts)) + 3 * len(counts)


def _of_forward(operation: Resample[str], values: Exact, specs: Specs) -> Exact:
    del specs
    if operation.mode is ResampleMode.NEAREST:
        return {}
    x, taps = _magnitudes(values["x"], operation.taps(values["x"].shape))
    return {"y": _factor([of.places.shape[1] for of in taps.values()]) * apply_taps(np, x, taps)}


def _of_backward(operation: ResampleBackward[str], values: Exact, specs: Specs) -> Exact:
    dims = specs["dx"].dims
    dy, taps = _magnitudes(values["dy"], operation.taps(dims))
    lists = [of.transpose(dims[axis]) for axis, of in taps.items()]
    counts = [int(np.diff(of.starts).max()) for of in lists]
    return {"dx": _factor(counts) * spread(np, dy, taps, dims)}


ROWS = (
    Row(
        Resample,
        (*FLOATS, DType.INT8, DType.INT64, DType.BOOL),
        ranks=(2, 4),
        forms=FORMS,
        make=_forward,
        bounds=_of_forward,
        specials=(math.nan, math.inf),
        more_ranks=(1, 3, 5),
        varied=("x",),
    ),
    Row(
        ResampleBackward,
        FLOATS,
        ranks=(2, 4),
        forms=FORMS,
        make=_backward,
        bounds=_of_backward,
        specials=(math.nan, math.inf),
        more_ranks=(1, 3, 5),
        varied=("dy",),
    ),
)
