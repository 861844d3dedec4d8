"""How CUDA runs each operation: one file for each family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from cudnn_actor.engines.cuda.cudnn.frontend_graph import FrontendGraph
from cudnn_actor.engines.cuda.library.libcublas import WORKSPACE_BYTES
from cudnn_actor.engines.cuda.operations.attention import attention_operands, lower_attention
from cudnn_actor.engines.cuda.operations.bit_cast import bit_cast_kernel
from cudnn_actor.engines.cuda.operations.channel_norms import lower_channel_norm
from cudnn_actor.engines.cuda.operations.computed import Computed
from cudnn_actor.engines.cuda.operations.convolution import lower_convolution
from cudnn_actor.engines.cuda.operations.flash_attention import attention_kernels, attention_workspace
from cudnn_actor.engines.cuda.operations.fused_norms import norm_launch, norm_workspace
from cudnn_actor.engines.cuda.operations.grid_sampling import grid_sample_kernel
from cudnn_actor.engines.cuda.operations.grouped_matmul import grouped_kernels, grouped_workspace
from cudnn_actor.engines.cuda.operations.indexing import gather_kernel, scatter_kernels, scatter_workspace
from cudnn_actor.engines.cuda.operations.matmul import cublas_product, lower_matmul, matmul_kernel
from cudnn_actor.engines.cuda.operations.normalization import lower_normalization
from cudnn_actor.engines.cuda.operations.padding import padding_kernel
from cudnn_actor.engines.cuda.operations.pointwise import lower_pointwise
from cudnn_actor.engines.cuda.operations.pooling import library_pooling, pooling_kernel
from cudnn_actor.engines.cuda.operations.random import random_kernel
from cudnn_actor.engines.cuda.operations.reduction import (
    cumulative_kernel,
    lower_reduction,
    reduction_kernels,
    reduction_workspace,
)
from cudnn_actor.engines.cuda.operations.resampling import resample_kernel
from cudnn_actor.engines.cuda.operations.response_norm import response_kernels, response_workspace
from cudnn_actor.engines.cuda.operations.softmax import library_softmax
from cudnn_actor.engines.cuda.operations.sorting import top_k_kernel, top_k_workspace
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
    Cumulative,
    Gather,
    GatherElements,
    GatherND,
    GenStats,
    GraphTensor,
    GridSample,
    GroupedMatMul,
    GroupedMatMulBackwardWeights,
    GroupNorm,
    GroupNormBackward,
    InstanceNorm,
    InstanceNormBackward,
    LayerNorm,
    LayerNormBackward,
    LocalResponseNorm,
    LocalResponseNormBackward,
    LpPool,
    LpPoolBackward,
    MatMul,
    MaxPool,
    MaxPoolBackward,
    Node,
    Pad,
    Pointwise,
    RandomBernoulli,
    RandomIntegers,
    RandomNormal,
    RandomUniform,
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
    TopK,
    Transpose,
)

__all__ = ["IMPLEMENTATIONS", "Implementation", "Launch", "Launcher"]

Launch = Callable[[Sequence[int]], None]
"""Enqueues an operation on the current stream: takes its operands' addresses, in the order of its fields, and
its workspace's if it has one."""


class Launcher(NamedTuple):
    """A way to run an operation as a step of its own.

    Parameters
    ----------
    make
        Makes the launch of an operation, which has its graph's numerics, on tensors of these specs, in that
        order, for a handle of cuDNN's. Raises `Refused` and `EngineFailure` if it cannot.
    packed
        Whether the tensors must be packed in the order of their dims.
    workspace
        Gives the bytes of memory that the launch needs besides, from what `make` gets; None if it needs none.
    """

    make: Callable[[Any, Sequence[GraphTensor], Any], Launch]
    packed: bool = False
    workspace: Callable[[Any, Sequence[GraphTensor]], int] | None = None


class Implementation(NamedTuple):
    """The ways in which CUDA can run an operation: a graph of cuDNN's first, then the launchers in order.

    Parameters
    ----------
    lower
        Adds it to a graph of cuDNN's frontend. Raises `Refused`.
    computed
        Operands that cuDNN's graph must get in the place of those given, by name, from the operation and its
        tensors. If there are any, the operation runs in a graph of its own.
    launchers
        By name, as in plan tags.
    """

    lower: Callable[[FrontendGraph, Any], None] | None = None
    computed: Callable[[Any, Mapping[str, GraphTensor]], Mapping[str, Computed]] | None = None
    launchers: Mapping[str, Launcher] = MappingProxyType({})

    @property
    def ways(self) -> int:
        """How many ways there are: a graph of cuDNN's on tensors as given or packed, and each launcher."""
        return (self.lower is not None) * 2 + len(self.launchers)


