"""What ONNX says of its operators."""

from __future__ import annotations

import functools
from typing import Any

from onnx import defs

__all__ = ["Schema", "schema_of"]

Schema = Any
"""An `onnx.defs.OpSchema`, whose declared types lack half of its attributes."""


@functools.lru_cache(maxsize=4096)
def schema_of(op_type: str, version: int, domain: str) -> Schema | None:
    """The schema of an operator in a version of its domain; None if there is none."""
    try:
        return defs.get_schema(op_type, version, domain)
    except defs.SchemaError:
        return None
