"""Walks: loops of a kernel's threads over numbered places, and where each place lies in some tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from cudnn_actor.engines.cuda.kernels.axes import Axis, divisor, merge_axes, merge_dims, split_index

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
            sum((size - 1) * steps[n] for size, steps in self.axes if size) for n in range(len(self.names))
        )
        return max(self.total, *reach) + 1

    @property
    def numbers(self) -> tuple[int, ...]:
        """The arguments of `parameters`."""
        return (
            self.total,
            *(n for size, _ in self.axes[1:] for n in (size, divisor(size))),
            *(step for _, steps in self.axes for step in steps),
        )

    @property
    def parameters(self) -> str:
        """The parameters of a kernel that describe the places."""
        names = [f"{self.letter}_count"]
        names += [f"{self.letter}{n}_{name}" for n in range(1, len(self.axes)) for name in ("size", "by")]
        names += [f"{self.letter}{n}_{name}" for n in range(len(self.axes)) for name in self.names]
        return ", ".join(f"long long {name}" for name in names)

    def at(self, number: str) -> str:
        """Statements that define the offset of a place in each tensor: `x_at` for x."""
        letter, text = self.letter, [f"I {self.letter}_rest = (I){number};"]
        text += [
            split_index(f"{letter}{n}", f"{letter}_rest", f"{letter}{n}_size", f"{letter}{n}_by")
            for n in range(len(self.axes) - 1, 0, -1)
        ]
        text.append(f"const I {letter}0 = {letter}_rest;")
        for name in self.names:
            parts = (f"{letter}{n} * (I){letter}{n}_{name}" for n in range(len(self.axes)))
            text.append(f"const I {name}_at = {' + '.join(parts)};")
        return " ".join(text)

    def loop(self, body: str, unrolled: int = 1) -> str:
        """A loop of all threads over the places. The body knows `{letter}_number` and the offsets."""
        number = f"{self.letter}_number"
        start = f"long long {number} = blockIdx.x * (long long)blockDim.x + threadIdx.x"
        step = f"{number} += (long long)gridDim.x * blockDim.x"
        return f"""#pragma unroll {unrolled}
    for ({start}; {number} < {self.letter}_count; {step}) {{ {self.at(number)} {body} }}"""
