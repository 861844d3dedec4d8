"""The operations, one class each, and the tensors between them. `families` is the list of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Union

from cudnn_actor.protocol.operations import families
from cudnn_actor.protocol.operations.base import (
    GraphTensor as GraphTensor,
    Operation as Operation,
    Specs as Specs,
    TensorRole as TensorRole,
)
from cudnn_actor.protocol.operations.channel_norms import ChannelNorm as ChannelNorm
from cudnn_actor.protocol.operations.convolution import (
    Convolution as Convolution,
    ConvolutionBackwardData as ConvolutionBackwardData,
    ConvolutionBackwardFilter as ConvolutionBackwardFilter,
    ConvolutionForward as ConvolutionForward,
)
from cudnn_actor.protocol.operations.example import Example as Example
from cudnn_actor.protocol.operations.families import *
from cudnn_actor.protocol.operations.functions import FUNCTIONS as FUNCTIONS
from cudnn_actor.protocol.operations.movement import Movement as Movement, Placed as Placed
from cudnn_actor.protocol.operations.random import Randomness as Randomness

OPERATIONS: tuple[type[Operation[Any]], ...] = (
    ConvolutionForward,  # these three are nodes only: the messages of convolutions are others
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    *(each for each in vars(families).values() if isinstance(each, type) and issubclass(each, Operation)),
)
"""Every operation."""

if TYPE_CHECKING:
    Node = Operation[int]
    """An operation in a graph."""
else:
    Node = Union[tuple(operation[int] for operation in OPERATIONS)]  # noqa: UP007 - for the codec


def examples() -> Iterator[Example]:
    """Small examples of every operation, by families."""
    for family in dict.fromkeys(operation.__module__ for operation in OPERATIONS):
        yield from sys.modules[family].examples()
