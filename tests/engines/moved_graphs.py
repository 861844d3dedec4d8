"""Graphs that move elements: kernels of ours alone."""

from __future__ import annotations

from typing import Any

import msgspec

from cudnn_actor.protocol import (
    Graph,
    GraphBuilder,
    GraphTensor,
    OperationGraph,
    Pointwise,
    PointwiseMode,
    TensorRole,
    TensorSpec,
    Transpose,
)
from cudnn_actor.protocol.graphs.named_graph import Port
from cudnn_actor.protocol.types.dtypes import DTypeLike
from cudnn_actor.protocol.types.tensor import LayoutLike

__all__ = ["CONCATENATED", "IN_ROWS", "TRANSPOSED"]


def concatenated(
    *sizes: int, dims: Any, axis: int, dtype: DTypeLike = "float32", layout: Any = "NCHW"
) -> Graph:
    g = GraphBuilder()
    tensors = []
    for number, size in enumerate(sizes):
        given_ = list(dims)
        given_[axis] = size
        tensors.append(g.input(f"x{number}", given_, dtype, layout=layout))
    return g.build(y=g.concatenate(tensors, axis))


CONCATENATED = {
    "rows": concatenated(1, 4, 2, dims=(0, 8), axis=0),
    "columns": concatenated(8, 3, 16, dims=(5, 0), axis=1, dtype="int8"),
    "channels last": concatenated(8, 16, dims=(2, 0, 3, 3), axis=1, dtype="float16", layout="NHWC"),
    "with none": concatenated(4, 0, 2, dims=(3, 0, 2), axis=1, dtype="int64"),
    "only none": concatenated(0, 0, dims=(2, 0), axis=1),
    "many": concatenated(*range(1, 60), dims=(2, 0), axis=1, dtype="uint8"),
    "odd columns": concatenated(*(3, 5) * 9, dims=(90, 0), axis=1, dtype="float16"),
    "bits": concatenated(3, 5, dims=(0, 2), axis=0, dtype="bool"),
}

"""Each is one launch of copies side by side, but for "many"."""


def cut(*parts: Any, dims: Any, axis: int = 1, dtype: DTypeLike = "float32", layout: Any = "NCHW") -> Graph:
    """Parts of a tensor, one behind the other."""
    g = GraphBuilder()
    x = g.input("x", dims, dtype, layout=layout)
    slices = [x[part] for part in parts]
    return g.build(y=g.concatenate(slices, axis) if len(slices) > 1 else slices[0])


_ALL = slice(None)
IN_ROWS = {
    "odd channels": concatenated(33, 31, dims=(4, 0, 5, 5), axis=1, dtype="float16", layout="NHWC"),
    "odd channels of one": cut(
        (_ALL, slice(1, 34)), (_ALL, slice(33, None)), dims=(3, 64, 5, 5), dtype="bfloat16", layout="NHWC"
    ),
    "bytes": concatenated(3, 1, dims=(2, 0, 30, 11), axis=1, dtype="uint8", layout="NHWC"),
    "bytes in rows of seven": concatenated(2, 5, dims=(6, 0, 6, 1), axis=1, dtype="int8", layout="NHWC"),
    "bytes in an odd number of rows": concatenated(2, 5, dims=(5, 0, 7), axis=1, dtype="bool", layout="NHWC"),
    "halves in an even number of rows": cut((_ALL, slice(1, 32)), dims=(700, 33), dtype="float16"),
    "pairs of halves": concatenated(2, 4, dims=(50, 0), axis=1, dtype="float16"),
    "three tensors": concatenated(1, 5, 3, dims=(300, 0), axis=-1, dtype="float32"),
    "eight bytes": concatenated(1, 2, dims=(41, 0), axis=1, dtype="int64"),
    "planes": concatenated(3, 2, dims=(10, 0, 3, 3), axis=1, dtype="float16"),
    "with none": concatenated(3, 0, 2, dims=(20, 0), axis=1, dtype="float32"),
    "inner": cut((_ALL, _ALL, slice(1, -1), slice(1, -2)), dims=(2, 3, 7, 9), dtype="float32"),
    "inner halves": cut((_ALL, slice(1, 3), slice(1, -1), slice(1, -2)), dims=(2, 4, 6, 9), dtype="float16"),
    "rolled": cut((..., slice(-3, None)), (..., slice(0, -3)), dims=(5, 3, 10), axis=-1, dtype="int16"),
    "rows reversed": cut(
        (slice(None, None, -1), slice(0, 3)), (_ALL, slice(1, None)), dims=(20, 4), dtype="float32"
    ),
}
"""Each is a copy to rows."""


