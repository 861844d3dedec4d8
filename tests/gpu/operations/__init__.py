"""The operations that are tested beside convolutions: how problems of each are drawn and judged.

To add a family, add its file and its name to `_FAMILIES`.
"""

from __future__ import annotations

from . import (
    attention,
    channel_norms,
    grid_sampling,
    grouped_matmul,
    indexing,
    matmul,
    movement,
    normalization,
    pointwise,
    pooling,
    random,
    reduction,
    resampling,
    response_norm,
    softmax,
    sorting,
)
from .rows import Row

__all__ = ["EXACTNESS", "ROWS"]

_FAMILIES = (
    pooling,
    normalization,
    channel_norms,
    response_norm,
    attention,
    matmul,
    grouped_matmul,
    reduction,
    softmax,
    pointwise,
    movement,
    random,
    indexing,
    sorting,
    resampling,
    grid_sampling,
)
ROWS: tuple[Row, ...] = tuple(row for family in _FAMILIES for row in family.ROWS)
EXACTNESS = {family.ROWS[0].family: family.EXACTNESS for family in _FAMILIES}
"""What the support page says of each family's bounds."""
