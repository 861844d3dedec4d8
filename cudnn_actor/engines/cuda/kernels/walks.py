"""Walks: loops of a kernel's threads over numbered places, and where each place lies in some tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from cudnn_actor.engines.cuda.kernels.axes import Axis, extent, merge_axes, merge_dims
from cudnn_actor.engines.cuda.kernels.index_code import offset_of, split_all, split_index, with_divisors
from cudnn_actor.engines.cuda.kernels.kernel import parameters_of

__all__ = ["Walk"]


class Walk(NamedTuple):
    """Numbered places, and the C++ that finds each one's offset in some tensors.

    Parameters
    ----------
    letter
        The letter with which the names of the walk's C variables begin.
    names
        The names of the tensors.
    axes
        The axes, the slowest first, with each tensor's strides.
    """

    letter: str
    names: tuple[str, ...]
    axes: tuple[Axis, ...]

    @classmethod
    def over(cls, letter: str, dims: Sequence[int], **strides: Sequence[int]) -> Walk:
        """Describe the places of dims, numbered as the first tensor's elements lie in memory."""
        axes = merge_dims(dims, [*strides.values()]) or [(1, (0,) * len(strides))]
        return cls(letter, tuple(strides), tuple(axes))

    @classmethod
    def in_order(cls, letter: str, dims: Sequence[int], **strides: Sequence[int]) -> Walk:
        """Describe the places of dims, numbered in the order of their indices."""
        steps = zip(*strides.values(), strict=True) if dims else ()
        axes = merge_axes(zip(dims, steps, strict=True)) or [(1, (0,) * len(strides))]
        return cls(letter, tuple(strides), tuple(axes))

    @property
    def total(self) -> int:
        """The number of places."""
        return math.prod(size for size, _ in self.axes)

    @property
    def span(self) -> int:
        """A number that is larger than each place's number and offset."""
        sizes = [size for size, _ in self.axes]
        extents = (extent(sizes, (steps[n] for _, steps in self.axes)) for n in range(len(self.names)))
        return max(self.total, *extents) + 1

    @property
    def numbers(self) -> dict[str, int]:
        """The numbers that a kernel needs to know of the places, by the names of its parameters."""
        letter, sizes = self.letter, enumerate(self.axes[1:], 1)
        found = {f"{letter}_count": self.total}
        found |= with_divisors({f"{letter}{n}_size": size for n, (size, _) in sizes})
        for n, (_, steps) in enumerate(self.axes):
            found |= {f"{letter}{n}_{name}": step for name, step in zip(self.names, steps, strict=True)}
        return found

    @property
    def _indices(self) -> list[str]:
        """The C names of a place's index along each axis."""
        return [f"{self.letter}{n}" for n in range(len(self.axes))]

    @property
    def parameters(self) -> str:
        """The C parameters of `numbers`."""
        return parameters_of(self.numbers)

    def split(self, number: str, times: int = 1) -> str:
        """Statements that define a place's index along each axis: `t0`, `t1`, ... for the letter t.

        `times`: how many elements an index along the last axis counts.
        """
        rest = f"{self.letter}_rest"
        axes = [(index, f"{index}_size") for index in reversed(self._indices)]
        return f"I {rest} = (I){number}; {split_all(rest, axes, split_index, times)}"

    def offset(self, name: str) -> str:
        """The C expression of the offset in a tensor of the place whose indices `split` defines."""
        return offset_of(self._indices, (f"(I){index}_{name}" for index in self._indices))

    def at(self, number: str) -> str:
        """Statements that define the offset of a place in each tensor: `x_at` for x."""
        offsets = (f"const I {name}_at = {self.offset(name)};" for name in self.names)
        return " ".join([self.split(number), *offsets])

    def loop(self, body: str, unrolled: int = 1) -> str:
        """A C loop of all threads over the places, with `{letter}_number` and the offsets for its body."""
        number = f"{self.letter}_number"
        return f"""#pragma unroll {unrolled}
    EACH({number}, {self.letter}_count) {{ {self.at(number)} {body} }}"""
