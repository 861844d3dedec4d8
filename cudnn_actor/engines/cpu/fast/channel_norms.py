"""Batch, instance and group norm: means first, then variances around them, and then each element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.engines.cpu.fast.folding import Fold, Folding, Select
from cudnn_actor.engines.cpu.fast.kernels import Call, Kernel, Operands, Step, carrier_dtype, deal, in_turn
from cudnn_actor.engines.cpu.fast.lines import Box, Floats, beside, blocks_of_lines, most_lines
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint
from cudnn_actor.protocol.operations import (
    BatchNorm,
    BatchNormTraining,
    ChannelNorm,
    GroupNorm,
    InstanceNorm,
    Node,
)
from cudnn_actor.protocol.operations.base import Specs

__all__ = ["batch_norm", "channel_norm", "parted_dims"]

Lanes = Sequence[Scratch]


def batch_norm(node: Node, specs: Specs) -> Kernel | None:
    """A kernel of `BatchNorm`, for inference; None without elements."""
    assert isinstance(node, BatchNorm)
    return _BatchNorm(node, *parted_dims(node, specs)) if specs["x"].size else None


def channel_norm(node: Node, specs: Specs) -> Kernel | None:
    """A kernel of `BatchNormTraining`, `InstanceNorm` or `GroupNorm`; None without elements."""
    assert isinstance(node, BatchNormTraining | InstanceNorm | GroupNorm)
    return _Normalizing(node, *parted_dims(node, specs)) if specs["x"].size else None


def parted_dims(node: ChannelNorm[int], specs: Specs) -> tuple[Dims, np.dtype[Any]]:
    """Dims of x as (N, groups, channels of a group, others...), and the dtype of its arrays."""
    x = specs["x"]
    groups = node.groups_of(x.dims[1])
    dims = (x.dims[0], groups, x.dims[1] // groups, *x.dims[2:])
    return dims, carrier_dtype(x.dtype)


class _Factor(NamedTuple):
    """How a block's factors are computed.

    `calls` gives the calls, from the block's parts of `arrays` and the array to write to.
    """

    arrays: Sequence[Floats]
    calls: Callable[[Sequence[Floats], Floats], list[Call]]


@dataclass(frozen=True)
class _PerChannel:
    """y = (x - mean) * factor + bias. `dims`: of x, as (N, groups, channels of a group, others...)."""

    dims: Dims
    dtype: np.dtype[Any]

    def footprint(self) -> int:
        """Bytes of each lane: the factors of a block."""
        return footprint((most_lines(self.dims, (), self.dtype.itemsize),), itemsize=self.dtype.itemsize)

    def of_channels(self, array: Floats) -> Floats:
        """An array with a number for each channel, as one that broadcasts to x."""
        return array.reshape(1, *self.dims[1:3], *[1] * (len(self.dims) - 3))

    def step(
        self, arrays: tuple[Floats, Floats], mean: Floats, factor: _Factor, bias: Floats | None, lanes: Lanes
    ) -> Step:
        """A step that computes y. `arrays`: x and y, of the operation's own dims."""
        x, y = (array.reshape(self.dims) for array in arrays)

        def call(box: Box, lane: int) -> Call:
            of_x, of_y = x[box], y[box]
            numbers = [beside(array, box) for array in factor.arrays]
            dims = np.broadcast_shapes(*(array.shape for array in numbers))
            factors = lanes[lane].fork().take(dims, self.dtype)
            calls: list[Call] = [
                *factor.calls(numbers, factors),
                partial(np.subtract, of_x, beside(mean, box), of_y),
                partial(np.multiply, of_y, factors, of_y),
            ]
            if bias is not None:
                calls.append(partial(np.add, of_y, beside(bias, box), of_y))
            return in_turn(calls)

        return deal([*blocks_of_lines(y, ())], len(lanes), call)


