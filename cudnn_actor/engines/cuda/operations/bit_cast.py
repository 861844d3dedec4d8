"""Bits read as another dtype, on CUDA: a copy of its elements."""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_actor.engines.cuda.kernels.elementwise import describe_elementwise
from cudnn_actor.engines.cuda.kernels.expressions import Leaf, Result
from cudnn_actor.engines.cuda.kernels.kernel import Launch
from cudnn_actor.engines.cuda.operations.implementation import implement, kernels
from cudnn_actor.protocol.operations import BitCast, GraphTensor

__all__ = ["bit_cast_launches"]


def bit_cast_launches(operation: BitCast[int], tensors: Sequence[GraphTensor]) -> list[Launch]:
    """The launch of a copy from and to one type, which copies bits."""
    del operation
    x, y = tensors
    result = Result(Leaf(0, x.dtype), x.dtype)
    kernel = describe_elementwise([result], [], y.dims, [y.strides, x.strides], [y.alignment, x.alignment])
    return [launch.on((1, 0)) for launch in kernel.launches()]


implement(BitCast, launchers=kernels(bit_cast_launches), exact=True)
