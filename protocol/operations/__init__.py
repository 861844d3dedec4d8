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
from cudnn_actor.protocol.operations.normalization import (
    LayerNorm,
    LayerNormBackward,
    RMSNorm,
    RMSNormBackward,
)
from cudnn_actor.protocol.operations.pointwise import Pointwise, PointwiseMode
from cudnn_actor.protocol.operations.pooling import AvgPool, AvgPoolBackward, MaxPool, MaxPoolBackward, Window

__all__ = [
    "OPERATIONS",
    "Attention",
    "AttentionBackward",
    "AvgPool",
    "AvgPoolBackward",
    "Convolution",
    "ConvolutionBackwardData",
    "ConvolutionBackwardFilter",
    "ConvolutionForward",
    "GraphTensor",
    "LayerNorm",
    "LayerNormBackward",
    "MaxPool",
    "MaxPoolBackward",
    "Node",
    "Operation",
    "Pointwise",
    "PointwiseMode",
    "RMSNorm",
    "RMSNormBackward",
    "Specs",
    "TensorRole",
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
)
"""Every operation."""

if TYPE_CHECKING:
    Node = Operation[int]
    """An operation in a graph."""
else:
    Node = Union[tuple(operation[int] for operation in OPERATIONS)]  # noqa: UP007 - for the codec
