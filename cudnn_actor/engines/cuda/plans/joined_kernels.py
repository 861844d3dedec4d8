"""Several elementwise kernels in one launch: each has blocks of its own.

For kernels that neither read nor overwrite what another one writes. The source depends on their sources and
their number.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.plans.kernels import PACK, THREADS, Elementwise, Source, blocks, preamble

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
        self._ends = list(itertools.accumulate(map(blocks, kernels)))
        self._geometries = [kernel.geometry for kernel in kernels]
        self._pointers = [len(kernel.strides) for kernel in kernels]

    def launch(self, pointers: Sequence[int], _: Sequence[float]) -> None:
        """Enqueue a run. `pointers`: those of each kernel, one after the other."""
        if not self._ends[-1]:
            return
        given = iter(pointers)
        arguments = list(self._ends)
        for count, geometry in zip(self._pointers, self._geometries, strict=True):
            arguments += [*itertools.islice(given, count), *geometry]
        self._function((self._ends[-1],), (THREADS,), arguments)


def joined_source(kernels: Sequence[Elementwise]) -> str:
    """The kernel in CUDA C++."""
    found: dict[str, str] = {}
    arguments = [f"long long end{n}" for n in range(len(kernels))]
    branches = []
    for n, kernel in enumerate(kernels):
        own = Source(kernel)
        name = found.setdefault(own.function("Part"), f"Part{len(found)}")
        named = [f"{argument}_{n}" for argument in own.arguments()]
        arguments += named
        passed = ", ".join(argument.rpartition(" ")[2] for argument in named)
        start = f"end{n - 1}" if n else "0"
        branches.append(
            f"if (block < end{n}) return {name}::run("
            f"(block - {start}) * blockDim.x + threadIdx.x, (end{n} - {start}) * blockDim.x, {passed});"
        )
    body = "\n    ".join(branches)
    functions = "".join(text.replace("struct Part ", f"struct {name} ") for text, name in found.items())
    return f"""{preamble()}{PACK}{functions}
extern "C" __global__ void joined({", ".join(arguments)}) {{
    const long long block = blockIdx.x;
    {body}
}}
"""
