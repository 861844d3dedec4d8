"""Pooling as ONNX defines it, one window and one element at a time.

https://onnx.ai/onnx/operators/onnx__MaxPool.html and onnx__AveragePool.html, without `ceil_mode`. Only the
numbers of a `Window` are used, none of its methods. Values are Python's own numbers, so integers are exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.protocol.operations import Window

__all__ = [
    "avg_pool",
    "avg_pool_backward",
    "flat_position",
    "max_pool",
    "max_pool_backward",
    "output_dims",
    "starts",
]

Place = tuple[int, ...]


class Pooled(NamedTuple):
    """The place of a result, and the places in x of its window's elements, in the window's order."""

    result: Place
    elements: list[Place]


def starts(window: Window, axis: int, size: int) -> list[int]:
    """Where the windows of a spatial dim of `size` elements begin: all that end within the padding."""
    reach = window.dilation[axis] * (window.size[axis] - 1)
    found, start = [], -window.pre_padding[axis]
    while start + reach < size + window.post_padding[axis]:
        found.append(start)
        start += window.stride[axis]
    return found


def _inside(window: Window, axis: int, size: int, start: int) -> list[int]:
    """The elements of a window that are not padding, along one spatial dim."""
    every = [start + number * window.dilation[axis] for number in range(window.size[axis])]
    return [place for place in every if 0 <= place < size]


def output_dims(window: Window, dims: Sequence[int]) -> tuple[int, ...] | None:
    """The result's dims; None if there is no window, or one that has only padding."""
    counts = []
    for axis, size in enumerate(dims[2:]):
        found = starts(window, axis, size)
        if not found or not all(_inside(window, axis, size, start) for start in found):
            return None
        counts.append(len(found))
    return (*dims[:2], *counts)


def flat_position(place: Sequence[int], dims: Sequence[int]) -> int:
    """The number of an element, counted in row-major order over the whole tensor."""
    position = 0
    for coordinate, size in zip(place, dims, strict=True):
        position = position * size + coordinate
    return position


def _windows(window: Window, dims: Sequence[int]) -> Iterator[Pooled]:
    every_start = [starts(window, axis, size) for axis, size in enumerate(dims[2:])]
    for n, c in itertools.product(range(dims[0]), range(dims[1])):
        for place in itertools.product(*(range(len(found)) for found in every_start)):
            along = [
                _inside(window, axis, dims[axis + 2], every_start[axis][number])
                for axis, number in enumerate(place)
            ]
            yield Pooled((n, c, *place), [(n, c, *spatial) for spatial in itertools.product(*along)])


def max_pool(x: np.ndarray, window: Window) -> tuple[np.ndarray, np.ndarray]:
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


def max_pool_backward(dy: np.ndarray, index: np.ndarray, window: Window, dims: tuple[int, ...]) -> np.ndarray:
    """Each gradient goes to the element of its window that has the index, if there is one."""
    dx = np.zeros(dims)
    for result, elements in _windows(window, dims):
        for place in elements:
            if flat_position(place, dims) == index[result]:
                dx[place] += float(dy[result])
    return dx


def avg_pool(x: np.ndarray, window: Window, *, include_padding: bool) -> np.ndarray:
    """The mean of each window, in float64."""
    dims = output_dims(window, x.shape)
    assert dims is not None
    y = np.empty(dims)
    for result, elements in _windows(window, x.shape):
        count = math.prod(window.size) if include_padding else len(elements)
        y[result] = math.fsum(float(x[place]) for place in elements) / count
    return y


def avg_pool_backward(
    dy: np.ndarray, window: Window, dims: tuple[int, ...], *, include_padding: bool
) -> np.ndarray:
    """Each gradient goes to all elements of its window in equal parts, in float64."""
    dx = np.zeros(dims)
    for result, elements in _windows(window, dims):
        count = math.prod(window.size) if include_padding else len(elements)
        for place in elements:
            dx[place] += float(dy[result]) / count
    return dx
