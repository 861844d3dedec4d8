"""Named tuples of outputs. They can be pickled, though their classes are in no module."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Mapping
from typing import Any

__all__ = ["named_outputs"]


def named_outputs(kind: str, outputs: Mapping[str, Any]) -> Any:
    """The outputs as a named tuple of the class `kind`. Names that are not Python's become "_0", "_1" ..."""
    return _of_class(kind, tuple(outputs))(*outputs.values())


@functools.lru_cache(maxsize=1024)
def _of_class(kind: str, names: tuple[str, ...]) -> Any:
    fields: Any = namedtuple(kind, names, rename=True)  # type: ignore[misc]

    def reduce_outputs(made: tuple[Any, ...]) -> tuple[Any, ...]:
        return _restore, (kind, names, tuple(made))

    return type(kind, (fields,), {"__slots__": (), "__reduce__": reduce_outputs})


def _restore(kind: str, names: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    return _of_class(kind, names)(*values)
