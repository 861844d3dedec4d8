"""Layer norm and RMS norm: each block of rows is centred first, then squared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from cudnn_actor.engines.cpu.fast.kernels import Call, Operands, Step, carrier_dtype, deal, in_turn
from cudnn_actor.engines.cpu.fast.lines import Floats, Part, most_lines, one_each, parts_of_lines
from cudnn_actor.engines.cpu.fast.sums import squares_into, sums_into
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint
from cudnn_actor.protocol.operations import LayerNorm, Node, RMSNorm
from cudnn_actor.protocol.operations.base import Specs

__all__ = ["layer_norm", "rms_norm"]


def layer_norm(node: Node, specs: Specs) -> _RowNorm | None:
    """A kernel of `LayerNorm`; None without elements."""
    assert isinstance(node, LayerNorm)
    return _of(node, specs, centred=True)


def rms_norm(node: Node, specs: Specs) -> _RowNorm | None:
    """A kernel of `RMSNorm`; None without elements."""
    assert isinstance(node, RMSNorm)
    return _of(node, specs, centred=False)


def _of(node: LayerNorm[int] | RMSNorm[int], specs: Specs, *, centred: bool) -> _RowNorm | None:
    x = specs["x"]
    if not x.size:
        return None
    axes = tuple(range(node.axis % x.rank, x.rank))
    return _RowNorm(x.dims, axes, carrier_dtype(x.dtype).itemsize, node.epsilon, centred)


@dataclass(frozen=True)
class _RowNorm:
    """Normalises rows along `axes`. `centred`: whether their mean is subtracted."""

    dims: Dims
    axes: Dims
    itemsize: int
    epsilon: float
    centred: bool

    def footprint(self, lanes: int) -> int:
        """A mean and an inverse deviation for each row of a block, and a block."""
        del lanes
        rows = most_lines(self.dims, self.axes, self.itemsize)
        block = rows * math.prod(self.dims[axis] for axis in self.axes)
        return footprint((rows,), (rows,), (block,), itemsize=self.itemsize)

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        x, y = operands["x"], results["y"]
        weights = {
            name: np.broadcast_to(operands[name], x.shape) for name in ("scale", "bias") if name in operands
        }
        statistics = ("mean", "inverse_deviation" if self.centred else "inverse_rms")
        kept = [results[name] for name in statistics if name in results]

        def call(part: Part, lane: int) -> Call:
            of_y, of_x, *others = part.arrays
            scratch = lanes[lane].fork()
            found = {name: scratch.take(one_each(of_y, part.axes), x.dtype) for name in statistics}
            calls = [self._normalise(of_x, of_y, [*found.values()], part.axes, scratch)]
            for name, weight in zip(weights, others, strict=True):
                calls.append(partial(np.multiply if name == "scale" else np.add, of_y, weight, of_y))
            stored = [found[name] for name in statistics if name in results]
            calls += [partial(np.copyto, into, each) for into, each in zip(part.numbers, stored, strict=True)]
            return in_turn(calls)

        parts = parts_of_lines(self.axes, (y, x, *weights.values()), kept)
        return [deal([*parts], len(lanes), call)]

    def _normalise(
        self, x: Floats, y: Floats, statistics: list[Floats], axes: tuple[int, ...], scratch: Scratch
    ) -> Call:
        mean, inverse = statistics
        length, epsilon = x.dtype.type(x.size // mean.size), x.dtype.type(self.epsilon)
        total = sums_into(x, axes, mean, scratch)
        centred = y if self.centred else x
        squares = squares_into(centred, axes, inverse, scratch)

        def run() -> None:
            if self.centred:
                total()
                np.divide(mean, length, mean)
                np.subtract(x, mean, y)
            squares()
            np.divide(inverse, length, inverse)
            np.add(inverse, epsilon, inverse)
            np.sqrt(inverse, inverse)
            np.reciprocal(inverse, inverse)
            np.multiply(centred, inverse, y)

        return run
