"""Random choices, and random tensors, that problems are drawn from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from cudnn_actor.protocol import DType, Layout, TensorSpec

__all__ = ["Choices"]


class Choices:
    """What a random generator gives, in the terms of problems."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def one(self, values: Iterable[Any]) -> Any:
        """One of them, each as likely as the others."""
        values = tuple(values)
        return values[int(self.rng.integers(len(values)))]

    def chance(self, share: float) -> bool:
        """True in this share of the calls."""
        return bool(self.rng.random() < share)

    def size(self, largest: int) -> int:
        """From 1, small ones as often as large ones."""
        return int(math.exp(self.rng.uniform(0, math.log(largest + 1))))

    def each(self, rank: int, least: int, end: int) -> tuple[int, ...]:
        """A number for each dim, from `least` up to but not including `end`."""
        return tuple(int(v) for v in self.rng.integers(least, end, rank))

    def spec(
        self,
        dims: tuple[int, ...],
        dtype: DType,
        layout: Layout | None,
        order: tuple[int, ...] | None = None,
    ) -> TensorSpec:
        """A tensor in a layout; None for any. NHWC becomes NCHW where the rank has none.

        `order`: of the dims in memory without gaps, the slowest first, where the layout is STRIDED.
        """
        layout = layout or self.one(Layout)
        if layout is Layout.STRIDED:
            return self._strided(dims, dtype) if order is None else _in_order(dims, dtype, order)
        return TensorSpec.packed(dims, dtype, layout if 3 <= len(dims) <= 5 else Layout.NCHW)

    def _strided(self, dims: tuple[int, ...], dtype: DType) -> TensorSpec:
        """Dims in any order in memory, with gaps before some of them: a slice of something larger, say."""
        strides, step = [0] * len(dims), self.one((1, 1, 1, 2, 3))
        for axis in self.rng.permutation(len(dims)):
            strides[axis] = step
            step = step * max(dims[axis], 1) + self.one((0, 0, 1, 8))
        return TensorSpec.strided(dims, strides, dtype)


def _in_order(dims: tuple[int, ...], dtype: DType, order: tuple[int, ...]) -> TensorSpec:
    strides, step = [0] * len(dims), 1
    for axis in reversed(order):
        strides[axis], step = step, step * max(dims[axis], 1)
    return TensorSpec.strided(dims, strides, dtype)
