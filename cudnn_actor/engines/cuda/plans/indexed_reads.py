"""Operations of which each element of the result is one of x, and which one of those it is.

A kernel of pointwise operations reads it there, so that it computes such an operation, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cudnn_actor.engines.cuda.operations.indexing import strides_of
from cudnn_actor.protocol.operations import BorderPad, GraphTensor, Node, Resample, ResampleMode
from cudnn_actor.protocol.operations.indexing import Gathering

__all__ = ["Read", "indices_of", "is_indexed_read", "read_of"]

_MOST_INDICES = 1 << 14
"""Of all tables of an operation: a recipe has them as numbers."""
_LARGEST = (1 << 31) - 1
"""An index in a table has 32 bits."""


class Read(NamedTuple):
    """Where a kernel reads x.

    Parameters
    ----------
    steps
        The strides of x over the dims of the result, but for the axes along which something selects.
    axes
        Those: each axis of x, and the indices along it, or None for those that are an operand.
    of_indices
        The strides of that operand over the dims of the result, and the one from index to index of a list.
    """

    steps: tuple[int, ...]
    axes: dict[int, tuple[int, ...] | None]
    of_indices: tuple[tuple[int, ...], int] = ((), 0)


def is_indexed_read(operation: Node, x: GraphTensor) -> bool:
    """Whether a kernel of pointwise operations can compute an operation on such a tensor."""
    return isinstance(operation, Gathering) or indices_of(operation, x.dims) is not None


def indices_of(operation: Node, dims: tuple[int, ...]) -> dict[int, tuple[int, ...]] | None:
    """The indices along each axis of an x of these dims that is not read as it is, where they are known.

    None for other operations, and if they are too many or too large.
    """
    found: dict[int, np.ndarray]
    match operation:
        case BorderPad(before=before, after=after, mode=mode):
            widths = enumerate(zip(dims, before, after, strict=True))
            padded = {axis: width for axis, width in widths if any(width[1:])}
            if sum(map(sum, padded.values())) > _MOST_INDICES:  # not computed: an axis may be long
                return None
            found = {axis: mode.places(np, *width) for axis, width in padded.items()}
        case Resample(mode=ResampleMode.NEAREST):
            taps = operation.taps(dims)
            if any(of.outside.any() for of in taps.values()):
                return None
            found = {axis: of.places[:, 0] for axis, of in taps.items()}
        case _:
            return None
    if not 0 < sum(map(len, found.values())) <= _MOST_INDICES or max(map(np.max, found.values())) > _LARGEST:
        return None
    return {axis: tuple(indices.tolist()) for axis, indices in found.items()}


def read_of(operation: Node, x: GraphTensor, dims: tuple[int, ...], *given: GraphTensor) -> Read:
    """Where a kernel over the result's dims reads x. `given`: the indices, if they are an operand."""
    if isinstance(operation, Gathering):
        (indices,) = given
        places = operation.places(x.dims, indices.dims)
        steps, of_indices = (_over(dims, of) for of in strides_of(places, x, indices))
        component = indices.strides[-1] if places.stacked else 0
        return Read(steps, dict.fromkeys(places.selected), (of_indices, component))
    axes = indices_of(operation, x.dims)
    assert axes is not None, "the operation is no such one"
    return Read(_over(dims, [0 if n in axes else step for n, step in enumerate(x.strides)]), {**axes})


def _over(dims: Sequence[int], steps: Sequence[int]) -> tuple[int, ...]:
    """Strides, with 0 where there is one element."""
    return tuple(0 if size == 1 else step for size, step in zip(dims, steps, strict=True))
