"""Scatters: x is copied, and then changed in place, block by block in the order of the updates."""

from __future__ import annotations

from collections.abc import Sequence
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
    carried,
    deal,
    dealt,
    lanes_worth,
)
from cudnn_actor.engines.cpu.fast.lines import boxes_of_elements
from cudnn_actor.engines.cpu.fast.rounding import store
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint
from cudnn_actor.protocol.operations import Node, ScatterReduction, Specs
from cudnn_actor.protocol.operations.indexing import Scattering
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["Scattered", "scatter"]

Array = npt.NDArray[Any]
_BLOCK = 1 << 15
"""Updates of a block. NumPy allocates as many places for it, and some copies of them."""
_WIDE = np.dtype(np.int64)


def scatter(node: Node, specs: Specs) -> Scattered | None:
    """The kernel for any scatter; None for sums of many small integers, which may exceed their dtype."""
    assert isinstance(node, Scattering)
    x = specs["x"]
    sums = node.reduction in (ScatterReduction.ADD, ScatterReduction.MUL)
    wide = sums and carried(x.dtype).kind in "iu" and x.dtype.itemsize < _WIDE.itemsize
    kernel = Scattered(node, x.dims, x.dtype, wide)
    return kernel if kernel.footprint(1) <= MOST_SCRATCH else None


@dataclass(frozen=True, eq=False)
class Scattered:
    """y is x, of these dims and dtype, with some elements changed. `wide`: they are summed as int64."""

    node: Scattering[Any]
    x: Dims
    dtype: DType
    wide: bool

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs: for sums as int64, in the first one."""
        del lanes
        return footprint(self.x, itemsize=_WIDE.itemsize) if self.wide else 0

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        x, indices, updates, y = (*(operands[name] for name in self.node.inputs), results["y"])
        into = lanes[0].take(self.x, _WIDE) if self.wide else y
        places = self.node.places(x.shape, indices.shape)
        steps = [_copies(x, into, lanes)]
        written: list[Call] = []
        for box in boxes_of_elements(updates.shape, _BLOCK):
            of_x: Any = tuple(slice(None) if own is None else box[own] for own in places.own)
            of_indices: Any = (*(box[own] for own in places.of_indices), ...)  # arrays also without dims
            of_updates: Any = (*box, ...)
            written.append(partial(self.node.write, into[of_x], indices[of_indices], updates[of_updates]))
        steps.append(dealt([written]))
        if self.wide:
            boxes = boxes_of_elements(self.x, BLOCK_ELEMENTS)
            steps.append(
                deal(boxes, len(lanes), lambda box, _: partial(_narrow, into[box], self.dtype, y[box]))
            )
        return steps


def _copies(x: Array, y: Array, lanes: Sequence[Scratch]) -> Step:
    dims, (into, of) = merged_axes(y.shape, [y, x])
    lanes = lanes_worth(lanes, COPY_NS * y.size)
    blocks = pieces(dims, BLOCK_ELEMENTS)
    return deal(blocks, len(lanes), lambda part, _: partial(np.copyto, into[part], of[part]))


def _narrow(sums: Array, dtype: DType, y: Array) -> None:
    store(sums, dtype, y)
