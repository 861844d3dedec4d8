"""Staging memory as a worker sees it: segments that the parent has made."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np

from cudnn_actor.engines.base import Engine
from cudnn_actor.execution.arriving import Arriving
from cudnn_actor.isolation.process.arrivals import Arrival, parts_of
from cudnn_actor.isolation.process.wire import Staged
from cudnn_actor.isolation.staging import map_segment
from cudnn_actor.processes.frames import BadFrame
from cudnn_actor.protocol.errors import CudnnActorError
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Stages"]


class Stages:
    """The mapped segments, by number.

    Parameters
    ----------
    engine
        Returns the engine, which pins each segment after it is mapped and unpins it before it is unmapped.
    """

    def __init__(self, engine: Callable[[], Engine]) -> None:
        self._engine = engine
        self._mapped: dict[int, mmap.mmap] = {}
        self._refused: dict[int, CudnnActorError] = {}

    def map(self, segment: int, descriptor: int, nbytes: int) -> None:
        """Map a segment. The caller keeps the descriptor. Raises `OSError`."""
        self._mapped[segment] = mapped = map_segment(descriptor, nbytes)
        self._engine().pin(memoryview(mapped))

    def refuse(self, segment: int, error: CudnnActorError) -> None:
        """Let requests that name this segment fail, because this process had no room to map it."""
        self._refused[segment] = error

    def unmap(self, segment: int) -> None:
        """Unmap a segment, which nothing uses any more."""
        if self._refused.pop(segment, None) is not None:
            return
        self._engine().unpin(memoryview(self._mapped[segment]))
        del self._mapped[segment]

    def array(self, staged: Staged, spec: TensorSpec) -> np.ndarray:
        """The values of a buffer, C-contiguous.

        Raises `BadFrame` for a place that does not exist, and the error that `refuse` was given.
        """
        if self._refused and (refusal := self._refused.get(staged.segment)) is not None:
            raise refusal.again()
        try:
            return np.ndarray(
                spec.dims, spec.dtype.numpy, buffer=self._mapped[staged.segment], offset=staged.offset
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadFrame(f"there is no such place in staging memory: {error!r}") from error

    def values(self, staged: Staged, spec: TensorSpec) -> np.ndarray | Arriving:
        """The values for a buffer, C-contiguous, which may still arrive. Raises what `array` raises."""
        array = self.array(staged, spec)
        if not staged.arrival:
            return array
        try:
            arrival = Arrival(memoryview(self._mapped[staged.segment]), staged.arrival)
        except (TypeError, ValueError) as error:
            raise BadFrame(f"there are no such words in staging memory: {error!r}") from error
        parts = parts_of(array.nbytes)
        return Arriving(array, parts, arrival.is_there, arrival.first_missing, arrival.answer)
