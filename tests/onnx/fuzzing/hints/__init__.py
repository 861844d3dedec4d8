"""What a schema alone does not say of inputs: sizes that must agree, values that decide, and subgraphs."""

from __future__ import annotations

from .generators import GENERATORS
from .parts import Hint, Parts, by_schema
from .products import PRODUCTS
from .recurrences import RECURRENCES
from .shapes import SHAPES
from .subgraphs import SUBGRAPHS
from .windows import WINDOWS

__all__ = ["HINTS", "Parts", "by_schema"]

HINTS: dict[str, Hint] = {**GENERATORS, **PRODUCTS, **RECURRENCES, **SHAPES, **SUBGRAPHS, **WINDOWS}
"""Operators → how their inputs are drawn; of all others, by their schema: see `by_schema`."""
