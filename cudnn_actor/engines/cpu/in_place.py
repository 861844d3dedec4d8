"""Which arrays of callers a run reads and writes where they lie, so that they need not be copied."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

__all__ = ["LEAST_BYTES", "Arrays", "address_of", "fitting"]

LEAST_BYTES = 1 << 18
"""Bytes of arrays with which it pays: to bind a run to them takes as long as to copy some 100 kB."""

Arrays = dict[int, np.ndarray]
"""By their places among the buffers of a run."""


def fitting(
    sources: Sequence[tuple[int, np.ndarray]],
    targets: Sequence[tuple[int, np.ndarray | None]],
    buffers: Sequence[np.ndarray],
    results: Sequence[np.ndarray],
    takes: Callable[[int, np.ndarray, np.ndarray], bool],
) -> tuple[Arrays, Arrays]:
    """The arrays that a run can read, and those that it can write, in place of its buffers.

    No result overlaps what the run reads, or another result. What is read overlaps no buffer that is written
    meanwhile either: there may be views of these.

    Parameters
    ----------
    sources, targets
        See `RunAnywhere.instead`. There is a new array for each target that is None.
    buffers, results
        What the run is expected on, and those of them that it writes.
    takes
        Whether the run can use an array in the place of a buffer, as far as the two alone decide that.
    """
    if len({place for place, _ in targets}) < len(targets):
        return {}, {}
    filled = [*results, *(buffers[place] for place, _ in sources)]
    read = {
        place: array
        for place, array in sources
        if takes(place, array, buffers[place]) and not any(np.may_share_memory(array, one) for one in filled)
    }
    written: Arrays = {}
    for place, target in targets:
        buffer = buffers[place]
        array = np.empty(buffer.shape, buffer.dtype) if target is None else target
        if array.flags.writeable and takes(place, array, buffer):
            written[place] = array
    given = [written[place] for place, target in targets if target is not None and place in written]
    if given:  # no new array overlaps another
        others = [*(array for _, array in sources), *(array for _, array in targets if array is not None)]
        pairs = itertools.product(given, others)
        if any(one is not other and np.may_share_memory(one, other) for one, other in pairs):
            return {}, {}
    return read, written


def address_of(array: np.ndarray) -> int:
    """Where the first element of an array lies."""
    address: int = array.__array_interface__["data"][0]
    return address
