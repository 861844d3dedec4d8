"""Runs of a fast plan on the arrays of callers.

To bind a plan to memory takes longer than to copy the inputs and outputs of a run. So a run reads and writes
a caller's arrays in place only if arrays of earlier runs have lain at the same addresses. That is often so:
allocators give the same memory again and again, and buffers stay where they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from cudnn_actor.engines.base import RunAnywhere
from cudnn_actor.engines.cpu.fast.bound_programs import AT_A_TIME, several_fit
from cudnn_actor.engines.cpu.fast.plan import FastPlan, FastProgram
from cudnn_actor.engines.cpu.in_place import LEAST_BYTES, Arrays, InPlace
from cudnn_actor.memory.least_recent import LeastRecent

__all__ = ["FastLaunch"]

_WAYS = 3
"""A run is in place with its inputs and outputs, or with its outputs alone, or with its inputs."""

_Places = tuple[tuple[int, int], ...]
"""The addresses of arrays, each with its place among the buffers."""


class FastLaunch(RunAnywhere):
    """Runs of a plan on the buffers for which this was made, or with arrays in the place of some of these.

    None of these arrays is kept: a bound program has no more than their addresses, and it runs only on
    arrays that lie there at that time, with the same dims, strides and dtype.

    Parameters
    ----------
    plan, buffers
        The plan and the buffers.
    run
        Runs the plan on buffers. It gets the same objects for the same memory each time.
    """

    def __init__(
        self,
        plan: FastPlan,
        buffers: Sequence[np.ndarray],
        run: Callable[[Sequence[np.ndarray]], None],
    ) -> None:
        self._buffers, self._run = buffers, run
        self._in_place = InPlace(buffers, [buffers[place] for place in plan.places_written], _like(buffers))
        self._bound: LeastRecent[_Places, tuple[np.ndarray, ...]] = LeastRecent(most=AT_A_TIME, nbytes=0)
        self._noted = [deque[_Places](maxlen=AT_A_TIME) for _ in range(_WAYS)]
        """The addresses of the arrays of the last runs that were not in place, for each way of being in
        place.

        No more are noted than can be bound. Otherwise, arrays that come again too seldom would be bound in
        each run, and displace each other.
        """

    @staticmethod
    def pays(plan: FastPlan, program: FastProgram) -> bool:
        """Whether a launch of the plan may save time.

        The plan must overwrite no operand, and read and write many bytes. And it must be bound in little
        time: programs of whole networks are too large for that.
        """
        nbytes = sum(buffer.nbytes for buffer in program.buffers)
        return not plan.updates and nbytes >= LEAST_BYTES and several_fit(program)

    def __call__(self) -> None:
        """Compute on its buffers."""
        self._run(self._buffers)

    def may_pay(self, nbytes: int) -> bool:
        """See `RunAnywhere`."""
        return nbytes >= LEAST_BYTES

    def instead(
        self,
        sources: Sequence[tuple[int, np.ndarray]],
        targets: Sequence[tuple[int, np.ndarray | None]],
    ) -> Arrays:
        """See `RunAnywhere`. The arrays have the layout of the buffers, and are at addresses at which such
        arrays have been lately."""
        found = self._in_place.find(sources, targets)
        for ports, noted in zip((None, targets, sources), self._noted, strict=True):
            chosen = found if ports is None else found.only(place for place, _ in ports)
            if chosen.nbytes < LEAST_BYTES:
                continue
            places = tuple(chosen.starts.items())
            if places in self._bound or places in noted:
                return chosen
            noted.append(places)
        return Arrays()

    def run_on(self, arrays: Arrays) -> None:
        """See `RunAnywhere`."""
        places = tuple(arrays.starts.items())
        buffers = self._bound.get(places)
        if buffers is None:
            starts = arrays.starts
            buffers = tuple(
                _at(starts[place], buffer) if place in starts else buffer
                for place, buffer in enumerate(self._buffers)
            )
            self._bound.put(places, buffers, 0)
        self._run(buffers)


def _like(buffers: Sequence[np.ndarray]) -> Callable[[int, np.ndarray], bool]:
    """A function that says whether an array lies as the buffer in a place does.

    No method of the launch: what this kept in a reference cycle would stay mapped until garbage is collected.
    """

    def lies_alike(place: int, array: np.ndarray) -> bool:
        buffer = buffers[place]
        return (
            array.shape == buffer.shape
            and array.strides == buffer.strides
            and array.dtype == buffer.dtype
            and array.flags.aligned
        )

    return lies_alike


class _Memory:
    """Bytes at an address, for NumPy. It does not keep them."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
        }


def _at(address: int, like: np.ndarray) -> np.ndarray:
    """An array at an address, with the dims, strides and dtype of another. Its strides are not negative."""
    steps = zip(like.shape, like.strides, strict=True)
    nbytes = like.itemsize + sum((size - 1) * stride for size, stride in steps) if like.size else 0
    memory = np.asarray(_Memory(address, nbytes))
    return np.ndarray(like.shape, like.dtype, memory, 0, like.strides)
