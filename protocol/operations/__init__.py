"""The operations, one class each, and the tensors between them.

To add one, add its class to a file of its family and a row to `OPERATIONS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

from cudnn_actor.protocol.operations.base import GraphTensor, Operation, Specs, TensorRole
from cudnn_actor.protocol.operations.convolution import (
    Convolution,
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
)
from cudnn_actor.protocol.operations.pointwise import Pointwise, PointwiseMode

__all__ = [
    "OPERATIONS",
    "Convolution",
    "ConvolutionBackwardData",
    "ConvolutionBackwardFilter",
    "ConvolutionForward",
    "GraphTensor",
    "Node",
    "Operation",
    "Pointwise",
    "PointwiseMode",
    "Specs",
    "TensorRole",
]

OPERATIONS: tuple[type[Operation[Any]], ...] = (
    ConvolutionForward,
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    Pointwise,
)
"""Every operation."""

if TYPE_CHECKING:
    Node = Operation[int]
    """An operation in a graph."""
else:
    Node = Union[tuple(operation[int] for operation in OPERATIONS)]  # noqa: UP007 - for the codec
