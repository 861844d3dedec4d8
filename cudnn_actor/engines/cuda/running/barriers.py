"""Finds where a kernel of cuDNN's must wait for the kernels before it.

cuDNN launches kernels so that they may begin before the one in front of them on the stream has ended
(programmatic dependent launch), and has them wait before they read the operands of a convolution or a
product. Operands of the pointwise operations behind it are read without waiting: a residual that the kernel
in front had just written was partly an old one, in most runs of ResNet-50 in bfloat16 for one image (cuDNN
9.19, H200), and in some of a transformer's block (9.19 and 9.28, H100: `benchmarks.library_faults`). Scales,
biases, masks and lengths of norms and of attention are treated in the same way, though they were never seen
to be wrong. A kernel that is launched in the ordinary way begins when all work before it has ended, and the
next one begins when it has ended itself. So an empty kernel in between is a barrier.
https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#programmatic-dependent-launch-and-synchronization
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.running.recipe import (
    Buffer,
    GraphStep,
    KernelStep,
    OperationStep,
    ProductStep,
    Scratch,
    Source,
    Step,
)

__all__ = ["barrier", "waits", "waits_at_start"]

_SCRATCH = -1
"""The number that stands for all scratch memory, beside the numbers of buffers."""


def waits(steps: Sequence[Step]) -> list[bool]:
    """Whether each step of a plan needs a barrier before it, because of the steps before."""
    found = []
    under_way: set[int] = set()
    """The memory that kernels may still be writing: the numbers of buffers, and `_SCRATCH`."""
    for step in steps:
        here = isinstance(step, GraphStep) and not under_way.isdisjoint(_memory(_beside(step)))
        found.append(here)
        if here or not _overlaps(step):
            under_way.clear()
        under_way.update(_memory(step.sources))
    return found


def waits_at_start(steps: Sequence[Step], waiting: Sequence[bool]) -> bool:
    """Whether a plan needs a barrier before it, because of other work on the stream.

    `waiting`: what `waits` says of the steps. A CUDA graph needs no barrier before it: it begins when all
    work before it has ended.
    """
    for step, here in zip(steps, waiting, strict=True):
        if here or not _overlaps(step):
            return False
        if isinstance(step, GraphStep) and step.beside:
            return True
    return False


@functools.cache
def barrier() -> Any:
    """A kernel that does nothing. Launch it with `barrier()((1,), (1,), ())` on the current stream."""
    return libraries().cupy.RawKernel('extern "C" __global__ void barrier() {}', "barrier")


def _overlaps(step: Step) -> bool:
    """Whether a step may begin before the work in front of it ends: a library's, or one without a launch."""
    match step:
        case GraphStep() | ProductStep():
            return True
        case OperationStep():
            return not step.launcher.startswith("kernel") or any(0 in tensor.dims for tensor in step.tensors)
        case KernelStep():
            return step.kernel.is_empty


def _beside(step: GraphStep) -> Iterable[Source]:
    """The sources that the step's kernel may read too early."""
    return (step.sources[place] for place in step.beside)


def _memory(sources: Iterable[Source]) -> Iterator[int]:
    """The numbers of the buffers that sources lie in. Tensors in scratch memory may lie within each other."""
    for source in sources:
        if isinstance(source, Scratch):
            yield _SCRATCH
        elif isinstance(source, Buffer):
            yield source.number
