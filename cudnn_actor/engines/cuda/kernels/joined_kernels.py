"""Several elementwise kernels in one launch: each block does a part of each.

So what they read or write side by side, or both read, is in the caches at the same time. For kernels that
neither read nor overwrite what another one writes. The source depends on their sources and their number.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from cudnn_actor.engines.cuda.kernels.axes import DIVISION
from cudnn_actor.engines.cuda.kernels.element_types import PACK
from cudnn_actor.engines.cuda.kernels.elementwise import THREADS, Elementwise, Source, in_turns
from cudnn_actor.engines.cuda.kernels.formulas import PREAMBLE
from cudnn_actor.engines.cuda.library.libraries import libraries

__all__ = ["JoinedKernel", "joined_source", "launches"]

_MOST_BYTES = 4096
"""Of a launch's arguments."""


def launches(kernels: Sequence[Elementwise]) -> Iterator[range]:
    """The kernels, by their indices, of each launch: as many neighbours as its arguments hold."""
    start, taken = 0, 0
    for number, kernel in enumerate(kernels):
        needed = 8 * (1 + len(Source(kernel).arguments()))
        if taken + needed > _MOST_BYTES:
            yield range(start, number)
            start, taken = number, 0
        taken += needed
    yield range(start, len(kernels))


class JoinedKernel:
    """Compiled kernels. `launch` enqueues them on the current stream, with one launch."""

    def __init__(self, kernels: Sequence[Elementwise]) -> None:
        code = joined_source(kernels)
        self._function = libraries().cupy.RawKernel(code, "joined", options=("--std=c++17", "--fmad=false"))
        self._function.compile()
        self._grid = (_blocks(kernels),)
        self._shares = [-(-kernel.geometry[0] // max(self._grid[0], 1)) for kernel in kernels]
        self._geometries = [kernel.geometry for kernel in kernels]
        self._pointers = [len(kernel.strides) for kernel in kernels]

    def launch(self, pointers: Sequence[int], _: Sequence[float]) -> None:
        """Enqueue a run. `pointers`: those of each kernel, one after the other."""
        if not self._grid[0]:
            return
        given = iter(pointers)
        arguments = self._shares[:]
        for count, geometry in zip(self._pointers, self._geometries, strict=True):
            arguments += [*itertools.islice(given, count), *geometry]
        self._function(self._grid, (THREADS,), arguments)


def _blocks(kernels: Sequence[Elementwise]) -> int:
    """How many blocks there are: enough for the largest kernel; none if there are no elements."""
    places = max(-(-kernel.geometry[0] // kernel.unrolled) + kernel.rest for kernel in kernels)
    needed = -(-places // THREADS)
    return in_turns(needed)


def joined_source(kernels: Sequence[Elementwise]) -> str:
    """The kernel in CUDA C++."""
    found: dict[str, str] = {}
    arguments = [f"long long share{n}" for n in range(len(kernels))]
    calls = []
    for n, kernel in enumerate(kernels):
        own = Source(kernel)
        name = found.setdefault(own.function("Part"), f"Part{len(found)}")
        named = [f"{argument}_{n}" for argument in own.arguments()]
        arguments += named
        passed = ", ".join(argument.rpartition(" ")[2] for argument in named)
        last = f"min((block + 1) * share{n}, count_{n})"
        calls.append(f"{name}::run(block * share{n} + threadIdx.x, blockDim.x, {last}, {passed});")
    body = "\n    ".join(calls)
    functions = "".join(text.replace("struct Part ", f"struct {name} ") for text, name in found.items())
    return f"""{PREAMBLE}{PACK}{DIVISION}{functions}
extern "C" __global__ void joined({", ".join(arguments)}) {{
    const long long block = blockIdx.x;
    {body}
}}
"""
