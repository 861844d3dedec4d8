"""The places that indices name, computed in scratch memory: of gathers and of scatters."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from cudnn_actor.engines.cpu.boxes import Box, box_dims
from cudnn_actor.engines.cpu.fast.blocks import BLOCK_ELEMENTS
from cudnn_actor.engines.cpu.fast.kernels import Call, Operands, Step, deal
from cudnn_actor.engines.cpu.fast.lines import boxes_of_elements
from cudnn_actor.engines.cpu.fast.recorder import Recorder
from cudnn_actor.engines.cpu.fast.recording import Recorded, Recording
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint
from cudnn_actor.protocol.operations.indexing import Gathering, Scattering

__all__ = ["BoundPlaces", "GatheredByPlaces", "NamedPlaces", "box_parts", "flat_memory", "places_bytes"]

Array = npt.NDArray[Any]
_BLOCK = BLOCK_ELEMENTS
"""Elements of a block."""


@dataclass(frozen=True, eq=False)
class BoundPlaces:
    """Calls that find the places that `indices` hold: what to index with, or distances in elements."""

    calls: Sequence[Call]
    indices: Array
    at: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class NamedPlaces:
    """The places of a gather or a scatter on a tensor of dims `x`, with indices of these dims.

    `strides`: if not None, places are distances from an element at `offset`, in elements, for such strides:
    one array of all dims.
    """

    node: Gathering[Any] | Scattering[Any]
    x: Dims
    indices: Dims
    strides: Dims | None = None
    offset: int = 0

    @functools.cached_property
    def _recording_of_places(self) -> tuple[Recording, Recorded, tuple[Any, ...]]:
        recording = Recording()
        given = recording.new(self.indices, np.int64)
        places = self.node.places(self.x, self.indices)
        at = places.at(Recorder(recording), given, self.x)
        if self.strides is not None:
            at = (recording.pack(self._distances(at, self.strides)),)
        recording.finish([given], [one for one in at if isinstance(one, Recorded)])
        return recording, given, at

    def _distances(self, at: Sequence[Any], strides: Dims) -> Any:
        first = sum(isinstance(one, slice) for one in at)
        rank = max(one.ndim for one in at[first:]) + first + len(self.x) - len(at)

        def along(axis: int) -> Any:
            """How far elements are from the first one along an axis, by constant or by named places."""
            if first <= axis < len(at):
                one = at[axis]
                return (one * strides[axis]).reshape(*one.shape, *[1] * (len(self.x) - len(at)))
            dims = [1] * rank
            dims[axis if axis < first else axis - len(self.x)] = self.x[axis]
            return (np.arange(self.x[axis]) * strides[axis]).reshape(dims)

        terms = [along(axis) for axis in range(len(self.x))]
        constant = [one for one in terms if isinstance(one, np.ndarray)]
        total: Any = sum(constant, np.array(self.offset))
        for one in terms:
            total = total if isinstance(one, np.ndarray) else one + total
        return total

    @property
    def nbytes(self) -> int:
        """Bytes of scratch."""
        return self._recording_of_places[0].nbytes

    def bind(self, memory: Scratch) -> BoundPlaces:
        """The calls and arrays that find these places, in this memory."""
        recording, given, at = self._recording_of_places
        calls, array = recording.on(memory.take((recording.nbytes,), np.uint8), {})
        found = tuple(array(one) if isinstance(one, Recorded) else one for one in at)
        return BoundPlaces(calls, array(given), found)


def box_parts(
    node: Gathering[Any] | Scattering[Any], x: Array, indices: Array, box: Box
) -> tuple[Array, Array]:
    """The parts of x and of the indices that a box of what is read or written needs."""
    places = node.places(x.shape, indices.shape)
    of_x: Any = (*(slice(None) if own is None else box[own] for own in places.own), ...)
    of_indices: Any = (*(box[own] for own in places.of_indices), ...)  # arrays also without dims
    return x[of_x], indices[of_indices]


def flat_memory(x: Array) -> tuple[Array, Dims, int]:
    """The memory that an array lies in as one line, and strides and the first element's place there."""
    strides = tuple(stride // x.itemsize for stride in x.strides)
    lowest: Any = (*(slice(None, None, -1 if stride < 0 else 1) for stride in strides), ...)
    steps = [(size - 1) * abs(stride) for size, stride in zip(x.shape, strides, strict=True)]
    offset = sum(step for step, stride in zip(steps, strides, strict=True) if stride < 0)
    return as_strided(x[lowest], (1 + sum(steps),), (x.itemsize,)), strides, offset


def places_bytes(
    node: Gathering[Any] | Scattering[Any], x: Dims, indices: Dims, block: int, *, flat: bool
) -> int:
    """Bytes of scratch for the places of a block of at most `block` elements. `flat`: whether they are
    distances."""
    dims = node.places(x, indices).dims
    box = max(boxes_of_elements(dims, block), key=lambda box: math.prod(box_dims(box)))
    of_x, of_indices = (as_strided(np.empty(0), of, [0] * len(of)) for of in (x, indices))
    part, of_indices = box_parts(node, of_x, of_indices, box)
    places = NamedPlaces(node, part.shape, of_indices.shape, (1,) * len(x) if flat else None)
    return footprint((places.nbytes,), itemsize=1)


@dataclass(frozen=True, eq=False)
class GatheredByPlaces:
    """y[...] = x[places], element by element, in any layouts. `x`, `indices`: their dims."""

    node: Gathering[Any]
    x: Dims
    indices: Dims
    itemsize: int

    @functools.cached_property
    def _nbytes(self) -> int:
        return places_bytes(self.node, self.x, self.indices, _BLOCK, flat=True)

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs: for places, and for a block of elements."""
        del lanes
        return self._nbytes + footprint((_BLOCK,), itemsize=self.itemsize)

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        x, indices, y = operands["x"], operands["indices"], results["y"]
        bound: dict[tuple[Dims, Dims, int], BoundPlaces] = {}

        def call(box: Box, lane: int) -> Sequence[Call]:
            part, of_indices = box_parts(self.node, x, indices, box)
            memory, strides, offset = flat_memory(part)
            key = part.shape, of_indices.shape, lane
            if key not in bound:
                places = NamedPlaces(self.node, part.shape, of_indices.shape, strides, offset)
                bound[key] = places.bind(lanes[lane].fork())
            own = bound[key]
            every: Any = (*box, ...)  # an array also where it has no dims
            into: Array = y[every]
            (at,) = own.at
            found = into
            if not into.flags.c_contiguous:
                scratch = lanes[lane].fork()
                scratch.take((self._nbytes,), np.uint8)
                found = scratch.take(into.shape, into.dtype)
            calls: list[Call] = [partial(np.copyto, own.indices, of_indices), *own.calls]
            calls.append(partial(memory.take, at, None, found, "clip"))
            return calls if found is into else [*calls, partial(np.copyto, into, found)]

        return [deal(boxes_of_elements(y.shape, _BLOCK), len(lanes), call)]
