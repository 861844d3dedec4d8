"""The arrays of a batch: put together from those of its requests, and divided among them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Gather", "assemble", "batch_specs", "concatenate", "divided", "total_nbytes"]

Gather = Callable[[Sequence[np.ndarray], np.ndarray], object]
"""A function that copies arrays, one after another along the leading dim, into one array, and fills it."""

_LOCKED_ELEMENTS = 500
"""NumPy keeps the interpreter's lock while it copies so many elements."""


def batch_specs(part: Mapping[str, np.ndarray], size: int) -> dict[str, TensorSpec]:
    """The specs of a batch of this size with inputs like these."""
    return {name: TensorSpec.packed((size, *one.shape[1:]), one.dtype) for name, one in part.items()}


def concatenate(arrays: Sequence[np.ndarray], whole: np.ndarray) -> None:
    """Copy arrays, one after another along the leading dim, into another one: a `Gather`."""
    np.concatenate(arrays, out=whole)


def assemble(
    parts: Sequence[Mapping[str, np.ndarray]],
    batch: Mapping[str, np.ndarray],
    gather: Gather = concatenate,
) -> None:
    """Fill a batch with the samples of all requests, one after another, copied once.

    The rows behind the samples are copies of the last sample. So no row computes values that no request asked
    for.
    """
    for name, whole in batch.items():
        given = [part[name] for part in parts]
        given += [given[-1][-1:]] * (len(whole) - sum(map(len, given)))
        gather(given, whole)


def divided(
    results: Mapping[str, np.ndarray], counts: Sequence[int], size: int, *, locked: bool = False
) -> list[dict[str, np.ndarray]]:
    """The outputs of each request, as arrays of its own. They keep no other request's outputs alive.

    NumPy releases the interpreter's lock while it copies more than 500 elements. If other threads want the
    lock, getting it back takes longer than a short copy. `locked`: whether to keep the lock.
    """
    parts: list[dict[str, np.ndarray]] = [{} for _ in counts]
    for name, whole in results.items():
        releases = whole.size > _LOCKED_ELEMENTS * len(whole)
        copied = (
            _copies_with_the_lock if locked and releases and whole.flags.c_contiguous else _copies_of_parts
        )
        for part, each in zip(parts, copied(whole, counts, size), strict=True):
            part[name] = each
    return parts


def _copies_of_parts(whole: np.ndarray, counts: Sequence[int], size: int) -> Iterator[np.ndarray]:
    end = 0
    for count in counts:
        begin, end = end, end + count
        yield whole if count == size else whole[begin:end].copy()


def _copies_with_the_lock(whole: np.ndarray, counts: Sequence[int], size: int) -> Iterator[np.ndarray]:
    """Yield the same as `_copies_of_parts`, for C-contiguous arrays, and keep the interpreter's lock.

    Python itself copies the bytes.
    """
    content, dims, dtype = whole.reshape(-1).view(np.uint8).data, whole.shape[1:], whole.dtype
    row, end = whole.nbytes // len(whole), 0
    for count in counts:
        begin, end = end, end + count * row
        yield whole if count == size else np.ndarray((count, *dims), dtype, bytearray(content[begin:end]))


def total_nbytes(parts: Sequence[Mapping[str, np.ndarray]]) -> int:
    """The bytes of all arrays together."""
    return sum(array.nbytes for part in parts for array in part.values())