_CONVOLUTION = Implementation(lower_convolution)
_KERNEL, _LIBRARY = {"kernel": Launcher(pooling_kernel)}, {"library": Launcher(library_pooling)}
_POOLING = Implementation(launchers={**_KERNEL, **_LIBRARY})
_NORM = {"kernel": Launcher(norm_launch, workspace=norm_workspace)}
_NORMALIZATION = Implementation(lower_normalization, launchers=_NORM)
_OUR_CHANNEL_NORM = Implementation(launchers=_NORM)
_EITHER_CHANNEL_NORM = Implementation(lower_channel_norm, launchers=_NORM)
_RESPONSE = Implementation(launchers={"kernel": Launcher(response_kernels, workspace=response_workspace)})
_ATTENTION = Implementation(
    lower_attention,
    attention_operands,
    launchers={"kernel": Launcher(attention_kernels, workspace=attention_workspace)},
)
_REDUCTION = {"kernel": Launcher(reduction_kernels, workspace=reduction_workspace)}
_SOFTMAX = Implementation(launchers={"library": Launcher(library_softmax)})
_RANDOM = Implementation(launchers={"kernel": Launcher(random_kernel)})
_MATMUL = Implementation(
    lower_matmul,
    launchers={
        "cublas": Launcher(cublas_product, workspace=lambda *_: WORKSPACE_BYTES),
        "cublas_packed": Launcher(cublas_product, packed=True, workspace=lambda *_: WORKSPACE_BYTES),
        "kernel": Launcher(matmul_kernel),
    },
)
_GATHER = Implementation(launchers={"kernel": Launcher(gather_kernel)})
_RESAMPLE = Implementation(launchers={"kernel": Launcher(resample_kernel)})
_SCATTER = Implementation(launchers={"kernel": Launcher(scatter_kernels, workspace=scatter_workspace)})
_GROUPED = Implementation(launchers={"kernel": Launcher(grouped_kernels, workspace=grouped_workspace)})
_PADDING = Implementation(launchers={"kernel": Launcher(padding_kernel)})
IMPLEMENTATIONS: dict[type[Node], Implementation] = {
    ConvolutionForward: _CONVOLUTION,
    ConvolutionBackwardData: _CONVOLUTION,
    ConvolutionBackwardFilter: _CONVOLUTION,
    Pointwise: Implementation(lower_pointwise),
    MaxPool: _POOLING,
    MaxPoolBackward: Implementation(launchers=_KERNEL),
    AvgPool: _POOLING,
    AvgPoolBackward: Implementation(launchers={**_LIBRARY, **_KERNEL}),
    LpPool: Implementation(launchers=_KERNEL),
    LpPoolBackward: Implementation(launchers=_KERNEL),
    LayerNorm: _NORMALIZATION,
    LayerNormBackward: _NORMALIZATION,
    RMSNorm: _NORMALIZATION,
    RMSNormBackward: _NORMALIZATION,
    BatchNorm: _OUR_CHANNEL_NORM,
    BatchNormTraining: _EITHER_CHANNEL_NORM,
    BatchNormBackward: _EITHER_CHANNEL_NORM,
    InstanceNorm: _EITHER_CHANNEL_NORM,
    InstanceNormBackward: _OUR_CHANNEL_NORM,  # cuDNN 9.19 gives other results from run to run
    GroupNorm: _OUR_CHANNEL_NORM,
    GroupNormBackward: _OUR_CHANNEL_NORM,
    GenStats: _EITHER_CHANNEL_NORM,
    LocalResponseNorm: _RESPONSE,
    LocalResponseNormBackward: _RESPONSE,
    Attention: _ATTENTION,
    AttentionBackward: _ATTENTION,
    Reshape: Implementation(),
    Transpose: Implementation(),
    Slice: Implementation(),
    Pad: _PADDING,
    BorderPad: _PADDING,
    Concat: Implementation(),
    BitCast: Implementation(launchers={"kernel": Launcher(bit_cast_kernel)}),
    Reduction: Implementation(lower_reduction, launchers=_REDUCTION),
    ArgReduction: Implementation(launchers=_REDUCTION),
    Cumulative: Implementation(launchers={"kernel": Launcher(cumulative_kernel)}),
    Softmax: _SOFTMAX,
    SoftmaxBackward: _SOFTMAX,
    MatMul: _MATMUL,
    RandomUniform: _RANDOM,
    RandomNormal: _RANDOM,
    RandomBernoulli: _RANDOM,
    RandomIntegers: _RANDOM,
    GroupedMatMul: _GROUPED,
    GroupedMatMulBackwardWeights: _GROUPED,
    Gather: _GATHER,
    GatherElements: _GATHER,
    GatherND: _GATHER,
    Scatter: _SCATTER,
    ScatterElements: _SCATTER,
    ScatterND: _SCATTER,
    Resample: _RESAMPLE,
    ResampleBackward: _RESAMPLE,
    GridSample: Implementation(launchers={"kernel": Launcher(grid_sample_kernel)}),
    TopK: Implementation(launchers={"kernel": Launcher(top_k_kernel, workspace=top_k_workspace)}),
}
"""The order of an operation's launchers is that of their speed on most shapes, measured on an H200."""
