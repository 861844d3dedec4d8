"""Graphs that move elements: kernels of ours alone."""

from __future__ import annotations

from typing import Any

from cudnn_actor.protocol import Graph, GraphBuilder
from cudnn_actor.protocol.dtypes import DTypeLike

__all__ = ["CONCATENATED"]


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
    "bits": concatenated(3, 5, dims=(0, 2), axis=0, dtype="bool"),
}
