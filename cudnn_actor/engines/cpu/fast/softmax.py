"""Softmax and its logarithm, and their gradients: each block of lines in a few passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from cudnn_actor.engines.cpu.fast.kernels import Call, Kernel, Operands, Step, carrier_dtype, deal, in_turn
from cudnn_actor.engines.cpu.fast.lines import Floats, Part, most_lines, one_each, parts_of_lines
from cudnn_actor.engines.cpu.fast.sums import reduced_into, sums_into
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint
from cudnn_actor.protocol.operations import Node, Softmax, SoftmaxBackward
from cudnn_actor.protocol.operations.base import Specs
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["softmax", "softmax_backward"]

_PIECE = 1 << 18
"""Elements of a line whose powers are in scratch at the same time: blocks of longer lines have only one."""


def softmax(node: Node, specs: Specs) -> Kernel | None:
    """A kernel of `Softmax`; None without elements."""
    assert isinstance(node, Softmax)
    return _of(_Softmax, node, specs["y"])


def softmax_backward(node: Node, specs: Specs) -> Kernel | None:
    """A kernel of `SoftmaxBackward`; None without elements."""
    assert isinstance(node, SoftmaxBackward)
    return _of(_SoftmaxBackward, node, specs["dx"])


def _of(
    kind: type[_Softmax] | type[_SoftmaxBackward],
    node: Softmax[int] | SoftmaxBackward[int],
    result: TensorSpec,
) -> Kernel | None:
    if not result.size:
        return None
    itemsize = carrier_dtype(result.dtype).itemsize
    return kind(dims=result.dims, axis=node.axis % result.rank, log=node.log, itemsize=itemsize)


@dataclass(frozen=True)
class _Lines:
    """Lines along `axis` of a tensor of these dims."""

    dims: Dims
    axis: int
    log: bool
    itemsize: int

    @property
    def _count(self) -> int:
        """The most lines of a block."""
        return most_lines(self.dims, (self.axis,), self.itemsize)

    def footprint(self, lanes: int) -> int:
        """A number for each line of a block."""
        del lanes
        return footprint((self._count,), itemsize=self.itemsize)


class _Softmax(_Lines):
    def footprint(self, lanes: int) -> int:
        """A number for each line of a block; for logarithms also powers and sums of a piece of each line."""
        found, length = super().footprint(lanes), self.dims[self.axis]
        if self.log:
            sizes = (self._count * min(length, _PIECE),), (self._count * -(-length // _PIECE),)
            found += footprint(*sizes, itemsize=self.itemsize)
        return found

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        def call(part: Part, lane: int) -> Call:
            y, x = part.arrays
            return (_logarithm if self.log else _powers)(x, y, part.axes, lanes[lane].fork())

        return [deal([*parts_of_lines((self.axis,), (results["y"], operands["x"]))], len(lanes), call)]


class _SoftmaxBackward(_Lines):
    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        def call(part: Part, lane: int) -> Call:
            dx, dy, y = part.arrays
            gradient = _log_gradient if self.log else _gradient
            return gradient(dy, y, dx, part.axes, lanes[lane].fork())

        arrays = (results["dx"], operands["dy"], operands["y"])
        return [deal([*parts_of_lines((self.axis,), arrays)], len(lanes), call)]


def _of_lines(array: Floats, axes: tuple[int, ...], scratch: Scratch) -> Floats:
    """Scratch for a number for each line of an array."""
    return scratch.take(one_each(array, axes), array.dtype)


def _powers(x: Floats, y: Floats, axes: tuple[int, ...], scratch: Scratch) -> Call:
    of_line = _of_lines(x, axes, scratch)
    largest, total = reduced_into(np.maximum, x, axes, of_line), sums_into(y, axes, of_line, scratch)

    def run() -> None:
        largest()
        np.subtract(x, of_line, y)
        np.exp(y, y)
        total()
        np.divide(y, of_line, y)

    return run


def _logarithm(x: Floats, y: Floats, axes: tuple[int, ...], scratch: Scratch) -> Call:
    of_line = _of_lines(x, axes, scratch)
    largest, total = reduced_into(np.maximum, x, axes, of_line), _sums_of_powers(y, axes, of_line, scratch)

    def run() -> None:
        largest()
        np.subtract(x, of_line, y)
        total()
        np.log(of_line, of_line)
        np.subtract(y, of_line, y)

    return run


def _sums_of_powers(y: Floats, axes: tuple[int, ...], of_line: Floats, scratch: Scratch) -> Call:
    """A call that adds up exp(y) of each line; of long ones in pieces."""
    length = y.shape[-1]
    powers = scratch.take((*y.shape[:-1], min(length, _PIECE)), y.dtype)
    if length <= _PIECE:
        return in_turn([partial(np.exp, y, powers), sums_into(powers, axes, of_line, scratch)])
    sums = scratch.take((*y.shape[:-1], -(-length // _PIECE)), y.dtype)
    calls = list[Call]()
    for number, start in enumerate(range(0, length, _PIECE)):
        piece = y[..., start : start + _PIECE]
        own = powers[..., : piece.shape[-1]]
        of_piece = sums[..., number : number + 1]
        calls += [partial(np.exp, piece, own), sums_into(own, axes, of_piece, scratch)]
    return in_turn([*calls, sums_into(sums, axes, of_line, scratch)])


def _gradient(dy: Floats, y: Floats, dx: Floats, axes: tuple[int, ...], scratch: Scratch) -> Call:
    of_line = _of_lines(y, axes, scratch)
    total = sums_into(dx, axes, of_line, scratch)

    def run() -> None:
        np.multiply(dy, y, dx)
        total()
        np.subtract(dy, of_line, dx)
        np.multiply(dx, y, dx)

    return run


def _log_gradient(dy: Floats, y: Floats, dx: Floats, axes: tuple[int, ...], scratch: Scratch) -> Call:
    of_line = _of_lines(y, axes, scratch)
    total = sums_into(dy, axes, of_line, scratch)

    def run() -> None:
        np.exp(y, dx)
        total()
        np.multiply(dx, of_line, dx)
        np.subtract(dy, dx, dx)

    return run
