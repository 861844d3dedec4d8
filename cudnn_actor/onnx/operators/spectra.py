"""Fourier transforms, as products with the matrices that define them."""

from __future__ import annotations

import math

import numpy as np

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operator_table import operator
from cudnn_actor.onnx.values import Contradiction, Declined
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor

__all__: list[str] = []

_LONGEST = 8192
"""The longest transform: its matrix has the square of that many elements."""
_ROWS = 64
"""How many rows of a matrix are computed at a time."""


def _matrices(node: Node, x: Tensor, kept: int, used: int, length: int) -> tuple[Tensor, Tensor]:
    """The real and the imaginary part of exp(-2 pi i j k / length), for `kept` numbers j and `used` k."""
    of = x.dtype.numpy
    node.reserve(2, kept, used, itemsize=of.itemsize, passing=0)
    cosine, sine = np.empty((kept, used), of), np.empty((kept, used), of)
    for start in range(0, kept, _ROWS):
        rows = np.arange(start, min(kept, start + _ROWS))
        turns = np.outer(rows, np.arange(used)) % length * (2 * math.pi / length)
        cosine[rows], sine[rows] = np.cos(turns), -np.sin(turns)
    return node.weight(cosine), node.weight(sine)


def _parts(g: GraphBuilder, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The real part, and the imaginary part if there is one."""
    return g.slice(x, (..., slice(0, 1))), g.slice(x, (..., slice(1, 2))) if x.dims[-1] == 2 else None


def _forward(node: Node, g: GraphBuilder, x: Tensor, length: int, *, onesided: bool) -> Tensor:
    """Dims (..., n, 1 or 2) as (..., length, 2), transformed along the dim before the last."""
    used = min(x.dims[-2], length)
    x = g.slice(x, (..., slice(0, used), slice(None))) if used < x.dims[-2] else x
    cosine, sine = _matrices(node, x, length // 2 + 1 if onesided else length, used, length)
    real, imaginary = _parts(g, x)
    y, z = g.matmul(cosine, real), g.matmul(sine, real)
    if imaginary is not None:
        y, z = g.subtract(y, g.matmul(sine, imaginary)), g.add(z, g.matmul(cosine, imaginary))
    return g.concatenate([y, z], x.rank - 1)


def _inverse(node: Node, g: GraphBuilder, x: Tensor, length: int) -> Tensor:
    """The inverse of `_forward`: a transform with the parts exchanged, and its parts exchanged."""
    real, imaginary = _parts(g, x)
    imaginary = g.multiply(real, 0.0) if imaginary is None else imaginary
    last = x.rank - 1
    y = _forward(node, g, g.concatenate([imaginary, real], last), length, onesided=False)
    z, w = _parts(g, y)
    assert w is not None
    return g.multiply(g.concatenate([w, z], last), 1 / length)


def _real_inverse(node: Node, g: GraphBuilder, x: Tensor, length: int) -> Tensor:
    """The real numbers, dims (..., length, 1), whose transform has this half, dims (..., n, 2)."""
    real, imaginary = _parts(g, x)
    if imaginary is None:
        raise Declined("an inverse transform of real numbers")
    used = min(x.dims[-2], length // 2 + 1)
    cosine, sine = _matrices(node, x, length, used, length)
    node.reserve(used)
    twice = np.full((used, 1), 2 / length)  # all but the first, and the middle one, stand for two
    twice[0] = 1 / length
    if length % 2 == 0 and used == length // 2 + 1:
        twice[-1] = 1 / length
    weights = node.weight(twice.astype(x.dtype.numpy))
    real, imaginary = (
        g.multiply(g.slice(each, (..., slice(0, used), slice(None))), weights) for each in (real, imaginary)
    )
    return g.add(g.matmul(cosine, real), g.matmul(sine, imaginary))


@operator("DFT", since=17)
def dft(node: Node, g: GraphBuilder) -> Result:
    x, rank = node.tensor(0), node.rank(0)
    given = node.axes("axis")
    axis = rank - 2 if given is None else given[0]
    inverse, onesided = bool(node.attribute("inverse")), bool(node.attribute("onesided"))
    if onesided and not inverse and x.dims[-1] != 1:
        raise Contradiction("has complex numbers, where half a transform is of real ones")
    length = node.count(1) if node.has(1) else 0
    length = length or ((x.dims[axis] - 1) * 2 if inverse and onesided else x.dims[axis])
    if length > _LONGEST:
        raise Declined(f"a transform of {length} elements, where {_LONGEST:,} are the most")
    order = [n for n in range(rank - 1) if n != axis] + [axis, rank - 1]
    moved = g.transpose(x, order)
    if not inverse:
        y = _forward(node, g, moved, length, onesided=onesided)
    else:
        y = (_real_inverse if onesided else _inverse)(node, g, moved, length)
    return g.transpose(y, [order.index(n) for n in range(rank)])


@operator("STFT", since=17)
def stft(node: Node, g: GraphBuilder) -> Result:
    signal, step = node.tensor(0), node.count(1)
    if signal.rank == 2:
        signal = g.reshape(signal, (*signal.dims, 1))
    length = node.count(3) if node.has(3) else node.dims(2)[0]
    count = (signal.dims[1] - length) // step + 1
    node.reserve(count, length, passing=1)
    places = np.arange(count)[:, None] * step + np.arange(length)
    frames = g.take(signal, node.weight(places), 1)  # (batch, frames, length, 1 or 2)
    if node.has(2):
        frames = g.multiply(frames, g.reshape(node.tensor(2), (-1, 1)))
    return _forward(node, g, frames, length, onesided=bool(node.attribute("onesided")))
