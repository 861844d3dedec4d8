"""The operations that are tested beside convolutions: how problems of each are drawn and judged.

Each family of `cudnn_actor.protocol.operations` has a file here, of the same name.
"""

from __future__ import annotations

import importlib

from cudnn_actor.protocol.operations import OPERATIONS

from .rows import Row

__all__ = ["EXACTNESS", "ROWS"]

_NAMES = dict.fromkeys(operation.__module__.rpartition(".")[2] for operation in OPERATIONS)
_FAMILIES = [importlib.import_module(f".{name}", __name__) for name in _NAMES if name != "convolution"]
ROWS: tuple[Row, ...] = tuple(row for family in _FAMILIES for row in family.ROWS)
EXACTNESS = {family.ROWS[0].family: family.EXACTNESS for family in _FAMILIES}
"""What the support page says of each family's bounds."""
