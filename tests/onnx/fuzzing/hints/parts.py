"""What a hint gives, and what is drawn where there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..draw import Draw, dtype_of
from ..versions import Version

__all__ = ["Hint", "Parts", "by_schema", "scalar"]


@dataclass(frozen=True)
class Parts:
    """Inputs of a node (None is one left out; a list is a list of tensors), and attributes.

    Attributes that are not here are drawn; those that are None are left out. Optional inputs may be left
    out, but for those of `needed`. Those whose names are in `static` are constants. `outputs`: how many;
    drawn if 0.
    """

    inputs: Sequence[Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    static: frozenset[str] = frozenset()
    needed: frozenset[int] = frozenset()
    outputs: int = 0


Hint = Callable[[Draw, Version], Parts]


def by_schema(d: Draw, v: Version) -> Parts:
    """Inputs of the schema's types, whose dims broadcast to those of one of them."""
    base = d.dims()
    inputs = list[Any]()
    whole = d.randrange(max(1, len(v.schema.inputs)))
    for number, declared in enumerate(v.schema.inputs):
        count = d.choices((1, 2, 3, 4), (1, 3, 2, 1))[0] if declared.option.name == "Variadic" else 1
        for each in range(count):
            dims = base if number == whole and not each else d.broadcast(base)
            inputs.append(_value(d, v, declared, dims))
    return Parts(inputs)


def _value(d: Draw, v: Version, declared: Any, dims: tuple[int, ...]) -> Any:
    if all(dtype_of(kind) is None for kind in declared.types):
        dtype = np.dtype(d.choice(("f4", "f4", "i8")))
        return [d.array(dtype, dims) for _ in range(d.choice((0, 1, 2, 3)))]
    return d.array(d.dtype(v.schema, declared.type_str), dims)


def scalar(d: Draw, value: Any, dtype: Any = np.int64) -> np.ndarray:
    """A number as an input: of rank 0, now and then of one element."""
    return np.full((1,) if d.random() < 0.3 else (), value, dtype)
