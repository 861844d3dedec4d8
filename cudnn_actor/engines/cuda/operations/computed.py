"""Operands of cuDNN's graphs that kernels of our own compute first."""

from __future__ import annotations

from typing import NamedTuple

from cudnn_actor.engines.cuda.kernels.expressions import Value
from cudnn_actor.protocol.operations import Operation
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["Computed"]


class Computed(NamedTuple):
    """A packed tensor that a kernel computes from an operation's operands before the operation runs.

    `value`: elementwise, or an operation with names of operands, one of whose launchers is "kernel".
    `operands`: the names of what the value's leaves read, in the order of their numbers, or of its inputs.
    """

    value: Value | Operation[str]
    operands: tuple[str, ...]
    dims: tuple[int, ...]
    dtype: DType
