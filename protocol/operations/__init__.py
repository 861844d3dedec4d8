"""The operations, one class each, and the tensors between them.

To add one, add its class to a file of its family and a row to `OPERATIONS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

from cudnn_actor.protocol.operations.attention import Attention, AttentionBackward, alibi_slopes
from cudnn_actor.protocol.operations.base import GraphTensor, Operation, Specs, TensorRole
from cudnn_actor.protocol.operations.channel_norms import (
    BatchNorm,
    BatchNormBackward,
    BatchNormTraining,
    ChannelNorm,
    GenStats,
    GroupNorm,
    GroupNormBackward,
    InstanceNorm,
    InstanceNormBackward,
)
from cudnn_actor.protocol.operations.convolution import (
    Convolution,
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
)
from cudnn_actor.protocol.operations.functions import FUNCTIONS, PointwiseMode
from cudnn_actor.protocol.operations.grid_sampling import (
    GridPadding,
    GridSample,
)
from cudnn_actor.protocol.operations.grouped_matmul import GroupedMatMul, GroupedMatMulBackwardWeights
from cudnn_actor.protocol.operations.indexing import (
    Gather,
    GatherElements,
    GatherND,
    Scatter,
    ScatterElements,
    ScatterND,
    ScatterReduction,
)
from cudnn_actor.protocol.operations.matmul import MatMul
from cudnn_actor.protocol.operations.movement import (
    BitCast,
    BorderPad,
    Concat,
    Movement,
    Pad,
    PadMode,
    Placed,
    Reshape,
    Slice,
    Transpose,
)
from cudnn_actor.protocol.operations.normalization import (
    LayerNorm,
    LayerNormBackward,
    RMSNorm,
    RMSNormBackward,
)
from cudnn_actor.protocol.operations.pointwise import Pointwise
from cudnn_actor.protocol.operations.pooling import (
    AdaptiveWindow,
    AvgPool,
    AvgPoolBackward,
    LpPool,
    LpPoolBackward,
    MaxPool,
    MaxPoolBackward,
    Window,
)
from cudnn_actor.protocol.operations.random import (
    RandomBernoulli,
    RandomIntegers,
    Randomness,
    RandomNormal,
    RandomUniform,
)
from cudnn_actor.protocol.operations.reduction import ArgReduction, Cumulative, Reduction, ReductionMode
from cudnn_actor.protocol.operations.resampling import (
    Coordinates,
    NearestRounding,
    Resample,
    ResampleBackward,
    ResampleMode,
)
from cudnn_actor.protocol.operations.response_norm import LocalResponseNorm, LocalResponseNormBackward
from cudnn_actor.protocol.operations.softmax import Softmax, SoftmaxBackward
from cudnn_actor.protocol.operations.sorting import (
    TopK,
)

__all__ = [
    "FUNCTIONS",
    "OPERATIONS",
    "AdaptiveWindow",
    "ArgReduction",
    "Attention",
    "AttentionBackward",
    "AvgPool",
    "AvgPoolBackward",
    "BatchNorm",
    "BatchNormBackward",
    "BatchNormTraining",
    "BitCast",
    "BorderPad",
    "ChannelNorm",
    "Concat",
    "Convolution",
    "ConvolutionBackwardData",
    "ConvolutionBackwardFilter",
    "ConvolutionForward",
    "Coordinates",
    "Cumulative",
    "Gather",
    "GatherElements",
    "GatherND",
    "GenStats",
    "GraphTensor",
    "GridPadding",
    "GridSample",
    "GroupNorm",
    "GroupNormBackward",
    "GroupedMatMul",
    "GroupedMatMulBackwardWeights",
    "InstanceNorm",
    "InstanceNormBackward",
    "LayerNorm",
    "LayerNormBackward",
    "LocalResponseNorm",
    "LocalResponseNormBackward",
    "LpPool",
    "LpPoolBackward",
    "MatMul",
    "MaxPool",
    "MaxPoolBackward",
    "Movement",
    "NearestRounding",
    "Node",
    "Operation",
    "Pad",
    "PadMode",
    "Placed",
    "Pointwise",
    "PointwiseMode",
    "RMSNorm",
    "RMSNormBackward",
    "RandomBernoulli",
    "RandomIntegers",
    "RandomNormal",
    "RandomUniform",
    "Randomness",
    "Reduction",
    "ReductionMode",
    "Resample",
    "ResampleBackward",
    "ResampleMode",
    "Reshape",
    "Scatter",
    "ScatterElements",
    "ScatterND",
    "ScatterReduction",
    "Slice",
    "Softmax",
    "SoftmaxBackward",
    "Specs",
    "TensorRole",
    "TopK",
    "Transpose",
    "Window",
    "alibi_slopes",
]

OPERATIONS: tuple[type[Operation[Any]], ...] = (
    ConvolutionForward,
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    Pointwise,
    MaxPool,
    MaxPoolBackward,
    AvgPool,
    AvgPoolBackward,
    LpPool,
    LpPoolBackward,
    LayerNorm,
    LayerNormBackward,
    RMSNorm,
    RMSNormBackward,
    BatchNorm,
    BatchNormTraining,
    BatchNormBackward,
    InstanceNorm,
    InstanceNormBackward,
    GroupNorm,
    GroupNormBackward,
    GenStats,
    LocalResponseNorm,
    LocalResponseNormBackward,
    Attention,
    AttentionBackward,
    Reshape,
    Transpose,
    Slice,
    Pad,
    BorderPad,
    Concat,
    BitCast,
    Reduction,
    ArgReduction,
    Cumulative,
    Softmax,
    SoftmaxBackward,
    MatMul,
    RandomUniform,
    RandomNormal,
    RandomBernoulli,
    RandomIntegers,
    GroupedMatMul,
    GroupedMatMulBackwardWeights,
    Gather,
    GatherElements,
    GatherND,
    Scatter,
    ScatterElements,
    ScatterND,
    TopK,
    Resample,
    ResampleBackward,
    GridSample,
)
"""Every operation."""

if TYPE_CHECKING:
    Node = Operation[int]
    """An operation in a graph."""
else:
    Node = Union[tuple(operation[int] for operation in OPERATIONS)]  # noqa: UP007 - for the codec
