"""Gradients of batch, instance and group norm, and sums over channels.

With Q the sum of dy over a channel, P that of dy * (x - mean), i the inverse deviation, and means over the L
elements that are normalised together, whose channels may have several scales s:

    dscale = sum of P i,   dbias = sum of Q,
    dx = dy s i - (x - mean) i² · (sum of s P i) / L - i · (sum of s Q) / L
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.fast.channel_norms import parted_dims
from cudnn_actor.engines.cpu.fast.folding import Fold, Folding, Select, store
from cudnn_actor.engines.cpu.fast.kernels import Call, Kernel, Operands, Step, carrier_dtype, deal, in_turn
from cudnn_actor.engines.cpu.fast.lines import Box, Floats, beside, blocks_of_lines, most_lines
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint
from cudnn_actor.protocol.operations import (
    BatchNormBackward,
    ChannelNorm,
    GenStats,
    GroupNormBackward,
    InstanceNormBackward,
    Node,
)
from cudnn_actor.protocol.operations.base import Specs

__all__ = ["channel_norm_backward", "channel_sums"]

Lanes = Sequence[Scratch]


def channel_norm_backward(node: Node, specs: Specs) -> Kernel | None:
    """A kernel of the gradients of batch, instance or group norm; None without elements."""
    assert isinstance(node, BatchNormBackward | InstanceNormBackward | GroupNormBackward)
    return _Backward(node, *parted_dims(node, specs)) if specs["x"].size else None


def channel_sums(node: Node, specs: Specs) -> Kernel | None:
    """A kernel of `GenStats`; None without elements."""
    assert isinstance(node, GenStats)
    x = specs["x"]
    if not x.size:
        return None
    dtype = carrier_dtype(x.dtype)
    return _Sums(Folding(x.dims, (0, *range(2, x.rank)), dtype))


@dataclass(frozen=True)
class _Sums:
    folding: Folding

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs."""
        del lanes
        return self.folding.footprint()

    def bind(self, operands: Operands, results: Operands, lanes: Lanes) -> list[Step]:
        x = operands["x"]
        into = (results[name].reshape(1, -1, *[1] * (x.ndim - 2)) for name in ("sum", "sum_of_squares"))
        folds = (Fold(), Fold(squares=True))
        return [
            step
            for fold, each in zip(folds, into, strict=True)
            for step in self.folding.steps(fold, x, each, lanes, store)
        ]


@dataclass(frozen=True)
class _Backward:
    """`dims`: of x, as (N, groups, channels of a group, others...)."""

    node: ChannelNorm[int]
    dims: Dims
    dtype: np.dtype[Any]

    @property
    def _folding(self) -> Folding:
        """Sums over each channel, or over those of each sample."""
        others = tuple(range(3, len(self.dims)))
        return Folding(self.dims, (0, *others) if self.node.over_samples else others, self.dtype)

    @property
    def _of_sums(self) -> Dims:
        """The dims of an array of these sums that broadcasts to x."""
        samples = 1 if self.node.over_samples else self.dims[0]
        return (samples, *self.dims[1:3], *[1] * (len(self.dims) - 3))

    @property
    def _of_groups(self) -> Dims:
        """The dims of an array with a number for each mean that broadcasts to x."""
        return tuple(1 if axis == 2 else size for axis, size in enumerate(self._of_sums))

    def footprint(self, lanes: int) -> int:
        """Bytes of each lane: three numbers for each sum, three for each mean; what sums need, or a block."""
        del lanes
        shared = (*[self._of_sums] * 3, *[self._of_groups] * 3)
        block = footprint((most_lines(self.dims, (), self.dtype.itemsize),), itemsize=self.dtype.itemsize)
        return footprint(*shared, itemsize=self.dtype.itemsize) + max(self._folding.footprint(), block)

    def bind(self, operands: Operands, results: Operands, lanes: Lanes) -> list[Step]:
        shared = lanes[0].fork()
        scaled, total, slope = (shared.take(self._of_sums, self.dtype) for _ in range(3))
        along, across, spare = (shared.take(self._of_groups, self.dtype) for _ in range(3))
        rest = [shared, *lanes[1:]]
        dy, x, dx = (each.reshape(self.dims) for each in (operands["dy"], operands["x"], results["dx"]))
        mean, inverse = (operands[name].reshape(self._of_groups) for name in ("mean", "inverse_deviation"))
        between: list[Call] = [
            partial(np.multiply, scaled, inverse, scaled),
            *self._weights(results, scaled, total),
            *self._means(operands, (scaled, total, slope), (along, across)),
            partial(np.multiply, slope, inverse, slope),
            partial(np.multiply, across, inverse, across),
            partial(np.multiply, inverse, inverse, spare),
            partial(np.multiply, along, spare, along),
        ]
        centred = Fold(change=partial(_centred_product, x, mean))
        return [
            *self._folding.steps(Fold(), dy, total, rest, store),
            *self._folding.steps(centred, dy, scaled, rest, store),
            (in_turn(between),),
            _gradient_step((dy, x, dx), mean, (slope, along, across), rest),
        ]

    def _weights(self, results: Operands, scaled: Floats, total: Floats) -> list[Call]:
        """Calls that add up the samples' gradients of scale and bias."""
        calls: list[Call] = []
        for name, sums in (("dscale", scaled), ("dbias", total)):
            if name in results:
                into = results[name].reshape(1, *self._of_sums[1:])
                calls.append(partial(np.add.reduce, sums, 0, out=into, keepdims=True))
        return calls

    def _means(
        self, operands: Operands, sums: tuple[Floats, Floats, Floats], means: tuple[Floats, Floats]
    ) -> list[Call]:
        """Calls that compute the means of slopes, and of slopes times normalised elements; and the scales."""
        *given, slope = sums
        length = self.dtype.type(np.prod(self.dims) // np.prod(self._of_groups))
        scale = self.dtype.type(1)
        if "scale" in operands:
            scale = operands["scale"].reshape(1, *self._of_sums[1:])
        calls: list[Call] = []
        for each, mean in zip(given, means, strict=True):
            calls += [
                partial(np.multiply, each, scale, slope),
                partial(np.add.reduce, slope, 2, out=mean, keepdims=True),
                partial(np.divide, mean, length, mean),
            ]
        return [*calls, partial(np.copyto, slope, scale)]


def _gradient_step(
    arrays: tuple[Floats, Floats, Floats], mean: Floats, factors: tuple[Floats, Floats, Floats], lanes: Lanes
) -> Step:
    """A step that computes dx = dy * slope - ((x - mean) * along + across)."""

    def call(box: Box, lane: int) -> Call:
        dy, x, dx = (array[box] for array in arrays)
        slope, along, across = (beside(array, box) for array in factors)
        others = lanes[lane].fork().take(dx.shape, dx.dtype)
        return in_turn(
            [
                partial(np.subtract, x, beside(mean, box), others),
                partial(np.multiply, others, along, others),
                partial(np.add, others, across, others),
                partial(np.multiply, dy, slope, dx),
                partial(np.subtract, dx, others, dx),
            ]
        )

    return deal([*blocks_of_lines(arrays[2], ())], len(lanes), call)


def _centred_product(x: Floats, mean: Floats, dy: Floats, into: Floats, select: Select) -> list[Call]:
    """Calls that multiply dy by x less its mean."""
    return [partial(np.subtract, select(x), select(mean), into), partial(np.multiply, into, dy, into)]