def transposed(*dims: int, axes: tuple[int, ...], dtype: DTypeLike) -> Graph:
    """With a packed result: a builder's may lie as the operand does."""
    specs = [TensorSpec.packed(each, dtype) for each in (dims, [dims[axis] for axis in axes])]
    tensors = tuple(
        GraphTensor(uid=uid, dims=spec.dims, strides=spec.strides, dtype=spec.dtype)
        for uid, spec in enumerate(specs)
    )
    body = OperationGraph(tensors=tensors, operations=(Transpose(x=0, y=1, axes=axes),))
    x, y = (Port(name="xy"[uid], spec=spec, uid=uid) for uid, spec in enumerate(specs))
    return Graph(body=body, inputs=(x,), outputs=(y,))


def laid_out(*dims: int, dtype: DTypeLike, layouts: tuple[LayoutLike, LayoutLike]) -> Graph:
    g = GraphBuilder()
    before, after = layouts
    return g.build(y=g.to_layout(g.input("x", dims, dtype, layout=before), after))


def repeated(*dims: int, dtype: DTypeLike, layout: LayoutLike) -> Graph:
    """Each element twice in a row, with a packed result."""
    x = TensorSpec.packed(dims, dtype, layout)
    y = TensorSpec.packed((*dims, 2), dtype)
    x = TensorSpec.strided((*dims, 1), (*x.strides, 1), dtype)
    tensors = tuple(
        GraphTensor(uid=uid, dims=spec.dims, strides=spec.strides, dtype=spec.dtype)
        for uid, spec in enumerate((x, y, y))
    )
    one = msgspec.structs.replace(tensors[2], role=TensorRole.CONSTANT, value=1.0)
    operations = (Pointwise(mode=PointwiseMode.MUL, operands=(0, 2), result=1),)
    body = OperationGraph(tensors=(*tensors[:2], one), operations=operations)
    ports = (Port(name="xy"[uid], spec=spec, uid=uid) for uid, spec in enumerate((x, y)))
    return Graph(body=body, inputs=(next(ports),), outputs=(next(ports),))


TRANSPOSED = {
    "bytes": transposed(160, 144, axes=(1, 0), dtype="int8"),
    "bytes, some together": transposed(132, 24, axes=(1, 0), dtype="bool"),
    "odd bytes": transposed(131, 17, axes=(1, 0), dtype="uint8"),
    "halves": transposed(72, 80, axes=(1, 0), dtype="float16"),
    "odd halves": transposed(67, 130, axes=(1, 0), dtype="bfloat16"),
    "batches": transposed(2, 20, 3, 36, axes=(0, 3, 2, 1), dtype="float32"),
    "odd": transposed(65, 19, axes=(1, 0), dtype="float32"),
    "wide": transposed(34, 66, axes=(1, 0), dtype="float64"),
    "odd and wide": transposed(3, 17, 65, axes=(0, 2, 1), dtype="int64"),
    "channels last": transposed(2, 16, 4, 8, axes=(0, 2, 3, 1), dtype="bfloat16"),
    "channels first": transposed(2, 4, 8, 16, axes=(0, 3, 1, 2), dtype="float32"),
    "to channels last": laid_out(2, 16, 4, 8, dtype="bfloat16", layouts=("NCHW", "NHWC")),
    "from channels last": laid_out(2, 16, 4, 8, dtype="float32", layouts=("NHWC", "NCHW")),
    "eight axes": transposed(2, 1, 2, 16, 2, 1, 2, 16, axes=(2, 7, 1, 4, 0, 5, 6, 3), dtype="int16"),
    "repeated": repeated(2, 3, 400, dtype="float32", layout="NCHW"),
    "repeated, channels last": repeated(2, 16, 4, 36, dtype="int8", layout="NHWC"),
    "three channels": transposed(2, 1400, 3, axes=(0, 2, 1), dtype="uint8"),
    "to three channels": transposed(2, 3, 700, axes=(0, 2, 1), dtype="float32"),
    "depth to space": transposed(2, 2, 2, 3, 6, 40, axes=(0, 3, 4, 1, 5, 2), dtype="bfloat16"),
    "odd depth to space": transposed(1, 2, 2, 7, 5, 61, axes=(0, 3, 4, 1, 5, 2), dtype="float16"),
    "depth to space, channels last": transposed(
        1, 2, 40, 2, 2, 16, axes=(0, 5, 1, 3, 2, 4), dtype="bfloat16"
    ),
    "space to depth": transposed(2, 3, 20, 2, 21, 2, axes=(0, 3, 5, 1, 2, 4), dtype="float64"),
    "space to depth of halves": transposed(1, 2, 30, 2, 64, 2, axes=(0, 3, 5, 1, 2, 4), dtype="bfloat16"),
    "space to depth of bytes": transposed(1, 4, 30, 2, 48, 2, axes=(0, 3, 5, 1, 2, 4), dtype="int8"),
    "ends of odd halves": transposed(2, 129, 67, axes=(0, 2, 1), dtype="float16"),
    "ends of odd bytes": transposed(2, 257, 131, axes=(0, 2, 1), dtype="bool"),
    "few odd halves": transposed(2, 129, 19, axes=(0, 2, 1), dtype="float16"),
}
"""Each is a copy by tiles."""
