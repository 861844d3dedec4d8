"""Convolutions computed in other ways than the engines do: by SciPy, and directly tap by tap."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cudnn_actor.protocol import ConvSpec, DType

from .remembered import remembered

TOLERANCES = {
    DType.FLOAT64: 1e-12,
    DType.FLOAT32: 1e-6,
    DType.FLOAT16: 1e-3,
    DType.BFLOAT16: 8e-3,
}
"""Largest relative error, by norm, of a result of each dtype: its rounding, and a GPU's order of sums."""


def relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    """The norm of the difference in terms of the norm of what is wanted; NaN stays NaN."""
    difference = np.linalg.norm((got.astype(np.float64) - wanted).ravel())
    return float(difference / (np.linalg.norm(wanted.astype(np.float64).ravel()) or 1.0))


def assert_close(got: np.ndarray, wanted: np.ndarray) -> None:
    """Within the tolerance of `got`'s dtype."""
    assert got.shape == wanted.shape
    dtype = DType.of(got.dtype)
    assert dtype is not None
    assert relative_error(got, wanted) <= TOLERANCES[dtype]


def assert_all_close(
    found: Mapping[str, np.ndarray],
    wanted: Mapping[str, np.ndarray],
    tolerances: Mapping[np.dtype[Any], float],
) -> None:
    """Results by name: each element within the tolerance of the result's dtype, absolute and relative."""
    for name, values in wanted.items():
        tolerance = tolerances[found[name].dtype]
        np.testing.assert_allclose(
            found[name].astype(np.float64), values, rtol=tolerance, atol=tolerance, err_msg=name
        )


@remembered
def scipy_forward(x: np.ndarray, w: np.ndarray, conv: ConvSpec) -> np.ndarray:
    """Cross-correlation by `scipy.signal.correlate`, one image, filter and channel at a time."""
    from scipy.signal import correlate  # it takes two seconds of each process that collects tests

    padded, filters = _pad(x, conv), _dilate(w, conv)
    per_group = w.shape[0] // conv.groups
    strided = tuple(slice(None, None, s) for s in conv.stride)
    y = [
        [
            sum(
                correlate(
                    image[k // per_group * w.shape[1] + c], filters[k, c], mode="valid", method="direct"
                )
                for c in range(w.shape[1])
            )[strided]
            for k in range(w.shape[0])
        ]
        for image in padded
    ]
    return np.array(y)


Index = tuple[slice | int, ...]


def _pad(x: np.ndarray, conv: ConvSpec) -> np.ndarray:
    return np.pad(x, [(0, 0), (0, 0), *zip(conv.pre_padding, conv.post_padding, strict=True)])


def _dilate(w: np.ndarray, conv: ConvSpec) -> np.ndarray:
    window = [d * (t - 1) + 1 for d, t in zip(conv.dilation, w.shape[2:], strict=True)]
    dilated = np.zeros((*w.shape[:2], *window), w.dtype)
    dilated[:, :, *(slice(None, None, d) for d in conv.dilation)] = w
    return dilated


@remembered
def direct_forward(x: np.ndarray, w: np.ndarray, conv: ConvSpec) -> np.ndarray:
    """The sum over groups and taps, in x's own dtype."""
    y = np.zeros(conv.output_dims(x.shape, w.shape), x.dtype)
    padded = _pad(x, conv)
    for filters, tap, seen in _taps(x.shape, w.shape, conv):
        y[:, filters] += np.einsum("nc...,kc->nk...", padded[seen], w[tap])
    return y


@remembered
def direct_backward_data(dy: np.ndarray, w: np.ndarray, conv: ConvSpec, dims: tuple[int, ...]) -> np.ndarray:
    """The transpose of `direct_forward` by x."""
    padded = _pad(np.zeros(dims, dy.dtype), conv)
    for filters, tap, seen in _taps(dims, w.shape, conv):
        padded[seen] += np.einsum("nk...,kc->nc...", dy[:, filters], w[tap])
    return padded[:, :, *(slice(p, p + d) for p, d in zip(conv.pre_padding, dims[2:], strict=True))]


@remembered
def direct_backward_filter(
    x: np.ndarray, dy: np.ndarray, conv: ConvSpec, dims: tuple[int, ...]
) -> np.ndarray:
    """The transpose of `direct_forward` by w."""
    dw = np.zeros(dims, x.dtype)
    padded = _pad(x, conv)
    for filters, tap, seen in _taps(x.shape, dims, conv):
        images = (len(x), -1, math.prod(dy.shape[2:]))
        gradient, part = dy[:, filters].reshape(images), padded[seen].reshape(images)
        dw[tap] = np.einsum("nkp,ncp->kc", gradient, part)
    return dw


def _taps(x: tuple[int, ...], w: tuple[int, ...], conv: ConvSpec) -> Iterator[tuple[slice, Index, Index]]:
    """For each group and tap: the group's filters, the tap in w, and what it sees of the padded x."""
    outputs = conv.output_dims(x, w)[2:]
    per_group = w[0] // conv.groups
    for group, tap in itertools.product(range(conv.groups), np.ndindex(w[2:])):
        seen = (
            slice(t * d, t * d + (o - 1) * s + 1, s)
            for t, d, s, o in zip(tap, conv.dilation, conv.stride, outputs, strict=True)
        )
        channels = slice(group * w[1], (group + 1) * w[1])
        filters = slice(group * per_group, (group + 1) * per_group)
        yield filters, (filters, slice(None), *tap), (slice(None), channels, *seen)
