"""Chooses the kernel that computes an operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cudnn_actor.engines.cpu.fast import convolution, movement, pointwise, pooling
from cudnn_actor.engines.cpu.fast.attention import attention
from cudnn_actor.engines.cpu.fast.attention_gradients import attention_backward
from cudnn_actor.engines.cpu.fast.by_definition import by_definition
from cudnn_actor.engines.cpu.fast.channel_norm_gradients import channel_norm_backward, channel_sums
from cudnn_actor.engines.cpu.fast.channel_norms import batch_norm, channel_norm
from cudnn_actor.engines.cpu.fast.ctc_loss import ctc_loss
from cudnn_actor.engines.cpu.fast.grouped_matmul import grouped_matmul, grouped_matmul_backward_weights
from cudnn_actor.engines.cpu.fast.indexing import gather, gather_elements, gather_nd
from cudnn_actor.engines.cpu.fast.kernels import Kernel
from cudnn_actor.engines.cpu.fast.matmul import matmul
from cudnn_actor.engines.cpu.fast.pooling_gradients import avg_pool_backward
from cudnn_actor.engines.cpu.fast.pooling_index_gradients import max_pool_backward
from cudnn_actor.engines.cpu.fast.pooling_indices import max_pool
from cudnn_actor.engines.cpu.fast.pooling_norms import lp_pool, lp_pool_backward
from cudnn_actor.engines.cpu.fast.recurrent import recurrent
from cudnn_actor.engines.cpu.fast.recurrent_gradients import (
    recurrent_backward_data,
    recurrent_backward_weights,
)
from cudnn_actor.engines.cpu.fast.recurrent_steps import recurrent_steps
from cudnn_actor.engines.cpu.fast.reductions import reduction
from cudnn_actor.engines.cpu.fast.resampling import resample, resample_backward
from cudnn_actor.engines.cpu.fast.reserves import on_bytes
from cudnn_actor.engines.cpu.fast.row_norm_gradients import row_norm_backward
from cudnn_actor.engines.cpu.fast.row_norms import layer_norm, rms_norm
from cudnn_actor.engines.cpu.fast.scans import arg_reduction, cumulative
from cudnn_actor.engines.cpu.fast.scattering import scatter
from cudnn_actor.engines.cpu.fast.softmax import softmax, softmax_backward
from cudnn_actor.engines.cpu.fast.sorting import top_k
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import (
    ArgReduction,
    Attention,
    AttentionBackward,
    AvgPool,
    AvgPoolBackward,
    BatchNorm,
    BatchNormBackward,
    BatchNormTraining,
    BitCast,
    BorderPad,
    Concat,
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
    CTCLoss,
    Cumulative,
    Gather,
    GatherElements,
    GatherND,
    GenStats,
    GroupedMatMul,
    GroupedMatMulBackwardWeights,
    GroupNorm,
    GroupNormBackward,
    InstanceNorm,
    InstanceNormBackward,
    LayerNorm,
    LayerNormBackward,
    LpPool,
    LpPoolBackward,
    MatMul,
    MaxPool,
    MaxPoolBackward,
    Node,
    Pad,
    Pointwise,
    Recurrent,
    RecurrentBackwardData,
    RecurrentBackwardWeights,
    RecurrentSteps,
    Reduction,
    Resample,
    ResampleBackward,
    Reshape,
    RMSNorm,
    RMSNormBackward,
    Scatter,
    ScatterElements,
    ScatterND,
    Slice,
    Softmax,
    SoftmaxBackward,
    Specs,
    TopK,
    Transpose,
)

__all__ = ["kernel_of"]

_MAKERS: Mapping[type, Callable[[Node, Specs], Kernel | None]] = {
    ArgReduction: arg_reduction,
    Attention: attention,
    AttentionBackward: attention_backward,
    AvgPool: pooling.avg_pool,
    AvgPoolBackward: avg_pool_backward,
    BatchNorm: batch_norm,
    BatchNormBackward: channel_norm_backward,
    BatchNormTraining: channel_norm,
    BitCast: movement.bit_cast,
    BorderPad: movement.border_pad,
    Concat: movement.concat,
    ConvolutionBackwardData: convolution.make,
    ConvolutionBackwardFilter: convolution.make,
    ConvolutionForward: convolution.make,
    CTCLoss: ctc_loss,
    Cumulative: cumulative,
    Gather: gather,
    GatherElements: gather_elements,
    GatherND: gather_nd,
    GenStats: channel_sums,
    GroupedMatMul: grouped_matmul,
    GroupedMatMulBackwardWeights: grouped_matmul_backward_weights,
    GroupNorm: channel_norm,
    GroupNormBackward: channel_norm_backward,
    InstanceNorm: channel_norm,
    InstanceNormBackward: channel_norm_backward,
    LayerNorm: layer_norm,
    LayerNormBackward: row_norm_backward,
    LpPool: lp_pool,
    LpPoolBackward: lp_pool_backward,
    MatMul: matmul,
    MaxPool: max_pool,
    MaxPoolBackward: max_pool_backward,
    Pad: movement.pad,
    Pointwise: pointwise.make,
    Recurrent: on_bytes(recurrent),
    RecurrentBackwardData: on_bytes(recurrent_backward_data),
    RecurrentBackwardWeights: on_bytes(recurrent_backward_weights),
    RecurrentSteps: recurrent_steps,
    Reduction: reduction,
    Resample: resample,
    ResampleBackward: resample_backward,
    Reshape: movement.reshape,
    RMSNorm: rms_norm,
    RMSNormBackward: row_norm_backward,
    Scatter: scatter,
    ScatterElements: scatter,
    ScatterND: scatter,
    Slice: movement.slice_,
    Softmax: softmax,
    SoftmaxBackward: softmax_backward,
    TopK: top_k,
    Transpose: movement.transpose,
}


def kernel_of(graph: OperationGraph, operation: Node) -> Kernel | None:
    """The kernel for an operation of a graph; None if it is to be evaluated as a whole."""
    specs = {name: graph.tensor(uid).spec for name, uid in operation.named()}
    if any(0 in spec.dims for spec in specs.values()) and not isinstance(operation, CTCLoss):
        return None  # but losses without frames or labels are numbers
    make = _MAKERS.get(type(operation))
    kernel = None if make is None else make(operation, specs)
    return kernel or by_definition(operation, specs)
