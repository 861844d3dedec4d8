"""The largest or smallest elements along a dim, in order: top-k, and so sorting.

The definition is ONNX's, of `TopK`; what it leaves open is settled here.
https://onnx.ai/onnx/operators/onnx__TopK.html
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.operations.base import (
    ALLOCATED,
    Array,
    Operation,
    Region,
    Specs,
    T,
    axis_of,
    needed_along,
)
from cudnn_actor.protocol.operations.example import Example
from cudnn_actor.protocol.operations.indexing import ScatterElements, ScatterReduction
from cudnn_actor.protocol.types.checks import is_whole
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["TopK"]


class TopK(Operation[T], tag=True):
    """The `k` largest or smallest elements along a dim, and their places. Answered by a `Receipt`.

    Of equal elements, that with the lower place comes first; 0 and -0 are equal. NaN is larger than any
    number, and equal to NaN: it is the first of the largest, and the last of the smallest.

    Parameters
    ----------
    x
        Input, of any dtype.
    values
        Result, of x's dtype, and of its dims but for `k` along `axis`.
    indices
        Their places along the dim, or None: int64, of the values' dims.
    k
        How many: from 0 to the size of the dim. All of them, to sort.
    axis
        The dim; negative: from the end.
    largest
        Whether the largest are found, and not the smallest.
    in_order
        Whether the best comes first. If not, they are in the order of their places.
    """

    kind = "top_k"
    inputs = ("x",)
    outputs = ("values", "indices")
    optional = frozenset({"indices"})
    takes_empty = True
    x: T
    values: T = ALLOCATED
    indices: T | None = None
    k: int
    axis: int = -1
    largest: bool = True
    in_order: bool = True

    def compute(self, dtypes: tuple[DType, ...]) -> DType:
        """The type of x: nothing is computed."""
        return dtypes[0]

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        x = specs["x"]
        axis = axis_of("axis", self.axis, x.rank)
        if not is_whole(self.k) or not 0 <= self.k <= x.dims[axis]:
            raise InvalidRequest(
                field="k",
                value=self.k,
                problem=f"is no number of elements along axis {axis} of dims {x.dims}",
                fix=f"use one from 0 to {x.dims[axis]}",
            )
        dims = (*x.dims[:axis], self.k, *x.dims[axis + 1 :])
        return {"values": TensorSpec.packed(dims, x.dtype), "indices": TensorSpec.packed(dims, DType.INT64)}

    def samples(self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Array]) -> dict[str, Array]:
        """Many different elements, and some that are equal."""
        x = specs["x"]
        numbers = xp.arange(math.prod(x.dims), dtype=xp.int64).reshape(x.dims)
        return {"x": numbers * 7 % 13 * 8 + draw(x)}

    def needs(self, specs: Specs, wanted: Mapping[str, Region]) -> dict[str, Region] | None:
        return needed_along(specs, wanted, axis_of("axis", self.axis, specs["x"].rank), self.inputs)

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs
        x, axis = values["x"], self.axis
        if self.largest:  # in reverse, the last of equals is the first
            found = xp.flip(x.shape[axis] - 1 - xp.argsort(xp.flip(x, axis), axis=axis, kind="stable"), axis)
        else:
            found = xp.argsort(x, axis=axis, kind="stable")
        found = xp.take(found, xp.arange(self.k), axis=axis)
        if not self.in_order:
            found = xp.sort(found, axis=axis)
        found = found.astype(xp.int64, copy=False)
        return {"values": xp.take_along_axis(x, found, axis), "indices": found}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        if "values" not in d:
            return {}
        x: Any = self.x
        zeros, indices = g.full(x.dims, 0.0, x.dtype), g.output(self, "indices")
        where: Any = {"indices": indices, "axis": self.axis, "reduction": ScatterReduction.ADD}
        return {"x": g.apply(ScatterElements(x=zeros, updates=d["values"], **where))}


def examples() -> tuple[Example, ...]:
    """The largest along the last dim, and all along the first."""
    operations = (
        TopK(x="x", values="values", indices="places", k=20),
        TopK(x="x", values="sorted", k=12, axis=0, largest=False),
    )
    return (Example(dims={"x": (12, 3, 300)}, operations=operations),)
