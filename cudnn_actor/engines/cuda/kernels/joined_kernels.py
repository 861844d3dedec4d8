"""Several elementwise kernels in one launch: each block does a part of each kernel's work.

Elements that two kernels read, or write side by side, are then in the caches at the same time. No kernel
reads or overwrites the results of another. The source depends on the kernels' sources and their number.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec

from cudnn_actor.engines.cuda.kernels.element_types import PACK
from cudnn_actor.engines.cuda.kernels.elementwise import Elementwise, Source
from cudnn_actor.engines.cuda.kernels.formulas import PREAMBLE
from cudnn_actor.engines.cuda.kernels.index_code import INDEXING
from cudnn_actor.engines.cuda.kernels.kernel import ROUNDING, THREADS, Launch, Pointer, blocks_for
from cudnn_actor.protocol.graphs.step_kinds import StepKind

__all__ = ["Joined", "joined_source", "shared_launches"]

_MOST_BYTES = 4096
"""The most bytes of a launch's arguments."""


def shared_launches(kernels: Sequence[Elementwise]) -> Iterator[range]:
    """Yields the indices of the kernels that share a launch: as many neighbours as its arguments allow."""
    start, taken = 0, 0
    for number, kernel in enumerate(kernels):
        needed = 8 * (1 + len(Source(kernel).arguments()))
        if taken + needed > _MOST_BYTES:
            yield range(start, number)
            start, taken = number, 0
        taken += needed
    yield range(start, len(kernels))


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """Several kernels that are one launch."""

    kernels: tuple[Elementwise, ...]

    # `Kernel`. Its tensors are those of each kernel, one after the other.

    name = "copies"
    title = StepKind.COPIES.step_name()

    @property
    def is_empty(self) -> bool:
        """Whether there are no elements."""
        return all(kernel.is_empty for kernel in self.kernels)

    @property
    def reads(self) -> list[int]:
        """See `Kernel.reads`."""
        firsts = itertools.accumulate((len(kernel.strides) for kernel in self.kernels), initial=0)
        return [
            first + number
            for first, kernel in zip(firsts, self.kernels, strict=False)
            for number in kernel.reads
        ]

    def launches(self) -> tuple[Launch, ...]:
        """The kernel's only launch."""
        # Enough for the largest kernel; none if there are no elements.
        blocks = blocks_for(-(-max(kernel.places for kernel in self.kernels) // THREADS))
        tensors = itertools.count()
        arguments: list[Pointer | int] = [-(-kernel.walk.total // max(blocks, 1)) for kernel in self.kernels]
        for kernel in self.kernels:
            arguments += (Pointer(next(tensors)) for _ in kernel.strides)
            arguments += kernel.numbers.values()
        return (Launch("joined", joined_source(self.kernels), (blocks,), (THREADS,), arguments, ROUNDING),)


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
        last = f"min((block + 1) * share{n}, i_count_{n})"
        calls.append(f"{name}::run(block * share{n} + threadIdx.x, blockDim.x, {last}, {passed});")
    body = "\n    ".join(calls)
    functions = "".join(text.replace("struct Part ", f"struct {name} ") for text, name in found.items())
    return f"""{PREAMBLE}{PACK}{INDEXING}{functions}
extern "C" __global__ void joined({", ".join(arguments)}) {{
    const long long block = blockIdx.x;
    {body}
}}
"""
