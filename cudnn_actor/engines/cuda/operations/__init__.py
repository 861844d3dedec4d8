"""How CUDA runs the operations that no graph of cuDNN's frontend covers: one file for each family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cudnn_actor.engines.cuda.operations.pooling import pooling
from cudnn_actor.protocol.operations import (
    AvgPool,
    AvgPoolBackward,
    GraphTensor,
    MaxPool,
    MaxPoolBackward,
    Node,
)

__all__ = ["KERNELS", "Launch"]

Launch = Callable[[Sequence[int]], None]
"""Enqueues an operation on the current stream: takes its operands' addresses, in the order of its fields."""

KERNELS: dict[type[Node], Callable[[Any, Sequence[GraphTensor]], Launch]] = {
    MaxPool: pooling,
    MaxPoolBackward: pooling,
    AvgPool: pooling,
    AvgPoolBackward: pooling,
}
"""Makes the launch of an operation on tensors of these specs: compiles a kernel."""
