"""A kernel of our own: data that a plan stores, what a plan asks of it, and its launches, compiled.

What differs from kernel to kernel is in its `launches`: CUDA C++, a grid, and arguments. What is done with
kernels is the same for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from cudnn_actor.engines.cuda.kernels.expressions import Scalar
from cudnn_actor.engines.cuda.library.libraries import libraries

__all__ = [
    "ROUNDING",
    "THREADS",
    "Argument",
    "Kernel",
    "Launch",
    "Pointer",
    "Run",
    "blocks_for",
    "compiled",
    "function_of",
]

THREADS = 256
"""Of a block of most kernels."""
_MANY_BLOCKS, _MOST_TURNS = 2048, 4
"""As many blocks keep a GPU busy; if there are more, each does as much as so many at most."""
ROUNDING = ("--fmad=false",)
"""The options for kernels with formulas: a contracted product and sum would not round in between."""

Run = Callable[[Sequence[int], Sequence[float]], None]
"""Enqueues a run on the current stream: takes the addresses of a kernel's tensors, and the plan's scalars."""


class Pointer(NamedTuple):
    """An argument: the address of one of the kernel's tensors, by its number among them."""

    number: int


Argument = Pointer | Scalar | np.ndarray | np.floating | int


class Launch(NamedTuple):
    """One launch of a kernel.

    Parameters
    ----------
    name, source
        The function, and its CUDA C++.
    grid, block
        How many blocks and threads. A grid without blocks, which CUDA refuses, is not launched.
    arguments
        The function's, in order. A `Scalar` is passed as double, an array as the address of a copy on the
        device, an int as long long, and NumPy's numbers as what they are.
    options
        The compiler's, besides C++17.
    """

    name: str
    source: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: Sequence[Argument]
    options: tuple[str, ...] = ()


class Kernel(Protocol):
    """What plans ask of a kernel of our own, which is data: it can be stored, compared and changed."""

    @property
    def name(self) -> str:
        """What the tags of plans call it."""

    @property
    def title(self) -> str:
        """What explanations call it."""

    @property
    def is_empty(self) -> bool:
        """Whether it launches nothing, because there are no elements."""

    def launches(self) -> Sequence[Launch]:
        """Its launches, in order. Generates the sources."""

    def renumbered(self, numbers: Sequence[int]) -> Self:
        """The kernel with `numbers[n]` in the place of the plan's scalar `n`."""


def compiled(kernel: Kernel) -> Run:
    """The kernel, compiled for the current device. Blocks for up to seconds."""
    runs = [_compiled(launch) for launch in kernel.launches() if math.prod(launch.grid)]
    if len(runs) == 1:
        return runs[0]

    def run(pointers: Sequence[int], scalars: Sequence[float]) -> None:
        for each in runs:
            each(pointers, scalars)

    return run


def _compiled(launch: Launch) -> Run:
    """A launch, compiled."""
    cupy = libraries().cupy
    function = function_of(launch.source, launch.name, *launch.options)
    grid, block, double = launch.grid, launch.block, cupy.float64
    arguments: list[Any] = list(launch.arguments)
    addresses: list[tuple[int, int]] = []
    numbers: list[tuple[int, int]] = []
    for place, argument in enumerate(arguments):
        if isinstance(argument, Pointer):
            addresses.append((place, argument.number))
        elif isinstance(argument, Scalar):
            numbers.append((place, argument.number))
        elif isinstance(argument, np.ndarray):
            arguments[place] = cupy.asarray(argument)
            cupy.cuda.get_current_stream().synchronize()  # other streams read it, too

    def run(pointers: Sequence[int], scalars: Sequence[float]) -> None:
        given = arguments.copy()
        for place, number in addresses:
            given[place] = pointers[number]
        for place, number in numbers:
            given[place] = double(scalars[number])
        function(grid, block, given)

    return run


def function_of(source: str, name: str, *options: str) -> Any:
    """A function of some CUDA C++, compiled for the current device. It takes grid, block and arguments."""
    return libraries().cupy.RawModule(code=source, options=("--std=c++17", *options)).get_function(name)


def blocks_for(needed: int) -> int:
    """How many blocks do the work of so many, if each can do that of several."""
    return max(min(needed, _MANY_BLOCKS), -(-needed // _MOST_TURNS))
