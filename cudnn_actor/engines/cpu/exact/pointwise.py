"""A graph's pointwise operations, one box at a time; in place where the operand is no longer needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cudnn_actor.engines.cpu.boxes import Box, box_dims
from cudnn_actor.engines.cpu.exact.activations import BINARY, UNARY
from cudnn_actor.engines.cpu.exact.steps import Step, load
from cudnn_actor.engines.cpu.scratch import Array, Dims, Scratch
from cudnn_actor.protocol.operations import PointwiseMode

__all__ = ["Elementwise", "Loaded", "Operand", "Passed"]


@dataclass(frozen=True)
class Loaded:
    """An operand that is copied from the values of a run: a buffer or a scalar, broadcast along dims of 1."""

    index: int
    dims: Dims


@dataclass(frozen=True)
class Passed:
    """An operand that an earlier operation left in scratch memory; `last` if no later operation reads it."""

    uid: int
    last: bool


Operand = Loaded | Passed


@dataclass(frozen=True)
class Elementwise:
    """One pointwise operation, ready to be bound to scratch memory.

    Parameters
    ----------
    mode, parameter
        As in the graph's `Pointwise`.
    operands
        One or two, depending on the mode.
    dims
        The result's dims.
    """

    mode: PointwiseMode
    parameter: float | None
    operands: tuple[Operand, ...]
    dims: Dims

    def scratch_dims(self) -> Iterator[Dims]:
        """Dims of each array that it takes from scratch memory, for a box that is all of the result."""
        yield from (operand.dims for operand in self.operands if isinstance(operand, Loaded))
        if not any(map(self._reusable, self.operands)):
            yield self.dims

    def bind(self, box: Box, passed: Mapping[int, Array], memory: Scratch) -> tuple[Array, list[Step]]:
        """The result in a box, and the steps that compute it."""
        steps: list[Step] = []
        arrays: list[Array] = []
        out: Array | None = None
        for operand in self.operands:
            if isinstance(operand, Loaded):
                part = tuple(slice(0, 1) if d == 1 else s for d, s in zip(operand.dims, box, strict=True))
                array = memory.take(box_dims(part))
                steps.append(load(operand.index, operand.dims, part, array))
            else:
                array = passed[operand.uid]
            arrays.append(array)
            if out is None and self._reusable(operand):
                out = array
        result = memory.take(box_dims(box)) if out is None else out
        steps.append(self._apply(arrays, result))
        return result, steps

    def _apply(self, arrays: list[Array], out: Array) -> Step:
        if self.mode in BINARY:
            function, (a, b) = BINARY[self.mode], arrays
            return lambda _: function(a, b, out)
        activation, (x,) = UNARY[self.mode], arrays
        parameter = 1.0 if self.parameter is None else self.parameter
        return lambda _: activation(x, parameter, out)

    def _reusable(self, operand: Operand) -> bool:
        return operand.dims == self.dims if isinstance(operand, Loaded) else operand.last
