"""How CUDA runs each operation: one file for each family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cudnn_actor.engines.cuda.operations.attention import (
    attention_kernels,
    attention_lengths,
    lower_attention,
)
from cudnn_actor.engines.cuda.operations.convolution import lower_convolution
from cudnn_actor.engines.cuda.operations.normalization import lower_normalization, normalization_kernels
from cudnn_actor.engines.cuda.operations.pointwise import lower_pointwise
from cudnn_actor.engines.cuda.operations.pooling import library_pooling, pooling_kernel
from cudnn_actor.engines.cuda.plans.frontend_graph import FrontendGraph
from cudnn_actor.engines.cuda.plans.kernels import Computed
from cudnn_actor.protocol.operations import (
    Attention,
    AttentionBackward,
    AvgPool,
    AvgPoolBackward,
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
    GraphTensor,
    LayerNorm,
    LayerNormBackward,
    MaxPool,
    MaxPoolBackward,
    Node,
    Pointwise,
    RMSNorm,
    RMSNormBackward,
)

__all__ = ["IMPLEMENTATIONS", "Implementation", "Launch"]

Launch = Callable[[Sequence[int]], None]
"""Enqueues an operation on the current stream: takes its operands' addresses, in the order of its fields."""


class Implementation(NamedTuple):
    """The ways in which CUDA can run an operation.

    Parameters
    ----------
    lower
        Adds it to a graph of cuDNN's frontend. Raises `Refused`.
    computed
        Operands that cuDNN's graph must get in the place of those given, by name, from the operation and its
        tensors. If there are any, the operation runs in a graph of its own.
    library
        Makes its launch by libcudnn's own functions, on tensors of these specs, for a handle that has a
        stream. Raises `Refused` and `EngineFailure`.
    kernel
        Makes its launch by kernels of our own, on tensors of these specs.
    packed
        Whether our kernels need tensors that are packed in the order of their dims.
    """

    lower: Callable[[FrontendGraph, Any], None] | None = None
    computed: Callable[[Any, Mapping[str, GraphTensor]], Mapping[str, Computed]] | None = None
    library: Callable[[Any, Sequence[GraphTensor], int], Launch] | None = None
    kernel: Callable[[Any, Sequence[GraphTensor]], Launch] | None = None
    packed: bool = False


_CONVOLUTION = Implementation(lower_convolution)
_POOLING = Implementation(library=library_pooling, kernel=pooling_kernel)
_INDEXED_POOLING = Implementation(kernel=pooling_kernel)
_NORMALIZATION = Implementation(lower_normalization, kernel=normalization_kernels, packed=True)
_ATTENTION = Implementation(lower_attention, attention_lengths, kernel=attention_kernels)
IMPLEMENTATIONS: dict[type[Node], Implementation] = {
    ConvolutionForward: _CONVOLUTION,
    ConvolutionBackwardData: _CONVOLUTION,
    ConvolutionBackwardFilter: _CONVOLUTION,
    Pointwise: Implementation(lower_pointwise),
    MaxPool: _POOLING,
    MaxPoolBackward: _INDEXED_POOLING,
    AvgPool: _POOLING,
    AvgPoolBackward: _POOLING,
    LayerNorm: _NORMALIZATION,
    LayerNormBackward: _NORMALIZATION,
    RMSNorm: _NORMALIZATION,
    RMSNormBackward: _NORMALIZATION,
    Attention: _ATTENTION,
    AttentionBackward: _ATTENTION,
}
