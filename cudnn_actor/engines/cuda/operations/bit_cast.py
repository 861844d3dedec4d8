"""Bits read as another dtype, on CUDA: a copy of its elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cudnn_actor.engines.cuda.kernels.elementwise import Elementwise, fused, source
from cudnn_actor.engines.cuda.kernels.expressions import Leaf, Result
from cudnn_actor.engines.cuda.kernels.kernel import compiled
from cudnn_actor.engines.cuda.operations.implementation import Launcher, implement
from cudnn_actor.protocol.operations import BitCast, GraphTensor

__all__ = ["bit_cast_kernel", "bit_cast_source"]


def bit_cast_kernel(
    operation: BitCast[int], tensors: Sequence[GraphTensor], handle: Any
) -> Callable[[Sequence[int]], None]:
    """The launch of a copy; see `operations.Launcher`."""
    del operation, handle
    run = compiled(_copy(tensors))
    return lambda addresses: run((addresses[1], addresses[0]), ())


def bit_cast_source(operation: BitCast[int], tensors: Sequence[GraphTensor]) -> str:
    """The kernel in CUDA C++."""
    del operation
    return source(_copy(tensors))


def _copy(tensors: Sequence[GraphTensor]) -> Elementwise:
    x, y = tensors
    result = Result(Leaf(0, x.dtype), x.dtype)  # from and to one type: it copies bits
    return fused([result], [], y.dims, [y.strides, x.strides], [y.alignment, x.alignment])


implement(BitCast, launchers={"kernel": Launcher(bit_cast_kernel)})
