"""Runs of a fast plan on the arrays of callers.

A plan is bound to memory, which takes longer than to copy what a run reads and writes. So a run is on a
caller's arrays only where earlier arrays have lain before: allocators give the same memory again and again,
and buffers stay where they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cudnn_actor.engines.base import RunAnywhere
from cudnn_actor.engines.cpu.fast.bound_programs import AT_A_TIME, is_small
from cudnn_actor.engines.cpu.fast.plan import FastPlan, FastProgram
from cudnn_actor.engines.cpu.in_place import LEAST_BYTES, Arrays, address_of, fitting
from cudnn_actor.memory.least_recent import LeastRecent

__all__ = ["FastLaunch"]

_WAYS = 3
"""A run is in place with its inputs and outputs, or with its outputs alone, or with its inputs."""

_Places = tuple[tuple[int, int], ...]
"""Where arrays lie: places among the buffers, and addresses."""


class FastLaunch(RunAnywhere):
    """Runs of a plan on the buffers that it was made for, or on arrays in place of some.

    None of these arrays is kept: a bound program has no more than their addresses, and it runs only on
    arrays that lie there at that time, with the same dims, strides and dtype.

    Parameters
    ----------
    plan, buffers
        The plan and the buffers.
    run
        Computes on buffers, whose objects are the same for the same memory.
    """

    def __init__(
        self,
        plan: FastPlan,
        buffers: Sequence[np.ndarray],
        run: Callable[[Sequence[np.ndarray]], None],
    ) -> None:
        self._buffers, self._run = buffers, run
        self._results = [buffers[place] for place in plan.written]
        self._bound: LeastRecent[_Places, tuple[np.ndarray, ...]] = LeastRecent(most=AT_A_TIME, nbytes=0)
        self._noted = [deque[_Places](maxlen=AT_A_TIME) for _ in range(_WAYS)]
        """Where the arrays of the last runs lay that were not in place in each way.

        No more are noted than can be bound. Else arrays that come round too seldom would be bound in each
        run, and displace each other."""

    @staticmethod
    def pays(plan: FastPlan, program: FastProgram) -> bool:
        """Whether a plan may run on other buffers than those of this program, and that may pay.

        It overwrites no operand, what it reads and writes is large, and it is bound soon: no network is.
        """
        nbytes = sum(buffer.nbytes for buffer in program.buffers)
        return not plan.updates and nbytes >= LEAST_BYTES and is_small(program)

    def __call__(self) -> None:
        """Compute on its buffers."""
        self._run(self._buffers)

    def instead(
        self,
        sources: Sequence[tuple[int, np.ndarray]],
        targets: Sequence[tuple[int, np.ndarray | None]],
    ) -> Arrays:
        """See `RunAnywhere`: arrays that lie as the buffers do, and where such arrays have lain lately."""
        read, written = fitting(sources, targets, self._buffers, self._results, _lie_alike)
        for found, noted in zip((read | written, written, read), self._noted, strict=True):
            if sum(array.nbytes for array in found.values()) < LEAST_BYTES:
                continue
            places = _places(found)
            if places in self._bound or places in noted:
                return found
            noted.append(places)
        return {}

    def run_on(self, arrays: Mapping[int, np.ndarray]) -> None:
        """See `RunAnywhere`."""
        places = _places(arrays)
        buffers = self._bound.get(places)
        if buffers is None:
            buffers = tuple(
                _at(address_of(arrays[place]), buffer) if place in arrays else buffer
                for place, buffer in enumerate(self._buffers)
            )
            self._bound.put(places, buffers, 0)
        self._run(buffers)


def _places(arrays: Mapping[int, np.ndarray]) -> _Places:
    return tuple((place, address_of(array)) for place, array in arrays.items())


def _lie_alike(_place: int, array: np.ndarray, buffer: np.ndarray) -> bool:
    return (
        array.shape == buffer.shape
        and array.strides == buffer.strides
        and array.dtype == buffer.dtype
        and array.flags.aligned
    )


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
