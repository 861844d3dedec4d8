"""Convolution problems that the contract is tested with, and random numbers for them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from cudnn_actor.protocol import ConvSpec, DType


class Problem(NamedTuple):
    """Dims of x and w, and the convolution's parameters."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    conv: ConvSpec

    @property
    def y(self) -> tuple[int, ...]:
        return self.conv.output_dims(self.x, self.w)


def _conv(pre: tuple[int, ...], post: tuple[int, ...], stride: tuple[int, ...]) -> ConvSpec:
    return ConvSpec(pre_padding=pre, post_padding=post, stride=stride, dilation=(1,) * len(pre))


PROBLEMS = {
    "plain": Problem((2, 3, 8, 7), (4, 3, 3, 3), ConvSpec.symmetric(2)),
    "padded": Problem((2, 3, 6, 7), (4, 3, 3, 3), ConvSpec.symmetric(2, pad=1)),
    "asymmetric": Problem((2, 3, 6, 7), (4, 3, 3, 2), _conv((0, 2), (1, 0), (1, 1))),
    "strided": Problem((2, 3, 9, 8), (4, 3, 3, 3), ConvSpec.symmetric(2, pad=1, stride=(2, 3))),
    "dilated": Problem((1, 3, 9, 10), (4, 3, 3, 2), ConvSpec.symmetric(2, pad=1, dilation=(2, 3))),
    "grouped": Problem((2, 6, 5, 5), (4, 3, 3, 3), ConvSpec.symmetric(2, pad=1, groups=2)),
    "depthwise": Problem((2, 8, 6, 6), (8, 1, 3, 3), ConvSpec.symmetric(2, pad=1, groups=8)),
    "depthwise_doubled": Problem((2, 4, 6, 6), (8, 1, 3, 3), ConvSpec.symmetric(2, stride=2, groups=4)),
    "pointwise": Problem((3, 8, 4, 5), (6, 8, 1, 1), ConvSpec.symmetric(2)),
    "pointwise_strided": Problem((2, 4, 7, 6), (4, 4, 1, 1), ConvSpec.symmetric(2, stride=2)),
    "pointwise_padded": Problem((2, 4, 3, 3), (4, 4, 1, 1), ConvSpec.symmetric(2, pad=1)),
    "strided_past_the_filter": Problem((1, 3, 11, 11), (2, 3, 2, 2), ConvSpec.symmetric(2, stride=4)),
    "one_output": Problem((2, 3, 5, 4), (4, 3, 5, 4), ConvSpec.symmetric(2)),
    "one_of_everything": Problem((1, 1, 1, 1), (1, 1, 1, 1), ConvSpec.symmetric(2)),
    "one_dimensional": Problem((2, 4, 17), (6, 4, 3), ConvSpec.symmetric(1, pad=2, stride=2, dilation=2)),
    "three_dimensional": Problem(
        (2, 4, 4, 5, 6), (4, 2, 2, 3, 3), ConvSpec.symmetric(3, pad=(0, 1, 1), stride=(1, 2, 1), groups=2)
    ),
    "mostly_padding": Problem((1, 2, 2, 2), (3, 2, 2, 2), _conv((4, 0), (5, 3), (2, 1))),
}
FLOATS = (DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)


def normal(dims: tuple[int, ...], dtype: DType, seed: int) -> np.ndarray:
    """Normally distributed values, the same for the same seed."""
    return np.random.default_rng([seed, *dims]).normal(size=dims).astype(dtype.numpy)


def integers(dims: tuple[int, ...], dtype: DType, seed: int) -> np.ndarray:
    """Uniformly distributed values of the dtype's whole range."""
    limits = np.iinfo(dtype.value)
    rng = np.random.default_rng([seed, *dims])
    return rng.integers(limits.min, limits.max, size=dims, endpoint=True).astype(dtype.numpy)


def smooth(dims: tuple[int, ...]) -> np.ndarray:
    """Values from -4 to 4 in small steps, 0 among them where the number of elements is odd."""
    return np.linspace(-4, 4, math.prod(dims)).reshape(dims)
