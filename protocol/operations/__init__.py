"""The operations, one class each, and the tensors between them.

To add one, add its class to a file of its family and a row to `OPERATIONS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

from cudnn_actor.protocol.operations.attention import Attention, AttentionBackward
from cudnn_actor.protocol.operations.base import GraphTensor, Operation, Specs, TensorRole
from cudnn_actor.protocol.operations.convolution import (
    Convolution,
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
)
from cudnn_actor.protocol.operations.functions import FUNCTIONS, PointwiseMode
from cudnn_actor.protocol.operations.matmul import MatMul
from cudnn_actor.protocol.operations.movement import Movement, Placed, Reshape, Slice, Transpose
from cudnn_actor.protocol.operations.normalization import (
    LayerNorm,
    LayerNormBackward,
    RMSNorm,
    RMSNormBackward,
)
from cudnn_actor.protocol.operations.pointwise import Pointwise
from cudnn_actor.protocol.operations.pooling import AvgPool, AvgPoolBackward, MaxPool, MaxPoolBackward, Window
from cudnn_actor.protocol.operations.reduction import ArgReduction, Cumulative, Reduction, ReductionMode
from cudnn_actor.protocol.operations.softmax import Softmax, SoftmaxBackward

__all__ = [
    "FUNCTIONS",
    "OPERATIONS",
    "ArgReduction",
    "Attention",
    "AttentionBackward",
    "AvgPool",
    "AvgPoolBackward",
    "Convolution",
    "ConvolutionBackwardData",
    "ConvolutionBackwardFilter",
    "ConvolutionForward",
    "Cumulative",
    "GraphTensor",
    "LayerNorm",
    "LayerNormBackward",
    "MatMul",
    "MaxPool",
    "MaxPoolBackward",
    "Movement",
    "Node",
    "Operation",
    "Placed",
    "Pointwise",
    "PointwiseMode",
    "RMSNorm",
    "RMSNormBackward",
    "Reduction",
    "ReductionMode",
    "Reshape",
    "Slice",
    "Softmax",
    "SoftmaxBackward",
    "Specs",
    "TensorRole",
    "Transpose",
    "Window",
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
    LayerNorm,
    LayerNormBackward,
    RMSNorm,
    RMSNormBackward,
    Attention,
    AttentionBackward,
    Reshape,
    Transpose,
    Slice,
    Reduction,
    ArgReduction,
    Cumulative,
    Softmax,
    SoftmaxBackward,
    MatMul,
)
"""Every operation."""

if TYPE_CHECKING:
    Node = Operation[int]
    """An operation in a graph."""
else:
    Node = Union[tuple(operation[int] for operation in OPERATIONS)]  # noqa: UP007 - for the codec
