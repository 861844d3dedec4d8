"""Gradients of layer norm and RMS norm: those of x row by row, those of the weights as sums over all rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.fast.folding import Fold, Folding, Select, store
from cudnn_actor.engines.cpu.fast.kernels import Call, Kernel, Operands, Step, carrier_dtype, deal, in_turn
from cudnn_actor.engines.cpu.fast.lines import Floats, Part, most_lines, one_each, parts_of_lines
from cudnn_actor.engines.cpu.fast.sums import dots_into, sums_into
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint
from cudnn_actor.protocol.operations import LayerNormBackward, Node, RMSNormBackward
from cudnn_actor.protocol.operations.base import Specs

__all__ = ["row_norm_backward"]


def row_norm_backward(node: Node, specs: Specs) -> Kernel | None:
    """A kernel of `LayerNormBackward` or `RMSNormBackward`; None without elements."""
    assert isinstance(node, LayerNormBackward | RMSNormBackward)
    x = specs["x"]
    if not x.size:
        return None
    dtype = carrier_dtype(x.dtype)
    return _Backward(x.dims, node.axis % x.rank, dtype)


@dataclass(frozen=True)
class _Backward:
    """The gradients of norms of rows, which begin at dim `first`."""

    dims: Dims
    first: int
    dtype: np.dtype[Any]

    @property
    def _axes(self) -> Dims:
        return tuple(range(self.first, len(self.dims)))

    @property
    def _columns(self) -> Folding:
        return Folding(self.dims, tuple(range(self.first)), self.dtype)

    def footprint(self, lanes: int) -> int:
        """Bytes of each lane: of rows, two numbers for each and two blocks; or what sums of columns need."""
        del lanes
        rows = most_lines(self.dims, self._axes, self.dtype.itemsize)
        block = rows * math.prod(self.dims[self.first :])
        own = footprint(*[(rows,), (block,)] * 2, itemsize=self.dtype.itemsize)
        return max(own, self._columns.footprint())

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        dx = results["dx"]
        given = {
            name: np.broadcast_to(array, self.dims) for name, array in operands.items() if name != "scale"
        }
        if "scale" in operands:
            given["scale"] = np.broadcast_to(operands["scale"], self.dims)

        def call(part: Part, lane: int) -> Call:
            into, *others = part.arrays
            of = dict(zip(given, others, strict=True))
            return _row_gradients(into, of, part.axes, lanes[lane].fork())

        steps = [deal([*parts_of_lines(self._axes, (dx, *given.values()))], len(lanes), call)]
        for name, change in (("dscale", partial(_normalised_product, operands)), ("dbias", None)):
            if name in results:
                into = results[name].reshape(*[1] * self.first, *self.dims[self.first :])
                steps += self._columns.steps(Fold(change=change), operands["dy"], into, lanes, store)
        return steps


def _row_gradients(dx: Floats, of: dict[str, Floats], axes: tuple[int, ...], scratch: Scratch) -> Call:
    """A call that computes dx = (s - mean of s - n * mean of s n) * inverse, with s = dy * scale."""
    inverse = of["inverse_deviation"] if "mean" in of else of["inverse_rms"]
    along, across = (scratch.take(one_each(dx, axes), dx.dtype) for _ in range(2))
    normal = scratch.take(dx.shape, dx.dtype)
    length = dx.dtype.type(dx.size // along.size)
    slope = dx if "scale" in of else of["dy"]
    calls: list[Call] = []
    if "mean" in of:
        calls += [
            partial(np.subtract, of["x"], of["mean"], normal),
            partial(np.multiply, normal, inverse, normal),
        ]
    else:
        calls.append(partial(np.multiply, of["x"], inverse, normal))
    if "scale" in of:
        calls.append(partial(np.multiply, of["dy"], of["scale"], dx))
    calls += [
        dots_into(slope, normal, axes, along, scratch),
        partial(np.divide, along, length, along),
        partial(np.multiply, normal, along, normal),
    ]
    if "mean" in of:
        calls += [
            sums_into(slope, axes, across, scratch),
            partial(np.divide, across, length, across),
            partial(np.add, normal, across, normal),
        ]
    calls += [partial(np.subtract, slope, normal, dx), partial(np.multiply, dx, inverse, dx)]
    return in_turn(calls)


def _normalised_product(of: Operands, dy: Floats, into: Floats, select: Select) -> list[Call]:
    """Calls that multiply dy by the normalised elements."""
    x = select(of["x"])
    if "mean" in of:
        inverse = select(of["inverse_deviation"])
        calls: list[Call] = [
            partial(np.subtract, x, select(of["mean"]), into),
            partial(np.multiply, into, inverse, into),
        ]
    else:
        calls = [partial(np.multiply, x, select(of["inverse_rms"]), into)]
    return [*calls, partial(np.multiply, into, dy, into)]
