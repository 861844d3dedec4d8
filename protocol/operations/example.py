"""A small example of an operation: what the tests of all operations run, and the chaos load.

Each family's module has a function `examples`, with at least one example of each of its operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import LayoutName

__all__ = ["ROUNDED", "Example"]

ROUNDED = 1e-4
"""The tolerance of results that are rounded."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Example:
    """Tensors, and operations on them that every engine runs.

    Parameters
    ----------
    dims
        The dims of the tensors that no operation gives, by name. Those of a gradient, whose name is `d` and
        another one's, are that one's.
    operations
        What is computed, forward first. Their operands are names of tensors. One that an operation writes and
        another reads is handed on.
    layout
        Of the tensors of 3 to 5 dims.
    dtypes
        Of the tensors in `dims` that are not float32.
    tolerance
        The allowed error of results, relative to the largest; 0 if they are exact where all inputs are small
        whole numbers, whose sums are exact in any order.
    """

    dims: Mapping[str, tuple[int, ...]]
    operations: tuple[Any, ...]
    layout: LayoutName = "NCHW"
    dtypes: Mapping[str, DType] = field(default_factory=dict)
    tolerance: float = 0.0
