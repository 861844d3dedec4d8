"""Poolings: windows of any kind over 1 to 3 spatial dims."""

from __future__ import annotations

import math

import numpy as np

from cudnn_actor.engines.cpu.exact.evaluation import NumPy
from cudnn_actor.protocol import DType, InvalidRequest
from cudnn_actor.protocol.operations import (
    AdaptiveWindow,
    AvgPool,
    AvgPoolBackward,
    LpPool,
    LpPoolBackward,
    MaxPool,
    MaxPoolBackward,
    Operation,
    Specs,
    Window,
)

from .rows import BARE, FLOATS, Asked, Dims, Exact, Made, Row, Sizes, walk

__all__ = ["EXACTNESS", "ROWS"]

EXACTNESS = """\
Max pooling is exact, its index too, and so are the gradients of integers and of small whole numbers. With T
elements in a window, or of the windows that an element is in, w = 4 √T and u the unit roundoff of the sums, a
value may be off before it is rounded by

| | bound |
| --- | --- |
| AvgPool: y | (w + 2) u · mean of \\|x\\| |
| AvgPoolBackward: dx | (w + 2) u · sum of \\|dy\\| / count |
| MaxPoolBackward: dx | w u · sum of \\|dy\\| |
| LpPool: y | ((w + 8 + log T) / p + 11) u · y |
| LpPoolBackward: dx | (w + p + 12) u · sum of \\|dy\\| (\\|x\\| / y)^(p - 1) |
"""

APART, OVERLAPPING, ASYMMETRIC = "side by side", "overlapping, padded", "asymmetric padding"
DILATED, GLOBAL, COUNTED, ADAPTIVE = "dilation", "global", "padding counts", "adaptive"
FORMS = (APART, OVERLAPPING, ASYMMETRIC, DILATED, GLOBAL, ADAPTIVE)
_NORM_FORMS = (APART, OVERLAPPING, DILATED, ADAPTIVE)
_EXPONENTS = (1.0, 2.0, 3.0, 2.5)
_EXTENTS = {1: 400, 2: 40, 3: 14}


def _forward(asked: Asked) -> Made:
    dims, window = _windows(asked)
    return Made({"x": dims}, {"window": window})


def _max_backward(asked: Asked) -> Made:
    dims, window = _windows(asked)
    y = window.output_dims(dims)
    return Made({"dy": y, "index": y, "dx": dims}, {"window": window}, {"index": DType.INT64})


def _average(asked: Asked) -> Made:
    made = _forward(asked)
    return Made(made.dims, {**made.attributes, "include_padding": asked.has(COUNTED, 0.5)})


def _average_backward(asked: Asked) -> Made:
    dims, window = _windows(asked)
    counted = asked.has(COUNTED, 0.5)
    return Made({"dy": window.output_dims(dims), "dx": dims}, {"window": window, "include_padding": counted})


def _norm(asked: Asked) -> Made:
    made = _forward(asked)
    return Made(made.dims, {**made.attributes, "p": asked.choose.one(_EXPONENTS)})


def _norm_backward(asked: Asked) -> Made:
    dims, window = _windows(asked)
    y = window.output_dims(dims)
    p = asked.choose.one(_EXPONENTS)
    return Made({"dy": y, "x": dims, "y": y}, {"window": window, "p": p})


def _windows(asked: Asked) -> tuple[Dims, Window | AdaptiveWindow]:
    """Dims of x, and windows that all have an element of it."""
    if asked.has(ADAPTIVE, 0.2):
        rank = asked.rank - 2
        one = asked.sizes is Sizes.ONE
        output = (1,) * rank if one else asked.choose.each(rank, 1, 12 if rank < 3 else 6)
        return _dims(asked, (0,) * rank), AdaptiveWindow(output=output)
    while True:
        dims, window = _attempt(asked)
        try:
            window.output_dims(dims)
        except InvalidRequest:
            continue
        return dims, window


def _attempt(asked: Asked) -> tuple[Dims, Window]:
    choose, rank, any_form = asked.choose, asked.rank - 2, asked.form is None
    size = choose.each(rank, 1 if any_form else 2, 4 if rank == 3 else 6)
    dilation = choose.each(rank, 1 if any_form else 2, 4) if asked.has(DILATED, 0.3) else (1,) * rank
    reach = tuple(d * (s - 1) for d, s in zip(dilation, size, strict=True))
    dims = _dims(asked, reach)
    if asked.has(GLOBAL, 0.1):
        size, dilation, reach = dims[2:], (1,) * rank, (0,) * rank
    pre = tuple(int(choose.rng.integers(0, min(4, r + 1))) for r in reach)
    post = tuple(int(choose.rng.integers(0, min(4, r + 1))) for r in reach)
    if asked.form in (APART, DILATED, GLOBAL) or (any_form and choose.chance(0.3)):
        pre = post = (0,) * rank
    elif asked.form in (OVERLAPPING, COUNTED) or (any_form and choose.chance(0.5)):
        pre = post = tuple(min(1, r) for r in reach) if asked.form else pre
    stride = choose.each(rank, 1, 4)
    if asked.form == APART or (any_form and choose.chance(0.3)):
        stride = size
    if asked.form in (OVERLAPPING, COUNTED):
        stride = tuple(min(s, t - 1) for s, t in zip(stride, size, strict=True))
    return dims, Window(size=size, pre_padding=pre, post_padding=post, stride=stride, dilation=dilation)


