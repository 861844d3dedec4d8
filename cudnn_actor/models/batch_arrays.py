"""The arrays of a batch: put together from those of its requests, and divided among them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain, repeat
from operator import attrgetter
from typing import Any

import numpy as np

from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Gather", "assemble", "batch_specs", "concatenate", "divide_results", "total_nbytes"]

Gather = Callable[[Sequence[np.ndarray], np.ndarray], object]
"""A function that copies arrays, one after another along the leading dim, into one array, and fills it."""

_NBYTES = attrgetter("nbytes")
_array: Callable[[tuple[int, ...], np.dtype[Any], bytearray], np.ndarray] = np.ndarray
_LOCKED_ELEMENTS = 500
"""NumPy keeps the interpreter's lock while it copies an array of up to this many elements."""


def batch_specs(names: Sequence[str], part: Sequence[np.ndarray], size: int) -> dict[str, TensorSpec]:
    """The specs of a batch of this size with inputs like these."""
    return {
        name: TensorSpec.packed((size, *one.shape[1:]), one.dtype)
        for name, one in zip(names, part, strict=True)
    }


def concatenate(arrays: Sequence[np.ndarray], whole: np.ndarray) -> None:
    """Copy arrays, one after another along the leading dim, into another one: a `Gather`."""
    np.concatenate(arrays, out=whole)


def assemble(
    parts: Sequence[Sequence[np.ndarray]],
    batch: Sequence[np.ndarray],
    gather: Gather = concatenate,
) -> None:
    """Fill the inputs of a batch with those of all requests, one after another, copied once.

    The rows behind the samples are copies of the last sample. So no row computes values that no request asked
    for.
    """
    for arrays, whole in zip(zip(*parts, strict=True), batch, strict=True):
        missing = len(whole) - sum(map(len, arrays))
        gather(arrays + (arrays[-1][-1:],) * missing if missing else arrays, whole)


def divide_results(
    results: Mapping[str, np.ndarray], counts: Sequence[int], size: int, *, locked: bool = False
) -> list[dict[str, np.ndarray]]:
    """The outputs of each request, as arrays of its own. They keep no other request's outputs alive.

    NumPy releases the interpreter's lock while it copies more than 500 elements. If other threads want the
    lock, getting it back takes longer than a short copy. `locked`: whether to keep the lock.
    """
    if len(counts) == 1 and counts[0] == size:
        return [dict(results)]
    columns = []
    for whole in results.values():
        releases = whole.size > _LOCKED_ELEMENTS * len(whole)
        copied = _copies_with_the_lock if locked and releases and whole.flags.c_contiguous else _copies
        columns.append(copied(whole, counts))
    if len(columns) == 1:
        (name,) = results
        return [{name: each} for each in columns[0]]
    return [dict(zip(results, each, strict=True)) for each in zip(*columns, strict=True)]


def _copies(whole: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    if _is_one_each(counts):  # nearly always; so Python runs no code for each row
        return [*map(np.ndarray.copy, whole[: len(counts), None])]
    ends = [*accumulate(counts)]
    return [whole[end - count : end].copy() for count, end in zip(counts, ends, strict=True)]


def _copies_with_the_lock(whole: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    """Return the same as `_copies`, for C-contiguous arrays, and keep the interpreter's lock.

    Python itself copies the bytes.
    """
    content, dims = whole.reshape(-1).view(np.uint8).data, whole.shape[1:]
    row = whole.nbytes // len(whole)
    ends: Iterable[int]
    shapes: Iterable[tuple[int, ...]]
    if _is_one_each(counts):  # nearly always; so Python runs no code for each row
        ends, shapes = range(row, row * len(counts) + 1, row), repeat((1, *dims))
    else:
        ends, shapes = [row * end for end in accumulate(counts)], [(count, *dims) for count in counts]
    places = map(slice, chain((0,), ends), ends)
    copies = map(bytearray, map(content.__getitem__, places))
    return [*map(_array, shapes, repeat(whole.dtype), copies)]


def _is_one_each(counts: Sequence[int]) -> bool:
    return sum(counts) == len(counts)


def total_nbytes(arrays: Iterable[np.ndarray]) -> int:
    """The bytes of all arrays together."""
    return sum(map(_NBYTES, arrays))
