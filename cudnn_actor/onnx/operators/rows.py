"""Tensors seen as rows, or along one axis of another tensor."""

from __future__ import annotations

import math
from collections.abc import Callable

from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor

__all__ = ["along", "of_rows"]


def along(g: GraphBuilder, values: Tensor, axis: int, rank: int) -> Tensor:
    """Values that broadcast to tensors of that rank: they lie along an axis."""
    return g.reshape(values, [-1 if n == axis else 1 for n in range(rank)])


def of_rows(g: GraphBuilder, function: Callable[[Tensor, int], Tensor], x: Tensor, axis: int) -> Tensor:
    """A function along all dims from an axis on, taken as one dim, as operators did before version 13."""
    rows = g.reshape(x, (math.prod(x.dims[:axis]), math.prod(x.dims[axis:])))
    return g.reshape(function(rows, 1), x.dims)
