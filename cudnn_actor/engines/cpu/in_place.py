"""Finds the arrays of callers that a run can read and write where they lie, so that they need not be
copied."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from cudnn_actor.memory.array_addresses import address_of

__all__ = ["LEAST_BYTES", "Arrays", "InPlace"]

LEAST_BYTES = 1 << 18
"""Bytes of arrays with which it pays: to bind a run to them takes as long as to copy some 100 kB."""


class Arrays(dict[int, np.ndarray]):
    """Arrays by their places among the buffers of a run.

    Attributes
    ----------
    starts
        The address of each, by the same places.
    nbytes
        The bytes of all.
    """

    __slots__ = ("nbytes", "starts")

    def __init__(self) -> None:
        self.starts: dict[int, int] = {}
        self.nbytes = 0

    def only(self, places: Iterable[int]) -> Arrays:
        """The arrays at some places."""
        chosen = Arrays()
        for place in places:
            if place in self:
                chosen[place], chosen.starts[place] = self[place], self.starts[place]
                chosen.nbytes += self[place].nbytes
        return chosen


class InPlace:
    """Finds the arrays that runs can read, and those that they can write, in place of some buffers.

    What it can know before a run is decided once: each run of a model asks it.

    Parameters
    ----------
    buffers, results
        What the runs are expected on, and those of them that they write.
    takes
        Whether a run can use an array in the place of a buffer, as far as the two alone decide that. Such an
        array takes up as many bytes of memory as the buffer, from its first element on.
    """

    def __init__(
        self,
        buffers: Sequence[np.ndarray],
        results: Sequence[np.ndarray],
        takes: Callable[[int, np.ndarray], bool],
    ) -> None:
        self._buffers, self._takes = buffers, takes
        self._bounds = [np.lib.array_utils.byte_bounds(buffer) for buffer in buffers]
        self._written = [np.lib.array_utils.byte_bounds(buffer) for buffer in results]
        self._lowest = min(low for low, _ in self._bounds)
        self._highest = max(high for _, high in self._bounds)
        self._makes: dict[int, bool] = {}
        """Whether new arrays can be written in the place of a buffer."""

    def find(
        self,
        sources: Sequence[tuple[int, np.ndarray]],
        targets: Sequence[tuple[int, np.ndarray | None]],
    ) -> Arrays:
        """The arrays that a run can read and write.

        No result overlaps what the run reads, or another result. What is read overlaps no buffer that is
        written meanwhile either: there may be views of these.

        Parameters
        ----------
        sources, targets
            See `RunAnywhere.instead`. There is a new array for each target that is None.
        """
        found, takes, buffers, makes = Arrays(), self._takes, self._buffers, self._makes
        if len(targets) > 1 and len({place for place, _ in targets}) < len(targets):
            return found
        starts, nbytes = found.starts, 0
        for place, array in sources:
            if takes(place, array):
                start = address_of(array)
                # Nearly always it lies beside all of the buffers.
                if start >= self._highest or not self._is_filled(start, place, sources):
                    found[place], starts[place] = array, start
                    nbytes += array.nbytes
        given = list[np.ndarray]()
        for place, target in targets:
            if target is None:
                if not (makes[place] if place in makes else self._makes_new(place)):
                    continue
                buffer = buffers[place]
                array = np.empty(buffer.shape, buffer.dtype)
            elif target.flags.writeable and takes(place, target):
                array = target
                given.append(array)
            else:
                continue
            found[place], starts[place] = array, address_of(array)
            nbytes += array.nbytes
        if given and _overlap(given, sources, targets):
            return Arrays()
        found.nbytes = nbytes
        return found

    def _is_filled(self, start: int, place: int, sources: Sequence[tuple[int, object]]) -> bool:
        """Whether an array that is at this address, in a place, overlaps a buffer that is written."""
        low, high = self._bounds[place]
        end = start + high - low
        if end <= self._lowest or start >= self._highest:  # nearly always
            return False
        # Each source is copied to its buffer, if it is not in place.
        written = [*self._written, *(self._bounds[other] for other, _ in sources)]
        return any(start < high and low < end for low, high in written)

    def _makes_new(self, place: int) -> bool:
        buffer = self._buffers[place]
        known = self._makes[place] = self._takes(place, np.empty(buffer.shape, buffer.dtype))
        return known


def _overlap(
    given: Sequence[np.ndarray],
    sources: Sequence[tuple[int, np.ndarray]],
    targets: Sequence[tuple[int, np.ndarray | None]],
) -> bool:
    """Whether a result that was given overlaps another array. No new array does."""
    others = [*(array for _, array in sources), *(array for _, array in targets if array is not None)]
    pairs = itertools.product(given, others)
    return any(one is not other and np.may_share_memory(one, other) for one, other in pairs)