def _dims(asked: Asked, reach: Dims) -> Dims:
    """Dims that windows of that reach find room in."""
    choose, rank = asked.choose, len(reach)
    if asked.form is not None:
        extents = choose.rng.choice(np.arange(4, 12), rank, replace=False)
        return (choose.size(3), choose.size(9), *(int(e) + r for e, r in zip(extents, reach, strict=True)))
    match asked.sizes:
        case Sizes.ONE:
            return (1,) * asked.rank
        case Sizes.TINY:
            return choose.each(asked.rank, 1, 4)
        case Sizes.VECTOR:
            spatial = tuple(8 * choose.size(5 if rank < 3 else 2) for _ in reach)
            return (choose.size(4), 8 * choose.size(8), *spatial)
        case Sizes.LONG:
            long = int(choose.rng.integers(rank))
            spatial = tuple(choose.size(20_000 if axis == long else 4) for axis in range(rank))
            return (choose.size(2), choose.size(4), *spatial)
        case _:
            spatial = tuple(r + choose.size(_EXTENTS[rank]) for r in reach)
            return (choose.size(8), choose.size(64), *spatial)


def _taps(window: Window | AdaptiveWindow, x: Dims) -> int:
    """The most elements of a window, and the most windows that an element is in."""
    if isinstance(window, Window):
        return math.prod(window.size)
    sizes = zip(x[2:], window.output, strict=True)
    return math.prod(1 + max(-(-n // m), -(-m // n)) for n, m in sizes)


def _exact(operation: MaxPool[str], values: Exact, specs: Specs) -> Exact:
    del operation, values, specs
    return {}


def _average_bound(operation: AvgPool[str], values: Exact, specs: Specs) -> Exact:
    """A sum, and the division."""
    (magnitude,) = _of_magnitudes(operation, values, specs).values()
    return {"y": (walk(_taps(operation.window, values["x"].shape)) + 2) * magnitude}


def _average_backward_bound(operation: AvgPoolBackward[str], values: Exact, specs: Specs) -> Exact:
    """A sum of what has been divided."""
    (magnitude,) = _of_magnitudes(operation, values, specs).values()
    return {"dx": (walk(_taps(operation.window, specs["dx"].dims)) + 2) * magnitude}


def _max_backward_bound(operation: MaxPoolBackward[str], values: Exact, specs: Specs) -> Exact:
    """A sum; exact if it is of small whole numbers."""
    dy = values["dy"]
    if dy.dtype.kind == "i" or (np.isfinite(dy).all() and not (dy % 1).any()):
        return {}
    (magnitude,) = _of_magnitudes(operation, values, specs).values()
    return {"dx": walk(_taps(operation.window, specs["dx"].dims)) * magnitude}


def _norm_bound(operation: LpPool[str], values: Exact, specs: Specs) -> Exact:
    """Powers, which CUDA gives within 4 units in the last place, their sum, its root, and a product."""
    (magnitude,) = _of_magnitudes(operation, values, specs).values()
    taps = _taps(operation.window, values["x"].shape)
    return {"y": ((walk(taps) + 8 + math.log(taps)) / operation.p + 11) * magnitude}


def _norm_backward_bound(operation: LpPoolBackward[str], values: Exact, specs: Specs) -> Exact:
    """A sum of products with powers."""
    (magnitude,) = _of_magnitudes(operation, values, specs).values()
    return {"dx": (walk(_taps(operation.window, specs["dx"].dims)) + operation.p + 12) * magnitude}


def _of_magnitudes(operation: Operation[str], values: Exact, specs: Specs) -> Exact:
    """What an operation that is linear in its floating-point inputs gives for their magnitudes."""
    magnitudes = {name: np.abs(v) if v.dtype.kind == "f" else v for name, v in values.items()}
    return operation.evaluate(NumPy(), magnitudes, specs)


def _foreign_indices(
    operation: MaxPoolBackward[str], rng: np.random.Generator, values: Exact, specs: Specs
) -> None:
    """Indices that are not in their windows, or nowhere: those are ignored."""
    del operation
    index, size = values["index"], specs["dx"].size
    if rng.random() < 0.3:
        foreign = rng.random(index.shape) < 0.3
        index[foreign] = rng.integers(-2, size + 2, int(foreign.sum()))


_SPECIALS = (math.nan, math.nan, math.inf, -math.inf)
_RANKS = (3, 4, 5)
_ALL = (*FLOATS, DType.INT8, DType.INT32, DType.INT64, DType.UINT8)
"""Those that have been recorded. It runs on every dtype, which `test_contract_dtypes` shows."""
ROWS = (
    Row(MaxPool, _ALL, _RANKS, (*FORMS, BARE), _forward, _exact, specials=_SPECIALS),
    Row(
        MaxPoolBackward,
        _ALL,
        _RANKS,
        FORMS,
        _max_backward,
        _max_backward_bound,
        arrange=_foreign_indices,
        specials=_SPECIALS,
        largest=1 << 54,
    ),
    Row(AvgPool, FLOATS, _RANKS, (*FORMS, COUNTED), _average, _average_bound, specials=_SPECIALS),
    Row(
        AvgPoolBackward,
        FLOATS,
        _RANKS,
        (*FORMS, COUNTED),
        _average_backward,
        _average_backward_bound,
        specials=_SPECIALS,
    ),
    Row(LpPool, FLOATS, _RANKS, _NORM_FORMS, _norm, _norm_bound, specials=_SPECIALS),
    Row(
        LpPoolBackward, FLOATS, _RANKS, _NORM_FORMS, _norm_backward, _norm_backward_bound, specials=_SPECIALS
    ),
)
