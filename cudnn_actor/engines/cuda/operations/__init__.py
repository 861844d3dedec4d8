"""How CUDA runs the operations that no graph of cuDNN's frontend covers: one file for each family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cudnn_actor.engines.cuda.operations.normalization import normalization
from cudnn_actor.engines.cuda.operations.pooling import pooling
from cudnn_actor.protocol.operations import (
    AvgPool,
    AvgPoolBackward,
    GraphTensor,
    LayerNorm,
    LayerNormBackward,
    MaxPool,
    MaxPoolBackward,
    Node,
    RMSNorm,
    RMSNormBackward,
)

__all__ = ["KERNELS", "Launch", "OwnKernel"]

Launch = Callable[[Sequence[int]], None]
"""Enqueues an operation on the current stream: takes its operands' addresses, in the order of its fields."""


class OwnKernel(NamedTuple):
    """How an operation is run by kernels of our own.

    Parameters
    ----------
    compile
        Makes the launch of an operation on tensors of these specs.
    packed
        Whether the tensors must be packed in the order of their dims.
    """

    compile: Callable[[Any, Sequence[GraphTensor]], Launch]
    packed: bool = False


_POOLING, _NORMALIZATION = OwnKernel(pooling), OwnKernel(normalization, packed=True)
KERNELS: dict[type[Node], OwnKernel] = {
    MaxPool: _POOLING,
    MaxPoolBackward: _POOLING,
    AvgPool: _POOLING,
    AvgPoolBackward: _POOLING,
    LayerNorm: _NORMALIZATION,
    LayerNormBackward: _NORMALIZATION,
    RMSNorm: _NORMALIZATION,
    RMSNormBackward: _NORMALIZATION,
}