@dataclass(frozen=True)
class _BatchNorm:
    node: BatchNorm[int]
    dims: Dims
    dtype: np.dtype[Any]

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs."""
        del lanes
        return _PerChannel(self.dims, self.dtype).footprint()

    def bind(self, operands: Operands, results: Operands, lanes: Lanes) -> list[Step]:
        per_channel = _PerChannel(self.dims, self.dtype)
        numbers = {name: per_channel.of_channels(operands[name]) for name in operands if name != "x"}
        given = [numbers[name] for name in ("variance", "scale") if name in numbers]
        step = per_channel.step(
            (operands["x"], results["y"]),
            numbers["mean"],
            _Factor(given, self._factors),
            numbers.get("bias"),
            lanes,
        )
        return [step]

    def _factors(self, given: Sequence[Floats], factors: Floats) -> list[Call]:
        variance, *scale = given
        return [
            partial(np.add, variance, self.dtype.type(self.node.epsilon), factors),
            partial(np.sqrt, factors, factors),
            partial(np.divide, scale[0] if scale else self.dtype.type(1), factors, factors),
        ]


@dataclass(frozen=True)
class _Normalizing:
    node: BatchNormTraining[int] | InstanceNorm[int] | GroupNorm[int]
    dims: Dims
    dtype: np.dtype[Any]

    @property
    def _folding(self) -> Folding:
        others = tuple(range(2, len(self.dims)))
        return Folding(self.dims, (0, *others) if self.node.over_samples else others, self.dtype)

    @property
    def _of_groups(self) -> Dims:
        """The dims of an array with a number for each mean that broadcasts to x."""
        return tuple(1 if axis in self._folding.axes else size for axis, size in enumerate(self.dims))

    def footprint(self, lanes: int) -> int:
        """Bytes of each lane: five numbers for each mean, and what each step needs."""
        del lanes
        steps = max(self._folding.footprint(), _PerChannel(self.dims, self.dtype).footprint())
        return steps + footprint(*[self._of_groups] * 5, itemsize=self.dtype.itemsize)

    def bind(self, operands: Operands, results: Operands, lanes: Lanes) -> list[Step]:
        x, folding, per_channel = operands["x"], self._folding, _PerChannel(self.dims, self.dtype)
        shared = lanes[0].fork()
        mean, inverse, variance, one, other = (shared.take(self._of_groups, self.dtype) for _ in range(5))
        if "mean" in results:
            mean = results["mean"].reshape(self._of_groups)
        if "inverse_deviation" in results:
            inverse = results["inverse_deviation"].reshape(self._of_groups)
        rest = [shared, *lanes[1:]]
        parted, centred = x.reshape(self.dims), Fold(squares=True, change=partial(_centre, mean))
        length = self.dtype.type(folding.length)

        def finish(total: Floats, into: Floats) -> None:
            np.divide(total, length, into)

        between: list[Call] = [partial(self._invert, variance, inverse)]
        if isinstance(self.node, BatchNormTraining):
            of_x = {"running_mean": mean, "running_variance": variance}
            between += self._update_running(self.node, (operands, results), of_x, (one, other))
        given = [
            inverse,
            *(per_channel.of_channels(operands[name]) for name in ("scale",) if name in operands),
        ]
        bias = per_channel.of_channels(operands["bias"]) if "bias" in operands else None
        return [
            *folding.steps(Fold(), parted, mean, rest, finish),
            *folding.steps(centred, parted, variance, rest, finish),
            (in_turn(between),),
            per_channel.step((x, results["y"]), mean, _Factor(given, _products), bias, rest),
        ]

    def _invert(self, variance: Floats, inverse: Floats) -> None:
        np.add(variance, self.dtype.type(self.node.epsilon), inverse)
        np.sqrt(inverse, inverse)
        np.reciprocal(inverse, inverse)

    def _update_running(
        self,
        node: BatchNormTraining[int],
        given: tuple[Operands, Operands],
        of_x: dict[str, Floats],
        scratch: tuple[Floats, Floats],
    ) -> list[Call]:
        """Calls that compute the new running statistics. `scratch`: two arrays like the statistics of x."""
        operands, results = given
        shares = {"running_mean": node.momentum, "running_variance": node.momentum}
        shares["running_variance"] *= node.correction(self._folding.length)
        kept, added = scratch
        calls: list[Call] = []
        for name, share in shares.items():
            if f"new_{name}" in results:
                old, new = (
                    each.reshape(self._of_groups) for each in (operands[name], results[f"new_{name}"])
                )
                calls += [
                    partial(np.multiply, old, self.dtype.type(1 - node.momentum), kept),
                    partial(np.multiply, of_x[name], self.dtype.type(share), added),
                    partial(np.add, kept, added, new),
                ]
        return calls


def _centre(mean: Floats, part: Floats, into: Floats, select: Select) -> list[Call]:
    return [partial(np.subtract, part, select(mean), into)]


def _products(given: Sequence[Floats], factors: Floats) -> list[Call]:
    first, *others = given
    return [partial(np.multiply, first, others[0] if others else factors.dtype.type(1), factors)]
