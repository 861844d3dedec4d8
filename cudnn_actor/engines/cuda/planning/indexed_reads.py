"""Operations whose results consist of elements of x and of a number: gathers, paddings and the like.

A kernel of pointwise operations computes such an operation, too, by reading x at the places given here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from cudnn_actor.engines.cuda.operations.indexing import strides_of
from cudnn_actor.protocol.operations import BorderPad, GraphTensor, Node, Pad, Resample, ResampleMode
from cudnn_actor.protocol.operations.indexing import Gathering

__all__ = ["Read", "indices_of", "is_indexed_read", "read_of"]

_MOST_INDICES = 1 << 14
"""The most indices in all tables of an operation: a recipe has them as numbers."""
_LARGEST = (1 << 31) - 1
"""An index in a table has 32 bits."""


class Read(NamedTuple):
    """The places at which a kernel reads x.

    Parameters
    ----------
    steps
        The strides of x over the dims of the result, 0 along the axes that indices select along.
    axes
        The axes of x that indices select along, each with the indices; None if they are an operand.
    of_indices
        The strides of that operand over the dims of the result, and the distance of two components of an
        index.
    filling
        The number where an index is below 0; None if no index is.
    """

    steps: tuple[int, ...]
    axes: dict[int, tuple[int, ...] | None]
    of_indices: tuple[tuple[int, ...], int] = ((), 0)
    filling: float | int | None = None


def is_indexed_read(operation: Node, x: GraphTensor, y: GraphTensor) -> bool:
    """Whether a pointwise kernel can compute an operation on such tensors while it reads x."""
    return isinstance(operation, Gathering) or indices_of(operation, x.dims, y.dims) is not None


def indices_of(operation: Node, x: tuple[int, ...], y: tuple[int, ...]) -> dict[int, tuple[int, ...]] | None:
    """The indices along each axis of x that an operation changes, if the operation alone decides them.

    `x`, `y`: dims. None for other operations, and if the indices are too many or too large.
    """
    along: dict[int, Callable[[], np.ndarray]]
    match operation:
        case BorderPad(before=before, after=after, mode=mode):
            widths = enumerate(zip(x, before, after, strict=True))
            along = {axis: partial(mode.places, np, *width) for axis, width in widths if any(width[1:])}
        case Pad(before=before, after=after, steps=steps):
            gaps = enumerate(zip(x, before, after, steps, strict=True))
            along = {axis: partial(_between, *gap) for axis, gap in gaps if gap[1:] != (0, 0, 1)}
        case Resample(mode=ResampleMode.NEAREST):
            taps = operation.taps(x)
            if any(of.outside.any() for of in taps.values()):
                return None
            along = {axis: partial(of.places.__getitem__, (slice(None), 0)) for axis, of in taps.items()}
        case _:
            return None
    if not 0 < sum(y[axis] for axis in along) <= _MOST_INDICES:  # before any index is computed
        return None
    found = {axis: indices() for axis, indices in along.items()}
    if max(map(np.max, found.values())) > _LARGEST:
        return None
    return {axis: tuple(indices.tolist()) for axis, indices in found.items()}


def read_of(operation: Node, x: GraphTensor, dims: tuple[int, ...], *given: GraphTensor) -> Read:
    """The places at which a kernel over the result's dims reads x. `given`: the tensor of indices, if it is
    an operand."""
    if isinstance(operation, Gathering):
        (indices,) = given
        places = operation.places(x.dims, indices.dims)
        steps, of_indices = (_over(dims, of) for of in strides_of(places, x, indices))
        component = indices.strides[-1] if places.stacked else 0
        return Read(steps, dict.fromkeys(places.selected_axes), (of_indices, component))
    axes = indices_of(operation, x.dims, dims)
    assert axes is not None, "the operation is no such one"
    steps = _over(dims, [0 if n in axes else step for n, step in enumerate(x.strides)])
    return Read(steps, {**axes}, filling=operation.value if isinstance(operation, Pad) else None)


def _between(size: int, before: int, after: int, step: int) -> np.ndarray:
    """The indices along an axis of a `Pad`; -1 for places with the number that it fills in."""
    length = (size - 1) * abs(step) + 1 if size else 0
    found = np.full(before + length + after, -1)
    found[before : before + length : abs(step)] = np.arange(size)[:: 1 if step > 0 else -1]
    return found


def _over(dims: Sequence[int], steps: Sequence[int]) -> tuple[int, ...]:
    """The strides, with 0 where a dim has one element."""
    return tuple(0 if size == 1 else step for size, step in zip(dims, steps, strict=True))
