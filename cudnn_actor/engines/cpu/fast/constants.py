"""Weights of half types, converted to float32 once for all runs of a deployed graph.

A plan converts the buffers of half types that it reads in each run, since they may have changed. In place of
buffers that keep their values, the plan made here reads arrays of float32. These arrays live as long as the
`Constants` object: the engine makes another object after a write to the weights. Plans for other dims share
an array if its values are the same. So after a write, no plan reads an array that was converted before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.base import no_progress
from cudnn_actor.engines.cpu.fast.plan import Buffer, FastPlan, Piece, Place
from cudnn_actor.engines.cpu.fast.units import stored_number
from cudnn_actor.engines.cpu.scratch import aligned_bytes
from cudnn_actor.engines.scratch_places import Held, places
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["Constants", "Converted", "is_convertible", "with_constants"]


class Constants:
    """A plan that reads converted weights, and the arrays that it runs on.

    Parameters
    ----------
    plan
        The plan.
    buffers
        The arrays that the plan runs on: buffers, and converted weights in place of others.
    converted
        The converted weights among these.
    """

    def __init__(
        self, plan: FastPlan, buffers: Sequence[npt.NDArray[Any]], converted: Sequence[npt.NDArray[Any]]
    ) -> None:
        self.plan = plan
        self.buffers = buffers
        self.converted = converted


class Converted:
    """The weights that are kept in float32, as long as a `Constants` has them."""

    def __init__(self) -> None:
        self._latest: WeakValueDictionary[object, npt.NDArray[Any]] = WeakValueDictionary()
        """The converted weights, by the memory from which they are converted and by their strides."""

    def missing_bytes(
        self, plan: FastPlan, buffers: Sequence[npt.NDArray[Any]], constant: Collection[int]
    ) -> int:
        """The bytes of the converted weights that a plan would read and that are not here yet, if no weight
        has changed since it was converted."""
        found = _convertible(plan, constant).items()
        return sum(
            place.nbytes for number, place in found if _key(buffers[number], place) not in self._latest
        )

    def of(self, source: npt.NDArray[Any], place: Place) -> npt.NDArray[Any]:
        """A buffer's values as `place` wants them: an array that is here, if it has these values, else a new
        one.

        Raises `MemoryError`.
        """
        array = np.ndarray(place.dims, place.dtype, aligned_bytes(place.nbytes), 0, place.strides)
        np.copyto(array, source, casting="unsafe")
        known = self._latest.get(key := _key(source, place))
        if known is not None and np.array_equal(known.view(np.uint32), array.view(np.uint32)):
            return known
        self._latest[key] = array
        return array


def _key(source: npt.NDArray[Any], place: Place) -> object:
    at = source.__array_interface__["data"][0]
    return at, source.shape, source.strides, source.dtype, place.strides


def is_convertible(plan: FastPlan, constant: Collection[int]) -> bool:
    """Whether some weights among these buffers are of half types."""
    return bool(_convertible(plan, constant))


def with_constants(
    plan: FastPlan,
    buffers: Sequence[npt.NDArray[Any]],
    constant: Collection[int],
    converted: Converted,
    on_progress: Callable[[], None] = no_progress,
) -> Constants:
    """The plan for buffers of which those at the places `constant` keep their values. Raises `MemoryError`.

    `on_progress` is called after each buffer that is converted.
    """
    found = _convertible(plan, constant)
    arrays, bound = list(buffers), list(plan.bound)
    for number, place in found.items():
        arrays[number] = converted.of(buffers[number], place)
        on_progress()
        bound[number] = Buffer(place.number, place.dims, DType.FLOAT32)
    numbers = {place.number for place in found.values()}
    kept = [place for place in plan.places if place.number not in numbers]
    offsets, held_bytes = places([Held(one.number, one.nbytes, one.first, one.last) for one in kept])
    reads = dataclasses.replace(
        plan,
        pieces=tuple(_without_loads(piece, numbers) for piece in plan.pieces),
        bound=tuple(bound),
        places=tuple(dataclasses.replace(one, offset=offsets[one.number]) for one in kept),
        held_bytes=held_bytes,
    )
    return Constants(reads, arrays, [arrays[number] for number in found])


def _convertible(plan: FastPlan, constant: Collection[int]) -> dict[int, Place]:
    """The number of each buffer that a run converts → the place to which it converts the values."""
    of_tensors = {place.number: place for place in plan.places}
    return {
        number: of_tensors[stored_number(buffer.number)]
        for number, buffer in enumerate(plan.bound)
        if number in constant and buffer.dtype.is_half and stored_number(buffer.number) in of_tensors
    }


def _without_loads(piece: Piece, numbers: Collection[int]) -> Piece:
    """A piece without the units that copy buffers of these tensors."""
    units = (unit for unit in piece.units if not (len(unit.writes) == 1 and unit.writes[0] in numbers))
    return dataclasses.replace(piece, units=tuple(units))
