"""The operations that are tested beside convolutions: how problems of each are drawn and judged.

To add a family, add its file and its name to `_FAMILIES`.
"""

from __future__ import annotations

from . import attention, matmul, movement, normalization, pointwise, pooling, reduction, softmax
from .rows import Row

__all__ = ["EXACTNESS", "ROWS"]

_FAMILIES = (pooling, normalization, attention, matmul, reduction, softmax, pointwise, movement)
ROWS: tuple[Row, ...] = tuple(row for family in _FAMILIES for row in family.ROWS)
EXACTNESS = {family.ROWS[0].family: family.EXACTNESS for family in _FAMILIES}
"""What the support page says of each family's bounds."""
