"""How each operator is added to a graph: one file for each family, all in one table."""

from __future__ import annotations

from cudnn_actor.onnx.operators import (
    casts,
    convolution,
    matmul,
    movement,
    norms,
    pointwise,
    pooling,
    reduction,
)
from cudnn_actor.onnx.table import HANDLERS, Handler, handler_of

__all__ = ["HANDLERS", "Handler", "handler_of"]

FAMILIES = (casts, convolution, matmul, movement, norms, pointwise, pooling, reduction)
"""Importing them fills the table."""
