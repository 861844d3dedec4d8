"""Walks: loops of a kernel's threads over numbered places, and where each place lies in some tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from cudnn_actor.engines.cuda.kernels.axes import Axis, merge_axes, merge_dims, split_index, with_divisors
from cudnn_actor.engines.cuda.kernels.kernel import parameters_of

__all__ = ["Walk"]


class Walk(NamedTuple):
    """Numbered places, and the C++ that finds each one's offset in some tensors.

    Parameters
    ----------
    letter
        What the names of its variables begin with.
    names
        Of the tensors.
    axes
        The slowest first, with each tensor's strides.
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
        """A number larger than all that the walk computes."""
        reach = (
            sum((size - 1) * abs(steps[n]) for size, steps in self.axes if size)
            for n in range(len(self.names))
        )
        return max(self.total, *reach) + 1

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
    def parameters(self) -> str:
        """The C parameters of `numbers`."""
        return parameters_of(self.numbers)

    def split(self, number: str, times: int = 1) -> str:
        """Statements that define a place's index along each axis: `t0`, `t1`, ... for the letter t.

        `times`: how many elements an index along the last axis counts.
        """
        letter, last = self.letter, len(self.axes) - 1
        names = ((f"{letter}{n}", f"{letter}_rest", f"{letter}{n}_size") for n in range(last, 0, -1))
        text = [f"I {letter}_rest = (I){number};"]
        text += [split_index(*of, times if n == 0 else 1) for n, of in enumerate(names)]
        text.append(f"const I {letter}0 = {letter}_rest{f' * {times}' if times > 1 and not last else ''};")
        return " ".join(text)

    def offset(self, name: str) -> str:
        """The C expression of where the place with the indices of `split` lies in a tensor."""
        letter = self.letter
        return " + ".join(f"{letter}{n} * (I){letter}{n}_{name}" for n in range(len(self.axes)))

    def at(self, number: str) -> str:
        """Statements that define the offset of a place in each tensor: `x_at` for x."""
        offsets = (f"const I {name}_at = {self.offset(name)};" for name in self.names)
        return " ".join([self.split(number), *offsets])

    def loop(self, body: str, unrolled: int = 1) -> str:
        """A loop of all threads over the places. The body knows `{letter}_number` and the offsets."""
        number = f"{self.letter}_number"
        return f"""#pragma unroll {unrolled}
    EACH({number}, {self.letter}_count) {{ {self.at(number)} {body} }}"""
