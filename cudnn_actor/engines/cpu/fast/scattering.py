"""Scatters: x is copied, and then changed in place, block by block in the order of the updates."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.blocks import BLOCK_ELEMENTS, merged_axes, pieces
from cudnn_actor.engines.cpu.fast.kernels import (
    COPY_NS,
    MOST_SCRATCH,
    Call,
    Operands,
    Step,
    carrier_dtype,
    deal,
    lanes_worth,
    step_by_lane,
)
from cudnn_actor.engines.cpu.fast.lines import boxes_of_elements
from cudnn_actor.engines.cpu.fast.places import (
    BoundPlaces,
    NamedPlaces,
    box_parts,
    flat_memory,
    places_bytes,
)
from cudnn_actor.engines.cpu.fast.rounding import saturate
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint
from cudnn_actor.protocol.operations import Node, ScatterReduction, Specs
from cudnn_actor.protocol.operations.indexing import Scattering
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["Scattered", "scatter"]

Array = npt.NDArray[Any]
_BLOCK = BLOCK_ELEMENTS
"""Updates of a block."""
_WIDE = np.dtype(np.int64)


def scatter(node: Node, specs: Specs) -> Scattered | None:
    """The kernel for any scatter; None for sums of many small integers, which may exceed their dtype."""
    assert isinstance(node, Scattering)
    x = specs["x"]
    sums = node.reduction in (ScatterReduction.ADD, ScatterReduction.MUL)
    wide = sums and carrier_dtype(x.dtype).kind in "iu" and x.dtype.itemsize < _WIDE.itemsize
    kernel = Scattered(node, x.dims, specs["indices"].dims, x.dtype, wide)
    return kernel if kernel.wide_bytes <= MOST_SCRATCH else None


@dataclass(frozen=True, eq=False)
class Scattered:
    """y is x, with some elements changed.

    `x`, `indices`, `dtype`: dims, and x's dtype. `wide`: elements are summed as int64.
    """

    node: Scattering[Any]
    x: Dims
    indices: Dims
    dtype: DType
    wide: bool

    @property
    def wide_bytes(self) -> int:
        """Bytes of scratch for sums as int64, in the first lane."""
        return footprint(self.x, itemsize=_WIDE.itemsize) if self.wide else 0

    @functools.cached_property
    def _flat(self) -> bool:
        """Whether updates are written along one line, element by element.

        That is fastest where each element has a place of its own, and for sums and the like. And where
        indices are walked through beside several axes of x, NumPy would allocate places for all elements.
        """
        places = self.node.places(self.x, self.indices)
        of_arrays = [n for n, own in enumerate(places.own) if own is None or own in places.of_indices]
        arrays = max(of_arrays) + 1 - min(of_arrays)
        several = arrays > len(places.selected_axes) + 1
        return arrays == len(self.x) or several or self.node.reduction is not ScatterReduction.NONE

    @functools.cached_property
    def _places_bytes(self) -> int:
        return places_bytes(self.node, self.x, self.indices, _BLOCK, flat=self._flat)

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs: for sums, for places, and for a block of updates."""
        del lanes
        return self.wide_bytes + self._places_bytes + footprint((_BLOCK,))

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        x, indices, updates, y = (*(operands[name] for name in self.node.inputs), results["y"])
        into = lanes[0].take(self.x, _WIDE) if self.wide else y
        steps = [_copies(x, into, lanes)]
        written = self._write_updates(into, indices, updates, lanes[0].fork())
        if updates.size:
            steps.append(step_by_lane([[*written]]))
        if self.wide:
            boxes = boxes_of_elements(self.x, BLOCK_ELEMENTS)
            steps.append(deal(boxes, len(lanes), lambda box, _: partial(saturate, into[box], y[box])))
        return steps

    def _write_updates(self, into: Array, indices: Array, updates: Array, scratch: Scratch) -> Iterator[Call]:
        """Calls that write the updates, in their order."""
        bound: dict[tuple[Dims, Dims], BoundPlaces] = {}
        for box in boxes_of_elements(updates.shape, _BLOCK):
            target, of_indices = box_parts(self.node, into, indices, box)
            key = target.shape, of_indices.shape
            places = NamedPlaces(self.node, *key)
            if self._flat:
                target, strides, offset = flat_memory(target)
                places = NamedPlaces(self.node, *key, strides, offset)
            if key not in bound:
                bound[key] = places.bind(scratch.fork())
            own = bound[key]
            yield partial(np.copyto, own.indices, of_indices)
            yield from own.calls
            every: Any = (*box, ...)  # an array also where it has no dims
            values: Array = updates[every]
            if not values.flags.c_contiguous or values.dtype != into.dtype:
                behind = scratch.fork()
                behind.take((self._places_bytes,), np.uint8)
                copied = behind.take(values.shape, into.dtype)
                yield partial(np.copyto, copied, values)
                values = copied
            at: Any = own.at
            if self._flat:
                at, values = own.at[0].reshape(-1), values.reshape(-1)
            yield partial(self.node.write_at, target, at, values)


def _copies(x: Array, y: Array, lanes: Sequence[Scratch]) -> Step:
    dims, (into, of) = merged_axes(y.shape, [y, x])
    lanes = lanes_worth(lanes, COPY_NS * y.size)
    blocks = pieces(dims, BLOCK_ELEMENTS)
    return deal(blocks, len(lanes), lambda part, _: partial(np.copyto, into[part], of[part]))
