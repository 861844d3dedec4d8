"""The views of filters, images and columns that matrix products take where they lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.fast.kernels import Call, Step, made_when_run
from cudnn_actor.engines.cpu.fast.lines import Floats
from cudnn_actor.engines.cpu.fast.matrices import blas_takes
from cudnn_actor.engines.cpu.geometry import ConvGeometry
from cudnn_actor.engines.cpu.scratch import Dims, Scratch

__all__ = [
    "FEW_PIXELS",
    "MOST_BOUND_TAPS",
    "Filters",
    "add_call",
    "as_matrices",
    "as_results",
    "calls_of_taps",
    "channels_moved_last",
    "clear_call",
    "copy_call",
    "even",
    "has_dense_channels",
    "images_joined",
    "inner",
    "product_call",
    "reshaped_view",
]

FEW_PIXELS = 192
"""A block of fewer pixels takes more time to read the filter than its columns."""
MOST_BOUND_TAPS = 128
"""The most taps of a filter for each of which calls are bound. For more taps, calls are made when they
run."""


_WITHOUT_COPY: dict[str, Any] = {"copy": False} if np.lib.NumpyVersion(np.__version__) >= "2.1.0" else {}
"""Older versions of NumPy make a copy, which is not used."""


def reshaped_view(array: Floats, dims: Dims) -> Floats | None:
    """A view of an array with other dims; None if only a copy can have them."""
    try:
        view: Floats = np.reshape(array, dims, **_WITHOUT_COPY)
    except ValueError:
        return None
    return view if np.may_share_memory(view, array) else None


def has_dense_channels(array: Floats) -> bool:
    """Whether images, (N, C, spatial), have several pixels, and several channels side by side."""
    return array.shape[1] > 1 and array.strides[1] == array.itemsize and math.prod(array.shape[2:]) > 1


def channels_moved_last(array: Floats) -> Floats:
    """A view of an array of dims (first, channels, others) with the dims (first, others, channels)."""
    return array.transpose(0, *range(2, array.ndim), 1)


def inner(array: Floats, parts: Iterable[slice | int], whole: int = 0) -> Floats:
    """A view of an array: a part along each of the dims before the last `whole` ones, and all of these."""
    index: Any = (..., *parts, *(slice(None),) * whole)
    view: Floats = array[index]
    return view


def copy_call(source: Floats, target: Floats) -> Call:
    """A call that copies an array to another of the same dims."""
    return lambda: np.copyto(target, source)


def even(size: int, most: int) -> int:
    """The size of the parts if `size` is cut into the fewest about equal parts of at most `most`."""
    return -(-size // -(-size // max(1, most)))


def clear_call(target: Floats) -> Call:
    """A call that sets an array to zeros."""
    return lambda: target.fill(0)


def add_call(into: Floats, part: Floats) -> Call:
    """A call that adds an array to another."""
    return lambda: np.add(into, part, out=into)


def product_call(a: Floats, b: Floats, y: Floats) -> Call:
    """A call that computes y = a @ b. Leading dims that are 1 in all of them are dropped."""
    while y.ndim > 2 and y.shape[0] == 1 and b.shape[0] == 1 and (a.ndim < y.ndim or a.shape[0] == 1):
        a, b, y = (a[0] if a.ndim == y.ndim else a), b[0], y[0]
    return lambda: np.matmul(a, b, out=y)


class Filters:
    """A filter as matrices, (groups, filters of a group, depth): a view, if it is packed or channels-last.

    `taps_first`: whether depth is in the order taps, channels.
    """

    def __init__(self, geometry: ConvGeometry, w: Floats, scratch: Scratch) -> None:
        self._groups = geometry.groups
        dims = geometry.filter_matrix
        self._source = w
        moved = channels_moved_last(w)
        found = reshaped_view(w, dims)
        self.taps_first = found is None and reshaped_view(moved, dims) is not None
        if self.taps_first:
            found = reshaped_view(moved, dims)
        self._copied = None if found is not None else scratch.keep(w.shape, w.dtype)
        self._matrices = self._copied.reshape(dims) if found is None and self._copied is not None else found

    def copies(self) -> list[Step]:
        """The step that copies the filter to memory of its own; none if its matrices are a view."""
        if self._copied is None:
            return []
        return [(copy_call(self._source, self._copied),)]

    def matrices(self, filters: slice) -> Floats:
        """The matrices of some filters; of all, if there is more than one group."""
        assert self._matrices is not None
        return self._matrices if self._groups > 1 else self._matrices[:, filters]


def calls_of_taps(taps: int, make: Callable[[], Iterable[Call]]) -> list[Call]:
    """The calls that `make` yields, for each tap of a filter. With more than `MOST_BOUND_TAPS` taps, one call
    that makes them when it runs."""
    return [*make()] if taps <= MOST_BOUND_TAPS else [made_when_run(make)]


def as_results(box: Floats, groups: int) -> Floats | None:
    """A box of y with dims (images, groups, filters of a group, pixels); None if only a copy has them."""
    images, filters, *pixels = box.shape
    return reshaped_view(box, (images, groups, filters // groups, math.prod(pixels)))


def as_matrices(columns: Floats, taps_first: bool, rank: int) -> Floats | None:
    """Columns as matrices, (images, groups, depth, pixels); None if BLAS only takes a copy of them."""
    if taps_first:
        columns = columns.transpose(0, 1, *range(3, 3 + rank), 2, *range(3 + rank, columns.ndim))
    images, groups = columns.shape[:2]
    depth, pixels = math.prod(columns.shape[2 : 3 + rank]), math.prod(columns.shape[3 + rank :])
    found = reshaped_view(columns, (images, groups, depth, pixels))
    return found if found is not None and blas_takes(found) else None


def images_joined(columns: Floats, results: Floats) -> tuple[Floats, Floats]:
    """The operands and the results of a product with the pixels of all images side by side, if they lie so in
    memory."""
    if len(columns) == 1:
        return columns, results
    one, other = (
        reshaped_view(np.moveaxis(each, 0, 2), (1, 1, each.shape[2], each.shape[0] * each.shape[3]))
        for each in (columns, results)
    )
    if one is None or other is None or not blas_takes(one) or not blas_takes(other):
        return columns, results
    return one, other
