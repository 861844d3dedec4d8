"""A kernel of our own: data that a plan stores, with launches that are compiled and run here.

Kernels differ in their `launches`: CUDA C++, a grid, and arguments. All of them are compiled and run in the
same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple, Protocol

import numpy as np

from cudnn_actor.engines.cuda.kernels.expressions import Scalar
from cudnn_actor.engines.cuda.library.libraries import libraries

__all__ = [
    "AHEAD",
    "BUSY_BLOCKS",
    "FEW_BLOCKS",
    "LARGEST_GRID",
    "MOST_BLOCKS",
    "MOST_THREADS",
    "MOST_TURNS",
    "MULTIPROCESSORS",
    "ROUNDING",
    "THREADS",
    "WARP",
    "Ahead",
    "Argument",
    "Kernel",
    "Launch",
    "Pointer",
    "Run",
    "arguments_of",
    "blocks_for",
    "compile_run",
    "grid_over",
    "on_device",
    "parameters_of",
    "power_of_two",
]

WARP, THREADS, MOST_THREADS = 32, 256, 1024
"""Threads of a warp, of a block of most kernels, and of any block at most."""
FEW_BLOCKS, MOST_BLOCKS, LARGEST_GRID = 1 << 10, 1 << 16, (1 << 31) - 1
"""The most blocks of a grid: `FEW_BLOCKS` if each block has memory of its own, or ends with an atomic step;
`MOST_BLOCKS` if a block can do the work of several; `LARGEST_GRID`, CUDA's limit, if each has much to do."""
MULTIPROCESSORS = 132
"""The multiprocessors of an H200, for which the numbers of blocks are chosen."""
BUSY_BLOCKS, MOST_TURNS = 2048, 4
"""The number of blocks that keeps a GPU busy, and the most blocks whose work one block does: see
`blocks_for`."""
ROUNDING = ("--fmad=false",)
"""The compiler's options for kernels with formulas: a fused multiply-add would not round the product."""

_MOST_SOURCES = 4096
Run = Callable[[Sequence[int], Sequence[float]], None]
"""Enqueues a run on the current stream: takes the addresses of a kernel's tensors, and the plan's scalars."""


class Pointer(NamedTuple):
    """An argument: the address of one of the kernel's tensors, by its number among them."""

    number: int


Argument = Pointer | Scalar | np.ndarray | np.floating | float


class Launch(NamedTuple):
    """A launch of a kernel.

    Parameters
    ----------
    name, source
        The function's name, and its CUDA C++.
    grid, block
        The numbers of blocks, and of a block's threads. A grid without blocks, which CUDA refuses, is not
        launched.
    arguments
        The function's arguments, in order. A `Scalar` is passed as double, an array as the address of a copy
        on the device, an int as long long, a float as double, and NumPy's numbers in their own types.
    options
        The compiler's options, besides the one for C++17.
    shared
        The bytes of shared memory that a block gets besides what the source declares.
    """

    name: str
    source: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: Sequence[Argument]
    options: tuple[str, ...] = ()
    shared: int = 0

    def on(self, numbers: Sequence[int]) -> Launch:
        """The launch on other tensors: `numbers[n]` in the place of the kernel's tensor `n`."""
        arguments = [Pointer(numbers[a.number]) if isinstance(a, Pointer) else a for a in self.arguments]
        return self._replace(arguments=arguments)


class Kernel(Protocol):
    """A kernel of our own, as plans use it. It is data: it can be stored, compared and changed.

    A field whose nodes may contain the plan's scalars has a name that `expressions.renumber` knows.
    """

    @property
    def name(self) -> str:
        """The kernel's name in the tags of plans."""

    @property
    def title(self) -> str:
        """The kernel's name in explanations."""

    @property
    def is_empty(self) -> bool:
        """Whether it launches nothing, because there are no elements."""

    @property
    def reads(self) -> Sequence[int]:
        """The numbers of the tensors that it only reads."""

    def launches(self) -> Sequence[Launch]:
        """The kernel's launches, in order. Generates the sources."""


def arguments_of(tensors: int, *others: Argument) -> list[Argument]:
    """The arguments of a kernel: the addresses of `tensors` tensors, and then `others`."""
    return [*map(Pointer, range(tensors)), *others]


