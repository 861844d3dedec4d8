"""Products of matrices.

The definition is NumPy's, of `matmul`, for operands of at least two dims.
https://numpy.org/doc/stable/reference/generated/numpy.matmul.html
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.operations.base import (
    ALLOCATED,
    Array,
    Operation,
    Region,
    Specs,
    T,
    require,
)
from cudnn_actor.protocol.operations.convolution import type_of_sums
from cudnn_actor.protocol.operations.example import Example
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["MatMul", "transpose_last"]

_RESULTS = {
    DType.FLOAT64: (DType.FLOAT64,),
    DType.FLOAT32: (DType.FLOAT32,),
    DType.FLOAT16: (DType.FLOAT16, DType.FLOAT32),
    DType.BFLOAT16: (DType.BFLOAT16, DType.FLOAT32),
    DType.INT8: (DType.INT32,),
    DType.UINT8: (DType.INT32,),
}
"""The dtypes of operands, and those that their product can have: the first is the default."""
_ALL = slice(None)


class MatMul(Operation[T], tag=True):
    """y = a @ b, the product of the matrices in the last two dims. Answered by a `Receipt`.

    The dims before those are a batch. Batches are broadcast as in NumPy: they are aligned at their last dims,
    and each dim has the same size in a and b, or is 1 or missing in one of them. A transposed operand is a
    tensor with swapped strides.

    Parameters
    ----------
    a, b
        Dims (..., M, K) and (..., K, N), of one dtype: float64, float32, float16, bfloat16, int8 or uint8.
    y
        Result, dims (..., M, N), of the operands' dtype or, where that is a half type, float32. Of integers:
        int32, exact; sums that it cannot hold become its least or largest value. Floats are summed up in
        float32 (float64 of float64). Float32 operands are rounded to TF32 only if `numerics.tf32` allows it.
    """

    kind = "matmul"
    inputs = ("a", "b")
    outputs = ("y",)
    a: T
    b: T
    y: T = ALLOCATED

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        a, b = specs["a"], specs["b"]
        for name in self.inputs:
            if specs[name].rank < 2:
                raise InvalidRequest(
                    field=name,
                    value=specs[name].dims,
                    problem="is no matrix",
                    fix="give it two dims, one of size 1: (1, K) as a, or (K, 1) as b",
                )
        if a.dtype not in _RESULTS:
            raise InvalidRequest(
                field="a",
                value=Words(a.dtype),
                problem="is not a dtype that matrices can have",
                fix=f"use {', '.join(_RESULTS)}",
            )
        if a.dims[-1] != b.dims[-2]:
            raise InvalidRequest(
                field="b",
                value=b.dims,
                problem=f"has {b.dims[-2]} rows, but a, of dims {a.dims}, has {a.dims[-1]} columns",
                fix="give b as many rows as a has columns",
            )
        require(specs, "b", b.dims, a.dtype)
        dims = (*self._batch(a.dims[:-2], b.dims), a.dims[-2], b.dims[-1])
        return {"y": TensorSpec.packed(dims, _RESULTS[a.dtype][0])}

    def _batch(self, first: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
        """The dims that a's batch and b's are broadcast to."""
        second = b[:-2]
        rank = max(len(first), len(second))
        first, second = ((1,) * (rank - len(dims)) + dims for dims in (first, second))
        if any(1 not in (one, other) and one != other for one, other in zip(first, second, strict=True)):
            raise InvalidRequest(
                field="b",
                value=b,
                problem="has a batch that does not broadcast to that of a",
                fix="give each dim before the last two the size that it has in a, or 1",
            )
        return tuple(other if one == 1 else one for one, other in zip(first, second, strict=True))

    def check(self, specs: Specs) -> None:
        wanted = self.infer({name: specs[name] for name in self.inputs})["y"]
        require(specs, "y", wanted.dims, *_RESULTS[specs["a"].dtype])

    def compute(self, dtypes: tuple[DType, ...]) -> DType:
        return type_of_sums(dtypes[0])

    def work(self, specs: Specs) -> int:
        return specs["y"].size * specs["a"].dims[-1]

    def needs(self, specs: Specs, wanted: Mapping[str, Region]) -> dict[str, Region]:
        *batch, rows, columns = wanted["y"]
        return {
            "a": (*_of_batch(batch, specs["a"].dims), rows, _ALL),
            "b": (*_of_batch(batch, specs["b"].dims), _ALL, columns),
        }

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs
        a, b = values["a"], values["b"]
        if a.dtype.kind == "f":
            return {"y": xp.matmul(a, b)}
        # Sums of products of bytes are exact in float64, whose products are faster than those of int64.
        floats = (array.astype(xp.float64) for array in (a, b))
        return {"y": xp.matmul(*floats).astype(xp.int64)}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        a: Any = self.a
        b: Any = self.b
        dy = d["y"]
        da = g.sum_to(g.matmul(dy, transpose_last(g, b)), a.dims)
        if math.prod(b.dims[:-2]) == 1:  # one b for all of a batch: its gradient is one product
            rows, slopes = (g.reshape(each, (math.prod(each.dims[:-1]), each.dims[-1])) for each in (a, dy))
            return {"a": da, "b": g.reshape(g.matmul(transpose_last(g, rows), slopes), b.dims)}
        return {"a": da, "b": g.sum_to(g.matmul(transpose_last(g, a), dy), b.dims)}


def transpose_last(g: Any, x: Any) -> Any:
    """Matrices with rows for columns. `g`: a graph builder; `x`: a tensor of it."""
    *batch, row, column = range(x.rank)
    return g.transpose(x, (*batch, column, row))


def _of_batch(wanted: list[slice], dims: tuple[int, ...]) -> tuple[slice, ...]:
    """The part of an operand's batch that a part of the result's batch follows from."""
    sizes = dims[:-2]
    own = wanted[len(wanted) - len(sizes) :]
    return tuple(_ALL if size == 1 else part for size, part in zip(sizes, own, strict=True))


def examples() -> tuple[Example, ...]:
    """Matrices, and stacks of them that are broadcast. The last one writes much and computes little."""
    operands = (((24, 40), (40, 16)), ((2, 3, 9, 16), (3, 16, 5)), ((160, 8), (8, 160)))
    product = MatMul(a="a", b="b", y="y")
    return tuple(Example(dims={"a": a, "b": b}, operations=(product,)) for a, b in operands)
