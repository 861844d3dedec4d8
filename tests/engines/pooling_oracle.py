"""Pooling as ONNX defines it, one window and one element at a time.

https://onnx.ai/onnx/operators/onnx__MaxPool.html, onnx__AveragePool.html and onnx__LpPool.html, without
`ceil_mode`; adaptive windows as PyTorch has them. Only the numbers of windows are used, not their methods.
Values are Python's own numbers, so integers are exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.protocol.operations import AdaptiveWindow, Window

from .remembered import remembered

__all__ = [
    "avg_pool",
    "avg_pool_backward",
    "flat_position",
    "lp_pool",
    "lp_pool_backward",
    "max_pool",
    "max_pool_backward",
    "output_dims",
]

Place = tuple[int, ...]
Windows = Window | AdaptiveWindow


class Pooled(NamedTuple):
    """The place of a result, and the places in x of its window's elements, in the window's order."""

    result: Place
    elements: list[Place]


def _along(window: Windows, axis: int, size: int) -> list[list[int]]:
    """The elements that each window has which are not padding, along a spatial dim of `size` elements."""
    if isinstance(window, AdaptiveWindow):
        step = Fraction(size, window.output[axis])
        return [
            list(range(math.floor(number * step), math.ceil((number + 1) * step)))
            for number in range(window.output[axis])
        ]
    reach = window.dilation[axis] * (window.size[axis] - 1)
    found, start = [], -window.pre_padding[axis]
    while start + reach < size + window.post_padding[axis]:
        every = [start + number * window.dilation[axis] for number in range(window.size[axis])]
        found.append([place for place in every if 0 <= place < size])
        start += window.stride[axis]
    return found


def output_dims(window: Windows, dims: Sequence[int]) -> tuple[int, ...] | None:
    """The result's dims; None if there is no window, or one that has only padding."""
    counts = []
    for axis, size in enumerate(dims[2:]):
        found = _along(window, axis, size)
        if not found or not all(found):
            return None
        counts.append(len(found))
    return (*dims[:2], *counts)


def flat_position(place: Sequence[int], dims: Sequence[int]) -> int:
    """The number of an element, counted in row-major order over the whole tensor."""
    position = 0
    for coordinate, size in zip(place, dims, strict=True):
        position = position * size + coordinate
    return position


def _windows(window: Windows, dims: Sequence[int]) -> Iterator[Pooled]:
    every = [_along(window, axis, size) for axis, size in enumerate(dims[2:])]
    for n, c in itertools.product(range(dims[0]), range(dims[1])):
        for place in itertools.product(*(range(len(found)) for found in every)):
            along = [every[axis][number] for axis, number in enumerate(place)]
            yield Pooled((n, c, *place), [(n, c, *spatial) for spatial in itertools.product(*along)])


@remembered
def max_pool(x: np.ndarray, window: Windows) -> tuple[np.ndarray, np.ndarray]:
    """The largest element of each window, and its number in x. NaN is the largest; the first of equals."""
    dims = output_dims(window, x.shape)
    assert dims is not None
    y, index = np.empty(dims, x.dtype), np.empty(dims, np.int64)
    for result, elements in _windows(window, x.shape):
        best = elements[0]
        for place in elements[1:]:
            if _larger(x[place].item(), x[best].item()):
                best = place
        y[result], index[result] = x[best], flat_position(best, x.shape)
    return y, index


def _larger(a: Any, b: Any) -> bool:
    if math.isnan(b):
        return False
    return bool(math.isnan(a) or a > b)


@remembered
def max_pool_backward(
    dy: np.ndarray, index: np.ndarray, window: Windows, dims: tuple[int, ...]
) -> np.ndarray:
    """Each gradient goes to the element of its window that has the index, if there is one."""
    dx = np.zeros(dims)
    for result, elements in _windows(window, dims):
        for place in elements:
            if flat_position(place, dims) == index[result]:
                dx[place] += float(dy[result])
    return dx


@remembered
def avg_pool(x: np.ndarray, window: Windows, *, include_padding: bool) -> np.ndarray:
    """The mean of each window, in float64."""
    dims = output_dims(window, x.shape)
    assert dims is not None
    y = np.empty(dims)
    for result, elements in _windows(window, x.shape):
        count = _count(window, elements, include_padding)
        y[result] = math.fsum(float(x[place]) for place in elements) / count
    return y


@remembered
def avg_pool_backward(
    dy: np.ndarray, window: Windows, dims: tuple[int, ...], *, include_padding: bool
) -> np.ndarray:
    """Each gradient goes to all elements of its window in equal parts, in float64."""
    dx = np.zeros(dims)
    for result, elements in _windows(window, dims):
        count = _count(window, elements, include_padding)
        for place in elements:
            dx[place] += float(dy[result]) / count
    return dx


def _count(window: Windows, elements: list[Place], include_padding: bool) -> int:
    padded = include_padding and isinstance(window, Window)
    return math.prod(window.size) if padded else len(elements)  # type: ignore[union-attr]


@remembered
def lp_pool(x: np.ndarray, window: Windows, p: float) -> np.ndarray:
    """The root of the sum of powers of each window, in float64."""
    dims = output_dims(window, x.shape)
    assert dims is not None
    y = np.empty(dims)
    for result, elements in _windows(window, x.shape):
        y[result] = math.fsum(abs(float(x[place])) ** p for place in elements) ** (1 / p)
    return y


@remembered
def lp_pool_backward(dy: np.ndarray, x: np.ndarray, window: Windows, p: float) -> np.ndarray:
    """The chain rule, in float64. Windows of zeros have a gradient of 0."""
    y, dx = lp_pool(x, window, p), np.zeros(x.shape)
    for result, elements in _windows(window, x.shape):
        for place in elements if y[result] else ():
            value = float(x[place])
            slope = math.copysign(abs(value) ** (p - 1), value) * y[result] ** (1 - p) if value else 0.0
            dx[place] += float(dy[result]) * slope
    return dx
