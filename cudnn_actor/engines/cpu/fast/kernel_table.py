"""Which kernel computes an operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cudnn_actor.engines.cpu.fast import convolution, pointwise
from cudnn_actor.engines.cpu.fast.attention import attention
from cudnn_actor.engines.cpu.fast.channel_norms import batch_norm, channel_norm
from cudnn_actor.engines.cpu.fast.grouped_matmul import grouped_matmul, grouped_matmul_backward_weights
from cudnn_actor.engines.cpu.fast.kernels import Kernel
from cudnn_actor.engines.cpu.fast.matmul import matmul
from cudnn_actor.engines.cpu.fast.reductions import reduction
from cudnn_actor.engines.cpu.fast.row_norms import layer_norm, rms_norm
from cudnn_actor.engines.cpu.fast.softmax import softmax, softmax_backward
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import (
    Attention,
    BatchNorm,
    BatchNormTraining,
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
    GroupedMatMul,
    GroupedMatMulBackwardWeights,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    MatMul,
    Node,
    Pointwise,
    Reduction,
    RMSNorm,
    Softmax,
    SoftmaxBackward,
    Specs,
)

__all__ = ["kernel_of"]

_MAKERS: Mapping[type, Callable[[Node, Specs], Kernel | None]] = {
    Attention: attention,
    BatchNorm: batch_norm,
    BatchNormTraining: channel_norm,
    GroupNorm: channel_norm,
    GroupedMatMul: grouped_matmul,
    GroupedMatMulBackwardWeights: grouped_matmul_backward_weights,
    InstanceNorm: channel_norm,
    ConvolutionBackwardData: convolution.make,
    ConvolutionBackwardFilter: convolution.make,
    ConvolutionForward: convolution.make,
    LayerNorm: layer_norm,
    MatMul: matmul,
    Pointwise: pointwise.make,
    Reduction: reduction,
    RMSNorm: rms_norm,
    Softmax: softmax,
    SoftmaxBackward: softmax_backward,
}


def kernel_of(graph: OperationGraph, operation: Node) -> Kernel | None:
    """The kernel for an operation of a graph; None if it is to be evaluated by its definition."""
    make = _MAKERS.get(type(operation))
    specs = {name: graph.tensor(uid).spec for name, uid in operation.named()}
    if make is None or any(0 in spec.dims for spec in specs.values()):
        return None
    return make(operation, specs)
