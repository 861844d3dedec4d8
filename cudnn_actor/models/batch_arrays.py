"""The arrays of a batch: put together from those of its requests, and divided among them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["assemble", "batch_specs", "divided", "total_nbytes"]


def batch_specs(part: Mapping[str, np.ndarray], size: int) -> dict[str, TensorSpec]:
    """The specs of a batch of this size with inputs like these."""
    return {name: TensorSpec.packed((size, *one.shape[1:]), one.dtype) for name, one in part.items()}


def assemble(parts: Sequence[Mapping[str, np.ndarray]], batch: Mapping[str, np.ndarray]) -> None:
    """Fill a batch with the samples of all requests, one after another, copied once.

    The rows behind them are copies of the last sample, so that they compute nothing that a request does not.
    """
    for name, whole in batch.items():
        given = [part[name] for part in parts]
        given += [given[-1][-1:]] * (len(whole) - sum(map(len, given)))
        np.concatenate(given, out=whole)


def divided(
    results: Mapping[str, np.ndarray], counts: Sequence[int], size: int
) -> list[dict[str, np.ndarray]]:
    """The outputs of each request: arrays of its own, which keep no other's alive."""
    parts, end = [], 0
    for count in counts:
        begin, end = end, end + count
        parts.append({name: all if count == size else all[begin:end].copy() for name, all in results.items()})
    return parts


def total_nbytes(parts: Sequence[Mapping[str, np.ndarray]]) -> int:
    """Bytes of all arrays."""
    return sum(array.nbytes for part in parts for array in part.values())