def parameters_of(numbers: Iterable[str]) -> str:
    """The C parameters of a kernel's numbers, by their names; an argument of each is an int."""
    return ", ".join(f"long long {name}" for name in numbers)


class Ahead:
    """Sources that other threads compile before they are needed.

    CuPy keeps what it has compiled, by device, source and options. Builders on any threads may use this at
    the same time: each look at the dict, and each change of it, is one step, and none relies on another. At
    worst, two builders have the same source compiled.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, tuple[str, ...]], Future[None]] = {}

    def missing(self, launches: Iterable[Launch]) -> list[Launch]:
        """A launch for each source that has not been compiled ahead."""
        found = {(each.source, each.options): each for each in launches if math.prod(each.grid)}
        return [launch for key, launch in found.items() if key not in self._known]

    def compile_on(self, pool: Executor, launches: Iterable[Launch]) -> None:
        """Start to compile the sources of launches on the pool's threads, for their current device."""
        for each in launches:
            self._known[each.source, each.options] = pool.submit(_compile, each)
        for key in list(self._known)[:-_MOST_SOURCES]:  # the oldest; others may be dropping them, too
            self._known.pop(key, None)

    def wait_for(self, launch: Launch) -> None:
        """Wait for the source if it is being compiled. A failure is not raised here: the later use fails."""
        future = self._known.get((launch.source, launch.options))
        if future is not None:
            future.exception()


def _compile(launch: Launch) -> None:
    _module(launch).get_function(launch.name)


def _module(launch: Launch) -> Any:
    """CuPy's module of a launch, which compiles when it is used first."""
    options = ("--std=c++17", *launch.options)
    return libraries().cupy.RawModule(code=launch.source, options=options)


AHEAD = Ahead()
"""The sources of this process. A builder adds to them."""


def compile_run(launches: Iterable[Launch]) -> Run:
    """The run of some launches in order, compiled for the current device. Blocks for up to seconds."""
    runs = [_compile_launch(launch) for launch in launches if math.prod(launch.grid)]
    if len(runs) == 1:
        return runs[0]

    def run(pointers: Sequence[int], scalars: Sequence[float]) -> None:
        for each in runs:
            each(pointers, scalars)

    return run


def _compile_launch(launch: Launch) -> Run:
    """The run of a launch, compiled. Blocks for up to seconds."""
    cupy = libraries().cupy
    AHEAD.wait_for(launch)
    function = _module(launch).get_function(launch.name)
    grid, block, shared, double = launch.grid, launch.block, launch.shared, cupy.float64
    if shared:
        function.max_dynamic_shared_size_bytes = shared
    arguments: list[Any] = list(launch.arguments)
    addresses: list[tuple[int, int]] = []
    numbers: list[tuple[int, int]] = []
    for place, argument in enumerate(arguments):
        if isinstance(argument, Pointer):
            addresses.append((place, argument.number))
        elif isinstance(argument, Scalar):
            numbers.append((place, argument.number))
        elif isinstance(argument, np.ndarray):
            arguments[place] = on_device(argument)

    def run(pointers: Sequence[int], scalars: Sequence[float]) -> None:
        given = arguments.copy()
        for place, number in addresses:
            given[place] = pointers[number]
        for place, number in numbers:
            given[place] = double(scalars[number])
        function(grid, block, given, shared_mem=shared)

    return run


def on_device(values: np.ndarray) -> Any:
    """A copy in the device's memory, which any stream may read. Blocks until it is there."""
    cupy = libraries().cupy
    copied = cupy.asarray(values)
    # The copy is on the current stream, for which the stream that plans run on does not wait.
    cupy.cuda.get_current_stream().synchronize()
    return copied


def grid_over(count: int, most: int = MOST_BLOCKS) -> tuple[tuple[int], tuple[int]]:
    """The grid and the block with a thread for each of `count` places, or for several if there are many."""
    return (min(-(-count // THREADS), most),), (THREADS,)


def power_of_two(least: int) -> int:
    """The smallest power of two that is not below `least`; 1 for numbers below 1."""
    return 1 << max(0, least - 1).bit_length()


def blocks_for(needed: int) -> int:
    """The number of blocks to launch for the work of `needed` ones, where a block can do several' work."""
    return max(min(needed, BUSY_BLOCKS), -(-needed // MOST_TURNS))
